"""Reads the body of each request once, away from the event loop if it is large, and keeps what it asks for while the
request is open, if memory has room.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from echo2.core.errors import InvariantError, PeerError, UserError
from echo2_service import limits
from echo2_service.backend import Ints, ReadCall, TextCall, TrainWork
from echo2_service.calling import AnsweringProcess
from echo2_service.front.bodies import LoadBody, OptimBody, SampleBody, SaveBody, parse
from echo2_service.front.data import read_json, read_protobuf

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
#: Longer training data in JSON are read in a process of their own: in a thread they would block the event loop for 20
#: ms and more.
LONG_JSON_BYTES = 256 << 10
#: Memory of a sample's body as it was read, over its bytes, at most (numbers of three digits); of training data 1.
SAMPLE_MEMORY = 10


class ParsedBodies:
    """What the open requests ask for, by id. For one event loop."""

    def __init__(self) -> None:
        self._parsed_bodies: dict[str, tuple[ParsedBody, int]] = {}
        self._num_bytes = 0

    def add(self, request: str, parsed_body: ParsedBody, num_bytes: int) -> None:
        """Keep what a request asks for, whose body has so many bytes, if there is room."""
        if isinstance(parsed_body, SampleBody):
            num_bytes *= SAMPLE_MEMORY
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
    """Reads bodies: short ones at once, longer ones in a thread, and long training data in JSON in a process that the
    first of them starts, which also decodes samples. For one event loop.
    """

    def __init__(self, log_path: Path) -> None:
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

    async def read_training(self, body: bytes, is_protobuf: bool, forward_only: bool = False) -> tuple[TrainWork, str]:
        """Read training data that have just come, as `read`. The digest of protobuf is that of its canonical bytes.

        Raises:
            PeerError: the body is not such a message.
            InvariantError: a bug in echo2, or the body kills the process that reads it.
        """
        if is_protobuf:
            work, canonical = await off_loop(len(body), lambda: read_protobuf(body))
        else:
            work, canonical = await self._read_json(body, forward_only), body
        return work, await off_loop(len(canonical), lambda: digest_of(canonical))

    async def read_stored(self, body: bytes, kind: str) -> ParsedBody:
        """Read the stored body of a request that was not kept."""
        if not kind.startswith("forward"):
            return await off_loop(len(body), lambda: read_stored(body, kind))
        try:  # protobuf or JSON, as the body begins
            return (await self.read_training(body, body[:1] != b"{", kind == "forward"))[0]
        except PeerError as error:
            return error

    async def texts(self, directory: str, rows: list[Ints]) -> list[str]:
        """Return the texts of tokens, by the tokenizer of the base model in `directory`; "" where there is none."""
        answer = await self._process.call(TextCall(directory, rows))
        return answer.texts or [""] * len(rows)

    async def _read_json(self, body: bytes, forward_only: bool) -> TrainWork:
        if len(body) <= LONG_JSON_BYTES:
            return await off_loop(len(body), lambda: read_json(body, forward_only))
        try:
            answer = await self._process.call(ReadCall(body, forward_only))
        except UserError as error:
            raise PeerError("malformed", str(error)) from error
        if answer.work is None:
            raise InvariantError("the process that reads bodies has answered another call")
        return answer.work


async def off_loop(num_bytes: int, work: Callable[[], T]) -> T:
    """Return the result of work on a body of this size, in a thread if the body is large."""
    return work() if num_bytes <= SHORT_BYTES else await asyncio.to_thread(work)


def read_stored(body: bytes, kind: str) -> ParsedBody:
    """Read the stored body of a request that carries no training data."""
    try:
        return parse(BODIES[kind], body) if kind in BODIES else None
    except PeerError as error:
        return error


def digest_of(body: bytes) -> str:
    """Return the digest that identifies a repeated request."""
    return hashlib.sha256(body).hexdigest()
