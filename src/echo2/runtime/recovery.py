"""What the ledger remembers, as the planner wants to be told it after a restart."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from echo2.buffer.records import GroupRecord, LedgerState
from echo2.control import events as ev


def recovered(state: LedgerState, is_flat: Callable[[GroupRecord], bool]) -> dict[str, Any]:
    """Groups, leases and portions, by their names in `HeadStarted`."""
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
        "portions": tuple(ev.RecoveredPortion(**asdict(portion)) for portion in state.portions),
    }
