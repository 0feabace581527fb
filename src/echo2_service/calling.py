"""Both ends of a process that answers calls. The caller starts it, restarts it when it dies, and sends all unanswered
calls again; the process reads them from stdin until its parent is gone.

Messages are MessagePack in frames. msgspec checks the types. Arrays are sent as their type code and their bytes. Long
training data go from one process to another in a file, which the calls name: to encode and send 10 MB would keep the
caller's event loop for 60 ms.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import sys
from array import array
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import msgspec

from echo2.core import frames, logs
from echo2.core.background import spawn
from echo2.core.child import ChildProcess, child_environment, ending, take_pipes
from echo2.core.errors import InvariantError, LinkError, NoRoomError, PeerError, UserError
from echo2.core.frames import read_frame, receive_frame
from echo2.core.logs import TAIL_BYTES, WORDLESS, last_words
from echo2.core.retries import Retries
from echo2.core.types import Backoff
from echo2_service.backend import (
    Answer,
    Call,
    CancelCall,
    ClientDatum,
    ForwardBackwardCall,
    JournalRecord,
    Request,
    TrainWork,
)

log = logging.getLogger(__name__)
T = TypeVar("T")

#: Type codes of the arrays that may be sent.
_CODES = ("i", "f", "d")
#: Deaths of the process during one call after which the call is failed; likewise starts in a row without an answer.
MOST_DEATHS = 8
#: What a tenant hears of a full disk.
FULL = "The service's disk is full, so that this was not done. Nothing was lost. Try again later."
#: Pauses between two starts; they grow while the process dies without an answer.
RESTART_SECONDS = Backoff(0.1, 10.0)


def _plain(value: Any) -> Any:
    if isinstance(value, array):
        return [value.typecode, value.tobytes()]
    raise NotImplementedError(f"{type(value).__name__} is not sent")


def _typed(kind: Any, value: Any) -> Any:
    if kind is not array or not isinstance(value, list) or len(value) != 2 or value[0] not in _CODES:
        raise ValueError("not an array")
    return array(value[0], value[1])


_ENCODER = msgspec.msgpack.Encoder(enc_hook=_plain)
REQUESTS = msgspec.msgpack.Decoder(Request, dec_hook=_typed)
ANSWERS = msgspec.msgpack.Decoder(Answer, dec_hook=_typed)
RECORDS = msgspec.msgpack.Decoder(JournalRecord, dec_hook=_typed)
_WORK = msgspec.msgpack.Decoder(TrainWork, dec_hook=_typed)
_DATA = msgspec.msgpack.Decoder(list[ClientDatum], dec_hook=_typed)
#: The first bytes of each JournalRecord: a map, and the first name in it.
RECORD_BEGINNING = bytes([0x80 | len(JournalRecord.__struct_fields__)]) + _ENCODER.encode("operation")


def encode(message: Request | Answer) -> bytes:
    """Encode a message without its length, for links that preserve message boundaries."""
    return _ENCODER.encode(message)


def frame(message: Request | Answer | JournalRecord) -> bytes:
    """Encode a message as one frame.

    Raises:
        PeerError: "oversized".
    """
    return frames.frame(_ENCODER.encode(message))


def write_work(path: Path, work: TrainWork, request: str) -> TrainWork:
    """Write training data to the file of a request: a frame with the rest of the work, then one with the data. Return
    that rest.

    Raises:
        OSError: it cannot be written. PeerError: "oversized".
    """
    rest = replace(work, data=[], request=request)
    with path.open("wb") as file:
        for part in (rest, work.data):
            file.write(frames.frame(_ENCODER.encode(part)))
    return rest


def read_work(path: Path) -> TrainWork:
    """Return what a file of `write_work` has beside the data.

    Raises:
        InvariantError: the file is gone or damaged.
    """
    return _read_part(path, 0, _WORK)


def with_data(call: ForwardBackwardCall) -> ForwardBackwardCall:
    """Return the call with the data from its file, if it names one.

    Raises:
        InvariantError: the file is gone or damaged.
    """
    if not call.file:
        return call
    return msgspec.structs.replace(call, data=_read_part(Path(call.file), 1, _DATA), file="")


def _read_part(path: Path, place: int, decoder: msgspec.msgpack.Decoder[T]) -> T:
    try:
        with path.open("rb") as file:
            for _ in range(place):
                read_frame(file)
            return decoder.decode(read_frame(file) or b"")
    except (OSError, PeerError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        log.error("the training data in %s: %s", path, error)
        raise InvariantError("The request's training data are gone or damaged: send them again.") from error


@dataclass(slots=True)
class _Pending:
    """A call that has no answer yet. `deaths`: how often the process died while working on it."""

    frame: bytes
    answered: asyncio.Future[Answer]
    has_begun: bool = False
    deaths: int = 0


class AnsweringProcess:
    """A process `python -m MODULE SETTINGS` that answers calls over stdin and stdout and writes its log to a file. For
    one event loop.
    """

    def __init__(self, module: str, settings: str, log_path: Path) -> None:
        self._command = (sys.executable, "-m", module, settings)
        self._name, self._log_path = module.removesuffix(".process").rpartition(".")[2], log_path
        self._numbers, self._pending = itertools.count(1), dict[int, _Pending]()
        self._process: ChildProcess | None = None
        self._inbox: asyncio.StreamWriter | None = None
        self._is_closing = False
        self._running: asyncio.Task[None] | None = None

    @property
    def process_id(self) -> int | None:
        """Id of the running process; None if it is not running."""
        return None if self._process is None else self._process.pid

    async def call(self, call: Call) -> Answer:
        """Return the answer, restarting the process if it dies. Cancelling this also cancels the call in the process.
        A call is cancelled if this is closed before its answer.

        Raises:
            UserError: the tenant's mistake, in the process's words.
            InvariantError: a bug in echo2, or the call kills the process.
        """
        if self._is_closing:
            raise asyncio.CancelledError(f"the {self._name} is closed")
        if self._running is None:
            self._running = spawn(self._run(), self._failed)
        number = next(self._numbers)
        pending = _Pending(frame(Request(number, call)), asyncio.get_running_loop().create_future())
        self._pending[number] = pending
        try:
            await self._send(pending.frame)
            answer = await pending.answered
        finally:
            del self._pending[number]
            if pending.answered.cancelled():
                await self._send(frame(Request(number, CancelCall(number))))
        if answer.fault:
            raise (InvariantError if answer.is_ours else UserError)(answer.fault)
        return answer

    async def close(self) -> None:
        """End the process; calls in progress are cancelled."""
        self._is_closing = True
        if self._running is not None:
            if self._process is not None and self._process.status is None:
                self._process.kill()
            else:
                self._running.cancel()
            await asyncio.gather(self._running, return_exceptions=True)
        for pending in self._pending.values():
            pending.answered.cancel()

    async def _send(self, data: bytes) -> None:
        """Send to the process, if it is running; the next process gets all pending calls when it starts."""
        inbox = self._inbox
        if inbox is not None and not inbox.is_closing():
            inbox.write(data)
            try:
                await inbox.drain()
            except ConnectionError:
                pass  # the process died

    async def _run(self) -> None:
        retries = Retries(RESTART_SECONDS)
        fruitless = 0  # starts in a row that failed, or after which the process exited without an answer
        while True:
            status: int | None = 1
            num_answers = 0
            try:
                process, answers = await self._start()
                num_answers, is_readable = await self._read_answers(answers)
                if not is_readable:
                    process.kill()
                status = await process.ended() if is_readable else 1
                process.kill()  # with what it started
                if not self._is_closing:
                    words = last_words(process.log_tail(TAIL_BYTES)) if status not in WORDLESS else ""
                    log.warning("%s", f"the {self._name} {ending(status)} and is started again: {words}".rstrip(": "))
            except OSError as error:  # no descriptor, no memory, or no room for the log
                log.warning("the %s cannot be started, trying again: %s", self._name, error)
            self._process = self._inbox = None
            if self._is_closing:
                return
            self._count_deaths()
            fruitless = fruitless + 1 if status and status > 0 and not num_answers else 0
            if fruitless >= MOST_DEATHS:
                self._fail(f"The {self._name} process does not start: see its log.")
            if num_answers:
                retries.succeeded()
            await retries.pause()

    def _failed(self, error: Exception) -> None:
        """Fail all calls because of a mistake in this class; the next call starts the process again."""
        log.error("the calls of the %s", self._name, exc_info=error)
        if self._process is not None:
            self._process.kill()
        self._process = self._inbox = self._running = None
        self._fail(f"The calls of the {self._name} process failed: {type(error).__name__}.")

    async def _start(self) -> tuple[ChildProcess, asyncio.StreamReader]:
        """Start the process, and send it all calls that have no answer. Return it and its answers."""
        process = ChildProcess(self._command, log_path=self._log_path, environment=child_environment(), has_pipes=True)
        try:
            answers, inbox = await process.streams()
        except BaseException:
            process.kill()
            raise
        for pending in self._pending.values():
            inbox.write(pending.frame)
        self._process, self._inbox = process, inbox
        return process, answers

    async def _read_answers(self, answers: asyncio.StreamReader) -> tuple[int, bool]:
        """Return the number of answers until the process ended, or one cannot be read; and whether all could be."""
        for number in itertools.count():
            try:
                answer = ANSWERS.decode(await receive_frame(answers))
            except (EOFError, ConnectionError):
                return number, True
            except (PeerError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
                log.warning("an answer of the %s cannot be read: %s", self._name, error)
                return number, False
            pending = self._pending.get(answer.number)
            if pending is None or pending.answered.done():
                continue
            if answer.has_begun:
                pending.has_begun = True
            else:
                pending.answered.set_result(answer)
        raise AssertionError

    def _fail(self, words: str) -> None:
        for pending in self._pending.values():
            if not pending.answered.done():
                pending.answered.set_result(Answer(fault=words, is_ours=True))

    def _count_deaths(self) -> None:
        for pending in self._pending.values():
            pending.deaths += pending.has_begun
            pending.has_begun = False
            if pending.deaths >= MOST_DEATHS and not pending.answered.done():
                words = f"The {self._name} process died {pending.deaths} times while it worked on this: see its log."
                pending.answered.set_result(Answer(fault=words, is_ours=True))


class ProcessSettings(msgspec.Struct, frozen=True):
    """Settings of learner and sampler. `bases`: directories of the base models by name. `root`: that of the models."""

    bases: dict[str, str]
    root: str
    device: str


def begin(name: str) -> tuple[BinaryIO, Callable[[Answer], None]]:
    """In a process that answers calls, return the stream of requests, and the function that sends an answer. What is
    logged goes to stderr, under this name.
    """
    inbox, outbox = take_pipes()
    logs.start(name)

    def send(answer: Answer) -> None:
        try:
            data = frame(answer)
        except PeerError as error:  # too large
            data = frame(Answer(answer.number, fault=f"The answer cannot be sent: {error.detail}", is_ours=True))
        outbox.write(data)
        outbox.flush()

    return inbox, send


def failed(number: int, error: Exception, doing: str) -> Answer:
    """Return the answer to a call that failed. What is not the tenant's mistake is logged, and other tenants' work goes
    on. A tenant hears of no path of this machine, which may also name another tenant's model.
    """
    if isinstance(error, PeerError):  # weights that are not finite, bytes that are not a message
        return Answer(number, fault=error.detail)
    if isinstance(error, UserError) and not isinstance(error, NoRoomError):
        return Answer(number, fault=str(error))
    if isinstance(error, LinkError):  # the service is away, and a machine beside it has no weights
        log.warning("%s: %s", doing, error)
        return Answer(number, fault=str(error), is_ours=True)
    # A full disk says so at each try, and needs no traceback.
    is_disk = isinstance(error, OSError | NoRoomError)
    log.error("%s: %s", doing, error, exc_info=None if is_disk else error)
    if isinstance(error, OSError):
        return Answer(number, fault=f"{type(error).__name__}: {error.strerror or 'it failed'}", is_ours=True)
    return Answer(number, fault=FULL if is_disk else f"{type(error).__name__}: {error}", is_ours=True)


def serve(name: str, carry_out: Callable[[Call, int], Answer]) -> None:
    """Be a process that answers one call after the other, until its parent is gone."""
    inbox, send = begin(name)

    def take(request: Request) -> None:
        call, number = request.call, request.number
        if isinstance(call, CancelCall):
            return  # it comes too late, and is not a call
        send(Answer(number, has_begun=True))
        try:
            send(carry_out(call, number))
        except Exception as error:  # later calls are answered
            send(failed(number, error, type(call).__name__))

    receive(inbox, take)


def receive(inbox: BinaryIO, take: Callable[[Request], None]) -> None:
    """Pass every request to `take`, and end this process at the end of input. Runs in its own thread."""
    while (body := read_frame(inbox)) is not None:
        take(REQUESTS.decode(body))
    os._exit(0)  # the main thread may be in the middle of a forward or backward pass
