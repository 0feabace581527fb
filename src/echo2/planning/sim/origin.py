"""Snapshots at the simulated head: their payloads, and the real state machine that routes them.

A chunk's name is a hash of its data. Its data holds the digest of the weights that it makes, and for a delta the digest
of the base. So a worker that applies a delta to the wrong weights gets a wrong digest, which its checks detect.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from echo2.core.decide.machine import Event
from echo2.core.errors import InvariantError
from echo2.core.types import PayloadId, SnapshotRef
from echo2.planning.sim.scenario import Scenario
from echo2.planning.sim.world import SimWorld
from echo2.weights.broadcast.decide import fetcher as fev
from echo2.weights.broadcast.decide import origin_messages as bev
from echo2.weights.broadcast.decide import origin_messages as do
from echo2.weights.broadcast.decide.origin import Broadcast, BroadcastOptions
from echo2.weights.broadcast.decide.routes import plan_routes

DIGEST_BYTES = 32
#: The whole content has this many times the chunks of a delta.
DELTA_SHARE = 8
#: Chance, times `delta_chance`, that the head announces a delta on the newest older version, whatever the worker has:
#: the head's knowledge may be outdated.
STALE_CHANCE = 0.2


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


def cut(digest: bytes, base: bytes, count: int) -> dict[bytes, bytes]:
    """Return the name and data of each chunk; `base` is empty for the whole content."""
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
        self.payloads: dict[PayloadId, tuple[SimManifest, dict[bytes, bytes]]] = {}
        self._has_delta: dict[PayloadId, bool] = {}

    def tell(self, event: bev.Event) -> None:
        """Pass an event to the state machine, check the machine, and carry out its commands."""
        commands = self.machine.handle(event, self.world.now)
        self.world.check(self.machine)
        for command in commands:
            if isinstance(command, do.SetRoutes):
                self.order(command.worker_id, fev.RoutesSet(command.payload, command.sources))

    def joined(self, worker_id: str, installed: SnapshotRef | None, ticket: str = "") -> None:
        """Note that a worker connects, with this snapshot installed."""
        self.tell(bev.MemberJoined(worker_id, worker_id if self.dialable[worker_id] else "", ticket=ticket))
        self.holds(worker_id, installed)

    def holds(self, worker_id: str, installed: SnapshotRef | None) -> None:
        """Note which snapshot a worker has installed."""
        if self.installed.get(worker_id) != installed and installed in self.store and installed is not None:
            base_model = self.scenario.base_of(installed)
            base = None if base_model is None else PayloadId(base_model)
            self.tell(bev.SnapshotHeld(worker_id, PayloadId(installed), base))
        self.installed[worker_id] = installed

    def left(self, worker_id: str) -> None:
        """Note that a worker is no longer connected."""
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

    def asked(self, sender: str, body: ManifestAsked) -> Announced | None:
        """Return the manifest of a payload that fits; None if there is no such snapshot."""
        asked = (body.ref.policy, body.ref.version)
        lineages = [ref for ref in self.store if (ref.policy, ref.version) == asked]
        found = sorted(ref for ref in lineages if body.ref.lineage in (0, ref.lineage))
        if not found:
            return None
        payload = self._fitting(found[-1], body.base)
        self._assign(payload, [sender])
        return Announced(self.manifest(payload), asked_for=True)

    def chunk(self, body: ChunkAsked) -> bytes | None:
        """Return a chunk's data; None if it is not stored (any more)."""
        known = self.payloads.get(body.payload)
        return None if known is None else known[1].get(body.chunk)

    def dropped(self, ref: SnapshotRef) -> None:
        """Note that a snapshot is no longer stored."""
        for payload in [payload for payload in self.payloads if ref in (payload.ref, payload.base)]:
            del self.payloads[payload]
            self.tell(bev.PayloadDropped(payload))

    def manifest(self, payload: PayloadId) -> SimManifest:
        """Return the manifest of this payload."""
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
