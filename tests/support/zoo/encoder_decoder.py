"""Text encoder-decoders."""

from __future__ import annotations

from transformers import (
    BertConfig,
    EncoderDecoderConfig,
    SpeechEncoderDecoderConfig,
    VisionEncoderDecoderConfig,
    ViTConfig,
)

from tests.support.zoo import inputs
from tests.support.zoo.audio import CONVOLUTIONS
from tests.support.zoo.catalogue import Catalogue, Recipe
from tests.support.zoo.shrink import HIDDEN, shrink, tiny

encoder_decoder = Catalogue("encoder_decoder")

encoder_decoder.add(
    "bart",
    "bigbird_pegasus",
    "blenderbot",
    "blenderbot-small",
    "longt5",
    "m2m_100",
    "marian",
    "mbart",
    "mt5",
    "mvp",
    "nllb-moe",
    "pegasus",
    "pegasus_x",
    "plbart",
    "prophetnet",
    "switch_transformers",
    "t5",
    "umt5",
)
encoder_decoder.add("fsmt", src_vocab_size=128, tgt_vocab_size=128)
encoder_decoder.add(
    "t5gemma",
    decoder={"cross_attention_hidden_size": HIDDEN},
    vocab_size=128,
)
encoder_decoder.add("t5gemma2")


@encoder_decoder.architecture("led")
def led(model_type: str) -> Recipe:
    config = tiny(
        model_type,
        max_encoder_position_embeddings=64,
        max_decoder_position_embeddings=64,
        attention_window=4,
    )
    global_attention = {"global_attention_mask": inputs.first_token(12)}
    return Recipe(config, inputs.text(12) | global_attention | inputs.decoder_text())


@encoder_decoder.architecture(
    "udop", padding_leaks="It drops the patches that lie under the boxes of padding."
)
def udop(model_type: str) -> Recipe:
    bbox = {"bbox": inputs.uniform(2, inputs.TOKENS, 4)}
    return Recipe(tiny(model_type), inputs.text() | bbox | inputs.images() | inputs.decoder_text())


@encoder_decoder.architecture("encoder-decoder")
def bert_to_bert(model_type: str) -> Recipe:
    decoder = shrink(BertConfig, is_decoder=True, add_cross_attention=True)
    config = EncoderDecoderConfig.from_encoder_decoder_configs(shrink(BertConfig), decoder)
    return Recipe(config, inputs.text() | inputs.decoder_text(), "EncoderDecoderModel")


@encoder_decoder.architecture("dia")
def dia(model_type: str) -> Recipe:
    channels = 3
    config = tiny(
        model_type,
        encoder_config={"num_key_value_heads": 4},
        decoder_config={
            "num_channels": channels,
            "cross_num_attention_heads": 4,
            "cross_num_key_value_heads": 4,
            "cross_head_dim": 8,
            "cross_hidden_size": HIDDEN,
        },
        delay_pattern=[0, 1, 2],
    )
    decoder_ids = inputs.token_ids(inputs.DECODER_TOKENS)[..., None].repeat(1, 1, channels)
    return Recipe(config, inputs.text() | {"decoder_input_ids": decoder_ids})


@encoder_decoder.architecture("vision-encoder-decoder")
def vit_to_bert(model_type: str) -> Recipe:
    decoder = shrink(BertConfig, is_decoder=True, add_cross_attention=True)
    config = VisionEncoderDecoderConfig.from_encoder_decoder_configs(shrink(ViTConfig), decoder)
    return Recipe(config, inputs.images() | inputs.decoder_text(), "VisionEncoderDecoderModel")


@encoder_decoder.architecture("speech-encoder-decoder")
def wav2vec2_to_bert(model_type: str) -> Recipe:
    decoder = shrink(BertConfig, is_decoder=True, add_cross_attention=True)
    encoder = tiny("wav2vec2", **CONVOLUTIONS)
    config = SpeechEncoderDecoderConfig.from_encoder_decoder_configs(encoder, decoder)
    return Recipe(config, inputs.sounds() | inputs.decoder_text(), "SpeechEncoderDecoderModel")
