"""Grants an idle worker a second lease on a group that is late. The first valid result counts.

A group is late when its lease has run `LATE_AFTER` times as long as leases usually take, or for `lease_seconds` while
that is not known. Deterministic mode, where a batch's shape is fixed, has no second leases. Both workers sample with
the group's seed, so that taking the first result does not favour shorter completions.
"""

from __future__ import annotations

from echo2.control.head import commands as do
from echo2.control.head import granting, strangers
from echo2.control.head.fleet import Worker
from echo2.control.head.state import PlannerState
from echo2.types import Lease

#: Accepted results after which the usual duration of a lease counts as known.
LEASES_KNOWN = 8
#: As a multiple of the usual time from lease to result. In simulations (docs/overlap.md), equal machines sample one
#: group in seven twice at 1.5, and stragglers cost more time at 3.
LATE_AFTER = 2.0


def grant_backup_leases(state: PlannerState, now: float) -> None:
    """Grant second leases on the late groups of the step that the learner waits for, the latest first."""
    for late_at, late, holder in _lates(state):
        worker = _idle_worker(state, holder) if late_at <= now else None
        record = state.groups.get(late.group.number)
        if worker is None or record is None:
            return
        lease = granting.lease_of(state, record, now, worker)
        state.open_lease(worker.worker_id, lease)
        reason = f"group {late.group.number} is late at {holder}: the first result counts"
        state.emit(do.GrantLeases, reason, worker_id=worker.worker_id, leases=(lease,))
        state.settle(now)


def next_at(state: PlannerState) -> float | None:
    """Return when the next group becomes late, if an idle worker could take it."""
    lates = _lates(state)
    return lates[0][0] if lates and _idle_worker(state, lates[0][2]) is not None else None


def _lates(state: PlannerState) -> list[tuple[float, Lease, str]]:
    """Return when the last lease on each missing group becomes late: (time, lease, worker), sorted by time."""
    usual, step = state.gauge.lease_seconds, state.wanted_step
    if step is None or state.step_ended or not state.fleet.num_free:
        return []
    if state.options.deterministic:
        return []
    after = LATE_AFTER * usual if state.gauge.num_leases >= LEASES_KNOWN else state.options.lease_seconds
    found = []
    for record in state.groups.of_step(step):
        held = state.leases.of_group(state.train_group(record.number)) if record.state in ("pending", "leased") else ()
        for worker_id, lease in filter(None, map(state.leases.get, held)):
            if lease.lease_id == max(held):
                found.append((lease.deadline - lease.seconds + after, lease, worker_id))
    return sorted(found, key=lambda late: (late[0], late[1].lease_id))


def _idle_worker(state: PlannerState, holder: str) -> Worker | None:
    """Return an idle worker that may sample this step, other than the late worker and those of its ticket; preferably
    the owner's, and with a newer snapshot.
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
