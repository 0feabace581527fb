"""What config.json says of a text model. `engines/model_values.py` adds what it leaves to transformers' class.

A multimodal model has its text model's values in `text_config`. There, they count before those at the top level, which
transformers does not use; of ties, end tokens and dtype, the top level counts first, as in transformers.

How many positions are read alike: LongRoPE (arXiv 2402.13753; Phi-3 and Phi-4-mini) has two sets of rotary frequencies.
transformers takes the second one for all rows of a batch once its longest row passes
`original_max_position_embeddings`: the logprobs of a short row would depend on its neighbours, and those of early
tokens on how many tokens follow. vLLM decides once, by its longest allowed length. So the context ends where the second
set begins. Dynamic scaling begins behind `max_position_embeddings`, where the context ends anyway.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

#: Of the length in config.json: the usual one, GPT-2's, and DBRX's.
NAMES = ("max_position_embeddings", "n_positions", "max_seq_len")
#: Keys that the whole model decides, if it has them.
OF_THE_WHOLE = ("tie_word_embeddings", "eos_token_id", "dtype", "torch_dtype")


def text_part(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return what config.json says of its text model."""
    text = config.get("text_config")
    if not isinstance(text, Mapping):
        return dict(config)
    outer = {name: value for name, value in config.items() if name != "text_config"}
    return {**outer, **text, **{name: outer[name] for name in OF_THE_WHOLE if outer.get(name) is not None}}


def context_length(config: Mapping[str, Any]) -> int | None:
    """Return the number of positions that one sequence may have; None if config.json names none."""
    values = text_part(config)
    values_there = [*map(values.get, NAMES), *_ends_of_short_ropes(values)]
    lengths = [length for length in values_there if isinstance(length, int) and not isinstance(length, bool)]
    return min(lengths, default=None)


def has_two_ropes(config: Mapping[str, Any]) -> bool:
    """Whether rotary frequencies would change behind the context."""
    return any(isinstance(length, int) for length in _ends_of_short_ropes(text_part(config)))


def num_experts(values: Mapping[str, Any]) -> int:
    """Return the number of experts in a mixture's layers; 0: the model is dense."""
    counts = (values.get(name) for name in ("num_experts", "num_local_experts", "n_routed_experts"))
    return next((int(count) for count in counts if count), 0)


def num_chosen(values: Mapping[str, Any]) -> int:
    """Return how many experts a router chooses for a token; 0: not given."""
    return int(values.get("num_experts_per_tok") or values.get("top_k_experts") or 0)


def is_sparse(values: Mapping[str, Any], number: int) -> bool:
    """Whether the layer of this number has a mixture of experts, or is one."""
    if not num_experts(values) or values.get("enable_moe_block") is False:
        return False
    if values.get("model_type") == "nemotron_h":  # each layer is one part
        return list(values.get("layers_block_type") or values.get("layer_types") or ())[number : number + 1] == ["moe"]
    if number < int(values.get("first_k_dense_replace") or values.get("num_dense_layers") or 0):
        return False
    if number in (values.get("mlp_only_layers") or ()):
        return False
    return (number + 1) % int(values.get("decoder_sparse_step") or 1) == 0


def routed_layers(values: Mapping[str, Any]) -> tuple[int, ...]:
    """Return the numbers of the layers that have a router."""
    return tuple(number for number in range(int(values.get("num_hidden_layers") or 0)) if is_sparse(values, number))


def _ends_of_short_ropes(config: Mapping[str, Any]) -> Iterator[Any]:
    """Yield where the first set of frequencies ends, for each LongRoPE: layers of one type may share one."""
    ropes = config.get("rope_parameters") or config.get("rope_scaling")
    if not isinstance(ropes, Mapping):
        return
    for rope in (ropes, *ropes.values()):
        if isinstance(rope, Mapping) and "long_factor" in rope:
            own = rope.get("original_max_position_embeddings")
            yield own or config.get("original_max_position_embeddings")
