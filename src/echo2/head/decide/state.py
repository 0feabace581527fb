"""The planner's state: its tables, the run's position, the evaluations, and the commands of the current event.
Decisions are in the modules beside it.

Evaluations: the owner's machines sample each held-out task with one exact version. Eval groups are numbered
version * size + position. They are bound to no training step, and the ledger does not store them: after a restart of
the head an unfinished evaluation starts again.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from dataclasses import dataclass, field

from echo2.core.decide.machine import StateMachine
from echo2.core.types import RUN_POLICY, GroupRef, Lease, SnapshotRef, Wait
from echo2.head.decide import commands as do
from echo2.head.decide.groups import GroupBook, LeaseTable
from echo2.head.decide.pacing import Frontier
from echo2.head.fleet.decide.activation import ActivationLoop
from echo2.head.fleet.decide.fleet import Fleet
from echo2.head.fleet.decide.gauge import Gauge, UsualSeconds, is_occupied
from echo2.head.strangers.decide.standings import Conducts, Standings
from echo2.head.strangers.decide.trust import TrustBook


@dataclass(slots=True)
class EvalRound:
    """One running evaluation. A position is waiting, leased, being scored, or done. `failed`: by reason, how many tasks
    were given up.
    """

    ref: SnapshotRef
    size: int
    waiting: OrderedDict[int, None] = field(default_factory=OrderedDict)
    done: set[int] = field(default_factory=set)
    failed: dict[str, int] = field(default_factory=dict)
    started_at: float = 0.0
    attempts: dict[int, int] = field(default_factory=dict)
    failed_by: dict[int, dict[str, None]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.waiting.update(dict.fromkeys(range(self.size)))

    @property
    def is_finished(self) -> bool:
        """Whether every task has a result or was given up."""
        return len(self.done) == self.size


@dataclass(slots=True)
class Evaluation:
    """The evaluations of one policy: of `size` tasks (0: never), before the first and after the last step, and every
    `every` steps if that is not 0.
    """

    policy: str
    size: int
    every: int
    max_steps: int
    evaluated: set[int] = field(default_factory=set)
    rounds: dict[int, EvalRound] = field(default_factory=dict)
    skipped: set[int] = field(default_factory=set)

    def is_due(self, version: int) -> bool:
        """Whether this version shall be evaluated and its evaluation has not started yet."""
        if not self.size or version in self.evaluated or version in self.skipped or version in self.rounds:
            return False
        return version in (0, self.max_steps) or bool(self.every and version % self.every == 0)

    def start(self, ref: SnapshotRef, now: float) -> None:
        """Begin the evaluation of this snapshot."""
        self.rounds[ref.version] = EvalRound(ref, self.size, started_at=now)

    def forget_after(self, version: int) -> None:
        """After the learner fell back to `version`: forget evaluations of later weights, which no longer count."""
        for later in [v for v in self.rounds if v > version]:
            del self.rounds[later]
        self.evaluated = {v for v in self.evaluated if v <= version}
        self.skipped = {v for v in self.skipped if v <= version}

    def skip(self, version: int) -> None:
        """Give up this evaluation, because no machine of the owner is connected."""
        del self.rounds[version]
        self.skipped.add(version)

    def group(self, version: int, position: int) -> GroupRef:
        """Return the name of the group that samples this task with this version."""
        return GroupRef(self.policy, "eval", version * self.size + position)

    def locate(self, group: GroupRef) -> tuple[EvalRound, int] | None:
        """Return the round and position of an eval group, or None if its round is not open."""
        round_ = self.rounds.get(group.number // self.size) if self.size else None
        return None if round_ is None else (round_, group.number % self.size)

    def take(self, installed_version: int, num_groups: int) -> tuple[EvalRound, list[int]] | None:
        """Take positions for a worker with this version from the oldest round whose version it has reached, or None."""
        for version in sorted(self.rounds):
            round_ = self.rounds[version]
            if round_.waiting and version <= installed_version:
                return round_, [
                    round_.waiting.popitem(last=False)[0] for _ in range(min(num_groups, len(round_.waiting)))
                ]
        return None

    def put_back(self, group: GroupRef) -> int:
        """Requeue a group whose lease ended without a result. Return how often this has happened."""
        place = self.locate(group)
        if place is None or place[1] in place[0].done:
            return 0
        round_, position = place
        round_.waiting.setdefault(position)
        round_.attempts[position] = round_.attempts.get(position, 0) + 1
        return round_.attempts[position]


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
    a machine of the owner can check them.

    `heartbeat_seconds` (between two reports of a worker) and `max_failures` (failed groups in a row that stop the run)
    are not settings: a run uses the defaults. Simulations with other time scales or failing machines use other values.
    """

    groups_per_step: int
    group_size: int
    max_steps: int
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
    eval_size: int = 0
    eval_every: int = 0
    eval_samples: int = 1
    keep_snapshots: int = 2
    activation: bool = False
    offers: tuple[RentableOffer, ...] = ()


@dataclass(slots=True)
class Activation:
    """The state of `standby`. `needed_rate`: rollouts per second, None while it is unknown, infinite if no rate is
    enough. `rents`: by offer, when each machine was rented that has not joined yet. `failures`: by offer, the hook's
    failures in a row, and until when the offer is skipped. `gone`: rented machines whose worker is lost, as worker ->
    (offer, time of the loss).
    """

    loop: ActivationLoop = field(default_factory=ActivationLoop)
    next_at: float = 0.0
    needed_rate: float | None = None
    rents: dict[str, list[float]] = field(default_factory=dict)
    failures: dict[str, tuple[int, float]] = field(default_factory=dict)
    gone: dict[str, tuple[str, float]] = field(default_factory=dict)


class PlannerState(StateMachine):
    """Plain data. Only the functions of this package change it, and only while an event is handled.

    published   versions of the surviving history that a worker may have installed
    retained    those of them that the origin still stores
    wanted_step the step whose groups the learner waits for; `step_ended` once it has them all
    over        why the run ended; None before its end
    now         time of the current event, in seconds
    published_at  when the newest snapshot was published
    skips_evals_at  until when evaluations wait for a machine of the owner, while none is active
    failed_at_strangers, last_failure
                groups in a row that only strangers failed, and why the last of them was given up
    first_lease_id  the first lease of this head, which may not know earlier ones
    reward_time, replay_time  seconds of the reward functions, and of the environment's replay, for a group
    paused      what keeps the run from leasing and feeding groups; None if nothing does
    took_over_at  when the learner last fell back, or this head replaced an earlier one; -inf if neither happened
    """

    def __init__(self, options: PlannerOptions) -> None:
        super().__init__()
        self.options = options
        self.version = 0
        self.lineage = 1
        self.checkpoint_version = -1
        self.oldest_kept = 0
        self.groups = GroupBook(options.groups_per_batch if options.deterministic else 1)
        self.leases = LeaseTable()
        self.fleet = Fleet(options.heartbeat_seconds, options.group_size, self.groups.groups_per_unit)
        self.evaluation = Evaluation(options.policy, options.eval_size, options.eval_every, options.max_steps)
        self.gauge = Gauge()
        self.frontier = Frontier(options.groups_per_batch) if options.order == "frontier" else None
        self.activation = Activation() if options.activation else None
        self.published: dict[int, SnapshotRef] = {}
        self.retained: dict[int, SnapshotRef] = {}
        self.wanted_step: int | None = None
        self.wanted_since: float | None = None
        self.step_ended = False
        self.learner_joined = False
        self.over: str | None = None
        self.paused: Wait | None = None
        self.failures_in_a_row = 0
        self.failed_at_strangers, self.last_failure = 0, ""
        self.reward_time, self.replay_time = UsualSeconds(), UsualSeconds()
        self.standings = Standings()
        self.conducts = Conducts()
        self.trust = TrustBook()
        self.now = self.published_at = 0.0
        self.took_over_at = -math.inf
        self.skips_evals_at: float | None = None
        self.first_lease_id = 1
        self._touched: dict[str, None] = {}

    def open_lease(self, worker_id: str, lease: Lease) -> None:
        """Add a lease held by this worker."""
        worker = self.fleet.get(worker_id)
        self.leases.add(worker_id, lease, self.newest_had(worker_id))
        self._touched[worker_id] = None
        self.conducts.granted(worker_id)
        if worker is not None and not worker.is_own:
            self.standings.opened(worker.ticket, lease.lease_id)
            self._supply(lease, worker.ticket, lease.num_samples)

    def newest_had(self, worker_id: str, version: int | None = None) -> SnapshotRef | None:
        """Return the newest weights that this worker has had, as it says: by a report, by its results, or by one with
        this version. Weights of a history that the learner left do not count: it may go back behind them.
        """
        worker, refs = self.fleet.get(worker_id), [self.conducts.of(worker_id).sampled_with]
        refs += [None if worker is None else worker.installed, None if version is None else self.published.get(version)]
        return max((ref for ref in refs if ref is not None and self.published.get(ref.version) == ref), default=None)

    def close_lease(self, lease_id: int, is_in: bool = False) -> tuple[str, Lease]:
        """Close a lease and return (worker, lease). `is_in`: its result was accepted for the group."""
        worker_id, lease = self.leases.close(lease_id)
        self._touched[worker_id] = None
        ticket = self.standings.closed(lease_id)
        if ticket is not None and not is_in:
            self._supply(lease, ticket, -lease.num_samples)
        return worker_id, lease

    def _supply(self, lease: Lease, ticket: str, num_samples: int) -> None:
        record = self.groups.get(lease.group.number) if lease.group.kind == "train" else None
        if record is not None:
            self.groups.supply(record, ticket, num_samples)

    def settle(self, now: float) -> None:
        """Update the indexes of workers whose leases have changed, and record since when they have none."""
        for worker_id in self._touched:
            worker = self.fleet.get(worker_id)
            if worker is not None:
                worker.samples = self.leases.samples_of(worker_id)
                self.fleet.file(worker)
                is_occupied(worker, self.fleet.at_once(worker) * self.options.group_size, now)
                if not worker.detached:
                    idle_since = now if worker.idle_since is None else worker.idle_since
                    worker.idle_since = None if worker.samples else idle_since
        self._touched.clear()

    @property
    def reward_seconds(self) -> float | None:
        """Seconds of the reward functions for a group: a running mean, None before the first."""
        return self.reward_time.mean

    @property
    def has_unsettled(self) -> bool:
        """Whether leases have changed that `settle` has not processed yet."""
        return bool(self._touched)

    def own_snapshot(self, installed: SnapshotRef | None) -> SnapshotRef | None:
        """Return what a worker says it has installed, if it is a snapshot of this policy; otherwise None."""
        return installed if installed is not None and installed.policy == self.options.policy else None

    def train_group(self, number: int) -> GroupRef:
        """Return the name of this policy's train group with this number."""
        return GroupRef(self.options.policy, "train", number)

    def emit(self, kind: type[do.Command], reason: str, **fields: object) -> None:
        """Add a command of this policy, caused by the current event."""
        super().emit(kind, reason, policy=self.options.policy, **fields)
