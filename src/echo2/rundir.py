"""A run directory: where its files are, and which process may use it.

    config.json       resolved configuration            metrics.jsonl   one object a step
    ledger.sqlite     what became of every group        events.jsonl    what the planner was told and answered (replay)
    status.json       who waits for whom, right now     rollouts/       samples as text, for people
    checkpoints/      step_N/: HF model + optimizer     snapshots/      chunks that workers fetch
    logs/             one file a process                identity/       the run's keys (private)
    ticket            what `echo2 worker` needs to join processes.json  local processes with their pids
    outcome.json      how the run ended                 summary.json    the numbers of its closing table
    inputs/           rows, functions and a model that Python gave (`echo2.train`)

Small files are replaced whole (`write_atomically`), so that a reader never sees half of one.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import sqlite3
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from echo2 import config as configuration
from echo2.documents import parse_json
from echo2.errors import UserError, write_failed

#: In metrics.jsonl, before a worker's name: mean |log ratio| of its tokens at lag 0, and how many they are.
FRESH_SURPRISE = "mismatch/surprise/lag_0/worker/"
FRESH_MISMATCH, FRESH_TOKENS = "mismatch/abs_log_ratio/lag_0/worker/", "mismatch/tokens/lag_0/worker/"
#: How long a claim waits for a predecessor that is about to die (children outlive a killed supervisor by a moment).
CLAIM_SECONDS = 3.0


class _Entry:
    """The path of one entry of a run directory."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, rundir: RunDir, kind: type[RunDir]) -> Path:
        return rundir.path / self._name


@dataclass(frozen=True, slots=True)
class RunDir:
    """Paths of one run."""

    path: Path

    config = _Entry("config.json")
    ledger = _Entry("ledger.sqlite")
    metrics = _Entry("metrics.jsonl")
    events = _Entry("events.jsonl")
    status = _Entry("status.json")
    processes = _Entry("processes.json")
    outcome = _Entry("outcome.json")
    summary = _Entry("summary.json")
    ticket = _Entry("ticket")
    learner_ticket = _Entry("identity/learner-ticket")
    identity = _Entry("identity")
    checkpoints = _Entry("checkpoints")
    snapshots = _Entry("snapshots")
    rollouts = _Entry("rollouts")
    logs = _Entry("logs")
    inputs = _Entry("inputs")

    def read_config(self) -> configuration.Config:
        """The resolved configuration of this run.

        Raises:
            UserError: this is not a run directory.
        """
        if not self.config.is_file():
            raise UserError(f"{self.path} is not a run directory: it has no config.json.")
        return configuration.load(self.config)


@contextmanager
def claimed(path: Path, role: str) -> Iterator[None]:
    """Be the only `role` (run, head, serve) of a directory; the system lets go of the claim when the process dies.

    Raises:
        UserError: another process is.
    """
    lock, give_up_at = path / f".{role}.lock", time.monotonic() + CLAIM_SECONDS
    try:
        path.mkdir(parents=True, exist_ok=True)
        file = open(lock, "a+", encoding="utf-8")  # noqa: SIM115 (closed below)
    except OSError as error:
        raise UserError(f"Cannot write the run directory {path}: {error.strerror}.") from error
    with file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > give_up_at:
                    detail = f"Another `echo2 {role}` works on {path}: see `echo2 status {path}`."
                    raise UserError(f"{detail} Stop it first, or choose another --out.") from None
            time.sleep(0.1)
        yield


def check_directory(path: Path, resume: bool) -> None:
    """Find that a run cannot begin, or go on with `resume`, in this directory.

    Raises:
        UserError: it holds a run and `resume` was not asked for; there is nothing to resume.
    """
    rundir = RunDir(path)
    exists = rundir.ledger.exists() or rundir.config.exists()
    if exists and not resume and not failed_to_start(rundir):
        raise UserError(
            f"{path} holds a run already. Continue it with --resume, or choose another directory with --out DIR."
        )
    if resume and not exists:
        raise UserError(f"Nothing to resume in {path}: it holds no run. Leave --resume out to start one.")


def create(path: Path, config: configuration.Config, resume: bool) -> RunDir:
    """Make the directory of a new run, or reopen one with `resume`. A resumed run may change its configuration.

    Raises:
        UserError: as `check_directory` says; or it cannot be written.
    """
    check_directory(path, resume)
    rundir = RunDir(path)
    if not resume and (rundir.ledger.exists() or rundir.config.exists()):
        clear(rundir)
    try:
        for folder in (path, rundir.rollouts, rundir.logs, rundir.checkpoints, rundir.snapshots):
            folder.mkdir(parents=True, exist_ok=True)
        rundir.identity.mkdir(mode=0o700, exist_ok=True)
        write_atomically(rundir.config, configuration.to_json(config))
        for stale in (rundir.outcome, rundir.status, rundir.processes, rundir.summary):
            stale.unlink(missing_ok=True)
    except OSError as error:
        raise UserError(f"Cannot write the run directory {path}: {error.strerror}.") from error
    return rundir


def failed_to_start(rundir: RunDir) -> bool:
    """Whether what was started there ended with an error and left nothing that is worth keeping: no checkpoint, and no
    group of use in its ledger."""
    outcome = read_json(rundir.outcome)
    is_failure = outcome is not None and outcome.get("kind") in ("user_error", "failed")
    return is_failure and newest_checkpoint(rundir.checkpoints) is None and not _has_groups(rundir.ledger)


def _has_groups(ledger: Path) -> bool:
    """Whether a ledger records a training, or a group that was delivered and not retired. One that cannot be read may.

    The ledger is asked, and not status.json: that file is of the newest start, the ledger of all.
    """
    if not ledger.exists():
        return False
    of_use = "SELECT 1 FROM trainings UNION ALL SELECT 1 FROM groups WHERE state IN ('delivered', 'ready', 'trained')"
    try:
        with closing(sqlite3.connect(ledger)) as connection:
            return bool(connection.execute(f"SELECT EXISTS ({of_use})").fetchone()[0])
    except sqlite3.Error:
        return True


def clear(rundir: RunDir) -> None:
    """Take a start that failed away; its keys, logs and workers' directories stay."""
    for pattern in ("ledger.sqlite*", "events.jsonl*", "metrics.jsonl", "training.json"):
        for path in rundir.path.glob(pattern):
            path.unlink()
    for folder in (rundir.snapshots, rundir.checkpoints, rundir.rollouts):
        shutil.rmtree(folder, ignore_errors=True)


def newest_checkpoint(checkpoints: Path) -> int | None:
    """The version of the newest whole checkpoint; None: there is none."""
    states = checkpoints.glob("step_*/state.json")
    versions = (path.parent.name.removeprefix("step_") for path in states)
    return max((int(version) for version in versions if version.isdecimal()), default=None)


def accuracies(rows: Iterable[Mapping[str, Any]]) -> dict[int, float]:
    """Held-out accuracy by version, of the rows of a metrics file that have one."""
    return {row["step"]: row["eval/accuracy"] for row in rows if "eval/accuracy" in row}


def best_version(versions: Iterable[int], accuracies: Mapping[int, float]) -> int | None:
    """The most accurate of `versions`, the newest of equals; None: none of them was evaluated."""
    evaluated = (version for version in versions if version in accuracies)
    return max(evaluated, key=lambda version: (accuracies[version], version), default=None)


def write_atomically(path: Path, text: str, mode: int = 0o644) -> None:
    """Replace a small file whole: a reader sees the old text or the new, never half of it.

    Raises:
        NoRoomError: the disk is full; the old file is untouched.
        UserError: the directory can't be written otherwise.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode), "w", encoding="utf-8") as file:
            file.write(text)
        os.replace(temporary, path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        message = f"Cannot write {path}: {error.strerror}. Free some space; nothing was lost."
        raise write_failed(error, message) from error


def read_json(path: Path) -> Any:
    """The JSON value in a file, or None while there is no such file.

    Raises:
        UserError: it can't be read, or holds something else.
    """
    try:
        return parse_json(path.read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise UserError(f"{path} is damaged: {error}. A run that is active rewrites it.") from error


def newest_run(outputs: Path = Path("outputs")) -> RunDir:
    """The run directory below `outputs` whose head wrote last.

    Raises:
        UserError: there is none.
    """
    runs = [RunDir(entry.parent) for entry in outputs.glob("*/config.json")]
    if not runs:
        raise UserError(f"No run found below {outputs}/. Name the run directory.")
    return max(runs, key=_last_written)


def _last_written(rundir: RunDir) -> float:
    """Not the directory's own time: looking at a run (its ledger's lock files) changes that."""
    return max(path.stat().st_mtime for path in (rundir.config, rundir.status) if path.exists())


def read_metrics(path: Path, refuses_damage: bool = False) -> list[dict[str, Any]]:
    """The rows of a metrics file up to the first damaged one; none where there is no file.

    Raises:
        UserError: with `refuses_damage`, a row before the last is damaged; the last may be torn by a kill.
    """
    rows: list[dict[str, Any]] = []
    lines = path.read_bytes().splitlines() if path.is_file() else []
    for number, line in enumerate(lines, 1):
        row = parse_row(line)
        if row is None:
            if refuses_damage and number < len(lines):
                raise UserError(f"{path}, line {number} is damaged: it is not a JSON object with an integer `step`.")
            break
        rows.append(row)
    return rows


def parse_row(line: bytes) -> dict[str, Any] | None:
    """A row of a metrics file; None where the line is damaged."""
    try:
        row = parse_json(line)
    except ValueError:  # no JSON, or a character cut in two
        return None
    return row if isinstance(row, dict) and type(row.get("step")) is int else None
