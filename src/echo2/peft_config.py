"""What echo2 computes of a LoRA adapter in PEFT's form: the one list for training, engines and the service.

An adapter's adapter_config.json says more than rank and alpha: some settings change what factors A and B compute, and
leave no trace in the tensors' names and shapes (`alpha_pattern`), or belong to another base model (`pissa`). So only
settings listed here are taken. PEFT writes all its settings, and adds some with each release: a setting that is not
listed must be off.

Sources: peft 0.21's `LoraConfig`; for `use_rslora`, Kalajdzievski (arXiv 2312.03732).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from echo2.errors import UserError

CONFIG_FILE = "adapter_config.json"
RANK_MAX = 4096
ALPHA_MAX = 1e6
#: Settings that may have any value: they do not change what given A and B compute, or tensors would show it.
ANY_VALUE = frozenset(
    {"auto_mapping", "base_model_name_or_path", "ensure_weight_tying", "eva_config", "exclude_modules"}
    | {"fan_in_fan_out", "inference_mode", "layers_pattern", "layers_to_transform", "lora_dropout", "megatron_core"}
    | {"peft_version", "qalora_group_size", "revision", "target_modules", "task_type"}
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
        raise UserError(f"{CONFIG_FILE} holds no object.")
    for name in sorted(config.keys() | {"peft_type"}):
        value = config.get(name)
        known = VALUES.get(name, OFF)
        if name not in ANY_VALUE and name not in ("r", "lora_alpha") and not (_is_plain(value) and value in known):
            expected = f"; it must be {' or '.join(map(repr, known))}" if name in VALUES else ""
            raise UserError(f"{CONFIG_FILE} has {name} = {_shown(value)}, which echo2 does not compute{expected}.")
    rank, alpha = config.get("r"), config.get("lora_alpha")
    if not isinstance(rank, int) or isinstance(rank, bool) or not 1 <= rank <= RANK_MAX:
        raise UserError(f"{CONFIG_FILE} has r = {_shown(rank)}; whole numbers from 1 to {RANK_MAX} are taken.")
    if not isinstance(alpha, int | float) or isinstance(alpha, bool) or not abs(alpha) <= ALPHA_MAX:
        raise UserError(f"{CONFIG_FILE} has lora_alpha = {_shown(alpha)}; numbers up to {ALPHA_MAX:g} are taken.")
    if config.get("use_rslora") and is_trained:
        raise UserError(
            f"{CONFIG_FILE} has use_rslora = True; echo2 trains with the scale alpha / r. Set it to false and "
            f"lora_alpha to {alpha * math.sqrt(rank):g}, which computes the same."
        )
    return LoraFactors(rank, alpha, alpha / (math.sqrt(rank) if config.get("use_rslora") else rank))


def _is_plain(value: Any) -> bool:
    """Whether the value may be compared: numbers equal truth values, and are none here."""
    return value is None or isinstance(value, bool | str | dict | list)


def _shown(value: Any) -> str:
    return repr(value)[:64]
