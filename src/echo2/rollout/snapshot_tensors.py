"""Loads a snapshot's tensors into an engine piece by piece. Each must exist, have the right shape and be finite, and
only one piece is in memory at a time.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from echo2.errors import PeerError
from echo2.types import Snapshot, TensorSource

FLOAT_DTYPES = {"F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
DTYPES = FLOAT_DTYPES | {
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
#: Bytes of a tensor that are read at once; a multiple of every item.
PIECE_BYTES = 4 << 20

Places = Mapping[str, Sequence[Tensor]]
"""Where each tensor of a snapshot goes, by its name: to one tensor of its shape or to several, contiguous ones. Names
with the same place are tied: a snapshot has at least one of them."""


def computing_dtype(snapshot: Snapshot) -> torch.dtype:
    """That of the largest tensor.

    Raises:
        PeerError: it is not one of floating-point numbers.
    """
    stored = max(snapshot.tensors.values(), key=lambda tensor: tensor.num_bytes, default=None)
    if stored is None or stored.dtype not in FLOAT_DTYPES:
        found = "there are none" if stored is None else f"they are {stored.dtype}"
        raise PeerError("bad_snapshot", f"an engine computes with weights of {', '.join(FLOAT_DTYPES)}; {found}")
    return FLOAT_DTYPES[stored.dtype]


def check_tensors(snapshot: Snapshot, places: Places) -> None:
    """Read all tensors that have a place. The places are not touched, and may be on no device ("meta").

    Raises:
        PeerError: a tensor is missing or has no place; unknown dtype, another shape than its place, a wrong number of
            bytes, or values that are not finite.
    """
    buffer = _buffer()
    for name in _taken(snapshot, places):
        source, shape = snapshot.tensors[name], tuple(places[name][0].shape)
        if source.dtype not in DTYPES:
            raise PeerError("bad_snapshot", f"{name} has dtype {source.dtype!r}, which no engine reads")
        dtype = DTYPES[source.dtype]
        if tuple(source.shape) != shape:
            said = f"{name} has shape {list(source.shape)}, its architecture says {list(shape)}"
            raise PeerError("bad_snapshot", said)
        if source.num_bytes != math.prod(shape) * dtype.itemsize:
            said = f"{name} has {source.num_bytes} bytes, not those of {source.dtype} {list(shape)}"
            raise PeerError("bad_snapshot", said)
        for _, piece in _pieces(source, buffer) if dtype.is_floating_point else ():
            # Either end of the range is NaN if any value is: thirty times as fast as to ask each value.
            if not all(math.isfinite(float(end)) for end in torch.aminmax(piece)):
                raise PeerError("bad_snapshot", f"{name} holds NaN or infinity")


def copy_tensors(snapshot: Snapshot, places: Places) -> None:
    """Copy all tensors, which were checked, into their places, whatever dtype these have.

    Raises:
        PeerError: the snapshot's bytes are not there any more; some places are filled then, others not.
    """
    buffer = _buffer()
    for name in _taken(snapshot, places):
        for start, piece in _pieces(snapshot.tensors[name], buffer):
            for place in places[name]:
                place.view(-1)[start : start + piece.numel()].copy_(piece)


def _taken(snapshot: Snapshot, places: Places) -> list[str]:
    """The names of the tensors that are read: of those that are tied the first that the snapshot has."""
    tied: dict[int, list[str]] = {}
    for name, place in places.items():
        tied.setdefault(id(place[0]), []).append(name)
    taken = [next((name for name in names if name in snapshot.tensors), names[0]) for names in tied.values()]
    for complaint, names in (
        ("are missing", set(taken) - snapshot.tensors.keys()),
        ("do not belong to the architecture", snapshot.tensors.keys() - places.keys()),
    ):
        if names:
            raise PeerError("bad_snapshot", f"{len(names)} tensors {complaint}, first {min(names)}")
    return taken


def _buffer() -> Tensor:
    return torch.empty(PIECE_BYTES, dtype=torch.uint8)


def _pieces(source: TensorSource, buffer: Tensor) -> Iterator[tuple[int, Tensor]]:
    """(first item, items) of one piece of a tensor after the other, all in the same buffer."""
    dtype = DTYPES[source.dtype]
    for start in range(0, source.num_bytes, PIECE_BYTES):
        stop = min(source.num_bytes, start + PIECE_BYTES)
        part = buffer[: stop - start]
        part.numpy()[:] = np.frombuffer(source.read(start, stop), np.uint8)  # bytes that are read-only, and not aligned
        yield start // dtype.itemsize, part.view(dtype)
