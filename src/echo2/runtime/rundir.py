"""A run directory: what lies where, and who may use it.

    config.json       resolved configuration            metrics.jsonl   one object a step
    ledger.sqlite     what became of every group        events.jsonl    what the planner was told and answered (replay)
    status.json       who waits for whom, right now     rollouts/       samples as text, for people
    checkpoints/      step_N/: HF model + optimizer     snapshots/      chunks that workers fetch
    logs/             one file a process                identity/       the run's keys (private)
    ticket            what `echo2 worker` needs to join processes.json  local processes with their pids
    outcome.json      how the run ended                 summary.json    the numbers of its closing table

Small files are replaced whole (`write_atomically`), so that a reader never sees half of one.
"""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from echo2 import config as configuration
from echo2.documents import parse_json
from echo2.errors import UserError, write_failed

#: How long a claim waits for a predecessor that is about to die (children outlive a killed supervisor by a moment).
CLAIM_SECONDS = 3.0


@dataclass(frozen=True, slots=True)
class RunDir:
    """Paths of one run."""

    path: Path

    @property
    def config(self) -> Path:
        return self.path / "config.json"

    @property
    def ledger(self) -> Path:
        return self.path / "ledger.sqlite"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def events(self) -> Path:
        return self.path / "events.jsonl"

    @property
    def status(self) -> Path:
        return self.path / "status.json"

    @property
    def processes(self) -> Path:
        return self.path / "processes.json"

    @property
    def outcome(self) -> Path:
        return self.path / "outcome.json"

    @property
    def summary(self) -> Path:
        return self.path / "summary.json"

    @property
    def ticket(self) -> Path:
        return self.path / "ticket"

    @property
    def learner_ticket(self) -> Path:
        return self.path / "identity" / "learner-ticket"

    @property
    def identity(self) -> Path:
        return self.path / "identity"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def snapshots(self) -> Path:
        return self.path / "snapshots"

    @property
    def rollouts(self) -> Path:
        return self.path / "rollouts"

    @property
    def logs(self) -> Path:
        return self.path / "logs"

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
    """Be the only `role` (run or head) of a run directory; the system lets go of the claim when the process dies.

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


def create(path: Path, config: configuration.Config, resume: bool) -> RunDir:
    """Make the directory of a new run, or reopen one with `resume`. A resumed run may change its configuration.

    Raises:
        UserError: it exists and `resume` was not asked for; it cannot be written; there is nothing to resume.
    """
    rundir = RunDir(path)
    exists = rundir.ledger.exists() or rundir.config.exists()
    if exists and not resume:
        raise UserError(
            f"{path} holds a run already. Continue it with --resume, or choose another directory with --out DIR."
        )
    if resume and not exists:
        raise UserError(f"Nothing to resume in {path}: it holds no run. Leave --resume out to start one.")
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
        raise UserError(f"{path} is damaged: {error}. A run that is going on writes it anew.") from error


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
