"""Grants an idle worker a second lease on a group that is late. The first valid result counts.

Late: out for `LATE_AFTER` times as long as leases usually take. Deterministic mode, where a batch's shape is fixed, has
none.
Both workers sample with the group's seed, so that the quicker one does not mean the shorter answers.
"""

from __future__ import annotations

from echo2.control.head import commands as do
from echo2.control.head import granting, strangers
from echo2.control.head.fleet import Worker
from echo2.control.head.state import PlannerState
from echo2.types import Lease

#: Accepted results after which it is known how long leases usually take.
LEASES_KNOWN = 8
#: In usual times from lease to result. Simulated (docs/overlap.md): at 1.5 equal machines sample one group in seven
#: twice, at 3 stragglers cost more time.
LATE_AFTER = 2.0


def grant_backup_leases(state: PlannerState, now: float) -> None:
    """Second leases on the late groups of the step that the learner waits for, the latest first."""
    for late_at, late, holder in _lates(state):
        worker = _idle_worker(state, holder) if late_at <= now else None
        record = state.groups.get(late.group.number)
        if worker is None or record is None:
            return
        lease = granting.lease_of(state, record, now)
        state.open_lease(worker.worker_id, lease)
        reason = f"group {late.group.number} is late at {holder}: whoever is first"
        state.emit(do.GrantLeases, reason, worker_id=worker.worker_id, leases=(lease,))
        state.settle(now)


def next_at(state: PlannerState) -> float | None:
    """When the next group becomes late, if an idle worker could take it."""
    lates = _lates(state)
    return lates[0][0] if lates and _idle_worker(state, lates[0][2]) is not None else None


def _lates(state: PlannerState) -> list[tuple[float, Lease, str]]:
    """When each lease that is the last on its group becomes late: (time, lease, worker)."""
    usual, step = state.gauge.lease_seconds, state.wanted_step
    if step is None or state.step_ended or not state.fleet.num_free:
        return []
    if state.gauge.num_leases < LEASES_KNOWN or state.options.deterministic:
        return []
    found = []
    for record in state.groups.of_step(step):
        held = state.leases.of_group(state.train_group(record.number)) if record.state in ("pending", "leased") else ()
        for worker_id, lease in filter(None, map(state.leases.get, held)):
            if lease.lease_id == max(held):
                found.append((lease.deadline - lease.seconds + LATE_AFTER * usual, lease, worker_id))
    return sorted(found, key=lambda late: (late[0], late[1].lease_id))


def _idle_worker(state: PlannerState, holder: str) -> Worker | None:
    """An idle worker that may sample this step, other than the late worker and those of its ticket; preferably the
    owner's, and with a newer snapshot.
    """
    step, late = state.wanted_step or 0, state.fleet.get(holder)
    ticket = "" if late is None else late.ticket
    kinds = [kind for kind in state.fleet.rankings(0) if granting.is_published(state, kind[0])]
    for kind in sorted(kinds, key=lambda kind: (kind[1] != "", -kind[0].version if kind[0] is not None else 0)):
        first = state.fleet.rankings(0)[kind].first()
        worker = None if first is None else state.fleet.get(first[-1])
        if worker is None or worker.worker_id == holder or (kind[1] and kind[1] == ticket):
            continue
        may = strangers.has_credit(state, worker) and strangers.may_supply(state, worker, step)
        if may and granting.last_step(state, worker.installed) >= step:
            return worker
    return None
