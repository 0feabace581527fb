"""A snapshot's content on disk, and at a worker (`InstalledContent`) also the payloads that lead to it, which serve
other workers and restore the content after a crash. Payloads are applied in place, segment by segment; each result is
verified.

The tensor stream lies in one file and is never in memory as a whole: tensors are read from the file on demand. A
payload that fails half-way leaves a mixture of two snapshots. `ref` is None then, and only a payload without a base can
be applied. The same holds for the file of a killed process. Segments in it that have the digest of the new payload
stay; all others are written again.

Nothing here runs in the background or waits: the caller fetches, and decides when to apply, list and delete.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from itertools import accumulate
from pathlib import Path

import numpy as np
from blake3 import blake3

from echo2.core.errors import PeerError, write_failed
from echo2.core.types import PayloadId, Snapshot, SnapshotRef, StoredTensor
from echo2.weights.format.manifest import DELTA, Manifest, Segment, TensorEntry, compose, is_anchor_due, widths_of
from echo2.weights.format.segments import Encoder, ReadChunk, apply_segment, gather, join_record
from echo2.weights.store.store import ChunkStore, write_at

log = logging.getLogger(__name__)

#: Maximum number of segments applied at once; each takes some 60 MB.
THREADS_MAX = 4


class Content:
    """A snapshot on disk. `ref`: the snapshot, verified; None: there is none. `path`: the file of its tensors."""

    def __init__(self, path: Path) -> None:
        self.ref: SnapshotRef | None = None
        self.path = path
        self._tensors: tuple[TensorEntry, ...] = ()
        self._files: dict[str, bytes] = {}
        self._base_model: SnapshotRef | None = None

    def apply(self, manifest: Manifest, read_chunk: ReadChunk) -> None:
        """Apply a payload: afterwards this is the manifest's content. `read_chunk` gives the bytes of a chunk by hash.

        Raises:
            PeerError: "base", when the payload's base is not this content, which then stays; "corrupt", when a chunk, a
                record or a digest is wrong.
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
        """Return the content as a snapshot. Its tensors are read when they are used, so the next `apply` changes them.

        Raises:
            PeerError: "missing", when there is no complete snapshot; later also when a tensor cannot be read from disk.
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
        """Open the file and set its size. Gives the file descriptor, and the size before. The file takes disk space
        only as it is written: the size that a manifest claims takes none."""
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
        """Read the bytes from `start` to `stop` of the tensor at offset `at` of the file."""
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
    """Apply one segment in place in the file. Unless it is a delta, a segment that has its digest already stays."""
    is_there = start + segment.num_bytes <= old_bytes
    here = np.frombuffer(os.pread(file, segment.num_bytes, start) if is_there else b"", np.uint8)
    is_delta = bool(segment.records) and segment.records[0].codec == DELTA
    if is_delta or not is_there or blake3(here.data).digest() != segment.digest:
        write_at(file, start, apply_segment(segment, width, here, read_chunk).data)


def read_files(manifest: Manifest, read_chunk: ReadChunk, base: dict[str, bytes] | None = None) -> dict[str, bytes]:
    """Return the files of a snapshot by name. Files that are not sent are taken from `base`.

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


class InstalledContent(Content):
    """The content of one worker, with the store of its payloads and of the base models of adapters."""

    def __init__(self, store: ChunkStore) -> None:
        super().__init__(store.directory / "content")
        self._store = store

    def base(self, ref: SnapshotRef) -> Snapshot:
        """Return a base model, made from its stored chunks.

        Raises:
            PeerError: the store does not have all of it, or the disk altered it.
            UserError: the disk is full.
        """
        manifest = self._store.manifest(PayloadId(ref))
        if manifest is None:
            raise PeerError("missing", f"base model {ref} is not whole here")
        base = Content(self._store.directory / "base")
        base.apply(manifest, self._store.get)
        return base.snapshot()

    def take_base(self, manifest: Manifest, own: Snapshot) -> None:
        """Store the chunks of a base model, taken from the tensors of `own`, a copy on this machine.

        Raises:
            UserError: the disk is full.
        """
        for segment, data in zip(manifest.segments, gather(own.tensors, manifest.extents), strict=True):
            start = 0
            for hash_, num_bytes in segment.records[0].chunks():
                if not self._store.has(hash_):
                    self._store.put(hash_, data[start : start + num_bytes].data)
                start += num_bytes

    def restore(self) -> None:
        """Restore the newest content that the store's payloads lead to. If it is damaged, its payloads are forgotten.

        Raises:
            UserError: the disk is full.
        """
        refs = (manifest.ref for manifest in self._store.manifests())
        newest = max((ref for ref in refs if not ref.is_base_model), default=None)
        if newest is None:
            return
        try:
            steps = self._store.chain(newest)
            if steps is None:
                raise PeerError("missing", "nothing leads to it")
            self.apply(compose(steps), self._store.get)
        except PeerError as error:
            log.warning("the stored snapshot %s is not used: %s", newest, error)
            self._store.drop_snapshot(newest)

    def take(self, manifest: Manifest) -> None:
        """Apply a payload whose chunks are stored; see `Content.apply`."""
        if self.ref != manifest.ref:  # else an engine refused it, and it is tried again
            self.apply(manifest, self._store.get)

    def keep(self, manifest: Manifest) -> list[Manifest] | None:
        """List the payload of the current content. Returns the payloads that are still needed, which are the chain that
        leads to the content, and base models. All others may be deleted.

        If the chain has become long, the whole content is stored too, in the same chunks as the learner makes. Returns
        None then, and nothing may be deleted: peers may still need the newest delta.

        Raises:
            UserError: the disk is full.
        """
        if self.ref != manifest.ref or self._store.missing(manifest):
            return None
        self._store.put_manifest(manifest)
        steps = self._store.chain(manifest.ref)
        if steps is not None and not is_anchor_due(steps):
            return [*steps, *(one for one in self._store.manifests() if one.ref.is_base_model)]
        encoder = Encoder(self.snapshot(), extents=manifest.extents)
        for chunks in encoder.parts():
            for hash_, chunk in chunks.items():
                self._store.put(hash_, chunk)
        self._store.put_manifest(encoder.manifest())
        return None
