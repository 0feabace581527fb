"""Decides how long a lease lasts. A worker that is slower than `lease_seconds` must not lose its groups only to get the
same ones again.

granted    for `lease_seconds`, or for twice as long as the worker needs for all that it may hold, at its measured rate
extended   at its deadline, while its worker is connected and its rate is not known yet. Meanwhile a free
           worker samples the group, too (`granting`), so nobody waits for the slow one, and its work is not lost
           if it comes first.

Both are bounded, so that an engine that hangs loses its groups: `longest` says by what.
"""

from __future__ import annotations

from echo2.core.types import Wait
from echo2.head.decide.groups import LEASE_STRETCH_MAX, duration
from echo2.head.decide.state import PlannerState
from echo2.head.fleet.decide.fleet import Worker
from echo2.head.strangers.decide import strangers

#: The longest lease of a stranger where no machine of the owner can work, as a multiple of `lease_seconds`; beside one,
#: a stranger's leases are never extended, whatever it did before.
STRANGER_STRETCH = 2.0


def longest(state: PlannerState, worker: Worker) -> float:
    """Return for how many seconds this worker may hold a lease."""
    seconds = state.options.lease_seconds
    if not worker.is_own:
        return seconds * (1.0 if strangers.own_can_work(state) else STRANGER_STRETCH)
    full_seconds = state.fleet.full_seconds(worker)
    return duration(seconds, full_seconds) if full_seconds else LEASE_STRETCH_MAX * seconds


def extend(state: PlannerState, lease_id: int, now: float) -> bool:
    """Let a lease whose deadline has come go on as long as its worker may hold it. Return whether it does."""
    worker_id, lease = state.leases.get(lease_id) or ("", None)
    worker = state.fleet.get(worker_id)
    if lease is None or worker is None or worker.detached:
        return False
    ends_at = lease.deadline - lease.seconds + longest(state, worker)
    if ends_at <= now:
        return False
    state.leases.extend(lease_id, ends_at)
    return True


def waits_for_slow(state: PlannerState, now: float) -> list[Wait]:
    """Return a wait for each worker that has held a lease for longer than `lease_seconds`."""
    oldest: dict[str, tuple[int, float]] = {}
    for worker_id, lease in state.leases.open_leases():
        granted_at = lease.deadline - lease.seconds
        if now - granted_at > state.options.lease_seconds:
            count, since = oldest.get(worker_id, (0, granted_at))
            oldest[worker_id] = count + 1, min(since, granted_at)
    waits = []
    for worker_id, (count, since) in oldest.items():
        if (worker := state.fleet.get(worker_id)) is not None:
            waits.append(Wait("head", worker_id, since, since + longest(state, worker), _why(state, worker, count)))
    return waits


def _why(state: PlannerState, worker: Worker, count: int) -> str:
    full_seconds = state.fleet.full_seconds(worker)
    rate = f"it needs {full_seconds:.0f} s for all that it may hold" if full_seconds else "its rate is not known yet"
    return (
        f"it has held {count} group{'s' * (count > 1)} for longer than schedule.lease_seconds = "
        f"{state.options.lease_seconds:g} ({rate}), and may keep them for {longest(state, worker):.0f} s. With fewer "
        "--slots a group is done sooner; a larger schedule.lease_seconds gives it more time"
    )
