"""A worker's part in the broadcast: receives chunks from its assigned sources, stores them, relays them, and reports.

It drives `broadcast.decide.fetcher.Fetcher`: passes it events, and carries out its commands. Chunks are written on
disk threads; the rest runs on the event loop. While the head is away, news for it is queued and progress is dropped.

`WeightsReceiver` is what every machine that gets weights needs: chunks on disk, such a peer, and manifests that the
head has signed. Which weights it wants is its own affair: a worker the newest, a service's sampler those of a call.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from echo2.core.addresses import Addresses, host_and_port, split
from echo2.core.background import Background, close_all, spawn
from echo2.core.errors import LinkError, PeerError
from echo2.core.loop_thread import BlockingThreads
from echo2.core.retries import Retries
from echo2.core.types import Backoff, PayloadId, SnapshotRef
from echo2.transport import messages
from echo2.transport import wire_pb2 as wire
from echo2.transport.base import Link, Network
from echo2.transport.grpc_link import Membership
from echo2.transport.identity import verify_manifest
from echo2.weights.broadcast.decide import fetcher as do
from echo2.weights.broadcast.decide import fetcher as ev
from echo2.weights.broadcast.decide.fetcher import Fetcher
from echo2.weights.broadcast.decide.origin_messages import ORIGIN, Tally
from echo2.weights.broadcast.edges import Edges
from echo2.weights.broadcast.probe import NO_LINK, Rates, measure
from echo2.weights.broadcast.serving import ChunkCache, Server, encode_payload
from echo2.weights.format.manifest import Manifest
from echo2.weights.store.store import ChunkStore, check_chunk

CALL_SECONDS = 10.0
RETRY_SECONDS = 1.0
#: Maximum number of reports queued while the head is away; the oldest is dropped first.
NEWS_MAX = 1000
DISK_THREADS = 2
#: Maximum bytes of verified chunks waiting for the disk; above it, sources are not read.
UNWRITTEN_BYTES = 8 << 20
#: A write of fewer bytes than this first waits `GATHERING_SECONDS` for more chunks: handing chunks to a thread and back
#: costs more than writing one of 64 KiB.
WRITTEN_AT_ONCE_BYTES = 1 << 20
GATHERING_SECONDS = 0.01
PROGRESS_SECONDS = 1.0
#: First and longest pause before a measurement is tried again while the head measures another worker's link. The pause
#: doubles: each try costs both ends a new connection, and a thousand workers may wait for their turn.
BUSY_SECONDS = Backoff(0.2, 10.0, growth=1.25)
#: A peer that asks for a payload unknown to this node waits this long for the payload to be announced here.
EARLY_SECONDS = 5.0
#: Maximum number of payloads remembered as asked for before their announcement, or as no longer expected.
ASKED_MAX = 64
#: Uplink rate in bytes per second reported by a worker that does not relay, so that it becomes no worker's source.
LEAF_UP = 1.0
MANIFEST_SECONDS = 60.0

OnPayload: TypeAlias = Callable[[PayloadId], None]
OnError: TypeAlias = Callable[[BaseException], None]
#: Makes a machine's `WeightsReceiver`, given its last three arguments.
Receive: TypeAlias = "Callable[[OnPayload, OnPayload, OnError], WeightsReceiver]"


class Reports:
    """Sends reports one after the other, so that the origin receives them in order."""

    def __init__(self, link: Link, on_error: Callable[[Exception], object]) -> None:
        self._link = link
        self._news: deque[wire.FetchReport] = deque(maxlen=NEWS_MAX)
        self._is_connected = False
        self._sending: asyncio.Task[None] | None = None
        self._on_error = on_error

    def failed(self, payload: PayloadId, source: str, failure: str) -> None:
        """Report that a source was given up."""
        self._put(wire.FetchReport(payload=encode_payload(payload), failed_source=source, failure=failure))

    def whole(self, payload: PayloadId, num_bytes: int, tallies: Sequence[Tally]) -> None:
        """Report that every chunk is stored, and how much each source sent."""
        tally_messages = [wire.Tally(source=t.source, num_bytes=t.num_bytes, seconds=t.seconds) for t in tallies]
        report = wire.FetchReport(
            payload=encode_payload(payload),
            bytes_stored=num_bytes,
            bytes_total=num_bytes,
            whole=True,
            tallies=tally_messages,
        )
        self._put(report)

    def measured(self, up: float, down: float) -> None:
        """Report the measured rates of the worker's own link."""
        self._put(wire.FetchReport(up=up, down=down))

    def progress(self, payload: PayloadId, bytes_stored: int, bytes_total: int) -> None:
        """Report the progress of a fetch. Dropped if other reports are queued."""
        if self._is_connected and not self._news:
            encoded = encode_payload(payload)
            self._put(wire.FetchReport(payload=encoded, bytes_stored=bytes_stored, bytes_total=bytes_total))

    def connected(self) -> None:
        """Send the queued reports: the head is connected."""
        self._is_connected = True
        self._start()

    def disconnected(self) -> None:
        """Queue reports from now on: the head is away."""
        self._is_connected = False

    def _put(self, report: wire.FetchReport) -> None:
        self._news.append(report)
        self._start()

    def _start(self) -> None:
        if self._is_connected and (self._sending is None or self._sending.done()):
            self._sending = spawn(self._send(), self._on_error)

    async def _send(self) -> None:
        while self._news and self._is_connected:
            report = self._news[0]
            try:
                await self._link.call("ReportFetch", report, CALL_SECONDS)
            except PeerError:
                pass  # the head refuses this report; sending it again would not help
            except LinkError:
                await asyncio.sleep(RETRY_SECONDS)
                continue
            if self._news and self._news[0] is report:
                self._news.popleft()

    async def close(self) -> None:
        """Stop sending; queued reports are dropped."""
        self._is_connected = False
        if self._sending is not None:
            self._sending.cancel()
            await asyncio.gather(self._sending, return_exceptions=True)


class _Fetching:
    """The payload being fetched, and how much of it is stored."""

    def __init__(self, manifest: Manifest, missing: tuple[bytes, ...]) -> None:
        sizes = manifest.chunk_bytes
        self.payload = manifest.payload
        self.bytes_total = sum(sizes.values())
        self.bytes_stored = self.bytes_total - sum(sizes[hash_] for hash_ in missing)
        self._missing = set(missing)

    def stored(self, hash_: bytes, num_bytes: int) -> None:
        if hash_ in self._missing:
            self._missing.discard(hash_)
            self.bytes_stored += num_bytes


class PeerNode:
    """Connects a worker's fetcher with the network and the disk.

    on_whole(payload)   every chunk of the payload is stored
    on_gone(payload)    no source has the payload any more
    on_error(error)     a bug, or a full disk
    relays              whether this worker sends chunks to others
    """

    def __init__(
        self,
        peer_id: str,
        store: ChunkStore,
        network: Network,
        link: Link,
        *,
        on_whole: OnPayload,
        on_gone: OnPayload,
        on_error: OnError,
        listen: tuple[str, int] | None = ("0.0.0.0", 0),
        relays: bool = True,
    ) -> None:
        self._store, self._network = store, network
        self._on_whole, self._on_gone, self._on_error = on_whole, on_gone, on_error
        self._listen, self._relays = listen, relays
        self._disk = BlockingThreads(DISK_THREADS, "chunks")
        self._fetcher = Fetcher(peer_id)
        self._cache = ChunkCache(store, self._disk)
        self._server = Server(self._cache, self._expects)
        self._server.allowance.add(payload_bytes=max((each.content_bytes for each in store.manifests()), default=0))
        self._edges = Edges(network, self, self._server, on_error)
        self._reports = Reports(link, on_error)
        self._fetching: _Fetching | None = None
        self._unwritten: list[tuple[str, bytes, memoryview]] = []  # (source, hash, bytes) of chunks
        self._unwritten_bytes = 0  # of these chunks, and of those being written
        self._wrote, self._is_writing = asyncio.Event(), False
        self._asked_since: dict[PayloadId, float] = {}
        self._wake: asyncio.TimerHandle | None = None
        self._chores = Background(on_error)
        self._measuring: asyncio.Task[None] | None = None
        self._is_closed = False
        self.rates: Rates | None = None
        self.bytes_received = 0
        self.bytes_from_peers = 0
        self._carry: dict[type[Any], Callable[[Any], None]] = {
            do.RequestChunks: lambda c: self._edges.source(c.source).ask(c.payload, c.chunks),
            do.CancelRequests: lambda c: self._edges.source(c.source).cancel(),
            do.ReportSource: lambda c: self._reports.failed(c.payload, c.source, c.failure),
            do.PayloadWhole: self._whole,
            do.PayloadGone: self._gone,
            do.WakeAt: self._wake_at,
        }

    # ---- called by the worker ------------------------------------------------------------------------------------

    async def start(self) -> int:
        """Listen for other workers. Return the port, 0 if this worker does not listen.

        Raises:
            UserError: the address or port is not available.
        """
        if self._listen is None:
            return 0
        return await self._network.listen(*self._listen, self._edges.handlers(), self._edges.check_not_revoked)

    def connected(self) -> None:
        """Handle a connection to the head, the first one or a new one."""
        self._reports.connected()
        self._happen(ev.OriginBack())
        self._tell_rates()  # a restarted head does not know them
        if self.rates is None and self._measuring is None:
            self._measuring = self._chores.spawn(self._measure())

    def disconnected(self) -> None:
        """Handle the loss of the head. Transfers between peers continue."""
        self._reports.disconnected()
        self._happen(ev.OriginLost())

    def fetch(self, manifest: Manifest) -> None:
        """Fetch this payload instead of the one being fetched. Stored chunks that both share are kept."""
        missing = self._store.missing(manifest)
        if self._fetching is not None:
            self._asked_since[self._fetching.payload] = -math.inf
        self._fetching = _Fetching(manifest, missing)
        self._server.allowance.add(payload_bytes=self._fetching.bytes_total)
        self._chores.spawn(self._report_progress(self._fetching))
        self._happen(ev.PayloadWanted(manifest.payload, manifest.hashes, frozenset(missing)))
        self._server.reconsider()

    def stop_fetching(self, payload: PayloadId) -> None:
        """Stop fetching a payload that is no longer wanted."""
        if self._fetching is not None and self._fetching.payload == payload:
            self._fetching = None
        self._asked_since[payload] = -math.inf
        self._happen(ev.PayloadUnwanted(payload))
        self._server.reconsider()

    def obey(self, order: wire.Order) -> bool:
        """Carry out an order of the head if it concerns the broadcast. Return whether it does."""
        kind = order.WhichOneof("order")
        if kind == "routes" and not order.routes.HasField("payload"):
            self._edges.acquaint(order.routes.sources)
        elif kind == "routes":
            self._happen(ev.RoutesSet(*self._edges.set_routes(order.routes)))
        elif kind == "dial" and self._relays:
            self._edges.dial(order.dial.peer_id, order.dial.address)
        elif kind == "revoked_peers":
            self._edges.revoke(frozenset(order.revoked_peers.peer_ids))
        return kind in ("routes", "dial", "revoked_peers")

    @property
    def progress(self) -> tuple[PayloadId, int, int] | None:
        """(payload, bytes stored, bytes in total) of the payload being fetched, or None."""
        now = self._fetching
        return None if now is None else (now.payload, now.bytes_stored, now.bytes_total)

    @property
    def bytes_sent(self) -> int:
        """Bytes of messages sent to other workers."""
        return self._server.bytes_sent

    async def close(self) -> None:
        """End all transfers, tasks and connections, and wait until they have ended."""
        self._is_closed = True
        self._wrote.set()  # release calls of `keep` that wait for the disk
        self._server.close()
        if self._wake is not None:
            self._wake.cancel()
        parts = (self._chores, self._reports, self._edges, self._network, self._disk)
        await close_all(*(part.close for part in parts))

    # ---- events and commands -------------------------------------------------------------------------------------

    def _happen(self, event: ev.Event) -> None:
        if self._is_closed:
            return
        try:
            for command in self._fetcher.handle(event, time.monotonic()):
                self._carry[type(command)](command)
        except Exception as error:  # timers and tasks call this too; their exceptions would only be logged
            self._on_error(error)

    def _wake_at(self, command: do.WakeAt) -> None:
        if self._wake is not None:
            self._wake.cancel()
        delay = max(0.0, command.at - time.monotonic())
        self._wake = asyncio.get_running_loop().call_later(delay, self._happen, ev.Tick())

    def _whole(self, command: do.PayloadWhole) -> None:
        if self._fetching is not None and self._fetching.payload == command.payload:
            self._reports.whole(command.payload, self._fetching.bytes_total, command.tallies)
            self._fetching = None
            self._asked_since[command.payload] = -math.inf  # no further chunks of this payload are expected
        self._on_whole(command.payload)

    def _gone(self, command: do.PayloadGone) -> None:
        self.stop_fetching(command.payload)
        self._on_gone(command.payload)

    # ---- storing and relaying chunks -----------------------------------------------------------------------------

    async def keep(self, source: str, hash_: bytes, message: bytes, data: memoryview) -> None:
        """Verify a chunk that a source sent, and relay it. A thread stores it later, batched with other chunks, even if
        the request for it is cancelled.

        Raises:
            PeerError: "corrupt" or "oversized".
        """
        check_chunk(hash_, data)  # on the event loop: a round trip to a thread takes longer than the check
        while self._unwritten_bytes > UNWRITTEN_BYTES and not self._is_closed:
            await self._wrote.wait()
        if self._is_closed:
            return
        self._unwritten.append((source, hash_, data))
        self._unwritten_bytes += len(data)
        self._cache.arrived(hash_, message)  # the cache holds more bytes than may be unwritten
        if not self._is_writing:
            self._is_writing = True
            self._chores.spawn(self._write())

    async def _write(self) -> None:
        """Write the unwritten chunks, in batches gathered over `GATHERING_SECONDS`."""
        while self._unwritten:
            if self._unwritten_bytes < WRITTEN_AT_ONCE_BYTES:
                await asyncio.sleep(GATHERING_SECONDS)
            batch, self._unwritten = self._unwritten, []
            chunks = [(hash_, data) for _, hash_, data in batch]
            try:
                await self._disk.run(self._store.put_checked, chunks)
            except Exception as error:  # the disk is full, or a bug
                if not self._is_closed:
                    self._on_error(error)
                batch.clear()
            self._unwritten_bytes -= sum(len(data) for _, data in chunks)
            self._wrote.set()
            self._wrote = asyncio.Event()
            for source, hash_, data in batch:
                self._cache.stored(hash_)
                self._stored(source, hash_, len(data))
        self._is_writing = False

    def _stored(self, source: str, hash_: bytes, num_bytes: int) -> None:
        self.bytes_received += num_bytes
        self.bytes_from_peers += num_bytes if source != ORIGIN else 0
        self._server.allowance.add(num_new_bytes=num_bytes)
        if self._fetching is not None:
            self._fetching.stored(hash_, num_bytes)
        self._happen(ev.ChunkStored(source, hash_, num_bytes))

    def alive(self, source: str) -> None:
        """See `Intake.alive`."""
        self._happen(ev.SourceAlive(source))

    def failed(self, source: str, reason: str) -> None:
        """See `Intake.failed`."""
        self._happen(ev.RequestFailed(source, reason))

    def _expects(self, payload: PayloadId) -> bool:
        """Whether missing chunks of the payload may still arrive."""
        if self._fetching is not None and self._fetching.payload == payload:
            return True
        now = time.monotonic()
        since = self._asked_since.setdefault(payload, now)
        while len(self._asked_since) > ASKED_MAX:
            del self._asked_since[next(iter(self._asked_since))]
        return now - since < EARLY_SECONDS

    async def _report_progress(self, fetching: _Fetching) -> None:
        reported = -1
        while self._fetching is fetching:
            if fetching.bytes_stored != reported:
                reported = fetching.bytes_stored
                self._reports.progress(fetching.payload, reported, fetching.bytes_total)
            await asyncio.sleep(PROGRESS_SECONDS)

    def _tell_rates(self) -> None:
        down = self.rates.down if self.rates is not None else 0.0
        if not self._relays:
            self._reports.measured(LEAF_UP, down)
        elif self.rates is not None:
            self._reports.measured(self.rates.up, down)

    def _know(self, rates: Rates) -> None:
        self.rates = rates
        self._edges.prepare(rates.num_connections)
        self._tell_rates()

    async def _measure(self) -> None:
        retries = Retries(BUSY_SECONDS, spread=0.5)
        while self.rates is None:
            try:
                self._know(await measure(self._network.to_head))
            except LinkError:
                break  # measured when the head is back; until then rates are estimated from fetches
            except PeerError as error:
                if error.reason == "no_link":
                    self._know(NO_LINK)
                if error.reason != "busy":
                    break
                await retries.pause()  # another worker's turn
        self._measuring = None


class WeightsReceiver:
    """`store`: the chunks in `directory`; `node`: the machine's part in the broadcast, which calls the `on_*`. It
    listens for other machines on `listen` if it `relays`, by default on a free port: on all interfaces, or on loopback
    if the head is on this machine.
    """

    def __init__(
        self,
        member: Membership,
        link: Link,
        directory: Path,
        listen: str,
        relays: bool,
        on_whole: OnPayload,
        on_gone: OnPayload,
        on_error: OnError,
    ) -> None:
        """Raises: UserError, `listen` is not HOST:PORT."""
        self._link, self._ca_pem = link, member.credentials.ca_pem
        address = listen_address(listen, relays, member.head)
        self.store = ChunkStore(directory / "snapshots")
        self.node = PeerNode(
            member.peer_id,
            self.store,
            member.network(),
            link,
            on_whole=on_whole,
            on_gone=on_gone,
            on_error=on_error,
            listen=address,
            relays=relays,
        )

    def manifest_in(self, notice: wire.SnapshotNotice) -> Manifest:
        """Return an announced manifest. Raises PeerError if it is invalid or not signed by the head."""
        verify_manifest(self._ca_pem, notice.manifest, notice.signature)
        return Manifest.from_wire(notice.manifest)

    async def ask(self, ref: SnapshotRef, base: SnapshotRef | None = None) -> Manifest:
        """Ask the head for a payload of `ref`, preferably a delta from `base`.

        Raises:
            LinkError: the head can't be reached.
            PeerError: "unknown_snapshot", it has none; or it does not know this machine, or the manifest is invalid.
        """
        over = None if base is None else messages.encode_ref(base)
        request = wire.ManifestRequest(policy=ref.policy, lineage=ref.lineage, version=ref.version, base=over)
        return self.manifest_in(await self._link.call("FetchManifest", request, MANIFEST_SECONDS))


def listen_address(listen: str, relays: bool, head: Addresses) -> tuple[str, int] | None:
    """Return the (host, port) to listen on for other machines, or None not to listen. Raises as `WeightsReceiver`."""
    if not relays:
        return None
    if not listen:
        return (split(head.current)[0] if head.are_loopback else "0.0.0.0", 0)
    return host_and_port(listen, "--listen", "0.0.0.0:7342")
