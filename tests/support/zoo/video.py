"""Video encoders."""

from __future__ import annotations

from tests.support.zoo import inputs
from tests.support.zoo.catalogue import Catalogue, Recipe
from tests.support.zoo.shrink import IMAGE, PATCH, tiny

video = Catalogue("video")

# The two images of the batch are the two frames of one video.
video.add("xclip_vision_model", model_class="XCLIPVisionModel", num_frames=2)


@video.architecture("videomae")
def videomae(model_type: str) -> Recipe:
    return Recipe(tiny(model_type, num_frames=4), inputs.video(frames=4))


@video.architecture("timesformer")
def timesformer(model_type: str) -> Recipe:
    return Recipe(tiny(model_type, num_frames=2), inputs.video(frames=2))


@video.architecture("vivit")
def vivit(model_type: str) -> Recipe:
    config = tiny(
        model_type, num_frames=4, tubelet_size=[2, PATCH, PATCH], video_size=[4, IMAGE, IMAGE]
    )
    return Recipe(config, inputs.video(frames=4))


@video.architecture("vjepa2")
def vjepa2(model_type: str) -> Recipe:
    config = tiny(
        model_type,
        # Three rotary axes: the head dimension is a multiple of six.
        hidden_size=36,
        num_attention_heads=3,
        pred_hidden_size=36,
        pred_num_attention_heads=3,
        pred_num_hidden_layers=2,
        num_pooler_layers=1,
        crop_size=IMAGE,
        frames_per_clip=4,
        tubelet_size=2,
    )
    return Recipe(config, {"pixel_values_videos": inputs.noise(2, 4, 3, IMAGE, IMAGE)})


@video.architecture("videoprism_vision_model")
def videoprism_vision(model_type: str) -> Recipe:
    config = tiny(
        model_type,
        image_size=16,
        num_frames=2,
        tubelet_size=[1, PATCH, PATCH],
        num_spatial_layers=2,
        num_temporal_layers=1,
        num_auxiliary_layers=1,
    )
    return Recipe(config, {"pixel_values_videos": inputs.noise(2, 2, 3, 16, 16)})


@video.architecture("videomt")
def videomt(model_type: str) -> Recipe:
    config = tiny(model_type, num_queries=5, num_blocks=1, num_upscale_blocks=1)
    videos = {"pixel_values_videos": inputs.noise(2, 2, 3, IMAGE, IMAGE)}
    return Recipe(config, videos, "VideomtForUniversalSegmentation")
