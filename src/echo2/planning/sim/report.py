"""What happened in a simulation: plain counts, the fleet over time, and their report: idle ratio, staleness, wasted
work and its causes, as numbers and as text.
"""

from __future__ import annotations

import statistics
from collections import Counter
from dataclasses import dataclass, field, fields
from typing import Any

from echo2.core.errors import InvariantError, counted
from echo2.core.types import SnapshotRef
from echo2.head.decide import commands as do
from echo2.head.decide import events as ev
from echo2.head.decide.groups import UNINFORMATIVE, PlannedGroup
from echo2.head.decide.planner import Planner
from echo2.planning.sim.scenario import Scenario

#: Workers of no use whose reasons a report shows.
USELESS_SHOWN = 3


@dataclass(frozen=True, slots=True)
class TrainedStep:
    """One step as the learner finished it. `versions`: oldest token's version of each group, in the order fed."""

    step: int
    lineage: int
    numbers: tuple[int, ...]
    versions: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class StepTimes:
    """One attempt of the learner to train a step: its start, the wait before it, and its duration."""

    step: int
    at_seconds: float
    wait_seconds: float
    train_seconds: float


@dataclass(slots=True)
class History:
    """`lives`: for each life of the head, every (event, time, commands), so that it can be replayed.

    trained      every RecordStep carried out, in order; after a fall-back, a step appears once per lineage
    refused, closed, retired, killed
                 refused deliveries by reason, closed leases by outcome, retired groups by reason, kills by process
    killed_within
                 kills of the head inside a transaction, and between two effects of a committed one
    shapes       train group -> size of the batch it was sampled in; the set must have one member
    sampled      train group -> versions of the tokens of its accepted result
    flat         train groups whose rewards are all equal
    replaced     step -> its groups that dynamic sampling retired
    wait_seconds, train_seconds
                 the learner's time waiting for groups, and training
    usd          cost of workers while they were up; learner_usd likewise for the learner, waiting or not
    active_usd   cost of workers while they were active: with activation, only this is paid
    fleet        (time, connected workers, active workers among them) at each change
    broadcasts   seconds from each publication until 1 / 1.1 of the active workers had the snapshot
    given_up     sources of chunks that workers gave up, by reason
    digests      the weights of each snapshot, as the learner published them
    idle_worker_seconds, worker_seconds
                 the active workers' time without a lease, and all of their time
    of_no_use    workers that hardly got a group at last, and why
    """

    lives: list[list[tuple[ev.Event, float, list[do.Command]]]] = field(default_factory=list)
    trained: list[TrainedStep] = field(default_factory=list)
    refused: Counter[str] = field(default_factory=Counter)
    closed: Counter[str] = field(default_factory=Counter)
    retired: Counter[str] = field(default_factory=Counter)
    killed: Counter[str] = field(default_factory=Counter)
    killed_within: Counter[str] = field(default_factory=Counter)
    shapes: dict[int, set[int]] = field(default_factory=dict)
    sampled: dict[int, set[int]] = field(default_factory=dict)
    flat: set[int] = field(default_factory=set)
    replaced: Counter[int] = field(default_factory=Counter)
    evaluated: list[int] = field(default_factory=list)
    fallbacks: int = 0
    wait_seconds: float = 0.0
    train_seconds: float = 0.0
    usd: float = 0.0
    learner_usd: float = 0.0
    active_usd: float = 0.0
    steps: list[StepTimes] = field(default_factory=list)
    fleet: list[tuple[float, int, int]] = field(default_factory=list)
    broadcasts: list[float] = field(default_factory=list)
    idle_worker_seconds: float = 0.0
    worker_seconds: float = 0.0
    origin_bytes: int = 0
    peer_bytes: int = 0
    given_up: Counter[str] = field(default_factory=Counter)
    digests: dict[SnapshotRef, bytes] = field(default_factory=dict)
    of_no_use: dict[str, str] = field(default_factory=dict)
    weights: str = ""
    ended: str = ""

    def retire(self, record: PlannedGroup | None, why: str) -> None:
        """Count a retired group. Dynamic sampling may retire only a group whose rewards are all equal."""
        self.retired[why] += 1
        if why == UNINFORMATIVE:
            if record is None or record.number not in self.flat:
                raise InvariantError(f"{record} is retired as {why}, and has no equal rewards")
            self.replaced[record.step] += 1

    def surviving(self) -> dict[int, TrainedStep]:
        """Return each step as trained in the highest lineage that reached it."""
        return {done.step: done for done in sorted(self.trained, key=lambda done: done.lineage)}


class FleetMeter:
    """Reads the planner's state after each event; this takes constant time unless the fleet has changed."""

    def __init__(self, history: History, pays_active: bool) -> None:
        self._history, self._pays_active = history, pays_active
        self._usd_per_hour = 0.0
        self._counted_at = 0.0
        self._num_active = self._num_free = 0
        self._num_broadcasts = 0

    def look(self, planner: Planner, now: float) -> None:
        """Attribute the time since the last call to its uses."""
        fleet, history = planner.fleet, self._history
        seconds = now - self._counted_at
        history.worker_seconds += seconds * self._num_active
        history.active_usd += seconds / 3600 * self._usd_per_hour
        history.idle_worker_seconds += seconds * self._num_free
        self._counted_at, self._num_active, self._num_free = now, fleet.num_active, fleet.num_free
        if planner.measurements.num_broadcasts > self._num_broadcasts:
            history.broadcasts.append(planner.measurements.broadcasts[-1])
        self._num_broadcasts = planner.measurements.num_broadcasts  # smaller after a restart of the head
        counts = (fleet.num_attending, fleet.num_active)
        if not history.fleet or history.fleet[-1][1:] != counts:
            history.fleet.append((now, *counts))
            if self._pays_active:
                self._usd_per_hour = sum(worker.price_usd_per_hour for worker in fleet.active())


@dataclass(frozen=True, slots=True)
class Report:
    """`staleness`: surviving trained groups by age of their oldest token. `idle_ratio`: the learner's waiting /
    (waiting + training), over the whole run; `steady_idle_ratio` and `step_seconds` over the second half of its steps,
    without the cold start. `usd` is the cost of workers, `learner_usd` of the learner, both over the whole run.
    `usd_per_step`: the run's mean cost per second times `step_seconds`. `broadcast_seconds`: the median time from a
    publication until 1 / 1.1 of the active workers had it (0: no broadcast got so far). `idle_workers`: share of the
    active workers' time without a lease. `of_no_use`: workers that hardly got a group at last, and why. `history`: the
    counts behind the numbers.
    """

    name: str
    seed: int
    finished: bool
    seconds: float
    num_events: int
    steps: int
    idle_ratio: float
    steady_idle_ratio: float
    step_seconds: float
    staleness: dict[int, int]
    refused: dict[str, int]
    leases: dict[str, int]
    retired: dict[str, int]
    killed: dict[str, int]
    fallbacks: int
    usd: float
    learner_usd: float
    usd_per_step: float
    broadcast_seconds: float
    idle_workers: float
    max_workers: int
    of_no_use: dict[str, str]
    origin_bytes: int
    history: History

    @property
    def max_staleness(self) -> int:
        """Largest age of the oldest token of a group, in versions."""
        return max(self.staleness, default=0)

    @property
    def mean_staleness(self) -> float:
        """Mean age of the oldest token of a group, in versions."""
        total = sum(self.staleness.values())
        return sum(age * count for age, count in self.staleness.items()) / max(1, total)

    def to_dict(self) -> dict[str, Any]:
        return {entry.name: getattr(self, entry.name) for entry in fields(self) if entry.name != "history"}

    def to_text(self) -> str:
        steps, groups = max(1, self.steps), max(1, sum(self.staleness.values()))
        state = "finished" if self.finished else "NOT FINISHED"
        dollars = f"${self.usd:.2f} for workers, ${self.learner_usd:.2f} for the learner"
        lines = [
            f"{self.name}, seed {self.seed}: {state} after {self.seconds:.0f} s ({self.num_events} events)",
            f"  steps       {self.steps} trained, {self.seconds / steps:.2f} s each, {self.fallbacks} fall-backs",
            f"  learner     idle ratio {self.idle_ratio:.3f}; {self.steady_idle_ratio:.3f} in the second half, "
            f"with {self.step_seconds:.2f} s a step",
            f"  workers     {self.max_workers} at most, without work {self.idle_workers:.1%} of the time",
            f"  staleness   mean {self.mean_staleness:.2f}, max {self.max_staleness}   {_bars(self.staleness, groups)}",
            f"  broadcast   {self.broadcast_seconds:.1f} s until 91 % of the workers had it (median)",
            f"  leases      {_counts(self.leases)}",
            f"  refused     {_counts(self.refused)}",
            f"  retired     {_counts(self.retired)}",
            f"  killed      {_counts(self.killed)}",
            f"  shipped     {self.origin_bytes / 1e9:.2f} GB of snapshots from the head",
            f"  cost        {dollars}, ${self.usd_per_step:.4f} a step",
        ]
        return "\n".join(lines + self.useless_lines())

    def useless_lines(self) -> list[str]:
        """Return a line for each of the first workers that are of no use, and the number of the others."""
        lines = [f"  of no use   {name}: {why}" for name, why in list(self.of_no_use.items())[:USELESS_SHOWN]]
        more = len(self.of_no_use) - USELESS_SHOWN
        return [*lines, f"  of no use   and {counted(more, 'other worker')}"] if more > 0 else lines


def make_report(scenario: Scenario, seed: int, history: History, seconds: float, num_events: int) -> Report:
    """Compute the report from the history of a run."""
    surviving = history.surviving()
    staleness = Counter(done.step - version for done in surviving.values() for version in done.versions)
    busy = history.wait_seconds + history.train_seconds
    steady_idle, step_seconds = _steady(history.steps)
    return Report(
        name=scenario.name,
        seed=seed,
        finished=history.ended == "all steps are trained",
        seconds=seconds,
        num_events=num_events,
        steps=len(surviving),
        idle_ratio=history.wait_seconds / busy if busy else 0.0,
        steady_idle_ratio=steady_idle,
        step_seconds=step_seconds,
        staleness=dict(sorted(staleness.items())),
        refused=dict(history.refused),
        leases=dict(history.closed),
        retired=dict(history.retired),
        killed=dict(history.killed),
        fallbacks=history.fallbacks,
        usd=history.usd,
        learner_usd=history.learner_usd,
        usd_per_step=(history.usd + history.learner_usd) / seconds * step_seconds if seconds else 0.0,
        broadcast_seconds=statistics.median(history.broadcasts) if history.broadcasts else 0.0,
        idle_workers=history.idle_worker_seconds / history.worker_seconds if history.worker_seconds else 0.0,
        of_no_use=history.of_no_use,
        max_workers=max((attending for _, attending, _ in history.fleet), default=0),
        origin_bytes=history.origin_bytes,
        history=history,
    )


def _steady(steps: list[StepTimes]) -> tuple[float, float]:
    """Return the idle ratio and the seconds per step, over the second half of the steps."""
    later = steps[len(steps) // 2 :]
    if not later:
        return 0.0, 0.0
    waited, trained = sum(one.wait_seconds for one in later), sum(one.train_seconds for one in later)
    return waited / (waited + trained), (waited + trained) / len(later)


def _counts(counts: dict[str, int]) -> str:
    return ", ".join(f"{name} {count}" for name, count in sorted(counts.items())) or "none"


def _bars(histogram: dict[int, int], total: int) -> str:
    return "  ".join(f"{age}: {100 * count / total:.0f}%" for age, count in sorted(histogram.items()))
