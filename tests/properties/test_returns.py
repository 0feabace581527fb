"""A head that begins anew under a large fleet: no lease ends whose worker is alive and only waits at the door, and the
leases of those that never come end in bounded time."""

from __future__ import annotations

import heapq
import random
from collections import deque
from dataclasses import dataclass

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from echo2.core.types import RUN_POLICY, SnapshotRef
from echo2.head.decide import commands as do
from echo2.head.decide import events as ev
from echo2.head.decide.planner import Planner
from echo2.head.decide.state import PlannerOptions
from echo2.head.fleet.decide import returns
from echo2.head.fleet.decide.fleet import REPORTS_PER_SECOND
from echo2.transport import grpc_options, limits
from echo2.transport.grpc_link import RECONNECT_SECONDS, dial_pauses

FIRST = SnapshotRef(RUN_POLICY, 1, 0)
HEARTBEAT, LEASE = 2.0, 120.0
OPTIONS = PlannerOptions(
    groups_per_step=1000, group_size=2, max_steps=1000, heartbeat_seconds=HEARTBEAT, lease_seconds=LEASE
)
#: When the second head begins, and for how long a worker goes on sampling after it is back.
BEGAN, SAMPLING = 1000.0, 3.0


@dataclass(frozen=True)
class Storm:
    """Workers come back to a head that has just begun. `opens_after`: seconds until the first; `cut_share`: of those
    that lose the new head, too, and come back once more.
    """

    num_workers: int
    num_dead: int
    per_second: float
    opens_after: float
    stranger_share: float
    cut_share: float
    seed: int


storms = st.builds(
    Storm,
    num_workers=st.integers(1, 400),
    num_dead=st.integers(0, 150),
    per_second=st.floats(1.2 * returns.RETURNS_PER_SECOND, limits.HANDSHAKES_PER_SECOND),
    opens_after=st.floats(0.1, 5.0),
    stranger_share=st.sampled_from([0.0, 0.3, 1.0]),
    cut_share=st.sampled_from([0.0, 0.05]),
    seed=st.integers(0, 1 << 30),
)


class Hall:
    """The second head's planner, whose timers go off when they are due. `ended`: leases that are over, and how."""

    def __init__(self, storm: Storm) -> None:
        self.draw = random.Random(storm.seed)
        num_all = storm.num_workers + storm.num_dead
        self.names = {f"w{number}": number + 1 for number in range(num_all)}  # worker -> its lease
        groups = tuple(ev.RecoveredGroup(number, 0, "open") for number in range(num_all))
        leases = []
        for name, lease_id in self.names.items():
            granted_at = BEGAN - self.draw.uniform(0.0, LEASE)
            leases.append(ev.RecoveredLease(lease_id, lease_id - 1, name, granted_at, granted_at + LEASE, 2))
        self.planner, self.now, self.ended, self.wake_at = Planner(OPTIONS), BEGAN, dict[int, str](), float("inf")
        started = ev.HeadStarted(
            next_number=num_all, next_lease_id=num_all + 1, groups=groups, leases=tuple(leases), published=(FIRST,)
        )
        self._tell(started)

    def _tell(self, event: ev.Event) -> None:
        for command in self.planner.handle(event, self.now):
            if isinstance(command, do.CloseLease):
                self.ended[command.lease_id] = command.outcome
            elif isinstance(command, do.WakeAt):
                self.wake_at = command.at

    def wait_until(self, at: float) -> None:
        while self.wake_at <= at:
            self.now, self.wake_at = max(self.now, self.wake_at), float("inf")
            self._tell(ev.Tick())
        self.now = at

    def comes(self, name: str, ticket: str) -> None:
        held = (self.names[name],)
        self._tell(ev.WorkerJoined(name, 4, 1.0, FIRST, held_leases=held, ticket=ticket))

    def is_cut(self, name: str) -> None:
        self._tell(ev.WorkerDetached(name, "its connection closed"))

    def delivers(self, name: str) -> None:
        lease_id = self.names[name]
        if (held := self.planner.leases.get(lease_id)) is not None:
            self._tell(ev.GroupDelivered(name, lease_id, held[1].group, 2, 0, 0, 9, is_own=False))


def ride_out(storm: Storm) -> Hall:
    """Let all come back, one after the other, and sample for some more seconds, and wait until nobody can be waited
    for."""
    hall = Hall(storm)
    alive = list(hall.names)[: storm.num_workers]
    hall.draw.shuffle(alive)
    line, at, sampling = deque(alive), BEGAN + storm.opens_after, list[tuple[float, str]]()
    while line:
        name = line.popleft()
        while sampling and sampling[0][0] <= at:
            hall.wait_until(sampling[0][0])
            hall.delivers(heapq.heappop(sampling)[1])
        hall.wait_until(at)
        hall.comes(name, f"t{hall.names[name] % 3}" if hall.draw.random() < storm.stranger_share else "")
        if hall.draw.random() < storm.cut_share:
            hall.is_cut(name)
            line.insert(min(len(line), 50), name)  # it is in line at the door again
        else:
            heapq.heappush(sampling, (at + hall.draw.uniform(0.0, SAMPLING), name))
        # Up to so many begin their handshakes together.
        pace = storm.per_second if len(hall.names) > returns.RETURNS_AT_ONCE else limits.HANDSHAKES_BURST
        at += hall.draw.uniform(0.5, 1.5) / pace
    for until, name in sorted(sampling):
        hall.wait_until(until)
        hall.delivers(name)
    hall.wait_until(max(hall.now, BEGAN + 2 * OPTIONS.lease_seconds + 2 * hall.planner.fleet.report_seconds))
    return hall


@given(storms)
@example(Storm(600, 0, 24.0, 0.1, 0.0, 0.0, 1))  # the last of them come after half a minute
@example(Storm(150, 0, 24.0, 5.0, 1.0, 0.0, 2))  # strangers, whose leases are never extended
@example(Storm(105, 0, 24.0, 5.0, 0.0, 0.0, 3))  # few are away when the first ones are to be lost
@example(Storm(1, 150, 24.0, 5.0, 0.0, 0.0, 4))
def test_no_lease_ends_while_its_worker_waits_at_the_door(storm: Storm) -> None:
    hall = ride_out(storm)
    alive = list(hall.names.values())[: storm.num_workers]
    outcomes = {lease_id: hall.ended.get(lease_id, "open") for lease_id in alive}
    assert set(outcomes.values()) == {"accepted"}, (storm, outcomes)


@given(storms)
def test_the_leases_of_workers_that_never_come_end_in_bounded_time(storm: Storm) -> None:
    hall = ride_out(storm)
    dead = list(hall.names.values())[storm.num_workers :]
    assert {hall.ended.get(lease_id, "open") for lease_id in dead} <= {"lost"}, storm


def test_the_first_to_come_back_report_as_seldom_as_the_whole_fleet() -> None:
    hall = Hall(Storm(700, 0, 24.0, 0.1, 0.0, 0.0, 1))
    hall.comes("w0", "")
    assert hall.planner.fleet.report_seconds == 700 / REPORTS_PER_SECOND


@pytest.mark.parametrize("num_workers", [1, 40, 300, 4500, 16_000])
def test_workers_dial_within_the_time_that_the_head_waits_and_the_door_takes(num_workers: int) -> None:
    seconds = max(HEARTBEAT, num_workers / REPORTS_PER_SECOND)
    pauses, spread = dial_pauses(seconds)
    if num_workers > returns.RETURNS_AT_ONCE:
        waits = returns.Returns(HEARTBEAT)
        waits.begin(0.0)
        waits.leave(num_workers, 0.0)
        longest = pauses.most_seconds + grpc_options.HEAD_CONNECT_SECONDS
        assert longest <= waits.until(0.0)  # nobody is lost who has just been turned away
    if num_workers > limits.HANDSHAKES_BURST:  # else all of them get in at once
        assert spread == 1.0
        assert num_workers / pauses.first_seconds <= limits.HANDSHAKES_PER_SECOND
    if num_workers <= 40:
        assert pauses == RECONNECT_SECONDS
