"""A new snapshot's steps are shared among the workers that it travels to."""

from __future__ import annotations

from dataclasses import replace

from echo2.core.types import RUN_POLICY, SnapshotRef
from echo2.head.decide import commands as do
from echo2.head.decide import events as ev
from echo2.head.decide.granting import SHARED_TIMES
from echo2.head.decide.state import PlannerOptions
from planner_cases import Desk, of

OPTIONS = PlannerOptions(groups_per_step=2, group_size=2, max_steps=9, max_staleness=0, groups_per_batch=2)
FIRST = SnapshotRef(RUN_POLICY, 1, 0)


def half_there(options: PlannerOptions = OPTIONS) -> Desk:
    """Either of two workers has slots for the whole step, and only "a" has its version."""
    desk = Desk(options)
    desk.tell(ev.LearnerJoined(0), ev.GroupsWanted(0))
    desk.join("a", version=None)
    desk.join("b", version=None)
    desk.publish(0)
    desk.tell(ev.WorkerReported("a", FIRST))
    return desk


def held(desk: Desk, worker_id: str) -> list[int]:
    return [lease.step for holder, lease in desk.planner.leases.open_leases() if holder == worker_id]


def test_the_first_to_have_a_snapshot_leaves_the_others_their_share_of_its_step() -> None:
    desk = half_there()
    assert held(desk, "a") == [0]
    desk.tell(ev.WorkerReported("b", FIRST))
    assert (held(desk, "a"), held(desk, "b")) == ([0], [0])


def test_who_is_done_with_its_share_goes_on_with_that_of_others() -> None:
    desk = half_there()
    (first,) = desk.open()
    desk.deliver(first)
    assert held(desk, "a") == [0]
    assert desk.open() != [first]


def test_a_worker_whose_snapshot_does_not_come_keeps_its_share_from_the_others_only_for_a_while() -> None:
    desk = half_there()
    until = desk.now + SHARED_TIMES * OPTIONS.lease_seconds
    desk.now = until - 1.0
    desk.tell(ev.WorkerReported("a", FIRST), ev.WorkerReported("b", None))
    assert [wake.at for wake in of(do.WakeAt, desk.tell(ev.Tick()))] <= [until]
    desk.now = until
    desk.tell(ev.Tick())
    assert held(desk, "a") == [0, 0]


def test_later_steps_of_the_same_snapshot_fill_slots_and_fixed_batches_are_not_shared() -> None:
    assert held(half_there(replace(OPTIONS, max_staleness=1)), "a") == [0, 1]
    assert held(half_there(replace(OPTIONS, deterministic=True)), "a") == [0, 0]
