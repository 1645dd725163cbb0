"""Shrink any transformers configuration to a few thousand parameters."""

from __future__ import annotations

from typing import Any

from transformers import CONFIG_MAPPING, PreTrainedConfig

HIDDEN = 32
HEADS = 4
KEY_VALUE_HEADS = 2
HEAD_DIM = HIDDEN // HEADS
LAYERS = 2
FEED_FORWARD = 64
VOCABULARY = 128
POSITIONS = 128
IMAGE = 32
PATCH = 8
MEL_BINS = 16
WINDOW = 4

# Ids below this one are kept for special tokens and never drawn as ordinary input.
FIRST_ORDINARY_TOKEN = 5


def _each(size: int, fields: str) -> dict[str, int]:
    return dict.fromkeys(fields.split(), size)


TINY: dict[str, int] = {
    **_each(
        HIDDEN,
        "hidden_size hidden_dim d_model dim embed_dim embed_dims emb_dim n_embd embedding_size "
        "encoder_hidden_size decoder_hidden_size output_hidden_size "
        "text_embed_dim projection_dim d_latents qk_channels v_channels out_hidden_size "
        "conv_dim_out output_dim tdnn_out",
    ),
    **_each(
        LAYERS,
        "num_hidden_layers num_layers n_layers n_layer depth encoder_layers decoder_layers "
        "num_encoder_layers num_decoder_layers l_layers x_layers r_layers num_adapter_layers "
        "num_block_layers depth_cls",
    ),
    **_each(
        HEADS,
        "num_attention_heads num_heads n_heads n_head encoder_attention_heads "
        "decoder_attention_heads num_encoder_attention_heads num_decoder_attention_heads "
        "speech_encoder_attention_heads",
    ),
    **_each(KEY_VALUE_HEADS, "num_key_value_heads"),
    **_each(HEAD_DIM, "head_dim d_kv d_head kv_channels"),
    **_each(
        FEED_FORWARD,
        "intermediate_size ffn_dim encoder_ffn_dim decoder_ffn_dim d_ff d_ffn d_inner "
        "dim_feedforward mlp_dim speech_encoder_intermediate_size",
    ),
    **_each(VOCABULARY, "vocab_size"),
    **_each(POSITIONS, "max_position_embeddings max_source_positions max_target_positions"),
    **_each(IMAGE, "image_size"),
    **_each(PATCH, "patch_size"),
    **_each(MEL_BINS, "num_mel_bins"),
    **_each(16, "num_buckets"),
    # Narrower than the inputs, so that windows do restrict attention.
    **_each(WINDOW, "sliding_window local_attention"),
}


def tiny(model_type: str, **overrides: Any) -> PreTrainedConfig:
    """Return a tiny configuration of a model type.

    Args:
        model_type: A key of transformers' ``CONFIG_MAPPING``.
        **overrides: Values that take precedence over the shrunk ones. A dict given for a
            sub-configuration overrides fields of the shrunk sub-configuration.

    Returns:
        A configuration built afresh from its arguments, so that whatever it derives from them
        (layer types, window sizes, ...) is consistent.
    """
    return shrink(CONFIG_MAPPING[model_type], **overrides)


def shrink(config_class: type[PreTrainedConfig], **overrides: Any) -> PreTrainedConfig:
    """Return an instance of a configuration class with every known size made tiny.

    Args:
        config_class: A configuration class whose arguments all have defaults.
        **overrides: Values that take precedence, as in `tiny`.

    Returns:
        The tiny configuration.
    """
    return _shrink(config_class(), overrides)


def _shrink(default: PreTrainedConfig, overrides: Any) -> PreTrainedConfig:
    if isinstance(overrides, PreTrainedConfig):
        return overrides
    arguments = _differences(default)
    vocabulary = overrides.get("vocab_size", VOCABULARY)
    for field, value in vars(default).items():
        if isinstance(value, PreTrainedConfig):
            arguments[field] = _shrink(value, overrides.get(field, {}))
        elif type(value) is int and field in TINY:
            arguments[field] = TINY[field]
        elif type(value) is int and field.endswith("token_id") and value >= vocabulary:
            arguments[field] = _special_token(field)
    nested = {field for field, value in arguments.items() if isinstance(value, PreTrainedConfig)}
    plain = {field: value for field, value in overrides.items() if field not in nested}
    return type(default)(**(arguments | plain))


def _differences(config: PreTrainedConfig) -> dict[str, Any]:
    """Return what a part of a larger configuration sets otherwise than its own class does.

    What follows from the number of layers is left out: the tiny part has fewer.
    """
    usual = vars(type(config)())
    return {
        field: value
        for field, value in vars(config).items()
        if not field.startswith("_")
        and field not in {"layer_types", "stage_names"}
        and not isinstance(value, PreTrainedConfig)
        and value != usual.get(field)
    }


def _special_token(field: str) -> int:
    """Return an id below `FIRST_ORDINARY_TOKEN` for a special token outside the vocabulary."""
    known = ("pad_token_id", "bos_token_id", "eos_token_id")
    return known.index(field) if field in known else FIRST_ORDINARY_TOKEN - 1
