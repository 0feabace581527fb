"""Frames: the one way in which messages follow each other in a pipe, a socket or a file. A frame is a 4-byte length,
then that many bytes; what these mean is not known here.
"""

from __future__ import annotations

import asyncio
import struct
from typing import IO

from echo2.core.errors import PeerError

HEADER = struct.Struct("<I")
MAX_FRAME_BYTES = 256 << 20


def frame(body: bytes) -> bytes:
    """Return the frame of a message.

    Raises:
        PeerError: "oversized".
    """
    return HEADER.pack(_checked(len(body), MAX_FRAME_BYTES)) + body


def read_frame(stream: IO[bytes]) -> bytes | None:
    """Read the next message; None at the end of the stream (a frame cut short counts as the end).

    Raises:
        PeerError: "oversized".
    """
    header = stream.read(HEADER.size)
    if len(header) < HEADER.size:
        return None
    length = _checked(HEADER.unpack(header)[0], MAX_FRAME_BYTES)
    body = stream.read(length)
    return body if len(body) == length else None


async def receive_frame(reader: asyncio.StreamReader, bytes_max: int | None = None) -> bytes:
    """Read the next message.

    Raises:
        PeerError: "oversized".
        EOFError, ConnectionError: the other end is gone (asyncio's IncompleteReadError is an EOFError).
    """
    header = await reader.readexactly(HEADER.size)
    return await reader.readexactly(_checked(HEADER.unpack(header)[0], bytes_max or MAX_FRAME_BYTES))


def _checked(length: int, most: int) -> int:
    if length > most:
        raise PeerError("oversized", f"a frame of {length} bytes; the limit is {most}")
    return length
