"""Every architecture of the zoo: attached, exact, bit-identical, or refused for a named reason."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import transformers
from torch import Tensor

from attnlens import Capture, record
from tests.support.conformance import NO_PROJECTION, REFUSED, documented, marks, verdict
from tests.support.zoo import NAMES, build, names

# No softmax·V product exists in these models (or in the part of them that AutoModel builds).
NO_ATTENTION = {
    "fnet",
    "yoso",
    "mra",
    "reformer",
    "autoformer",
    "swiftformer",
    "mobilevitv2",
    "falcon_mamba",
    "mamba",
    "mamba2",
    "rwkv",
}
# Something sits between attention and W_O, or A·V is not the whole context.
NO_PROJECTION_BECAUSE = {
    "convbert": "a convolution is concatenated to the context",
    "nystromformer": "the context is a product of three matrices plus a convolution",
    "vits": "relative values are added to the context",
    "longformer": "local and global parts are summed",
    "led": "local and global parts are summed",
    "pegasus_x": "local and global parts are summed",
    "longt5": "local attention is laid out in blocks and cut to the length afterwards",
    "mgp-str": "a norm before the projection of the token learners",
    "informer": "the context is scattered into mean values",
    "neomme": "the context is gated",
    "levit": "hardswish before the projection",
    "florence_vision": "the tokens of channel attention are channels",
    "gemma4_audio": "the projection clips its input",
    "kosmos-2": "a norm before the projection",
    "jev": "the context is gated",
    "afmoe": "the context is gated",
    "qwen3_5_text": "the context is gated",
    "qwen3_next": "the context is gated",
    "bitnet": "a norm before the projection",
}
# Attention is laid out in blocks of the padded length; tests/tap/test_zoo.py compares the outputs.
BLOCKS = {"longformer"}
VERSION, DOCUMENTED = documented()


@pytest.mark.parametrize("name", NAMES)
def test_architecture(name: str) -> None:
    found = verdict(name)
    assert found.identical
    if name in NO_ATTENTION:
        assert not found.supported
        assert "no softmax·V product was seen" in found.reason
    else:
        assert found.supported, found.reason
        unknown = [site for site in found.sites if site.projection is None]
        assert bool(unknown) == (name in NO_PROJECTION_BECAUSE), unknown
        assert all(site.projection_reason for site in unknown)
        assert max(site.context_error for site in found.sites) <= 1e-5
        assert max(site.output_error or 0.0 for site in found.sites) <= 1e-5
    assert DOCUMENTED.get(name) == marks(found), "run `python -m tests.support.conformance`"


def test_the_readme_lists_this_version() -> None:
    assert transformers.__version__ == VERSION, "run `python -m tests.support.conformance`"
    assert set(DOCUMENTED) == set(NAMES), "run `python -m tests.support.conformance`"


def test_at_least_210_architectures_work() -> None:
    works = [name for name, mark in DOCUMENTED.items() if REFUSED not in mark]
    assert len(works) >= 210
    assert sum(NO_PROJECTION in mark for mark in DOCUMENTED.values()) <= len(NO_PROJECTION_BECAUSE)


def real_part(capture: Capture, index: int, computed: Callable[[Capture], Tensor]) -> Tensor:
    """Maps of one example at its real rows and keys, once it is sure that the rest is empty."""
    keys, rows = capture.support.keys[index, 0], capture.real_rows[index, 0]
    maps = computed(capture)[index][:, rows]
    assert not maps[..., ~keys].any()
    return maps[..., keys]


def rounding(capture: Capture) -> float:
    """How far attention in float32 may be off, relative to its largest entry.

    A batch of another shape is multiplied in another order: that is a few eps. Softmax turns an
    absolute error of the logits into a relative one of A, and logits are rounded relative to
    their size, which is 80 in embedding_gemma2.
    """
    largest = 0.0
    if capture.query is not None and capture.key is not None:
        logits = capture.scaling * capture.query @ capture.key.mT
        largest = float((logits if capture.bias is None else logits + capture.bias).abs().max())
    return (16 + 2 * largest) * torch.finfo(torch.float32).eps


@pytest.mark.parametrize("name", names("text"))
def test_padded_batch_equals_one_by_one(name: str) -> None:
    example = build(name)
    singles = example.singles()
    if singles is None or name in NO_ATTENTION:
        assert (
            name in NO_ATTENTION or example.padding_leaks or "attention_mask" not in example.inputs
        )
        return
    together = record(example.model, **example.inputs)
    if name in BLOCKS:
        return
    for index, inputs in enumerate(singles):
        alone = record(example.model, **inputs)
        assert len(alone) == len(together)
        for one, many in zip(alone, together, strict=True):
            if one.windows > 1 or many.windows > 1:
                continue  # so are these
            bar = rounding(one)
            for computed in (Capture.attention, Capture.effective_attention):
                expected, found = real_part(one, 0, computed), real_part(many, index, computed)
                assert (found - expected).abs().max() <= bar * expected.abs().max()


def test_local_attention_of_an_encoder_is_seen_too() -> None:
    sites = {site.site for site in verdict("longt5").sites if site.kind == "encoder"}
    assert len(sites) == 2
