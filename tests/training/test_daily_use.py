"""What a person meets who trains every day: runs, trials, observers, metrics, other trainers."""

from __future__ import annotations

import copy
import pickle
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from torch import Tensor, nn
from transformers import EarlyStoppingCallback

from attnlens import (
    HeadImportance,
    HeadStatistics,
    HiddenTokenAttribution,
    LabelAttention,
    LensCallback,
    TokenSaliency,
)
from attnlens.capture import Capture
from attnlens.errors import AttnLensWarning, CaptureError, InputError
from attnlens.files import load_state
from tests.support import models
from tests.support.finetuning import NO_DROPOUT, classifier, losses, scalars, trainer
from tests.support.hooks import is_clean

# Runs


def test_every_run_begins_at_zero(tmp_path: Path) -> None:
    callback, over = LensCallback(every_n_steps=1), LensCallback(every_n_steps=1, over_runs=True)
    run = trainer(tmp_path, callback, over, num_train_epochs=1)
    for count in (1, 2, 3):
        run.train()
        assert callback.observers[0].compute().examples.eq(24).all()
        assert over.observers[0].compute().examples.eq(24 * count).all()


def test_evaluations_before_a_training_do_not_count(tmp_path: Path) -> None:
    callback = LensCallback(every_n_steps=1, on="both")
    run = trainer(tmp_path, callback)
    run.evaluate()
    assert callback.eval_observers[0].compute().examples.eq(10).all()
    run.train()
    assert not callback.eval_observers[0].sums
    run.evaluate()
    assert callback.eval_observers[0].compute().examples.eq(10).all()


def other_heads(heads: int) -> nn.Module:
    config = hf.BertConfig(**{**models.TEXT, "num_attention_heads": heads})
    return models.initialise(hf.BertForSequenceClassification, config)


@pytest.mark.parametrize("over_runs", [False, True])
def test_trials_with_other_heads(tmp_path: Path, over_runs: bool) -> None:
    """Totals over runs of different shapes cannot be added up; the training goes on."""
    callback = LensCallback(every_n_steps=1, keep="all", over_runs=over_runs)
    run = trainer(tmp_path, callback)
    counts = iter((4, 2))
    run.model_init = lambda: other_heads(next(counts))
    for heads in (4, 2):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            run.train()
        told = [str(one.message) for one in caught if one.category is AttnLensWarning]
        assert any("Use one observer per model" in text for text in told) == (
            over_runs and heads == 2
        )
        assert run.state.global_step == 6
        if not over_runs:
            assert callback.observers[0].compute().entropy.shape == (2, heads)
            names = {name.split("/")[-1] for name in scalars(run)[6] if "/entropy/" in name}
            assert names == {"mean", *(f"head_{head:02d}" for head in range(heads))}


def test_the_state_of_a_trial_lies_in_the_folder_of_the_trial(tmp_path: Path) -> None:
    callback = LensCallback(every_n_steps=1)
    run = trainer(tmp_path, callback, save_strategy="steps", save_steps=3)
    run._get_output_dir = lambda trial: str(tmp_path / "run-7")
    run.train()
    (file,) = tmp_path.rglob("checkpoint-3/attnlens*")
    assert file.parent == tmp_path / "run-7" / "checkpoint-3"
    assert load_state(file)[1]["settings"]["every_n_steps"] == "1"


# Observers


def grouped() -> LabelAttention:
    return LabelAttention(lambda inputs: inputs["input_ids"] % 2, ("even", "odd"))


@pytest.mark.parametrize(
    ("observer", "on", "expected"),
    [
        (HeadStatistics(), "train", "attnlens/entropy/layer_01/mean"),
        (HeadImportance(), "train", "attnlens/importance/layer_01/mean"),
        (grouped(), "train", "attnlens/effective/odd/layer_01/head_03"),
        (grouped(), "eval", "eval_attnlens/raw/even/layer_00/mean"),
        (TokenSaliency(), "train", "attnlens/norm/layer_01/mean"),
        (HiddenTokenAttribution(), "eval", "eval_attnlens/own/layer_01/mean"),
        (HiddenTokenAttribution(), "train", "attnlens/own/layer_00/mean"),
    ],
)
def test_every_observer_has_scalars(tmp_path: Path, observer: Any, on: Any, expected: str) -> None:
    callback = LensCallback([observer], every_n_steps=2, on=on, keep="all")
    run = trainer(
        tmp_path, callback, model=classifier(**NO_DROPOUT), eval_strategy="steps", eval_steps=6
    )
    run.train()
    logged = scalars(run)[6]
    result = observer.compute()
    assert expected in logged
    name = expected.split("/")[1]
    if name == "own":
        own = {place: logged[f"{expected[:-6]}{place}/mean"] for place in (0, 1)}
        assert all(0 < value < 1 for value in own.values())
        if on == "eval":  # one evaluation, so that the totals are what was logged
            assert list(own.values()) == result.own[:, 0].tolist()
    assert is_clean(run.model)


def test_label_scalars_are_those_of_the_result(tmp_path: Path) -> None:
    observer = grouped()
    callback = LensCallback([observer], every_n_steps=1, on="eval", keep="all")
    metrics = trainer(tmp_path, callback).evaluate()
    result = observer.compute()
    for layer in range(2):
        for head in range(4):
            for place, label in enumerate(("even", "odd")):
                name = f"eval_attnlens/raw/{label}/layer_{layer:02d}/head_{head:02d}"
                assert metrics[name] == result.raw[layer, head, place].item()


def test_attribution_under_dropout_is_refused_before_the_training(tmp_path: Path) -> None:
    callback = LensCallback([HiddenTokenAttribution()], every_n_steps=1)
    with pytest.raises(InputError, match=r'dropout draws anew.*on="eval"'):
        trainer(tmp_path, callback)
    callback = LensCallback([HiddenTokenAttribution()], every_n_steps=1, on="eval")
    trainer(tmp_path, callback).train()


class Failing(HeadStatistics):
    """Fails in the second layer of the second and the third step looked at."""

    calls = 0

    def update(self, capture: Capture) -> None:
        type(self).calls += 1
        if type(self).calls in (4, 6):
            raise CaptureError("no luck")
        super().update(capture)


class FailingBackward(HeadImportance):
    calls = 0

    def update_gradient(self, capture: Capture, gradient: Tensor) -> None:
        type(self).calls += 1
        if type(self).calls == 3:
            raise RuntimeError("no luck")
        super().update_gradient(capture, gradient)


@pytest.mark.parametrize("kind", [Failing, FailingBackward])
def test_an_error_of_ours_ends_no_training(tmp_path: Path, kind: Any) -> None:
    kind.calls = 0
    plain = trainer(tmp_path, seed=3)
    plain.train()
    callback = LensCallback([kind()], every_n_steps=1)
    run = trainer(tmp_path, callback, seed=3)
    with pytest.warns(AttnLensWarning, match=r"saw nothing after an error in it.*no luck"):
        run.train()
    assert losses(run) == losses(plain) and run.state.global_step == 6
    weights = plain.model.state_dict()
    assert all(torch.equal(t, weights[name]) for name, t in run.model.state_dict().items())
    # The steps that failed are left out whole: no layer counts more examples than another.
    failed = 2 if kind is Failing else 1
    assert callback.observers[0].compute().examples.eq(4 * (6 - failed)).all()
    assert is_clean(run.model)


def test_a_lens_that_cannot_open_ends_no_training(tmp_path: Path) -> None:
    run = trainer(tmp_path, LensCallback(every_n_steps=1, layers=[7]))
    with pytest.warns(AttnLensWarning, match="could not be looked at.*7"):
        run.train()
    assert run.state.global_step == 6 and scalars(run) == {}


class Mute(HeadStatistics):
    def compute(self) -> Any:
        raise InputError("too little was seen")


def test_a_window_without_a_result_is_skipped(tmp_path: Path) -> None:
    run = trainer(tmp_path, LensCallback([Mute(), HeadImportance()], every_n_steps=1))
    with pytest.warns(AttnLensWarning, match="Mute has nothing to log.*too little"):
        run.train()
    assert "attnlens/importance/layer_00/mean" in scalars(run)[6]


# Metrics


def test_an_evaluation_scalar_chooses_the_best_model_and_stops_early(tmp_path: Path) -> None:
    metric = "eval_attnlens/entropy/layer_01/mean"
    stopping = EarlyStoppingCallback(early_stopping_patience=1, early_stopping_threshold=10.0)
    run = trainer(
        tmp_path,
        stopping,  # before ours
        LensCallback(every_n_steps=1, on="eval"),
        eval_strategy="steps",
        eval_steps=1,
        save_strategy="steps",
        save_steps=1,
        metric_for_best_model=metric,
        greater_is_better=False,
        load_best_model_at_end=True,
    )
    run.train()
    values = [log[metric] for log in run.state.log_history if metric in log]
    assert run.state.best_metric == min(values) and len(values) == run.state.global_step == 2


def test_an_epoch_that_was_cut_short_does_not_warn(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", AttnLensWarning)
        trainer(tmp_path, LensCallback(every_n_steps=100), max_steps=9).train()
    with pytest.warns(AttnLensWarning, match="step 12"):
        trainer(tmp_path, LensCallback(every_n_steps=100), max_steps=12).train()


def test_pickles_and_copies(tmp_path: Path) -> None:
    callback = LensCallback([HeadStatistics(), HeadImportance()], every_n_steps=1, on="both")
    run = trainer(tmp_path, callback)
    run.train()
    for twin in (copy.deepcopy(callback), pickle.loads(pickle.dumps(callback))):
        expected = callback.observers[0].compute()
        assert torch.equal(twin.observers[0].compute().entropy, expected.entropy)
        assert twin.settings == callback.settings
        again = trainer(tmp_path, twin)
        again.train()
        assert twin.observers[0].compute().examples.eq(24).all()
        assert is_clean(again.model) and is_clean(run.model)
        assert torch.equal(callback.observers[0].compute().entropy, expected.entropy)
