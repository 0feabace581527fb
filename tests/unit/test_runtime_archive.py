"""The head's snapshots: rebuilt from deltas, re-diffed for laggards, bounded, and whole again after a restart."""

from __future__ import annotations

import asyncio
import dataclasses
import random
import threading
from collections.abc import Iterable, Mapping
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from echo2.errors import PeerError
from echo2.runtime.archive import CONTENTS_MAX, HISTORY_VERSIONS, MEMORY_SHARE, REDIFFS_MAX, Archive, worth_keeping
from echo2.types import PayloadId, Snapshot, SnapshotRef, TensorBytes
from echo2.weights import ChunkStore, Manifest, apply_delta, encode, encode_delta

ITEMS = 4000


def content(version: int, lineage: int = 1) -> Snapshot:
    """Each version changes a few items of the one before."""
    data = bytearray(random.Random(0).randbytes(2 * ITEMS))
    for step in range(1, version + 1):
        for place in random.Random(step).sample(range(2 * ITEMS), 20):
            data[place] = (data[place] + lineage) % 256
    tensors = {"w": TensorBytes("I16", (ITEMS,), bytes(data))}
    return Snapshot(SnapshotRef(lineage, version), tensors, {"config.json": b"{}"})


def ref(version: int) -> SnapshotRef:
    return SnapshotRef(1, version)


def whole(version: int) -> tuple[Manifest, Mapping[bytes, memoryview]]:
    return encode(ref(version), content(version).tensors, content(version).files)


def delta(version: int, base: int) -> tuple[Manifest, Mapping[bytes, memoryview]]:
    encoded = encode_delta(content(base), content(version))
    assert encoded is not None
    return encoded


async def publish(archive: Archive, manifest: Manifest, chunks: Mapping[bytes, memoryview]) -> None:
    for name in archive.offer(manifest):
        await archive.put(name, bytes(chunks[name]))
    await archive.take(manifest)
    await archive.rebuild(manifest.ref)


async def publish_many(archive: Archive, last: int, keep: int = 2) -> None:
    """Versions 0..last, the first whole, each retained until `keep` newer ones are there."""
    for version in range(last + 1):
        await publish(archive, *(whole(0) if version == 0 else delta(version, version - 1)))
        if version >= keep:
            await archive.drop(ref(version - keep))


def applied(archive: Archive, manifest: Manifest) -> Snapshot:
    """What a worker makes of a payload."""
    assert manifest.base is not None
    return apply_delta(manifest, content(manifest.base.version), archive.store.get)


def same(one: Snapshot, other: Snapshot) -> bool:
    return {n: bytes(t.data) for n, t in one.tensors.items()} == {n: bytes(t.data) for n, t in other.tensors.items()}


def test_a_delta_is_there_at_once_and_whole_soon_after(tmp_path: Path) -> None:
    async def story() -> None:
        archive = Archive(ChunkStore(tmp_path))
        await publish(archive, *whole(0))
        manifest, chunks = delta(1, 0)
        for name in archive.offer(manifest):
            await archive.put(name, bytes(chunks[name]))
        await archive.take(manifest)
        assert archive.ready(ref(1), ref(0)) == manifest
        assert archive.ready(ref(1), None) is None, "the whole has to be rebuilt first"
        rebuilt = await archive.payload(ref(1), None)
        assert rebuilt == whole(1)[0], "bit for bit what the learner would have sent"

    asyncio.run(story())


def test_a_delta_over_what_is_not_here_is_refused(tmp_path: Path) -> None:
    async def story() -> None:
        archive = Archive(ChunkStore(tmp_path))
        with pytest.raises(PeerError, match="base"):
            archive.offer(delta(1, 0)[0])
        with pytest.raises(PeerError, match="no offered snapshot"):
            await archive.put(bytes(32), b"")

    asyncio.run(story())


def test_a_delta_with_a_wrong_digest_is_dropped_and_the_whole_can_follow(tmp_path: Path) -> None:
    async def story() -> None:
        dropped: list[PayloadId] = []
        archive = Archive(ChunkStore(tmp_path), dropped.append)
        await publish(archive, *whole(0))
        manifest, chunks = delta(1, 0)
        wrong = dataclasses.replace(manifest, digest=bytes(32))
        with pytest.raises(PeerError, match="corrupt"):
            await publish(archive, wrong, chunks)
        assert dropped == [PayloadId(ref(1), ref(0))]
        assert archive.find(1, 1) is None
        await publish(archive, *whole(1))
        assert archive.find(0, 1) == ref(1)
        assert same(archive.store.load(ref(1)), content(1))

    asyncio.run(story())


def test_a_worker_that_was_away_for_twenty_versions_gets_one_delta(tmp_path: Path) -> None:
    async def story() -> None:
        archive = Archive(ChunkStore(tmp_path))
        await publish_many(archive, 24)
        assert archive.ready(ref(24), ref(4)) is None
        both = await asyncio.gather(archive.payload(ref(24), ref(4)), archive.payload(ref(24), ref(4)))
        assert both[0] is both[1]
        assert both[0].payload == PayloadId(ref(24), ref(4))
        assert both[0].total_bytes < whole(24)[0].total_bytes / 3
        assert same(applied(archive, both[0]), content(24))

    asyncio.run(story())


def test_a_base_that_nobody_knows_and_a_delta_that_saves_nothing_get_the_whole(tmp_path: Path) -> None:
    async def story() -> None:
        archive = Archive(ChunkStore(tmp_path))
        await publish_many(archive, 2)
        stranger = SnapshotRef(7, 1)
        assert (await archive.payload(ref(2), stranger)).payload == PayloadId(ref(2))
        noise = {"w": TensorBytes("I16", (ITEMS,), random.Random(9).randbytes(2 * ITEMS))}
        await publish(archive, *encode(ref(3), noise, {"config.json": b"{}"}))
        assert (await archive.payload(ref(3), ref(2))).payload == PayloadId(ref(3))
        assert archive.ready(ref(3), ref(2)) is not None, "it is remembered that there is no delta"
        with pytest.raises(PeerError, match="unknown_snapshot"):
            await archive.payload(ref(9), None)

    asyncio.run(story())


def test_the_archive_is_bounded(tmp_path: Path) -> None:
    async def story() -> None:
        dropped: list[PayloadId] = []
        archive = Archive(ChunkStore(tmp_path), dropped.append)
        await publish_many(archive, 3 * HISTORY_VERSIONS)
        listed = [manifest.payload for manifest in archive.store.manifests()]
        wholes = [payload.ref.version for payload in listed if payload.base is None]
        assert len(wholes) <= 4, "the retained two, and at most two anchors"
        assert len(listed) - len(wholes) <= 2 * HISTORY_VERSIONS + 1
        used = {name for manifest in archive.store.manifests() for name in manifest.hashes}
        assert len(list((tmp_path / "chunks").iterdir())) == len(used)
        assert not set(dropped) & set(listed)
        newest = 3 * HISTORY_VERSIONS
        back = await archive.payload(ref(newest), ref(newest - HISTORY_VERSIONS))
        assert back.payload.base == ref(newest - HISTORY_VERSIONS)
        for base in range(newest - HISTORY_VERSIONS, newest - HISTORY_VERSIONS + 2 * REDIFFS_MAX):
            manifest = await archive.payload(ref(newest), ref(base))
            assert manifest.base in (None, ref(base))
        rediffs = [m for m in archive.store.manifests() if m.base is not None and m.base.version < m.version - 1]
        assert 0 < len(rediffs) <= REDIFFS_MAX

    asyncio.run(story())


def test_a_restart_finishes_what_was_published_as_a_delta(tmp_path: Path) -> None:
    async def first() -> None:
        archive = Archive(ChunkStore(tmp_path))
        await publish_many(archive, 3)
        manifest, chunks = delta(4, 3)
        for name in archive.offer(manifest):
            await archive.put(name, bytes(chunks[name]))
        await archive.take(manifest)  # and the process dies here

    async def second() -> None:
        archive = Archive(ChunkStore(tmp_path))
        assert (await archive.mend())[-2:] == [ref(3), ref(4)]
        assert archive.is_whole(ref(4))
        assert same(archive.store.load(ref(4)), content(4))

    asyncio.run(first())
    asyncio.run(second())


def test_what_is_being_offered_is_not_thrown_away(tmp_path: Path) -> None:
    async def story() -> None:
        archive = Archive(ChunkStore(tmp_path))
        await publish_many(archive, 3)
        manifest, chunks = delta(4, 3)
        for name in archive.offer(manifest):
            await archive.put(name, bytes(chunks[name]))
        await archive.tidy()
        await archive.take(manifest)
        assert archive.ready(ref(4), ref(3)) == manifest

    asyncio.run(story())


class SlowBroom(ChunkStore):
    """Throws away only when it is let."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self.reached, self.go_on = threading.Event(), threading.Event()
        self.go_on.set()

    def retain(self, manifests: Iterable[Manifest]) -> int:
        self.reached.set()
        assert self.go_on.wait(30.0)
        return super().retain(manifests)


def test_what_is_thrown_away_while_it_is_offered_is_missed_and_may_be_offered_again(tmp_path: Path) -> None:
    """A learner that fell back publishes the bytes of a version that is being dropped at that moment."""

    async def story() -> None:
        store = SlowBroom(tmp_path)
        archive = Archive(store)
        await publish(archive, *whole(1))
        store.reached.clear()
        store.go_on.clear()
        dropping = asyncio.ensure_future(archive.drop(ref(1)))
        await asyncio.to_thread(store.reached.wait, 30.0)
        again = SnapshotRef(2, 1)
        manifest, chunks = encode(again, content(1).tensors, content(1).files)
        assert archive.offer(manifest) == ()
        taking = asyncio.ensure_future(archive.take(manifest))
        await asyncio.sleep(0)
        store.go_on.set()
        with pytest.raises(PeerError, match="missing"):
            await taking
        await dropping
        assert archive.find(2, 1) is None
        await publish(archive, manifest, chunks)
        assert archive.ready(again, None) == manifest

    asyncio.run(story())


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32 - 1))
def test_what_is_kept_can_be_had(seed: int) -> None:
    """Whatever is published whole or as a delta and dropped in whatever order: what is retained stays, every delta
    that is kept leads to something whole, and what is kept is bounded."""
    rng = random.Random(seed)
    tensors = {"w": TensorBytes("I16", (8,), bytes(16))}
    listed: dict[PayloadId, Manifest] = {}
    retained: list[SnapshotRef] = []
    before: SnapshotRef | None = None
    for version in range(rng.randrange(1, 120)):
        now = ref(version)
        manifest = encode(now, tensors, {})[0]
        listed[PayloadId(now)] = manifest
        if before is not None and rng.random() < 0.9:
            listed[PayloadId(now, before)] = manifest
        before = now
        retained = [*retained, now][-rng.randrange(1, 4) :]
        kept = worth_keeping(listed, retained, [])
        listed = {payload: each for payload, each in listed.items() if payload in kept}
        wholes = {payload.ref for payload in listed if payload.base is None}
        assert set(retained) <= wholes, seed
        reached = set(wholes)
        for payload in sorted((p for p in listed if p.base is not None), key=lambda p: p.ref):
            assert payload.base in reached, (seed, payload)
            reached.add(payload.ref)
        assert len(listed) <= 2 * HISTORY_VERSIONS + 8, seed


def test_without_deltas_none_are_made(tmp_path: Path) -> None:
    async def story() -> None:
        archive = Archive(ChunkStore(tmp_path), deltas=False)
        for version in range(3):
            await publish(archive, *whole(version))
        assert archive.ready(ref(2), ref(0)) == whole(2)[0]

    asyncio.run(story())


def test_a_content_that_the_disk_altered_is_no_base(tmp_path: Path) -> None:
    async def story() -> None:
        archive = Archive(ChunkStore(tmp_path))
        for version in range(3):
            await publish(archive, *whole(version))
        lost = set(whole(0)[0].hashes) - set(whole(2)[0].hashes)
        for name in lost:
            (tmp_path / "chunks" / name.hex()).write_bytes(b"damage")
        assert (await archive.payload(ref(2), ref(0))).payload == PayloadId(ref(2))

    asyncio.run(story())


def rediffs(archive: Archive) -> list[Manifest]:
    return [m for m in archive.store.manifests() if m.base is not None and m.base.version < m.version - 1]


def test_re_diffs_take_no_more_room_than_one_whole_content(tmp_path: Path) -> None:
    """Each is over another content altogether, but for the last fifth."""

    def mixed(version: int) -> Snapshot:
        data = random.Random(version).randbytes(8 * ITEMS // 5) + random.Random(0).randbytes(2 * ITEMS // 5)
        return Snapshot(ref(version), {"w": TensorBytes("I16", (ITEMS,), data)}, {"config.json": b"{}"})

    async def story() -> None:
        archive = Archive(ChunkStore(tmp_path))
        for version in range(6):
            now = mixed(version)
            encoded = encode_delta(mixed(version - 1), now) if version else encode(now.ref, now.tensors, now.files)
            assert encoded is not None
            await publish(archive, *encoded)
        first = await archive.payload(ref(5), ref(0))
        assert 0.7 * 2 * ITEMS < first.total_bytes < 2 * ITEMS
        for base in range(1, 4):  # the first is being fetched, and stays
            assert (await archive.payload(ref(5), ref(base))).base is None
            assert [m.payload for m in rediffs(archive)] == [first.payload]
        newer = mixed(6)
        encoded = encode_delta(mixed(5), newer)
        assert encoded is not None
        await publish(archive, *encoded)
        second = await archive.payload(ref(6), ref(3))
        assert second.base == ref(3)
        assert [m.payload for m in rediffs(archive)] == [second.payload]

    asyncio.run(story())


@pytest.mark.parametrize("room", [0.9, 1.1])
def test_contents_that_do_not_fit_into_memory_are_not_re_diffed(tmp_path: Path, room: float) -> None:
    async def story() -> None:
        memory_bytes = int(room * CONTENTS_MAX / MEMORY_SHARE * 2 * ITEMS)
        archive = Archive(ChunkStore(tmp_path), memory_bytes=memory_bytes)
        await publish_many(archive, 4)
        assert (await archive.payload(ref(4), ref(1))).base == (ref(1) if room > 1 else None)
        assert (await archive.payload(ref(4), ref(3))).base == ref(3), "the learner's own delta is there"

    asyncio.run(story())


class SlowRebuild(ChunkStore):
    """Rebuilds only when a re-diff has begun meanwhile, or none does for a moment."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self.has_rediff_begun = threading.Event()
        self.order: list[str] = []

    def load(self, ref: SnapshotRef, base: Snapshot | None = None) -> Snapshot:
        name = threading.current_thread().name.partition("_")[0]
        if name == "re-diff":
            self.has_rediff_begun.set()
        else:
            self.has_rediff_begun.wait(0.2)
        self.order.append(f"{name} {ref.version}")
        return super().load(ref, base)


def test_a_re_diff_to_what_is_being_rebuilt_waits_for_it(tmp_path: Path) -> None:
    """Else two would build the same content at the same time."""

    async def story() -> None:
        store = SlowRebuild(tmp_path)
        archive = Archive(store)
        await publish_many(archive, 1)
        manifest, chunks = delta(2, 1)
        for name in archive.offer(manifest):
            await archive.put(name, bytes(chunks[name]))
        await archive.take(manifest)
        store.order.clear()
        made, _ = await asyncio.gather(archive.payload(ref(2), ref(0)), archive.rebuild(ref(2)))
        assert made.base == ref(0)
        assert store.order == ["archive 2", "re-diff 0", "re-diff 2"]

    asyncio.run(story())
