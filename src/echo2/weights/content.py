"""A snapshot's content on disk. Payloads are applied in place, segment by segment, and each result is verified.

The stream of tensors lies in one file and is never in memory: who wants a tensor reads it from there. A payload that
breaks off half-way leaves a mixture of two snapshots, which is the content of none: `ref` is None then, and only a
payload that needs no base can be applied. The same holds for a file that a killed process left: what of it is as a
payload says, by its digest, stays; all else is made anew.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from itertools import accumulate
from pathlib import Path

import numpy as np
from blake3 import blake3

from echo2.errors import PeerError, write_failed
from echo2.types import Snapshot, SnapshotRef, StoredTensor
from echo2.weights.manifest import DELTA, Manifest, Segment, TensorEntry, widths_of
from echo2.weights.packs import write_at
from echo2.weights.segments import ReadChunk, apply_segment, join_record

#: Segments that are applied at once; each takes some 60 MB.
THREADS_MAX = 4


class Content:
    """`ref`: the snapshot that is here, verified; None: there is none. `path`: the file of its tensors."""

    def __init__(self, path: Path) -> None:
        self.ref: SnapshotRef | None = None
        self.path = path
        self._tensors: tuple[TensorEntry, ...] = ()
        self._files: dict[str, bytes] = {}
        self._base_model: SnapshotRef | None = None

    def apply(self, manifest: Manifest, read_chunk: ReadChunk) -> None:
        """Turn what is here into the manifest's content. `read_chunk` gives the bytes of a chunk by its hash.

        Raises:
            PeerError: "base", when the payload is over another content than this, which then stays; "corrupt", when a
                chunk, a record or a digest is wrong.
            UserError: the disk is full or cannot be written or read.
            Whatever `read_chunk` raises.
        """
        here = (self.ref, self._tensors, self._base_model)
        if manifest.base is not None and here != (manifest.base, manifest.tensors, manifest.base_model):
            raise PeerError("base", f"payload {manifest.payload} cannot be applied to snapshot {self.ref}")
        files = read_files(manifest, read_chunk, self._files)
        self.ref = None
        starts, widths = accumulate(manifest.extents, initial=0), widths_of(manifest.tensors, manifest.extents)
        with (
            self._opened(manifest.tensor_bytes) as (file, old_bytes),
            ThreadPoolExecutor(_num_threads(), "applying") as threads,
        ):
            for _ in threads.map(partial(_apply, file, old_bytes, read_chunk), starts, manifest.segments, widths):
                pass
        self._tensors, self._files, self._base_model = manifest.tensors, files, manifest.base_model
        self.ref = manifest.ref

    def snapshot(self) -> Snapshot:
        """The content as a snapshot. Its tensors are read when they are used, so they change with the next `apply`.

        Raises:
            PeerError: "missing", when nothing is here; also when a tensor is read and the disk does not give it.
        """
        if self.ref is None:
            raise PeerError("missing", "no snapshot is whole here")
        tensors, start = {}, 0
        for entry in self._tensors:
            read = partial(self._read, start)
            tensors[entry.name] = StoredTensor(entry.dtype, entry.shape, entry.num_bytes, read)
            start += entry.num_bytes
        return Snapshot(self.ref, tensors, self._files, self._base_model)

    @contextmanager
    def _opened(self, num_bytes: int) -> Iterator[tuple[int, int]]:
        """The file, of this size, and the bytes that it had before. It takes room on the disk as it is written: a
        manifest's claim alone takes none."""
        try:
            file = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o600)
            try:
                old_bytes = os.fstat(file).st_size
                os.truncate(file, num_bytes)
                yield file, old_bytes
            finally:
                os.close(file)
        except OSError as error:
            message = (
                f"Cannot write the {num_bytes} bytes of a snapshot's tensors into {self.path}: {error.strerror}. Make "
                "room there (or allow writing), then start again."
            )
            raise write_failed(error, message) from error

    def _read(self, at: int, start: int, stop: int) -> memoryview:
        """The bytes from `start` to `stop` of what lies at `at`."""
        try:
            with open(self.path, "rb", buffering=0) as file:
                data = os.pread(file.fileno(), stop - start, at + start)
        except OSError as error:
            data, reason = b"", error.strerror
        else:
            reason = "it has become shorter"
        if len(data) != stop - start:
            self.ref = None
            raise PeerError("missing", f"{self.path} can't be read ({reason}) and is made anew")
        return memoryview(data)


def _num_threads() -> int:
    return min(THREADS_MAX, os.cpu_count() or 1)


def _apply(file: int, old_bytes: int, read_chunk: ReadChunk, start: int, segment: Segment, width: int) -> None:
    """Apply one segment in place in the file. Parts that are right already are not written."""
    is_there = start + segment.num_bytes <= old_bytes
    here = np.frombuffer(os.pread(file, segment.num_bytes, start) if is_there else b"", np.uint8)
    is_delta = bool(segment.records) and segment.records[0].codec == DELTA
    if is_delta or not is_there or blake3(here.data).digest() != segment.digest:
        write_at(file, start, apply_segment(segment, width, here, read_chunk).data)


def read_files(manifest: Manifest, read_chunk: ReadChunk, base: dict[str, bytes] | None = None) -> dict[str, bytes]:
    """The files of a snapshot by name, those that are not sent from `base`.

    Raises:
        PeerError: "corrupt", when a file has other bytes than its digest says; "base", when a file is neither
            sent nor in `base`.
        Whatever `read_chunk` raises.
    """
    files = {}
    for entry in manifest.files:
        if entry.record is not None:
            data = join_record(entry.record, read_chunk).tobytes()
        else:
            data = (base or {}).get(entry.name, b"")
        if blake3(data).digest() != entry.digest:
            reason = "base" if entry.record is None else "corrupt"
            raise PeerError(reason, f"file {entry.name!r} of {manifest.payload} has other bytes than its digest says")
        files[entry.name] = data
    return files
