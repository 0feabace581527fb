"""Computes what each policy of a head needs from the fleet, and which worker it gets next; `policies` moves the worker.

A policy *wants* workers while it has groups to lease. Its frontier is the step to be trained next. The policy whose
frontier would take longest with its current workers is the neediest.
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
    """A connected worker that stays with its policy; `since`: the time at which it started to work for it. `rate` in
    rollouts per second: measured, or the mean of the other workers.
    """

    worker: Worker
    since: float
    rate: float

    def had_turn(self, state: PlannerState, now: float) -> bool:
        """Whether the worker has worked for its policy for at least the duration of a lease."""
        return now - self.since >= state.options.lease_seconds


@dataclass(frozen=True, slots=True)
class Need:
    """What one policy has and lacks. `alone_since`: since when it has no useful worker; infinite if it has one. A
    worker without weights counts as useful until its turn is over; after that it may never get them.
    """

    policy: str
    state: PlannerState
    members: tuple[PostedWorker, ...]
    num_unleased: int
    frontier_rollouts: int
    alone_since: float

    @property
    def is_alone(self) -> bool:
        """Whether the policy has no useful worker."""
        return self.alone_since < math.inf

    def seconds_left(self, without: PostedWorker | None = None) -> float:
        """Return the seconds until the frontier step has its rollouts, with all workers or all but `without`."""
        if self.is_alone:
            return math.inf
        rate = math.fsum(member.rate for member in self.members if member is not without)
        return self.frontier_rollouts / rate if rate else math.inf

    @property
    def urgency(self) -> tuple[bool, float, float]:
        """Sort key of policies, the neediest first."""
        return not self.num_unleased, -self.seconds_left(), self.alone_since


def typical_rate(workers: Iterable[Worker]) -> float:
    """Return the mean of the known rates in rollouts per second; 1 if none is known."""
    known = [worker.rate for worker in workers if worker.rate]
    return statistics.mean(known) if known else 1.0


def num_unleased(state: PlannerState) -> int:
    """Return how many groups could be leased now to a worker with the newest snapshot, including evaluations."""
    if state.over is not None or state.paused is not None or not state.retained:
        return 0
    last = granting.last_step(state, state.retained[max(state.retained)])
    last = min(last, state.options.max_steps - 1)
    num_new = sum(max(0, granting.room(state, step)) for step in range(state.version, last + 1))
    num_queued = sum(record.state == "pending" and record.step <= last for record in state.groups)
    return num_new + num_queued + sum(len(round_.waiting) for round_ in state.evaluation.rounds.values())


def frontier_rollouts(state: PlannerState) -> int:
    """Return how many rollouts the next step to be trained still lacks."""
    step = state.version
    if state.over is not None or step >= state.options.max_steps:
        return 0
    num_out = sum(record.state in ("pending", "leased") for record in state.groups.of_step(step))
    return (max(0, granting.room(state, step)) + num_out) * state.options.group_size


def donor(mine: Need, others: Collection[Need], now: float) -> str | None:
    """Return the worker that shall work for this policy next; None: no worker, for now.

    - A worker that its policy has left idle for as long as the new weights take to arrive.
    - Else a worker of the policy whose frontier will be complete first, if that policy is still ahead of this one
      without the worker: at once if this policy has no useful worker, otherwise after the worker's turn.
    - If this policy has no useful worker (as when there are fewer workers than policies): any worker after its turn.
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
    """Whether the worker has had no lease since `since`, and its policy has none for it."""
    return not need.num_unleased and worker.idle_since is not None and worker.idle_since <= since
