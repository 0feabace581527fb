"""Reads metrics.jsonl while it grows, without parsing a row twice."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from echo2.rundir import parse_row

Row = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class MetricsFile:
    """The rows of the file up to the first damaged one, and how far the file was read. The head appends rows; when a
    late evaluation ends, and when the learner falls back, it replaces the file by one with the same older rows.
    """

    rows: tuple[Row, ...] = ()
    _marks: tuple[tuple[int, int], ...] = ()  # offset and hash of each row's line
    _seen: tuple[int, int, int] | None = None  # inode, size and modification time of the file

    def newer(self, path: Path) -> MetricsFile:
        """Return the current contents of the file; this object if they have not changed.

        Reading stops at the size reported by the file system, because a device file has no end.
        """
        try:
            with path.open("rb") as file:
                stat = os.fstat(file.fileno())
                seen = stat.st_ino, stat.st_size, stat.st_mtime_ns
                if seen == self._seen:
                    return self
                if self._marks and self._seen is not None and self._seen[0] == seen[0]:
                    start, known = self._marks[-1]
                    file.seek(start)
                    text = file.read(max(0, stat.st_size - start))
                    if hash(text.partition(b"\n")[0]) == known:
                        return self._read(text, start, len(self.rows) - 1, seen)
                    file.seek(0)
                return self._read(file.read(stat.st_size), 0, 0, seen)
        except FileNotFoundError:
            return self if self._seen is None else MetricsFile()

    def _read(self, text: bytes, start: int, num_kept: int, seen: tuple[int, int, int]) -> MetricsFile:
        """Return the first `num_kept` rows, followed by those of `text`, which begins at byte `start` of the file."""
        rows, marks = list(self.rows[:num_kept]), list(self._marks[:num_kept])
        for line in text.split(b"\n"):
            mark = start, hash(line)
            start += len(line) + 1
            if not line:
                continue
            number = len(rows)
            if number < len(self._marks) and self._marks[number] == mark:
                rows.append(self.rows[number])
            elif (row := parse_row(line)) is not None:
                rows.append({sys.intern(name): value for name, value in row.items()})
            else:
                break
            marks.append(mark)
        return MetricsFile(tuple(rows), tuple(marks), seen)
