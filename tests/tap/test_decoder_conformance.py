"""Every decoder of the zoo against the slow twin, row by row, however its batch is padded."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from attnlens import HeadStatistics, Lens, check
from attnlens.attention.recording import Recording
from tests.support import reference
from tests.support.zoo import build, names
from tests.support.zoo.inputs import TOKENS, padding_mask, text

NO_ATTENTION = {"falcon_mamba", "mamba", "mamba2", "rwkv"}
# These take no text and mask, as others do: tests/tap/test_conformance.py runs them.
OTHER_INPUTS = {"imagegpt", "jev"}
DECODERS = tuple(n for n in names("decoder") if n not in NO_ATTENTION | OTHER_INPUTS)
# float32 attention recomputed from queries and keys, relative to the largest entry
BAR = 2e-5


def padded(side: str) -> dict[str, Tensor]:
    """Two texts: of one length, or the second padded on one side."""
    inputs = text()
    mask = padding_mask() if side != "none" else torch.ones(2, TOKENS, dtype=torch.long)
    inputs["attention_mask"] = mask.flip(-1) if side == "left" else mask
    return inputs


@pytest.mark.parametrize("side", ["none", "right", "left"])
@pytest.mark.parametrize("name", DECODERS)
def test_a_decoder_equals_its_twin(name: str, side: str) -> None:
    example, inputs = build(name), padded(side)
    statistics, recording = HeadStatistics(), Recording()
    with torch.no_grad():
        plain = example.model(**inputs).last_hidden_state
        with Lens(example.model, statistics, recording):
            looked = example.model(**inputs).last_hidden_state
    assert torch.equal(plain, looked)
    result = statistics.compute()
    captures = recording.compute()
    assert [layer for _, layer in result.layers] == [capture.layer for capture in captures]
    real = inputs["attention_mask"].bool()
    for row, capture in enumerate(captures):
        batch, heads, queries, keys, _ = capture.shape
        mask = reference.dense_mask(capture.mask, batch, heads, queries, keys)
        mask = mask & real[:, None, :, None] & real[:, None, None]
        assert not mask.triu(1).any()
        attention = capture.attention().double() * mask
        projection = capture.projection
        expected = reference.effective_attention(attention, capture.value, mask, projection)
        found = capture.effective_attention()
        counted = real[:, None, :, None]
        assert ((found - expected) * counted).abs().max() <= BAR * expected.abs().max()
        twin = reference.head_statistics(attention, capture.value, mask, real, projection)
        for field in ("rank", "nullity", "nullity_min", "nullity_max", "simplex_nullity"):
            assert torch.equal(getattr(result, field)[row], twin[field]), field
        for field in ("attention_norm", "effective_norm", "effective_fraction", "output_norm"):
            torch.testing.assert_close(
                getattr(result, field)[row], twin[field], rtol=BAR, atol=0, msg=field
            )


@pytest.mark.parametrize("name", sorted(NO_ATTENTION))
def test_a_state_space_model_is_refused_by_name(name: str) -> None:
    example = build(name)
    verdict = check(example.model, example.inputs)
    assert not verdict.supported
    mixer = "blocks.0.attention" if name == "rwkv" else "layers.0.mixer"
    kind = type(example.model.get_submodule(mixer)).__name__
    assert f"{mixer} ({kind}) mixes tokens by other means" in verdict.reason
