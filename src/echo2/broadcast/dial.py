"""Both ends of an edge whose source can't be dialled: the source dials the peer that wants its chunks.

Dial            at the source: connects, receives requests, sends the chunks
AwaitedSource   at the peer: waits for the source to connect, and asks it for chunks
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import aclosing

from echo2.background import Background, spawn
from echo2.broadcast.payloads import REQUEST_CHUNKS_MAX, encode_payload
from echo2.broadcast.serving import REQUESTS_PER_PEER_MAX
from echo2.broadcast.sources import FAILURE_OF, Intake, Source
from echo2.errors import LinkError, PeerError
from echo2.transport import chunks
from echo2.transport import wire_pb2 as wire
from echo2.transport.base import Link
from echo2.types import PayloadId

log = logging.getLogger(__name__)

#: Timeout for an awaited peer to dial this node.
DIALLED_WITHIN_SECONDS = 8.0
#: How long, and at which interval, a peer that does not answer is dialled again.
DIAL_SECONDS = 5.0
REDIAL_SECONDS = 0.5
#: Maximum number of concurrent GiveChunk calls per request, and the timeout of one call.
GIVE_CALLS = 16
GIVE_SECONDS = 60.0
#: Maximum number of the peer's requests answered at once; further requests are not read meanwhile.
GIVES_MAX = REQUESTS_PER_PEER_MAX

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
                    owed.pop(chunks.hash_of(message), None)
                    self._tasks.spawn(self._send(message, window))
        except PeerError:
            if owed:
                await window.acquire()
                await self._send(chunks.pack_missing(next(iter(owed))), window)

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
            hash_ = chunks.hash_of(message)
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
        """As `Source.close`."""
        self.cancel()
