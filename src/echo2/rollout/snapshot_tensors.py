"""A snapshot's bytes as torch tensors, each checked: there, of the right shape, finite. Nothing is taken on trust."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from echo2.errors import PeerError
from echo2.types import Snapshot, TensorBytes

FLOAT_DTYPES = {"F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
DTYPES = FLOAT_DTYPES | {
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


def read_tensor(name: str, source: TensorBytes, shape: tuple[int, ...] | None = None) -> Tensor:
    """One tensor on the CPU, a copy of the snapshot's bytes.

    Raises:
        PeerError: unknown dtype, another shape than `shape`, a wrong number of bytes, or values that are not finite.
    """
    if source.dtype not in DTYPES:
        raise PeerError("bad_snapshot", f"{name} has dtype {source.dtype!r}, which no engine reads")
    dtype = DTYPES[source.dtype]
    if shape is not None and tuple(source.shape) != shape:
        raise PeerError("bad_snapshot", f"{name} has shape {list(source.shape)}, its architecture says {list(shape)}")
    data = memoryview(source.data).cast("B")
    if len(data) != math.prod(source.shape) * dtype.itemsize:
        raise PeerError(
            "bad_snapshot", f"{name} has {len(data)} bytes, not those of {source.dtype} {list(source.shape)}"
        )
    if not len(data):
        return torch.empty(source.shape, dtype=dtype)
    # A copy, because torch warns about memory that can't be written to, and because bytes need not be aligned.
    tensor = torch.frombuffer(bytearray(data), dtype=dtype).reshape(source.shape)
    if dtype.is_floating_point and not bool(torch.isfinite(tensor).all()):
        raise PeerError("bad_snapshot", f"{name} holds NaN or infinity")
    return tensor


def require_names(snapshot: Snapshot, wanted: set[str], tolerated: set[str]) -> None:
    """Refuse a snapshot that lacks a tensor of its architecture or holds one that the architecture does not have.

    Raises:
        PeerError: with the first names.
    """
    missing = sorted(wanted - snapshot.tensors.keys())
    unknown = sorted(snapshot.tensors.keys() - wanted - tolerated)
    if missing:
        raise PeerError("bad_snapshot", f"{len(missing)} tensors are missing, first {missing[0]}")
    if unknown:
        raise PeerError("bad_snapshot", f"{len(unknown)} tensors do not belong to the architecture, first {unknown[0]}")
