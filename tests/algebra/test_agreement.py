"""One algebra: whoever reports a quantity reports the same, on inputs made to tell them apart."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import BertConfig, BertModel

import attnlens
from attnlens import EffectiveAttention, HeadStatistics, LabelAttention, Lens
from attnlens.algebra.effective import effective_attention, value_basis
from attnlens.capture import Capture, Masking, OutputProjection
from attnlens.errors import AttnLensWarning, NonFiniteError
from attnlens.identifiability.dimensions import identifiability
from tests.support import interpreter, reference
from tests.support.captures import synthetic_capture

BACKENDS = ("torch", "triton") if interpreter.DEVICE == "cpu" else ("torch",)
MASKS = ("none", "causal", "window", "blocks", "sparse")


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=generator(seed))


def values_with_spectrum(sigma: Tensor, tokens: int, heads: int = 1, seed: int = 0) -> Tensor:
    """`[1, H, n, D]` float32 with the given singular values, for n ≥ D."""
    width = len(sigma)
    left = torch.linalg.qr(normal(1, heads, tokens, width, seed=seed))[0]
    right = torch.linalg.qr(normal(1, heads, width, width, seed=seed + 1))[0]
    return (left * sigma @ right).float()


def pattern(kind: str, tokens: int, seed: int = 0) -> Tensor | None:
    """`[1, 1, n, n]` bool, or None."""
    place = torch.arange(tokens)
    distance = place[:, None] - place
    if kind == "none":
        return None
    rows = {
        "causal": distance >= 0,
        "window": distance.abs() <= max(2, tokens // 4),
        "blocks": (place[:, None] * 3 // tokens) == (place * 3 // tokens),
        "sparse": torch.rand(tokens, tokens, generator=generator(seed)) < 0.7,
    }[kind]
    return rows[None, None]


def padded(tensor: Tensor, length: int, dim: int = -2) -> Tensor:
    """More tokens, which must not matter: NaN."""
    missing = length - tensor.shape[dim]
    ends = [0, 0] * (tensor.dim() - 1 - dim % tensor.dim()) + [0, missing]
    return torch.nn.functional.pad(tensor, ends, value=float("nan"))


def padded_call(call: Capture, length: int) -> Capture:
    """The same call among padding on the right."""
    assert call.query is not None and call.grouped_key is not None
    tokens = call.query.shape[2]
    real = torch.arange(length) < tokens
    mask = torch.zeros(1, 1, length, length, dtype=torch.bool)
    mask[..., :tokens, :tokens] = True if call.mask is None else call.mask
    shared = call.mask is None
    return replace(
        call,
        query=padded(call.query, length).nan_to_num(0.0),
        grouped_key=padded(call.grouped_key, length).nan_to_num(0.0),
        grouped_value=padded(call.grouped_value, length),
        context=padded(call.context, length),
        masking=Masking(real[None, None, None] if shared else mask),
        padding=real[None],
    )


def statistics(call: Capture, backend: str = "torch", **options: Any) -> dict[str, Tensor]:
    """Every field of one layer, `[H]`."""
    observer = HeadStatistics(**options)
    observer.update(replace(call, backend=backend))
    return {name: tensor[0] for name, tensor in observer.compute().tensors().items()}


def call_with(
    value: Tensor, scale: float = 1.0, mask: Tensor | None = None, **more: Any
) -> Capture:
    """A call whose context is A V as float32 gives it; `scale` is that of the logits."""
    _, heads, tokens, width = value.shape
    query, key = (normal(1, heads, tokens, width, seed=s).float() for s in (5, 6))
    query = query * scale
    attention = reference.attention(query, key, mask)
    return Capture(
        site="layer.0",
        stack="layer.*",
        query=query,
        grouped_key=key,
        grouped_value=value,
        context=(attention.float() @ value),
        masking=Masking(mask),
        scaling=width**-0.5,
        **more,
    )


# Padding ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", MASKS)
def test_padding_changes_no_map_and_no_rank(kind: str) -> None:
    """Singular values from 1 to 4e-5 of 40 tokens, alone and among 512."""
    mask = pattern(kind, 40)
    value = values_with_spectrum(torch.logspace(0, -4.4, 16, dtype=torch.float64), 40, 2)
    attention = reference.attention(normal(1, 2, 40, 16), normal(1, 2, 40, 16, seed=1), mask)
    alone = effective_attention(attention.float(), value, mask)
    twin = reference.effective_attention(attention.float(), value, mask)
    assert reference.relative_errors(alone, twin).max() <= 1e-5
    rank = value_basis(value, mask).rank
    assert torch.equal(
        rank.expand(1, 2, 40) if rank.dim() == 3 else rank[..., None].expand(1, 2, 40),
        reference.ranks(value, mask, 40),
    )
    for length in (41, 128, 512):
        real = torch.arange(length) < 40
        among = real[None, None, None] & torch.ones(length, length, dtype=torch.bool)
        if mask is not None:
            among = torch.zeros(1, 1, length, length, dtype=torch.bool)
            among[..., :40, :40] = mask
        more = padded(padded(attention.float(), length), length, -1).nan_to_num(0.0)
        found = effective_attention(more, padded(value, length), among)
        torch.testing.assert_close(found[..., :40, :40], alone, rtol=1e-6, atol=1e-8)
        moved = value_basis(padded(value, length), among).rank
        assert torch.equal(moved[..., :40] if moved.dim() == 3 else moved, rank)


@pytest.mark.parametrize("kind", MASKS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_padding_changes_nothing_that_observers_say(kind: str, backend: str) -> None:
    value = values_with_spectrum(torch.logspace(0, -4.4, 16, dtype=torch.float64), 40, 2)
    call = call_with(value, mask=pattern(kind, 40))
    among = padded_call(call, 120)
    alone = statistics(call, backend)
    for name, tensor in statistics(among, backend).items():
        torch.testing.assert_close(tensor, alone[name], rtol=1e-6, atol=1e-9, msg=name)
    maps = [EffectiveAttention(), EffectiveAttention(simplex=True)]
    for observer in maps:
        for one in (call, among):
            observer.update(one)
        first, second = observer.compute()
        torch.testing.assert_close(
            second.effective[..., :40, :40], first.effective, rtol=1e-5, atol=1e-7
        )
    labels = torch.arange(120)[None] % 3
    shares = []
    for one in (call, among):
        share = LabelAttention(labels[:, : one.shape[3]], ("a", "b", "c"))
        share.update(one)
        shares.append(share.compute())
    torch.testing.assert_close(shares[1].effective, shares[0].effective, rtol=1e-5, atol=1e-7)
    verdicts = [attnlens.identify(one) for one in (call, among)]
    for name in ("rank", "nullity", "simplex_nullity", "tokens", "condition"):
        first, second = (getattr(verdict, name) for verdict in verdicts)
        second = second[..., :40] if second.dim() == 3 else second
        torch.testing.assert_close(second, first, rtol=1e-9, atol=0, msg=name)
    assert torch.equal(verdicts[0].simplex_dimension, verdicts[1].simplex_dimension)


# Nearly uniform attention -----------------------------------------------------------------------


def pearson_of_dense(call: Capture) -> tuple[Tensor, Tensor]:
    """Correlation and fraction of every head from float64 matrices, where all rows count."""
    assert call.query is not None and call.key is not None
    attention = reference.attention(call.query, call.key, call.mask)
    effective = reference.effective_attention(attention, call.value, call.mask, call.projection)
    dense = reference.dense_mask(call.mask, *attention.shape)
    found = []
    for head in range(attention.shape[1]):
        seen = dense[0, head].numpy()
        raw, visible = (m[0, head].numpy()[seen] for m in (attention, effective))
        found.append(reference.pearson(raw, visible))
    fraction = effective.square().sum((-2, -1)) / attention.square().sum((-2, -1))
    return torch.tensor(found, dtype=torch.float64), fraction[0]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", ["none", "causal", "blocks"])
@pytest.mark.parametrize("scale", [1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 1.0, 100.0])
def test_correlation_of_nearly_uniform_attention(scale: float, kind: str, backend: str) -> None:
    value = (normal(1, 2, 24, 6, seed=3) + normal(1, 2, 1, 6, seed=4)).float()
    call = call_with(value, scale, pattern(kind, 24))
    found = statistics(call, backend)
    correlation, fraction = pearson_of_dense(call)
    torch.testing.assert_close(found["correlation"], correlation, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found["pooled_correlation"], correlation, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found["effective_fraction"], fraction, rtol=1e-5, atol=0)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", ["none", "causal", "window"])
@pytest.mark.parametrize("scale", [1e-6, 1e-4, 1.0])
@pytest.mark.parametrize("offset", [0.0, 1e3])
def test_where_nothing_is_null_correlation_and_fraction_are_one(
    offset: float, scale: float, kind: str, backend: str
) -> None:
    value = (normal(1, 2, 12, 16, seed=3) + offset * normal(1, 2, 1, 16, seed=4)).float()
    found = statistics(call_with(value, scale, pattern(kind, 12)), backend)
    assert (found["nullity_max"] == 0).all()
    for name in ("correlation", "pooled_correlation", "effective_fraction"):
        assert (found[name] == 1).all(), (name, found[name])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("tokens", [5, 24])
def test_uniform_attention_has_no_correlation(tokens: int, backend: str) -> None:
    call = call_with(normal(1, 2, tokens, 6, seed=3).float(), 0.0)
    found = statistics(call, backend)
    assert found["correlation"].isnan().all() and found["pooled_correlation"].isnan().all()
    assert found["effective_fraction"].isfinite().all()
    # equal keys with large logits: rows are constant to the precision of the logits
    call = call_with(normal(1, 2, tokens, 6, seed=3).float(), 50.0)
    assert call.grouped_key is not None
    call = replace(call, grouped_key=call.grouped_key[:, :, :1].expand(-1, -1, tokens, -1))
    assert statistics(call, backend)["correlation"].isnan().all()


def test_attention_seen_in_the_model_is_constant_to_its_own_precision() -> None:
    value = normal(1, 2, 24, 6, seed=3).float()
    call = call_with(value, 0.0)
    seen = torch.full((1, 2, 24, 24), 1 / 24)
    noisy = seen * (1 + 1e-7 * normal(1, 2, 24, 24).float())
    observed = replace(call, query=None, grouped_key=None, observed=noisy)
    assert statistics(observed)["correlation"].isnan().all()
    clear = replace(observed, observed=(seen * (1 + 1e-3 * normal(1, 2, 24, 24).float())))
    assert statistics(clear)["correlation"].isfinite().all()


@pytest.mark.parametrize("scale", [0.02, 0.005, 0.001])
def test_a_fresh_model_has_correlation_one_up_to_n_equal_d(scale: float) -> None:
    config = BertConfig(
        hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64,
        vocab_size=99, initializer_range=scale,
    )  # fmt: skip
    torch.manual_seed(0)
    model = BertModel(config).eval()
    with Lens(model) as lens, torch.no_grad():
        model(torch.randint(0, 99, (2, 12), generator=generator(1)))
    result = lens.observers[0].compute()
    for name in ("correlation", "pooled_correlation", "effective_fraction"):
        assert (getattr(result, name) == 1).all(), name


# Ill-conditioned values -------------------------------------------------------------------------


@pytest.mark.parametrize("fields", ["all", "null_space"])
@pytest.mark.parametrize("kind", ["none", "causal", "blocks"])
@pytest.mark.parametrize("condition", [1e2, 1e4, 1e5, 1e6, 1e8])
def test_norms_of_ill_conditioned_values(condition: float, kind: str, fields: str) -> None:
    """The model's float32 outputs do not resolve the smallest directions; float64 rows do."""
    sigma = torch.logspace(0, -np.log10(condition), 12, dtype=torch.float64)
    value = values_with_spectrum(sigma, 60, 3)
    call = call_with(value, mask=pattern(kind, 60))
    assert call.query is not None and call.key is not None
    attention = reference.attention(call.query, call.key, call.mask)
    effective = reference.effective_attention(attention, value, call.mask)
    found = statistics(call, fields=fields)
    norm = effective.square().sum((-2, -1)).sqrt()[0]
    torch.testing.assert_close(found["effective_norm"], norm, rtol=1e-5, atol=0)
    output = (attention @ value.double()).square().sum((-2, -1)).sqrt()[0]
    torch.testing.assert_close(found["output_norm"], output, rtol=1e-5, atol=0)


@pytest.mark.parametrize("offset", [1e2, 1e3, 1e5])
def test_values_with_a_large_common_offset(offset: float) -> None:
    value = (normal(1, 2, 40, 8, seed=3) + offset * normal(1, 2, 1, 8, seed=4)).float()
    call = call_with(value)
    assert call.query is not None and call.key is not None
    attention = reference.attention(call.query, call.key)
    twin = reference.head_statistics(attention, value, None, torch.ones(1, 40, dtype=torch.bool))
    for name, tensor in statistics(call).items():
        if name != "skipped":
            torch.testing.assert_close(tensor, twin[name], rtol=1e-5, atol=1e-7, msg=name)


def test_float64_maps_of_ill_conditioned_values() -> None:
    for condition in (1e2, 1e4, 1e5):
        sigma = torch.logspace(0, -np.log10(condition), 8, dtype=torch.float64)
        left = torch.linalg.qr(normal(1, 1, 60, 8))[0]
        value = left * sigma @ torch.linalg.qr(normal(8, 8, seed=1))[0]
        attention = normal(1, 1, 9, 60, seed=2).softmax(-1)
        found = effective_attention(attention, value)
        # the basis is known exactly: that of the left factor
        exact = attention @ left @ left.mT
        rounding = 10 * condition * torch.finfo(torch.float64).eps
        assert reference.relative_errors(found, exact).max() <= max(1e-12, rounding)
        output = attention @ value
        assert reference.relative_errors(found @ value, output).max() <= 1e-12


# One rank of [T, 1], one condition, one count of tokens ------------------------------------------


def simplex_nullities(value: Tensor) -> dict[str, int]:
    """What everyone says of `n − rank([T, 1])` of one head."""
    call = call_with(value)
    query = torch.zeros_like(value)
    return {
        "HeadStatistics": int(statistics(call)["simplex_nullity"][0]),
        "HeadStatistics, null space": int(
            statistics(call, fields="null_space")["simplex_nullity"][0]
        ),
        "triton": int(statistics(call, "triton")["simplex_nullity"][0]),
        "value_basis": int(value_basis(value, simplex=True).nullity[0, 0]),
        "identifiability": int(identifiability(query, query, value).simplex_nullity[0, 0]),
        "identify": int(attnlens.identify(call).simplex_nullity[0, 0]),
    }


def test_a_large_common_vector_leaves_one_simplex_nullity() -> None:
    value = (normal(1, 1, 11, 8) + 1000 * normal(1, 1, 1, 8, seed=1)).float()
    assert set(simplex_nullities(value).values()) == {2}


@pytest.mark.parametrize("spread", [3e-3, 3e-5, 3e-7])
def test_a_column_that_is_nearly_constant_leaves_one_simplex_nullity(spread: float) -> None:
    value = normal(1, 1, 50, 8)
    value[..., 0] = 1 + spread * normal(1, 1, 50, seed=2)
    value = value.float()
    expected = 50 - int(reference.ranks(value, simplex=True)[0, 0, 0])
    assert set(simplex_nullities(value).values()) == {expected}
    assert expected == (42 if spread < 1e-6 else 41)


@pytest.mark.parametrize("constant", [0.0, 1.0])
def test_constant_values(constant: float) -> None:
    """Equal values: rank one or none, and `[T, 1]` has rank one either way."""
    value = torch.full((1, 1, 9, 4), constant) * torch.tensor([1.0, -2.0, 3.0, 0.5])
    assert set(simplex_nullities(value).values()) == {8}
    found = statistics(call_with(value))
    assert found["rank"].item() == bool(constant)
    assert found["correlation"].isnan().all()  # A⊥ is constant


def test_condition_is_that_of_t_for_everyone() -> None:
    value, projection = normal(1, 3, 20, 6).float(), normal(3, 6, 24, seed=1).float()
    projection[:, 0] *= 30
    projection[2, 3:] = 0
    call = call_with(value, output_projection=OutputProjection("output", projection))
    query = torch.zeros(1, 3, 20, 6)
    expected = []
    for head in range(3):
        sigma = torch.linalg.svdvals(value[0, head].double() @ projection[head].double())
        kept = sigma[sigma > 1e-6 * sigma[0]]
        expected.append(kept[0] / kept[-1])
    twin = torch.stack(expected)
    torch.testing.assert_close(statistics(call)["condition"], twin, rtol=1e-9, atol=0)
    torch.testing.assert_close(attnlens.identify(call).condition[0], twin, rtol=1e-9, atol=0)
    plain = identifiability(query, query, value, projection=projection).condition[0]
    torch.testing.assert_close(plain, twin, rtol=1e-9, atol=0)


def test_tokens_and_condition_leave_out_keys_that_no_row_sees() -> None:
    """The causal rule from the top left, with fewer queries than keys, and sparse masks."""
    value = normal(1, 2, 30, 5).float()
    value[:, :, 9:] *= 1000
    query, key = normal(1, 2, 9, 5, seed=1).float(), normal(1, 2, 30, 5, seed=2).float()
    place = torch.arange(30)
    rows = (place <= place[:9, None])[None, None]
    for masking in (Masking(causal=True), Masking(rows), Masking(rows & (place % 2 == 0))):
        mask = rows if masking.mask is None else masking.mask
        attention = reference.attention(query, key, mask)
        call = Capture(
            site="layer.0", stack="layer.*", query=query, grouped_key=key, grouped_value=value,
            context=(attention @ value.double()).float(), masking=masking, kind="cross",
        )  # fmt: skip
        twin = reference.head_statistics(attention, value, mask, torch.ones(1, 9).bool())
        found = statistics(call)
        assert found["tokens"].tolist() == [float(mask.any(-2).sum())] * 2
        for name in ("tokens", "condition", "rank", "nullity", "effective_norm"):
            torch.testing.assert_close(found[name], twin[name], rtol=1e-5, atol=0, msg=name)


# Numbers that are not finite --------------------------------------------------------------------


@pytest.mark.parametrize("mask", [None, pattern("causal", 20)], ids=["none", "causal"])
@pytest.mark.parametrize(
    ("dtype", "where", "bad"),
    [
        (torch.float32, "value", torch.nan),
        (torch.float32, "value", torch.inf),
        (torch.float64, "value", 1e300),
        (torch.float32, "projection", torch.nan),
        (torch.float32, "projection", torch.inf),
        (torch.float64, "projection", 1e300),
    ],
)
def test_numbers_that_are_not_finite_cost_their_own_heads(
    dtype: torch.dtype, where: str, bad: float, mask: Tensor | None
) -> None:
    """In values, in W_O, and finite ones whose squares overflow: skipped, counted, no error."""
    call = synthetic_capture(
        batch=1, heads=3, queries=20, keys=20, width=4, dtype=dtype,
        projection=normal(3, 4, 8).to(dtype), mask=mask,
    )  # fmt: skip
    expected = statistics(call)
    assert call.output_projection is not None
    if where == "value":
        value = call.grouped_value.clone()
        value[0, 1, 3, 2] = bad
        broken = replace(call, grouped_value=value, context=call.attention().to(dtype) @ value)
    else:
        weight = call.output_projection.weight.clone()
        weight[1, 2, 3] = bad
        broken = replace(call, output_projection=OutputProjection("output", weight))
    with pytest.warns(AttnLensWarning, match=r"1 example\(s\) held NaN or Inf"):
        found = statistics(broken)
    assert found["skipped"].tolist() == [0, 1, 0] and found["examples"].tolist() == [1, 0, 1]
    for name, tensor in found.items():
        torch.testing.assert_close(tensor[[0, 2]], expected[name][[0, 2]], rtol=1e-6, atol=1e-9)
        assert name in ("skipped", "examples") or tensor[1].isnan(), name
    maps = EffectiveAttention()
    maps.update(broken)
    effective = maps.compute()[0].effective
    assert effective[:, 1].isnan().all() and effective[:, ::2].isfinite().all()
    labels = LabelAttention()
    labels.update(broken)
    with pytest.warns(AttnLensWarning, match=r"1 example\(s\) held NaN or Inf"):
        assert labels.compute().skipped.tolist() == [[0, 1, 0]]
    with pytest.raises(NonFiniteError, match="head 1"):
        attnlens.identify(broken)


def test_plain_functions_name_what_is_not_finite() -> None:
    value = normal(1, 2, 9, 4)
    attention = normal(1, 2, 9, 9).softmax(-1)
    large = value.clone()
    large[0, 1, 2, 3] = 1e300
    with pytest.raises(NonFiniteError, match=r"reaches 1.0e\+300 at batch index 0, head 1"):
        effective_attention(attention, large)
    projection = normal(2, 4, 6)
    projection[1, 0, 0] = torch.inf
    with pytest.raises(NonFiniteError, match="projection holds NaN or Inf at head 1"):
        effective_attention(attention, value, projection=projection)
    scaled = effective_attention(attention, value * 1e100)  # large, and still right
    torch.testing.assert_close(scaled, effective_attention(attention, value), rtol=1e-9, atol=1e-12)


# Everything at once -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Draw:
    """A call drawn to be difficult."""

    call: Capture
    mask: Tensor | None
    length: int


@st.composite
def draws(draw: st.DrawFn) -> Draw:
    seed = draw(st.integers(0, 2**31))
    tokens, width = draw(st.integers(2, 30)), draw(st.integers(1, 10))
    heads, groups = draw(st.sampled_from([(1, 1), (2, 1), (2, 2)]))
    condition = 10.0 ** draw(st.integers(0, 8))
    offset = 10.0 ** draw(st.integers(-1, 4)) if draw(st.booleans()) else 0.0
    scale = 10.0 ** draw(st.integers(-5, 2))
    kind = draw(st.sampled_from(MASKS))
    count = min(tokens, width)
    sigma = torch.logspace(0, -np.log10(condition), count, dtype=torch.float64)
    left = torch.linalg.qr(normal(1, heads // groups, tokens, count, seed=seed))[0]
    right = torch.linalg.qr(normal(1, heads // groups, width, count, seed=seed + 1))[0]
    common = normal(1, heads // groups, 1, width, seed=seed + 2)
    value = (left * sigma @ right.mT + offset * common).float()
    mask = pattern(kind, tokens, seed)
    query, key = (
        normal(1, h, tokens, width, seed=seed + s).float()
        for s, h in ((3, heads), (4, heads // groups))
    )
    query = query * scale
    repeated = value.repeat_interleave(groups, 1)
    attention = reference.attention(query, key.repeat_interleave(groups, 1), mask)
    call = Capture(
        site="layer.0", stack="layer.*", query=query, grouped_key=key, grouped_value=value,
        context=attention.float() @ repeated, masking=Masking(mask), scaling=width**-0.5,
    )  # fmt: skip
    return Draw(call, mask, draw(st.integers(tokens, 48)))


def clear_ranks(value: Tensor, mask: Tensor | None) -> bool:
    """Whether no singular value lies so near a threshold that rounding could decide."""
    _, heads, tokens, width = value.shape
    queries = tokens if mask is None else mask.shape[-2]
    dense = reference.dense_mask(mask, 1, heads, queries, tokens)
    for head in range(heads):
        for _, seen in reference.supports(dense[0, head]):
            values = value[0, head].double().numpy()[seen]
            if not len(values):
                continue
            rtol = reference.threshold(values, width)
            sigma = np.linalg.svd(values, compute_uv=False)
            apart = np.linalg.svd(values - values.mean(0), compute_uv=False)
            for spectrum in (sigma, apart):
                relative = spectrum / max(sigma[0], 1e-300) / rtol
                if ((relative > 0.5) & (relative < 2)).any():
                    return False
    return True


@settings(max_examples=120, deadline=None)
@given(draws())
def test_statistics_of_difficult_calls_equal_the_dense_twin(drawn: Draw) -> None:
    call = drawn.call
    assume(clear_ranks(call.value, drawn.mask))
    assert call.query is not None and call.key is not None
    attention = reference.attention(call.query, call.key, drawn.mask)
    real = call.real_rows.expand(1, *attention.shape[1:3])[:, 0]
    assume(bool(real.any()) and torch.equal(call.real_rows.all(1), call.real_rows.any(1)))
    twin = reference.head_statistics(attention, call.value, drawn.mask, real)
    for one in (call, padded_call(call, drawn.length)):
        found = statistics(one)
        for name, expected in twin.items():
            assert_close(name, found[name], expected)


@settings(max_examples=15, deadline=None)
@given(draws())
def test_backends_agree_on_difficult_calls(drawn: Draw) -> None:
    assume(clear_ranks(drawn.call.value, drawn.mask))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # of the interpreter
        triton = statistics(padded_call(drawn.call, drawn.length), "triton")
    for name, expected in statistics(drawn.call).items():
        assert_close(name, triton[name], expected)


@settings(max_examples=60, deadline=None)
@given(draws())
def test_maps_and_ranks_of_difficult_calls_agree(drawn: Draw) -> None:
    call, mask = drawn.call, drawn.mask
    assume(clear_ranks(call.value, mask))
    statistic, verdict = statistics(call), attnlens.identify(call)
    for simplex, name in ((False, "nullity"), (True, "simplex_nullity")):
        basis = value_basis(call.value, mask, simplex=simplex)
        nullity, found = basis.nullity.double(), getattr(verdict, name).double()
        if nullity.dim() == 2:
            nullity, found = nullity[..., None], found[..., None]
        rows = call.real_rows.expand(1, nullity.shape[1], -1)
        nullity, found = (part.expand(rows.shape) for part in (nullity, found))
        assert torch.equal(nullity[rows], found[rows])
        mean = (nullity * rows).sum(-1) / rows.sum(-1)
        torch.testing.assert_close(mean[0], statistic[name], rtol=1e-12, atol=0, equal_nan=True)
        attention = call.attention()
        twin = reference.effective_attention(attention, call.value, mask, simplex=simplex)
        effective = call.effective_attention(simplex)
        counted = call.real_rows[..., None]
        errors = reference.relative_errors(effective * counted, twin * counted)
        assert errors.max() <= 1e-5
        plain = effective_attention(attention, call.value, mask, simplex=simplex)
        assert reference.relative_errors(plain, twin).max() <= 1e-5


def assert_close(name: str, found: Tensor, expected: Tensor) -> None:
    """Equal to the bar; a correlation where its variance is not rounding."""
    torch.testing.assert_close(
        found, expected, rtol=1e-5, atol=1e-6, equal_nan=True, msg=lambda text: f"{name}: {text}"
    )
