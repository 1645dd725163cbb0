"""`scan`: run a corpus through a model, in pieces that can be interrupted and shared out."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any

import torch
from torch import nn
from tqdm.auto import tqdm

from attnlens.corpus import resuming as checkpoint
from attnlens.corpus.chunks import Chunk, chunks
from attnlens.corpus.identity import model_identity, observer_identity, require_same
from attnlens.corpus.named import named_observer, require_fit
from attnlens.corpus.outcome import Scan, write_results
from attnlens.corpus.readers import Corpus, entries_of
from attnlens.corpus.records import Record, Rejected
from attnlens.corpus.settings import Handling, OnError, Settings
from attnlens.corpus.shards import Shard, shard_of
from attnlens.corpus.token_labels import TokenLabels
from attnlens.errors import InputError
from attnlens.files import remove_unfinished
from attnlens.lens import Lens
from attnlens.observer import Observer
from attnlens.texts.batching import TextModel, TokenisedTexts
from attnlens.texts.loading import text_model

Source = str | os.PathLike[str] | Corpus | Iterable[Any]


def scan(
    model: nn.Module,
    tokenizer: Any,
    corpus: Source,
    observers: Sequence[Observer | str] = ("head-statistics",),
    *,
    out: str | os.PathLike[str] | None = None,
    batch_size: int = Settings.batch_size,
    batch_tokens: int = Settings.batch_tokens,
    chunk: int = Settings.chunk,
    max_length: int | None = None,
    checkpoint_every: float = Handling.checkpoint_every,
    resume: bool = True,
    on_error: OnError = "skip",
    report: Callable[[Rejected], None] | None = None,
    label_names: Sequence[str] = (),
    shard: Sequence[int] | None = None,
    progress: bool = False,
    name: str = "",
) -> Scan:
    """Run a corpus of any size through a model, and let observers look.

    Under `torchrun` or `accelerate launch` the processes share the corpus, and every one of them
    has the whole result at the end. However a corpus is shared out, and wherever a scan is
    interrupted and resumed, the same batches are seen with the same probes, and sums do not
    depend on their order, so the results are the same.

    Args:
        model: a `PreTrainedModel` that reads text, in evaluation mode.
        tokenizer: its own.
        corpus: a file, a :class:`~attnlens.corpus.Corpus` of files, or records, texts, pairs of
            texts or mappings. All processes must be given the same.
        observers: what to compute, as instances or by name, as in `"attribution:probes=2"`. What
            they have seen before is forgotten. Observers with `label_names` and no `labels` are
            given the labels of words that records carry; special tokens have their own names, such
            as `[CLS]`, for labels.
        out: folder for checkpoints, results and the list of what was rejected; None writes
            nothing.
        batch_size: most examples in a batch.
        batch_tokens: most tokens in a batch, padding included.
        chunk: number of consecutive examples that are sorted by length before they are cut into
            batches. Chunks are what processes share out and what is resumed from.
        max_length: most tokens of an example; by default what the model can read.
        checkpoint_every: least seconds between two checkpoints.
        resume: go on from the checkpoint in `out`, if there is one.
        on_error: `"skip"` what is no record, or `"raise"` at the first.
        report: told of everything that is skipped.
        label_names: of the labels of words, for observers that are given by name.
        shard: index and count, such as `(0, 4)`, to look at a part of the corpus only, which
            :func:`~attnlens.corpus.merge_shards` then takes together with the others.
        progress: show a bar with rate and time left.
        name: of the model, for the record.

    Returns:
        The observers and how much was read.

    Raises:
        InputError: if an argument is of the wrong kind or value, `out` holds a checkpoint of
            something else, or a record is bad and `on_error="raise"`.
    """
    settings = Settings(batch_size, batch_tokens, chunk, max_length)
    reads = text_model(model, tokenizer, name)
    reads.require_padding(batch_size)
    if model.training:
        raise InputError("The model is in training mode, so dropout is on. Call model.eval().")
    if isinstance(corpus, (str, os.PathLike)):
        corpus = Corpus(corpus)
    looking = tuple(
        named_observer(observer, label_names) if isinstance(observer, str) else observer
        for observer in observers
    )
    # Whence `attnlens merge` makes the same observers again.
    named = [observer if isinstance(observer, str) else "" for observer in observers]
    notes = {"name": reads.name, "named": named}
    folder = None if out is None else Path(out)
    with shard_of(shard) as part:
        shown = progress and part.index == 0
        handling = Handling(checkpoint_every, resume, on_error, report, shown)
        scanner = Scanner(reads, looking, settings, part, folder, notes)
        scanner.read(corpus, handling)
        return scanner.finish()


class Scanner:
    """One process on its part of a corpus.

    Args:
        model: reads it.
        observers: look on.
        settings: how records become batches.
        shard: the part.
        folder: where checkpoints and results go, or None.
        notes: for the record.
    """

    def __init__(
        self,
        model: TextModel,
        observers: Sequence[Observer],
        settings: Settings,
        shard: Shard,
        folder: Path | None,
        notes: Mapping[str, Any],
    ) -> None:
        self.model = model
        self.settings = settings
        self.shard = shard
        self.folder = folder
        self.notes = notes
        self.observers = tuple(map(require_fit, observers))
        self.state = checkpoint.State.of(self.observers)
        self.labels = TokenLabels(self.observers, model.tokenizer)
        self.about = {
            "model": model_identity(model),
            "settings": asdict(settings),
            "observers": [observer_identity(observer) for observer in self.observers],
            "shard": [shard.index, shard.count],
        }
        self._lens = Lens(model.model, *self.observers)

    def read(self, corpus: Corpus | Iterable[Any], handling: Handling) -> None:
        """Read the corpus from the beginning, and look at what was not seen before.

        Args:
            corpus: the corpus.
            handling: what to do besides.

        Raises:
            InputError: if it is not the corpus of the checkpoint.
        """
        path = self._prepared(handling)
        done = self.state.chunks
        entries = iter(corpus) if isinstance(corpus, Corpus) else entries_of(corpus)
        self.state.counts.rejected = 0  # counted again, from the beginning
        written, last, line = time.monotonic(), 0, 0
        bar: Any = None
        with ExitStack() as stack:
            log = stack.enter_context(_rejected_log(path))

            def reject(index: int, entry: Rejected) -> None:
                if handling.on_error == "raise":
                    raise InputError(str(entry))
                if self.shard.owns(index):
                    self.state.counts.rejected += 1
                    log(entry)
                    if handling.report is not None and index >= done:  # not told of before
                        handling.report(entry)

            for chunk in chunks(entries, self.settings.chunk, reject):
                last = chunk.index + 1
                if last == done and chunk.digest != self.state.digest:
                    raise self._other_corpus("differs in what was seen of it")
                if last > done:
                    if bar is None:
                        bar = stack.enter_context(_bar(corpus, line, handling.progress))
                    self._advance(chunk, stack)
                    bar.update(chunk.line - bar.n)
                    if path is not None and time.monotonic() - written >= handling.checkpoint_every:
                        self._write(path)
                        written = time.monotonic()
                line = chunk.line
        if last < done:
            raise self._other_corpus("ends before what was seen of it")
        self.state.finished = True
        if path is not None:
            self._write(path)

    def finish(self) -> Scan:
        """Take all parts together, and write the results where that is this process's task.

        Returns:
            What came of the scan.
        """
        if self.shard.group is not None:
            self._gather()
        results: dict[str, Any] = {}
        if self.folder is not None and self.shard.writes:
            about = {name: self.about[name] for name in ("model", "settings", "observers")}
            results = write_results(self.folder, self.state, about, self.model.name)
        return Scan(self.observers, self.state.counts, self.shard, results)

    def _prepared(self, handling: Handling) -> Path | None:
        """The file of this process, after what it holds was taken up."""
        if self.folder is None:
            return None
        checkpoint.require_one_layout(checkpoint.made(self.folder), self.shard)
        path = checkpoint.shard_path(self.folder, self.shard)
        remove_unfinished(path)
        if handling.resume:
            checkpoint.resume(path, self.state, self.about)
        return path

    def _advance(self, chunk: Chunk, stack: ExitStack) -> None:
        """Look at a chunk, unless it is that of another process."""
        if self.shard.owns(chunk.index):
            if not self._lens.active:  # a process may have nothing to look at
                stack.enter_context(self._lens)
            with ExitStack() as sums:
                for observer in self.state.observers:
                    sums.enter_context(observer.chunk())
                self._look(chunk)
        self.state.chunks, self.state.digest = chunk.index + 1, chunk.digest

    def _look(self, chunk: Chunk) -> None:
        """Run the model on a chunk."""
        texts = self._tokenised(chunk.records)
        settings = self.settings
        parts = texts.groups(settings.batch_size, settings.batch_tokens)
        for place, members in enumerate(parts):
            for observer in self.observers:
                observer.seek(chunk.index * settings.chunk + place)
            inputs = self.model.padded(texts, members)
            with self.labels.given(texts, members, chunk.records), torch.no_grad():
                self.model.model(**inputs)
        counts = checkpoint.Counts(len(chunk.records), sum(texts.lengths), texts.truncated)
        self.state.counts.add(counts)

    def _tokenised(self, records: Sequence[Record]) -> TokenisedTexts:
        texts = [record.text for record in records]
        pairs = [record.pair for record in records if record.pair is not None]
        if len({type(text) for text in texts}) > 1 or 0 < len(pairs) < len(records):
            raise InputError(
                "Texts, pairs of texts and lists of words cannot be mixed in a corpus. Scan them "
                "one after the other."
            )
        return self.model.tokenise(texts, self.settings.max_length, pairs or None)

    def _gather(self) -> None:
        """Replace the state by that of all processes together."""
        own = self.state.tensors(), self.state.progress()
        for place, (tensors, progress) in enumerate(self.shard.gathered(own)):
            if place == 0:
                self.state.restore(tensors, progress)
                continue
            corpus = {"corpus": self.state.progress()["corpus"]}
            require_same(progress, corpus, f"Process {place}", "All must be given the same.")
            self.state.add(tensors, progress)

    def _write(self, path: Path) -> None:
        checkpoint.write(path, self.state, {**self.about, **self.notes})

    def _other_corpus(self, how: str) -> InputError:
        return InputError(
            f"{self.folder} holds a scan of another corpus: this one {how}. {checkpoint.ANEW}"
        )


@contextmanager
def _rejected_log(path: Path | None) -> Iterator[Callable[[Rejected], None]]:
    """Open a file beside a checkpoint for what was rejected, a line each, at the first of them."""
    file: IO[str] | None = None
    path = None if path is None else path.with_suffix(".rejected.txt")
    if path is not None:
        path.unlink(missing_ok=True)

    def write(entry: Rejected) -> None:
        nonlocal file
        if path is not None:
            file = file or open(path, "w", encoding="utf-8")
            file.write(f"{entry}\n")

    try:
        yield write
    finally:
        if file is not None:
            file.close()


def _bar(corpus: Corpus | Iterable[Any], line: int, shown: bool) -> Any:
    """A bar over the lines of a corpus; the rate is measured from the line where work begins."""
    total = len(corpus) if isinstance(corpus, Sized) else None
    if shown and isinstance(corpus, Corpus):
        total = corpus.lines()
    return tqdm(total=total, initial=line, unit="line", smoothing=0.05, disable=not shown)
