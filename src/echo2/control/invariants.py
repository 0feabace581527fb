"""What must hold of the planner after every event. The simulator and the tests call it each time; a failure tells the
story.
"""

from __future__ import annotations

from echo2.control import portions, staleness
from echo2.control.groups import GroupRecord
from echo2.control.state import PlannerState
from echo2.errors import InvariantError
from echo2.types import GroupRef


def check_planner(state: PlannerState) -> None:
    """Raise InvariantError on the first rule that does not hold."""
    state.groups.check_invariants()
    state.leases.check_invariants()
    if not state.has_unsettled:
        state.fleet.check_invariants()
    live: dict[int, int] = {}
    for record in state.groups:
        live[record.step] = live.get(record.step, 0) + (record.state != "retired")
        _check_group(state, record)
    for step, count in live.items():
        if count > state.options.groups_per_step:
            raise InvariantError(f"step {step} has {count} live groups of {state.options.groups_per_step}")
    bound, most = state.admission.bound, state.options.max_staleness
    if not min(state.options.publish_every - 1, most) <= bound <= most:
        raise InvariantError(f"sampling may run {bound} versions ahead; max_staleness is {most}")
    for worker_id, lease in state.leases.open_leases():
        if staleness.staleness(lease.step, lease.min_version) > state.options.max_staleness:
            raise InvariantError(f"{worker_id} may sample {lease} with tokens older than max_staleness")
        held = state.groups.get(lease.group.number) if lease.group.kind == "train" else None
        if lease.group.kind == "train" and (held is None or held.step != lease.step):
            raise InvariantError(f"lease {lease.lease_id} is of a group that is not open or changed its step")


def _check_group(state: PlannerState, record: GroupRecord) -> None:
    num_leases = len(state.leases.of_group(GroupRef("train", record.number)))
    if record.state == "pending" and portions.next_unleased(state, record) is None:
        raise InvariantError(f"group {record.number} is pending and leased")
    if record.state == "leased" and portions.next_unleased(state, record) is not None:
        raise InvariantError(f"group {record.number} is leased by nobody")
    num_in = len(record.portions_in)
    is_open = record.state in ("pending", "leased")
    if num_in and record.state != "retired" and (num_in < record.num_portions) != is_open:
        raise InvariantError(f"group {record.number} is {record.state} with {num_in} of {record.num_portions} portions")
    if record.state == "retired" and num_leases:
        raise InvariantError(f"group {record.number} is retired and leased")
    if record.state == "trained" and record.step >= state.version:
        raise InvariantError(
            f"group {record.number} is trained at step {record.step}; the run stands at {state.version}"
        )
    if record.step < state.version and record.state not in ("trained", "retired"):
        raise InvariantError(f"group {record.number} of step {record.step} was left behind {record.state}")
    if record.state in ("fed", "trained"):
        age = staleness.staleness(record.step, record.oldest_version or 0)
        if age > state.options.max_staleness:
            raise InvariantError(f"group {record.number} trains step {record.step} at staleness {age}")
