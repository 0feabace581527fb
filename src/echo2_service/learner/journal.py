"""The operations of one model since its last checkpoint, on disk, so that they can be repeated after a kill.

A record is appended when its operation has been carried out, before the answer is sent. So every answered operation is
in the journal; an operation that was in progress at a kill is not, and is requested again. Records are written but not
synced: a killed process loses nothing, but a power failure may lose the last second. So an incomplete last record is
cut off. Any other damage is an error, because later records were answered. A record that could not be written
is cut off at once: its operation has failed, and may be requested again.
"""

from __future__ import annotations

import os
import zlib
from collections import deque
from collections.abc import Iterator
from pathlib import Path

from echo2.core.disk import append_whole
from echo2.core.errors import InvariantError, write_failed
from echo2.core.frames import HEADER
from echo2_service import limits
from echo2_service.backend import Answer, JournalRecord
from echo2_service.calling import RECORD_BEGINNING, RECORDS, frame

#: Number of answers that can be requested again, and stay in memory. A front has fewer operations of one model open at
#: a time; an answer may have 64 MB.
ANSWERS_KEPT = 2 * limits.OPERATIONS_MAX
_CHECK_BYTES = 4
#: So many zeros at the end of a file were allocated, but not written.
_UNWRITTEN_BYTES = 32


class Journal:
    """The records of one model in one file.

    Raises:
        InvariantError: a record is damaged.
    """

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
        self._file = path.open("ab", buffering=0)
        self._file.truncate(whole)

    def take_to_redo(self, after: int) -> list[JournalRecord]:
        """Return the records to repeat, of operations after that of the checkpoint. They are returned only once.

        Raises:
            InvariantError: there was a later checkpoint.
        """
        if after < self._covered:
            raise InvariantError(f"{self._path}: the checkpoint after operation {self._covered} is gone or damaged")
        records = [record for record in self._to_redo if record.operation > after]
        self._to_redo, self._covered = [], after
        self.last_operation = max(self.last_operation, after)
        return records

    def append(self, record: JournalRecord) -> None:
        """Record that an operation has been carried out.

        Raises:
            UserError: it could not be recorded, as a `NoRoomError` where the disk is full.
        """
        try:
            append_whole(self._file, _checked(record))
        except OSError as error:
            raise write_failed(error, f"Cannot write {self._path}: {error.strerror}. Nothing was lost.") from error
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
        partial, covered = self._path.with_suffix(".partial"), self.last_operation
        answers = [JournalRecord(record.operation, None, record.answer) for record in self._recent]
        partial.unlink(missing_ok=True)
        file = partial.open("ab", buffering=0)  # which is the journal's own from then on
        try:
            for record in (JournalRecord(covered, None, Answer(), is_checkpoint=True), *answers):
                append_whole(file, _checked(record))
            os.replace(partial, self._path)
        except BaseException:
            file.close()
            raise
        self._file.close()
        self._file, self._covered, self._recent = file, covered, deque(answers, maxlen=ANSWERS_KEPT)

    @property
    def num_bytes(self) -> int:
        """Size of the file."""
        return os.fstat(self._file.fileno()).st_size

    def close(self) -> None:
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
            begin, length = file.tell() - HEADER.size, HEADER.unpack(header)[0]
            body, check = file.read(length), file.read(_CHECK_BYTES)
            if zlib.crc32(header + body).to_bytes(_CHECK_BYTES, "little") != check:
                file.seek(begin)
                if not _is_torn(file.read()):
                    raise InvariantError(
                        f"{path} is damaged at byte {begin}: the model has lost operations that were answered. Begin a "
                        "new one with a saved state."
                    )
                return
            yield RECORDS.decode(body), file.tell()


def _is_torn(rest: bytes) -> bool:
    """Whether the end of a file is one record that was not written to its end."""
    begin = HEADER.size
    while (begin := rest.find(RECORD_BEGINNING, begin + 1)) >= 0:
        header, length = rest[begin - HEADER.size : begin], HEADER.unpack_from(rest, begin - HEADER.size)[0]
        check = rest[begin + length : begin + length + _CHECK_BYTES]
        if zlib.crc32(header + rest[begin : begin + length]).to_bytes(_CHECK_BYTES, "little") == check:
            return False
    claimed = HEADER.size + HEADER.unpack_from(rest)[0] + _CHECK_BYTES
    return claimed > len(rest) or rest.endswith(bytes(_UNWRITTEN_BYTES))
