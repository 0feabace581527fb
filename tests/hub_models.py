"""Tiny models with random weights, as the hub has each family: names, classes and nested configurations."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

SIZES: dict[str, Any] = {
    "vocab_size": 80,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "intermediate_size": 32,
    "max_position_embeddings": 64,
    "initializer_range": 0.3,
    "eos_token_id": 1,
    "pad_token_id": 0,
    "bos_token_id": None,
}
HEADS = {"head_dim": 16}
EXPERTS = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
ROUTED = {"n_routed_experts": 4, "n_group": 1, "topk_group": 1, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
LATENT = {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8}
WINDOW = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 4}
LINEAR = {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_value_heads": 2,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_conv_kernel_dim": 4,
}
SHARED = {"shared_expert_intermediate_size": 16}
TOWER = {"hidden_size": 16, "intermediate_size": 16}
QWEN_TOWER = {
    **TOWER,
    "depth": 1,
    "num_heads": 2,
    "out_hidden_size": 32,
    "patch_size": 14,
    "num_position_embeddings": 16,
}
QWEN_IMAGE = {"image_token_id": 79, "video_token_id": 78, "vision_start_token_id": 77, "vision_end_token_id": 76}
GEMMA3_TOWER = {**TOWER, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28, "patch_size": 14}
GEMMA3_IMAGE = {"mm_tokens_per_image": 4, "image_token_index": 79, "boi_token_index": 78, "eoi_token_index": 77}
GEMMA4_TOWER = {
    **TOWER,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "patch_size": 4,
    "position_embedding_size": 64,
}
GEMMA4_IMAGE = {"image_token_id": 79, "boi_token_id": 78, "eoi_token_id": 77}
GEMMA4_TEXT = {
    "global_head_dim": 16,
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": 80,
    "num_kv_shared_layers": 0,
}
ENDS = {"eos_token_id": 1, "pad_token_id": 0}
MAMBA = {"vocab_size": 80, "hidden_size": 32, "num_hidden_layers": 2, **ENDS, "bos_token_id": None}


def nested(text: dict[str, Any], tower: dict[str, Any], **others: Any) -> dict[str, Any]:
    return {"text_config": {**SIZES, **HEADS, **text}, "vision_config": tower, **others}


#: Model type -> the configuration's values.
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3": {**SIZES, **HEADS},
    "qwen3_moe": {**SIZES, **HEADS, **EXPERTS, "decoder_sparse_step": 1},
    "qwen3_5_text": {**SIZES, **HEADS, **LINEAR},
    "qwen3_5_moe_text": {**SIZES, **HEADS, **LINEAR, **EXPERTS, **SHARED},
    "qwen3_5": nested(LINEAR, QWEN_TOWER, **QWEN_IMAGE, tie_word_embeddings=False),
    "qwen3_5_moe": nested({**LINEAR, **EXPERTS, **SHARED}, QWEN_TOWER, **QWEN_IMAGE, tie_word_embeddings=False),
    "qwen3_next": {**SIZES, **HEADS, **LINEAR, **EXPERTS, **SHARED},
    "gpt_oss": {**SIZES, **HEADS, **EXPERTS, **WINDOW, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
    "glm4_moe": {**SIZES, **HEADS, **ROUTED, "first_k_dense_replace": 1},
    "deepseek_v3": {**SIZES, **LATENT, **ROUTED, "num_key_value_heads": 2, "first_k_dense_replace": 1},
    "olmoe": {**SIZES, **EXPERTS},
    "mixtral": {**SIZES, **HEADS, **EXPERTS},
    "gemma3_text": {**SIZES, **HEADS, **WINDOW},
    "gemma3": nested(WINDOW, GEMMA3_TOWER, **GEMMA3_IMAGE, **ENDS),
    "gemma4_text": {**SIZES, **HEADS, **WINDOW, **GEMMA4_TEXT},
    "gemma4": nested({**WINDOW, **GEMMA4_TEXT}, GEMMA4_TOWER, **GEMMA4_IMAGE, **ENDS),
    "smollm3": SIZES,
    "lfm2": {**SIZES, "layer_types": ["conv", "full_attention"], "block_multiple_of": 8},
    "lfm2_moe": {**SIZES, **EXPERTS, "layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "granitemoehybrid": {
        **SIZES,
        **EXPERTS,
        "layer_types": ["mamba", "attention"],
        "mamba_n_heads": 4,
        "mamba_d_head": 16,
        "mamba_d_state": 8,
        "mamba_n_groups": 1,
        "mamba_expand": 2,
        "shared_intermediate_size": 16,
    },
    "nemotron_h": {
        **SIZES,
        **HEADS,
        **ROUTED,
        "initializer_range": 0.1,  # its states grow by themselves
        "layers_block_type": ["mamba", "attention", "moe"],
        "num_hidden_layers": 3,
        "mamba_num_heads": 4,
        "mamba_head_dim": 16,
        "ssm_state_size": 8,
        "n_groups": 1,
        "moe_shared_expert_intermediate_size": 16,
    },
    "mamba2": {**MAMBA, "num_heads": 4, "head_dim": 16, "state_size": 8, "n_groups": 1},
    "mamba": {**MAMBA, "state_size": 4},
    "llama": SIZES,
    "phi": {**SIZES, "num_key_value_heads": 2},
    "phi3": SIZES,
    "mistral": SIZES,
    "gpt2": {"vocab_size": 80, "n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 64, **ENDS},
}
#: The families that have experts.
MIXTURES = tuple(
    name
    for name, values in FAMILIES.items()
    if {"num_experts", "n_routed_experts"} & (values.get("text_config") or values).keys()
)


def hub_model(directory: Path, model_type: str) -> Path:
    """Write a model of this family into a directory. Router biases have values that 16 bits do not hold.

    Raises: as transformers, where it does not have the family.
    """
    import transformers

    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(model_type, **FAMILIES[model_type])
    is_nested = config.get_text_config() is not config
    kind: Any = transformers.AutoModelForImageTextToText if is_nested else transformers.AutoModelForCausalLM
    model = kind.from_config(config).float()
    for name, tensor in model.state_dict().items():
        if "bias" in name and ("e_score" in name or "expert_bias" in name):
            tensor.copy_(6.8 + torch.rand(tensor.shape) / 100)
    model.save_pretrained(directory)
    return directory
