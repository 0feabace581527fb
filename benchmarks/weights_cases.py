"""Payloads made and applied in one call, for tests and benchmarks that are about something else."""

from __future__ import annotations

import random
from collections.abc import Mapping

from echo2.types import Snapshot, SnapshotRef, TensorBytes
from echo2.weights.content import Content
from echo2.weights.encoder import Encoder
from echo2.weights.manifest import Manifest
from echo2.weights.segments import ReadChunk, base_model_of

Encoded = tuple[Manifest, dict[bytes, memoryview]]


def encode(
    ref: SnapshotRef, tensors: Mapping[str, TensorBytes], files: Mapping[str, bytes], chunk_bytes: int | None = None
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


def holding(snapshot: Snapshot) -> Content:
    """A worker's content that is this snapshot."""
    manifest, chunks = encode(snapshot.ref, snapshot.tensors, snapshot.files)
    content = Content()
    content.apply(manifest, chunks.__getitem__)
    return content


def decode(manifest: Manifest, read_chunk: ReadChunk) -> Snapshot:
    """What a payload without a base comes to."""
    content = Content()
    content.apply(manifest, read_chunk)
    return content.snapshot()


def apply_delta(manifest: Manifest, base: Snapshot, read_chunk: ReadChunk) -> Snapshot:
    """What a payload makes of `base`."""
    content = holding(base)
    content.apply(manifest, read_chunk)
    return content.snapshot()


def bytes_of(snapshot: Snapshot) -> tuple[dict[str, tuple[str, tuple[int, ...], bytes]], dict[str, bytes]]:
    """The content of a snapshot as values that can be compared."""
    tensors = {name: (t.dtype, tuple(t.shape), memoryview(t.data).tobytes()) for name, t in snapshot.tensors.items()}
    return tensors, dict(snapshot.files)
