"""Health of heads and layers: closed forms against dense float64 matrices."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from torch import Tensor

from attnlens import HeadStatistics, Lens, functional
from attnlens.attention import HeadHealthResult, LayerHealth, Recording
from attnlens.errors import InputError
from tests.algebra.test_hypothesis import Problem, problems
from tests.attention.test_statistics import FAMILIES, PADDED, PROBLEMS, PROJECTION, expected_masks
from tests.support import models, reference
from tests.support.captures import synthetic_capture

NAMES = (
    "max_logit relative_entropy confidence received sink_first sink_mass effective_sink_mass "
    "sink_value_norm effective_rank stable_rank"
).split()


def health_of(*captures: Any, **settings: Any) -> HeadHealthResult:
    observer = HeadStatistics(fields="health", **settings)
    for capture in captures:
        observer.update(capture)
    result = observer.compute()
    assert isinstance(result, HeadHealthResult)
    return result


def dense_health(
    capture: Any, mask: Tensor | None, real: Tensor, sinks: Tensor | None = None
) -> dict[str, Tensor]:
    """The mean of the dense twin over examples, the largest of the logits."""
    bias = 0.0 if capture.masking.bias is None else capture.masking.bias.double()
    logits = capture.scaling * capture.query.double() @ capture.key.double().mT + bias
    attention = reference.attention(
        capture.query, capture.key, mask, capture.scaling, capture.masking.bias
    )
    examples = reference.head_health(
        attention, logits, capture.value, mask, real, capture.projection, sinks
    )
    stacked = {name: torch.stack([e[name] for e in examples]) for name in NAMES}
    return {n: v.amax(0) if n == "max_logit" else v.nanmean(0) for n, v in stacked.items()}


def check(result: HeadHealthResult, row: int, expected: dict[str, Tensor], bar: float) -> None:
    for name in NAMES:
        found = getattr(result, name)[row]
        torch.testing.assert_close(found, expected[name], rtol=bar, atol=bar, msg=name)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", PROBLEMS)
def test_health_equals_the_dense_computation(name: str, dtype: torch.dtype) -> None:
    settings, mask = PROBLEMS[name]
    capture = synthetic_capture(dtype=dtype, **{"projection": PROJECTION, **settings})
    own = capture.kind == "encoder" and mask is not None and mask.shape[0] == 3
    real = PADDED if own else torch.ones(3, capture.shape[2], dtype=torch.bool)
    bar = 1e-10 if dtype == torch.float64 else 2e-5
    check(health_of(capture), 0, dense_health(capture, mask, real), bar)


@pytest.mark.parametrize("name", ["padding", "causal with padding", "window with padding"])
def test_sinks_that_were_named(name: str) -> None:
    settings, mask = PROBLEMS[name]
    sinks = torch.zeros(3, 26, dtype=torch.bool)
    sinks[:, [0, 3, 4]] = True
    capture = synthetic_capture(dtype=torch.float64, projection=PROJECTION, **settings)
    expected = dense_health(capture, mask, PADDED, sinks)
    observer = HeadStatistics(fields="health", sinks=lambda given: given["sinks"])
    observer.begin_forward({"sinks": sinks})
    observer.update(capture)
    check(observer.compute(), 0, expected, 1e-10)  # type: ignore[arg-type]


def test_an_extra_column_is_the_sink() -> None:
    capture = synthetic_capture(
        dtype=torch.float64, projection=PROJECTION, sinks=torch.tensor([2.0, -1.0, 0.0, 5.0])
    )
    object.__setattr__(capture, "context", capture.attention() @ capture.value)
    found = health_of(capture)
    attention = capture.attention()
    torch.testing.assert_close(found.sink_mass[0], 1 - attention.sum(-1).mean((0, 2)))
    assert (found.effective_sink_mass == 0).all() and (found.sink_value_norm == 0).all()
    logits = capture.scaling * capture.query @ capture.key.mT
    torch.testing.assert_close(found.max_logit[0], logits.amax((0, 2, 3)))
    torch.testing.assert_close(found.confidence[0], attention.amax(-1).mean((0, 2)))


def test_capped_logits_are_those_that_the_softmax_gets() -> None:
    capture = synthetic_capture(dtype=torch.float64, softcap=0.5)
    object.__setattr__(capture, "context", capture.attention() @ capture.value)
    logits = 0.5 * torch.tanh(capture.scaling * capture.query @ capture.key.mT / 0.5)
    torch.testing.assert_close(health_of(capture).max_logit[0], logits.amax((0, 2, 3)))


def test_logits_are_missing_where_only_attention_was_seen() -> None:
    capture = synthetic_capture(dtype=torch.float64)
    seen = synthetic_capture(dtype=torch.float64, observed=capture.attention())
    for name in ("query", "grouped_key"):
        object.__setattr__(seen, name, None)
    found, expected = health_of(seen), health_of(capture)
    assert found.max_logit.isnan().all() and expected.max_logit.isfinite().all()
    for name in NAMES[1:]:
        torch.testing.assert_close(getattr(found, name), getattr(expected, name))


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("name", FAMILIES)
def test_models_equal_the_dense_computation(name: str, implementation: str) -> None:
    model, inputs = models.build(name, implementation), models.inputs(name)
    statistics, recording = HeadStatistics(fields="health"), Recording()
    with Lens(model, statistics, recording, **FAMILIES[name]), torch.no_grad():
        model(**inputs)
    result: Any = statistics.compute()
    for capture, mask in zip(recording.captures, expected_masks(name, inputs), strict=True):
        real = torch.ones(2, capture.shape[2], dtype=torch.bool)
        if mask is not None and mask.shape[0] == 2:
            real = inputs["attention_mask"].bool()
        check(result, capture.layer, dense_health(capture, mask, real), bar=2e-5)


@given(problems())
def test_health_of_tensors_equals_the_loop(problem: Problem) -> None:
    value = problem.value + 1.0  # no head without a value
    found = functional.head_health(problem.attention, value, problem.mask)
    batch, _, queries, keys = problem.attention.shape
    seen = problem.dense.any(-1).any(1) & problem.dense.any(-2).any(1)
    for example in range(batch):
        one = slice(example, example + 1)
        real = seen[one]
        dense = problem.dense[one] & real[:, None, :, None]
        if not real.any() or not (dense.any(-1) == real[:, None]).all():
            continue  # heads that count different rows are compared in the captures above
        attention = problem.attention[one] * real[:, None, :, None]
        (expected,) = reference.head_health(attention, None, value[one], dense, real)
        for name in NAMES[1:]:
            if name not in ("received_key", "sink_first"):  # ties
                torch.testing.assert_close(
                    found[name][example],
                    expected[name],
                    rtol=1e-7,
                    atol=1e-7 if "effective" in name else 1e-9,
                    equal_nan=True,
                    msg=f"{name} of {queries} × {keys}",
                )


def test_merged_halves_equal_one_run() -> None:
    first = synthetic_capture(projection=PROJECTION, mask=PADDED[:, None, None])
    second = synthetic_capture(projection=PROJECTION, seed=1)
    one, other = (HeadStatistics(fields="health") for _ in range(2))
    one.update(first)
    other.update(second)
    together = health_of(first, second)
    merged = one.merge(other).compute()
    restored = HeadStatistics(fields="health")
    restored.load_state_dict(one.state_dict())
    for name in NAMES:
        for found in (merged, restored.compute()):
            torch.testing.assert_close(getattr(found, name), getattr(together, name))
    with pytest.raises(InputError, match="fields"):
        HeadStatistics().merge(one)


def test_settings_that_do_not_fit_are_refused() -> None:
    with pytest.raises(InputError, match="health"):
        HeadStatistics(sinks=PADDED)
    with pytest.raises(InputError, match=r"sinks must be bool \[B, K\] = \[3, 26\]"):
        health_of(synthetic_capture(), sinks=PADDED[:, :4])


def twin_of_layer(hidden: Tensor, mask: Tensor) -> dict[str, float]:
    rows = [row.double() for row, real in zip(hidden, mask, strict=True) if real]
    tokens = torch.stack(rows)
    size = tokens.abs().flatten().sort().values
    median = size[(len(size) - 1) // 2].item()
    apart = tokens - tokens.mean(0)
    return {
        "collapse": math.sqrt((apart**2).sum() / (tokens**2).sum()),
        "massive": size[-1].item() / median,
        "large_entries": sum(entry > 100 * median for entry in size.tolist()),
        "massive_entries": sum(entry > 1000 * median for entry in size.tolist()),
    }


def test_layer_health_equals_the_loop(generator: torch.Generator) -> None:
    hidden = torch.randn(3, 26, 16, generator=generator)
    hidden[0, 2, 5], hidden[0, 7, 5], hidden[1, 0, 3] = 3000.0, 250.0, -400.0
    hidden[2, 9, 1] = torch.nan  # padding may hold anything
    found = functional.layer_health(hidden, PADDED)
    for example in range(3):
        for name, value in twin_of_layer(hidden[example], PADDED[example]).items():
            assert found[name][example].item() == pytest.approx(value, rel=1e-5), name
    assert found["massive_share"].nonzero().tolist() == [[0, 5], [1, 3]]
    equal = functional.layer_health(hidden[:1, :1].expand(-1, 4, -1))
    assert equal["collapse"].item() == pytest.approx(0, abs=1e-6)
    nothing = functional.layer_health(hidden, PADDED & False)
    assert all(field.isnan().all() for field in nothing.values())
    with pytest.raises(InputError, match="hidden must be"):
        functional.layer_health(hidden[0])
    with pytest.raises(InputError, match="mask must be"):
        functional.layer_health(hidden, PADDED.long())


def test_layer_health_of_a_model_streams_and_merges() -> None:
    model = models.build("bert")
    batches = [models.text_inputs((19, 6)), models.text_inputs((11, 4), seed=1)]
    whole, one, other = LayerHealth(), LayerHealth(), LayerHealth()
    with torch.no_grad():
        with Lens(model, whole):
            outputs = [model(**b, output_hidden_states=True) for b in batches]
        for part, batch in zip((one, other), batches, strict=True):
            with Lens(model, part):
                model(**batch)
    result = whole.compute()
    merged = one.merge(other).compute()
    for name, values in result.tensors().items():
        torch.testing.assert_close(getattr(merged, name), values)
    assert result.massive_share.shape == (2, models.HIDDEN)
    for layer in range(2):
        twins = [
            twin_of_layer(hidden, mask.bool())
            for output, batch in zip(outputs, batches, strict=True)
            for hidden, mask in zip(
                output.hidden_states[layer + 1], batch["attention_mask"], strict=True
            )
        ]
        for name in twins[0]:
            expected = sum(twin[name] for twin in twins) / len(twins)
            assert getattr(result, name)[layer].item() == pytest.approx(expected, rel=1e-6)
    assert len(result.to_pandas()) == 2
    chosen = LayerHealth(layers=[1])
    with Lens(model, chosen), torch.no_grad():
        model(**batches[0])
    assert [layer for _, layer in chosen.compute().layers] == [1]
