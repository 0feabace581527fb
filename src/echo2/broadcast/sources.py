"""Receives chunks from one source: the origin, a peer that we connect to, or a peer that connects to us.

A source is asked for chunks again and again; requests do not wait for earlier ones. Its first failure ends all that is
under way from it, and is told once.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing
from typing import Protocol

from echo2.broadcast.payloads import REQUEST_CHUNKS_MAX, encode_payload
from echo2.errors import LinkError, PeerError
from echo2.transport import chunks
from echo2.transport import wire_pb2 as wire
from echo2.transport.base import Link
from echo2.types import PayloadId

#: A peer that should dial us has this long.
DIALLED_WITHIN_SECONDS = 8.0
#: A connection to a source has this long to be made.
DIAL_SECONDS = 5.0
#: What is wrong with a message that a source sent, to those who plan. Whatever else happens, it is "broken".
_FAILURE_OF = {"corrupt": "corrupt", "oversized": "corrupt", "malformed": "corrupt", "missing": "missing"}


class Intake(Protocol):
    """Receives chunks and news of a source."""

    async def keep(self, source: str, hash_: bytes, message: bytes, data: memoryview) -> None:
        """Verify, and store later. Raises PeerError("corrupt")."""

    def alive(self, source: str) -> None:
        """A source has nothing to send yet, and says so."""

    def failed(self, source: str, reason: str) -> None:
        """A source gives no more of what is under way."""


class Source:
    """The common part of both kinds of sources: the chunks still awaited from it."""

    def __init__(self, source: str, intake: Intake) -> None:
        self.source, self.intake = source, intake
        self.awaited: dict[bytes, None] = {}

    def ask(self, payload: PayloadId, hashes: Sequence[bytes]) -> None:
        """Request these chunks of a payload, in addition to earlier requests."""
        raise NotImplementedError

    def cancel(self) -> None:
        """End what is under way; the source stays usable."""
        raise NotImplementedError

    async def close(self) -> None:
        """End what is under way, and the connections."""
        raise NotImplementedError

    async def take(self, message: bytes, awaited: dict[bytes, None]) -> None:
        """Handle one message of the source.

        Raises:
            PeerError: it is not what was asked for.
        """
        hash_, data = chunks.unpack(message)
        if not hash_:
            self.intake.alive(self.source)
            return
        if hash_ not in awaited:
            raise PeerError("corrupt", f"chunk {hash_.hex()} was not asked for")
        if not data:
            raise PeerError("missing", f"chunk {hash_.hex()}")
        await self.intake.keep(self.source, hash_, message, data)
        awaited.pop(hash_, None)

    def fail(self, reason: str) -> None:
        """End what is under way and tell why."""
        self.cancel()
        self.intake.failed(self.source, reason)


class DialledSource(Source):
    """Dialled over one or several connections, to which the chunks of each request are dealt."""

    def __init__(self, source: str, address: str, intake: Intake, links: Sequence[Link]) -> None:
        super().__init__(source, intake)
        self.address = address
        self._links = links
        self._tasks: set[asyncio.Task[None]] = set()
        self._was_reached = False
        self._patience: asyncio.TimerHandle | None = None

    @property
    def stripes(self) -> int:
        """Number of connections."""
        return len(self._links)

    @property
    def is_busy(self) -> bool:
        """Whether requests are under way."""
        return bool(self._tasks)

    def open(self) -> None:
        """Connect now, ahead of the first request."""
        for link in self._links:
            link.open()

    def ask(self, payload: PayloadId, hashes: Sequence[bytes]) -> None:
        """As `Source.ask`; the chunks are dealt to the connections."""
        for number, link in enumerate(self._links):
            dealt = hashes[number :: self.stripes]
            for start in range(0, len(dealt), REQUEST_CHUNKS_MAX):
                part = dealt[start : start + REQUEST_CHUNKS_MAX]
                task = asyncio.ensure_future(self._fetch(link, payload, part))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
        if not self._was_reached and self._patience is None:
            self._patience = asyncio.get_running_loop().call_later(DIAL_SECONDS, self._was_not_reached)

    def _was_not_reached(self) -> None:
        self._patience = None
        if not self._was_reached and self._tasks:
            self.fail("unreachable")

    async def _fetch(self, link: Link, payload: PayloadId, hashes: Sequence[bytes]) -> None:
        awaited = dict.fromkeys(hashes)
        request = wire.ChunkRequest(hashes=hashes, payload=encode_payload(payload))
        try:
            async with aclosing(link.frames("FetchChunks", request)) as messages:  # type: ignore[type-var]
                async for message in messages:
                    if (self._was_reached or message != chunks.ALIVE) and not await self._is_good(message, awaited):
                        return
                    self._was_reached = True  # a server says so at once
                    if not awaited:
                        return
            self.fail("broken")
        except PeerError as error:
            self._was_reached = True
            self.fail("missing" if error.reason == "missing" else "broken")  # a refusal, whatever the word, is no lie
        except LinkError:
            self.fail("broken" if self._was_reached else "unreachable")

    async def _is_good(self, message: bytes, awaited: dict[bytes, None]) -> bool:
        try:
            await self.take(message, awaited)
        except PeerError as error:
            self._was_reached = True
            self.fail(_FAILURE_OF.get(error.reason, "broken"))
            return False
        return True

    def cancel(self) -> None:
        """As `Source.cancel`."""
        own = asyncio.current_task()  # None: a timer
        for task in self._tasks:
            if task is not own:
                task.cancel()
        if self._patience is not None:
            self._patience.cancel()
            self._patience = None

    async def close(self) -> None:
        """As `Source.close`."""
        self.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for link in self._links:
            await link.close()


class AwaitedSource(Source):
    """A peer that can't be dialled: it dials us, is told what is wanted, and gives."""

    def __init__(self, source: str, intake: Intake) -> None:
        super().__init__(source, intake)
        self._requests: asyncio.Queue[wire.ChunkRequest | None] = asyncio.Queue()
        self._is_attached = False
        self._patience: asyncio.TimerHandle | None = None

    @property
    def is_busy(self) -> bool:
        """Whether chunks are awaited."""
        return bool(self.awaited)

    def ask(self, payload: PayloadId, hashes: Sequence[bytes]) -> None:
        """As `Source.ask`; the peer hears of it when it has dialled."""
        for start in range(0, len(hashes), REQUEST_CHUNKS_MAX):
            part = hashes[start : start + REQUEST_CHUNKS_MAX]
            self.awaited.update(dict.fromkeys(part))
            self._requests.put_nowait(wire.ChunkRequest(hashes=part, payload=encode_payload(payload)))
        if not self._is_attached and self._patience is None:
            loop = asyncio.get_running_loop()
            self._patience = loop.call_later(DIALLED_WITHIN_SECONDS, self._was_not_dialled)

    def _was_not_dialled(self) -> None:
        self._patience = None
        if self.awaited:
            self.fail("unreachable")

    async def attach(self) -> AsyncIterator[wire.ChunkRequest]:
        """The peer has dialled: what is wanted of it, as it comes. Ends when that is cancelled, or by another call:
        what was said over the older one, which may be half open, may never have come.
        """
        if self._is_attached and self.awaited:
            self.fail("broken")
        elif self._is_attached:
            self.cancel()
        requests, self._is_attached = self._requests, True
        if self._patience is not None:
            self._patience.cancel()
            self._patience = None
        try:
            while (request := await requests.get()) is not None:
                yield request
        finally:
            if requests is self._requests:
                self._is_attached = False
                if self.awaited:
                    self.fail("broken")

    async def give(self, message: bytes) -> None:
        """A chunk that the peer sent. Raises PeerError for what is not wanted of it."""
        try:
            await self.take(message, self.awaited)
        except PeerError as error:
            hash_ = chunks.hash_of(message)
            if error.reason != "corrupt" or hash_ in self.awaited:
                self.fail(_FAILURE_OF.get(error.reason, "broken"))
            raise

    def cancel(self) -> None:
        """As `Source.cancel`; the peer has to dial again."""
        self.awaited.clear()
        if self._patience is not None:
            self._patience.cancel()
            self._patience = None
        self._requests.put_nowait(None)
        self._requests, self._is_attached = asyncio.Queue(), False

    async def close(self) -> None:
        """As `Source.close`."""
        self.cancel()
