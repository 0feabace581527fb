"""A snapshot's content in memory, made of payloads: segment by segment, in place, each one verified before it counts.

The stream of tensors on the CPU is here once, never twice; what an engine made of it is its own. A payload that breaks
off half-way leaves a mixture of two snapshots, which is the content of none: `ref` is None then, and only a payload
that needs no base can be applied.
"""

from __future__ import annotations

import numpy as np
from blake3 import blake3

from echo2.errors import PeerError
from echo2.types import Snapshot, SnapshotRef, TensorBytes
from echo2.weights.manifest import Manifest, TensorEntry, widths_of
from echo2.weights.segments import ReadChunk, apply_segment, empty_bytes, join_record


class Content:
    """`ref`: the snapshot that is here, verified; None: there is none."""

    def __init__(self) -> None:
        self.ref: SnapshotRef | None = None
        self._tensors: tuple[TensorEntry, ...] = ()
        self._stream = np.empty(0, np.uint8)
        self._files: dict[str, bytes] = {}
        self._base_model: SnapshotRef | None = None

    def apply(self, manifest: Manifest, read_chunk: ReadChunk) -> None:
        """Turn what is here into the manifest's content. `read_chunk` gives the bytes of a chunk by its hash.

        Raises:
            PeerError: "base", when the payload is over another content than this, which then stays; "corrupt", when a
                chunk, a record or a digest is wrong.
            UserError: the snapshot does not fit into memory.
            Whatever `read_chunk` raises.
        """
        here = (self.ref, self._tensors, self._base_model)
        if manifest.base is not None and here != (manifest.base, manifest.tensors, manifest.base_model):
            raise PeerError("base", f"payload {manifest.payload} cannot be applied to snapshot {self.ref}")
        files = read_files(manifest, read_chunk, self._files)
        self.ref = None
        if manifest.tensors != self._tensors:
            self._stream = np.empty(0, np.uint8)  # let go first: both may not fit
            self._stream = empty_bytes(manifest.tensor_bytes)
            self._tensors = manifest.tensors
        start = 0
        for segment, width in zip(manifest.segments, widths_of(manifest.tensors, manifest.extents), strict=True):
            part = self._stream[start : start + segment.num_bytes]
            part[:] = apply_segment(segment, width, part, read_chunk)
            start += segment.num_bytes
        self._files, self._base_model, self.ref = files, manifest.base_model, manifest.ref

    def snapshot(self) -> Snapshot:
        """What is here. The tensors are read-only views: they change with the next `apply`.

        Raises:
            PeerError: "missing", when nothing is here.
        """
        if self.ref is None:
            raise PeerError("missing", "no snapshot is whole here")
        tensors, start = {}, 0
        stream = self._stream.data.toreadonly()
        for entry in self._tensors:
            data = stream[start : start + entry.num_bytes]
            tensors[entry.name] = TensorBytes(entry.dtype, entry.shape, data)
            start += entry.num_bytes
        return Snapshot(self.ref, tensors, self._files, self._base_model)


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
