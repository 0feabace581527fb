"""Which payload each worker is told of, over real parts: a store, an origin, and the run's keys."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Coroutine, Iterable
from pathlib import Path
from typing import Any

import pytest
from weights_cases import encode, encode_delta

from broadcast_fleet import fail
from echo2.core.errors import PeerError
from echo2.core.types import RUN_POLICY, PayloadId, Snapshot, SnapshotRef, TensorBytes
from echo2.head.fleet.decide.fleet import Worker
from echo2.transport import message_bytes
from echo2.transport import wire_pb2 as wire
from echo2.transport.base import Peer
from echo2.transport.identity import RunIdentity, verify_manifest
from echo2.weights.broadcast import distribution
from echo2.weights.broadcast.distribution import Distribution
from echo2.weights.broadcast.origin import OriginNode
from echo2.weights.broadcast.serving import encode_payload
from echo2.weights.format.manifest import Manifest
from echo2.weights.store.archive import JOINED_MAX, Archive
from echo2.weights.store.store import ChunkStore
from memory_links import MemoryNetwork

ITEMS = 4000


def ref(version: int) -> SnapshotRef:
    return SnapshotRef(RUN_POLICY, 1, version)


def content(version: int) -> Snapshot:
    data = bytearray(random.Random(0).randbytes(2 * ITEMS))
    for step in range(1, version + 1):
        for place in random.Random(step).sample(range(2 * ITEMS), 20):
            data[place] = (data[place] + 1) % 256
    return Snapshot(ref(version), {"w": TensorBytes("I16", (ITEMS,), bytes(data))}, {"config.json": b"{}"})


class Fleet:
    """Workers by id, and what each was told: the payloads of its notices, and of its routes. `order`: who heard."""

    def __init__(self, path: Path, **installed: SnapshotRef | None) -> None:
        self.identity = RunIdentity.create_or_load(path / "identity")
        self.workers = {name: Worker(name, 1, 0.0, base, 0.0) for name, base in installed.items()}
        self.order: list[str] = []
        self.notices: dict[str, list[PayloadId]] = {name: [] for name in installed}
        self.routes: dict[str, list[int]] = {name: [] for name in installed}
        store = ChunkStore(path / "store")
        self.origin = OriginNode(store, self._order, MemoryNetwork().member("head").to_peer, fail)
        self.archive = Archive(store)
        self.telling: list[asyncio.Future[None]] = []
        self.distribution = Distribution(
            self.archive, self.origin, self.identity, self._order, self.workers.get, self._spawn
        )
        for name in installed:
            self.origin.joined(name, wire.WorkerHello(), "203.0.113.9")

    def _order(self, worker_id: str, order: wire.Order) -> None:
        if order.HasField("snapshot"):
            notice = order.snapshot
            verify_manifest(self.identity.credentials.ca_pem, notice.manifest, notice.signature)
            self.order.append(worker_id)
            self.notices[worker_id].append(Manifest.from_wire(notice.manifest).payload)
        elif order.HasField("routes"):
            self.routes[worker_id].append(order.routes.payload.ref.version)

    def _spawn(self, telling: Coroutine[Any, Any, None]) -> None:
        self.telling.append(asyncio.ensure_future(telling))

    async def publish(self, version: int, as_delta: bool = True, told: Iterable[str] | None = None) -> None:
        """As the head does: list it, and announce it. `told`: the workers that hear of it; None: all."""
        now = content(version)
        manifest, chunks = (
            encode_delta(content(version - 1), now) if as_delta else encode(now.ref, now.tensors, now.files)
        )
        for name in self.archive.offer(manifest.hashes):
            await self.archive.put(name, bytes(chunks[name]))
        await self.archive.take(manifest)
        self.announce(now.ref, list(self.workers if told is None else told))
        while not all(each.done() for each in self.telling):
            await asyncio.gather(*self.telling)

    def announce(self, newest: SnapshotRef, names: list[str]) -> None:
        """As the planner does and then its effects."""
        for name in names:
            self.workers[name].announced = newest
        self.distribution.announce(newest, names)


def test_each_worker_hears_of_the_payload_for_its_version(tmp_path: Path) -> None:
    async def story() -> None:
        fleet = Fleet(tmp_path, new=None, old=ref(0), present=ref(1), stranger=SnapshotRef(RUN_POLICY, 9, 1))
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


def test_many_workers_are_notified_in_waves_oldest_snapshot_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(distribution, "WAVE_WORKERS", 2)
    monkeypatch.setattr(distribution, "WAVE_SECONDS", 0.0)

    async def story() -> None:
        fleet = Fleet(tmp_path, newest=ref(1), newer=ref(1), old=ref(0), older=ref(0), new=None)
        await fleet.publish(2, as_delta=False)
        assert fleet.order == ["new", "old", "older", "newest", "newer"]
        await fleet.distribution.close()

    asyncio.run(story())


def test_workers_that_wait_for_their_wave_hear_of_the_newest_version_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(distribution, "WAVE_WORKERS", 2)
    monkeypatch.setattr(distribution, "WAVE_SECONDS", 0.0)

    async def story() -> None:
        fleet = Fleet(tmp_path, a=None, b=None, c=None, d=None)
        await fleet.publish(0, as_delta=False)
        fleet.order.clear()
        fleet.announce(ref(0), list(fleet.workers))  # anew, and nobody has waited for its second wave yet
        await fleet.publish(1)
        assert sorted(fleet.order[2:]) == list(fleet.workers)
        assert all(payloads[-1].ref == ref(1) for payloads in fleet.notices.values())
        await fleet.distribution.close()

    asyncio.run(story())


def test_a_worker_with_the_newest_version_is_sent_nothing(tmp_path: Path) -> None:
    async def story() -> None:
        fleet = Fleet(tmp_path, worker=ref(0))
        await fleet.publish(0, as_delta=False)
        assert fleet.notices["worker"] == [PayloadId(ref(0))]
        assert fleet.routes["worker"] == []
        await fleet.distribution.close()

    asyncio.run(story())


def test_new_chunks_are_served_without_reading_them_from_disk(tmp_path: Path) -> None:
    """The head has just checked and stored them."""

    async def story() -> None:
        fleet = Fleet(tmp_path, worker=None)
        await fleet.publish(0, as_delta=False)
        hashes = fleet.archive.payload(ref(0), None).hashes
        for path in (tmp_path / "store" / "chunks").iterdir():
            path.unlink()
        request = wire.ChunkRequest(hashes=hashes, payload=encode_payload(PayloadId(ref(0))))
        serve = fleet.origin.handlers()["FetchChunks"]
        messages = [message async for message in serve(Peer("worker", "worker", "203.0.113.9"), request)]
        assert {message_bytes.unpack(message)[0] for message in messages} - {b""} == set(hashes)
        await fleet.distribution.close()

    asyncio.run(story())


def test_a_worker_may_request_a_snapshot_by_itself(tmp_path: Path) -> None:
    async def story() -> None:
        fleet = Fleet(tmp_path, worker=None)
        for version in range(4):
            await fleet.publish(version, as_delta=version > 0)
        base = wire.SnapshotId(policy=RUN_POLICY, lineage=1, version=1)
        for lineage in (0, 1):
            request = wire.ManifestRequest(policy=RUN_POLICY, lineage=lineage, version=3, base=base)
            notice = await fleet.distribution.fetch_manifest("worker", request)
            assert Manifest.from_wire(notice.manifest).payload == PayloadId(ref(3), ref(1))
        notice = await fleet.distribution.fetch_manifest(
            "worker", wire.ManifestRequest(policy=RUN_POLICY, lineage=1, version=3)
        )
        assert Manifest.from_wire(notice.manifest).payload == PayloadId(ref(3))
        with pytest.raises(PeerError, match="unknown_snapshot"):
            await fleet.distribution.fetch_manifest(
                "worker", wire.ManifestRequest(policy=RUN_POLICY, lineage=2, version=3)
            )
        await fleet.distribution.close()

    asyncio.run(story())


def test_a_worker_gets_three_joined_payloads_of_a_version_and_then_the_whole_content(tmp_path: Path) -> None:
    """To join is the head's work: who asks over ever other bases, or over some that nobody knows, costs it no more."""

    async def story() -> None:
        fleet = Fleet(tmp_path, greedy=None, modest=None)

        async def bases(worker_id: str, version: int, *asked: SnapshotRef) -> list[SnapshotRef | None]:
            told = []
            for base in asked:
                over = wire.SnapshotId(policy=base.policy, lineage=base.lineage, version=base.version)
                request = wire.ManifestRequest(policy=RUN_POLICY, lineage=1, version=version, base=over)
                notice = await fleet.distribution.fetch_manifest(worker_id, request)
                told.append(Manifest.from_wire(notice.manifest).payload.base)
            return told

        for version in range(8):
            await fleet.publish(version, as_delta=version > 0)
        known = [ref(version) for version in range(7)]
        for _ in range(2):  # what is remembered costs nothing
            assert await bases("greedy", 7, *known) == [*known[:3], *[None] * 4]
        assert await bases("modest", 7, ref(5)) == [ref(5)], "each has its own share"
        assert await bases("greedy", 7, ref(5)) == [ref(5)], "it is there by now"
        await fleet.publish(8)
        unknown = [SnapshotRef(RUN_POLICY, 9, version) for version in range(3)]
        assert await bases("greedy", 8, *unknown, ref(7)) == [None] * 4
        await fleet.distribution.close()

    asyncio.run(story())


def test_many_workers_with_one_base_are_notified_together(tmp_path: Path) -> None:
    async def story() -> None:
        fleet = Fleet(tmp_path, **{f"w{number}": ref(number % 2) for number in range(20)})
        for version in (0, 1):
            await fleet.publish(version, as_delta=version > 0)
        await fleet.publish(2)
        told = {name: payloads[-1] for name, payloads in fleet.notices.items()}
        assert told == {f"w{number}": PayloadId(ref(2), ref(number % 2)) for number in range(20)}
        await fleet.distribution.close()

    asyncio.run(story())


def test_a_payload_that_is_joined_again_is_signed_again(tmp_path: Path) -> None:
    """A chunk of the sum of its deltas was lost, so that it is the deltas in a row again."""

    async def story() -> None:
        fleet = Fleet(tmp_path, worker=None)
        for version in range(4):
            await fleet.publish(version, as_delta=version > 0)
        base = wire.SnapshotId(policy=RUN_POLICY, lineage=1, version=0)
        request = wire.ManifestRequest(policy=RUN_POLICY, lineage=1, version=3, base=base)
        signed = await fleet.distribution.fetch_manifest("worker", request)
        assert await fleet.distribution.fetch_manifest("worker", request) is signed
        merged = Manifest.from_wire(signed.manifest)
        made = set(merged.hashes) - {name for one in fleet.archive.store.manifests() for name in one.hashes}
        for name in made:
            fleet.archive.store._packs.drop(name)
        again = await fleet.distribution.fetch_manifest("worker", request)
        told = Manifest.from_wire(again.manifest)
        assert told.payload == merged.payload
        assert made
        assert fleet.archive.store.missing(told) == ()
        verify_manifest(fleet.identity.credentials.ca_pem, again.manifest, again.signature)
        await fleet.distribution.close()

    asyncio.run(story())


def test_a_version_that_is_overtaken_while_it_waits_is_not_added_up(tmp_path: Path) -> None:
    async def story() -> None:
        fleet = Fleet(tmp_path, worker=None)
        for version in range(5):
            await fleet.publish(version, as_delta=version > 0)
        fleet.origin._progress.clear()  # it has not heard of the newest yet
        overtaken, newest = PayloadId(ref(3), ref(0)), PayloadId(ref(4), ref(0))
        for payload in (overtaken, newest):
            await fleet.distribution._announce_merged(payload, ["worker"])
        assert not fleet.archive.is_joined(overtaken)
        assert fleet.archive.is_joined(newest)
        await fleet.distribution.close()

    asyncio.run(story())


@pytest.mark.parametrize("wave", [1, 256])
def test_who_was_to_hear_of_a_version_hears_of_it_although_others_hear_of_a_newer_one_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wave: int
) -> None:
    """The planner tells it of no newer one before it has this one (`workers.announce_published`): it would wait for
    ever, for its wave or until its deltas are added up.
    """
    monkeypatch.setattr(distribution, "WAVE_WORKERS", wave)
    monkeypatch.setattr(distribution, "WAVE_SECONDS", 0.0)

    async def story() -> None:
        fleet = Fleet(tmp_path, quick=ref(2), slow=ref(0))
        for version in range(3):
            await fleet.publish(version, as_delta=version > 0, told=())
        fleet.announce(ref(2), ["quick", "slow"])
        assert not fleet.notices["slow"]
        await fleet.publish(3, told=["quick"])
        assert fleet.notices["slow"] == [PayloadId(ref(2), ref(0))]
        assert fleet.notices["quick"][-1].ref == ref(3)
        await fleet.distribution.close()

    asyncio.run(story())


def test_notifications_of_dropped_versions_are_forgotten(tmp_path: Path) -> None:
    async def story() -> None:
        workers = {f"w{number}": ref(number) for number in range(2 * JOINED_MAX)}
        fleet = Fleet(tmp_path, **workers)
        dropped: list[PayloadId] = []
        forget = fleet.archive.on_dropped
        fleet.archive.on_dropped = lambda payload: (dropped.append(payload), forget(payload))[1]
        last = 2 * JOINED_MAX + 3
        for version in range(last + 1):
            await fleet.publish(version, as_delta=version > 0)
            if version >= 2:
                await fleet.archive.drop(ref(version - 2))
        told = {payload for payloads in fleet.notices.values() for payload in payloads}
        assert len({payload for payload in told if payload.ref == ref(last)}) > JOINED_MAX
        assert {payload for payload in told if payload.ref.version <= last - 2} <= set(dropped)
        assert not [payload for payload in dropped if payload.ref == ref(last) and payload in told]
        assert len(fleet.distribution._notices) <= JOINED_MAX
        await fleet.distribution.close()

    asyncio.run(story())
