"""Why the learner waited: the seconds before each step, by what its last group was at."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from echo2.config.sections import RewardConfig
from echo2.core.types import RUN_POLICY, GroupRef, Lease, SnapshotRef
from echo2.head.decide import commands as do
from echo2.head.decide import events as ev
from echo2.head.decide.groups import PlannedGroup
from echo2.head.decide.planner import Planner
from echo2.head.decide.state import PlannerOptions, RentableOffer
from echo2.head.fleet.decide.measurements import CAUSES, LearnerWait, learner_wait, main_cause
from echo2.head.fleet.decide.standby import fleet_need, predicted_idle_ratio
from invariants import check
from planner_cases import OPTIONS, running
from test_head_fleet import Hall

FIRST = SnapshotRef(RUN_POLICY, 1, 0)


class Story:
    """A planner whose learner wants a step of one group at 0 s, and what comes then."""

    def __init__(self, **options: Any) -> None:
        values: dict[str, Any] = {"groups_per_step": 1, "group_size": 2, "max_steps": 50, "max_staleness": 0}
        self.planner = Planner(PlannerOptions(**(values | {"lease_seconds": 1e6, "heartbeat_seconds": 1e6} | options)))
        self.held: dict[str, list[Lease]] = {}
        self.rented: list[str] = []
        self.at(0.0, ev.HeadStarted())
        self.at(0.0, ev.SnapshotPublished(FIRST, 1))
        self.at(0.0, ev.LearnerJoined(0))
        self.at(0.0, ev.GroupsWanted(0))

    def at(self, now: float, event: ev.Event) -> None:
        for command in self.planner.handle(event, now):
            if isinstance(command, do.GrantLeases):
                self.held.setdefault(command.worker_id, []).extend(command.leases)
            elif isinstance(command, do.RentMachine):
                self.rented.append(command.offer)
        check(self.planner)

    def joins(self, now: float, name: str = "w") -> None:
        self.at(now, ev.WorkerJoined(name, 2, 1.0, FIRST))

    def delivers(self, now: float, name: str = "w") -> GroupRef:
        lease = self.held[name].pop(0)
        installed = self.planner.training.version
        self.at(now, ev.GroupDelivered(name, lease.lease_id, lease.group, 2, installed, installed, 9))
        return lease.group

    @property
    def waits(self) -> dict[str, float]:
        return {cause: seconds for cause, seconds in self.planner.measurements.waits[-1].seconds.items() if seconds}


def test_a_wait_is_explained_by_the_stages_of_the_last_group() -> None:
    story = Story()
    story.joins(3.0)
    group = story.delivers(13.0)
    story.at(20.0, ev.GroupScored(group))
    assert story.planner.training.has_all
    assert story.waits == {"lease": 3.0, "sampling": 10.0, "rewards": 7.0}


def test_time_of_a_lost_lease_is_a_cause_of_its_own() -> None:
    story = Story()
    story.joins(0.0)
    story.at(8.0, ev.WorkerLeft("w", "its machine is gone"))
    story.joins(9.0, "other")
    story.at(12.0, ev.GroupScored(story.delivers(12.0, "other")))
    assert story.waits == {"lost": 9.0, "sampling": 3.0}
    assert story.planner.measurements.waits[-1].worker_id == "other"


def test_time_of_a_resampled_flat_group_is_a_cause_of_its_own() -> None:
    story = Story(dynamic_sampling=True)
    story.joins(0.0)
    story.at(5.0, ev.GroupScored(story.delivers(5.0), is_flat=True))
    story.at(7.0, ev.GroupScored(story.delivers(7.0)))
    assert story.waits == {"replaced": 5.0, "sampling": 2.0}


def test_time_before_the_learners_request_is_not_a_wait() -> None:
    story = Story(max_staleness=1)
    story.joins(0.0)
    first = story.delivers(1.0)
    second = story.delivers(2.0)  # of the next step
    story.at(2.0, ev.GroupScored(second))
    story.at(4.0, ev.GroupScored(first))
    story.at(30.0, ev.StepTrained(0, (first.number,)))
    story.at(30.0, ev.GroupsWanted(1))
    assert story.planner.training.has_all
    assert story.waits == {}


def trained(seconds_by_steps: dict[str, float], **options: Any) -> Story:
    """A run of five steps of 2 s each, of which each waits so long for its worker, and for its rewards."""
    story, now = Story(**options), 0.0
    story.joins(0.0)
    for step in range(5):
        now += seconds_by_steps["sampling"]
        group = story.delivers(now)
        now += seconds_by_steps["rewards"]
        story.at(now, ev.GroupScored(group, seconds=seconds_by_steps["rewards"]))
        now += 2.0
        story.at(now, ev.StepTrained(step, (group.number,), busy_seconds=2.0))
        ref = SnapshotRef(RUN_POLICY, 1, step + 1)
        story.at(now, ev.SnapshotPublished(ref, 1))
        story.at(now, ev.WorkerReported("w", ref))
        story.at(now, ev.GroupsWanted(step + 1))
    for seconds in range(1, 10):
        story.at(now + 60.0 * seconds, ev.Tick())
    return story


OFFERS = (RentableOffer("spot", 1.0, 1.0, 4),)


def test_slow_rewards_cause_no_demand_for_workers() -> None:
    story = trained({"sampling": 1.0, "rewards": 6.0}, max_staleness=20, activation=True, offers=OFFERS)
    found = fleet_need(story.planner, story.planner.now)
    assert found.text == "the learner waits for rewards (6 s a group): more workers would not help"
    assert predicted_idle_ratio(story.planner, story.planner.now) is None
    assert story.rented == []
    slow_worker = trained({"sampling": 6.0, "rewards": 1.0}, max_staleness=20, activation=True, offers=OFFERS)
    assert slow_worker.rented[0] == "spot"
    assert "reward" not in fleet_need(slow_worker.planner, slow_worker.planner.now).text
    assert predicted_idle_ratio(slow_worker.planner, slow_worker.planner.now) is not None


def test_the_forecast_leaves_out_a_worker_that_was_too_slow() -> None:
    hall = Hall(5, groups_per_step=16, max_staleness=4)
    for _ in range(3):
        hall.train_a_step()
    planner, slow = hall.planner, hall.planner.fleet.get("w4")
    assert slow is not None
    slow.speed.rate /= 20
    with_it = predicted_idle_ratio(planner, hall.now)
    for _ in range(planner.fleet.at_once(slow)):
        planner.fleet.came_late(slow, 30.0, hall.now)
    without_it = predicted_idle_ratio(planner, hall.now)
    hall.tell(ev.WorkerLeft("w4", "gone"))
    assert with_it is not None
    assert without_it == predicted_idle_ratio(planner, hall.now)
    assert without_it < with_it - 0.1


def test_a_learner_that_hardly_waits_has_no_bottleneck() -> None:
    assert trained({"sampling": 0.01, "rewards": 0.02}).planner.measurements.bottleneck() is None
    assert main_cause([LearnerWait(0, "w", dict.fromkeys(CAUSES, 0.0))]) is None


moments = st.one_of(st.just(-math.inf), st.floats(-1e6, 1e6))


@given(st.lists(st.tuples(moments, moments, moments, moments, st.integers(0, 5)), min_size=1, max_size=6), st.data())
@example([(-math.inf, -math.inf, -math.inf, -math.inf, 0)], None)
def test_the_seconds_always_add_up_to_the_wait(groups: list[tuple[float, float, float, float, int]], data: Any) -> None:
    """In whatever order a kill of the head, a late result or a clock put a group's moments."""
    since = data.draw(st.floats(-1e6, 1e6)) if data is not None else 0.0
    now = since + (data.draw(st.floats(0, 1e6)) if data is not None else 3.0)
    records = [
        PlannedGroup(
            number,
            7,
            "retired" if number and tries == 5 else "fed",
            attempts=tries,
            issued_at=a,
            leased_at=b,
            delivered_at=c,
            ready_at=d,
        )
        for number, (a, b, c, d, tries) in enumerate(groups)
    ]
    wait = learner_wait(7, records, since, now)
    assert set(wait.seconds) == set(CAUSES)
    assert all(seconds >= 0.0 for seconds in wait.seconds.values())
    assert math.fsum(wait.seconds.values()) == pytest.approx(now - since, abs=1e-6)


def test_a_run_with_a_judge_waits_for_the_judge() -> None:
    asked = {"model": "m", "base_url": "http://127.0.0.1:1/v1", "rubric": "good"}
    told = []
    for functions in (["judge", "0.5 * exact_match"], ["judge", "mine.py:score"]):
        desk = running(replace(OPTIONS, scored_by=RewardConfig(functions, judge=asked).scored_by))
        desk.deliver(1, scored=False)
        told.append(desk.planner.waits(0.0)[0].reason.rpartition(", ")[2])
    assert told == ["waiting for the judge", "waiting for the judge or your reward function"]
