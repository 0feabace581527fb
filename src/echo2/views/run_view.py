"""The state of a run directory at one moment. `echo2 status`, the progress display, the dashboard and the Python API
are made from it.

It reads and never writes, so a run that goes on, ended, was killed or was copied from elsewhere is read alike. A file
that is missing or half written says nothing yet.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from echo2.errors import UserError
from echo2.planning.cost_report import report
from echo2.rundir import RunDir, accuracies, read_json
from echo2.types import Wait
from echo2.views.metrics_file import MetricsFile, Row
from echo2.views.status import live_status

#: So many of the newest steps say what the next ones take and cost.
FORECAST_STEPS = 50


@dataclass(frozen=True, slots=True)
class Forecast:
    """Of a run that goes on as in its newest steps: dollars at its end, and seconds until then."""

    usd: float
    seconds: float


@dataclass(frozen=True, slots=True)
class RunView:
    """One moment of a run; `newer` reads the next one and no more than is new.

    status   what the head told last (status.json), with `state`, `processes` but those of workers, and `waits` as they
             are now; empty while no head has told anything. The same object as before where nothing has changed
    summary  numbers of the closing table, once the run is over; else None
    problem  what can't be read, for people; empty: nothing
    """

    rundir: RunDir
    status: Mapping[str, Any]
    summary: Mapping[str, Any] | None
    problem: str
    _metrics: MetricsFile
    _told: Mapping[str, Any] | None = None  # status.json, and which one it was
    _told_by: tuple[int, int] | None = None

    @classmethod
    def read(cls, directory: Path) -> RunView:
        """The run in a directory, which may not have begun."""
        return cls(RunDir(directory), {}, None, "", MetricsFile()).newer()

    def newer(self) -> RunView:
        """The same run now; equal to this where nothing has changed."""
        status: Mapping[str, Any] = {}
        summary, problem, told, told_by = None, "", self._told, _identity(self.rundir.status)
        try:
            if told_by != self._told_by:  # with thousands of workers it is megabytes
                told = read_json(self.rundir.status)
            status = {} if told is None else live_status(self.rundir, told, with_workers=False)
            if told is self._told and status == self.status:
                status = self.status
            summary = read_json(self.rundir.summary)
        except UserError as error:
            problem, told_by = str(error), None
        metrics = self._metrics.newer(self.rundir.metrics)
        return RunView(self.rundir, status, summary, problem, metrics, told, told_by)

    @property
    def name(self) -> str:
        """Of the directory."""
        return self.rundir.path.resolve().name

    @property
    def rows(self) -> tuple[Row, ...]:
        """metrics.jsonl: row N is of the step that made version N; row 0 has the evaluation before training."""
        return self._metrics.rows

    @property
    def steps(self) -> tuple[Row, ...]:
        """The rows of training steps."""
        return tuple(row for row in self.rows if "time/step" in row or "reward/mean" in row)

    @property
    def state(self) -> str:
        """For people: running, starting, paused and why, how it ended, or that nothing runs."""
        return self.problem or self.status.get("state") or "no head was started here yet"

    @property
    def version(self) -> int:
        """Completed training steps."""
        return int(self.status.get("version", self.rows[-1]["step"] if self.rows else 0))

    @property
    def max_steps(self) -> int | None:
        """Steps that it is to train; None: not known yet."""
        return self.status.get("max_steps")

    @property
    def accuracies(self) -> tuple[tuple[int, float], ...]:
        """(version, held-out accuracy), ascending."""
        return tuple(accuracies(self.rows).items())

    @property
    def waits(self) -> tuple[Wait, ...]:
        """Who waits for whom; nobody where no head runs."""
        return tuple(Wait(**wait) for wait in self.status.get("waits", ()))

    def series(self, name: str) -> tuple[tuple[int, float], ...]:
        """(step, value) of each row that has this metric as a number."""
        found = ((row["step"], row.get(name)) for row in self.rows)
        return tuple((step, float(value)) for step, value in found if isinstance(value, int | float))

    def cost(self) -> dict[str, Any]:
        """The bill, as `echo2 cost --json` prints it.

        Raises:
            UserError: the head has not saved accounts yet.
        """
        return report(self.rundir.path, self.rows)

    def forecast(self) -> Forecast | None:
        """None where the run is over or nothing is known yet."""
        recent = [row for row in self.steps[-FORECAST_STEPS:] if "cost/cum_usd" in row and "time/since_start" in row]
        if self.summary is not None or self.max_steps is None or len(recent) < 2:
            return None
        first, last = recent[0], recent[-1]
        num_left = max(0, self.max_steps - last["step"]) / (last["step"] - first["step"])
        usd = last["cost/cum_usd"] + num_left * (last["cost/cum_usd"] - first["cost/cum_usd"])
        return Forecast(usd, num_left * (last["time/since_start"] - first["time/since_start"]))


def _identity(path: Path) -> tuple[int, int] | None:
    """Of a file that is only ever replaced whole."""
    try:
        stat = path.stat()
    except OSError:
        return None
    return stat.st_ino, stat.st_mtime_ns
