"""Batched and padded equals one by one."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from transformers import PreTrainedModel

from attnlens import HeadStatistics, Lens
from attnlens.attention import Recording
from attnlens.attention.statistics import HeadStatisticsResult
from attnlens.texts.batching import TokenisedTexts
from tests.support import models

LENGTHS = (19, 6, 3, 1, 12)


def look(
    model: PreTrainedModel, *batches: dict[str, Tensor]
) -> tuple[HeadStatisticsResult, Recording]:
    statistics, recording = HeadStatistics(), Recording()
    with Lens(model, statistics, recording), torch.no_grad():
        for batch in batches:
            model(**batch)
    return statistics.compute(), recording


def one_by_one(batch: dict[str, Tensor]) -> list[dict[str, Tensor]]:
    """The same examples without padding."""
    return [
        {name: tensor[index : index + 1, :length] for name, tensor in batch.items()}
        for index, length in enumerate(batch["attention_mask"].sum(1).tolist())
    ]


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("name", models.TEXT_FAMILIES)
def test_statistics_of_every_example(name: str, implementation: str) -> None:
    model = models.build(name, implementation)
    tolerance = 1e-4  # what a batch of another shape changes in a float32 model
    if implementation == "sdpa":  # eager attention takes its softmax in float32 whatever the model
        model, tolerance = model.double(), 1e-9
    batch = models.text_inputs(LENGTHS)
    together, _ = look(model, batch)
    apart = [look(model, example)[0] for example in one_by_one(batch)]
    all_apart, _ = look(model, *one_by_one(batch))

    def close(found: Tensor, expected: Tensor, field: str) -> None:
        torch.testing.assert_close(
            found, expected, rtol=tolerance, atol=tolerance, msg=lambda text: f"{field}: {text}"
        )

    for field, values in together.tensors().items():
        close(all_apart.tensors()[field], values, field)
        if field not in {"examples", "skipped", "pooled_correlation"}:
            each = torch.stack([result.tensors()[field] for result in apart])
            combine = {"nullity_min": torch.amin, "nullity_max": torch.amax}
            close(combine.get(field, torch.nanmean)(each, 0), values, field)
    assert apart[3].nullity.eq(0).all() and apart[0].nullity.gt(0).all()
    assert apart[3].correlation.isnan().all()  # one token: nothing varies
    assert together.examples.eq(len(LENGTHS)).all()


@pytest.mark.parametrize("name", models.TEXT_FAMILIES)
def test_maps_of_every_example(name: str) -> None:
    model = models.build(name)
    batch = models.text_inputs(LENGTHS)
    _, together = look(model, batch)
    for index, example in enumerate(one_by_one(batch)):
        _, alone = look(model, example)
        length = LENGTHS[index]
        for batched, single in zip(together.captures, alone.captures, strict=True):
            for method in ("attention", "effective_attention"):
                found = getattr(batched, method)()[index]
                expected = getattr(single, method)()[0]
                torch.testing.assert_close(
                    found[:, :length, :length], expected, rtol=1e-4, atol=1e-5
                )
                assert found[:, :length, length:].eq(0).all()


@pytest.mark.parametrize("name", ["bert", "modernbert"])
def test_padding_on_the_left(name: str) -> None:
    """Attention cares for the mask, not for the side it is on."""
    model = models.build(name).double()
    batch = models.text_inputs((12, 5))
    flipped = {key: tensor.clone() for key, tensor in batch.items()}
    for key, tensor in flipped.items():
        tensor[1] = batch[key][1].roll(7)
    flipped["position_ids"] = torch.stack([torch.arange(12), (torch.arange(12) - 7).clamp(min=0)])
    right, left = look(model, batch)[0], look(model, flipped)[0]
    for field, values in right.tensors().items():
        torch.testing.assert_close(left.tensors()[field], values, rtol=1e-9, atol=1e-9)


@given(st.lists(st.integers(1, 50), max_size=60), st.integers(1, 9), st.integers(1, 200))
def test_batches_are_of_similar_length_and_bounded(
    lengths: list[int], most: int, tokens: int
) -> None:
    texts = TokenisedTexts({"input_ids": [[0] * length for length in lengths]}, truncated=0)
    found = list(texts.groups(most, tokens))
    assert sorted(index for batch in found for index in batch) == list(range(len(lengths)))
    flat = [lengths[index] for batch in found for index in batch]
    assert flat == sorted(flat, reverse=True)
    for batch in found:
        longest = max(lengths[index] for index in batch)
        assert len(batch) <= most and (len(batch) == 1 or longest * len(batch) <= tokens)
    for batch in found[:-1]:  # no batch had room for one more text
        assert len(batch) == most or lengths[batch[0]] * (len(batch) + 1) > tokens
