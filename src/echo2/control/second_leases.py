"""A second lease on a group that is late, for a worker that has nothing to do: the first valid result counts.

Late: out for `second_lease_after` times as long as leases usually take. Both workers sample with the group's seed, so
that the quicker one does not mean the shorter answers.
"""

from __future__ import annotations

from echo2.control import commands as do
from echo2.control import granting
from echo2.control.fleet import Worker
from echo2.control.state import PlannerState
from echo2.types import GroupRef

#: Accepted results after which it is known how long leases usually take.
LEASES_KNOWN = 8


def grant_seconds(state: PlannerState, now: float) -> None:
    """Second leases on the late groups of the step that the learner waits for, the latest first."""
    for late_at, number, holder in _lates(state):
        worker = _idle_worker(state, holder) if late_at <= now else None
        record = state.groups.get(number)
        if worker is None or record is None:
            return
        lease = granting.new_lease(state, GroupRef("train", number), record.step, number, now)
        state.open_lease(worker.worker_id, lease)
        reason = f"group {number} is late at {holder}: whoever is first"
        state.emit(do.GrantLeases, reason, worker_id=worker.worker_id, leases=(lease,), worker_scores=worker.scores)
        state.settle(now)


def next_at(state: PlannerState) -> float | None:
    """When the next group is late, if somebody idle could have it."""
    lates = _lates(state)
    return lates[0][0] if lates and _idle_worker(state, lates[0][2]) is not None else None


def _lates(state: PlannerState) -> list[tuple[float, int, str]]:
    """When each group that one worker holds is late: (time, number, worker)."""
    factor, usual, step = state.options.second_lease_after, state.gauge.lease_seconds, state.wanted_step
    if not factor or step is None or state.step_ended or not state.fleet.num_free:
        return []
    if state.gauge.num_leases < LEASES_KNOWN or state.options.deterministic:
        return []
    found = []
    for record in state.groups.of_step(step):
        held = state.leases.of_group(GroupRef("train", record.number)) if record.state == "leased" else ()
        opened = state.leases.get(held[0]) if len(held) == 1 else None
        if opened is not None:
            worker_id, lease = opened
            found.append((lease.deadline - lease.seconds + factor * usual, record.number, worker_id))
    return sorted(found)


def _idle_worker(state: PlannerState, holder: str) -> Worker | None:
    """A worker without leases that may sample this step, and is not the one that is late."""
    step = state.wanted_step
    for ref in reversed(state.published.values()):
        ranking = state.fleet.rankings(0).get(ref)
        first = ranking.first() if ranking is not None else None
        worker = None if first is None else state.fleet.get(first[2])
        if worker is not None and worker.worker_id != holder and granting.last_step(state, worker) >= (step or 0):
            return worker
    return None
