"""Every class of result returns from its file bit by bit."""

from __future__ import annotations

import dataclasses
import inspect
from typing import get_args, get_type_hints

import pytest
import torch

import attnlens
from attnlens import load, save
from attnlens.attribution.contributions import AttributionMatrices
from attnlens.attribution.saliency import PassSaliency
from attnlens.corpus import Scan
from attnlens.saving import ENTRIES, RESULTS, storable
from tests.support.results import one_of_each
from tests.test_saving import assert_same

KINDS = (
    "HeadStatisticsResult HeadHealthResult LayerHealthResult NormStatisticsResult "
    "ResidualMixingResult HeadImportanceResult LabelAttentionResult "
    "HiddenTokenAttributionResult AttributionMatrices TokenSaliencyResult PassSaliency "
    "TokenIdentifiabilityResult HeadDrift Identifiability SimplexWitness SoftmaxWitness "
    "RealisabilityRank Verdict PruningCurve Plan PruningReport AttentionMap "
    "MinimalDistributionResult LayerStatisticsResult EffectiveFor"
).split()
ELSEWHERE = {"Capture"}  # tests/test_saving.py


@pytest.mark.parametrize("kind", KINDS)
def test_a_result_returns_bit_by_bit(kind, tmp_path):
    result = one_of_each()[kind]
    save(result, tmp_path / "a.safetensors")
    found = load(tmp_path / "a.safetensors")
    assert_same(found, result)
    if kind in ENTRIES:
        save([result, result], tmp_path / "a.safetensors")
        assert_same(load(tmp_path / "a.safetensors"), [result, result])
    if kind == "PruningCurve":
        assert str(found.table()) == str(result.table())
        assert found.plan("rising", 0.5) == result.plan("rising", 0.5)


def test_every_class_has_been_tried():
    assert RESULTS.keys() | ENTRIES.keys() == {*KINDS, *ELSEWHERE}


def returned(thing):
    """The dataclasses among what a public function, or an observer's compute, returns."""
    function = thing.compute if inspect.isclass(thing) and hasattr(thing, "compute") else thing
    if not inspect.isfunction(function):
        return set()
    kind = get_type_hints(function).get("return")
    return {k for k in (kind, *get_args(kind)) if dataclasses.is_dataclass(k)}


def test_every_public_result_can_be_saved():
    found = {kind for name in attnlens.__all__ for kind in returned(getattr(attnlens, name))}
    found |= {AttributionMatrices, PassSaliency}  # properties of observers
    assert len(found) > 12
    # a page has a file of its own, a scan a folder
    others = {attnlens.reporting.page.Report, Scan}
    assert {kind.__name__ for kind in found - others} <= RESULTS.keys() | ENTRIES.keys()


def test_views_of_one_tensor_are_saved_one_by_one(tmp_path):
    rows = torch.rand(3, 4, generator=torch.Generator().manual_seed(0))
    views = AttributionMatrices("s", (0,), rows[0:2], rows[1:3], rows[:, 1], *[rows[0]] * 3, True)
    save([views], tmp_path / "a.safetensors")
    assert_same(load(tmp_path / "a.safetensors"), [views])


def test_a_class_of_ones_own_can_be_saved(tmp_path, monkeypatch):
    @storable()
    @dataclasses.dataclass(frozen=True)
    class Pair:
        table: dict
        numbers: torch.Tensor

    monkeypatch.setitem(RESULTS, "Pair", RESULTS.pop("Pair"))
    pair = Pair({("a", 1): (2, 3.5), "b": None}, torch.eye(2))
    save(pair, tmp_path / "a.safetensors")
    found = load(tmp_path / "a.safetensors")
    assert found.table == pair.table and torch.equal(found.numbers, pair.numbers)
