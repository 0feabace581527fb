"""Runs whose head's directory is deleted: they go on from the store, in an empty directory, with nothing lost."""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from real_runs import Run
from seeds import seeds

pytestmark = pytest.mark.timeout(500)
STEPS = 24


def fallen(run: Run) -> None:
    """Kill every process of the run, as a burning machine would, and delete its disk."""
    pids = run.pids()
    for name in ("run", *(name for name in pids if name != "run")):
        os.kill(pids[name], signal.SIGKILL)
    assert run.process is not None
    run.process.communicate()
    shutil.rmtree(run.out)


def resumed(run: Run, store: Path, out: Path) -> Run:
    run.out = out
    arguments = ["run", "--resume-from", str(store), "--out", str(out), "--json"]
    run.process = subprocess.Popen(
        [sys.executable, "-m", "echo2", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    return run


@pytest.mark.parametrize("seed", seeds(1, 4))
def test_a_run_whose_disk_is_lost_ends_with_the_same_weights(tmp_path: Path, sort_model: Path, seed: int) -> None:
    settings = ("--run.max_steps", str(STEPS), "--run.deterministic", "true", "--schedule.max_staleness", "2")
    calm = Run(tmp_path / "calm", sort_model, *settings).start()
    calm.finish()

    store, chance = tmp_path / "store", random.Random(seed)
    lost = Run(tmp_path / "lost0", sort_model, *settings, "--head.store", str(store)).start()
    version = 0
    for number in (1, 2, 3):
        version += chance.randint(1, 6)
        lost.wait_version(version)
        fallen(lost)
        resumed(lost, store, tmp_path / f"lost{number}")
        lost.wait(lambda: (lost.out / "metrics.jsonl").exists(), "metrics")
        version = max([version, *(row["step"] for row in lost.rows())])
    summary = lost.finish()

    assert lost.weights() == calm.weights()
    audit = lost.command("audit")
    assert audit["lost"] == audit["doubled"] == 0
    assert audit["trained"] == summary["groups"]["trained"] == STEPS * 16
    assert [row["step"] for row in lost.rows() if "reward/mean" in row] == list(range(1, STEPS + 1))
    rewards = [[row["reward/mean"] for row in run.rows() if "reward/mean" in row] for run in (calm, lost)]
    assert rewards[0] == rewards[1]
