"""Identifiability and witnesses of captured calls: the right tensors reach the mathematics."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

import attnlens
from attnlens import Capture, Lens
from attnlens.attention import Recording
from attnlens.capture import Masking
from attnlens.errors import CaptureError, InputError
from attnlens.identifiability import dimensions as dimensions
from attnlens.identifiability import witnesses
from tests.conftest import Encoder
from tests.identifiability.test_witnesses import SENTENCE
from tests.support.captures import synthetic_capture
from tests.support.chains import CHAINS, build_chain

LENGTHS = torch.tensor([14, 11, 9])
PADDING = torch.arange(14) < LENGTHS[:, None]


def call(width: int = 6, **fields: object) -> Capture:
    fields = {"queries": 14, "keys": 14, "dtype": torch.float64, **fields}
    return synthetic_capture(heads=2, width=width, **fields)


def softmax(capture: Capture, query: Tensor, key: Tensor) -> Tensor:
    """A from other queries and keys, under the mask and bias of a call."""
    logits = (capture.scaling or 1.0) * query @ key.mT
    if capture.bias is not None:
        logits = logits + capture.bias
    mask = torch.ones(1, dtype=torch.bool) if capture.mask is None else capture.mask
    return logits.masked_fill(~mask, -torch.inf).softmax(-1)


def test_everything_reaches_the_functional_form() -> None:
    projection = torch.randn(2, 6, 5, generator=torch.Generator().manual_seed(1))  # rank 5 < D
    capture = call(mask=PADDING[:, None, None], projection=projection, groups=2)
    value, mask = capture.value, PADDING[:, None, None]
    found = attnlens.identify(capture)
    wanted = dimensions.identifiability(
        capture.query, capture.key, value, mask=mask, projection=projection
    )
    for name in ("tokens", "rank", "nullity", "simplex_dimension", "softmax_dimension"):
        assert torch.equal(getattr(found, name), getattr(wanted, name)), name
    assert found.rank.tolist() == [[5, 5]] * 3
    assert (found.query_width, found.value_width) == (6, 6)
    moved = attnlens.identifiability.simplex_witness(capture)
    again = witnesses.simplex_witness(
        capture.attention(), value, mask=mask, projection=projection
    ).attention
    real = PADDING[:, None, :, None]
    torch.testing.assert_close(moved.attention * real, again * real, rtol=0, atol=1e-12)


def test_padded_examples_are_judged_by_their_own_length() -> None:
    capture = call(width=9, mask=PADDING[:, None, None])  # D + 1 = 10
    found = attnlens.identify(capture)
    assert found.identifiable_simplex.tolist() == [[False] * 2, [False] * 2, [True] * 2]
    assert torch.equal(
        attnlens.identifiability.simplex_witness(capture).exists, ~found.identifiable_simplex
    )
    assert torch.equal(
        attnlens.identifiability.softmax_witness(capture).exists, ~found.identifiable_simplex
    )


def test_padding_that_attends_to_itself_is_padding() -> None:
    own = PADDING[:, None, :, None] & PADDING[:, None, None]
    own = own | torch.eye(14, dtype=torch.bool)  # padded rows see themselves
    plain = call(width=9, mask=PADDING[:, None, None])
    odd = replace(plain, masking=Masking(own), padding=PADDING)
    wanted, found = attnlens.identify(plain), attnlens.identify(odd)
    assert torch.equal(found.tokens, wanted.tokens)
    assert torch.equal(found.simplex_dimension, wanted.simplex_dimension)
    assert torch.equal(found.softmax_dimension, wanted.softmax_dimension)
    assert torch.equal(
        attnlens.identifiability.softmax_witness(odd).exists,
        attnlens.identifiability.softmax_witness(plain).exists,
    )


def test_masks_by_row_have_simplex_witnesses_only() -> None:
    capture = call(width=4, causal=True)
    found = attnlens.identify(capture)
    assert found.softmax_dimension is None
    assert found.tokens.shape == (3, 2, 14)
    moved = attnlens.identifiability.simplex_witness(capture)
    assert moved.exists.all() and not moved.attention.triu(1).any()
    with pytest.raises(InputError, match="varies by row"):
        attnlens.identifiability.softmax_witness(capture)


def test_as_many_queries_as_keys_in_cross_attention() -> None:
    capture = call(width=4, mask=PADDING[:, None, None], kind="cross")
    found = attnlens.identify(capture)
    expected = 14 * (LENGTHS - 5)  # every query counts, also beyond the keys' length
    assert torch.equal(found.simplex_dimension, expected[:, None].expand(3, 2))
    moved = attnlens.identifiability.simplex_witness(capture)
    assert (moved.total_variation > 0).all()
    witness = attnlens.identifiability.softmax_witness(capture)
    context = capture.attention() @ capture.value
    again = softmax(capture, witness.query, witness.key) @ capture.value
    assert witness.converged.all()
    assert ((again - context).norm(dim=(-2, -1)) / context.norm(dim=(-2, -1)) < 1e-10).all()


def test_a_position_bias_stays_as_it_is() -> None:
    bias = torch.randn(
        1, 2, 14, 14, dtype=torch.float64, generator=torch.Generator().manual_seed(5)
    )
    capture = call(width=5)
    capture = replace(capture, masking=Masking(bias=bias))
    attention = capture.attention()
    torch.testing.assert_close(attention, softmax(capture, capture.query, capture.key))
    witness = attnlens.identifiability.softmax_witness(capture)
    moved = softmax(capture, witness.query, witness.key)
    assert witness.converged.all()
    torch.testing.assert_close(moved, witness.attention, rtol=1e-9, atol=1e-13)
    context, again = attention @ capture.value, moved @ capture.value
    assert ((again - context).norm(dim=(-2, -1)) / context.norm(dim=(-2, -1)) < 1e-10).all()
    change = (moved - attention).norm(dim=(-2, -1)) / attention.norm(dim=(-2, -1))
    assert (change > 0.09).all()
    rank = attnlens.identifiability.realisability_rank(capture)
    assert (rank.attention_rank == 5).all() and (rank.rank > 5).all()
    bare = witnesses.realisability_rank(attention, capture.value, query_width=5)
    assert (bare.attention_rank > 5).all()


def test_small_probabilities_keep_their_rank_in_single_precision() -> None:
    capture = call(width=4, dtype=torch.float32)
    sharp = replace(capture, query=capture.query * 40)
    assert (sharp.attention() == 0).any()
    assert (attnlens.identifiability.realisability_rank(sharp).attention_rank == 4).all()


def test_calls_of_which_only_the_attention_was_seen() -> None:
    capture = call(width=6)
    seen = replace(capture, query=None, grouped_key=None, observed=capture.attention())
    found, wanted = attnlens.identify(seen), attnlens.identify(capture)
    assert torch.equal(found.simplex_dimension, wanted.simplex_dimension)
    assert found.softmax_dimension is None and found.query_width is None
    assert "no plain products" in found.verdict(0, 0)
    assert attnlens.identifiability.simplex_witness(seen).exists.all()
    for function in (
        attnlens.identifiability.softmax_witness,
        attnlens.identifiability.realisability_rank,
    ):
        with pytest.raises(CaptureError, match=r"layer\.0\.attention .* only A was seen"):
            function(seen)


def test_capped_logits_and_sinks_are_refused_in_words() -> None:
    capped = replace(call(), softcap=20.0)
    assert attnlens.identify(capped).softmax_dimension is None
    with pytest.raises(CaptureError, match="capped at 20"):
        attnlens.identifiability.softmax_witness(capped)
    sunk = replace(call(), sinks=torch.zeros(2))
    for function in (
        attnlens.identify,
        attnlens.identifiability.simplex_witness,
        attnlens.identifiability.softmax_witness,
        attnlens.identifiability.realisability_rank,
    ):
        with pytest.raises(CaptureError, match="attention sinks"):
            function(sunk)


@pytest.mark.parametrize("family", ["bert", "t5", "deberta"])
def test_calls_of_real_architectures(family: str) -> None:
    model, recording = build_chain(family), Recording()
    with Lens(model, recording), torch.no_grad():
        model(**CHAINS[family].inputs())
    capture = recording.captures[0]
    found = attnlens.identify(capture)
    assert torch.equal(
        attnlens.identifiability.simplex_witness(capture).exists, ~found.identifiable_simplex
    )
    if capture.query is None:
        with pytest.raises(CaptureError):
            attnlens.identifiability.softmax_witness(capture)
    else:
        witness = attnlens.identifiability.softmax_witness(capture)
        assert torch.equal(witness.exists, found.softmax_dimension > 0)


def test_a_trained_encoder_just_below_and_above_the_threshold(minilm: Encoder) -> None:
    inputs = minilm.tokenize([SENTENCE])
    for tokens, exists in ((33, False), (34, True)):
        recording = Recording(layers=[2])
        with Lens(minilm.model, recording), torch.no_grad():
            minilm.model(**{name: rows[:, :tokens] for name, rows in inputs.items()})
        (capture,) = recording.captures
        found = attnlens.identify(capture)
        assert (found.identifiable_simplex != exists).all()
        moved = attnlens.identifiability.simplex_witness(capture)
        assert (moved.exists == exists).all() and (moved.residual < 1e-12).all()
        assert (
            attnlens.identifiability.softmax_witness(capture, max_iterations=0).exists == exists
        ).all()
