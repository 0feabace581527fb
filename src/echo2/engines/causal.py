"""Models that transformers builds, and that no batch of independent rows could be computed with as causal language
models: they are refused by what they are. Found by a search over all of transformers' families and kinds of rotary
embeddings (`tests/causal_families.py`), which also shows that rows of the others have the same logprobs alone and
beside others.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from typing import Any

from echo2.core.errors import UserError

#: Families whose rows cannot be padded at all, and why.
NO_ROWS = {"cpmant": "puts tokens of its own in front of each row and counts positions from the end of the longest"}
#: Families whose cache and attention do not agree in transformers, and how.
UNFIT = {
    "dory": "its loops read windows of the cache that have other lengths than their masks",
    "moshi": "its cache drops tokens behind a window that its attention still sees",
    "xlm": "it takes the lengths of rows from their tokens, and knows no padding on the left",
}
ANOTHER = "Take another model."


def refuse_model(config: Any, module: Any) -> None:
    """Refuse a text model whose logprobs would not be those of a causal language model as config.json describes it.

    Raises:
        UserError: says why.
    """
    name = type(module).__name__
    reads_encoder = "encoder_hidden_states" in inspect.signature(module.forward).parameters
    if why := NO_ROWS.get(config.model_type):
        raise UserError(f"transformers' {name} {why}, so rows are not independent. {ANOTHER}")
    if (
        reads_encoder
        and getattr(config, "is_decoder", None) is False
        and not getattr(config, "is_encoder_decoder", False)
    ):
        raise UserError(
            f"config.json describes an encoder: with is_decoder = false, {name} reads each token together with those "
            "behind it, so it has no probability of the next token. If it was trained as a decoder, write "
            '"is_decoder": true into config.json.'
        )
    kinds = set(_kinds_of(config)) - {"default"}
    if passed_over := kinds - set(_kinds_computed(module)):
        raise UserError(
            f"config.json asks for rotary embeddings of the kind {', '.join(sorted(passed_over))}, and transformers' "
            f"{name} would pass over that. {ANOTHER}"
        )
    widths = {2 * len(part.inv_freq) for part in module.modules() if hasattr(part, "inv_freq")}
    rotated = {part.rotary_ndims for part in module.modules() if hasattr(part, "rotary_ndims")}
    if widths and rotated and widths != rotated:
        raise UserError(
            f"Rotary embeddings of the kind {', '.join(sorted(kinds) or ['default'])} are of {max(widths)} values of a "
            f"head, and transformers' {name} rotates {max(rotated)}. {ANOTHER}"
        )


def refuse_cache(module: Any, layers: Any) -> None:
    """Refuse a model whose rows would depend on each other, read with a cache of these layers and padded on the left.

    Raises:
        UserError: says why.
    """
    takes = inspect.signature(module.forward).parameters
    why = UNFIT.get(module.config.model_type, "")
    if {"encoder_hidden_states", "encoder_outputs"} & takes.keys() and "position_ids" not in takes:
        why = "it is told no positions, and counts the padding of rows that are shorter than others"
    places = [part for name, part in module.named_modules() if name.endswith("position_embeddings")]
    if any(getattr(part, "padding_idx", None) is not None for part in places):
        why = "it numbers positions itself, from the number of its padding token on"
    if any(hasattr(layer, "compress_rate") for layer in layers):
        why = "its cache compresses as many columns at a time, the padding of shorter rows included"
    if why:
        raise unfit(module, why)


def unfit(module: Any, why: str) -> UserError:
    """Return the error that the engine `transformers` cannot run this model."""
    return UserError(f"The engine 'transformers' cannot run {type(module).__name__}: {why}. {ANOTHER}")


def _kinds_of(config: Any) -> Iterator[str]:
    """Yield the kinds of rotary embeddings that a configuration asks for; layers of one type may have their own."""
    ropes = getattr(config, "rope_parameters", None)
    if isinstance(ropes, Mapping):
        for rope in (ropes, *ropes.values()):
            if isinstance(rope, Mapping) and isinstance(kind := rope.get("rope_type", rope.get("type")), str):
                yield kind


def _kinds_computed(module: Any) -> Iterator[str]:
    for part in module.modules():
        kind = getattr(part, "rope_type", None)
        yield from [kind] if isinstance(kind, str) else kind.values() if isinstance(kind, Mapping) else ()
