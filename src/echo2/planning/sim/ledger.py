"""The production ledger, whose process can be killed between any two statements of a transaction."""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from echo2.head.ledger.ledger import Ledger


class Killed(Exception):
    """Unwinds the work under way when a kill comes. The ledger rolls back, as SQLite does for the next process."""


class MortalLedger(Ledger):
    """`statements_left`: statements that a transaction may still execute before the kill; None: no kill is planned."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.statements_left: int | None = None

    def _execute(self, sql: str, parameters: Sequence[Any] = ()) -> sqlite3.Cursor:
        if self.statements_left is not None and self._in_transaction():
            if self.statements_left == 0:
                self.statements_left = None
                raise Killed
            self.statements_left -= 1
        return super()._execute(sql, parameters)
