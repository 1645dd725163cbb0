"""Settings of a scan: those its results depend on, and the others."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, get_args

from attnlens.corpus.records import Rejected
from attnlens.errors import InputError

OnError = Literal["skip", "raise"]


@dataclass(frozen=True)
class Settings:
    """How records become batches; scans with equal settings have equal batches.

    Attributes:
        batch_size: most examples in a batch.
        batch_tokens: most tokens in a batch, padding included.
        chunk: number of consecutive examples that are sorted by length together.
        max_length: most tokens of an example, or None for the model's limit.
    """

    batch_size: int = 32
    batch_tokens: int = 1024
    chunk: int = 256
    max_length: int | None = None

    def __post_init__(self) -> None:
        for name in ("batch_size", "batch_tokens", "chunk"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise InputError(f"{name} must be a positive integer. Got {value!r}.")


@dataclass(frozen=True)
class Handling:
    """Errors, checkpoints and progress; the results of a scan do not depend on them.

    Attributes:
        checkpoint_every: least time between two checkpoints, in seconds.
        resume: whether to continue from a checkpoint.
        on_error: `"skip"` entries that are no examples, or `"raise"` at the first.
        report: called with every entry that is skipped, or None.
        progress: whether to show a bar with rate and time left.
    """

    checkpoint_every: float = 30.0
    resume: bool = True
    on_error: OnError = "skip"
    report: Callable[[Rejected], None] | None = None
    progress: bool = False

    def __post_init__(self) -> None:
        if self.on_error not in get_args(OnError):
            raise InputError(f'on_error must be "skip" or "raise". Got {self.on_error!r}.')
        if not self.checkpoint_every >= 0:
            raise InputError(
                f"checkpoint_every must be a number of seconds, at least 0. Got "
                f"{self.checkpoint_every!r}."
            )
