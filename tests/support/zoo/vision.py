"""Image encoders."""

from __future__ import annotations

from typing import Any

import torch

from tests.support.zoo import backbones, inputs
from tests.support.zoo.catalogue import Catalogue, Recipe
from tests.support.zoo.shrink import HIDDEN, IMAGE, PATCH, tiny

vision = Catalogue("vision")

vision.add(
    "aimv2_vision_model",
    "chinese_clip_vision_model",
    "clip_vision_model",
    "deit",
    "dinov2",
    "dinov2_with_registers",
    "dinov3_vit",
    "dpt",
    "granite_docling_vision",
    "ijepa",
    "mlcd_vision_model",
    "pixio",
    "pixtral",
    "sam3_vit_model",
    "siglip_vision_model",
    "tipsv2_vision_model",
    "vit",
    "vit_msn",
    "vitdet",
)
vision.add("beit", "data2vec-vision", use_relative_position_bias=True)
vision.add("sam_vision_model", "sam_hq_vision_model", output_channels=16)
vision.add("internvl_vision", "qianfan_ocr_vision", image_size=[32, 32], patch_size=[8, 8])
vision.add("altclip_vision_model", model_class="AltCLIPVisionModel")
vision.add("blip_2_vision_model", model_class="Blip2VisionModel")
vision.add("blip_vision_model", model_class="BlipVisionModel")
vision.add("clipseg_vision_model", model_class="CLIPSegVisionModel")
vision.add("flava_image_model", model_class="FlavaImageModel")
vision.add("git_vision_model", model_class="GitVisionModel")
vision.add("groupvit_vision_model", model_class="GroupViTVisionModel")
vision.add("instructblip_vision_model", model_class="InstructBlipVisionModel")
vision.add("instructblipvideo_vision_model", model_class="InstructBlipVideoVisionModel")
vision.add("janus_vision_model", model_class="JanusVisionModel")
vision.add(
    "llama4_vision_model",
    model_class="Llama4VisionModel",
    # Four neighbouring patches are joined to one.
    intermediate_size=4 * HIDDEN,
    projector_input_dim=64,
    projector_output_dim=64,
    vision_output_dim=64,
)
vision.add("metaclip_2_vision_model", model_class="MetaClip2VisionModel")
vision.add("owlv2_vision_model", model_class="Owlv2VisionModel")
vision.add("owlvit_vision_model", model_class="OwlViTVisionModel")
vision.add(
    "pp_formulanet_vision",
    model_class="PPFormulaNetVisionModel",
    output_channels=16,
    post_conv_in_channels=16,
    post_conv_mid_channels=16,
    post_conv_out_channels=16,
    decoder_hidden_size=16,
)
vision.add("step3p5_vision", model_class="Step3p7VisionModel")

PYRAMID: dict[str, Any] = {
    "hidden_sizes": [8, 16, 24, 32],
    "depths": [1, 1, 1, 1],
    "num_attention_heads": [1, 2, 3, 4],
}
WINDOWS: dict[str, Any] = {
    "patch_size": 2,
    "embed_dim": 16,
    "depths": [2, 2],
    "num_heads": [2, 4],
    "window_size": 4,
}
vision.add("donut-swin", "maskformer-swin", "swin", **WINDOWS)
vision.add("swinv2", pretrained_window_sizes=[0, 0], **WINDOWS)
vision.add("swin2sr", **(WINDOWS | {"patch_size": 1}))
vision.add("glpn", "segformer", decoder_hidden_size=16, **PYRAMID)
vision.add(
    "mgp-str",
    image_size=[32, 32],
    max_token_length=5,
    num_character_labels=10,
    num_bpe_labels=10,
    num_wordpiece_labels=10,
)
# Stochastic depth indexes the blocks of a stage by the number of the stage.
vision.add("cvt", image_size=64, embed_dim=[8, 16, 32], num_heads=[1, 2, 4], depth=[1, 2, 3])
vision.add(
    "levit",
    image_size=64,
    hidden_sizes=[16, 24, 32],
    num_attention_heads=[2, 3, 4],
    depths=[1, 1, 1],
    key_dim=[8, 8, 8],
    patch_size=16,
)
vision.add(
    "mobilevit",
    image_size=64,
    hidden_sizes=[16, 24, 32],
    patch_size=2,
    neck_hidden_sizes=[8, 8, 16, 16, 24, 24, 32],
)
vision.add("mobilevitv2", image_size=64, width_multiplier=0.25, patch_size=2)
vision.add("swiftformer", image_size=64, depths=[1, 1, 1, 1], embed_dims=[8, 16, 24, 32])
vision.add("radio", max_img_size=64, num_registers=2, num_cls_tokens=3, mlp_ratio=2.0)
vision.add(
    "sapiens2",
    num_hidden_layers=4,
    num_key_value_attention_heads=2,
    num_first_full_attention_layers=1,
    num_last_full_attention_layers=1,
    num_register_tokens=2,
)
vision.add("yolos", image_size=[32, 32], num_detection_tokens=4)
vision.add(
    "vitpose_backbone", model_class="VitPoseBackbone", image_size=[32, 32], patch_size=[8, 8]
)
vision.add(
    "eomt",
    model_class="EomtForUniversalSegmentation",
    num_queries=5,
    num_blocks=1,
    num_upscale_blocks=1,
)
vision.add(
    "eomt_dinov3",
    model_class="EomtDinov3ForUniversalSegmentation",
    num_queries=5,
    num_blocks=1,
    num_upscale_blocks=1,
)
vision.add(
    "hiera",
    image_size=[64, 64],
    embed_dim=16,
    depths=[1, 1, 1],
    num_heads=[1, 2, 4],
    query_stride=[2, 2],
    masked_unit_size=[4, 4],
    num_query_pool=2,
    patch_size=[7, 7],
    patch_stride=[4, 4],
)

TWO_STAGES: dict[str, Any] = {
    "hidden_sizes": [16, 32],
    "depths": [1, 1],
    "num_attention_heads": [1, 2],
    "num_encoder_blocks": 2,
    "mlp_ratios": [2, 2],
    "strides": [4, 2],
}
vision.add("pvt", sequence_reduction_ratios=[2, 1], patch_sizes=[4, 2], **TWO_STAGES)
vision.add("pvt_v2", sr_ratios=[2, 1], patch_sizes=[7, 3], **TWO_STAGES)


def padded_patches() -> dict[str, torch.Tensor]:
    """Return a boolean mask: the last column of patches of the second image is padding."""
    side = IMAGE // PATCH
    mask = torch.ones(2, side, side, dtype=torch.bool)
    mask[1, :, -1] = False
    return {"patch_attention_mask": mask}


@vision.architecture("vit_mae")
def vit_mae(model_type: str) -> Recipe:
    # Without this argument the model masks patches at random.
    order = inputs.uniform(2, (IMAGE // PATCH) ** 2)
    return Recipe(tiny(model_type), inputs.images() | {"noise": order})


@vision.architecture("siglip2_vision_model")
def siglip2_vision(model_type: str) -> Recipe:
    return Recipe(tiny(model_type, num_patches=16), inputs.variable_resolution_patches())


@vision.architecture("pix2struct_vision_model")
def pix2struct_vision(model_type: str) -> Recipe:
    config = tiny(model_type, patch_embed_hidden_size=48, seq_len=32)
    return Recipe(config, inputs.flattened_patches(48), "Pix2StructVisionModel")


@vision.architecture("seggpt")
def seggpt(model_type: str) -> Recipe:
    config = tiny(
        model_type,
        # The image and its prompt are stacked vertically.
        image_size=[2 * IMAGE, IMAGE],
        pretrain_image_size=IMAGE,
        decoder_hidden_size=16,
        merge_index=0,
        intermediate_hidden_state_indices=[0, 1],
    )
    return Recipe(
        config,
        inputs.images()
        | {
            "prompt_pixel_values": inputs.noise(2, 3, IMAGE, IMAGE, seed=2),
            "prompt_masks": inputs.noise(2, 3, IMAGE, IMAGE, seed=3),
        },
    )


@vision.architecture("sam2_vision_model")
def sam2_vision(model_type: str) -> Recipe:
    config = tiny(model_type, **backbones.SAM2_VISION)
    return Recipe(config, inputs.images(64))


@vision.architecture("gemma4_vision")
def gemma4_vision(model_type: str) -> Recipe:
    config = tiny(
        model_type,
        num_key_value_heads=4,
        patch_size=4,
        position_embedding_size=64,
        pooling_kernel_size=2,
    )
    row, column = torch.meshgrid(torch.arange(4), torch.arange(4), indexing="ij")
    positions = torch.stack([column, row], dim=-1).reshape(1, 16, 2)
    return Recipe(
        config,
        {
            "pixel_values": inputs.uniform(2, 16, 3 * 4 * 4),
            "pixel_position_ids": positions.repeat(2, 1, 1),
        },
    )


@vision.architecture("mllama_vision_model")
def mllama_vision(model_type: str) -> Recipe:
    config = tiny(
        model_type,
        attention_heads=4,
        num_global_layers=1,
        max_num_tiles=2,
        supported_aspect_ratios=[[1, 1], [1, 2], [2, 1]],
        intermediate_layers_indices=[0],
        vision_output_dim=2 * HIDDEN,
    )
    # One image per example, cut to two tiles; the second example has one tile and padding.
    return Recipe(
        config,
        {
            "pixel_values": inputs.noise(2, 1, 2, 3, IMAGE, IMAGE),
            "aspect_ratio_ids": torch.tensor([[2], [1]]),
            "aspect_ratio_mask": torch.tensor([[[1, 1]], [[1, 0]]]),
        },
        "MllamaVisionModel",
    )


@vision.architecture("florence_vision")
def florence_vision(model_type: str) -> Recipe:
    config = tiny(
        model_type,
        depths=[1, 1],
        patch_size=[7, 3],
        patch_stride=[4, 2],
        patch_padding=[3, 1],
        patch_prenorm=[False, True],
        embed_dim=[16, 32],
        num_heads=[2, 4],
        num_groups=[2, 4],
        window_size=4,
    )
    images = {"hidden_states": inputs.noise(2, 3, 64, 64)}
    return Recipe(config, images, "Florence2VisionBackbone")


@vision.architecture("molmo2_vision")
def molmo2_vision(model_type: str) -> Recipe:
    config = tiny(model_type, image_size=[IMAGE, IMAGE], num_key_value_heads=4)
    patches = {"pixel_values": inputs.noise(2, 16, 3 * PATCH * PATCH)}
    return Recipe(config, patches, "Molmo2VisionModel")


@vision.architecture("sam3_vision_model")
def sam3_vision(model_type: str) -> Recipe:
    return Recipe(tiny(model_type, fpn_hidden_size=HIDDEN), inputs.images())


@vision.architecture("deepseek_ocr2_vision", "unlimited_ocr_vision")
def two_encoders(model_type: str) -> Recipe:
    # A SAM encoder and a convolution feed the encoder proper.
    sam = {"image_size": 64, "output_channels": 16, "downsample_channels": [16, HIDDEN]}
    names = {
        "deepseek_ocr2_vision": "DeepseekOcr2VisionModel",
        "unlimited_ocr_vision": "UnlimitedOcrVisionModel",
    }
    return Recipe(tiny(model_type, sam_config=sam), inputs.images(64), names[model_type])


@vision.architecture("pp_ocrv5_server_rec")
def text_line_recogniser(model_type: str) -> Recipe:
    backbone = {
        "stem_channels": [3, 8, 8],
        "stage_in_channels": [8, 16, 16, 16],
        "stage_mid_channels": [8, 8, 8, 8],
        "stage_out_channels": [16, 16, 16, 16],
        "stage_numb_of_layers": [1, 1, 1, 1],
    }
    config = tiny(model_type, backbone_config=backbone, head_out_channels=32)
    # The model alone is convolutional; attention is in the recogniser's encoder.
    return Recipe(config, inputs.images((48, 64)), "PPOCRV5ServerRecForTextRecognition")


@vision.architecture("idefics3_vision", "smolvlm_vision")
def idefics3(model_type: str) -> Recipe:
    return Recipe(tiny(model_type), inputs.images() | padded_patches())


@vision.architecture("phi4_multimodal_vision")
def phi4_vision(model_type: str) -> Recipe:
    images = inputs.images() | padded_patches()
    return Recipe(tiny(model_type), images, "Phi4MultimodalVisionModel")
