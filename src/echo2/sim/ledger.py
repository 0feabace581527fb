"""The production ledger, whose process can be killed between any two statements of a transaction."""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from echo2.buffer import Ledger


class Killed(Exception):
    """Unwinds the work under way when a kill comes. The ledger rolls back, as SQLite does for the next process."""


class MortalLedger(Ledger):
    """`statements_left`: statements that a transaction may still execute before the kill; None: no kill is planned. The
    ledgers of all policies in a file die together.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._fate: dict[str, int | None] = {"statements_left": None}  # shared by all that `of` makes

    @property
    def statements_left(self) -> int | None:
        """Statements until the kill, or None."""
        return self._fate["statements_left"]

    @statements_left.setter
    def statements_left(self, count: int | None) -> None:
        self._fate["statements_left"] = count

    def _execute(self, sql: str, parameters: Sequence[Any] = ()) -> sqlite3.Cursor:
        if self.statements_left is not None and self._in_transaction():
            if self.statements_left == 0:
                self.statements_left = None
                raise Killed
            self.statements_left -= 1
        return super()._execute(sql, parameters)
