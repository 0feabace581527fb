"""The events of the planner, as facts in the past tense; plain data, so that a run can be replayed."""

from __future__ import annotations

from dataclasses import dataclass, field

from echo2.core.decide.machine import Event as _Event
from echo2.core.decide.machine import Tick as Tick  # part of this module's vocabulary, too
from echo2.core.types import Attachment, GroupRef, LostRollout, SamplingFailure, SnapshotRef
from echo2.head.strangers.decide.trust import DrawnCheck, TicketRest, Trust


@dataclass(frozen=True, slots=True)
class RecoveredGroup:
    """A group as recorded in the ledger. `state`: open, delivered (not yet scored), ready, trained or retired; `why`:
    the reason for retiring it. `is_flat`: its rewards are all equal, if that was checked. `num_kept`, `num_top_ups`: as
    in `groups.PlannedGroup`.
    """

    number: int
    step: int
    state: str
    oldest_version: int | None = None
    worker_id: str = ""
    why: str = ""
    is_flat: bool = False
    num_kept: int = 0
    num_top_ups: int = 0


@dataclass(frozen=True, slots=True)
class RecoveredLease:
    """A lease that was open when the head stopped."""

    lease_id: int
    number: int
    worker_id: str
    granted_at: float
    deadline: float
    num_samples: int


@dataclass(frozen=True, slots=True)
class RecoveredExpulsion:
    """An expelled worker: nothing is accepted from it until `until` (seconds). `reason`: of the last expulsion."""

    worker_id: str
    until: float
    num_expelled: int
    reason: str


@dataclass(frozen=True, slots=True)
class WorkerMismatch:
    """How far a worker's logprobs are from those that the learner computes under the weights that sampled the tokens:
    the number of tokens of a step at lag 0, and the sum of their absolute log ratios. `surprise`: the sum of -logprob
    less the entropy of the distribution that each token was drawn from, by the learner's logprobs.
    """

    worker_id: str
    num_tokens: float
    abs_log_ratio: float
    surprise: float = 0.0


@dataclass(frozen=True, slots=True)
class RecoveredMachine:
    """A machine that an earlier head rented and has not returned. `worker_id`: empty if no worker joined from it."""

    offer: str
    worker_id: str = ""


class PlannerEvent(_Event):
    """Base class of the planner's events."""


class HeadStarted(PlannerEvent):
    """The head (re)started with the contents of the ledger and the snapshot store; on a fresh run everything is empty.
    `trust`: by ticket.
    """

    version: int = 0
    lineage: int = 1
    checkpoint_version: int = -1
    oldest_kept: int = 0
    next_number: int = 0
    next_lease_id: int = 1
    groups: tuple[RecoveredGroup, ...] = ()
    leases: tuple[RecoveredLease, ...] = ()
    published: tuple[SnapshotRef, ...] = ()
    evaluated: tuple[int, ...] = ()
    machines: tuple[RecoveredMachine, ...] = ()
    trust: tuple[tuple[str, Trust], ...] = ()
    checks: tuple[DrawnCheck, ...] = ()
    rests: tuple[TicketRest, ...] = ()
    expulsions: tuple[RecoveredExpulsion, ...] = ()


class LearnerJoined(PlannerEvent):
    """The learner connected with the weights after `version` steps (fewer than the planner's if the learner fell back
    to a checkpoint).
    """

    version: int


class LearnerLost(PlannerEvent):
    """The learner's connection closed."""

    reason: str


class GroupsWanted(PlannerEvent):
    """The learner is ready for the groups of this step."""

    step: int


class StepTrained(PlannerEvent):
    """The learner finished a step with exactly these groups; its version is now step + 1. `busy_seconds`: time without
    waiting, as reported by the learner (0: unknown). `mismatches`: of the workers with the largest mismatch.
    """

    step: int
    numbers: tuple[int, ...]
    busy_seconds: float = 0.0
    mismatches: tuple[WorkerMismatch, ...] = ()


class SnapshotPublished(PlannerEvent):
    """A snapshot is completely stored at the origin."""

    ref: SnapshotRef
    num_bytes: int


class CheckpointSaved(PlannerEvent):
    """A checkpoint of `version` is durable; `oldest_kept` is the version of the oldest checkpoint kept."""

    version: int
    oldest_kept: int


class WorkerJoined(PlannerEvent):
    """A worker connected (again). `slots`: rollouts that it decodes at once. `held_leases`: leases it still works on;
    `offer`: the offer from which the planner rented its machine, or empty. `ticket`: with which a stranger joined;
    empty for machines of the run's owner. `draws`: its engine draws from the head's random numbers, and can check
    workers that do so; `form`: to which it rounds its weights, empty: not at all, else it checks nobody; `rounds`: it
    can check rounded weights, too.
    """

    worker_id: str
    slots: int
    price_usd_per_hour: float
    installed: SnapshotRef | None
    held_leases: tuple[int, ...] = ()
    offer: str = ""
    ticket: str = ""
    draws: bool = False
    form: str = ""
    rounds: bool = False


class WorkersHeard(PlannerEvent):
    """These workers are alive and have nothing new to report."""

    worker_ids: tuple[str, ...]


class WorkerReported(PlannerEvent):
    """The worker is alive and has this snapshot installed. `refused`: a newer snapshot that it could not install, and
    why."""

    worker_id: str
    installed: SnapshotRef | None
    refused: str = ""


class WorkerDetached(PlannerEvent):
    """The worker's connection closed. It may come back: its leases live until the grace period ends."""

    worker_id: str
    reason: str


class WorkerLeft(PlannerEvent):
    """The worker said good-bye, or was revoked: its leases end now."""

    worker_id: str
    reason: str


class GroupDelivered(PlannerEvent):
    """A well-formed result arrived. `seconds`: sampling time. `rollouts` are passed on with `AcceptDelivery` and
    `ScoreGroup`. `lineage`: of the weights, as the worker claims; `versions_between`: versions of tokens between the
    oldest and the newest. `logged`: the head read the rollouts from a log, so there is nothing to check.
    `replay_seconds`: that the head's environment took to replay the rollouts, here and below. `is_own`: the worker is a
    machine of the owner, also if it has not come back yet to a head that was restarted. `num_rollouts`: of the group,
    with those that it had before (None: as many as leased); `lost`: those of the lease that failed.
    """

    worker_id: str
    lease_id: int
    group: GroupRef
    num_samples: int
    oldest_version: int
    newest_version: int
    num_tokens: int
    seconds: float = 0.0
    rollouts: Attachment | None = field(default=None, compare=False)
    lineage: int = 1
    versions_between: tuple[int, ...] = ()
    logged: bool = False
    replay_seconds: float = 0.0
    is_own: bool = False
    num_rollouts: int | None = None
    lost: tuple[LostRollout, ...] = ()


class DeliveryMalformed(PlannerEvent):
    """A result that broke the wire format or its bounds; or that was "late", as its lease ended while it was read."""

    worker_id: str
    lease_id: int
    reason: str
    detail: str
    replay_seconds: float = 0.0


class LeaseFailed(PlannerEvent):
    """The worker could not produce the group. `traceback`: of the user's environment, for display."""

    worker_id: str
    lease_id: int
    reason: SamplingFailure
    detail: str
    traceback: str = ""
    replay_seconds: float = 0.0


class GroupScored(PlannerEvent):
    """A reward process scored a delivered group. `is_flat`: its rewards are all equal. `seconds`: scoring time.
    `scores` are passed on with `KeepScores`. `lost`: the rollouts whose rewards failed, if any did; then `rollouts` has
    the `num_rollouts` others, to which the scores belong.
    """

    group: GroupRef
    is_flat: bool = False
    seconds: float = 0.0
    scores: Attachment | None = field(default=None, compare=False)
    lost: tuple[LostRollout, ...] = ()
    num_rollouts: int = 0
    rollouts: Attachment | None = field(default=None, compare=False)


class GroupUnfit(PlannerEvent):
    """The head found that a group is unusable: its prompt cannot be made, or its reward function failed. `seconds`: how
    long that took. `traceback`: of the user's code, for display.
    """

    group: GroupRef
    reason: str
    detail: str
    seconds: float = 0.0
    traceback: str = ""


class GroupChecked(PlannerEvent):
    """A machine of the owner has checked a group. `num_tokens`: drawn tokens that were judged; `num_skipped`: drawn
    tokens that were not; `fault`: why the group was not drawn as its worker claims, empty if it was; `missed`: why the
    group could not be checked; `surprise`: of its tokens, in standard deviations; `variance`: of that sum, nats^2.
    """

    worker_id: str
    group: GroupRef
    num_tokens: int = 0
    fault: str = ""
    missed: str = ""
    num_skipped: int = 0
    surprise: float = 0.0
    variance: float = 0.0


class RentFailed(PlannerEvent):
    """The offer's hook could not rent a machine."""

    offer: str
    reason: str


class DiskFull(PlannerEvent):
    """The head's disk has just enough room for the work in progress; `reason` names disk and sizes."""

    reason: str


class DiskFreed(PlannerEvent):
    """The head's disk has room again."""


Event = PlannerEvent | Tick
