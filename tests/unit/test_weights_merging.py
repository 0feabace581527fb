"""Deltas that the head adds up for a laggard: right, with nothing left of what is broken off."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest
from weights_cases import bytes_of, spoil, stored_hashes

from echo2.core.errors import NoRoomError
from echo2.core.types import PayloadId
from echo2.weights.store.archive import Archive
from echo2.weights.store.store import ChunkStore
from test_weights_archive import applied, content, publish_many, ref


def chunks_here(archive: Archive, path: Path) -> set[bytes]:
    return {name for name in stored_hashes(path) if archive.store.has(name)}


def test_the_deltas_of_a_laggard_are_added_up_without_the_weights(tmp_path: Path) -> None:
    """What it then has is the learner's, in fewer bytes; what was made for it goes with the version."""

    async def story() -> None:
        archive = Archive(ChunkStore(tmp_path))
        await publish_many(archive, 8)
        in_a_row = archive.payload(ref(8), ref(3))
        payload = PayloadId(ref(8), ref(2))
        assert archive.is_chain(payload)
        await asyncio.gather(archive.merge(payload), archive.merge(payload), archive.tidy())
        merged = archive.payload(ref(8), ref(2))
        assert merged.payload == payload
        assert [len(segment.records) for segment in merged.segments] == [1]
        assert [len(segment.records) for segment in in_a_row.segments] == [5]
        assert merged.total_bytes < in_a_row.total_bytes
        await archive.tidy()
        assert bytes_of(applied(archive, merged)) == bytes_of(content(8))
        made = set(merged.hashes) - {name for one in archive.store.manifests() for name in one.hashes}
        assert made
        await archive.drop(ref(8))
        assert not any(archive.store.has(name) for name in made)

    asyncio.run(story())


def test_deltas_that_a_disk_altered_are_not_added_up(tmp_path: Path) -> None:
    async def story() -> None:
        archive = Archive(ChunkStore(tmp_path))
        await publish_many(archive, 5)
        step = archive.store.manifest(PayloadId(ref(4), ref(3)))
        assert step is not None
        spoil(tmp_path, step.hashes[0])
        await archive.merge(PayloadId(ref(5), ref(2)))
        assert not archive.is_joined(PayloadId(ref(5), ref(2)))
        assert archive.store.missing(step) == step.hashes[:1], "the learner is asked for it"

    asyncio.run(story())


@pytest.mark.parametrize("end", ["cancelled", "dropped"])
def test_an_aborted_merge_leaves_nothing(tmp_path: Path, end: str) -> None:
    async def story() -> None:
        archive, payload = Archive(ChunkStore(tmp_path)), PayloadId(ref(8), ref(2))
        await publish_many(archive, 8)
        before = chunks_here(archive, tmp_path)
        is_free = threading.Event()
        archive._thread._threads.submit(is_free.wait)
        merging = asyncio.ensure_future(archive.merge(payload))
        await asyncio.sleep(0)
        assert list(archive._merged) == [payload]
        dropping = asyncio.ensure_future(archive.drop(ref(8)) if end == "dropped" else asyncio.sleep(0))
        await asyncio.sleep(0)
        are_made = archive._thread._threads.submit(lambda: chunks_here(archive, tmp_path) - before)
        if end == "cancelled":
            merging.cancel()
        is_free.set()
        assert bool(are_made.result()) == (end == "cancelled"), "a drop throws away what is made by then"
        await asyncio.wait([merging, dropping])
        assert merging.cancelled() == (end == "cancelled")
        assert archive._merged == {}
        if end == "cancelled":
            await archive.tidy()
        assert not archive.is_joined(payload)
        assert chunks_here(archive, tmp_path) <= before, "nothing that was made for it"
        await archive.merge(payload)
        assert list(archive._merged) == ([] if end == "dropped" else [payload])
        await archive.close()

    asyncio.run(story())


class FullDisk(ChunkStore):
    """Has room only while it is told so."""

    is_full = False

    def put_checked(self, chunks: Sequence[tuple[bytes, bytes | memoryview]]) -> None:
        if self.is_full:
            raise NoRoomError("no room")
        super().put_checked(chunks)


def test_a_full_disk_leaves_deltas_unmerged(tmp_path: Path) -> None:
    async def story() -> None:
        store = FullDisk(tmp_path)
        archive, payload = Archive(store), PayloadId(ref(8), ref(2))
        await publish_many(archive, 8)
        store.is_full = True
        await archive.merge(payload)
        assert archive._merged == {}
        in_a_row = archive.payload(ref(8), ref(2))
        assert [len(segment.records) for segment in in_a_row.segments] == [6]
        assert bytes_of(applied(archive, in_a_row)) == bytes_of(content(8))

    asyncio.run(story())


def test_a_merge_that_is_no_longer_wanted_is_skipped(tmp_path: Path) -> None:
    async def story() -> None:
        archive, payloads = Archive(ChunkStore(tmp_path)), [PayloadId(ref(8), ref(base)) for base in (2, 3)]
        await publish_many(archive, 8)
        wanted = [True, True]
        merging = [
            asyncio.ensure_future(archive.merge(payload, lambda at=at: wanted[at]))
            for at, payload in enumerate(payloads)
        ]
        await asyncio.sleep(0)
        wanted[1] = False
        await asyncio.gather(*merging)
        assert [archive.is_joined(payload) for payload in payloads] == [True, False]

    asyncio.run(story())
