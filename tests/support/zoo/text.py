"""Text encoders and text towers of multimodal models."""

from __future__ import annotations

import torch

from tests.support.zoo import inputs
from tests.support.zoo.catalogue import Catalogue, Recipe
from tests.support.zoo.shrink import tiny

text = Catalogue("text")

text.add(
    "albert",
    "bert",
    "bert-generation",
    "big_bird",
    "camembert",
    "clip_text_model",
    "data2vec-text",
    "distilbert",
    "dpr",
    "electra",
    "embedding_gemma2_text",
    "ernie",
    "eurobert",
    "flaubert",
    "gte",
    "jina_embeddings_v3",
    "layoutlm",
    "megatron-bert",
    "modernbert",
    "mpnet",
    "nomic_bert",
    "rembert",
    "roberta",
    "roberta-prelayernorm",
    "roformer",
    "splinter",
    "squeezebert",
    "tapas",
    "tipsv2_text_model",
    "xlm",
    "xlm-roberta",
    "xlm-roberta-xl",
    "xlnet",
)
text.add("fnet", "ibert", "mra")
text.add("convbert", padding_leaks="Its span convolutions reach into padding.")
text.add("nystromformer", padding_leaks="Its convolution reaches into padding.")
text.add("yoso", padding_leaks="It takes masks for -10000 that are the smallest float.")
text.add(
    "aimv2_text_model",
    model_class="Aimv2TextModel",
    padding_leaks="Under sdpa it is causal only if something is padded.",
)
text.add("align_text_model", model_class="AlignTextModel")
text.add("altclip_text_model", model_class="AltCLIPTextModel")
text.add("chinese_clip_text_model", model_class="ChineseCLIPTextModel")
text.add("clap_text_model", model_class="ClapTextModel")
text.add("clipseg_text_model", model_class="CLIPSegTextModel")
text.add("flava_text_model", model_class="FlavaTextModel")
text.add("groupvit_text_model", model_class="GroupViTTextModel")
text.add("metaclip_2_text_model", model_class="MetaClip2TextModel")
text.add("owlv2_text_model", model_class="Owlv2TextModel")
text.add("owlvit_text_model", model_class="OwlViTTextModel")
text.add("siglip2_text_model", model_class="Siglip2TextModel", projection_size=32)
text.add("siglip_text_model", model_class="SiglipTextModel", projection_size=32)
text.add("videoprism_text_model", model_class="VideoPrismTextModel")
text.add("xclip_text_model", model_class="XCLIPTextModel")
# The rotary dimension is at least 32.
text.add("clvp_encoder", model_class="ClvpEncoder", hidden_size=64, num_attention_heads=2)

text.add(
    "canine",
    num_hash_buckets=64,
    padding_leaks="It downsamples characters together with padding.",
)
text.add("deberta", relative_attention=True, pos_att_type=["c2p", "p2c"])
text.add("deberta-v2", relative_attention=True, pos_att_type=["c2p", "p2c"], position_buckets=8)
text.add("markuplm", max_depth=4, xpath_unit_hidden_size=8)
text.add("openai_privacy_filter", num_local_experts=4)
# The first and the last layer are convolutions.
text.add(
    "sam3_lite_text_text_model",
    num_hidden_layers=4,
    padding_leaks="Its convolutions reach into padding.",
)
text.add("ultrabert", layer_types=["sliding_attention", "full_attention"])
text.add("xmod", languages=["en_XX"], default_language="en_XX")
text.add(
    "funnel",
    block_sizes=[2, 1],
    block_repeats=[1, 1],
    num_decoder_layers=1,
    model_class="FunnelModel",
    padding_leaks="It pools tokens together with padding.",
)
text.add(
    "mobilebert",
    embedding_size=16,
    intra_bottleneck_size=16,
    num_feedforward_networks=2,
    padding_leaks="Each embedding joins those of its neighbours.",
)
text.add(
    "neomme",
    embedding_rank=16,
    hidden_size=64,
    num_hidden_layers=3,
    head_dim=32,
)
text.add(
    "roc_bert",
    pronunciation_vocab_size=20,
    shape_vocab_size=20,
    pronunciation_embed_dim=8,
    shape_embed_dim=8,
)


@text.architecture("esm")
def esm(model_type: str) -> Recipe:
    config = tiny(
        model_type,
        vocab_size=40,
        position_embedding_type="rotary",
        mask_token_id=32,
        pad_token_id=1,
    )
    return Recipe(config, inputs.text(largest=30))


@text.architecture("esmc")
def esmc(model_type: str) -> Recipe:
    config = tiny(model_type, vocab_size=40, num_key_value_heads=4)
    return Recipe(config, inputs.text(largest=30))


@text.architecture("bros")
def bros(model_type: str) -> Recipe:
    return Recipe(
        # Two-dimensional sinusoids need a wider model.
        tiny(model_type, hidden_size=128),
        inputs.text() | {"bbox": inputs.uniform(2, inputs.TOKENS, 8)},
    )


@text.architecture("lilt")
def lilt(model_type: str) -> Recipe:
    bbox = torch.zeros(2, inputs.TOKENS, 4, dtype=torch.long)
    return Recipe(tiny(model_type, hidden_size=48), inputs.text() | {"bbox": bbox})


@text.architecture("longformer")
def longformer(model_type: str) -> Recipe:
    return Recipe(
        tiny(model_type, attention_window=4),
        inputs.text(12) | {"global_attention_mask": inputs.first_token(12)},
    )


@text.architecture("luke")
def luke(model_type: str) -> Recipe:
    config = tiny(
        model_type, entity_vocab_size=20, entity_emb_size=16, use_entity_aware_attention=True
    )
    # Positions of the tokens that mention each entity, filled up with -1.
    mentions = torch.tensor([[1, 2, -1], [3, -1, -1]])
    entities = {
        "entity_ids": torch.tensor([[1, 2], [3, 4]]),
        "entity_attention_mask": inputs.padding_mask(2, padded=1),
        "entity_position_ids": mentions.expand(2, 2, 3).contiguous(),
    }
    return Recipe(config, inputs.text() | entities)


@text.architecture("perceiver")
def perceiver(model_type: str) -> Recipe:
    config = tiny(model_type, num_latents=8, num_self_attends_per_block=2)
    return Recipe(
        config,
        {"inputs": inputs.noise(2, 20, 32), "attention_mask": inputs.padding_mask(20)},
    )


@text.architecture("reformer")
def reformer(model_type: str) -> Recipe:
    config = tiny(
        model_type,
        attention_head_size=8,
        feed_forward_size=64,
        attn_layers=["local", "lsh"],
        axial_pos_shape=[4, 8],
        axial_pos_embds_dim=[16, 16],
        local_attn_chunk_length=4,
        lsh_attn_chunk_length=4,
        num_buckets=2,
        max_position_embeddings=32,
        is_decoder=False,
        hash_seed=0,
    )
    return Recipe(config, inputs.text(32))


@text.architecture("embedding_gemma2")
def embedding_gemma2(model_type: str) -> Recipe:
    # Without a vision part it reads text alone.
    config = tiny(model_type, text_config=tiny("embedding_gemma2_text"))
    return Recipe(config, inputs.text())


@text.architecture("t5gemma2_encoder")
def t5gemma2_encoder(model_type: str) -> Recipe:
    return Recipe(tiny(model_type, text_config={"dropout_rate": 0.0}), inputs.text())
