"""A head whose reward is a judge with faults: nothing is lost, no fault is a score, and what costs too much waits."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import Any

import pytest

from echo2.head.ledger.audit import audit
from echo2.head.serve.report import status, step_row
from echo2.reward import judge
from echo2.reward.judge import Judge
from echo2.transport import wire_pb2 as wire
from head_cases import OpenHead, delivery, rows, sample, settings, until
from judge_standin import PROBE, JudgeStandIn, judge_standin
from test_reward_judge import SETTINGS, TASK, with_judge


def judged(tmp_path: Path, standin: JudgeStandIn, **changes: Any) -> dict[str, dict[str, Any]]:
    """A run of two groups a step."""
    table = {"model": "m", "base_url": standin.url, "rubric": "Right is {answer}.", **changes}
    reward = {"functions": ["judge"], "judge": table}
    return settings(rows(tmp_path / "rows.jsonl", "53=", "35="), reward=reward, schedule={"groups_per_step": 2})


def digits(*counts: int) -> list[wire.Rollout]:
    """Rollouts of so many digits, which is what the stand-in looks at."""
    return [sample([5] * count + [1]) for count in counts]


def rewards(open_head: OpenHead) -> list[list[float | None]]:
    return sorted([one.reward for one in group.rollouts] for group in open_head.fed)


def test_a_failing_judge_costs_no_rollout_and_gives_no_zeros(tmp_path: Path) -> None:
    kinds = ("500", "garbage", "429 0", "no json", "400", "oversized", "404", "429")

    def fault(question: str, n: int) -> str:
        found = re.search(r"^<answer-.*>\n(\d+)\n", question, re.MULTILINE)
        return kinds[len(found[1]) - 1] if found and n == 1 else ""

    async def scenario() -> None:
        async with OpenHead(tmp_path, judged(tmp_path, standin)) as open_head, open_head.attending() as leases:
            for number, counts in enumerate([(1, 2, 3, 4), (5, 6, 7, 8)]):
                await until(lambda at=number: len(leases) > at)
                assert (await open_head.deliver(delivery(leases[number], digits(*counts))))[0][0]
            await until(lambda: len(open_head.fed) == 2)
            assert rewards(open_head) == [[0.1, 0.2, 0.3, 0.4], [0.5, 0.6, 0.7, 0.8]]
            assert open_head.head.ledger.counts()["lost"] == {}
            (failure,) = status(open_head.head)["failures"]
            assert (failure["kind"], failure["count"]) == ("judge_retried", 6)
            assert step_row(open_head.head, 1, {})["cost/judge_usd"] == 0.0

    with judge_standin(fault) as standin:
        asyncio.run(asyncio.wait_for(scenario(), 60.0))
        assert sorted(count for question, count in standin.num_verdicts.items() if question != PROBE) == [1] * 8


def test_a_rollout_that_cannot_be_judged_is_lost_by_its_cause(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(judge, "TRIES_MAX", 2)

    async def scenario() -> None:
        async with OpenHead(tmp_path, judged(tmp_path, standin)) as open_head, open_head.attending() as leases:
            await until(lambda: leases)
            assert (await open_head.deliver(delivery(leases[0], digits(1, 2, 3, 4))))[0][0]
            await until(lambda: open_head.fed)
            assert rewards(open_head) == [[0.1, 0.2, 0.4]]
            assert open_head.head.ledger.counts()["lost"] == {"judge_failed": 1}

    with judge_standin(lambda question, n: "400" if "\n333\n" in question else "") as standin:
        asyncio.run(asyncio.wait_for(scenario(), 60.0))


def test_a_judge_that_is_down_is_shown_in_the_status_and_scoring_resumes_by_itself(tmp_path: Path) -> None:
    is_down = True

    async def scenario() -> None:
        nonlocal is_down
        async with OpenHead(tmp_path, judged(tmp_path, standin)) as open_head, open_head.attending() as leases:
            await until(lambda: leases)
            assert (await open_head.deliver(delivery(leases[0], digits(1, 2, 3, 4))))[0][0]
            await until(lambda: status(open_head.head)["paused"])
            told = status(open_head.head)["paused"]
            assert told.startswith(f"scoring waits for the judge at {standin.url}")
            assert "it answers 401" in told
            is_down = False
            await until(lambda: open_head.fed)
            assert rewards(open_head) == [[0.1, 0.2, 0.3, 0.4]]
            found = status(open_head.head)
            assert (found["paused"], found["judge"]["answers"] >= 4) == ("", True)
            assert open_head.head.ledger.counts()["retired"] == {}

    with judge_standin(lambda question, n: "401" if is_down else "") as standin:
        asyncio.run(asyncio.wait_for(scenario(), 60.0))


def test_a_spent_budget_stops_the_run_and_a_larger_one_continues_it(tmp_path: Path) -> None:
    # A request may cost $.2, and costs $.00002.
    prices = {"usd_per_mtok": [0.0, 2.0], "params": {"max_tokens": 100_000}}

    async def until_spent() -> None:
        raw = judged(tmp_path, standin, budget_usd=0.20001, **prices)
        async with OpenHead(tmp_path, raw) as open_head, open_head.attending() as leases:
            await until(lambda: leases)
            assert (await open_head.deliver(delivery(leases[0], digits(1, 1, 1, 1))))[0][0]
            await until(lambda: open_head.fed and len(leases) > 1)
            assert (await open_head.deliver(delivery(leases[1], digits(2, 2, 2, 2))))[0][0]
            await until(lambda: open_head.head.ending.stopping)
            assert "Raise reward.judge.budget_usd and continue with --resume" in open_head.head.ending.stopping

    async def with_more() -> None:
        async with OpenHead(tmp_path, judged(tmp_path, standin, budget_usd=1.0, **prices)) as open_head:
            await until(lambda: len(open_head.fed) == 2)
            assert rewards(open_head) == [[0.1] * 4, [0.2] * 4]
            assert status(open_head.head)["judge"]["usd"] == pytest.approx(4e-5)
            counts = open_head.head.ledger.counts()
            assert (counts["lost"], counts["retired"]) == ({}, {})

    with judge_standin() as standin:
        asyncio.run(asyncio.wait_for(until_spent(), 60.0))
        assert len(standin.asked) == 1
        asyncio.run(asyncio.wait_for(with_more(), 60.0))
        assert len(standin.asked) == 2, "what was judged is not judged again"
    found = audit(tmp_path / "run" / "ledger.sqlite")
    assert (found.lost, found.doubled) == (0, 0)


def test_the_cost_of_a_group_that_exceeded_the_budget_is_kept(tmp_path: Path) -> None:
    prices = {"usd_per_mtok": [0.0, 2.0], "params": {"max_tokens": 100_000}, "max_concurrency": 1}

    async def scenario() -> None:
        raw = judged(tmp_path, standin, budget_usd=0.20003, **prices)  # for two requests
        async with OpenHead(tmp_path, raw) as open_head, open_head.attending() as leases:
            await until(lambda: leases)
            assert (await open_head.deliver(delivery(leases[0], digits(1, 2, 3, 4))))[0][0]
            await until(lambda: open_head.head.ending.stopping)
        async with OpenHead(tmp_path, raw) as open_head:
            assert status(open_head.head)["judge"]["usd"] == pytest.approx(4e-5)

    with judge_standin() as standin:
        asyncio.run(asyncio.wait_for(scenario(), 60.0))
        assert len(standin.asked) == 2


def test_a_head_that_is_killed_has_counted_the_requests_under_way(tmp_path: Path) -> None:
    """Whatever answers a group lacks: the cost of those that came was lost with it, too."""
    prices = {
        "usd_per_mtok": [0.0, 2.0],
        "params": {"max_tokens": 1000},
    }  # $.002 a request at most, $.00002 if answered

    async def scenario() -> None:
        raw = judged(tmp_path, standin, **prices)
        async with OpenHead(tmp_path, raw) as open_head, open_head.attending() as leases:
            await until(lambda: leases)
            assert (await open_head.deliver(delivery(leases[0], digits(1, 2, 3, 4))))[0][0]
            await until(lambda: len(standin.asked) == 4 and status(open_head.head)["judge"]["answers"] == 3)
            assert open_head.head.ledger.get_meta("judge_usd") >= 0.002 + 3 * 0.00002
            assert status(open_head.head)["judge"]["usd"] == pytest.approx(6e-5)

    with judge_standin(lambda question, n: "hang" if "\n333\n" in question else "") as standin:
        asyncio.run(asyncio.wait_for(scenario(), 60.0))


def test_no_number_of_kills_exceeds_the_budget() -> None:
    kept = [0.0]

    async def killed(judge: Judge) -> None:
        asking = asyncio.ensure_future(judge.score(TASK, [str(10**n) for n in range(20)]))
        num_asked = len(standin.asked) + min(SETTINGS.max_concurrency, round(10.0 - judge.spent_usd))
        await until(lambda: asking.done() or (judge.spent_usd < 10.0 and len(standin.asked) >= num_asked))
        at_the_kill.append(kept[-1])
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)

    prices = {"usd_per_mtok": (0.0, 1.0), "params": {"max_tokens": 1_000_000}}  # $1 each, if it is not answered
    with judge_standin(lambda question, n: "hang") as standin:
        for _ in range(4):
            at_the_kill = list[float]()
            with_judge(standin, killed, spent_usd=kept[-1], keep=kept.append, budget_usd=10.0, **prices)
            kept = at_the_kill
        assert len(standin.asked) == 10
