"""A directory with a small model, written without torch."""

from __future__ import annotations

import json
import math
from pathlib import Path

from echo2.core.documents import safetensors_pieces
from echo2.core.types import TensorBytes
from echo2.engines.model_values import read_architecture
from rollout_cases import tokenizer_files

LLAMA = {
    "model_type": "llama",
    "vocab_size": 64,
    "hidden_size": 8,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
}

#: The values that Qwen/Qwen3-30B-A3B-Instruct-2507 has on the hub, as far as they decide its size.
QWEN3_30B_A3B = {
    "model_type": "qwen3_moe",
    "dtype": "bfloat16",
    "vocab_size": 151_936,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "max_position_embeddings": 262_144,
    "tie_word_embeddings": False,
}


def model_directory(path: Path) -> Path:
    """A model whose weights are 0, and a tokenizer of 31 characters."""
    path.mkdir()
    (path / "config.json").write_text(json.dumps(LLAMA))
    weights = {
        name: TensorBytes("F32", shape, bytes(4 * math.prod(shape)))
        for name, shape in read_architecture(LLAMA).tensor_shapes().items()
    }
    with (path / "model.safetensors").open("wb") as file:
        file.writelines(safetensors_pieces(weights))
    for name, data in tokenizer_files().items():
        (path / name).write_bytes(data)
    return path
