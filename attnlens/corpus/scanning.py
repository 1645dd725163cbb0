"""`scan`: run a corpus through a model, chunk by chunk, in one process or several."""

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
from attnlens.corpus.chunks import Chunk, Part, chunks
from attnlens.corpus.identity import model_identity, observer_identity, require_same
from attnlens.corpus.named import named_observer, require_fit
from attnlens.corpus.outcome import Scan, write_results
from attnlens.corpus.readers import Corpus, entries_of
from attnlens.corpus.records import Record, Rejected
from attnlens.corpus.settings import Handling, OnError, Settings
from attnlens.corpus.shards import Shard, shard_of
from attnlens.corpus.token_labels import TokenLabels
from attnlens.errors import AttnLensError, InputError
from attnlens.files import make_folder, remove_unfinished, versions
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
    overwrite: bool = False,
) -> Scan:
    """Run a corpus of any size through a model while observers look on.

    Under `torchrun` or `accelerate launch` the processes share the corpus, and each of them has
    the result of the whole corpus at the end. The result does not depend on how the corpus was
    shared or where the scan was interrupted: the batches and probes are the same, and the sums do
    not depend on the order of their terms.

    Args:
        model: a `PreTrainedModel` that reads text, in evaluation mode.
        tokenizer: tokenizer of the model.
        corpus: a file, a :class:`~attnlens.corpus.Corpus` of files, or records, texts, pairs of
            texts or mappings. All processes must be given the same corpus.
        observers: observers, or their names with settings, as in `"attribution:probes=2"`. They
            are reset first. Observers with `label_names` and no `labels` are given the labels of
            the words in the records; the label of a special token is its name, such as `[CLS]`.
        out: folder for checkpoints, results and the list of rejected entries; None writes nothing.
        batch_size: most examples in a batch.
        batch_tokens: most tokens in a batch, padding included.
        chunk: number of consecutive examples that are sorted by length together before they are
            cut into batches. A chunk goes to one process, and a scan resumes after a chunk.
        max_length: most tokens of an example; by default the longest that the model can read.
        checkpoint_every: least time between two checkpoints, in seconds.
        resume: continue from the checkpoint in `out`, if there is one.
        on_error: `"skip"` entries that are no examples, or `"raise"` at the first.
        report: called with every entry that is skipped.
        label_names: names of the labels of words, for observers given by name.
        shard: index and count, such as `(0, 4)`, to read only that part of the corpus.
            :func:`~attnlens.corpus.merge_shards` merges all parts.
        progress: show a bar with rate and time left.
        name: name of the model, for the record.
        overwrite: allow an `out` that holds something else than a scan.

    Returns:
        The observers and how much was read.

    Raises:
        InputError: if an argument is of the wrong kind or value, `out` holds a checkpoint of
            another scan, something else or what is read, another process writes to it, nothing
            is an example, or an entry is none and `on_error="raise"`.

    Examples:
        >>> outcome = scan(model, tokenizer, ["One sentence.", "And another."], [HeadStatistics()])
        >>> outcome.counts.records
        2
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
    # `attnlens merge` makes the same observers from these names.
    named = [observer if isinstance(observer, str) else "" for observer in observers]
    notes = {"name": reads.name, "named": named}
    files = [str(path) for path, _ in corpus.files] if isinstance(corpus, Corpus) else []
    with shard_of(shard) as part, ExitStack() as stack:
        shown = progress and part.index == 0
        handling = Handling(checkpoint_every, resume, on_error, report, shown)
        folder = None
        if out is not None:
            inputs = [reads.name, *files]
            folder = make_folder(out, inputs=inputs, own=checkpoint.FILES, overwrite=overwrite)
            stack.enter_context(checkpoint.locked(folder, part))
        scanner = Scanner(reads, looking, settings, part, folder, notes)
        scanner.read(corpus, handling)
        return scanner.finish()


class Scanner:
    """Scan the part of a corpus that belongs to one process.

    Args:
        model: the model.
        observers: the observers.
        settings: how records become batches.
        shard: the part of the corpus.
        folder: folder for checkpoints and results, or None.
        notes: further entries of the checkpoint.
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
            "versions": versions(),
        }
        self._lens = Lens(model.model, *self.observers)

    def read(self, corpus: Corpus | Iterable[Any], handling: Handling) -> None:
        """Read the corpus from its beginning, and run the model on every chunk that is not done.

        Args:
            corpus: the corpus.
            handling: errors, checkpoints and progress.

        Raises:
            InputError: if it is not the corpus of the checkpoint.
        """
        path = self._prepared(handling)
        done = self.state.chunks
        entries = iter(corpus) if isinstance(corpus, Corpus) else entries_of(corpus)
        self.state.counts.rejected = 0  # counted again, from the beginning
        written, last, line = time.monotonic(), 0, 0
        bar: Any = None
        first: Rejected | None = None
        with ExitStack() as stack:
            log = stack.enter_context(_rejected_log(path))

            def reject(index: int, entry: Rejected) -> None:
                nonlocal first
                first = first or entry
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
        if not last:
            reason = f"The first entry: {first}" if first else "It is empty"
            raise InputError(f"There is no record in {_named(corpus)}. {reason}.")
        self.state.finished = True
        if path is not None:
            self._write(path)

    def finish(self) -> Scan:
        """Merge the parts of all processes; one process writes the results.

        Returns:
            The outcome.
        """
        if self.shard.group is not None:
            self._gather()
        results: dict[str, Any] = {}
        if self.folder is not None and self.shard.writes:
            about = {
                name: self.about[name] for name in ("model", "settings", "observers", "versions")
            }
            results = write_results(self.folder, self.state, about, self.model.name)
        return Scan(self.observers, self.state.counts, self.shard, results)

    def _prepared(self, handling: Handling) -> Path | None:
        """Load the checkpoint of this process, if it exists, and return its path."""
        if self.folder is None:
            return None
        checkpoint.require_one_layout(self.folder, self.shard)
        path = checkpoint.shard_path(self.folder, self.shard)
        remove_unfinished(path)
        if handling.resume:
            checkpoint.resume(path, self.state, self.about)
        return path

    def _advance(self, chunk: Chunk, stack: ExitStack) -> None:
        """Run the model on the parts of a chunk that belong to this process."""
        _require_one_kind(chunk.records)
        for number, part in enumerate(chunk.parts(self.settings.batch_size), chunk.index):
            if not self.shard.owns(number):
                continue
            if not self._lens.active:  # entered late: a process may own no part
                stack.enter_context(self._lens)
            with ExitStack() as sums:
                for observer in self.state.observers:
                    sums.enter_context(observer.chunk())
                self._look(part, chunk.index * self.settings.chunk + part.start)
        self.state.chunks, self.state.digest = chunk.index + 1, chunk.digest

    def _look(self, part: Part, start: int) -> None:
        """Run the model on a part, batch by batch, from a number of the first batch on."""
        texts = self._tokenised(part.records)
        batches = texts.groups(self.settings.batch_size, self.settings.batch_tokens)
        for place, members in enumerate(batches, start):
            for observer in self.observers:
                observer.seek(place)
            inputs = self.model.padded(texts, members)
            with self.labels.given(texts, members, part.records), torch.no_grad():
                self.model.model(**inputs)
        counts = checkpoint.Counts(len(part.records), sum(texts.lengths), texts.truncated)
        self.state.counts.add(counts)

    def _tokenised(self, records: Sequence[Record]) -> TokenisedTexts:
        texts = [record.text for record in records]
        pairs = [record.pair for record in records if record.pair is not None]
        return self.model.tokenise(texts, self.settings.max_length, pairs or None)

    def _gather(self) -> None:
        """Replace the state by the sum over all processes."""
        own = self.state.tensors(), self.state.progress()
        for place, (tensors, progress) in enumerate(self._gathered(own)):
            if place == 0:
                self.state.restore(tensors, progress)
                continue
            corpus = {"corpus": self.state.progress()["corpus"]}
            require_same(progress, corpus, f"Process {place}", "All must be given the same.")
            self.state.add(tensors, progress)

    def _gathered(self, own: Any) -> Iterator[Any]:
        """What all processes have seen; an error that says how to go on where one was lost."""
        try:
            yield from self.shard.gathered(own)
        except RuntimeError as error:
            where = "" if self.folder is None else f" in {self.folder}"
            raise AttnLensError(
                f"Another process of this scan was lost. The same command goes on from the last "
                f"checkpoint{where}."
            ) from error

    def _write(self, path: Path) -> None:
        checkpoint.write(path, self.state, {**self.about, **self.notes})

    def _other_corpus(self, how: str) -> InputError:
        return InputError(
            f"{self.folder} holds a scan of another corpus: this one {how}. {checkpoint.ANEW}"
        )


def _require_one_kind(records: Sequence[Record]) -> None:
    """Refuse records of which some have words or pairs, and some have none."""
    if len({(type(record.text), record.pair is None) for record in records}) > 1:
        raise InputError(
            "Texts, pairs of texts and lists of words cannot be mixed in a corpus. Scan them one "
            "after the other."
        )


def _named(corpus: Corpus | Iterable[Any]) -> str:
    files = corpus.files if isinstance(corpus, Corpus) else []
    return ", ".join(str(path) for path, _ in files) or "the corpus"


@contextmanager
def _rejected_log(path: Path | None) -> Iterator[Callable[[Rejected], None]]:
    """Write rejected entries to a file beside the checkpoint, opened for the first of them."""
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
    """Return a bar over the lines of a corpus that begins at a line, or one that is not shown."""
    total = len(corpus) if isinstance(corpus, Sized) else None
    if shown and isinstance(corpus, Corpus):
        total = corpus.lines()
    return tqdm(total=total, initial=line, unit="line", smoothing=0.05, disable=not shown)
