"""Forecasts a run with given workers: walks through every batch, in milliseconds and without randomness.

`formulas.py` treats rollouts as a fluid. This module is discrete: whole batches, groups of different durations, steps
that wait for their last group, each worker's own version. It follows the rules of `granting.py` (earliest step first,
no version older than the bound) for workers that never fail; durations are log-normal, drawn by a hash.
"""

from __future__ import annotations

import bisect
import heapq
import itertools
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from statistics import NormalDist

from echo2.core.decide.seeds import mix
from echo2.core.errors import UserError
from echo2.head.fleet.decide.formulas import Demand

#: Steps that are simulated at most, and at least; all later steps are assumed to take as long as their second half.
MAX_STEPS, LEAST_STEPS = 120, 24
#: Groups and twice the machines, times steps, above which fewer steps are simulated. Above twice as many, run and fleet
#: are scaled down together: with so many of both, chance averages out.
WORK = 4096
#: In place of a step: groups of an evaluation.
EVALUATION = -1
_FACTOR_DRAWS = 2000
_NORMAL = NormalDist()


@dataclass(frozen=True, slots=True)
class WorkerKind:
    """`count` equal workers. `rate`: rollouts per second of one worker that never pauses between batches. `spread`:
    standard deviation of the logarithm of a group's duration. `fixed_share`: of a full batch's seconds, those that a
    batch with fewer groups takes, too.
    """

    rate: float
    count: int = 1
    groups_per_batch: int = 8
    spread: float = 0.0
    fixed_share: float = 1.0


@dataclass(frozen=True, slots=True)
class OneMachine:
    """Learner and workers compute on the cores of one machine, each on one thread: their seconds are of a core that
    they have alone, and all slow down alike while there are more of them than cores. `first_seconds`: until workers
    have the first version; `num_parts`: in which the learner trains on a step's groups as they arrive; `eval_groups`:
    sampled before a step's groups with version 0 and each `eval_every` steps (0: not again).
    """

    cores: int
    first_seconds: float = 0.0
    num_parts: int = 1
    eval_groups: int = 0
    eval_every: int = 0


@dataclass(frozen=True, slots=True)
class Prediction:
    """`idle_ratio`: of the whole run, including its cold start; `steady_idle_ratio`: in the steady state. `staleness`:
    age of a group's oldest token, in versions -> share of groups.
    """

    idle_ratio: float
    steady_idle_ratio: float
    run_seconds: float
    step_seconds: float
    staleness: dict[int, float]

    @property
    def mean_staleness(self) -> float:
        """Mean age of the oldest token of a group, in versions."""
        return sum(age * share for age, share in self.staleness.items())

    @property
    def max_staleness(self) -> int:
        """Largest age of the oldest token of a group, in versions."""
        return max(self.staleness, default=0)


@dataclass(frozen=True, slots=True)
class ScoringDelays:
    """Seconds from a group's delivery to its rewards, ascending, as they were measured: of a judge that hangs now and
    then, the last ones are long. A walk draws one for each group. `groups`: how many groups of the run one of a run
    that is scaled down stands for, of which the slowest counts."""

    seconds: tuple[float, ...] = ()
    groups: float = 1.0

    def at(self, share: float) -> float:
        """Return the delay below which this share of them lies."""
        place = int(share ** (1.0 / self.groups) * len(self.seconds))
        return self.seconds[min(place, len(self.seconds) - 1)]


def forecast(
    demand: Demand,
    kinds: Sequence[WorkerKind],
    steps: int,
    seed: int = 0,
    machine: OneMachine | None = None,
    delays: ScoringDelays | None = None,
) -> Prediction:
    """Predict a run of so many steps. `machine`: the one on which all of it happens; None: each process has its own.
    `delays`: of rewards; None: there are none.

    Raises:
        UserError: there is no worker, or one without a rate.
    """
    if not kinds or any(kind.rate <= 0 or kind.count < 1 or kind.groups_per_batch < 1 for kind in kinds):
        raise UserError("A forecast needs workers, each with a positive rate.")
    size = demand.groups_per_step + 2 * sum(kind.count for kind in kinds)
    least = max(LEAST_STEPS, 6 * demand.publish_every)
    num_walked = min(steps, max(least, min(MAX_STEPS, WORK // size)))
    if machine is None:
        factor = num_walked * size / (2 * WORK)
        demand, kinds = _scaled(demand, kinds, factor)
        delays = replace(delays, groups=max(1.0, factor)) if delays else None
    walk = _Walk(demand, kinds, steps, seed, machine, delays)
    for step in range(num_walked):
        walk.step(step)
    ends, half = walk.ended, num_walked // 2
    trained = [demand.train_seconds] * num_walked
    if machine is not None:
        ends, trained = walk.shared(machine.cores)
    steady_seconds = (ends[-1] - ends[half - 1]) / (num_walked - half) if half else ends[-1]
    steady_trained = sum(trained[half:]) / (num_walked - half)
    run_seconds = ends[-1] + (steps - num_walked) * steady_seconds
    run_trained = sum(trained) + (steps - num_walked) * steady_trained
    total = sum(walk.ages.values())
    return Prediction(
        idle_ratio=max(0.0, 1 - run_trained / run_seconds),
        steady_idle_ratio=max(0.0, 1 - steady_trained / steady_seconds),
        run_seconds=run_seconds,
        step_seconds=steady_seconds,
        staleness={age: walk.ages[age] / total for age in sorted(walk.ages)},
    )


def _scaled(demand: Demand, kinds: Sequence[WorkerKind], factor: float) -> tuple[Demand, Sequence[WorkerKind]]:
    """Return a run with as many times fewer groups and machines, and the same rate for a group."""
    if factor <= 1:
        return demand, kinds
    groups = max(1, round(demand.groups_per_step / factor))
    rate = sum(kind.count * kind.rate for kind in kinds) * groups / demand.groups_per_step
    fewer = [replace(kind, count=count) for kind in kinds if (count := round(kind.count / factor))]
    fewer = fewer or [replace(max(kinds, key=lambda kind: kind.count * kind.rate), count=1)]
    rest = rate / sum(kind.count * kind.rate for kind in fewer)
    return replace(demand, groups_per_step=groups), [replace(kind, rate=kind.rate * rest) for kind in fewer]


@dataclass(slots=True)
class _Worker:
    """`version`: the installed version; -1: none yet. `next_batch`: waits for the running one, as step -> number of
    groups. `parked_at`: the time since which it has had nothing to sample; `is_woken`: its wake-up is scheduled.
    """

    kind: WorkerKind
    median_seconds: float
    version: int = -1
    next_batch: dict[int, int] = field(default_factory=dict)
    parked_at: float | None = None
    is_woken: bool = False


class _Walk:
    """State of the simulation. `ended[t]`: time at which the training of step t ends. `queue`: workers by the time at
    which their engine becomes free. `arrived`: times at which groups of a step come; `trained`: the learner's times for
    the parts of each step, and `sampled` the workers'; `evals`: groups of evaluations to come, by version.
    """

    def __init__(
        self,
        demand: Demand,
        kinds: Sequence[WorkerKind],
        steps: int,
        seed: int,
        machine: OneMachine | None = None,
        delays: ScoringDelays | None = None,
    ) -> None:
        self.delays = delays
        self.demand, self.steps, self.seed, self.travel_seconds = demand, steps, seed, demand.broadcast_seconds
        self.machine = machine or OneMachine(0, demand.broadcast_seconds)
        self.evals: dict[int, int] = {0: self.machine.eval_groups} if self.machine.eval_groups else {}
        self.arrived: dict[int, list[float]] = {}
        self.trained: list[list[tuple[float, float]]] = []
        self.sampled: list[tuple[float, float]] = []
        self.ended: list[float] = []
        self.ages: Counter[int] = Counter()
        self.unstarted: dict[int, int] = {}
        self.frontier, self.unissued = 0, demand.groups_per_step
        self.num_draws = 0
        self.workers: list[_Worker] = []
        for kind in kinds:
            batch = kind.groups_per_batch
            seconds = batch * demand.group_size / kind.rate / longest_of(batch, kind.spread)
            self.workers.extend(_Worker(kind, seconds) for _ in range(kind.count))
        self.active_groups = sum(worker.kind.groups_per_batch for worker in self.workers)
        self.queue: list[tuple[float, int, int]] = []
        for number in range(len(self.workers)):
            self._push(0.0, number)

    def step(self, step: int) -> None:
        """Advance the workers until every group of the step has started, which fixes when its training ends."""
        while self.unstarted.get(step, self.demand.groups_per_step) > 0:
            at, _, number = heapq.heappop(self.queue)
            self._free(self.workers[number], number, at)
        self._train(sorted(self.arrived.pop(step)))
        if self.machine.eval_groups and self.machine.eval_every and (step + 1) % self.machine.eval_every == 0:
            self.evals[step + 1] = self.machine.eval_groups
        if (step + 1) % self.demand.publish_every == 0:
            for number, worker in enumerate(self.workers):
                if worker.parked_at is not None and not worker.is_woken:
                    self._wake(worker, number)

    def _train(self, arrived: Sequence[float]) -> None:
        """Train a step whose groups come at these times, part by part."""
        end, num_parts = self.ended[-1] if self.ended else 0.0, self.machine.num_parts
        parts = list[tuple[float, float]]()
        for part in range(num_parts):
            begin = max(end, arrived[math.ceil((part + 1) * len(arrived) / num_parts) - 1])
            end = begin + self.demand.train_seconds / num_parts
            parts.append((begin, end))
        self.trained.append(parts)
        self.ended.append(end)

    def shared(self, cores: int) -> tuple[list[float], list[float]]:
        """Return the ends of the steps, and the seconds that each was trained, where all compute on so many cores. All
        that compute at a time slow down alike, so the order of events stays, and only time passes more slowly.
        """
        busy = [*itertools.chain.from_iterable(self.trained), *self.sampled]
        changes = sorted([(begin, 1) for begin, _ in busy] + [(end, -1) for _, end in busy])
        instants, passed, num_busy = [0.0], [0.0], 0
        for at, change in changes:
            passed.append(passed[-1] + (at - instants[-1]) * max(1.0, num_busy / cores))
            instants.append(at)
            num_busy += change

        def time_of(instant: float) -> float:
            return passed[bisect.bisect_left(instants, instant)]

        ends = [time_of(end) for end in self.ended]
        return ends, [sum(time_of(end) - time_of(begin) for begin, end in parts) for parts in self.trained]

    def _push(self, at: float, number: int) -> None:
        """Queue a worker. Workers that become free at the same time are served in pseudo-random order."""
        self.num_draws += 1
        heapq.heappush(self.queue, (at, mix(mix(self.seed) ^ self.num_draws), number))

    # ---- a worker ----------------------------------------------------------------------------------------------------

    def _free(self, worker: _Worker, number: int, at: float) -> None:
        """Handle a free engine: install an arrived version, start the held or a new batch, or wait for a version."""
        worker.version = max(worker.version, self._arrived(worker, at))
        batch = worker.next_batch or self._issue(worker)
        worker.next_batch = {}
        worker.parked_at, worker.is_woken = (None if batch else at), False
        if not batch:
            self._wake(worker, number)
            return
        self._push(self._run(worker, batch, at), number)
        if self._is_plenty(worker):
            worker.next_batch = self._issue(worker)

    def _wake(self, worker: _Worker, number: int) -> None:
        """Schedule the worker for the arrival of the version that the next step needs, if that time is known."""
        assert worker.parked_at is not None
        needed = max(self._needed(self.frontier), worker.version + 1)
        needed += -needed % self.demand.publish_every
        if self.frontier < self.steps and needed <= len(self.ended):
            worker.is_woken = True
            self._push(max(worker.parked_at, self._arrives(needed)), number)

    def _issue(self, worker: _Worker) -> dict[int, int]:
        """Return a batch of the earliest groups that the worker's version may sample, as step -> number of groups."""
        batch: dict[int, int] = {}
        room = worker.kind.groups_per_batch
        for version in [one for one in self.evals if one <= worker.version]:
            count = min(room, self.evals[version])
            batch[EVALUATION] = batch.get(EVALUATION, 0) + count
            room, self.evals[version] = room - count, self.evals[version] - count
            if not self.evals[version]:
                del self.evals[version]
        while room > 0 and self.frontier < self.steps and self._needed(self.frontier) <= worker.version:
            count = min(room, self.unissued)
            batch[self.frontier] = count
            room -= count
            self.unissued -= count
            if self.unissued == 0:
                self.frontier, self.unissued = self.frontier + 1, self.demand.groups_per_step
        return batch

    def _is_plenty(self, worker: _Worker) -> bool:
        """As `granting._has_work`: a worker may hold a second batch only while there is a batch for every worker."""
        last = min(worker.version + self.demand.max_staleness, self.steps - 1)
        num_unissued = (last - self.frontier) * self.demand.groups_per_step + self.unissued
        return len(self.workers) == 1 or num_unissued >= self.active_groups

    def _run(self, worker: _Worker, batch: dict[int, int], start: float) -> float:
        """Run a batch and return the time at which its last group is done."""
        longest, kind = start, worker.kind
        filled = kind.fixed_share + (1 - kind.fixed_share) * sum(batch.values()) / kind.groups_per_batch
        for step, count in batch.items():
            for _ in range(count):
                done = self._thawed(start, filled * worker.median_seconds * self._draw(kind.spread))
                longest = max(longest, done)
                if step != EVALUATION:
                    self.arrived.setdefault(step, []).append(done + self._delay())
            if step == EVALUATION:
                continue
            self.unstarted[step] = self.unstarted.get(step, self.demand.groups_per_step) - count
            self.ages[step - worker.version] += count
        self.sampled.append((start, longest))
        return longest

    def _thawed(self, start: float, seconds: float) -> float:
        """Return when work of `seconds` is done, given that engines pause during a broadcast unless it overlaps."""
        end, frozen = start + seconds, self.travel_seconds
        if self.demand.overlaps or frozen <= 0:
            return end
        kappa, newest = self.demand.publish_every, len(self.ended) - len(self.ended) % self.demand.publish_every
        first = newest
        while first > 0 and self._published(first) + frozen > start:
            first -= kappa
        stood_until = start
        for version in range(first + kappa, newest + 1, kappa):
            begins, ends = max(self._published(version), stood_until), self._published(version) + frozen
            if begins >= end:
                break
            end += max(0.0, ends - begins)
            stood_until = max(stood_until, ends)
        return end

    # ---- versions ----------------------------------------------------------------------------------------------------

    def _needed(self, step: int) -> int:
        """Return the oldest published version that may sample this step."""
        kappa = self.demand.publish_every
        return max(0, kappa * -(-(step - self.demand.max_staleness) // kappa))

    def _arrived(self, worker: _Worker, at: float) -> int:
        """Return the newest known version that has fully arrived at the worker by time `at`."""
        kappa, version = self.demand.publish_every, len(self.ended) - len(self.ended) % self.demand.publish_every
        while version > worker.version and version > 0 and self._arrives(version) > at + 1e-9:
            version -= kappa
        return max(version, worker.version) if version > 0 or at + 1e-9 >= self._arrives(0) else worker.version

    def _arrives(self, version: int) -> float:
        return self._published(version) + (self.travel_seconds if version else self.machine.first_seconds)

    def _published(self, version: int) -> float:
        return self.ended[version - 1] if version > 0 else 0.0

    def _delay(self) -> float:
        """Draw the seconds until a delivered group has its rewards."""
        if self.delays is None or not self.delays.seconds:
            return 0.0
        self.num_draws += 1
        return self.delays.at(uniform(self.seed, self.num_draws))

    def _draw(self, spread: float) -> float:
        """Draw a log-normal factor with median 1."""
        if spread <= 0:
            return 1.0
        self.num_draws += 1
        return math.exp(spread * normal(self.seed, self.num_draws))


def normal(seed: int, number: int) -> float:
    """Return the `number`-th value of a stream of standard normal values."""
    return _NORMAL.inv_cdf(uniform(seed, number))


def uniform(seed: int, number: int) -> float:
    """Return the `number`-th value of a stream of values between 0 and 1."""
    return ((mix(mix(seed) ^ number) >> 11) + 0.5) / 2**53


@lru_cache(maxsize=256)
def longest_of(count: int, spread: float) -> float:
    """Mean of the longest of `count` log-normal durations with median 1: a batch ends with its slowest group."""
    if spread <= 0:
        return 1.0
    num_draws = max(1, _FACTOR_DRAWS // count)
    total = 0.0
    for draw in range(num_draws):
        # The largest of n uniform values is distributed as the n-th root of one.
        share = ((draw + 0.5) / num_draws) ** (1 / count)
        total += math.exp(spread * _NORMAL.inv_cdf(share))
    return total / num_draws
