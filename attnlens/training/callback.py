"""`LensCallback`: follow heads through a training with the Hugging Face Trainer."""

from __future__ import annotations

import math
import os
import warnings
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

from transformers import TrainerCallback
from transformers import TrainerControl as Control
from transformers import TrainerState as State
from transformers import TrainingArguments as Arguments
from transformers.integrations.integration_utils import rewrite_logs

from attnlens.errors import AttnLensError, AttnLensWarning, InputError
from attnlens.files import load_state, save_state
from attnlens.training.boards import Board, boards_of_reporters, show_histograms, show_results
from attnlens.training.following import Following, first_process
from attnlens.training.steps import calling_trainer, loss_scale, surround

_NAME = "attnlens_{}.safetensors"


class LensCallback(Following, TrainerCallback):
    """Look at some steps of a training and log what their heads did, beside the loss.

    trainer = Trainer(..., callbacks=[LensCallback(every_n_steps=50)])

    Arguments are those of :class:`~attnlens.training.following.Following`. Whenever the Trainer
    logs, scalars go through its logging too, so that every reporter gets them; each describes the
    steps looked at since the last log. Those of an evaluation are among its metrics, where
    `metric_for_best_model="eval_attnlens/…"` and sweeps find them. At the end W&B and MLflow get
    the observers' results as tables and grids, TensorBoard as grids. Trainers that derive from
    the Trainer take it alike.

    Examples:
        >>> callback = LensCallback([HeadStatistics(), HeadImportance()], every_n_steps=50)
        >>> [type(observer).__name__ for observer in callback.observers]
        ['HeadStatistics', 'HeadImportance']
    """

    _trainer: Callable[[], Any] = staticmethod(lambda: None)
    _steps = _batches = 0
    _logging = _warned = False

    def __getstate__(self) -> dict[str, Any]:
        """Copies and pickles belong to no Trainer."""
        return {name: v for name, v in super().__getstate__().items() if name != "_trainer"}

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Write the state of the observers into a checkpoint folder.

        In a distributed run every process must call this; the first one writes.

        Args:
            folder: where to; nothing is written if it does not exist.
        """
        state = self._state()
        if first_process() and Path(folder).is_dir():
            save_state(state, self._file(folder), self._about())

    def load(self, folder: str | os.PathLike[str]) -> None:
        """Restore what :meth:`save` wrote; a resumed training does so itself if it finds it.

        Args:
            folder: the checkpoint folder.

        Raises:
            InputError: if the folder holds no state, a damaged one, or only that of callbacks
                with other settings.
        """
        path = self._file(folder)
        others = sorted(Path(folder).glob(_NAME.format("*")))
        if not path.is_file() and not others:
            raise InputError(
                f"{folder} holds no {path.name}. Give a checkpoint saved with this callback."
            )
        for file in [path] if path.is_file() else others:
            state, about = load_state(file)
            self._restore(state, about, str(file))

    def on_init_end(self, args: Arguments, state: State, control: Control, **kwargs: Any) -> None:
        """Meet the Trainer."""
        self._meet(calling_trainer(self))

    def on_train_begin(
        self, args: Arguments, state: State, control: Control, **kwargs: Any
    ) -> None:
        """Begin at zero, or restore the state of a resumed training."""
        self._meet(calling_trainer(self))
        if args.n_gpu > 1:
            raise InputError(
                "With several devices in one process the Trainer uses nn.DataParallel, which runs "
                "copies of the model that no hook can follow. Start it with torchrun."
            )
        if state.global_step and not self._restored:
            self._resume(args, state)
        self._begin_run()
        self._warned = False

    def on_epoch_begin(
        self, args: Arguments, state: State, control: Control, **kwargs: Any
    ) -> None:
        """Count the steps looked at anew."""
        self._steps = 0

    def on_epoch_end(self, args: Arguments, state: State, control: Control, **kwargs: Any) -> None:
        """Warn, once in a training, if no step of a whole epoch was looked at."""
        cut = state.epoch is None or not math.isclose(state.epoch, round(state.epoch), abs_tol=1e-6)
        if "train" in self._recent and not self._steps and not self._warned and not cut:
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
        """Log what was seen of the training since the last time."""
        if self._logging or "train" not in self._recent or _is_of_evaluation(logs or {}):
            return
        results, scalars = self._close("train", (state.global_step, state.epoch or 0.0))
        control.should_training_stop |= self._bell.stops
        if scalars:
            self._log(scalars)
        boards = self._boards()
        if self._histograms:
            show_histograms(boards, results, self._choice, "train/", state.global_step)
        if "train_runtime" in (logs or {}) and boards:
            totals = self._recent["train"].results()
            show_results(boards, totals, self._choice, state.global_step)

    def on_train_end(self, args: Arguments, state: State, control: Control, **kwargs: Any) -> None:
        """Let go of the model."""
        self._lenses.clear()

    def on_save(self, args: Arguments, state: State, control: Control, **kwargs: Any) -> None:
        """Save the state beside the Trainer's."""
        self.save(self._checkpoint(args, state))

    def _log(self, scalars: dict[str, float]) -> None:
        self._logging = True
        try:
            self._trainer().log(scalars)
        finally:
            self._logging = False

    def _boards(self) -> list[Board]:
        """The boards that this process reports to."""
        reporters = self._trainer().callback_handler.callbacks
        return list(boards_of_reporters(reporters)) if first_process() else []

    def _file(self, folder: str | os.PathLike[str]) -> Path:
        return Path(folder) / _NAME.format(self._key)

    def _meet(self, trainer: Any) -> None:
        """Put a lens around the Trainer's steps, once."""
        if trainer is None:
            raise AttnLensError(
                "LensCallback found no Trainer among its callers. Pass it to a transformers "
                "Trainer as callbacks=[...], or use attnlens.monitor in a loop of your own."
            )
        if self._trainer() is trainer:
            return
        if trainer.model is not None:
            self._require_still(trainer.model)
        self._trainer = weakref.ref(trainer)
        if "train" in self._recent:
            surround(trainer, "training_step", self, self._around_step)
        if "eval" in self._recent:
            surround(trainer, "prediction_step", self, self._around_batch)
            surround(trainer, "evaluation_loop", self, self._around_evaluation)

    def _around_step(
        self,
        step: Callable[..., Any],
        model: Any,
        inputs: Any,
        num_items_in_batch: Any = None,
    ) -> Any:
        trainer = self._trainer()
        if trainer.state.global_step % self.every_n_steps:
            return step(model, inputs, num_items_in_batch)
        self._steps += 1
        with self._look("train", trainer.model, loss_scale(trainer, num_items_in_batch)):
            return step(model, inputs, num_items_in_batch)

    def _around_batch(self, step: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self._batches += 1
        if (self._batches - 1) % self.every_n_steps:
            return step(*args, **kwargs)
        with self._look("eval", self._trainer().model):
            return step(*args, **kwargs)

    def _around_evaluation(self, loop: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Add the scalars of an evaluation or a prediction to its metrics."""
        try:
            output = loop(*args, **kwargs)
        finally:
            self._batches = 0
            self._lenses.pop("eval", None)
        prefix = f"{kwargs.get('metric_key_prefix', 'eval')}_"
        results, scalars = self._close("eval")
        output.metrics.update({f"{prefix}{name}": value for name, value in scalars.items()})
        if self._histograms:
            # As TensorBoard groups the scalars.
            (group,) = rewrite_logs({prefix: 0})  # type: ignore[no-untyped-call]
            step = self._trainer().state.global_step
            show_histograms(self._boards(), results, self._choice, group, step)
        return output

    def _checkpoint(self, args: Arguments, state: State) -> Path:
        """The folder of the checkpoint of this step, in that of its trial if there is one."""
        trainer = self._trainer()
        run = trainer._get_output_dir(getattr(trainer, "_trial", None)) if trainer else None
        return Path(str(run or args.output_dir)) / f"checkpoint-{state.global_step}"

    def _resume(self, args: Arguments, state: State) -> None:
        named = args.resume_from_checkpoint
        folders = [self._checkpoint(args, state)]
        folders += [Path(named)] if isinstance(named, str) else []
        for folder in folders:
            if list(folder.glob(_NAME.format("*"))):
                self.load(folder)
                return
        warnings.warn(
            f"The training resumes at step {state.global_step}, but there is no "
            f"{self._file(folders[0])}, so the observers begin anew. If it is elsewhere, call "
            f"callback.load(folder) before train().",
            AttnLensWarning,
            stacklevel=2,
        )


def _is_of_evaluation(logs: dict[str, Any]) -> bool:
    return any(name.endswith("_runtime") and name != "train_runtime" for name in logs)
