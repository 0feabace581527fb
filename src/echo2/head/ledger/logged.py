"""A ledger that another can be made from: its transactions are numbered, and each is passed on as a record of the
statements that changed it.

The number stands in the ledger itself and is written in the same transaction, so that a copy made at any moment says
which records it has, and no record is applied twice.
"""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import msgspec

from echo2.core.errors import InvariantError
from echo2.head.ledger.ledger import Ledger
from echo2.head.ledger.schema import open_for_reading, open_for_writing

_CHANGES = ("INSERT ", "UPDATE ", "DELETE ")
_NUMBER = "log"  # key in the table `meta`
_SET_NUMBER = "INSERT OR REPLACE INTO meta (key, value) VALUES (?, ?)"


class LoggedLedger(Ledger):
    """`on_record` is called with the number and the record of each transaction that has changed something, once it is
    committed."""

    def __init__(self, path: Path, on_record: Callable[[int, bytes], None]) -> None:
        super().__init__(path)
        self._on_record, self._changes = on_record, list[tuple[str, Sequence[Any]]]()
        self._number = number_of(self._connection)

    def _execute(self, sql: str, parameters: Sequence[Any] = ()) -> sqlite3.Cursor:
        if sql == "BEGIN IMMEDIATE":
            self._changes = []  # of a transaction that was rolled back
        elif sql.startswith(_CHANGES):
            self._changes.append((sql, parameters))
        elif sql == "COMMIT" and self._changes:
            changes, self._changes = self._changes, []
            super()._execute(_SET_NUMBER, (_NUMBER, str(self._number + 1)))
            done = super()._execute(sql)
            self._number += 1
            self._on_record(self._number, msgspec.msgpack.encode(changes))
            return done
        return super()._execute(sql, parameters)


class LedgerFile:
    """A ledger's file that follows the records of another. Its directory exists."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._connection = open_for_writing(path)

    @property
    def number(self) -> int:
        """The last record that it has."""
        return number_of(self._connection)

    def apply(self, number: int, record: bytes) -> None:
        """Apply a record.

        Raises:
            InvariantError: it is none.
        """
        changes = msgspec.msgpack.decode(record, type=list[tuple[str, list[Any]]])
        for sql, _ in changes:
            if not sql.startswith(_CHANGES):
                raise InvariantError(f"record {number} of the log has the statement {sql[:80]!r}")
        self._connection.execute("BEGIN IMMEDIATE")
        for sql, parameters in changes:
            self._connection.execute(sql, parameters)
        self._connection.execute(_SET_NUMBER, (_NUMBER, str(number)))
        self._connection.execute("COMMIT")

    def load(self, pieces: Iterator[bytes]) -> None:
        """Put a copy in its place."""
        aside = self._path.with_name(f"{self._path.name}.copy")
        with aside.open("wb") as file:
            file.writelines(pieces)
        self.close()
        os.replace(aside, self._path)
        self._connection = open_for_writing(self._path)

    def close(self) -> None:
        """Close the file, whose log is merged into it."""
        self._connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        self._connection.close()
        for name in ("-wal", "-shm"):
            with suppress(FileNotFoundError):
                os.unlink(f"{self._path}{name}")


def copy_ledger(path: Path, to: Path) -> int:
    """Copy a ledger that another process or thread may be writing. Return the number of its last record."""
    to.unlink(missing_ok=True)
    with closing(open_for_reading(path)) as source, closing(sqlite3.connect(to)) as target:
        source.backup(target)
        target.execute("PRAGMA journal_mode = DELETE")  # one file
        return number_of(target)


def number_of(connection: sqlite3.Connection) -> int:
    """Return the number of a ledger's last record; 0: it has none."""
    row = connection.execute("SELECT value FROM meta WHERE key = ?", (_NUMBER,)).fetchone()
    return int(row[0]) if row is not None else 0
