"""The process that reads long training data in JSON. A parser keeps its interpreter to itself, for 0.8 s with 26 MB of
numbers, so another one reads them; what comes back are arrays. It ends with its parent.
"""

from __future__ import annotations

import logging
import sys
from typing import BinaryIO

from echo2.core.child import take_pipes
from echo2.core.errors import PeerError
from echo2_service.calling import receive
from echo2_service.frames import Answer, ReadCall, Request, frame
from echo2_service.front.data import read_json

log = logging.getLogger(__name__)


def read(request: Request, outbox: BinaryIO) -> None:
    """Answer one call; its cancellation comes too late, and is no call."""
    call, number = request.call, request.number
    if not isinstance(call, ReadCall):
        return
    _tell(Answer(number, has_begun=True), outbox)
    try:
        answer = Answer(number, work=read_json(call.body, call.forward_only))
    except PeerError as error:
        answer = Answer(number, fault=error.detail)
    except Exception as error:  # later bodies are read
        log.exception("a body of %d bytes", len(call.body))
        answer = Answer(number, fault=f"{type(error).__name__}: {error}", is_ours=True)
    _tell(answer, outbox)


def _tell(answer: Answer, outbox: BinaryIO) -> None:
    outbox.write(frame(answer))
    outbox.flush()


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(asctime)s reader %(message)s")
    inbox, out = take_pipes()
    receive(inbox, lambda request: read(request, out))
