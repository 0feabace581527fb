"""The pipes between an echo2 process and a child with the user's code. A frame is a 4-byte length, then that much JSON.

The child may print, read its stdin, hang and die; none of this may disturb the frames or the parent.
"""

from __future__ import annotations

import json
import os
import queue
import signal
import struct
from pathlib import Path
from typing import IO, Any, BinaryIO

import echo2
from echo2.core.documents import parse_json
from echo2.core.errors import PeerError

#: Entries of `no_proxy`: OpenAI clients and the like would send calls of the model to a proxy.
LOOPBACK_NAMES = ("127.0.0.1", "localhost", "::1")
MAX_FRAME_BYTES = 256 << 20
HEADER = struct.Struct("<I")
PACKAGE_ROOT = str(Path(echo2.__file__).resolve().parent.parent)  # the child imports the same echo2


def encode(message: dict[str, Any]) -> bytes:
    """Encode a message as one frame.

    Raises:
        PeerError: "oversized".
    """
    body = json.dumps(message).encode()
    return HEADER.pack(checked_length(len(body))) + body


def checked_length(length: int) -> int:
    """Return a frame's length in bytes. Raises PeerError("oversized") if it is over the limit."""
    if length > MAX_FRAME_BYTES:
        raise PeerError("oversized", f"a frame of {length} bytes; the limit is {MAX_FRAME_BYTES}")
    return length


def decode(body: bytes) -> dict[str, Any]:
    """Decode the message in a frame's body.

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
    """Read the next frame's message; None at the end of the stream (a frame cut short counts as the end).

    Raises:
        PeerError: "oversized" or "malformed".
    """
    header = stream.read(HEADER.size)
    if len(header) < HEADER.size:
        return None
    length = checked_length(HEADER.unpack(header)[0])
    body = stream.read(length)
    if len(body) < length:
        return None
    return decode(body)


# ---- the parent's side -----------------------------------------------------------------------------------------------


def child_environment() -> dict[str, str]:
    """Environment variables with which a child imports the same echo2, and calls this machine without a proxy."""
    paths = [PACKAGE_ROOT, os.environ.get("PYTHONPATH", "")]
    direct = {
        name: ",".join(filter(None, [os.environ.get(name, ""), *LOOPBACK_NAMES])) for name in ("no_proxy", "NO_PROXY")
    }
    return {**os.environ, **direct, "PYTHONPATH": os.pathsep.join(path for path in paths if path)}


def kill_group(group: int) -> None:
    """Kill a child and everything that it started."""
    try:
        os.killpg(group, signal.SIGKILL)
    except ProcessLookupError:
        pass  # the child is gone, and so is everything it started


def ending(status: int | None) -> str:
    """How a process ended, in words."""
    if status is None:
        return "went away"
    return f"was killed by {signal.Signals(-status).name}" if status < 0 else f"exited with status {status}"


# ---- the child's side ------------------------------------------------------------------------------------------------


def take() -> tuple[BinaryIO, BinaryIO]:
    """Return the pipes from and to the parent. From then on, stdin is empty and stdout goes to stderr."""
    inbox, outbox = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    os.dup2(2, 1)
    return inbox, outbox


def receive(inbox: BinaryIO, messages: queue.Queue[dict[str, Any]]) -> None:
    """Put every frame in the queue, and end this process when the parent is gone. Needs a thread of its own."""
    while (message := read(inbox)) is not None:
        messages.put(message)
    os._exit(0)  # the main thread may be inside the user's code
