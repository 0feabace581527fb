"""Everything that can happen to the planner (the head's machine). Facts, in the past tense; plain data, so that a run
can be replayed.
"""

from __future__ import annotations

from dataclasses import dataclass

from echo2.types import GroupRef, Portion, SnapshotRef


@dataclass(frozen=True, slots=True)
class RecoveredGroup:
    """A group as the ledger remembers it. `state`: open, delivered (not yet scored), ready, trained or retired; `why`
    that was. `is_flat`: its rewards are all equal, where that is looked at.
    """

    number: int
    step: int
    state: str
    oldest_version: int | None = None
    num_tokens: int = 0
    worker_id: str = ""
    why: str = ""
    is_flat: bool = False


@dataclass(frozen=True, slots=True)
class RecoveredLease:
    """A lease that was open when the head stopped."""

    lease_id: int
    number: int
    worker_id: str
    deadline: float
    first_sample: int
    num_samples: int


@dataclass(frozen=True, slots=True)
class RecoveredMachine:
    """A machine that an earlier head rented and has not given back. `worker_id`: empty if none has joined from it."""

    offer: str
    worker_id: str = ""


@dataclass(frozen=True, slots=True)
class HeadStarted:
    """The head (re)started with what the ledger and the snapshot store hold; on a fresh run everything is empty. `ess`:
    (step, ESS / B) of the steps before `version` that are known.
    """

    version: int = 0
    lineage: int = 1
    checkpoint_version: int = -1
    oldest_kept: int = 0
    next_number: int = 0
    next_lease_id: int = 1
    groups: tuple[RecoveredGroup, ...] = ()
    leases: tuple[RecoveredLease, ...] = ()
    portions: tuple[Portion, ...] = ()
    published: tuple[SnapshotRef, ...] = ()
    evaluated: tuple[int, ...] = ()
    machines: tuple[RecoveredMachine, ...] = ()
    ess: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class LearnerJoined:
    """The learner connected, holding the weights after `version` steps (lower than ours after a fall-back to a
    checkpoint).
    """

    version: int


@dataclass(frozen=True, slots=True)
class LearnerLost:
    """The learner's connection closed."""

    reason: str


@dataclass(frozen=True, slots=True)
class GroupsWanted:
    """The learner is ready for the groups of this step."""

    step: int


@dataclass(frozen=True, slots=True)
class StepTrained:
    """The learner finished a step with exactly these groups; its version is now step + 1. `busy_seconds`: what it took
    without waiting, as the learner says; 0: it does not say. `ess`: the effective sample size over the number of
    rollouts; None: it does not say.
    """

    step: int
    numbers: tuple[int, ...]
    busy_seconds: float = 0.0
    ess: float | None = None


@dataclass(frozen=True, slots=True)
class SnapshotPublished:
    """A snapshot is whole in the origin's store."""

    ref: SnapshotRef
    num_bytes: int


@dataclass(frozen=True, slots=True)
class CheckpointSaved:
    """A checkpoint of `version` is durable; the oldest one kept is of `oldest_kept`."""

    version: int
    oldest_kept: int


@dataclass(frozen=True, slots=True)
class WorkerJoined:
    """A worker attends (again). `held_leases` are leases it still works on; `offer` what its machine was rented as, if
    the planner asked for it. `ticket`: by which a stranger joined; empty for machines of the run's owner.
    """

    worker_id: str
    capacity_groups: int
    price_usd_per_hour: float
    installed: SnapshotRef | None
    held_leases: tuple[int, ...] = ()
    offer: str = ""
    ticket: str = ""


@dataclass(frozen=True, slots=True)
class WorkerReported:
    """A heartbeat: the worker lives and has this snapshot installed."""

    worker_id: str
    installed: SnapshotRef | None


@dataclass(frozen=True, slots=True)
class WorkerDetached:
    """The worker's connection closed. It may come back: its leases live until the grace period ends."""

    worker_id: str
    reason: str


@dataclass(frozen=True, slots=True)
class WorkerLeft:
    """The worker said good-bye, or was revoked: its leases end now."""

    worker_id: str
    reason: str


@dataclass(frozen=True, slots=True)
class GroupDelivered:
    """A well-formed result came in. Its payload waits at the driver for `AcceptDelivery` or `RefuseDelivery`."""

    worker_id: str
    lease_id: int
    group: GroupRef
    num_samples: int
    oldest_version: int
    newest_version: int
    num_tokens: int


@dataclass(frozen=True, slots=True)
class DeliveryMalformed:
    """A result that broke the wire format or its bounds."""

    worker_id: str
    lease_id: int
    reason: str
    detail: str


@dataclass(frozen=True, slots=True)
class LeaseFailed:
    """The worker could not produce the group. `reason` is one of `leases.FAILURES`."""

    worker_id: str
    lease_id: int
    reason: str
    detail: str


@dataclass(frozen=True, slots=True)
class GroupScored:
    """The head's reward process scored a delivered group. `is_flat`: its rewards are all equal."""

    group: GroupRef
    is_flat: bool = False


@dataclass(frozen=True, slots=True)
class GroupUnfit:
    """The head found by itself that a group is of no use: its prompt can't be made, or its reward function failed.
    `seconds`: how long that took.
    """

    group: GroupRef
    reason: str
    detail: str
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class RentFailed:
    """The offer's hook got no machine."""

    offer: str
    reason: str


@dataclass(frozen=True, slots=True)
class DiskFull:
    """There is just enough room on the head's disk for what is under way; `reason` names disk and sizes."""

    reason: str


@dataclass(frozen=True, slots=True)
class DiskFreed:
    """There is room again."""


@dataclass(frozen=True, slots=True)
class Tick:
    """The time asked for by `WakeAt` has come."""


Event = (
    HeadStarted
    | LearnerJoined
    | LearnerLost
    | GroupsWanted
    | StepTrained
    | SnapshotPublished
    | CheckpointSaved
    | WorkerJoined
    | WorkerReported
    | WorkerDetached
    | WorkerLeft
    | GroupDelivered
    | DeliveryMalformed
    | LeaseFailed
    | GroupScored
    | GroupUnfit
    | RentFailed
    | DiskFull
    | DiskFreed
    | Tick
)
