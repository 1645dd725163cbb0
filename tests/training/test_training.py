"""Training with a lens: the Trainer, plain loops, and everything people train with."""

from __future__ import annotations

import gc
import json
import random
import subprocess
import sys
import warnings
import weakref
from collections.abc import Iterator
from inspect import signature
from pathlib import Path
from typing import Any

import accelerate
import peft
import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import Tensor, nn
from transformers import Trainer, TrainerCallback, TrainingArguments

import attnlens
from attnlens import (
    AttnLensError,
    EffectiveAttention,
    HeadImportance,
    HeadStatistics,
    LabelAttention,
    Lens,
    LensCallback,
    TokenIdentifiability,
    TokenSaliency,
    monitor,
)
from attnlens.errors import AttnLensWarning, InputError
from attnlens.files import load_state
from attnlens.training.callback import NAME
from tests.support import models
from tests.support.finetuning import (
    NO_DROPOUT,
    Sentences,
    classifier,
    every_observer,
    losses,
    scalars,
    trainer,
)
from tests.support.hooks import hooks, is_clean, patched

LAYERS, HEADS = 2, 4
MEANS = "effective_fraction effective_norm entropy output_norm".split()


def both_observers() -> list[Any]:
    return [HeadStatistics(), HeadImportance()]


def same(first: Any, second: Any, rtol: float = 0.0) -> None:
    """Assert that two results hold the same numbers."""
    assert first.layers == second.layers
    for name, tensor in first.tensors().items():
        other = second.tensors()[name]
        assert torch.allclose(tensor, other, rtol=rtol, atol=0, equal_nan=True), name


def alone(model: nn.Module, *batches: dict[str, Tensor]) -> list[Any]:
    """What both observers say of batches in a plain loop without an optimizer."""
    observers = both_observers()
    with Lens(model, *observers):
        for batch in batches:
            model(**batch).loss.backward()
    return [observer.compute() for observer in observers]


@pytest.mark.parametrize("options", [{}, {"eval_strategy": "steps", "eval_steps": 3}])
def test_losses_and_weights_are_bit_identical(tmp_path: Path, options: dict[str, Any]) -> None:
    callback = LensCallback(both_observers(), every_n_steps=2, on="both", keep="all")
    runs = []
    for callbacks in ([], [callback]):
        run = trainer(tmp_path, *callbacks, seed=5, num_train_epochs=2, **options)
        run.train()
        runs.append(run)
    assert losses(runs[0]) == losses(runs[1]) and len(losses(runs[0])) > 6
    weights = [run.model.state_dict() for run in runs]
    assert all(torch.equal(tensor, weights[1][name]) for name, tensor in weights[0].items())
    assert not torch.equal(
        weights[0]["classifier.weight"], classifier().state_dict()["classifier.weight"]
    )
    assert callback.observers[0].compute().examples.eq(24).all()
    assert is_clean(runs[1].model)


def test_scalars_reach_tensorboard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(tmp_path / "events"))
    callback = LensCallback(both_observers(), every_n_steps=1, on="both", keep="all")
    run = trainer(
        tmp_path, callback, report_to=["tensorboard"], eval_strategy="steps", eval_steps=4
    )
    run.train()
    events = EventAccumulator(str(tmp_path / "events"))
    events.Reload()
    tags = events.Tags()
    for name in (*MEANS, "importance"):
        for layer in range(LAYERS):
            label = f"attnlens/{name}/layer_{layer:02d}"
            for leaf in (*(f"head_{head:02d}" for head in range(HEADS)), "mean"):
                read = events.Scalars(f"train/{label}/{leaf}")
                assert [event.step for event in read] == [2, 4, 6]
                logged = [scalars(run)[step][f"{label}/{leaf}"] for step in (2, 4, 6)]
                assert [event.value for event in read] == pytest.approx(logged, rel=1e-6)
            assert label in tags["histograms"]
            heads = events.Histograms(label)[0].histogram_value
            assert heads.num == HEADS
    assert "eval/attnlens/entropy/layer_00/head_00" in tags["scalars"]
    assert "eval/attnlens/importance/layer_00/head_00" not in tags["scalars"]
    assert all(
        event.value == 8 for event in events.Scalars("train/attnlens/HeadImportance/examples")
    )


def test_each_log_tells_of_its_own_steps(tmp_path: Path) -> None:
    """With a learning rate of zero the model stays, so each log can be computed apart."""
    callback = LensCallback(both_observers(), every_n_steps=2, keep="all")
    model = classifier(**NO_DROPOUT)
    run = trainer(tmp_path, callback, model=model, learning_rate=0.0)
    run.train()
    found = scalars(run)
    assert sorted(found) == [2, 4, 6]
    data = Sentences()
    for step, first in ((2, 0), (4, 8), (6, 16)):  # the steps 0, 2, 4 were looked at
        statistics, gates = alone(model, data.batch(*range(first, first + 4)))
        assert found[step]["attnlens/HeadStatistics/examples"] == 4
        for head in range(HEADS):
            name = f"layer_01/head_{head:02d}"
            exact = (statistics.entropy[1, head].item(), gates.importance[1, head].item())
            logged = [found[step][f"attnlens/{q}/{name}"] for q in ("entropy", "importance")]
            assert logged == pytest.approx(exact, rel=1e-5)
        mean = found[step]["attnlens/entropy/layer_01/mean"]
        assert mean == pytest.approx(statistics.entropy[1].mean().item(), rel=1e-6)
    whole = alone(model, *(data.batch(*range(first, first + 4)) for first in (0, 8, 16)))
    for observer, expected in zip(callback.observers, whole, strict=True):
        same(observer.compute(), expected, rtol=1e-5)


@pytest.mark.parametrize(
    ("keep", "leaves"),
    [
        ("summary", {"mean"}),
        ([(1, 2)], {"mean", "head_02"}),
        ("all", {"mean", "head_00", "head_01", "head_02", "head_03"}),
    ],
)
def test_keep(tmp_path: Path, keep: Any, leaves: set[str]) -> None:
    callback = LensCallback(keep=keep, quantities=["entropy", "nullity"], every_n_steps=3)
    run = trainer(tmp_path, callback)
    run.train()
    names = {name for logs in scalars(run).values() for name in logs}
    assert {n.split("/")[1] for n in names} == {"HeadStatistics", "entropy", "nullity"}
    assert {n.split("/")[3] for n in names if "layer_01" in n} == leaves
    kept = {"mean"} if isinstance(keep, list) else leaves
    assert {n.split("/")[3] for n in names if "layer_00" in n} == kept


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"every_n_steps": 0}, "every_n_steps"),
        ({"every_n_steps": True}, "every_n_steps"),
        ({"on": "test"}, "on must be"),
        ({"keep": "some"}, "keep must be"),
        ({"keep": [3]}, "keep must be"),
        ({"observers": [EffectiveAttention()]}, "sums"),
        ({"observers": [TokenIdentifiability()]}, "sums"),
        ({"observers": [TokenSaliency()], "on": "eval"}, "TokenSaliency needs a backward"),
        ({"observers": [HeadImportance()], "on": "eval"}, "backward"),
    ],
)
def test_bad_arguments(arguments: dict[str, Any], match: str) -> None:
    with pytest.raises(InputError, match=match):
        LensCallback(**arguments)


def test_an_unknown_quantity_is_named(tmp_path: Path) -> None:
    run = trainer(tmp_path, LensCallback(quantities=["entropie"]))
    with pytest.raises(InputError, match=r"entropie.*entropy"):
        run.train()
    assert is_clean(run.model)


# What people train with

CHECKPOINTING = next(  # the argument's name after and before transformers 5.20
    name
    for name in ("activation_checkpointing", "gradient_checkpointing")
    if name in signature(TrainingArguments).parameters
)


@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing(tmp_path: Path, reentrant: bool) -> None:
    results = []
    for options in ({}, {"use_reentrant": reentrant}):
        callback = LensCallback(both_observers(), every_n_steps=1)
        run = trainer(
            tmp_path,
            callback,
            model=classifier(**NO_DROPOUT),
            **{CHECKPOINTING: bool(options), f"{CHECKPOINTING}_kwargs": options},
        )
        before = hooks(run.model)
        run.train()
        results.append([observer.compute() for observer in callback.observers])
        assert not patched()
    assert before == 0
    for plain, checkpointed in zip(*results, strict=True):
        same(plain, checkpointed, rtol=1e-9)
    assert results[1][1].examples.eq(24).all() and results[1][1].seen.eq(24).all()
    assert results[1][1].importance.gt(0).all()


@pytest.mark.parametrize("by_trainer", [False, True])
def test_gradient_accumulation(tmp_path: Path, by_trainer: bool) -> None:
    """Micro-batches count one by one, and a factor that the Trainer applies is divided out."""
    results = []
    for accumulate in (1, 3):
        callback = LensCallback(both_observers(), every_n_steps=1)
        run = trainer(
            tmp_path,
            callback,
            model=classifier(**NO_DROPOUT),
            learning_rate=0.0,
            gradient_accumulation_steps=accumulate,
        )
        run.model_accepts_loss_kwargs = not by_trainer  # else the model normalises
        run.train()
        assert run.state.global_step == 6 // accumulate
        results.append([observer.compute() for observer in callback.observers])
    for single, accumulated in zip(*results, strict=True):
        same(single, accumulated, rtol=1e-5)


def test_only_chosen_steps_of_accumulated_ones(tmp_path: Path) -> None:
    callback = LensCallback(every_n_steps=2)
    trainer(tmp_path, callback, gradient_accumulation_steps=2).train()  # steps 0, 1, 2
    assert callback.observers[0].compute().examples.eq(2 * 2 * 4).all()


def test_autocast(tmp_path: Path) -> None:
    results = []
    for bf16 in (False, True):
        callback = LensCallback(both_observers(), every_n_steps=1)
        run = trainer(tmp_path, callback, model=classifier(**NO_DROPOUT), bf16=bf16)
        run.train()
        results.append([observer.compute() for observer in callback.observers])
    exact, rounded = results
    assert not torch.equal(exact[0].entropy, rounded[0].entropy)
    assert torch.allclose(exact[0].entropy, rounded[0].entropy, rtol=0.02)
    assert torch.allclose(exact[0].effective_fraction, rounded[0].effective_fraction, rtol=0.02)
    distance = (exact[1].importance - rounded[1].importance).norm() / exact[1].importance.norm()
    assert distance < 0.1


def test_compiled(tmp_path: Path) -> None:
    results, weights = [], []
    for compiled in (False, True):
        callback = LensCallback(both_observers(), every_n_steps=2)
        options = {"torch_compile": True, "torch_compile_backend": "eager"} if compiled else {}
        run = trainer(tmp_path, callback, model=classifier(**NO_DROPOUT), **options)
        run.train()
        weights.append(run.model.state_dict())
        results.append([observer.compute() for observer in callback.observers])
    for plain, compiled_result in zip(*results, strict=True):
        same(plain, compiled_result)
    assert all(torch.equal(tensor, weights[1][name]) for name, tensor in weights[0].items())


def test_low_rank_adapters(tmp_path: Path) -> None:
    config = peft.LoraConfig(task_type="SEQ_CLS", target_modules=["query", "value"], r=2)
    model = peft.get_peft_model(classifier(), config)
    callback = LensCallback(both_observers(), every_n_steps=1)
    run = trainer(tmp_path, callback, model=model)
    run.train()
    statistics, gates = (observer.compute() for observer in callback.observers)
    assert statistics.examples.eq(24).all() and statistics.value_space == ("T", "T")
    assert gates.importance.gt(0).all() and gates.without_gradient == ()
    assert "attnlens/importance/layer_00/mean" in scalars(run)[2]
    assert hooks(run.model) == 0 and not patched()


def test_frozen_encoder_is_said_and_not_logged(tmp_path: Path) -> None:
    model = classifier()
    model.bert.requires_grad_(False)
    callback = LensCallback([HeadImportance()], every_n_steps=2, keep="all")
    run = trainer(tmp_path, callback, model=model)
    with pytest.warns(AttnLensWarning, match="No gradient reached"):
        run.train()
    assert len(callback.observers[0].compute().without_gradient) == LAYERS
    names = {name for logs in scalars(run).values() for name in logs}
    assert names == {"attnlens/HeadImportance/examples", "attnlens/HeadImportance/skipped"}
    assert all(logs["attnlens/HeadImportance/examples"] == 0 for logs in scalars(run).values())


def test_statistics_are_of_attention_before_dropout(tmp_path: Path) -> None:
    model = classifier(hidden_dropout=0.0, attention_dropout=0.5)
    callback = LensCallback(every_n_steps=1)
    trainer(tmp_path, callback, model=model, learning_rate=0.0).train()
    observer = HeadStatistics()
    with Lens(model.eval(), observer), torch.no_grad():
        for first in range(0, 24, 4):
            model(**Sentences().batch(*range(first, first + 4)))
    dropped, plain = callback.observers[0].compute(), observer.compute()
    for name in ("entropy", "attention_norm", "effective_norm", "output_norm", "correlation"):
        first, other = dropped.tensors()[name], plain.tensors()[name]
        assert torch.allclose(first[0], other[0], rtol=1e-5), name  # the first layer's input
        assert not torch.allclose(first[1], other[1], rtol=1e-3), name  # dropout did act


@pytest.mark.parametrize("on", ["train", "eval", "both"])
def test_evaluation_interleaved(tmp_path: Path, on: Any) -> None:
    callback = LensCallback(every_n_steps=2, on=on)
    run = trainer(tmp_path, callback, eval_strategy="steps", eval_steps=2)
    run.train()
    train = [n for logs in scalars(run).values() for n in logs if n.startswith("attnlens/")]
    evaluation = [n for logs in scalars(run).values() for n in logs if n.startswith("eval_")]
    assert bool(train) == (on != "eval") and bool(evaluation) == (on != "train")
    if on != "eval":
        assert callback.observers[0].compute().examples.eq(12).all()
    if on != "train":  # 10 sentences in batches of 4: the first and the third are looked at
        assert callback.eval_observers[0].compute().examples.eq(3 * 6).all()
        before = callback.eval_observers[0].compute().examples.clone()
        metrics = run.evaluate()  # also outside a training
        assert not [name for name in metrics if "attnlens" in name]
        assert torch.equal(callback.eval_observers[0].compute().examples, before + 6)
        assert "eval_attnlens/entropy/layer_00/mean" in run.state.log_history[-1]
        run.predict(Sentences(4))
        assert torch.equal(callback.eval_observers[0].compute().examples, before + 10)
    assert is_clean(run.model)


def test_nan_losses_are_skipped_and_counted(tmp_path: Path) -> None:
    class Broken(Trainer):
        def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
            loss = super().compute_loss(*args, **kwargs)
            return loss * torch.nan if self.state.global_step == 2 else loss

    class Mend(TrainerCallback):
        def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            for parameter in kwargs["model"].parameters():
                if parameter.grad is not None:
                    parameter.grad.nan_to_num_(0.0)

    callback = LensCallback(both_observers(), every_n_steps=1)
    run = trainer(tmp_path, callback, Mend(), kind=Broken, max_grad_norm=0.0)
    run.train()
    found = scalars(run)
    assert [found[step]["attnlens/HeadImportance/skipped"] for step in (2, 4, 6)] == [0, 4, 0]
    assert [found[step]["attnlens/HeadImportance/examples"] for step in (2, 4, 6)] == [8, 4, 8]
    result = callback.observers[1].compute()
    assert result.skipped.eq(4).all() and result.importance.isfinite().all()


def test_weights_that_became_nan_are_skipped_and_counted(tmp_path: Path) -> None:
    class Broken(Trainer):
        def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
            loss = super().compute_loss(*args, **kwargs)
            return loss * torch.nan if self.state.global_step == 2 else loss

    callback = LensCallback(both_observers(), every_n_steps=1)
    with pytest.warns(AttnLensWarning, match="NaN or Inf"):
        trainer(tmp_path, callback, kind=Broken).train()
        statistics, gates = (observer.compute() for observer in callback.observers)
    assert statistics.examples.eq(12).all() and statistics.skipped.eq(12).all()
    assert gates.examples.eq(8).all() and gates.skipped.eq(16).all()
    assert statistics.entropy.isfinite().all() and gates.importance.isfinite().all()


def test_an_epoch_without_a_look_warns(tmp_path: Path) -> None:
    callback = LensCallback(every_n_steps=100)
    with pytest.warns(AttnLensWarning, match="every_n_steps=100 looked at no step") as caught:
        trainer(tmp_path, callback, num_train_epochs=3).train()
    assert len([one for one in caught if one.category is AttnLensWarning]) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error", AttnLensWarning)
        trainer(tmp_path, LensCallback(every_n_steps=6), num_train_epochs=2).train()
        trainer(tmp_path, LensCallback(every_n_steps=100, on="eval"), num_train_epochs=1).train()


# Life cycle


class Stop(Exception):
    """Raised on purpose."""


class Raise(TrainerCallback):
    def __init__(self, event: str, error: type[BaseException]) -> None:
        self.error = error
        setattr(self, event, self._raise)

    def _raise(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        raise self.error


def _fail_forward(run: Trainer, error: type[BaseException]) -> None:
    def fail(*args: Any) -> None:
        if run.state.global_step == 2:
            raise error

    run.model.bert.encoder.layer[1].attention.self.forward = _after(
        run.model.bert.encoder.layer[1].attention.self.forward, fail
    )


def _after(function: Any, then: Any) -> Any:
    def both(*args: Any, **kwargs: Any) -> Any:
        result = function(*args, **kwargs)
        then()
        return result

    return both


def _fail_backward(run: Trainer, error: type[BaseException]) -> None:
    def fail(gradient: Tensor) -> None:
        if run.state.global_step == 2:
            raise error

    run.model.bert.embeddings.word_embeddings.weight.register_hook(fail)


@pytest.mark.parametrize("error", [Stop, KeyboardInterrupt])
@pytest.mark.parametrize("place", ["forward", "backward", "on_step_end", "on_log"])
def test_nothing_is_left_after_an_exception(
    tmp_path: Path, place: str, error: type[BaseException]
) -> None:
    callback = LensCallback(both_observers(), every_n_steps=1)
    others = [Raise(place, error)] if place.startswith("on_") else []
    run = trainer(tmp_path, callback, *others)
    if not others:
        {"forward": _fail_forward, "backward": _fail_backward}[place](run, error)
    with pytest.raises(error):
        run.train()
    assert is_clean(run.model)
    assert all(not lens.active for lens in callback._lenses.values())
    again = trainer(tmp_path, callback)  # the callback can be used again
    again.train()
    assert is_clean(again.model) and len(scalars(again)) == 3
    # The steps of the training that was aborted belong to no log of the next.
    assert all(logs["attnlens/HeadStatistics/examples"] == 8 for logs in scalars(again).values())


def test_a_removed_callback_looks_no_more(tmp_path: Path) -> None:
    callback = LensCallback(every_n_steps=1)
    run = trainer(tmp_path, callback)
    run.remove_callback(callback)
    run.train()
    assert scalars(run) == {}
    with pytest.raises(AttnLensError, match="seen no attention"):
        callback.observers[0].compute()


def test_a_trainer_is_let_go(tmp_path: Path) -> None:
    callback = LensCallback(every_n_steps=2, on="both")
    run = trainer(tmp_path, callback, eval_strategy="epoch")
    run.train()
    alive = weakref.ref(run), weakref.ref(run.model)
    gc.collect()
    gc.disable()
    try:
        del run
        assert not any(reference() for reference in alive)
    finally:
        gc.enable()


def test_a_callback_added_later(tmp_path: Path) -> None:
    run = trainer(tmp_path)
    run.add_callback(LensCallback(every_n_steps=2))
    run.train()
    assert sorted(scalars(run)) == [2, 4, 6]


def test_without_a_trainer_it_says_so() -> None:
    with pytest.raises(AttnLensError, match="found no Trainer"):
        LensCallback().on_init_end(None, None, None)  # type: ignore[arg-type]


# Checkpoints


@pytest.mark.parametrize("save_steps", [2, 3])
def test_resume(tmp_path: Path, save_steps: int) -> None:
    """Saved between two logs (3) or at one (2): the resumed run ends where the whole one does."""
    options = {"save_strategy": "steps", "save_steps": save_steps, "eval_strategy": "steps"}
    whole = LensCallback(both_observers(), every_n_steps=1, on="both")
    run = trainer(tmp_path, whole, eval_steps=2, **options)
    run.train()
    folder = tmp_path / f"checkpoint-{save_steps}"
    assert [path.name for path in folder.glob("attnlens*")] == [NAME]
    assert load_state(folder / NAME)[1] == {"observers": [
        "train HeadStatistics(fields='all', rtol=None)",
        "train HeadImportance()",
        "eval HeadStatistics(fields='all', rtol=None)",
    ]}  # fmt: skip

    resumed = LensCallback(both_observers(), every_n_steps=1, on="both")
    again = trainer(tmp_path, resumed, eval_steps=2, **options)
    again.train(resume_from_checkpoint=str(folder))
    for first, second in zip(
        (*whole.observers, *whole.eval_observers),
        (*resumed.observers, *resumed.eval_observers),
        strict=True,
    ):
        same(first.compute(), second.compute(), rtol=1e-9)
    later = {step: logs for step, logs in scalars(run).items() if step > save_steps}
    for step, logs in later.items():
        assert scalars(again)[step] == pytest.approx(logs, rel=1e-9)


def test_resume_without_a_state_warns(tmp_path: Path) -> None:
    trainer(tmp_path, save_strategy="steps", save_steps=2).train()
    callback = LensCallback(every_n_steps=1)
    run = trainer(tmp_path, callback)
    with pytest.warns(AttnLensWarning, match="observers begin anew"):
        run.train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))
    assert callback.observers[0].compute().examples.eq(8).all()


def test_resume_from_elsewhere(tmp_path: Path) -> None:
    first = LensCallback(every_n_steps=1)
    trainer(tmp_path / "a", first, save_strategy="steps", save_steps=4).train()
    folder = tmp_path / "a" / "checkpoint-4"
    callback = LensCallback(every_n_steps=1)
    callback.load(folder)
    trainer(tmp_path / "b", callback).train(resume_from_checkpoint=str(folder))
    same(callback.observers[0].compute(), first.observers[0].compute(), rtol=1e-9)


def test_a_state_of_other_observers_is_refused(tmp_path: Path) -> None:
    LensCallback([HeadStatistics()]).save(tmp_path)
    with pytest.raises(InputError, match="HeadStatistics"):
        LensCallback([HeadImportance()]).load(tmp_path)
    LensCallback([LabelAttention(label_names=("noun", "verb"))]).save(tmp_path)
    with pytest.raises(InputError, match="holds the state of"):
        LensCallback([LabelAttention(label_names=("verb", "noun"))]).load(tmp_path)
    (tmp_path / NAME).write_bytes(b"short")
    with pytest.raises(InputError, match="not a complete safetensors file"):
        LensCallback().load(tmp_path)
    with pytest.raises(InputError, match="holds no"):
        LensCallback().load(tmp_path / "nowhere")


def test_a_state_with_any_bit_flipped_is_refused(tmp_path: Path) -> None:
    callback = LensCallback(both_observers(), every_n_steps=1)
    trainer(tmp_path, callback).train()
    callback.save(tmp_path)
    content = (tmp_path / NAME).read_bytes()
    header = 8 + int.from_bytes(content[:8], "little")
    chance = random.Random(0)
    for trial in range(200):
        broken = bytearray(content)  # every other flip is in the header, the smaller part
        broken[chance.randrange(len(content) if trial % 2 else header)] ^= 1 << chance.randrange(8)
        (tmp_path / NAME).write_bytes(broken)
        with pytest.raises(AttnLensError, match=NAME):
            LensCallback(both_observers(), every_n_steps=1).load(tmp_path)


# Loops of one's own


def batches(count: int) -> Iterator[dict[str, Tensor]]:
    data = Sentences()
    for step in range(count):
        yield data.batch(*range(4 * (step % 6), 4 * (step % 6) + 4))


def test_monitor(tmp_path: Path) -> None:
    model = classifier(**NO_DROPOUT)
    given = both_observers()
    seen = []
    with monitor(model, *given, every=3, keep=[(0, 1)]) as heads:
        assert heads.scalars() == {}
        for step, batch in enumerate(batches(12)):
            model(**batch).loss.backward()
            model.eval()
            with torch.no_grad():
                model(**batch)  # an evaluation does not count
            model.train()
            if step % 6 == 5:
                seen.append(heads.scalars())
    assert is_clean(model)
    assert len(seen) == 2 and seen[0] == pytest.approx(seen[1], rel=1e-9)
    data = Sentences()
    statistics, gates = alone(model, data.batch(0, 1, 2, 3), data.batch(12, 13, 14, 15))
    entropy = statistics.entropy[0, 1].item()
    assert seen[0]["attnlens/entropy/layer_00/head_01"] == pytest.approx(entropy, rel=1e-6)
    exact = gates.importance[1].mean().item()
    assert seen[0]["attnlens/importance/layer_01/mean"] == pytest.approx(exact, rel=1e-6)
    assert "attnlens/entropy/layer_00/head_00" not in seen[0]
    assert heads.observers == tuple(given)
    assert given[0].compute().examples.eq(16).all()


def test_monitor_of_evaluations_only() -> None:
    model = classifier()
    with monitor(model, every=1, on="eval") as heads:
        for training in (True, False, True, False):
            model.train(training)
            with torch.no_grad():
                model(**Sentences().batch(0, 1))
    assert heads.observers[0].compute().examples.eq(4).all()


def test_several_stacks_are_told_apart() -> None:
    model = models.build("clip")
    with monitor(model, every=1, on="both", quantities=["entropy"]) as heads:
        model(**models.inputs("clip"))
        names = [name for name in heads.scalars() if name.endswith("mean")]
    assert len(names) == len(set(names)) == 2 * LAYERS
    stacks = {name.split("/")[2] for name in names}
    assert len(stacks) == 2 and not any("*" in stack or ".." in stack for stack in stacks)


def test_monitor_that_saw_nothing_warns() -> None:
    model = classifier()
    with pytest.warns(AttnLensWarning, match="in training mode"), monitor(model):
        model.eval()(**Sentences().batch(0))


def test_monitor_leaves_nothing_after_an_exception() -> None:
    model = classifier()
    with pytest.raises(Stop), monitor(model, every=1):
        model(**Sentences().batch(0))
        raise Stop
    assert is_clean(model)


def test_monitor_keeps_nothing() -> None:
    model = classifier()
    observer = HeadImportance()
    with monitor(model, observer, every=1) as heads:
        sizes = set()
        for batch in batches(8):
            model(**batch).loss.backward()
            sizes.add(
                sum(t.numel() for s in heads._recent.observers[0].sums.values() for t in s.values())
            )
            assert heads._lens._tap is not None and heads._lens._tap.gradients is not None
            assert not heads._lens._tap.gradients._waiting
        assert len(sizes) == 1


def test_accelerate() -> None:
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = classifier(**NO_DROPOUT)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    model, optimizer = accelerator.prepare(model, optimizer)
    observer = HeadImportance(loss_scale=1 / accelerator.gradient_accumulation_steps)
    with monitor(model, HeadStatistics(), observer, every=1) as heads:
        for batch in batches(4):
            with accelerator.accumulate(model):
                accelerator.backward(model(**batch).loss)
                optimizer.step()
                optimizer.zero_grad()
        logged = heads.scalars()
    statistics, gates = alone(accelerator.unwrap_model(model), *batches(4))
    assert logged["attnlens/importance/layer_00/mean"] == pytest.approx(
        gates.importance[0].mean().item(), rel=1e-5
    )
    assert logged["attnlens/entropy/layer_00/mean"] == pytest.approx(
        statistics.entropy[0].mean().item(), rel=1e-6
    )


def test_two_processes(tmp_path: Path) -> None:
    """Two processes on half the data each, after `sync()`, are one process on all of it."""
    model = classifier(**NO_DROPOUT)
    expected = LensCallback(every_observer(), every_n_steps=1, keep="all")
    run = trainer(tmp_path, expected, model=model, per_device_train_batch_size=8, learning_rate=0.0)
    run.train()
    arguments = [sys.executable, "-m", "tests.support.two_processes", str(tmp_path)]
    finished = subprocess.run(arguments, capture_output=True, text=True, timeout=1800)
    assert finished.returncode == 0, finished.stderr[-3000:]
    for rank in range(2):
        callback = LensCallback(every_observer(), every_n_steps=1, keep="all")
        callback.load(tmp_path / f"rank{rank}")
        health, gates, *others = callback.observers
        alike = zip(
            [health, *others], [expected.observers[0], *expected.observers[2:]], strict=True
        )
        for one, two in alike:
            same(one.compute(), two.compute(), rtol=1e-5)
        gates = gates.compute()
        assert gates.examples.eq(24).all()
        # Each process averages its loss over half as many examples.
        half = expected.observers[1].compute().importance * 2
        assert torch.allclose(gates.importance, half, rtol=1e-4)
    logs = [json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in range(2)]
    assert logs[0] == logs[1]
    logged = next(iter(scalars(run).values()))
    for name in ("max_logit", "collapse", "layer_fraction", "cancellation", "mixing_ratio"):
        assert f"attnlens/{name}/layer_01/mean" in logged
    assert "attnlens/collapse/layer_01/head_00" not in logged
    for step, scalars_of_step in scalars(run).items():
        for name, value in scalars_of_step.items():
            factor = 2 if "/importance/" in name else 1
            assert logs[0]["trainer"][str(step)][name] == pytest.approx(value * factor, rel=1e-4)
    assert logs[0]["monitor"]["attnlens/HeadStatistics/examples"] == 8


def test_the_callback_is_imported_when_it_is_used() -> None:
    assert attnlens.LensCallback is LensCallback
    with pytest.raises(AttributeError, match="LensCallbac"):
        attnlens.LensCallbac  # noqa: B018
