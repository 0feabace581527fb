"""A disk that fills up while a real run goes on, on a file system of its own: the run waits, goes on by itself when
there is room, and nothing is lost or trained on twice."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from real_runs import Run, is_running

DISK_BYTES = 420 << 20
STEPS = 12


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    where = tmp_path / "disk"
    where.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "tmpfs", str(where)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("mounting a file system of one's own is not allowed here")
    try:
        yield where
    finally:
        subprocess.run(["umount", "--lazy", str(where)], check=True)


def started(disk: Path, model: Path) -> Run:
    run = Run(disk / "run", model, f"--run.max_steps={STEPS}", "--learner.checkpoint_every=2").start()
    run.wait_step(2)
    return run


def fill(run: Run, disk: Path, left_bytes: int) -> Path:
    """Somebody else's file. The head is held meanwhile, else a fast run is over before the disk is full."""
    filler, head = disk / "filler", run.pids()["head"]
    os.kill(head, signal.SIGSTOP)
    try:
        with open(filler, "wb", buffering=0) as file, contextlib.suppress(OSError):
            while shutil.disk_usage(disk).free > left_bytes:
                file.write(bytes(min(1 << 20, shutil.disk_usage(disk).free - left_bytes)))
    finally:
        os.kill(head, signal.SIGCONT)
    return filler


def assert_whole(run: Run) -> None:
    audit = run.command("audit")
    assert (audit["lost"], audit["doubled"], audit["open"]) == (0, 0, 0)
    assert audit["trained"] == STEPS * 16
    assert [row["step"] for row in run.rows() if "reward/mean" in row] == list(range(1, STEPS + 1))


@pytest.mark.slow
def test_a_run_pauses_before_its_disk_is_full_and_goes_on_when_there_is_room(disk: Path, sort_model: Path) -> None:
    run = started(disk, sort_model)
    pids = run.pids()
    filler = fill(run, disk, 100 << 20)
    run.wait(lambda: bool(run.status().get("paused")), "pause")
    told = run.command("status")
    assert re.search(rf"^paused: no room on the disk that holds {run.out}: \d+ MB free", told["state"])
    assert (told["waits"][0]["waits_for"], told["waits"][0]["reason"]) == ("disk", run.status()["paused"])
    version = run.status()["version"]
    assert version < STEPS
    run.wait(lambda: "waiting for groups" in (run.status()["learner"] or {"doing": ""})["doing"], "idle learner")
    held = run.status()["version"]
    assert held <= version + 1, "a step that had all its groups is finished, and no other"
    filler.unlink()
    summary = run.finish()
    assert summary["steps"] == STEPS
    assert run.pids() == pids, "nobody died of it"
    assert_whole(run)
    assert run.command("replay")["num_different"] == 0
    assert "paused: no room" in (run.out / "logs" / "head.log").read_text()
    modes = {path: path.lstat().st_mode & 0o077 for path in (run.out, *run.out.rglob("*")) if not path.is_symlink()}
    assert not {str(path): oct(mode) for path, mode in modes.items() if mode}, "what a run writes is its owner's alone"


@pytest.mark.slow
def test_a_disk_without_a_byte_left_stops_processes_and_not_the_run(disk: Path, sort_model: Path) -> None:
    run = started(disk, sort_model)
    head = run.pids()["head"]
    filler = fill(run, disk, 0)
    run.wait(lambda: not is_running(head), "end of the head")
    said = f"paused: no room on the disk that holds {run.out}"  # once the supervisor knows of the end, too
    run.wait(lambda: run.command("status")["state"] == said, said)
    filler.unlink()
    assert run.finish(seconds=150.0)["steps"] == STEPS
    assert run.pids()["head"] != head
    assert_whole(run)
