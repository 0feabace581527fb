"""A snapshot to a payload, segment by segment: chunks can be sent while the rest is not encoded yet."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import repeat

from blake3 import blake3

from echo2.errors import InvariantError
from echo2.types import Snapshot
from echo2.weights.manifest import FORMAT, RAW, FileEntry, Manifest, Segment, widths_of
from echo2.weights.segments import (
    SEGMENT_BYTES,
    Bytes,
    chunk_bytes_for,
    cut_record,
    cut_stream,
    encode_segment,
    gather,
    tensor_index,
)


class Encoder:
    """The payload of `target`, over `base` where one is given.

    `extents`: bytes of each segment, as `Manifest.extents`; by default as one process cuts them. `chunk_bytes`: the
    size of all chunks; by default as suits the payload.

    Raises:
        UserError: a dtype that snapshots cannot carry.
    """

    def __init__(
        self,
        target: Snapshot,
        base: Snapshot | None = None,
        *,
        extents: Sequence[int] | None = None,
        chunk_bytes: int | None = None,
    ) -> None:
        self._target, self._base = target, base
        self._tensors = tensor_index(target.tensors)
        self._extents = cut_stream(self._tensors) if extents is None else tuple(extents)
        self._chunk_bytes = chunk_bytes
        self._content_bytes = sum(self._extents) + sum(map(len, target.files.values()))
        self._files: list[FileEntry] = []
        self._segments: list[Segment] = []
        if base is not None and tensor_index(base.tensors) != self._tensors:
            raise InvariantError(f"{base.ref} has other tensors than {target.ref}: there is no delta between them")

    def parts(self) -> Iterator[dict[bytes, memoryview]]:
        """Distinct chunks by hash, about `SEGMENT_BYTES` at a time: all together those that the manifest names.

        The chunks are views of what is encoded, or of the target's tensors.
        """
        self._files, self._segments = [], []
        chunks = self._encode_files()
        targets, bases = gather(self._target.tensors, self._extents), self._bases()
        for width, target, base in zip(widths_of(self._tensors, self._extents), targets, bases, strict=True):
            segment, named = encode_segment(target, width, base, self._size_of_chunks)
            self._segments.append(segment)
            chunks.update(named)
            if sum(chunk.nbytes for chunk in chunks.values()) >= SEGMENT_BYTES:
                yield chunks
                chunks = {}
        yield chunks

    def manifest(self) -> Manifest:
        """The manifest, when all parts were taken.

        Raises:
            UserError: a name, shape or size that a manifest cannot carry.
        """
        base = None if self._base is None else self._base.ref
        return Manifest(
            FORMAT,
            self._target.ref,
            base,
            tuple(self._files),
            self._tensors,
            tuple(self._segments),
            self._target.base_model,
        )

    def _bases(self) -> Iterator[Bytes | None]:
        return gather(self._base.tensors, self._extents) if self._base is not None else repeat(None, len(self._extents))

    def _size_of_chunks(self, record_bytes: int) -> int:
        """How to cut a record: as if all others were as large, or so that all whole payloads of it are cut alike."""
        if self._chunk_bytes is not None:
            return self._chunk_bytes
        total = self._content_bytes if self._base is None else record_bytes * len(self._extents)
        return chunk_bytes_for(total)

    def _encode_files(self) -> dict[bytes, memoryview]:
        chunks: dict[bytes, memoryview] = {}
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
