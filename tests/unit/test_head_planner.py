"""The planner by example: who gets what, what is accepted and refused, when a step ends, what a restart keeps, why a
run stops.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from echo2.core.errors import InvariantError
from echo2.core.types import RUN_POLICY, GroupRef, SnapshotRef
from echo2.head.decide import commands as do
from echo2.head.decide import events as ev
from echo2.head.decide.groups import MAX_ATTEMPTS
from echo2.head.decide.planner import Planner
from echo2.head.decide.state import PlannerOptions
from planner_cases import OPTIONS, Desk, of, running

# ---- granting ------------------------------------------------------------------------------------------------------


def test_leases_go_out_earliest_step_first_a_batch_to_run_and_one_to_wait() -> None:
    desk = running()
    assert [(lease.step, lease.group.number) for _, lease in desk.leases.values()] == [(0, 0), (0, 1), (1, 2), (1, 3)]
    assert desk.open() == [1, 2, 3, 4]


def test_no_worker_samples_beyond_the_staleness_bound() -> None:
    desk = running()
    for lease_id in (1, 2, 3, 4):
        desk.deliver(lease_id)
    assert desk.open() == []  # step 2 needs version 1 or later
    desk.tell(ev.StepTrained(0, (0, 1)))
    desk.publish(1)
    assert desk.open() == []
    desk.tell(ev.WorkerReported("a", SnapshotRef(RUN_POLICY, 1, 1)))
    assert {lease.step for _, lease in desk.leases.values()} == {0, 1, 2}


def test_a_worker_without_a_valid_snapshot_gets_nothing() -> None:
    desk = Desk()
    desk.tell(ev.LearnerJoined(0))
    desk.publish(0)
    desk.join("a", None)
    desk.tell(ev.WorkerJoined("b", 8, 0.5, SnapshotRef(RUN_POLICY, 7, 0)))
    assert desk.leases == {}


def test_fast_workers_hold_no_groups_that_idle_ones_could_sample() -> None:
    desk = Desk()
    desk.tell(ev.LearnerJoined(0))
    desk.join("a")
    desk.join("b")
    desk.publish(0)
    assert [worker_id for worker_id, _ in desk.leases.values()] == ["a", "a", "b", "b"]


def test_deterministic_mode_fixes_the_version_of_a_step_and_its_units() -> None:
    options = PlannerOptions(
        groups_per_step=3,
        group_size=4,
        max_steps=10,
        groups_per_batch=2,
        max_staleness=2,
        publish_every=3,
        deterministic=True,
    )
    desk = running(options)
    units = [[lease.group.number for lease in grant.leases] for grant in of(do.GrantLeases, desk.join("b"))]
    units += [[lease.group.number for lease in grant.leases] for grant in of(do.GrantLeases, desk.join("c"))]
    units += [[lease.group.number for lease in grant.leases] for grant in of(do.GrantLeases, desk.join("d"))]
    assert units == [[3], [4, 5], [6, 7], [8]]  # a holds [0, 1] and [2]: no unit crosses a step
    assert [(lease.step, lease.exact_version) for _, lease in desk.leases.values()] == [(n // 3, 0) for n in range(9)]
    assert of(do.GrantLeases, desk.join("e")) == []  # step 3 is sampled with version 3, by anybody


# ---- results -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "word"),
    [
        ({"worker_id": "b"}, "malformed"),
        ({"group": GroupRef(RUN_POLICY, "train", 1)}, "malformed"),
        ({"num_samples": 3}, "malformed"),
        ({"newest_version": 1}, "malformed"),
    ],
)
def test_results_without_a_lease_are_refused(fields: dict[str, object], word: str) -> None:
    desk = running()
    desk.join("b")
    commands = desk.deliver(1, **fields)
    assert [command.refusal for command in of(do.RefuseDelivery, commands)] == [word]
    assert of(do.AcceptDelivery, commands) == []


def test_a_result_older_than_its_lease_is_stale() -> None:
    desk = running()
    for step in range(3):
        desk.train(step)
        desk.publish(step + 1)
        desk.tell(ev.WorkerReported("a", SnapshotRef(RUN_POLICY, 1, step + 1)))
    ahead = [lease for _, lease in desk.leases.values() if lease.step == 4]
    commands = desk.deliver(ahead[0].lease_id, ahead[0].min_version - 1)
    assert [(c.refusal, "2 versions old" in c.reason) for c in of(do.RefuseDelivery, commands)] == [("stale", True)]


def test_the_second_result_is_a_duplicate_and_one_after_the_deadline_is_late() -> None:
    desk = running()
    desk.deliver(1)
    assert [command.refusal for command in of(do.RefuseDelivery, desk.deliver(1))] == ["duplicate"]
    desk.now = OPTIONS.lease_seconds
    commands = desk.tell(ev.Tick())
    assert [(c.lease_id, c.outcome) for c in of(do.CloseLease, commands)][:1] == [(2, "lost")]  # silent, too
    assert [command.refusal for command in of(do.RefuseDelivery, desk.deliver(2))] == ["late"]


def test_an_expired_lease_is_revoked_and_its_group_goes_to_another() -> None:
    desk = running()
    desk.planner.fleet.get("a").speed.rate = 1.0  # it hangs, else it would keep them (`test_head_lease_times`)
    desk.join("b")
    for desk.now in range(0, 121, 5):
        commands = desk.tell(
            ev.WorkerReported("a", SnapshotRef(RUN_POLICY, 1, 0)), ev.WorkerReported("b", SnapshotRef(RUN_POLICY, 1, 0))
        )
    assert {command.lease_ids for command in of(do.RevokeLease, commands)} == {(1,), (2,), (3,), (4,)}
    granted = of(do.GrantLeases, commands)
    assert {grant.worker_id for grant in granted} == {"b"}  # the one that let them expire rests
    assert {lease.group.number for grant in granted for lease in grant.leases} <= {0, 1, 2, 3}


def test_a_failing_worker_rests_while_another_attends_and_alone_retires_no_group() -> None:
    desk = running()
    desk.join("b")
    commands = desk.tell(ev.LeaseFailed("a", 1, "environment_failed", "raised"))
    assert of(do.RetireGroup, commands) == []
    assert "a" not in {grant.worker_id for grant in of(do.GrantLeases, commands)}
    for lease_id in (2, 3, 4):
        commands = desk.tell(ev.LeaseFailed("a", lease_id, "engine_failed", "out of memory"))
        assert "a" not in {grant.worker_id for grant in of(do.GrantLeases, commands)}
    assert desk.planner.health.over is None


def test_a_result_is_fed_once_it_is_scored() -> None:
    desk = running()
    commands = desk.deliver(1, scored=False)
    assert (len(of(do.ScoreGroup, commands)), len(of(do.FeedGroup, commands))) == (1, 0)
    commands = desk.tell(ev.GroupScored(GroupRef(RUN_POLICY, "train", 0)))
    assert [command.number for command in of(do.FeedGroup, commands)] == [0]


def test_a_step_ends_when_it_is_complete_and_not_before() -> None:
    desk = running()
    assert of(do.EndStep, desk.deliver(1)) == []
    assert [(c.step, c.num_groups, c.cursor) for c in of(do.EndStep, desk.deliver(2))] == [(0, 2, 2)]


def test_a_failed_group_is_retired_and_replaced() -> None:
    desk = running()
    desk.deliver(2)
    commands = desk.tell(ev.LeaseFailed("a", 1, "prompt_too_long", "5000 tokens"))
    assert [(c.number, c.why) for c in of(do.RetireGroup, commands)] == [(0, "prompt_too_long")]
    assert [(c.number, c.step) for c in of(do.IssueGroup, commands)] == [(4, 0)]


def test_deterministic_mode_replaces_nothing_and_feeds_in_issue_order() -> None:
    options = PlannerOptions(groups_per_step=3, group_size=4, max_steps=1, groups_per_batch=3, deterministic=True)
    desk = running(options)
    desk.tell(ev.LeaseFailed("a", 1, "environment_failed", "raised"))
    assert of(do.FeedGroup, desk.deliver(3)) == []
    commands = desk.deliver(2)
    assert [command.number for command in of(do.FeedGroup, commands)] == [1, 2]
    assert [command.num_groups for command in of(do.EndStep, commands)] == [2]


def test_deterministic_mode_stops_at_a_step_that_has_lost_every_group() -> None:
    options = PlannerOptions(groups_per_step=1, group_size=4, max_steps=3, deterministic=True)
    desk = running(options)
    commands = desk.tell(ev.LeaseFailed("a", 1, "environment_failed", "raised"))
    assert ["no group of step 0" in command.reason for command in of(do.StopRun, commands)] == [True]


def test_a_batch_that_is_sampled_again_for_its_shape_ends_with_the_step() -> None:
    options = PlannerOptions(groups_per_step=2, group_size=4, max_steps=3, groups_per_batch=2, deterministic=True)
    desk = running(options)
    desk.deliver(1)
    again = of(do.GrantLeases, desk.tell(ev.LeaseFailed("a", 2, "engine_failed", "broke")))
    assert [lease.group.number for lease in again[0].leases] == [0, 1]
    commands = desk.deliver(again[0].leases[1].lease_id)
    assert [c.lease_ids for c in of(do.RevokeLease, commands)] == [(again[0].leases[0].lease_id,)]
    assert len(of(do.EndStep, commands)) == 1


def test_a_failure_of_a_second_sampling_does_not_retire_what_has_a_result() -> None:
    options = PlannerOptions(groups_per_step=2, group_size=4, max_steps=3, groups_per_batch=2, deterministic=True)
    desk = running(options)
    desk.deliver(1, scored=False)
    again = of(do.GrantLeases, desk.tell(ev.LeaseFailed("a", 2, "engine_failed", "broke")))
    commands = desk.tell(ev.LeaseFailed("a", again[0].leases[0].lease_id, "environment_failed", "raised"))
    assert of(do.RetireGroup, commands) == []


def test_a_group_that_no_lease_can_complete_is_given_up() -> None:
    desk = running()
    for lease_id in (2, 3, 4):
        desk.deliver(lease_id)
    lease_id = 1
    for _ in range(MAX_ATTEMPTS - 1):
        commands = desk.tell(ev.LeaseFailed("a", lease_id, "engine_failed", "broke"))
        assert of(do.RetireGroup, commands) == []
        lease_id = next(n for n, (_, lease) in reversed(desk.leases.items()) if lease.group.number == 0)
    commands = desk.tell(ev.LeaseFailed("a", lease_id, "engine_failed", "broke"))
    assert [(command.number, command.why) for command in of(do.RetireGroup, commands)] == [(0, "gave_up")]


def test_too_many_failures_in_a_row_stop_the_run_and_a_success_starts_the_count_anew() -> None:
    desk = running()
    for lease_id in (1, 2):
        desk.tell(ev.LeaseFailed("a", lease_id, "environment_failed", "raised"))
    desk.deliver(3)
    rest = [n for n in desk.open() if n != 3]
    assert of(do.StopRun, desk.tell(ev.LeaseFailed("a", rest[0], "environment_failed", "raised"))) == []
    desk.tell(ev.LeaseFailed("a", rest[1], "environment_failed", "raised"))
    more = desk.open()
    commands = desk.tell(ev.LeaseFailed("a", more[0], "environment_failed", "it raised ValueError"))
    assert [command.reason for command in of(do.StopRun, commands)] == [
        "3 groups failed in a row (environment_failed). The last: it raised ValueError"
    ]


# ---- workers -------------------------------------------------------------------------------------------------------


def test_a_worker_that_comes_back_in_time_keeps_what_it_still_holds() -> None:
    desk = running()
    desk.deliver(2)
    held = sorted(desk.open())
    desk.tell(ev.WorkerDetached("a", "cut"))
    desk.now = 1.0
    commands = desk.join("a", held=(held[0], 2, 77))
    assert sorted(command.lease_id for command in of(do.CloseLease, commands)) == held[1:]
    assert [command.lease_ids for command in of(do.RevokeLease, commands)] == [(2,)]  # 77 was never granted
    assert held[0] in desk.open()


def test_ten_thousand_claimed_leases_are_one_command_of_a_kilobyte_at_most() -> None:
    desk = running(replace(OPTIONS, groups_per_batch=8))
    desk.planner.leases.next_id = 20_000
    commands = desk.join("a", held=tuple(range(1, 10_001)))
    revoked = of(do.RevokeLease, commands)
    assert [len(command.lease_ids) for command in revoked] == [64 - 4]  # it holds 1 to 4
    assert sum(len(repr(command)) for command in commands) < 2000


def test_a_silent_worker_is_lost_at_its_deadline_and_its_groups_go_on() -> None:
    desk = running()
    desk.now = 9.0
    desk.join("b")
    desk.now = 10.0
    commands = desk.tell(ev.Tick())
    assert [command.worker_id for command in of(do.WorkerGone, commands)] == ["a"]
    assert {grant.worker_id for grant in of(do.GrantLeases, commands)} == {"b"}


def test_workers_with_recent_signs_of_life_are_not_silent() -> None:
    desk = running()
    desk.join("b")
    desk.now = 9.0
    assert not desk.tell(ev.WorkersHeard(("a", "nobody")))
    desk.now = 10.0
    assert [command.worker_id for command in of(do.WorkerGone, desk.tell(ev.Tick()))] == ["b"]
    desk.now = 19.0
    assert [command.worker_id for command in of(do.WorkerGone, desk.tell(ev.Tick()))] == ["a"]


def test_a_new_worker_hears_of_the_newest_stored_snapshot() -> None:
    desk = running()
    assert [command.ref for command in of(do.AnnounceSnapshot, desk.join("b", None))] == [SnapshotRef(RUN_POLICY, 1, 0)]


# ---- the learner ---------------------------------------------------------------------------------------------------


def test_a_learner_that_is_ahead_of_the_ledger_is_refused() -> None:
    desk = Desk()
    assert "another run" in of(do.RefuseLearner, desk.tell(ev.LearnerJoined(3)))[0].reason


def test_a_learner_behind_the_oldest_checkpoint_is_refused() -> None:
    desk = running()
    for step in range(3):
        desk.train(step)
        desk.publish(step + 1)
        desk.tell(ev.WorkerReported("a", SnapshotRef(RUN_POLICY, 1, step + 1)))
    desk.tell(ev.CheckpointSaved(3, 2))
    assert "groups of steps before 2" in of(do.RefuseLearner, desk.tell(ev.LearnerJoined(1)))[0].reason
    assert of(do.RefuseLearner, desk.tell(ev.LearnerJoined(2))) == []


def test_a_fall_back_trains_the_same_groups_at_the_same_step_under_a_new_lineage() -> None:
    desk = running()
    desk.train(0)
    desk.publish(1)
    commands = desk.tell(ev.LearnerJoined(0))
    assert [(c.version, c.lineage) for c in of(do.RecordLearner, commands)] == [(0, 2)]
    assert [command.ref for command in of(do.DropSnapshot, commands)] == [SnapshotRef(RUN_POLICY, 1, 1)]
    assert [command.ref for command in of(do.AnnounceSnapshot, commands)] == [SnapshotRef(RUN_POLICY, 1, 0)]
    commands = desk.tell(ev.GroupsWanted(0))
    assert [command.number for command in of(do.FeedGroup, commands)] == [0, 1]
    assert len(of(do.EndStep, commands)) == 1
    dropped = desk.publish(0, lineage=1)
    assert [command.ref for command in of(do.DropSnapshot, dropped)] == [SnapshotRef(RUN_POLICY, 1, 0)]


def test_a_step_reported_twice_is_recorded_once() -> None:
    desk = running()
    desk.deliver(1)
    desk.deliver(2)
    assert len(of(do.RecordStep, desk.tell(ev.StepTrained(0, (0, 1))))) == 1
    assert of(do.RecordStep, desk.tell(ev.StepTrained(0, (0, 1)))) == []


def test_a_step_reported_with_other_groups_is_a_bug() -> None:
    desk = running()
    desk.deliver(1)
    desk.deliver(2)
    with pytest.raises(InvariantError, match="was fed"):
        desk.tell(ev.StepTrained(0, (0, 5)))


def test_checkpoint_reports_may_come_out_of_order() -> None:
    desk = running()
    for step in range(2):
        desk.train(step)
        desk.publish(step + 1)
        desk.tell(ev.WorkerReported("a", SnapshotRef(RUN_POLICY, 1, step + 1)))
    desk.tell(ev.CheckpointSaved(2, 1))
    commands = desk.tell(ev.CheckpointSaved(1, 1))
    assert [(c.version, c.oldest_kept) for c in of(do.RecordCheckpoint, commands)] == [(2, 1)]


# ---- restart, end, waits -------------------------------------------------------------------------------------------


def test_a_restarted_head_keeps_leases_and_results() -> None:
    started = ev.HeadStarted(
        version=0,
        next_number=2,
        next_lease_id=3,
        groups=(ev.RecoveredGroup(0, 0, "ready", 0, "a"), ev.RecoveredGroup(1, 0, "open")),
        leases=(ev.RecoveredLease(2, 1, "a", 0.0, 50.0, 4),),
        published=(SnapshotRef(RUN_POLICY, 1, 0),),
    )
    desk = Desk(started=started)
    desk.tell(ev.LearnerJoined(0), ev.GroupsWanted(0))
    desk.join("a", held=(2,))
    assert 2 in desk.open()
    lease = desk.planner.leases.get(2)
    assert lease is not None
    assert (lease[1].deadline, lease[1].group.number) == (50.0, 1)
    desk.leases[2] = lease
    assert len(of(do.EndStep, desk.deliver(2))) == 1


def test_a_restarted_head_scores_what_was_delivered_and_not_scored() -> None:
    started = ev.HeadStarted(next_number=1, groups=(ev.RecoveredGroup(0, 0, "delivered", 0, "a"),))
    commands = Planner(OPTIONS).handle(started, 0.0)
    assert [command.group.number for command in of(do.ScoreGroup, commands)] == [0]


def test_a_restarted_head_drops_snapshots_of_an_abandoned_history() -> None:
    started = ev.HeadStarted(
        version=1,
        lineage=2,
        published=(SnapshotRef(RUN_POLICY, 1, 1), SnapshotRef(RUN_POLICY, 2, 1), SnapshotRef(RUN_POLICY, 1, 5)),
    )
    planner = Planner(OPTIONS)
    commands = planner.handle(started, 0.0)
    assert [command.ref for command in of(do.DropSnapshot, commands)] == [
        SnapshotRef(RUN_POLICY, 1, 1),
        SnapshotRef(RUN_POLICY, 1, 5),
    ]
    assert planner.snapshots.published == {1: SnapshotRef(RUN_POLICY, 2, 1)}


def test_a_restarted_head_completes_a_unit_that_was_issued_in_part() -> None:
    options = PlannerOptions(groups_per_step=3, group_size=4, max_steps=2, groups_per_batch=3, deterministic=True)
    started = ev.HeadStarted(next_number=1, groups=(ev.RecoveredGroup(0, 0, "open"),))
    commands = Planner(options).handle(started, 0.0)
    assert [(command.number, command.step) for command in of(do.IssueGroup, commands)] == [(1, 0), (2, 0)]


def test_the_run_finishes_when_the_last_step_is_trained_checkpointed_and_evaluated() -> None:
    desk = running(PlannerOptions(groups_per_step=2, group_size=4, max_steps=1, eval_size=1))
    for _ in range(2):  # the evaluation of version 0, then step 0
        for lease_id in desk.open():
            desk.deliver(lease_id)
    desk.tell(ev.StepTrained(0, (0, 1)))
    assert of(do.StartEval, desk.publish(1)) != []
    assert of(do.FinishRun, desk.tell(ev.CheckpointSaved(1, 1))) == []
    desk.tell(ev.WorkerReported("a", SnapshotRef(RUN_POLICY, 1, 1)))
    commands = desk.deliver(desk.open()[0], 1)
    assert [(c.version, c.failed) for c in of(do.FinishEval, commands)] == [(1, {})]
    assert len(of(do.FinishRun, commands)) == 1


def test_every_wait_has_a_party_and_a_reason() -> None:
    desk = Desk()
    assert [wait.reason for wait in desk.planner.waits(0.0)] == ["no learner is connected"]
    desk.tell(ev.LearnerJoined(0), ev.GroupsWanted(0))
    assert (
        desk.planner.waits(0.0)[0].reason == "step 0: 2 groups not yet sampled by any worker (no worker is connected)"
    )
    desk.join("a", None)
    assert desk.planner.waits(0.0)[-1].reason == "no snapshot is published yet"
    desk.publish(0)
    assert desk.planner.waits(0.0)[-1].reason == "it is still receiving the weights of version 0"
    desk.tell(ev.WorkerReported("a", SnapshotRef(RUN_POLICY, 1, 0)))
    first = desk.planner.waits(0.0)[0]
    assert (first.waiter, first.waits_for, first.until) == ("learner", "a", OPTIONS.lease_seconds)
    assert first.reason == "step 0: a holds 2 of 2 missing groups"
    for lease_id in (1, 2, 3, 4):
        desk.deliver(lease_id)
    assert "every group up to step 1 (version 0 + max_staleness)" in desk.planner.waits(0.0)[-1].reason
    desk.tell(ev.WorkerDetached("a", "cut"))
    assert "its connection is closed" in desk.planner.waits(0.0)[-1].reason


def test_groups_that_wait_for_rewards_are_the_first_wait_with_the_seconds_each_takes() -> None:
    desk = running()
    desk.deliver(1, scored=False)
    first = desk.planner.waits(0.0)[0]
    assert (first.waiter, first.waits_for) == ("learner", "rewards")
    assert first.reason == "step 0: 1 group sampled, waiting for your reward function"
    desk.deliver(2, scored=False)
    desk.deliver(3, scored=False)
    desk.tell(ev.GroupScored(GroupRef(RUN_POLICY, "train", 0), seconds=2.0))
    reason = "step 0: 1 group sampled (2 with those of later steps), waiting for your reward function (2 s each)"
    assert desk.planner.waits(0.0)[0].reason == reason
    desk.tell(ev.GroupScored(GroupRef(RUN_POLICY, "train", 2), seconds=4.0))
    assert desk.planner.measurements.rewards.mean == pytest.approx(2.2)


def test_unfit_rows_end_a_run_only_where_no_row_between_them_is_fit() -> None:
    """They are found before anything is sampled, so at the start there is no success between them."""
    desk = Desk(replace(OPTIONS, groups_per_step=20, max_staleness=0))
    desk.tell(ev.LearnerJoined(0), ev.GroupsWanted(0))
    desk.publish(0)
    desk.join()

    def unfit(*numbers: int) -> list[do.StopRun]:
        groups = [GroupRef(RUN_POLICY, "train", number) for number in numbers]
        return of(do.StopRun, desk.tell(*(ev.GroupUnfit(group, "bad_task", "no prompt") for group in groups)))

    assert unfit(0, 2, 3, 5) == []
    assert [stop.reason for stop in unfit(4)] == ["4 groups failed in a row (bad_task). The last: no prompt"]


def test_an_evaluation_may_take_several_rollouts_of_each_task() -> None:
    desk = Desk(replace(OPTIONS, eval_size=3, eval_samples=5))
    desk.tell(ev.LearnerJoined(0), ev.GroupsWanted(0))
    desk.publish(0)
    leases = [lease for grant in of(do.GrantLeases, desk.join()) for lease in grant.leases]
    assert {lease.num_samples for lease in leases if lease.group.kind == "eval"} == {5}


def test_an_evaluation_waits_for_samples_or_rewards_and_an_ended_learner_for_nothing() -> None:
    desk = Desk(replace(OPTIONS, max_steps=1, eval_size=3))
    desk.tell(ev.LearnerJoined(0))
    desk.publish(0)

    def told(waits_for: str) -> list[str]:
        return [one.reason for one in desk.planner.waits(0.0) if one.waits_for == waits_for]

    assert told("workers") == ["evaluation of version 0: 3 of 3 tasks not yet sampled"]
    desk.join()
    desk.deliver(1)
    desk.deliver(2, scored=False)
    assert told("workers") == ["evaluation of version 0: 1 of 3 tasks not yet sampled"]
    reason = "evaluation of version 0: 1 of 3 tasks sampled, waiting for your reward function (0 s each)"
    assert told("rewards") == [reason]
    desk.tell(ev.GroupsWanted(0))
    desk.train(0)
    desk.tell(ev.LearnerLost("all steps are trained"))
    assert told("learner") == ["every group of the run is sampled or leased"]


def test_timers_ask_for_the_next_deadline_only() -> None:
    desk = running()
    assert desk.planner.handle(ev.Tick(), 0.0) == [
        do.WakeAt(cause=desk.planner.num_events, reason="next deadline of a lease or of a silent worker", at=10.0)
    ]
    assert desk.tell(ev.WorkerReported("a", SnapshotRef(RUN_POLICY, 1, 0))) == []
