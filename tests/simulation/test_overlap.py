"""Strictly on-policy rounds in simulated worlds: the frontier, and second leases on what a slow worker holds."""

from __future__ import annotations

from dataclasses import replace

from echo2.head.decide import commands as do
from echo2.planning.sim.report import Report
from echo2.planning.sim.scenario import LearnerSpec, Scenario, WorkersSpec
from invariants import run_scenario

ON_POLICY = Scenario(
    name="on-policy",
    max_steps=20,
    groups_per_step=24,
    max_staleness=0,
    groups_per_batch=4,
    lease_seconds=600.0,
    workers=(WorkersSpec(count=4, rollout_seconds=2.0),),
    learner=LearnerSpec(train_seconds=4.0),
)


def with_a_slow_one() -> Scenario:
    """Alone it would take 20 times as long as the others for what it holds."""
    slow = WorkersSpec(rollout_seconds=40.0, capacity_groups=1)
    return replace(ON_POLICY, workers=(*ON_POLICY.workers, slow))


def grants(report: Report) -> list[do.GrantLeases]:
    commands = [command for life in report.history.lives for _, _, answer in life for command in answer]
    return [command for command in commands if isinstance(command, do.GrantLeases)]


def test_second_leases_keep_a_slow_worker_from_holding_up_every_step() -> None:
    """Without them each step would last at least as long as the slow one's group: 40 seconds."""
    for seed in range(2):
        report = run_scenario(with_a_slow_one(), seed)
        assert report.finished
        assert report.seconds < 0.6 * 40.0 * ON_POLICY.max_steps, (seed, report.seconds)
        assert report.max_staleness == 0
        assert any(" is late at " in grant.reason for grant in grants(report)), seed


def test_a_fleet_of_equals_hardly_ever_gets_second_leases() -> None:
    report = run_scenario(ON_POLICY, 1)
    seconds = [grant for grant in grants(report) if " is late at " in grant.reason]
    assert report.finished
    assert len(seconds) <= 0.06 * ON_POLICY.max_steps * ON_POLICY.groups_per_step, len(seconds)


def test_the_frontier_loses_nothing_where_an_engine_is_as_quick_with_a_whole_batch() -> None:
    """In these worlds a batch takes as long as its slowest group: whole batches are best, and are found to be."""
    whole = run_scenario(ON_POLICY, 3)
    frontier = run_scenario(replace(ON_POLICY, order="frontier"), 3)
    assert frontier.finished
    assert frontier.seconds < 1.25 * whole.seconds, (frontier.seconds, whole.seconds)
    late = [len(grant.leases) for grant in grants(frontier)][-20:]
    assert max(late) == 4, late
