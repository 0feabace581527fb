"""A worker that receives a snapshot while newer ones are published: it comes to have one, and the head stores no more
than one for such workers.
"""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from echo2.core.types import RUN_POLICY, SnapshotRef
from echo2.head.decide import commands as do
from echo2.head.decide import events as ev
from echo2.head.fleet.decide.workers import HELD_LEASES
from echo2.planning.sim.report import Report
from echo2.planning.sim.scenario import LearnerSpec, Scenario, WorkersSpec
from invariants import run_scenario
from planner_cases import OPTIONS, Desk, of


def ref(version: int) -> SnapshotRef:
    return SnapshotRef(RUN_POLICY, 1, version)


class Race(Desk):
    """A learner that trains and publishes a step a second, with the worker `a`, which has each version at once."""

    def __init__(self, **options: object) -> None:
        super().__init__(replace(OPTIONS, max_staleness=2, max_steps=50, **options))  # type: ignore[arg-type]
        self.tell(ev.LearnerJoined(0))
        self.publish(0)
        self.join("a")
        self.stored = {0}

    def go_on(self, num_steps: int = 1) -> dict[str, list[int]]:
        """Return the versions that each worker hears of."""
        heard: dict[str, list[int]] = {}
        for _ in range(num_steps):
            self.now += 1.0
            version = self.planner.training.version
            self.train(version)
            commands = self.publish(version + 1)
            self.stored |= {version + 1}
            commands += self.tell(ev.WorkerReported("a", ref(version + 1)))
            self.note(commands, heard)
        return heard

    def note(self, commands: list[do.Command], heard: dict[str, list[int]]) -> dict[str, list[int]]:
        self.stored -= {command.ref.version for command in of(do.DropSnapshot, commands)}
        for command in of(do.AnnounceSnapshot, commands):
            for worker_id in command.worker_ids:
                heard.setdefault(worker_id, []).append(command.ref.version)
        return heard

    def has(self, worker_id: str, version: int) -> dict[str, list[int]]:
        return self.note(self.tell(ev.WorkerReported(worker_id, ref(version))), {})


def test_a_snapshot_is_stored_until_who_receives_it_has_it_and_hears_of_the_newest() -> None:
    race = Race()
    assert race.note(race.join("slow", None), {}) == {"slow": [0]}
    heard = race.go_on(9)
    assert "slow" not in heard, "a newer one would take its place before it is there"
    assert heard["a"] == list(range(1, 10))
    assert race.stored == {0, 8, 9}
    assert race.has("slow", 0) == {"slow": [9]}
    assert race.go_on() == {"a": [10]}
    assert race.stored == {9, 10}, "that of the newest which it receives"
    race.has("slow", 9)
    race.has("slow", 10)
    assert race.go_on() == {"a": [11], "slow": [11]}


def test_one_snapshot_is_held_at_a_time_and_whoever_is_late_meanwhile_shares_the_next() -> None:
    race = Race()
    race.join("slow", None)
    race.go_on(2)
    assert race.note(race.join("other", None), {}) == {"other": [2]}
    heard = race.go_on(4)
    assert (heard.get("slow"), heard["other"]) == (None, [3, 4, 5, 6])
    assert race.stored == {0, 5, 6}
    race.has("slow", 0)
    assert race.go_on(3) == {"a": [7, 8, 9]}
    assert race.stored == {6, 8, 9}, "both receive version 6"


def test_who_refuses_leaves_or_takes_for_ever_holds_nothing() -> None:
    for end in (
        lambda race: race.tell(ev.WorkerReported("slow", None, "no room for it")),
        lambda race: race.tell(ev.WorkerLeft("slow", "gone")),
        lambda race: setattr(race, "now", race.now + HELD_LEASES * OPTIONS.lease_seconds),
    ):
        race = Race(lease_seconds=OPTIONS.lease_seconds)
        race.join("slow", None)
        race.go_on(3)
        assert 0 in race.stored
        race.note(end(race) or [], {})
        race.tell(ev.WorkerReported("a", ref(3)))
        race.join("a", 3)
        race.go_on(2)
        assert 0 not in race.stored


def test_who_comes_back_goes_on_with_what_is_held_for_it() -> None:
    race = Race()
    race.join("slow", None)
    race.go_on(3)
    race.tell(ev.WorkerDetached("slow", "its link broke"))
    assert race.note(race.join("slow", None), {}) == {"slow": [0]}
    assert race.note(race.join("slow", 0), {}) == {"slow": [3]}


def test_strangers_alone_hold_a_snapshot_for_one_lease() -> None:
    """One that pretends to receive it would keep others from theirs."""
    for own, is_held in (((), False), (("slow",), True)):
        race = Race(lease_seconds=3.0)
        race.tell(ev.WorkerJoined("liar", 4, 0.5, None, (), "", "ticket"))
        for name in own:
            race.join(name, None)
        race.go_on(2)
        assert 0 in race.stored
        race.go_on(3)
        assert (0 in race.stored) == is_held


def test_what_nobody_has_is_not_held_for_it_may_not_be_there() -> None:
    race = Race()
    race.join("b", 0)
    for step in range(2):
        race.train(step)
        heard = race.note(race.publish(step + 1), {})
        assert heard == {"a": [step + 1], "b": [step + 1]}


def test_a_deterministic_run_holds_nothing() -> None:
    race = Race(deterministic=True)
    race.join("slow", None)
    assert race.go_on(3)["slow"] == [1, 2, 3]


def newcomer(seed: int, bytes_per_second: float) -> tuple[Report, list[int]]:
    """Return what a worker installs that joins a run whose steps take .06 s. Its link takes longer for a snapshot."""
    common = {"capacity_groups": 2, "rollout_seconds": 0.03, "latency_seconds": 0.002}
    kinds = (
        WorkersSpec(count=2, install_seconds=0.005, bytes_per_second=1e9, **common),  # type: ignore[arg-type]
        WorkersSpec(bytes_per_second=bytes_per_second, joins_at_seconds=3.0, **common),  # type: ignore[arg-type]
    )
    scenario = Scenario(
        max_steps=200,
        groups_per_step=4,
        group_size=4,
        groups_per_batch=2,
        faults_until_seconds=0.0,
        chunk_bytes=1 << 18,
        delta_chance=0.9,
        workers=kinds,
        learner=LearnerSpec(train_seconds=0.06, publish_seconds=0.003),
    )
    report = run_scenario(scenario, seed)
    installed = [
        event.installed.version
        for life in report.history.lives
        for event, _, _ in life
        if isinstance(event, ev.WorkerReported) and event.worker_id == "w1-0" and event.installed is not None
    ]
    return report, list(dict.fromkeys(installed))


@pytest.mark.parametrize("bytes_per_second", [1e7, 2e6])
def test_a_newcomer_with_a_slow_link_does_not_starve_behind_fast_publications(bytes_per_second: float) -> None:
    """A snapshot of 2 MiB takes .2 and 1 s, in which three and seventeen others are published."""
    seed = random.Random(int(bytes_per_second)).randrange(100)
    report, versions = newcomer(seed, bytes_per_second)
    assert report.finished, f"seed {seed}"
    assert len(versions) >= 5, f"seed {seed}: {versions}"
    assert versions == sorted(versions)
    assert versions[-1] >= 150, f"seed {seed}: {versions}"
