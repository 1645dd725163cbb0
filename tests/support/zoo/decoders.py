"""Decoders: plain, with experts, with windows, and hybrids of attention and state spaces.

Hybrids have four layers, of which the second and the last attend.
"""

from __future__ import annotations

from typing import Any

import torch

from tests.support.zoo import inputs
from tests.support.zoo.catalogue import Catalogue, Recipe
from tests.support.zoo.shrink import tiny

decoder = Catalogue("decoder")

decoder.add(
    "bitnet",
    "bloom",
    "cohere",
    "doge",
    "exaone4",
    "falcon",
    "glm",
    "gpt2",
    "gpt_bigcode",
    "gpt_neox",
    "granite",
    "imagegpt",
    "llama",
    "mistral",
    "mpt",
    "olmo2",
    "openai-gpt",
    "opt",
    "persimmon",
    "phi",
    "phi3",
    "qwen2",
    "qwen3",
    "smollm3",
    "stablelm",
    "starcoder2",
)
decoder.add("codegen", "gptj", rotary_dim=4)
decoder.add("gpt_neo", attention_types=[[["global", "local"], 1]], window_size=4)
_WINDOWED = {"layer_types": ["sliding_attention", "full_attention"]}
decoder.add("cohere2", "gemma2", "gemma3_text", "olmo3", **_WINDOWED)
decoder.add(
    "gemma3n_text",
    num_hidden_layers=4,
    layer_types=_WINDOWED["layer_types"] * 2,
    num_kv_shared_layers=2,
    laurel_rank=4,
    hidden_size_per_layer_input=8,
    vocab_size_per_layer_input=128,
    activation_sparsity_pattern=[0.0] * 4,
    intermediate_size=[64] * 4,
)

_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
decoder.add("afmoe", **_EXPERTS, **_WINDOWED, num_dense_layers=1)
decoder.add("mixtral", num_local_experts=4)
decoder.add("qwen3_moe", **_EXPERTS)
decoder.add("gpt_oss", num_local_experts=4, num_experts_per_tok=2, **_WINDOWED)
decoder.add(
    "llama4_text",
    num_local_experts=4,
    interleave_moe_layer_step=2,
    layer_types=["chunked_attention", "full_attention"],
    attention_chunk_size=4,
    intermediate_size_mlp=64,
    moe_layers=[1],
    no_rope_layers=[1, 0],
)
decoder.add(
    "deepseek_v2",
    "deepseek_v3",
    num_key_value_heads=4,
    q_lora_rank=16,
    kv_lora_rank=16,
    qk_nope_head_dim=8,
    qk_rope_head_dim=8,
    v_head_dim=8,
    n_routed_experts=4,
    num_experts_per_tok=2,
    moe_intermediate_size=16,
    n_group=1,
    topk_group=1,
    n_shared_experts=1,
    first_k_dense_replace=1,
)

_LINEAR: dict[str, Any] = {
    "num_hidden_layers": 4,
    "layer_types": ["linear_attention", "full_attention"] * 2,
}
_DELTA = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
_MAMBA: dict[str, Any] = {
    "mamba_n_heads": 4,
    "mamba_d_head": 16,
    "mamba_d_state": 8,
    "mamba_n_groups": 1,
    "mamba_chunk_size": 8,
}
decoder.add("bamba", num_hidden_layers=4, attn_layer_indices=[1, 3], **_MAMBA)
decoder.add("falcon_h1", mamba_d_ssm=64, **_MAMBA)
decoder.add("lfm2", num_hidden_layers=4, layer_types=["conv", "full_attention"] * 2)
decoder.add("minimax", **_LINEAR, num_local_experts=4, block_size=4)
decoder.add("qwen3_5_text", **_LINEAR, **_DELTA)
decoder.add("qwen3_next", **_LINEAR, **_DELTA, **_EXPERTS, shared_expert_intermediate_size=16)
decoder.add(
    "jamba",
    num_hidden_layers=4,
    attn_layer_period=2,
    attn_layer_offset=1,
    expert_layer_period=2,
    expert_layer_offset=1,
    num_experts=4,
    mamba_dt_rank=4,
    mamba_d_state=8,
)
decoder.add(
    "recurrent_gemma",
    num_hidden_layers=4,
    block_types=["recurrent", "attention"],
    attention_window_size=4,
    num_key_value_heads=1,
    lru_width=32,
)
decoder.add(
    "zamba2",
    num_hidden_layers=4,
    layers_block_type=["linear_attention", "hybrid"] * 2,
    num_mem_blocks=1,
    mamba_d_state=8,
    mamba_ngroups=1,
    n_mamba_heads=4,
    mamba_headdim=16,
    chunk_size=8,
    adapter_rank=4,
    attention_head_dim=16,
    attention_hidden_size=64,
)

decoder.add("falcon_mamba", "mamba", "rwkv")
decoder.add("mamba2", num_heads=4, head_dim=16, state_size=8, n_groups=1, chunk_size=8)


@decoder.architecture("jev")
def jev(model_type: str) -> Recipe:
    layers = ["linear_attention", "full_attention"]
    config = tiny(model_type, text_config={"layer_types": layers})
    # One prompt with two questions of two options, each answered after its mark.
    questions = {
        "marks": torch.tensor([[3, 7]]),
        "num_options": torch.tensor([[2, 2]]),
        "question_type_ids": torch.tensor([[0, 0]]),
    }
    return Recipe(config, inputs.text(batch=1) | questions, "JevForDecision")
