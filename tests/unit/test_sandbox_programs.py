"""What ends a command: its time, which is that of the clock, less what it waited for a processor; and the machine."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from secrets import token_hex

import pytest

from container_cases import WITHOUT_IMAGES
from echo2.sandbox import folders, process_table, programs
from echo2.sandbox.containers import Containers, Image
from echo2.sandbox.folders import FolderContainer
from echo2.sandbox.process_table import Used, usage_in
from echo2.sandbox.programs import ContainerFault, ContainerLimits, Program, Ran, Stopwatch

pytestmark = pytest.mark.skipif(not os.path.isdir("/proc/self/task"), reason="processes of Linux")
#: Computes for .8 s of processor time, in a thread or without one, and sleeps for half a second.
COMPUTES = """
import threading, time
def work():
    while time.process_time() < .8: pass
if {in_thread}:
    thread = threading.Thread(target=work); thread.start(); thread.join()
else:
    work()
time.sleep(.5)
print("done")
"""
SPIN = "while True: pass"
NUM_OTHERS = 5


def looked(*looks: tuple[float, float, bool]) -> Stopwatch:
    """A stopwatch after looks: at a moment, with so much processor time, ready or not."""
    stopwatch = Stopwatch(100.0)
    for at, computed, is_ready in looks:
        stopwatch.look(Used(cpu_seconds=computed, is_ready=is_ready, at=100.0 + at))
    return stopwatch


def test_what_waits_for_a_processor_has_time_until_it_had_one() -> None:
    """By hand: 2 s of computing in 10 s, and then 3 s of sleep."""
    assert looked(*((at, at / 5, True) for at in range(1, 11))).seconds(110.0) == pytest.approx(2.0)
    looks = [*((at, at / 5, True) for at in range(1, 11)), *((at, 2.0, False) for at in range(11, 14))]
    assert looked(*looks).seconds(113.0) == pytest.approx(5.0)


def test_what_computes_or_sleeps_has_the_time_of_the_clock() -> None:
    assert looked((1, 1.0, True), (2, 2.0, True)).seconds(102.0) == pytest.approx(2.0)
    assert looked((1, 4.0, True), (2, 8.0, True)).seconds(102.0) == pytest.approx(2.0)  # four threads
    assert looked((1, 0.0, False), (9, 0.0, False)).seconds(109.0) == pytest.approx(9.0)
    assert looked((3, 1.0, True), (3, 1.0, True), (2, 1.0, True)).seconds(103.0) == pytest.approx(1.0)  # of one table
    assert looked((1, 5.0, True), (2, 0.0, True)).seconds(102.0) == pytest.approx(1.0)  # one has left with its time
    assert Stopwatch(100.0).seconds(99.0) == 0.0


def test_processes_of_a_control_group_are_told_apart() -> None:
    """Those of podman and docker are no children of ours."""
    root = "/sys/fs/cgroup/pids" if os.path.isdir("/sys/fs/cgroup/pids") else "/sys/fs/cgroup"
    group = Path(root, token_hex(32))
    try:
        group.mkdir()
    except OSError as error:
        pytest.skip(f"no control group can be made here: {error}")
    try:
        code = f"import time\ninput()\nwhile time.process_time() < .4: pass\nprint(flush=True)\n{SPIN}"
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        with subprocess.Popen([sys.executable, "-c", code], **pipes, text=True) as child:
            try:
                (group / "cgroup.procs").write_text(str(child.pid))
                print(file=child.stdin, flush=True)
                child.stdout.readline()
                used = usage_in(group.name)
                assert (used.pids, used.is_ready) == (frozenset([child.pid]), True)
                assert used.cpu_seconds > 0.1  # the table may be a tenth of a second old
                assert not usage_in(token_hex(32)).pids
            finally:
                child.kill()
    finally:
        group.rmdir()


@pytest.fixture
def one_processor() -> Iterator[None]:
    """This process and what it starts have one processor, which they share with programs that compute."""
    before = os.sched_getaffinity(0)
    with ExitStack() as stack:
        os.sched_setaffinity(0, {min(before)})
        stack.callback(os.sched_setaffinity, 0, before)
        for _ in range(NUM_OTHERS):
            other = subprocess.Popen([sys.executable, "-c", SPIN], start_new_session=True)  # for a share of its own
            stack.callback(other.wait)
            stack.callback(other.kill)
        yield


def ran(code: str, seconds: float) -> tuple[Ran, float]:
    began = time.monotonic()
    return asyncio.run(Program((sys.executable, "-c", code), seconds).run()), time.monotonic() - began


@pytest.mark.parametrize("in_thread", [False, True])
def test_a_busy_machine_ends_no_command(in_thread: bool, one_processor: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has a sixth of a processor at most, and takes longer than its limit by the clock."""
    monkeypatch.setattr(programs, "BUSY_FACTOR", 1000.0)
    did, passed = ran(COMPUTES.format(in_thread=in_thread), 3.5)
    assert (did.status, did.output, did.stopped) == (0, "done\n", "")
    assert passed > 3.5  # else this test shows nothing
    assert did.seconds < 3.5


@pytest.mark.parametrize("code", [SPIN, "import time; time.sleep(1000)"])
def test_what_has_had_its_time_is_ended_on_a_busy_machine(
    code: str, one_processor: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(programs, "BUSY_FACTOR", 1000.0)
    did, _ = ran(code, 0.5)
    assert did.stopped == "time"
    assert did.seconds > 0.5


def test_a_machine_that_is_too_busy_is_at_fault(one_processor: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(programs, "BUSY_FACTOR", 1.5)
    with pytest.raises(ContainerFault, match=r"too busy: a command with a limit of 3 s waited \d+ s for a processor"):
        ran(SPIN, 3.0)


@WITHOUT_IMAGES
def test_a_command_that_the_kernel_ended_for_memory_is_the_machines_fault(
    runtime: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else its tests would have given 0."""
    counts = tmp_path / "vmstat"
    monkeypatch.setattr(process_table, "COUNTS", counts)

    async def scene() -> None:
        container = await Containers(runtime).open(Image(), ContainerLimits())
        assert isinstance(container, FolderContainer)
        for before, after in (("3", "3"), ("3", "4")):
            counts.write_text(f"nr_free_pages 7\noom_kill {before}\n")
            running = asyncio.ensure_future(
                container.run("echo > begun; while ! [ -e go ]; do :; done; kill -9 $$", 60)
            )
            while not (container.folder / "app" / "begun").exists():  # noqa: ASYNC110  # another process makes it
                await asyncio.sleep(0.01)
            counts.write_text(f"oom_kill {after}\n")
            (container.folder / "app" / "go").touch()
            if before == after:
                assert (await running).status == 137  # its own affair
            else:
                with pytest.raises(ContainerFault, match="ran out of memory"):
                    await running
            await container.run("rm begun go", 20)
        await container.close()

    asyncio.run(scene())


@WITHOUT_IMAGES
def test_a_container_that_cannot_be_removed_costs_no_result(
    runtime: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def scene() -> FolderContainer:
        container = await Containers(runtime).open(Image(), ContainerLimits())
        assert isinstance(container, FolderContainer)
        with monkeypatch.context() as broken:
            broken.setattr(folders, "REMOVE", ("/bin/sh", "-c", "echo $0: device or resource busy >&2; exit 1"))
            await container.close()
        assert "device or resource busy" in caplog.text
        await container.close()
        return container

    assert not asyncio.run(scene()).folder.exists()
