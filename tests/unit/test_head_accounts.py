"""What the head adds up: dollars by machine, evaluations, times of broadcasts."""

from __future__ import annotations

import itertools
import json
from array import array
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from echo2.core.types import RUN_POLICY, GroupRef, Rollout, RolloutGroup, SnapshotRef
from echo2.head.ledger.books import VERSIONS_MAX, BroadcastTimes, Evals, pass_at_k
from echo2.head.ledger.costs import CostBook


def eval_group(number: int, version: int, reward: float | None, length: int = 2) -> RolloutGroup:
    tokens, logprobs = array("i", range(length)), array("f", [0.0] * length)
    rollout = Rollout(tokens, logprobs, bytes([1] * length), ((0, version),), "stop", "text", reward)
    return RolloutGroup(GroupRef(RUN_POLICY, "eval", number), version, 1, number, array("i", [1]), (rollout,))


# ---- costs -----------------------------------------------------------------------------------------------------------


def test_a_machine_costs_its_price_while_it_attends() -> None:
    costs = CostBook()
    costs.joined("w1", 0.36, now=100.0)
    costs.joined("w2", 3.60, now=100.0)
    assert costs.cum_usd(100.0) == 0.0
    costs.left("w1", now=110.0)  # 10 s at 0.36 $/h
    assert costs.machines["w1"].usd(500.0) == pytest.approx(0.001)
    costs.joined("w1", 0.36, now=200.0)  # back for another 5 s
    assert costs.machines["w1"].usd(205.0) == pytest.approx(0.0015)
    assert costs.cum_usd(205.0) == pytest.approx(0.0015 + 105 * 0.001)


def test_attending_twice_costs_once_and_leaving_twice_changes_nothing() -> None:
    costs = CostBook()
    costs.joined("w1", 3.6, now=0.0)
    costs.joined("w1", 3.6, now=4.0)
    costs.left("w1", now=10.0)
    costs.left("w1", now=20.0)
    costs.left("a stranger", now=20.0)
    assert costs.cum_usd(99.0) == pytest.approx(0.01)


def test_a_result_that_is_not_trained_on_after_all_moves_to_its_cause() -> None:
    costs = CostBook()
    costs.joined("w1", 3.6, now=0.0)
    costs.useful("w1", 2.0)
    costs.useful("w1", 4.0)
    costs.count_as_wasted("w1", "uninformative")  # the mean of its groups: 3 s
    machine = costs.machines["w1"]
    assert (machine.useful_seconds, machine.useful_groups) == (3.0, 1)
    assert machine.wasted_seconds == {"uninformative": 3.0}
    costs.count_as_wasted("a stranger", "stale")
    assert costs.wasted_usd(60.0) == pytest.approx(0.003)


def test_waste_is_charged_by_cause() -> None:
    costs = CostBook()
    costs.joined("w1", 3.6, now=0.0)
    costs.useful("w1", 2.0)
    costs.useful("w1", 4.0)
    costs.wasted("w1", "duplicate", 1.5)
    costs.wasted_lease("w1", "expired", lasted_seconds=20.0)  # the mean of its groups: 3 s
    costs.wasted_lease("w1", "expired", lasted_seconds=0.5)  # no longer than it lasted
    machine = costs.machines["w1"]
    assert machine.wasted_seconds == {"duplicate": 1.5, "expired": 3.5}
    assert costs.wasted_usd(60.0) == pytest.approx(0.005)


def test_a_lost_lease_of_a_worker_without_results_costs_what_it_lasted() -> None:
    costs = CostBook()
    costs.joined("w1", 3.6, now=0.0)
    costs.wasted_lease("w1", "lost", lasted_seconds=7.0)
    assert costs.wasted_usd(60.0) == pytest.approx(0.007)


def test_waste_never_exceeds_the_cost() -> None:
    """Six leases side by side, which a head that was stopped for a while finds lost when it is resumed."""
    costs = CostBook()
    costs.joined("w1", 3.6, now=0.0)
    costs.left("w1", now=50.0)
    for _ in range(6):
        costs.wasted_lease("w1", "lost", lasted_seconds=220.0)
    assert costs.machines["w1"].wasted(300.0) == {"lost": pytest.approx(50.0)}
    assert costs.wasted_usd(300.0) == pytest.approx(costs.cum_usd(300.0)) == pytest.approx(0.05)


@given(
    steps=st.lists(
        st.tuples(st.sampled_from(["joined", "left"]), st.sampled_from(["a", "b"]), st.floats(0.0, 50.0)), max_size=20
    )
)
def test_a_restart_of_the_head_forgets_no_dollar(steps: list[tuple[str, str, float]]) -> None:
    costs, now = CostBook(), 0.0
    for action, name, pause in steps:
        now += pause
        if action == "joined":
            costs.joined(name, 1.0, now)
        else:
            costs.left(name, now)
    again = CostBook(json.loads(json.dumps(costs.to_plain(now))))
    assert again.cum_usd(now) == pytest.approx(costs.cum_usd(now))
    assert again.cum_usd(now + 1e6) == again.cum_usd(now), "nobody attends a head that was just started"


# ---- evaluations -----------------------------------------------------------------------------------------------------


def test_an_evaluation_is_the_mean_over_scored_tasks() -> None:
    evals = Evals()
    evals.start(3)
    evals.keep(eval_group(0, 3, 1.0, length=2))
    evals.keep(eval_group(1, 3, 0.0, length=6))
    values = evals.finish(3, {"reward_failed": 2, "gave_up": 1})
    assert values == {
        "eval/version": 3,
        "eval/accuracy": 1 / 2,  # a task whose reward failed says nothing about the policy
        "eval/num_tasks": 2,
        "eval/num_failed": 3,
        "eval/num_failed/gave_up": 1,
        "eval/num_failed/reward_failed": 2,
        "eval/mean_length": 4.0,
    }


def test_a_result_for_no_evaluation_under_way_is_dropped() -> None:
    evals = Evals()
    evals.keep(eval_group(0, 3, 1.0))
    assert evals.finish(3, {"gave_up": 5}) == {
        "eval/version": 3,
        "eval/num_tasks": 0,
        "eval/num_failed": 5,
        "eval/num_failed/gave_up": 5,
    }


def test_two_evaluations_at_once_do_not_mix() -> None:
    evals = Evals()
    evals.start(1)
    evals.start(2)
    evals.keep(eval_group(0, 1, 0.0))
    evals.keep(eval_group(10, 2, 1.0))
    assert evals.finish(2, {})["eval/accuracy"] == 1.0
    assert evals.finish(1, {})["eval/accuracy"] == 0.0


def test_pass_at_k_is_the_share_of_subsets_with_a_solved_one() -> None:
    for num_samples in range(1, 8):
        for num_solved in range(num_samples + 1):
            samples = [True] * num_solved + [False] * (num_samples - num_solved)
            for k in range(1, num_samples + 1):
                chosen = list(itertools.combinations(samples, k))
                assert pass_at_k(num_samples, num_solved, k) == pytest.approx(sum(map(any, chosen)) / len(chosen))


def test_several_rollouts_of_a_task_and_several_sets() -> None:
    evals = Evals(lambda position: "easy" if position < 1 else "hard")
    evals.start(2)
    for position, rewards in ((0, (1.0, 1.0, 0.0, 0.0)), (1, (0.0, 0.0, 0.0, 1.0)), (2, (0.0, 0.0, 0.0, 0.5))):
        group = eval_group(position, 2, 0.0)
        rollouts = tuple(replace(group.rollouts[0], reward=reward) for reward in rewards)
        evals.keep(replace(group, rollouts=rollouts, cursor=position))
    found = evals.finish(2, {"reward_failed": 1})
    assert found["eval/accuracy"] == pytest.approx((0.5 + 0.25 + 0.125) / 3)
    assert found["eval/pass@2"] == pytest.approx((5 / 6 + 1 / 2) / 3)
    assert found["eval/pass@4"] == pytest.approx(2 / 3)
    assert found["eval/accuracy/easy"] == 0.5
    assert found["eval/accuracy/hard"] == pytest.approx((0.25 + 0.125) / 2)


# ---- broadcasts ------------------------------------------------------------------------------------------------------


def test_broadcast_times_are_those_of_the_newest_installed_version() -> None:
    meter = BroadcastTimes()
    meter.published(SnapshotRef(RUN_POLICY, 1, 1), 10.0, ["w1", "w2"])
    meter.published(SnapshotRef(RUN_POLICY, 1, 2), 20.0, ["w1", "w2", "w3"])
    meter.installed("w1", SnapshotRef(RUN_POLICY, 1, 1), now=19.0)
    row = meter.metrics()
    assert (row["broadcast/latency_p50"], row["broadcast/latency_p95"]) == (9.0, 9.0)
    meter.installed("w1", SnapshotRef(RUN_POLICY, 1, 2), now=21.0)
    meter.installed("w1", SnapshotRef(RUN_POLICY, 1, 2), now=30.0)  # it says so with every heartbeat: the first counts
    meter.installed("w2", SnapshotRef(RUN_POLICY, 1, 2), now=22.0)
    meter.installed("w3", SnapshotRef(RUN_POLICY, 1, 2), now=26.0)
    row = meter.metrics()
    assert (row["broadcast/latency_p50"], row["broadcast/latency_p95"]) == (2.0, 6.0)


def test_t_bcast_waits_for_a_share_of_the_connected_workers() -> None:
    """Eleven attend: ten of them are a share of 1/1.1."""
    meter, ref = BroadcastTimes(), SnapshotRef(RUN_POLICY, 1, 5)
    workers = [f"w{number}" for number in range(11)]
    meter.published(ref, 100.0, workers)
    meter.installed("late", ref, now=100.5)
    for number, worker in enumerate(workers[:9]):
        meter.installed(worker, ref, now=101.0 + number)
    assert meter.metrics()["broadcast/t_bcast"] is None
    meter.installed("w9", ref, now=120.0)
    assert meter.metrics()["broadcast/t_bcast"] == 20.0
    meter.installed("w10", ref, now=500.0)
    assert meter.metrics()["broadcast/t_bcast"] == 20.0


def test_a_broadcast_waits_no_longer_for_workers_that_left_and_counts_those_that_skipped_a_version() -> None:
    meter = BroadcastTimes()
    meter.published(SnapshotRef(RUN_POLICY, 1, 1), 0.0, ["w1", "w2"])
    meter.installed("w1", SnapshotRef(RUN_POLICY, 1, 1), now=2.0)
    assert meter.metrics()["broadcast/t_bcast"] is None
    meter.gone("w2")
    assert meter.metrics()["broadcast/t_bcast"] == 2.0
    meter.published(SnapshotRef(RUN_POLICY, 1, 2), 10.0, ["w1"])
    meter.published(SnapshotRef(RUN_POLICY, 1, 3), 11.0, ["w1"])
    meter.installed("w1", SnapshotRef(RUN_POLICY, 1, 3), now=15.0)
    assert meter.metrics()["broadcast/t_bcast"] == 4.0
    meter.installed("w1", SnapshotRef(RUN_POLICY, 2, 9), now=16.0)  # of another lineage: says nothing about this one
    assert meter.metrics()["broadcast/t_bcast"] == 4.0


def test_without_workers_t_bcast_is_unknown() -> None:
    meter = BroadcastTimes()
    meter.published(SnapshotRef(RUN_POLICY, 1, 1), 0.0, [])
    meter.installed("w1", SnapshotRef(RUN_POLICY, 1, 1), now=2.0)
    row = meter.metrics()
    assert row["broadcast/t_bcast"] is None
    assert row["broadcast/latency_p50"] == 2.0


def test_a_version_that_was_never_published_here_is_not_counted() -> None:
    meter = BroadcastTimes()
    meter.installed("w1", SnapshotRef(RUN_POLICY, 1, 5), now=1.0)
    assert "broadcast/latency_p50" not in meter.metrics()


def test_the_meter_forgets_old_versions() -> None:
    meter = BroadcastTimes()
    for version in range(VERSIONS_MAX + 1):
        meter.published(SnapshotRef(RUN_POLICY, 1, version), float(version), ["w1"])
    meter.installed("w1", SnapshotRef(RUN_POLICY, 1, 0), now=100.0)
    assert "broadcast/latency_p50" not in meter.metrics()
