"""`EffectiveAttention`: maps on the CPU, within a stated bound."""

from __future__ import annotations

import pytest
import torch

from attnlens import AttnLensError, EffectiveAttention, Lens
from attnlens.attention import Recording
from attnlens.attention.maps import AttentionMap
from attnlens.errors import InputError, MemoryBoundError
from tests.algebra.test_rowwise import window
from tests.support import models
from tests.support.captures import synthetic_capture

PADDED = torch.arange(26) < torch.tensor([26, 15, 5])[:, None]
MASKS = {
    "padding": PADDED[:, None, None],
    "window": window(26, 4)[None, None] & PADDED[:, None, None],
    "one for each head": torch.stack([window(26, r) for r in (2, 9, 30, 5)])[None],
}


def assert_same(first: list[AttentionMap], second: list[AttentionMap]) -> None:
    assert len(first) == len(second)
    for one, other in zip(first, second, strict=True):
        assert (one.stack, one.layer, one.heads) == (other.stack, other.layer, other.heads)
        for name in ("raw", "effective", "mask"):
            assert torch.equal(getattr(one, name), getattr(other, name))


@pytest.mark.parametrize("simplex", [False, True])
@pytest.mark.parametrize("name", MASKS)
def test_maps_are_those_of_the_capture(name: str, simplex: bool) -> None:
    capture = synthetic_capture(mask=MASKS[name])
    maps = EffectiveAttention(heads=[2, 0], simplex=simplex)
    maps.update(capture)
    (kept,) = maps.compute()
    assert kept.heads == (2, 0) and (kept.stack, kept.layer) == (capture.stack, capture.layer)
    assert torch.equal(kept.raw, capture.attention()[:, [2, 0]])
    assert torch.equal(kept.effective, capture.effective_attention(simplex)[:, [2, 0]])
    real = capture.real_rows[..., None] & MASKS[name]
    expected = real[:, [2, 0]] if name == "one for each head" else real
    assert torch.equal(kept.mask, expected.expand_as(kept.mask))


def test_in_a_model() -> None:
    model, inputs = models.build("bert"), models.inputs("bert")
    maps, recording = EffectiveAttention(layers=[1]), Recording()
    with Lens(model, maps, recording), torch.no_grad():
        model(**inputs)
        model(**inputs)
    kept = maps.compute()
    assert [entry.layer for entry in kept] == [1, 1]
    assert torch.equal(kept[0].effective, recording.captures[1].effective_attention())
    assert kept[0].effective.device.type == "cpu" and kept[0].effective.dtype == torch.float32


def test_maps_share_no_memory_with_the_model() -> None:
    capture = synthetic_capture(mask=MASKS["padding"])
    maps = EffectiveAttention()
    maps.update(capture)
    kept = maps.compute()[0]
    before = kept.mask.clone()
    capture.masking.mask.fill_(False)
    assert torch.equal(kept.mask, before)


def test_bound_is_kept_before_it_is_crossed() -> None:
    needed = 3 * 26 * (26 * (2 * 4 * 4 + 1) + 4 * 4)
    capture = synthetic_capture(mask=MASKS["padding"])
    exact = EffectiveAttention(max_bytes=needed)
    exact.update(capture)
    assert exact.kept_bytes == needed
    with pytest.raises(MemoryBoundError, match="max_bytes"):
        exact.update(capture)
    assert exact.kept_bytes == needed and len(exact.compute()) == 1
    exact.reset()
    exact.update(capture)
    small = EffectiveAttention(max_bytes=needed - 1)
    with pytest.raises(MemoryBoundError, match=r"layer\.0\.attention.*3 example"):
        small.update(capture)
    assert small.kept_bytes == 0
    with pytest.raises(MemoryBoundError):
        small.merge(exact)


def test_merge_and_state() -> None:
    first, second, both = EffectiveAttention(), EffectiveAttention(), EffectiveAttention()
    for seed, observers in ((0, (first, both)), (1, (second, both))):
        for observer in observers:
            observer.update(synthetic_capture(mask=MASKS["window"], seed=seed))
    restored = EffectiveAttention()
    restored.load_state_dict(both.state_dict())
    assert_same(restored.compute(), both.compute())
    assert first.merge(second) is first
    assert_same(first.compute(), both.compute())
    assert len(second.compute()) == 1


@pytest.mark.parametrize("heads", [[4], [-1], [0, 9]])
def test_heads_that_do_not_exist(heads: list[int]) -> None:
    with pytest.raises(InputError, match="heads 0 to 3"):
        EffectiveAttention(heads=heads).update(synthetic_capture())


def test_nothing_seen_is_an_error() -> None:
    with pytest.raises(AttnLensError, match="no attention call"):
        EffectiveAttention().compute()


def test_recordings_merge_and_have_no_state() -> None:
    first, second = Recording(), Recording()
    first.update(synthetic_capture())
    second.update(synthetic_capture(seed=1))
    captures = [*first.compute(), *second.compute()]
    assert first.merge(second).compute() == captures
    for refused in (first.state_dict, lambda: first.load_state_dict({}), first.sync):
        with pytest.raises(InputError, match="no state"):
            refused()
    assert first.compute() == captures
    first.reset()
    assert first.compute() == []
