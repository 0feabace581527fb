"""A worker's connections to other workers, and to the origin: those it receives chunks from, and those it opens to send
chunks (`sources.py`), by peer.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable
from typing import Any

from echo2.core.background import Background
from echo2.core.errors import PeerError
from echo2.core.types import PayloadId
from echo2.transport import wire_pb2 as wire
from echo2.transport.base import Handlers, Network, Peer
from echo2.weights.broadcast.decide.origin_messages import ORIGIN
from echo2.weights.broadcast.serving import Server, decode_payload
from echo2.weights.broadcast.sources import AwaitedSource, Dial, DialledSource, Intake, Source

#: Maximum number of connections of each kind that stay open for reuse; the least recently used idle one is closed
#: first.
EDGES_MAX = 256


class Edges:
    """A worker's sources and dials, by peer. `num_connections`: to each new source, as `probe.py` decides. Sources stay
    open between payloads: the congestion window of a new connection takes seconds to grow."""

    def __init__(
        self, network: Network, intake: Intake, server: Server, on_error: Callable[[Exception], object]
    ) -> None:
        self._network, self._intake, self._server = network, intake, server
        self._dialled: dict[str, DialledSource] = {}
        self._awaited: dict[str, AwaitedSource] = {}
        self._dials: dict[str, Dial] = {}
        self._addresses: dict[str, str] = {}
        self._revoked: frozenset[str] = frozenset()
        self._closing = Background(on_error)
        self.num_connections, self._is_acquainted = 1, False

    def handlers(self) -> Handlers:
        """The methods that other workers may call."""
        return {"FetchChunks": self._server.serve, "AskWanted": self._ask_wanted, "GiveChunk": self._give_chunk}

    def check_not_revoked(self, peer_id: str) -> None:
        """Raises PeerError("revoked") if the head has revoked this peer."""
        if peer_id in self._revoked:
            raise PeerError("revoked", f"{peer_id} was revoked")

    # ---- receiving chunks ----------------------------------------------------------------------------------------

    def source(self, name: str) -> Source:
        """Return the source of this name, connected according to the newest routes."""
        address = self._addresses.get(name, "")
        if name != ORIGIN and not address:
            return self._awaited_source(name)
        old = self._dialled.get(name)
        if old is not None and old.address == address and (old.is_busy or old.num_connections == self.num_connections):
            self._dialled[name] = self._dialled.pop(name)
            return old
        if old is not None:
            self._close(old)
        open_link = self._network.to_head if name == ORIGIN else lambda: self._network.to_peer(name, address)
        links = [open_link() for _ in range(self.num_connections)]
        self._dialled[name] = DialledSource(name, address, self._intake, links)
        self._bound(self._dialled)
        return self._dialled[name]

    def _awaited_source(self, name: str) -> AwaitedSource:
        source = self._awaited.pop(name, None) or AwaitedSource(name, self._intake)
        self._awaited[name] = source
        self._bound(self._awaited)
        return source

    def set_routes(self, routes: wire.Routes) -> tuple[PayloadId, tuple[str, ...]]:
        """Store the source addresses of an order. Return (payload, the source of each stripe).

        Raises:
            PeerError: "malformed".
        """
        if any(number >= len(routes.sources) for number in routes.stripes) or not routes.stripes:
            raise PeerError("malformed", "a stripe has no source")
        for source in routes.sources:
            self._set_address(source)
        return decode_payload(routes.payload), tuple(routes.sources[number].peer_id for number in routes.stripes)

    def _set_address(self, source: wire.Source) -> None:
        """Set the address of a source. If it changed, fail and report the requests under way to the old address."""
        self._addresses[source.peer_id] = source.address
        old = self._dialled.get(source.peer_id)
        if old is not None and old.address != source.address:
            del self._dialled[source.peer_id]
            if old.is_busy:
                old.fail("broken")
            self._close(old)

    def acquaint(self, sources: Iterable[wire.Source]) -> None:
        """Connect to possible sources ahead of the first payload, and to the origin over every connection."""
        self._is_acquainted = True
        names = [ORIGIN] if ORIGIN in self._dialled else []
        for source in sources:
            self._set_address(source)
            names.append(source.peer_id)
        self._connect(names)

    def prepare(self, num_connections: int) -> None:
        """Set the number of connections per source, and connect to the origin. In a large fleet, whose head needs its
        descriptors, over one connection until more are needed."""
        self.num_connections = num_connections
        self._connect([ORIGIN, *self._dialled])

    def _connect(self, names: Iterable[str]) -> None:
        for name in dict.fromkeys(names):
            source = self.source(name)
            if isinstance(source, DialledSource):
                source.open(source.num_connections if self._is_acquainted else 1)

    # ---- sending chunks ------------------------------------------------------------------------------------------

    def dial(self, peer_id: str, address: str) -> None:
        """Dial a peer that wants chunks but can't dial this node, and send them."""
        old = self._dials.get(peer_id)
        if old is not None and old.address == address and not old.is_over:
            return
        if old is not None:
            self._close(old)
        link = self._network.to_peer(peer_id, address)
        peer = Peer(peer_id, "worker")
        self._dials[peer_id] = Dial(address, link, lambda request: self._server.serve(peer, request))
        self._bound(self._dials)

    def revoke(self, peer_ids: frozenset[str]) -> None:
        """Close all connections to these peers and refuse new ones. Replaces the earlier set."""
        self._revoked = peer_ids
        for name in peer_ids:
            for source in (self._dialled.pop(name, None), self._awaited.pop(name, None)):
                if source is not None:
                    source.fail("broken")
                    self._close(source)
            dial = self._dials.pop(name, None)
            if dial is not None:
                self._close(dial)

    def _ask_wanted(self, peer: Peer, request: wire.Empty) -> AsyncIterator[wire.ChunkRequest]:
        return self._awaited_source(peer.peer_id).attach()

    async def _give_chunk(self, peer: Peer, message: bytes) -> wire.Empty:
        source = self._awaited.get(peer.peer_id)
        if source is None:
            raise PeerError("unasked", "no chunks are wanted from this peer")
        await source.give(message)
        return wire.Empty()

    # ---- closing -------------------------------------------------------------------------------------------------

    def _bound(self, ends: dict[str, Any]) -> None:
        """Close idle connections above EDGES_MAX, except the newest. Busy ones stay: the routes bound their number."""
        idle = [name for name, end in ends.items() if not end.is_busy]
        for name in idle[: max(0, len(ends) - EDGES_MAX)]:
            if name != next(reversed(ends)):
                self._close(ends.pop(name))

    def _close(self, end: Source | Dial) -> None:
        self._closing.spawn(end.close())

    async def close(self) -> None:
        """Close every connection."""
        ends: dict[str, Any]
        for ends in (self._dialled, self._awaited, self._dials):
            for end in ends.values():
                self._close(end)
        await asyncio.gather(*self._closing)
