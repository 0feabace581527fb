"""How often a snapshot is written on its way from the learner's weights to those that a worker's engine reads."""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from echo2.core.types import RUN_POLICY, SnapshotRef, TensorBytes
from echo2.learner.core.publication import BorrowedWeights, Publisher
from echo2.weights.format.manifest import Manifest
from echo2.weights.store.content import InstalledContent
from echo2.weights.store.store import ChunkStore

ITEMS = 1 << 20  # of two bytes


def test_a_whole_snapshot_is_written_four_times_and_a_delta_whole_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the learner what the next delta is compared with; by the head what machines fetch; by the worker what others
    fetch from it, and what its engine reads. A delta's records are kept by the learner, too."""
    written = Counter[str]()
    write = os.pwrite

    def counting(file: int, data: Any, at: int, /) -> int:
        done = write(file, data, at)
        path = Path(os.readlink(f"/proc/self/fd/{file}").removesuffix(" (deleted)"))
        written[" ".join(path.relative_to(tmp_path).parts[:2])] += done
        return done

    monkeypatch.setattr(os, "pwrite", counting)
    publisher, head, worker = Publisher(tmp_path / "learner"), ChunkStore(tmp_path / "head"), tmp_path / "worker"
    chunks = ChunkStore(worker)
    content = InstalledContent(chunks)
    items = np.random.default_rng(1).integers(0, 1 << 16, ITEMS).astype(np.uint16)
    seen = []
    for version in range(2):
        items[::100] += np.uint16(version)
        tensor = TensorBytes("BF16", items.shape, items.tobytes())
        weights = BorrowedWeights({"w": tensor}, {"config.json": b"{}"})
        payload = publisher.payload(SnapshotRef(RUN_POLICY, 1, version), weights)
        for names in payload.parts():
            for name in names:
                head.put(name, payload.chunk(name))
        manifest = Manifest.from_wire(payload.manifest.to_wire())
        for name in chunks.missing(manifest):
            chunks.put(name, head.get(name))
        content.take(manifest)
        assert content.ref == manifest.ref
        seen.append({where: num_bytes / items.nbytes for where, num_bytes in written.items()})
        written.clear()
    whole, delta = (sorted(round(share) for share in one.values()) for one in seen)
    assert whole == [1, 1, 1, 1], seen
    assert delta == [0, 0, 0, 1, 1], seen
