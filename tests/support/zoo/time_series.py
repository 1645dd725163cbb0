"""Time-series transformers."""

from __future__ import annotations

import torch

from tests.support.zoo import inputs
from tests.support.zoo.catalogue import Catalogue, Recipe
from tests.support.zoo.shrink import tiny

time_series = Catalogue("time_series")

CONTEXT = 12
LARGEST_LAG = 2
PREDICTION = 4


@time_series.architecture("autoformer", "informer", "time_series_transformer")
def forecaster(model_type: str) -> Recipe:
    config = tiny(
        model_type,
        prediction_length=PREDICTION,
        context_length=CONTEXT,
        lags_sequence=[1, LARGEST_LAG],
        num_time_features=1,
    )
    observed = CONTEXT + LARGEST_LAG
    return Recipe(
        config,
        {
            "past_values": inputs.noise(2, observed),
            "past_time_features": inputs.noise(2, observed, 1, seed=2),
            "past_observed_mask": inputs.padding_mask(observed),
            "future_values": inputs.noise(2, PREDICTION, seed=3),
            "future_time_features": inputs.noise(2, PREDICTION, 1, seed=4),
        },
    )


@time_series.architecture("patchtst")
def patchtst(model_type: str) -> Recipe:
    config = tiny(
        model_type,
        num_input_channels=2,
        context_length=32,
        patch_length=8,
        patch_stride=8,
        channel_attention=True,
    )
    return Recipe(config, {"past_values": inputs.noise(2, 32, 2)})


@time_series.architecture("patchtsmixer")
def patchtsmixer(model_type: str) -> Recipe:
    config = tiny(
        model_type,
        num_input_channels=2,
        context_length=32,
        patch_length=8,
        patch_stride=8,
        self_attn=True,
        self_attn_heads=2,
    )
    return Recipe(config, {"past_values": inputs.noise(2, 32, 2)})


@time_series.architecture("timesfm")
def timesfm(model_type: str) -> Recipe:
    config = tiny(model_type, patch_length=4, context_length=16, horizon_length=8)
    return Recipe(
        config,
        {
            "past_values": inputs.noise(2, 16),
            "past_values_padding": torch.zeros(2, 16),
            "freq": torch.zeros(2, 1, dtype=torch.long),
        },
    )


@time_series.architecture("timesfm2_5")
def timesfm2_5(model_type: str) -> Recipe:
    config = tiny(
        model_type,
        patch_length=4,
        context_length=16,
        horizon_length=8,
        output_quantile_len=8,
        num_key_value_heads=4,
    )
    return Recipe(config, {"past_values": inputs.noise(2, 16)})
