"""The end of a process that answers calls: frames from stdin, until who started it is gone."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import BinaryIO

from echo2.sandbox.pipes import HEADER
from echo2.service.frames import REQUESTS, Request, frame_length


def receive(inbox: BinaryIO, take: Callable[[Request], None]) -> None:
    """For a thread of its own: give every request on, and end this process when no more can come."""
    while len(header := inbox.read(HEADER.size)) == HEADER.size:
        length = frame_length(header)
        body = inbox.read(length)
        if len(body) < length:
            break
        take(REQUESTS.decode(body))
    os._exit(0)  # the main thread may be in the middle of a pass
