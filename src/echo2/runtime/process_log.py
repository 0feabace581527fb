"""Logging of the processes of a run: to stderr, one sanitised line an event; repetitions are counted.

Whoever can make a process log (a peer that misbehaves, a disk that fails) can do so without end. So of lines of one
kind, BURST_LINES are written a window, and then how many more there were.
"""

from __future__ import annotations

import logging
import os
import sys
from collections import OrderedDict
from dataclasses import dataclass
from typing import TextIO

from echo2.printable import printable, printable_lines

#: Lines of one kind (logger and text before its values are filled in) that are written in a window; equal ones, once.
BURST_LINES = 20
WINDOW_SECONDS = 60.0
#: Kinds whose lines are counted; the one not heard of for longest is forgotten, its count written.
KINDS_MAX = 64
#: Characters of a line, and of the traceback below it.
LINE_CHARS_MAX = 2000
TRACEBACK_CHARS_MAX = 20_000
#: Rights that nobody but the owner has: weights, rollouts, ledger, keys.
PRIVATE_UMASK = 0o077


def keep_private() -> None:
    """What this process and its children write is its owner's alone."""
    os.umask(PRIVATE_UMASK)


def start() -> None:
    """Set a process of a run up: it logs to stderr, and what it writes is its owner's alone."""
    keep_private()
    handler = CountingHandler(sys.stderr)
    handler.setFormatter(SafeFormatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    logging.basicConfig(level=logging.INFO, handlers=[handler])


class SafeFormatter(logging.Formatter):
    """A record's line says one thing in one line, whatever a peer wrote into it."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        record.message = printable(record.message, LINE_CHARS_MAX)
        return super().formatMessage(record)

    def formatException(self, ei: object) -> str:
        return printable_lines(super().formatException(ei), TRACEBACK_CHARS_MAX)  # type: ignore[arg-type]


@dataclass(slots=True)
class _Kind:
    """Lines of one kind in the present window. `held_back`: how many were not written; `last` is the newest of them."""

    since: float
    text: str = ""
    num_written: int = 0
    num_held_back: int = 0
    last: logging.LogRecord | None = None


class CountingHandler(logging.StreamHandler[TextIO]):
    """Writes records, those that repeat as "... (repeated N times)". Time is that of the records."""

    def __init__(self, stream: TextIO) -> None:
        super().__init__(stream)
        self._kinds: OrderedDict[tuple[str, str], _Kind] = OrderedDict()

    def emit(self, record: logging.LogRecord) -> None:
        now, key, text = record.created, (record.name, str(record.msg)), record.getMessage()
        for old in [old for old, kind in self._kinds.items() if now - kind.since >= WINDOW_SECONDS]:
            self._close(old)
        kind = self._kinds.setdefault(key, _Kind(now))
        self._kinds.move_to_end(key)
        if len(self._kinds) > KINDS_MAX:
            self._close(next(iter(self._kinds)))
        if kind.num_written and (text == kind.text or kind.num_written >= BURST_LINES):
            kind.num_held_back += 1
            kind.last = record
            return
        self._write_count(kind)
        kind.text, kind.num_written = text, kind.num_written + 1
        super().emit(record)

    def close(self) -> None:
        """Write the counts that are left."""
        for key in list(self._kinds):
            self._close(key)
        super().close()

    def _close(self, key: tuple[str, str]) -> None:
        self._write_count(self._kinds.pop(key))

    def _write_count(self, kind: _Kind) -> None:
        if kind.last is None:
            return
        record, count = kind.last, kind.num_held_back
        kind.last, kind.num_held_back = None, 0
        record.msg, record.args = f"{printable(record.getMessage(), LINE_CHARS_MAX - 40)} (repeated {count} times)", ()
        record.exc_info = record.exc_text = None
        super().emit(record)
