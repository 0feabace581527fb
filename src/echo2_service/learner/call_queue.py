"""The learner process of a service: reads calls from stdin, writes answers to stdout, and ends with its parent.

Calls of one model are carried out in order of arrival. Between models, the owner who has used least is next
(`src/echo2_service/decide/order.py`), for one forward and backward pass at a time.
"""

from __future__ import annotations

import logging
import os
import queue
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

import msgspec

from echo2.config.rundir import claimed
from echo2.core.errors import Echo2Error
from echo2.learner.core.adapters import load_base
from echo2_service.backend import (
    Answer,
    CancelCall,
    ModelCall,
    PromptCall,
    ReadCall,
    ReplyCall,
    Request,
    SampleCall,
    TextCall,
)
from echo2_service.calling import ProcessSettings, begin, failed, receive
from echo2_service.decide.order import FairQueue
from echo2_service.learner.models import Models, Slices
from echo2_service.learner.tenants import Tenants

log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Queue:
    """The calls of one model. `slices`: of the first call, if it has begun."""

    owner: str
    calls: deque[tuple[int, ModelCall]] = field(default_factory=deque)
    slices: Slices | None = None


class CallQueue:
    """Queues calls, and runs them slice by slice, fairly among their owners. For one thread."""

    def __init__(self, models: Models, send: Callable[[Answer], None]) -> None:
        self._models, self._send = models, send
        self._fair_queue = FairQueue()
        self._queues: dict[str, _Queue] = {}
        self._of_owner: dict[str, deque[str]] = {}

    def take(self, request: Request) -> None:
        call = request.call
        if isinstance(call, SampleCall | ReadCall | TextCall | PromptCall | ReplyCall | CancelCall):
            return  # the learner only trains, and cancels nothing
        waiting = self._queues.get(call.model)
        if waiting is None:
            waiting = self._queues[call.model] = _Queue(self._models.owner(call))
            self._of_owner.setdefault(waiting.owner, deque()).append(call.model)
            self._fair_queue.wait(waiting.owner)
        waiting.calls.append((request.number, call))

    def work(self) -> bool:
        """Run one slice; return False if there is nothing to do."""
        owner = self._fair_queue.next()
        if owner is None:
            return False
        models = self._of_owner[owner]
        name = models[0]
        models.rotate(-1)
        started = time.perf_counter()
        self._step(self._queues[name])
        self._fair_queue.charge(owner, time.perf_counter() - started)
        if not self._queues[name].calls:
            del self._queues[name]
            models.remove(name)
            if not models:
                del self._of_owner[owner]
                self._fair_queue.rest(owner)
        return True

    def _step(self, waiting: _Queue) -> None:
        number, call = waiting.calls[0]
        try:
            if waiting.slices is None:
                self._send(Answer(number, has_begun=True))
                waiting.slices = self._models.carry_out(call)
            next(waiting.slices)
            return
        except StopIteration as end:
            answer: Answer = end.value
        except Exception as error:  # this caller gets the error
            answer = failed(number, error, f"{type(call).__name__} of {call.model}")
        waiting.slices = None
        waiting.calls.popleft()
        self._send(msgspec.structs.replace(answer, number=number))


def _receive(inbox: BinaryIO, take: Callable[[Request], None]) -> None:
    """Receive requests, as `receive` does. If one can't be read, this process ends, and the front starts another."""
    try:
        receive(inbox, take)
    except BaseException:
        log.exception("a request can't be read")
        os._exit(1)  # the main thread would wait for the next one for ever


def main(settings_text: str) -> None:
    """Answer calls until stdin ends."""
    inbox, send = begin("learner")
    settings = msgspec.json.decode(settings_text, type=ProcessSettings)
    with claimed(Path(settings.root), "learner"):  # the previous process may still be ending
        bases = {name: Tenants(load_base(directory, settings.device)) for name, directory in settings.bases.items()}
        for tenants in bases.values():
            tenants.warm_up()
        calls, requests = CallQueue(Models(bases, Path(settings.root)), send), queue.Queue[Request]()
        threading.Thread(target=_receive, args=(inbox, requests.put), daemon=True).start()
        log.info("ready: %s", ", ".join(bases))
        while True:
            if not calls.work():
                calls.take(requests.get())
            while not requests.empty():
                calls.take(requests.get())


if __name__ == "__main__":
    try:
        main(sys.argv[1])
    except Echo2Error as error:
        sys.exit(str(error))
