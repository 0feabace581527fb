"""Publishes a version: encodes it, and keeps it in two files, not in memory, until the head has it.

    content   what was published last, as the tensor stream: the base of the next delta, and the bytes of raw records
    spool     the records of the delta under way

A publication reads the weights themselves, segment by segment: compares each with the content, encodes what changed,
and writes it over the old. So it needs memory for a few segments, and the weights can go on changing as soon as the
last one is encoded, however slow the link is. Whether workers have the base does not matter: the encoder waits for
nobody.

The files have no names: whatever kills the process, the disk has them back, and no later learner takes one that was
half written for a base. It sends the whole content first.
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
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from pathlib import Path

from echo2.errors import InvariantError, LinkError, NoRoomError, UserError, write_failed
from echo2.types import SnapshotRef, StoredTensor, TensorSource
from echo2.weights.chain import is_anchor_due
from echo2.weights.encoder import Chunks, Encoder, SnapshotSource
from echo2.weights.manifest import RAW, Manifest, Segment
from echo2.weights.segments import Bytes, cut_stream, passing_bytes, readers, tensor_index

log = logging.getLogger(__name__)

#: Segments that are encoded at once; each takes about 30 MB.
THREADS_MAX = 4
#: A multiple of every item's, of what is copied at once.
PIECE_BYTES = 16 << 20
#: Between two tries to write to a full disk.
NO_ROOM_SECONDS = 2.0


class LentWeights:
    """The weights themselves, and the files that make them a model, for whoever reads them beside the training. They
    do not change until they are given back: updates wait for it. Any thread may give them back, also twice.
    """

    def __init__(
        self,
        tensors: Mapping[str, TensorSource],
        files: Mapping[str, bytes],
        base_model: SnapshotRef | None = None,
    ) -> None:
        self.tensors, self.files, self.base_model = tensors, files, base_model
        self.returned: Future[None] = Future()

    def give_back(self) -> None:
        """Nobody reads them any more."""
        with suppress(InvalidStateError):
            self.returned.set_result(None)


@dataclass(frozen=True, slots=True)
class _Source:
    """A snapshot whose tensors are read where they are."""

    ref: SnapshotRef
    tensors: Mapping[str, TensorSource]
    files: Mapping[str, bytes]
    base_model: SnapshotRef | None


class Publisher:
    """The payloads of one learner, one after the other: each is read to its end before the next is begun, and its
    chunks can be had until then. `directory` has room for a snapshot and a delta; a full disk is waited for.
    `base_model`: what the published adapters are over.
    """

    def __init__(self, directory: Path, base_model: SnapshotSource | None = None) -> None:
        """Raises: UserError, the directory can't be written."""
        self.base_model = base_model
        self.trouble = ""  # what is waited for, for people
        self._stopped = threading.Event()
        self.content, self.spool = (NamelessFile(directory, self._wait_for_room) for _ in range(2))
        self._last: _Source | None = None  # what the content file holds; None: nothing, or a mixture
        self._made_from: LentWeights | None = None
        self._steps: list[Manifest] = []  # what leads to the last published content from nothing

    def stop(self) -> None:
        """Wait for no room any more."""
        self._stopped.set()

    def payload(self, ref: SnapshotRef, weights: LentWeights) -> Payload:
        """What changed since the last content, and all of it at the start of a lineage. To take its parts is to read
        the weights, which are given back then, and to make them the last content."""
        if self._last is not None and self._made_from is weights:  # the lineage changed meanwhile
            return self.whole(ref)
        base = self._last if self._last is not None and self._last.ref.history == ref.history else None
        return Payload(self, _Source(ref, weights.tensors, weights.files, weights.base_model), base, weights)

    def whole(self, ref: SnapshotRef) -> Payload:
        """The last content as it is, named `ref`, over nothing."""
        assert self._last is not None
        self._last = replace(self._last, ref=ref)
        return Payload(self, self._last, None, None)

    def published(self, manifest: Manifest) -> bool:
        """The head has this payload. Returns whether the whole content is due as well: a newcomer would have to take as
        many deltas as a payload may have, or deltas as large as the content."""
        self._steps = [manifest] if manifest.base is None else [*self._steps, manifest]
        return is_anchor_due(self._steps)

    def begin(self, weights: LentWeights) -> None:
        """The content file is about to become these weights."""
        self._last, self._made_from = None, weights
        self.spool.clear()

    def end(self, source: _Source) -> None:
        """The content file has become this."""
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


class Payload:
    """One payload. Its chunks can be read as soon as they are among the parts that were taken."""

    def __init__(
        self, publisher: Publisher, target: _Source, base: SnapshotSource | None, weights: LentWeights | None
    ) -> None:
        self._publisher, self._target, self._weights = publisher, target, weights
        num_threads = min(THREADS_MAX, os.cpu_count() or 1)
        self._encoder = Encoder(target, base, num_threads=num_threads, keep=self._keep)
        self._places: dict[bytes, tuple[NamelessFile, int, int]] = {}
        self._files: Chunks = {}

    def parts(self) -> Iterator[list[bytes]]:
        """Names of distinct chunks, some at a time: all together those that the manifest names. To be taken once.

        Raises:
            UserError: a dtype that snapshots cannot carry; the disk can't be written.
            LinkError: there is no room, and nobody waits for it any more.
        """
        if self._weights is None:
            yield from map(self._named, self._encoder.parts())
            return
        try:
            self._publisher.begin(self._weights)
            yield from map(self._named, self._encoder.parts())
            self._publisher.end(self._target)
        finally:
            self._weights.give_back()

    @property
    def manifest(self) -> Manifest:
        """The manifest, when all parts were taken."""
        return self._encoder.manifest()

    @property
    def names(self) -> list[bytes]:
        """Of all chunks whose parts were taken."""
        return [*self._files, *self._places]

    def chunk(self, name: bytes) -> bytes:
        """The bytes of a chunk."""
        if name in self._files:
            return bytes(self._files[name])
        file, start, num_bytes = self._places[name]
        return bytes(file.read(start, 0, num_bytes))

    def _named(self, chunks: Chunks) -> list[bytes]:
        """What the encoder gives that no thread has kept are the chunks of files, which are in memory anyway."""
        self._files.update((name, chunk) for name, chunk in chunks.items() if name not in self._places)
        return list(chunks)

    def _keep(self, start: int, target: Bytes, segment: Segment, chunks: Chunks) -> None:
        """In the encoder's threads: put what was encoded where it can be read later."""
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
                self._places[name] = (file, at, num_bytes)
                at += num_bytes


class BasePayload:
    """A base model as a payload: it is frozen, so its chunks are read where it lies, once more when they are sent."""

    def __init__(self, base_model: SnapshotSource) -> None:
        self._tensors = base_model.tensors
        self._encoder = Encoder(base_model, keep=self._keep)
        self._reads: dict[int, Callable[[], Bytes]] = {}  # by place in the tensor stream
        self._chunks: dict[bytes, Callable[[], Bytes]] = {}
        self._files: Chunks = {}

    def parts(self) -> Iterator[list[bytes]]:
        """As `Payload.parts`."""
        for chunks in self._encoder.parts():
            self._files.update((name, chunk) for name, chunk in chunks.items() if name not in self._chunks)
            yield list(chunks)

    @property
    def manifest(self) -> Manifest:
        """The manifest, when all parts were taken."""
        return self._encoder.manifest()

    @property
    def names(self) -> list[bytes]:
        """Of all chunks whose parts were taken."""
        return [*self._files, *self._chunks]

    def chunk(self, name: bytes) -> bytes:
        """The bytes of a chunk."""
        return bytes(self._files[name] if name in self._files else self._chunks[name]())

    def _keep(self, start: int, _: Bytes, segment: Segment, __: Chunks) -> None:
        for record in segment.records:
            if not self._reads:
                extents = cut_stream(tensor_index(self._tensors))
                sizes = [
                    min(record.chunk_bytes, extent - at)
                    for extent in extents
                    for at in range(0, extent, record.chunk_bytes)
                ]
                places = accumulate(sizes, initial=0)
                self._reads = dict(zip(places, readers(self._tensors, sizes), strict=False))
            for name, num_bytes in record.chunks():
                self._chunks[name] = self._reads[start]
                start += num_bytes


class NamelessFile:
    """A file without a name, for any threads: what one writes at a place no other reads or writes meanwhile.
    `wait_for_room` returns when it is worth another try, or raises.
    """

    def __init__(self, directory: Path, wait_for_room: Callable[[NoRoomError], None]) -> None:
        """Raises: UserError, the directory can't be written."""
        self._directory, self._wait_for_room = directory, wait_for_room
        self._end = 0
        self._appending = threading.Lock()
        try:
            directory.mkdir(parents=True, exist_ok=True)
            self._file, name = tempfile.mkstemp(dir=directory)
            weakref.finalize(self, os.close, self._file)  # when no thread of an encoder has it any more
            os.unlink(name)
        except OSError as error:
            raise self._failed(error) from error

    def read(self, at: int, start: int, stop: int) -> memoryview:
        """The bytes from `start` to `stop` of what was written at `at`."""
        data = passing_bytes(stop - start)
        done = 0
        while done < data.nbytes:
            got = os.preadv(self._file, [data[done:]], at + start + done)
            if not got:
                raise InvariantError(f"bytes {start} to {stop} at {at} were never written")
            done += got
        return data

    def write(self, at: int, data: bytes | memoryview) -> None:
        """All of it, when there is room."""
        rest = memoryview(data)
        while rest.nbytes:
            try:
                done = os.pwrite(self._file, rest, at)
            except OSError as error:
                failure = self._failed(error)
                if not isinstance(failure, NoRoomError):
                    raise failure from error
                self._wait_for_room(failure)
                continue
            rest, at = rest[done:], at + done

    def append(self, data: bytes | memoryview) -> int:
        """Write behind everything else; where that is."""
        with self._appending:
            at, self._end = self._end, self._end + memoryview(data).nbytes
        self.write(at, data)
        return at

    def copied(self, tensor: TensorSource) -> StoredTensor:
        """The same tensor, to be read from this file; a piece of it at a time is in memory."""
        at = self._end
        for start in range(0, tensor.num_bytes, PIECE_BYTES):
            self.append(tensor.read(start, min(start + PIECE_BYTES, tensor.num_bytes)))
        return StoredTensor(tensor.dtype, tensor.shape, tensor.num_bytes, partial(self.read, at))

    def clear(self) -> None:
        """Give the disk back what was written."""
        self._end = 0
        os.ftruncate(self._file, 0)

    def _failed(self, error: OSError) -> UserError:
        message = f"Cannot write the weights that are to be published into {self._directory}: {error.strerror}."
        return write_failed(error, f"{message} Free some space there; nothing was lost.")
