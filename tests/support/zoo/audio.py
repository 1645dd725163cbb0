"""Speech and audio encoders, and speech encoder-decoders."""

from __future__ import annotations

from torch import Tensor

from tests.support.zoo import inputs
from tests.support.zoo.catalogue import Catalogue, Recipe
from tests.support.zoo.shrink import HIDDEN, MEL_BINS, tiny

audio = Catalogue("audio")

FRAMES = 32
CONVOLUTIONS = {
    "conv_dim": [16, 16, 16],
    "conv_stride": [5, 2, 2],
    "conv_kernel": [10, 3, 3],
    "num_conv_pos_embeddings": 16,
    "num_conv_pos_embedding_groups": 4,
}


def mels(count: int = FRAMES, *, mask: str | None = None) -> dict[str, Tensor]:
    """Return log-mel spectrograms with time last, and a mask if its argument is named."""
    features = {"input_features": inputs.noise(2, MEL_BINS, count)}
    return features | ({mask: inputs.padding_mask(count, padded=8)} if mask else {})


def frames(
    count: int = FRAMES, *, width: int = MEL_BINS, mask: str = "attention_mask"
) -> dict[str, Tensor]:
    """Return acoustic features with time first, and their mask."""
    return {
        "input_features": inputs.noise(2, count, width),
        mask: inputs.padding_mask(count, padded=8),
    }


@audio.architecture(
    "hubert",
    "sew",
    "sew-d",
    "unispeech",
    "unispeech-sat",
    "wav2vec2",
    "wav2vec2-conformer",
    "wavlm",
)
def wav2vec2(model_type: str) -> Recipe:
    squeezed = {"squeeze_factor": 2} if model_type.startswith("sew") else {}
    return Recipe(tiny(model_type, **CONVOLUTIONS, **squeezed), inputs.sounds())


@audio.architecture("data2vec-audio")
def data2vec_audio(model_type: str) -> Recipe:
    config = tiny(
        model_type, **(CONVOLUTIONS | {"num_conv_pos_embeddings": 2, "conv_pos_kernel_size": 5})
    )
    return Recipe(config, inputs.sounds())


@audio.architecture("omniasr_audio")
def omniasr(model_type: str) -> Recipe:
    config = tiny(model_type, **CONVOLUTIONS)
    return Recipe(
        config,
        {
            "input_values": inputs.noise(2, 1, 800),
            "padding_mask": inputs.padding_mask(800, padded=240),
        },
    )


@audio.architecture("speecht5")
def speecht5(model_type: str) -> Recipe:
    return Recipe(
        tiny(model_type, **CONVOLUTIONS),
        inputs.sounds() | inputs.decoder_text(),
        "SpeechT5ForSpeechToText",
    )


@audio.architecture("wav2vec2-bert")
def wav2vec2_bert(model_type: str) -> Recipe:
    config = tiny(model_type, feature_projection_input_dim=MEL_BINS, num_adapter_layers=1)
    return Recipe(config, frames())


@audio.architecture("audio-spectrogram-transformer")
def spectrogram(model_type: str) -> Recipe:
    config = tiny(model_type, max_length=FRAMES, frequency_stride=8, time_stride=8)
    return Recipe(config, {"input_values": inputs.noise(2, FRAMES, MEL_BINS)})


@audio.architecture("lasr_encoder", "nemotron_asr_streaming_encoder", "parakeet_encoder")
def conformer(model_type: str) -> Recipe:
    return Recipe(tiny(model_type, subsampling_conv_channels=16), frames(64))


@audio.architecture("nemotron3_5_transcribe_asr_audio", "nemotron3_diarization_audio")
def nemotron(model_type: str) -> Recipe:
    return Recipe(tiny(model_type, num_key_value_heads=4), frames())


@audio.architecture("granite_speech5_encoder")
def granite_speech5(model_type: str) -> Recipe:
    # Four neighbouring frames come stacked to one.
    return Recipe(
        tiny(model_type, context_size=16, num_key_value_heads=4), frames(width=4 * MEL_BINS)
    )


@audio.architecture("granite_speech_encoder", "granite_speech_plus_encoder")
def granite_speech(model_type: str) -> Recipe:
    names = {
        "granite_speech_encoder": "GraniteSpeechCTCEncoder",
        "granite_speech_plus_encoder": "GraniteSpeechPlusCTCEncoder",
    }
    config = tiny(model_type, input_dim=MEL_BINS, context_size=16, output_dim=16)
    return Recipe(config, {"hidden_states": inputs.noise(2, FRAMES, MEL_BINS)}, names[model_type])


@audio.architecture(
    "glmasr_encoder",
    "moss_transcribe_diarize_audio",
    "qwen2_audio_encoder",
    "voxtral_encoder",
    "voxtral_realtime_encoder",
)
def whisper_encoder(model_type: str) -> Recipe:
    return Recipe(tiny(model_type, max_source_positions=FRAMES // 2), mels())


@audio.architecture("audioflamingo3_encoder")
def audioflamingo3(model_type: str) -> Recipe:
    config = tiny(model_type, max_source_positions=FRAMES // 2)
    return Recipe(config, mels(mask="input_features_mask"))


@audio.architecture("qwen3_asr_encoder")
def qwen3_asr(model_type: str) -> Recipe:
    # Features come in windows of 100 frames.
    config = tiny(model_type, downsample_hidden_size=16)
    return Recipe(config, mels(200, mask="input_features_mask"))


@audio.architecture("whisper")
def whisper(model_type: str) -> Recipe:
    config = tiny(model_type, max_source_positions=FRAMES // 2)
    return Recipe(config, mels(mask="attention_mask") | inputs.decoder_text())


@audio.architecture("speech_to_text")
def speech_to_text(model_type: str) -> Recipe:
    config = tiny(
        model_type, input_feat_per_channel=MEL_BINS, input_channels=1, conv_channels=HIDDEN
    )
    return Recipe(config, frames() | inputs.decoder_text())


@audio.architecture("canary", "cohere_asr")
def canary(model_type: str) -> Recipe:
    return Recipe(tiny(model_type), frames(64) | inputs.decoder_text())


@audio.architecture("moonshine")
def moonshine(model_type: str) -> Recipe:
    return Recipe(tiny(model_type), inputs.sounds(2000, padded=600) | inputs.decoder_text())


@audio.architecture("fun_asr_nano_encoder")
def fun_asr_nano(model_type: str) -> Recipe:
    config = tiny(model_type, num_stacked_frames=2, num_timestamp_prediction_layers=1)
    return Recipe(config, frames(width=2 * MEL_BINS, mask="input_features_mask"))


@audio.architecture("gemma3n_audio")
def gemma3n_audio(model_type: str) -> Recipe:
    config = tiny(
        model_type,
        input_feat_size=32,
        conf_num_attention_heads=4,
        conf_num_hidden_layers=2,
        conf_attention_chunk_size=4,
        conf_attention_context_left=5,
        sscp_conv_channel_size=[8, 4],
    )
    # This mask is True where there is padding.
    padding = ~inputs.padding_mask(64, padded=16).bool()
    return Recipe(config, {"audio_mel": inputs.noise(2, 64, 32), "audio_mel_mask": padding})


@audio.architecture("gemma4_audio")
def gemma4_audio(model_type: str) -> Recipe:
    config = tiny(
        model_type,
        # The model takes the first number of channels for the number of mel bins.
        subsampling_conv_channels=[128, 4],
        output_proj_dims=32,
        attention_chunk_size=4,
        attention_context_left=5,
    )
    mask = inputs.padding_mask(64, padded=16).bool()
    return Recipe(config, {"input_features": inputs.noise(2, 64, 128), "attention_mask": mask})


CLAP_AUDIO = {
    "window_size": 4,
    "spec_size": 64,
    "patch_size": 4,
    "patch_stride": [4, 4],
    "depths": [2, 2],
    "num_attention_heads": [2, 4],
    "patch_embeds_hidden_size": 16,
}


def clap_sounds() -> dict[str, Tensor]:
    """Return spectrograms as images of one channel. Shape [B, 1, frames, bins]."""
    return {"input_features": inputs.noise(2, 1, 256, MEL_BINS)}


@audio.architecture("clap_audio_model")
def clap_audio(model_type: str) -> Recipe:
    return Recipe(tiny(model_type, **CLAP_AUDIO), clap_sounds(), "ClapAudioModel")


@audio.architecture("mimi_encoder")
def mimi(model_type: str) -> Recipe:
    config = tiny(
        model_type,
        num_filters=4,
        upsampling_ratios=[4, 4],
        upsample_groups=HIDDEN,
        num_key_value_heads=4,
        num_quantizers=2,
        codebook_size=16,
        codebook_dim=8,
        vector_quantization_hidden_dimension=8,
    )
    padding = inputs.padding_mask(800, padded=240)[:, None]
    return Recipe(config, {"input_values": inputs.noise(2, 1, 800), "padding_mask": padding})


@audio.architecture("pe_audio_encoder")
def pe_audio(model_type: str) -> Recipe:
    config = tiny(
        model_type,
        num_key_value_heads=4,
        dac_config={
            "encoder_hidden_size": 8,
            "downsampling_ratios": [4, 4],
            "hop_length": 16,
            "codebook_size": 16,
        },
    )
    padding = inputs.padding_mask(800, padded=240)
    return Recipe(config, {"input_values": inputs.noise(2, 1, 800), "padding_mask": padding})


@audio.architecture("seamless_m4t", "seamless_m4t_v2")
def seamless(model_type: str) -> Recipe:
    # The text-to-unit model and the vocoder take no part in the forward pass.
    unused = {
        "t2u_vocab_size": 128,
        "t2u_encoder_layers": 1,
        "t2u_encoder_ffn_dim": 64,
        "t2u_encoder_attention_heads": 4,
        "t2u_decoder_layers": 1,
        "t2u_decoder_ffn_dim": 64,
        "t2u_decoder_attention_heads": 4,
        "unit_hifi_gan_vocab_size": 128,
        "upsample_initial_channel": 16,
        "upsample_rates": [4],
        "upsample_kernel_sizes": [8],
        "resblock_kernel_sizes": [3],
        "resblock_dilation_sizes": [[1]],
        "unit_embed_dim": 16,
        "lang_embed_dim": 8,
        "spkr_embed_dim": 8,
    }
    return Recipe(tiny(model_type, **unused), inputs.text() | inputs.decoder_text())


@audio.architecture("fastspeech2_conformer", padding_leaks="Its convolutions reach into padding.")
def fastspeech2(model_type: str) -> Recipe:
    config = tiny(
        model_type,
        encoder_linear_units=64,
        decoder_linear_units=64,
        duration_predictor_channels=16,
        energy_predictor_channels=16,
        pitch_predictor_channels=16,
        pitch_predictor_layers=2,
        speech_decoder_postnet_layers=2,
        speech_decoder_postnet_units=16,
        decoder_kernel_size=7,
    )
    return Recipe(config, inputs.text())


@audio.architecture("vits", padding_leaks="It draws one noise for the whole batch.")
def vits(model_type: str) -> Recipe:
    config = tiny(
        model_type,
        num_attention_heads=2,
        flow_size=16,
        spectrogram_bins=9,
        duration_predictor_num_flows=1,
        prior_encoder_num_flows=1,
        prior_encoder_num_wavenet_layers=1,
        posterior_encoder_num_wavenet_layers=1,
        wavenet_kernel_size=3,
        upsample_initial_channel=16,
        upsample_rates=[4, 4],
        upsample_kernel_sizes=[8, 8],
        resblock_kernel_sizes=[3],
        resblock_dilation_sizes=[[1]],
        depth_separable_num_layers=1,
        duration_predictor_filter_channels=16,
    )
    return Recipe(config, inputs.text())


@audio.architecture("phi4_multimodal_audio")
def phi4_audio(model_type: str) -> Recipe:
    config = tiny(
        model_type,
        input_size=MEL_BINS,
        nemo_conv_channels=16,
        ext_pw_out_channel=32,
        depthwise_separable_out_channel=32,
    )
    return Recipe(
        config,
        {
            "hidden_states": inputs.noise(2, 64, MEL_BINS),
            "mask": inputs.padding_mask(64, padded=16).bool(),
        },
        "Phi4MultimodalAudioModel",
    )
