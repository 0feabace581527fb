"""What a head and its gates say to each other: calls, answers and the items of streams, over one socket for each gate.

A frame is a header and a body. Numbers of calls are the gate's. Both ends are processes of this run's owner, on one
machine: what they say is not checked as what comes from peers is.
"""

from __future__ import annotations

import asyncio
import json
import struct
from collections import deque
from collections.abc import Callable
from enum import IntEnum
from typing import cast

from echo2.core.errors import PeerError
from echo2.transport.budgets import OverBudget

#: Bytes of the body, kind, number of the call.
HEADER = struct.Struct("<IBQ")
#: Bytes of a stream that a head sends ahead of what its gate has passed on.
WINDOW_BYTES = 2 << 20


class Frame(IntEnum):
    """What a frame is. `CALL` to `READY` are a gate's, the others a head's."""

    CALL = 1  # caller and method (`pack_call`), and the request
    CANCEL = 2  # the caller is gone
    TAKEN = 3  # the next item of a stream has been passed on
    READY = 4  # the gate accepts connections; and later, now and then, that it is there
    ANSWER = 5  # a reply, or an item of a stream
    END = 6  # of a stream
    REFUSED = 7  # instead of an answer (`pack_refusal`)
    MEMBER = 8  # a peer that has enrolled: JSON
    STOP = 9


class HeadFailedError(Exception):
    """The head could not answer a call, by a fault of its own, which it has been told of."""


class Channel(asyncio.Protocol):
    """One end of the socket. `hear` is called with each frame, `lost` once when the other end is gone."""

    def __init__(self, hear: Callable[[Frame, int, bytes], None], lost: Callable[[], None]) -> None:
        self._hear, self._lost = hear, lost
        self._transport: asyncio.Transport | None = None
        self._data = bytearray()
        self._unsent: list[bytes] = []

    def send(self, kind: Frame, number: int = 0, *parts: bytes) -> None:
        """Send a frame, together with the others of this turn of the event loop. No effect once an end is gone."""
        if not self._unsent:
            asyncio.get_running_loop().call_soon(self._flush)
        self._unsent += [HEADER.pack(sum(map(len, parts)), kind, number), *parts]

    def _flush(self) -> None:
        parts, self._unsent = self._unsent, []
        if self._transport is not None and not self._transport.is_closing():
            self._transport.writelines(parts)

    def close(self) -> None:
        """Close this end: what was sent may not arrive."""
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        self._data += data
        at, frames = 0, []
        with memoryview(self._data) as view:
            while len(view) >= at + HEADER.size:
                size, kind, number = HEADER.unpack_from(view, at)
                end = at + HEADER.size + size
                if len(view) < end:
                    break
                frames.append((Frame(kind), number, bytes(view[at + HEADER.size : end])))
                at = end
        del self._data[:at]
        for frame in frames:
            self._hear(*frame)

    def connection_lost(self, exc: Exception | None) -> None:
        self._lost()


class Window:
    """How much of a stream has been sent and not passed on yet, of at most `WINDOW_BYTES` or one item."""

    def __init__(self) -> None:
        self._sizes = deque[int]()
        self._num_bytes = 0
        self._has_room = asyncio.Event()

    async def room_for(self, size: int) -> None:
        """Wait until an item of this size may be sent; it counts from then on."""
        while self._sizes and self._num_bytes + size > WINDOW_BYTES:
            self._has_room.clear()
            await self._has_room.wait()
        self._sizes.append(size)
        self._num_bytes += size

    def taken(self) -> None:
        """Count the oldest item as passed on."""
        self._num_bytes -= self._sizes.popleft()
        self._has_room.set()


def pack_call(method: int, name: str, host: str) -> bytes:
    """What stands before a request: the number of its method, the name in the caller's certificate, and its address."""
    texts = [text.encode() for text in (name, host)]
    return bytes((method, *map(len, texts))) + b"".join(texts)


def unpack_call(body: bytes) -> tuple[int, str, str, bytes]:
    """Return method, name, address and request of a call."""
    method, num_name, num_host = body[:3]
    end = 3 + num_name + num_host
    return method, body[3 : 3 + num_name].decode(), body[3 + num_name : end].decode(), body[end:]


def pack_refusal(error: Exception) -> bytes:
    """Say why there is no answer."""
    if isinstance(error, PeerError):
        words = ["refused", error.reason, error.detail]
    elif isinstance(error, OverBudget):
        words = ["over budget", str(error), "flood" if error.is_flood else ""]
    else:
        words = ["failed", str(error), ""]
    return json.dumps(words).encode()


def unpack_refusal(body: bytes) -> Exception:
    """Return the error that says why there is no answer."""
    kind, first, second = json.loads(body)
    if kind == "refused":
        return PeerError(first, second)
    return OverBudget(first, bool(second)) if kind == "over budget" else HeadFailedError(first)
