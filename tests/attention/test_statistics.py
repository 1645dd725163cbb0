"""`HeadStatistics`: closed forms against dense float64 matrices."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor

from attnlens import AttnLensError, HeadStatistics, Lens
from attnlens.attention import Recording
from attnlens.attention.statistics import HeadStatisticsResult
from attnlens.errors import AttnLensWarning, InputError
from tests.algebra.test_rowwise import CAUSAL, window
from tests.support import models
from tests.support.captures import dense_statistics, synthetic_capture

EXACT = ["examples", "tokens", "rank", "nullity", "nullity_min", "nullity_max", "simplex_nullity"]
LENGTHS = torch.tensor([26, 15, 5])
PADDED = torch.arange(26) < LENGTHS[:, None]
PADDING = PADDED[:, None, None]
PROJECTION = torch.randn(4, 8, 32, generator=torch.Generator().manual_seed(9))
NULL_SPACE = [*EXACT, "skipped", "effective_norm", "output_norm"]
SPECTRUM = [*NULL_SPACE, "condition"]


def check(result: HeadStatisticsResult, row: int, expected: dict[str, Tensor], bar: float) -> None:
    """Compare one layer of a result with the dense twin, field by field."""
    tensors = result.tensors()
    assert set(expected) | {"skipped"} == set(tensors)
    for name, values in expected.items():
        tolerance = 1e-12 if name in EXACT else bar
        torch.testing.assert_close(
            tensors[name][row],
            values,
            rtol=tolerance,
            atol=tolerance,
            msg=lambda m, n=name: f"{n}: {m}",
        )


def statistics_of(*captures: Any, **settings: Any) -> HeadStatisticsResult:
    observer = HeadStatistics(**settings)
    for capture in captures:
        observer.update(capture)
    return observer.compute()


def reduced(rank: int) -> Tensor:
    """A projection whose second head has a smaller rank."""
    projection = PROJECTION.clone()
    projection[1, rank:] = 0
    return projection


PROBLEMS: dict[str, tuple[dict[str, Any], Tensor | None]] = {
    "no mask": ({}, None),
    "no projection": ({"projection": None}, None),
    "rank-deficient projection": ({"projection": reduced(3)}, None),
    "padding": ({"mask": PADDING}, PADDING),
    "padding, rank-deficient projection": ({"mask": PADDING, "projection": reduced(5)}, PADDING),
    "grouped heads": ({"groups": 2, "mask": PADDING}, PADDING),
    "one key head": ({"groups": 4}, None),
    "grouped heads, rank-deficient projection": (
        {"groups": 2, "projection": reduced(2), "mask": PADDING},
        PADDING,
    ),
    "causal": ({"causal": True}, CAUSAL[..., :26, :26]),
    "causal with padding": (
        {"causal": True, "mask": PADDING},
        CAUSAL[..., :26, :26] & PADDING,
    ),
    "window": ({"mask": window(26, 4)[None, None]}, window(26, 4)[None, None]),
    "window with padding": ({"mask": window(26, 7) & PADDING}, window(26, 7) & PADDING),
    "window, grouped heads": (
        {"mask": window(26, 7) & PADDING, "groups": 2},
        window(26, 7) & PADDING,
    ),
    "window, rank-deficient projection": (
        {"mask": window(26, 7) & PADDING, "projection": reduced(3)},
        window(26, 7) & PADDING,
    ),
    "more keys than queries": ({"queries": 9, "mask": PADDING, "kind": "cross"}, PADDING),
    "as many keys as queries, across": ({"mask": PADDING, "kind": "cross"}, PADDING),
    "one mask for each head": (
        {"mask": torch.stack([window(26, r) for r in (2, 9, 30, 5)])[None], "groups": 2},
        torch.stack([window(26, r) for r in (2, 9, 30, 5)])[None],
    ),
    "wide heads": ({"width": 31, "projection": None, "mask": PADDING}, PADDING),
    "heads of one dimension": ({"width": 1, "projection": None, "mask": PADDING}, PADDING),
}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", PROBLEMS)
def test_closed_forms_equal_the_dense_computation(name: str, dtype: torch.dtype) -> None:
    settings, mask = PROBLEMS[name]
    capture = synthetic_capture(dtype=dtype, **{"projection": PROJECTION, **settings})
    own = capture.kind == "encoder" and mask is not None and mask.shape[0] == 3
    real = PADDED if own else torch.ones(3, capture.shape[2], dtype=torch.bool)
    expected = dense_statistics(capture, mask, real)
    check(statistics_of(capture), 0, expected, bar=1e-10 if dtype == torch.float64 else 1e-5)


@pytest.mark.parametrize(("fields", "names"), [("null_space", NULL_SPACE), ("spectrum", SPECTRUM)])
@pytest.mark.parametrize("name", ["padding", "window with padding", "grouped heads", "causal"])
def test_some_fields_alone(name: str, fields: str, names: list[str]) -> None:
    settings, _ = PROBLEMS[name]
    everything, some = (
        statistics_of(synthetic_capture(projection=PROJECTION, **settings), fields=wanted)
        for wanted in ("all", fields)
    )
    for field, values in some.tensors().items():
        expected = everything.tensors()[field]
        if field == "effective_norm":  # rows of which nothing is null are summed apart
            torch.testing.assert_close(values, expected, rtol=1e-7, atol=0)
        elif field in names:
            assert torch.equal(values, expected)
        else:
            assert values.isnan().all()


@pytest.mark.parametrize("lengths", [[8, 5, 3], [8, 26, 3], [1, 8, 1], [0, 5, 8]])
@pytest.mark.parametrize("squeezed", [1.0, 1e-3, 2e-5])
def test_short_examples_have_the_fields_of_the_dense_computation(
    lengths: list[int], squeezed: float
) -> None:
    """Up to D keys, well or badly conditioned, alone and among longer ones."""
    keys = torch.arange(26) < torch.tensor(lengths)[:, None]
    mask = keys[:, None, None]
    capture = synthetic_capture(projection=PROJECTION, mask=mask)
    value = capture.grouped_value
    value[:, :, 1] = value[:, :, 0] + squeezed * value[:, :, 1]
    value = value.masked_fill(~keys[:, None, :, None], 0.0).double()
    weight = PROJECTION.double()
    result = statistics_of(capture, fields="spectrum")
    ratios, ranks = [], []
    for example, length in enumerate(lengths):
        if not length:
            continue
        sigma = torch.linalg.svdvals(value[example] @ weight)
        rank = torch.linalg.matrix_rank(
            value[example], rtol=max(length, 8) * torch.finfo(torch.float32).eps
        )
        ratios.append(sigma[:, 0] / sigma.gather(-1, rank[:, None] - 1)[:, 0])
        ranks.append(rank.double())
    assert torch.equal(result.rank[0], torch.stack(ranks).mean(0))
    torch.testing.assert_close(result.condition[0], torch.stack(ratios).mean(0), rtol=1e-5, atol=0)


@pytest.mark.parametrize("dropout", [0.0, 0.4])
def test_fields_do_not_depend_on_how_the_context_is_had(dropout: float) -> None:
    """With dropout the context is not A V and must be recomputed, not read."""
    clean = synthetic_capture(projection=PROJECTION, mask=PADDING)
    spoilt = synthetic_capture(projection=PROJECTION, mask=PADDING, dropout=dropout)
    if dropout:
        spoilt.context.mul_(torch.rand(spoilt.context.shape))
    first, second = statistics_of(clean).tensors(), statistics_of(spoilt).tensors()
    for name, values in first.items():
        torch.testing.assert_close(second[name], values, rtol=2e-6, atol=2e-6)


CAUSAL_DECODER = {"kinds": "decoder"}
FAMILIES: dict[str, dict[str, Any]] = {
    "bert": {},
    "modernbert": {},
    "t5": {},
    "eurobert": {},
    "bart": CAUSAL_DECODER,
    "vit": {},
}


def expected_masks(name: str, inputs: dict[str, Tensor]) -> list[Tensor | None]:
    """The mask of every layer, from the model's inputs and documentation."""
    if name == "vit":
        return [None, None]
    if name == "bart":
        size = inputs["decoder_input_ids"].shape[1]
        return [torch.ones(size, size, dtype=torch.bool).tril()[None, None]] * 2
    padding = inputs["attention_mask"].bool()[:, None, None]
    size = padding.shape[-1]
    return [padding & window(size, 4) if name == "modernbert" else padding, padding]


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("name", FAMILIES)
def test_models_equal_the_dense_computation(name: str, implementation: str) -> None:
    model, inputs = models.build(name, implementation), models.inputs(name)
    statistics, recording = HeadStatistics(), Recording()
    with Lens(model, statistics, recording, **FAMILIES[name]), torch.no_grad():
        model(**inputs)
    result = statistics.compute()
    assert [layer for _, layer in result.layers] == [0, 1]
    assert result.value_space == ("T", "T")
    for capture, mask in zip(recording.captures, expected_masks(name, inputs), strict=True):
        real = torch.ones(2, capture.shape[2], dtype=torch.bool)
        if mask is not None and mask.shape[0] == 2:
            real = inputs["attention_mask"].bool()
        check(result, capture.layer, dense_statistics(capture, mask, real), bar=1e-5)


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("prepare", ["bfloat16", "train"])
def test_low_precision_and_dropout_are_recomputed(prepare: str, implementation: str) -> None:
    """In bfloat16, and of A before dropout in training."""
    model, inputs = models.build("bert", implementation), models.inputs("bert")
    model.to(torch.bfloat16) if prepare == "bfloat16" else model.train()
    statistics, recording = HeadStatistics(), Recording()
    with Lens(model, statistics, recording):
        model(**inputs)
    for capture in recording.captures:
        assert (capture.dropout > 0) == (prepare == "train")
        real = inputs["attention_mask"].bool()
        expected = dense_statistics(capture, real[:, None, None], real)
        check(statistics.compute(), capture.layer, expected, bar=1e-5)


def halves() -> tuple[Any, Any, Any]:
    """Two calls of other lengths, and a dense twin of both together."""
    first = synthetic_capture(projection=PROJECTION, mask=PADDING)
    second = synthetic_capture(projection=PROJECTION, mask=PADDING.flip(0), seed=1)
    return first, second, statistics_of(first, second)


def assert_same(first: HeadStatisticsResult, second: HeadStatisticsResult) -> None:
    assert first.layers == second.layers and first.value_space == second.value_space
    for name, values in first.tensors().items():
        torch.testing.assert_close(
            second.tensors()[name], values, rtol=1e-14, atol=0, equal_nan=True
        )


def test_merged_halves_equal_one_run() -> None:
    first, second, together = halves()
    one, other = HeadStatistics(), HeadStatistics()
    one.update(first)
    other.update(second)
    assert one.merge(other) is one
    assert_same(one.compute(), together)
    assert_same(other.compute(), statistics_of(second))
    empty = HeadStatistics().merge(one)
    assert_same(empty.compute(), together)
    one.update(first)  # merging copied, so this changes nothing in `empty`
    assert_same(empty.compute(), together)


def test_pooled_correlation_spans_examples() -> None:
    first, second, together = halves()
    both = synthetic_capture(batch=6)
    joined = {
        name: torch.cat([getattr(first, name), getattr(second, name)])
        for name in ("query", "grouped_key", "grouped_value", "context")
    }
    for name, tensor in joined.items():
        object.__setattr__(both, name, tensor)
    mask = torch.cat([PADDING, PADDING.flip(0)])
    expected = dense_statistics(both, mask, mask[:, 0, 0])
    for name in ("pooled_correlation", "correlation"):
        found = together.tensors()[name][0]
        torch.testing.assert_close(found, expected[name], rtol=2e-5, atol=2e-5)
    assert (expected["pooled_correlation"] - expected["correlation"]).abs().max() > 1e-3


def test_state_survives_a_round_trip() -> None:
    first, second, together = halves()
    observer = HeadStatistics()
    observer.update(first)
    restored = HeadStatistics()
    restored.load_state_dict(observer.state_dict())
    restored.update(second)
    assert_same(restored.compute(), together)
    assert_same(observer.compute(), statistics_of(first))


@pytest.mark.parametrize("where", ["grouped_value", "query", "context"])
@pytest.mark.parametrize(
    "mask", [None, PADDING, window(26, 7)[None, None]], ids=["no", "pad", "row"]
)
def test_examples_that_are_not_finite_are_left_out(mask: Tensor | None, where: str) -> None:
    capture = synthetic_capture(projection=PROJECTION, mask=mask)
    getattr(capture, where)[1, :, 2] = torch.nan
    if where != "context":  # what the model itself would have made of it
        capture.context[1] = torch.nan
    observer = HeadStatistics()
    observer.update(capture)
    with pytest.warns(AttnLensWarning, match=r"1 example\(s\).*layer 0, head 0"):
        result = observer.compute()
    assert result.examples.tolist() == [[2.0] * 4]
    assert result.skipped.tolist() == [[1.0] * 4]
    good = synthetic_capture(projection=PROJECTION, mask=mask)
    for name in ("query", "grouped_key", "grouped_value", "context"):
        object.__setattr__(good, name, getattr(good, name)[[0, 2]])
    if mask is PADDING:
        object.__setattr__(good.masking, "mask", mask[[0, 2]])
    for name, values in statistics_of(good).tensors().items():
        if name != "skipped":
            torch.testing.assert_close(result.tensors()[name], values, rtol=1e-12, atol=1e-12)


def test_an_example_of_padding_alone_does_not_count() -> None:
    padded = PADDED.clone()
    padded[1] = False
    capture = synthetic_capture(projection=PROJECTION, mask=padded[:, None, None])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        result = statistics_of(capture)
    assert result.examples.tolist() == [[2.0] * 4]
    check(result, 0, dense_statistics(capture, padded[:, None, None], padded), bar=1e-5)


def test_nothing_seen_is_an_error() -> None:
    with pytest.raises(AttnLensError, match="no attention call"):
        HeadStatistics().compute()
    with pytest.raises(InputError, match="fields"):
        HeadStatistics(fields="some")  # type: ignore[arg-type]


def test_layers_of_other_widths_are_padded_with_nan() -> None:
    narrow = synthetic_capture(heads=2)
    object.__setattr__(narrow, "layer", 1)
    result = statistics_of(synthetic_capture(), narrow)
    assert result.rank[0].isfinite().all()
    assert result.rank[1].isfinite().tolist() == [True, True, False, False]
    plain: Any = result.to_dict()
    assert plain["rank"][1][2] is None
    with pytest.raises(InputError, match="one observer per model"):
        observer = HeadStatistics()
        observer.update(synthetic_capture())
        observer.update(synthetic_capture(heads=2))
