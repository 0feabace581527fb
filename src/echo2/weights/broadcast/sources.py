"""One source of chunks, and what it sends. A source can have several requests under way. Its first failure ends all of
them, and is reported once.

DialledSource   the origin, or a peer that this node dials
AwaitedSource   a peer that can't be dialled: this node waits for it to connect, and asks it for chunks
Dial            the other end of that, at the source: connects, receives requests, sends the chunks
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import aclosing
from typing import Protocol

from echo2.core.background import Background, close_all, spawn
from echo2.core.errors import LinkError, PeerError
from echo2.core.types import PayloadId
from echo2.transport import message_bytes
from echo2.transport import wire_pb2 as wire
from echo2.transport.base import Link
from echo2.weights.broadcast.serving import (
    REQUEST_CHUNKS_MAX,
    REQUESTS_PER_PEER_MAX,
    encode_payload,
)

log = logging.getLogger(__name__)

#: Timeout for connecting to a source that is dialled.
REACH_SECONDS = 5.0
#: Reason of a PeerError in handling a source's message -> failure reported to the fetcher. Other reasons: "broken".
FAILURE_OF = {"corrupt": "corrupt", "oversized": "corrupt", "malformed": "corrupt", "missing": "missing"}
#: Timeout for an awaited peer to dial this node.
DIALLED_WITHIN_SECONDS = 8.0
#: A request for more chunks than these many parts hold is split among the connections. Each part of a shared one is
#: sent over all, under a random number of so many bits.
SHARED_PARTS_MAX = 4
NUMBER_BITS = 63
#: How long, and at which interval, a peer that does not answer is dialled again.
DIAL_SECONDS = 5.0
REDIAL_SECONDS = 0.5
#: Maximum number of concurrent GiveChunk calls per request, and the timeout of one call.
GIVE_CALLS = 16
GIVE_SECONDS = 60.0
#: Maximum number of the peer's requests answered at once; further requests are not read meanwhile.
GIVES_MAX = REQUESTS_PER_PEER_MAX


class Intake(Protocol):
    """Receives the chunks and the state changes of a source."""

    async def keep(self, source: str, hash_: bytes, message: bytes, data: memoryview) -> None:
        """Verify a chunk, and store it later. Raises PeerError("corrupt")."""

    def alive(self, source: str) -> None:
        """Handle a keep-alive message: the source has nothing to send yet."""

    def failed(self, source: str, reason: str) -> None:
        """Handle a failure: the requests under way at this source have ended."""


class Source:
    """The common part of both kinds of sources: the chunks still awaited from it."""

    def __init__(self, source: str, intake: Intake) -> None:
        self.source, self.intake = source, intake
        self.awaited: dict[bytes, None] = {}

    def ask(self, payload: PayloadId, hashes: Sequence[bytes]) -> None:
        """Request these chunks of a payload, in addition to earlier requests."""
        raise NotImplementedError

    def cancel(self) -> None:
        """Cancel the requests under way; the source stays usable."""
        raise NotImplementedError

    async def close(self) -> None:
        """Cancel the requests under way, and close the connections."""
        raise NotImplementedError

    async def take(self, message: bytes, awaited: dict[bytes, None]) -> None:
        """Handle one message of the source.

        Raises:
            PeerError: "corrupt", "missing" or "malformed": it is not a requested chunk.
        """
        hash_, data = message_bytes.unpack(message)
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
        """Cancel the requests under way, and report the reason."""
        self.cancel()
        self.intake.failed(self.source, reason)


class _Part:
    """One request, over several connections: the chunks still awaited, and a task for each connection."""

    def __init__(self, hashes: Sequence[bytes]) -> None:
        self.awaited = dict.fromkeys(hashes)
        self.tasks: set[asyncio.Task[None]] = set()

    def ended(self) -> bool:
        """End the caller's own task. Return whether no other goes on."""
        self.tasks.discard(asyncio.current_task())
        return not self.tasks

    def cancel_others(self) -> None:
        """Everything has come: the other connections have nothing to wait for."""
        self.ended()
        for task in self.tasks:
            task.cancel()


class DialledSource(Source):
    """A source that this node dials, over one or several connections. Each request goes out over all of them, and each
    chunk comes over the one that is free first (`decide/dealing.py`)."""

    def __init__(self, source: str, address: str, intake: Intake, links: Sequence[Link]) -> None:
        super().__init__(source, intake)
        self.address = address
        self._links = links
        self._tasks = Background(self._fetching_failed)
        self._was_reached = False
        self._patience: asyncio.TimerHandle | None = None

    @property
    def num_connections(self) -> int:
        """Number of connections over which chunks are asked for."""
        return len(self._links)

    @property
    def is_busy(self) -> bool:
        """Whether requests are under way."""
        return bool(self._tasks)

    def open(self, num: int) -> None:
        """Make so many connections now, ahead of the first request."""
        for link in self._links[:num]:
            link.open()

    def ask(self, payload: PayloadId, hashes: Sequence[bytes]) -> None:
        """As `Source.ask`. Of very many chunks, each connection is asked for its own part."""
        parts = [hashes[at : at + REQUEST_CHUNKS_MAX] for at in range(0, len(hashes), REQUEST_CHUNKS_MAX)]
        is_shared = len(self._links) > 1 and len(parts) <= SHARED_PARTS_MAX
        for at, chunks in enumerate(parts):
            part, number = _Part(chunks), secrets.randbits(NUMBER_BITS) if is_shared else 0
            request = wire.ChunkRequest(hashes=chunks, payload=encode_payload(payload), number=number)
            for link in self._links if is_shared else [self._links[at % len(self._links)]]:
                part.tasks.add(self._tasks.spawn(self._fetch(link, request, part)))
        if not self._was_reached and self._patience is None:
            self._patience = asyncio.get_running_loop().call_later(REACH_SECONDS, self._was_not_reached)

    def _was_not_reached(self) -> None:
        self._patience = None
        if not self._was_reached and self._tasks:
            self.fail("unreachable")

    async def _fetch(self, link: Link, request: wire.ChunkRequest, part: _Part) -> None:
        has_answered = False
        try:
            async with aclosing(link.frames("FetchChunks", request)) as messages:  # type: ignore[type-var]
                async for message in messages:
                    is_first = not self._was_reached and message == message_bytes.ALIVE
                    if not (is_first or await self._is_good(message, part.awaited)):
                        return
                    self._was_reached = has_answered = True  # a server sends ALIVE at once
                    if not part.awaited:
                        part.cancel_others()
                        return
            if part.ended():
                self.fail("broken")
        except PeerError as error:
            self._was_reached = True
            self.fail("missing" if error.reason == "missing" else "broken")  # a refusal is never "corrupt"
        except LinkError:
            if not part.ended() and not has_answered:
                return  # nothing was sent over this connection, and the others go on
            self.fail("broken" if self._was_reached else "unreachable")

    def _fetching_failed(self, error: Exception) -> None:
        log.error("a request to %s failed", self.source, exc_info=error)
        self.fail("broken")

    async def _is_good(self, message: bytes, awaited: dict[bytes, None]) -> bool:
        try:
            await self.take(message, awaited)
        except PeerError as error:
            self._was_reached = True
            self.fail(FAILURE_OF.get(error.reason, "broken"))
            return False
        return True

    def cancel(self) -> None:
        self._tasks.cancel()
        if self._patience is not None:
            self._patience.cancel()
            self._patience = None

    async def close(self) -> None:
        self.cancel()
        await close_all(self._tasks.close, *(link.close for link in self._links))


Serve = Callable[[wire.ChunkRequest], AsyncGenerator[bytes, None]]


class Dial:
    """Starts at once, and ends when the peer refuses or can't be reached for `DIAL_SECONDS`."""

    def __init__(self, address: str, link: Link, serve: Serve) -> None:
        self.address = address
        self._link, self._serve = link, serve
        self._tasks = Background(self._broke)
        self._gives = asyncio.Semaphore(GIVES_MAX)
        self._running = spawn(self._run(), self._broke)

    @property
    def is_over(self) -> bool:
        """Whether the peer refused, or became unreachable."""
        return self._running.done()

    @property
    def is_busy(self) -> bool:
        """Whether chunks are being sent."""
        return bool(self._tasks)

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        give_up_at = loop.time() + DIAL_SECONDS
        while loop.time() < give_up_at:
            begun_at = loop.time()
            try:
                async for request in self._link.stream("AskWanted", wire.Empty()):
                    await self._gives.acquire()
                    giving = self._tasks.spawn(self._give(request))
                    giving.add_done_callback(lambda _: self._gives.release())
                self._tasks.cancel()  # the peer ended its stream: it no longer wants these chunks
                give_up_at = loop.time() + DIAL_SECONDS
            except PeerError:
                return
            except LinkError:
                self._tasks.cancel()
            await asyncio.sleep(max(0.0, begun_at + REDIAL_SECONDS - loop.time()))

    def _broke(self, error: Exception) -> None:
        """End, which the owner sees and dials again."""
        log.error("sending to %s failed", self.address, exc_info=error)
        self._running.cancel()
        self._tasks.cancel()

    async def _give(self, request: wire.ChunkRequest) -> None:
        window, owed = asyncio.Semaphore(GIVE_CALLS), dict.fromkeys(request.hashes)
        try:
            async with aclosing(self._serve(request)) as messages:
                async for message in messages:
                    await window.acquire()
                    owed.pop(message_bytes.hash_of(message), None)
                    self._tasks.spawn(self._send(message, window))
        except PeerError:
            if owed:
                await window.acquire()
                await self._send(message_bytes.pack_missing(next(iter(owed))), window)

    async def _send(self, message: bytes, window: asyncio.Semaphore) -> None:
        try:
            await self._link.call("GiveChunk", message, GIVE_SECONDS)
        except (LinkError, PeerError):
            pass  # the peer knows which chunks it lacks, and asks again or elsewhere
        finally:
            window.release()

    async def close(self) -> None:
        """Stop sending, and close the link."""
        self._running.cancel()
        self._tasks.cancel()
        await asyncio.gather(self._running, return_exceptions=True)
        await self._tasks.close()
        await self._link.close()


class AwaitedSource(Source):
    """A peer that can't be dialled: it dials this node, receives the requests, and sends the chunks."""

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
        """As `Source.ask`; the peer receives the request once it has dialled."""
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
        """Yield the requests to a peer that has dialled. Ends when they are cancelled, or when the peer dials again:
        requests sent over the older stream, which may be half open, may never have arrived, so they fail.
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
        """Take a chunk that the peer sent. Raises PeerError if it was not requested, or is corrupt."""
        try:
            await self.take(message, self.awaited)
        except PeerError as error:
            hash_ = message_bytes.hash_of(message)
            if error.reason != "corrupt" or hash_ in self.awaited:
                self.fail(FAILURE_OF.get(error.reason, "broken"))
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
        self.cancel()
