"""Decides whether a delivered result is accepted. A refusal is one word, which is counted, and a readable reason."""

from __future__ import annotations

from echo2.control.head import events as ev
from echo2.control.head import staleness
from echo2.control.head.state import PlannerState
from echo2.types import GroupRef, Lease


def judge(state: PlannerState, event: ev.GroupDelivered) -> tuple[str, str] | None:
    """Return None if the result is the first valid one of an open lease; otherwise (refusal, reason).

    late: the lease is over, or its weights are no longer valid.  duplicate: the group has a result already.
    malformed: the result does not match the lease, or names weights that never existed.  stale: a token is older than
    the lease allowed.
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
    if event.oldest_version < lease.min_version:
        age = staleness.staleness(lease.step, event.oldest_version)
        return "stale", f"its oldest token would be {age} versions old at step {lease.step}"
    if (unknown := _unknown_weights(state, event, lease)) is not None:
        return "late" if is_from_before(state, lease) else "malformed", unknown
    if lease.exact_version is not None and event.newest_version != lease.exact_version:
        return "malformed", f"sampled with version {event.newest_version}, leased for exactly {lease.exact_version}"
    return None


def is_from_before(state: PlannerState, lease: Lease) -> bool:
    """Whether a lease was granted before the learner fell back or a new head took over, or up to a lease later: its
    worker may not have heard.
    """
    return lease.deadline - lease.seconds < state.took_over_at + state.options.lease_seconds


def _unknown_weights(state: PlannerState, event: ev.GroupDelivered, lease: Lease) -> str | None:
    """Return why the named weights are invalid or can't be checked, or None. They are invalid if a version is above the
    step's own, or if a stranger names one below what it had installed: versions never fall. They can't be checked if a
    stranger names a version that is not published in its lineage.

    Honest workers send such a group after the learner fell back, or after a new head took over that does not know every
    earlier version: if the lease was granted before that, or shortly after. Machines of the owner are trusted, and in
    deterministic runs the weights are the same in every lineage.
    """
    if event.newest_version > lease.step:
        return f"tokens of version {event.newest_version}; step {lease.step} trains version {lease.step}"
    worker = state.fleet.get(event.worker_id)
    if state.options.deterministic or (worker is not None and worker.is_own):
        return None
    had = state.leases.installed_at.get(event.lease_id)
    if had is not None and had.lineage == event.lineage and event.oldest_version < had.version:
        return f"tokens of version {event.oldest_version}; the worker had version {had.version} when it got the lease"
    for version in (event.oldest_version, *event.versions_between, event.newest_version):
        ref = state.published.get(version)
        if ref is None or ref.lineage != event.lineage:
            named = f"version {version} of lineage {event.lineage}"
            return f"sampled with {named}, which is not published: nobody can check it"
    return None


def has_result(state: PlannerState, group: GroupRef) -> bool:
    """Whether no further result is expected for this group: it has a valid one, or was given up."""
    if group.kind == "eval":
        place = state.evaluation.locate(group)
        return place is None or place[1] in place[0].done
    record = state.groups.get(group.number)
    return record is None or record.state not in ("pending", "leased")
