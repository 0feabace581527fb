"""The experts that a mixture's routers chose for a group's tokens: packed for the wire and the ledger, and checked.

A rollout of P prompt tokens and T tokens has routes [P + T - 1, layers, chosen]: of all tokens that a model reads, not
of the last. Ids are uint8 up to 256 experts, else uint16, in the order in which the router chose them. A group's routes
are one zstd frame over its rollouts' routes: a prompt that was read once for all of them takes no more bytes than once.

The head checks every byte of them before the ledger takes them. They are kept and deleted with their group.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import zstandard
from numpy.typing import NDArray

from echo2.core.errors import PeerError
from echo2.core.types import RolloutGroup
from echo2.transport import wire_pb2 as wire
from echo2.transport.limits import ROUTES_BYTES_MAX

#: Expert ids of one rollout: [P + T - 1, layers, chosen].
Routes = NDArray[Any]
#: Distant repetitions are found, which prompts are.
_LONG_DISTANCE = {"window_log": 26, "enable_ldm": True}
LEVEL = 1
#: Beyond all mixtures in use; ids fit into 15 bits.
LAYERS_MAX, EXPERTS_MAX = 10_000, 1 << 15


@dataclass(frozen=True, slots=True)
class RouteShape:
    """A mixture's layers that have a router, how many experts each chooses for a token, and of how many."""

    layers: int
    chosen: int
    experts: int

    @property
    def dtype(self) -> np.dtype[Any]:
        """Of an expert's id."""
        return np.dtype("<u1" if self.experts <= 256 else "<u2")

    @property
    def token_bytes(self) -> int:
        """Bytes of one token's routes, before they are compressed."""
        return self.layers * self.chosen * self.dtype.itemsize

    def read(self, data: bytes) -> Routes:
        """Return a rollout's routes [tokens, layers, chosen]."""
        return np.frombuffer(data, self.dtype).reshape(-1, self.layers, self.chosen)


def encode_shape(shape: RouteShape | None) -> wire.RouteShape | None:
    """The wire form of a shape."""
    return None if shape is None else wire.RouteShape(layers=shape.layers, chosen=shape.chosen, experts=shape.experts)


def decode_shape(message: wire.RouteShape) -> RouteShape:
    """The shape that a message gives.

    Raises:
        PeerError: "malformed": no mixture has it.
    """
    shape = RouteShape(message.layers, message.chosen, message.experts)
    if not (0 < shape.layers <= LAYERS_MAX and 0 < shape.chosen < shape.experts <= EXPERTS_MAX):
        raise PeerError("malformed", f"routes of the shape {shape}")
    return shape


def num_routed(group: RolloutGroup) -> list[int]:
    """Return how many tokens of each rollout have routes: all that are read, prompt included."""
    return [len(group.prompt_tokens) + len(rollout.tokens) - 1 for rollout in group.rollouts]


def packed(group: RolloutGroup) -> RolloutGroup:
    """Return the group with its rollouts' routes in `RolloutGroup.routes`; without any, if a rollout has none or they
    are larger than `ROUTES_BYTES_MAX`."""
    routes = [rollout.routes for rollout in group.rollouts]
    if not any(routes):
        return group
    size = sum(map(len, routes))
    frame = _compressed(b"".join(routes)) if all(routes) and size <= ROUTES_BYTES_MAX else b""
    return replace(group, rollouts=tuple(replace(one, routes=b"") for one in group.rollouts), routes=frame)


def _compressed(data: bytes) -> bytes:
    params = zstandard.ZstdCompressionParameters.from_level(LEVEL, source_size=len(data), **_LONG_DISTANCE)
    return zstandard.ZstdCompressor(compression_params=params).compress(data)


def unpacked(group: RolloutGroup) -> RolloutGroup:
    """Return the group with the routes of `RolloutGroup.routes` in its rollouts.

    Raises:
        PeerError: "malformed": they are not as many bytes for each token.
    """
    if not group.routes:
        return group
    counts = num_routed(group)
    data = memoryview(_data(group.routes, sum(counts)))
    token_bytes, rollouts, start = len(data) // sum(counts), [], 0
    for rollout, count in zip(group.rollouts, counts, strict=True):
        rollouts.append(replace(rollout, routes=bytes(data[start : start + count * token_bytes])))
        start += count * token_bytes
    return replace(group, rollouts=tuple(rollouts), routes=b"")


def check_routes(group: RolloutGroup, shape: RouteShape | None) -> None:
    """Check a group's routes: one set of different experts for each layer of each token. `shape`: None if nobody asked
    for routes. Memory and time are bounded by `ROUTES_BYTES_MAX`.

    Raises:
        PeerError: "malformed" or "oversized", saying what is wrong.
    """
    if not group.routes:
        return
    if shape is None:
        raise PeerError("malformed", "routes, which were not asked for")
    counts = num_routed(group)
    data = _data(group.routes, sum(counts))
    if len(data) != sum(counts) * shape.token_bytes:
        raise PeerError(
            "malformed", f"{len(data)} bytes of routes; {sum(counts)} tokens of {shape.token_bytes} were sampled"
        )
    problem = why_impossible(np.frombuffer(data, shape.dtype).reshape(-1, shape.chosen), shape.experts)
    if problem:
        raise PeerError("malformed", problem)


def why_impossible(ids: Routes, experts: int) -> str:
    """Return why no router of so many experts chooses these, whose last axis is one choice; empty if one may."""
    if ids.size and int(ids.max()) >= experts:
        return f"expert {ids.max()} of {experts} in the routes"
    columns = np.ascontiguousarray(ids.reshape(-1, ids.shape[-1]).T)  # rows of a few bytes are slow
    if any(bool((columns[distance:] == columns[:-distance]).any()) for distance in range(1, len(columns))):
        return "an expert that is chosen twice for a token"
    return ""


def _data(frame: bytes, num_tokens: int) -> bytes:
    """Return the bytes of a frame, whose size it must tell."""
    try:
        size = zstandard.get_frame_parameters(frame).content_size
        if size in (zstandard.CONTENTSIZE_UNKNOWN, zstandard.CONTENTSIZE_ERROR):
            raise PeerError("malformed", "routes in a frame that does not tell its size")
        if size > ROUTES_BYTES_MAX:
            raise PeerError("oversized", f"routes of {size} bytes; the limit is {ROUTES_BYTES_MAX}")
        if not size or size % num_tokens:
            raise PeerError("malformed", f"{size} bytes of routes for {num_tokens} tokens")
        data = zstandard.ZstdDecompressor().decompress(frame, max_output_size=size, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise PeerError("malformed", f"routes that are not a zstd frame: {error}") from error
    if len(data) != size:
        raise PeerError("malformed", f"{len(data)} bytes of routes in a frame of {size}")
    return data
