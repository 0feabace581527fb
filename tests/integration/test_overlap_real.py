"""Strictly on-policy runs as a user starts them: handed over group by group or as a whole, the weights are the same."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from real_runs import Run

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
ON_POLICY = ("--schedule.max_staleness", "0", "--run.max_steps", "6", "--learner.checkpoint_every", "6")


def test_overlapped_training_gives_the_weights_of_the_sequential_schedule(tmp_path: Path, sort_model: Path) -> None:
    fixed = (*ON_POLICY, "--run.deterministic", "true", "--schedule.groups_per_step", "16")
    overlapped = Run(tmp_path / "overlapped", sort_model, *fixed).start()
    overlapped.finish()
    sequential = Run(tmp_path / "sequential", sort_model, *fixed, "--schedule.hand_over", "step").start()
    sequential.finish()
    assert overlapped.weights() == sequential.weights()
    assert any(row.get("reward/std", 0.0) > 0.0 for row in overlapped.rows()), "there was nothing to learn from"


def test_a_frontier_run_keeps_every_rule_and_can_be_replayed(tmp_path: Path, sort_model: Path) -> None:
    settings = ("--schedule.order", "frontier", "--schedule.second_lease_after", "2", "--run.log_rollouts", "64")
    run = Run(tmp_path / "run", sort_model, *ON_POLICY, *settings, "--schedule.workers_per_group", "2").start()
    run.finish()
    texts = [path.read_text(encoding="utf-8") for path in (run.out / "rollouts").glob("*.jsonl")]
    logs = [json.loads(line) for text in texts for line in text.splitlines()]
    assert all(len(group["rollouts"]) == 4 for group in logs)
    assert any("+" in group["worker"] for group in logs), "no group was sampled by two workers"
    audit = run.command("audit")
    assert (audit["trained"], audit["lost"], audit["doubled"], audit["max_staleness"]) == (6 * 16, 0, 0, 0)
    assert run.command("replay")["num_different"] == 0
    widths = [row["schedule/batch_groups"] for row in run.rows() if "schedule/batch_groups" in row]
    assert widths[0] == 4
    assert len(set(widths)) > 1, f"no other batch was tried: {widths}"
