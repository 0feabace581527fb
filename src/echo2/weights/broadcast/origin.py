"""The head's part in the broadcast: serves chunks, and carries out what `broadcast.decide.origin.Broadcast` decides.

It also collects the inputs of the plan: which workers can be dialled (by dialling back), and the rates of each worker's
link (by answering probes, one worker at a time).
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from echo2.core.addresses import PORT_MAX, is_loopback, join, split
from echo2.core.background import Background
from echo2.core.errors import LinkError, PeerError
from echo2.core.loop_thread import BlockingThreads
from echo2.core.types import PayloadId, SnapshotRef
from echo2.transport import message_bytes
from echo2.transport import wire_pb2 as wire
from echo2.transport.base import Handler, Link, Peer
from echo2.transport.limits import NAME_CHARS_MAX, NUMBER_MAX
from echo2.weights.broadcast.decide import origin_messages as do
from echo2.weights.broadcast.decide import origin_messages as ev
from echo2.weights.broadcast.decide.origin import Broadcast, BroadcastOptions
from echo2.weights.broadcast.probe import DONE, FILLER, PIECE_BYTES, PROBE_BYTES
from echo2.weights.broadcast.serving import ChunkCache, Server, decode_payload, encode_payload
from echo2.weights.format.manifest import Manifest
from echo2.weights.store.store import ChunkStore

log = logging.getLogger(__name__)

DISK_THREADS = 4
#: Timeout of one try to dial a worker back, and the number of tries.
DIAL_BACK_SECONDS = 3.0
DIAL_BACK_TRIES = 4
#: A probing worker has the head's link to itself until it sends DONE, or has been silent for this long.
PROBE_SLOT_SECONDS = 1.5
#: Maximum length of a worker's probing turn: several times that of an honest measurement.
PROBE_SECONDS_MAX = 30.0
#: Up to this number of workers, all are connected with each other as they join.
ACQUAINTED_MAX = 17
#: Maximum number of worker addresses kept, including those of workers that left.
ADDRESSES_MAX = 10_000
#: Maximum number of sources in one report.
TALLIES_MAX = 10_000
#: Maximum number of payloads in `OriginNode.finished`.
FINISHED_MAX = 64
HOST_CHARS_MAX = 253


@dataclass(frozen=True, slots=True)
class Progress:
    """How much of a payload a worker has stored, as reported by the worker."""

    payload: PayloadId
    bytes_stored: int
    bytes_total: int


class OriginNode:
    """Connects the broadcast's state machine with the head and with the workers that fetch.

    order(worker_id, order)     sends an order to an attending worker
    dial(worker_id, address)    opens a link to a worker as a server
    on_error(error)             is called after an unexpected exception
    now()                       returns monotonic seconds
    """

    def __init__(
        self,
        store: ChunkStore,
        order: Callable[[str, wire.Order], None],
        dial: Callable[[str, str], Link],
        on_error: Callable[[BaseException], None],
        now: Callable[[], float] = time.monotonic,
        options: BroadcastOptions | None = None,
    ) -> None:
        self._order, self._dial, self._on_error, self._now = order, dial, on_error, now
        self._machine = Broadcast(options or BroadcastOptions())
        self._disk = BlockingThreads(DISK_THREADS, "origin")
        self._cache = ChunkCache(store, self._disk)
        self._server = Server(self._cache, lambda payload: False, self._machine.rate_limit, self._is_own)
        self._members: dict[str, object] = {}
        self._addresses: dict[str, str] = {}
        self._hosts: dict[str, str] = {}
        self._tickets: dict[str, str] = {}
        self._progress: dict[str, Progress] = {}
        self._prober, self._probe_began, self._probe_until = "", 0.0, 0.0
        self._dialling: dict[str, asyncio.Task[None]] = {}
        self._chores = Background(on_error)
        self._is_closed = False
        self.finished: dict[PayloadId, set[str]] = {}
        self.suspects: dict[str, str] = {}
        self.sources: dict[str, list[str]] = {}  # worker -> its sources of the newest weights
        self.peer_bytes = 0
        self._carry: dict[type[Any], Callable[[Any], None]] = {
            do.SetRoutes: self._set_routes,
            do.DialPeer: self._dial_peer,
            do.NameSuspect: self._name_suspect,
        }

    # ---- called by the head --------------------------------------------------------------------------------------

    def handlers(self) -> dict[str, Handler]:
        """The methods that workers may call."""
        return {
            "FetchChunks": self._server.serve,
            "ReportFetch": self._report_fetch,
            "Probe": self._probe,
            "PutProbe": self._put_probe,
        }

    def joined(self, worker_id: str, hello: wire.WorkerHello, host: str, ticket: str = "") -> None:
        """Add a worker that attends from `host`; dial it back in the background. `ticket`: "" unless a stranger's."""
        self._members[worker_id], self._tickets[worker_id] = hello, ticket
        self._hosts[worker_id] = host
        address = of_worker(hello, host)
        if self._addresses.get(worker_id) != address:  # equal: the worker only reconnected
            self._addresses.pop(worker_id, None)
        old_address = self._addresses.get(worker_id, "")
        self._happen(ev.MemberJoined(worker_id, old_address, reach(old_address or host), ticket))
        if worker_id in self._dialling:
            self._dialling.pop(worker_id).cancel()  # at most one dial-back per worker, however often it joins
        if address:
            self._dialling[worker_id] = self._chores.spawn(self._dial_back(worker_id, hello, address))

    def stored(self, hash_: bytes, data: bytes) -> None:
        """Keep a verified chunk in memory, from where it is served without reading it from disk."""
        self._cache.arrived(hash_, message_bytes.pack(hash_, data))
        self._server.allowance.add(num_new_bytes=len(data))

    def left(self, worker_id: str, reason: str) -> None:
        """Remove a worker that no longer attends."""
        dialling = self._dialling.pop(worker_id, None)
        if dialling is not None:
            dialling.cancel()
        if self._members.pop(worker_id, None) is not None:
            self._progress.pop(worker_id, None)
            self.sources.pop(worker_id, None)
            self._hosts.pop(worker_id, None)
            self._tickets.pop(worker_id, None)
            self._happen(ev.MemberLeft(worker_id, reason))

    def assign(self, payload: PayloadId, worker_ids: Iterable[str], manifest: Manifest) -> None:
        """Send this stored payload to these workers."""
        num_bytes, ids = sum(manifest.chunk_bytes.values()), tuple(worker_ids)
        self._server.allowance.add(payload_bytes=num_bytes)
        self.finished.setdefault(payload, set())
        while len(self.finished) > FINISHED_MAX:
            del self.finished[next(iter(self.finished))]
        for worker_id in ids:
            self._progress[worker_id] = Progress(payload, 0, num_bytes)
        self._happen(ev.PayloadAssigned(payload, ids, len(manifest.chunk_bytes)))

    def has_installed(self, worker_id: str, ref: SnapshotRef, base_model: SnapshotRef | None = None) -> None:
        """Record that a worker has installed `ref`, over `base_model` if it is an adapter."""
        if worker_id in self._members:
            base = None if base_model is None else PayloadId(base_model)
            self._happen(ev.SnapshotHeld(worker_id, PayloadId(ref), base))

    def dropped(self, payload: PayloadId) -> None:
        """Record that the origin no longer stores this payload."""
        self._happen(ev.PayloadDropped(payload))

    def revoked(self, peer_ids: Iterable[str]) -> None:
        """Send all workers the complete list of revoked peers."""
        order = wire.Order(revoked_peers=wire.RevokedPeers(peer_ids=sorted(peer_ids)))
        for worker_id in self._members:
            self._order(worker_id, order)

    def progress(self) -> Mapping[str, Progress]:
        """What each worker is fetching, or fetched last."""
        return self._progress

    def address_of(self, worker_id: str) -> str:
        """Return the address of a worker; "" if it cannot be dialled, or has not been dialled back yet."""
        return self._addresses.get(worker_id, "") if worker_id in self._members else ""

    @property
    def origin_bytes(self) -> int:
        """Bytes sent by the head. `peer_bytes`: bytes that peers sent each other, as reported by the receivers."""
        return self._server.bytes_sent

    async def close(self) -> None:
        """Cancel all transfers and tasks, and wait until they have ended."""
        self._is_closed = True
        self._server.close()
        await self._chores.close()
        await self._disk.close()

    # ---- events and commands -------------------------------------------------------------------------------------

    def _happen(self, event: ev.Event) -> None:
        if self._is_closed:
            return
        try:
            for command in self._machine.handle(event, self._now()):
                self._carry[type(command)](command)
        except Exception as error:  # timers call this too; their exceptions would only be logged
            log.exception("the broadcast failed")
            self._on_error(error)

    def _set_routes(self, command: do.SetRoutes) -> None:
        sources = list(dict.fromkeys(command.sources))
        self.sources[command.worker_id] = sources
        number = {source: index for index, source in enumerate(sources)}
        routes = wire.Routes(
            payload=encode_payload(command.payload),
            sources=[wire.Source(peer_id=source, address=command.addresses.get(source, "")) for source in sources],
            stripes=[number[source] for source in command.sources],
        )
        self._order(command.worker_id, wire.Order(routes=routes))

    def _dial_peer(self, command: do.DialPeer) -> None:
        dial = wire.DialPeer(peer_id=command.peer_id, address=command.address)
        self._order(command.worker_id, wire.Order(dial=dial))

    def _name_suspect(self, command: do.NameSuspect) -> None:
        self.suspects[command.worker_id] = command.reason
        log.warning("%s is suspected: %s", command.worker_id, command.reason)

    async def _dial_back(self, worker_id: str, hello: wire.WorkerHello, address: str) -> None:
        link = self._dial(worker_id, address)
        try:
            await _answer(link)
        except LinkError as error:
            log.info("%s can't be dialled: %s", worker_id, error)
            if self._members.get(worker_id) is hello and self._addresses.pop(worker_id, ""):
                self._happen(ev.MemberJoined(worker_id, "", reach(address), self._tickets[worker_id]))
            return
        finally:
            await link.close()
        if self._members.get(worker_id) is hello:
            while len(self._addresses) >= ADDRESSES_MAX:
                del self._addresses[next(iter(self._addresses))]
            self._addresses[worker_id] = address
            self._happen(ev.MemberJoined(worker_id, address, reach(address), self._tickets[worker_id]))
            self._acquaint(worker_id)

    def _acquaint(self, worker_id: str) -> None:
        """Connect a new worker with all others ahead of the first payload, as long as there are few workers: they are
        then certain to exchange chunks."""
        if len(self._members) > ACQUAINTED_MAX:
            return
        sources = {key: wire.Source(peer_id=key, address=self.address_of(key)) for key in self._members}
        sources = {key: source for key, source in sources.items() if source.address}
        own = sources.pop(worker_id)
        self._order(worker_id, wire.Order(routes=wire.Routes(sources=sources.values())))
        for other in self._members:
            if other != worker_id:
                self._order(other, wire.Order(routes=wire.Routes(sources=[own])))

    # ---- called by workers ---------------------------------------------------------------------------------------

    async def _report_fetch(self, peer: Peer, report: wire.FetchReport) -> wire.Empty:
        worker_id = peer.peer_id
        if worker_id not in self._members:
            raise PeerError("unknown_worker", f"{worker_id} does not attend; attend first")
        if not report.HasField("payload"):
            self._happen(ev.LinkMeasured(worker_id, _rate(report.up), _rate(report.down)))
            return wire.Empty()
        payload = decode_payload(report.payload)
        if report.failure:
            if report.failure not in ev.SOURCE_FAILURES or len(report.failed_source) > NAME_CHARS_MAX:
                raise PeerError("malformed", "a failure of a kind that is not known")
            self._happen(ev.SourceFailed(worker_id, payload, report.failed_source, report.failure))
            return wire.Empty()
        if report.bytes_stored > report.bytes_total or report.bytes_total > NUMBER_MAX:
            raise PeerError("malformed", f"{report.bytes_stored} of {report.bytes_total} bytes")
        self._progress[worker_id] = Progress(payload, report.bytes_stored, report.bytes_total)
        if report.whole:
            tallies = _tallies(report)
            finished = self.finished.get(payload, {worker_id})
            if worker_id not in finished:  # count each worker once per payload, and assigned payloads only
                self.peer_bytes += sum(tally.num_bytes for tally in tallies if tally.source != do.ORIGIN)
                finished.add(worker_id)
            self._happen(ev.PayloadReceived(worker_id, payload, tallies))
        return wire.Empty()

    async def _probe(self, peer: Peer, request: wire.ProbeRequest) -> AsyncGenerator[bytes, None]:
        for _ in range(math.ceil(min(request.num_bytes, PROBE_BYTES) / PIECE_BYTES)):
            self._take_probe_slot(peer.peer_id)
            yield FILLER

    async def _put_probe(self, peer: Peer, message: bytes) -> wire.Empty:
        self._take_probe_slot(peer.peer_id)
        if message == DONE:
            self._probe_until = self._now()
        return wire.Empty()

    def _is_own(self, worker_id: str) -> bool:
        """Whether a worker is a machine of the run's owner, and attends."""
        return self._tickets.get(worker_id) == ""

    def _take_probe_slot(self, worker_id: str) -> None:
        if reach(self._hosts.get(worker_id, "")) == ev.ONE_MACHINE:
            raise PeerError("no_link", f"{worker_id} is on this machine")
        now = self._now()
        if now >= self._probe_until:
            if self._server.is_busy:
                raise PeerError("busy", "weights are on their way, and share the link")
            self._prober, self._probe_began = worker_id, now
        elif worker_id != self._prober:
            raise PeerError("busy", "another worker measures its link")
        elif now - self._probe_began >= PROBE_SECONDS_MAX:
            raise PeerError("overlong", f"{worker_id} has measured for {PROBE_SECONDS_MAX:.0f} s")
        self._probe_until = now + PROBE_SLOT_SECONDS


def of_worker(hello: wire.WorkerHello, host: str) -> str:
    """Return the address "host:port" of a worker that connects from `host`; "" if it does not listen, or advertises an
    invalid address."""
    if not 0 < hello.listen_port <= PORT_MAX:
        return ""
    if not hello.advertise:
        return _joined(host, hello.listen_port)
    advertised, port = split(hello.advertise)
    return _joined(advertised, port or hello.listen_port)


def reach(address: str) -> str:
    """Return `MemberJoined.reach` for an address: ONE_MACHINE for the loopback interface, else ""."""
    return ev.ONE_MACHINE if is_loopback(split(address)[0]) else ""


def _joined(host: str, port: int) -> str:
    if not host or len(host) > HOST_CHARS_MAX or not host.isascii() or not host.isprintable() or set(host) & set(" []"):
        return ""
    return join(host, port)


async def _answer(link: Link) -> None:
    """Return when the worker answers. Raises LinkError after `DIAL_BACK_TRIES`: its server may still be starting."""
    for tries_left in reversed(range(DIAL_BACK_TRIES)):
        try:
            await link.call("GiveChunk", message_bytes.ALIVE, DIAL_BACK_SECONDS)
            return
        except PeerError:
            return  # a refusal is an answer too
        except LinkError:
            if not tries_left:
                raise


def _rate(value: float) -> float | None:
    """Return a reported rate in bytes per second, or None if it is implausible."""
    return value if 1.0 <= value <= 1e12 else None


def _tallies(report: wire.FetchReport) -> tuple[ev.Tally, ...]:
    if len(report.tallies) > TALLIES_MAX:
        raise PeerError("oversized", f"{len(report.tallies)} sources; {TALLIES_MAX} allowed")
    tallies = tuple(ev.Tally(each.source[:NAME_CHARS_MAX], each.num_bytes, each.seconds) for each in report.tallies)
    if any(not 0 <= tally.seconds < math.inf for tally in tallies):
        raise PeerError("malformed", "seconds are not a number >= 0")
    if sum(tally.num_bytes for tally in tallies) > report.bytes_total:
        raise PeerError("malformed", "more bytes than the payload has")
    return tallies
