"""How a scan makes batches, and what it does besides."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, get_args

from attnlens.corpus.records import Rejected
from attnlens.errors import InputError

OnError = Literal["skip", "raise"]


@dataclass(frozen=True)
class Settings:
    """How records become batches; two scans with the same see the same batches.

    Attributes:
        batch_size: most examples in a batch.
        batch_tokens: most tokens in a batch, padding included.
        chunk: consecutive examples that are sorted by length before they are cut into batches.
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
    """What a scan does besides, which its results do not depend on.

    Attributes:
        checkpoint_every: least seconds between two checkpoints.
        resume: whether to go on from a checkpoint.
        on_error: `"skip"` what is no record, or `"raise"` at the first.
        report: told of everything that is skipped, or None.
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
