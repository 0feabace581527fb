"""What open requests ask for: each body is read once, large ones in a thread, and kept in memory if there is room."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, TypeVar

import msgspec

from echo2.core.errors import PeerError
from echo2_service import limits
from echo2_service.front.bodies import LoadBody, OptimBody, SampleBody, SaveBody, parse
from echo2_service.front.data import TrainWork, read_json, read_protobuf

T = TypeVar("T")
Body = TypeVar("Body", bound=msgspec.Struct)
#: A body as it was read, or why it cannot be read any more.
Given = TrainWork | OptimBody | SaveBody | LoadBody | SampleBody | PeerError | None
#: Shorter bodies are read at once: a thread costs more.
SHORT_BYTES = 32 << 10
#: Memory of a sample's body as it was read, over its bytes, at most (numbers of three digits); of training data 1.
SAMPLE_MEMORY = 10


class GivenRequests:
    """What the open requests ask for, by id. For one event loop."""

    def __init__(self) -> None:
        self._given: dict[str, tuple[Given, int]] = {}
        self._num_bytes = 0

    def add(self, request: str, given: Given, num_bytes: int) -> None:
        """Keep what a request asks for, whose body has so many bytes, if there is room."""
        if isinstance(given, SampleBody):
            num_bytes *= SAMPLE_MEMORY
        if given is not None and self._num_bytes + num_bytes <= limits.DATA_BYTES_MAX:
            self._given[request] = given, num_bytes
            self._num_bytes += num_bytes

    def look(self, request: str) -> Given:
        """Return what a request asks for; None if it was not kept."""
        return self._given.get(request, (None, 0))[0]

    def drop(self, request: str) -> Given:
        """Forget what a request asks for, and return it; None if it was not kept."""
        given, num_bytes = self._given.pop(request, (None, 0))
        self._num_bytes -= num_bytes
        return given


async def read(kind: type[Body], body: bytes) -> tuple[Body, str]:
    """Read a body that has just come. Return it and its digest.

    Raises:
        PeerError: the body is not JSON of that type.
    """
    return await off_loop(len(body), lambda: (parse(kind, body), digest_of(body)))


async def read_training(body: bytes, is_protobuf: bool, forward_only: bool = False) -> tuple[TrainWork, str]:
    """Read training data that have just come, as `read`. The digest of protobuf is that of its canonical bytes."""

    def work() -> tuple[TrainWork, str]:
        if not is_protobuf:
            return read_json(body, forward_only), digest_of(body)
        found, canonical = read_protobuf(body)
        return found, digest_of(canonical)

    return await off_loop(len(body), work)


async def off_loop(num_bytes: int, work: Callable[[], T]) -> T:
    """Return the result of work on a body of this size, in a thread if the body is large. JSON's parser keeps the
    interpreter to itself, so it still holds up the event loop (a second for 11 MB of numbers); conversions do not."""
    return work() if num_bytes <= SHORT_BYTES else await asyncio.to_thread(work)


def read_stored(body: bytes | None, kind: str) -> Given:
    """Read the stored body of a request that was not kept."""
    stored = body or b""
    try:
        return _READERS[kind](stored) if kind in _READERS else None
    except PeerError as error:
        return error


def digest_of(body: bytes) -> str:
    """Return the digest by which a repeated request is known."""
    return hashlib.sha256(body).hexdigest()


def _training(forward_only: bool, body: bytes) -> TrainWork:
    """Read protobuf or JSON, as the body begins."""
    return read_json(body, forward_only) if body[:1] == b"{" else read_protobuf(body)[0]


_READERS: Mapping[str, Callable[[bytes], Any]] = {
    "forward_backward": partial(_training, False),
    "forward": partial(_training, True),
    "optim_step": partial(parse, OptimBody),
    "save_weights": partial(parse, SaveBody),
    "save_weights_for_sampler": partial(parse, SaveBody),
    "load_weights": partial(parse, LoadBody),
    "sample": partial(parse, SampleBody),
}
