"""Judges the deaths of a process that is restarted: a failure that repeats ends the run, however long a start takes.

What counts is not time but progress beyond the best that was reached before: of the learner another version (steps that
it trains again after a restart are none) or another group left out (`learner/grpo/saving.py`), of a worker
another accepted group, of the head either.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from echo2.core.printable import printable

#: Deaths in a row, without progress in between, after which the run ends.
RESTARTS_MAX = 5
#: The same for a process that dies with the same words before the head has heard of it. It comes no further at the next
#: start, and each may take minutes.
START_FAILURES_MAX = 3
#: Bytes of a log's end in which the last words are sought, and their maximum length.
TAIL_BYTES = 64 << 10
WORDS_CHARS_MAX = 500
ERROR_PREFIX = "error: "
_TRACEBACK = "Traceback (most recent call last):"
#: A line of the log that is no error: `core.logs` begins it with a time.
_LOGGED = re.compile(r"\d{4}-\d\d-\d\d ")
_NUMBERS = re.compile(r"0x[0-9a-f]+|\d+")


@dataclass(slots=True)
class Deaths:
    """Deaths in a row of one process. `words`: its last words, empty if it was killed. `num_at_start`: the newest ones
    that happened before the head had heard of the process, with the same words but for numbers. `best`: the progress
    before them, by kind."""

    num: int = 0
    num_at_start: int = 0
    words: str = ""
    ending: str = ""
    died_at: float = 0.0
    best: tuple[int, ...] = ()

    def died(self, words: str, progress: tuple[int, ...], was_up: bool, now: float, ending: str = "") -> None:
        """Count a death. `words`: the last words, if any; `was_up`: the head had heard of this process;
        `now`: Unix time; `ending`: how it ended."""
        best = self.best or progress
        if any(reached > before for reached, before in zip(progress, best, strict=True)):
            self.num = self.num_at_start = 0
        is_same = _NUMBERS.sub("#", words) == _NUMBERS.sub("#", self.words)
        if was_up or not words:
            self.num_at_start = 0
        else:
            self.num_at_start = self.num_at_start + 1 if is_same else 1
        self.best = tuple(map(max, zip(progress, best, strict=True)))
        self.num += 1
        self.words, self.died_at, self.ending = words, now, ending

    @property
    def said(self) -> str:
        """The last words, or how it ended."""
        return self.words or f"it {self.ending}"

    def to_plain(self) -> dict[str, Any]:
        """Return what processes.json shows; empty: it has not died."""
        return {"deaths": self.num, "last_words": self.said, "died_at": self.died_at} if self.num else {}

    def why_hopeless(self) -> str:
        """Return how often it died, if it should not be started again; else ""."""
        if self.num_at_start >= START_FAILURES_MAX:
            return f"died {self.num_at_start} times in a row while it started"
        return f"died {self.num} times in a row" if self.num >= RESTARTS_MAX else ""


def progress(status: Mapping[str, Any], role: str, peer_id: str, num_left_out: int) -> tuple[int, ...]:
    """Return numbers that grow with what a process of this role has reached, by the head's status."""
    groups = {worker["id"]: int(worker.get("useful_groups", 0)) for worker in _listed(status)}
    if role == "worker":
        return (groups.get(peer_id, 0),)
    return int(status.get("version", 0)), num_left_out if role == "learner" else sum(groups.values())


def is_up(status: Mapping[str, Any], pid: int) -> bool:
    """Whether the head has heard of this process, or is this process."""
    others = [status.get("head"), status.get("learner"), *_listed(status)]
    return any(one is not None and one.get("pid") == pid for one in others)


def _listed(status: Mapping[str, Any]) -> list[dict[str, Any]]:
    return list(status.get("workers", ()))


def last_error(log: bytes) -> str | None:
    """Return the last line of a log that begins with "error: ", without that prefix."""
    errors = [line.removeprefix(ERROR_PREFIX) for line in _lines(log) if line.startswith(ERROR_PREFIX)]
    return errors[-1] if errors else None


def last_words(log: bytes) -> str:
    """Return the error of a process that died: its error line, the exception of its last traceback, or else the last
    line that is no log line; "" if there is none."""
    if (error := last_error(log)) is not None:
        return printable(error, WORDS_CHARS_MAX)
    lines = _lines(log)
    if _TRACEBACK in lines:
        last = len(lines) - lines[::-1].index(_TRACEBACK)
        lines = [line for line in lines[last:] if not line.startswith(" ")][:1]
    plain = [line for line in lines if line.strip() and not _LOGGED.match(line)]
    return printable(plain[-1], WORDS_CHARS_MAX) if plain else ""


def _lines(log: bytes) -> list[str]:
    return log.decode("utf-8", errors="replace").splitlines()
