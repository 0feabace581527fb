"""Processes that look after each other: children end with their supervisor, and tell it why they refused."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from echo2.config import Config
from echo2.config.rundir import RunDir, claimed, create, read_json, write_atomically
from echo2.core import disk
from echo2.core.child import LIFELINE_VARIABLE, log_end
from echo2.core.errors import UserError
from echo2.core.logs import last_error
from echo2.launch import supervisor as supervisor_module
from echo2.launch.supervisor import START_FAILURES_MAX, ProcessFailed, Supervisor
from echo2.transport.identity import PeerIdentity, RunIdentity
from echo2.transport.tickets import Ticket
from echo2.views import run_view
from echo2.views.run_view import RunView, read_status
from echo2.views.status import failure_lines
from echo2.views.watch import run_data

#: A grandchild that holds on, says its pid, and would stay for ever; its parent holds the pipe's writing end.
NO_WORKERS = {"time": 0.0, "head": {"pid": 0, "host": "elsewhere"}, "learner": None, "workers": []}
SUPERVISOR = f"""
import os, subprocess, sys
reading, writing = os.pipe()
child = "import signal; from echo2.core.child import end_with_supervisor as end; end(); print('held', flush=True)"
child += "; signal.pause()"
environment = {{**os.environ, {LIFELINE_VARIABLE!r}: str(reading)}}
process = subprocess.Popen([sys.executable, "-c", child], env=environment, pass_fds=(reading,))
print(process.pid, flush=True)
process.wait()
"""


def test_a_child_ends_when_its_supervisor_is_killed() -> None:
    source = Path(__file__).parents[2] / "src"
    environment = {**os.environ, "PYTHONPATH": str(source)}
    with subprocess.Popen(
        [sys.executable, "-c", SUPERVISOR], stdout=subprocess.PIPE, text=True, env=environment
    ) as supervisor:
        assert supervisor.stdout is not None
        words = {supervisor.stdout.readline().strip(), supervisor.stdout.readline().strip()}
        assert "held" in words
        supervisor.send_signal(signal.SIGKILL)
        # The grandchild holds the other end of this pipe: it is read to its end only when that process is gone too.
        assert supervisor.stdout.read() == ""


def test_without_a_supervisor_a_process_stays() -> None:
    source = Path(__file__).parents[2] / "src"
    environment = {name: value for name, value in os.environ.items() if name != LIFELINE_VARIABLE}
    code = "from echo2.core import child; child.end_with_supervisor()\n"
    code += "import threading; print(threading.active_count())"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**environment, "PYTHONPATH": str(source)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == "1\n"


def test_the_last_error_of_a_log_is_found_and_older_ones_are_not(tmp_path: Path) -> None:
    log = tmp_path / "head.log"
    log.write_bytes(b"error: an old one\n")
    start = log.stat().st_size
    assert last_error(log_end(log, 1 << 16)) == "an old one"
    assert last_error(log_end(log, 1 << 16, start)) is None
    log.write_bytes(log.read_bytes() + b"INFO error: in the middle\nerror: first\nerror: \xff last\nTraceback\n")
    assert last_error(log_end(log, 1 << 16, start)) == "\N{REPLACEMENT CHARACTER} last"


@pytest.fixture
def rundir(tmp_path: Path) -> RunDir:
    return create(tmp_path / "run", Config(), resume=False)


def test_a_process_that_refuses_to_run_ends_the_run_with_its_message(rundir: RunDir) -> None:
    rundir.config.write_text('{"run": {"seeed": 1}}')
    with pytest.raises(UserError, match=r"unknown key run\.seeed\. Did you mean run\.seed\?"):
        Supervisor(rundir, 0, []).run(lambda: None)
    outcome = read_json(rundir.outcome)
    assert (outcome["kind"], "unknown key run.seeed" in outcome["reason"]) == ("user_error", True)


def test_a_process_that_keeps_dying_is_not_started_for_ever(rundir: RunDir) -> None:
    supervisor = Supervisor(rundir, 0, [])
    supervisor.head.arguments = ["--version"]  # ends at once, with status 0 and without an outcome
    with pytest.raises(ProcessFailed, match=r"head died 5 times in a row: it exited with status 0\..*head\.log"):
        supervisor.run(lambda: None)
    assert read_json(rundir.outcome)["reason"].startswith("head died 5 times")
    assert rundir.logs.joinpath("head.log").read_text().count("echo2 ") == 5


DIES = """
import os, sys
if "learner" in sys.orig_argv:
    lines = ("Traceback (most recent call last):", "  File 'x.py', line 1", "AttributeError: no vocab_size")
    os.write(2, "\\n".join(["2026-01-01 10:00:00 INFO loading", *lines, ""]).encode())
    os._exit(1)
"""


def test_a_process_that_fails_alike_at_each_start_ends_the_run_with_its_message(
    rundir: RunDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "sitecustomize.py").write_text(DIES)
    paths = [str(tmp_path), str(Path(__file__).parents[2] / "src")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(paths))
    write_atomically(rundir.status, json.dumps({**NO_WORKERS, "version": 0}))
    supervisor, shown = Supervisor(rundir, 0, []), set[str]()
    supervisor.head.arguments = ["view", str(rundir.path)]  # which stays

    def look() -> None:
        view = RunView.read(rundir.path)
        shown.update(failure_lines(view.status))
        assert failure_lines(read_status(rundir)) == failure_lines(view.status) == run_data(view)["notes"]

    reason = "learner died 3 times in a row while it started: AttributeError: no vocab_size."
    with pytest.raises(ProcessFailed, match=reason):
        supervisor.run(look)
    assert read_json(rundir.outcome)["reason"].startswith(reason)
    assert rundir.logs.joinpath("learner.log").read_text().count("Traceback") == START_FAILURES_MAX
    told = capsys.readouterr().err
    assert told.count("learner died and is started again: AttributeError: no vocab_size") == START_FAILURES_MAX - 1
    assert any("learner died once" in line and "no vocab_size" in line for line in shown)
    assert any("learner died 2 times in a row" in line for line in shown)


class Clock:
    """As the module `time`, for a supervisor: while the disk is full, each of its looks is half an hour later."""

    time = staticmethod(time.time)

    def __init__(self) -> None:
        self.now, self.step_seconds = 0.0, 0.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += self.step_seconds


FULL = """#!/bin/sh
cd {folder} && echo x >> starts
[ -f room ] || {{ echo "error: Cannot write the ledger: No space left on device" >&2; exit 3; }}
echo '{{"kind": "finished", "reason": "done"}}' > run/outcome.json
echo '{{"version": 0}}' > run/status.json
"""


def test_a_head_whose_run_is_over_before_it_was_seen_to_start_is_not_started_again(
    rundir: RunDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    outcome = '{"kind": "finished", "reason": "done"}'
    (tmp_path / "child").write_text(
        f"#!/bin/sh\ncd {tmp_path} && echo x >> starts\necho '{outcome}' > run/outcome.json\n"
    )
    (tmp_path / "child").chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "child"))
    assert Supervisor(rundir, 0, [], has_learner=False).run(lambda: None)["kind"] == "finished"
    assert (tmp_path / "starts").read_text() == "x\n"


def test_a_head_that_meets_a_full_disk_while_it_starts_waits_for_room_and_says_so(
    rundir: RunDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "child").write_text(FULL.format(folder=tmp_path))
    (tmp_path / "child").chmod(0o755)
    told = list[str]()

    def free_bytes(path: Path) -> int:
        clock.step_seconds = 1800.0
        if len(told) > 3:  # somebody makes room
            clock.step_seconds = 0.0
            (tmp_path / "room").touch()
            return 1 << 40
        monkeypatch.setattr(run_view, "free_bytes", lambda path: 5 << 20)
        with claimed(rundir.path, "run"), pytest.raises(UserError) as raised:
            read_status(rundir)
        told.append(str(raised.value))
        return 5 << 20

    clock = Clock()
    monkeypatch.setattr(sys, "executable", str(tmp_path / "child"))
    monkeypatch.setattr(supervisor_module, "time", clock)
    monkeypatch.setattr(disk, "free_bytes", free_bytes)
    assert Supervisor(rundir, 0, [], has_learner=False).run(lambda: None)["kind"] == "finished"
    assert (tmp_path / "starts").read_text() == "x\n" * 2
    paused = f"waits for room on the disk that holds {rundir.path}"
    assert capsys.readouterr().err.count(f"paused: head {paused} (5 MiB free, 256 needed)") == 1
    assert all(f"its head {paused}" in one for one in told)


def test_a_run_goes_on_without_a_worker_that_was_revoked(rundir: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    run = RunIdentity.create_or_load(rundir.identity)
    ticket = Ticket.parse(run.make_ticket("worker", "127.0.0.1:1", 1, 1.0, is_own=True))
    worker = PeerIdentity(rundir.path / "workers" / "worker-0" / f"{run.run_id}-worker")
    worker_id, certificate = run.enrol(ticket.ticket_id, "worker", worker.request())
    worker.keep(ticket.credentials.ca_pem, certificate)
    write_atomically(rundir.status, '{"version": 0}')  # so that the worker is started

    def supervised() -> dict[str, str]:
        supervisor = Supervisor(rundir, 1, [], has_learner=False)
        supervisor.head.arguments = ["view", str(rundir.path)]  # which stays
        supervisor.others[0].arguments = ["worker", "no ticket"]  # which ends with status 2, as one that was revoked
        return supervisor.run(end_without_worker)

    def end_without_worker() -> None:
        if len(read_json(rundir.processes)) == len(["supervisor", "head"]):
            write_atomically(rundir.outcome, '{"kind": "failed", "reason": "the test ended it"}')

    with pytest.raises(UserError, match="no ticket"):
        supervised()
    rundir.outcome.unlink()
    run.revoke(worker_id)
    assert supervised()["reason"] == "the test ended it"
    assert "worker-0 is out: it was revoked, or the ticket it joined with" in capsys.readouterr().err


def test_the_outcome_names_steps_without_a_checkpoint(rundir: RunDir) -> None:
    write_atomically(rundir.status, '{"version": 8}')
    (rundir.checkpoints / "step_5").mkdir()
    (rundir.checkpoints / "step_5" / "state.json").write_text("{}")
    (rundir.logs / "learner.log").write_text("error: the disk is full\n")
    supervisor = Supervisor(rundir, 0, [])
    supervisor.head.arguments = ["--version"]
    assert supervisor.learner is not None
    supervisor.learner.arguments = ["view", str(rundir.path)]  # which stays, and has no error to tell
    with pytest.raises(ProcessFailed):
        supervisor.run(lambda: None)
    said = read_json(rundir.outcome)["checkpoint"]
    assert said.startswith("no checkpoint of step 8: the newest is of step 5. the disk is full.")
