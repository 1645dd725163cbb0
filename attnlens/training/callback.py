"""`LensCallback`: follow heads through a training with the Hugging Face Trainer."""

from __future__ import annotations

import os
import warnings
import weakref
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback
from transformers import TrainerControl as Control
from transformers import TrainerState as State
from transformers import TrainingArguments as Arguments

from attnlens.attention.importance import HeadImportance
from attnlens.capture import Kind
from attnlens.errors import AttnLensError, AttnLensWarning, InputError
from attnlens.files import load_state, save_state
from attnlens.lens import Lens
from attnlens.observer import Observer, part_of
from attnlens.tap.forwards import Mode
from attnlens.training.recent import Recent, checked_observers, forward_only
from attnlens.training.scalars import Choice, Keep, layer_values, named_scalars
from attnlens.training.steps import calling_trainer, loss_scale, surround

NAME = "attnlens_observers.safetensors"


class LensCallback(TrainerCallback):
    """Look at some steps of a training and log what their heads did, beside the loss.

    trainer = Trainer(..., callbacks=[LensCallback(every_n_steps=50)])

    Whenever the Trainer logs, scalars go through its logging too, so that every reporter gets
    them; each describes the steps looked at since the last log. Losses and weights are
    bit-identical to those of a training without the callback (a compiled model runs uncompiled in
    the steps looked at). Statistics are of A before dropout. A lens is open during the forward
    and the backward pass of a step looked at, and closed whatever happens there. The state is
    saved in each checkpoint folder and restored with it.

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

    Attributes:
        observers: what was given, or `HeadStatistics`.
        eval_observers: what holds the evaluations: with `on="eval"` the observers themselves,
            else empty copies of those that need no backward pass.

    Raises:
        InputError: if an argument is of the wrong kind or value.

    Examples:
        >>> callback = LensCallback([HeadStatistics(), HeadImportance()], every_n_steps=50)
        >>> [type(observer).__name__ for observer in callback.observers]
        ['HeadStatistics', 'HeadImportance']
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
        self._choice = Choice(keep, quantities)
        self._histograms = histograms
        layers = layers if layers is None or isinstance(layers, (int, str)) else list(layers)
        self._make_lens = partial(Lens, layers=layers, kinds=kinds)
        self._recent: dict[str, Recent] = {}
        if on != "eval":
            self._recent["train"] = Recent(self.observers)
        if on != "train":
            self._recent["eval"] = Recent(self.eval_observers)
        self._lenses: dict[str, Lens] = {}
        self._trainer: Callable[[], Any] = lambda: None
        self._steps = self._batches = 0
        self._restored = self._logging = self._warned = False

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Write the state of the observers into a checkpoint folder.

        In a distributed run every process must call this; the first one writes.

        Args:
            folder: where to; nothing is written if it does not exist.
        """
        state = {
            f"{phase}/{name}": tensor
            for phase, recent in self._recent.items()
            for name, tensor in recent.state(sync=_distributed()).items()
        }
        if _first_process() and Path(folder).is_dir():
            save_state(state, Path(folder) / NAME, {"observers": self._kinds()})

    def load(self, folder: str | os.PathLike[str]) -> None:
        """Restore what :meth:`save` wrote; a resumed training does so itself if it finds it.

        Args:
            folder: the checkpoint folder.

        Raises:
            InputError: if the folder holds no state, a damaged one, or that of other observers.
        """
        path = Path(folder) / NAME
        if not path.is_file():
            raise InputError(
                f"{folder} holds no {NAME}. Give a checkpoint saved with this callback."
            )
        state, about = load_state(path)
        if about.get("observers") != self._kinds():
            raise InputError(
                f"{path} holds the state of {about.get('observers')}; here are {self._kinds()}. "
                f"Use the observers it was saved with."
            )
        for phase, recent in self._recent.items():
            recent.restore(part_of(state, f"{phase}/"), recent=_first_process())
        self._restored = True

    def on_init_end(self, args: Arguments, state: State, control: Control, **kwargs: Any) -> None:
        """Meet the Trainer."""
        self._meet(calling_trainer(self))

    def on_train_begin(
        self, args: Arguments, state: State, control: Control, **kwargs: Any
    ) -> None:
        """Restore the state of a resumed training."""
        self._meet(calling_trainer(self))
        if args.n_gpu > 1:
            raise InputError(
                "With several devices in one process the Trainer uses nn.DataParallel, which runs "
                "copies of the model that no hook can follow. Start it with torchrun."
            )
        if not self._restored:
            for recent in self._recent.values():
                recent.drop()
            if state.global_step:
                self._resume(args, state)
        self._restored = self._warned = False

    def on_epoch_begin(
        self, args: Arguments, state: State, control: Control, **kwargs: Any
    ) -> None:
        """Count the steps looked at anew."""
        self._steps = 0

    def on_epoch_end(self, args: Arguments, state: State, control: Control, **kwargs: Any) -> None:
        """Warn, once in a training, if no step of the epoch was looked at."""
        if "train" in self._recent and not self._steps and not self._warned:
            self._warned = True
            warnings.warn(
                f"every_n_steps={self.every_n_steps} looked at no step of a whole epoch, the one "
                f"that ended with step {state.global_step}. Choose a smaller number.",
                AttnLensWarning,
                stacklevel=2,
            )

    def on_log(
        self, args: Arguments, state: State, control: Control, logs: Any = None, **kwargs: Any
    ) -> None:
        """Log what was seen since the last time, training and evaluation each with its own."""
        if self._logging:
            return
        prefix = _evaluated(logs or {})
        recent = self._recent.get("train" if prefix is None else "eval")
        if recent is None:
            return
        results = recent.close(sync=_distributed())
        scalars = named_scalars(results, self._choice)
        if not scalars:
            return
        self._logging = True
        try:
            self._trainer().log({f"{prefix or ''}{name}": v for name, v in scalars.items()})
        finally:
            self._logging = False
        if self._histograms:
            self._write_histograms(results, prefix or "", state.global_step)

    def on_train_end(self, args: Arguments, state: State, control: Control, **kwargs: Any) -> None:
        """Let go of the model."""
        self._lenses.clear()

    def on_evaluate(self, args: Arguments, state: State, control: Control, **kwargs: Any) -> None:
        """Begin the next evaluation with a first batch, and let go of the model."""
        self._end_batches()

    def on_predict(
        self, args: Arguments, state: State, control: Control, metrics: Any = None, **kwargs: Any
    ) -> None:
        """Add what was seen to the totals; a prediction is not logged."""
        self._end_batches()
        if "eval" in self._recent:
            self._recent["eval"].close(sync=_distributed())

    def on_save(self, args: Arguments, state: State, control: Control, **kwargs: Any) -> None:
        """Save the state beside the Trainer's."""
        self.save(_checkpoint(args, state))

    def _meet(self, trainer: Any) -> None:
        """Put a lens around the Trainer's steps, once."""
        if trainer is None:
            raise AttnLensError(
                "LensCallback found no Trainer among its callers. Pass it to a transformers "
                "Trainer as callbacks=[...], or use attnlens.monitor in a loop of your own."
            )
        if self._trainer() is trainer:
            return
        self._trainer = weakref.ref(trainer)
        if "train" in self._recent:
            surround(trainer, "training_step", self, self._around_step)
        if "eval" in self._recent:
            surround(trainer, "prediction_step", self, self._around_batch)

    def _around_step(
        self, model: Any, inputs: Any, num_items_in_batch: Any = None
    ) -> AbstractContextManager[Any]:
        trainer = self._trainer()
        if trainer.state.global_step % self.every_n_steps:
            return nullcontext()
        self._steps += 1
        scale = loss_scale(trainer, num_items_in_batch)
        recent = self._recent["train"]
        for total, copy in zip(recent.totals, recent.observers, strict=True):
            if isinstance(total, HeadImportance) and isinstance(copy, HeadImportance):
                copy.loss_scale = scale if total.loss_scale is None else total.loss_scale
        return self._lens("train", trainer.model)

    def _around_batch(self, *args: Any, **kwargs: Any) -> AbstractContextManager[Any]:
        self._batches += 1
        if (self._batches - 1) % self.every_n_steps:
            return nullcontext()
        return self._lens("eval", self._trainer().model)

    def _end_batches(self) -> None:
        self._batches = 0
        self._lenses.pop("eval", None)

    def _lens(self, phase: str, model: torch.nn.Module) -> Lens:
        """The lens of a phase, made anew when the Trainer has a new model."""
        lens = self._lenses.get(phase)
        if lens is None or lens.model is not model:
            lens = self._make_lens(model, *self._recent[phase].observers)
            self._lenses[phase] = lens
        return lens

    def _write_histograms(self, results: list[Any], prefix: str, step: int) -> None:
        """Hand the heads of every layer to each TensorBoard writer among the reporters."""
        reporters = self._trainer().callback_handler.callbacks
        writers = [getattr(reporter, "tb_writer", None) for reporter in reporters]
        for writer in filter(None, writers):
            for result in results:
                for name, _, label, heads in layer_values(result, self._choice):
                    finite = heads[~heads.isnan()]
                    if len(finite):
                        writer.add_histogram(f"{prefix}attnlens/{name}/{label}", finite, step)

    def _resume(self, args: Arguments, state: State) -> None:
        named = args.resume_from_checkpoint
        folders = [_checkpoint(args, state), *([Path(named)] if isinstance(named, str) else [])]
        for folder in folders:
            if (folder / NAME).is_file():
                self.load(folder)
                return
        warnings.warn(
            f"The training resumes at step {state.global_step}, but there is no {NAME} in "
            f"{folders[0]}, so the observers begin anew. If it is elsewhere, call "
            f"callback.load(folder) before train().",
            AttnLensWarning,
            stacklevel=2,
        )

    def _kinds(self) -> list[str]:
        """What must agree between a saved state and this callback."""
        return [f"{phase} {o!r}" for phase, recent in self._recent.items() for o in recent.totals]


def _evaluated(logs: dict[str, Any]) -> str | None:
    """The prefix of an evaluation's log, such as `eval_`; None for a training's."""
    runtimes = (name for name in logs if name.endswith("_runtime") and name != "train_runtime")
    return next((name.removesuffix("runtime") for name in runtimes), None)


def _checkpoint(args: Arguments, state: State) -> Path:
    return Path(str(args.output_dir)) / f"checkpoint-{state.global_step}"


def _distributed() -> bool:
    distributed = torch.distributed
    return distributed.is_available() and distributed.is_initialized()


def _first_process() -> bool:
    return not _distributed() or torch.distributed.get_rank() == 0
