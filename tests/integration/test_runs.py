"""Whole runs with real processes: learning, joining late, agreement of sampler and learner, swaps during generation."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from echo2.transport.limits import LOGGED_GROUPS
from real_runs import REPOSITORY, Run

pytestmark = pytest.mark.timeout(600)


def test_forty_on_policy_steps_learn_to_sort(tmp_path: Path, sort_model: Path) -> None:
    settings = ["--run.max_steps", "40", "--schedule.max_staleness", "0", "--schedule.groups_per_step", "64"]
    settings += ["--sampling.group_size", "8", "--sampling.groups_per_batch", "32", "--learner.warmup_steps", "5"]
    settings += ["--eval.source", "digit_sorting", "--eval.params", '{split = "heldout"}']
    run = Run(tmp_path / "run", sort_model, *settings).start()
    summary = run.finish()
    assert 0.15 < summary["eval_before"] < 0.45
    assert summary["eval_after"] >= summary["eval_before"] + 0.25
    assert summary["staleness_max"] == 0
    assert summary["groups"]["trained"] == 40 * 64
    rows = [row for row in run.rows() if "mismatch/ratio_max" in row]
    # On-policy and in fp32, sampler and learner give every token the same logprob (unit tests hold them to 1e-4).
    assert max(row["mismatch/ratio_max"] for row in rows) < 1.001
    assert max(row["mismatch/abs_log_ratio"] for row in rows) < 1e-5
    evaluated = run.command("eval")
    assert abs(evaluated["eval/accuracy"] - summary["eval_after"]) < 0.12
    answers = [json.loads(line) for line in (run.out / "rollouts" / "eval_40.jsonl").read_text().splitlines()]
    assert sum(answer["rollouts"][0]["reward"] for answer in answers) / 256 == pytest.approx(summary["eval_after"])


@pytest.mark.slow
def test_a_worker_that_joins_late_is_used(tmp_path: Path, sort_model: Path) -> None:
    run = Run(tmp_path / "run", sort_model, "--workers.count", "0").start()
    run.wait(lambda: run.status().get("learner") is not None, "learner")
    waits = run.status()["waits"]
    arguments = ["worker", f"@{run.out / 'ticket'}", "--state", str(tmp_path / "state"), "--price-usd-per-hour", "0.5"]
    worker = subprocess.Popen(
        [sys.executable, "-m", "echo2", *arguments],
        cwd=REPOSITORY,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    summary = run.finish()
    output, _ = worker.communicate(timeout=60)
    assert worker.returncode == 0
    assert "all steps are trained" in output
    assert all(wait["reason"] for wait in waits)
    machines = {name: machine for name, machine in summary["machines"].items() if name != "learner"}
    assert [machine["useful_groups"] for machine in machines.values()] == [24 * 16]
    assert summary["cost_usd"] == pytest.approx(
        sum(machine["seconds"] for machine in machines.values()) * 0.5 / 3600, rel=0.2
    )


@pytest.mark.slow
def test_weights_can_be_swapped_between_two_tokens(tmp_path: Path, sort_model: Path) -> None:
    """One worker with the slower engine and large batches: it generates whenever a version comes."""
    settings = ("--schedule.max_staleness", "3")
    settings += ("--sampling.group_size", "16", "--sampling.groups_per_batch", "32", "--schedule.groups_per_step", "32")
    settings += ("--workers.engine", "transformers", "--workers.count", "1", "--run.max_steps", "10")
    run = Run(tmp_path / "run", sort_model, *settings).start()
    run.finish()
    rollouts = [
        rollout
        for path in (run.out / "rollouts").glob("step_*.jsonl")
        for line in path.read_text(encoding="utf-8").splitlines()
        for rollout in json.loads(line)["rollouts"]
    ]
    assert len(rollouts) == 10 * LOGGED_GROUPS * 16
    assert any(len(rollout["versions"]) > 1 for rollout in rollouts), "no rollout spans two versions"
    assert run.command("audit")["max_staleness"] <= 3


@pytest.mark.slow
def test_the_engine_of_transformers_and_two_steps_between_snapshots(tmp_path: Path, sort_model: Path) -> None:
    settings = ("--workers.engine", "transformers", "--schedule.publish_every", "2", "--schedule.max_staleness", "2")
    run = Run(tmp_path / "run", sort_model, *settings, "--run.max_steps", "8").start()
    summary = run.finish()
    assert summary["groups"]["trained"] == 8 * 16
    assert run.command("audit")["max_staleness"] <= 2
