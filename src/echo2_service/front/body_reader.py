"""Reads the body of each request once, away from the event loop if it is large, and keeps what it asks for while the
request is open, if memory has room.

The data of a long training body pass by the event loop, which would copy, encode and store 10 MB for 250 ms: a process
reads them from a file and writes them to another, as the learner takes them. That file is the store's part of the
request until it has ended.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from echo2.core.errors import InvariantError, PeerError, UserError
from echo2_service import limits
from echo2_service.backend import Ints, ReadCall, TextCall, TrainWork
from echo2_service.calling import FULL, AnsweringProcess, read_work
from echo2_service.front.bodies import LoadBody, OptimBody, SampleBody, SaveBody, digest_of, parse
from echo2_service.front.data import read_training

log = logging.getLogger(__name__)
T = TypeVar("T")
Body = TypeVar("Body", bound=msgspec.Struct)
#: A body as it was read, or why it cannot be read any more.
ParsedBody = TrainWork | OptimBody | SaveBody | LoadBody | SampleBody | PeerError | None
#: The bodies of requests that are stored and carry no training data, by kind.
BODIES: Mapping[str, Any] = {
    "optim_step": OptimBody,
    "save_weights": SaveBody,
    "save_weights_for_sampler": SaveBody,
    "load_weights": LoadBody,
    "sample": SampleBody,
}
#: Shorter bodies are read at once: a thread costs more.
SHORT_BYTES = 32 << 10
#: Longer training data are read in a process of their own: in a thread they would block the event loop for 20 ms and
#: more.
LONG_BYTES = 256 << 10
#: Memory of a sample's body as it was read, over its bytes, at most (numbers of three digits); of training data 1; of
#: those in a file, a datum.
SAMPLE_MEMORY, DATUM_MEMORY = 10, 16


class ParsedBodies:
    """What the open requests ask for, by id. For one event loop."""

    def __init__(self) -> None:
        self._parsed_bodies: dict[str, tuple[ParsedBody, int]] = {}
        self._num_bytes = 0

    def add(self, request: str, parsed_body: ParsedBody, num_bytes: int) -> None:
        """Keep what a request asks for, whose body has so many bytes, if there is room."""
        if isinstance(parsed_body, SampleBody):
            num_bytes *= SAMPLE_MEMORY
        elif isinstance(parsed_body, TrainWork) and parsed_body.request:
            num_bytes = len(parsed_body.widths) * DATUM_MEMORY
        if parsed_body is not None and self._num_bytes + num_bytes <= limits.DATA_BYTES_MAX:
            self._parsed_bodies[request] = parsed_body, num_bytes
            self._num_bytes += num_bytes

    def look(self, request: str) -> ParsedBody:
        """Return what a request asks for; None if it was not kept."""
        return self._parsed_bodies.get(request, (None, 0))[0]

    def drop(self, request: str) -> ParsedBody:
        """Forget what a request asks for, and return it; None if it was not kept."""
        parsed_body, num_bytes = self._parsed_bodies.pop(request, (None, 0))
        self._num_bytes -= num_bytes
        return parsed_body


class BodyReader:
    """Reads bodies: short ones at once, longer ones in a thread, and long training data in a process that the first of
    them starts, which also decodes samples. For one event loop.
    """

    def __init__(self, arriving: Path, log_path: Path) -> None:
        """`arriving`: directory of the files of bodies whose request is not stored yet."""
        self._arriving = arriving.absolute()
        self._process = AnsweringProcess("echo2_service.front.reader", "", log_path)

    async def close(self) -> None:
        """End the process."""
        await self._process.close()

    async def read(self, kind: type[Body], body: bytes) -> tuple[Body, str]:
        """Read a body that has just come. Return it and its digest.

        Raises:
            PeerError: the body is not JSON of that type.
        """
        return await off_loop(len(body), lambda: (parse(kind, body), digest_of(body)))

    @asynccontextmanager
    async def reading(self, body: bytes, is_protobuf: bool, forward_only: bool = False) -> AsyncIterator[TrainWork]:
        """Read training data that have just come. If they lie in a file, it goes with the block, unless it is moved to
        the request's place in between.

        Raises:
            PeerError: the body is not such a message; "full", the disk is.
            InvariantError: a bug in echo2, or the body kills the process that reads it.
        """
        if len(body) <= LONG_BYTES:
            yield await off_loop(len(body), lambda: read_training(body, is_protobuf, forward_only))
            return
        work = self.arrived("req_" + secrets.token_hex(16))
        unread = work.with_suffix(".body")
        try:
            yield await self._read_long(body, ReadCall(str(unread), str(work), is_protobuf, forward_only))
        finally:
            await asyncio.to_thread(_remove, unread, work)

    def arrived(self, request: str) -> Path:
        """Return the file with the data of a request that is not stored yet."""
        return self._arriving / request

    async def read_file(self, path: Path) -> ParsedBody:
        """Read the rest of a stored request that was not kept, whose data lie in a file."""
        try:
            return await asyncio.to_thread(read_work, path)
        except InvariantError as error:
            return PeerError("damaged", str(error))

    async def read_stored(self, body: bytes, kind: str) -> ParsedBody:
        """Read the stored body of a request that was not kept."""
        return await off_loop(len(body), lambda: read_stored(body, kind))

    async def texts(self, directory: str, rows: list[Ints]) -> list[str]:
        """Return the texts of tokens, by the tokenizer of the base model in `directory`; "" where there is none."""
        answer = await self._process.call(TextCall(directory, rows))
        return answer.texts or [""] * len(rows)

    async def _read_long(self, body: bytes, call: ReadCall) -> TrainWork:
        try:
            await asyncio.to_thread(Path(call.body).write_bytes, body)
            answer = await self._process.call(call)
        except UserError as error:
            reason, _, detail = str(error).partition(": ")
            raise PeerError(reason, detail) from error
        except (OSError, InvariantError) as error:
            if isinstance(error, InvariantError) and str(error) != FULL:
                raise
            log.warning("a body of %d bytes cannot be written: %s", len(body), error)
            raise PeerError("full", FULL) from error
        if answer.work is None:
            raise InvariantError("the process that reads bodies has answered another call")
        return answer.work


def _remove(*paths: Path) -> None:
    for path in paths:
        path.unlink(missing_ok=True)


async def off_loop(num_bytes: int, work: Callable[[], T]) -> T:
    """Return the result of work on a body of this size, in a thread if the body is large."""
    return work() if num_bytes <= SHORT_BYTES else await asyncio.to_thread(work)


def read_stored(body: bytes, kind: str) -> ParsedBody:
    """Read the stored body of a request."""
    try:
        if kind.startswith("forward"):  # protobuf or JSON, as the body begins
            return read_training(body, body[:1] != b"{", kind == "forward")
        return parse(BODIES[kind], body) if kind in BODIES else None
    except PeerError as error:
        return error
