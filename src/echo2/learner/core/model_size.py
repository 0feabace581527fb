"""Computes the sizes of a model and its snapshots from its safetensors headers, without torch and without weights."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from echo2.config import Config
from echo2.config.rundir import read_json
from echo2.core.errors import UserError
from echo2.engines.model_values import all_values
from echo2.learner.decide.memory import BYTES_PER_VALUE
from echo2.learner.decide.model_shape import ModelShape, read_shape
from echo2.weights.format.adapter_files import EXPERTS, lora_targets
from echo2.weights.format.model_files import linear_layers, tensor_shapes


def model_config(path: str) -> dict[str, Any] | None:
    """Return config.json of a model directory, or of a hub id in the local hub cache; None if there is none."""
    config = Path(path) / "config.json"
    if not config.is_file():
        try:
            from huggingface_hub import try_to_load_from_cache
            from huggingface_hub.errors import HFValidationError
        except ImportError:
            return None
        try:
            cached = try_to_load_from_cache(path, "config.json")
        except HFValidationError:
            return None
        if not isinstance(cached, str):
            return None
        config = Path(cached)
    values = read_json(config)
    return values if isinstance(values, dict) else None


def model_shape(path: str) -> ModelShape | None:
    """Return the shape of a model directory, or of a hub id in the local hub cache; None if it is unknown."""
    config = model_config(path)
    return None if config is None else _shape_of(json.dumps(config, sort_keys=True))


@lru_cache(maxsize=16)
def _shape_of(config_json: str) -> ModelShape | None:
    """A plan and its neighbours ask for the same one many times, and transformers takes long to answer."""
    return read_shape(all_values(json.loads(config_json)))


@dataclass(frozen=True, slots=True)
class SnapshotSize:
    """Bytes of a full snapshot. `base_bytes`: of the model under the adapter, which travels once; 0 without one."""

    num_bytes: int
    base_bytes: int = 0


def num_parameters(path: str) -> int | None:
    """Return the number of weights of a model directory, or of a hub id in the local cache; None if it is unknown."""
    model = Path(path)
    files = sorted(model.glob("*.safetensors")) if model.is_dir() else []
    if count := sum(math.prod(shape) for file in files for shape in tensor_shapes(file).values()):
        return count
    shape = model_shape(path)
    return None if shape is None else shape.parameters


def snapshot_bytes(model: Path, snapshot_dtype: str) -> int:
    """Return the bytes of tensors that a worker receives in a full snapshot of this model.

    Raises:
        UserError: it is no directory with safetensors files.
    """
    if not model.is_dir() or (count := num_parameters(str(model))) is None or not any(model.glob("*.safetensors")):
        raise UserError(
            f"The size of a snapshot is not known: model.path = {str(model)!r} is no local directory with "
            "*.safetensors files. Give --snapshot-bytes (parameters x 2 for bfloat16, x 4 for float32; with "
            "lora.rank, of the adapter's)."
        )
    return count * BYTES_PER_VALUE[snapshot_dtype]


def snapshot_size(config: Config) -> SnapshotSize:
    """Return what a worker receives in a full snapshot of this run: the model, or the adapter over it.

    Raises:
        UserError: as `snapshot_bytes`, or the adapter matches no layer.
    """
    model, dtype = Path(config.model.path), config.model.snapshot_dtype
    whole = snapshot_bytes(model, dtype)
    if not config.lora.rank:
        return SnapshotSize(whole)
    layers = linear_layers(model)
    ends = tuple(f".{one}" for one in lora_targets(layers, config.lora.targets))
    trained = sum(sum(shape) for name, shape in layers.items() if f".{name}".endswith(ends))
    shape = model_shape(str(model)) if EXPERTS in config.lora.targets else None
    trained += sum(layer.stacked for layer in shape.layers) if shape else 0
    stored = sum(path.stat().st_size for path in model.glob("*.safetensors"))
    return SnapshotSize(config.lora.rank * trained * BYTES_PER_VALUE[dtype], min(stored, whole))
