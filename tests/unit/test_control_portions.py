"""Siblings of the groups that a step begins with, spread over several workers."""

from __future__ import annotations

from dataclasses import replace

from echo2.control import commands as do
from echo2.control import events as ev
from echo2.control.groups import GroupRecord
from echo2.control.leases import MAX_ATTEMPTS
from echo2.control.portions import put_in
from echo2.control.state import PlannerOptions
from echo2.types import Portion, SnapshotRef
from planner_cases import Desk, of

SPREAD = PlannerOptions(
    groups_per_step=40,
    group_size=6,
    max_steps=9,
    max_staleness=0,
    groups_per_batch=2,
    order="frontier",
    workers_per_group=3,
    max_failures=99,
)


def desk_with(workers: str, options: PlannerOptions = SPREAD, started: ev.HeadStarted | None = None) -> Desk:
    desk = Desk(options, started)
    desk.tell(ev.LearnerJoined(0), ev.GroupsWanted(0))
    for worker_id in workers:
        desk.join(worker_id)
    desk.publish(0)
    return desk


def asked(desk: Desk, number: int) -> dict[str, tuple[int, int]]:
    """Which attempts of the group each worker is asked for: (the first, how many)."""
    held = [(name, lease) for name, lease in desk.planner.leases.open_leases() if lease.group.number == number]
    return {name: (lease.first_sample, lease.num_samples) for name, lease in held}


def lease_on(desk: Desk, number: int, first_sample: int) -> int:
    return next(
        lease.lease_id
        for _, lease in desk.planner.leases.open_leases()
        if (lease.group.number, lease.first_sample) == (number, first_sample)
    )


def test_the_groups_a_step_begins_with_are_sampled_by_as_many_workers_as_may() -> None:
    desk = desk_with("abcdef")
    assert asked(desk, 0) == {"a": (0, 2), "b": (2, 2), "c": (4, 2)}
    assert asked(desk, 1) == {"d": (0, 2), "e": (2, 2), "f": (4, 2)}
    later = [lease for _, lease in desk.planner.leases.open_leases() if lease.group.number > 1]
    assert later
    assert all((lease.first_sample, lease.num_samples) == (0, 6) for lease in later), "only the first ones are cut"
    of_one_group = {lease.seed for _, lease in desk.planner.leases.open_leases() if lease.group.number == 0}
    assert len(of_one_group) == 1, "siblings draw from one seed, each its own stream"


def test_groups_that_cannot_be_cut_are_begun_with_as_without_the_dial() -> None:
    options = replace(SPREAD, group_size=7, workers_per_group=4, groups_per_batch=8)
    desk = Desk(options)
    desk.tell(ev.LearnerJoined(0), ev.GroupsWanted(0))
    for worker_id in "abcd":
        desk.tell(ev.WorkerJoined(worker_id, 8, 0.5, SnapshotRef(1, 0)))
    sizes = [len(grant.leases) for grant in of(do.GrantLeases, desk.publish(0))]
    assert sizes[:4] == [2, 4, 6, 8]


def test_portions_divide_the_group_and_need_a_worker_each() -> None:
    assert asked(desk_with("ab"), 0) == {"a": (0, 3), "b": (3, 3)}
    assert asked(desk_with("a"), 0) == {"a": (0, 6)}
    four = desk_with("abcd", replace(SPREAD, workers_per_group=4, group_size=6))
    assert [count for _, count in asked(four, 0).values()] == [2, 2, 2], "four do not divide six attempts"


def test_a_group_is_complete_with_its_last_portion_and_then_scored_as_a_whole() -> None:
    desk = desk_with("abc")
    for first, completes in ((4, False), (0, False), (2, True)):
        commands = desk.deliver(lease_on(desk, 0, first), scored=False)
        (accepted,) = of(do.AcceptDelivery, commands)
        assert (accepted.first_sample, accepted.completes) == (first, completes)
        assert of(do.FeedGroup, commands) == []
        assert [score.group.number for score in of(do.ScoreGroup, commands)] == ([0] if completes else [])
    record = desk.planner.groups.get(0)
    assert record is not None
    assert (record.state, record.num_tokens, record.worker_id) == ("delivered", 27, "c+a+b")
    fed = of(do.FeedGroup, desk.tell(ev.GroupScored(desk.leases[1][1].group)))
    assert [command.number for command in fed] == [0]


def test_the_age_of_a_group_is_that_of_its_oldest_portion() -> None:
    record = GroupRecord(0, 0, num_portions=3)
    versions = {0: 5, 4: 3, 2: 4}
    complete = [put_in(record, first, Portion(0, first, 2, "a", v, 9)) for first, v in versions.items()]
    assert complete == [False, False, True]
    assert (record.oldest_version, record.num_tokens) == (3, 27)


def test_a_portion_that_is_lost_goes_to_another_worker_and_the_others_count() -> None:
    desk = desk_with("abc")
    desk.deliver(lease_on(desk, 0, 0))
    desk.tell(ev.WorkerLeft("b", "gone"))
    desk.deliver(lease_on(desk, 0, 4))
    assert list(asked(desk, 0).values()) == [(2, 2)]
    (accepted,) = of(do.AcceptDelivery, desk.deliver(lease_on(desk, 0, 2)))
    assert accepted.completes


def test_who_samples_a_portion_leaves_the_others_to_those_who_come_later() -> None:
    desk = desk_with("")
    for worker_id in "abc":  # nobody has the version yet, and all are expected
        desk.join(worker_id, None)
    desk.tell(ev.WorkerReported("a", SnapshotRef(1, 0)))
    assert asked(desk, 0) == {"a": (0, 2)}
    assert sum(name == "a" for name, _ in desk.planner.leases.open_leases()) > 1, "it has a batch that waits"
    desk.tell(ev.WorkerReported("b", SnapshotRef(1, 0)))
    desk.tell(ev.WorkerReported("c", SnapshotRef(1, 0)))
    assert asked(desk, 0) == {"a": (0, 2), "b": (2, 2), "c": (4, 2)}


def test_an_earlier_step_goes_before_what_could_be_left_to_others() -> None:
    desk = desk_with("", replace(SPREAD, max_staleness=1, groups_per_step=1))
    for worker_id in "ab":
        desk.tell(ev.WorkerJoined(worker_id, 1, 0.5, None))
    desk.tell(ev.WorkerReported("a", SnapshotRef(1, 0)))
    held = [(lease.step, lease.first_sample) for _, lease in desk.planner.leases.open_leases()]
    assert held[:2] == [(0, 0), (0, 3)]


def test_after_a_restart_nothing_is_leased_twice_beside_a_cut_group() -> None:
    whole, cut = (
        (ev.RecoveredLease(3, 1, "c", 50.0, 0, 6),),
        tuple(ev.RecoveredLease(3 + at, 1, "c", 50.0, 2 * at, 2) for at in range(3)),
    )
    for second in (whole, cut):
        started = ev.HeadStarted(
            next_number=2,
            next_lease_id=9,
            groups=(ev.RecoveredGroup(0, 0, "open"), ev.RecoveredGroup(1, 0, "open")),
            leases=(ev.RecoveredLease(1, 0, "a", 50.0, 0, 2), ev.RecoveredLease(2, 0, "b", 50.0, 2, 2), *second),
            published=(SnapshotRef(1, 0),),
        )
        desk = Desk(SPREAD, started)
        desk.tell(ev.LearnerJoined(0), ev.GroupsWanted(0))
        desk.join("a", held=(1,))
        assert set(asked(desk, 1)) == {"c"}
        assert asked(desk, 0) == {"a": (0, 2), "b": (2, 2)}, "the third portion is left to others"
        desk.join("d")
        assert asked(desk, 0)["d"] == (4, 2)


def test_a_fall_back_of_the_learner_retires_what_is_cut_and_not_complete() -> None:
    desk = Desk(replace(SPREAD, groups_per_step=2))
    desk.tell(ev.LearnerJoined(0))
    desk.publish(0)
    desk.join("a")
    desk.train(0)
    desk.publish(1)
    for worker_id in "bc":
        desk.join(worker_id, 1)
    desk.tell(ev.WorkerReported("a", SnapshotRef(1, 1)))
    desk.deliver(lease_on(desk, 2, 0), 1)
    leases = [lease for _, lease in desk.planner.leases.open_leases()]
    cut = {lease.group.number for lease in leases if lease.num_samples < 6}
    assert 2 in cut
    commands = desk.tell(ev.LearnerJoined(0))
    assert {command.number for command in of(do.RetireGroup, commands)} == cut
    assert {command.why for command in of(do.RetireGroup, commands)} == {"fell_back"}
    assert all(asked(desk, number) == {} for number in cut)
    assert len(of(do.RevokeLease, commands)) == sum(lease.group.number in cut for lease in leases)


def test_who_is_alone_with_a_group_samples_all_of_it() -> None:
    desk = desk_with("ab", replace(SPREAD, groups_per_step=1))
    desk.tell(ev.WorkerLeft("b", "gone"))
    for first in (0, 3):
        desk.deliver(lease_on(desk, 0, first), scored=False)
    record = desk.planner.groups.get(0)
    assert record is not None
    assert record.state == "delivered"


def test_a_second_result_for_a_portion_is_refused() -> None:
    desk = desk_with("abc")
    lease_id = lease_on(desk, 0, 0)
    desk.deliver(lease_id)
    (refused,) = of(do.RefuseDelivery, desk.deliver(lease_id))
    assert refused.refusal == "late"
    assert asked(desk, 0) == {"b": (2, 2), "c": (4, 2)}


def test_a_group_that_loses_worker_after_worker_is_given_up_with_all_its_portions() -> None:
    desk = desk_with("abc", replace(SPREAD, lease_seconds=5.0, lost_after_seconds=1e6))
    retired: list[do.RetireGroup] = []
    for _ in range(2 * MAX_ATTEMPTS):
        desk.now += 5.0
        retired += of(do.RetireGroup, desk.tell(ev.Tick()))
    assert {command.why for command in retired} == {"gave_up"}
    assert 0 in {command.number for command in retired}


def test_a_restarted_head_asks_for_the_missing_portions_only() -> None:
    started = ev.HeadStarted(
        next_number=1,
        next_lease_id=9,
        groups=(ev.RecoveredGroup(0, 0, "open"),),
        leases=(ev.RecoveredLease(2, 0, "b", 50.0, 2, 2), ev.RecoveredLease(3, 0, "a", 50.0, 0, 2)),
        portions=(Portion(0, 0, 2, "a", 0, 9),),
    )
    desk = Desk(SPREAD, started)
    desk.tell(ev.LearnerJoined(0), ev.GroupsWanted(0))
    desk.publish(0)
    desk.join("c")
    assert asked(desk, 0) == {"a": (0, 2), "b": (2, 2), "c": (4, 2)}
    duplicate = ev.GroupDelivered("a", 3, desk.planner.leases.open_leases()[0][1].group, 2, 0, 0, 9)
    assert [command.refusal for command in of(do.RefuseDelivery, desk.tell(duplicate))] == ["duplicate"]
    desk.deliver(lease_on(desk, 0, 4))
    last = replace(duplicate, worker_id="b", lease_id=2)
    assert [command.completes for command in of(do.AcceptDelivery, desk.tell(last))] == [True]
