"""What the callbacks of all trainers share: settings, looks, logs, alarms and state."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from hashlib import sha256
from typing import Any

import torch
from torch import Tensor, nn

from attnlens.attention.importance import HeadImportance
from attnlens.capture import Kind
from attnlens.errors import AttnLensError, AttnLensWarning, InputError
from attnlens.lens import Lens
from attnlens.observer import Observer, State, part_of
from attnlens.results import LayeredResult
from attnlens.tap.forwards import Mode
from attnlens.training.alarms import Alarm, AlarmBell, Moment
from attnlens.training.recent import Recent, checked_observers, forward_only
from attnlens.training.scalars import Choice, Keep, named_scalars


class Following:
    """Follow heads through a training, whoever trains.

    Losses and weights are bit-identical to those of a training without it (a compiled model runs
    uncompiled in the steps looked at). Statistics are of A before dropout. A lens is open during
    the forward and the backward pass of a step looked at, and closed whatever happens there; an
    error of attnlens in it is warned of, and the step left out. A run begins at zero. The state is
    saved with every checkpoint and restored with it.

    Args:
        observers: observers of sums, such as `HeadStatistics()`, the default, and
            `HeadImportance()`. Afterwards they hold the whole training.
        every_n_steps: look at each N-th optimisation step, beginning with the first, with all its
            micro-batches; in an evaluation, at each N-th batch.
        on: look at `"train"` steps, at `"eval"` batches, or `"both"`.
        keep: `"summary"` for the mean of every layer, `"all"` for every head too, or a list of
            `(layer, head)`.
        quantities: fields of the observers' results to log; the usual ones by default.
        histograms: write the distribution over the heads of each layer where TensorBoard is used.
        layers: layers to look at, see :class:`~attnlens.Lens`.
        kinds: kinds of attention to look at, see :class:`~attnlens.Lens`.
        alarms: rules on quantities of the training steps.
        over_runs: go on adding from one training to the next.

    Attributes:
        observers: what was given, or `HeadStatistics`.
        eval_observers: what holds the evaluations: with `on="eval"` the observers themselves,
            else empty copies of those that need no backward pass.
        settings: what tells this callback from another in a checkpoint, as plain text by name.

    Raises:
        InputError: if an argument is of the wrong kind or value.
    """

    def __init__(
        self,
        observers: Iterable[Observer] = (),
        *,
        every_n_steps: int = 50,
        on: Mode = "train",
        keep: Keep = "summary",
        quantities: Iterable[str] | None = None,
        histograms: bool = True,
        layers: Iterable[int | str] | None = None,
        kinds: Iterable[Kind] | Kind | None = None,
        alarms: Iterable[Alarm] = (),
        over_runs: bool = False,
    ) -> None:
        whole = isinstance(every_n_steps, int) and not isinstance(every_n_steps, bool)
        if not whole or every_n_steps < 1:
            raise InputError(f"every_n_steps must be a positive integer. Got {every_n_steps!r}.")
        if on not in ("train", "eval", "both"):
            raise InputError(f'on must be "train", "eval" or "both". Got {on!r}.')
        self.observers = checked_observers(observers)
        self.eval_observers = self.observers if on == "eval" else forward_only(self.observers)
        backward = [type(o).__name__ for o in self.eval_observers if o.needs_backward]
        if backward:
            raise InputError(f'{backward[0]} needs a backward pass: use on="train" or on="both".')
        self.every_n_steps = every_n_steps
        self.over_runs = over_runs
        self._choice = Choice(keep, quantities, self.observers)
        self._bell = AlarmBell(tuple(alarms))
        self._bell.require_known(self.observers)
        if self._bell.alarms and on == "eval":
            raise InputError('alarms are about training steps: use on="train" or on="both".')
        self._histograms = histograms
        layers = layers if layers is None or isinstance(layers, (int, str)) else list(layers)
        kinds = kinds if kinds is None or isinstance(kinds, str) else list(kinds)
        self._make_lens = partial(Lens, layers=layers, kinds=kinds, on_error="warn")
        self._recent: dict[str, Recent] = {}
        if on != "eval":
            self._recent["train"] = Recent(self.observers)
        if on != "train":
            self._recent["eval"] = Recent(self.eval_observers)
        self.settings = {
            "observers": ", ".join(map(_described, self.observers)),
            "every_n_steps": str(every_n_steps),
            "on": on,
            "layers": str(layers),
            "kinds": str(kinds),
            "alarms": str(list(self._bell.alarms)),
        }
        self._lenses: dict[str, Lens] = {}
        self._restored = False

    def __getstate__(self) -> dict[str, Any]:
        """Copies and pickles come without the model and the trainer."""
        return {**vars(self), "_lenses": {}}

    @property
    def _key(self) -> str:
        """A name for this callback's state that no callback of other settings has."""
        return sha256(json.dumps(self.settings, sort_keys=True).encode()).hexdigest()[:12]

    def _begin_run(self) -> None:
        """Begin at zero, unless a state was restored or runs are to be added up."""
        restored, self._restored = self._restored, False
        if restored:
            return
        self._bell.reset()
        for recent in self._recent.values():
            if self.over_runs:
                recent.drop()
            else:
                recent.forget()

    @contextmanager
    def _look(self, phase: str, model: nn.Module, loss_scale: float = 1.0) -> Iterator[None]:
        """Open a lens around one step; where it fails, the step is left out with a warning."""
        recent = self._recent[phase]
        for total, copy in zip(recent.totals, recent.observers, strict=True):
            if isinstance(total, HeadImportance) and isinstance(copy, HeadImportance):
                copy.loss_scale = loss_scale if total.loss_scale is None else total.loss_scale
        undo = recent.snapshot()
        lens = self._opened(phase, model)
        if lens is None:
            yield
            return
        try:
            yield
        except BaseException as error:
            lens.__exit__(type(error), error, error.__traceback__)
            undo()
            raise
        try:
            lens.__exit__(None, None, None)
        except AttnLensError as error:
            _warn_of(error)
        if lens.error is not None:
            undo()

    def _opened(self, phase: str, model: nn.Module) -> Lens | None:
        """The lens of a phase, made anew when there is a new model; None if it cannot be opened."""
        lens = self._lenses.get(phase)
        try:
            if lens is None or lens.model is not model:
                lens = self._make_lens(model, *self._recent[phase].observers)
                self._lenses[phase] = lens
            return lens.__enter__()
        except AttnLensError as error:
            _warn_of(error)
            return None

    def _require_still(self, model: nn.Module) -> None:
        """Refuse observers that call layers again where dropout would draw anew."""
        again = [type(o).__name__ for o in self.observers if o.calls_again]
        drops = [n for n, m in model.named_modules() if isinstance(m, nn.Dropout) and m.p]
        if "train" in self._recent and again and drops:
            raise InputError(
                f"{again[0]} calls layers again, but in training {drops[0]} draws anew each time: "
                f'use on="eval", or a model without dropout.'
            )

    def _close(
        self, phase: str, now: Moment = (0.0, 0.0)
    ) -> tuple[list[LayeredResult], dict[str, float]]:
        """Read what was seen since the last time, add it to the totals, and mind the alarms."""
        results = self._recent[phase].close(sync=distributed())
        scalars = named_scalars(results, self._choice)
        if phase == "train" and results:
            scalars |= self._bell.hear(results, now)
        return results, scalars

    def _state(self) -> State:
        """Return totals and what was seen since the last log; every process must call this."""
        return {
            f"{phase}/{name}": tensor
            for phase, recent in self._recent.items()
            for name, tensor in recent.state(sync=distributed()).items()
        }

    def _about(self) -> dict[str, Any]:
        """What goes beside :meth:`_state`."""
        return {"settings": self.settings, "alarms": self._bell.state()}

    def _restore(self, state: Mapping[str, Tensor], about: Mapping[str, Any], where: str) -> None:
        """Take up a state, refusing one of other settings."""
        self._require_same(about.get("settings", {}), where)
        for phase, recent in self._recent.items():
            recent.restore(part_of(state, f"{phase}/"), recent=first_process())
        self._bell.restore(about["alarms"])
        self._restored = True

    def _require_same(self, settings: Mapping[str, str], where: str) -> None:
        """Refuse a state of other settings, naming the first that differs."""
        for name, own in self.settings.items():
            if settings.get(name) != own:
                raise InputError(
                    f"{where} holds the state of a callback with {name}={settings.get(name)}; here "
                    f"it is {name}={own}. Use the settings it was saved with."
                )


def distributed() -> bool:
    """Tell whether several processes train together."""
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def first_process() -> bool:
    """Tell whether this is the one process that writes."""
    return not distributed() or torch.distributed.get_rank() == 0


def _described(observer: Observer) -> str:
    """An observer with every setting that must be the same in what is added to it."""
    layers: Sequence[int] | None = None if observer.layers is None else sorted(observer.layers)
    return f"{observer!r} of layers {'all' if layers is None else layers}"


def _warn_of(error: Exception) -> None:
    warnings.warn(
        f"A step could not be looked at. {type(error).__name__}: {error}",
        AttnLensWarning,
        stacklevel=4,
    )
