"""Chunks on disk, behind each other in a few large files: a file for each costs more than all else done with a chunk.

    <directory>/<number>.pack     of each chunk its hash (32 bytes), its size (4 bytes) and its bytes

Chunks are only ever written behind the last one, so what a killed process leaves half-written is at the end of a pack:
it is cut off at the next opening, as is all behind a header that a disk has altered. The hash of a chunk that is
forgotten is written over. A pack goes when less than half of it is still needed; what is, is written again behind the
newest chunk. So the packs take at most twice the room of what they hold.
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

from echo2.weights.manifest import HASH_BYTES, MAX_CHUNK_BYTES

log = logging.getLogger(__name__)

#: From this size on a pack is not continued. All of what comes with one payload goes at about the same time.
PACK_BYTES = 64 << 20

#: Errors that say nothing of the bytes on disk: too many files are open, or memory is short.
PASSING = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM})
_NO_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT})

_NO_HASH = bytes(HASH_BYTES)
_HEADER = struct.Struct(f"<{HASH_BYTES}sI")


@dataclass(frozen=True, slots=True)
class ChunkPlace:
    """Where the bytes of a chunk are."""

    pack: int
    start: int
    num_bytes: int


class Packs:
    """The chunks in a directory, by hash. Hashes are the caller's to check. Any thread may call anything.

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
        """Where a chunk is; None: it is not here."""
        return self._places.get(hash_)

    def hashes(self) -> list[bytes]:
        """Of all chunks that are here."""
        return list(self._places)

    def forget(self, hash_: bytes) -> ChunkPlace | None:
        """From now on this chunk is not here; where it was. Its bytes stay until `sweep`."""
        place = self._places.pop(hash_, None)
        if place is not None:
            self._forgotten.append(place)
        return place

    def drop(self, hash_: bytes) -> None:
        """Forget a chunk that the disk altered, for the next opening too: its place is not trusted any more."""
        place = self.forget(hash_)
        if place is not None:
            with suppress(OSError):  # on such a disk it is found wrong once more then
                self._erase(place)

    def append(self, chunks: Iterable[tuple[bytes, bytes | memoryview]]) -> None:
        """Write (hash, bytes) of chunks, in order; those that are here already are not written again.

        Raises:
            OSError: the disk is full or cannot be written: the chunks before are here, this one and the rest are not.
        """
        with self._writing:
            for hash_, data in chunks:
                place = self._places.get(hash_)
                if place is None or place.num_bytes != len(data):
                    self._places[hash_] = self._write(hash_, data)

    def read(self, place: ChunkPlace) -> bytes:
        """The bytes there, whatever the disk made of them; fewer where the pack has become shorter.

        Raises:
            OSError: it can't be read, or a sweep has moved the chunk.
        """
        file = os.open(self.path(place.pack), os.O_RDONLY)
        try:
            return os.pread(file, place.num_bytes, place.start)
        finally:
            os.close(file)

    def sweep(self) -> None:
        """Give the room of forgotten chunks back to the disk. Where that is broken off, they are here after the next
        opening, to be forgotten again. A full disk breaks it off: a pack stays while there is no room to move the rest.

        Raises:
            OSError: a pack can't be deleted, read or written.
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
                for number in sorted(sparse, key=lambda number: kept[number]):  # first those that need no room
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
        except OSError as error:  # a disk that can't read it: it is not here any more
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
    """Write all of it, from this place of the file on.

    Raises:
        OSError: the disk is full or cannot be written.
    """
    left = memoryview(data)
    while left.nbytes:
        written = os.pwrite(file, left, start)
        left, start = left[written:], start + written


def _scan(path: Path, number: int) -> Iterator[tuple[bytes, ChunkPlace]]:
    """The chunks of a pack, up to the first that is not whole."""
    with path.open("rb", buffering=0) as pack:
        size, at = os.fstat(pack.fileno()).st_size, 0
        while at + _HEADER.size <= size:
            hash_, num_bytes = _HEADER.unpack(os.pread(pack.fileno(), _HEADER.size, at))
            at += _HEADER.size
            if not 0 < num_bytes <= min(MAX_CHUNK_BYTES, size - at):
                return
            yield hash_, ChunkPlace(number, at, num_bytes)
            at += num_bytes
