"""Stores chunks in a few large files: one file for each chunk would cost more than all other work on the chunk.

    <directory>/<number>.pack     for each chunk: its hash (32 bytes), its size (4 bytes) and its bytes

Chunks are only appended, so a chunk that a killed process leaves half-written is at the end of a pack. The next opening
cuts it off, and also everything behind a header that the disk has altered. The hash of a forgotten chunk is
overwritten. A pack is deleted when less than half of it is still needed; its needed chunks are first appended to the
newest pack. So the packs take at most twice the space of their chunks.
"""

from __future__ import annotations

import errno
import logging
import os
import struct
import threading
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from echo2.weights.format.manifest import HASH_BYTES, MAX_CHUNK_BYTES

log = logging.getLogger(__name__)

#: A pack of this size is not extended. The chunks of one payload are deleted at about the same time.
PACK_BYTES = 64 << 20

#: Errors that do not mean damaged bytes on disk: too many files are open, or memory is short.
PASSING = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM})
_NO_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT})

_NO_HASH = bytes(HASH_BYTES)
_HEADER = struct.Struct(f"<{HASH_BYTES}sI")


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
        """The file of a pack."""
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
            kept = Counter[int]()
            for place in list(self._places.values()):
                kept[place.pack] += _HEADER.size + place.num_bytes
            with self._writing:
                sparse = [number for number, end in self._ends.items() if 2 * kept[number] < end]
                self._newest += self._newest in sparse
            moving: defaultdict[int, list[tuple[bytes, ChunkPlace]]] = defaultdict(list)
            for hash_, place in list(self._places.items()):
                moving[place.pack].append((hash_, place))
            try:
                for number in sorted(sparse, key=lambda number: kept[number]):  # least to move first
                    for hash_, place in moving[number]:
                        self._move(hash_, place)
                    self.path(number).unlink(missing_ok=True)
                    del self._ends[number]
                while self._forgotten:
                    self._erase(self._forgotten.pop())
            except OSError as error:
                if error.errno not in PASSING | _NO_ROOM:
                    raise
                log.warning("%s keeps, for now, chunks that nobody needs: %s", self.directory, error.strerror)

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
    left = memoryview(data)
    while left.nbytes:
        written = os.pwrite(file, left, start)
        left, start = left[written:], start + written


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
