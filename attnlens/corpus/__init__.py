"""Run a corpus through a model: read, batch, look, resume, share out, merge.

from attnlens.corpus import Corpus, Fields, scan

scan(model, tokenizer, Corpus("sentences.jsonl", Fields(text="sentence")), out="results")
"""

from attnlens.corpus.merging import merge_shards
from attnlens.corpus.named import named_observer, observer_names
from attnlens.corpus.outcome import Scan
from attnlens.corpus.readers import Corpus
from attnlens.corpus.records import Fields, Record, Rejected
from attnlens.corpus.scanning import scan

__all__ = [
    "Corpus",
    "Fields",
    "Record",
    "Rejected",
    "Scan",
    "merge_shards",
    "named_observer",
    "observer_names",
    "scan",
]
