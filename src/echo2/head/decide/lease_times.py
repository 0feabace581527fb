"""Decides how long a lease lasts. A worker that is slower than `lease_seconds` must not lose its groups only to get the
same ones again.

granted    for `lease_seconds`, or for twice as long as the worker needs for all that it may hold, at its measured rate
extended   at its deadline, while its worker's rate is not known yet. Meanwhile a free worker samples the group, too
           (`granting`), so nobody waits for the slow one, and its work is not lost if it comes first.

Both are bounded, so that an engine that hangs loses its groups: `ends_at` says by what. A worker that is away, because
its connection closed or the head was restarted, keeps its leases until it counts as lost.
"""

from __future__ import annotations

from echo2.core.types import Lease, Wait
from echo2.head.decide.state import PlannerState
from echo2.head.fleet.decide.fleet import UNKNOWN, Worker
from echo2.head.strangers.decide import strangers

#: The longest lease, as a multiple of `lease_seconds`.
LEASE_STRETCH_MAX = 8.0
#: How long a lease lasts at least, as a multiple of the time that its worker needs for all groups that it may hold.
FULL_TIMES = 2.0
#: The longest lease of a stranger where no machine of the owner can work, as a multiple of `lease_seconds`; beside one,
#: a stranger's leases are never extended, whatever it did before.
STRANGER_STRETCH = 2.0


def granted_seconds(state: PlannerState, worker: Worker) -> float:
    """Return for how many seconds this worker gets a lease."""
    seconds = state.options.lease_seconds
    full_seconds = state.fleet.full_seconds(worker) if worker.is_own else 0.0
    return min(LEASE_STRETCH_MAX * seconds, max(seconds, FULL_TIMES * full_seconds))


def ends_at(state: PlannerState, worker: Worker, lease: Lease) -> float:
    """Return until when this worker may hold the lease."""
    at = lease.granted_at + _longest(state, worker)
    # After a restart of the head a worker may be a stranger until it is back.
    lost_at = state.fleet.silence.get(worker.worker_id) if worker.ticket == UNKNOWN else None
    return at if lost_at is None else min(at, lost_at)


def _longest(state: PlannerState, worker: Worker) -> float:
    seconds = state.options.lease_seconds
    if worker.is_own or worker.ticket == UNKNOWN:
        return granted_seconds(state, worker) if worker.speed.rate > 0 else LEASE_STRETCH_MAX * seconds
    return seconds * (1.0 if strangers.own_can_work(state) else STRANGER_STRETCH)


def extend(state: PlannerState, lease_id: int, now: float) -> bool:
    """Let a lease whose deadline has come go on as long as its worker may hold it. Return whether it does."""
    worker_id, lease = state.leases.get(lease_id) or ("", None)
    worker = state.fleet.get(worker_id)
    if lease is None or worker is None or (until := ends_at(state, worker, lease)) <= now:
        return False
    state.leases.prolong(lease_id, until)
    return True


def waits_for_slow(state: PlannerState, now: float) -> list[Wait]:
    """Return a wait for each worker that has held a lease for longer than `lease_seconds`."""
    oldest: dict[str, tuple[int, float]] = {}
    for worker_id, lease in state.leases.open_leases():
        if now - lease.granted_at > state.options.lease_seconds:
            count, since = oldest.get(worker_id, (0, lease.granted_at))
            oldest[worker_id] = count + 1, min(since, lease.granted_at)
    waits = []
    for worker_id, (count, since) in oldest.items():
        if (worker := state.fleet.get(worker_id)) is not None and not worker.detached:
            waits.append(Wait("head", worker_id, since, since + _longest(state, worker), _why(state, worker, count)))
    return waits


def _why(state: PlannerState, worker: Worker, count: int) -> str:
    full_seconds = state.fleet.full_seconds(worker)
    rate = f"it needs {full_seconds:.0f} s for all that it may hold" if full_seconds else "its rate is not known yet"
    return (
        f"it has held {count} group{'s' * (count > 1)} for longer than schedule.lease_seconds = "
        f"{state.options.lease_seconds:g} ({rate}), and may keep them for {_longest(state, worker):.0f} s. With fewer "
        "--slots a group is done sooner; a larger schedule.lease_seconds gives it more time"
    )
