"""The state of a run directory at one moment, used by `echo2 status`, the progress display, the dashboard and the
Python API.

The directory is only read, so it makes no difference whether the run is going on, has ended, was killed or was copied
from elsewhere. A file that is missing or half written counts as having no data yet.
"""

from __future__ import annotations

import os
import socket
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from echo2.config.rundir import RunDir, accuracies, is_claimed, newest_checkpoint, parse_row, read_json
from echo2.core.disk import FLOOR_BYTES, free_bytes
from echo2.core.errors import UserError
from echo2.core.types import Wait
from echo2.head.ledger.costs import report

Row = Mapping[str, Any]
#: Number of the newest steps from which the time and cost of the remaining ones are extrapolated.
FORECAST_STEPS = 50
#: The largest process id of Linux.
PID_MAX = 1 << 22
#: A head on another machine (run directory copied or shared) counts as gone after this time without a new status.
SILENT_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class MetricsFile:
    """The rows of the file up to the first damaged one, and how far the file was read. The head appends rows; when a
    late evaluation ends, and when the learner falls back, it replaces the file by one with the same older rows.
    """

    rows: tuple[Row, ...] = ()
    _marks: tuple[tuple[int, int], ...] = ()  # offset and hash of each row's line
    _file_identity: tuple[int, int, int] | None = None  # inode, size and modification time of the file

    def newer(self, path: Path) -> MetricsFile:
        """Return the current contents of the file; this object if they have not changed.

        Reading stops at the size reported by the file system, because a device file has no end.
        """
        try:
            with path.open("rb") as file:
                stat = os.fstat(file.fileno())
                identity = stat.st_ino, stat.st_size, stat.st_mtime_ns
                if identity == self._file_identity:
                    return self
                if self._marks and self._file_identity is not None and self._file_identity[0] == identity[0]:
                    start, mark = self._marks[-1]
                    file.seek(start)
                    text = file.read(max(0, stat.st_size - start))
                    if hash(text.partition(b"\n")[0]) == mark:
                        return self._read(text, start, len(self.rows) - 1, identity)
                    file.seek(0)
                return self._read(file.read(stat.st_size), 0, 0, identity)
        except FileNotFoundError:
            return self if self._file_identity is None else MetricsFile()

    def _read(self, text: bytes, start: int, num_kept: int, identity: tuple[int, int, int]) -> MetricsFile:
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
        return MetricsFile(tuple(rows), tuple(marks), identity)


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
    _head_status: Mapping[str, Any] | None = None  # status.json as last read, and its `_identity`
    _status_identity: tuple[int, int] | None = None

    @classmethod
    def read(cls, directory: Path) -> RunView:
        """Read the run in a directory; the run may not have begun."""
        return cls(RunDir(directory), {}, None, "", MetricsFile()).newer()

    def newer(self) -> RunView:
        """Return the current state of the same run; equal to this one if nothing has changed."""
        status: Mapping[str, Any] = {}
        summary, problem, head_status, identity = None, "", self._head_status, _identity(self.rundir.status)
        try:
            if identity != self._status_identity:  # megabytes with thousands of workers
                head_status = read_json(self.rundir.status)
            status = {} if head_status is None else live_status(self.rundir, head_status, with_workers=False)
            if head_status is self._head_status and status == self.status:
                status = self.status
            summary = read_json(self.rundir.summary)
        except UserError as error:
            problem, identity = str(error), None
        metrics = self._metrics.newer(self.rundir.metrics)
        return RunView(self.rundir, status, summary, problem, metrics, head_status, identity)

    @property
    def name(self) -> str:
        return self.rundir.path.resolve().name

    @property
    def rows(self) -> tuple[Row, ...]:
        """Rows of metrics.jsonl: step N made version N; step 0 has the evaluation before training."""
        return self._metrics.rows

    @property
    def steps(self) -> tuple[Row, ...]:
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
        values = ((row["step"], row.get(name)) for row in self.rows)
        return tuple((step, float(value)) for step, value in values if isinstance(value, int | float))

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


def read_status(rundir: RunDir) -> dict[str, Any]:
    """Return the head's status, plus `state`, `goes_on` (whether a head serves the run or is being started) and
    `processes` (role, id, pid, engine and whether each is alive).

    Raises:
        UserError: no run was started in this directory.
    """
    status: dict[str, Any] | None = read_json(rundir.status)
    if status is None:
        why = "no head was started there. `echo2 run` starts one."
        if is_claimed(rundir.path):
            why = "its head is being started, or stands by for another one. Ask again in a minute."
            if (free := free_bytes(rundir.path)) < FLOOR_BYTES:
                sizes = f"{free >> 20} MiB free, {FLOOR_BYTES >> 20} needed"
                why = f"its head waits for room on the disk that holds {rundir.path}: {sizes}. Free some space."
        raise UserError(f"{rundir.path} has no status yet: {why}")
    return live_status(rundir, status)


def live_status(rundir: RunDir, head_status: Mapping[str, Any], with_workers: bool = True) -> dict[str, Any]:
    """Return `head_status`, which the head wrote, with the current state and processes of the run. Worker processes, of
    which there may be thousands, are included only with `with_workers`. Where no head serves the run, nobody waits, no
    fleet is wanted, and the newest checkpoint is the one on the disk: the learner may have saved it last.

    Raises:
        UserError: a file of the run directory is damaged.
    """
    processes = _processes(rundir, head_status, with_workers)
    head = processes[0]  # the head that wrote the status; a successor may be starting
    lives = {process["role"] for process in processes if process["alive"]}
    outcome = read_json(rundir.outcome)
    is_going_on = outcome is None and (
        head["alive"] or (head["alive"] is None and time.time() - head_status["time"] < SILENT_SECONDS)
    )
    if outcome is not None:
        state = f"{outcome['kind']}: {outcome['reason']}"
    elif is_going_on:
        state = f"paused: {head_status['paused']}" if head_status.get("paused") else "running"
    elif head["alive"] is None:
        state = f"no news from the head on {head['host']} for {SILENT_SECONDS:.0f} s"
    elif "supervisor" in lives:
        room = free_bytes(rundir.path) >= FLOOR_BYTES
        state = "starting" if room else f"paused: no room on the disk that holds {rundir.path}"
    else:
        state = "the head is not running; continue with `echo2 run ... --resume`"
    goes_on = is_going_on or (outcome is None and "supervisor" in lives)
    status = {**head_status, "directory": str(rundir.path), "processes": processes, "state": state, "goes_on": goes_on}
    status["deaths"] = [] if outcome is not None else _deaths(rundir)
    return status if is_going_on else {**status, "waits": [], "fleet": None, "checkpoint": _newest(rundir, head_status)}


def _deaths(rundir: RunDir) -> list[dict[str, Any]]:
    """Return the local processes that died and were started again, and have come no further since."""
    return [entry for entry in read_json(rundir.processes) or [] if entry.get("deaths")]


def _newest(rundir: RunDir, head_status: Mapping[str, Any]) -> int | None:
    """Return the newest checkpoint: on this disk, or told by a learner that saves elsewhere."""
    versions = (newest_checkpoint(rundir.checkpoints), head_status.get("checkpoint"))
    return max((version for version in versions if version is not None and version >= 0), default=None)


def _processes(rundir: RunDir, status: Mapping[str, Any], with_workers: bool) -> list[dict[str, Any]]:
    """Return all known processes: those connected to the head, and those that a supervisor on this machine started."""
    here = socket.gethostname()
    processes: list[dict[str, Any]] = [{"role": "head", "id": "head", **status["head"], "doing": "serving the run"}]
    if status["learner"] is not None:
        processes.append({"role": "learner", "id": "learner", **status["learner"]})
    pids = {entry["pid"] for entry in (*processes, *status["workers"]) if entry.get("host") == here}
    if with_workers:
        processes += [{"role": "worker", **worker} for worker in status["workers"]]
    for entry in read_json(rundir.processes) or []:
        if entry["pid"] not in pids and (with_workers or entry["role"] != "worker"):
            processes.append(
                {"role": entry["role"], "id": entry["name"], "pid": entry["pid"], "host": here, "doing": ""}
            )
    return [_process(entry, here) for entry in processes]


def _process(entry: dict[str, Any], here: str) -> dict[str, Any]:
    is_pid = 0 < (entry["pid"] or 0) <= PID_MAX  # workers report their own
    alive = _is_alive(entry["pid"]) if entry["host"] == here and is_pid else None
    doing = "stands by" if entry.get("standby") else entry.get("doing") or ""
    named = {key: entry[key] for key in ("role", "id", "pid", "host")} | {"engine": entry.get("engine") or ""}
    return {**named, "alive": alive, "doing": "" if alive is False else doing, "weights": _weights(entry)}


def _weights(entry: dict[str, Any]) -> str:
    """Describe a worker's weights in a few words: `v11, v12 63%, up 3.1 MB, down 9.8 MB`."""
    words = [f"v{entry['installed'].rpartition('.')[2]}"] if entry.get("installed") else []
    if (fetching := entry.get("fetching")) is not None:
        share = fetching["bytes_stored"] / max(1, fetching["bytes_total"])
        words.append(f"v{fetching['version']} {share:.0%}")
    for word, key in (("up", "bytes_sent"), ("down", "bytes_received")):
        if entry.get(key):
            words.append(f"{word} {entry[key] / 1e6:.1f} MB")
    if entry.get("mismatch") is not None:
        words.append(f"logprobs {entry['mismatch']:.2g} nats from the learner's")
    if entry.get("suspected"):
        words.append(f"suspected: {entry['suspected']}")
    return ", ".join(words)


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass  # it is alive, but belongs to another user
    return True
