"""A strictly on-policy run as a user starts it, with the first groups of each step hurried."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from real_runs import Run

pytestmark = pytest.mark.timeout(600)
ON_POLICY = ("--schedule.max_staleness", "0", "--run.max_steps", "6", "--learner.checkpoint_every", "6")


@pytest.mark.slow
def test_a_frontier_run_keeps_every_rule_and_can_be_replayed(tmp_path: Path, sort_model: Path) -> None:
    settings = ("--schedule.order", "frontier")
    run = Run(tmp_path / "run", sort_model, *ON_POLICY, *settings).start()
    run.finish()
    texts = [path.read_text(encoding="utf-8") for path in (run.out / "rollouts").glob("*.jsonl")]
    logs = [json.loads(line) for text in texts for line in text.splitlines()]
    assert all(len(group["rollouts"]) == 4 for group in logs)
    audit = run.command("audit")
    assert (audit["trained"], audit["lost"], audit["doubled"], audit["max_staleness"]) == (6 * 16, 0, 0, 0)
    assert run.command("replay")["num_different"] == 0
    widths = [row["schedule/batch_groups"] for row in run.rows() if "schedule/batch_groups" in row]
    assert widths[0] == 4
    assert len(set(widths)) > 1, f"no other batch was tried: {widths}"
