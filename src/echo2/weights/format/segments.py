"""Encodes a snapshot as a payload, segment by segment, and decodes segments, each independently of all others.

So a process encodes only the shards of tensors that it holds, several processes encode in parallel, each needs memory
only for the segment, its base and the difference between them, and chunks can be sent while later segments are still
encoded.
"""

from __future__ import annotations

import mmap
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import accumulate, groupby, islice, repeat
from typing import Any

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

from echo2.core.errors import InvariantError, PeerError, UserError
from echo2.core.types import Snapshot, SnapshotRef, TensorSource
from echo2.weights.format.deltas import SPLIT, apply_items, encode_items
from echo2.weights.format.manifest import (
    DELTA,
    FORMAT,
    MAX_CHUNK_BYTES,
    RAW,
    FileEntry,
    Manifest,
    Record,
    Segment,
    TensorEntry,
    item_bytes,
    name_base_model,
    stream_order,
    widths_of,
)
from echo2.weights.format.planes import UNSIGNED, Reader

SEGMENT_BYTES = 16 << 20
MIN_CHUNK_BYTES = 32 << 10
PASSING_BYTES = 4 << 20  # buffers of at least this size are mapped, so that the system gets their memory back
PEEK_BYTES = 64 << 10  # compared first: usually there is a change in these bytes
CHUNKS_AIMED_AT = 512
"""Enough to spread over many links, few enough to handle: 64 MiB go in chunks of 128 KiB."""

Bytes = NDArray[np.uint8]
Chunks = dict[bytes, memoryview]
ReadChunk = Callable[[bytes], bytes | memoryview]
"""Returns the bytes of a chunk by its hash, verified (`ChunkStore.get`)."""


def chunk_bytes_for(num_bytes: int) -> int:
    """Return the size of the chunks (except the last) of a payload of `num_bytes`: a power of two, 32 KiB to 1 MiB."""
    aim = max(1, num_bytes // CHUNKS_AIMED_AT)
    return min(max(MIN_CHUNK_BYTES, 1 << (aim - 1).bit_length()), MAX_CHUNK_BYTES)


def tensor_index(tensors: Mapping[str, TensorSource]) -> tuple[TensorEntry, ...]:
    """Return the entries of the tensors in the order of the tensor stream.

    Raises:
        UserError: a dtype that snapshots cannot carry, or more or fewer bytes than the shape needs.
    """
    names = sorted(tensors, key=lambda name: stream_order(name, tensors[name].dtype))
    entries = tuple(TensorEntry(name, tensors[name].dtype, tuple(tensors[name].shape)) for name in names)
    for entry in entries:
        num_bytes = tensors[entry.name].num_bytes
        if num_bytes != entry.num_bytes:
            raise UserError(
                f"Tensor {entry.name!r} has {num_bytes} bytes; its shape, {entry.dtype} {list(entry.shape)}, needs "
                f"{entry.num_bytes}."
            )
    return entries


def cut_stream(entries: Iterable[TensorEntry]) -> tuple[int, ...]:
    """Return the bytes of each segment if one process holds all tensors. Large tensors are cut; small neighbours of one
    item width share a segment."""
    extents: list[int] = []
    for _, group in groupby(entries, key=lambda entry: item_bytes(entry.dtype)):
        last = 0  # bytes of the segment that the next tensor of this width may share
        for num_bytes in (entry.num_bytes for entry in group):
            whole, rest = divmod(num_bytes, SEGMENT_BYTES)
            if not whole and last and last + rest <= SEGMENT_BYTES:
                extents[-1] = last = last + rest
                continue
            extents += [SEGMENT_BYTES] * whole + [rest] * (rest > 0)
            last = rest or (last if not whole else 0)
    return tuple(extents)


def gather(tensors: Mapping[str, TensorSource], extents: Iterable[int]) -> Iterator[Bytes]:
    """Yield the bytes of each segment, read when its turn comes: a copy only if they lie in several pieces."""
    return (read() for read in readers(tensors, extents))


def readers(tensors: Mapping[str, TensorSource], extents: Iterable[int]) -> Iterator[Callable[[], Bytes]]:
    """Yield for each segment a function that reads its bytes, at any time and in any thread that can read tensors."""
    for parts in pieces(tensor_index(tensors), extents):
        yield partial(_read, [(tensors[name], start, stop) for name, start, stop in parts])


def pieces(entries: Iterable[TensorEntry], extents: Iterable[int]) -> Iterator[list[tuple[str, int, int]]]:
    """Yield for each segment where its bytes are: in which tensors, from which byte of the tensor to which."""
    following = iter(entries)
    name, at, end = "", 0, 0  # the current tensor, the bytes taken of it, and its size
    for extent in extents:
        parts: list[tuple[str, int, int]] = []
        while extent:
            if at == end:
                entry = next(following)
                name, at, end = entry.name, 0, entry.num_bytes
                continue
            size = min(extent, end - at)
            parts.append((name, at, at + size))
            at, extent = at + size, extent - size
        yield parts


def _read(parts: Iterable[tuple[TensorSource, int, int]]) -> Bytes:
    pieces = [np.frombuffer(source.read(start, stop), np.uint8) for source, start, stop in parts]
    return pieces[0] if len(pieces) == 1 else np.concatenate(pieces)


def base_model_of(tensors: Mapping[str, TensorSource], config: bytes) -> SnapshotRef:
    """Return the name of the base model of these tensors and this config.json. Reads all bytes, a segment at a time.

    Raises:
        UserError: as `tensor_index`.
    """
    index = tensor_index(tensors)
    extents = cut_stream(index)
    digests = (blake3(segment.data).digest() for segment in gather(tensors, extents))
    return name_base_model(index, zip(extents, digests, strict=True), blake3(config).digest())


def encode_segment(
    target: Bytes, width: int, base: Bytes | None = None, chunk_bytes: Callable[[int], int] = chunk_bytes_for
) -> tuple[Segment, dict[bytes, memoryview]]:
    """Encode a segment as one record. Returns it with its distinct chunks by hash. The record is a delta over `base`,
    or raw if there is no base or the delta is not smaller. A segment that equals `base` has no record.

    target, base  [num_bytes] the bytes of the segment; the chunks of a raw record are views of `target`
    width         bytes of one item
    chunk_bytes   gives the size of the chunks by the bytes of the record
    """
    digest = blake3(target.data).digest()
    if base is not None and np.array_equal(base[:PEEK_BYTES], target[:PEEK_BYTES]) and np.array_equal(base, target):
        return Segment(target.size, digest, ()), {}
    encoded = None if base is None else encode_items(base.view(UNSIGNED[width]), target.view(UNSIGNED[width]))
    if encoded is None or len(encoded) >= target.size:
        record, chunks = cut_record(RAW, target.data, chunk_bytes(target.size))
    else:
        record, chunks = cut_record(DELTA, memoryview(encoded), chunk_bytes(len(encoded)))
    return Segment(target.size, digest, (record,)), chunks


def cut_record(codec: str, data: memoryview, chunk_bytes: int) -> tuple[Record, dict[bytes, memoryview]]:
    """Cut encoded bytes into chunks. Returns the record, and its distinct chunks by hash."""
    named = []
    for start in range(0, data.nbytes, chunk_bytes):
        chunk = data[start : start + chunk_bytes]
        named.append((blake3(chunk).digest(), chunk))
    return Record(codec, data.nbytes, chunk_bytes, b"".join(hash_ for hash_, _ in named)), dict(named)


def apply_segment(segment: Segment, width: int, base: Bytes, read_chunk: ReadChunk) -> Bytes:
    """Apply the records of a segment, and return its verified bytes. `base` is not changed.

    base          [num_bytes] the bytes before; not used if the first record is raw
    read_chunk    gives the bytes of a chunk by its hash

    Raises:
        PeerError: "corrupt", when a chunk does not have its size, a record is invalid, or the result does not have the
            digest of the segment.
        Whatever `read_chunk` raises.
    """
    now = base
    for record in segment.records:
        data = join_record(record, read_chunk)
        if record.codec == RAW:
            now = data
            continue
        now = now.copy() if now is base else now
        reader = Reader(data.data)
        apply_items(reader, now.view(UNSIGNED[width]))
        reader.end()
    digest = blake3(now.data).digest()
    if digest != segment.digest:
        raise PeerError("corrupt", f"a segment has digest {digest.hex()}, not {segment.digest.hex()}")
    return now


def merge_deltas(segment: Segment, width: int, read_chunk: ReadChunk, num_segments: int) -> tuple[Segment, Chunks]:
    """Add up the deltas of a segment into one. Returns the new segment, and the chunks of the merged delta by hash.
    Deltas add up without the base. A split delta needs the base, so a segment with a split delta stays as it is.
    A segment that would not get smaller does so, too.

    width         bytes of one item
    num_segments  of the payload; it determines the chunk size

    Raises:
        PeerError: "corrupt", a record is invalid.
        Whatever `read_chunk` raises.
    """
    deltas = [record for record in segment.records if record.codec == DELTA]
    if len(deltas) < 2:
        return segment, {}
    steps = np.zeros(segment.num_bytes // width, UNSIGNED[width])
    for delta in deltas:
        data = join_record(delta, read_chunk)
        if data[0] == SPLIT:
            return segment, {}
        reader = Reader(data.data)
        apply_items(reader, steps)
        reader.end()
    merged = encode_items(np.zeros_like(steps), steps, splits=0)
    if len(merged) >= min(segment.num_bytes, sum(delta.num_bytes for delta in deltas)):
        return segment, {}
    record, chunks = cut_record(DELTA, memoryview(merged), chunk_bytes_for(len(merged) * num_segments))
    return replace(segment, records=(*segment.records[: -len(deltas)], record)), chunks


def join_record(record: Record, read_chunk: ReadChunk) -> NDArray[Any]:
    """Join the chunks of a record into a new array. It is not verified here: the decoded segment or file has a digest.

    Raises:
        PeerError: "corrupt", when a chunk does not have its size.
        Whatever `read_chunk` raises.
    """
    data = empty_bytes(record.num_bytes)
    offset = 0
    for hash_, size in record.chunks():
        chunk = read_chunk(hash_)
        if len(chunk) != size:
            raise PeerError("corrupt", f"chunk {hash_.hex()} has {len(chunk)} bytes, not {size}")
        data[offset : offset + size] = np.frombuffer(chunk, np.uint8)
        offset += size
    return data


def passing_bytes(num_bytes: int) -> memoryview:
    """Return a buffer whose memory goes back to the system with its last reference. Memory that several threads take
    from malloc and free, segment after segment, stays with the process: up to a byte per parameter."""
    if num_bytes < PASSING_BYTES:
        return memoryview(bytearray(num_bytes))
    buffer = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a kernel without large pages: small pages work, but take four times as long
            buffer.madvise(mmap.MADV_HUGEPAGE)
    return memoryview(buffer)


def empty_bytes(num_bytes: int) -> Bytes:
    """Return an uninitialised buffer. Its pages cost no memory until written, so a manifest that lies
    about its size costs nothing.

    Raises:
        UserError: it does not fit into memory.
    """
    try:
        return np.empty(num_bytes, np.uint8)
    except (MemoryError, ValueError) as error:  # ValueError: more than an address can hold
        raise UserError(f"A snapshot of {num_bytes} bytes does not fit into this machine's memory.") from error


Keep = Callable[[int, Bytes, Segment, Chunks], None]
"""Called with (offset in the tensor stream, the segment's bytes, the encoded segment, its distinct chunks by hash)."""


class Encoder:
    """Encodes the payload of `target`, over `base` if there is one, or one of several shares of it.

    `share`: (i, n) for the share of every n-th segment from segment i on; the files belong to share 0.
    `extents`: bytes of each segment, as `Manifest.extents`; by default those of `cut_stream`. `chunk_bytes`: the size
    of all chunks; by default it depends on the payload. `num_threads`: segments that are encoded at once. The thread
    that iterates over `parts` reads the target in stream order, a segment or two ahead. The encoder threads read the
    base, and call `keep` with every encoded segment before `parts` yields its chunks.

    Raises:
        UserError: a dtype that snapshots cannot carry.
    """

    def __init__(
        self,
        target: Snapshot,
        base: Snapshot | None = None,
        *,
        share: tuple[int, int] = (0, 1),
        extents: Sequence[int] | None = None,
        chunk_bytes: int | None = None,
        num_threads: int = 1,
        keep: Keep | None = None,
    ) -> None:
        self._target, self._base = target, base
        self._tensors = tensor_index(target.tensors)
        self._extents = cut_stream(self._tensors) if extents is None else tuple(extents)
        self._share = share
        self._chunk_bytes = chunk_bytes
        self._num_threads = num_threads
        self._keep = keep
        self._content_bytes = sum(self._extents) + sum(map(len, target.files.values()))
        self._files: list[FileEntry] = []
        self.segments: list[Segment] = []  # those of the share that are encoded
        if base is not None and tensor_index(base.tensors) != self._tensors:
            raise InvariantError(
                f"{base.ref} and {target.ref} have different tensors, so there is no delta between them"
            )

    def parts(self) -> Iterator[Chunks]:
        """Yield distinct chunks by hash, about `SEGMENT_BYTES` at a time; together all chunks of the share.

        The chunks are views of encoded records, or of the target's tensors.
        """
        self._files, self.segments = [], []
        chunks = self._encode_files()
        if self._share[0]:
            chunks = {}
        for segment, named in self._encode_segments():
            self.segments.append(segment)
            chunks.update(named)
            if sum(chunk.nbytes for chunk in chunks.values()) >= SEGMENT_BYTES:
                yield chunks
                chunks = {}
        yield chunks

    def manifest(self, others: Sequence[Sequence[Segment]] = ()) -> Manifest:
        """Return the manifest. Call it when `parts` is exhausted.

        `others`: of share 0 of several, the segments of shares 1, 2, ...

        Raises:
            UserError: a name, shape or size that a manifest cannot carry.
        """
        base = None if self._base is None else self._base.ref
        shares = (self.segments, *others)
        segments = (shares[number % len(shares)][number // len(shares)] for number in range(len(self._extents)))
        return Manifest(
            FORMAT,
            self._target.ref,
            base,
            tuple(self._files),
            self._tensors,
            tuple(segments),
            self._target.base_model,
        )

    def _encode_segments(self) -> Iterator[tuple[Segment, Chunks]]:
        """Yield encoded segments in order. At most one segment more than there are threads is under way at a time."""
        under_way: deque[Future[tuple[Segment, Chunks]]] = deque()
        starts = accumulate(self._extents, initial=0)
        widths = widths_of(self._tensors, self._extents)
        targets = readers(self._target.tensors, self._extents)
        bases = repeat(None) if self._base is None else readers(self._base.tensors, self._extents)
        share = islice(zip(starts, targets, widths, bases, strict=False), self._share[0], None, self._share[1])
        with ThreadPoolExecutor(self._num_threads, thread_name_prefix="encoder") as threads:
            for start, read_target, width, read_base in share:
                under_way.append(threads.submit(self._encode_segment, start, read_target(), width, read_base))
                if len(under_way) > self._num_threads:
                    yield under_way.popleft().result()
            while under_way:
                yield under_way.popleft().result()

    def _encode_segment(
        self, start: int, target: Bytes, width: int, read_base: Callable[[], Bytes] | None
    ) -> tuple[Segment, Chunks]:
        base = None if read_base is None else read_base()
        segment, chunks = encode_segment(target, width, base, self._size_of_chunks)
        if self._keep is not None:
            self._keep(start, target, segment, chunks)
        return segment, chunks

    def _size_of_chunks(self, record_bytes: int) -> int:
        """Return the chunk size of a record: of a delta as if every record had this size; of a whole payload by the
        size of the content, so that all whole payloads of this content are cut alike."""
        if self._chunk_bytes is not None:
            return self._chunk_bytes
        total = self._content_bytes if self._base is None else record_bytes * len(self._extents)
        return chunk_bytes_for(total)

    def _encode_files(self) -> Chunks:
        chunks: Chunks = {}
        for name in sorted(self._target.files):
            data = self._target.files[name]
            if self._base is not None and self._base.files.get(name) == data:
                record = None
            else:
                size = self._chunk_bytes or chunk_bytes_for(len(data))  # the same in every version
                record, named = cut_record(RAW, memoryview(data), size)
                chunks.update(named)
            self._files.append(FileEntry(name, len(data), blake3(data).digest(), record))
        return chunks
