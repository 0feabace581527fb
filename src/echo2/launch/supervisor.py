"""Starts head, learner and workers on this machine, connected as over a network, and restarts those that die.

A process that dies is restarted (the head from its ledger, the learner from its checkpoint, a worker afresh), until its
failure repeats, however long a start takes; its last words are shown. What counts is not time but progress beyond the
best that was reached before: of the learner another version (steps that it trains again after a restart are none) or
another group left out (`learner/grpo/saving.py`), of a worker another accepted group, of the head either.

A process that fails because of the user's mistake ends the run, with its one-line error; one that fails because the
disk is full is restarted when there is room; a worker that the owner revoked stays away, and the run goes on. When the
supervisor itself dies, its children end too (`lifeline`).
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

from echo2.config.rundir import CRASH_RECORD, STOP_WORDS, RunDir, newest_checkpoint, read_json, write_atomically
from echo2.core import disk, logs
from echo2.core.child import ChildProcess, ending, log_end
from echo2.core.errors import Echo2Error, NoRoomError, UserError
from echo2.core.logs import TAIL_BYTES, WORDLESS, last_error, last_words
from echo2.transport.identity import PeerIdentity, RunIdentity

#: A process that meets a full disk twice within this time, although there is room, is not restarted.
ROOM_WINDOW_SECONDS = 60.0
#: Time for a process to end by itself once the run is over.
END_SECONDS = 10.0
#: Time after which a stop that waits for the learner's checkpoint prints a message.
PATIENCE_SECONDS = 3.0
#: Time for the other processes to end once the head is gone.
STRAGGLER_SECONDS = 3.0
#: Time for a process to end after SIGTERM, before it is killed.
KILL_SECONDS = 2.0
#: Timeout for the head to start listening.
HEAD_START_SECONDS = 180.0
POLL_SECONDS = 0.1
#: A disk with fewer free bytes than this counts as full.
FULL_DISK_BYTES = 1 << 16
#: Deaths in a row, without progress in between, after which the run ends.
RESTARTS_MAX = 5
#: The same for a process that dies with the same words before the head has heard of it. It comes no further at the next
#: start, and each may take minutes.
START_FAILURES_MAX = 3
_NUMBERS = re.compile(r"0x[0-9a-f]+|\d+")


class ProcessFailed(Echo2Error):
    """A process of the run keeps dying; the message names it and its log."""


@dataclass(slots=True)
class Deaths:
    """Deaths in a row of one process. `words`: its last words, empty if it was killed. `num_at_start`: the newest ones
    that happened before the head had heard of the process, with the same words but for numbers. `best`: the progress
    before them, by kind."""

    num: int = 0
    num_at_start: int = 0
    words: str = ""
    ending: str = ""
    died_at: float = 0.0
    best: tuple[int, ...] = ()

    def died(self, words: str, progress: tuple[int, ...], was_up: bool, now: float, ending: str = "") -> None:
        """Count a death. `words`: the last words, if any; `was_up`: the head had heard of this process;
        `now`: Unix time; `ending`: how it ended."""
        best = self.best or progress
        if any(reached > before for reached, before in zip(progress, best, strict=True)):
            self.num = self.num_at_start = 0
        is_same = _NUMBERS.sub("#", words) == _NUMBERS.sub("#", self.words)
        if was_up or not words:
            self.num_at_start = 0
        else:
            self.num_at_start = self.num_at_start + 1 if is_same else 1
        self.best = tuple(map(max, zip(progress, best, strict=True)))
        self.num += 1
        self.words, self.died_at, self.ending = words, now, ending

    @property
    def reason(self) -> str:
        """The last words, or how it ended."""
        return self.words or f"it {self.ending}"

    def to_plain(self) -> dict[str, Any]:
        """Return what processes.json shows; empty: it has not died."""
        return {"deaths": self.num, "last_words": self.reason, "died_at": self.died_at} if self.num else {}

    def why_hopeless(self) -> str:
        """Return how often it died, if it should not be started again; else ""."""
        if self.num_at_start >= START_FAILURES_MAX:
            return f"died {self.num_at_start} times in a row while it started"
        return f"died {self.num} times in a row" if self.num >= RESTARTS_MAX else ""


@dataclass(slots=True)
class Child:
    """One local process of the run."""

    name: str
    arguments: list[str]
    process: ChildProcess | None = None
    waits_for_room: bool = False
    full_at: float | None = None
    deaths: Deaths = field(default_factory=Deaths)


class Supervisor:
    """Owns the local processes of one run. Without `has_learner`, the learner is started elsewhere. `takes_turns`: its
    learner and workers share a GPU that does not hold them all."""

    def __init__(
        self,
        rundir: RunDir,
        num_workers: int,
        worker_arguments: list[str],
        num_ranks: int = 1,
        has_learner: bool = True,
        takes_turns: bool = False,
    ) -> None:
        self.rundir = rundir
        path = str(rundir.path)
        self.head = Child("head", ["head", path])
        card = ["--card", str(rundir.path / "card")] if takes_turns else []
        self.learner = Child("learner", ["learner", path, *card]) if has_learner else None
        self.others = [self.learner] if self.learner else []
        for number in range(num_workers):
            name, device = f"worker-{number}", f"auto:{number + num_ranks}"  # the learner has the first devices
            places = ["--state", str(self._state(name)), "--device", device]
            self.others.append(Child(name, ["worker", f"@{rundir.ticket}", *places, *card, *worker_arguments]))
        self._signalled: signal.Signals | None = None
        self._num_signals = 0
        self._failure: Exception | None = None
        self._listed = ""

    @property
    def children(self) -> list[Child]:
        """All local processes, the head first."""
        return [self.head, *self.others]

    def run(self, on_poll: Callable[[], None]) -> dict[str, str]:
        """Run until the run is over. Return its outcome ({"kind", "reason"}).

        Raises:
            UserError: the user's mistake, in the words of the process that failed.
            ProcessFailed: a process keeps dying.
            KeyboardInterrupt: the run was stopped by a signal; it can be resumed.
        """
        previous = {number: signal.signal(number, self._on_signal) for number in (signal.SIGINT, signal.SIGTERM)}
        with contextlib.ExitStack() as ending:  # in reverse order; each of them is done, whatever becomes of the others
            for number, handler in previous.items():
                ending.callback(signal.signal, number, handler)
            ending.callback(self._write_end)
            ending.callback(self._end_all)
            try:
                return self._run(on_poll)
            except Exception as error:
                self._failure = error
                raise

    def _run(self, on_poll: Callable[[], None]) -> dict[str, str]:
        self._start(self.head)
        self._wait_for_head()
        for child in self.others:
            self._start(child)
        while (outcome := self._outcome()) is None:
            if self._signalled is not None:
                raise KeyboardInterrupt
            self._look_after()
            self._list()
            on_poll()
            time.sleep(POLL_SECONDS)
        return outcome

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._signalled = signal.Signals(number)
        self._num_signals += 1

    def _outcome(self) -> dict[str, str] | None:
        outcome: dict[str, str] | None = read_json(self.rundir.outcome)
        return outcome

    def _start(self, child: Child) -> None:
        environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
        environment.setdefault("PYTHONHASHSEED", "0")  # task code that iterates over sets gives the same tasks always
        environment.setdefault("OMP_NUM_THREADS", "1")  # processes share the cores: see docs/operations.md
        command, log = [sys.executable, "-m", "echo2", *child.arguments], self._log(child)
        child.process = ChildProcess(command, log_path=log, environment=environment, has_lifeline=True)
        self._list()

    def _list(self) -> None:
        """Write the list of processes if it has changed. On a full disk, the next call tries again."""
        listing: list[dict[str, Any]] = [{"role": "supervisor", "name": "run", "pid": os.getpid()}]
        for child in self.children:
            if child.process is not None:
                entry = {"role": child.arguments[0], "name": child.name, "pid": child.process.pid}
                listing.append({**entry, **child.deaths.to_plain()})
        plain = json.dumps(listing)
        if plain != self._listed:
            with contextlib.suppress(NoRoomError):
                write_atomically(self.rundir.processes, plain)
                self._listed = plain

    def _wait_for_head(self) -> None:
        deadline = time.monotonic() + HEAD_START_SECONDS
        while read_json(self.rundir.status) is None:
            assert self.head.process is not None
            if self.head.process.status is not None:
                if self._outcome() is not None:
                    return  # the run was over at once
                self._died(self.head)
                deadline = time.monotonic() + HEAD_START_SECONDS  # of the next one; a full disk may last for days
            if time.monotonic() > deadline:
                raise ProcessFailed(
                    f"The head did not start within {HEAD_START_SECONDS:.0f} s; see {self._log(self.head)}."
                )
            if self._signalled is not None:
                raise KeyboardInterrupt
            time.sleep(POLL_SECONDS)

    def _look_after(self) -> None:
        for child in self.children:
            logs.cut_log(self._log(child))
            status = child.process.status if child.process is not None else None
            is_done = status == 0 and child is not self.head  # the learner may end before the last evaluation
            if status is not None and not is_done and self._outcome() is None:
                self._died(child)

    def _died(self, child: Child) -> None:
        """Restart a dead child, or give up on the run."""
        assert child.process is not None
        status = child.process.status
        assert status is not None
        now = time.monotonic()
        if status == NoRoomError.exit_status and self._may_wait_for_room(child, now):
            return
        if status == UserError.exit_status and self._is_revoked(child):
            child.process = None
            word = f"{child.name} is out: it was revoked, or the ticket it joined with. The run goes on without it"
            command = shlex.join(["echo2", "worker", f"@{self.rundir.ticket}"])
            print(f"{word}; a worker in its place: {command}", file=sys.stderr)
            return
        if status in (UserError.exit_status, NoRoomError.exit_status):
            raise UserError(last_error(child.process.log_tail(TAIL_BYTES)) or self._silent(child))
        self._count_death(child, child.process, status)
        if why := child.deaths.why_hopeless():
            raise ProcessFailed(
                f"{child.name} {why}: {child.deaths.reason}. Nothing is lost: see {self._log(child)}, then continue "
                "with --resume."
            )
        print(f"{child.name} died and is started again: {child.deaths.reason}", file=sys.stderr)
        self._start(child)

    def _count_death(self, child: Child, process: ChildProcess, status: int) -> None:
        """Count a death, with its last words and what the process had reached."""
        head_status, role = read_json(self.rundir.status) or {}, child.arguments[0]
        record = read_json(self.rundir.checkpoints / CRASH_RECORD) or {}
        reached = progress(head_status, role, self._peer_id(child), len(record.get("left_out", ())))
        words = "" if status in WORDLESS else last_words(process.log_tail(TAIL_BYTES))
        child.deaths.died(words, reached, is_up(head_status, process.pid), time.time(), ending(status))

    def _is_revoked(self, child: Child) -> bool:
        """Whether this is a worker that `echo2 revoke` shut out."""
        peer_id = self._peer_id(child)
        return bool(peer_id) and peer_id in RunIdentity.create_or_load(self.rundir.identity).revoked()

    def _peer_id(self, child: Child) -> str:
        """Return the id of a worker in the run; empty if it has not joined yet, and for head and learner."""
        if child is self.head or child is self.learner:
            return ""
        run = RunIdentity.create_or_load(self.rundir.identity)
        identity = PeerIdentity(self._state(child.name) / f"{run.run_id}-worker").load()
        return "" if identity is None else identity[0]

    def _may_wait_for_room(self, child: Child, now: float) -> bool:
        """Restart a child that met a full disk, once there is room. Return False if it meets a full disk again soon
        after a restart with room: then it writes to another disk, or has a quota.
        """
        free = disk.free_bytes(self.rundir.path)
        if free < disk.FLOOR_BYTES:
            if not child.waits_for_room:
                word = f"{child.name} waits for room on the disk that holds {self.rundir.path}"
                print(f"paused: {word} ({free >> 20} MiB free, {disk.FLOOR_BYTES >> 20} needed)", file=sys.stderr)
            child.waits_for_room = True
            return True
        if child.full_at is not None and now - child.full_at < ROOM_WINDOW_SECONDS and not child.waits_for_room:
            return False
        child.waits_for_room, child.full_at = False, now
        self._start(child)
        return True

    def _silent(self, child: Child) -> str:
        """Return the error of a child that refused to run without one: a full disk takes no log line either."""
        free = disk.free_bytes(self.rundir.path)
        if free < FULL_DISK_BYTES:
            return f"The disk of {self.rundir.path} is full ({free} bytes left). Free some space, then --resume."
        return f"{child.name} refused to run; see {self._log(child)}."

    def _state(self, name: str) -> Path:
        return self.rundir.path / "workers" / name

    def _log(self, child: Child) -> Path:
        return self.rundir.logs / f"{child.name}.log"

    def _head_tells(self) -> bool:
        """Whether the head tells the other processes that the run is over. If the run has no outcome yet, the head is
        asked to stop it."""
        outcome = self._outcome()
        if outcome is not None:
            return outcome["kind"] in ("finished", "stopped")
        if self.head.process is None or self.head.process.status is not None:
            return False
        self.head.process.signal(self._signalled or signal.SIGTERM)  # the head records which
        return True

    def _wait_for_checkpoint(self) -> None:
        """Wait until the head ends the run, after the learner has saved, or at once after a second signal."""
        started, num_signals, has_announced = time.monotonic(), self._num_signals, False
        while self._outcome() is None and self.head.process is not None and self.head.process.status is None:
            if self._num_signals > num_signals or self._has_lost_learner():
                self.head.process.signal(signal.SIGTERM)  # the learner is gone, or the user does not want to wait
                return
            if not has_announced and time.monotonic() - started > PATIENCE_SECONDS:
                print("stopping: the learner saves a checkpoint; interrupt again to stop at once", file=sys.stderr)
                has_announced = True
            time.sleep(POLL_SECONDS)

    def _has_lost_learner(self) -> bool:
        """Whether the local learner is not running. A learner elsewhere is watched by the head."""
        if self.learner is None:
            return False
        return self.learner.process is None or self.learner.process.status is not None

    def _write_end(self) -> None:
        """Add to outcome.json the error that ended the run, and the steps that no checkpoint covers."""
        outcome = self._outcome() or {
            "kind": "failed",
            "reason": "the head ended without an error message; see logs/head.log",
        }
        if self._signalled is not None and self._outcome() is None:
            outcome = {"kind": "stopped", "reason": STOP_WORDS[self._signalled]}  # before the head could record it
        if (failure := self._failure) is not None:
            kind = "user_error" if isinstance(failure, UserError) else "failed"
            is_foreseen = isinstance(failure, Echo2Error)
            outcome = {"kind": kind, "reason": str(failure) if is_foreseen else f"{type(failure).__name__}: {failure}"}
        version = (read_json(self.rundir.status) or {}).get("version", 0)
        saved = newest_checkpoint(self.rundir.checkpoints)
        if self.learner and version and saved != version and outcome["kind"] != "finished":
            has = "there is none" if saved is None else f"the newest is of step {saved}"
            why = (
                last_error(log_end(self._log(self.learner), TAIL_BYTES)) or "the learner was ended before it had saved"
            )
            outcome["checkpoint"] = f"no checkpoint of step {version}: {has}. {why}. --resume trains the rest again."
            print(outcome["checkpoint"], file=sys.stderr)
        with contextlib.suppress(UserError):  # a full disk: the error is on the terminal
            write_atomically(self.rundir.outcome, json.dumps(outcome))

    def _end_all(self) -> None:
        """End all children: wait for those that the head tells to end, then SIGTERM, then SIGKILL."""
        started = [child.process for child in self.children if child.process is not None]
        with contextlib.ExitStack() as ending:  # each of them ends, whatever becomes of the others
            for process in reversed(started):
                ending.callback(_kill, process)
            try:
                self._ask_to_end(started)
            except BaseException:
                for process in started:
                    ending.callback(process.signal, signal.SIGTERM)
                raise

    def _ask_to_end(self, started: Sequence[ChildProcess]) -> None:
        is_told = self._head_tells()
        if is_told:
            self._wait_for_checkpoint()
        deadline = time.monotonic() + (END_SECONDS if is_told else 0.0)
        for process in started:
            if process.wait(max(0.1, deadline - time.monotonic())) is None:
                process.signal(signal.SIGTERM)
            if process is self.head.process:  # the head has ended: no further message will reach the others
                deadline = min(deadline, time.monotonic() + STRAGGLER_SECONDS)


def _kill(process: ChildProcess) -> None:
    try:
        process.wait(KILL_SECONDS)
    finally:
        if process.status is None:
            process.kill()
            process.wait()


def progress(status: Mapping[str, Any], role: str, peer_id: str, num_left_out: int) -> tuple[int, ...]:
    """Return numbers that grow with what a process of this role has reached, by the head's status."""
    groups = {worker["id"]: int(worker.get("useful_groups", 0)) for worker in _listed(status)}
    if role == "worker":
        return (groups.get(peer_id, 0),)
    return int(status.get("version", 0)), num_left_out if role == "learner" else sum(groups.values())


def is_up(status: Mapping[str, Any], pid: int) -> bool:
    """Whether the head has heard of this process, or is this process."""
    others = [status.get("head"), status.get("learner"), *_listed(status)]
    return any(one is not None and one.get("pid") == pid for one in others)


def _listed(status: Mapping[str, Any]) -> list[dict[str, Any]]:
    return list(status.get("workers", ()))
