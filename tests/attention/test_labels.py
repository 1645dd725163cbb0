"""`LabelAttention`: streamed sums against explicit float64 maps."""

from __future__ import annotations

import warnings
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from attnlens import AttnLensError, Capture, LabelAttention, Lens
from attnlens.attention import Recording
from attnlens.attention.labels import LabelAttentionResult
from attnlens.errors import AttnLensWarning, InputError
from tests.attention.test_statistics import (
    CAUSAL_DECODER,
    PADDED,
    PADDING,
    PROBLEMS,
    PROJECTION,
    window,
)
from tests.conftest import Encoder
from tests.support import models, reference, zoo
from tests.support.captures import synthetic_capture

NAMES = ("first", "second", "third")
LABELS = torch.randint(-1, 4, (3, 26), generator=torch.Generator().manual_seed(5))  # 3 is none
MEANS = ("raw", "raw_error", "effective", "effective_error")


def observed(*captures: Capture, labels: Tensor = LABELS) -> LabelAttention:
    observer = LabelAttention(labels, NAMES)
    for capture in captures:
        observer.update(capture)
    return observer


def expected(
    capture: Capture, mask: Tensor | None, real: Tensor, labels: Tensor, count: int
) -> dict[str, np.ndarray]:
    """Means and standard errors from explicit maps, `[H, G]`."""
    attention = reference.attention(
        capture.query, capture.key, mask, capture.scaling, capture.masking.bias
    )
    effective = reference.effective_attention(attention, capture.value, mask, capture.projection)
    found = {}
    for name, maps in (("raw", attention), ("effective", effective)):
        examples = reference.label_attention(maps, labels, real, count)
        found[name] = examples.mean(0)
        found[f"{name}_error"] = examples.std(0, ddof=1) / len(examples) ** 0.5
    return found


def check(result: LabelAttentionResult, row: int, twin: dict[str, np.ndarray], bar: float) -> None:
    for name in MEANS:
        error = np.abs(result.tensors()[name][row].numpy() - twin[name])
        assert error.max() <= bar, name


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", PROBLEMS)
def test_sums_equal_those_of_explicit_maps(name: str, dtype: torch.dtype) -> None:
    settings, mask = PROBLEMS[name]
    capture = synthetic_capture(dtype=dtype, **{"projection": PROJECTION, **settings})
    own = capture.kind == "encoder" and mask is not None and mask.shape[0] == 3
    real = PADDED if own else torch.ones(3, capture.shape[2], dtype=torch.bool)
    twin = expected(capture, mask, real, LABELS, len(NAMES))
    check(observed(capture).compute(), 0, twin, 1e-12 if dtype == torch.float64 else 1e-5)


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("name", ["bert", "modernbert", "t5", "bart"])
def test_models_equal_explicit_maps(name: str, implementation: str) -> None:
    """Labels looked up by token id; padding, windows, position biases and causal masks."""
    model, inputs = models.build(name, implementation), models.inputs(name)
    table = torch.arange(models.VOCABULARY) % 4
    source = "decoder_input_ids" if name == "bart" else "input_ids"
    observer = LabelAttention(lambda given: table[given[source]], NAMES)
    recording = Recording()
    settings: dict[str, Any] = CAUSAL_DECODER if name == "bart" else {}
    with Lens(model, observer, recording, **settings), torch.inference_mode():
        model(**inputs)
    labels = table[inputs[source]]
    for capture in recording.captures:
        mask = inputs["attention_mask"].bool()[:, None, None]
        real = mask[:, 0, 0]
        if name == "bart":
            mask = torch.ones(7, 7, dtype=torch.bool).tril()[None, None]
            real = torch.ones(2, 7, dtype=torch.bool)
        elif name == "modernbert" and capture.layer == 0:
            mask = mask & window(mask.shape[-1], 4)
        twin = expected(capture, mask, real, labels, len(NAMES))
        check(observer.compute(), capture.layer, twin, 1e-5)


@pytest.mark.parametrize("prepare", ["bfloat16", "train"])
def test_low_precision_and_dropout_are_recomputed(prepare: str) -> None:
    model, inputs = models.build("bert", "sdpa"), models.inputs("bert")
    model.to(torch.bfloat16) if prepare == "bfloat16" else model.train()
    labels = inputs["input_ids"] % 4
    observer, recording = LabelAttention(labels, NAMES), Recording()
    with Lens(model, observer, recording):
        model(**inputs)
    real = inputs["attention_mask"].bool()
    for capture in recording.captures:
        twin = expected(capture, real[:, None, None], real, labels, len(NAMES))
        check(observer.compute(), capture.layer, twin, 1e-5)


def test_padded_equals_single(minilm: Encoder, real_text: list[str]) -> None:
    names = [str(label) for label in range(7)]
    together, apart = (LabelAttention(lambda i: i["input_ids"] % 7, names) for _ in range(2))
    with Lens(minilm.model, together), torch.no_grad():
        minilm.model(**minilm.tokenize(real_text))
    with Lens(minilm.model, apart), torch.no_grad():
        for text in real_text:
            minilm.model(**minilm.tokenize([text]))
    assert together.compute().examples.eq(len(real_text)).all()
    for name, tensor in together.compute().tensors().items():
        torch.testing.assert_close(apart.compute().tensors()[name], tensor, rtol=1e-5, atol=1e-6)


def test_short_inputs_lose_nothing() -> None:
    """Up to n = D, effective attention is attention, to the last bit."""
    short = observed(synthetic_capture(queries=8, keys=8), labels=LABELS[:, :8]).compute()
    assert torch.equal(short.raw, short.effective)
    assert torch.equal(short.raw_error, short.effective_error)
    every = LabelAttention()
    every.update(synthetic_capture())
    result = every.compute()
    torch.testing.assert_close(result.raw, torch.ones(1, 4, 1, dtype=torch.float64))
    assert (result.effective < 1 - 1e-3).any()


class LargestTensor(TorchDispatchMode):
    """Notes the memory of the largest tensor that any operation returns."""

    nbytes = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None):
        result = function(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple) else (result,):
            if isinstance(tensor, Tensor):
                self.nbytes = max(self.nbytes, tensor.untyped_storage().nbytes())
        return result


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("causal", [False, True])
def test_no_attention_matrix_is_built(causal: bool, dtype: torch.dtype) -> None:
    size = 640
    mask = torch.arange(size) < torch.tensor([size, 600, 200])[:, None]
    capture = synthetic_capture(
        queries=size, keys=size, mask=mask[:, None, None], causal=causal, dtype=dtype
    )
    if causal:  # no such mask tensor reaches the fused kernel
        capture = replace(capture, masking=replace(capture.masking, mask=None))
    observer = LabelAttention(torch.arange(size).remainder(3).expand(3, -1), NAMES)
    with LargestTensor() as largest:
        observer.update(capture)
    matrices = 3 * 4 * size * size * 4  # bytes, in float32
    assert 0 < largest.nbytes < matrices / 2
    with LargestTensor() as largest:
        capture.attention()
    assert largest.nbytes == matrices


def test_more_labels_than_head_dimensions() -> None:
    names = [str(label) for label in range(21)]
    labels = torch.arange(26).remainder(21).expand(3, -1)
    capture = synthetic_capture(mask=PADDING, projection=PROJECTION, dtype=torch.float64)
    observer = LabelAttention(labels, names)
    observer.update(capture)
    twin = expected(capture, PADDING, PADDED, labels, 21)
    check(observer.compute(), 0, twin, 1e-10)


def test_shares_of_labels() -> None:
    result = observed(synthetic_capture(mask=PADDING)).compute()
    share, present = np.zeros((3, 3)), np.zeros((3, 3))
    for example, (labels, real) in enumerate(zip(LABELS.tolist(), PADDED, strict=True)):
        count = int(real.sum())
        for label in range(3):
            share[example, label] = labels[:count].count(label) / count
            present[example, label] = label in labels[:count]
    for found, twin in ((result.tokens, share), (result.present, present)):
        expect = torch.from_numpy(twin.mean(0)).expand(1, 4, 3)
        torch.testing.assert_close(found, expect, rtol=1e-12, atol=0)


def halves() -> tuple[Capture, Capture, LabelAttentionResult]:
    first = synthetic_capture(projection=PROJECTION, mask=PADDING)
    second = synthetic_capture(projection=PROJECTION, mask=PADDING.flip(0), seed=1)
    return first, second, observed(first, second).compute()


def assert_same(found: LabelAttentionResult, expect: LabelAttentionResult) -> None:
    assert found.layers == expect.layers and found.value_space == expect.value_space
    assert found.labels == expect.labels
    for name, tensor in expect.tensors().items():
        torch.testing.assert_close(
            found.tensors()[name], tensor, rtol=1e-12, atol=0, equal_nan=True
        )


def test_merged_halves_equal_one_run() -> None:
    first, second, together = halves()
    one = observed(first)
    assert one.merge(observed(second)) is one
    assert_same(one.compute(), together)
    with pytest.raises(InputError, match="different label_names cannot be merged"):
        one.merge(LabelAttention(LABELS, NAMES[::-1]))
    restored = LabelAttention(LABELS, NAMES)
    restored.load_state_dict(observed(first).state_dict())
    restored.update(second)
    assert_same(restored.compute(), together)
    restored.reset()
    with pytest.raises(AttnLensError, match="no attention call"):
        restored.compute()


def test_results_become_tables() -> None:
    table = halves()[2].to_pandas()
    assert table.index.names == ["stack", "layer", "head"] and len(table) == 4
    assert {"examples", f"raw[{NAMES[0]}]", f"effective[{NAMES[2]}]"} <= set(table.columns)


@pytest.mark.parametrize("where", ["grouped_value", "query", "context"])
@pytest.mark.parametrize(
    "mask", [None, PADDING, window(26, 7)[None, None]], ids=["no", "pad", "row"]
)
def test_examples_that_are_not_finite_are_left_out(mask: Tensor | None, where: str) -> None:
    capture = synthetic_capture(projection=PROJECTION, mask=mask)
    getattr(capture, where)[1, :, 2] = torch.nan
    if where != "context":  # what the model itself would have made of it
        capture.context[1] = torch.nan
    with pytest.warns(AttnLensWarning, match=r"1 example\(s\)"):
        result = observed(capture).compute()
    assert result.examples.tolist() == [[2.0] * 4] and result.skipped.tolist() == [[1.0] * 4]
    good = synthetic_capture(projection=PROJECTION, mask=mask)
    names = ("query", "grouped_key", "grouped_value", "context")
    good = replace(good, **{name: getattr(good, name)[[0, 2]] for name in names})
    if mask is PADDING:
        good = replace(good, masking=replace(good.masking, mask=mask[[0, 2]], _supports={}))
    alone = observed(good, labels=LABELS[[0, 2]]).compute()
    for name in MEANS:
        torch.testing.assert_close(
            result.tensors()[name], alone.tensors()[name], rtol=1e-6, atol=1e-9
        )


def test_an_example_of_padding_alone_does_not_count() -> None:
    padded = PADDED.clone()
    padded[1] = False
    capture = synthetic_capture(projection=PROJECTION, mask=padded[:, None, None])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        result = observed(capture).compute()
    assert result.examples.tolist() == [[2.0] * 4] and result.skipped.sum() == 0
    check(result, 0, expected(capture, padded[:, None, None], padded, LABELS, 3), bar=1e-5)


def test_one_example_has_no_error_and_missing_heads_are_nan() -> None:
    narrow = replace(synthetic_capture(batch=1, heads=2), layer=1)
    result = observed(synthetic_capture(batch=1), narrow, labels=LABELS[:1]).compute()
    assert result.raw[0].isfinite().all() and result.raw_error.isnan().all()
    assert result.raw[1].isfinite().all(-1).tolist() == [True, True, False, False]


def test_wrong_labels_are_refused() -> None:
    for labels in (LABELS[:, 1:], LABELS.double(), LABELS[:2]):
        with pytest.raises(InputError, match=r"labels must be integers.*\[3, 26\]"):
            observed(synthetic_capture(), labels=labels)
    with pytest.raises(InputError, match="label_names"):
        LabelAttention(LABELS, "punctuation")
    with pytest.raises(InputError, match="label_names"):
        LabelAttention(LABELS, ())


def test_labels_may_change_between_forwards() -> None:
    model, inputs = models.build("bert", "sdpa"), models.inputs("bert")
    observer = LabelAttention(label_names=NAMES)
    with Lens(model, observer), torch.no_grad():
        for label in (0, 2):
            observer.labels = torch.full_like(inputs["input_ids"], label)
            model(**inputs)
    result = observer.compute()
    torch.testing.assert_close(
        result.raw, torch.tensor([0.5, 0.0, 0.5], dtype=torch.float64).expand(2, 4, 3)
    )


@pytest.mark.parametrize("name", ["gpt_oss", "llama"])
def test_the_mass_of_a_learned_sink_is_a_field(name: str) -> None:
    """Shares of the labels sum to one with it."""
    example = zoo.build(name)
    observer, recording = LabelAttention(), Recording()
    with Lens(example.model, observer, recording), torch.no_grad():
        example.model(**example.inputs)
    result = observer.compute()
    torch.testing.assert_close(result.raw.sum(-1) + result.sink, torch.ones(2, 4).double())
    for row, capture in enumerate(recording.compute()):
        real = capture.real_rows.expand(-1, 4, -1)
        missing = (1 - capture.attention().double().sum(-1)).masked_fill(~real, 0)
        expected = (missing.sum(-1) / real.sum(-1)).mean(0)
        torch.testing.assert_close(result.sink[row], expected, rtol=1e-5, atol=1e-6)
        assert bool((result.sink[row] > 0.01).all()) == (name == "gpt_oss")
