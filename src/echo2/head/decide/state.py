"""The planner's options and its tables. Each table is an object with the verbs that change it; no other file writes its
fields (`tests/house.py`). Decisions are in the modules beside it. Here are those that say where the run stands: the
learner's steps, what it waits for, the policy's snapshots and their evaluations; and whether it goes on.

The owner's machines sample each held-out task with one exact version. Eval groups are numbered version * size +
position. They are bound to no training step, and the ledger does not store them: after a restart of the head an
unfinished evaluation starts again.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Container, Iterable
from dataclasses import dataclass, field

from echo2.core.decide.machine import StateMachine
from echo2.core.types import RUN_POLICY, GroupRef, Lease, SnapshotRef, Wait
from echo2.head.decide import commands as do
from echo2.head.decide import events as ev
from echo2.head.decide.groups import GroupBook, LeaseTable
from echo2.head.decide.pacing import Cadence, WidthSearch
from echo2.head.fleet.decide.activation import Rentals
from echo2.head.fleet.decide.fleet import Fleet
from echo2.head.fleet.decide.measurements import Measurements
from echo2.head.strangers.decide.trust import TicketCredits, TrustBook, WorkerPenalties


@dataclass(slots=True)
class Training:
    """The learner's position. `version`: number of trained steps; `lineage`: grows each time the learner falls back.
    `wanted_step`: the step whose groups the learner waits for, since `wanted_since`; `has_all`: it has got them all.
    `took_over_at`: when the learner last fell back, or this head replaced an earlier one; -inf if neither happened.
    """

    version: int = 0
    lineage: int = 1
    checkpoint_version: int = -1
    oldest_kept: int = 0
    wanted_step: int | None = None
    wanted_since: float | None = None
    has_all: bool = False
    learner_joined: bool = False
    took_over_at: float = -math.inf

    def join(self) -> None:
        self.learner_joined, self.wanted_step = True, None

    def lose(self, now: float) -> None:
        """The learner is gone; from now on the head waits for it."""
        self.learner_joined, self.wanted_step, self.wanted_since = False, None, now

    def fall_back(self, version: int, now: float) -> None:
        """The learner is back at its checkpoint of `version`: the later steps are trained again."""
        self.version, self.lineage, self.took_over_at = version, self.lineage + 1, now
        self.checkpoint_version = min(self.checkpoint_version, version)

    def want(self, step: int, now: float) -> None:
        self.wanted_step, self.wanted_since, self.has_all = step, now, False

    def end_step(self) -> None:
        self.has_all, self.wanted_since = True, None

    def train(self) -> None:
        self.version, self.wanted_step = self.version + 1, None

    def save(self, version: int, oldest_kept: int) -> None:
        """A checkpoint is durable. Reports may come twice and out of order; only the newest counts."""
        self.checkpoint_version = max(self.checkpoint_version, version)
        self.oldest_kept = max(self.oldest_kept, oldest_kept)

    def replaces_weights(self, now: float) -> None:
        """A version is published again: workers may still have the earlier weights of that name."""
        self.took_over_at = now

    @property
    def open_step(self) -> int | None:
        """The step whose groups the learner lacks; None if it waits for none."""
        return None if self.has_all else self.wanted_step


@dataclass(slots=True)
class RunHealth:
    """Whether the run goes on. `over`: why it ended; `paused`: what keeps it from leasing and feeding groups; both None
    while it goes on. `num_failed`: groups that failed in a row; `num_failed_at_strangers`: those that only strangers
    failed, and `last_failure` why the last of them was given up.
    """

    over: str | None = None
    paused: Wait | None = None
    num_failed: int = 0
    num_failed_at_strangers: int = 0
    last_failure: str = ""

    def end(self, reason: str) -> bool:
        """End the run. Return False if it had ended before: the first reason counts."""
        is_first = self.over is None
        self.over = reason if is_first else self.over
        return is_first

    def pause(self, wait: Wait | None) -> None:
        """Pause the run because of this wait, or let it go on (None)."""
        self.paused = wait

    def succeed(self) -> None:
        """A group was scored, which ends every row of failures."""
        self.num_failed = self.num_failed_at_strangers = 0

    def fail(self) -> int:
        """The head or machines of the owner failed a group. Return how many in a row."""
        self.num_failed += 1
        return self.num_failed

    def fail_at_strangers(self, why: str) -> None:
        self.num_failed_at_strangers, self.last_failure = self.num_failed_at_strangers + 1, why


class Snapshots:
    """`published`: the versions of the surviving history that a worker may have installed; `retained`: those that the
    origin still stores; `published_at`: when the newest was published, in seconds. `held_ref`: one that is stored until
    the workers that receive it have it, since `held_since`. Verbs return what the origin may delete.
    """

    def __init__(self) -> None:
        self.published: dict[int, SnapshotRef] = {}
        self.retained: dict[int, SnapshotRef] = {}
        self.published_at = 0.0
        self.held_ref: SnapshotRef | None = None
        self.held_since = 0.0

    def restore(self, refs: Iterable[SnapshotRef], version: int) -> list[SnapshotRef]:
        """Add what an earlier head left. What does not belong to the history up to `version` is returned."""
        refs = list(refs)
        self.published.update({ref.version: ref for ref in sorted(refs) if ref.version <= version})
        self.retained.update(self.published)
        return [ref for ref in refs if not self.has(ref)]

    def publish(self, ref: SnapshotRef, now: float) -> bool:
        """Add a snapshot. Return whether its version was published before, with other weights."""
        is_again = self.published.get(ref.version, ref) != ref
        self.published[ref.version] = self.retained[ref.version] = ref
        self.published_at = now
        return is_again

    def hold(self, ref: SnapshotRef | None, now: float) -> None:
        """Store this snapshot for workers that still receive it; None: there are no such workers."""
        if ref != self.held_ref:
            self.held_ref, self.held_since = ref, now

    def fall_back(self, version: int) -> list[SnapshotRef]:
        self.held_ref = None
        for later in [v for v in self.published if v > version]:
            del self.published[later]
        return [self.retained.pop(v) for v in sorted(self.retained) if v > version]

    def drop_old(self, needed: Container[int], num_kept: int, oldest: int, oldest_installed: int) -> list[SnapshotRef]:
        """Drop what the origin need not store any longer: versions below `oldest`, but not the `needed` ones and the
        newest few. No worker has a version below `oldest_installed`.
        """
        held_version = None if self.held_ref is None else self.held_ref.version
        olds = [v for v in sorted(self.retained)[:-num_kept] if v < oldest and v not in needed and v != held_version]
        dropped = [self.retained.pop(version) for version in olds]
        for version in [v for v in self.published if v < oldest_installed and v not in self.retained]:
            del self.published[version]
        return dropped

    def has(self, ref: SnapshotRef | None) -> bool:
        """Whether this snapshot is valid: it belongs to the surviving history and is recent enough."""
        return ref is not None and self.published.get(ref.version) == ref

    def newest(self) -> SnapshotRef | None:
        return self.published[max(self.published)] if self.published else None

    def before(self) -> SnapshotRef | None:
        """The snapshot before the newest."""
        versions = sorted(self.published)
        return self.published[versions[-2]] if len(versions) > 1 else None

    def last_before(self, max_staleness: int) -> int:
        """The last step that the snapshots before the newest may sample for; -1: there is none."""
        before = sorted(self.published)[-2:-1]
        return before[0] + max_staleness if before else -1

    def newest_retained(self) -> SnapshotRef | None:
        return self.retained[max(self.retained)] if self.retained else None


@dataclass(slots=True)
class EvalRound:
    """One running evaluation. A position is waiting, leased, being scored, or done. `failed`: by reason, how many tasks
    were given up.
    """

    ref: SnapshotRef
    size: int
    started_at: float = 0.0
    waiting: OrderedDict[int, None] = field(default_factory=OrderedDict)
    done: set[int] = field(default_factory=set)
    failed: dict[str, int] = field(default_factory=dict)
    attempts: dict[int, int] = field(default_factory=dict)
    failed_by: dict[int, dict[str, None]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.waiting.update(dict.fromkeys(range(self.size)))


@dataclass(slots=True)
class Evaluation:
    """The evaluations of one policy: of `size` tasks (0: never), before the first and after the last step, and every
    `every` steps if that is not 0. `rounds`: the running ones, by version. `gives_up_at`: until when they wait for a
    machine of the owner, while there is none.
    """

    policy: str
    size: int
    every: int
    max_steps: int
    gives_up_at: float | None = None
    evaluated: set[int] = field(default_factory=set)
    rounds: dict[int, EvalRound] = field(default_factory=dict)
    _skipped: set[int] = field(default_factory=set)

    @property
    def is_over(self) -> bool:
        """Whether nothing is evaluated now, and the last step has been, if it shall be."""
        return not self.rounds and (not self.size or self.max_steps in self.evaluated | self._skipped)

    def restore(self, evaluated: Iterable[int]) -> None:
        """These versions were evaluated under an earlier head."""
        self.evaluated.update(evaluated)

    def is_due(self, version: int) -> bool:
        """Whether this version shall be evaluated and its evaluation has not started yet."""
        if not self.size or version in self.evaluated or version in self._skipped or version in self.rounds:
            return False
        return version in (0, self.max_steps) or bool(self.every and version % self.every == 0)

    def start(self, ref: SnapshotRef, now: float) -> None:
        self.rounds[ref.version] = EvalRound(ref, self.size, now)

    def forget_after(self, version: int) -> None:
        """After the learner fell back to `version`: forget evaluations of later weights, which no longer count."""
        for later in [v for v in self.rounds if v > version]:
            del self.rounds[later]
        self.evaluated = {v for v in self.evaluated if v <= version}
        self._skipped = {v for v in self._skipped if v <= version}

    def pop_finished(self) -> list[EvalRound]:
        """Remove the rounds in which every task has a result or was given up, and return them."""
        finished = [version for version, round_ in self.rounds.items() if len(round_.done) == self.size]
        self.evaluated.update(finished)
        return [self.rounds.pop(version) for version in finished]

    def skip_all(self) -> list[int]:
        """Give up all running evaluations and return their versions."""
        skipped = list(self.rounds)
        self._skipped.update(skipped)
        self.rounds.clear()
        return skipped

    def lacks_machine(self, is_here: bool, now: float, patience_seconds: float) -> bool:
        """Whether no machine of the owner has been here for so long. `is_here`: whether one is now."""
        if is_here:
            self.gives_up_at = None
        elif self.gives_up_at is None:
            self.gives_up_at = now + patience_seconds
        return self.gives_up_at is not None and now >= self.gives_up_at

    def group(self, version: int, position: int) -> GroupRef:
        return GroupRef(self.policy, "eval", version * self.size + position)

    def _locate(self, group: GroupRef) -> tuple[EvalRound, int] | None:
        """Return the round and position of an eval group that has no result yet, or None."""
        round_ = self.rounds.get(group.number // self.size) if self.size else None
        position = group.number % self.size if round_ is not None else 0
        return None if round_ is None or position in round_.done else (round_, position)

    def is_done(self, group: GroupRef) -> bool:
        """Whether no further result is expected for this group."""
        return self._locate(group) is None

    def take(self, installed_version: int, num_groups: int) -> tuple[int, list[int]] | None:
        """Take positions for a worker with this version from the oldest round whose version it has reached. Return that
        version and the positions, or None.
        """
        for version in sorted(self.rounds):
            waiting = self.rounds[version].waiting
            if waiting and version <= installed_version:
                return version, [waiting.popitem(last=False)[0] for _ in range(min(num_groups, len(waiting)))]
        return None

    def put_back(self, group: GroupRef) -> int:
        """Requeue a group whose lease ended without a result. Return how often this has happened."""
        if (place := self._locate(group)) is None:
            return 0
        round_, position = place
        round_.waiting.setdefault(position)
        round_.attempts[position] = round_.attempts.get(position, 0) + 1
        return round_.attempts[position]

    def finish(self, group: GroupRef, why: str = "") -> bool:
        """Record that a group has a result, or was given up (`why`: the reason). Return False if it was done before."""
        if (place := self._locate(group)) is None:
            return False
        round_, position = place
        round_.done.add(position)
        if why:
            round_.failed[why] = round_.failed.get(why, 0) + 1
            round_.waiting.pop(position, None)
        return True

    def fail(self, group: GroupRef, voice: str) -> dict[str, None]:
        """Record who reported that this group can't be produced. Return all who did."""
        if (place := self._locate(group)) is None:
            return {}
        voices = place[0].failed_by.setdefault(place[1], {})
        voices[voice] = None
        return voices


@dataclass(frozen=True, slots=True)
class RentableOffer:
    """Machines that can be rented during the run: up to `count`, each with this rate in rollouts per second."""

    name: str
    rate: float
    price_usd_per_hour: float
    count: int


@dataclass(frozen=True, slots=True)
class PlannerOptions:
    """The part of the configuration that the planner needs, with the same names. `policy`: id of the policy it plans
    for. `activation`: if False, all workers are active. `check_seed`: secret seed, unknown to all workers, for drawing
    the groups to check; None: nothing is checked. `require_checks`: strangers that are not trusted yet work only while
    a machine of the owner can check them. `scored_by`: whom the head waits for when it waits for rewards.

    `heartbeat_seconds` (between two reports of a worker, at least) and `max_failures` (failed groups in a row that stop
    the run) are not settings: a run uses the defaults. Simulations with other time scales or failing machines use other
    values.
    """

    groups_per_step: int
    group_size: int
    max_steps: int
    min_group: int = 2
    max_staleness: int = 1
    publish_every: int = 1
    dynamic_sampling: bool = False
    deterministic: bool = False
    check_seed: int | None = None
    require_checks: bool = True
    groups_per_batch: int = 8
    lease_seconds: float = 120.0
    order: str = "any"
    heartbeat_seconds: float = 2.0
    max_failures: int = 8
    seed: int = 0
    policy: str = RUN_POLICY
    scored_by: str = "your reward function"
    eval_size: int = 0
    eval_every: int = 0
    eval_samples: int = 1
    keep_snapshots: int = 2
    activation: bool = False
    offers: tuple[RentableOffer, ...] = ()


class PlannerState(StateMachine):
    """The tables, and what concerns several of them at once. `now`: time of the current event, in seconds."""

    def __init__(self, options: PlannerOptions) -> None:
        super().__init__()
        self.options = options
        self.training, self.health, self.snapshots = Training(), RunHealth(), Snapshots()
        self.groups = GroupBook(options.groups_per_batch if options.deterministic else 1)
        self.leases = LeaseTable()
        self.evaluation = Evaluation(options.policy, options.eval_size, options.eval_every, options.max_steps)
        self.width_search = WidthSearch(options.groups_per_batch) if options.order == "frontier" else None
        self.cadence = Cadence(options.publish_every, options.max_staleness)
        self.fleet = Fleet(options.heartbeat_seconds, options.group_size, self.groups.groups_per_unit)
        self.rentals = Rentals() if options.activation else None
        self.measurements = Measurements()
        self.credits, self.penalties, self.trust = TicketCredits(), WorkerPenalties(), TrustBook()
        self.now = 0.0

    @property
    def publish_every(self) -> int:
        """Steps between snapshots, now."""
        return self.cadence.publish_every

    def begin_at(self, event: ev.Event, now: float) -> None:
        self.begin(event)
        self.now = now

    def open_lease(self, worker_id: str, lease: Lease) -> None:
        worker = self.fleet.get(worker_id)
        standing = "known" if worker is None else self.fleet.standing(worker)
        self.leases.add(worker_id, lease, self.newest_had(worker_id), standing)
        self.penalties.granted(worker_id)
        if worker is not None:
            self.fleet.take(worker, lease.lease_id, self.now)
        if worker is not None and not worker.is_own:
            self.credits.opened(worker.ticket, lease.lease_id)
            self._supply(lease, worker.ticket, lease.num_samples)

    def newest_had(self, worker_id: str, version: int | None = None) -> SnapshotRef | None:
        """Return the newest weights that this worker has had, as it says: by a report, by its results, or by one with
        this version. Weights of a history that the learner left do not count: it may go back behind them.
        """
        worker, refs = self.fleet.get(worker_id), [self.penalties.of(worker_id).sampled_with]
        refs.append(None if worker is None else worker.installed)
        refs.append(None if version is None else self.snapshots.published.get(version))
        return max((ref for ref in refs if ref is not None and self.snapshots.has(ref)), default=None)

    def close_lease(self, lease_id: int, is_in: bool = False) -> tuple[str, Lease]:
        """Close a lease and return (worker, lease). `is_in`: its result was accepted for the group."""
        worker_id, lease = self.leases.close(lease_id)
        if (worker := self.fleet.get(worker_id)) is not None:
            is_whole = lease.group.kind == "train" and lease.num_samples == self.options.group_size
            self.fleet.end(worker, lease_id, is_in and is_whole, self.now)
        ticket = self.credits.closed(lease_id)
        if ticket is not None and not is_in:
            self._supply(lease, ticket, -lease.num_samples)
        return worker_id, lease

    def _supply(self, lease: Lease, ticket: str, num_samples: int) -> None:
        record = self.groups.get(lease.group.number) if lease.group.kind == "train" else None
        if record is not None:
            self.groups.supply(record, ticket, num_samples)

    def settle(self, now: float) -> None:
        """Tell the fleet how much the workers hold whose leases have changed."""
        for worker_id in self.leases.take_changed() if self.leases.changed else ():
            if (worker := self.fleet.get(worker_id)) is not None:
                self.fleet.load(worker, self.leases.samples_of(worker_id), now)

    def own_snapshot(self, installed: SnapshotRef | None) -> SnapshotRef | None:
        """Return what a worker says it has installed, if it is a snapshot of this policy; otherwise None."""
        return installed if installed is not None and installed.policy == self.options.policy else None

    def train_group(self, number: int) -> GroupRef:
        return GroupRef(self.options.policy, "train", number)

    def tell_rest(self, worker_id: str, seconds: float, reason: str) -> None:
        """Say that a worker begins to rest; 0.0 seconds: it does not."""
        if seconds > 0.0:
            self.emit(do.RestWorker, reason, worker_id=worker_id, seconds=seconds)

    def emit(self, kind: type[do.Command], reason: str, **fields: object) -> None:
        """Add a command of this policy, caused by the current event."""
        super().emit(kind, reason, policy=self.options.policy, **fields)
