"""The commands of the planner. `cause` is the number of the event that led to the command, `reason` is a text for the
operator, and `policy` is the id of the policy whose groups, versions and steps the numbers refer to.

The driver executes commands in order. Those that are `Durable` must be on disk before the next command is executed.
This makes the handling of every group exactly-once, even if the head is killed at any instant.
"""

from __future__ import annotations

from dataclasses import field

from echo2.core.decide.machine import Command as Command
from echo2.core.decide.machine import WakeAt as WakeAt
from echo2.core.types import Attachment, GroupRef, Lease, LostRollout, SnapshotRef
from echo2.head.strangers.decide.trust import DrawnCheck, TicketRest, Trust


class PolicyCommand(Command):
    """Base class: a command on behalf of one policy."""

    policy: str


class Durable(PolicyCommand):
    """Base class: a command that the ledger records."""


class IssueGroup(Durable):
    """Group `number` exists from now on, bound to training step `step`."""

    number: int
    step: int


class GrantLeases(Durable):
    """Sent. In deterministic mode the worker samples these groups together and alone. `is_second`: others sample them,
    too.
    """

    worker_id: str
    leases: tuple[Lease, ...]
    is_second: bool = False


class CloseLease(Durable):
    """The lease ended this way (accepted, expired, lost, failed, ...), after so many seconds."""

    lease_id: int
    group: GroupRef
    worker_id: str
    outcome: str
    held_seconds: float


class RevokeLease(PolicyCommand):
    """Sent to the worker: stop working on these leases."""

    worker_id: str
    lease_ids: tuple[int, ...]


class AcceptDelivery(Durable):
    """Answered: the rollouts become this group's result. `seconds`: sampling time."""

    worker_id: str
    lease_id: int
    group: GroupRef
    oldest_version: int
    newest_version: int
    num_tokens: int
    seconds: float
    rollouts: Attachment | None = field(compare=False)
    lost: tuple[LostRollout, ...] = ()


class RefuseDelivery(Durable):
    """Answered: `refusal` is one word (late, duplicate, stale, malformed, oversized, ...). `num_tokens`
    and `seconds`: the cost of sampling the refused result, if known.
    """

    worker_id: str
    lease_id: int
    group: GroupRef | None
    refusal: str
    num_tokens: int = 0
    seconds: float = 0.0


class ScoreGroup(PolicyCommand):
    """Have the reward process score this delivered group. `rollouts` None: read them from the ledger."""

    group: GroupRef
    rollouts: Attachment | None = field(compare=False)


class KeepScores(Durable):
    """The rewards of this delivered group, which makes it ready for the learner. `rollouts`: what is left of
    it, if some were `lost`.
    """

    group: GroupRef
    is_flat: bool
    scores: Attachment | None = field(compare=False)
    lost: tuple[LostRollout, ...] = ()
    rollouts: Attachment | None = field(default=None, compare=False)


class TopUpGroup(Durable):
    """This group has too few rollouts. It keeps `num_kept`, and is leased again for the others, for
    the `num_top_ups`-th time. `rollouts`: those kept, if some were `lost` since the delivery.
    """

    number: int
    num_kept: int
    num_top_ups: int
    lost: tuple[LostRollout, ...] = ()
    rollouts: Attachment | None = field(default=None, compare=False)


class RetireGroup(Durable):
    """The group will never be trained on. `why` is one word, which the audit counts."""

    number: int
    why: str


class FeedGroup(PolicyCommand):
    """To the learner: this group belongs to the step that it waits for."""

    step: int
    number: int


class EndStep(PolicyCommand):
    """To the learner: the step has all its groups. `cursor`: the first task that no step up to this one has used.
    `publish_every`: steps between snapshots, from this step on.
    """

    step: int
    num_groups: int
    cursor: int
    publish_every: int


class RecordStep(Durable):
    """The step was trained on exactly these groups."""

    step: int
    lineage: int
    numbers: tuple[int, ...]


class RecordLearner(Durable):
    """The learner is at `version` in `lineage`; trained groups of later steps become ready again, for the same
    steps.
    """

    version: int
    lineage: int


class RefuseLearner(PolicyCommand):
    """Answered: this learner can't continue the run."""


class AnnounceSnapshot(PolicyCommand):
    """Sent to the workers: this snapshot is the newest."""

    ref: SnapshotRef
    worker_ids: tuple[str, ...]


class DropSnapshot(PolicyCommand):
    """Delete this snapshot, which is no longer needed."""

    ref: SnapshotRef


class RecordCheckpoint(Durable):
    """Rollouts of steps below `oldest_kept` are covered by a checkpoint and may be deleted."""

    version: int
    oldest_kept: int


class StartEval(PolicyCommand):
    """An evaluation of this snapshot begins."""

    ref: SnapshotRef


class FinishEval(PolicyCommand):
    """The evaluation of this version is complete. `failed`: by reason, how many tasks have no result."""

    version: int
    failed: dict[str, int]


class SkipEval(PolicyCommand):
    """The evaluation of this version is given up: no machine of the owner is connected, and no other may evaluate."""

    version: int


class CheckGroup(PolicyCommand):
    """Sent to a machine of the owner: check this delivered group under the weights of `ref`. `is_from_stream`: its
    worker's engine draws from the head's random numbers; `form`: to which it rounds its weights.
    """

    worker_id: str
    group: GroupRef
    ref: SnapshotRef
    is_from_stream: bool
    form: str = ""


class RecordTrust(Durable):
    """The results of checks of this stranger's ticket."""

    ticket: str
    trust: Trust


class RecordCheck(Durable):
    """This check of a group is running."""

    check: DrawnCheck


class EndCheck(Durable):
    """The check of this group is over."""

    number: int


class RecordRest(Durable):
    """This ticket rests, or has earned the pardon of a rest."""

    rest: TicketRest


class WorkerGone(PolicyCommand):
    """The worker counts as lost from now on."""

    worker_id: str


class ExpelWorker(Durable):
    """The worker may not join for this many seconds. `num_expelled`: its expulsions, including this one."""

    worker_id: str
    seconds: float
    num_expelled: int


class ActivateWorker(PolicyCommand):
    """A worker on standby gets leases from now on."""

    worker_id: str


class ReleaseWorker(PolicyCommand):
    """The worker finishes its leases, then stands by: it gets no leases and no announcements of snapshots."""

    worker_id: str


class RestWorker(PolicyCommand):
    """The worker gets no leases for this many seconds."""

    worker_id: str
    seconds: float


class LimitGroups(PolicyCommand):
    """Workers begin a step with at most so many groups each."""

    num_groups: int


class SetWidth(PolicyCommand):
    """Sent to the worker: from now on decode so many groups at once, of `num_slots` rollouts."""

    worker_id: str
    num_groups: int
    num_slots: int


class SpaceSnapshots(PolicyCommand):
    """From now on so many steps lie between two snapshots."""

    publish_every: int


class RentMachine(PolicyCommand):
    """To the offer's hook: rent one more machine of this kind, and start a worker there."""

    offer: str


class ReturnMachine(PolicyCommand):
    """To the offer's hook: this worker's machine is no longer needed. `worker_id` empty: a machine whose worker has not
    joined.
    """

    offer: str
    worker_id: str


class StopRun(PolicyCommand):
    """The run cannot go on. Nothing is lost, and `--resume` continues it after the cause is fixed."""


class FinishRun(PolicyCommand):
    """Every step is trained, checkpointed and evaluated."""
