"""Publishes a version: encodes it, and keeps it in two files, not in memory, until the head has it.

    content   the weights published last, as the tensor stream: the base of the next delta, and the bytes of raw records
    spool     the records of the delta under way

A publication reads the weights themselves, segment by segment: it compares each segment with the content, encodes the
changes, and overwrites the old content. So it needs memory for a few segments only, and the weights may change again as
soon as the last segment is encoded, however slow the link is. The encoder does not wait for workers to have the base.

The files are unlinked: when the process dies, their space is freed, and no later learner can take a half-written file
for a base. A new learner sends the whole content first.
"""

from __future__ import annotations

import logging
import os
import tempfile
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import accumulate
from pathlib import Path

from echo2.core.errors import InvariantError, LinkError, NoRoomError, UserError, write_failed
from echo2.core.types import Snapshot, SnapshotRef, StoredTensor, TensorSource
from echo2.weights.format.manifest import MAX_SEGMENTS, RAW, Manifest, Segment, is_anchor_due
from echo2.weights.format.segments import (
    Bytes,
    Chunks,
    Encoder,
    cut_stream,
    passing_bytes,
    readers,
    tensor_index,
)

log = logging.getLogger(__name__)

#: Segments encoded in parallel; each takes about 30 MB.
THREADS_MAX = 4
#: Ranks that publish, each a share; more would exceed what the head grants one member in connections and calls.
PUBLISHING_RANKS_MAX = 16
#: Seconds between two attempts to write to a full disk.
NO_ROOM_SECONDS = 2.0


def share_of(rank: int, size: int) -> tuple[int, int]:
    """Return a rank's share of a payload, as of `Encoder`; that of a rank that does not publish has no segments."""
    return (rank, min(size, PUBLISHING_RANKS_MAX)) if rank < PUBLISHING_RANKS_MAX else (MAX_SEGMENTS, 1)


class BorrowedWeights:
    """The weights themselves, and the other files of the model, lent to a background reader. They do not change until
    they are given back: updates wait for it. Any thread may give them back, also twice.
    """

    def __init__(
        self,
        tensors: Mapping[str, TensorSource],
        files: Mapping[str, bytes],
        base_model: SnapshotRef | None = None,
    ) -> None:
        self.tensors, self.files, self.base_model = tensors, files, base_model
        self.returned: Future[None] = Future()

    def release(self) -> None:
        """Allow the weights to change again."""
        with suppress(InvalidStateError):
            self.returned.set_result(None)


class Publisher:
    """Makes the payloads of one learner, one after the other: each is read to its end before the next is begun, and its
    chunks are available until then. `directory` needs room for a snapshot and a delta; if the disk is full, the
    publisher waits. `base_model`: the base model of published adapters. `share`: of one of several ranks, the share of
    the payloads that it makes, as of `Encoder`; its files have holes where the other shares would be.
    """

    def __init__(self, directory: Path, base_model: Snapshot | None = None, share: tuple[int, int] = (0, 1)) -> None:
        """Raises: UserError, the directory can't be written."""
        self.base_model, self.share = base_model, share
        self.trouble = ""  # what the publisher waits for, for people
        self._stopped = threading.Event()
        self.content, self.spool = (UnlinkedFile(directory, self._wait_for_room) for _ in range(2))
        self._last: Snapshot | None = None  # the snapshot in the content file; None: nothing, or a mixture
        self._made_from: BorrowedWeights | None = None
        self._steps: list[Manifest] = []  # payloads that build the last published content from nothing

    def stop(self) -> None:
        """Stop waiting for disk space."""
        self._stopped.set()

    def payload(self, ref: SnapshotRef, weights: BorrowedWeights) -> Payload:
        """Return the payload of `weights`: the changes since the last content, or at the start of a lineage the whole.
        Taking its parts reads the weights, gives them back, and makes them the last content."""
        if self._last is not None and self._made_from is weights:  # the lineage changed meanwhile
            return self.whole(ref)
        base = self._last if self._last is not None and self._last.ref.history == ref.history else None
        return Payload(self, Snapshot(ref, weights.tensors, weights.files, weights.base_model), base, weights)

    def whole(self, ref: SnapshotRef) -> Payload:
        """Return the last content as a payload without base, named `ref`."""
        assert self._last is not None
        self._last = replace(self._last, ref=ref)
        return Payload(self, self._last, None, None)

    def published(self, manifest: Manifest) -> bool:
        """Note that the head has this payload. Return whether the whole content is due as well, because a new worker
        would have to fetch as many deltas as a payload may have, or deltas as large as the content."""
        self._steps = [manifest] if manifest.base is None else [*self._steps, manifest]
        return is_anchor_due(self._steps)

    def begin(self, weights: BorrowedWeights) -> None:
        """Note that the content file is about to be overwritten with these weights."""
        self._last, self._made_from = None, weights
        self.spool.clear()

    def end(self, source: Snapshot) -> None:
        """Note that the content file now holds `source`."""
        tensors, start = {}, 0
        for entry in tensor_index(source.tensors):
            read = partial(self.content.read, start)
            tensors[entry.name] = StoredTensor(entry.dtype, entry.shape, entry.num_bytes, read)
            start += entry.num_bytes
        self._last = replace(source, tensors=tensors)

    def _wait_for_room(self, error: NoRoomError) -> None:
        if self._stopped.is_set():
            raise LinkError(f"no room for what is to be published, and this learner is to stop: {error}") from error
        self.trouble = f"waiting for room: {error}"
        log.warning("%s", self.trouble)
        self._stopped.wait(NO_ROOM_SECONDS)
        self.trouble = ""


class ChunkedPayload:
    """A payload that `encoder` encodes part by part. A chunk can be read as soon as its part was taken: tensors' from
    where `_reads` says, other files' from memory.
    """

    def __init__(self, ref: SnapshotRef, encoder: Encoder) -> None:
        self.ref, self._encoder = ref, encoder
        self._reads: dict[bytes, Callable[[], Bytes | memoryview]] = {}
        self._files: Chunks = {}

    def parts(self) -> Iterator[list[bytes]]:
        """Yield the names of distinct chunks, part by part; together they are the chunks of the manifest. Call it once.

        Raises:
            UserError: a dtype that snapshots cannot carry; the disk can't be written.
            LinkError: there is no room, and the publisher was stopped.
        """
        for chunks in self._encoder.parts():
            self._files.update((name, chunk) for name, chunk in chunks.items() if name not in self._reads)
            yield list(chunks)

    @property
    def manifest(self) -> Manifest:
        """The manifest, when all parts were taken."""
        return self._encoder.manifest()

    @property
    def names(self) -> list[bytes]:
        """Of all chunks whose parts were taken."""
        return [*self._files, *self._reads]

    def chunk(self, name: bytes) -> bytes:
        return bytes(self._files[name] if name in self._files else self._reads[name]())


class Payload(ChunkedPayload):
    """A payload of the weights, or of the last content (`weights` None)."""

    def __init__(
        self, publisher: Publisher, target: Snapshot, base: Snapshot | None, weights: BorrowedWeights | None
    ) -> None:
        self._publisher, self._target, self._weights = publisher, target, weights
        num_threads = min(THREADS_MAX, os.cpu_count() or 1)
        self.others: list[list[Segment]] = []  # of the first rank: the segments that the other ranks encoded
        encoder = Encoder(target, base, share=publisher.share, num_threads=num_threads, keep=self._keep)
        super().__init__(target.ref, encoder)

    def parts(self) -> Iterator[list[bytes]]:
        """As `ChunkedPayload.parts`. Weights are given back at the end."""
        if self._weights is None:
            yield from super().parts()
            return
        try:
            self._publisher.begin(self._weights)
            yield from super().parts()
            self._publisher.end(self._target)
        finally:
            self._weights.release()

    @property
    def segments(self) -> list[Segment]:
        """Those of this rank, when all parts were taken."""
        return self._encoder.segments

    @property
    def manifest(self) -> Manifest:
        """The manifest, when all parts were taken."""
        return self._encoder.manifest(self.others)

    def _keep(self, start: int, target: Bytes, segment: Segment, chunks: Chunks) -> None:
        """Store encoded chunks for later reading. Runs in the encoder's threads."""
        publisher = self._publisher
        if self._weights is not None and segment.records:
            publisher.content.write(start, target.data)
        for record in segment.records:
            if record.codec == RAW:
                file, at = publisher.content, start
            else:
                encoded = b"".join(chunks[name] for name, _ in record.chunks())
                file, at = publisher.spool, publisher.spool.append(encoded)
            for name, num_bytes in record.chunks():
                self._reads[name] = partial(file.read, at, 0, num_bytes)
                at += num_bytes


class BasePayload(ChunkedPayload):
    """A base model as a payload. It is frozen, so its chunks are not stored but read from the model when sent."""

    def __init__(self, base_model: Snapshot) -> None:
        super().__init__(base_model.ref, Encoder(base_model, keep=self._keep))
        self._tensors = base_model.tensors
        self._reads_at: dict[int, Callable[[], Bytes]] = {}  # by offset in the tensor stream

    def _keep(self, start: int, _: Bytes, segment: Segment, __: Chunks) -> None:
        for record in segment.records:
            if not self._reads_at:
                extents = cut_stream(tensor_index(self._tensors))
                sizes = [
                    min(record.chunk_bytes, extent - at)
                    for extent in extents
                    for at in range(0, extent, record.chunk_bytes)
                ]
                places = accumulate(sizes, initial=0)
                self._reads_at = dict(zip(places, readers(self._tensors, sizes), strict=False))
            for name, num_bytes in record.chunks():
                self._reads[name] = self._reads_at[start]
                start += num_bytes


class UnlinkedFile:
    """An unlinked file for any threads, as long as no thread reads or writes a range that another is writing.
    `wait_for_room` returns when another attempt is worthwhile, or raises; None: a full disk is an error.
    """

    def __init__(self, directory: Path, wait_for_room: Callable[[NoRoomError], None] | None = None) -> None:
        """Raises: UserError, the directory can't be written."""
        self._directory, self._wait_for_room = directory, wait_for_room
        self._end = 0
        self._appending = threading.Lock()
        try:
            directory.mkdir(parents=True, exist_ok=True)
            self._file, name = tempfile.mkstemp(dir=directory)
            weakref.finalize(self, os.close, self._file)  # once no encoder thread refers to it
            os.unlink(name)
        except OSError as error:
            raise self._failed(error) from error

    def read(self, at: int, start: int, stop: int) -> memoryview:
        """Return the bytes from `start` to `stop` of the data written at `at`."""
        data = passing_bytes(stop - start)
        done = 0
        while done < data.nbytes:
            num_read = os.preadv(self._file, [data[done:]], at + start + done)
            if not num_read:
                raise InvariantError(f"bytes {start} to {stop} at {at} were never written")
            done += num_read
        return data

    def write(self, at: int, data: bytes | memoryview) -> None:
        """Write all of `data` at `at`; wait for room on a full disk."""
        rest = memoryview(data)
        while rest.nbytes:
            try:
                done = os.pwrite(self._file, rest, at)
            except OSError as error:
                failure = self._failed(error)
                if self._wait_for_room is None or not isinstance(failure, NoRoomError):
                    raise failure from error
                self._wait_for_room(failure)
                continue
            rest, at = rest[done:], at + done

    def append(self, data: bytes | memoryview) -> int:
        """Append data. Return its offset."""
        with self._appending:
            at, self._end = self._end, self._end + memoryview(data).nbytes
        self.write(at, data)
        return at

    def clear(self) -> None:
        """Delete the content and free its disk space."""
        self._end = 0
        os.ftruncate(self._file, 0)

    def _failed(self, error: OSError) -> UserError:
        message = f"Cannot write the weights that are to be published into {self._directory}: {error.strerror}."
        return write_failed(error, f"{message} Free some space there; nothing was lost.")
