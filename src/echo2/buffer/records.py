"""The rows that the ledger returns after a restart."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from echo2.buffer.schema import STRANGERS_KINDS


@dataclass(frozen=True, slots=True)
class GroupRecord:
    """One group that a learner may still need, or need again after a fall-back.

    `state` is open | delivered | ready | trained (only until a checkpoint covers the group, that is while its rollouts
    are kept) | retired (only of steps that may still be trained, or trained again). `reason`: why it was retired.
    Versions are None until delivery. `is_flat`: its rewards are all equal.
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
    """One lease that is still held. Times in seconds of the head's clock."""

    lease_id: int
    number: int
    worker_id: str
    granted_at: float
    deadline: float
    num_samples: int


@dataclass(frozen=True, slots=True)
class LedgerState:
    """The state of a run in the ledger.

    version, lineage   of the learner: its last trained step + 1 (0, 0 before the first learner)
    next_number        number of the next group to issue
    cursor             next position in the task stream: one more than the largest of any issued group
    next_lease_id      one more than the largest lease id granted (from 1)
    groups, leases     in order of group numbers and lease ids
    checkpoint_version, oldest_kept
                       version of the newest reported checkpoint, and of the oldest checkpoint kept at that time
    strangers          the stored records about strangers, by kind and name
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
