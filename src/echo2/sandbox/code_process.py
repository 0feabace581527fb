"""A child process that runs the user's code (rewards, environments) and can neither stall nor kill its parent.

This is the parent's side; `child.py` is the child's. Several calls may be in flight; the child answers in any order. If
a call takes too long, or the child dies, every call in flight fails: the child is killed with everything it started,
and the next call starts another.
"""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from echo2.core.background import Background, spawn, unforeseen
from echo2.core.child import ChildProcess, child_environment, ending
from echo2.core.errors import PeerError, UserError
from echo2.core.frames import receive_frame
from echo2.sandbox import pipes

log = logging.getLogger(__name__)

STARTUP_SECONDS = 120.0  # imports of the user's module: some load a judge, a game or a word list
REAP_SECONDS = 5.0  # for the system to end a killed child; one that waits for a device may not end
EXIT_SECONDS = 1.0  # from the end of the child's pipe to its exit, if it ends by itself
LOG_BYTES_READ = 16 << 10
LOG_CHARS_SHOWN = 1500
#: Beginning of Python's crash report; the stacks of all threads follow it.
CRASH_LINE = "Fatal Python error:"


class CodeFailure(UserError):
    """The user's code raised, hung, or ended its process. `is_shared`: other calls were in flight in that process, and
    one of them may be to blame. `traceback`: the user code's, if it raised."""

    def __init__(self, message: str, is_shared: bool = False, traceback: str = "") -> None:
        super().__init__(message)
        self.is_shared, self.traceback = is_shared, traceback


@dataclass(slots=True)
class _Call:
    doing: str
    answer: asyncio.Future[dict[str, Any]]


@dataclass(slots=True)
class _Child:
    """One child process. `calls`: those in flight, by number; `at`: the call whose code ran last, if known."""

    process: ChildProcess
    inbox: asyncio.StreamWriter
    outbox: asyncio.StreamReader
    calls: dict[int, _Call] = field(default_factory=dict)
    next_number: int = 0
    at: int | None = None
    reader: asyncio.Task[None] | None = None


class CodeProcess:
    """A child that is started at the first call (or by `start`) and lives until `close`. For one event loop.

    `entry` names the echo2 function that makes the child's handler (`child.py`) from `setup`. `name` is the process's
    name in errors; `python` its interpreter. `log_path` receives the output of the user's code; None: this process's
    log.
    """

    def __init__(
        self,
        name: str,
        entry: str,
        setup: Mapping[str, Any],
        log_path: Path | None = None,
        python: str = sys.executable,
    ) -> None:
        self._name, self._entry, self._setup, self._log_path = name, entry, dict(setup), log_path
        self._python = python
        self._child: _Child | None = None
        self._description: dict[str, Any] = {}
        self._lock = asyncio.Lock()
        self._is_closed = False
        self._endings = Background(unforeseen(log, f"ending {name}"))
        self.num_started = 0

    @property
    def pid(self) -> int | None:
        """Process id of the running child; None if there is none."""
        return self._child.process.pid if self._child is not None and self._child.process.status is None else None

    async def start(self) -> dict[str, Any]:
        """Start the child unless it runs; returns its handler's description (`child.py`).

        Raises:
            UserError: the user's code cannot be loaded; the message says which and why.
        """
        await self._running()
        return self._description

    async def call(self, request: Mapping[str, Any], seconds: float, doing: str, advice: str = "") -> dict[str, Any]:
        """Return the child's answer. For errors, `doing` says what was asked, `advice` what to do if it takes too long.

        Raises:
            CodeFailure: the user's code failed, took over `seconds`, or ended its process.
            UserError: the user's code cannot be loaded.
        """
        return await self._ask(await self._running(), request, seconds, doing, advice)

    async def close(self) -> None:
        """End the child; calls in flight fail, and so do later ones."""
        self._is_closed = True
        if self._child is not None:
            await self._lose(self._child, "was closed")
        async with self._lock:
            pass  # a child that was being started is ended by its caller
        if self._endings:  # of children whose callers were cancelled meanwhile
            await asyncio.wait(list(self._endings))

    async def _running(self) -> _Child:
        async with self._lock:
            self._check_open()
            if self._child is not None and self._child.process.status is None:
                return self._child
            if self._child is not None:  # it died between two calls
                await self._lose(self._child, "went away")
            self._child = child = await self._spawn()
            self.num_started += 1
            child.reader = spawn(self._read_answers(child), partial(self._reading_failed, child))
            try:
                self._check_open()
                self._description = await self._ask(child, self._setup, STARTUP_SECONDS, "loading the user's code")
            except BaseException:
                await self._lose(child, "was closed")
                raise
            return child

    def _check_open(self) -> None:
        if self._is_closed:
            raise CodeFailure(f"{self._name} was closed.")

    async def _spawn(self) -> _Child:
        command = (self._python, "-m", "echo2.sandbox.child", self._entry)
        try:
            if self._log_path is not None:
                self._log_path.parent.mkdir(parents=True, exist_ok=True)
            process = ChildProcess(command, log_path=self._log_path, environment=child_environment(), has_pipes=True)
        except OSError as error:
            raise UserError(f"Cannot start {self._name}: {error}.") from error
        try:
            outbox, inbox = await process.streams()
        except BaseException:
            await asyncio.shield(self._ending(process, 0.0))
            raise
        return _Child(process, inbox, outbox)

    async def _ask(
        self, child: _Child, request: Mapping[str, Any], seconds: float, doing: str, advice: str = ""
    ) -> dict[str, Any]:
        number, child.next_number = child.next_number, child.next_number + 1
        try:
            frame = pipes.encode({**request, "id": number})
        except PeerError as error:
            raise CodeFailure(f"{self._name} cannot go on while {doing}: {error}.") from error
        call = child.calls[number] = _Call(doing, asyncio.get_running_loop().create_future())
        child.inbox.write(frame)  # not awaited: a child that does not read runs into the time limit
        try:
            await asyncio.wait([call.answer], timeout=seconds)
            if not call.answer.done():
                await self._lose(child, f"took longer than {seconds:g} s", advice)
            answer = await call.answer  # if another call is ending the child already, that fails this call, too
        except asyncio.CancelledError:
            if list(child.calls) == [number]:  # no other call loses its answer with the child
                await self._lose(child, "was closed")
            raise
        finally:
            child.calls.pop(number, None)
        if "failed" in answer:
            raise CodeFailure(str(answer["failed"]), traceback=str(answer.get("traceback", "")))
        return answer

    async def _read_answers(self, child: _Child) -> None:
        """Consumes: the child's answers. Produces: those of the calls in flight. Waits for: the child."""
        try:
            while True:
                answer = pipes.decode(await receive_frame(child.outbox))
                if "at" in answer:
                    child.at = answer["at"]
                    continue
                call = child.calls.pop(answer.get("id", -1), None)
                if call is not None and not call.answer.done():
                    call.answer.set_result(answer)
        except (EOFError, ConnectionError):  # asyncio's IncompleteReadError is an EOFError
            await self._lose(child, "", grace_seconds=EXIT_SECONDS)
        except PeerError as error:
            await self._lose(child, f"sent {error}")

    def _reading_failed(self, child: _Child, error: Exception) -> None:
        """No answer of this child can arrive any more."""
        if self._child is child:
            self._child = None
        self._ending(child.process, 0.0)
        for call in child.calls.values():
            if not call.answer.done():
                call.answer.set_exception(error)
                call.answer.exception()  # its caller may be gone

    async def _lose(self, child: _Child, problem: str, advice: str = "", grace_seconds: float = 0.0) -> None:
        """End this child; its calls in flight fail with `problem` (empty: with how the child ended)."""
        if self._child is child:
            self._child = None
        calls, child.calls = child.calls, {}
        status = None
        try:
            status = await asyncio.shield(self._ending(child.process, grace_seconds))
        finally:  # even if this caller is cancelled: the other calls wait for nothing else
            if child.reader is not None and child.reader is not asyncio.current_task():
                child.reader.cancel()
            for number, call in calls.items():
                if not call.answer.done():
                    words = f"{self._name} {problem or ending(status)} while {call.doing}. {advice}"
                    is_shared = len(calls) > 1 and number != child.at
                    call.answer.set_exception(
                        CodeFailure(f"{words.strip()} {self._last_words(child.process)}", is_shared)
                    )
                    call.answer.exception()  # its caller may be gone

    def _ending(self, process: ChildProcess, grace_seconds: float) -> asyncio.Task[int | None]:
        return self._endings.spawn(_kill(process, grace_seconds))

    def _last_words(self, process: ChildProcess) -> str:
        """The end of the log, for an error message. A crash report is shown from its beginning, which has the cause."""
        if self._log_path is None:
            return "What it printed is in this process's log."
        end = process.log_tail(LOG_BYTES_READ).decode(errors="replace").strip().replace("\n", " | ")
        crash = end.rfind(CRASH_LINE)
        text = end[-LOG_CHARS_SHOWN:] if crash < 0 else end[crash : crash + LOG_CHARS_SHOWN]
        return f"Its log {self._log_path} " + (f"ends: {text}" if text else "is empty.")


async def _kill(process: ChildProcess, grace_seconds: float) -> int | None:
    """Kill the child and everything it started, after `grace_seconds` to end by itself. Return the exit status."""
    try:
        await process.ended(grace_seconds)
    finally:
        process.kill()
    return await process.ended(REAP_SECONDS)
