"""Runs that begin wrongly, as in `make bench-wrong_settings`: what the planner makes good, and how soon."""

from __future__ import annotations

from dataclasses import replace

import pytest

from echo2.head.decide import commands as do
from echo2.planning.sim.scenario import BroadcastSpec, LearnerSpec, Scenario, WorkersSpec
from invariants import run_scenario

#: A group takes 32 s, and a step 30; nine machines keep up.
MACHINE = WorkersSpec(rollouts_per_second=1.0)
WORLD = Scenario(
    max_steps=12,
    groups_per_step=32,
    group_size=8,
    max_staleness=2,
    groups_per_batch=4,
    lease_seconds=120.0,
    heartbeat_seconds=5.0,
    max_failures=1000,
    faults_until_seconds=0.0,
    learner=LearnerSpec(train_seconds=30.0, spread=0.05, publish_seconds=0.5),
    broadcast=BroadcastSpec(scheme="fixed", seconds=6.0),
)


@pytest.mark.parametrize("seed", [0, 1])
def test_slow_machines_are_recognised_within_the_first_step(seed: int) -> None:
    """They bring nothing while others do. The first step took 127 and 166 s before, and 60 to 70 without them."""
    kinds = (replace(MACHINE, count=13), replace(MACHINE, count=4, rollouts_per_second=0.1))
    report = run_scenario(replace(WORLD, workers=kinds), seed)
    assert report.finished
    assert report.history.steps[0].wait_seconds < 100.0, report.to_text()
    rests = [
        (now, command.worker_id)
        for life in report.history.lives
        for _, now, commands in life
        for command in commands
        if isinstance(command, do.RestWorker)
    ]
    assert {who for now, who in rests if now < 110.0} == {f"w1-{number}" for number in range(4)}, rests


@pytest.mark.parametrize("seed", [0, 1])
def test_no_more_machines_are_rented_than_keep_up(seed: int) -> None:
    """Twelve and sixteen were rented before, and some of the user's own released, who cost as much on standby."""
    kinds = (replace(MACHINE, count=4), replace(MACHINE, count=16, offer="spot", restart_seconds=60.0))
    report = run_scenario(replace(WORLD, activation=True, workers=kinds, max_steps=24), seed)
    commands = [one for life in report.history.lives for _, _, given in life for one in given]
    rented = [one for one in commands if isinstance(one, do.RentMachine)]
    assert report.finished
    assert 5 <= len(rented) <= 9, len(rented)
    assert report.steady_idle_ratio < 0.2, report.to_text()
    assert not [one for one in commands if isinstance(one, do.ReleaseWorker) and one.worker_id.startswith("w0")]


def test_a_group_that_two_workers_are_slow_with_goes_to_a_third() -> None:
    """One group in fifty takes ten times as long, and leases are too long to end that. The learner waited for 59 s
    before, until some worker had no work at all.
    """
    kinds = (replace(MACHINE, count=13, straggler_chance=0.02, straggler_factor=10.0),)
    report = run_scenario(replace(WORLD, max_steps=24, max_staleness=4, lease_seconds=1200.0, workers=kinds), 1)
    assert report.finished
    assert max(step.wait_seconds for step in report.history.steps[1:]) < 55.0, report.to_text()
