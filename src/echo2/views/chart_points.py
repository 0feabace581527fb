"""Columns of the charts over steps, downsampled: however long a run is, a chart has at most `POINTS_MAX` points.
metrics.jsonl is read while it grows, and no row is parsed twice.
"""

from __future__ import annotations

import math
import os
import sys
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from echo2.config.rundir import parse_row
from echo2.head.fleet.decide.measurements import CAUSES

Row = Mapping[str, Any]
Values = Sequence[float]
Column = list[float | None]

#: Maximum number of points of a line on a chart.
POINTS_MAX = 500
#: Prefixes of metrics whose names depend on the run: held-out sets, and pass@k. Number of them that a page gets.
OPEN_PREFIXES = ("eval/accuracy/", "eval/pass@")
OPEN_MAX = 16


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


def _mean(values: Values) -> float:
    return math.fsum(values) / len(values)


def _last(values: Values) -> float:
    return values[-1]


#: By metric: how the values of several steps become one point.
COLUMNS: Mapping[str, Callable[[Values], float]] = {
    "eval/accuracy": _last,
    "reward/mean": _mean,
    "reward/frac_zero_std": _mean,
    "off_policy/mean": _mean,
    "off_policy/max": max,
    "off_policy/bound": max,
    "learner/idle_ratio": _mean,
    "learner/idle_predicted": _mean,
    "time/step": _mean,
    "time/wait_for_batch": _mean,
    "time/teacher": _mean,
    "distill/reverse_kl/mean": _mean,
    **{f"wait/{cause}": _mean for cause in CAUSES},
    "fleet/rate": _mean,
    "fleet/needed_rate": _mean,
    "workers/active": _last,
    "broadcast/t_bcast": _mean,
    "cost/cum_usd": _last,
    "cost/wasted_usd": _last,
    "entropy/mean": _mean,
    "loss/mean": _mean,
    "optim/grad_norm": _mean,
    "ess": _mean,
    "clip_ratio/mean": _mean,
    "mismatch_kl/mean": _mean,
    "mismatch/abs_log_ratio": _mean,
    "completions/mean_length": _mean,
    "completions/clipped_ratio": _mean,
    "eval/mean_length": _last,
}


class ChartPoints:
    """The points of a run's charts. All points cover the same number of steps, a power of two, so that points stay in
    place while the run continues. A new row recomputes only the point that it falls into.
    """

    def __init__(self) -> None:
        self.stride = 1  # steps per point
        self._rows: Sequence[Row] = ()
        self._steps: list[int] = []  # the last step of each point
        self._seconds: list[float] = []  # since the first step began, of each point; never falling
        self._began = 0.0
        self._columns: dict[str, Column] = {name: [] for name in COLUMNS}
        self._shown: list[str] = []

    def take(self, rows: Sequence[Row]) -> int:
        """Update the points to these rows, in ascending order of steps. Return how many of the leading points are
        unchanged; 0 means that a page needs all points, for example because other columns are shown."""
        last = rows[-1]["step"] if rows else 0
        stride = 1 << max(0, math.ceil(math.log2((last + 1) / POINTS_MAX)))
        kept = self._first_changed(rows) if stride == self.stride else 0
        first = self._first_row(rows, kept)
        began, named = _began(rows), _open_names(rows[first:]) - self._columns.keys()
        if began != self._began or named:
            kept = first = 0
            self._columns |= {name: [] for name in sorted(named)}
        self.stride, self._rows, self._began = stride, rows, began
        del self._steps[kept:], self._seconds[kept:]
        for column in self._columns.values():
            del column[kept:]
        for _, group in groupby(rows[first:], self._place_of):
            self._append(list(group))
        shown = [name for name, values in self._columns.items() if _is_shown(name, values)]
        hidden = {*sorted(name for name in shown if name.startswith(OPEN_PREFIXES))[OPEN_MAX:]}
        shown = [name for name in shown if name not in hidden]
        was_shown, self._shown = self._shown, shown
        return kept if shown == was_shown else 0

    def _first_row(self, rows: Sequence[Row], kept: int) -> int:
        """Return the index of the first row that is in none of the first `kept` points."""
        return bisect_left(rows, self._place(self._steps[kept - 1]) + 1, key=self._place_of) if kept else 0

    def _append(self, point: Sequence[Row]) -> None:
        self._steps.append(point[-1]["step"])
        before = self._seconds[-1] if self._seconds else 0.0
        seconds = _numbers("time/unix", point)[-1:] or [0.0]
        self._seconds.append(max(before, float(f"{seconds[0] - self._began:.6g}")))
        for name, values in self._columns.items():
            values.append(_point(name, COLUMNS.get(name, _last), point))

    def tail(self, first: int) -> dict[str, Any]:
        """Return the points from index `first` on, as they are sent to a page."""
        columns = {name: self._columns[name][first:] for name in self._shown}
        points = {"steps": self._steps[first:], "seconds": self._seconds[first:]}
        return {"from": first, **points, "stride": self.stride, "columns": columns}

    def _place(self, step: int) -> int:
        return -(-step // self.stride)

    def _place_of(self, row: Row) -> int:
        return self._place(row["step"])

    def _first_changed(self, rows: Sequence[Row]) -> int:
        """Return the index of the first point whose rows have changed. Unchanged rows are the same objects."""
        pairs = enumerate(zip(self._rows, rows, strict=False))
        same = next((number for number, (old, new) in pairs if old is not new), min(len(self._rows), len(rows)))
        changed = [self._place_of(each[same]) for each in (self._rows, rows) if same < len(each)]
        if not changed:
            return len(self._steps)
        return bisect_left(self._steps, min(changed), key=self._place)


def _is_shown(name: str, values: Iterable[float | None]) -> bool:
    """Whether a column has any value; for a cause of waiting (`wait/...`), whether the learner waited for it at all."""
    return any(values) if name.startswith("wait/") else any(value is not None for value in values)


def _point(name: str, merge: Callable[[Values], float], rows: Iterable[Row]) -> float | None:
    found = _numbers(name, rows)
    return float(f"{merge(found):.6g}") if found else None


def _numbers(name: str, rows: Iterable[Row]) -> list[float]:
    return [value for row in rows if isinstance(value := row.get(name), int | float) and math.isfinite(value)]


def _began(rows: Iterable[Row]) -> float:
    """Return the Unix time at which the first step began; 0 if no row has a time."""
    first = next((row for row in rows if _numbers("time/unix", [row])), None)
    return 0.0 if first is None else first["time/unix"] - sum(_numbers("time/step", [first]))


def _open_names(rows: Iterable[Row]) -> set[str]:
    return {name for row in rows for name in row if name.startswith(OPEN_PREFIXES)}
