"""Detection, segmentation, promptable segmentation and keypoint models."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import DetrConfig

from tests.support.zoo import backbones, inputs
from tests.support.zoo.catalogue import Catalogue, Recipe
from tests.support.zoo.shrink import FEED_FORWARD, HEADS, HIDDEN, LAYERS, shrink, tiny

detection = Catalogue("detection")

SIZE = 64
THREE_STAGES = ("stage2", "stage3", "stage4")
FOUR_STAGES = ("stage1", *THREE_STAGES)


def padded_images(size: int = SIZE) -> dict[str, Tensor]:
    """Return images and a pixel mask: the right quarter of the second one is padding."""
    mask = torch.ones(2, size, size, dtype=torch.long)
    mask[1, :, size - size // 4 :] = 0
    return inputs.images(size) | {"pixel_mask": mask}


@detection.architecture("conditional_detr", "dab-detr", "detr", "table-transformer")
def detr(model_type: str) -> Recipe:
    backbone = backbones.resnet("stage4")
    return Recipe(tiny(model_type, backbone_config=backbone, num_queries=5), padded_images())


@detection.architecture("deformable_detr")
def deformable_detr(model_type: str) -> Recipe:
    config = tiny(
        model_type,
        backbone_config=backbones.resnet(*THREE_STAGES),
        num_queries=5,
        num_feature_levels=3,
    )
    return Recipe(config, padded_images())


RT_DETR: dict[str, Any] = {
    "encoder_hidden_dim": HIDDEN,
    "encoder_in_channels": backbones.WIDTHS[1:],
    "decoder_in_channels": [HIDDEN] * 3,
    "num_queries": 10,
    "num_denoising": 0,
}


@detection.architecture("rt_detr", "rt_detr_v2")
def rt_detr(model_type: str) -> Recipe:
    config = tiny(model_type, backbone_config=backbones.rt_detr_resnet(), **RT_DETR)
    return Recipe(config, padded_images())


@detection.architecture("d_fine")
def d_fine(model_type: str) -> Recipe:
    config = tiny(model_type, backbone_config=backbones.resnet(*THREE_STAGES), **RT_DETR)
    return Recipe(config, padded_images())


@detection.architecture(
    "grounding-dino", "mm-grounding-dino", padding_leaks="Its eager attention adds a boolean mask."
)
def grounding_dino(model_type: str) -> Recipe:
    config = tiny(
        model_type,
        backbone_config=backbones.swin(*THREE_STAGES),
        num_queries=5,
        max_text_len=16,
        disable_custom_kernels=True,
    )
    return Recipe(config, padded_images(128) | inputs.text())


@detection.architecture("maskformer")
def maskformer(model_type: str) -> Recipe:
    decoder = shrink(DetrConfig, num_queries=5, backbone_config=backbones.resnet("stage4"))
    config = tiny(
        model_type,
        backbone_config=backbones.swin(*FOUR_STAGES),
        decoder_config=decoder,
        mask_feature_size=HIDDEN,
        fpn_feature_size=HIDDEN,
    )
    return Recipe(config, padded_images())


@detection.architecture("mask2former")
def mask2former(model_type: str) -> Recipe:
    config = tiny(
        model_type,
        backbone_config=backbones.swin(*FOUR_STAGES),
        feature_size=HIDDEN,
        mask_feature_size=HIDDEN,
        encoder_feedforward_dim=FEED_FORWARD,
        num_queries=5,
    )
    return Recipe(config, padded_images())


@detection.architecture("oneformer")
def oneformer(model_type: str) -> Recipe:
    config = tiny(
        model_type,
        backbone_config=backbones.swin(*FOUR_STAGES),
        conv_dim=HIDDEN,
        mask_dim=HIDDEN,
        encoder_feedforward_dim=FEED_FORWARD,
        num_queries=5,
        text_encoder_width=HIDDEN,
        text_encoder_num_layers=LAYERS,
        text_encoder_vocab_size=128,
        text_encoder_context_length=16,
        task_seq_len=8,
    )
    return Recipe(config, padded_images() | {"task_inputs": inputs.token_ids(8)})


@detection.architecture("sam", "sam_hq")
def sam(model_type: str) -> Recipe:
    mask_decoder = {
        "hidden_size": 16,
        "mlp_dim": 32,
        "iou_head_hidden_dim": 16,
        **({"vit_dim": HIDDEN} if model_type == "sam_hq" else {}),
    }
    config = tiny(
        model_type,
        vision_config={
            "image_size": SIZE,
            "window_size": 3,
            "global_attn_indexes": [1],
            "output_channels": 16,
            "num_pos_feats": 8,
        },
        prompt_encoder_config={"hidden_size": 16, "image_size": SIZE, "mask_input_channels": 4},
        mask_decoder_config=mask_decoder,
    )
    points = {"input_points": SIZE * inputs.uniform(2, 1, 2, 2)}
    return Recipe(config, inputs.images(SIZE) | points)


@detection.architecture("deimv2")
def deimv2(model_type: str) -> Recipe:
    config = tiny(
        model_type,
        backbone_config=backbones.resnet(*THREE_STAGES),
        lqe_hidden_dim=16,
        top_prob_values=2,
        **RT_DETR,
    )
    return Recipe(config, padded_images())


DETR_DECODER: dict[str, Any] = {
    "decoder_self_attention_heads": HEADS,
    "decoder_cross_attention_heads": HEADS,
    "num_queries": 10,
    "group_detr": 2,
    "c2f_num_blocks": 1,
}


@detection.architecture("lw_detr")
def lw_detr(model_type: str) -> Recipe:
    config = tiny(
        model_type,
        backbone_config={
            "image_size": SIZE,
            "pretrain_image_size": SIZE,
            "num_windows": 4,
            "window_block_indices": [0],
            "out_indices": [1, 2],
        },
        projector_scale_factors=[1.0],
        **DETR_DECODER,
    )
    return Recipe(config, padded_images())


@detection.architecture("rf_detr")
def rf_detr(model_type: str) -> Recipe:
    config = tiny(
        model_type,
        backbone_config={"image_size": SIZE, "num_windows": 2, "out_indices": [1, 2]},
        **DETR_DECODER,
    )
    return Recipe(config, padded_images())


@detection.architecture("pp_doclayout_v2")
def pp_doclayout_v2(model_type: str) -> Recipe:
    config = tiny(model_type, backbone_config=backbones.resnet(*THREE_STAGES), **RT_DETR)
    return Recipe(config, padded_images(), "PPDocLayoutV2Model")


@detection.architecture("pp_doclayout_v3", "pp_doclayout_v4")
def pp_doclayout(model_type: str) -> Recipe:
    stages = FOUR_STAGES if model_type == "pp_doclayout_v3" else THREE_STAGES
    config = tiny(
        model_type,
        backbone_config=backbones.resnet(*stages),
        x4_feat_dim=backbones.WIDTHS[0],
        mask_feature_channels=[16, 16],
        num_prototypes=8,
        **RT_DETR,
    )
    return Recipe(config, padded_images())


@detection.architecture("sam2")
def sam2(model_type: str) -> Recipe:
    config = tiny(
        model_type,
        vision_config=backbones.SAM2_VISION,
        prompt_encoder_config={
            "hidden_size": HIDDEN,
            "image_size": SIZE,
            "patch_size": 16,
            "mask_input_channels": 4,
        },
        mask_decoder_config={"iou_head_hidden_dim": 16, "hidden_size": HIDDEN},
    )
    return Recipe(config, inputs.images(SIZE) | {"input_points": SIZE * inputs.uniform(2, 1, 2, 2)})


@detection.architecture("sam3_lite_text", padding_leaks="Its convolutions reach into padding.")
@detection.architecture("sam3")
def sam3(model_type: str) -> Recipe:
    config = tiny(
        model_type,
        vision_config={"fpn_hidden_size": HIDDEN},
        detr_decoder_config={"num_queries": 5},
    )
    return Recipe(config, inputs.images() | inputs.text())
