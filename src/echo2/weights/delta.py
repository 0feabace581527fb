"""Deltas: what turns one snapshot into another, as chunks; applied to a copy, and verified before anybody sees it.

The tensor stream of the target (as `snapshot.py` lays it out) is cut into segments of at most 16 MiB of items of one
width, whatever tensors they belong to: large tensors spread over many, small ones share one. Each segment is a record
(`items.py`) over the base's bytes of the same tensors, or over zeros where the base has no such tensor. The delta
stream is one [length, record] after the other.

Encoder and applier hold one segment at a time beside the snapshots, so the memory they need does not grow with the
model. Both may use several threads: compression, hashing and numpy's loops run without Python's lock.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import groupby
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from echo2.errors import PeerError
from echo2.types import Snapshot, TensorBytes
from echo2.weights.codec import (
    ReadChunk,
    assemble,
    checked,
    content_digest,
    cut_streams,
    empty_bytes,
    flat_bytes,
    join_files,
    slice_files,
    slice_tensors,
    tensor_index,
)
from echo2.weights.items import apply_items, encode_items
from echo2.weights.planes import UNSIGNED, Reader, Writer
from echo2.weights.snapshot import ENCODING_DELTA, FORMAT, ChunkEntry, FileEntry, Manifest, TensorEntry, item_bytes

SEGMENT_BYTES = 16 << 20

_Job = TypeVar("_Job")
_Done = TypeVar("_Done")

Segment = tuple[int, int, int]
"""(start, stop, item width): a range of the tensor stream."""


def encode_delta(
    base: Snapshot,
    target: Snapshot,
    chunk_bytes: int | None = None,
    *,
    idempotent: bool = False,
    num_threads: int = 1,
    digest: bytes | None = None,
) -> tuple[Manifest, dict[bytes, memoryview]] | None:
    """The delta from `base` to `target` with its distinct chunks by hash; None where it is not smaller than the whole.

    The two need not follow each other: a laggard gets one delta over what it has, whatever lies between.
    `idempotent` leaves out the forms that may be applied only once, at a price in size. `digest` is the content digest
    of the target where it is known already.

    Raises:
        UserError: a name, dtype, shape or size that a manifest cannot carry.
    """
    entries = tensor_index(target.tensors)
    limit = entries[-1].offset + entries[-1].num_bytes if entries else 0
    sent = {name: data for name, data in target.files.items() if base.files.get(name) != data}
    records = Writer()
    num_bytes = sum(map(len, sent.values()))
    limit += sum(map(len, target.files.values()))
    for record in _records(entries, base, target, idempotent, num_threads):
        records.number(len(record))
        records.raw(record)
        num_bytes += 4 + len(record)
        if num_bytes >= limit:
            break
    if num_bytes >= limit:
        return None
    named = list(cut_streams(join_files(sent), memoryview(records.record()), chunk_bytes))
    manifest = Manifest(
        format=FORMAT,
        lineage=target.ref.lineage,
        version=target.ref.version,
        base=base.ref,
        encoding=ENCODING_DELTA,
        files=tuple(FileEntry(name, len(target.files[name]), name not in sent) for name in sorted(target.files)),
        tensors=entries,
        chunks=tuple(ChunkEntry(hash_, chunk.nbytes) for hash_, chunk in named),
        digest=digest or content_digest(target.tensors, target.files),
    )
    return manifest, dict(named)


def apply_delta(manifest: Manifest, base: Snapshot, read_chunk: ReadChunk, *, num_threads: int = 1) -> Snapshot:
    """The snapshot that the delta makes of `base`, whole and verified. The base stays as it is.

    Raises:
        PeerError: "base", when the delta is not over this base; "corrupt", when a chunk does not have its hash or size,
            a record cannot be one, or the content has not the manifest's digest.
        UserError: the snapshot does not fit into memory.
        Whatever `read_chunk` raises.
    """
    if manifest.base != base.ref:
        raise PeerError("base", f"payload {manifest.payload} cannot be applied to snapshot {base.ref}")
    split = manifest.num_file_chunks
    files = _patched_files(manifest, base, assemble(manifest.chunks[:split], read_chunk).data)
    stream = assemble(manifest.chunks[split:], read_chunk).data
    shadow = empty_bytes(manifest.tensor_bytes)
    layout = _Layout(manifest.tensors)

    def patch(job: tuple[Segment, memoryview]) -> None:
        (start, stop, width), record = job
        offset = start
        for part in layout.pieces(base.tensors, start, stop):
            shadow[offset : offset + part.size] = part
            offset += part.size
        reader = Reader(record)
        apply_items(reader, shadow[start:stop].view(UNSIGNED[width]))
        reader.end()

    for _ in _in_order(patch, _with_records(segments(manifest.tensors), stream), num_threads):
        pass
    return checked(manifest, slice_tensors(manifest.tensors, shadow.data.toreadonly()), files)


def segments(entries: Sequence[TensorEntry]) -> Iterator[Segment]:
    """The ranges of the tensor stream that have a record each. Both sides compute them from the tensor index."""
    for width, group in groupby(entries, key=lambda entry: item_bytes(entry.dtype)):
        tensors = list(group)
        start, end = tensors[0].offset, tensors[-1].offset + tensors[-1].num_bytes
        while start < end:
            stop = min(end, start + SEGMENT_BYTES)
            yield start, stop, width
            start = stop


class _Layout:
    """Where tensors lie in the tensor stream, and the bytes that another snapshot has for a range of it."""

    def __init__(self, entries: Sequence[TensorEntry]) -> None:
        self._entries = [entry for entry in entries if entry.num_bytes]
        self._offsets = [entry.offset for entry in self._entries]

    def pieces(self, tensors: Mapping[str, TensorBytes], start: int, stop: int) -> Iterator[NDArray[np.uint8]]:
        """The bytes of this range by pieces; zeros for a tensor that is not there or has another dtype or shape."""
        position = bisect_right(self._offsets, start) - 1
        while start < stop:
            entry = self._entries[position]
            end = min(stop, entry.offset + entry.num_bytes)
            tensor = tensors.get(entry.name)
            if tensor is not None and (tensor.dtype, tuple(tensor.shape)) == (entry.dtype, entry.shape):
                yield flat_bytes(tensor.data)[start - entry.offset : end - entry.offset]
            else:
                yield np.zeros(end - start, np.uint8)
            start, position = end, position + 1

    def gather(self, tensors: Mapping[str, TensorBytes], segment: Segment) -> NDArray[Any]:
        """The items of one segment: a view where they lie in one piece."""
        start, stop, width = segment
        pieces = list(self.pieces(tensors, start, stop))
        return (pieces[0] if len(pieces) == 1 else np.concatenate(pieces)).view(UNSIGNED[width])


def _records(
    entries: Sequence[TensorEntry], base: Snapshot, target: Snapshot, idempotent: bool, num_threads: int
) -> Iterator[bytes]:
    layout = _Layout(entries)

    def record(segment: Segment) -> bytes:
        before, after = layout.gather(base.tensors, segment), layout.gather(target.tensors, segment)
        return encode_items(before, after, idempotent)

    return _in_order(record, segments(entries), num_threads)


def _with_records(ranges: Iterator[Segment], stream: memoryview) -> Iterator[tuple[Segment, memoryview]]:
    reader = Reader(stream)
    for segment in ranges:
        yield segment, reader.raw(reader.number(stream.nbytes))
    reader.end()


def _patched_files(manifest: Manifest, base: Snapshot, stream: memoryview) -> dict[str, bytes]:
    """The files of the target: those that were sent, and those that are the base's.

    Raises:
        PeerError: "base", when the base has no such file; what is in it the digest of the whole checks.
    """
    sent = slice_files((entry for entry in manifest.files if not entry.from_base), stream)
    kept = [entry for entry in manifest.files if entry.from_base]
    for entry in kept:
        if len(base.files.get(entry.name, b"")) != entry.num_bytes or entry.name not in base.files:
            raise PeerError("base", f"snapshot {base.ref} has no file {entry.name!r} of {entry.num_bytes} bytes")
    return {**sent, **{entry.name: base.files[entry.name] for entry in kept}}


def _in_order(work: Callable[[_Job], _Done], jobs: Iterable[_Job], num_threads: int) -> Iterator[_Done]:
    """`work` done on every job, results in the order of the jobs, at most two jobs a thread ahead of the caller."""
    if num_threads == 1:
        yield from map(work, jobs)
        return
    with ThreadPoolExecutor(num_threads) as pool:
        waiting: deque[Future[_Done]] = deque()
        for job in jobs:
            waiting.append(pool.submit(work, job))
            if len(waiting) >= 2 * num_threads:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
