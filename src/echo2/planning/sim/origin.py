"""Snapshots in a simulation. At the head: their payloads, and the real state machine that routes them. At a worker: the
real fetcher, and chunks from the head and from other workers, in memory.

A chunk's name is a hash of its data. Its data holds the digest of the weights that it makes, and for a delta the digest
of the base. So a worker that applies a delta to the wrong weights gets a wrong digest, which its checks detect.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache

from echo2.core.decide.machine import Event
from echo2.core.errors import InvariantError
from echo2.core.types import RUN_POLICY, PayloadId, SnapshotRef
from echo2.planning.sim.report import History
from echo2.planning.sim.scenario import Scenario, WorkersSpec
from echo2.planning.sim.world import Actor, PeerAsked, PeerBroke, PeerGave, SimNetwork, SimWorld
from echo2.weights.broadcast.decide import fetcher as fev
from echo2.weights.broadcast.decide import origin_messages as bev
from echo2.weights.broadcast.decide.fetcher import Fetcher
from echo2.weights.broadcast.decide.origin import Broadcast, BroadcastOptions
from echo2.weights.broadcast.decide.origin_messages import ORIGIN
from echo2.weights.broadcast.decide.routes import plan_routes
from echo2.worker.decide import messages as wev

DIGEST_BYTES = 32
#: The whole content has this many times the chunks of a delta.
DELTA_SHARE = 8
#: Chance, times `delta_chance`, that the head announces a delta on the newest older version, whatever the worker has:
#: the head's knowledge may be outdated.
STALE_CHANCE = 0.2
#: Chunks under way from one source at a time.
WINDOW = 4


@dataclass(frozen=True, slots=True)
class SimManifest:
    """A payload's chunks, and the digest of the weights that it makes. `base_model`: of weights that are an adapter."""

    payload: PayloadId
    chunks: tuple[bytes, ...]
    digest: bytes
    base_model: SnapshotRef | None = None


class Announced(Event):
    """To a worker: this payload is available. `asked_for`: the worker asked for it."""

    manifest: SimManifest
    asked_for: bool = False


class Arriving(Event):
    """To a worker: a snapshot is on its way, and arrives after `seconds` (see `BroadcastSpec`)."""

    manifest: SimManifest
    seconds: float


class ManifestAsked(Event):
    """A worker asks for a manifest. Lineage 0: the newest lineage that has the version. `base`: the asker's installed
    snapshot, for a delta.
    """

    ref: SnapshotRef
    base: SnapshotRef | None


class ChunkAsked(Event):
    """A request for one chunk of a payload, to the head or to a worker."""

    payload: PayloadId
    chunk: bytes


@lru_cache(maxsize=64)
def cut(digest: bytes, base: bytes, count: int) -> Mapping[bytes, bytes]:
    """Return the name and data of each chunk, which all workers share; `base` is empty for the whole content."""
    pieces = [digest + base + index.to_bytes(4, "big") for index in range(count)]
    return {hashlib.sha256(piece).digest(): piece for piece in pieces}


def apply(weights: bytes, pieces: Iterable[bytes]) -> bytes:
    """Return the digest of the weights that these chunks make of `weights`."""
    for piece in pieces:
        target, base = piece[:DIGEST_BYTES], piece[DIGEST_BYTES:-4]
        return target if base in (b"", weights) else hashlib.sha256(weights + piece).digest()
    raise InvariantError("a payload without chunks")


class SimOrigin:
    """The head's side of broadcasts. `store`: the published snapshots, which outlive the head's process. `order` sends
    a message to a worker.
    """

    def __init__(
        self,
        world: SimWorld,
        scenario: Scenario,
        store: Mapping[SnapshotRef, bytes],
        dialable: Mapping[str, bool],
        order: Callable[[str, object], None],
    ) -> None:
        self.world, self.scenario, self.store, self.dialable, self.order = world, scenario, store, dialable, order
        self.machine = Broadcast(BroadcastOptions(plan_routes if scenario.peers == "trees" else None, scenario.fan_out))
        self.installed: dict[str, SnapshotRef | None] = {}
        self.payloads: dict[PayloadId, tuple[SimManifest, Mapping[bytes, bytes]]] = {}
        self._has_delta: dict[PayloadId, bool] = {}

    def tell(self, event: bev.Event) -> None:
        """Pass an event to the state machine, check the machine, and carry out its commands."""
        commands = self.machine.handle(event, self.world.now)
        self.world.check(self.machine)
        for command in commands:
            if isinstance(command, bev.SetRoutes):
                self.order(command.worker_id, fev.RoutesSet(command.payload, command.sources))

    def joined(self, worker_id: str, installed: SnapshotRef | None, ticket: str = "") -> None:
        self.tell(bev.MemberJoined(worker_id, worker_id if self.dialable[worker_id] else "", ticket=ticket))
        self.holds(worker_id, installed)

    def holds(self, worker_id: str, installed: SnapshotRef | None) -> None:
        if self.installed.get(worker_id) != installed and installed in self.store and installed is not None:
            base_model = self.scenario.base_of(installed)
            base = None if base_model is None else PayloadId(base_model)
            self.tell(bev.SnapshotHeld(worker_id, PayloadId(installed), base))
        self.installed[worker_id] = installed

    def left(self, worker_id: str) -> None:
        self.installed.pop(worker_id, None)
        self.tell(bev.MemberLeft(worker_id, "its connection closed"))

    def announce(self, ref: SnapshotRef, worker_ids: Iterable[str]) -> None:
        """Announce to each worker the payload that fits the snapshot it has, or may have by now. Workers with the same
        payload are assigned to it together.
        """
        groups: dict[PayloadId, list[str]] = {}
        for worker_id in worker_ids:
            base = self.installed.get(worker_id)
            if self.world.chance(STALE_CHANCE * self.scenario.delta_chance):
                base = max((other for other in self.store if other.policy == ref.policy and other < ref), default=None)
            groups.setdefault(self._fitting(ref, base), []).append(worker_id)
        for payload, members in groups.items():
            for worker_id in members:
                self.order(worker_id, Announced(self.manifest(payload)))
            self._assign(payload, members)

    def manifest_for(self, sender: str, body: ManifestAsked) -> Announced | None:
        """Return the manifest of a payload that fits; None if there is no such snapshot."""
        version = (body.ref.policy, body.ref.version)
        lineages = [ref for ref in self.store if (ref.policy, ref.version) == version]
        refs = sorted(ref for ref in lineages if body.ref.lineage in (0, ref.lineage))
        if not refs:
            return None
        payload = self._fitting(refs[-1], body.base)
        self._assign(payload, [sender])
        return Announced(self.manifest(payload), asked_for=True)

    def chunk(self, body: ChunkAsked) -> bytes | None:
        """Return a chunk's data; None if it is not stored (any more)."""
        payload = self.payloads.get(body.payload)
        return None if payload is None else payload[1].get(body.chunk)

    def dropped(self, ref: SnapshotRef) -> None:
        for payload in [payload for payload in self.payloads if ref in (payload.ref, payload.base)]:
            del self.payloads[payload]
            self.tell(bev.PayloadDropped(payload))

    def manifest(self, payload: PayloadId) -> SimManifest:
        if payload not in self.payloads:
            digest, is_base = self.store[payload.ref], payload.ref.is_base_model
            count = self.scenario.base_chunks if is_base else self.scenario.snapshot_chunks
            base = b"" if payload.base is None else self.store[payload.base]
            chunks = cut(digest, base, count if payload.base is None else max(1, count // DELTA_SHARE))
            base_model = self.scenario.base_of(payload.ref)
            self.payloads[payload] = SimManifest(payload, tuple(chunks), digest, base_model), chunks
        return self.payloads[payload][0]

    def _fitting(self, ref: SnapshotRef, base: SnapshotRef | None) -> PayloadId:
        delta = PayloadId(ref, base)
        if base is None or base == ref or base.policy != ref.policy or base not in self.store:
            return PayloadId(ref)
        return delta if self._is_smaller(delta) else PayloadId(ref)

    def _is_smaller(self, delta: PayloadId) -> bool:
        if delta not in self._has_delta:
            self._has_delta[delta] = self.world.chance(self.scenario.delta_chance)
        return self._has_delta[delta]

    def _assign(self, payload: PayloadId, worker_ids: Iterable[str]) -> None:
        self.tell(bev.PayloadAssigned(payload, tuple(worker_ids), len(self.manifest(payload).chunks)))


class FetchTick(Event):
    """The fetcher asked to be woken."""

    number: int


class Gone(Event):
    """The requested chunk is not stored here and not expected."""


class Alive(Event):
    """The requested chunk is expected."""


@dataclass(slots=True)
class _Line:
    """The requests to one source: not sent yet, and under way."""

    queue: deque[ChunkAsked] = field(default_factory=deque)
    under_way: dict[ChunkAsked, None] = field(default_factory=dict)


class Peering:
    """A worker's side of broadcasts. `call` asks the head, `tell` passes events to the scheduler. `stored` is on disk
    and outlives the process.
    """

    def __init__(
        self,
        actor: Actor,
        network: SimNetwork,
        spec: WorkersSpec,
        scenario: Scenario,
        history: History,
        call: Callable[[object], None],
        tell: Callable[[wev.Event], None],
    ) -> None:
        self.actor, self.network, self.spec, self.scenario = actor, network, spec, scenario
        self.history, self.call, self.tell = history, call, tell
        self.stored: dict[bytes, bytes] = {}
        self.base_models: dict[SnapshotRef, SimManifest] = {}  # whole base models, listed on disk
        self.restart()

    def restart(self) -> None:
        """Forget everything that is not on disk."""
        self.fetcher = Fetcher(self.actor.name)
        self.manifests: dict[PayloadId, SimManifest] = {}
        self.weights, self.installed = b"", PayloadId(SnapshotRef(RUN_POLICY, 0, 0))
        self.base: tuple[SnapshotRef | None, bytes] = (None, b"")  # the engine's base model, and its digest
        self._cut: Mapping[bytes, bytes] = {}
        self._lines: dict[str, _Line] = {}
        self._waiting: dict[ChunkAsked, list[str]] = {}
        self._wakes = 0

    def handle(self, event: fev.Event) -> None:
        """Pass an event to the fetcher, check the fetcher, and carry out its commands."""
        commands = self.fetcher.handle(event, self.actor.world.now)
        self.actor.world.check(self.fetcher)
        for command in commands:
            self._carry_out(command)
        self._serve_waiting()

    def _carry_out(self, command: fev.Command) -> None:
        match command:
            case fev.RequestChunks():
                line = self._lines.setdefault(command.source, _Line())
                line.queue.extend(ChunkAsked(command.payload, chunk) for chunk in command.chunks)
                self._ask(command.source)
            case fev.CancelRequests():
                self._lines.pop(command.source, None)
            case fev.ReportSource():
                failed = bev.SourceFailed(self.actor.name, command.payload, command.source, command.failure)
                self.history.given_up[command.failure] += 1
                self.call(failed)
            case fev.PayloadWhole():
                self.call(bev.PayloadReceived(self.actor.name, command.payload, command.tallies))
                if command.payload.ref.is_base_model:
                    self.base_models[command.payload.ref] = self.manifests[command.payload]
                self.tell(wev.SnapshotWhole(command.payload))
            case fev.PayloadGone():
                self.tell(wev.SnapshotGone(command.payload))
            case fev.WakeAt():
                self._wakes += 1
                self.actor.post(command.at - self.actor.world.now, FetchTick(self._wakes))

    def tick(self, event: FetchTick) -> None:
        """Wake the fetcher at the time it asked for; tell waiting peers that their chunks are expected."""
        if event.number == self._wakes:
            for asker in sorted({asker for askers in self._waiting.values() for asker in askers}):
                self._give(asker, None, Alive())
            self.handle(fev.Tick())

    # ---- requests of the scheduler -----------------------------------------------------------------------------------

    def announced(self, body: Announced) -> None:
        """Tell the scheduler that a payload is available."""
        self.manifests[body.manifest.payload] = body.manifest
        download = self.fetcher.download
        progress = 0.0 if download is None else 1.0 - len(download.missing) / len(download.chunks)
        manifest = body.manifest
        self.tell(wev.SnapshotAnnounced(manifest.payload, body.asked_for, progress, manifest.base_model))

    def arrived(self, manifest: SimManifest) -> None:
        """Store all chunks of a snapshot that arrived whole (see `Arriving`), and announce it to the scheduler."""
        self.stored.update(cut(manifest.digest, b"", len(manifest.chunks)))
        self.announced(Announced(manifest))

    def fetch(self, payload: PayloadId) -> None:
        """Fetch the missing chunks of this payload."""
        chunks = self.manifests[payload].chunks
        self.handle(fev.PayloadWanted(payload, chunks, frozenset(chunks) - self.stored.keys()))

    def whole_base_models(self) -> set[SnapshotRef]:
        """Return the base models on disk of which no chunk is torn."""
        return {ref for ref, manifest in self.base_models.items() if self.stored.keys() >= set(manifest.chunks)}

    def install(self, payload: PayloadId, incoming: PayloadId | None) -> wev.SnapshotRefused | wev.SnapshotInstalled:
        """Load a payload, and before it the base model if the engine has another one. On disk, keep only this payload,
        the incoming one, the one announced last, and base models."""
        manifest = self.manifests[payload]
        if manifest.base_model is not None and manifest.base_model != self.base[0]:
            digest, refusal = self._decode(self.base_models[manifest.base_model], b"")
            if refusal:
                return wev.SnapshotRefused(PayloadId(manifest.base_model), refusal)
            self.base = manifest.base_model, digest
        weights, refusal = self._decode(manifest, self.weights)
        if refusal:
            return wev.SnapshotRefused(payload, refusal)
        self.weights, self.installed = weights, payload
        self._cut = cut(weights, b"", self.scenario.snapshot_chunks)
        retained = [payload, incoming, list(self.manifests)[-1]]
        self.manifests = {key: value for key, value in self.manifests.items() if key in retained}
        chunks = {chunk for one in (*self.manifests.values(), *self.base_models.values()) for chunk in one.chunks}
        self.stored = {chunk: piece for chunk, piece in self.stored.items() if chunk in chunks}
        return wev.SnapshotInstalled(payload.ref)

    def _decode(self, manifest: SimManifest, over: bytes) -> tuple[bytes, str]:
        """Return the digest of the weights that a payload makes of the weights `over`, and why it is refused, if so."""
        if self.actor.world.chance(self.spec.corrupt_snapshots):
            self.stored.pop(manifest.chunks[0], None)
            return b"", "a chunk is torn"
        if not self.stored.keys() >= set(manifest.chunks):
            return b"", "a chunk is missing"  # torn when another snapshot that shares it was installed
        weights = apply(over, (self.stored[chunk] for chunk in manifest.chunks))
        return weights, "" if weights == manifest.digest else "the digest does not match"

    # ---- taking ------------------------------------------------------------------------------------------------------

    def _ask(self, source: str) -> None:
        line = self._lines.get(source)
        while line is not None and line.queue and len(line.under_way) < WINDOW:
            body = line.queue.popleft()
            line.under_way[body] = None
            if source == ORIGIN:
                self.call(body)
            else:
                self.network.ask_peer(self.actor.name, source, body)

    def got(self, source: str, body: ChunkAsked | None, value: object) -> None:
        if isinstance(value, Alive) or body is None:
            self.handle(fev.SourceAlive(source))
            return
        line = self._lines.get(source)
        if line is None or body not in line.under_way:
            return  # cancelled meanwhile
        del line.under_way[body]
        if not isinstance(value, bytes):
            self._fail(source, "missing")
        elif hashlib.sha256(value).digest() != body.chunk:
            self._fail(source, "corrupt")
        else:
            if source != ORIGIN:
                self.history.peer_bytes += self.scenario.chunk_bytes
            self.stored[body.chunk] = value
            self._ask(source)
            self.handle(fev.ChunkStored(source, body.chunk, self.scenario.chunk_bytes))

    def failed(self, source: str, body: ChunkAsked | None = None) -> None:
        """Note that no answer came, or that the connection broke."""
        line = self._lines.get(source)
        if line is not None and (line.under_way if body is None else body in line.under_way):
            self._fail(source, "broken")

    def _fail(self, source: str, reason: str) -> None:
        self._lines.pop(source, None)
        self.handle(fev.RequestFailed(source, reason))

    # ---- giving ------------------------------------------------------------------------------------------------------

    def peer(self, event: PeerAsked | PeerGave | PeerBroke) -> None:
        """Handle another worker's request, answer, or broken connection."""
        match event:
            case PeerAsked() if self.spec.mute:
                return  # a black hole: it takes requests, and never says a word
            case PeerAsked():
                assert isinstance(event.body, ChunkAsked)
                self._waiting.setdefault(event.body, []).append(event.sender)
                self._serve_waiting()
            case PeerGave():
                assert event.body is None or isinstance(event.body, ChunkAsked)
                self.got(event.sender, event.body, event.value)
            case PeerBroke():
                self.failed(event.sender)

    def _serve_waiting(self) -> None:
        for body in list(self._waiting):
            piece = self.stored.get(body.chunk, self._cut.get(body.chunk))
            if piece is None and self._expects(body):
                continue
            for asker in self._waiting.pop(body):
                value: object = Gone() if piece is None else piece
                if piece is not None and self.actor.world.chance(self.spec.lies):
                    value = piece + b"!"
                self._give(asker, body, value)

    def _expects(self, body: ChunkAsked) -> bool:
        """Whether the chunk is on its way here. A newer payload that was not announced here yet may still be."""
        download = self.fetcher.download
        if download is not None and download.payload == body.payload:
            return body.chunk in download.missing
        ref, installed = body.payload.ref, self.installed.ref
        return body.payload not in self.manifests and ref.policy == installed.policy and ref > installed

    def _give(self, asker: str, body: ChunkAsked | None, value: object) -> None:
        num_bytes = self.scenario.chunk_bytes if isinstance(value, bytes) else 0
        self.network.give_peer(self.actor.name, asker, body, value, num_bytes)
