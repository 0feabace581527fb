"""All families of transformers' causal language models, tiny, with every kind of rotary embedding that there is.

A family's own default configuration is shrunk by the names of its sizes; what that leaves wrong is in `CHANGES`, and a
family that it cannot make is in `TOO_FAR`, with the reason. A kind is written where the family has its rotary settings:
for all layers, or for each of their types.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import torch

from hub_models import FAMILIES as AS_ON_THE_HUB
from learner_cases import VOCAB

LONGEST, ORIGINAL = 48, 12
#: Kind -> its own settings. LongRoPE's lists are as long as the family's rotary part wants them.
KINDS: dict[str, dict[str, Any]] = {
    "default": {},
    "linear": {"factor": 4.0},
    "dynamic": {"factor": 4.0},
    "yarn": {"factor": 4.0, "original_max_position_embeddings": ORIGINAL},
    "llama3": {
        "factor": 4.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": ORIGINAL,
    },
    "longrope": {"factor": 4.0, "original_max_position_embeddings": ORIGINAL},
    "proportional": {"partial_rotary_factor": 0.5},
}
#: What a family's kind has beside these.
MORE = {"longrope": {"phimoe": {"short_mscale": 1.1, "long_mscale": 1.2}}}
#: Settings of other kinds, which the family's default may have.
FOREIGN = {"factor", "beta_fast", "beta_slow", "low_freq_factor", "high_freq_factor", "mscale", "mscale_all_dim"}
FOREIGN |= {"rope_type", "type", "truncate", "short_factor", "long_factor", "original_max_position_embeddings"}
#: By the names that configurations have for them; a family is given those that it knows.
SMALL: dict[str, Any] = {
    "vocab_size": VOCAB,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "initializer_range": 0.3,
    "hidden_size": 32,
    "intermediate_size": 32,
    "max_position_embeddings": LONGEST,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "rotary_dim": 8,
    "word_embed_proj_dim": 32,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "moe_intermediate_size": 16,
    "topk_group": 1,
    "moe_topk": 2,
    "shared_expert_intermediate_size": 16,
    "q_lora_rank": 8,
    "kv_lora_rank": 8,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "linear_num_value_heads": 2,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 32,
    "decoder_ffn_dim": 32,
    "d_ff": 32,
    "ffn_dim": 32,
    "sliding_window": 8,
}
#: What those leave wrong.
CHANGES: dict[str, dict[str, Any]] = {
    "bamba": {"attn_layer_indices": [1], "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8},
    "cpmant": {"prompt_length": 4, "segment_types": 2, "prompt_types": 2, "dim_ff": 32, "dim_head": 16},
    "dbrx": {
        "d_model": 32,
        "n_heads": 2,
        "n_layers": 2,
        "max_seq_len": LONGEST,
        "attn_config": {"rope_theta": 10_000.0, "kv_n_heads": 1, "clip_qkv": 8.0},
        "ffn_config": {"ffn_hidden_size": 32, "moe_num_experts": 2},
    },
    "dots1": {"n_shared_experts": 1, "first_k_dense_replace": 1, "routed_scaling_factor": 1.0},
    "falcon_h1": {"mamba_d_ssm": 16, "mamba_n_heads": 2, "mamba_d_state": 4, "mamba_d_head": 8},
    "gemma3n_text": {"num_kv_shared_layers": 0, "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": VOCAB},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "granitemoehybrid": {"position_embedding_type": "rope"},
    "hrm_text": {"initializer_range": 0.1},  # its layers are repeated, and so is what is rounded
    "inkling2_loop_text": {"unpadded_vocab_size": VOCAB},
    "inkling2_text": {"unpadded_vocab_size": VOCAB},
    "inkling_text": {"unpadded_vocab_size": VOCAB},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "mamba_d_state": 4},
    "nemotron_h": {"initializer_range": 0.1},  # its states grow by themselves
    "qwen4_exp_text": {
        "indexer_n_heads": 2,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 16,
        "indexer_budget": 8,
        "indexer_compress_ratio": 2,
        "ple_embed_dim": 8,
    },
    "recurrent_gemma": {"num_hidden_layers": 3, "lru_width": 32, "attention_window_size": 8},
    "roc_bert": {"pronunciation_vocab_size": 9, "shape_vocab_size": 9},
    "xmod": {"default_language": "en_XX", "languages": ["en_XX"]},
    "zamba": {"layer_types": ["mamba", "hybrid"] * 2, "num_hidden_layers": 4},
    "zaya": {"num_experts_per_tok": 1},
}
CHANGES |= {"gemma3n": CHANGES["gemma3n_text"], "qwen4_exp": CHANGES["qwen4_exp_text"]}
#: What is not a text model of a token at a time, or needs a configuration of its own.
TOO_FAR = {
    "blt": "patches of bytes, made by a second model",
    "cohere_compass_text": "its class fails on its own default configuration",
    "dots3_note": "has layers of unlike sizes",
    "dots3_note_text": "has layers of unlike sizes",
    "emu3": "transformers has no causal language model of its text part",
    "gemma4_assistant": "drafts tokens for another model",
    "gemma4_unified_assistant": "drafts tokens for another model",
    "git": "reads an image",
    "mimo_v2_flash": "has layers of unlike sizes",
    "mllama": "transformers has no causal language model of its text part",
    "musicgen": "codes of sound",
    "musicgen_melody": "codes of sound",
    "phi4_multimodal": "has two encoders of fixed sizes",
    "prophetnet": "predicts several tokens at once",
    "reformer": "hashes tokens into buckets of a fixed length",
    "xlnet": "permutes tokens",
    "zamba2": "shares blocks by the numbers of the layers of its real sizes",
}


def families() -> list[str]:
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.keys() - TOO_FAR.keys())


@functools.cache
def _shrunk(family: str) -> tuple[type[Any], dict[str, Any]]:
    """The class of a family's text configuration, and small values of it."""
    import transformers

    text = transformers.CONFIG_MAPPING[family]().get_text_config()
    values = {name: value for name, value in SMALL.items() if _may_have(text, name)}
    if getattr(text, "is_decoder", True) is False:
        values["is_decoder"] = True  # an encoder is refused
    if "qk_rope_head_dim" in values:
        values["head_dim"] = values["qk_rope_head_dim"]  # the same thing under another name
    types = list(dict.fromkeys(getattr(text, "layer_types", None) or ()))
    if types and _may_have(text, "layer_types"):  # one layer of each type, and two at least
        values["layer_types"] = types * (1 if len(types) > 1 else 2)
        values["num_hidden_layers"] = len(values["layer_types"])
    known = AS_ON_THE_HUB.get(family, {})
    known = {name: value for name, value in known.get("text_config", known).items() if name != "rope_parameters"}
    return type(text), values | {k: v for k, v in known.items() if k not in SMALL} | CHANGES.get(family, {})


def _may_have(config: Any, name: str) -> bool:
    if name not in dir(config) and name not in config.attribute_map:
        return False
    own = getattr(type(config), config.attribute_map.get(name, name), None)
    is_computed = isinstance(own, property) and own.fset is None
    return not is_computed and (name != "sliding_window" or bool(config.sliding_window))


def has_kinds(family: str) -> bool:
    """Whether this family's configuration has rotary settings."""
    made, values = _shrunk(family)
    return bool(getattr(made(**values), "rope_parameters", None))


def tiny_config(family: str, kind: str = "default", **changes: Any) -> Any:
    """A configuration of this family, with its rotary embeddings of this kind.

    Raises: what transformers raises if the family has no such kind.
    """
    made, values = _shrunk(family)
    values = values | changes
    config = made(**values)
    if kind == "default" or not getattr(config, "rope_parameters", None):
        return config
    ropes, num = config.rope_parameters, _num_frequencies(family)
    kinds = {key: rope for key, rope in ropes.items() if isinstance(rope, Mapping)}
    of_kind = {key: _of_kind(family, rope, kind, num.get(key, num[""])) for key, rope in kinds.items()}
    own = {"original_max_position_embeddings": ORIGINAL} if "phi" in family else {}  # it has it at the top, too
    return made(**values, **own, rope_parameters=ropes | of_kind if kinds else _of_kind(family, ropes, kind, num[""]))


def _of_kind(family: str, rope: Mapping[str, Any], kind: str, num: int) -> dict[str, Any]:
    own = {"rope_type": kind, **KINDS[kind]}
    if kind == "longrope":
        own |= {"short_factor": [1.0] * num, "long_factor": [1.0 + 2 * place**2 for place in range(num)]}
    own |= MORE.get(kind, {}).get(family, {})
    if "llama_4_scaling_beta" in rope:
        own.setdefault("original_max_position_embeddings", ORIGINAL)
    foreign = FOREIGN | ({"partial_rotary_factor"} if rope.get("rope_type") == "proportional" else set())
    return {name: value for name, value in rope.items() if name not in foreign} | own


@functools.cache
def _num_frequencies(family: str) -> dict[str, int]:
    """How many frequencies the family's rotary embeddings have, by type of layer; "": of all, or of one of them."""
    import transformers

    with torch.device("meta"):
        module = transformers.AutoModelForCausalLM.from_config(tiny_config(family))
    found = {
        name.rpartition(".")[2].removesuffix("inv_freq").rstrip("_"): len(buffer)
        for name, buffer in module.named_buffers()
        if name.endswith("inv_freq") and "original" not in name
    }
    return {"": next(iter(found.values()), 8)} | found
