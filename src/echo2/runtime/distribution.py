"""How snapshots leave the head: which payload each worker is told of, signed, and the origin that sends its chunks.

A worker that has the version published before gets the learner's delta, one that has an older retained version a
re-diff, anybody else the whole content. What has to be made first is made beside; the others are told meanwhile.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Coroutine, Iterable
from typing import Any, Protocol

from echo2.broadcast.origin import OriginNode
from echo2.control.fleet import Worker
from echo2.errors import PeerError
from echo2.runtime.archive import Archive
from echo2.transport import wire_pb2 as wire
from echo2.types import PayloadId, SnapshotRef
from echo2.weights import Manifest

log = logging.getLogger(__name__)

Order = Callable[[str, wire.Order], None]


class Signer(Protocol):
    """The part of `RunIdentity` that is needed here."""

    def sign_manifest(self, manifest: bytes) -> bytes: ...


class Distribution:
    """Tells workers of payloads. `attending` gives a worker that can be told something now, or None."""

    def __init__(
        self,
        archive: Archive,
        origin: OriginNode,
        signer: Signer,
        order: Order,
        attending: Callable[[str], Worker | None],
        spawn: Callable[[Coroutine[Any, Any, None]], object],
    ) -> None:
        self.archive, self.origin = archive, origin
        self._signer, self._order, self._attending, self._spawn = signer, order, attending, spawn
        self._newest: SnapshotRef | None = None
        self._notices: dict[PayloadId, wire.SnapshotNotice] = {}
        archive.on_dropped = self._dropped

    def announce(self, ref: SnapshotRef, worker_ids: Iterable[str]) -> None:
        """Tell these workers that `ref` is the newest."""
        self._newest = ref
        with_base: defaultdict[SnapshotRef | None, list[str]] = defaultdict(list)
        for worker_id in worker_ids:
            worker = self._attending(worker_id)
            if worker is not None:
                with_base[worker.installed].append(worker_id)
        for base, told in with_base.items():
            manifest = self.archive.ready(ref, base)
            if manifest is not None:
                self._tell(manifest, told)
                continue
            self._spawn(self._announce_when_made(ref, base, told))

    async def _announce_when_made(self, ref: SnapshotRef, base: SnapshotRef | None, worker_ids: list[str]) -> None:
        """Those who have another base by the time it is made are looked at anew."""
        try:
            manifest = await self.archive.payload(ref, base)
        except PeerError as error:
            log.info("%d workers with %s are not told of %s: %s", len(worker_ids), base, ref, error)
            return
        if ref != self._newest:
            return
        here = {worker_id: worker for worker_id in worker_ids if (worker := self._attending(worker_id)) is not None}
        told = [worker_id for worker_id, worker in here.items() if worker.installed == base]
        if told:
            self._tell(manifest, told)
        self.announce(ref, [worker_id for worker_id in here if worker_id not in told])

    def _tell(self, manifest: Manifest, worker_ids: list[str]) -> None:
        notice = self._notice(manifest)
        for worker_id in worker_ids:
            self._order(worker_id, wire.Order(snapshot=notice))
        wanting = tuple(w for w in worker_ids if self._lacks(w, manifest.ref))
        if wanting:
            self.origin.assign(manifest.payload, wanting, manifest)

    def _lacks(self, worker_id: str, ref: SnapshotRef) -> bool:
        worker = self._attending(worker_id)
        return worker is not None and worker.installed != ref

    async def fetch_manifest(self, worker_id: str, request: wire.ManifestRequest) -> wire.SnapshotNotice:
        """A worker asks for a version by itself, perhaps over what it has.

        Raises:
            PeerError: there is no such snapshot (any more).
        """
        ref = self.archive.find(request.lineage, request.version)
        if ref is None:
            raise PeerError("unknown_snapshot", f"no snapshot of version {request.version} is stored")
        base = SnapshotRef(request.base.lineage, request.base.version) if request.HasField("base") else None
        manifest = await self.archive.payload(ref, base)
        self.origin.assign(manifest.payload, (worker_id,), manifest)
        return self._notice(manifest)

    def _notice(self, manifest: Manifest) -> wire.SnapshotNotice:
        notice = self._notices.get(manifest.payload)
        if notice is None:
            ref, raw = manifest.ref, manifest.to_wire()
            signature = self._signer.sign_manifest(raw)
            notice = wire.SnapshotNotice(lineage=ref.lineage, version=ref.version, manifest=raw, signature=signature)
            self._notices[manifest.payload] = notice
        return notice

    def _dropped(self, payload: PayloadId) -> None:
        self._notices.pop(payload, None)
        self.origin.dropped(payload)

    async def close(self) -> None:
        await self.origin.close()
        self.archive.close()
