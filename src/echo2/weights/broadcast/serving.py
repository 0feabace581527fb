"""Serves chunks to peers: recently received chunks from memory, other stored chunks from disk, expected chunks as soon
as they arrive.

Chunks are kept as encoded messages (`transport.message_bytes`), so that a chunk sent to many peers is hashed, read and
packed once.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections import Counter, OrderedDict, defaultdict
from collections.abc import AsyncGenerator, Callable, Iterable

from echo2.core.errors import PeerError, UserError
from echo2.core.loop_thread import BlockingThreads
from echo2.core.types import PayloadId
from echo2.transport import message_bytes
from echo2.transport import wire_pb2 as wire
from echo2.transport.base import Peer
from echo2.transport.budgets import Buckets
from echo2.transport.messages import decode_ref, encode_ref
from echo2.weights.broadcast.decide.dealing import Dealing
from echo2.weights.format.manifest import HASH_BYTES
from echo2.weights.store.store import ChunkStore

log = logging.getLogger(__name__)

#: Maximum number of chunks per request; larger demands are split into several requests.
REQUEST_CHUNKS_MAX = 4096
#: Bytes of messages kept in memory: how far the children of a relay can lag behind it without disk reads.
RECENT_BYTES = 64 << 20
#: Interval of keep-alive messages while there is no chunk to send.
ALIVE_SECONDS = 0.5
#: Maximum number of concurrent requests of one peer.
REQUESTS_PER_PEER_MAX = 64
#: What a peer may be sent: this many copies of every chunk that is new here, and as many of the largest payload, which
#: it earns again over this time. An honest one needs each chunk about once, and everything again if its disk is lost.
COPIES = 2
COPIES_SECONDS = 3600.0
COPIES_BYTES_MIN = 64 << 20


def encode_payload(payload: PayloadId) -> wire.PayloadId:
    """The wire form of a payload's name."""
    base = None if payload.base is None else encode_ref(payload.base)
    return wire.PayloadId(ref=encode_ref(payload.ref), base=base)


def decode_payload(message: wire.PayloadId) -> PayloadId:
    """Return the decoded name. Raises PeerError("malformed") if it is not a valid snapshot name."""
    return PayloadId(decode_ref(message.ref), decode_ref(message.base) if message.HasField("base") else None)


def requested(request: wire.ChunkRequest) -> dict[bytes, None]:
    """Return the distinct requested hashes, in order.

    Raises:
        PeerError: "oversized" or "malformed".
    """
    if len(request.hashes) > REQUEST_CHUNKS_MAX:
        raise PeerError("oversized", f"{len(request.hashes)} chunks at once; {REQUEST_CHUNKS_MAX} allowed")
    if any(len(hash_) != HASH_BYTES for hash_ in request.hashes):
        raise PeerError("malformed", f"a chunk hash that has not {HASH_BYTES} bytes")
    return dict.fromkeys(request.hashes)


class ChunkCache:
    """Serves chunks from memory or from `store`. Disk reads run on `disk` threads, the rest on the event loop."""

    def __init__(self, store: ChunkStore, disk: BlockingThreads) -> None:
        self._store, self._disk = store, disk
        self._recent: OrderedDict[bytes, bytes] = OrderedDict()
        self._recent_bytes = 0
        self._waiting: defaultdict[bytes, set[Callable[[bytes], None]]] = defaultdict(set)

    def has(self, hash_: bytes) -> bool:
        """Whether this chunk can be sent now."""
        return hash_ in self._recent or self._store.has(hash_)

    async def message(self, hash_: bytes) -> bytes:
        """Return the message with this chunk.

        Raises:
            PeerError: "missing": the chunk is not stored, or damaged on disk (the peer then asks another source, and
                does not report this one as corrupt); "busy": it is stored but can't be read now.
        """
        message = self._recent.get(hash_)
        if message is not None:
            return message
        try:
            data = await self._disk.run(self._store.get, hash_)
        except PeerError as error:
            log.warning("a chunk is not given: %s", error)
            raise PeerError("missing", str(error)) from error
        except UserError as error:
            log.warning("a chunk is not given: %s", error)
            raise PeerError("busy", f"chunk {hash_.hex()} can't be read now") from error
        message = message_bytes.pack(hash_, data)
        self._remember(hash_, message)
        return message

    def arrived(self, hash_: bytes, message: bytes) -> None:
        """Add a verified chunk, and notify the requests that wait for it."""
        self._remember(hash_, message)
        self.stored(hash_)

    def stored(self, hash_: bytes) -> None:
        """Notify the requests that wait for this chunk, which is now on disk. A request may have begun to wait after
        the chunk was evicted from memory and before it was written."""
        for notify in self._waiting.pop(hash_, ()):
            notify(hash_)

    def wait_for(self, hash_: bytes, notify: Callable[[bytes], None]) -> None:
        """Call `notify` once, when the chunk arrives."""
        self._waiting[hash_].add(notify)

    def forget(self, hash_: bytes, notify: Callable[[bytes], None]) -> None:
        """Undo `wait_for`."""
        waiting = self._waiting.get(hash_)
        if waiting is not None:
            waiting.discard(notify)
            if not waiting:
                del self._waiting[hash_]

    def _remember(self, hash_: bytes, message: bytes) -> None:
        if hash_ in self._recent:
            return
        self._recent[hash_] = message
        self._recent_bytes += len(message)
        while self._recent_bytes > RECENT_BYTES:
            self._recent_bytes -= len(self._recent.popitem(last=False)[1])


class Allowance:
    """The bytes that each peer may be sent. A peer over its allowance is not refused, but sent more only as it earns
    it. Its buckets run by a clock of bytes: those that are new here, and those earned over time."""

    def __init__(self) -> None:
        self._buckets, self._earned, self._at, self._largest = Buckets(), 0.0, math.inf, COPIES_BYTES_MIN // COPIES

    def add(self, num_new_bytes: int = 0, payload_bytes: int = 0) -> None:
        """Record bytes of new chunks, and the size of a payload that peers may fetch."""
        self._earned += COPIES * (num_new_bytes + max(0, payload_bytes - self._largest))
        self._largest = max(self._largest, payload_bytes)

    def take(self, peer_id: str, num_bytes: int, now: float) -> float:
        """Take bytes from a peer's allowance. Return the seconds until it has earned them."""
        per_second = COPIES * self._largest / COPIES_SECONDS
        self._earned, self._at = self._earned + per_second * max(0.0, now - self._at), now
        allowance = self._buckets.take(peer_id, 1.0, COPIES * self._largest, self._earned, num_bytes, debt_max=math.inf)
        return max(0.0, -allowance / per_second)


class Server:
    """Serves requests from `cache`.

    expects(payload)           whether missing chunks of a payload may still arrive
    rate_limit(peer, payload)  bytes per second at which this peer is sent the payload; None: as its link takes it
    is_trusted(peer)           whether this peer may be sent any number of bytes
    """

    def __init__(
        self,
        cache: ChunkCache,
        expects: Callable[[PayloadId], bool],
        rate_limit: Callable[[str, PayloadId], float | None] = lambda peer_id, payload: None,
        is_trusted: Callable[[str], bool] = lambda peer_id: False,
    ) -> None:
        self._cache, self._expects, self._rate_limit, self._is_trusted = cache, expects, rate_limit, is_trusted
        self.allowance = Allowance()
        self._under_way: Counter[str] = Counter()
        self._due: dict[str, float] = {}  # peer -> when its next chunk may be sent
        self._orders: set[_Order] = set()
        self._shared: dict[tuple[str, int], _Order] = {}  # (peer, number): of a request over several connections
        self._is_closed = False
        self.bytes_sent = 0

    async def serve(self, peer: Peer, request: wire.ChunkRequest) -> AsyncGenerator[bytes, None]:
        """Yield messages with the requested chunks, in any order, and keep-alive messages in between; of a request that
        came over several connections, those that this one is the first to be free for.

        Raises:
            PeerError: "missing", when some chunks are neither stored nor expected; "malformed"; "oversized"; "busy";
                "closing".
        """
        payload, peer_id = decode_payload(request.payload), peer.peer_id
        order = self._order(peer_id, request)
        dealing = order.dealing
        dealing.num_connections += 1
        try:
            yield message_bytes.ALIVE  # tells the caller that the request arrived
            clock = asyncio.get_running_loop().time
            alive_at = clock()
            while dealing.remaining:
                self._check_open()
                if not dealing.ready and not self._expects(payload):
                    raise PeerError("missing", f"{len(dealing.remaining)} chunks of {payload} are not here or expected")
                if not dealing.ready and clock() - alive_at >= ALIVE_SECONDS:
                    # Every chunk received so far is sent: if the peer finds this slow, the cause is this node's own
                    # source, even if that source still delivers a little.
                    alive_at = clock()
                    yield message_bytes.ALIVE
                if not dealing.ready:
                    await order.something()
                while dealing.ready:
                    message = await self._read(order, payload)
                    if message is None:
                        continue
                    due = self._due_at(peer_id, payload, len(message))
                    while (wait_seconds := due - clock()) > 0.0:
                        await asyncio.sleep(min(wait_seconds, ALIVE_SECONDS))
                        if wait_seconds > ALIVE_SECONDS:
                            yield message_bytes.ALIVE
                    self.bytes_sent += len(message)
                    yield message
            order.woken.set()  # the other connections of this request have nothing left to wait for
        finally:
            dealing.num_connections -= 1
            if not dealing.num_connections:
                self._ended(peer_id, order)

    def _order(self, peer_id: str, request: wire.ChunkRequest) -> _Order:
        """Return what a request asks for: a request of its own, or one that came over another connection already.

        Raises:
            PeerError: "malformed"; "oversized"; "busy".
        """
        chunks, key = requested(request), (peer_id, request.number)
        order = self._shared.get(key) if request.number else None
        if order is not None:
            if not order.dealing.may_join(chunks):
                raise PeerError("malformed", f"request {request.number} asked for other chunks, or came too often")
            return order
        if self._under_way[peer_id] >= REQUESTS_PER_PEER_MAX:
            raise PeerError("busy", f"{peer_id} has {REQUESTS_PER_PEER_MAX} requests under way")
        self._under_way[peer_id] += 1
        order = _Order(self._cache, chunks, key)
        self._orders.add(order)
        if request.number:
            self._shared[key] = order
        return order

    def _ended(self, peer_id: str, order: _Order) -> None:
        order.end()
        self._orders.discard(order)
        if self._shared.get(order.key) is order:
            del self._shared[order.key]
        self._under_way[peer_id] -= 1
        if not self._under_way[peer_id]:
            del self._under_way[peer_id]
            self._due.pop(peer_id, None)

    @property
    def is_busy(self) -> bool:
        """Whether any request is under way."""
        return bool(self._under_way)

    def _due_at(self, peer_id: str, payload: PayloadId, num_bytes: int) -> float:
        """Return when this message may be sent, and charge it. A peer whose link was slow for a while may catch up with
        its rate limit."""
        rate_limit, now = self._rate_limit(peer_id, payload), asyncio.get_running_loop().time()
        due = self._due.get(peer_id, now)
        if rate_limit is not None:
            self._due[peer_id] = due + num_bytes / rate_limit
        if self._is_trusted(peer_id):
            return due
        return max(due, now + self.allowance.take(peer_id, num_bytes, now))

    async def _read(self, order: _Order, payload: PayloadId) -> bytes | None:
        """Return the next message; None if its chunk was dropped before it was read, and is awaited again."""
        self._check_open()
        hash_ = order.dealing.take()
        try:
            return await self._cache.message(hash_)
        except PeerError as error:
            order.dealing.put_back(hash_)
            if error.reason != "missing" or not self._expects(payload):
                raise
            if self._cache.has(hash_):  # written in the meantime
                order.dealing.arrived(hash_)
            else:
                self._cache.wait_for(hash_, order.arrived)
            return None

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
    """One request: the chunks still to be dealt, and the waiting for those that are not here."""

    def __init__(self, cache: ChunkCache, chunks: Iterable[bytes], key: tuple[str, int]) -> None:
        self._cache, self.dealing, self.key = cache, Dealing(chunks), key
        self.woken = asyncio.Event()
        for hash_ in self.dealing.request:
            if cache.has(hash_):
                self.dealing.arrived(hash_)
            else:
                cache.wait_for(hash_, self.arrived)

    def end(self) -> None:
        for hash_ in self.dealing.remaining:
            self._cache.forget(hash_, self.arrived)

    def arrived(self, hash_: bytes) -> None:
        self.dealing.arrived(hash_)
        self.woken.set()

    async def something(self) -> None:
        """Wait for a chunk to send, for the end of the request, or for `reconsider`; no longer than ALIVE_SECONDS."""
        self.woken.clear()
        try:
            async with asyncio.timeout(ALIVE_SECONDS):
                await self.woken.wait()
        except TimeoutError:
            pass
