"""The rows that the ledger returns after a restart."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from echo2.buffer.schema import STRANGERS_KINDS


@dataclass(frozen=True, slots=True)
class GroupRecord:
    """One group that is not finally covered: a learner may still need it, or need it again.

    `state` is open | delivered | ready | trained (trained groups are here as long as no checkpoint covers them, that is
    while their rollouts are kept) | retired (of steps that may still be trained, or trained again), for
    this `reason`. Versions are None until it was delivered. `is_flat`: its rewards are all equal.
    """

    number: int
    step: int
    cursor: int
    state: str
    oldest_version: int | None
    newest_version: int | None
    num_tokens: int
    worker_id: str
    reason: str = ""
    is_flat: bool = False


@dataclass(frozen=True, slots=True)
class LeaseRecord:
    """One lease that nobody has closed. Times in seconds of the head's clock."""

    lease_id: int
    number: int
    worker_id: str
    granted_at: float
    deadline: float
    num_samples: int


@dataclass(frozen=True, slots=True)
class LedgerState:
    """Where the run stands.

    version, lineage   of the learner: its last trained step + 1 (0, 0 before the first learner)
    next_number        number of the next group to issue
    cursor             next position in the task stream: one more than any issued group has
    next_lease_id      one more than any lease granted (from 1)
    groups, leases     in order of their numbers and ids
    checkpoint_version, oldest_kept
                       of the newest checkpoint that was reported, and of the oldest one that was kept then
    strangers          what was last kept of them, by kind and name
    """

    version: int
    lineage: int
    next_number: int
    cursor: int
    next_lease_id: int
    groups: tuple[GroupRecord, ...]
    leases: tuple[LeaseRecord, ...]
    checkpoint_version: int = -1
    oldest_kept: int = 0
    strangers: Mapping[str, Mapping[str, Any]] = field(default_factory=lambda: {kind: {} for kind in STRANGERS_KINDS})
