"""How many positions of a model are read alike: its context length, from config.json.

LongRoPE (arXiv 2402.13753; Phi-3 and Phi-4-mini) has two sets of rotary frequencies. transformers takes the second one
for all rows of a batch once its longest row passes `original_max_position_embeddings`: the logprobs of a short row
would depend on its neighbours, and those of early tokens on how many tokens follow. vLLM decides once, by its longest
allowed length. So the context ends where the second set begins. Dynamic scaling begins behind
`max_position_embeddings`, where the context ends anyway.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

#: Of the length in config.json: the usual one, GPT-2's, and DBRX's.
NAMES = ("max_position_embeddings", "n_positions", "max_seq_len")


def context_length(config: Mapping[str, Any]) -> int | None:
    """Return the number of positions that one sequence may have; None if config.json names none. What it says of its
    text model (`text_config`) counts where the top level is silent.
    """
    text = config.get("text_config")
    values = {**text, **config} if isinstance(text, Mapping) else config
    found = [*map(values.get, NAMES), *_ends_of_short_ropes(values)]
    lengths = [length for length in found if isinstance(length, int) and not isinstance(length, bool)]
    return min(lengths, default=None)


def has_two_ropes(config: Mapping[str, Any]) -> bool:
    """Whether rotary frequencies would change behind the context."""
    text = config.get("text_config")
    values = {**text, **config} if isinstance(text, Mapping) else config
    return any(isinstance(length, int) for length in _ends_of_short_ropes(values))


def _ends_of_short_ropes(config: Mapping[str, Any]) -> Iterator[Any]:
    """Yield where the first set of frequencies ends, for each LongRoPE: layers of one type may share one."""
    ropes = config.get("rope_parameters") or config.get("rope_scaling")
    if not isinstance(ropes, Mapping):
        return
    for rope in (ropes, *ropes.values()):
        if isinstance(rope, Mapping) and "long_factor" in rope:
            own = rope.get("original_max_position_embeddings")
            yield own or config.get("original_max_position_embeddings")
