"""From the learner to every worker, whatever path the bytes take: the learner's weights bit for bit, or nothing.

What is drawn: publications, heads and learners that are restarted, versions that the planner drops, workers that fetch
at any time from the head or each other, are restarted, or have a chunk altered on the way or on their disk. The parts
are the real ones; only the network is left out.
"""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from weights_cases import bytes_of, decode, new_content, spoil

from echo2.core.errors import PeerError
from echo2.core.types import RUN_POLICY, Snapshot, SnapshotRef, TensorBytes
from echo2.learner.core.publication import BorrowedWeights, Payload, Publisher
from echo2.weights.format.manifest import FORMAT, Manifest, widths_of
from echo2.weights.format.segments import Encoder, encode_segment, tensor_index
from echo2.weights.store.archive import Archive
from echo2.weights.store.content import InstalledContent
from echo2.weights.store.store import ChunkStore
from seeds import examples

#: Of one story.
STEPS = 70
ITEMS = 3000


class Worker:
    """A worker's disk and memory; what it has installed."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.start()

    def start(self) -> None:
        """Also a second time, after a kill."""
        self.store = ChunkStore(self.directory)
        self.kept = InstalledContent(self.store)
        self.kept.restore()
        self.installed = self.kept.ref
        self.is_refusing = False


class Story:
    """One run: `truth` has the learner's weights of every version that was published."""

    def __init__(self, directory: Path, rng: random.Random) -> None:
        self.directory, self.rng = directory, rng
        self.archive = Archive(ChunkStore(directory / "head"))
        self.publisher = Publisher(directory / "learner")
        self.ref = SnapshotRef(RUN_POLICY, 1, -1)
        self.weights = np.frombuffer(rng.randbytes(2 * ITEMS), np.uint16)
        self.scale = np.frombuffer(rng.randbytes(4 * 50), np.uint32)
        self.truth: dict[SnapshotRef, Snapshot] = {}
        self.published: list[SnapshotRef] = []
        self.workers = [Worker(directory / f"w-{number}") for number in range(3)]
        self.paths: set[str] = set()

    async def step(self) -> None:
        chance = self.rng.random()
        if chance < 0.4 or not self.published:
            await self.publish()
        elif chance < 0.45:
            await self.archive.close()
            self.archive = Archive(ChunkStore(self.directory / "head"))
            assert set(self.published) <= set(self.archive.retained), "a restarted head has all that it had"
        elif chance < 0.48:
            self.publisher = Publisher(self.directory / "learner")
            self.ref = SnapshotRef(RUN_POLICY, self.ref.lineage + 1, self.ref.version)
        elif chance < 0.55:
            worker = self.rng.choice(self.workers)
            if worker.kept.path.exists() and self.rng.random() < 0.5:  # killed while it wrote, or a disk's damage
                worker.kept.path.write_bytes(worker.kept.path.read_bytes()[: self.rng.randrange(2 * ITEMS)] + b"torn")
                self.paths.add("torn")
            worker.start()
            assert worker.installed is None or bytes_of(worker.kept.snapshot()) == bytes_of(
                self.truth[worker.installed]
            )
        elif chance < 0.6 and len(self.published) > 1:
            gone = self.published.pop(self.rng.randrange(len(self.published) - 1))
            await self.archive.drop(gone)
        else:
            self.install(self.rng.choice(self.workers))

    async def publish(self) -> None:
        """What the learner's client does, without its link."""
        share = self.rng.choice([0.0, 0.001, 0.02, 0.3, 1.0])
        hit = np.random.default_rng(self.rng.randrange(1 << 32)).random(ITEMS) < share
        self.weights = np.where(hit, self.weights + np.uint16(1), self.weights)
        self.scale = self.scale + np.uint32(self.rng.randrange(2))
        self.ref = SnapshotRef(self.ref.policy, self.ref.lineage, self.ref.version + 1)
        tensors = {
            "w": TensorBytes("BF16", (ITEMS,), self.weights.tobytes()),
            "scale": TensorBytes("F32", (50,), self.scale.tobytes()),
        }
        files = {"config.json": b"{}", "notes.txt": self.rng.choice([b"one", b"two"])}
        target = Snapshot(self.ref, tensors, files)
        self.truth[self.ref] = target
        lent = BorrowedWeights(tensors, files)
        sent = await self.send(self.publisher.payload(self.ref, lent))
        assert lent.returned.done()
        if self.publisher.published(sent):
            assert not self.publisher.published(await self.send(self.publisher.whole(self.ref)))
            self.paths.add("anchor after delta")
        self.published.append(self.ref)
        while len(self.published) > 4:
            await self.archive.drop(self.published.pop(0))

    async def send(self, payload: Payload) -> Manifest:
        for names in payload.parts():
            for name in self.archive.offer(names):
                await self.archive.put(name, payload.chunk(name))
            if self.rng.random() < 0.1:
                await self.archive.tidy()
        await self.archive.take(payload.manifest)
        return payload.manifest

    def install(self, worker: Worker) -> None:
        ref = self.rng.choice([self.published[-1], self.rng.choice(self.published)])
        base = None if worker.is_refusing else worker.installed
        if ref == worker.installed and not worker.is_refusing:
            return
        manifest = Manifest.from_wire(self.archive.payload(ref, base).to_wire())
        has_lie = self.fetch(worker, manifest)
        try:
            worker.kept.take(manifest)
        except PeerError:
            assert has_lie or manifest.base not in (None, worker.kept.ref), "what is right is taken"
            worker.is_refusing = True
            return
        worker.installed, worker.is_refusing = worker.kept.ref, False
        assert worker.installed == ref
        assert bytes_of(worker.kept.snapshot()) == bytes_of(self.truth[ref])
        kept = worker.kept.keep(manifest)
        if kept is not None:
            worker.store.retain(kept)
        depth = max((len(segment.records) for segment in manifest.segments), default=0)
        self.paths.add(("delta" if manifest.base else "whole") + (" chain" if depth > 1 else ""))

    def fetch(self, worker: Worker, manifest: Manifest) -> bool:
        """Take each chunk from somebody; whether one was altered after it was stored."""
        sources = [other.store for other in self.workers if other is not worker]
        for hash_ in worker.store.missing(manifest):
            source = next((store for store in sources if store.has(hash_)), self.archive.store)
            data = source.get(hash_)
            with pytest.raises(PeerError):
                worker.store.put(hash_, data[:-1])
            worker.store.put(hash_, data)
        if not manifest.hashes or self.rng.random() > 0.05:
            return False
        spoil(worker.directory, self.rng.choice(manifest.hashes))
        return True


@examples(25)
@given(seed=st.integers(0, 2**32 - 1))
def test_a_worker_that_installs_a_version_has_the_learners_weights_of_it(
    tmp_path_factory: pytest.TempPathFactory, seed: int
) -> None:
    async def story() -> None:
        run = Story(tmp_path_factory.mktemp("run"), random.Random(seed))
        for _ in range(STEPS):
            await run.step()
        for worker in run.workers:
            if worker.is_refusing:
                worker.start()
        await run.archive.close()

    asyncio.run(story())


def test_random_stories_take_every_path(tmp_path: Path) -> None:
    async def paths() -> set[str]:
        found: set[str] = set()
        for seed in range(4):
            run = Story(tmp_path / str(seed), random.Random(seed))
            for _ in range(STEPS):
                await run.step()
            found |= run.paths
            await run.archive.close()
        return found

    assert asyncio.run(paths()) >= {"torn", "delta", "delta chain", "whole", "whole chain", "anchor after delta"}


@given(rows=st.integers(2, 9), columns=st.integers(1, 40), cut=st.data(), seed=st.integers(0, 2**32 - 1))
def test_two_ranks_encode_their_shards_and_a_worker_applies_both(
    rows: int, columns: int, cut: st.DataObject, seed: int
) -> None:
    """Each rank holds some rows of every tensor and sees nothing of the other's. One's shard of `a` moved in one item
    and the other's altogether, so that the codecs differ; one's shard of `b` did not move."""
    draw = np.random.default_rng(seed)
    at = cut.draw(st.integers(1, rows - 1))
    before = {name: draw.normal(0, 0.02, (rows, columns)).astype(np.float32) for name in ("a", "b")}
    after = {name: values.copy() for name, values in before.items()}
    for values in after.values():
        values[at:] = draw.normal(0, 1.0, (rows - at, columns))
    after["a"][0, 0] += 1.0

    def snapshot(version: int, arrays: dict[str, np.ndarray]) -> Snapshot:
        tensors = {name: TensorBytes("F32", values.shape, values.tobytes()) for name, values in arrays.items()}
        return Snapshot(SnapshotRef(RUN_POLICY, 1, version), tensors, {})

    base, target = snapshot(0, before), snapshot(1, after)
    row_bytes = 4 * columns
    extents = (at * row_bytes, (rows - at) * row_bytes) * 2
    whole = Encoder(base, extents=extents)
    chunks = {hash_: data for part in whole.parts() for hash_, data in part.items()}
    segments = {}
    for rank, shard in enumerate((slice(0, at), slice(at, rows))):  # in any order, on any machine
        for place, name in enumerate(("a", "b")):
            old, new = (np.frombuffer(arrays[name][shard].tobytes(), np.uint8) for arrays in (before, after))
            segments[2 * place + rank], encoded = encode_segment(new, 4, old)
            chunks |= encoded
    codecs = [[record.codec for record in segments[place].records] for place in range(4)]
    assert codecs[2] == []
    assert columns * at < 40 or codecs[0] == ["delta"]
    index = tensor_index(target.tensors)
    manifest = Manifest(FORMAT, target.ref, base.ref, (), index, tuple(segments[at] for at in range(4)))
    assert list(widths_of(index, manifest.extents)) == [4] * 4
    content = new_content()
    content.apply(whole.manifest(), chunks.__getitem__)
    content.apply(Manifest.from_wire(manifest.to_wire()), chunks.__getitem__)
    assert bytes_of(content.snapshot()) == bytes_of(target)
    again = Encoder(target, extents=extents)
    anchor = {hash_: data for part in again.parts() for hash_, data in part.items()}
    assert again.manifest().root == manifest.root
    assert bytes_of(decode(again.manifest(), anchor.__getitem__)) == bytes_of(target)
