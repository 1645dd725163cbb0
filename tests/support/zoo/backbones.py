"""Tiny convolutional and hierarchical backbones for detection and segmentation."""

from __future__ import annotations

from transformers import ResNetConfig, RTDetrResNetConfig, SwinConfig

WIDTHS = [8, 16, 24, 32]


def resnet(*stages: str) -> ResNetConfig:
    """Return a ResNet that passes on the feature maps of the named stages."""
    return ResNetConfig(
        embedding_size=8,
        hidden_sizes=WIDTHS,
        depths=[1, 1, 1, 1],
        layer_type="basic",
        out_features=list(stages),
    )


def rt_detr_resnet() -> RTDetrResNetConfig:
    """Return the ResNet variant of RT-DETR with its last three feature maps."""
    return RTDetrResNetConfig(
        embedding_size=8,
        hidden_sizes=WIDTHS,
        depths=[1, 1, 1, 1],
        layer_type="basic",
        out_features=["stage2", "stage3", "stage4"],
    )


def swin(*stages: str) -> SwinConfig:
    """Return a Swin transformer of four stages that passes on the named ones."""
    return SwinConfig(
        image_size=64,
        patch_size=4,
        embed_dim=16,
        depths=[1, 1, 1, 1],
        num_heads=[2, 2, 4, 4],
        window_size=4,
        out_features=list(stages),
    )


# Arguments of the vision part of SAM 2: a Hiera of four stages and a feature pyramid.
SAM2_VISION = {
    "backbone_config": {
        "hidden_size": 16,
        "num_attention_heads": 1,
        "image_size": [64, 64],
        "blocks_per_stage": [1, 1, 2, 1],
        "embed_dim_per_stage": [16, 32, 64, 128],
        "num_attention_heads_per_stage": [1, 2, 4, 8],
        "window_size_per_stage": [4, 2, 4, 2],
        "global_attention_blocks": [3],
        "window_positional_embedding_background_size": [4, 4],
    },
    "backbone_channel_list": [128, 64, 32, 16],
    "backbone_feature_sizes": [[16, 16], [8, 8], [4, 4]],
    "fpn_hidden_size": 32,
}
