"""Environments of the user's own in real runs: a failing one costs its groups, one that is not allowed its worker."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from echo2.transport.limits import LOGGED_GROUPS
from real_runs import ENDLESS, REPOSITORY, Run, is_running, odd_tasks

pytestmark = pytest.mark.timeout(600)

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
        *odd_tasks(own),
        "--schedule.groups_per_step=9",
    )


def invited(run: Run) -> str:
    """A ticket for strangers."""
    command = [sys.executable, "-m", "echo2", "invite", str(run.out)]
    return subprocess.run(command, capture_output=True, text=True, check=True, cwd=REPOSITORY).stdout.split()[-1]


def worker(ticket: str, folder: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    """A worker that is expected to end by itself."""
    command = [sys.executable, "-m", "echo2", "worker", ticket, "--engine", "fake", *flags]
    return subprocess.run(
        [*command, "--state", str(folder / "stranger")],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


@pytest.mark.slow
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


@pytest.mark.slow
def test_a_worker_that_does_not_run_the_environment_is_turned_away(sort_model: Path, tmp_path: Path) -> None:
    own = tmp_path / "own.py"
    own.write_text(OWN)
    rewards = '--reward.functions=["environment"]'
    run = Run(tmp_path / "run", sort_model, *settings(own), rewards, *ENDLESS).start()
    try:
        run.wait_version(0)
        done = worker(f"@{run.out / 'ticket'}", tmp_path)
        assert done.returncode != 0
        assert f"no_environment: this run plays {own}:Odd" in done.stderr
        assert f"--allow-environment {own}:Odd" in done.stderr
        assert is_running(run.pids()["head"])
    finally:
        assert run.process is not None
        run.process.terminate()
        run.process.communicate(timeout=150)


# No rollout ends before there is a file "go" beside this one.
HARNESS = """
import asyncio
from pathlib import Path

class Rows:
    def __len__(self): return 12
    def __getitem__(self, index): return {"prompt": f"{index}=", "do": index}

class Asking:
    def __init__(self, columns, seed):
        self.do = columns["do"]

    async def run(self, policy):
        while not Path(__file__).with_name("go").exists():
            await asyncio.sleep(0.02)
        said, own = [3, 4, 5 + self.do % 3], 0
        for turn in range(3):
            choice = await policy.generate(said, max_tokens=4)
            own += len(choice["token_ids"])
            said += [*choice["token_ids"], 6]
            if self.do == 1 and turn == 1: raise KeyError("no square")
        return float(own)
"""


@pytest.mark.slow
def test_a_harness_plays_on_own_machines_and_costs_what_it_fails_at(sort_model: Path, tmp_path: Path) -> None:
    own = tmp_path / "own.py"
    own.write_text(HARNESS)
    changed = {
        f"--tasks.source={own}:Rows",
        f"--tasks.environment=harness:{own}:Asking",
        '--reward.functions=["environment"]',
    }
    keys = {flag.partition("=")[0] for flag in changed}
    kept = [flag for flag in settings(own) if flag.partition("=")[0] not in keys]
    run = Run(tmp_path / "run", sort_model, *kept, *sorted(changed), "--schedule.lease_seconds=150").start()
    run.wait_version(0)
    refused = worker(invited(run), tmp_path, "--allow-environment", f"harness:{own}:Asking")
    assert refused.returncode != 0
    assert "not_own: this run's rollouts are played by harness:" in refused.stderr
    (tmp_path / "go").touch()
    summary = run.finish(150)
    assert summary["groups"]["trained"] == 18
    assert set(summary["groups"]["retired"]) == {"environment_failed"}
    audit = run.command("audit")
    assert (audit["trained"], audit["lost"], audit["doubled"], audit["open"]) == (18, 0, 0, 0)
    lines = [line for path in (run.out / "rollouts").glob("*.jsonl") for line in path.read_text().splitlines()]
    rewards = [rollout["reward"] for line in lines for rollout in json.loads(line)["rollouts"]]
    assert rewards
    assert all(3 <= reward <= 12 for reward in rewards)
