"""`LightningCallback`: follow heads through a training with Lightning."""

from __future__ import annotations

import warnings
from contextlib import ExitStack, suppress
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from attnlens.errors import AttnLensWarning
from attnlens.training.boards import boards_of_loggers, show_histograms, show_results
from attnlens.training.following import Following

_STATE = "attnlens_"


class LightningCallback(Following, Callback):
    """Look at some steps of a training and log what their heads did, beside the loss.

    trainer = lightning.Trainer(..., callbacks=[LightningCallback(every_n_steps=50)])

    Arguments are those of :class:`~attnlens.training.following.Following`. Every
    `log_every_n_steps` optimisation steps the scalars go to the loggers; each describes the steps
    looked at since the last time. Those of a validation are in `callback_metrics` as
    `val_attnlens/…`, where `ModelCheckpoint` and `EarlyStopping` find them. The state is in
    Lightning's own checkpoints. Needs `pip install "attnlens[lightning]"`.

    Examples:
        >>> callback = LightningCallback([HeadStatistics()], every_n_steps=50)
        >>> [type(observer).__name__ for observer in callback.observers]
        ['HeadStatistics']
    """

    _looks: ExitStack | None = None

    @property
    def state_key(self) -> str:
        """What the state is called in a checkpoint."""
        return f"{_STATE}{self._key}"

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the observers and alarms."""
        return {"state": self._state(), "about": self._about()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take up a state.

        Args:
            state_dict: from :meth:`state_dict`.
        """
        self._restore(state_dict["state"], state_dict["about"], "The checkpoint")

    def on_load_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Refuse a checkpoint that holds only states of callbacks with other settings."""
        states = checkpoint.get("callbacks", {})
        ours = [state for name, state in states.items() if name.startswith(_STATE)]
        if ours and self.state_key not in states:
            self._require_same(ours[0]["about"]["settings"], "The checkpoint")
        elif not ours:
            warnings.warn(
                "The training resumes from a checkpoint without a state of attnlens, so the "
                "observers begin anew.",
                AttnLensWarning,
                stacklevel=2,
            )

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Begin at zero, before a checkpoint is loaded."""
        self._require_still(pl_module)
        if stage == "fit":
            self._begin_run()

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Open a lens around a step that is to be looked at."""
        if "train" in self._recent and trainer.global_step % self.every_n_steps == 0:
            scaler = getattr(trainer.precision_plugin, "scaler", None)
            scale = 1.0 if scaler is None else float(scaler.get_scale())
            self._enter("train", pl_module, scale / trainer.accumulate_grad_batches)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Close the lens, and log where it is time to."""
        self._leave()
        if self._is_time(trainer, batch_idx):
            self._log(trainer)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Log the rest, and show the whole."""
        self._log(trainer)
        if "train" in self._recent and trainer.is_global_zero:
            boards = list(boards_of_loggers(trainer.loggers))
            totals = self._recent["train"].results() if boards else []
            show_results(boards, totals, self._choice, trainer.global_step)
        self._lenses.clear()

    def on_validation_batch_start(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Open a lens around a batch that is to be looked at; the sanity check is none."""
        chosen = "eval" in self._recent and batch_idx % self.every_n_steps == 0
        if chosen and not trainer.sanity_checking:
            self._enter("eval", pl_module)

    def on_validation_batch_end(self, *args: Any, **kwargs: Any) -> None:
        """Close the lens."""
        self._leave()

    def on_validation_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Add the scalars of a validation to its metrics."""
        if "eval" not in self._recent or trainer.sanity_checking:
            return
        results, scalars = self._close("eval")
        pl_module.log_dict({f"val_{name}": value for name, value in scalars.items()})
        self._lenses.pop("eval", None)
        if self._histograms and trainer.is_global_zero:
            boards = list(boards_of_loggers(trainer.loggers))
            show_histograms(boards, results, self._choice, "val_", trainer.global_step)

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        """Close a lens that is open."""
        looks, self._looks = self._looks, None
        if looks is not None:
            with suppress(type(exception)):  # Lightning goes on with it
                looks.__exit__(type(exception), exception, exception.__traceback__)

    def _enter(self, phase: str, module: LightningModule, loss_scale: float = 1.0) -> None:
        self._looks = ExitStack()
        self._looks.enter_context(self._look(phase, module, loss_scale))

    def _leave(self) -> None:
        looks, self._looks = self._looks, None
        if looks is not None:
            looks.close()

    def _is_time(self, trainer: Trainer, batch_idx: int) -> bool:
        """Whether an optimisation step has ended after which the loggers are due."""
        stepped = (batch_idx + 1) % trainer.accumulate_grad_batches == 0 or trainer.is_last_batch
        every: int = trainer.log_every_n_steps  # type: ignore[attr-defined]
        return stepped and trainer.global_step % every == 0

    def _log(self, trainer: Trainer) -> None:
        """Hand the loggers what was seen since the last time."""
        if "train" not in self._recent:
            return
        epochs = trainer.global_step / max(trainer.num_training_batches, 1)
        results, scalars = self._close(
            "train", (trainer.global_step, epochs * trainer.accumulate_grad_batches)
        )
        trainer.should_stop |= self._bell.stops
        for logger in trainer.loggers if scalars else ():
            logger.log_metrics(scalars, trainer.global_step)
        if self._histograms and trainer.is_global_zero:
            boards = list(boards_of_loggers(trainer.loggers))
            show_histograms(boards, results, self._choice, "", trainer.global_step)
