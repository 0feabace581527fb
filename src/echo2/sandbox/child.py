"""The child process that runs the user's code (`python -m echo2.sandbox.child module:function`).

    parent -> child    {"id", **setup}, once; then {"id", **request}
    child -> parent    {"id", **description}; {"id", **answer}; or {"id", "failed": message, "traceback"};
                       and {"at": id} when, of many requests in flight, this request's code runs next: if the process
                       then dies or hangs, this request is to blame

The function named on the command line is echo2's: from the setup it makes a handler (request -> answer) and the
handler's description. A handler that is a coroutine function has many requests in flight, any other has one.

The user's code may print, read its stdin and hang; none of this may disturb the frames. So the two pipes are moved to
other descriptors first, and a separate thread reads the frames and ends the process when the parent is gone.
"""

from __future__ import annotations

import asyncio
import faulthandler
import importlib
import inspect
import os
import queue
import sys
import threading
import traceback
from collections.abc import Callable, Coroutine, Generator
from typing import Any, BinaryIO

from echo2.core.background import Background
from echo2.core.child import take_pipes
from echo2.core.errors import UserError
from echo2.sandbox import pipes
from echo2.sandbox.plugins import traceback_of

#: Maps a request to its answer, or to an awaitable of its answer.
Handler = Callable[[dict[str, Any]], Any]
MAX_WAITING_REQUESTS = 2  # read ahead; the others wait in the pipe


def main() -> None:
    """Load the handler, then answer requests until the other end closes the pipe."""
    inbox, outbox = take_pipes()
    faulthandler.enable()  # a crash in the user's native code leaves its Python line in the log
    requests: queue.Queue[dict[str, Any]] = queue.Queue(MAX_WAITING_REQUESTS)
    threading.Thread(target=pipes.receive, args=(inbox, requests), daemon=True, name="frames").start()
    setup = requests.get()
    try:
        handler, facts = _handler(sys.argv[1], setup)
    except UserError as error:
        _send(outbox, setup, failed(error))
        return
    _send(outbox, setup, facts)
    if inspect.iscoroutinefunction(handler):
        asyncio.run(_serve_together(handler, requests, outbox))
    while True:
        request = requests.get()
        try:
            answer = handler(request)
        except UserError as error:
            answer = failed(error)
        _send(outbox, request, answer)


def _handler(entry: str, setup: dict[str, Any]) -> tuple[Handler, dict[str, Any]]:
    module, _, name = entry.partition(":")
    made: tuple[Handler, dict[str, Any]] = getattr(importlib.import_module(module), name)(setup)
    return made


async def _serve_together(handler: Handler, requests: queue.Queue[dict[str, Any]], outbox: BinaryIO) -> None:
    """Consumes: requests. Produces: answers, in the order in which they are ready. Waits for: the parent."""
    answering = Background(_broken)
    while True:
        request = await asyncio.to_thread(requests.get)
        answering.spawn(_answer_later(handler, request, outbox))


def _broken(error: Exception) -> None:
    """End the process: the parent learns of that with its last output, and would wait for the answer in vain."""
    traceback.print_exception(error)
    sys.stderr.flush()
    os._exit(1)


async def _answer_later(handler: Handler, request: dict[str, Any], outbox: BinaryIO) -> None:
    at = pipes.encode({"at": request["id"]})

    def announce() -> None:
        outbox.write(at)
        outbox.flush()

    try:
        answer = await _Announced(handler(request), announce)
    except UserError as error:
        answer = failed(error)
    _send(outbox, request, answer)


class _Announced:
    """Awaits a coroutine, and calls `announce` each time before its code continues."""

    def __init__(self, coroutine: Coroutine[Any, Any, Any], announce: Callable[[], None]) -> None:
        self._coroutine, self._announce = coroutine, announce

    def __await__(self) -> Generator[Any, None, Any]:
        raised: BaseException | None = None
        while True:
            self._announce()
            try:
                waits_for = self._coroutine.send(None) if raised is None else self._coroutine.throw(raised)
            except StopIteration as ended:
                return ended.value
            try:
                yield waits_for
                raised = None
            except BaseException as error:
                raised = error


def failed(error: UserError) -> dict[str, Any]:
    """Return the answer for a failure, with the end of the user code's traceback, which is also written to the log."""
    text = traceback_of(error)
    if text:
        print(text, file=sys.stderr, flush=True)
    return {"failed": str(error), "traceback": text}


def _send(outbox: BinaryIO, request: dict[str, Any], answer: dict[str, Any]) -> None:
    sys.stdout.flush()  # what the user's code printed reaches the log before the parent acts on the answer
    try:
        frame = pipes.encode({**answer, "id": request["id"]})
    except (TypeError, ValueError) as error:  # the user's code returned a value that is not JSON
        frame = pipes.encode({"failed": f"gave what cannot be sent: {error}", "id": request["id"]})
    outbox.write(frame)
    outbox.flush()


if __name__ == "__main__":
    main()
