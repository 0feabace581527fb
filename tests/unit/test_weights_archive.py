"""The head's snapshots: handed out as they came, joined for laggards and newcomers, bounded, there after a restart."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path

import pytest
from blake3 import blake3
from hypothesis import given
from hypothesis import strategies as st
from weights_cases import (
    base_model,
    bytes_of,
    decode,
    encode,
    encode_delta,
    holding,
    new_content,
    payload,
    spoil,
    stored_hashes,
)

from echo2.core.errors import PeerError
from echo2.core.types import RUN_POLICY, PayloadId, Snapshot, SnapshotRef, TensorBytes
from echo2.weights.format.manifest import MAX_DELTAS, Manifest, Record, is_anchor_due
from echo2.weights.format.segments import Encoder
from echo2.weights.store.archive import BASE_MODELS_MAX, OFFER_CHUNKS_MAX, Archive, reachable, worth_keeping
from echo2.weights.store.store import ChunkStore

ITEMS = 4000


def content(version: int, lineage: int = 1) -> Snapshot:
    """Each version changes a few items of the one before."""
    data = bytearray(random.Random(0).randbytes(2 * ITEMS))
    for step in range(1, version + 1):
        for place in random.Random(step).sample(range(2 * ITEMS), 20):
            data[place] = (data[place] + lineage) % 256
    tensors = {"w": TensorBytes("I16", (ITEMS,), bytes(data))}
    return Snapshot(SnapshotRef(RUN_POLICY, lineage, version), tensors, {"config.json": b"{}"})


def ref(version: int) -> SnapshotRef:
    return SnapshotRef(RUN_POLICY, 1, version)


def whole(version: int) -> tuple[Manifest, Mapping[bytes, memoryview]]:
    return encode(ref(version), content(version).tensors, content(version).files)


def delta(version: int, base: int) -> tuple[Manifest, Mapping[bytes, memoryview]]:
    return encode_delta(content(base), content(version))


async def publish(archive: Archive, manifest: Manifest, chunks: Mapping[bytes, memoryview]) -> None:
    for name in archive.offer(manifest.hashes):
        await archive.put(name, bytes(chunks[name]))
    await archive.take(manifest)


async def publish_many(archive: Archive, last: int, keep: int = 2) -> None:
    """Versions 0..last as the learner sends them, each retained until `keep` newer ones are there."""
    leads: list[Manifest] = []
    for version in range(last + 1):
        manifest, chunks = delta(version, version - 1) if leads else whole(0)
        await publish(archive, manifest, chunks)
        leads.append(manifest)
        if is_anchor_due(leads):
            manifest, chunks = whole(version)
            await publish(archive, manifest, chunks)
            leads = [manifest]
        if version >= keep:
            await archive.drop(ref(version - keep))


def applied(archive: Archive, manifest: Manifest) -> Snapshot:
    """What a worker makes of a payload."""
    made = new_content() if manifest.base is None else holding(content(manifest.base.version))
    made.apply(manifest, archive.store.get)
    return made.snapshot()


def test_a_delta_is_served_unchanged_and_a_newcomer_gets_the_chain_to_it(tmp_path: Path) -> None:
    async def story() -> None:
        archive = Archive(ChunkStore(tmp_path))
        await publish(archive, *whole(0))
        manifest, chunks = delta(1, 0)
        await publish(archive, manifest, chunks)
        assert archive.payload(ref(1), ref(0)) is archive.store.manifest(manifest.payload)
        assert archive.payload(ref(1), ref(0)).text == manifest.text
        assert not archive.is_joined(PayloadId(ref(1))), "nobody asked for it"
        from_nothing = archive.payload(ref(1), None)
        assert from_nothing.payload == PayloadId(ref(1))
        assert from_nothing.hashes == (*whole(0)[0].hashes, *manifest.hashes)
        assert bytes_of(applied(archive, from_nothing)) == bytes_of(content(1))
        assert archive.files(ref(1)) == {"config.json": b"{}"}

    asyncio.run(story())


def test_a_delta_over_what_is_not_here_is_refused(tmp_path: Path) -> None:
    async def story() -> None:
        archive = Archive(ChunkStore(tmp_path))
        with pytest.raises(PeerError, match="base"):
            await publish(archive, *delta(1, 0))
        assert archive.retained == []
        with pytest.raises(PeerError, match="not offered"):
            await archive.put(bytes(32), b"")

    asyncio.run(story())


def test_offers_are_bounded(tmp_path: Path) -> None:
    archive = Archive(ChunkStore(tmp_path))
    names = [blake3(bytes([number % 256, number // 256])).digest() for number in range(OFFER_CHUNKS_MAX + 1)]
    assert archive.offer(names[1:]) == tuple(names[1:])
    with pytest.raises(PeerError, match="oversized"):
        archive.offer(names)


def test_a_worker_that_was_away_for_twenty_versions_gets_one_payload(tmp_path: Path) -> None:
    async def story() -> None:
        archive = Archive(ChunkStore(tmp_path))
        await publish_many(archive, 24)
        manifest = archive.payload(ref(24), ref(4))
        assert manifest is archive.payload(ref(24), ref(4))
        assert manifest.payload == PayloadId(ref(24), ref(4))
        assert manifest.total_bytes < manifest.content_bytes
        assert bytes_of(applied(archive, manifest)) == bytes_of(content(24))

    asyncio.run(story())


def test_an_unknown_base_or_a_useless_delta_gives_the_whole_content(tmp_path: Path) -> None:
    async def story() -> None:
        archive = Archive(ChunkStore(tmp_path))
        await publish_many(archive, 2)
        assert archive.payload(ref(2), SnapshotRef(RUN_POLICY, 7, 1)).payload == PayloadId(ref(2))
        noise = {"w": TensorBytes("I16", (ITEMS,), random.Random(9).randbytes(2 * ITEMS))}
        target = Snapshot(ref(3), noise, {"config.json": b"{1}"})
        await publish(archive, *encode_delta(content(2), target))
        await publish(archive, *encode(target.ref, target.tensors, target.files))
        assert archive.payload(ref(3), ref(2)).payload == PayloadId(ref(3))
        with pytest.raises(PeerError, match="unknown_snapshot"):
            archive.payload(ref(9), None)

    asyncio.run(story())


def test_the_archive_is_bounded(tmp_path: Path) -> None:
    async def story() -> None:
        dropped: list[PayloadId] = []
        archive = Archive(ChunkStore(tmp_path))
        archive.on_dropped = dropped.append
        newest = 3 * MAX_DELTAS
        await publish_many(archive, newest)
        listed = [manifest.payload for manifest in archive.store.manifests()]
        anchors = [payload.ref.version for payload in listed if payload.base is None]
        assert len(anchors) <= 3
        assert len(listed) - len(anchors) <= 2 * MAX_DELTAS
        assert not set(dropped) & set(listed)
        handed_out = [archive.payload(ref(newest), ref(base)) for base in range(newest)]
        for manifest in handed_out:
            assert bytes_of(applied(archive, manifest)) == bytes_of(content(newest))
        await archive.tidy()
        used = {name for manifest in [*archive.store.manifests(), *handed_out] for name in manifest.hashes}
        assert {name for name in stored_hashes(tmp_path) if archive.store.has(name)} <= used
        room = sum(path.stat().st_size for path in (tmp_path / "chunks").iterdir())
        needed = sum(len(archive.store.get(name)) + 36 for name in used)
        assert room <= 2 * needed

    asyncio.run(story())


def test_after_a_restart_all_that_leads_to_something_is_there_at_once(tmp_path: Path) -> None:
    async def first() -> None:
        archive = Archive(ChunkStore(tmp_path))
        await publish_many(archive, 3)
        manifest, chunks = delta(5, 4)  # leads to nothing: 4 is not here
        for name, chunk in chunks.items():
            archive.store.put(name, chunk)
        archive.store.put_manifest(manifest)

    asyncio.run(first())
    archive = Archive(ChunkStore(tmp_path))
    assert archive.retained[-2:] == [ref(2), ref(3)]
    assert archive.find(SnapshotRef(RUN_POLICY, 0, 5)) is None
    assert bytes_of(applied(archive, archive.payload(ref(3), None))) == bytes_of(content(3))


def test_offered_chunks_are_not_deleted(tmp_path: Path) -> None:
    async def story() -> None:
        archive = Archive(ChunkStore(tmp_path))
        await publish_many(archive, 3)
        manifest, chunks = delta(4, 3)
        for name in archive.offer(manifest.hashes):
            await archive.put(name, bytes(chunks[name]))
        await archive.tidy()
        await archive.take(manifest)
        assert archive.payload(ref(4), ref(3)) == manifest

    asyncio.run(story())


class SlowBroom(ChunkStore):
    """Throws away only when it is let."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self.reached, self.go_on = threading.Event(), threading.Event()
        self.go_on.set()

    def retain(self, manifests: Iterable[Manifest], chunks: Iterable[bytes] = ()) -> int:
        self.reached.set()
        assert self.go_on.wait(30.0)
        return super().retain(manifests, chunks)


def test_chunks_deleted_during_an_offer_are_missing_and_may_be_offered_again(tmp_path: Path) -> None:
    """A learner that fell back publishes the bytes of a version that is being dropped at that moment."""

    async def story() -> None:
        store = SlowBroom(tmp_path)
        archive = Archive(store)
        await publish(archive, *whole(1))
        store.reached.clear()
        store.go_on.clear()
        dropping = asyncio.ensure_future(archive.drop(ref(1)))
        await asyncio.to_thread(store.reached.wait, 30.0)
        again = SnapshotRef(RUN_POLICY, 2, 1)
        manifest, chunks = encode(again, content(1).tensors, content(1).files)
        assert archive.offer(manifest.hashes) == ()
        taking = asyncio.ensure_future(archive.take(manifest))
        await asyncio.sleep(0)
        store.go_on.set()
        with pytest.raises(PeerError, match="missing"):
            await taking
        await dropping
        assert archive.find(SnapshotRef(RUN_POLICY, 2, 1)) is None
        await publish(archive, manifest, chunks)
        assert archive.payload(again, None) == manifest

    asyncio.run(story())


def test_a_content_altered_on_disk_is_not_used_as_a_base(tmp_path: Path) -> None:
    async def story() -> None:
        archive = Archive(ChunkStore(tmp_path))
        await publish(archive, *whole(0))
        await publish(archive, *delta(1, 0))
        for name in whole(0)[0].hashes:
            spoil(tmp_path, name)
            with pytest.raises(PeerError, match="corrupt"):
                archive.store.get(name)
        with pytest.raises(PeerError, match="unknown_snapshot"):
            archive.payload(ref(1), None)
        with pytest.raises(PeerError, match="base"):
            await publish(archive, *delta(2, 1))
        await publish(archive, *whole(2))
        assert archive.payload(ref(2), ref(1)).payload == PayloadId(ref(2))

    asyncio.run(story())


class Listed(ChunkStore):
    """Payloads without their chunks."""

    def missing(self, manifest: Manifest) -> tuple[bytes, ...]:
        return ()


def test_deltas_too_long_for_one_manifest_are_refused_and_a_whole_content_is_due(tmp_path: Path) -> None:
    """The text of the joined payload would be longer than a manifest may be, though each alone is not."""

    async def story() -> None:
        archive, size, cuts = Archive(Listed(tmp_path)), 1 << 20, 270_000
        data = TensorBytes("U8", (size,), bytes(size))
        steps = [encode(ref(0), {"w": data}, {})[0]]
        long = Record("delta", cuts, 1, bytes(32 * cuts))
        for version in (1, 2, 3):
            parts = tuple(replace(segment, records=(long,)) for segment in steps[0].segments)
            steps.append(replace(steps[0], ref=ref(version), base=ref(version - 1), segments=parts))
        for step in steps[:3]:
            await archive.take(step)
        with pytest.raises(PeerError, match=r"base: .* the limit is"):
            await archive.take(steps[3])
        assert not is_anchor_due(steps[:3])
        assert is_anchor_due(steps)
        archive.store.put_manifest(steps[3])  # as an earlier head took it
        with pytest.raises(PeerError, match="unknown_snapshot"):
            Archive(archive.store).payload(ref(3), None)

    asyncio.run(story())


@given(seed=st.integers(0, 2**32 - 1))
def test_retained_versions_can_be_decoded(tmp_path_factory: pytest.TempPathFactory, seed: int) -> None:
    """Whatever is published whole or as a delta and dropped in whatever order: what is retained stays, and what is kept
    is bounded."""
    rng = random.Random(seed)
    store = Listed(tmp_path_factory.mktemp("store"))
    retained: list[SnapshotRef] = []
    before: Snapshot | None = None
    since = 0
    for version in range(rng.randrange(1, 120)):
        now = Snapshot(ref(version), {"w": TensorBytes("I16", (64,), bytes([version]) * 128)}, {})
        is_delta = before is not None and since < MAX_DELTAS and rng.random() < 0.95
        if is_delta and before is not None:
            store.put_manifest(encode_delta(before, now)[0])
        if not is_delta or rng.random() < 0.1:
            store.put_manifest(encode(now.ref, now.tensors, {})[0])
            since = 0
        since += is_delta
        before = now
        retained = [*retained, now.ref][-rng.randrange(1, 4) :]
        kept = worth_keeping(store, retained)
        store.retain(kept.values())
        assert set(retained) <= reachable(store.manifests()), seed
        assert all(store.chain(each) for each in retained), seed
        assert len(store.manifests()) <= 2 * MAX_DELTAS + 4, seed


def test_a_payload_for_a_departed_caller_is_not_handed_out(tmp_path: Path) -> None:
    async def story() -> None:
        archive = Archive(ChunkStore(tmp_path))
        manifest, chunks = whole(0)
        for name in archive.offer(manifest.hashes):
            await archive.put(name, bytes(chunks[name]))
        is_free = threading.Event()
        archive._thread._threads.submit(is_free.wait)
        taking = asyncio.ensure_future(archive.take(manifest))
        await asyncio.sleep(0)
        taking.cancel()
        await asyncio.wait([taking])
        is_free.set()
        assert archive.retained == []
        await archive.take(manifest)
        assert archive.retained == [ref(0)]
        await archive.close()

    asyncio.run(story())


async def publish_adapters(archive: Archive, last: int) -> list[Snapshot]:
    """A base model, and adapters over it as the learner sends them; each is dropped when the next one is there."""
    base = base_model()
    await publish(archive, *payload(Encoder(base)))
    made: list[Snapshot] = []
    for version in range(last + 1):
        made.append(replace(content(version), files={"adapter_config.json": b"{}"}, base_model=base.ref))
        await publish(archive, *payload(Encoder(made[-1], made[-2] if version else None)))
        if version:
            await archive.drop(ref(version - 1))
    return made


def test_a_base_model_stays_while_adapters_over_it_come_and_go_and_over_restarts(tmp_path: Path) -> None:
    async def story() -> None:
        archive, base = Archive(ChunkStore(tmp_path)), base_model()
        with pytest.raises(PeerError, match="base_model"):
            await publish(archive, *payload(Encoder(replace(content(0), base_model=base.ref))))
        await publish_adapters(archive, 4)
        for again in (archive, Archive(ChunkStore(tmp_path))):
            await again.tidy()
            assert base.ref in again.retained
            assert again.find(base.ref) == base.ref
            assert again.base_model(ref(4)) == base.ref
            assert again.base_model(base.ref) is None
            manifest = again.payload(base.ref, None)
            assert bytes_of(decode(manifest, again.store.get)) == bytes_of(base)
            assert again.files(ref(4)) == {"adapter_config.json": b"{}", **base.files}

    asyncio.run(story())


def test_a_run_has_few_base_models(tmp_path: Path) -> None:
    async def story() -> None:
        archive = Archive(ChunkStore(tmp_path))
        for seed in range(BASE_MODELS_MAX):
            await publish(archive, *payload(Encoder(base_model(seed))))
        await publish(archive, *payload(Encoder(base_model(0))))
        with pytest.raises(PeerError, match="oversized"):
            await publish(archive, *payload(Encoder(base_model(BASE_MODELS_MAX))))

    asyncio.run(story())
