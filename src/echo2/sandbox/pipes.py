"""The pipes between an echo2 process and a child with the user's code: JSON in frames (`core/frames.py`).

The child may print, read its stdin, hang and die; none of this may disturb the frames or the parent.
"""

from __future__ import annotations

import json
import os
import queue
from typing import IO, Any, BinaryIO

from echo2.core.documents import parse_json
from echo2.core.errors import PeerError
from echo2.core.frames import frame, read_frame


def encode(message: dict[str, Any]) -> bytes:
    """Encode a message as one frame.

    Raises:
        PeerError: "oversized".
    """
    return frame(json.dumps(message).encode())


def decode(body: bytes) -> dict[str, Any]:
    """Decode the message in a frame.

    Raises:
        PeerError: "malformed".
    """
    try:
        message = parse_json(body)
    except ValueError as error:
        raise PeerError("malformed", f"a frame of {len(body)} bytes is not JSON: {error}") from error
    if not isinstance(message, dict):
        raise PeerError("malformed", f"a frame holds a {type(message).__name__}, not an object")
    return message


def read(stream: IO[bytes]) -> dict[str, Any] | None:
    """Read the next frame's message; None at the end of the stream.

    Raises:
        PeerError: "oversized" or "malformed".
    """
    body = read_frame(stream)
    return None if body is None else decode(body)


def receive(inbox: BinaryIO, messages: queue.Queue[dict[str, Any]]) -> None:
    """Put every frame in the queue, and end this process when the parent is gone. Needs a thread of its own."""
    while (message := read(inbox)) is not None:
        messages.put(message)
    os._exit(0)  # the main thread may be inside the user's code
