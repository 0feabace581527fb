"""A child process: its end is heard, it ends with all that it started, and it does not outlive its parent."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
from concurrent.futures import Future
from pathlib import Path

import pytest

from echo2.core.child import ChildProcess, ending

PYTHON = (sys.executable, "-S", "-c")
#: Prints the process id of a process that it started, and stays.
STARTS = """
import subprocess, sys, time
print(subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(600)"]).pid, flush=True)
time.sleep(600)
"""
#: A parent that is killed, with children that hold its stderr. One has a lifeline, one has pipes.
PARENT = """
import os, sys
from echo2.core.child import ChildProcess
bound = "from echo2.core.child import end_with_supervisor as end; end(); import signal; signal.pause()"
reads = "import sys; sys.stdin.read()"
children = [
    ChildProcess([sys.executable, "-c", bound], has_lifeline=True),
    ChildProcess([sys.executable, "-c", reads], has_pipes=True),
]
print(*(child.pid for child in children), flush=True)
os.kill(os.getpid(), 9)
"""


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_the_owner_learns_of_the_childs_end_with_its_last_output(tmp_path: Path) -> None:
    log, heard = tmp_path / "log", Future[int]()
    log.write_text("of an earlier process\n")
    code = "import sys; print('x' * 1000, file=sys.stderr); print('last words', file=sys.stderr); sys.exit(3)"
    child = ChildProcess([*PYTHON, code], log_path=log, on_end=heard.set_result)
    assert (child.wait(60.0), heard.result(60.0), child.status) == (3, 3, 3)
    assert child.log_tail(11) == b"last words\n"
    assert child.log_tail(1 << 20).startswith(b"xxx"), "what another process wrote before is not its own"
    log.write_bytes(b"cut\n")
    assert child.log_tail(100) == b"cut\n"
    assert ending(child.status) == "exited with status 3"


def test_a_child_is_killed_with_what_it_started() -> None:
    async def scene() -> None:
        child = ChildProcess([*PYTHON, STARTS], has_pipes=True)
        reader, _ = await child.streams()
        grandchild = int(await reader.readline())
        assert await child.ended(0.0) is None
        assert alive(grandchild)
        child.kill()
        assert await child.ended() == -signal.SIGKILL
        while alive(grandchild):  # noqa: ASYNC110 (the kernel tells nobody of another's child)
            await asyncio.sleep(0)
        child.kill()  # once more does nothing

    asyncio.run(scene())


def test_an_answer_arrives_and_a_late_write_does_no_harm() -> None:
    async def scene() -> None:
        child = ChildProcess([*PYTHON, "print(input()[::-1])"], has_pipes=True)
        reader, writer = await child.streams()
        writer.write(b"abc\n")
        assert await reader.read() == b"cba\n"
        assert await child.ended() == 0
        writer.write(b"too late\n")
        child.signal(signal.SIGTERM)
        child.kill()

    asyncio.run(scene())


def test_a_child_does_not_outlive_a_parent_that_is_killed() -> None:
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2] / "src")}
    with subprocess.Popen(
        [sys.executable, "-c", PARENT], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=environment
    ) as parent:
        assert parent.stdout is not None
        pids = [int(word) for word in parent.stdout.readline().split()]
        assert len(pids) == 2
        assert parent.stdout.read() == b"", "both have ended: they held this pipe"
    assert parent.returncode == -signal.SIGKILL


def test_a_missing_program_leaves_no_descriptor_open(tmp_path: Path) -> None:
    before = set(os.listdir("/proc/self/fd"))
    for options in ({"has_lifeline": True}, {"has_pipes": True, "log_path": tmp_path / "log"}):
        with pytest.raises(FileNotFoundError):
            ChildProcess(["/nowhere/program"], **options)  # type: ignore[arg-type]
    with pytest.raises(FileNotFoundError):
        ChildProcess([*PYTHON, ""], has_lifeline=True, log_path=tmp_path / "nowhere" / "log")
    assert set(os.listdir("/proc/self/fd")) <= before


def test_a_fork_of_the_parent_kills_no_process() -> None:
    """A reward that forks and exits runs what was registered for the parent's exit."""
    child = ChildProcess((*PYTHON, "import sys; sys.stdin.read()"), has_pipes=True)
    if not (fork := os.fork()):
        child.kill()
        child.signal(signal.SIGKILL)
        os._exit(0)
    os.waitpid(fork, 0)
    assert child.status is None
    with child.pipes[0], child.pipes[1]:
        child.kill()
        assert child.wait(60.0) == -signal.SIGKILL


def test_processes_of_a_child_with_pipes_end_with_it() -> None:
    child = ChildProcess((*PYTHON, STARTS), has_pipes=True)
    child.pipes[1].readline()
    child.signal(signal.SIGKILL)  # the child alone
    assert child.wait(60.0) == -signal.SIGKILL
    with child.pipes[0], child.pipes[1] as output:
        assert output.read() == b""  # the other had it open, too


def test_an_owner_that_fails_in_its_end_callback_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    def fail(status: int) -> None:
        raise RuntimeError("nobody foresaw this")

    child = ChildProcess((*PYTHON, ""), on_end=fail)
    assert child.wait(60.0) == 0
    for thread in threading.enumerate():
        if thread.name == f"child-{child.pid}":
            thread.join()
    assert "nobody foresaw this" in caplog.text


def test_a_child_may_outlive_the_event_loop_that_waited_for_it(caplog: pytest.LogCaptureFixture) -> None:
    child = ChildProcess((*PYTHON, "import sys; sys.stdin.read()"), has_pipes=True)
    with child.pipes[0], child.pipes[1]:
        assert asyncio.run(child.ended(0.01)) is None
        child.kill()
        assert asyncio.run(child.ended()) == -signal.SIGKILL
        for thread in threading.enumerate():
            if thread.name == f"child-{child.pid}":
                thread.join()
    assert not caplog.records
