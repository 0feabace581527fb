"""A fleet of thousands: how often its workers report, who counts as lost, and that no event looks through a step."""

from __future__ import annotations

import random

import pytest

from echo2.core.types import RUN_POLICY, GroupRef, Lease
from echo2.head.decide import commands as do
from echo2.head.decide import events as ev
from echo2.head.decide.groups import LeaseTable
from echo2.head.fleet.decide.fleet import LOST_AFTER_HEARTBEATS, LOST_AFTER_REPORTS, REPORTS_PER_SECOND
from echo2.head.fleet.decide.returns import DIAL_SECONDS, GRACE_HEARTBEATS, RETURNS_AT_ONCE, RETURNS_PER_SECOND
from test_head_fleet import FIRST, Hall, count_lines, of

SECONDS = 2.0
GRACE = GRACE_HEARTBEATS * SECONDS


def at(hall: Hall, now: float, *events: ev.Event) -> list[str]:
    """Pass the events, and let the deadlines up to `now` come. Return the workers that are lost."""
    hall.now = now
    commands = [command for event in (*events, ev.Tick()) for command in hall.tell(event)]
    return [command.worker_id for command in of(do.WorkerGone, commands)]


# ---- reports ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("num_workers", "seconds"), [(20, SECONDS), (40, SECONDS), (60, 3.0), (400, 20.0)])
def test_all_workers_together_report_so_often_at_most(num_workers: int, seconds: float) -> None:
    fleet = Hall(num_workers, heartbeat_seconds=SECONDS).planner.fleet
    assert fleet.report_seconds == seconds
    assert num_workers / fleet.report_seconds <= REPORTS_PER_SECOND


def test_the_interval_shrinks_with_the_fleet() -> None:
    hall = Hall(400, heartbeat_seconds=SECONDS)
    for number in range(360):
        hall.tell(ev.WorkerLeft(f"w{number}", "its owner ended it"))
    assert hall.planner.fleet.report_seconds == SECONDS


@pytest.mark.parametrize("num_workers", [4, 400])
def test_a_silent_worker_is_lost_after_two_reports_and_some_heartbeats(num_workers: int) -> None:
    hall = Hall(num_workers, heartbeat_seconds=SECONDS)
    heard = tuple(f"w{number}" for number in range(num_workers))
    at(hall, 1.0, ev.WorkersHeard(heard))
    seconds = LOST_AFTER_REPORTS * hall.planner.fleet.report_seconds + LOST_AFTER_HEARTBEATS * SECONDS
    assert at(hall, seconds, ev.WorkersHeard(heard[1:])) == []
    assert at(hall, 1.0 + seconds) == ["w0"]


def test_a_worker_that_delivers_or_fails_a_lease_need_not_report() -> None:
    hall = Hall(4, heartbeat_seconds=SECONDS)
    mine = {worker_id: lease_id for lease_id, (worker_id, _) in hall.leases.items()}
    failed = ev.LeaseFailed("w1", mine["w1"], "engine_failed", "it broke")
    assert at(hall, 9.0, hall.deliver(mine["w0"]), failed) == []
    assert at(hall, 11.0) == ["w2", "w3"]
    assert sorted(at(hall, 19.0)) == ["w0", "w1"]


# ---- workers that come back ------------------------------------------------------------------------------------------


def test_no_worker_is_lost_while_others_of_a_large_fleet_return() -> None:
    hall = Hall(300, heartbeat_seconds=SECONDS)
    for number in range(300):
        assert at(hall, 1.0, ev.WorkerDetached(f"w{number}", "the head's link was cut")) == []
    hall.now = GRACE
    hall.join("w0")
    assert at(hall, 1.0 + GRACE) == []
    hall.join("w1")
    assert at(hall, 0.5 + 2 * GRACE) == []
    hall.now = last = 1.0 + 300 / RETURNS_PER_SECOND
    hall.join("w2")
    assert at(hall, last + 0.9 * GRACE) == []
    assert len(at(hall, last + GRACE)) == 297  # the others have had their time


def test_they_are_lost_sooner_if_nobody_comes() -> None:
    hall = Hall(600, heartbeat_seconds=SECONDS)
    for number in range(600):
        assert at(hall, 1.0, ev.WorkerDetached(f"w{number}", "the head's link was cut")) == []
    hall.now = 2.0
    hall.join("w0")
    assert at(hall, 1.9 + DIAL_SECONDS + GRACE) == []
    assert len(at(hall, 2.0 + DIAL_SECONDS + GRACE)) == 599


def test_the_last_few_of_many_are_waited_for_as_the_first_ones_were() -> None:
    hall = Hall(300, heartbeat_seconds=SECONDS)
    for number in range(300):
        at(hall, 1.0, ev.WorkerDetached(f"w{number}", "the head's link was cut"))
    for number in range(250):
        hall.join(f"w{number}")
    assert at(hall, 1.0 + 2 * GRACE) == []


def test_absent_workers_are_lost_although_another_comes_and_goes() -> None:
    hall = Hall(300, heartbeat_seconds=SECONDS)
    for number in range(300):
        at(hall, 1.0, ev.WorkerDetached(f"w{number}", "the head's link was cut"))
    num_lost, now, last = 0, 1.0, 1.0 + 300 / RETURNS_PER_SECOND + GRACE
    while now < last:
        now += 1.0
        back, away = ev.WorkerJoined("w0", 4, 1.0, FIRST), ev.WorkerDetached("w0", "cut again")
        num_lost += len(at(hall, now, back, away))
    assert num_lost >= 300 - RETURNS_AT_ONCE


def test_one_of_many_absent_workers_is_lost_after_its_grace() -> None:
    hall = Hall(300, heartbeat_seconds=SECONDS)
    at(hall, 1.0, ev.WorkerDetached("w7", "cut"))
    assert at(hall, 0.9 + GRACE) == []
    assert at(hall, 1.0 + GRACE) == ["w7"]


# ---- what one event costs --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["delivery", "report"])
def test_an_event_costs_no_more_in_a_large_step_that_a_free_worker_could_help_with(kind: str) -> None:
    costs = []
    for num_workers in (20, 600):
        hall = Hall(num_workers, max_staleness=0)
        hall.join("free")
        assert hall.planner.fleet.num_free == 1
        events = {"delivery": hall.deliver(min(hall.leases)), "report": ev.WorkerReported("w3", None)}
        costs.append(count_lines(hall.planner, events[kind], hall.now + 0.1))
    assert costs[1] <= 1.3 * costs[0] + 20, costs  # a look at each group of the step would cost 600 lines


@pytest.mark.parametrize(("groups_per_step", "most"), [(4, 1.3), (200, 6.5)])
def test_an_event_costs_no_square_of_the_tickets(groups_per_step: int, most: float) -> None:
    """Nothing more where no group is left, or a look at each ticket where each has a lease, and no credit for more."""
    costs = []
    for num_tickets in (10, 50):
        hall = Hall(1, max_staleness=0, groups_per_step=groups_per_step)
        for number in range(num_tickets):
            hall.tell(ev.WorkerJoined(f"s{number}", 4, 0.0, FIRST, ticket=f"ticket {number}", draws=True))
        costs.append(count_lines(hall.planner, hall.deliver(min(hall.leases)), hall.now + 0.1))
    assert costs[1] <= most * costs[0], costs  # before, the tickets that are left were looked through for each


def test_the_longest_held_group_is_the_one_whose_newest_lease_is_the_oldest() -> None:
    """Of known workers and of new ones, which are known once they have brought a result."""
    table, draw, leases, new = LeaseTable(), random.Random(1), dict[int, Lease](), set[int]()
    for _ in range(2000):
        if leases and draw.random() < 0.45:
            lease_id = draw.choice(list(leases))
            assert table.close(lease_id)[1] == leases.pop(lease_id)
        else:
            group = GroupRef(RUN_POLICY, "train" if draw.random() < 0.9 else "eval", draw.randrange(40))
            granted_at = float(table.next_id)
            lease = Lease(table.take_id(), group, group.number % 3, 0, 8, 0, None, granted_at + 9.0, 9.0, 1)
            worker_id = f"w{draw.randrange(9)}"
            table.add(worker_id, lease, standing="new" if (is_new := draw.random() < 0.3) else "known")
            leases[lease.lease_id] = lease
            new |= {lease.lease_id} if is_new else set()
        if draw.random() < 0.1:
            table.prove(proven := f"w{draw.randrange(9)}")
            new -= set(table.of_worker(proven))
        for step in range(3):
            newest: dict[int, int] = {}
            for lease_id, lease in leases.items():
                if lease.step == step and lease.group.kind == "train":
                    newest[lease.group.number] = max(lease_id, newest.get(lease.group.number, 0))
            for standing in ("known", "new"):
                held = [lease.lease_id for one, _, lease in table.longest_held(step) if one == standing]
                of_these = [lease_id for lease_id in newest.values() if (lease_id in new) == (standing == "new")]
                assert held == sorted(of_these)[:1]
