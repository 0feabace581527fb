"""The receiving end of a process that answers calls: reads frames from stdin until the parent process is gone."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import BinaryIO

from echo2.sandbox.pipes import HEADER
from echo2.service.frames import REQUESTS, Request, frame_length


def receive(inbox: BinaryIO, take: Callable[[Request], None]) -> None:
    """Pass every request to `take`, and end this process at the end of input. Runs in its own thread."""
    while len(header := inbox.read(HEADER.size)) == HEADER.size:
        length = frame_length(header)
        body = inbox.read(length)
        if len(body) < length:
            break
        take(REQUESTS.decode(body))
    os._exit(0)  # the main thread may be in the middle of a forward or backward pass
