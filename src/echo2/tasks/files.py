"""Rows from one file: JSON Lines (stays on disk, found by offset) and Parquet (held in memory as Arrow). No splits.

A file that is edited while it is read would give other rows than it did. A line is checked whenever it is read again;
`digest` tells whether a whole file is the one that an earlier process read.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterator, Mapping
from json import JSONDecodeError
from pathlib import Path
from typing import Any

from echo2.documents import parse_json
from echo2.errors import UserError
from echo2.printable import shown

MAX_LINE_BYTES = 16 << 20
MAX_PARQUET_BYTES = 8 << 30  # decoded
DIGEST_BYTES = 16
#: Characters shown before and after the place of a mistake.
NEAR_CHARS = 30
ONE_OBJECT = 'Each line must be one JSON object: {"prompt": ...}.'


class JsonlRows:
    """The rows of a JSON Lines file. Opening parses every line once, so that a bad line is reported at once; afterwards
    memory holds 24 bytes a row. Blank lines are skipped.

    Raises:
        UserError: the file cannot be read, or a line is not a JSON object; the message gives file:line.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offsets = array("Q")
        self._lines = array("Q")
        self._marks = array("Q")
        for number, offset, line in self._read_lines():
            if line.strip():
                self._parse(line, number)
                self._offsets.append(offset)
                self._lines.append(number)
                self._marks.append(_mark(line))

    def __len__(self) -> int:
        return len(self._offsets)

    def __getitem__(self, index: int) -> Mapping[str, Any]:
        try:
            with self._path.open("rb") as file:
                file.seek(self._offsets[index])
                line = file.readline(MAX_LINE_BYTES)
        except OSError as error:
            raise UserError(f"Cannot read {self._path}: {error.strerror}.") from error
        if _mark(line) != self._marks[index]:
            raise UserError(
                f"{self.where(index)} has changed since the file was opened: its rows are no longer those of this run. "
                "Put the old file back, or start a new run on the new one."
            )
        return self._parse(line, self._lines[index])

    def digest(self) -> str:
        """See `TaskSource`."""
        return hashlib.blake2b(self._marks.tobytes(), digest_size=DIGEST_BYTES).hexdigest()

    def where(self, index: int) -> str:
        """The row's file and line, from 1."""
        return f"{self._path}:{self._lines[index]}"

    def _read_lines(self) -> Iterator[tuple[int, int, bytes]]:
        """(line number from 1, offset, bytes) of every line, blank ones too."""
        number = offset = 0
        try:
            with self._path.open("rb") as file:
                while line := file.readline(MAX_LINE_BYTES + 1):
                    number += 1
                    if len(line) > MAX_LINE_BYTES:
                        raise UserError(
                            f"{self._path}:{number}: the line is longer than the limit of {MAX_LINE_BYTES} bytes."
                        )
                    yield number, offset, line
                    offset += len(line)
        except OSError as error:
            raise UserError(f"Cannot read {self._path}: {error.strerror}.") from error

    def _parse(self, line: bytes, number: int) -> Mapping[str, Any]:
        try:
            row = parse_json(line.rstrip())
        except JSONDecodeError as error:
            near = shown(error.doc[max(0, error.pos - NEAR_CHARS) : error.pos + NEAR_CHARS].strip())
            detail = f"{error.msg} at character {error.pos + 1}, near {near}"
            raise UserError(f"{self._path}:{number}: not valid JSON: {detail}. {ONE_OBJECT}") from error
        except ValueError as error:
            raise UserError(f"{self._path}:{number}: not valid JSON: {error}. {ONE_OBJECT}") from error
        if not isinstance(row, dict):
            raise UserError(f"{self._path}:{number}: got {type(row).__name__} {shown(row)}. {ONE_OBJECT}")
        return row


def _mark(line: bytes) -> int:
    """Return 64 bits that tell this line from others. The end of the file may be the end of a line."""
    return int.from_bytes(hashlib.blake2b(line.rstrip(), digest_size=8).digest())


class ParquetRows:
    """The rows of a Parquet file, decoded once and held as Arrow columns.

    Raises:
        UserError: pyarrow is not installed, or the file is not Parquet or too large for memory.
    """

    def __init__(self, path: Path) -> None:
        try:
            import pyarrow
            import pyarrow.parquet
        except ImportError as error:
            raise UserError(f"{path}: reading Parquet needs pyarrow: pip install 'echo2[data]'.") from error
        self._path = path
        try:
            with path.open("rb") as file:
                self._digest = hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=DIGEST_BYTES)).hexdigest()
            metadata = pyarrow.parquet.read_metadata(path)
            decoded_bytes = sum(metadata.row_group(i).total_byte_size for i in range(metadata.num_row_groups))
            if decoded_bytes > MAX_PARQUET_BYTES:
                raise UserError(
                    f"{path} holds {decoded_bytes} bytes decoded; the limit is {MAX_PARQUET_BYTES}. "
                    "Name its directory instead: Hugging Face datasets map it from disk."
                )
            self._table = pyarrow.parquet.read_table(path)
        except (OSError, UnicodeError, pyarrow.ArrowException) as error:
            raise UserError(f"Cannot read {path} as Parquet: {error}.") from error

    def __len__(self) -> int:
        return int(self._table.num_rows)

    def __getitem__(self, index: int) -> Mapping[str, Any]:
        row: Mapping[str, Any] = self._table.slice(index, 1).to_pylist()[0]
        return row

    def digest(self) -> str:
        """See `TaskSource`."""
        return self._digest

    def where(self, index: int) -> str:
        """The row's file and number, from 0."""
        return f"{self._path} row {index}"
