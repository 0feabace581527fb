"""A directory that looks like a model to all that does not load it."""

from __future__ import annotations

import json
from pathlib import Path

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


def model_directory(path: Path) -> Path:
    """A model with empty weights and a tokenizer of 31 characters."""
    path.mkdir()
    (path / "config.json").write_text(json.dumps(LLAMA))
    (path / "model.safetensors").touch()
    for name, data in tokenizer_files().items():
        (path / name).write_bytes(data)
    return path
