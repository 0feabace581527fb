"""Runs jobs, several at once, within a time: each is a chain of commands, and one that fails does not stop the others.

A job's commands run in sessions of their own, with their output in files. Jobs that are `beside` each other run at
once; others wait for them, so that no side of a comparison is measured next to the other. When the time is over, what
runs is interrupted, and what it has written is read all the same.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

POLL_SECONDS = 0.1
#: Between two looks at the memory of a job's processes: the kernel remembers a process's peak, a GPU does not.
MEMORY_SECONDS = 2.0
#: What was interrupted may save and say how it ended, for this long.
GRACE_SECONDS = 10.0
LAST_WORDS = 1500

Found = dict[str, Any]

ECHO2 = [sys.executable, "-m", "echo2"]


@dataclass(frozen=True, slots=True)
class Job:
    """`steps`: commands by name, one after the other; the output of each is in NAME.out, its errors in NAME.log.
    `read`: the figures, from the job's directory, also from that of a job that was interrupted. `told`: what makes it
    differ from others. `run`: where an echo2 run of it is, whose processes' memory is watched.
    """

    name: str
    part: str
    steps: Mapping[str, Sequence[str]]
    read: Callable[[Path], Found]
    told: Found
    beside: str = ""
    run: str = "run"


@dataclass(slots=True)
class _Active:
    """A job at work. `left`: the steps after this one."""

    job: Job
    directory: Path
    left: list[str]
    began: float
    step: str = ""
    process: subprocess.Popen[bytes] | None = None
    told_to_end: float | None = None
    step_began: float = 0.0
    seconds: dict[str, float] = field(default_factory=dict)
    peaks: dict[str, Found] = field(default_factory=dict)


def run_jobs(
    jobs: Sequence[Job],
    work: Path,
    at_once: int,
    budget_seconds: float,
    environment: Mapping[str, str],
    record: Callable[[Found], None],
    clock: Callable[[], float] = time.monotonic,
) -> None:
    """Run these jobs in their order, each in `work`/its name. `record` is called with what each gave: `name`, `part`,
    `seconds` and what it is told and has read, and under `failed` why it has no more."""
    waiting, active, end = list(jobs), list[_Active](), clock() + budget_seconds
    looked = clock()
    while waiting or active:
        now = clock()
        while waiting and now < end and len(active) < at_once and _may_begin(waiting[0], active):
            active.append(_begin(waiting.pop(0), work, environment, now))
        if now >= end:
            for job in waiting:
                record({"name": job.name, "part": job.part, **job.told, "failed": "not begun: the time was over"})
            waiting = []
            for one in active:
                _interrupt(one, now)
        if now - looked >= MEMORY_SECONDS:
            looked, on_gpu = now, gpu_memory()
            for one in active:
                _watch_memory(one, on_gpu)
        for one in list(active):
            if (found := _go_on(one, environment, now)) is not None:
                active.remove(one)
                record(found)
        time.sleep(POLL_SECONDS)


def _may_begin(job: Job, active: Sequence[_Active]) -> bool:
    return all(one.job.beside == job.beside for one in active)


def _begin(job: Job, work: Path, environment: Mapping[str, str], now: float) -> _Active:
    directory = work / job.name
    directory.mkdir(parents=True)
    one = _Active(job, directory, list(job.steps), now)
    _next(one, environment, now)
    return one


def _next(one: _Active, environment: Mapping[str, str], now: float) -> None:
    one.step, one.step_began = one.left.pop(0), now
    with (
        (one.directory / f"{one.step}.out").open("wb") as out,
        (one.directory / f"{one.step}.log").open("wb") as log,
    ):
        one.process = subprocess.Popen(
            list(one.job.steps[one.step]),
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=log,
            env={**os.environ, **environment},
            start_new_session=True,
        )


def _go_on(one: _Active, environment: Mapping[str, str], now: float) -> Found | None:
    """What the job gave, once it is over."""
    assert one.process is not None
    if (status := one.process.poll()) is None:
        return None
    one.seconds[one.step] = round(now - one.step_began, 2)
    if status == 0 and one.told_to_end is None and one.left:
        _next(one, environment, now)
        return None
    _signal(one, signal.SIGKILL)  # what the command left behind
    found: Found = {"name": one.job.name, "part": one.job.part, **one.job.told, "seconds": one.seconds}
    if one.peaks:
        found["memory"] = one.peaks
    if one.told_to_end is not None:
        found["failed"] = f"interrupted in its step {one.step!r}: the time was over"
    elif status:
        found["failed"] = f"step {one.step!r} ended with status {status}: {_last_words(one)}"
    try:
        found |= one.job.read(one.directory)
    except Exception as error:  # of files that a run that failed has not written, or has written in part
        found.setdefault("failed", f"its figures could not be read: {type(error).__name__}: {error}")
    return found


def _last_words(one: _Active) -> str:
    words = (one.directory / f"{one.step}.log").read_text(errors="replace")[-LAST_WORDS:]
    return words or (one.directory / f"{one.step}.out").read_text(errors="replace")[-LAST_WORDS:]


def _interrupt(one: _Active, now: float) -> None:
    if one.told_to_end is None:
        one.told_to_end = now
        assert one.process is not None
        one.process.send_signal(signal.SIGINT)
    elif now - one.told_to_end > GRACE_SECONDS:
        _signal(one, signal.SIGKILL)


def _signal(one: _Active, number: signal.Signals) -> None:
    assert one.process is not None
    try:
        os.killpg(one.process.pid, number)
    except ProcessLookupError:
        pass


# ---- commands, and what they print -----------------------------------------------------------------------------------


def words(flags: Mapping[str, object]) -> list[str]:
    return [part for name, value in flags.items() for part in (f"--{name}", str(value))]


def last_json(path: Path) -> Any:
    """What the last line of a file says; None if there is none."""
    lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
    try:
        return json.loads(lines[-1]) if lines else None
    except ValueError:
        return None


# ---- memory ----------------------------------------------------------------------------------------------------------


def _watch_memory(one: _Active, on_gpu: Mapping[int, int]) -> None:
    """Take the peaks of the processes that the run lists, in bytes."""
    try:
        processes = json.loads((one.directory / one.job.run / "processes.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return
    for process in processes:
        peak = one.peaks.setdefault(process["name"], {"bytes": 0})
        peak["bytes"] = max(peak["bytes"], resident_peak(process["pid"]))
        if process["pid"] in on_gpu:
            peak["gpu_bytes"] = max(peak.get("gpu_bytes", 0), on_gpu[process["pid"]])


def resident_peak(pid: int) -> int:
    """Bytes that this process has had in memory at most; 0 if there is no such process."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM")), 0)


def gpu_memory() -> dict[int, int]:
    """Bytes of GPU memory by process, as the driver tells; none without one."""
    query = ["nvidia-smi", "--query-compute-apps=pid,used_memory", "--format=csv,noheader,nounits"]
    try:
        told = subprocess.run(query, capture_output=True, text=True, timeout=10.0, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return {}
    rows = [line.split(",") for line in told.splitlines()]
    return {int(pid): int(used) << 20 for pid, used in (row for row in rows if len(row) == 2) if used.strip().isdigit()}
