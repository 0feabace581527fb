"""What the ledger remembers, as the planner wants to be told it after a restart."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from echo2.buffer.records import GroupRecord, LeaseRecord, LedgerState
from echo2.control import events as ev
from echo2.errors import UserError
from echo2.types import Portion


def recovered(state: LedgerState, group_size: int, is_flat: Callable[[GroupRecord], bool]) -> dict[str, Any]:
    """Groups, leases and portions, by their names in `HeadStarted`.

    Raises:
        UserError: attempts are under way that groups of this size do not have.
    """
    under_way: list[LeaseRecord | Portion] = [*state.leases, *state.portions]
    for one in under_way:
        last = one.first_sample + one.num_samples - 1
        if group_size % one.num_samples or last >= group_size:
            raise UserError(
                f"sampling.group_size = {group_size}, but group {one.number} is under way with attempts "
                f"{one.first_sample} to {last} at one worker. Resume with the size that the run had."
            )
    return {
        "groups": tuple(
            ev.RecoveredGroup(
                g.number, g.step, g.state, g.oldest_version, g.num_tokens, g.worker_id, g.reason, is_flat(g)
            )
            for g in state.groups
        ),
        "leases": tuple(
            ev.RecoveredLease(o.lease_id, o.number, o.worker_id, o.deadline, o.first_sample, o.num_samples)
            for o in state.leases
        ),
        "portions": state.portions,
    }
