"""The operations of one model since its last checkpoint, on disk, so that they can be repeated after a kill.

A record is appended when its operation has been carried out, before the answer is sent. So every answered operation is
in the journal; an operation that was in progress at a kill is not, and is requested again. An incomplete last record is
cut off. Records are written but not synced: a killed process loses nothing, but a power failure may lose the last
second.
"""

from __future__ import annotations

import os
import zlib
from collections import deque
from collections.abc import Iterator
from pathlib import Path

from echo2.errors import InvariantError
from echo2.sandbox.pipes import HEADER
from echo2.service.frames import RECORDS, Answer, JournalRecord, frame

#: Number of answers that can be requested again. A front has fewer operations of one model open at a time.
ANSWERS_KEPT = 256
_CHECK_BYTES = 4


class Journal:
    """The records of one model in one file."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._recent: deque[JournalRecord] = deque(maxlen=ANSWERS_KEPT)
        self.last_operation = self._covered = whole = 0
        self._to_redo: list[JournalRecord] = []
        for record, end in _read(path):
            whole = end
            if record.is_checkpoint:
                self._covered = record.operation
                continue
            self._remember(record)
            if record.call is not None:
                self._to_redo.append(record)
        self._file = path.open("ab")
        self._file.truncate(whole)

    def take_to_redo(self, after: int) -> list[JournalRecord]:
        """Return the records to repeat, of operations after that of the checkpoint. They are returned only once.

        Raises:
            InvariantError: there was a later checkpoint.
        """
        if after < self._covered:
            raise InvariantError(f"{self._path}: the checkpoint after operation {self._covered} is gone or damaged")
        found = [record for record in self._to_redo if record.operation > after]
        self._to_redo, self._covered = [], after
        self.last_operation = max(self.last_operation, after)
        return found

    def append(self, record: JournalRecord) -> None:
        """Record that an operation has been carried out."""
        self._file.write(_checked(record))
        self._file.flush()
        self._remember(record)

    def answer(self, operation: int) -> Answer | None:
        """Return the answer to an operation; None if it has not been carried out.

        Raises:
            InvariantError: it was carried out too long ago.
        """
        if operation > self.last_operation:
            return None
        for record in self._recent:
            if record.operation == operation:
                return record.answer
        if operation == self._covered:  # killed after a state was loaded and saved, before the record
            return Answer()
        raise InvariantError(f"operation {operation} was asked for again, {self.last_operation} was the last")

    def cover(self) -> None:
        """Note that a checkpoint covers all operations, and keep only their answers."""
        partial, self._covered = self._path.with_suffix(".partial"), self.last_operation
        answers = [JournalRecord(record.operation, None, record.answer) for record in self._recent]
        with partial.open("wb") as file:
            for record in (JournalRecord(self._covered, None, Answer(), is_checkpoint=True), *answers):
                file.write(_checked(record))
        os.replace(partial, self._path)
        self._recent = deque(answers, maxlen=ANSWERS_KEPT)
        self._file.close()
        self._file = self._path.open("ab")

    @property
    def num_bytes(self) -> int:
        """Size of the file."""
        return self._file.tell()

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _remember(self, record: JournalRecord) -> None:
        self.last_operation = max(self.last_operation, record.operation)
        self._recent.append(record)


def _checked(record: JournalRecord) -> bytes:
    data = frame(record)
    return data + zlib.crc32(data).to_bytes(_CHECK_BYTES, "little")


def _read(path: Path) -> Iterator[tuple[JournalRecord, int]]:
    """Yield the complete records, and the offset at which each ends."""
    if not path.is_file():
        return
    with path.open("rb") as file:
        while len(header := file.read(HEADER.size)) == HEADER.size:
            body, check = file.read(HEADER.unpack(header)[0]), file.read(_CHECK_BYTES)
            if zlib.crc32(header + body).to_bytes(_CHECK_BYTES, "little") != check:
                return
            yield RECORDS.decode(body), file.tell()
