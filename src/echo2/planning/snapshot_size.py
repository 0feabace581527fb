"""Computes the sizes of a model and its snapshots from its safetensors headers, without torch and without weights."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from echo2.config import Config
from echo2.config.offers import Offer, load_offers
from echo2.control.capacity.memory import BYTES_PER_VALUE
from echo2.errors import UserError
from echo2.planning.memory_needs import model_shape
from echo2.weights.adapter_files import lora_targets
from echo2.weights.model_files import linear_layers, tensor_shapes


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


def offers_for(config: Config, path: Path) -> list[Offer]:
    """Return the offers of a file, their rates scaled to the run's model and answers. An offer whose rate is for a
    model of other `parameters` keeps it, and says so, if the size of the run's model is unknown.

    Raises:
        UserError: as `load_offers`.
    """
    offers = load_offers(path)
    count = num_parameters(config.model.path) if any(offer.parameters for offer in offers) else None
    return [offer.scaled_to(count, config.sampling.max_tokens) for offer in offers]


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
    stored = sum(path.stat().st_size for path in model.glob("*.safetensors"))
    return SnapshotSize(config.lora.rank * trained * BYTES_PER_VALUE[dtype], min(stored, whole))
