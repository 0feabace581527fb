"""How a benchmark and its node processes talk: one JSON object a line, over stdin and stdout. Standard library only.

A node is started with its description as the only argument. It says {"event": ..., "at": seconds} and is told orders,
one word a line. The clock is CLOCK_MONOTONIC, which all namespaces of a machine share.
"""

from __future__ import annotations

import hashlib
import json
import random
import sys
import time
from collections.abc import Iterable
from typing import Any

PIECE_BYTES = 16 << 20


def say(event: str, **facts: Any) -> None:
    """One line to the benchmark."""
    facts.setdefault("at", time.monotonic())
    sys.stdout.write(json.dumps({"event": event, **facts}) + "\n")
    sys.stdout.flush()


def hear() -> str:
    """The next order; "quit" when the benchmark is gone. Blocks."""
    return sys.stdin.readline().strip() or "quit"


def described() -> dict[str, Any]:
    """This node's description."""
    description: dict[str, Any] = json.loads(sys.argv[1])
    return description


def content(num_bytes: int, seed: int) -> bytes:
    """The bytes that are broadcast: nothing can compress them."""
    source = random.Random(seed)  # which gives fewer than 256 MiB at a time
    return b"".join(source.randbytes(min(PIECE_BYTES, num_bytes - at)) for at in range(0, num_bytes, PIECE_BYTES))


def seed_of(seed: int, nth: int) -> int:
    """The seed of the content that is broadcast as the nth of a trial."""
    return seed + 1000 * (nth - 1)


def digest(parts: Iterable[bytes | memoryview]) -> str:
    """Of the bytes of all parts in turn: what a receiver shows to have its time counted."""
    hasher = hashlib.sha256()
    for part in parts:
        hasher.update(part)
    return hasher.hexdigest()
