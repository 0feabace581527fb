"""What strangers that mean harm cost a run: its time beside the same run without them. The figures are of
`benchmarks/strangers/hostile_fleet.py`.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
from hostile_workers import HostileSpec

from echo2.head.decide import commands as do
from echo2.planning.sim.report import Report
from echo2.planning.sim.scenario import LearnerSpec, Scenario, WorkersSpec
from invariants import run_scenario

LEASE_SECONDS = 120.0
OWN = WorkersSpec(count=2)


def run(*workers: WorkersSpec, **fields: Any) -> Report:
    settings: dict[str, Any] = {"max_steps": 30, "groups_per_step": 16, "lease_seconds": LEASE_SECONDS, **fields}
    learner = LearnerSpec(train_seconds=2.0)
    return run_scenario(Scenario(workers=workers, learner=learner, faults_until_seconds=0.0, **settings), seed=0)


@cache
def undisturbed() -> Report:
    return run(OWN)


def commands_of(report: Report) -> list[do.Command]:
    return [command for life in report.history.lives for _, _, answer in life for command in answer]


@pytest.mark.parametrize("count", [1, pytest.param(20, marks=pytest.mark.slow)])
@pytest.mark.parametrize("hostile", ["holds", "holds_some", "fails", "malformed", "junk", "claims"])
def test_workers_of_one_ticket_cost_less_than_a_third_of_the_time_beside_two_own_workers(
    hostile: Any, count: int
) -> None:
    report = run(OWN, HostileSpec(count=count, ticket="t", hostile=hostile))
    assert report.finished
    assert report.seconds < 1.3 * undisturbed().seconds
    waited = report.history.wait_seconds - undisturbed().history.wait_seconds
    assert waited < LEASE_SECONDS / 2
    assert not report.retired


@pytest.mark.slow
def test_without_second_leases_withholding_costs_a_few_deadlines_in_total() -> None:
    """Batches of fixed shape: the n-th rest is 2^n deadlines long, so that holding gets rarer."""
    report = run(OWN, HostileSpec(count=20, ticket="t", hostile="holds"), deterministic=True, max_steps=200)
    assert report.finished
    assert report.history.wait_seconds < run(OWN, deterministic=True, max_steps=200).history.wait_seconds + 4 * 120.0


def test_a_run_of_strangers_that_bring_nothing_waits_and_writes_little() -> None:
    report = run(HostileSpec(count=5, ticket="t", hostile="fails"), time_limit_seconds=7200.0)
    assert not report.finished
    assert report.history.ended == ""
    grants = [command for command in commands_of(report) if isinstance(command, do.GrantLeases)]
    assert len(grants) < 7200 / 60 + 50  # a ticket that fails alone tries once a minute


def test_honest_strangers_of_one_ticket_soon_work_as_much_as_own_workers() -> None:
    assert run(WorkersSpec(count=8, ticket="t")).seconds < 1.15 * run(WorkersSpec(count=8)).seconds


def test_all_of_one_ticket_supply_half_of_each_step_beside_own_workers() -> None:
    report = run(OWN, WorkersSpec(count=20, ticket="t"))
    tickets = {f"w1-{at}" for at in range(20)}
    accepted = {c.group.number: c.worker_id for c in commands_of(report) if isinstance(c, do.AcceptDelivery)}
    shares = [sum(accepted[number] in tickets for number in done.numbers) for done in report.history.trained]
    assert max(shares) == 8
    assert report.finished


@pytest.mark.slow
def test_junk_is_refused_so_often_and_no_more() -> None:
    """Five results a second for leases that it does not hold."""
    report = run(OWN, HostileSpec(count=1, ticket="t", hostile="junk"), max_steps=300)
    assert report.seconds > 600.0
    refusals = [command for command in commands_of(report) if isinstance(command, do.RefuseDelivery)]
    expulsions = [command for command in commands_of(report) if isinstance(command, do.ExpelWorker)]
    assert [command.seconds for command in expulsions] == [60.0 * 2**at for at in range(len(expulsions))]
    assert len(expulsions) >= 3
    assert len(refusals) <= 30 * len(expulsions) + 30
