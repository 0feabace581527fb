"""What strangers may hold, supply and fail, and what follows: decisions of the planner, one by one."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from echo2.core.types import RUN_POLICY, GroupRef, SamplingFailure, SnapshotRef
from echo2.head.decide import commands as do
from echo2.head.decide import events as ev
from echo2.head.decide import results
from echo2.head.decide.groups import MAX_ATTEMPTS
from echo2.head.decide.state import PlannerOptions
from echo2.head.strangers.decide.trust import (
    EXPELLED_SECONDS,
    PATIENCE,
    WorkerPenalties,
)
from planner_cases import OPTIONS, Desk, of

FIRST = SnapshotRef(RUN_POLICY, 1, 0)
WIDE = replace(OPTIONS, groups_per_step=8, groups_per_batch=4, heartbeat_seconds=1e6, max_staleness=0)


def desk_with(*workers: tuple[str, str], options: PlannerOptions = WIDE) -> Desk:
    """The learner waits for step 0; these (worker, ticket) attend and may begin."""
    desk = Desk(options)
    desk.tell(ev.LearnerJoined(0), ev.GroupsWanted(0))
    for worker_id, ticket in workers:
        joins(desk, worker_id, ticket)
    desk.publish(0)
    return desk


def joins(desk: Desk, worker_id: str, ticket: str = "", **fields: Any) -> list[do.Command]:
    joined = ev.WorkerJoined(worker_id, 16, 0.5, FIRST, ticket=ticket)
    return desk.tell(replace(joined, **fields))


def held_by(desk: Desk, worker_id: str) -> list[int]:
    return list(desk.planner.leases.of_worker(worker_id))


def fail(desk: Desk, worker_id: str, reason: SamplingFailure = "engine_failed") -> list[do.Command]:
    """It fails the first lease that it holds."""
    return desk.tell(ev.LeaseFailed(worker_id, held_by(desk, worker_id)[0], reason, "it says so"))


def wait(desk: Desk, seconds: float) -> list[do.Command]:
    desk.now += seconds
    return desk.tell(ev.Tick())


# ---- holding ---------------------------------------------------------------------------------------------------------


def test_a_ticket_without_a_result_has_one_lease_however_many_workers_it_has() -> None:
    desk = desk_with(*((f"s{at}", "t") for at in range(5)))
    assert sum(len(held_by(desk, f"s{at}")) for at in range(5)) == 1


def test_each_result_earns_a_lease_and_each_failure_costs_two() -> None:
    desk = desk_with(("s", "t"))
    for most in (2, 3, 4):
        desk.deliver(held_by(desk, "s")[0])
        assert len(held_by(desk, "s")) == most
    joins(desk, "other", "u")
    fail(desk, "s")
    assert desk.planner.credits.of("t").credit == 2


def test_a_ticket_that_lets_its_lease_expire_rests_twice_as_long_each_time() -> None:
    desk = desk_with(("own", ""), ("s", "t"), options=replace(WIDE, max_failures=10**6, groups_per_step=10**4))
    rests = []
    for _ in range(3):
        while not held_by(desk, "s"):
            for lease_id in held_by(desk, "own"):
                desk.deliver(lease_id)
            wait(desk, 10.0)
        deadline = desk.leases[held_by(desk, "s")[0]][1].deadline
        while desk.now < deadline:
            for lease_id in held_by(desk, "own"):
                desk.deliver(lease_id)
            wait(desk, 10.0)
        until = desk.planner.credits.rests.get("t")
        assert until is not None
        rests.append(until - desk.now)
    assert rests == pytest.approx([120.0, 240.0, 480.0], abs=10.0)


def test_a_resting_worker_still_rests_under_its_name_or_another_of_its_ticket() -> None:
    desk = desk_with(("own", ""), ("s", "t"))
    fail(desk, "s")
    desk.tell(ev.WorkerLeft("s", "it goes"))
    joins(desk, "s", "t")
    joins(desk, "s2", "t")
    assert not held_by(desk, "s")
    assert not held_by(desk, "s2")
    assert any("its ticket gets no leases" in one.reason for one in desk.planner.waits(desk.now) if one.waiter == "s2")


def test_a_worker_that_failed_is_tried_after_others_of_its_ticket() -> None:
    desk = desk_with(("bad", "t"), ("good", "t"))
    assert held_by(desk, "bad")
    fail(desk, "bad")
    wait(desk, 100.0)
    assert held_by(desk, "good")
    assert not held_by(desk, "bad")


def test_a_ticket_supplies_at_most_half_of_a_step_beside_a_machine_of_the_owner() -> None:
    desk = desk_with(("own", ""), ("s", "t"))
    while any(held_by(desk, "s")):
        desk.deliver(held_by(desk, "s")[0])
    assert desk.planner.groups.supplied(0) == {"t": 4 * OPTIONS.group_size}
    desk.tell(ev.WorkerLeft("own", "it goes"))
    while any(held_by(desk, "s")):
        desk.deliver(held_by(desk, "s")[0])
    assert desk.planner.training.has_all


def test_a_group_that_is_late_at_a_stranger_goes_to_an_idle_worker_whatever_the_setting() -> None:
    desk = desk_with(("own", ""), ("s", "t"), options=replace(WIDE, groups_per_step=16))
    (late,) = held_by(desk, "s")
    commands: list[do.Command] = []
    while desk.planner.leases.get(late) is not None:
        desk.now += 1.0
        commands += desk.deliver(held_by(desk, "own")[0]) if held_by(desk, "own") else desk.tell(ev.Tick())
    (grant,) = [one for one in of(do.GrantLeases, commands) if "is late at s" in one.reason]
    assert (grant.worker_id, grant.leases[0].group) == ("own", desk.leases[late][1].group)
    assert desk.now < WIDE.lease_seconds / 2
    while held := held_by(desk, "own"):
        desk.deliver(held[0])
    assert desk.planner.training.has_all


@pytest.mark.parametrize(("holder", "quick", "rests"), [("own", "s", False), ("s", "own", True)])
def test_no_stranger_lets_a_machine_of_the_owner_rest(holder: str, quick: str, rests: bool) -> None:
    """It checks strangers: results that come too soon to be honest must not keep it from work."""
    desk = desk_with(("own", ""), ("s", "t"), options=replace(WIDE, groups_per_step=16))
    worker, other = desk.planner.fleet.get(holder), desk.planner.fleet.get(quick)
    assert worker is not None
    assert other is not None
    lease = desk.leases[held_by(desk, holder)[0]][1]
    second = replace(lease, lease_id=desk.planner.leases.take_id(), deadline=lease.deadline + 1.0)
    for _ in range(desk.planner.fleet.at_once(worker)):
        results.overtaken(desk.planner, second, other.is_own, desk.now)
    assert desk.planner.fleet.is_resting(worker) is rests


def test_a_strangers_slots_are_capped_at_what_the_run_asks_for() -> None:
    desk = desk_with(("own", ""))
    joins(desk, "s", "t", slots=10_000)
    worker = desk.planner.fleet.get("s")
    assert worker is not None
    assert worker.slots == WIDE.groups_per_batch * WIDE.group_size


# ---- failing ---------------------------------------------------------------------------------------------------------


def test_strangers_alone_never_stop_a_run_which_says_what_it_waits_for() -> None:
    desk = desk_with(("s", "t"))
    commands: list[do.Command] = []
    for _ in range(200):
        commands += fail(desk, "s", "prompt_too_long") if held_by(desk, "s") else wait(desk, 5.0)
    assert not of(do.StopRun, commands)
    assert len(of(do.RetireGroup, commands)) > WIDE.max_failures
    (reason,) = [one.reason for one in desk.planner.waits(desk.now) if "failed at strangers" in one.reason]
    assert reason.endswith("in a row; the last: prompt_too_long: it says so")
    for _ in range(100):
        if held_by(desk, "s"):
            desk.deliver(held_by(desk, "s")[0])
        wait(desk, 5.0)
    assert desk.planner.training.has_all  # and it goes on when somebody does good work


def test_failures_of_machines_of_the_owner_still_stop_it() -> None:
    desk = desk_with(("own", ""), ("s", "t"))
    commands: list[do.Command] = []
    while not of(do.StopRun, commands):
        commands += fail(desk, "own", "prompt_too_long") if held_by(desk, "own") else wait(desk, 5.0)
        if held_by(desk, "s"):
            commands += fail(desk, "s", "prompt_too_long")
        assert desk.now < 1000.0
    assert len(of(do.RetireGroup, commands)) == WIDE.max_failures


def test_tries_of_one_ticket_on_a_group_count_once_while_others_can_try_it() -> None:
    workers = [f"s{at}" for at in range(10)]
    desk = desk_with(("own", ""), *((name, "t") for name in workers), options=replace(WIDE, lease_seconds=1e9))
    num_failed = 0
    for _ in range(40):
        for name in workers:
            if held_by(desk, name):
                fail(desk, name)
                num_failed += 1
        wait(desk, 4000.0)
    assert num_failed > 1
    assert {record.attempts for record in desk.planner.groups} == {0, 1}
    assert not [record for record in desk.planner.groups if record.state == "retired"]


def test_an_unproducible_group_is_retired_even_with_strangers_only() -> None:
    desk = desk_with(("s", "t"))
    record = desk.planner.groups.get(0)
    assert record is not None
    for _ in range(MAX_ATTEMPTS):
        fail(desk, "s")
        wait(desk, 100.0)
    assert (record.state, record.why) == ("retired", "gave_up")


def test_a_group_that_a_stranger_failed_is_left_to_others() -> None:
    desk = desk_with(("s", "t"), ("own", ""))
    number = desk.leases[held_by(desk, "s")[0]][1].group.number
    fail(desk, "s")
    while held_by(desk, "own"):
        desk.deliver(held_by(desk, "own")[0])
    record = desk.planner.groups.get(number)
    assert record is not None
    assert record.worker_id == "own"


def test_texts_that_break_the_reward_function_count_against_their_sender() -> None:
    desk = desk_with(("s", "t"))
    commands: list[do.Command] = []
    for _ in range(50):
        if held_by(desk, "s"):
            group = desk.leases[held_by(desk, "s")[0]][1].group
            desk.deliver(held_by(desk, "s")[0], scored=False)
            commands += desk.tell(ev.GroupUnfit(group, "reward_failed", "it took too long"))
        wait(desk, 20.0)
    assert len(of(do.RetireGroup, commands)) > WIDE.max_failures
    assert not of(do.StopRun, commands)
    assert desk.planner.credits.of("t").num_rests > 0


def test_an_irreplaceable_last_group_is_not_given_up_because_strangers_fail() -> None:
    desk = desk_with(("s", "t"), options=replace(WIDE, deterministic=True, groups_per_batch=1, groups_per_step=2))
    for _ in range(60):
        if held_by(desk, "s"):
            fail(desk, "s", "prompt_too_long")
        wait(desk, 61.0)
    assert desk.planner.health.over is None
    assert desk.planner.groups.num_live(0) == 1


# ---- junk ------------------------------------------------------------------------------------------------------------


def junk(desk: Desk, worker_id: str) -> list[do.Command]:
    return desk.tell(ev.DeliveryMalformed(worker_id, 10**6, "malformed", "noise"))


def test_a_worker_that_sends_junk_is_expelled_for_longer_each_time_and_its_leases_end() -> None:
    desk = desk_with(("own", ""), ("s", "t"))
    seconds = []
    for _ in range(9):
        found: list[do.ExpelWorker] = []
        while not found:
            found = of(do.ExpelWorker, junk(desk, "s"))
        (expelled,) = found
        assert int(expelled.reason.split()[0]) <= PATIENCE
        assert not held_by(desk, "s")
        assert desk.planner.penalties.of("s").expelled_until == desk.now + expelled.seconds
        assert not of(do.RefuseDelivery, junk(desk, "s"))  # what is under way is not even recorded
        assert any(one.waiter == "s" and "expelled" in one.reason for one in desk.planner.waits(desk.now))
        seconds.append(expelled.seconds)
        desk.now += expelled.seconds
        assert desk.planner.penalties.expulsion("s", desk.now) is None
        joins(desk, "s", "t")
        joins(desk, "own")
    assert seconds == [min(EXPELLED_SECONDS.most_seconds, 60.0 * 2**at) for at in range(9)]


def test_failures_of_leases_that_it_does_not_hold_are_junk_too() -> None:
    desk = desk_with(("own", ""), ("s", "t"))
    commands = [
        c for at in range(100) for c in desk.tell(ev.LeaseFailed("s", 10**6 + at, "engine_failed", "it says so"))
    ]
    assert [one.worker_id for one in of(do.ExpelWorker, commands)] == ["s"]


@given(st.lists(st.tuples(st.integers(1, 8), st.integers(0, 2), st.floats(0.0, 600.0)), max_size=60))
def test_a_worker_with_two_late_results_for_each_lease_is_never_expelled(rounds: list[tuple[int, int, float]]) -> None:
    """A slow worker, each of whose results is refused, and sent again because the answer was lost."""
    penalties, now = WorkerPenalties(), 0.0
    for num_leases, num_refused, seconds in rounds:
        for _ in range(num_leases):
            penalties.granted("w")
        now += seconds
        for _ in range(num_leases * num_refused):
            penalties.refused("w", 1.0, "late", now)
    assert not penalties.to_expel


# ---- evaluation ------------------------------------------------------------------------------------------------------

EVALUATED = replace(WIDE, eval_size=3, max_steps=1, groups_per_step=1)


def test_held_out_tasks_go_to_machines_of_the_owner_only() -> None:
    desk = desk_with(("s", "t"), options=EVALUATED)
    assert {desk.leases[lease_id][1].group.kind for lease_id in held_by(desk, "s")} == {"train"}
    joins(desk, "own")
    assert "eval" in {desk.leases[lease_id][1].group.kind for lease_id in held_by(desk, "own")}


def test_without_a_machine_of_the_owner_an_evaluation_is_given_up_and_the_run_ends() -> None:
    desk = desk_with(("s", "t"), options=EVALUATED)
    numbers = [c.number for c in of(do.FeedGroup, desk.deliver(held_by(desk, "s")[0]))]
    commands = wait(desk, 2 * EVALUATED.lease_seconds - 1.0)
    assert not of(do.SkipEval, commands)
    assert of(do.WakeAt, commands)
    commands = wait(desk, 1.0)
    assert [(one.version, "no machine of the owner" in one.reason) for one in of(do.SkipEval, commands)] == [(0, True)]
    desk.tell(ev.StepTrained(0, tuple(numbers)))
    desk.publish(1)
    commands = desk.tell(ev.CheckpointSaved(1, 0)) + wait(desk, 2 * EVALUATED.lease_seconds)
    assert of(do.FinishRun, commands)


def test_results_of_leases_that_an_earlier_head_granted_cost_nothing() -> None:
    """Those of an evaluation are not in the ledger: a head that was killed has forgotten them."""
    desk = Desk(WIDE, ev.HeadStarted(next_lease_id=1000))
    joins(desk, "own")
    commands: list[do.Command] = []
    for lease_id in range(1, 300):
        commands += desk.tell(ev.GroupDelivered("own", lease_id, GroupRef(RUN_POLICY, "eval", lease_id), 1, 0, 0, 4))
    assert len(of(do.RefuseDelivery, commands)) == 299
    assert not of(do.ExpelWorker, commands)


@pytest.mark.parametrize("next_lease_id", [1, 1000])
def test_a_stranger_cannot_call_its_junk_results_of_an_earlier_head(next_lease_id: int) -> None:
    """4,096 of them fit into a call, each of which is a line of the event log."""
    desk = Desk(WIDE, ev.HeadStarted(next_lease_id=next_lease_id))
    joins(desk, "own")
    joins(desk, "s", "t")
    commands: list[do.Command] = []
    for _ in range(int(PATIENCE) + 1):
        commands += desk.tell(ev.GroupDelivered("s", 0, GroupRef(RUN_POLICY, "eval", 7), 1, 0, 0, 4))
    assert [one.worker_id for one in of(do.ExpelWorker, commands)] == ["s"]


# ---- what the head finds out -----------------------------------------------------------------------------------------


def test_prompts_that_cannot_be_made_stop_a_run_of_strangers_too() -> None:
    desk = desk_with(("s", "t"))
    for _ in range(WIDE.max_failures):
        group = desk.leases[held_by(desk, "s")[0]][1].group
        desk.tell(ev.GroupUnfit(group, "bad_task", "no chat template"))
    assert "no chat template" in (desk.planner.health.over or "")


def test_seconds_that_the_head_spends_on_a_reward_which_fails_cost_credit() -> None:
    desk = desk_with(("own", ""), ("s", "t"), options=replace(WIDE, groups_per_step=1000))
    for _ in range(6):
        desk.deliver(held_by(desk, "s")[0])
    credit = desk.planner.credits.of("t").credit
    lease_id = held_by(desk, "s")[0]
    group = desk.leases[lease_id][1].group
    desk.deliver(lease_id, scored=False)
    desk.tell(ev.GroupUnfit(group, "reward_failed", "it took too long", 3.5))
    assert desk.planner.credits.of("t").credit == credit + 1 - 2 - 3
    lease_id = held_by(desk, "s")[0]
    group = desk.leases[lease_id][1].group
    desk.deliver(lease_id, scored=False)
    desk.tell(ev.GroupUnfit(group, "reward_failed", "it took too long", 60.0))
    assert desk.planner.credits.rests.get("t") == desk.now + 60.0


def earned(results: int = 6) -> Desk:
    """A stranger that earned credit beside a machine of the owner, whose groups took two seconds to score each."""
    desk = desk_with(("own", ""), ("s", "t"), options=replace(WIDE, groups_per_step=1000))
    for worker_id in ("own", *["s"] * results):
        desk.tell(scored(desk, worker_id, 2.0))
    return desk


def scored(desk: Desk, worker_id: str, seconds: float) -> ev.GroupScored:
    """It delivers the first lease that it holds, whose rewards take as long."""
    lease_id = held_by(desk, worker_id)[0]
    desk.deliver(lease_id, scored=False)
    return ev.GroupScored(desk.leases[lease_id][1].group, seconds=seconds)


def test_seconds_that_the_texts_of_a_stranger_waste_cost_credit_as_those_of_a_reward_that_fails() -> None:
    desk = earned()
    credit = desk.planner.credits.of("t").credit
    desk.tell(scored(desk, "s", 23.5))  # ten times the usual is allowed
    assert desk.planner.credits.of("t").credit == credit + 1 - 2 - 3
    commands = desk.tell(scored(desk, "s", 80.0))
    assert desk.planner.credits.rests.get("t") == desk.now + 60.0
    assert "rewards of its group took 80.0 s, where 2 s are usual" in of(do.RecordRest, commands)[-1].reason
    assert not of(do.RetireGroup, commands)  # the group itself is as good as others


def test_rewards_that_are_slow_for_all_cost_no_credit() -> None:
    """A judge takes 20 seconds a group, whoever sampled it; the texts of one are three times as long."""
    desk = desk_with(("own", ""), ("s", "t"), options=replace(WIDE, groups_per_step=1000))
    desk.tell(scored(desk, "s", 20.0), scored(desk, "own", 20.0))
    for seconds in (20.0, 60.0, 20.0):
        credit = desk.planner.credits.of("t").credit
        desk.tell(scored(desk, "s", seconds))
        assert desk.planner.credits.of("t").credit == credit + 1


def test_a_stranger_can_not_make_its_own_slowness_usual() -> None:
    desk = earned()
    for seconds in [19.0, 20.0] * 10:
        desk.tell(scored(desk, "s", seconds))
    credit = desk.planner.credits.of("t").credit
    desk.tell(scored(desk, "s", 25.5))
    assert desk.planner.credits.of("t").credit == credit + 1 - 2 - 5


def test_groups_that_were_blamed_are_in_no_mean() -> None:
    """Where all are strangers, their groups are all there is to compare with."""
    desk = desk_with(("s", "t"), ("r", "u"), options=replace(WIDE, groups_per_step=1000))
    desk.tell(scored(desk, "r", 1.0), scored(desk, "s", 50.0))
    assert desk.planner.measurements.rewards.mean == 1.0
    assert desk.planner.credits.rests.get("t") == desk.now + 40.0


def test_a_machine_of_the_owner_is_never_blamed_for_slow_rewards() -> None:
    desk = earned()
    credit = desk.planner.credits.of("t").credit
    desk.tell(scored(desk, "own", 500.0))
    assert desk.planner.credits.of("t").credit == credit
    assert desk.planner.measurements.rewards.mean == pytest.approx(2.0 * 0.9 + 500.0 * 0.1)


@pytest.mark.parametrize("outcome", ["accepted", "failed", "malformed", "late"])
def test_seconds_of_the_environment_at_the_head_cost_credit_whatever_becomes_of_the_group(outcome: str) -> None:
    desk = earned(12)
    own, lease_id = held_by(desk, "own")[0], held_by(desk, "s")[0]
    desk.deliver(own, replay_seconds=0.2)
    before = desk.planner.credits.of("t").credit
    group = desk.leases[lease_id][1].group
    if outcome == "accepted":
        desk.deliver(lease_id, replay_seconds=7.5)
        wanted = before - 2 - 5 + 1
    elif outcome == "failed":
        desk.tell(ev.LeaseFailed("s", lease_id, "environment_failed", "it hung", replay_seconds=5.5))
        wanted = before - 2 - 5 - 2
    elif outcome == "malformed":
        desk.tell(ev.DeliveryMalformed("s", lease_id, "malformed", "other words", replay_seconds=5.5))
        wanted = before - 2 - 5 - 2
    else:
        desk.tell(ev.GroupDelivered("s", 10**6, group, 4, 0, 0, 9, replay_seconds=7.5))
        wanted = before - 2 - 5
    assert desk.planner.credits.of("t").credit == wanted
