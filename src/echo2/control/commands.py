"""Everything the planner can ask for. `cause` is the number of the event that led here, `reason` is for people.

The driver carries commands out in order. Those marked *durable* must be on disk before the next command is carried
out: that is what makes every group exactly-once through a kill at any instant.
"""

from __future__ import annotations

from dataclasses import dataclass

from echo2.types import GroupRef, Lease, SnapshotRef


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """Base: why it was asked for."""

    cause: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class IssueGroup(Command):
    """Durable: group `number` exists from now on, bound to training step `step`."""

    number: int
    step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class GrantLeases(Command):
    """Durable, then sent: the worker samples these groups together."""

    worker_id: str
    leases: tuple[Lease, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class CloseLease(Command):
    """Durable: the lease ended this way (accepted, expired, lost, failed, ...)."""

    lease_id: int
    group: GroupRef
    worker_id: str
    outcome: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RevokeLease(Command):
    """Sent to the worker: stop working on these leases."""

    worker_id: str
    lease_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class AcceptDelivery(Command):
    """Durable, then answered: the payload is this group's; or, unless it `completes` the group, the portion's that
    begins with attempt `first_sample`.
    """

    worker_id: str
    lease_id: int
    group: GroupRef
    first_sample: int = 0
    completes: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class RefuseDelivery(Command):
    """Answered and counted: `refusal` is one word (late, duplicate, stale, malformed, oversized, ...)."""

    worker_id: str
    lease_id: int
    group: GroupRef | None
    refusal: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreGroup(Command):
    """The reward process beside the head is to score this delivered group."""

    group: GroupRef


@dataclass(frozen=True, slots=True, kw_only=True)
class RetireGroup(Command):
    """Durable: the group will never be trained on. `why` is one word, counted by the audit."""

    number: int
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class FeedGroup(Command):
    """To the learner: this group belongs to the step it waits for."""

    step: int
    number: int


@dataclass(frozen=True, slots=True, kw_only=True)
class EndStep(Command):
    """To the learner: the step has all its groups. `cursor`: the first task that no step up to this one has used."""

    step: int
    num_groups: int
    cursor: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordStep(Command):
    """Durable: the step was trained on exactly these groups."""

    step: int
    lineage: int
    numbers: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordLearner(Command):
    """Durable: the learner stands at `version` in `lineage`; groups of later steps are ready again, for the same
    steps.
    """

    version: int
    lineage: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RefuseLearner(Command):
    """Answered: this learner can't continue the run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AnnounceSnapshot(Command):
    """Sent to the workers: this snapshot is the newest."""

    ref: SnapshotRef
    worker_ids: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class DropSnapshot(Command):
    """Nobody needs this snapshot any more."""

    ref: SnapshotRef


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordCheckpoint(Command):
    """Durable: payloads of steps below `oldest_kept` are covered by a checkpoint and may go."""

    version: int
    oldest_kept: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StartEval(Command):
    """An evaluation of this snapshot begins."""

    ref: SnapshotRef


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishEval(Command):
    """The evaluation of this version has all its results (`num_failed` tasks had none)."""

    version: int
    num_failed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SkipEval(Command):
    """The evaluation of this version is given up: there is no machine that it may count from."""

    version: int


@dataclass(frozen=True, slots=True, kw_only=True)
class WakeAt(Command):
    """Send a `Tick` at this time (a later `WakeAt` replaces an earlier one)."""

    at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerGone(Command):
    """The worker counts as lost from now on."""

    worker_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpelWorker(Command):
    """For so many seconds this worker is refused at the door; `num_refused` refusals led to it."""

    worker_id: str
    seconds: float
    num_refused: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ActivateWorker(Command):
    """It stood by, and works from now on."""

    worker_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ReleaseWorker(Command):
    """It finishes what it has, then stands by: it gets no leases and is not told of snapshots."""

    worker_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RentMachine(Command):
    """To the offer's hook: rent one more machine of this kind, and start a worker there."""

    offer: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ReturnMachine(Command):
    """To the offer's hook: this worker's machine is not needed any more. `worker_id` empty: one whose worker has not
    joined.
    """

    offer: str
    worker_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StopRun(Command):
    """The run can't go on; nothing is lost, and `--resume` continues it once the reason is gone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishRun(Command):
    """Every step is trained, checkpointed and evaluated."""
