"""Bytes of a model's snapshot from its safetensors headers: no torch, no weights read."""

from __future__ import annotations

import math
from pathlib import Path

from echo2.documents import parse_json
from echo2.errors import UserError

BYTES_PER_VALUE = {"float32": 4, "bfloat16": 2}
#: A header is small; what claims more is no safetensors file.
MAX_HEADER_BYTES = 100 << 20


def snapshot_bytes(model: Path, snapshot_dtype: str) -> int:
    """What the workers are sent of this model directory, tensors alone.

    Raises:
        UserError: it is no directory of safetensors.
    """
    files = sorted(model.glob("*.safetensors")) if model.is_dir() else []
    if not files:
        raise UserError(
            f"The size of a snapshot is not known: model.path = {str(model)!r} is no local directory with "
            "*.safetensors files. Give --snapshot-bytes (parameters x 2 for bfloat16, x 4 for float32)."
        )
    num_values = sum(math.prod(shape) for file in files for shape in _shapes(file))
    return num_values * BYTES_PER_VALUE[snapshot_dtype]


def _shapes(file: Path) -> list[list[int]]:
    try:
        with open(file, "rb") as opened:
            length = int.from_bytes(opened.read(8), "little")
            if length > MAX_HEADER_BYTES:
                raise ValueError(f"its header claims {length} bytes")
            header = parse_json(opened.read(length))
        return [entry["shape"] for name, entry in header.items() if name != "__metadata__"]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{file} is no readable safetensors file: {error}.") from error
