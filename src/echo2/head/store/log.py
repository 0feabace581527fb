"""Reads and writes the log of a ledger in a store (`decide/log.py`):

    log/<position>     entries, created once        marks/<number>    where a reader may begin, created once and kept
    copies/<name>      copies of the ledger, sealed     alive              the newest sign of life, replaced

Lists of a store may be old. So the newest mark is found by asking for the number behind the newest one listed, until
there is none, and the end of the log likewise.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Protocol, TypeVar

import msgspec
from blake3 import blake3

from echo2.core.errors import InvariantError, LinkError, UserError
from echo2.core.objects import Objects
from echo2.head.ledger.schema import MAX_INTEGER
from echo2.head.store.decide.log import Claim, Entry, LogWriter, Mark, SignOfLife

_DIGEST_BYTES = 32
_T = TypeVar("_T", Entry, Mark, SignOfLife)
ALIVE_KEY = "alive"


class FollowedError(UserError):
    """Another head has taken the run over."""


class Replica(Protocol):
    """What the log is about. `number`: its last record; 0: none."""

    @property
    def number(self) -> int: ...

    def apply(self, number: int, record: bytes) -> None:
        """Make the change that is record `number`, the next one."""

    def load(self, pieces: Iterator[bytes]) -> None:
        """Become the copy in these pieces."""


class _Nothing:
    """Needs no record: the log is read for it to find its end."""

    number = MAX_INTEGER

    def apply(self, number: int, record: bytes) -> None:
        raise InvariantError(f"record {number}")

    def load(self, pieces: Iterator[bytes]) -> None:
        raise InvariantError("a copy is not wanted")


def encode(value: Entry | Mark | SignOfLife) -> bytes:
    """Return an object of the store, with a digest of it."""
    data = msgspec.msgpack.encode(value)
    return blake3(data).digest() + data


def decode(data: bytes, kind: type[_T]) -> _T:
    """Return the value in an object. Raises UserError: the store has damaged it, or mistaken it for another."""
    if blake3(data[_DIGEST_BYTES:]).digest() != data[:_DIGEST_BYTES]:
        raise _lost("an object of its log, whose digest is wrong now")
    try:
        return msgspec.msgpack.decode(data[_DIGEST_BYTES:], type=kind)
    except msgspec.MsgspecError as error:
        raise _lost(f"an object of its log, in whose place is another: {error}") from error


def sealed(pieces: Iterable[bytes]) -> Iterator[bytes]:
    """Yield the pieces of a copy, and their digest."""
    digest = blake3()
    for piece in pieces:
        digest.update(piece)
        yield piece
    yield digest.digest()


def unsealed(name: str, pieces: Iterable[bytes]) -> Iterator[bytes]:
    """Yield the pieces of a sealed copy. Raises UserError at their end: they are not as they were sealed."""
    digest, tail = blake3(), b""
    for piece in pieces:
        tail += piece
        data, tail = tail[:-_DIGEST_BYTES], tail[-_DIGEST_BYTES:]
        digest.update(data)
        yield data
    if digest.digest() != tail:
        raise _lost(f"its copy of the ledger, {name}, whose digest is wrong now")


class LogReader:
    """Brings a replica up to date with the log. After `catch_up`: `position`, behind the last entry; `last`, that
    entry; `stored`, the number of its last record; `beginnings`, see `Mark`."""

    def __init__(self, objects: Objects, replica: Replica) -> None:
        self._objects, self._replica = objects, replica
        self.position, self.stored = 1, 0
        self.beginnings: tuple[int, ...] = ()
        self.last: Entry | None = None

    def catch_up(self) -> None:
        """Read on to the log's end.

        Raises:
            LinkError: the store cannot be reached.
            UserError: something of the log is missing.
        """
        mark, number = newest_mark(self._objects)
        while True:
            if mark is not None and mark.position > self.position:
                self.position, self.beginnings = mark.position, mark.beginnings
            is_there = mark is None or self._replica.number >= mark.number or self._load(mark.copy)
            while is_there and (data := self._objects.get(entry_key(self.position))) is not None:
                self._take(decode(data, Entry))
            # While this was read, the head that still writes may have deleted what lies behind a new mark.
            before, (mark, number) = number, newest_mark(self._objects, number)
            if number == before:
                if not is_there:
                    raise _lost(f"its copy of the ledger, {mark and mark.copy}")
                return

    def _take(self, entry: Entry) -> None:
        if entry.copy and self._replica.number < entry.first - 1 and not self._load(entry.copy):
            raise _lost(f"{entry.copy}, which its log needs at {entry_key(self.position)}")
        for number, record in enumerate(entry.records, entry.first):
            if number > self._replica.number:
                if number != self._replica.number + 1:
                    raise _lost(f"records {self._replica.number + 1} to {number - 1} of its log")
                self._replica.apply(number, record)
        if not entry.records and self.position not in self.beginnings:
            self.beginnings += (self.position,)
        self.last, self.stored, self.position = entry, entry.last, self.position + 1

    def _load(self, copy: str) -> bool:
        try:
            self._replica.load(unsealed(copy, self._objects.download(f"copies/{copy}")))
        except FileNotFoundError:
            return False
        return True


def _lost(what: str) -> UserError:
    return UserError(
        f"The store has lost {what}. Restore it from a backup, or --resume in the directory of the last head, if it "
        "is left."
    )


def newest_mark(objects: Objects, number: int = 0) -> tuple[Mark | None, int]:
    """Return the newest mark and its number; number 0: there is none. `number`: of one that is known."""
    number = max([number, *(mark_number for _, mark_number in _numbered(objects, "marks"))])
    while (mark_bytes := objects.get(_mark_key(number + 1))) is not None:
        number += 1
    mark_bytes = objects.get(_mark_key(number))
    return (decode(mark_bytes, Mark) if mark_bytes is not None else None), number


def entry_key(position: int) -> str:
    """Return the key of the entry at a position."""
    return f"log/{position:012}"


def _numbered(objects: Objects, folder: str) -> list[tuple[str, int]]:
    """Return the keys below a folder with their numbers, without what others have put there."""
    numbered_keys = ((key, Path(key).name.partition("-")[0]) for key in objects.keys(folder))
    return [(key, int(number)) for key, number in numbered_keys if number.isascii() and number.isdecimal()]


def _mark_key(number: int) -> str:
    return f"marks/{number:012}"


def take_log(objects: Objects, replica: Replica, claim: Claim, copy: Callable[[], Iterator[bytes]]) -> LogWriter:
    """Bring the replica up to date and become the one head that writes. `copy` gives the replica, which is uploaded if
    it has more than the log, as after a kill between the commit and the store.

    Raises:
        FollowedError: another head has taken the run over.
        LinkError: the store cannot be reached.
    """
    own_entry: Entry | None = None
    while True:
        end = LogReader(objects, _Nothing())
        end.catch_up()
        if own_entry is not None and end.last == own_entry:
            break
        if refusal := claim.refuses(end.last):
            raise FollowedError(
                f"head.store: {refusal}. If that one is gone for good, start in an empty directory with --resume-from "
                "URL --out DIR; else leave this one. For another run, choose another URL."
            )
        reader = LogReader(objects, replica)
        reader.catch_up()
        if claim.refuses(reader.last):  # meanwhile
            continue
        epoch, name = 1 + (reader.last.epoch if reader.last else 0), ""
        if reader.last is None or reader.stored < replica.number:
            name = copy_name(replica.number, claim.own, epoch)
            objects.upload(f"copies/{name}", sealed(copy()))
        own_entry = Entry(claim.own, epoch, replica.number + 1, copy=name)
        objects.create(entry_key(reader.position), encode(own_entry))
    if own_entry.copy:
        add_mark(objects, Mark(own_entry.copy, own_entry.first - 1, end.position - 1, end.beginnings))
    return LogWriter(claim.own, own_entry.epoch, end.position, own_entry.first, end.beginnings)


def send(objects: Objects, position: int, entry: Entry) -> Entry:
    """Create an entry. Return what is there afterwards: this entry, also if another head created it, or a different
    one.

    Raises:
        LinkError: the store cannot be reached; the entry may be there or not.
    """
    key = entry_key(position)
    if objects.create(key, encode(entry)):
        return entry
    entry_bytes = objects.get(key)
    if entry_bytes is None:
        raise LinkError(f"{key} exists and cannot be read")
    return decode(entry_bytes, Entry)


def read_sign(sign_bytes: bytes | None) -> SignOfLife | None:
    """Return the sign of life that was found; None: there is none yet, or it was torn."""
    try:
        return decode(sign_bytes or b"", SignOfLife)
    except UserError:
        return None


def why_over(objects: Objects, sign_bytes: bytes | None) -> str:
    """Return why the run is over, if it is, by a sign of life that was found. The last words of a head that another has
    followed do not count. Raises as `LogReader.catch_up`."""
    sign = read_sign(sign_bytes)
    if sign is not None and sign.over:
        end = LogReader(objects, _Nothing())
        end.catch_up()
        if end.last is not None and (end.last.head, end.last.epoch) == (sign.head, sign.epoch):
            return sign.over
    return ""


def add_mark(objects: Objects, mark: Mark) -> None:
    """Add a mark, unless a later one is there, and delete objects that are no longer read."""
    number = 0
    while True:
        newest, number = newest_mark(objects, number)
        if not mark.is_after(newest):
            return
        if objects.create(_mark_key(number + 1), encode(mark)):
            break
    listed, copies = _numbered(objects, "log"), _numbered(objects, "copies")
    old = [key for key, position in listed if position < mark.position and position not in mark.beginnings]
    old += [key for key, number in copies if number < mark.number]
    objects.delete(old)


def copy_name(number: int, head: str, epoch: int) -> str:
    """Return the name of a head's copy of the ledger up to record `number`; of each attempt another one. An entry may
    name a copy later than its head knows, and no second attempt may then leave half of it."""
    return f"{number:012}-{head}-{epoch}-{secrets.token_hex(4)}"
