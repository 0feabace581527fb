"""Distributes snapshots: chooses and signs each worker's payload, and runs the origin that sends its chunks.

A worker with an older version gets the deltas from that version to the newest; any other worker gets an anchor and the
deltas since. Several deltas are first merged into one.

Thousands of workers are notified in waves, those with the oldest snapshot first: to notify and route one takes a
millisecond of the head, and so does its report, for which results would wait.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, defaultdict
from collections.abc import Callable, Coroutine, Iterable
from typing import Any, Protocol

from echo2.core.background import close_all
from echo2.core.errors import PeerError
from echo2.core.types import PayloadId, SnapshotRef
from echo2.transport import messages
from echo2.transport import wire_pb2 as wire
from echo2.transport.identity import RunIdentity
from echo2.weights.broadcast.origin import OriginNode
from echo2.weights.format.manifest import Manifest
from echo2.weights.store.archive import JOINED_MAX, Archive

log = logging.getLogger(__name__)

#: Workers that hear of a snapshot together, and the time until the next wave of as many.
WAVE_WORKERS, WAVE_SECONDS = 256, 1.0
#: Maximum number of payloads of one version that are joined at the request of one worker.
JOINS_MAX = 3

Order = Callable[[str, wire.Order], None]


class AttendingWorker(Protocol):
    """The part of the planner's `Worker` that `Distribution` uses."""

    @property
    def installed(self) -> SnapshotRef | None: ...

    @property
    def announced(self) -> SnapshotRef | None:
        """The snapshot that it was to hear of last."""


class Distribution:
    """Announces payloads to workers. `attending` returns a worker that is connected, or None."""

    def __init__(
        self,
        archive: Archive,
        origin: OriginNode,
        identity: RunIdentity,
        order: Order,
        attending: Callable[[str], AttendingWorker | None],
        spawn: Callable[[Coroutine[Any, Any, None]], object],
    ) -> None:
        self.archive, self.origin = archive, origin
        self._identity, self._order, self._attending, self._spawn = identity, order, attending, spawn
        self._notices: dict[PayloadId, tuple[Manifest, wire.SnapshotNotice]] = {}
        self._joins: defaultdict[SnapshotRef, Counter[str]] = defaultdict(Counter)
        archive.on_dropped, archive.on_stored = self._dropped, origin.stored

    def has_installed(self, worker_id: str, installed: SnapshotRef) -> None:
        """Record that a worker has this snapshot installed."""
        self.origin.has_installed(worker_id, installed, self.archive.base_model(installed))

    def announce(self, ref: SnapshotRef, worker_ids: Iterable[str]) -> None:
        """Announce `ref` to these workers as the newest snapshot, in waves if they are many."""
        ordered = list(worker_ids)
        if len(ordered) > WAVE_WORKERS:
            ordered.sort(key=self._age_of)
            self._spawn(self._announce_later(ref, ordered[WAVE_WORKERS:]))
        self._announce(ref, ordered[:WAVE_WORKERS])

    def _age_of(self, worker_id: str) -> tuple[int, int]:
        """Order the workers by snapshot, those without any first."""
        worker = self._attending(worker_id)
        installed = None if worker is None else worker.installed
        return (-1, -1) if installed is None else (installed.lineage, installed.version)

    async def _announce_later(self, ref: SnapshotRef, worker_ids: list[str]) -> None:
        """Announce `ref` to the later waves. Workers that came back meanwhile have heard of it."""
        for start in range(0, len(worker_ids), WAVE_WORKERS):
            await asyncio.sleep(WAVE_SECONDS)
            self._announce(ref, self._waiting_for(ref, worker_ids[start : start + WAVE_WORKERS]))

    def _waiting_for(self, ref: SnapshotRef, worker_ids: Iterable[str]) -> list[str]:
        """Return those of these workers that still wait for notice of `ref`: they were to hear of no other since."""
        progress = self.origin.progress()
        there = ((key, self._attending(key)) for key in worker_ids)
        waiting = [key for key, worker in there if worker is not None and worker.announced == ref]
        return [key for key in waiting if key not in progress or progress[key].payload.ref != ref]

    def _announce(self, ref: SnapshotRef, worker_ids: Iterable[str], merges: bool = True) -> None:
        """`merges`: workers that need several deltas hear of the snapshot once these are merged."""
        with_base: defaultdict[SnapshotRef | None, list[str]] = defaultdict(list)
        for worker_id in worker_ids:
            worker = self._attending(worker_id)
            if worker is not None:
                with_base[worker.installed].append(worker_id)
        for base, receivers in with_base.items():
            if merges and base is not None and self.archive.is_chain(PayloadId(ref, base)):
                self._spawn(self._announce_merged(PayloadId(ref, base), receivers))
                continue
            try:
                manifest = self.archive.payload(ref, base)
            except PeerError as error:
                log.warning("%d workers with %s get no notice of %s: %s", len(receivers), base, ref, error)
                continue
            self._notify(manifest, receivers)

    async def _announce_merged(self, payload: PayloadId, worker_ids: Iterable[str]) -> None:
        """Merge the deltas, then announce the payload to those that still wait for it."""
        receivers = list(worker_ids)
        await self.archive.merge(payload, lambda: bool(self._waiting_for(payload.ref, receivers)))
        self._announce(payload.ref, self._waiting_for(payload.ref, receivers), merges=False)

    def _notify(self, manifest: Manifest, worker_ids: list[str]) -> None:
        order = wire.Order(snapshot=self._notice(manifest))
        for worker_id in worker_ids:
            self._order(worker_id, order)
        there = ((worker_id, self._attending(worker_id)) for worker_id in worker_ids)
        wanting = tuple(name for name, one in there if one is not None and one.installed != manifest.ref)
        if wanting:
            self.origin.assign(manifest.payload, wanting, manifest)

    async def fetch_manifest(self, worker_id: str, request: wire.ManifestRequest) -> wire.SnapshotNotice:
        """Return the payload of a version for a worker, as a delta if the request names a base. A worker that has used
        up its `JOINS_MAX` for this version gets it without a base.

        Raises:
            PeerError: "unknown_snapshot": the version is not stored (any more); "unknown_worker"; "malformed".
        """
        name = messages.decode_ref(request)
        ref = self.archive.find(name)
        if ref is None:
            raise PeerError("unknown_snapshot", f"no snapshot {name} is stored")
        base = messages.decode_ref(request.base) if request.HasField("base") else None
        if base is not None and not self._may_ask(worker_id, ref, base):
            base = None
        if base is not None:
            await self.archive.merge(PayloadId(ref, base))
            if self._attending(worker_id) is None:
                raise PeerError("unknown_worker", f"{worker_id} has left")
        manifest = self.archive.payload(ref, base)
        self.origin.assign(manifest.payload, (worker_id,), manifest)
        return self._notice(manifest)

    def _may_ask(self, worker_id: str, ref: SnapshotRef, base: SnapshotRef | None) -> bool:
        """Whether the payload is already joined, or this worker has not used up its joins."""
        if base is None or self.archive.is_joined(PayloadId(ref, base)):
            return True
        joins = self._joins[ref]
        joins[worker_id] += 1
        return joins[worker_id] <= JOINS_MAX

    def _notice(self, manifest: Manifest) -> wire.SnapshotNotice:
        signed, notice = self._notices.get(manifest.payload, (None, None))
        if notice is None or signed is not manifest:  # the archive may have joined the payload anew
            ref, raw = manifest.ref, manifest.to_wire()
            signature = self._identity.sign_manifest(raw)
            notice = wire.SnapshotNotice(
                policy=ref.policy, lineage=ref.lineage, version=ref.version, manifest=raw, signature=signature
            )
            self._notices.pop(manifest.payload, None)
            while len(self._notices) >= JOINED_MAX:
                del self._notices[next(iter(self._notices))]
            self._notices[manifest.payload] = manifest, notice
        return notice

    def _dropped(self, payload: PayloadId) -> None:
        self._notices.pop(payload, None)
        if self.archive.find(payload.ref) is None:
            self._joins.pop(payload.ref, None)
        self.origin.dropped(payload)

    async def close(self) -> None:
        await close_all(self.origin.close, self.archive.close)
