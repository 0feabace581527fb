"""Encodes a snapshot as a payload, segment by segment: chunks can be sent while later segments are still encoded."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import accumulate, islice, repeat
from typing import Protocol

from blake3 import blake3

from echo2.core.errors import InvariantError
from echo2.core.types import SnapshotRef, TensorSource
from echo2.weights.format.manifest import FORMAT, RAW, FileEntry, Manifest, Segment, widths_of
from echo2.weights.format.segments import (
    SEGMENT_BYTES,
    Bytes,
    Chunks,
    chunk_bytes_for,
    cut_record,
    cut_stream,
    encode_segment,
    readers,
    tensor_index,
)

Keep = Callable[[int, Bytes, Segment, Chunks], None]
"""Called with (offset in the tensor stream, the segment's bytes, the encoded segment, its distinct chunks by hash)."""


class SnapshotSource(Protocol):
    """A snapshot whose tensors may be anywhere until they are read."""

    @property
    def ref(self) -> SnapshotRef:
        """Its name."""

    @property
    def tensors(self) -> Mapping[str, TensorSource]:
        """By Hugging Face parameter name."""

    @property
    def files(self) -> Mapping[str, bytes]:
        """The other files of the model (configuration, tokenizer), by name."""

    @property
    def base_model(self) -> SnapshotRef | None:
        """Of an adapter: the frozen model that its tensors belong to."""


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
        target: SnapshotSource,
        base: SnapshotSource | None = None,
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
            raise InvariantError(f"{base.ref} has other tensors than {target.ref}: there is no delta between them")

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
        """Return the manifest. Take all parts before. `others`: of share 0 of several, the segments of shares 1, 2, ...

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
        mine = islice(zip(starts, targets, widths, bases, strict=False), self._share[0], None, self._share[1])
        with ThreadPoolExecutor(self._num_threads, thread_name_prefix="encoder") as threads:
            for start, read_target, width, read_base in mine:
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
        """Return the chunk size of a record: over a base as if all records were as large; without a base by the size of
        the content, so that all whole payloads of this content are cut alike."""
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
