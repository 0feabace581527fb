"""What happened in a simulation, as plain counts, and its fleet over time: the basis of the report and of the tests'
checks.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from echo2.core.errors import InvariantError
from echo2.core.types import SnapshotRef
from echo2.head.decide import commands as do
from echo2.head.decide import events as ev
from echo2.head.decide.groups import UNINFORMATIVE, PlannedGroup
from echo2.head.decide.planner import Planner


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
