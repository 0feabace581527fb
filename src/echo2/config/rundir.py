"""A run directory: where its files are, and which process may use it.

    config.json       resolved configuration            metrics.jsonl   one object a step
    ledger.sqlite     the fate of every group           events.jsonl    the planner's events and commands (for replay)
    status.json       who waits for whom, right now     rollouts/       samples as text, for people
    checkpoints/      step_N/: HF model + optimizer     snapshots/      chunks that workers fetch
    logs/             one file a process                identity/       the run's keys (private)
    ticket            what `echo2 worker` needs to join processes.json  local processes with their pids
    outcome.json      how the run ended                 summary.json    the numbers of its closing table
    store.json        this directory's claim to the store that keeps the run elsewhere
    inputs/           rows, functions and a model passed from Python (`echo2.train`)

Small files are replaced whole (`write_atomically`), so that a reader never sees half of one.
"""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import sqlite3
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from echo2 import config as configuration
from echo2.core.documents import parse_json, read_tables
from echo2.core.errors import UserError, write_failed
from echo2.core.file_lock import FileLock

#: Prefixes of keys in metrics.jsonl, before a worker's name. For the worker's tokens at lag 0: their mean surprise,
#: their mean |log ratio|, and their number.
FRESH_SURPRISE = "mismatch/surprise/lag_0/worker/"
FRESH_MISMATCH, FRESH_TOKENS = "mismatch/abs_log_ratio/lag_0/worker/", "mismatch/tokens/lag_0/worker/"
#: File below checkpoints/ with the groups on which the learner died (`learner/grpo/saving.py`).
CRASH_RECORD = "training.json"
#: Reason in outcome.json of a run that a person or its supervisor stopped, by the signal.
STOP_WORDS = {signal.SIGINT: "interrupted with Ctrl-C (SIGINT)", signal.SIGTERM: "told to end (SIGTERM)"}
#: How long `claimed` waits for the previous holder to die (children outlive a killed supervisor by a moment).
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
    claim = _Entry("store.json")
    checkpoints = _Entry("checkpoints")
    snapshots = _Entry("snapshots")
    rollouts = _Entry("rollouts")
    logs = _Entry("logs")
    inputs = _Entry("inputs")

    def read_config(self) -> configuration.Config:
        """Return the resolved configuration of this run.

        Raises:
            UserError: this is not a run directory.
        """
        if not self.config.is_file():
            raise UserError(f"{self.path} is not a run directory: it has no config.json.")
        if "model_type" in read_tables(self.config, "the config file"):
            raise UserError(f"{self.path} is a model's directory. Name the directory of a run, as in outputs/my.")
        return configuration.load(self.config)


@contextmanager
def claimed(path: Path, role: str) -> Iterator[None]:
    """Hold the only claim to a `role` (run, head, serve) in a directory; it ends with the process, however that dies.

    Raises:
        UserError: another process holds the claim, or the directory cannot be written.
    """
    give_up_at = time.monotonic() + CLAIM_SECONDS
    try:
        lock = FileLock(path / f".{role}.lock")
    except OSError as error:
        raise write_failed(error, f"Cannot write the run directory {path}: {error.strerror}.") from error
    with closing(lock):
        while not lock.take():
            if time.monotonic() > give_up_at:
                see = ["serve", "status", "--out"] if role == "serve" else ["status"]
                command = shlex.join(["echo2", *see, str(path)])
                detail = f"Another `echo2 {role}` works on {path}: see `{command}`."
                raise UserError(f"{detail} Stop it first, or choose another --out.")
            time.sleep(0.1)
        yield


def is_claimed(path: Path) -> bool:
    """Whether a process works on this directory, as `run` or as `head`."""
    for lock_file in filter(Path.exists, (path / ".run.lock", path / ".head.lock")):
        with closing(FileLock(lock_file)) as lock:
            if lock.is_taken():
                return True
    return False


def check_directory(path: Path, resume: bool) -> None:
    """Check that a run can begin, or with `resume` continue, in this directory.

    Raises:
        UserError: it can't be a directory, it holds a run and `resume` is False, or there is nothing to resume.
    """
    nearest = next(place for place in (path, *path.absolute().parents) if place.exists())
    if not nearest.is_dir():
        raise UserError(
            f"{path} cannot be a run directory: {nearest} is a file. Choose another directory with --out DIR."
        )
    if holds_run(path) and not resume:
        raise UserError(
            f"{path} holds a run already. Continue it with --resume (from Python: echo2.load(...).resume()), or "
            "choose another directory with --out DIR (out=...)."
        )
    rundir = RunDir(path)
    if resume and not (rundir.ledger.exists() or rundir.config.exists()):
        raise UserError(f"Nothing to resume in {path}: it holds no run. Leave --resume out to start one.")


def holds_run(path: Path) -> bool:
    """Whether a directory holds a run that only `--resume` continues."""
    rundir = RunDir(path)
    return (rundir.ledger.exists() or rundir.config.exists()) and not failed_to_start(rundir)


def create(path: Path, config: configuration.Config, resume: bool) -> RunDir:
    """Make the directory of a new run, or reopen one with `resume`. A resumed run may change its configuration.

    Raises:
        UserError: see `check_directory`; or the directory cannot be written.
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
        raise write_failed(error, f"Cannot write the run directory {path}: {error.strerror}.") from error
    return rundir


def failed_to_start(rundir: RunDir) -> bool:
    """Whether the last start in this directory failed and left nothing worth keeping: no checkpoint, and no useful
    group in the ledger."""
    outcome = read_json(rundir.outcome)
    is_failure = outcome is not None and outcome.get("kind") in ("user_error", "failed")
    return is_failure and newest_checkpoint(rundir.checkpoints) is None and not _has_groups(rundir.ledger)


def _has_groups(ledger: Path) -> bool:
    """Whether a ledger records a training step, or a delivered group that was not retired. True if it is unreadable.

    status.json would not do: it describes only the newest start, the ledger covers all.
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
    """Delete the files of a failed start, except its keys, logs and workers' directories."""
    for pattern in ("ledger.sqlite*", "events.jsonl*", "metrics.jsonl", "training.json"):
        for path in rundir.path.glob(pattern):
            path.unlink()
    for folder in (rundir.snapshots, rundir.checkpoints, rundir.rollouts):
        shutil.rmtree(folder, ignore_errors=True)


def newest_checkpoint(checkpoints: Path) -> int | None:
    """Return the version of the newest whole checkpoint; None if there is none."""
    states = checkpoints.glob("step_*/state.json")
    versions = (path.parent.name.removeprefix("step_") for path in states)
    return max((int(version) for version in versions if version.isdecimal()), default=None)


def accuracies(rows: Iterable[Mapping[str, Any]]) -> dict[int, float]:
    """Return the held-out reward by version, from the rows of a metrics file that have one."""
    return {row["step"]: row["eval/accuracy"] for row in rows if "eval/accuracy" in row}


def best_version(versions: Iterable[int], accuracies: Mapping[int, float]) -> int | None:
    """Return which of `versions` has the highest held-out reward, the newest of equals; None if none was evaluated."""
    evaluated = (version for version in versions if version in accuracies)
    return max(evaluated, key=lambda version: (accuracies[version], version), default=None)


def write_atomically(path: Path, text: str, mode: int = 0o644) -> None:
    """Replace a small file whole: a reader sees the old text or the new, never half of it.

    Raises:
        NoRoomError: the disk is full; the old file is untouched.
        UserError: the directory can't be written for another reason.
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


def read_json(path: Path, remedy: str = "A run that is active rewrites it.") -> Any:
    """Return the JSON value in a file, or None if there is no such file. `remedy`: where the file can't be read.

    Raises:
        UserError: the file can't be read, or does not hold JSON.
    """
    try:
        return parse_json(path.read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise UserError(f"{path} is damaged: {error}. {remedy}") from error


def newest_run(outputs: Path = Path("outputs")) -> RunDir:
    """Return the run directory below `outputs` whose head wrote last.

    Raises:
        UserError: there is none.
    """
    runs = [RunDir(entry.parent) for entry in outputs.glob("*/config.json")]
    if not runs:
        raise UserError(f"No run found below {outputs}/. Name the run directory.")
    return max(runs, key=_last_written)


def _last_written(rundir: RunDir) -> float:
    """Return when the head last wrote. The directory's own time does not say: viewing a run (its ledger's lock files)
    changes it.
    """
    return max(path.stat().st_mtime for path in (rundir.config, rundir.status) if path.exists())


def read_metrics(path: Path, refuses_damage: bool = False) -> list[dict[str, Any]]:
    """Return the rows of a metrics file up to the first damaged one; none if there is no file.

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
    """Parse a row of a metrics file; None if the line is damaged."""
    try:
        row = parse_json(line)
    except ValueError:  # not JSON, or a character cut in two
        return None
    return row if isinstance(row, dict) and type(row.get("step")) is int else None
