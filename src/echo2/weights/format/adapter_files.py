"""The files of a PEFT adapter: their names, adapter_config.json, and the layers that its targets select. One list of
what echo2 computes of PEFT's settings, for training, engines and the service.

An adapter's adapter_config.json says more than rank and alpha: some settings change what factors A and B compute, and
leave no trace in the tensors' names and shapes (`alpha_pattern`), or belong to another base model (`pissa`). So only
settings listed here are taken. PEFT writes all its settings, and adds some with each release: a setting that is not
listed must be off.

Sources: peft 0.21's `LoraConfig`; for `use_rslora`, Kalajdzievski (arXiv 2312.03732).
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from echo2.core.documents import parse_json
from echo2.core.errors import UserError
from echo2.core.types import SnapshotRef

if TYPE_CHECKING:
    from echo2.config.sections import LoraConfig

ADAPTER_WEIGHTS, ADAPTER_CONFIG = "adapter_model.safetensors", "adapter_config.json"
RANK_MAX = 4096
ALPHA_MAX = 1e6
#: Settings that may have any value: they do not change what given A and B compute, or tensors would show it.
ANY_VALUE = frozenset(
    {"auto_mapping", "base_model_name_or_path", "ensure_weight_tying", "eva_config", "exclude_modules"}
    | {"fan_in_fan_out", "inference_mode", "layers_pattern", "layers_to_transform", "lora_dropout", "megatron_core"}
    | {"peft_version", "qalora_group_size", "revision", "target_modules", "target_parameters", "task_type"}
)
#: Settings that may have these values. Other ways to begin (pissa, olora, corda, loftq, ...) change the base model.
VALUES: dict[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "bias": ("none", None),
    "init_lora_weights": (True, False, None, "gaussian", "orthogonal", "eva"),
    "use_rslora": (True, False, None),
}
#: Values that switch a setting off.
OFF: tuple[Any, ...] = (None, False, {}, [])
ALL_LINEAR, EXPERTS = "all-linear", "experts"
BEGINNING_REMEDY = "Set it to the value of the adapter, or name another adapter in lora.path."


@dataclass(frozen=True, slots=True)
class LoraFactors:
    """How the factors of an adapter are applied: y = W x + B (A x) scale."""

    rank: int
    alpha: float
    scale: float


def lora_factors(config: Any, is_trained: bool = False) -> LoraFactors:
    """Return what the content of an adapter_config.json says. `is_trained`: the adapter is to be trained, where the
    scale is always alpha / rank.

    Raises:
        UserError: the adapter computes something else.
    """
    if not isinstance(config, dict):
        raise UserError(f"{ADAPTER_CONFIG} holds no object.")
    for name in sorted(config.keys() | {"peft_type"}):
        value = config.get(name)
        possible = VALUES.get(name, OFF)
        if name not in ANY_VALUE and name not in ("r", "lora_alpha") and not (_is_plain(value) and value in possible):
            expected = f"; it must be {' or '.join(map(repr, possible))}" if name in VALUES else ""
            raise UserError(f"{ADAPTER_CONFIG} has {name} = {_shown(value)}, which echo2 does not compute{expected}.")
    rank, alpha = config.get("r"), config.get("lora_alpha")
    if not isinstance(rank, int) or isinstance(rank, bool) or not 1 <= rank <= RANK_MAX:
        raise UserError(f"{ADAPTER_CONFIG} has r = {_shown(rank)}; whole numbers from 1 to {RANK_MAX} are taken.")
    if not isinstance(alpha, int | float) or isinstance(alpha, bool) or not abs(alpha) <= ALPHA_MAX:
        raise UserError(f"{ADAPTER_CONFIG} has lora_alpha = {_shown(alpha)}; numbers up to {ALPHA_MAX:g} are taken.")
    if config.get("use_rslora") and is_trained:
        raise UserError(
            f"{ADAPTER_CONFIG} has use_rslora = True; echo2 trains with the scale alpha / r. Set it to false and "
            f"lora_alpha to {alpha * math.sqrt(rank):g}, which computes the same."
        )
    return LoraFactors(rank, alpha, alpha / (math.sqrt(rank) if config.get("use_rslora") else rank))


def _is_plain(value: Any) -> bool:
    """Whether the value may be compared: numbers equal truth values in Python, and are not compared here."""
    return value is None or isinstance(value, bool | str | dict | list)


def _shown(value: Any) -> str:
    return repr(value)[:64]


def adapter_config(
    lora: LoraConfig, targets: Sequence[str], base_model: SnapshotRef, within: str = "", stacks: Sequence[str] = ()
) -> bytes:
    """Return the adapter's adapter_config.json. It names the base model by content, not by its path on this machine.
    `within`: how the names of the layers that may have an adapter begin, in a model that has a vision tower, too.
    `stacks`: ends of the names of adapted tensors that are the weights of all experts."""
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
    if stacks:
        values["target_parameters"] = list(stacks)
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
        its_config = parse_json(path.read_bytes())
        lora_factors(its_config, is_trained=True)
        its_config["target_modules"] = _targets(its_config)
    except UserError as error:
        raise UserError(f"The adapter in {directory} is not taken: {error}") from error
    except OSError as error:
        raise UserError(f"{directory} holds no PEFT adapter: {path} cannot be read ({error.strerror}).") from error
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path} describes no LoRA adapter: {error!r}.") from error
    own_config = parse_json(ours)
    own_config["target_modules"] = _targets(own_config)
    for key, setting in (("r", "rank"), ("lora_alpha", "alpha"), ("target_modules", "targets")):
        if own_config[key] != its_config.get(key):
            raise UserError(
                f"{directory} holds an adapter with {key} = {its_config.get(key)}; lora.{setting} makes it "
                f"{own_config[key]}. {remedy}"
            )
    return str(its_config.get("base_model_name_or_path"))


def _targets(config: Any) -> list[str]:
    return sorted([*config["target_modules"], *(config.get("target_parameters") or ())])


def lora_targets(linear: Collection[str], targets: Sequence[str]) -> list[str]:
    """Return the targets in PEFT's form, sorted: suffixes of the names of linear layers. `linear`: the names of all
    linear layers except the model's head. "experts" is not a linear layer, and not among them.

    Raises:
        UserError: a target matches no linear layer.
    """
    ends = sorted({name.rpartition(".")[2] for name in linear})
    targets = [target for target in targets if target != EXPERTS]
    if targets == [ALL_LINEAR]:
        return ends
    for target in targets:
        if not any(name == target or name.endswith(f".{target}") for name in linear):
            raise UserError(
                f"lora.targets has {target!r}, and no linear layer of the model has that name. There are: "
                f'{", ".join(ends)}; ["{ALL_LINEAR}"] is all of them.'
            )
    return sorted(set(targets))
