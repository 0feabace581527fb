"""Writes metrics.jsonl, one object per training step.

A row's `step` is the number of completed steps: row N describes the step that made version N. `eval/*` in row N
describes version N and is added when that evaluation ends, which may be a few steps later. Row 0 holds the evaluation
before training.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from echo2.errors import write_failed
from echo2.rundir import accuracies, read_metrics, write_atomically
from echo2.runtime.head.metric_copies import Copy, Sink

Row = dict[str, Any]

#: Minimum number of rows kept in memory, once there are as many.
KEPT_ROWS = 64


class Metrics:
    """Appends rows to a file, amends them, and truncates them after a fall-back. Only the newest are kept in memory."""

    def __init__(self, path: Path, sinks: Sequence[Sink] = ()) -> None:
        self._path, self._copies = path, [Copy(sink) for sink in sinks]
        self.recent: list[Row] = []
        self._older_bytes = 0  # of the file, before the rows in memory
        self._read()
        self.accuracies = accuracies(self.recent)  # by version
        if path.is_file() and path.stat().st_size != self._older_bytes + sum(map(len, map(_line, self.recent))):
            self._rewrite()  # a kill tore the last line; the next row must not be glued to it
        self._keep_recent()

    @property
    def last_step(self) -> int:
        """The step of the newest row; -1 if there is none."""
        step: int = self.recent[-1]["step"] if self.recent else -1
        return step

    def write(self, row: Row) -> None:
        """Add a step's row. Delete rows of the same and later steps: a fall-back trains these steps again."""
        if self.last_step >= row["step"]:
            self._reach(row["step"])
            self._forget_from(row["step"])
            self.recent.append(row)
            self._rewrite()
        else:
            self.recent.append(row)
            try:
                with open(self._path, "ab") as file:
                    file.write(_line(row))
            except OSError as error:
                message = f"Cannot write {self._path}: {error.strerror}. Free some space, then --resume."
                raise write_failed(error, message) from error
        self._keep_recent()
        for copy in self._copies:
            copy.write(row["step"], row)

    def amend(self, step: int, values: Mapping[str, Any]) -> None:
        """Add values to the row of `step`, which is created if it does not exist."""
        self._reach(step)
        rows = {row["step"]: row for row in self.recent}
        rows.setdefault(step, {"step": step}).update(values)
        self.accuracies |= accuracies([rows[step]])
        self.recent = [rows[key] for key in sorted(rows)]
        self._rewrite()
        self._keep_recent()
        for copy in self._copies:
            copy.write(step, values)

    def truncate(self, version: int) -> None:
        """Remove the rows of steps after `version`: the learner fell back and trains them again."""
        if self.last_step > version:
            self._reach(version)
            self._forget_from(version + 1)
            self._rewrite()

    def close(self) -> None:
        """Let the copies write their queued rows."""
        for copy in self._copies:
            copy.close()

    def _forget_from(self, step: int) -> None:
        self.recent = [row for row in self.recent if row["step"] < step]
        self.accuracies = {version: value for version, value in self.accuracies.items() if version < step}

    def _read(self) -> None:
        self.recent, self._older_bytes = read_metrics(self._path), 0

    def _reach(self, step: int) -> None:
        """Make sure that the rows from `step` on, and one before, are in memory; else read the whole file."""
        if self._older_bytes and self.recent[0]["step"] >= step:
            self._read()

    def _keep_recent(self) -> None:
        if len(self.recent) > 2 * KEPT_ROWS:
            older, self.recent = self.recent[:-KEPT_ROWS], self.recent[-KEPT_ROWS:]
            self._older_bytes += sum(map(len, map(_line, older)))

    def _rewrite(self) -> None:
        """Rewrite the file with the rows in memory; its older rows are unchanged."""
        older = b""
        if self._older_bytes:
            with open(self._path, "rb") as file:
                older = file.read(self._older_bytes)
        write_atomically(self._path, (older + b"".join(map(_line, self.recent))).decode())


def _line(row: Row) -> bytes:
    return json.dumps(row).encode() + b"\n"
