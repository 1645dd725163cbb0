"""Vision towers that read the patches of all images as one packed sequence."""

from __future__ import annotations

import torch
from torch import Tensor

from tests.support.zoo import inputs
from tests.support.zoo.catalogue import Catalogue, Recipe
from tests.support.zoo.shrink import PATCH, tiny

packed = Catalogue("packed_vision")

# Two images, each one frame of 4 x 4 patches.
GRID = torch.tensor([[1, 4, 4], [1, 4, 4]])
PATCHES = int(GRID.prod(dim=1).sum())
PIXELS = 3 * PATCH * PATCH
# Where time steps hold two frames, still images are repeated.
PIXELS_OF_TWO_FRAMES = 2 * PIXELS


def patches(*shape: int, argument: str) -> dict[str, Tensor]:
    """Return the patches of both images and the grids they come from."""
    return {argument: inputs.noise(PATCHES, *shape), "grid_thw": GRID}


@packed.architecture("exaone4_5_vision", "qwen2_5_vl_vision")
def windowed_qwen(model_type: str) -> Recipe:
    config = tiny(model_type, window_size=32, fullatt_block_indexes=[1])
    return Recipe(config, patches(PIXELS_OF_TWO_FRAMES, argument="hidden_states"))


@packed.architecture(
    "cohere_compass_vision",
    "qwen3_vl_moe_vision",
    "qwen3_vl_vision",
)
def deepstack_qwen(model_type: str) -> Recipe:
    config = tiny(model_type, num_position_embeddings=16, deepstack_visual_indexes=[0])
    return Recipe(config, patches(PIXELS_OF_TWO_FRAMES, argument="hidden_states"))


@packed.architecture("qwen3_5_moe_vision", "qwen3_5_vision", "qwen4_exp_vision")
def qwen3_5(model_type: str) -> Recipe:
    config = tiny(model_type, num_position_embeddings=16)
    return Recipe(config, patches(PIXELS_OF_TWO_FRAMES, argument="hidden_states"))


@packed.architecture("glm4v_moe_vision", "glm4v_vision", "glm5_next_vision", "glm_ocr_vision")
def glm(model_type: str) -> Recipe:
    size = {"projection_intermediate_size": 64} if model_type == "glm5_next_vision" else {}
    return Recipe(tiny(model_type, **size), patches(PIXELS_OF_TWO_FRAMES, argument="hidden_states"))


@packed.architecture("ernie4_5_vl_moe_vision")
def ernie(model_type: str) -> Recipe:
    return Recipe(
        tiny(model_type),
        patches(PIXELS, argument="hidden_states"),
        "Ernie4_5_VLMoeVisionTransformerPretrainedModel",
    )


@packed.architecture("hunyuan_vl_vision", "hy_v4_vl_vision")
def hunyuan(model_type: str) -> Recipe:
    config = tiny(model_type, max_image_size=64, text_hidden_size=64)
    return Recipe(config, patches(PIXELS, argument="pixel_values"))


@packed.architecture("cosmos3_edge_vision", "glm_image_vision")
def pixel_rows(model_type: str) -> Recipe:
    return Recipe(tiny(model_type), patches(PIXELS, argument="pixel_values"))


@packed.architecture("muse_glimmer_vision", "muse_spark_vision")
def two_frame_pixel_rows(model_type: str) -> Recipe:
    return Recipe(tiny(model_type), patches(PIXELS_OF_TWO_FRAMES, argument="pixel_values"))


@packed.architecture("lfm3_vl_vision")
def convolutions_then_attention(model_type: str) -> Recipe:
    config = tiny(model_type, layer_types=["conv", "full_attention"])
    return Recipe(config, patches(PIXELS_OF_TWO_FRAMES, argument="pixel_values"))


@packed.architecture("minimax_m3_vl_vision")
def minimax(model_type: str) -> Recipe:
    return Recipe(
        tiny(model_type),
        patches(PIXELS_OF_TWO_FRAMES, argument="pixel_values"),
        "MiniMaxM3VLVisionModel",
    )


@packed.architecture("kimi_k25_vision")
def kimi(model_type: str) -> Recipe:
    return Recipe(tiny(model_type), patches(3, PATCH, PATCH, argument="pixel_values"))


@packed.architecture("inkling2_vision")
def inkling2(model_type: str) -> Recipe:
    config = tiny(model_type, projection_hidden_dim=64, text_hidden_size=64, posemb_grid_size=8)
    # Patches come merged two by two, as in the language model that reads the tower.
    merged = inputs.noise(PATCHES // 4, 2 * PATCH, 2 * PATCH, 3)
    return Recipe(
        config, {"pixel_values": merged, "image_grid_thw": GRID // torch.tensor([1, 2, 2])}
    )


@packed.architecture("paddleocr_vl_vision")
def paddle(model_type: str) -> Recipe:
    pixels = inputs.noise(1, PATCHES, 3, PATCH, PATCH)
    return Recipe(
        tiny(model_type), {"pixel_values": pixels, "grid_thw": GRID}, "PaddleOCRVisionModel"
    )


@packed.architecture("video_llama_3_vision")
def video_llama_3(model_type: str) -> Recipe:
    merge_sizes = {"merge_sizes": torch.tensor([1, 1])}
    return Recipe(tiny(model_type), patches(PIXELS, argument="pixel_values") | merge_sizes)


@packed.architecture("minicpm_ocr_vision", "minicpmv4_7_vision")
def minicpm(model_type: str) -> Recipe:
    # Images are unfolded to strips of patches, one after the other.
    strip = inputs.noise(1, 3, PATCH, PATCHES * PATCH)
    return Recipe(
        tiny(model_type, num_hidden_layers=3, insert_layer_id=1),
        {"pixel_values": strip, "target_sizes": GRID[:, 1:]},
    )
