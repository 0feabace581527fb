"""Memory of the head's part in snapshots, by the size of the model: it should not depend on it.

A model of random bfloat16 numbers is published by the learner's encoder: whole, and three deltas in which
a hundredth of the numbers moved. A process of its own does with them what the head does: takes the chunks one by one,
lists the payloads, joins them for a newcomer and for a laggard, signs nothing, drops old versions, and is opened again
as after a restart. Reported is the most memory that this process ever had, the interpreter and its modules included.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path

import numpy as np
from recording import child_environment

from echo2.core.types import RUN_POLICY, Snapshot, SnapshotRef, StoredTensor
from echo2.weights.format.manifest import Manifest
from echo2.weights.format.segments import SEGMENT_BYTES, Encoder
from echo2.weights.store.archive import Archive
from echo2.weights.store.store import ChunkStore

VERSIONS = 4


def weights(piece: int, num_items: int, version: int, start: int, stop: int) -> memoryview:
    """The bytes from `start` to `stop` of one tensor in one version; made again whenever they are read."""
    items = np.random.default_rng(piece).integers(0, 1 << 16, num_items, dtype=np.uint16)
    for step in range(1, version + 1):
        items += np.random.default_rng((piece, step)).random(num_items, np.float32) < 0.01
    return items.data.cast("B")[start:stop]


def snapshot(version: int, num_bytes: int) -> Snapshot:
    """A model of so many bytes whose tensors are nowhere: this process has to publish what it could not hold."""
    tensors = {}
    for piece, start in enumerate(range(0, num_bytes, SEGMENT_BYTES)):
        num_items = min(SEGMENT_BYTES, num_bytes - start) // 2
        read = partial(weights, piece, num_items, version)
        tensors[f"w{piece:04d}"] = StoredTensor("BF16", (num_items,), 2 * num_items, read)
    return Snapshot(SnapshotRef(RUN_POLICY, 1, version), tensors, {"config.json": b"{}"})


def publish(directory: Path, num_bytes: int) -> None:
    """What the learner sends, as files: chunks by their hash, manifests by their version."""
    base: Snapshot | None = None
    for version in range(VERSIONS):
        target = snapshot(version, num_bytes)
        encoder = Encoder(target, base)
        for chunks in encoder.parts():
            for hash_, chunk in chunks.items():
                (directory / hash_.hex()).write_bytes(chunk)
        (directory / f"{version}.json").write_bytes(encoder.manifest().text)
        base = target


async def receive(sent: Path, directory: Path) -> None:
    """The head's part."""
    archive = Archive(ChunkStore(directory))
    for version in range(VERSIONS):
        manifest = Manifest.from_bytes((sent / f"{version}.json").read_bytes())
        for hash_ in archive.offer(manifest.hashes):
            await archive.put(hash_, (sent / hash_.hex()).read_bytes())
        await archive.take(manifest)
        for base in (None, SnapshotRef(RUN_POLICY, 1, 0)):
            archive.payload(manifest.ref, base).to_wire()
        archive.files(manifest.ref)
        if version > 1:
            await archive.drop(SnapshotRef(RUN_POLICY, 1, version - 2))
    await archive.close()
    archive = Archive(ChunkStore(directory))
    assert len(archive.retained) == VERSIONS
    await archive.close()


def own_peak_bytes() -> int:
    """The most bytes of memory that this process ever had. What getrusage says includes its parent's."""
    return 1024 * int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0])


def peak_bytes(num_bytes: int) -> int:
    """The most bytes of memory of a head whose model has `num_bytes`, measured in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        sent, directory = Path(folder) / "sent", Path(folder) / "head"
        sent.mkdir()
        publish(sent, num_bytes)
        command = [sys.executable, __file__, str(sent), str(directory)]
        return int(subprocess.run(command, env=child_environment(), check=True, capture_output=True, text=True).stdout)


if __name__ == "__main__":
    asyncio.run(receive(*map(Path, sys.argv[1:])))
    print(own_peak_bytes())
