"""Alarms: they name the head that collapses, within their window, and stay silent otherwise."""

from __future__ import annotations

import math
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import TrainerCallback

from attnlens import HeadImportance, LensCallback, monitor
from attnlens.attention.importance import HeadImportanceResult
from attnlens.errors import AttnLensWarning, InputError
from attnlens.training import Alarm
from attnlens.training.alarms import AlarmBell
from tests.support.finetuning import NO_DROPOUT, Sentences, classifier, scalars, trainer

LAYER, HEAD = 1, 2


class ScaleLogits(TrainerCallback):
    """Scale the logits of one head up, from one step on."""

    def __init__(self, at: int, factor: float = 1e4) -> None:
        self.at, self.factor = at, factor

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self.at:
            query = kwargs["model"].bert.encoder.layer[LAYER].attention.self.query
            rows = slice(HEAD * query.out_features // 4, (HEAD + 1) * query.out_features // 4)
            with torch.no_grad():
                query.weight[rows] *= self.factor


def told(caught: list[warnings.WarningMessage]) -> list[str]:
    return [str(one.message) for one in caught if "since step" in str(one.message)]


@pytest.mark.parametrize("collapse", [True, False])
def test_an_entropy_collapse_is_told_of_its_head_within_the_window(
    tmp_path: Path, collapse: bool
) -> None:
    alarms = [Alarm("entropy", below=0.1, for_steps=4), Alarm("entropy", above=50.0)]
    callback = LensCallback(every_n_steps=1, alarms=alarms)
    others = [ScaleLogits(at=6)] if collapse else []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run = trainer(tmp_path, *others, callback, num_train_epochs=4)
        run.train()
    event = f"attnlens/alarm/entropy/layer_{LAYER:02d}/head_{HEAD:02d}"
    events = [
        (step, name) for step, logs in scalars(run).items() for name in logs if "/alarm/" in name
    ]
    assert events == ([(10, event)] if collapse else [])  # since step 6, for 4 steps
    assert len(told(caught)) == collapse
    if collapse:
        assert "entropy of layer 01, head 02 is" in told(caught)[0]
        assert "at or below 0.1 since step 6 (now step 10)" in told(caught)[0]
    assert run.state.global_step == 24


def test_an_alarm_stops_the_training_on_request(tmp_path: Path) -> None:
    alarm = Alarm("entropy", below=0.1, for_steps=4, stop=True)
    callback = LensCallback(every_n_steps=1, alarms=[alarm])
    run = trainer(tmp_path, ScaleLogits(at=6), callback, num_train_epochs=4)
    with pytest.warns(AttnLensWarning, match="layer 01, head 02"):
        run.train()
    assert run.state.global_step == 10
    with warnings.catch_warnings():
        warnings.simplefilter("error", AttnLensWarning)
        again = trainer(tmp_path, callback)  # the next run is another
        again.train()
    assert again.state.global_step == 6


def test_a_head_without_importance_for_an_epoch(tmp_path: Path) -> None:
    model = classifier(**NO_DROPOUT)
    projection = model.bert.encoder.layer[LAYER].attention.output.dense
    width = projection.in_features // 4
    columns = slice(HEAD * width, (HEAD + 1) * width)
    with torch.no_grad():
        projection.weight[:, columns] = 0.0
    projection.weight.register_hook(lambda gradient: mask(gradient, columns))
    alarm = Alarm("importance", below=0.0, for_epochs=1)
    callback = LensCallback([HeadImportance()], every_n_steps=1, alarms=[alarm])
    run = trainer(tmp_path, callback, model=model, num_train_epochs=2, weight_decay=0.0)
    with pytest.warns(AttnLensWarning, match="importance of layer 01, head 02 is 0,"):
        run.train()
    events = {name for logs in scalars(run).values() for name in logs if "/alarm/" in name}
    assert events == {"attnlens/alarm/importance/layer_01/head_02"}
    assert "attnlens/alarm/importance/layer_01/head_02" in scalars(run)[6]


def mask(gradient: torch.Tensor, columns: slice) -> torch.Tensor:
    gradient = gradient.clone()
    gradient[:, columns] = 0.0
    return gradient


def test_an_alarm_goes_on_after_a_resume(tmp_path: Path) -> None:
    alarm = Alarm("entropy", above=0.0, for_steps=5)
    options = {"save_strategy": "steps", "save_steps": 4}
    trainer(tmp_path, LensCallback(every_n_steps=1, alarms=[alarm]), max_steps=4, **options).train()
    run = trainer(tmp_path, LensCallback(every_n_steps=1, alarms=[alarm]), max_steps=6, **options)
    with pytest.warns(AttnLensWarning, match=r"since step 0 \(now step 6\)"):
        run.train(resume_from_checkpoint=True)


def result(*values: float) -> HeadImportanceResult:
    row = torch.tensor([values], dtype=torch.float64)
    return HeadImportanceResult((("encoder", 0),), (), row, row, row, row, row)


def test_a_value_must_stay_beyond_the_bound() -> None:
    bell = AlarmBell([Alarm("importance", above=2.0, for_steps=4)])
    events = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", AttnLensWarning)
        for step, value in enumerate((2.0, 1.0, 3.0, math.nan, 3.0, 3.0), 1):
            events.append(bell.hear([result(value, 0.0)], (2.0 * step, 0.0)))
    name = "attnlens/alarm/importance/layer_00/head_00"
    assert events == [{}, {}, {}, {}, {name: 3.0}, {}]  # NaN says nothing, and once is enough


def test_a_plain_loop_has_alarms_too() -> None:
    model = classifier(**NO_DROPOUT)
    alarm = Alarm("entropy", above=0.0, for_steps=3, stop=True)
    with monitor(model, every=1, alarms=[alarm]) as heads:
        for step in range(1, 6):
            model(**Sentences().batch(0, 1)).loss.backward()
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                logged = heads.scalars()
            assert len(told(caught)) == (8 if step == 3 else 0)
            assert ("attnlens/alarm/entropy/layer_00/head_00" in logged) == (step == 3)
            assert heads.should_stop == (step >= 3)
            model.zero_grad()


@pytest.mark.parametrize(
    "arguments",
    [{}, {"above": 1.0, "below": 0.0}, {"above": math.nan}, {"above": 1.0, "for_steps": -1}],
)
def test_alarms_that_make_no_sense(arguments: dict[str, Any]) -> None:
    with pytest.raises(InputError, match="An alarm"):
        Alarm("entropy", **arguments)
