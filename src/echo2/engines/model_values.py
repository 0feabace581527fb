"""The values of a text model, as transformers builds it: from config.json, and from its class what the file leaves out.

Gemma 3 on the hub names neither its vocabulary nor its context: its class has them. transformers is asked only then; it
takes up to three seconds to import, of which a process that loads a tokenizer spends most anyway.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from echo2.core.decide.model_config import context_length, text_part
from echo2.weights.format.snapshot_files import read_config

#: Some classes compute these, and leave them out of what they write (Nemotron-H counts its list of layers).
COMPUTED = ("num_hidden_layers", "layer_types")


def read_text_values(files: Mapping[str, bytes]) -> dict[str, Any]:
    """Return the values of a snapshot's text model.

    Raises:
        PeerError: config.json is missing or is not a JSON object.
    """
    return text_values(read_config(files))


def read_context(files: Mapping[str, bytes]) -> int | None:
    """Return the context length of a snapshot's text model; None if neither config.json nor the class has one.

    Raises:
        PeerError: config.json is missing or is not a JSON object.
    """
    return context_length(read_text_values(files))


def text_values(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of a text model, with at least its vocabulary and context where they are known."""
    values = text_part(config)
    has_both = values.get("vocab_size") is not None and context_length(values) is not None
    return values if has_both else all_values(config)


def all_values(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return all values of a text model, under transformers' usual names too (`hidden_size` for GPT-2's `n_embd`).
    What config.json says alone, if transformers does not know the model or refuses the values.
    """
    if "model_type" not in config:
        return text_part(config)
    try:
        return values_of(transformers_config(json.dumps(dict(config)).encode()))
    except Exception:  # each class fails in its own way; whoever needs a value says which one config.json lacks
        return text_part(config)


def transformers_config(config_json: bytes) -> Any:
    """Return transformers' configuration of a config.json. Code that comes with a model is never run.

    Raises: as transformers, which does not know the model or refuses a value.
    """
    from transformers import AutoConfig  # takes three seconds where torch is installed

    with TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_bytes(config_json)
        return AutoConfig.from_pretrained(folder, trust_remote_code=False, local_files_only=True)


def values_of(config: Any) -> dict[str, Any]:
    """Return all values of the text model of a configuration of transformers, under its usual names too."""
    text = config.get_text_config()
    values: dict[str, Any] = text.to_dict()
    for usual in (*text.attribute_map, *COMPUTED):
        if values.get(usual) is None:
            values[usual] = getattr(text, usual, None)
    tied = getattr(config, "tie_word_embeddings", None)
    return values if tied is None else {**values, "tie_word_embeddings": tied}
