"""A process of ours that runs the user's code, and the pipes to it: a 4-byte length, then that many bytes of JSON.

Such a process may print, read its stdin, hang and die; none of it may disturb the frames or who started it.
"""

from __future__ import annotations

import json
import os
import queue
import select
import signal
import struct
import subprocess
import time
from pathlib import Path
from typing import Any, BinaryIO

import echo2
from echo2.documents import parse_json
from echo2.errors import InvariantError, PeerError

MAX_FRAME_BYTES = 256 << 20
READ_BYTES = 1 << 16
HEADER = struct.Struct("<I")
PACKAGE_ROOT = str(Path(echo2.__file__).resolve().parent.parent)  # the child imports the same echo2


def encode(message: dict[str, Any]) -> bytes:
    """One frame.

    Raises:
        PeerError: "oversized".
    """
    body = json.dumps(message).encode()
    return HEADER.pack(checked_length(len(body))) + body


def checked_length(length: int) -> int:
    if length > MAX_FRAME_BYTES:
        raise PeerError("oversized", f"a frame of {length} bytes; the limit is {MAX_FRAME_BYTES}")
    return length


def decode(body: bytes) -> dict[str, Any]:
    """The message in a frame.

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


def read(stream: BinaryIO) -> dict[str, Any] | None:
    """The next frame; None at the end of the stream (a frame cut short counts as the end).

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


# ---- of the process that starts the other ----------------------------------------------------------------------------


def child_environment() -> dict[str, str]:
    """Environment variables with which a child imports the same echo2."""
    paths = [PACKAGE_ROOT, os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in paths if path)}


def exchange(process: subprocess.Popen[bytes], frame: bytes, until: float) -> dict[str, Any]:
    """Send one frame to a child and read its answer, until the monotonic time `until`.

    Raises:
        TimeoutError: no whole answer by then. EOFError, OSError: the child is gone. PeerError: "oversized" or
            "malformed".
    """
    if process.stdin is None or process.stdout is None:
        raise InvariantError("the child was started without pipes")
    to_child, from_child = process.stdin.fileno(), process.stdout.fileno()
    os.set_blocking(to_child, False)
    left = memoryview(frame)
    while left:
        _await(to_child, select.POLLOUT, until)
        left = left[os.write(to_child, left) :]
    length = checked_length(HEADER.unpack(_read_within(from_child, HEADER.size, until))[0])
    return decode(_read_within(from_child, length, until))


def _read_within(pipe: int, size: int, until: float) -> bytes:
    data = bytearray()
    while len(data) < size:
        _await(pipe, select.POLLIN, until)
        part = os.read(pipe, min(READ_BYTES, size - len(data)))
        if not part:
            raise EOFError
        data += part
    return bytes(data)


def _await(pipe: int, event: int, until: float) -> None:
    poll = select.poll()
    poll.register(pipe, event)
    if not poll.poll(max(0.0, until - time.monotonic()) * 1000):
        raise TimeoutError


def kill_group(group: int) -> None:
    try:
        os.killpg(group, signal.SIGKILL)
    except ProcessLookupError:
        pass  # the child is gone, and so is everything it started


def ending(status: int | None) -> str:
    """How a process ended, in words."""
    if status is None:
        return "went away"
    return f"was killed by {signal.Signals(-status).name}" if status < 0 else f"exited with status {status}"


# ---- of the process that is started ----------------------------------------------------------------------------------


def take() -> tuple[BinaryIO, BinaryIO]:
    """The pipes from and to the parent; stdin is empty from now on, and what is printed goes to stderr."""
    inbox, outbox = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    os.dup2(2, 1)
    return inbox, outbox


def receive(inbox: BinaryIO, messages: queue.Queue[dict[str, Any]]) -> None:
    """For a thread of its own: put every frame in the queue, and end this process when the parent is gone."""
    while (message := read(inbox)) is not None:
        messages.put(message)
    os._exit(0)  # the main thread may be inside the user's code
