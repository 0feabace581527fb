"""Connects to a peer that cannot connect to this node, and sends the chunks it asks for: the counterpart of
`AwaitedSource`.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import aclosing
from typing import Any

from echo2.broadcast.serving import REQUESTS_PER_PEER_MAX
from echo2.errors import LinkError, PeerError
from echo2.transport import chunks
from echo2.transport import wire_pb2 as wire
from echo2.transport.base import Link

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
        self._tasks: set[asyncio.Task[None]] = set()
        self._gives = asyncio.Semaphore(GIVES_MAX)
        self._running = asyncio.ensure_future(self._run())

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
                    giving = self._spawn(self._give(request))
                    giving.add_done_callback(lambda _: self._gives.release())
                self._end_tasks()  # the peer ended its stream: it no longer wants these chunks
                give_up_at = loop.time() + DIAL_SECONDS
            except PeerError:
                return
            except LinkError:
                self._end_tasks()
            await asyncio.sleep(max(0.0, begun_at + REDIAL_SECONDS - loop.time()))

    def _spawn(self, coroutine: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.ensure_future(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _give(self, request: wire.ChunkRequest) -> None:
        window, owed = asyncio.Semaphore(GIVE_CALLS), dict.fromkeys(request.hashes)
        try:
            async with aclosing(self._serve(request)) as messages:
                async for message in messages:
                    await window.acquire()
                    owed.pop(chunks.hash_of(message), None)
                    self._spawn(self._send(message, window))
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

    def _end_tasks(self) -> None:
        for task in self._tasks:
            task.cancel()

    async def close(self) -> None:
        """Stop sending, and close the link."""
        self._running.cancel()
        self._end_tasks()
        await asyncio.gather(self._running, *self._tasks, return_exceptions=True)
        await self._link.close()
