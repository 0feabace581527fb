"""Computes the size of a model's snapshot from its safetensors headers, without torch and without reading weights."""

from __future__ import annotations

import math
from pathlib import Path

from echo2.errors import UserError
from echo2.weights.model_files import tensor_shapes

BYTES_PER_VALUE = {"float32": 4, "bfloat16": 2}


def snapshot_bytes(model: Path, snapshot_dtype: str) -> int:
    """Return the bytes of tensors that a worker receives in a full snapshot of this model directory.

    Raises:
        UserError: the path is no directory with safetensors files.
    """
    files = sorted(model.glob("*.safetensors")) if model.is_dir() else []
    if not files:
        raise UserError(
            f"The size of a snapshot is not known: model.path = {str(model)!r} is no local directory with "
            "*.safetensors files. Give --snapshot-bytes (parameters x 2 for bfloat16, x 4 for float32)."
        )
    num_values = sum(math.prod(shape) for file in files for shape in tensor_shapes(file).values())
    return num_values * BYTES_PER_VALUE[snapshot_dtype]
