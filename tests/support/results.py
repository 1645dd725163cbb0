"""One of each class of result, computed once for all tests of a process."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch

import attnlens
from attnlens import (
    EffectiveAttention,
    HeadImportance,
    HeadStatistics,
    HiddenTokenAttribution,
    LabelAttention,
    Lens,
    TokenIdentifiability,
    TokenSaliency,
)
from attnlens.attention import (
    LayerHealth,
    LayerStatistics,
    MinimalDistribution,
    NormStatistics,
    ResidualMixing,
)
from attnlens.recovery import MapTraining
from tests.support import heads, models


@cache
def one_of_each() -> dict[str, Any]:
    """Results of small models by the name of their class."""
    model, batch = models.build("bert"), models.inputs("bert")
    statistics, importance = HeadStatistics(), HeadImportance()
    more = HeadStatistics(fields="health"), LayerHealth(), NormStatistics(), ResidualMixing()
    more += (MinimalDistribution(), LayerStatistics())
    saliency = TokenSaliency(label_names=("all",))
    rates = TokenIdentifiability(
        "linear", labels=None, neighbours=1, training=MapTraining(max_epochs=1, width=8), seed=1
    )
    attention = LabelAttention(lambda given: given["input_ids"] % 2, ("even", "odd"))
    with Lens(model, statistics, importance, saliency, rates, attention, *more):
        for seed in range(8):
            lengths = tuple(range(4, 16))
            model(**models.text_inputs(lengths, seed)).last_hidden_state.square().sum().backward()
    maps = EffectiveAttention(heads=[1, 3])
    attribution = HiddenTokenAttribution(2, keep="matrices")
    with Lens(model, maps, attribution), torch.no_grad():
        model(**batch)
    (capture, _) = attnlens.record(model, **batch)
    whole = heads.build("bert")
    rising = torch.arange(8.0).reshape(2, 4)
    curve = attnlens.pruning.pruning_curve(whole, lambda model: 0.1, {"rising": rising}, 2)
    results = [
        statistics.compute(),
        *(observer.compute() for observer in more),
        importance.compute(),
        saliency.compute(),
        saliency.last[0],
        rates.compute(),
        attention.compute(),
        attribution.compute(),
        attribution.matrices[0],
        maps.compute()[0],
        attnlens.compare(model, models.build("bert"), batch),
        attnlens.identify(capture),
        attnlens.identifiability.simplex_witness(capture),
        attnlens.identifiability.softmax_witness(capture, max_iterations=2),
        attnlens.identifiability.realisability_rank(capture),
        attnlens.check(model),
        attnlens.effective_for(model, batch, maps=True),
        curve,
        curve.plan("rising", 0.5),
        attnlens.prune_heads(whole, {0: [1]}, repeats=1),
    ]
    return {type(result).__name__: result for result in results}
