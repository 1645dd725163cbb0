"""Training with Lightning, and what its callback shares with that of the Trainer."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import lightning
import pytest
import torch
from lightning.pytorch.callbacks import Callback, EarlyStopping, ModelCheckpoint
from lightning.pytorch.loggers import TensorBoardLogger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.utils.data import DataLoader

from attnlens import HeadImportance, HeadStatistics, LensCallback
from attnlens.errors import AttnLensWarning, InputError
from attnlens.training import Alarm, LightningCallback
from tests.support.finetuning import NO_DROPOUT, Sentences, classifier, trainer
from tests.support.hooks import is_clean

pytestmark = pytest.mark.filterwarnings("ignore:.*:UserWarning:lightning.*")


class Stop(Exception):
    """Raised on purpose."""


class Task(lightning.LightningModule):
    def __init__(self, fail_at: int | None = None, learning_rate: float = 1e-3, **dropout: float):
        super().__init__()
        self.model = classifier(**dropout)
        self.losses: list[float] = []
        self.fail_at, self.learning_rate = fail_at, learning_rate

    def training_step(self, batch: Any, index: int) -> Any:
        if self.global_step == self.fail_at:
            raise Stop
        loss = self.model(**batch).loss
        self.losses.append(loss.item())
        return loss

    def validation_step(self, batch: Any, index: int) -> None:
        self.log("val_loss", self.model(**batch).loss)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), self.learning_rate)


def fit(
    folder: Path, *callbacks: Callback, task: Task | None = None, resume: Any = None, **options: Any
) -> tuple[lightning.Trainer, Task]:
    """Train on 24 sentences, 4 at a time: 6 steps an epoch; validate on 10."""
    lightning.seed_everything(5, verbose=False)
    settings: dict[str, Any] = {
        "max_epochs": 2,
        "log_every_n_steps": 2,
        "logger": False,
        "enable_checkpointing": any(isinstance(c, ModelCheckpoint) for c in callbacks),
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "accelerator": "cpu",
    }
    task = Task() if task is None else task
    run = lightning.Trainer(
        default_root_dir=folder, callbacks=list(callbacks), **settings | options
    )
    task.train()
    run.fit(
        task,
        DataLoader(Sentences(), 4),
        DataLoader(Sentences(10, seed=1), 4),
        ckpt_path=resume,
    )
    return run, task


def both_observers() -> list[Any]:
    return [HeadStatistics(), HeadImportance()]


def test_losses_and_weights_are_bit_identical(tmp_path: Path) -> None:
    callback = LightningCallback(both_observers(), every_n_steps=2, on="both", keep="all")
    tasks = [fit(tmp_path, *callbacks)[1] for callbacks in ([], [callback])]
    assert tasks[0].losses == tasks[1].losses and len(tasks[0].losses) == 12
    weights = tasks[0].state_dict()
    assert all(torch.equal(t, weights[name]) for name, t in tasks[1].state_dict().items())
    assert callback.observers[0].compute().examples.eq(24).all()
    assert callback.eval_observers[0].compute().examples.eq(2 * 6).all()
    assert is_clean(tasks[1])


@pytest.mark.parametrize("accumulate", [1, 3])
def test_it_sees_what_the_callback_of_the_trainer_sees(tmp_path: Path, accumulate: int) -> None:
    ours = LightningCallback(both_observers(), every_n_steps=1)
    task = Task(learning_rate=0.0, **NO_DROPOUT)
    fit(tmp_path, ours, task=task, max_epochs=1, accumulate_grad_batches=accumulate)
    theirs = LensCallback(both_observers(), every_n_steps=1)
    trainer(tmp_path, theirs, model=classifier(**NO_DROPOUT), learning_rate=0.0).train()
    for one, other in zip(ours.observers, theirs.observers, strict=True):
        for name, tensor in one.compute().tensors().items():
            expected = other.compute().tensors()[name]
            assert torch.allclose(tensor, expected, rtol=1e-5, equal_nan=True), name


def test_two_callbacks_survive_a_kill(tmp_path: Path) -> None:
    def two() -> list[LightningCallback]:
        return [
            LightningCallback(both_observers(), every_n_steps=1, on="both"),
            LightningCallback([HeadStatistics(fields="null_space")], every_n_steps=1, layers=[1]),
        ]

    def checkpoints(name: str) -> ModelCheckpoint:
        return ModelCheckpoint(tmp_path / name, save_on_train_epoch_end=True)

    # Lightning restores no random numbers, so a resumed training draws other dropout.
    whole, resumed = two(), two()
    fit(tmp_path, *whole, checkpoints("whole"), task=Task(**NO_DROPOUT))
    with pytest.raises(Stop):
        fit(tmp_path, *two(), checkpoints("killed"), task=Task(fail_at=8, **NO_DROPOUT))
    (saved,) = (tmp_path / "killed").iterdir()
    fit(
        tmp_path,
        *resumed,
        checkpoints("killed"),
        task=Task(**NO_DROPOUT),
        resume=saved,
    )
    for first, second in zip(whole, resumed, strict=True):
        for one, other in zip(
            (*first.observers, *first.eval_observers),
            (*second.observers, *second.eval_observers),
            strict=True,
        ):
            state = one.state_dict()
            assert state.keys() == other.state_dict().keys()
            assert all(torch.equal(t, state[n]) for n, t in other.state_dict().items())

    other = LightningCallback([HeadStatistics()], every_n_steps=7)
    with pytest.raises(InputError, match=r"with observers=.*; here it is"):
        fit(tmp_path, other, resume=saved)
    fit(tmp_path, checkpoints("plain"), max_epochs=1)
    with pytest.warns(AttnLensWarning, match="begin anew"):
        fit(tmp_path, other, resume=next((tmp_path / "plain").iterdir()))


def test_validation_scalars_stop_early_and_logs_reach_tensorboard(tmp_path: Path) -> None:
    metric = "val_attnlens/entropy/layer_01/mean"
    callback = LightningCallback(both_observers(), every_n_steps=1, on="both")
    stopping = EarlyStopping(metric, patience=0, min_delta=10.0)
    logger = TensorBoardLogger(tmp_path)
    run, _ = fit(tmp_path, stopping, callback, logger=logger, max_epochs=5)
    assert run.current_epoch == 1 or run.global_step == 12
    assert metric in run.callback_metrics
    events = EventAccumulator(logger.log_dir).Reload()
    steps = [event.step for event in events.Scalars("attnlens/importance/layer_01/mean")]
    assert steps == list(range(2, run.global_step + 1, 2))
    tags = events.Tags()
    assert "attnlens/entropy/layer_00" in tags["histograms"]
    assert "val_attnlens/entropy/layer_00" in tags["histograms"]
    assert metric in tags["scalars"] and "attnlens/entropy" in tags["images"]


def test_nothing_is_left_after_an_exception(tmp_path: Path) -> None:
    callback, task = LightningCallback(both_observers(), every_n_steps=1), Task(fail_at=3)
    with pytest.raises(Stop):
        fit(tmp_path, callback, task=task)
    assert is_clean(task)
    _, task = fit(tmp_path, callback)
    assert is_clean(task) and callback.observers[0].compute().examples.eq(48).all()


def test_alarms_end_the_training(tmp_path: Path) -> None:
    callback = LightningCallback(every_n_steps=1, alarms=[Alarm("entropy", above=0.0, stop=True)])
    with pytest.warns(AttnLensWarning, match="entropy of layer 00, head 00"):
        run, _ = fit(tmp_path, callback)
    assert run.global_step < 12
    twin = copy.deepcopy(callback)
    assert twin.settings == callback.settings and twin.state_key == callback.state_key
