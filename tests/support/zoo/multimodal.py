"""Models that read text together with images, video or sound."""

from __future__ import annotations

import torch
from transformers import BertConfig, VisionTextDualEncoderConfig, ViTConfig

from tests.support.zoo import backbones, inputs
from tests.support.zoo.audio import CLAP_AUDIO, clap_sounds
from tests.support.zoo.catalogue import Catalogue, Recipe
from tests.support.zoo.shrink import FIRST_ORDINARY_TOKEN, HIDDEN, IMAGE, MEL_BINS, shrink, tiny

multimodal = Catalogue("multimodal")

SOUND_TOKEN = FIRST_ORDINARY_TOKEN - 1

multimodal.add(
    "altclip",
    "chinese_clip",
    "clip",
    "clipseg",
    "git",
    "groupvit",
    "metaclip_2",
    "owlv2",
    "owlvit",
    "tipsv2",
)
multimodal.add(
    "aimv2", padding_leaks="Under sdpa its text tower is causal only if something is padded."
)
multimodal.add("siglip", text_config={"projection_size": HIDDEN})
multimodal.add("blip", image_text_hidden_size=HIDDEN)
multimodal.add(
    "align",
    vision_config={"hidden_dim": 64, "width_coefficient": 0.2, "depth_coefficient": 0.2},
    projection_dim=64,
)


def whole_images() -> dict[str, torch.Tensor]:
    """Return images with a mask that keeps every pixel."""
    return inputs.images() | {"pixel_mask": torch.ones(2, IMAGE, IMAGE, dtype=torch.long)}


@multimodal.architecture("siglip2")
def siglip2(model_type: str) -> Recipe:
    config = tiny(
        model_type,
        text_config={"projection_size": HIDDEN},
        vision_config={"num_patches": 16},
    )
    return Recipe(config, inputs.text() | inputs.variable_resolution_patches())


@multimodal.architecture("xclip")
def xclip(model_type: str) -> Recipe:
    config = tiny(
        model_type,
        vision_config={
            "num_frames": 2,
            "mit_hidden_size": HIDDEN,
            "mit_intermediate_size": 64,
            "mit_num_hidden_layers": 1,
            "mit_num_attention_heads": 4,
        },
        prompt_num_attention_heads=4,
    )
    return Recipe(config, inputs.text() | inputs.video(frames=2))


@multimodal.architecture("videoprism")
def videoprism(model_type: str) -> Recipe:
    config = tiny(
        model_type,
        vision_config={
            "image_size": 16,
            "num_frames": 2,
            "tubelet_size": [1, 8, 8],
            "num_spatial_layers": 2,
            "num_temporal_layers": 1,
            "num_auxiliary_layers": 1,
        },
    )
    return Recipe(config, inputs.text() | {"pixel_values_videos": inputs.noise(2, 2, 3, 16, 16)})


@multimodal.architecture("blip_2_qformer", "instructblip_qformer", "instructblipvideo_qformer")
def qformer(model_type: str) -> Recipe:
    config = tiny(model_type)
    states = {
        "encoder_hidden_states": inputs.noise(2, 9, config.encoder_hidden_size),
        "encoder_attention_mask": inputs.padding_mask(9),
    }
    queries = {"query_embeds": inputs.noise(2, 6, HIDDEN, seed=2)}
    if model_type == "blip_2_qformer":
        return Recipe(config, queries | states)
    names = {
        "instructblip_qformer": "InstructBlipQFormerModel",
        "instructblipvideo_qformer": "InstructBlipVideoQFormerModel",
    }
    ids = {"input_ids": inputs.token_ids(4)}
    return Recipe(config, ids | queries | states, names[model_type])


@multimodal.architecture("vilt")
def vilt(model_type: str) -> Recipe:
    return Recipe(tiny(model_type), inputs.text() | whole_images())


@multimodal.architecture("tvp")
def tvp(model_type: str) -> Recipe:
    config = tiny(
        model_type,
        backbone_config=backbones.resnet("stage4"),
        max_img_size=64,
        visual_prompt_size=4,
        num_frames=2,
    )
    # The model adds its column embeddings in a way that only a batch of one survives.
    return Recipe(config, inputs.text(batch=1) | inputs.video(batch=1, frames=2, size=64))


@multimodal.architecture("bridgetower")
def bridgetower(model_type: str) -> Recipe:
    config = tiny(
        model_type,
        # The towers split their width into heads of 64.
        hidden_size=64,
        text_config={"hidden_size": 64, "num_hidden_layers": 4},
        vision_config={"hidden_size": 64, "num_hidden_layers": 4},
    )
    return Recipe(config, inputs.text() | whole_images())


@multimodal.architecture("vision-text-dual-encoder")
def dual_encoder(model_type: str) -> Recipe:
    config = VisionTextDualEncoderConfig.from_vision_text_configs(
        shrink(ViTConfig), shrink(BertConfig), projection_dim=16
    )
    return Recipe(config, inputs.text() | inputs.images())


@multimodal.architecture("flava")
def flava(model_type: str) -> Recipe:
    return Recipe(tiny(model_type), inputs.text() | inputs.images())


@multimodal.architecture("layoutlmv3")
def layoutlmv3(model_type: str) -> Recipe:
    config = tiny(model_type, coordinate_size=6, shape_size=4, input_size=IMAGE, rel_pos_bins=16)
    bbox = {"bbox": torch.zeros(2, inputs.TOKENS, 4, dtype=torch.long)}
    return Recipe(config, inputs.text() | bbox | inputs.images())


@multimodal.architecture("lxmert")
def lxmert(model_type: str) -> Recipe:
    config = tiny(model_type, visual_feat_dim=16)
    regions = {
        "visual_feats": inputs.noise(2, 5, 16),
        "visual_pos": inputs.uniform(2, 5, 4),
        "visual_attention_mask": inputs.padding_mask(5, padded=1),
    }
    return Recipe(config, inputs.text() | regions)


@multimodal.architecture("clap")
def clap(model_type: str) -> Recipe:
    return Recipe(tiny(model_type, audio_config=CLAP_AUDIO), inputs.text() | clap_sounds())


@multimodal.architecture("clvp")
def clvp(model_type: str) -> Recipe:
    # The rotary dimension is at least 32.
    tower = {"hidden_size": 64, "num_attention_heads": 2, "projection_dim": 64}
    config = tiny(
        model_type,
        text_config=tower,
        speech_config=tower,
        decoder_config={"feature_size": 16, "max_text_tokens": 64, "num_mel_attn_blocks": 2},
        projection_dim=64,
    )
    return Recipe(config, inputs.text() | {"input_features": inputs.noise(2, 16, 40)})


@multimodal.architecture("pix2struct")
def pix2struct(model_type: str) -> Recipe:
    config = tiny(model_type, vision_config={"patch_embed_hidden_size": 48, "seq_len": 32})
    return Recipe(
        config,
        inputs.flattened_patches(48) | inputs.decoder_text(),
        "Pix2StructForConditionalGeneration",
    )


@multimodal.architecture("kosmos-2")
def kosmos2(model_type: str) -> Recipe:
    config = tiny(model_type, latent_query_num=4)
    places = {"image_embeds_position_mask": inputs.image_places()}
    return Recipe(config, inputs.text() | inputs.images() | places)


@multimodal.architecture("kosmos-2.5")
def kosmos2_5(model_type: str) -> Recipe:
    config = tiny(model_type, latent_query_num=4, vision_config={"patch_embed_hidden_size": 48})
    patches = inputs.flattened_patches(48)["flattened_patches"]
    return Recipe(
        config,
        inputs.text()
        | {"flattened_patches": patches, "image_embeds_position_mask": inputs.image_places()},
    )


@multimodal.architecture("visual_bert")
def visual_bert(model_type: str) -> Recipe:
    regions = {
        "visual_embeds": inputs.noise(2, 5, 16),
        "visual_attention_mask": inputs.padding_mask(5, padded=1),
    }
    return Recipe(tiny(model_type, visual_embedding_dim=16), inputs.text() | regions)


@multimodal.architecture("granite_speech", "granite_speech_plus")
def granite_speech(model_type: str) -> Recipe:
    # Each window of four frames becomes two tokens: eight frames fill the four places.
    config = tiny(
        model_type,
        encoder_config={"input_dim": MEL_BINS, "context_size": 8, "output_dim": 16},
        window_size=4,
        downsample_rate=2,
        audio_token_index=SOUND_TOKEN,
    )
    text = inputs.text()
    text["input_ids"][:, 1:5] = SOUND_TOKEN
    return Recipe(config, text | {"input_features": inputs.noise(2, 8, MEL_BINS)})
