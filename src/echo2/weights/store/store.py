"""Chunks and manifests on disk, by content. One process owns a store; its caller fetches what is missing.

    <directory>/chunks/<number>.pack      manifests/<ref>[-over-<ref>].json      tmp/

One snapshot may be listed as several payloads: without a base, and over several bases. All lead to the same content.

At any instant, also under ``kill -9``, everything stored is complete: chunks as described below, and a manifest is
written under tmp/ and renamed into place. Files are not synced, so after a *power* failure some may be empty or full
of zeros. Hashes are checked at each read, and a wrong chunk counts as missing and is fetched again.

Chunks lie in a few large files: one file for each chunk would cost more than all other work on the chunk. They are only
appended, so a chunk that a killed process leaves half-written is at the end of a pack. The next opening
cuts it off, and also everything behind a header that the disk has altered. The hash of a forgotten chunk is
overwritten. A pack is deleted when less than half of it is still needed; its needed chunks are first appended to the
newest pack. So the packs take at most twice the space of their chunks.
"""

from __future__ import annotations

import errno
import itertools
import logging
import os
import re
import struct
import threading
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from blake3 import blake3

from echo2.core.errors import NO_ROOM, InvariantError, PeerError, UserError, write_failed
from echo2.core.types import PayloadId, SnapshotRef
from echo2.weights.format.manifest import HASH_BYTES, MAX_CHUNK_BYTES, MAX_DELTAS, Manifest

log = logging.getLogger(__name__)

#: A pack of this size is not extended. The chunks of one payload are deleted at about the same time.
PACK_BYTES = 64 << 20

#: Errors that do not mean damaged bytes on disk: too many files are open, or memory is short.
PASSING = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM})

_NO_HASH = bytes(HASH_BYTES)
_HEADER = struct.Struct(f"<{HASH_BYTES}sI")
_CHUNK_NAME = re.compile(rf"[0-9a-f]{{{2 * HASH_BYTES}}}")  # 0.2.0 had a file for each chunk; such files are deleted


@dataclass(frozen=True, slots=True)
class ChunkPlace:
    """Where the bytes of a chunk are stored."""

    pack: int
    start: int
    num_bytes: int


class Packs:
    """The chunks in a directory, by hash. The caller checks hashes. Any thread may call any method.

    Raises:
        OSError: the directory cannot be used.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._writing, self._sweeping = threading.Lock(), threading.Lock()
        self._places: dict[bytes, ChunkPlace] = {}
        self._forgotten: list[ChunkPlace] = []
        self._ends: dict[int, int] = {}
        directory.mkdir(parents=True, exist_ok=True)
        for number in sorted(int(path.stem) for path in directory.glob("*.pack") if path.stem.isdecimal()):
            self._ends[number] = 0
            for hash_, place in _scan(self.path(number), number):
                self._ends[number] = place.start + place.num_bytes
                if hash_ != _NO_HASH:
                    self._places[hash_] = place
            os.truncate(self.path(number), self._ends[number])
        self._newest = max(self._ends, default=0)

    def path(self, number: int) -> Path:
        return self.directory / f"{number}.pack"

    def place(self, hash_: bytes) -> ChunkPlace | None:
        """Return where a chunk is stored; None: it is not stored here."""
        return self._places.get(hash_)

    def hashes(self) -> list[bytes]:
        """Return the hashes of all stored chunks."""
        return list(self._places)

    def forget(self, hash_: bytes) -> ChunkPlace | None:
        """Remove a chunk from the index, and return its place. Its bytes stay on disk until `sweep`."""
        place = self._places.pop(hash_, None)
        if place is not None:
            self._forgotten.append(place)
        return place

    def drop(self, hash_: bytes) -> None:
        """Forget a chunk that the disk altered, and overwrite its hash, so that the next opening does not find it."""
        place = self.forget(hash_)
        if place is not None:
            with suppress(OSError):  # if this fails, the chunk is found and refused once more
                self._erase(place)

    def append(self, chunks: Iterable[tuple[bytes, bytes | memoryview]]) -> None:
        """Store chunks, given as (hash, bytes), in order. Chunks that are stored already are not written again.

        Raises:
            OSError: the disk is full or cannot be written; only the chunks before the one that failed are stored.
        """
        with self._writing:
            for hash_, data in chunks:
                place = self._places.get(hash_)
                if place is None or place.num_bytes != len(data):
                    self._places[hash_] = self._write(hash_, data)

    def read(self, place: ChunkPlace) -> bytes:
        """Return the bytes of a place, unverified; fewer bytes if the pack has become shorter.

        Raises:
            OSError: the pack cannot be read, or a sweep has moved the chunk.
        """
        file = os.open(self.path(place.pack), os.O_RDONLY)
        try:
            return os.pread(file, place.num_bytes, place.start)
        finally:
            os.close(file)

    def sweep(self) -> None:
        """Free the disk space of forgotten chunks. If a sweep is interrupted, these chunks reappear at the next opening
        and must be forgotten again. A full disk interrupts it: a pack stays while its needed chunks cannot be moved.

        Raises:
            OSError: a pack cannot be deleted, read or written.
        """
        with self._sweeping:
            kept_bytes = Counter[int]()
            for place in list(self._places.values()):
                kept_bytes[place.pack] += _HEADER.size + place.num_bytes
            with self._writing:
                sparse = [number for number, end in self._ends.items() if 2 * kept_bytes[number] < end]
                self._newest += self._newest in sparse
            moving: defaultdict[int, list[tuple[bytes, ChunkPlace]]] = defaultdict(list)
            for hash_, place in list(self._places.items()):
                moving[place.pack].append((hash_, place))
            try:
                for number in sorted(sparse, key=lambda number: kept_bytes[number]):  # least to move first
                    for hash_, place in moving[number]:
                        self._move(hash_, place)
                    self.path(number).unlink(missing_ok=True)
                    del self._ends[number]
                while self._forgotten:
                    self._erase(self._forgotten.pop())
            except OSError as error:
                if error.errno not in PASSING | {*NO_ROOM}:
                    raise
                log.warning("%s keeps unneeded chunks for now: %s", self.directory, error.strerror)

    def _move(self, hash_: bytes, place: ChunkPlace) -> None:
        data = b""
        try:
            data = self.read(place)
        except OSError as error:  # unreadable: the chunk is lost
            if error.errno in PASSING:
                raise
        with self._writing:
            if self._places.get(hash_) is not place:
                return
            if len(data) == place.num_bytes:
                self._places[hash_] = self._write(hash_, data)
            else:
                del self._places[hash_]

    def _erase(self, place: ChunkPlace) -> None:
        if place.pack in self._ends:
            file = os.open(self.path(place.pack), os.O_WRONLY)
            try:
                write_at(file, place.start - _HEADER.size, _NO_HASH)
            finally:
                os.close(file)

    def _write(self, hash_: bytes, data: bytes | memoryview) -> ChunkPlace:
        if self._ends.get(self._newest, 0) >= PACK_BYTES:
            self._newest += 1
        number, end = self._newest, self._ends.get(self._newest, 0)
        file = os.open(self.path(number), os.O_WRONLY | os.O_CREAT, 0o600)
        try:
            self._ends[number] = end
            try:
                write_at(file, end, _HEADER.pack(hash_, len(data)))
                write_at(file, end + _HEADER.size, data)
            except BaseException:
                os.ftruncate(file, end)
                raise
        finally:
            os.close(file)
        self._ends[number] = end + _HEADER.size + len(data)
        return ChunkPlace(number, end + _HEADER.size, len(data))


def write_at(file: int, start: int, data: bytes | memoryview) -> None:
    """Write all bytes at offset `start` of the file.

    Raises:
        OSError: the disk is full or cannot be written.
    """
    rest = memoryview(data)
    while rest.nbytes:
        written = os.pwrite(file, rest, start)
        rest, start = rest[written:], start + written


def _scan(path: Path, number: int) -> Iterator[tuple[bytes, ChunkPlace]]:
    """Yield the chunks of a pack, up to the first incomplete chunk."""
    with path.open("rb", buffering=0) as pack:
        size, at = os.fstat(pack.fileno()).st_size, 0
        while at + _HEADER.size <= size:
            hash_, num_bytes = _HEADER.unpack(os.pread(pack.fileno(), _HEADER.size, at))
            at += _HEADER.size
            if not 0 < num_bytes <= min(MAX_CHUNK_BYTES, size - at):
                return
            yield hash_, ChunkPlace(number, at, num_bytes)
            at += num_bytes


class ChunkStore:
    """Content-addressed chunks, and the manifests whose chunks are all stored.

    Opening creates the directory where needed and clears what a killed process left half-written. One thread may write
    while others read: a read gives verified bytes, or an error.

    Raises:
        UserError: the directory cannot be used or is full; nothing half-written is visible, nothing stored is lost.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._manifests = directory / "manifests"
        self._tmp = directory / "tmp"
        self._serial = itertools.count()
        try:
            for folder in (self._manifests, self._tmp):
                folder.mkdir(parents=True, exist_ok=True)
            for leftover in self._tmp.iterdir():
                leftover.unlink()
            self._packs = Packs(directory / "chunks")
            for path in self._packs.directory.iterdir():
                if _CHUNK_NAME.fullmatch(path.name):
                    path.unlink()
            self._whole = self._load_manifests()
        except OSError as error:
            raise write_failed(error, f"Cannot open the snapshot store {directory}: {error.strerror}.") from error

    def has(self, hash_: bytes) -> bool:
        return self._packs.place(hash_) is not None

    def put(self, hash_: bytes, data: bytes | memoryview) -> None:
        """Store one chunk. Putting it again changes nothing.

        Raises:
            PeerError: "corrupt", when the data does not have this hash; "oversized".
            UserError: the disk is full or cannot be written.
        """
        check_chunk(hash_, data)
        self.put_checked([(hash_, data)])

    def put_checked(self, chunks: Sequence[tuple[bytes, bytes | memoryview]]) -> None:
        """Store chunks, given as (hash, bytes), that passed `check_chunk`.

        Raises:
            UserError: the disk is full or cannot be written; the chunks before the one that failed are kept.
        """
        try:
            self._packs.append(chunks)
        except OSError as error:
            raise self._write_failed(sum(len(data) for _, data in chunks), error) from error

    def get(self, hash_: bytes) -> bytes:
        """Return the bytes of one chunk, verified.

        Raises:
            PeerError: "missing", when it is not stored here; "corrupt", when the disk altered it or cannot read it. The
                chunk is dropped then, so that it is fetched again.
            UserError: too many files are open or memory is short. The chunk stays.
        """
        while (place := self._packs.place(hash_)) is not None:
            try:
                data, fault = self._packs.read(place), "was altered on disk"
            except OSError as error:
                if error.errno in PASSING:
                    message = f"Cannot read in the snapshot store {self.directory}: {error.strerror}. "
                    raise UserError(message + "Allow this process more open files (ulimit -n) and memory.") from error
                data, fault = b"", f"can't be read ({error.strerror})"
            if blake3(data).digest() == hash_:
                return data
            if self._packs.place(hash_) is place:  # else a sweep has moved it
                self._packs.drop(hash_)
                path = self._packs.path(place.pack)
                raise PeerError("corrupt", f"chunk {hash_.hex()} in {path} {fault} and is dropped")
        raise PeerError("missing", f"chunk {hash_.hex()[:128]} is not in this store")

    def missing(self, manifest: Manifest) -> tuple[bytes, ...]:
        """Return the distinct hashes of the manifest's chunks that are not stored here, in stream order."""
        return tuple(hash_ for hash_, size in manifest.chunk_bytes.items() if self._size(hash_) != size)

    def put_manifest(self, manifest: Manifest) -> None:
        """List a manifest whose chunks are all stored.

        Raises:
            InvariantError: some chunks are missing, or another content is listed under the same ref.
            UserError: the disk is full or cannot be written.
        """
        absent = self.missing(manifest)
        if absent:
            raise InvariantError(f"payload {manifest.payload} misses {len(absent)} chunks, first {absent[0].hex()}")
        if any(m.ref == manifest.ref and m.root != manifest.root for m in list(self._whole.values())):
            raise InvariantError(f"snapshot {manifest.ref} is immutable, but came again with another content")
        self._write(self._manifest_path(manifest.payload), manifest.text)
        self._whole[manifest.payload] = manifest

    def manifest(self, payload: PayloadId) -> Manifest | None:
        """Return the manifest of this payload if all its chunks are stored, else None."""
        manifest = self._whole.get(payload)
        return None if manifest is None or self.missing(manifest) else manifest

    def manifests(self) -> list[Manifest]:
        """Return the manifests whose chunks are all stored, oldest first; for one snapshot, without a base first."""
        manifests = (self.manifest(payload) for payload in sorted(self._whole, key=_age))
        return [manifest for manifest in manifests if manifest is not None]

    def chain(self, ref: SnapshotRef, over: SnapshotRef | None = None) -> list[Manifest] | None:
        """Return the payloads that lead to `ref` from nothing, or from `over`, in the order of applying. None: no such
        chain is stored, or it is too long for one payload. From nothing, it begins with the nearest payload without a
        base."""
        steps: list[Manifest] = []
        while len(steps) <= MAX_DELTAS:
            whole = None if over is not None else self.manifest(PayloadId(ref))
            deltas = (m for m in list(self._whole.values()) if m.ref == ref and m.base is not None)
            step = whole or next((delta for delta in deltas if not self.missing(delta)), None)
            if step is None:
                return None
            steps.insert(0, step)
            if step.base == over:
                return steps
            assert step.base is not None
            ref = step.base
        return None

    def drop_manifest(self, payload: PayloadId) -> None:
        """Forget a manifest, if it is listed. Its chunks stay until `retain`."""
        if self._whole.pop(payload, None) is not None:
            self._manifest_path(payload).unlink(missing_ok=True)

    def drop_snapshot(self, ref: SnapshotRef) -> None:
        """Forget every payload of a snapshot."""
        for payload in [payload for payload in list(self._whole) if payload.ref == ref]:
            self.drop_manifest(payload)

    def retain(self, manifests: Iterable[Manifest], chunks: Iterable[bytes] = ()) -> int:
        """Keep these manifests (listed, or still being fetched), their chunks, and `chunks`; delete all others.

        Returns the number of bytes freed. Manifests are deleted before their chunks: a listed manifest is complete at
        any instant.
        """
        num_bytes = self.forget(manifests, chunks)
        self.sweep()
        return num_bytes

    def forget(self, manifests: Iterable[Manifest], chunks: Iterable[bytes] = ()) -> int:
        """The quick half of `retain`: forget all other manifests and chunks. The chunks take disk space until `sweep`.
        Returns the number of their bytes.
        """
        payloads, used = set(), set(chunks)
        for manifest in manifests:
            payloads.add(manifest.payload)
            used.update(manifest.chunk_bytes)
        for payload in [payload for payload in list(self._whole) if payload not in payloads]:
            self.drop_manifest(payload)
        forgotten = [self._packs.forget(hash_) for hash_ in self._packs.hashes() if hash_ not in used]
        return sum(place.num_bytes for place in forgotten if place is not None)

    def sweep(self) -> None:
        """The slow half of `retain`, on any thread: free the disk space of forgotten chunks. See `Packs.sweep`.

        Raises:
            UserError: a pack cannot be deleted, read or written.
        """
        try:
            self._packs.sweep()
        except OSError as error:
            message = f"Cannot delete in the snapshot store {self.directory}: {error.strerror}."
            raise write_failed(error, message) from error

    def _size(self, hash_: bytes) -> int:
        place = self._packs.place(hash_)
        return 0 if place is None else place.num_bytes

    def _manifest_path(self, payload: PayloadId) -> Path:
        over = "" if payload.base is None else f"-over-{payload.base}"
        return self._manifests / f"{payload.ref}{over}.json"

    def _load_manifests(self) -> dict[PayloadId, Manifest]:
        """Load the manifests whose chunks are all stored; delete the files of the others (damaged by the disk)."""
        whole: dict[PayloadId, Manifest] = {}
        for path in self._manifests.iterdir():
            try:
                manifest = Manifest.from_bytes(path.read_bytes())
            except PeerError:
                path.unlink()
                continue
            if path == self._manifest_path(manifest.payload) and not self.missing(manifest):
                whole[manifest.payload] = manifest
            else:
                path.unlink()
        return whole

    def _write(self, path: Path, data: bytes) -> None:
        tmp = self._tmp / f"{next(self._serial)}-{path.name}"
        try:
            try:
                tmp.write_bytes(data)
                os.replace(tmp, path)
            except BaseException:
                tmp.unlink(missing_ok=True)
                raise
        except OSError as error:
            raise self._write_failed(len(data), error) from error

    def _write_failed(self, num_bytes: int, error: OSError) -> Exception:
        message = (
            f"Cannot write {num_bytes} bytes into the snapshot store {self.directory}: {error.strerror}. "
            "Nothing that was stored is lost; make room there (or allow writing), then start again."
        )
        return write_failed(error, message)


def check_chunk(hash_: bytes, data: bytes | memoryview) -> None:
    """Raises:
    PeerError: "corrupt", when the data does not have this hash; "oversized".
    """
    if len(data) > MAX_CHUNK_BYTES:
        raise PeerError("oversized", f"chunk of {len(data)} bytes; the limit is {MAX_CHUNK_BYTES}")
    if blake3(data).digest() != hash_:
        raise PeerError("corrupt", f"{len(data)} bytes were sent as chunk {hash_.hex()[:128]} and are not it")


def _age(payload: PayloadId) -> tuple[SnapshotRef, bool, SnapshotRef]:
    return payload.ref, payload.base is not None, payload.base or payload.ref
