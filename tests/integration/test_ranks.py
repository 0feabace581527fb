"""A run whose learner is two processes, each killed for real, or lost with the machine: nothing is lost, nothing
is doubled.
"""

from __future__ import annotations

import os
import re
import signal
import time
from pathlib import Path

import pytest

import real_runs
from real_runs import Run, is_running, pause

pytestmark = pytest.mark.timeout(600)


def rank_pids(run: Run) -> list[int]:
    """Of the other ranks of every learner so far, the newest last."""
    log = (run.out / "logs" / "learner.log").read_text(encoding="utf-8")
    return [int(pid) for pid in re.findall(r"rank 1 of 2 is process (\d+)", log)]


@pytest.mark.slow
def test_a_run_of_two_ranks_survives_the_death_of_each(
    tmp_path: Path, sort_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(real_runs, "STUCK_SECONDS", 150.0)  # a learner of two processes starts three times
    run = Run(tmp_path / "run", sort_model, "--learner.ranks=2").start()
    run.wait_version(4)
    os.kill(rank_pids(run)[-1], signal.SIGKILL)
    run.wait_version(9)
    other = rank_pids(run)[-1]
    run.kill("learner")
    run.wait_version(12)
    deadline = time.monotonic() + real_runs.STUCK_SECONDS
    while is_running(other):
        assert time.monotonic() < deadline, "a rank outlives the first one"
        pause()
    summary = run.finish(300.0)
    audit = run.command("audit")
    assert audit["trained"] == summary["groups"]["trained"] == 24 * 16
    assert audit["lost"] == audit["doubled"] == 0
    assert len(rank_pids(run)) == 3
    joined = re.findall(r"joined as (\S+)", (run.out / "logs" / "learner.log").read_text(encoding="utf-8"))
    assert len(joined) == 2 * 3, "each rank has a connection to the head"
    assert len(set(joined)) == 1, "all ranks are one member"
    newest = max((run.out / "checkpoints").iterdir(), key=lambda path: path.stat().st_mtime)
    assert {"model.0-of-2.safetensors", "model.1-of-2.safetensors"} <= {path.name for path in newest.iterdir()}


@pytest.mark.slow
def test_a_run_of_two_ranks_whose_machine_is_lost_goes_on_from_the_store_with_one(
    tmp_path: Path, sort_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(real_runs, "STUCK_SECONDS", 150.0)
    store, steps = tmp_path / "store", ("--run.max_steps=12", "--learner.checkpoint_every=2")
    run = Run(tmp_path / "two", sort_model, *steps, "--learner.ranks=2", "--head.store", str(store)).start()
    run.wait_version(5)
    other = rank_pids(run)[-1]
    os.kill(other, signal.SIGSTOP)  # it must not write into a directory that is being deleted
    run.burn()
    os.kill(other, signal.SIGKILL)
    run.start_from(store, tmp_path / "one", "--learner.ranks=1")
    summary = run.finish(300.0)
    audit = run.command("audit")
    assert audit["trained"] == summary["groups"]["trained"] == 12 * 16
    assert audit["lost"] == audit["doubled"] == 0
    assert [row["step"] for row in run.rows() if "reward/mean" in row] == list(range(1, 13))
    log = (run.out / "logs" / "learner.log").read_text(encoding="utf-8")
    assert "of 2 is process" not in log
    names = {path.name for path in (run.out / "checkpoints" / "step_12").iterdir()}
    assert "model.safetensors" in names
    assert not any("-of-" in name for name in names)
    assert int(re.findall(r"resumed at version (\d+)", log)[0]) >= 2
