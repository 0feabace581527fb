"""The planner's view of a large fleet: the order of who is next, what one event costs, and who works or stands by."""

from __future__ import annotations

import itertools
import math
import re
import sys
from types import FrameType
from typing import Any

import pytest

from echo2.core.types import RUN_POLICY, Lease, SnapshotRef
from echo2.head.decide import commands as do
from echo2.head.decide import events as ev
from echo2.head.decide.planner import Planner
from echo2.head.decide.state import PlannerOptions, RentableOffer
from echo2.head.fleet.decide.fleet import Throughput
from echo2.head.fleet.decide.measurements import Measurements
from echo2.head.fleet.decide.standby import fleet_need, predicted_idle_ratio
from invariants import check

FIRST = SnapshotRef(RUN_POLICY, 1, 0)


class Hall:
    """A planner with many workers of capacity 2 that all hold version 0, and a learner that waits."""

    def __init__(self, num_workers: int, **options: Any) -> None:
        values: dict[str, Any] = {"groups_per_step": 2 * num_workers, "group_size": 2, "max_steps": 1000}
        values |= {"heartbeat_seconds": 1e6, "lease_seconds": 1e6, **options}
        self.planner, self.now, self.num_workers = Planner(PlannerOptions(**values)), 0.0, num_workers
        self.leases, self.is_flat = dict[int, tuple[str, Lease]](), False
        self.tell(ev.HeadStarted())
        self.tell(ev.LearnerJoined(0))
        self.tell(ev.GroupsWanted(0))
        for number in range(num_workers):
            self.join(f"w{number}")
        self.tell(ev.SnapshotPublished(FIRST, 1))

    def tell(self, event: ev.Event) -> list[do.Command]:
        commands = self.planner.handle(event, self.now)
        if self.num_workers < 100:
            check(self.planner)
        for command in commands:
            if isinstance(command, do.GrantLeases):
                self.leases.update((lease.lease_id, (command.worker_id, lease)) for lease in command.leases)
            elif isinstance(command, do.CloseLease):
                del self.leases[command.lease_id]
        return commands

    def join(self, name: str, offer: str = "", price: float = 1.0) -> list[do.Command]:
        return self.tell(ev.WorkerJoined(name, 4, price, FIRST, offer=offer))

    def deliver(self, lease_id: int) -> ev.GroupDelivered:
        worker_id, lease = self.leases[lease_id]
        return ev.GroupDelivered(worker_id, lease_id, lease.group, 2, 0, 0, 9)

    def sample(self) -> None:
        """Ten seconds, in which every worker samples the two groups that it was leased first."""
        self.now += 10.0
        for worker in list(self.planner.fleet):
            for lease_id in self.planner.leases.of_worker(worker.worker_id)[:2]:
                event = self.deliver(lease_id)
                if any(isinstance(command, do.ScoreGroup) for command in self.tell(event)):
                    self.tell(ev.GroupScored(event.group, self.is_flat))

    def train_a_step(self, busy_seconds: float = 0.0) -> None:
        """The workers sample until the step has its groups, and for the 30 s that its training takes."""
        step = self.planner.training.version
        while not self.planner.training.has_all:
            self.sample()
        for _ in range(3):
            self.sample()
        numbers = tuple(record.number for record in self.planner.groups.of_step(step))
        self.tell(ev.StepTrained(step, numbers, busy_seconds))
        self.tell(ev.GroupsWanted(step + 1))


def count_lines(machine: Any, event: Any, now: float) -> int:
    """Lines of Python that handling the event runs: a cost without a clock."""
    num_lines = 0

    def trace(frame: FrameType, what: str, _: object) -> Any:
        nonlocal num_lines
        num_lines += what == "line"
        return trace

    sys.settrace(trace)
    try:
        machine.handle(event, now)
    finally:
        sys.settrace(None)
    return num_lines


@pytest.mark.parametrize("kind", ["report", "delivery", "failure", "unsampled", "detached", "tick"])
def test_an_event_costs_no_more_in_a_large_fleet(kind: str) -> None:
    costs = []
    for num_workers in (20, 600):
        hall = Hall(num_workers, max_staleness=3)
        lease_id = min(hall.leases)
        events = {
            "report": ev.WorkerReported("w3", FIRST),
            "delivery": hall.deliver(lease_id),
            "failure": ev.LeaseFailed(hall.leases[lease_id][0], lease_id, "engine_failed", "it broke"),
            "unsampled": ev.LeaseFailed(hall.leases[lease_id][0], lease_id, "environment_failed", "it raised"),
            "detached": ev.WorkerDetached("w3", "cut"),
            "tick": ev.Tick(),
        }
        costs.append(count_lines(hall.planner, events[kind], hall.now + 0.1))
    assert costs[1] <= 1.3 * costs[0] + 20, costs  # a look at each worker would cost 600 lines


def test_the_last_groups_go_to_the_worker_that_is_free_first() -> None:
    hall = Hall(4, max_staleness=1, groups_per_step=5)  # the window has 10 groups
    assert [len(hall.planner.leases.of_worker(f"w{number}")) for number in range(4)] == [2, 2, 2, 2]
    for lease_id in [lease_id for lease_id, (worker_id, _) in hall.leases.items() if worker_id == "w2"]:
        hall.tell(hall.deliver(lease_id))
    assert [len(hall.planner.leases.of_worker(f"w{number}")) for number in range(4)] == [2, 2, 2, 2]
    assert hall.planner.groups.num_live(1) == 5  # the last two went to w2


def test_the_only_worker_has_a_second_batch_waiting() -> None:
    hall = Hall(1, max_staleness=1)
    assert len(hall.planner.leases.of_worker("w0")) == 4


# ---- standing by -----------------------------------------------------------------------------------------------------


def of(kind: type[do.Command], commands: list[do.Command]) -> list[Any]:
    return [command for command in commands if isinstance(command, kind)]


def lively(**options: Any) -> Hall:
    """Eight workers, of which a learner that trains 30 s a step needs few."""
    hall = Hall(8, groups_per_step=16, max_staleness=50, publish_every=1, activation=True, **options)
    for _ in range(2):
        hall.train_a_step()
    return hall


def test_all_workers_work_until_a_measurement_and_then_the_cheapest_sufficient_ones() -> None:
    hall = Hall(8, groups_per_step=16, max_staleness=50, activation=True)
    assert hall.planner.fleet.num_active == 8
    hall.train_a_step()
    hall.sample()
    fleet, activation = hall.planner.fleet, hall.planner.rentals
    assert activation is not None
    assert activation.needed_rate == pytest.approx(1.1 * 32 / 30.0, rel=0.05)
    assert 0 < fleet.num_active < 8
    rate = sum(worker.speed.rate for worker in fleet.active())
    assert rate >= activation.needed_rate


def test_without_activation_all_workers_work() -> None:
    hall = Hall(8, groups_per_step=16, max_staleness=50)
    for _ in range(3):
        hall.train_a_step()
    assert hall.planner.fleet.num_active == 8


def test_a_standby_worker_gets_no_leases_and_no_snapshots_and_says_why() -> None:
    hall = lively()
    fleet = hall.planner.fleet
    standing = {worker.worker_id for worker in fleet if worker.standby}
    before = {name: len(hall.planner.leases.of_worker(name)) for name in standing}
    told = of(do.AnnounceSnapshot, hall.tell(ev.SnapshotPublished(SnapshotRef(RUN_POLICY, 1, 1), 1)))
    assert not standing & {worker_id for command in told for worker_id in command.worker_ids}
    commands = hall.tell(ev.WorkerReported("w0", SnapshotRef(RUN_POLICY, 1, 1)))
    assert not standing & {command.worker_id for command in of(do.GrantLeases, commands)}
    assert all(len(hall.planner.leases.of_worker(name)) <= before[name] for name in standing)
    waits = {wait.waiter: wait.reason for wait in hall.planner.waits(hall.now)}
    assert all("stands by" in waits[name] for name in standing)


def test_a_lost_worker_is_replaced_at_the_next_look() -> None:
    hall = lively()
    active = [worker.worker_id for worker in hall.planner.fleet.active()]
    for name in active[:2]:
        hall.tell(ev.WorkerLeft(name, "its machine was taken away"))
    hall.now += 6.0
    activated = of(do.ActivateWorker, hall.tell(ev.Tick()))
    assert activated
    assert not {command.worker_id for command in activated} & set(active)
    assert hall.planner.rentals is not None
    assert sum(worker.speed.rate for worker in hall.planner.fleet.active()) >= (hall.planner.rentals.needed_rate or 1e9)


def test_a_worker_that_joins_later_stands_by_and_keeps_its_place_when_it_returns() -> None:
    hall = lively()
    assert of(do.AnnounceSnapshot, hall.join("late")) == []
    late = hall.planner.fleet.get("late")
    assert late is not None
    assert late.standby
    active = hall.planner.fleet.active()[0].worker_id
    hall.tell(ev.WorkerDetached(active, "cut"))
    hall.join(active)
    back = hall.planner.fleet.get(active)
    assert back is not None
    assert not back.standby
    assert back.speed.rate > 0


def test_a_worker_whose_link_is_cut_every_now_and_then_is_measured_all_the_same() -> None:
    hall = Hall(1, groups_per_step=64)
    hall.sample()
    for _ in range(20):
        hall.now += 10.0  # from here on it is half as quick
        hall.sample()
        held = tuple(hall.planner.leases.of_worker("w0"))
        hall.tell(ev.WorkerDetached("w0", "cut"))
        hall.tell(ev.WorkerJoined("w0", 4, 1.0, FIRST, held))
    worker = hall.planner.fleet.get("w0")
    assert worker is not None
    assert worker.speed.rate == pytest.approx(0.2, abs=0.02)  # two groups of two in twenty seconds


def test_a_worker_that_lost_its_leases_is_measured_from_its_return() -> None:
    hall = Hall(1, groups_per_step=64)
    hall.sample()
    hall.now += 1000.0
    hall.tell(ev.WorkerDetached("w0", "killed"))
    hall.join("w0")
    for _ in range(4):
        hall.sample()
    worker = hall.planner.fleet.get("w0")
    assert worker is not None
    assert 0.4 <= worker.speed.rate <= 0.5  # .4, and what was under way at the first reading counts half


def test_machines_are_rented_while_the_fleet_is_too_small_and_returned_when_spare() -> None:
    hall = lively(offers=(RentableOffer("spot", 0.3, 0.1, 3),))
    rented: list[str] = []
    for worker in list(hall.planner.fleet):
        hall.tell(ev.WorkerLeft(worker.worker_id, "gone") if worker.worker_id != "w0" else ev.Tick())
    for _ in range(4):
        hall.now += 6.0
        rented += [command.offer for command in of(do.RentMachine, hall.tell(ev.WorkerReported("w0", FIRST)))]
    assert rented == ["spot"] * 3  # as many as there are, each once
    for number in range(3):
        hall.join(f"r{number}", offer="spot")
    assert all(not worker.standby for worker in hall.planner.fleet)
    returned: list[str] = []
    for number in range(1, 8):
        hall.join(f"w{number}", price=0.001)
    for _ in range(900):
        hall.now += 5.0
        for worker in list(hall.planner.fleet):
            commands = hall.tell(ev.WorkerReported(worker.worker_id, FIRST))
            returned += [command.worker_id for command in of(do.ReturnMachine, commands)]
    assert sorted(set(returned)) == sorted(returned)  # each is asked for once


def rents(hall: Hall, seconds: float) -> list[tuple[float, str]]:
    """(time, offer) of what is rented while the planner's timer alone goes on."""
    found = []
    for _ in range(int(seconds)):
        hall.now += 1.0
        found += [(hall.now, command.offer) for command in of(do.RentMachine, hall.tell(ev.Tick()))]
    return found


def short_of(*offers: RentableOffer) -> Hall:
    """One worker is left where four are needed; it reports, and nobody else does anything."""
    hall = lively(offers=offers)
    for number in range(1, 8):
        hall.tell(ev.WorkerLeft(f"w{number}", "gone"))
    return hall


def test_an_offer_whose_command_fails_rests_longer_each_time_and_others_are_asked() -> None:
    hall = short_of(RentableOffer("cheap", 2.0, 0.1, 1), RentableOffer("dear", 2.0, 1.0, 1))
    tries: list[tuple[float, str]] = []
    for _ in range(900):
        hall.now += 1.0
        for command in of(do.RentMachine, hall.tell(ev.WorkerReported("w0", FIRST))):
            tries.append((hall.now, command.offer))
            hall.tell(ev.RentFailed(command.offer, "quota"))
    cheap = [at for at, name in tries if name == "cheap"]
    gaps = [later - earlier for earlier, later in itertools.pairwise(cheap)]
    assert gaps == sorted(gaps)  # 15 s and 30 s, but a deficit is looked at every 35 s; then 60, 120, 240
    assert gaps[-1] >= 240.0
    assert "dear" in [name for _, name in tries]  # while the cheap one rests


def test_a_rented_machine_that_never_joins_and_one_that_lost_its_worker_are_given_back_once() -> None:
    hall = short_of(RentableOffer("spot", 2.0, 0.1, 1))
    asked: list[tuple[float, str, str]] = []
    for second in range(1600):
        hall.now += 1.0
        for command in hall.tell(ev.WorkerReported("w0", FIRST)):
            if isinstance(command, do.RentMachine):
                asked.append((second, "rent", ""))
            elif isinstance(command, do.ReturnMachine):
                asked.append((second, "return", command.worker_id))
        if second == 1000:
            hall.join("r0", offer="spot")
            hall.tell(ev.WorkerLeft("r0", "lost"))
    verbs = [verb for _, verb, _ in asked]
    assert verbs[:3] == ["rent", "return", "rent"]  # RENT_SECONDS without a word
    assert asked[1][0] - asked[0][0] == pytest.approx(900, abs=6)
    assert [(verb, worker) for _, verb, worker in asked].count(("return", "r0")) == 1


def test_without_workers_the_learners_wait_rents_the_cheapest_machine() -> None:
    hall = Hall(
        0,
        groups_per_step=4,
        activation=True,
        offers=(RentableOffer("cheap", 0.5, 0.1, 3), RentableOffer("dear", 9.0, 1.0, 3)),
    )
    found = rents(hall, 200)
    assert [name for _, name in found] == ["cheap"]
    assert found[0][0] >= 60.0
    quiet = Hall(0, groups_per_step=4, activation=True, offers=(RentableOffer("cheap", 0.5, 0.1, 3),))
    quiet.join("w0")
    assert rents(quiet, 200) == []


def restarted(machines: tuple[ev.RecoveredMachine, ...], *, leases: bool = False) -> Hall:
    """A second head: w0 is there, the learner waits, and these machines are out."""
    hall = Hall(0, groups_per_step=4, activation=True, offers=(RentableOffer("spot", 2.0, 0.1, 2),))
    held = (ev.RecoveredLease(1, 0, "r0", 0.0, 1e6, 8),) if leases else ()
    groups = (ev.RecoveredGroup(0, 0, "open"),) if leases else ()
    hall.planner = Planner(hall.planner.options)
    hall.tell(ev.HeadStarted(published=(FIRST,), groups=groups, leases=held, next_number=1, machines=machines))
    hall.tell(ev.LearnerJoined(0))
    hall.tell(ev.GroupsWanted(0))
    return hall


def ticks(hall: Hall, seconds: int) -> list[tuple[int, do.Command]]:
    """What is rented and returned in so many seconds."""
    found: list[tuple[int, do.Command]] = []
    for second in range(seconds):
        hall.now += 1.0
        commands = hall.tell(ev.Tick())
        found += [(second, one) for one in commands if isinstance(one, do.RentMachine | do.ReturnMachine)]
    return found


def test_a_machine_that_was_on_its_way_when_the_head_was_killed_is_waited_for_and_then_returned() -> None:
    hall = restarted((ev.RecoveredMachine("spot"),))
    assert ticks(hall, 800) == []  # it is coming: no other is rented, though nobody is there
    [(second, back), *later] = ticks(hall, 120)
    assert 90 <= second <= 110
    assert isinstance(back, do.ReturnMachine)
    assert (back.offer, back.worker_id) == ("spot", "")
    assert [type(command) for _, command in later] in ([], [do.RentMachine])
    joins = restarted((ev.RecoveredMachine("spot"),))
    ticks(joins, 100)
    joins.join("r7", offer="spot")
    joins.tell(ev.WorkerReported("r7", FIRST))
    assert not [c for _, c in ticks(joins, 1200) if isinstance(c, do.ReturnMachine)]


@pytest.mark.parametrize("leases", [False, True])
def test_a_rented_worker_is_returned_after_the_restart_only_if_it_stays_away(leases: bool) -> None:
    out = (ev.RecoveredMachine("spot", "r0"),)
    back = restarted(out, leases=leases)
    back.tell(ev.WorkerJoined("r0", 4, 0.1, FIRST, held_leases=(1,) if leases else (), offer="spot"))
    assert not [c for _, c in ticks(back, 1200) if isinstance(c, do.ReturnMachine)]
    away = restarted(out, leases=leases)
    asked = [(second, c) for second, c in ticks(away, 900) if isinstance(c, do.ReturnMachine)]
    assert [(c.offer, c.worker_id) for _, c in asked] == [("spot", "r0")]
    assert asked[0][0] == pytest.approx(300, abs=6)


def test_rented_machines_never_exceed_the_offer_even_with_lost_workers() -> None:
    hall = restarted((ev.RecoveredMachine("spot", "r0"), ev.RecoveredMachine("spot", "r1")))
    found = [c for _, c in ticks(hall, 280) if isinstance(c, do.RentMachine)]
    assert found == []  # nobody is there, but both machines are still out
    assert [c for _, c in ticks(hall, 60) if isinstance(c, do.RentMachine)]


def test_a_lost_worker_that_comes_back_is_not_taken_for_a_machine_that_is_on_its_way() -> None:
    hall = restarted((ev.RecoveredMachine("spot", "r0"), ev.RecoveredMachine("spot")))
    hall.join("r0", offer="spot")
    assert hall.planner.rentals is not None
    assert hall.planner.rentals.num_coming("spot") == 1
    hall.join("r1", offer="spot")
    assert hall.planner.rentals.num_coming("spot") == 0


# ---- outlook ---------------------------------------------------------------------------------------------------------


def test_before_the_first_step_the_forecast_counts_workers_only() -> None:
    found = fleet_need(Hall(3).planner, 0.0)
    assert (found.active, found.standby, found.needed_rate, found.short) == (3, 0, None, None)
    assert found.text == "how many workers are needed is known after the first step"


def test_the_fleet_need_counts_surplus_and_missing_workers_and_the_forecast_agrees() -> None:
    hall = Hall(8, groups_per_step=16, max_staleness=50)  # nobody is released: the surplus stays
    for _ in range(3):
        hall.train_a_step()
    planner = hall.planner
    found, idle = fleet_need(planner, hall.now), predicted_idle_ratio(planner, hall.now)
    assert found.needed_rate == pytest.approx(1.1 * 32 / 30.0, rel=0.05)
    assert found.short is not None
    assert found.short < 0
    assert found.text == f"{-found.short} workers over"
    assert found.rate == pytest.approx(sum(worker.speed.rate for worker in planner.fleet))
    assert idle == pytest.approx(0.0, abs=0.01)
    for number in range(1, 8):
        hall.tell(ev.WorkerLeft(f"w{number}", "gone"))
    alone, waits = fleet_need(planner, hall.now), predicted_idle_ratio(planner, hall.now)
    assert alone.active == 1
    assert alone.text == f"{alone.short} workers short"
    assert waits == pytest.approx(1 - alone.rate * 30.0 / 32, abs=0.05)  # it sets the pace


def test_on_policy_no_rate_is_sufficient_and_no_worker_is_surplus() -> None:
    hall = Hall(4, groups_per_step=8, max_staleness=0)
    hall.train_a_step()
    found = fleet_need(hall.planner, hall.now)
    assert (found.short, found.needed_rate) == (None, math.inf)
    assert found.text.startswith("max_staleness = 0 (on-policy) leaves the learner waiting at any rate: ")
    assert found.text.endswith(" Set max_staleness >= 1")


def slow_broadcast(seconds: float) -> str:
    """What is missing where a learner of 30 s a step may be one version behind, and rollouts take 10 s."""
    hall = Hall(1, groups_per_step=16, max_staleness=1)
    hall.train_a_step()
    measurements = hall.planner.measurements
    measurements.train_seconds.append(30.0)
    measurements.broadcasts.extend([seconds] * 15)
    measurements.batch_seconds = 10.0
    return fleet_need(hall.planner, hall.now).text


def test_status_and_plan_name_the_staleness_bound_as_the_limit() -> None:
    closed = "The learner is faster than weights travel: a step takes 30 s, new weights and the first rollouts 32 s"
    assert slow_broadcast(22.0).startswith(closed)
    assert slow_broadcast(22.0).endswith("or max_staleness >= 2 help")
    narrow = "Set max_staleness >= 2: with max_staleness = 1 a new version leaves workers 0.5 s to sample a step"
    assert slow_broadcast(19.5) == narrow
    short = slow_broadcast(10.0)
    assert re.fullmatch(
        r"Set max_staleness >= 2: .* leaves workers 10 s to sample a step; without that, \d+ workers short", short
    )


def test_a_changing_rate_has_a_variance_and_a_steady_one_has_zero() -> None:
    steady, changing = [Throughput(share=1.0, busy_since=0.0) for _ in range(2)]
    now = 0.0
    for turn in range(40):
        now += 10.0
        steady.deliver(16, 4, 0, now)
        changing.deliver(16 if turn % 2 else 8, 2, 0, now)
    assert steady.rate == pytest.approx(1.6)
    assert steady.variance == pytest.approx(0.0, abs=1e-12)
    assert 0.2 < math.sqrt(changing.variance) < 0.8


def test_a_worker_is_at_most_as_fast_as_what_it_has_not_finished_allows() -> None:
    """A machine that never finishes within its leases gives no result, and must not pass for one like the others."""
    assert Throughput(share=1.0, busy_since=0.0).current(1.0, 32, 20.0) == 1.0
    assert Throughput(share=1.0, busy_since=0.0).current(1.0, 32, 128.0) == pytest.approx(0.25)
    measured = Throughput(rate=1.0, share=1.0, busy_since=0.0)  # then a second batch may be waiting
    assert measured.current(1.0, 32, 128.0) == pytest.approx(0.5)


def test_a_broadcast_is_measured_once_workers_are_under_way_and_ends_without_released_workers() -> None:
    measurements = Measurements()
    measurements.published(SnapshotRef(RUN_POLICY, 1, 0), 0.0)
    measurements.installed(SnapshotRef(RUN_POLICY, 1, 0), 1, 500.0)  # it had to start first
    assert measurements.typical_broadcast_seconds() == 0.0
    measurements.step_trained(2.5, 510.0)
    assert measurements.typical_train_seconds() == 2.5  # as the learner says
    measurements.published(SnapshotRef(RUN_POLICY, 1, 1), 510.0)
    measurements.installed(SnapshotRef(RUN_POLICY, 1, 1), 3, 512.0)
    assert measurements.typical_broadcast_seconds() == 0.0
    measurements.fewer_active(1, 513.0)
    assert measurements.typical_broadcast_seconds() == 3.0


def test_steps_that_trained_nothing_ask_for_no_more_machines() -> None:
    """Of flat groups alone, in milliseconds: a learner that is slow with others would seem to need any number."""
    hall = Hall(1, max_staleness=30)
    for step in range(20):
        is_flat = all(one.is_flat for one in hall.planner.groups.of_step(step))
        hall.train_a_step(0.005 if is_flat and step else 30.0)
        hall.is_flat = True  # the groups that are sampled from here on
    assert hall.planner.measurements.typical_train_seconds() == 30.0


def test_weights_of_another_policy_do_not_count() -> None:
    """Whether a worker joins with them or says later that it has installed them."""
    hall, other = Hall(1), SnapshotRef("other", 1, 0)
    told = [*hall.tell(ev.WorkerJoined("new", 4, 1.0, other)), *hall.tell(ev.WorkerReported("w0", other))]
    assert [command.ref for command in told if isinstance(command, do.AnnounceSnapshot)] == [FIRST]
    assert not any(isinstance(command, do.GrantLeases) for command in told)
    assert [worker.installed for worker in hall.planner.fleet] == [None, None]
