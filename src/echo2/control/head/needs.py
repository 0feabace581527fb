"""Computes what each policy of a head needs from the fleet, and which policy gets a worker next; `policies` moves it.

A policy *wants* workers while it has groups to lease. Its frontier is the step to be trained next: how long that takes
with the workers it has says who is needed most.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Collection, Iterable
from dataclasses import dataclass

from echo2.control.head import granting
from echo2.control.head.fleet import Worker
from echo2.control.head.state import PlannerState


@dataclass(frozen=True, slots=True)
class PostedWorker:
    """A worker that attends and stays with its policy; `since`: how long already, as a time. `rate` in rollouts a
    second: measured, or that of the others on average.
    """

    worker: Worker
    since: float
    rate: float

    def had_turn(self, state: PlannerState, now: float) -> bool:
        """Whether it has worked for its policy for a lease's length."""
        return now - self.since >= state.options.lease_seconds


@dataclass(frozen=True, slots=True)
class Need:
    """What one policy has and lacks. `alone_since`: since when no worker is of use to it; infinite where one is. One
    without weights is of use until its turn is over: then it may never have them.
    """

    policy: str
    state: PlannerState
    members: tuple[PostedWorker, ...]
    num_unleased: int
    frontier_rollouts: int
    alone_since: float

    @property
    def is_alone(self) -> bool:
        """Whether no worker is of use to it."""
        return self.alone_since < math.inf

    def seconds_left(self, without: PostedWorker | None = None) -> float:
        """Until the frontier step has its rollouts, with all its workers or all but one."""
        if self.is_alone:
            return math.inf
        rate = math.fsum(member.rate for member in self.members if member is not without)
        return self.frontier_rollouts / rate if rate else math.inf

    @property
    def urgency(self) -> tuple[bool, float, float]:
        """Sorts policies, the neediest first."""
        return not self.num_unleased, -self.seconds_left(), self.alone_since


def typical_rate(workers: Iterable[Worker]) -> float:
    """The mean of the rates that are known, in rollouts a second; 1 where none is."""
    known = [worker.rate for worker in workers if worker.rate]
    return statistics.mean(known) if known else 1.0


def num_unleased(state: PlannerState) -> int:
    """Groups that a worker with the newest snapshot could be leased now, evaluations' included."""
    if state.over is not None or state.paused is not None or not state.retained:
        return 0
    last = granting.last_step(state, state.retained[max(state.retained)])
    last = min(last, state.options.max_steps - 1)
    num_new = sum(max(0, granting.room(state, step)) for step in range(state.version, last + 1))
    num_queued = sum(record.state == "pending" and record.step <= last for record in state.groups)
    return num_new + num_queued + sum(len(round_.waiting) for round_ in state.evaluation.rounds.values())


def frontier_rollouts(state: PlannerState) -> int:
    """Rollouts that the step to be trained next still lacks."""
    step = state.version
    if state.over is not None or step >= state.options.max_steps:
        return 0
    num_out = sum(record.state in ("pending", "leased") for record in state.groups.of_step(step))
    return (max(0, granting.room(state, step)) + num_out) * state.options.group_size


def donor(mine: Need, others: Collection[Need], now: float) -> str | None:
    """The worker that is to work for this policy next; None: nobody, for now.

    - One that its policy has left idle for as long as the new weights take to arrive.
    - Else one of the policy whose frontier will be complete first, if that still holds without it: at once where this
      policy has no worker, else after its turn.
    - Where there are fewer workers than policies: whoever has had its turn.
    """
    patience = mine.state.gauge.typical_broadcast_seconds()
    found: list[tuple[bool, float, int, str]] = []
    for other in others:
        for member in other.members:
            worker, had_turn = member.worker, member.had_turn(other.state, now)
            is_idle = _is_left_idle(other, worker, now - patience)
            left = other.seconds_left(member)
            is_spare = left < mine.seconds_left() and (had_turn or mine.is_alone)
            if is_idle or is_spare or (had_turn and mine.is_alone):
                found.append((not is_idle, left, worker.samples, worker.worker_id))
    return min(found)[-1] if found else None


def _is_left_idle(need: Need, worker: Worker, since: float) -> bool:
    """Whether the worker has had no lease since then, and its policy has none for it."""
    return not need.num_unleased and worker.idle_since is not None and worker.idle_since <= since
