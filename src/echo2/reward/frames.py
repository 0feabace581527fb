"""What the head and its reward process say to each other over pipes: a 4-byte length, then that many bytes of JSON.

    head -> child    {"specs", "weights"}, once; then {"task", "rollouts"} for each group
    child -> head    {"ready": true} or {"scores": [[reward, parts], ...]} or {"failed": message}

Scores pass through JSON unharmed: Python writes floats with all their digits.
"""

from __future__ import annotations

import json
import struct
from array import array
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any, BinaryIO

from echo2.errors import PeerError
from echo2.types import Message, Rollout, Task

MAX_FRAME_BYTES = 256 << 20
HEADER = struct.Struct("<I")


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


def read(stream: BinaryIO) -> dict[str, Any] | None:
    """The next frame; None at the end of the stream (a frame cut short counts as the end)."""
    header = stream.read(HEADER.size)
    if len(header) < HEADER.size:
        return None
    length = checked_length(HEADER.unpack(header)[0])
    body = stream.read(length)
    if len(body) < length:
        return None
    message: dict[str, Any] = json.loads(body)
    return message


def group_message(task: Task, rollouts: Sequence[Rollout]) -> dict[str, Any]:
    """A group as far as rewards can see it: no logprobs, no versions."""
    prompt = task.prompt if isinstance(task.prompt, str) else [asdict(message) for message in task.prompt]
    return {
        "task": {"cursor": task.cursor, "prompt": prompt, "columns": task.columns},
        "rollouts": [{"text": r.text, "tokens": r.tokens.tolist(), "finish": r.finish} for r in rollouts],
    }


def group_of(message: dict[str, Any]) -> tuple[Task, list[Rollout]]:
    """The inverse of `group_message`; what was not sent is empty."""
    plain = message["task"]
    prompt = plain["prompt"]
    if not isinstance(prompt, str):
        prompt = tuple(Message(**item) for item in prompt)
    rollouts = [
        Rollout(array("i", r["tokens"]), array("f"), b"", (), r["finish"], r["text"]) for r in message["rollouts"]
    ]
    return Task(plain["cursor"], prompt, plain["columns"]), rollouts
