"""The logs of the processes of a run: one sanitised line per event, as text or JSON, in files that are rotated.

A misbehaving peer or a failing disk can cause log lines without end. So at most BURST_LINES lines of one kind are
written per window, followed by the number of further ones. A file that grows is kept in parts of bounded size and
number: `x` (the newest), `x.1`, `x.2` ... Older parts are deleted.
"""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
import signal
import sys
import traceback
from collections import OrderedDict
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TextIO

from echo2.core.documents import parse_json
from echo2.core.errors import UserError
from echo2.core.printable import printable, printable_lines

#: Maximum number of lines of one kind (logger and unformatted message) written per window; equal lines only once.
BURST_LINES = 20
WINDOW_SECONDS = 60.0
#: Maximum number of kinds counted; the least recently used one is dropped, after its count is written.
KINDS_MAX = 64
#: Maximum characters of a line, and of the traceback below it.
LINE_CHARS_MAX = 2000
TRACEBACK_CHARS_MAX = 20_000
#: The environment variable that chooses between text (the default) and a JSON object a line.
FORMAT_VARIABLE = "ECHO2_LOG_FORMAT"
#: Lets only the owner read and write files: weights, rollouts, ledger, keys.
PRIVATE_UMASK = 0o077
#: Maximum bytes of a process's log, and the number of its old parts that are kept.
LOG_BYTES_MAX = 16 << 20
LOG_PARTS_KEPT = 3
#: Bytes of a log's end in which the last words are sought, and their maximum length.
TAIL_BYTES = 64 << 10
WORDS_CHARS_MAX = 500
ERROR_PREFIX = "error: "
#: Exit statuses of a process that had no error of its own.
WORDLESS = (0, -signal.SIGKILL, -signal.SIGTERM)
_TRACEBACK = "Traceback (most recent call last):"
_JSON_BEGINNING = '{"time": '
#: A line of the log that is not an error: it begins with a time.
_LOGGED = re.compile(rf"\d{{4}}-\d\d-\d\d |{_JSON_BEGINNING}")


def keep_private() -> None:
    """Make files of this process and its children accessible to their owner only."""
    os.umask(PRIVATE_UMASK)


def start(process: str) -> None:
    """Set up a process of a run or service: it logs to stderr, and only the owner can access its files. `process`: what
    JSON lines call it.

    Raises:
        UserError: the format that the environment names is unknown.
    """
    keep_private()
    formatters = {"text": SafeFormatter("%(asctime)s %(levelname)s %(name)s: %(message)s"), "json": JsonLines(process)}
    kind = os.environ.get(FORMAT_VARIABLE) or "text"
    if kind not in formatters:
        raise UserError(f"{FORMAT_VARIABLE} = {printable(kind)!r} in the environment: set it to text or json.")
    handler = CountingHandler(sys.stderr)
    handler.setFormatter(formatters[kind])
    logging.basicConfig(level=logging.INFO, handlers=[handler])


class SafeFormatter(logging.Formatter):
    """Formats a record as one printable line, whatever a peer wrote into it."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        record.message = printable(record.message, LINE_CHARS_MAX)
        return super().formatMessage(record)

    def formatException(self, ei: object) -> str:
        return printable_lines(super().formatException(ei), TRACEBACK_CHARS_MAX)  # type: ignore[arg-type]


class JsonLines(SafeFormatter):
    """Formats a record as one JSON object: `time` (UTC), `level`, `process`, `pid`, `logger`, `message`; for an error
    also `error`, its type and words, and `traceback`. They are the words of the text format, and bounded as there.
    """

    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        fields = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "process": self._process,
            "pid": os.getpid(),
            "logger": record.name,
            "message": printable(record.getMessage(), LINE_CHARS_MAX),
        }
        if record.exc_info and (error := record.exc_info[1]) is not None:
            fields["error"] = printable(" ".join(traceback.format_exception_only(error)).strip(), LINE_CHARS_MAX)
            fields["traceback"] = self.formatException(record.exc_info)
        return json.dumps(fields)


@dataclass(slots=True)
class _Kind:
    """Lines of one kind in the current window. `num_held_back`: lines not written; `last`: the newest of these."""

    since: float
    text: str = ""
    num_written: int = 0
    num_held_back: int = 0
    last: logging.LogRecord | None = None


class CountingHandler(logging.StreamHandler[TextIO]):
    """Writes records; repeated ones as "... (repeated N times)". Windows follow the time stamps of the records."""

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
        """Write the remaining counts, and close the stream handler."""
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


def parts(path: Path) -> list[Path]:
    """Return the paths of the existing parts and of the current file, oldest first."""
    older: list[Path] = []
    while (part := _part(path, len(older) + 1)).exists():
        older.append(part)
    return [*reversed(older), path]


def shift(path: Path, num_kept: int, first: int = 0) -> None:
    """Rename `path` to `path`.1, that to .2, and so on; keep `num_kept` old parts. No process may have `path` open for
    writing. Parts before number `first` are not renamed.
    """
    for number in range(num_kept, first, -1):
        source = _part(path, number - 1)
        if source.exists():
            os.replace(source, _part(path, number))


def cut_log(path: Path, bytes_max: int = LOG_BYTES_MAX, num_kept: int = LOG_PARTS_KEPT) -> bool:
    """Copy a log of more than `bytes_max` to an old part and truncate it. Return whether it was too long. The process
    that writes the log appends and need not reopen it; a line written during the copy may be lost. On a full disk the
    whole old content is lost.
    """
    if not path.exists() or path.stat().st_size <= bytes_max:
        return False
    shift(path, num_kept, first=1)
    try:
        shutil.copyfile(path, _part(path, 1))
    except OSError:
        _part(path, 1).unlink(missing_ok=True)
    os.truncate(path, 0)
    return True


def last_error(log: bytes) -> str | None:
    """Return the last line of a log that begins with "error: ", without that prefix."""
    errors = [line.removeprefix(ERROR_PREFIX) for line in _lines(log) if line.startswith(ERROR_PREFIX)]
    return errors[-1] if errors else None


def last_words(log: bytes) -> str:
    """Return the error of a process that died: its error line, the exception of its last traceback, or else the last
    line that is not a log line; "" if there is none."""
    if (error := last_error(log)) is not None:
        return printable(error, WORDS_CHARS_MAX)
    lines = _lines(log)
    if _TRACEBACK in lines:
        last = len(lines) - lines[::-1].index(_TRACEBACK)
        lines = [line for line in lines[last:] if not line.startswith(" ")][:1]
    plain = [line for line in lines if line.strip() and not _LOGGED.match(line)]
    return printable(plain[-1], WORDS_CHARS_MAX) if plain else ""


def _lines(log: bytes) -> list[str]:
    """Return the lines of a log as the text format has them, whatever its format."""
    lines = log.decode("utf-8", errors="replace").splitlines()
    return [part for line in lines for part in (_as_text(line) if line.startswith(_JSON_BEGINNING) else (line,))]


def _as_text(line: str) -> list[str]:
    try:
        fields = parse_json(line.encode())
        first = f"{fields['time']} {fields['level']} {fields['logger']}: {fields['message']}".replace("T", " ", 1)
        return [first, *((_TRACEBACK, str(fields["error"])) if "error" in fields else ())]
    except (ValueError, KeyError, TypeError):
        return [line]  # torn, or not ours


def _part(path: Path, number: int) -> Path:
    """Return the path of a part. Part 0 is the current file."""
    return path.with_name(f"{path.name}.{number}") if number else path
