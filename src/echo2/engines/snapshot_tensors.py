"""Loads a snapshot's tensors into an engine piece by piece. Each must exist, have the right shape and be finite, and
only one piece is in memory at a time.

Where the places are new, checking and copying is one pass over the bytes. Only weights that are copied over those in
use are read twice: nothing may be refused half-way.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from echo2.core.errors import PeerError
from echo2.core.types import Snapshot

FLOAT_DTYPES = {"F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
DTYPES = FLOAT_DTYPES | {
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
#: Bytes of a tensor that are read at once; a multiple of every item size.
PIECE_BYTES = 4 << 20

Places = Mapping[str, Sequence[Tensor]]
"""The destination of each tensor of a snapshot, by name: one or several tensors of its shape, or none for a tensor that
is passed over. Names with the same place are tied: a snapshot has at least one of them."""


def computing_dtype(snapshot: Snapshot) -> torch.dtype:
    """Return the dtype that an engine computes in: that of the largest tensor.

    Raises:
        PeerError: it is not a floating-point dtype, or there are no tensors.
    """
    stored = max(snapshot.tensors.values(), key=lambda tensor: tensor.num_bytes, default=None)
    if stored is None or stored.dtype not in FLOAT_DTYPES:
        detail = "there are none" if stored is None else f"they are {stored.dtype}"
        raise PeerError("bad_snapshot", f"an engine computes with weights of {', '.join(FLOAT_DTYPES)}; {detail}")
    return FLOAT_DTYPES[stored.dtype]


def check_layout(snapshot: Snapshot, places: Places) -> None:
    """Check all that can be known of the tensors without reading them. The places may be on the device "meta".

    Raises:
        PeerError: a tensor is missing or has no place; its dtype is unknown, its shape is not that of its place, or its
            number of bytes is wrong.
    """
    for name in names_to_read(snapshot, places):
        source, shape = snapshot.tensors[name], tuple(places[name][0].shape)
        if source.dtype not in DTYPES:
            raise PeerError("bad_snapshot", f"{name} has dtype {source.dtype!r}, which no engine reads")
        if tuple(source.shape) != shape:
            detail = f"{name} has shape {list(source.shape)}, its architecture says {list(shape)}"
            raise PeerError("bad_snapshot", detail)
        if source.num_bytes != math.prod(shape) * DTYPES[source.dtype].itemsize:
            detail = f"{name} has {source.num_bytes} bytes, not those of {source.dtype} {list(shape)}"
            raise PeerError("bad_snapshot", detail)


def check_values(snapshot: Snapshot, places: Places) -> None:
    """Read all tensors, without writing the places: after this, `copy_tensors` does not refuse a value.

    Raises:
        PeerError: a value is not finite, or the snapshot's bytes can no longer be read.
    """
    for name in names_to_read(snapshot, places):
        for _ in pieces_of(snapshot, name):
            pass


def copy_tensors(snapshot: Snapshot, places: Places) -> None:
    """Copy all tensors into their places, converting dtypes. Call `check_layout` before.

    Raises:
        PeerError: as `check_values`; some places are filled then, others not.
    """
    for name in names_to_read(snapshot, places):
        fill(snapshot, name, places[name])


def fill(snapshot: Snapshot, name: str, places: Sequence[Tensor]) -> None:
    """Copy one tensor into its places. Raises: as `copy_tensors`."""
    into = [place if place.is_contiguous() else torch.empty_like(place).contiguous() for place in places]
    for start, piece in pieces_of(snapshot, name):
        for place in into:
            place.view(-1)[start : start + piece.numel()].copy_(piece)
    for place, whole in zip(places, into, strict=True):
        if whole is not place:
            place.copy_(whole)


def pieces_of(snapshot: Snapshot, name: str) -> Iterator[tuple[int, Tensor]]:
    """Yield (first item, items) of consecutive pieces of a tensor, flat, in one buffer: each piece is gone when the
    next is taken.

    Raises:
        PeerError: as `check_values`.
    """
    source = snapshot.tensors[name]
    dtype, buffer = DTYPES[source.dtype], torch.empty(min(PIECE_BYTES, source.num_bytes), dtype=torch.uint8)
    for start in range(0, source.num_bytes, PIECE_BYTES):
        part = buffer[: source.num_bytes - start]
        read = source.read(start, start + len(part))
        part.numpy()[:] = np.frombuffer(read, np.uint8)  # a copy: these are read-only and unaligned
        piece = part.view(dtype)
        # Minimum and maximum are NaN if any value is: thirty times as fast as checking each value.
        if piece.is_floating_point() and not all(math.isfinite(float(end)) for end in torch.aminmax(piece)):
            raise PeerError("bad_snapshot", f"{name} holds NaN or infinity")
        yield start // dtype.itemsize, piece


def names_to_read(snapshot: Snapshot, places: Places) -> list[str]:
    """Return the names of the tensors to read: of tied names, the first that the snapshot has."""
    tied: dict[int, list[str]] = {}
    for name, place in places.items():
        if place:
            tied.setdefault(id(place[0]), []).append(name)
    tensor_names = [next((name for name in names if name in snapshot.tensors), names[0]) for names in tied.values()]
    for complaint, names in (
        ("are missing", set(tensor_names) - snapshot.tensors.keys()),
        ("do not belong to the architecture", snapshot.tensors.keys() - places.keys()),
    ):
        if names:
            raise PeerError("bad_snapshot", f"{len(names)} tensors {complaint}, first {min(names)}")
    return tensor_names
