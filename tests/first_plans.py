"""Models of which only config.json is there, and the command that plans them."""

from __future__ import annotations

import json
from pathlib import Path

QWEN3_8B = {
    "model_type": "qwen3",
    "vocab_size": 151936,
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 40960,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
MIXTURE = {
    **QWEN3_8B,
    "model_type": "qwen3_moe",
    "hidden_size": 2048,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
    "intermediate_size": 6144,
}

QWEN3_1_7B = {
    **QWEN3_8B,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "tie_word_embeddings": True,
}
QWEN3_4B = {**QWEN3_8B, "hidden_size": 2560, "intermediate_size": 9728, "tie_word_embeddings": True}


def write(folder: Path, values: dict[str, object], settings: str, offers: str) -> list[str]:
    """The words of a plan for a model of which only config.json is there."""
    model = folder / "model"
    model.mkdir(parents=True, exist_ok=True)
    (model / "config.json").write_text(json.dumps(values))
    config = f'[model]\npath = "{model}"\nsnapshot_dtype = "bfloat16"\n[tasks]\nsource = "digit_sorting"\n'
    (folder / "run.toml").write_text(config + '[reward]\nfunctions = ["exact_match"]\n' + settings)
    (folder / "offers.toml").write_text(offers)
    return ["plan", str(folder / "run.toml"), "--offers", str(folder / "offers.toml")]
