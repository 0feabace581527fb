"""What the planner decides about the fleet has a reason in the log, and people see the newest of it."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

from echo2.core.types import RUN_POLICY
from echo2.head.decide import commands as do
from echo2.head.ledger.books import DECISIONS_KEPT, REASON_CHARS, Decisions
from echo2.head.serve.report import status
from echo2.transport import wire_pb2 as wire
from head_cases import OpenHead, rows, settings, until
from planner_cases import OPTIONS, Desk, of, running
from view_cases import HOSTILE

SAID: dict[str, Any] = {"cause": 1, "policy": RUN_POLICY}


def released(name: str, reason: str) -> do.ReleaseWorker:
    return do.ReleaseWorker(worker_id=name, reason=reason, **SAID)


def test_the_newest_of_each_kind_are_kept_and_many_of_one_moment_are_one() -> None:
    kept = Decisions()
    kept.see([do.RentMachine(offer="rtx4090", reason="3 rollouts/s short", **SAID)], 1.0)
    kept.see([released(f"w-{number}", "40 rollouts/s are needed") for number in range(1000)], 2.0)
    for now in range(3, 100):
        kept.see([do.RestWorker(worker_id="w-1", seconds=60.0, reason=f"late at {now}", **SAID)], float(now))
    told = kept.to_plain()
    assert [one["at"] for one in told] == [*range(99, 99 - DECISIONS_KEPT, -1), 2, 1]
    assert [(one["what"], one["reason"], one["count"]) for one in told[-2:]] == [
        ("w-0 stands by", "40 rollouts/s are needed", 1000),
        ("a machine is rented: rtx4090", "3 rollouts/s short", 1),
    ]
    assert Decisions(told).to_plain() == told, "the next head knows them"


def test_names_and_reasons_of_strangers_are_bounded_lines() -> None:
    kept = Decisions()
    kept.see([released(HOSTILE * 1000, HOSTILE * 1000)], 1.0)
    (one,) = kept.to_plain()
    assert one["what"].isprintable()
    assert one["reason"].isprintable()
    assert len(one["reason"]) <= REASON_CHARS
    assert len(one["what"]) <= REASON_CHARS


def test_first_leases_and_what_is_not_about_the_fleet_are_left_out() -> None:
    kept, desk = Decisions(), Desk()
    kept.see([*desk.publish(0), *desk.join("a")], 1.0)
    assert kept.to_plain() == []


def test_another_number_of_groups_at_once_is_a_decision_with_a_reason() -> None:
    desk = running(replace(OPTIONS, order="frontier", groups_per_batch=8))
    limits = of(do.LimitGroups, desk.train(0) + desk.train(1))
    assert [found.num_groups for found in limits] == [5]
    assert limits[0].reason.startswith("a trial: with 8 a step takes ")


def test_failures_are_in_the_status_and_known_to_the_next_head(tmp_path: Path) -> None:
    raw = settings(rows(tmp_path / "rows.jsonl", "53=", "27="))

    async def scenario() -> None:
        async with OpenHead(tmp_path, raw) as open_head:
            async with open_head.attending("a") as leases, open_head.attending("b"):
                await until(lambda: leases)
                failed = wire.LeaseFailed(lease_id=leases[0].lease_id, reason="engine_failed", detail="it broke")
                await open_head.service.fail_lease(open_head.peer("a"), failed)
                await until(lambda: status(open_head.head)["decisions"])
            (found,) = status(open_head.head)["decisions"]
            open_head.head.books.save(open_head.head.distribution.origin)
        assert found["what"].endswith(" rests for 1 s")
        assert found["reason"] == "it failed a lease: engine_failed"
        async with OpenHead(tmp_path, raw) as again:
            assert status(again.head)["decisions"] == [found]

    asyncio.run(asyncio.wait_for(scenario(), 60.0))
