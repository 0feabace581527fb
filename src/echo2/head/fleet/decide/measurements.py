"""Measures the running fleet and learner from the planner's own events: the symbols of `formulas.py`, and why the
learner waited for a step.

A wait is explained by what the group that arrived last was doing meanwhile. That group is the step's critical path: if
any other group had arrived sooner, the learner would have waited as long.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from echo2.core.types import SnapshotRef
from echo2.head.decide.groups import PlannedGroup
from echo2.head.fleet.decide.formulas import INSTALLED_QUANTILE

#: What the last group waited for, with a description for the operator.
CAUSES: Mapping[str, str] = MappingProxyType(
    {
        "replaced": "groups that were retired and replaced",
        "lost": "leases that brought nothing",
        "lease": "a free worker with the weights",
        "sampling": "workers that sample",
        "rewards": "rewards",
        "held": "checks of how tokens were drawn, or room on the disk",
    }
)
#: Steps and broadcasts remembered.
NUM_REMEMBERED = 15
#: Steps, the last of those, whose waits say whether more groups at once would help.
NUM_LATEST = 4
#: Share of its training time that the learner may wait before a bottleneck is reported.
LITTLE_WAIT = 0.05
#: Weight of the newest group in the running means of the seconds that the head spends on a group.
GROUP_SHARE = 0.1


@dataclass(frozen=True, slots=True)
class LearnerWait:
    """Seconds by cause from when the learner wanted the groups of `step` until it had the last one, which `worker_id`
    sampled. A learner that starts with the first groups was busy for part of that time.
    """

    step: int
    worker_id: str
    seconds: Mapping[str, float]


def learner_wait(step: int, records: Iterable[PlannedGroup], since: float, now: float) -> LearnerWait:
    """Return the wait for a step that the learner wanted at `since` and whose last group is fed at `now`.

    `records`: all groups of the step. A group is issued when it is leased, so the time before that is a wait for a
    worker, unless another group of the step was in progress and was retired.
    """
    records = list(records)
    last = max((one for one in records if one.state != "retired"), key=lambda record: (record.ready_at, record.number))
    retired = [one for one in records if one.state == "retired"]
    replaced_at = max((max(one.leased_at, one.delivered_at, one.ready_at) for one in retired), default=-math.inf)
    before_lease = "lost" if last.attempts else "lease"
    causes = ("replaced", before_lease, "sampling", "rewards", "held")
    came = (min(replaced_at, last.issued_at), last.leased_at, last.delivered_at, last.ready_at, now)
    marks = itertools.accumulate((min(at, now) for at in came), max, initial=since)
    seconds = {cause: end - start for cause, (start, end) in zip(causes, itertools.pairwise(marks), strict=True)}
    return LearnerWait(step, last.worker_id, dict.fromkeys(CAUSES, 0.0) | seconds)


def main_cause(waits: Iterable[LearnerWait]) -> str | None:
    """Return the cause of most of the waiting, or None if the learner did not wait."""
    seconds = dict.fromkeys(CAUSES, 0.0)
    for wait in waits:
        for cause, value in wait.seconds.items():
            seconds[cause] += value
    most = max(seconds, key=seconds.__getitem__)
    return most if seconds[most] > 0 else None


@dataclass(slots=True)
class UsualSeconds:
    """Seconds that the head usually spends on a group, as running means: of all groups that wasted nothing, and of
    those that machines of the owner sampled. None: of no group yet.
    """

    mean: float | None = None
    own: float | None = None

    @property
    def usual(self) -> float | None:
        """The mean of the owner's groups if there is one; otherwise of all."""
        return self.mean if self.own is None else self.own

    def add(self, seconds: float, is_own: bool) -> None:
        self.mean = _moved(self.mean, seconds)
        if is_own:
            self.own = _moved(self.own, seconds)


def _moved(mean: float | None, value: float) -> float:
    return value if mean is None else (1.0 - GROUP_SHARE) * mean + GROUP_SHARE * value


@dataclass(slots=True)
class Measurements:
    """Measurements of recent steps. `train_seconds`: training time, `flat_seconds` that of steps whose groups were all
    flat, which train nothing unless there is a teacher; `waits`: what the learner waited for before each
    step; `replaced`: groups that dynamic sampling retired. `broadcasts`: seconds from a publication until enough
    workers had installed it. `rewards`, `replay`: seconds of the reward functions, and of the environment's replay,
    for a group.
    """

    train_seconds: deque[float] = field(default_factory=lambda: deque(maxlen=NUM_REMEMBERED))
    flat_seconds: deque[float] = field(default_factory=lambda: deque(maxlen=NUM_REMEMBERED))
    broadcasts: deque[float] = field(default_factory=lambda: deque(maxlen=NUM_REMEMBERED))
    waits: deque[LearnerWait] = field(default_factory=lambda: deque(maxlen=NUM_REMEMBERED))
    replaced: deque[int] = field(default_factory=lambda: deque(maxlen=NUM_REMEMBERED))
    num_broadcasts: int = 0
    batch_seconds: float = 0.0
    lease_seconds: float = 0.0
    num_leases: int = 0
    rewards: UsualSeconds = field(default_factory=UsualSeconds)
    replay: UsualSeconds = field(default_factory=UsualSeconds)
    _training_since: float | None = None
    _spreading: tuple[SnapshotRef, float] | None = None
    _num_installed: int = 0

    def step_fed(self, wait: LearnerWait, now: float) -> None:
        self.waits.append(wait)
        self._training_since = now

    def step_trained(self, busy_seconds: float, now: float, num_replaced: int = 0, is_flat: bool = False) -> None:
        """Record a trained step. If the learner does not report its busy time, the time since it had all groups counts;
        a learner that starts with the first groups was busy for longer.
        """
        self.replaced.append(num_replaced)
        durations = self.flat_seconds if is_flat else self.train_seconds
        if busy_seconds > 0:
            durations.append(busy_seconds)
        elif self._training_since is not None:
            durations.append(now - self._training_since)
        self._training_since = None

    def published(self, ref: SnapshotRef, now: float) -> None:
        """Start to measure a broadcast. An unfinished one is recorded with its time so far, a lower bound. Publications
        before the first step are not measured, because workers are still starting.
        """
        if self._spreading is not None:
            self._broadcast_over(now)
        self._spreading, self._num_installed = (ref, now) if self._steps_seconds() else None, 0

    @property
    def is_spreading(self) -> bool:
        """Whether a snapshot is on its way to the workers; also while the first step is sampled, and workers join."""
        return self._spreading is not None or not self._steps_seconds()

    def installed(self, ref: SnapshotRef, num_active: int, now: float) -> None:
        """Record that one more worker has installed this snapshot."""
        if self._spreading is not None and ref == self._spreading[0]:
            self._num_installed += 1
            if self._num_installed >= INSTALLED_QUANTILE * num_active:
                self._broadcast_over(now)

    def fewer_active(self, num_active: int, now: float) -> None:
        """Check whether the broadcast is over now that fewer workers are active."""
        if self._spreading is not None and 0 < self._num_installed >= INSTALLED_QUANTILE * num_active:
            self._broadcast_over(now)

    def _broadcast_over(self, now: float) -> None:
        assert self._spreading is not None
        self.broadcasts.append(now - self._spreading[1])
        self.num_broadcasts += 1
        self._spreading = None

    def waits_for_workers(self) -> bool:
        """Whether the learner waited for workers in the last few steps."""
        last = list(self.waits)[-NUM_LATEST:]
        waited = math.fsum(wait.seconds[cause] for wait in last for cause in ("lease", "sampling", "lost"))
        return waited > LITTLE_WAIT * len(last) * (self.typical_train_seconds() or math.inf)

    def bottleneck(self) -> str | None:
        """Return what the learner mostly waits for (`CAUSES`), or None if it hardly waits."""
        waited = math.fsum(seconds for wait in self.waits for seconds in wait.seconds.values())
        trained = math.fsum(self.train_seconds) + math.fsum(self.flat_seconds)
        return main_cause(self.waits) if waited > LITTLE_WAIT * trained else None

    def typical_train_seconds(self) -> float | None:
        """Median seconds of a training step; None before the first. Flat steps count if there was no other."""
        durations = self._steps_seconds()
        return statistics.median(durations) if durations else None

    def _steps_seconds(self) -> deque[float]:
        return self.train_seconds or self.flat_seconds

    def typical_broadcast_seconds(self) -> float:
        """The quantile 1 / 1.1 of recent broadcasts, as in section 4.2; 0 while none is known."""
        durations = sorted(self.broadcasts)
        return durations[math.ceil(INSTALLED_QUANTILE * len(durations)) - 1] if durations else 0.0

    def lease_done(self, seconds: float) -> None:
        """Record that a lease gave a result after this many seconds."""
        self.num_leases += 1
        self.lease_seconds += (seconds - self.lease_seconds) * max(0.05, 1.0 / self.num_leases)

    def batch_done(self, seconds: float) -> None:
        """Record the seconds of a worker's batch; 0: its rate was not measured."""
        if seconds > 0:
            self.batch_seconds += (seconds - self.batch_seconds) * (0.1 if self.batch_seconds else 1.0)
