"""The files of a PEFT adapter directory: their names, adapter_config.json, and the layers that its targets select."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from echo2.documents import parse_json
from echo2.errors import UserError
from echo2.peft_config import CONFIG_FILE, lora_factors
from echo2.types import SnapshotRef

if TYPE_CHECKING:
    from echo2.config.sections import LoraConfig

ADAPTER_WEIGHTS, ADAPTER_CONFIG = "adapter_model.safetensors", CONFIG_FILE
ALL_LINEAR = "all-linear"
BEGINNING_REMEDY = "Set it to the value of the adapter, or name another adapter in lora.path."


def adapter_config(lora: LoraConfig, targets: Sequence[str], base_model: SnapshotRef, within: str = "") -> bytes:
    """Return the adapter's adapter_config.json. It names the base model by content, not by its path on this machine.
    `within`: how the names of the layers that may have an adapter begin, in a model that has a vision tower, too."""
    values: dict[str, Any] = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base_model.policy,
        "r": lora.rank,
        "lora_alpha": lora.scaled_alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": list(targets),
        "inference_mode": True,
    }
    if within:
        values["exclude_modules"] = rf"(?!{re.escape(within)}).*"
    return json.dumps(values, indent=2, sort_keys=True).encode()


def check_same_settings(ours: bytes, directory: Path, remedy: str) -> str:
    """Check that the PEFT adapter in a directory has the rank, alpha and targets of the adapter_config.json `ours`, and
    that the learner computes it. Returns the base model that the adapter names.

    Raises:
        UserError: the message says what differs, or that there is no adapter.
    """
    path = directory / ADAPTER_CONFIG
    try:
        theirs = parse_json(path.read_bytes())
        lora_factors(theirs, is_trained=True)
        theirs["target_modules"] = sorted(theirs["target_modules"])
    except UserError as error:
        raise UserError(f"The adapter in {directory} is not taken: {error}") from error
    except OSError as error:
        raise UserError(f"{directory} holds no PEFT adapter: {path} cannot be read ({error.strerror}).") from error
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path} describes no LoRA adapter: {error!r}.") from error
    wanted = parse_json(ours)
    for key, setting in (("r", "rank"), ("lora_alpha", "alpha"), ("target_modules", "targets")):
        if wanted[key] != theirs.get(key):
            raise UserError(
                f"{directory} holds an adapter with {key} = {theirs.get(key)}; lora.{setting} makes it {wanted[key]}. "
                f"{remedy}"
            )
    return str(theirs.get("base_model_name_or_path"))


def lora_targets(linear: Collection[str], targets: Sequence[str]) -> list[str]:
    """Return the targets in PEFT's form, sorted: suffixes of the names of linear layers. `linear`: the names of all
    linear layers except the model's head.

    Raises:
        UserError: a target matches no linear layer.
    """
    ends = sorted({name.rpartition(".")[2] for name in linear})
    if list(targets) == [ALL_LINEAR]:
        return ends
    for target in targets:
        if not any(name == target or name.endswith(f".{target}") for name in linear):
            raise UserError(
                f"lora.targets has {target!r}, and no linear layer of the model has that name. There are: "
                f'{", ".join(ends)}; ["{ALL_LINEAR}"] is all of them.'
            )
    return sorted(set(targets))
