"""Reads a snapshot's configuration and end tokens for an engine. No torch here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from echo2.core.decide.model_config import text_part
from echo2.core.documents import parse_json
from echo2.core.errors import PeerError, UserError
from echo2.core.types import Snapshot
from echo2.weights.format.adapter_files import ADAPTER_CONFIG, LoraFactors, lora_factors


def read_config(files: Mapping[str, bytes]) -> dict[str, Any]:
    """Return config.json of a snapshot.

    Raises:
        PeerError: it is missing or is not a JSON object.
    """
    return read_object(files, "config.json")


def read_object(files: Mapping[str, bytes], name: str) -> dict[str, Any]:
    """Return the JSON object in one file of a snapshot.

    Raises:
        PeerError: the file is missing or is not a JSON object.
    """
    try:
        value = parse_json(files[name])
    except (KeyError, ValueError) as error:
        raise PeerError("bad_snapshot", f"{name} is missing or is not JSON") from error
    if not isinstance(value, dict):
        raise PeerError("bad_snapshot", f"{name} does not hold an object")
    return value


def read_factors(snapshot: Snapshot) -> LoraFactors:
    """Return how the factors of a snapshot's adapter are applied.

    Raises:
        PeerError: the snapshot is not a LoRA adapter, or one that computes something else than engines do.
    """
    try:
        return lora_factors(read_object(snapshot.files, ADAPTER_CONFIG))
    except UserError as error:
        raise PeerError("bad_adapter", f"{snapshot.ref}: {error}") from error


def end_tokens(files: Mapping[str, bytes]) -> tuple[int, ...]:
    """Return the token ids that end a completion, from generation_config.json or else config.json; () if neither has.

    Raises:
        PeerError: a file is not JSON, or an id is not a whole number.
    """
    for name in ("generation_config.json", "config.json"):
        if name not in files:
            continue
        values = text_part(read_object(files, name))
        ids = values.get("eos_token_id")
        if ids is not None:
            listed = ids if isinstance(ids, list) else [ids]
            if not all(isinstance(token, int) for token in listed):
                raise PeerError("bad_snapshot", f"eos_token_id in {name} is {ids!r}, not token ids")
            return tuple(listed)
    return ()


def model_type(files: Mapping[str, bytes]) -> str:
    """Return the `model_type` in a model's config.json: llama, gpt_neox, ..."""
    try:
        return str(read_config(files).get("model_type", "not given"))
    except PeerError:
        return "not given"
