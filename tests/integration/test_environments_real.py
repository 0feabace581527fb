"""Environments of the user's own in real runs: a failing one costs its groups, one that is not allowed its worker."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from echo2.runtime.head.rollout_log import LOGGED_GROUPS
from real_runs import REPOSITORY, Run, is_running

pytestmark = pytest.mark.timeout(200)

# Row 1 of 12 raises, row 2 hangs, row 3 kills its process; whatever the order, each costs its own group.
OWN = """
import os

class Rows:
    def __len__(self): return 12
    def __getitem__(self, index): return {"prompt": f"{index}=", "do": index, "answer": "1"}

class Odd:
    turn_tokens = 2
    def __init__(self, columns, seed):
        self.do, self.turns = columns["do"], 0
    def step(self, action):
        self.turns += 1
        if self.turns == 2:
            if self.do == 1: raise KeyError("no square")
            if self.do == 3: os._exit(5)
        return f"{self.turns}=", float(len(action)), self.turns == 3
"""


def settings(own: Path) -> tuple[str, ...]:
    return (
        "--run.max_steps=2",
        "--workers.count=1",
        f"--tasks.source={own}:Rows",
        "--tasks.params={}",
        f"--tasks.environment={own}:Odd",
        "--sampling.max_turns=4",
        "--sampling.max_tokens=20",
        "--schedule.groups_per_step=9",
    )


def test_an_environment_that_raises_or_dies_costs_its_own_groups(sort_model: Path, tmp_path: Path) -> None:
    own = tmp_path / "own.py"
    own.write_text(OWN)
    # The user's reward beside the head gets what the environment gave at the worker.
    functions = f'--reward.functions=["environment", "{own}:bonus"]'
    own.write_text(OWN + "\ndef bonus(completions, environment_reward, **_): return [0.5] * len(completions)\n")
    run = Run(tmp_path / "run", sort_model, *settings(own), functions).start()
    summary = run.finish(150)
    assert summary["groups"]["trained"] == 18
    retired = summary["groups"]["retired"]
    assert set(retired) == {"environment_failed"}
    assert retired["environment_failed"] >= 2
    audit = run.command("audit")
    assert (audit["trained"], audit["lost"], audit["doubled"], audit["open"]) == (18, 0, 0, 0)
    assert run.command("replay")["num_different"] == 0
    lines = [line for path in (run.out / "rollouts").glob("*.jsonl") for line in path.read_text().splitlines()]
    rollouts = [rollout for line in lines for rollout in json.loads(line)["rollouts"]]
    assert len(rollouts) == 2 * LOGGED_GROUPS * 4
    for rollout in rollouts:
        assert rollout["reward"] == rollout["reward_parts"]["environment"] + 0.5
        assert rollout["finish"] == "stop"
        assert rollout["text"].count("=") >= 2


def test_a_worker_that_does_not_run_the_environment_is_turned_away(sort_model: Path, tmp_path: Path) -> None:
    own = tmp_path / "own.py"
    own.write_text(OWN)
    rewards = '--reward.functions=["environment"]'
    run = Run(tmp_path / "run", sort_model, *settings(own), rewards, "--run.max_steps=500").start()
    try:
        run.wait_version(0)
        command = [sys.executable, "-m", "echo2", "worker", f"@{run.out / 'ticket'}", "--engine", "fake"]
        done = subprocess.run(
            [*command, "--state", str(tmp_path / "stranger")],
            cwd=REPOSITORY,
            capture_output=True,
            text=True,
            check=False,
            timeout=100,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        assert done.returncode != 0
        assert f"no_environment: this run plays {own}:Odd" in done.stderr
        assert f"--allow-environment {own}:Odd" in done.stderr
        assert is_running(run.pids()["head"])
    finally:
        assert run.process is not None
        run.process.terminate()
        run.process.communicate(timeout=60)
