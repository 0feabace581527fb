"""The state of a run directory at one moment, used by `echo2 status`, the progress display, the dashboard and the
Python API.

The directory is only read, so it makes no difference whether the run is going on, has ended, was killed or was copied
from elsewhere. A file that is missing or half written counts as having no data yet.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from echo2.config.rundir import RunDir, accuracies, read_json
from echo2.core.errors import UserError
from echo2.core.types import Wait
from echo2.head.ledger.costs import report
from echo2.views.chart_points import MetricsFile, Row
from echo2.views.status import live_status

#: Number of the newest steps from which the time and cost of the remaining ones are extrapolated.
FORECAST_STEPS = 50


@dataclass(frozen=True, slots=True)
class Forecast:
    """Extrapolation of a run's newest steps: dollars at the end of the run, and seconds until then."""

    usd: float
    seconds: float


@dataclass(frozen=True, slots=True)
class RunView:
    """State of a run at one moment; `newer` reads the current state and parses only what is new.

    status   the head's last status.json, with current `state`, `processes` (without workers) and `waits`; empty until
             a head writes status.json. The same object as before if nothing has changed
    summary  numbers of the closing table once the run is over, else None
    problem  why a file can't be read, for people; empty if all files can
    """

    rundir: RunDir
    status: Mapping[str, Any]
    summary: Mapping[str, Any] | None
    problem: str
    _metrics: MetricsFile
    _told: Mapping[str, Any] | None = None  # status.json as last read, and its `_identity`
    _told_by: tuple[int, int] | None = None

    @classmethod
    def read(cls, directory: Path) -> RunView:
        """Read the run in a directory; the run may not have begun."""
        return cls(RunDir(directory), {}, None, "", MetricsFile()).newer()

    def newer(self) -> RunView:
        """Return the current state of the same run; equal to this one if nothing has changed."""
        status: Mapping[str, Any] = {}
        summary, problem, told, told_by = None, "", self._told, _identity(self.rundir.status)
        try:
            if told_by != self._told_by:  # megabytes with thousands of workers
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
        """The name of the run directory."""
        return self.rundir.path.resolve().name

    @property
    def rows(self) -> tuple[Row, ...]:
        """Rows of metrics.jsonl: step N made version N; step 0 has the evaluation before training."""
        return self._metrics.rows

    @property
    def steps(self) -> tuple[Row, ...]:
        """The rows of training steps."""
        return tuple(row for row in self.rows if "time/step" in row or "reward/mean" in row)

    @property
    def state(self) -> str:
        """State for people: running, starting, paused and why, how the run ended, or that no process is running."""
        return self.problem or self.status.get("state") or "no head was started here yet"

    @property
    def version(self) -> int:
        """Number of completed training steps."""
        return int(self.status.get("version", self.rows[-1]["step"] if self.rows else 0))

    @property
    def max_steps(self) -> int | None:
        """Number of steps to train; None if not known yet."""
        return self.status.get("max_steps")

    @property
    def accuracies(self) -> tuple[tuple[int, float], ...]:
        """(version, held-out reward), ascending."""
        return tuple(accuracies(self.rows).items())

    @property
    def waits(self) -> tuple[Wait, ...]:
        """Current waits: who waits for whom; empty if no head is running."""
        return tuple(Wait(**wait) for wait in self.status.get("waits", ()))

    def series(self, name: str) -> tuple[tuple[int, float], ...]:
        """Return (step, value) of each row that has this metric as a number."""
        found = ((row["step"], row.get(name)) for row in self.rows)
        return tuple((step, float(value)) for step, value in found if isinstance(value, int | float))

    def cost(self) -> dict[str, Any]:
        """Return the bill, as `echo2 cost --json` prints it.

        Raises:
            UserError: the head has not saved accounts yet.
        """
        return report(self.rundir.path, self.rows)

    def forecast(self) -> Forecast | None:
        """Return the forecast; None if the run is over or too few steps are known."""
        recent = [row for row in self.steps[-FORECAST_STEPS:] if "cost/cum_usd" in row and "time/since_start" in row]
        if self.summary is not None or self.max_steps is None or len(recent) < 2:
            return None
        first, last = recent[0], recent[-1]
        num_left = max(0, self.max_steps - last["step"]) / (last["step"] - first["step"])
        usd = last["cost/cum_usd"] + num_left * (last["cost/cum_usd"] - first["cost/cum_usd"])
        return Forecast(usd, num_left * (last["time/since_start"] - first["time/since_start"]))


def _identity(path: Path) -> tuple[int, int] | None:
    """Return what identifies the version of a file that is always replaced as a whole; None if there is no file."""
    try:
        stat = path.stat()
    except OSError:
        return None
    return stat.st_ino, stat.st_mtime_ns
