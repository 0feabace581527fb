"""May a delivered result be accepted? If not: one word that is counted, and the reason for people."""

from __future__ import annotations

from echo2.control.head import events as ev
from echo2.control.head import staleness
from echo2.control.head.state import PlannerState
from echo2.types import GroupRef


def judge(state: PlannerState, event: ev.GroupDelivered) -> tuple[str, str] | None:
    """None if the result is the first valid one of an open lease, else (refusal, reason).

    late: the lease is over, or the weights it was sampled with count no more.  duplicate: the group has a result
    already.  malformed: the result is not what was leased.  stale: a token is older than the lease allowed.
    """
    done = has_result(state, event.group)
    held = state.leases.get(event.lease_id)
    if held is None:
        if done:
            return "duplicate", f"{event.group} has a result already"
        return "late", f"lease {event.lease_id} is over"
    worker_id, lease = held
    if worker_id != event.worker_id:
        return "malformed", f"lease {event.lease_id} is held by {worker_id}"
    if lease.group != event.group or lease.num_samples != event.num_samples:
        return (
            "malformed",
            f"leased {lease.num_samples} samples of {lease.group}, got {event.num_samples} of {event.group}",
        )
    if done:
        return "duplicate", f"{event.group} has a result already"
    if event.newest_version > state.highest_version and state.lineage > 1:
        # The head was restarted since the learner fell back, and does not know how far the run had come before.
        return (
            "late",
            f"sampled with version {event.newest_version} of before the fall-back; now {state.version} is newest",
        )
    if event.newest_version > state.highest_version:
        return "malformed", f"tokens of version {event.newest_version}; there is none after {state.highest_version}"
    if event.oldest_version < lease.min_version:
        age = staleness.staleness(lease.step, event.oldest_version)
        return "stale", f"its oldest token would be {age} versions old at step {lease.step}"
    if lease.exact_version is not None and event.newest_version != lease.exact_version:
        return "malformed", f"sampled with version {event.newest_version}, leased for exactly {lease.exact_version}"
    return None


def has_result(state: PlannerState, group: GroupRef) -> bool:
    """Whether nothing more is expected for this group: it has a valid result, or it was given up."""
    if group.kind == "eval":
        place = state.evaluation.locate(group)
        return place is None or place[1] in place[0].done
    record = state.groups.get(group.number)
    return record is None or record.state not in ("pending", "leased")
