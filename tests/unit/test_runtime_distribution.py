"""Which payload each worker is told of, over real parts: a store, an origin, and the run's keys."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import pytest

from echo2.broadcast.origin import OriginNode
from echo2.control.broadcast import BroadcastOptions
from echo2.control.fleet import Worker
from echo2.errors import PeerError
from echo2.runtime.archive import Archive
from echo2.runtime.clock import Clock
from echo2.runtime.distribution import Distribution
from echo2.transport import wire_pb2 as wire
from echo2.transport.identity import RunIdentity, verify_manifest
from echo2.types import PayloadId, Snapshot, SnapshotRef, TensorBytes
from echo2.weights import ChunkStore, Manifest, encode, encode_delta

ITEMS = 4000


def ref(version: int) -> SnapshotRef:
    return SnapshotRef(1, version)


def content(version: int) -> Snapshot:
    data = bytearray(random.Random(0).randbytes(2 * ITEMS))
    for step in range(1, version + 1):
        for place in random.Random(step).sample(range(2 * ITEMS), 20):
            data[place] = (data[place] + 1) % 256
    return Snapshot(ref(version), {"w": TensorBytes("I16", (ITEMS,), bytes(data))}, {"config.json": b"{}"})


class Fleet:
    """Workers by id, and what each was told: the payloads of its notices, and of its routes."""

    def __init__(self, path: Path, **installed: SnapshotRef | None) -> None:
        self.identity = RunIdentity.create_or_load(path / "identity")
        self.workers = {name: Worker(name, 1, 0.0, base, 0.0) for name, base in installed.items()}
        self.notices: dict[str, list[PayloadId]] = {name: [] for name in installed}
        self.routes: dict[str, list[int]] = {name: [] for name in installed}
        self.tasks: list[asyncio.Task[None]] = []
        self.makes = asyncio.Event()
        store = ChunkStore(path / "store")
        self.origin = OriginNode(store, BroadcastOptions(), self._order, Clock())
        self.archive = Archive(store)
        self.distribution = Distribution(
            self.archive, self.origin, self.identity, self._order, self.workers.get, self._spawn
        )
        for name in installed:
            self.origin.joined(name, wire.WorkerHello(), "203.0.113.9")

    def _order(self, worker_id: str, order: wire.Order) -> None:
        if order.HasField("snapshot"):
            notice = order.snapshot
            verify_manifest(self.identity.credentials.ca_pem, notice.manifest, notice.signature)
            self.notices[worker_id].append(Manifest.from_wire(notice.manifest).payload)
        elif order.HasField("routes"):
            self.routes[worker_id].append(order.routes.payload.ref.version)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        self.tasks.append(asyncio.ensure_future(work))
        self.makes.set()

    async def publish(self, version: int, as_delta: bool = True) -> None:
        """As the head does: list it, announce it, and rebuild it meanwhile."""
        now = content(version)
        encoded = encode_delta(content(version - 1), now) if as_delta else encode(now.ref, now.tensors, now.files)
        assert encoded is not None
        manifest, chunks = encoded
        for name in self.archive.offer(manifest):
            await self.archive.put(name, bytes(chunks[name]))
        await self.archive.take(manifest)
        self.distribution.announce(now.ref, list(self.workers))
        await self.archive.rebuild(now.ref)
        await asyncio.gather(*self.tasks)


def test_each_worker_is_told_of_the_payload_that_fits_what_it_has(tmp_path: Path) -> None:
    async def story() -> None:
        fleet = Fleet(tmp_path, new=None, old=ref(0), present=ref(1), stranger=SnapshotRef(9, 1))
        for version in range(3):
            await fleet.publish(version, as_delta=version > 0)
        told = {name: payloads[-1] for name, payloads in fleet.notices.items()}
        assert told == {
            "new": PayloadId(ref(2)),
            "old": PayloadId(ref(2), ref(0)),
            "present": PayloadId(ref(2), ref(1)),
            "stranger": PayloadId(ref(2)),
        }
        assert all(versions[-1] == 2 for versions in fleet.routes.values()), "and from whom to take it"
        await fleet.distribution.close()

    asyncio.run(story())


def test_who_has_it_already_is_told_that_it_is_the_newest_and_sent_nothing(tmp_path: Path) -> None:
    async def story() -> None:
        fleet = Fleet(tmp_path, worker=ref(0))
        await fleet.publish(0, as_delta=False)
        assert fleet.notices["worker"] == [PayloadId(ref(0))]
        assert fleet.routes["worker"] == []
        await fleet.distribution.close()

    asyncio.run(story())


def test_what_is_made_too_late_is_not_announced(tmp_path: Path) -> None:
    """While its delta is made, one worker leaves and another installs what the delta would be over."""

    async def story() -> None:
        fleet = Fleet(tmp_path, leaves=ref(0), moves=ref(0), stays=ref(0))
        await fleet.publish(0, as_delta=False)
        await fleet.publish(1)
        fleet.workers["stays"].installed = ref(1)
        fleet.distribution.announce(ref(1), [])
        publication = asyncio.ensure_future(fleet.publish(2))
        await fleet.makes.wait()  # the announcement to those with version 0 waits for its delta
        del fleet.workers["leaves"]
        fleet.workers["moves"].installed = ref(1)
        await publication
        assert [p for p in fleet.notices["leaves"] if p.ref == ref(2)] == []
        assert [p for p in fleet.notices["moves"] if p.ref == ref(2)] == [PayloadId(ref(2), ref(1))]
        await fleet.distribution.close()

    asyncio.run(story())


def test_a_worker_may_ask_by_itself(tmp_path: Path) -> None:
    async def story() -> None:
        fleet = Fleet(tmp_path, worker=None)
        for version in range(4):
            await fleet.publish(version, as_delta=version > 0)
        base = wire.SnapshotId(lineage=1, version=1)
        for lineage in (0, 1):
            request = wire.ManifestRequest(lineage=lineage, version=3, base=base)
            notice = await fleet.distribution.fetch_manifest("worker", request)
            assert Manifest.from_wire(notice.manifest).payload == PayloadId(ref(3), ref(1))
        notice = await fleet.distribution.fetch_manifest("worker", wire.ManifestRequest(lineage=1, version=3))
        assert Manifest.from_wire(notice.manifest).payload == PayloadId(ref(3))
        with pytest.raises(PeerError, match="unknown_snapshot"):
            await fleet.distribution.fetch_manifest("worker", wire.ManifestRequest(lineage=2, version=3))
        await fleet.distribution.close()

    asyncio.run(story())


def test_many_workers_with_one_base_are_told_together(tmp_path: Path) -> None:
    async def story() -> None:
        fleet = Fleet(tmp_path, **{f"w{number}": ref(number % 2) for number in range(20)})
        for version in (0, 1):
            await fleet.publish(version, as_delta=version > 0)
        waited = len(fleet.tasks)
        await fleet.publish(2)
        assert len(fleet.tasks) == waited + 1, "one waits for all that have version 0"
        told = {name: payloads[-1] for name, payloads in fleet.notices.items()}
        assert told == {f"w{number}": PayloadId(ref(2), ref(number % 2)) for number in range(20)}
        await fleet.distribution.close()

    asyncio.run(story())
