"""One broadcast, chunk by chunk, with the real machines of the origin and of each worker on modelled links.

Modelled: each node's uplink and downlink as a queue of fixed rate; a sender serves its receivers in turn, a chunk each,
and no receiver has more under way than a window that fills the link once (a slow one so holds up nobody); the latency
of each pair; connecting (two round trips); requests, routes and reports; signs of life; a process that is killed, one
that vanishes without a word, one that sends wrong bytes, members that can't be dialled.
Not modelled: single packets, so neither loss nor slow start nor congestion control, but as a factor on the rates
(`efficiency`); time for hashing, disks and processors; queues inside the network; traffic of others.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from broadcast_schemes import SCHEMES

from echo2.core.errors import InvariantError
from echo2.core.types import RUN_POLICY, PayloadId, SnapshotRef
from echo2.planning.sim.world import Actor, SimWorld
from echo2.weights.broadcast.decide import fetcher as do
from echo2.weights.broadcast.decide import fetcher as fev
from echo2.weights.broadcast.decide import origin_messages as bev
from echo2.weights.broadcast.decide import origin_messages as told
from echo2.weights.broadcast.decide.fetcher import Fetcher
from echo2.weights.broadcast.decide.origin import Broadcast, BroadcastOptions
from echo2.weights.broadcast.decide.origin_messages import ORIGIN

#: Seconds until the other end of a connection notices that a process is dead, or that its machine vanished.
KILL_NOTICED_SECONDS = 0.3
VANISHED_NOTICED_SECONDS = 4.0
#: Round trips before the first request on a new connection arrives (TCP, TLS).
CONNECT_ROUND_TRIPS = 2.0
#: Of a link's rate, what is payload under TCP/IP and TLS headers.
EFFICIENCY = 0.94
#: Virtual seconds after which a broadcast counts as stuck.
STUCK_SECONDS = 100_000.0
PAYLOAD = PayloadId(SnapshotRef(RUN_POLICY, 1, 1))


@dataclass(frozen=True, slots=True)
class NodeSpec:
    """One machine. `latency_seconds`: one way, to the middle of the network; rates in bytes per second. `trouble`:
    "killed", "vanished" or "lies" (from `trouble_at_seconds` on)."""

    up: float
    down: float
    latency_seconds: float = 0.025
    is_dialable: bool = True
    is_probed: bool = True
    joins_at_seconds: float = 0.0
    trouble: str = ""
    trouble_at_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class DisseminationSpec:
    """One payload to send to these workers."""

    workers: tuple[NodeSpec, ...]
    origin: NodeSpec
    num_bytes: int
    chunk_bytes: int
    scheme: str = "trees"
    fan_out: int = 8
    efficiency: float = EFFICIENCY


@dataclass(slots=True)
class Outcome:
    """`seconds`: from its joining until each worker had everything, None for the dead. `reports`: each source that was
    given up, as "when who whom why"."""

    seconds: list[float | None] = field(default_factory=list)
    origin_bytes: int = 0
    peer_bytes: int = 0
    wasted_bytes: int = 0
    num_events: int = 0
    num_routes: int = 0
    reports: list[str] = field(default_factory=list)
    suspects: list[str] = field(default_factory=list)

    @property
    def finished(self) -> list[float]:
        return sorted(seconds for seconds in self.seconds if seconds is not None)

    @property
    def last_seconds(self) -> float:
        return self.finished[-1] if self.finished else 0.0


@dataclass(slots=True)
class _Edge:
    """What one node still has to send to another: `wanted` all, `ready` what is here, `in_flight` bytes under way. A
    cancelled request is of an earlier epoch."""

    child: _Node
    wanted: dict[bytes, None] = field(default_factory=dict)
    ready: deque[bytes] = field(default_factory=deque)
    in_flight: int = 0
    epoch: int = 0
    asks_epoch: int = 0
    is_queued: bool = False


class _Node:
    """The origin (no fetcher) or a worker."""

    def __init__(self, name: str, spec: NodeSpec, efficiency: float) -> None:
        self.name, self.spec = name, spec
        self.up, self.down = spec.up * efficiency, spec.down * efficiency
        self.fetcher: Fetcher | None = None if name == ORIGIN else Fetcher(name)
        self.stored: set[bytes] = set()
        self.edges: dict[str, _Edge] = {}
        self.turn: deque[_Edge] = deque()
        self.is_sending = False
        self.down_free_at = 0.0
        self.met: set[str] = set()
        self.is_up = False
        self.is_lost = False
        self.lies = False
        self.done_at: float | None = None


class Network(Actor):
    """All that happens is an act on it: nodes that die do so by `is_up`, since the packets on their links go on."""

    def handle(self, event: object) -> None:
        assert callable(event)
        event()


class Dissemination:
    """The nodes, in a world whose only actor is the network between them."""

    def __init__(self, spec: DisseminationSpec) -> None:
        self.spec, self.world = spec, SimWorld(seed=0)
        self.network = Network(self.world, "network")
        self.network.starts()
        self.num_chunks = max(1, -(-spec.num_bytes // spec.chunk_bytes))
        self.chunks = tuple(index.to_bytes(4, "big") for index in range(self.num_chunks))
        self.outcome = Outcome()
        self.broadcast = Broadcast(
            BroadcastOptions(SCHEMES[spec.scheme], spec.fan_out, spec.origin.up * spec.efficiency)
        )
        self.origin = _Node(ORIGIN, spec.origin, spec.efficiency)
        self.origin.stored.update(self.chunks)
        self.origin.is_up = True
        self.workers = [_Node(f"w{at:05d}", worker, spec.efficiency) for at, worker in enumerate(spec.workers)]
        self.nodes = {node.name: node for node in (self.origin, *self.workers)}

    def run(self) -> Outcome:
        """Until every worker that lives has everything.

        Raises:
            InvariantError: a rule of the machines did not hold, or somebody never got everything.
        """
        joins: dict[float, list[_Node]] = {}
        for worker in self.workers:
            joins.setdefault(worker.spec.joins_at_seconds, []).append(worker)
            if worker.spec.trouble:
                self._after(worker.spec.trouble_at_seconds, self._strike, worker)
        for at, group in joins.items():
            self._after(at, self._join, group)
        while self.world.step():
            if self.now > STUCK_SECONDS:
                break
        self.outcome.num_events = self.world.num_events
        for worker in self.workers:
            if not worker.is_lost and worker.done_at is None:
                raise InvariantError(f"{worker.name} has {len(worker.stored)} of {self.num_chunks} chunks at the end")
            late = worker.spec.joins_at_seconds
            self.outcome.seconds.append(None if worker.done_at is None else worker.done_at - late)
        return self.outcome

    def _after(self, seconds: float, act: Callable[..., None], *arguments: Any) -> None:
        self.network.post(seconds, partial(act, *arguments))

    @property
    def now(self) -> float:
        return self.world.now

    def _latency(self, one: _Node, other: _Node) -> float:
        return one.spec.latency_seconds + other.spec.latency_seconds

    # ---- the origin's machine ----------------------------------------------------------------------------------------

    def _join(self, group: Sequence[_Node]) -> None:
        for node in group:
            node.is_up = not node.is_lost
            address = f"{node.name}:1" if node.spec.is_dialable else ""
            self._decide(bev.MemberJoined(node.name, address))
            if node.spec.is_probed:
                self._decide(bev.LinkMeasured(node.name, node.up, node.down))
            missing = frozenset(self.chunks)
            self._after(self._latency(node, self.origin), self._tell, node, self._wanted(missing))
        names = tuple(node.name for node in group)
        self._decide(bev.PayloadAssigned(PAYLOAD, names, self.num_chunks))

    def _wanted(self, missing: frozenset[bytes]) -> fev.PayloadWanted:
        return fev.PayloadWanted(PAYLOAD, self.chunks, missing)

    def _decide(self, event: bev.Event) -> None:
        for command in self.broadcast.handle(event, self.now):
            match command:
                case told.SetRoutes():
                    self.outcome.num_routes += 1
                    node = self.nodes[command.worker_id]
                    routes = fev.RoutesSet(command.payload, command.sources)
                    self._after(self._latency(node, self.origin), self._tell, node, routes)
                case told.NameSuspect():
                    self.outcome.suspects.append(command.worker_id)

    # ---- a worker's machine ------------------------------------------------------------------------------------------

    def _tell(self, node: _Node, event: fev.Event) -> None:
        if node.fetcher is None or not node.is_up:
            return
        for command in node.fetcher.handle(event, self.now):
            match command:
                case do.RequestChunks():
                    self._request(node, self.nodes[command.source], command.chunks)
                case do.CancelRequests():
                    source = self.nodes[command.source]
                    edge = source.edges.setdefault(node.name, _Edge(node))
                    edge.asks_epoch += 1
                    self._after(self._latency(node, source), self._cancelled, edge, edge.asks_epoch)
                case do.ReportSource():
                    self.outcome.reports.append(f"{self.now:.2f} {node.name} {command.source} {command.failure}")
                    report = bev.SourceFailed(node.name, command.payload, command.source, command.failure)
                    self._after(self._latency(node, self.origin), self._decide, report)
                case do.PayloadWhole():
                    self._whole(node, command.tallies)
                case do.WakeAt():
                    self._after(command.at - self.now, self._tick, node)

    def _whole(self, node: _Node, tallies: tuple[bev.Tally, ...]) -> None:
        if len(node.stored) != self.num_chunks:
            raise InvariantError(f"{node.name} believes to be whole with {len(node.stored)} chunks")
        node.done_at = self.now
        received = bev.PayloadReceived(node.name, PAYLOAD, tallies)
        self._after(self._latency(node, self.origin), self._decide, received)

    def _tick(self, node: _Node) -> None:
        if node.fetcher is None or not node.is_up:
            return
        for name, source in list(node.fetcher.sources.items()):
            if source.requested and self._is_waiting(self.nodes[name], node):
                self._tell(node, fev.SourceAlive(name))
        self._tell(node, fev.Tick())

    @staticmethod
    def _is_waiting(source: _Node, node: _Node) -> bool:
        edge = source.edges.get(node.name)
        return source.is_up and edge is not None and bool(edge.wanted) and not edge.ready and not edge.in_flight

    # ---- links -------------------------------------------------------------------------------------------------------

    def _request(self, node: _Node, source: _Node, chunks: tuple[bytes, ...]) -> None:
        seconds = self._latency(node, source)
        if source.name not in node.met:
            node.met.add(source.name)
            seconds *= 1.0 + 2 * CONNECT_ROUND_TRIPS
            if not node.spec.is_dialable or not source.spec.is_dialable:
                seconds += self._latency(source, self.origin)
        edge = source.edges.setdefault(node.name, _Edge(node))
        self._after(seconds, self._requested, source, edge, edge.asks_epoch, chunks)

    def _requested(self, source: _Node, edge: _Edge, epoch: int, chunks: tuple[bytes, ...]) -> None:
        if source.is_lost:
            if source.spec.trouble == "killed":
                self._after(self._latency(source, edge.child), self._broken, source, edge.child)
            return
        if epoch < edge.epoch:
            return
        for chunk in chunks:
            edge.wanted[chunk] = None
            if chunk in source.stored:
                edge.ready.append(chunk)
        self._queue_edge(source, edge)

    @staticmethod
    def _cancelled(edge: _Edge, epoch: int) -> None:
        edge.wanted, edge.ready, edge.epoch = {}, deque(), epoch

    def _window(self, source: _Node, edge: _Edge) -> float:
        """Bytes that may be under way: two chunks more than what fills the path once."""
        rate = min(source.up, edge.child.down)
        return 2 * self.spec.chunk_bytes + rate * 2 * self._latency(source, edge.child)

    def _queue_edge(self, source: _Node, edge: _Edge) -> None:
        if edge.ready and not edge.is_queued and edge.in_flight < self._window(source, edge):
            edge.is_queued = True
            source.turn.append(edge)
            if not source.is_sending:
                self._send_next(source)

    def _send_next(self, source: _Node) -> None:
        """The uplink is free: a chunk for the next in turn."""
        source.is_sending = False
        while source.turn and source.is_up:
            edge = source.turn.popleft()
            edge.is_queued = False
            while edge.ready and edge.ready[0] not in edge.wanted:
                edge.ready.popleft()
            if not edge.ready:
                continue
            chunk = edge.ready.popleft()
            del edge.wanted[chunk]
            edge.in_flight += self.spec.chunk_bytes
            source.is_sending = True
            seconds = self.spec.chunk_bytes / source.up
            self._after(seconds, self._send_next, source)
            self._after(seconds + self._latency(source, edge.child), self._arriving, source, edge, chunk)
            self._queue_edge(source, edge)
            return

    def _arriving(self, source: _Node, edge: _Edge, chunk: bytes) -> None:
        node = edge.child
        node.down_free_at = max(self.now, node.down_free_at) + self.spec.chunk_bytes / node.down
        # A link of the same rate behind the first one takes the chunk in as it comes, not after it has come.
        seconds = max(0.0, node.down_free_at - self.now - self.spec.chunk_bytes / max(source.up, node.down))
        self._after(seconds, self._arrived, source, edge, chunk)

    def _arrived(self, source: _Node, edge: _Edge, chunk: bytes) -> None:
        node = edge.child
        if not node.is_up:
            return  # and nothing is acknowledged: its sender stops when the window is full
        self._after(self._latency(source, node), self._acknowledged, source, edge)
        if source.lies:
            self._tell(node, fev.RequestFailed(source.name, "corrupt"))
            return
        if source.name == ORIGIN:
            self.outcome.origin_bytes += self.spec.chunk_bytes
        else:
            self.outcome.peer_bytes += self.spec.chunk_bytes
        if chunk in node.stored:
            self.outcome.wasted_bytes += self.spec.chunk_bytes
            return
        node.stored.add(chunk)
        for other in node.edges.values():
            if chunk in other.wanted:
                other.ready.append(chunk)
                self._queue_edge(node, other)
        self._tell(node, fev.ChunkStored(source.name, chunk, self.spec.chunk_bytes))

    def _acknowledged(self, source: _Node, edge: _Edge) -> None:
        edge.in_flight -= self.spec.chunk_bytes
        self._queue_edge(source, edge)

    # ---- troubles ----------------------------------------------------------------------------------------------------

    def _strike(self, node: _Node) -> None:
        if node.spec.trouble == "lies":
            node.lies = True
            return
        node.is_up, node.is_lost = False, True
        noticed = KILL_NOTICED_SECONDS if node.spec.trouble == "killed" else VANISHED_NOTICED_SECONDS
        self._after(noticed, self._decide, bev.MemberLeft(node.name, node.spec.trouble))
        for edge in node.edges.values():
            self._after(noticed + self._latency(node, edge.child), self._broken, node, edge.child)

    def _broken(self, source: _Node, node: _Node) -> None:
        known = node.fetcher.sources.get(source.name) if node.fetcher is not None else None
        if known is not None and known.requested:
            self._tell(node, fev.RequestFailed(source.name, "broken"))


def disseminate(spec: DisseminationSpec) -> Outcome:
    """Simulate one broadcast."""
    return Dissemination(spec).run()


def predict(
    num_workers: int,
    *,
    num_bytes: int,
    chunk_bytes: int,
    up: float,
    down: float,
    latency_seconds: float,
    origin_up: float | None = None,
    scheme: str = "trees",
    fan_out: int = 8,
    efficiency: float = EFFICIENCY,
    changes: Iterable[tuple[int, dict[str, Any]]] = (),
) -> Outcome:
    """Equal machines but for `changes` (number of the worker, fields of `NodeSpec`); `latency_seconds` is one way,
    between any two."""
    plain = NodeSpec(up, down, latency_seconds / 2)
    workers = [plain] * num_workers
    for at, fields in changes:
        workers[at] = replace(workers[at], **fields)
    origin = replace(plain, up=origin_up or up)
    return disseminate(DisseminationSpec(tuple(workers), origin, num_bytes, chunk_bytes, scheme, fan_out, efficiency))
