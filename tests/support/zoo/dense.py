"""Dense prediction on transformer backbones, and matching of image pairs."""

from __future__ import annotations

from torch import Tensor
from transformers import (
    SuperPointConfig,
    VitDetConfig,
    VitPoseBackboneConfig,
)

from tests.support.zoo import backbones, inputs
from tests.support.zoo.catalogue import Catalogue, Recipe
from tests.support.zoo.shrink import HIDDEN, IMAGE, shrink, tiny

dense = Catalogue("dense")

# Every layer of the backbone is passed on.
FOUR_LAYERS = {"num_hidden_layers": 4, "out_indices": [1, 2, 3, 4]}
NECK = [8, 16, 24, 32]


@dense.architecture("depth_anything", "prompt_depth_anything")
def depth_anything(model_type: str) -> Recipe:
    config = tiny(
        model_type,
        backbone_config=FOUR_LAYERS,
        reassemble_hidden_size=HIDDEN,
        neck_hidden_sizes=NECK,
        fusion_hidden_size=16,
    )
    if model_type == "depth_anything":
        return Recipe(config, inputs.images(), "DepthAnythingForDepthEstimation")
    prompt = {"prompt_depth": inputs.uniform(2, 1, 8, 8)}
    return Recipe(config, inputs.images() | prompt, "PromptDepthAnythingForDepthEstimation")


@dense.architecture("zoedepth")
def zoedepth(model_type: str) -> Recipe:
    config = tiny(
        model_type,
        backbone_config=FOUR_LAYERS,
        neck_hidden_sizes=NECK,
        fusion_hidden_size=16,
        bottleneck_features=16,
        bin_embedding_dim=16,
        num_relative_features=8,
    )
    return Recipe(config, inputs.images(), "ZoeDepthForDepthEstimation")


@dense.architecture("chmv2")
def chmv2(model_type: str) -> Recipe:
    config = tiny(
        model_type,
        backbone_config=FOUR_LAYERS,
        post_process_channels=NECK,
        fusion_hidden_size=16,
        head_hidden_size=8,
        number_output_channels=16,
    )
    return Recipe(config, inputs.images(), "CHMv2ForDepthEstimation")


@dense.architecture("tipsv2_dpt")
def tipsv2_dpt(model_type: str) -> Recipe:
    config = tiny(
        model_type,
        backbone_config=FOUR_LAYERS,
        neck_hidden_sizes=NECK,
        fusion_hidden_size=16,
        num_depth_bins=8,
    )
    return Recipe(config, inputs.images(), "Tipsv2DptForDepthEstimation")


@dense.architecture("upernet")
def upernet(model_type: str) -> Recipe:
    config = tiny(
        model_type,
        backbone_config=backbones.swin("stage1", "stage2", "stage3", "stage4"),
        use_auxiliary_head=False,
    )
    return Recipe(config, inputs.images(64), "UperNetForSemanticSegmentation")


@dense.architecture("vitmatte")
def vitmatte(model_type: str) -> Recipe:
    backbone = shrink(VitDetConfig, patch_size=16, num_channels=4, out_features=["stage2"])
    config = tiny(
        model_type,
        backbone_config=backbone,
        convstream_hidden_sizes=[8, 8, 8],
        fusion_hidden_sizes=[8, 8, 8, 8],
    )
    # Three colours and a trimap.
    images = {"pixel_values": inputs.noise(2, 4, IMAGE, IMAGE)}
    return Recipe(config, images, "VitMatteForImageMatting")


@dense.architecture("vitpose")
def vitpose(model_type: str) -> Recipe:
    backbone = shrink(VitPoseBackboneConfig, image_size=[32, 32], patch_size=[8, 8])
    return Recipe(
        tiny(model_type, backbone_config=backbone), inputs.images(), "VitPoseForPoseEstimation"
    )


@dense.architecture("depth_pro")
def depth_pro(model_type: str) -> Recipe:
    tower = {"num_hidden_layers": 3}
    config = tiny(
        model_type,
        image_model_config=tower,
        patch_model_config=tower,
        fov_model_config=tower,
        patch_size=IMAGE,
        fusion_hidden_size=16,
        intermediate_hook_ids=[2, 1],
        intermediate_feature_dims=[16, 16],
        scaled_images_feature_dims=[16, 16, 16],
        merge_padding_value=1,
    )
    return Recipe(config, inputs.images(4 * IMAGE))


def image_pairs(size: int) -> dict[str, Tensor]:
    """Return pairs of images to be matched. Shape [B, 2, 3, height, width]."""
    return {"pixel_values": inputs.noise(2, 2, 3, size, size)}


def superpoint() -> SuperPointConfig:
    """Return a detector that passes on the twelve best keypoints."""
    return SuperPointConfig(
        encoder_hidden_sizes=[8, 8, 8, 8],
        decoder_hidden_size=16,
        descriptor_decoder_dim=HIDDEN,
        keypoint_threshold=0.0,
        max_keypoints=12,
    )


@dense.architecture("superglue")
def superglue(model_type: str) -> Recipe:
    config = tiny(
        model_type,
        keypoint_detector_config=superpoint(),
        keypoint_encoder_sizes=[8, 16],
        gnn_layers_types=["self", "cross"],
        sinkhorn_iterations=5,
    )
    return Recipe(config, image_pairs(64), "SuperGlueForKeypointMatching")


@dense.architecture("lightglue")
def lightglue(model_type: str) -> Recipe:
    config = tiny(
        model_type,
        keypoint_detector_config=superpoint(),
        descriptor_dim=HIDDEN,
        num_key_value_heads=4,
    )
    return Recipe(config, image_pairs(64), "LightGlueForKeypointMatching")


@dense.architecture("efficientloftr")
def efficientloftr(model_type: str) -> Recipe:
    config = tiny(
        model_type,
        stage_num_blocks=[1, 1, 1, 1],
        out_features=[8, 16, 16, 32],
        stage_stride=[2, 1, 2, 2],
        num_attention_layers=1,
        num_key_value_heads=4,
        # The rotary embedding spans half of the hidden size.
        rope_parameters={
            "rope_type": "default",
            "rope_theta": 10000.0,
            "partial_rotary_factor": 2.0,
        },
    )
    return Recipe(config, image_pairs(64))
