"""Serves chunks to a peer: stored chunks at once, expected chunks as soon as they arrive."""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import AsyncGenerator, Callable

from echo2.broadcast.chunk_cache import ChunkCache
from echo2.broadcast.payloads import decode_payload, requested
from echo2.errors import PeerError
from echo2.transport import chunks
from echo2.transport import wire_pb2 as wire
from echo2.transport.base import Peer
from echo2.types import PayloadId

#: Interval of keep-alive messages while there is no chunk to send.
ALIVE_SECONDS = 0.5
#: Maximum number of concurrent requests of one peer.
REQUESTS_PER_PEER_MAX = 64


class Server:
    """Serves requests from `cache`. `expects`: whether missing chunks of a payload may still arrive."""

    def __init__(self, cache: ChunkCache, expects: Callable[[PayloadId], bool]) -> None:
        self._cache, self._expects = cache, expects
        self._under_way: Counter[str] = Counter()
        self._orders: set[_Order] = set()
        self._is_closed = False
        self.bytes_sent = 0

    async def serve(self, peer: Peer, request: wire.ChunkRequest) -> AsyncGenerator[bytes, None]:
        """Yield messages with the requested chunks, in any order, and keep-alive messages in between.

        Raises:
            PeerError: "missing", when some chunks are neither stored nor expected; "malformed"; "oversized"; "busy";
                "closing".
        """
        wanted, payload, peer_id = requested(request), decode_payload(request.payload), peer.peer_id
        if self._under_way[peer_id] >= REQUESTS_PER_PEER_MAX:
            raise PeerError("busy", f"{peer_id} has {REQUESTS_PER_PEER_MAX} requests under way")
        self._under_way[peer_id] += 1
        order = _Order(self._cache, wanted)
        self._orders.add(order)
        try:
            yield chunks.ALIVE  # tells the caller that the request arrived
            order.begin()
            clock = asyncio.get_running_loop().time
            told_at = clock()
            while order.wanted:
                self._check_open()
                if not order.ready and not self._expects(payload):
                    raise PeerError("missing", f"{len(order.wanted)} chunks of {payload} are not here and not expected")
                if not order.ready and clock() - told_at >= ALIVE_SECONDS:
                    # Every chunk received so far is sent: if the peer finds this slow, the cause is this node's own
                    # source, even if that source still delivers a little.
                    told_at = clock()
                    yield chunks.ALIVE
                if not order.ready:
                    await order.something()
                while order.ready:
                    message = await self._read(order, payload)
                    if message is not None:
                        self.bytes_sent += len(message)
                        yield message
        finally:
            order.end()
            self._orders.discard(order)
            self._under_way[peer_id] -= 1
            if not self._under_way[peer_id]:
                del self._under_way[peer_id]

    async def _read(self, order: _Order, payload: PayloadId) -> bytes | None:
        """Return the next message; None if its chunk was dropped before it was read, and is awaited again."""
        self._check_open()
        hash_ = order.ready.popleft()
        try:
            message = await self._cache.message(hash_)
        except PeerError as error:
            if error.reason != "missing" or not self._expects(payload):
                raise
            if self._cache.has(hash_):  # written in the meantime
                order.ready.append(hash_)
            else:
                self._cache.wait_for(hash_, order.tell)
            return None
        del order.wanted[hash_]
        return message

    def close(self) -> None:
        """Refuse new requests, and end those under way."""
        self._is_closed = True
        self.reconsider()

    def _check_open(self) -> None:
        if self._is_closed:
            raise PeerError("closing", "this node ends")

    def reconsider(self) -> None:
        """Make all waiting requests check again whether their chunks are still expected."""
        for order in self._orders:
            order.woken.set()


class _Order:
    """One request: the chunks still to be sent (`wanted`), and those of them that can be sent now (`ready`)."""

    def __init__(self, cache: ChunkCache, wanted: dict[bytes, None]) -> None:
        self._cache, self.wanted = cache, wanted
        self.ready: deque[bytes] = deque()
        self.woken = asyncio.Event()

    def begin(self) -> None:
        for hash_ in self.wanted:
            if self._cache.has(hash_):
                self.ready.append(hash_)
            else:
                self._cache.wait_for(hash_, self.tell)

    def end(self) -> None:
        for hash_ in self.wanted:
            self._cache.forget(hash_, self.tell)

    def tell(self, hash_: bytes) -> None:
        self.ready.append(hash_)
        self.woken.set()

    async def something(self) -> bool:
        """Wait for a chunk to send, or for `reconsider`. Return False after `ALIVE_SECONDS` without either."""
        self.woken.clear()
        try:
            async with asyncio.timeout(ALIVE_SECONDS):
                await self.woken.wait()
        except TimeoutError:
            return False
        return True
