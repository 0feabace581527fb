"""The operations of one model since its last checkpoint, on disk: what a killed learner had done is done again.

A record is appended when its operation has been carried out, before that is told to anybody. So what was told is here;
what was under way when the process was killed is not, and is asked for again. A record that was cut short is cut off.
It is written, not synced: a killed process loses nothing, a machine that loses its power may lose the last second.
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

#: Answers that can be asked for again. A front does not ask for more operations of one model at a time.
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
        """The records with something to do again, of operations after that of the checkpoint; they are given once.

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
        """From now on the operation has been carried out."""
        self._file.write(_checked(record))
        self._file.flush()
        self._remember(record)

    def answer(self, operation: int) -> Answer | None:
        """What was answered to an operation; None: it has not been carried out.

        Raises:
            InvariantError: it was, too long ago.
        """
        if operation > self.last_operation:
            return None
        for record in self._recent:
            if record.operation == operation:
                return record.answer
        if operation == self._covered:  # a state was loaded and saved, and the process killed before it was on record
            return Answer()
        raise InvariantError(f"operation {operation} was asked for again, {self.last_operation} was the last")

    def cover(self) -> None:
        """A checkpoint has it all: keep the answers alone."""
        partial, self._covered = self._path.with_suffix(".partial"), self.last_operation
        answers = [JournalRecord(record.operation, None, record.answer) for record in self._recent]
        with partial.open("wb") as file:
            for record in (JournalRecord(self._covered, None, Answer(), is_checkpoint=True), *answers):
                file.write(_checked(record))
        os.replace(partial, self._path)
        self._recent = deque(answers, maxlen=ANSWERS_KEPT)
        self._file.close()
        self._file = self._path.open("ab")

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
    """The whole records, and where each ends."""
    if not path.is_file():
        return
    with path.open("rb") as file:
        while len(header := file.read(HEADER.size)) == HEADER.size:
            body, check = file.read(HEADER.unpack(header)[0]), file.read(_CHECK_BYTES)
            if zlib.crc32(header + body).to_bytes(_CHECK_BYTES, "little") != check:
                return
            yield RECORDS.decode(body), file.tell()
