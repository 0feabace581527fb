"""Runs whose head's directory is deleted again and again: they go on from the store, in an empty directory, with
nothing lost. `test_kills.py` does it once at each commit.
"""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from real_runs import Run
from seeds import seeds

pytestmark = pytest.mark.timeout(600)
STEPS = 24


@pytest.mark.parametrize("seed", seeds(0, 4))
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
        lost.burn()
        lost.start_from(store, tmp_path / f"lost{number}")
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
