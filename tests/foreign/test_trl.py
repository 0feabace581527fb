"""TRL's own trainer learns from rollouts of our fleet, in an environment that `make test-foreign` makes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest

import house
from echo2.config.rundir import RunDir, read_json
from real_runs import pause

PYTHON = house.REPOSITORY / ".venv-trl" / "bin" / "python"
#: TRL's: two of its steps have one weight sync, with 16 groups of 4.
NUM_STEPS = 40
MAX_STALENESS = 2


@pytest.fixture(scope="module", autouse=True)
def installed() -> None:
    if not (PYTHON.parents[1] / ".installed").exists():
        pytest.skip(f"{PYTHON.parents[1]} is not there or not whole; `make test-foreign FOREIGN=trl` makes it")


def trainer(model: Path, out: Path, reward: str) -> subprocess.Popen[str]:
    environment = {**os.environ, "TRL_EXPERIMENTAL_SILENCE": "1", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    script = house.REPOSITORY / "tests" / "with_trl" / "train.py"
    return subprocess.Popen(
        [PYTHON, script, model, out, str(NUM_STEPS), reward],
        cwd=out.parent,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_the_divergences_of_distillation_are_trls() -> None:
    """Of all tokens, where there is no rest: value and gradient of each form, in float32."""
    script = house.REPOSITORY / "tests" / "with_trl" / "divergence.py"
    environment = {**os.environ, "TRL_EXPERIMENTAL_SILENCE": "1", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run([PYTHON, script], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert set(found) == {"0.0", "0.3", "0.5", "1.0"}
    for beta, one in found.items():
        assert one["off"] < 1e-5 < one["divergence"], beta
        assert one["gradient_off"] < 1e-5 < one["gradient"], beta


def audited(out: Path) -> dict[str, Any]:
    told = subprocess.run(
        [house.REPOSITORY / ".venv" / "bin" / "echo2", "audit", out, "--json"], stdout=subprocess.PIPE, check=True
    )
    found: dict[str, Any] = json.loads(told.stdout)
    return found


@pytest.mark.timeout(180)
def test_trl_trains_on_what_the_fleet_samples(tmp_path: Path, sort_model: Path) -> None:
    """With the head killed in the middle. What TRL computes itself tells whether tokens, logprobs and weights are the
    right ones: before the first update the ratio is 1."""
    out = tmp_path / "run"
    with trainer(sort_model, out, "exact") as running:
        while (read_json(RunDir(out).status) or {"version": 0})["version"] < 2:
            assert running.poll() is None, running.communicate()[1]
            pause()
        listed = read_json(RunDir(out).processes)
        os.kill(next(each["pid"] for each in listed if each["role"] == "head"), signal.SIGKILL)
        printed, said = running.communicate()
    assert running.returncode == 0, said
    *steps, _ = json.loads(printed.splitlines()[-1])
    assert len(steps) == NUM_STEPS
    assert steps[0]["ratio"] == pytest.approx(1.0, abs=1e-5)
    assert steps[0]["kl"] < 1e-7
    assert max(step["kl"] for step in steps) > 1e-4  # the weights that workers have are older than TRL's, and move
    assert max(step["sample/staleness_max"] for step in steps) <= MAX_STALENESS
    assert not any("sample/dropped_stale_total" in step for step in steps)
    ledger = audited(out)
    assert (ledger["lost"], ledger["doubled"]) == (0, 0)
    assert ledger["trained"] >= NUM_STEPS / 2 * 16
    assert (read_json(RunDir(out).outcome) or {})["kind"] == "stopped"


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_the_trainer_stops_when_the_run_ends(tmp_path: Path, sort_model: Path) -> None:
    with trainer(sort_model, tmp_path / "run", "failing") as running:
        _, said = running.communicate()
    assert running.returncode == 1
    assert "echo2.core.errors.Echo2Error: The run has ended: 8 groups failed in a row (reward_failed)" in said, said
    assert "no answer is known" in said
