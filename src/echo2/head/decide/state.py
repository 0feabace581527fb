"""The planner's options and its tables. Each table is an object with the verbs that change it; no other file writes its
fields (`tests/house.py`). Decisions are in the modules beside it.
"""

from __future__ import annotations

from dataclasses import dataclass

from echo2.core.decide.machine import StateMachine
from echo2.core.types import RUN_POLICY, GroupRef, Lease, SnapshotRef
from echo2.head.decide import commands as do
from echo2.head.decide import events as ev
from echo2.head.decide.groups import GroupBook, LeaseTable
from echo2.head.decide.pacing import WidthSearch
from echo2.head.decide.training import Evaluation, RunHealth, Snapshots, Training
from echo2.head.fleet.decide.activation import Rentals
from echo2.head.fleet.decide.fleet import Fleet
from echo2.head.fleet.decide.measurements import Measurements
from echo2.head.strangers.decide.trust import TicketCredits, TrustBook, WorkerPenalties


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
        self.fleet = Fleet(options.heartbeat_seconds, options.group_size, self.groups.groups_per_unit)
        self.rentals = Rentals() if options.activation else None
        self.measurements = Measurements()
        self.credits, self.penalties, self.trust = TicketCredits(), WorkerPenalties(), TrustBook()
        self.now = 0.0

    def begin_at(self, event: ev.Event, now: float) -> None:
        self.begin(event)
        self.now = now

    def open_lease(self, worker_id: str, lease: Lease) -> None:
        worker = self.fleet.get(worker_id)
        self.leases.add(worker_id, lease, self.newest_had(worker_id))
        self.penalties.granted(worker_id)
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

    def emit(self, kind: type[do.Command], reason: str, **fields: object) -> None:
        """Add a command of this policy, caused by the current event."""
        super().emit(kind, reason, policy=self.options.policy, **fields)
