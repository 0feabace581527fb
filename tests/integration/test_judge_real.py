"""Real runs whose reward is a judge with faults: nothing is lost, nothing is doubled, and no fault becomes a score."""

from __future__ import annotations

import json
from hashlib import blake2b
from pathlib import Path

import pytest

from judge_standin import PROBE, JudgeStandIn, judge_standin
from real_runs import Run

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

FAULTS = ("500", "429", "429 1", "garbage", "no json", "oversized", "cut", "400")  # none that a clock decides
STEPS, GROUPS = 4, 8


def fault(question: str, n: int) -> str:
    """15 % of requests fail: always the same, whenever they come."""
    drawn = int.from_bytes(blake2b(f"{n} {question}".encode()).digest()[:4], "big")
    return FAULTS[drawn % len(FAULTS)] if drawn // len(FAULTS) % 100 < 15 and question != PROBE else ""


def run_with(standin: JudgeStandIn, out: Path, model: Path, budget_usd: float = 0.0) -> Run:
    table = f"""{{model = "m", base_url = "{standin.url}", rubric = "More digits are better; right is {{answer}}.",
        max_concurrency = 8, usd_per_mtok = [1.0, 2.0], budget_usd = {budget_usd}}}""".replace("\n", " ")
    sizes = ("--run.max_steps", f"{STEPS}", "--schedule.groups_per_step", f"{GROUPS}", "--workers.count", "1")
    judged = ("--reward.functions", '["judge"]', "--reward.judge", table)
    return Run(out, model, *sizes, *judged)


def check(run: Run, standin: JudgeStandIn) -> None:
    """Every group is trained once, and every reward is what the judge said, once."""
    audit = run.command("audit")
    found = audit["trained"], audit["lost"], audit["doubled"], audit["retired"]
    assert found == (STEPS * GROUPS, 0, 0, {}), run.logs()
    lines = [line for path in (run.out / "rollouts").glob("step_*.jsonl") for line in path.read_text().splitlines()]
    rollouts = [rollout for line in lines for rollout in json.loads(line)["rollouts"]]
    assert rollouts
    for rollout in rollouts:
        assert rollout["reward"] == min(10, sum(one.isdigit() for one in rollout["text"])) / 10
        assert rollout["reward_parts"] == {"judge": rollout["reward"]}
    assert {count for question, count in standin.num_verdicts.items() if question != PROBE} == {1}


def test_a_judge_with_faults_costs_time_and_nothing_else(tmp_path: Path, sort_model: Path) -> None:
    with judge_standin(fault) as standin:
        run = run_with(standin, tmp_path / "run", sort_model).start()
        summary = run.finish()
        check(run, standin)
    assert summary["groups"]["lost"] == {}
    (retried,) = (one for one in summary["failures"] if one["kind"] == "judge_retried")
    assert retried["count"] > 0
    assert run.rows()[-1]["cost/judge_usd"] > 0.0


def test_a_judge_that_is_down_is_waited_for(tmp_path: Path, sort_model: Path) -> None:
    is_down = True
    with judge_standin(lambda question, n: "401" if is_down else "") as standin:
        run = run_with(standin, tmp_path / "run", sort_model).start()
        run.wait(lambda: "it answers 401" in run.status().get("paused", ""), "pause")
        assert run.command("status")["state"].startswith("paused: scoring waits for the judge")
        is_down = False
        summary = run.finish()
        check(run, standin)
    assert summary["groups"]["lost"] == {}


def test_a_run_whose_judge_has_spent_its_budget_continues_with_more(tmp_path: Path, sort_model: Path) -> None:
    with judge_standin() as standin:
        run = run_with(standin, tmp_path / "run", sort_model, budget_usd=0.006).start()
        assert "Raise reward.judge.budget_usd and continue with --resume" in run.refused()
        spent = run.status()["judge"]["usd"]
        assert 0.0 < spent <= 0.006
        run = run_with(standin, tmp_path / "run", sort_model, budget_usd=1.0).start("--resume")
        run.finish()
        assert run.status()["judge"]["usd"] > spent
        audit = run.command("audit")
    assert (audit["trained"], audit["lost"], audit["doubled"], audit["retired"]) == (STEPS * GROUPS, 0, 0, {})
