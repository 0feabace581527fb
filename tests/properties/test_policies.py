"""Several policies with bounds of their own in one fleet, under random faults: no group crosses, none starves."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from echo2.buffer import audit
from echo2.control.head import commands as do
from echo2.sim import Scenario
from echo2.sim.scenario import HeadSpec, LearnerSpec, PolicySpec, WorkersSpec
from invariants import run_policies
from policy_worlds import commands_of, judge_crossing, judge_policies, moves, policies_scenario
from worlds import calm

ON_POLICY = PolicySpec("on-policy", 10, 6, max_staleness=0, learner=LearnerSpec(train_seconds=1.0, life_seconds=25.0))
STALE = PolicySpec("stale", 12, 9, max_staleness=4, publish_every=2, learner=LearnerSpec(train_seconds=0.5))
SHARED = Scenario(
    name="two policies",
    groups_per_batch=2,
    group_size=2,
    lease_seconds=15.0,
    swap="during",
    peers="trees",
    delta_chance=0.5,
    faults_until_seconds=120.0,
    time_limit_seconds=2000.0,
    workers=(WorkersSpec(count=6, rollout_seconds=1.0, life_seconds=60.0, cut_every_seconds=40.0),),
    head=HeadSpec(life_seconds=50.0),
    policies=(ON_POLICY, STALE),
)


@pytest.mark.parametrize("seeds", [range(at, at + 10) for at in range(0, 40, 10)], ids=lambda seeds: f"from {seeds[0]}")
def test_every_policy_is_as_if_it_were_alone_in_random_worlds(seeds: range) -> None:
    wrong = {seed: found for seed in seeds if (found := judge_policies(seed))}
    assert not wrong


def test_two_policies_with_different_bounds_share_a_fleet_that_is_killed_and_cut(tmp_path: Path) -> None:
    killed, num_moves = set[str](), 0
    for seed in range(3):
        path = tmp_path / f"{seed}.sqlite"
        reports = run_policies(SHARED, seed, path)
        assert all(report.finished for report in reports.values())
        assert not judge_crossing(reports)
        assert reports["on-policy"].max_staleness == 0
        assert 0 < reports["stale"].max_staleness <= 4
        for policy, report in reports.items():
            found = audit(path, policy)
            assert (found.lost, found.doubled, found.trained) == (0, 0, sum(report.staleness.values()))
            assert found.max_staleness == report.max_staleness
        killed |= set(reports["stale"].killed)
        num_moves += moves(reports)
    assert {"head", "learner", "worker"} <= killed
    assert num_moves > 20


def test_one_worker_serves_three_policies() -> None:
    names = ("a", "b", "c")
    policies = tuple(PolicySpec(name, max_steps=6, groups_per_step=5, max_staleness=3) for name in names)
    scenario = replace(calm(SHARED), workers=(WorkersSpec(count=1, rollout_seconds=1.0),), policies=policies)
    reports = run_policies(scenario, 1)
    assert all(report.finished for report in reports.values())
    assert moves(reports) >= 2


def test_who_shares_the_fleet_does_not_change_the_weights_of_a_deterministic_policy() -> None:
    """Neither do the faults: alone and in peace, it has the same."""
    num_compared = 0
    for seed in range(30):
        scenario = policies_scenario(seed)
        if not scenario.deterministic:
            continue
        for policy, report in run_policies(scenario, seed).items():
            alone = replace(calm(scenario), policies=tuple(one for one in scenario.policies if one.policy == policy))
            if report.finished and not report.retired:
                num_compared += 1
                assert report.history.weights == run_policies(alone, seed)[policy].history.weights, f"{policy}, {seed}"
    assert num_compared > 10


def test_these_worlds_reach_what_they_are_meant_to_attack() -> None:
    """If no worker ever moved, or nobody was ever killed, the tests above would prove nothing."""
    killed, num_moves, num_scarce, num_checks = set[str](), 0, 0, 0
    for seed in range(20):
        scenario = policies_scenario(seed)
        reports = run_policies(scenario, seed)
        killed |= set(next(iter(reports.values())).killed)
        num_moves += moves(reports)
        num_checks += sum(isinstance(command, do.CheckGroup) for command in commands_of(reports))
        num_scarce += sum(spec.count for spec in scenario.workers) < len(scenario.policies)
    assert killed == {"head", "learner", "worker"}
    assert num_moves > 100
    assert num_scarce > 0
    assert num_checks > 0
