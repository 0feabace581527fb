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


def write_model(directory: Path, num_values: int) -> Path:
    directory.mkdir(exist_ok=True)
    header = json.dumps(
        {"__metadata__": {"format": "pt"}, "w": {"dtype": "F32", "shape": [num_values // 4, 4]}}
    ).encode()
    (directory / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    return directory


def write_files(tmp_path: Path) -> tuple[str, str]:
    model = write_model(tmp_path / "model", 4_000_000)
    config = tmp_path / "run.toml"
    config.write_text(
        f'[model]\npath = "{model}"\n[tasks]\nsource = "digit_sorting"\n[reward]\nfunctions = ["exact_match"]\n'
        "[schedule]\ngroups_per_step = 32\nmax_staleness = 2\n[run]\nmax_steps = 50\n"
        "[learner]\nprice_usd_per_hour = 3.0\n",
        encoding="utf-8",
    )
    offers = tmp_path / "offers.toml"
    offers.write_text('[[offers]]\nname = "card"\nprice_usd_per_hour = 0.4\nrollouts_per_second = 6\ncount = 20\n')
    return str(config), str(offers)
