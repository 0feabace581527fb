"""A base model that needs no download: a Qwen3 with 0.1 M random parameters and a byte tokenizer."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from echo2.core.documents import safetensors_pieces
from echo2.core.types import TensorBytes

HIDDEN, INTERMEDIATE, LAYERS, HEADS, HEAD_SIZE = 64, 192, 2, 2, 32
CONTEXT = 8192
#: Tokens of chat templates; the second ends an answer.
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_end|>", "<|im_start|>", "<think>", "</think>")
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def make(directory: Path) -> None:
    """Write the model as a Hugging Face directory, whole or not at all. The result is the same every time."""
    if directory.is_dir():
        return
    partial = directory.with_name(directory.name + ".part")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    num_tokens = _write_tokenizer(partial)
    config: dict[str, Any] = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": num_tokens,
        "hidden_size": HIDDEN,
        "intermediate_size": INTERMEDIATE,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": HEADS,
        "head_dim": HEAD_SIZE,
        "hidden_act": "silu",
        "max_position_embeddings": CONTEXT,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "tie_word_embeddings": True,
        "attention_bias": False,
        "eos_token_id": 1,
        "pad_token_id": 0,
        "torch_dtype": "float32",
    }
    (partial / "config.json").write_text(json.dumps(config, indent=2))
    generation = {"eos_token_id": [1, 0], "pad_token_id": 0}
    (partial / "generation_config.json").write_text(json.dumps(generation))
    with (partial / "model.safetensors").open("wb") as file:
        file.writelines(safetensors_pieces(_weights(num_tokens)))
    partial.rename(directory)


def _write_tokenizer(directory: Path) -> int:
    """Write a tokenizer with one token per byte and the special tokens, and return the number of tokens."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: number for number, token in enumerate((*SPECIAL_TOKENS, *letters))}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS])
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "clean_up_tokenization_spaces": False,
        "model_max_length": CONTEXT,
        "chat_template": CHAT_TEMPLATE,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(settings, indent=2))
    return len(vocabulary)


def _weights(num_tokens: int) -> dict[str, TensorBytes]:
    source = np.random.default_rng(0)
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (num_tokens, HIDDEN)}
    for layer in range(LAYERS):
        attention, mlp = f"model.layers.{layer}.self_attn.", f"model.layers.{layer}.mlp."
        shapes |= {f"{attention}{part}_proj.weight": (HEADS * HEAD_SIZE, HIDDEN) for part in "qkv"}
        shapes |= {f"{attention}o_proj.weight": (HIDDEN, HEADS * HEAD_SIZE)}
        shapes |= {f"{attention}{part}_norm.weight": (HEAD_SIZE,) for part in "qk"}
        shapes |= {f"{mlp}{part}_proj.weight": (INTERMEDIATE, HIDDEN) for part in ("gate", "up")}
        shapes |= {f"{mlp}down_proj.weight": (HIDDEN, INTERMEDIATE)}
        names = ("input_layernorm", "post_attention_layernorm")
        shapes |= {f"model.layers.{layer}.{name}.weight": (HIDDEN,) for name in names}
    shapes["model.norm.weight"] = (HIDDEN,)
    arrays = {
        name: np.ones(shape, "<f4") if len(shape) == 1 else source.normal(0.0, shape[1] ** -0.5, shape).astype("<f4")
        for name, shape in shapes.items()
    }
    return {name: TensorBytes("F32", array.shape, array.tobytes()) for name, array in arrays.items()}
