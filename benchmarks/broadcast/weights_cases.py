"""Payloads made and applied in one call, for tests and benchmarks that are about something else."""

from __future__ import annotations

import atexit
import random
import tempfile
from collections.abc import Mapping
from functools import cache
from itertools import count
from pathlib import Path

from echo2.core.types import Snapshot, SnapshotRef, TensorBytes, TensorSource
from echo2.weights.format.manifest import Manifest
from echo2.weights.format.segments import Encoder, ReadChunk, base_model_of
from echo2.weights.store.content import Content
from echo2.weights.store.store import Packs

Encoded = tuple[Manifest, dict[bytes, memoryview]]


def encode(
    ref: SnapshotRef, tensors: Mapping[str, TensorSource], files: Mapping[str, bytes], chunk_bytes: int | None = None
) -> Encoded:
    """The whole content."""
    return payload(Encoder(Snapshot(ref, tensors, files), chunk_bytes=chunk_bytes))


def encode_delta(base: Snapshot, target: Snapshot, chunk_bytes: int | None = None) -> Encoded:
    """What turns `base` into `target`."""
    return payload(Encoder(target, base, chunk_bytes=chunk_bytes))


def payload(encoder: Encoder) -> Encoded:
    """All that an encoder makes."""
    chunks: dict[bytes, memoryview] = {}
    for part in encoder.parts():
        chunks |= part
    return encoder.manifest(), chunks


def base_model(seed: int = 0, num_items: int = 50_000) -> Snapshot:
    """A whole model under the name that its content has."""
    tensors = {"w": TensorBytes("I16", (num_items,), random.Random(f"base model {seed}").randbytes(2 * num_items))}
    files = {"config.json": b"{}", "tokenizer.json": b"words"}
    return Snapshot(base_model_of(tensors, files["config.json"]), tensors, files)


_NUMBERS = count()


@cache
def _folder() -> Path:
    folder = tempfile.TemporaryDirectory(prefix="contents-")
    atexit.register(folder.cleanup)
    return Path(folder.name)


def new_content() -> Content:
    """Empty, in a file that goes when the process ends."""
    return Content(_folder() / str(next(_NUMBERS)))


def holding(snapshot: Snapshot) -> Content:
    """A worker's content that is this snapshot."""
    manifest, chunks = encode(snapshot.ref, snapshot.tensors, snapshot.files)
    content = new_content()
    content.apply(manifest, chunks.__getitem__)
    return content


def decode(manifest: Manifest, read_chunk: ReadChunk) -> Snapshot:
    """What a payload without a base comes to."""
    content = new_content()
    content.apply(manifest, read_chunk)
    return content.snapshot()


def apply_delta(manifest: Manifest, base: Snapshot, read_chunk: ReadChunk) -> Snapshot:
    """What a payload makes of `base`."""
    content = holding(base)
    content.apply(manifest, read_chunk)
    return content.snapshot()


def spoil(directory: Path, hash_: bytes) -> None:
    """Alter a chunk where it lies in the store of this directory, as a bad disk does."""
    packs = Packs(directory / "chunks")
    place = packs.place(hash_)
    assert place is not None
    with packs.path(place.pack).open("r+b") as pack:
        pack.seek(place.start)
        pack.write(bytes(byte ^ 0xFF for byte in packs.read(place)))


def stored_hashes(directory: Path) -> set[bytes]:
    """The chunks that whoever opens the store of this directory finds."""
    return set(Packs(directory / "chunks").hashes())


def bytes_of(snapshot: Snapshot) -> tuple[dict[str, tuple[str, tuple[int, ...], bytes]], dict[str, bytes]]:
    """The content of a snapshot as values that can be compared."""
    tensors = {name: (t.dtype, tuple(t.shape), bytes(t.read(0, t.num_bytes))) for name, t in snapshot.tensors.items()}
    return tensors, dict(snapshot.files)
