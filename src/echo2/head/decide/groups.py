"""The state of every training group: one record per group, and one table of the legal transitions. The leases: which
worker holds which group until when.

    pending --lease--> leased --result--> delivered --score--> ready --feed--> fed --step--> trained
       ^------expiry------'          |                           ^------------- fall-back -----'
       ^------ top-up ---------------'          any of the first four --> retired (with a reason)

A `delivered` group waits for a reward process beside the head. If too many of its rollouts failed, the others are kept
and the group is leased again for those that it lacks. A group stays bound to the step it was issued for
through every transition. Trained groups are kept until a checkpoint covers their step, because a learner that falls
back trains the same groups at the same step again. A lease is closed exactly once, with an outcome.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from echo2.core.decide.lazy_heap import LazyHeap
from echo2.core.errors import InvariantError
from echo2.core.types import GroupRef, Lease, SamplingFailure, SnapshotRef

MOVES: dict[str, frozenset[str]] = {
    "pending": frozenset({"leased", "delivered", "retired"}),
    "leased": frozenset({"pending", "delivered", "retired"}),
    "delivered": frozenset({"pending", "ready", "retired"}),
    "ready": frozenset({"fed", "retired"}),
    "fed": frozenset({"trained", "ready"}),
    "trained": frozenset({"ready"}),
    "retired": frozenset(),
}

#: Reason for retiring a group whose rewards are all equal: it has no gradient, and dynamic sampling replaces it.
UNINFORMATIVE = "uninformative"
#: Stands for all machines of the run's owner, where a stranger is identified by its ticket.
OWN = ""
#: Reasons for which a worker fails a lease -> whether another try can help (a prompt stays too long, an engine may
#: recover).
FAILURES: dict[SamplingFailure, bool] = {
    "prompt_too_long": False,
    "environment_failed": False,
    "log_unfit": False,
    "engine_failed": True,
    "snapshot_gone": True,
}
#: Times that a group with too few rollouts gets more. Where nine in ten rollouts fail, the task should be mended.
TOP_UPS_MAX = 2
#: Tries (expired, lost or failed leases) after which a group is given up: perhaps the group itself kills its workers.
MAX_ATTEMPTS = 5


@dataclass(slots=True)
class PlannedGroup:
    """What the planner knows about one group. `why`: reason for retiring it; `is_flat`: its rewards are all equal.
    `tried_by`: owners whose leases on it gave no result, `OWN` or a stranger's ticket; `failed_by`: machines and
    tickets that reported it can't be produced. `supplied_by`: samples that strangers hold or have delivered, by ticket.
    `is_held`: it is not fed for now. `num_kept`: rollouts that it has while it is leased for the others, for the
    `num_top_ups`-th time. `..._at`: when it last reached that state; -inf if that was under an earlier head.
    """

    number: int
    step: int
    state: str = "pending"
    attempts: int = 0
    failed_by: dict[str, None] = field(default_factory=dict)
    tried_by: dict[str, None] = field(default_factory=dict)
    supplied_by: dict[str, int] = field(default_factory=dict)
    oldest_version: int | None = None
    worker_id: str = ""
    is_flat: bool = False
    is_held: bool = False
    num_kept: int = 0
    num_top_ups: int = 0
    why: str = ""
    issued_at: float = -math.inf
    leased_at: float = -math.inf
    delivered_at: float = -math.inf
    ready_at: float = -math.inf

    def count_try(self, owner: str, is_counted: bool) -> None:
        """Record that a lease of this owner gave no result. `is_counted`: against the group."""
        self.attempts += is_counted
        self.tried_by[owner] = None

    def fail(self, voice: str) -> dict[str, None]:
        """Record who reported that it can't be produced. Return all who did."""
        self.failed_by[voice] = None
        return self.failed_by

    def forgive(self) -> None:
        self.attempts = 0
        self.failed_by.clear()


@dataclass(slots=True)
class StepGroups:
    """The groups of one step in issue order, with totals that would otherwise need a scan: groups not retired, fed, and
    retired as uninformative; ready groups in the order in which they became ready; and the samples that strangers
    supply, by ticket.
    """

    records: list[PlannedGroup] = field(default_factory=list)
    num_live: int = 0
    num_fed: int = 0
    num_uninformative: int = 0
    ready: OrderedDict[int, PlannedGroup] = field(default_factory=OrderedDict)
    supplied: dict[str, int] = field(default_factory=dict)


#: The groups of a step for which none was issued.
NO_GROUPS = StepGroups()


@dataclass(slots=True)
class GroupBook:
    """All groups that are not covered by a checkpoint yet, by number and by step.

    `groups_per_unit` groups make a *unit*, which is always leased as a whole: 1 group, or in deterministic mode the
    fixed batch.
    """

    groups_per_unit: int = 1
    next_number: int = 0  # of the next group; the ledger may have forgotten earlier ones
    _records: dict[int, PlannedGroup] = field(default_factory=dict)
    _by_step: dict[int, StepGroups] = field(default_factory=dict)
    _pending: list[tuple[int, int]] = field(default_factory=list)
    _is_pending: set[tuple[int, int]] = field(default_factory=set)

    def issue(self, step: int, now: float) -> PlannedGroup:
        record = PlannedGroup(self.next_number, step, issued_at=now)
        self._add(record)
        self.push_pending(record)
        return record

    def start_at(self, number: int) -> None:
        """Number further groups from here on: an earlier head issued those before."""
        self.next_number = max(self.next_number, number)

    def restore(self, record: PlannedGroup) -> None:
        self._add(record)
        if record.state == "pending":
            self.push_pending(record)

    def _add(self, record: PlannedGroup) -> None:
        if record.number in self._records:
            raise InvariantError(f"group {record.number} issued twice")
        self._records[record.number] = record
        of_step = self._by_step.setdefault(record.step, StepGroups())
        of_step.records.append(record)
        of_step.num_live += record.state != "retired"
        of_step.num_fed += record.state == "fed"
        of_step.num_uninformative += record.why == UNINFORMATIVE
        if record.state == "ready":
            of_step.ready[record.number] = record
        self.next_number = max(self.next_number, record.number + 1)

    def get(self, number: int) -> PlannedGroup | None:
        return self._records.get(number)

    def num_alike(self, number: int) -> int:
        """Return the number of successive groups, including this one, that were retired for the same reason."""
        why = self._records[number].why

        def is_alike(other: int) -> bool:
            return other in self._records and self._records[other].why == why

        first = next(before for before in itertools.count(number, -1) if not is_alike(before - 1))
        return next(after for after in itertools.count(number) if not is_alike(after)) - first

    def of_step(self, step: int) -> list[PlannedGroup]:
        """Return the groups bound to this step in issue order, including retired ones."""
        return list(self._by_step.get(step, NO_GROUPS).records)

    def num_issued(self, step: int) -> int:
        return len(self._by_step.get(step, NO_GROUPS).records)

    def num_live(self, step: int) -> int:
        return self._by_step.get(step, NO_GROUPS).num_live

    def num_fed(self, step: int) -> int:
        return self._by_step.get(step, NO_GROUPS).num_fed

    def num_uninformative(self, step: int) -> int:
        """Number of groups of this step that were retired because their rewards were all equal."""
        return self._by_step.get(step, NO_GROUPS).num_uninformative

    def supplied(self, step: int) -> Mapping[str, int]:
        """Samples of this step that strangers hold or have delivered, by ticket, without retired groups."""
        return self._by_step.get(step, NO_GROUPS).supplied

    def supply(self, record: PlannedGroup, ticket: str, num_samples: int) -> None:
        """Add to the samples of this group that a stranger holds or has delivered; negative if its lease ended."""
        if record.state != "retired":
            _add(record.supplied_by, ticket, num_samples)
            _add(self._by_step[record.step].supplied, ticket, num_samples)

    def first_ready(self, step: int) -> PlannedGroup | None:
        return next(iter(self._by_step.get(step, NO_GROUPS).ready.values()), None)

    def nth(self, step: int, index: int) -> PlannedGroup | None:
        """Return the group that was issued for this step after `index` others, or None."""
        records = self._by_step.get(step, NO_GROUPS).records
        return records[index] if index < len(records) else None

    def highest_number(self, last_step: int) -> int | None:
        """Return the highest group number of all steps up to `last_step`, or None."""
        highest = [max(r.number for r in of.records) for step, of in self._by_step.items() if step <= last_step]
        return max(highest, default=None)

    def move(self, record: PlannedGroup, state: str) -> None:
        """Change a record's state by a legal transition.

        Raises:
            InvariantError: the table has no such transition.
        """
        if state not in MOVES[record.state]:
            raise InvariantError(
                f"group {record.number} of step {record.step}: {record.state} -> {state} is not a legal move"
            )
        of_step = self._by_step[record.step]
        if record.state == "ready":
            of_step.ready.pop(record.number, None)
        elif record.state == "fed":
            of_step.num_fed -= 1
        record.state = state
        if state == "pending":
            self.push_pending(record)
        elif state == "ready" and not record.is_held:
            of_step.ready[record.number] = record
        elif state == "fed":
            of_step.num_fed += 1
        elif state == "retired":
            of_step.num_live -= 1

    def lease(self, record: PlannedGroup, now: float) -> None:
        """Record that a group is leased; a further lease changes nothing."""
        if record.state == "pending":
            self.move(record, "leased")
            record.leased_at = now

    def deliver(self, record: PlannedGroup, worker_id: str, oldest_version: int, now: float) -> None:
        record.oldest_version, record.worker_id, record.delivered_at = oldest_version, worker_id, now
        self.move(record, "delivered")

    def top_up(self, record: PlannedGroup, num_kept: int) -> None:
        """Queue a group that was delivered, or whose last lease failed, for the rollouts that it lacks beside those it
        keeps.
        """
        record.num_kept, record.num_top_ups = num_kept, record.num_top_ups + 1
        record.failed_by.clear()  # no worker has tried the next samples
        if record.state != "pending":
            self.move(record, "pending")

    def score(self, record: PlannedGroup, is_flat: bool, now: float) -> None:
        self.move(record, "ready")
        record.is_flat, record.ready_at = is_flat, now

    def hold(self, record: PlannedGroup) -> None:
        """Do not feed this group, even when it is ready, until `release`."""
        record.is_held = True
        self._by_step[record.step].ready.pop(record.number, None)

    def release(self, record: PlannedGroup) -> None:
        if record.is_held and record.state == "ready":
            self._by_step[record.step].ready[record.number] = record
        record.is_held = False

    def retire(self, record: PlannedGroup, why: str) -> None:
        """Retire a group: it will never be trained on.

        Raises:
            InvariantError: the group is fed, trained or retired already.
        """
        for ticket, num_samples in list(record.supplied_by.items()):
            self.supply(record, ticket, -num_samples)
        self.move(record, "retired")
        record.why = why
        self._by_step[record.step].num_uninformative += why == UNINFORMATIVE

    def unit_of(self, record: PlannedGroup) -> tuple[int, int]:
        """Return the unit that a group is leased with: its step and its first number."""
        return record.step, record.number - record.number % self.groups_per_unit

    def push_pending(self, record: PlannedGroup) -> None:
        """Queue the record's unit for a lease, earliest step first, then in issue order."""
        unit = self.unit_of(record)
        if unit not in self._is_pending:
            self._is_pending.add(unit)
            heapq.heappush(self._pending, unit)

    @property
    def num_queued(self) -> int:
        """Upper bound of the groups in queued units; some may be retired."""
        return len(self._pending) * self.groups_per_unit

    def is_queued(self, last_step: int) -> bool:
        """Whether a unit of a step up to this one is queued; its groups may be retired."""
        return bool(self._pending) and self._pending[0][0] <= last_step

    def first_pending(self) -> tuple[int, int] | None:
        """Return (step, first number) of the next unit to lease, or None. Drops units without pending groups."""
        while self._pending:
            unit = self._pending[0]
            if any(record.state == "pending" for record in self.unit_records(unit)):
                return unit
            self._drop_first()
        return None

    def pop_unit(self) -> list[PlannedGroup]:
        """Remove the first unit and return its groups that are not retired. In a unit of several, groups with a result
        are sampled again to keep the batch's shape, and their second result is refused as a duplicate.
        """
        unit = self._drop_first()
        return [record for record in self.unit_records(unit) if record.state != "retired"]

    def _drop_first(self) -> tuple[int, int]:
        unit = heapq.heappop(self._pending)
        self._is_pending.discard(unit)
        return unit

    def unit_records(self, unit: tuple[int, int]) -> list[PlannedGroup]:
        step, first = unit
        numbers = range(first, first + self.groups_per_unit)
        return [r for r in (self._records.get(n) for n in numbers) if r is not None and r.step == step]

    def forget_below(self, step: int) -> None:
        """Drop the groups of steps below `step`, which a checkpoint covers."""
        for old in [key for key in self._by_step if key < step]:
            for record in self._by_step.pop(old).records:
                del self._records[record.number]

    def __iter__(self) -> Iterator[PlannedGroup]:
        return iter(self._records.values())

    def __len__(self) -> int:
        return len(self._records)


def _add(counts: dict[str, int], key: str, count: int) -> None:
    """Add to a count, and remove it when it is zero."""
    counts[key] = counts.get(key, 0) + count
    if not counts[key]:
        del counts[key]


#: What is known of a worker when it gets a lease: that it is of use; nothing, for it has brought no result yet; that it
#: was too slow before.
Standing = Literal["known", "new", "slow"]


@dataclass(slots=True)
class LeaseTable:
    """The open leases, by id, by group and by worker. A lease past its deadline stays open until it is closed.
    `next_id`: no lease has had this id or a later one; `first_id`: the first lease of this head, which may not know
    earlier ones. `installed_at`: the newest weights that its worker had said it has when it got the lease; None if
    there are none. `changed`: workers whose leases changed since `take_changed`. `_newest`: by step, and by what was
    known of the worker, the newest lease on each train group, the first granted first.
    """

    next_id: int = 1
    first_id: int = 1
    _open: dict[int, tuple[str, Lease]] = field(default_factory=dict)
    _by_group: dict[GroupRef, dict[int, None]] = field(default_factory=dict)
    _by_worker: dict[str, dict[int, None]] = field(default_factory=dict)
    _samples: dict[str, int] = field(default_factory=dict)
    installed_at: dict[int, SnapshotRef | None] = field(default_factory=dict)
    deadlines: LazyHeap[int, float] = field(default_factory=LazyHeap)
    changed: dict[str, None] = field(default_factory=dict)
    _newest: dict[int, dict[Standing, LazyHeap[int, float]]] = field(default_factory=dict)
    _standings: dict[int, Standing] = field(default_factory=dict)

    def start_at(self, lease_id: int) -> None:
        """Number further leases from here on: an earlier head granted those before."""
        self.next_id = self.first_id = max(self.next_id, lease_id)

    def take_changed(self) -> list[str]:
        changed = list(self.changed)
        self.changed.clear()
        return changed

    def take_id(self) -> int:
        """Return an id that no lease has had."""
        self.next_id += 1
        return self.next_id - 1

    def add(
        self, worker_id: str, lease: Lease, installed: SnapshotRef | None = None, standing: Standing = "known"
    ) -> None:
        """Add a lease held by this worker, which has these weights.

        Raises:
            InvariantError: the lease is granted already.
        """
        if lease.lease_id in self._open:
            raise InvariantError(f"lease {lease.lease_id} granted twice")
        self._open[lease.lease_id] = (worker_id, lease)
        self._standings[lease.lease_id] = standing
        self.installed_at[lease.lease_id] = installed
        self._index(lease, is_newest=False)
        self._by_group.setdefault(lease.group, {})[lease.lease_id] = None
        self._index(lease, is_newest=True)
        self._by_worker.setdefault(worker_id, {})[lease.lease_id] = None
        self._samples[worker_id] = self._samples.get(worker_id, 0) + lease.num_samples
        self.changed[worker_id] = None
        self.deadlines.set(lease.lease_id, lease.deadline)

    def prolong(self, lease_id: int, deadline: float) -> None:
        worker_id, lease = self._open[lease_id]
        self._open[lease_id] = worker_id, replace(lease, deadline=deadline, seconds=deadline - lease.granted_at)
        self.deadlines.set(lease_id, deadline)

    def get(self, lease_id: int) -> tuple[str, Lease] | None:
        return self._open.get(lease_id)

    def close(self, lease_id: int) -> tuple[str, Lease]:
        worker_id, lease = self._open.pop(lease_id)
        self.changed[worker_id] = None
        self.deadlines.drop(lease_id)
        del self.installed_at[lease_id]
        self._samples[worker_id] -= lease.num_samples
        self._index(lease, is_newest=False)
        del self._standings[lease_id]
        del self._by_group[lease.group][lease_id]
        if not self._by_group[lease.group]:
            del self._by_group[lease.group]
        self._index(lease, is_newest=True)
        del self._by_worker[worker_id][lease_id]
        if not self._by_worker[worker_id]:
            del self._by_worker[worker_id], self._samples[worker_id]
        return worker_id, lease

    def _index(self, lease: Lease, is_newest: bool) -> None:
        """Add the newest lease on this lease's group to `_newest`, or remove it (before the leases on it change)."""
        lease_ids = self._by_group.get(lease.group)
        if not lease_ids or lease.group.kind != "train":
            return
        newest, heaps = max(lease_ids), self._newest.setdefault(lease.step, {})
        standing = self._standings[newest]
        if is_newest:
            heaps.setdefault(standing, LazyHeap()).set(newest, self._open[newest][1].granted_at)
            return
        heaps[standing].drop(newest)
        if not heaps[standing]:
            del heaps[standing]
        if not heaps:
            del self._newest[lease.step]

    def prove(self, worker_id: str) -> None:
        """The worker brought its first result: it is new no more."""
        for lease_id in self._by_worker.get(worker_id, ()):
            if self._standings[lease_id] == "new":
                lease = self._open[lease_id][1]
                self._index(lease, is_newest=False)
                self._standings[lease_id] = "known"
                self._index(lease, is_newest=True)

    def longest_held(self, step: int) -> list[tuple[Standing, str, Lease]]:
        """Return, by what was known of the worker, the worker and the lease of the train group of this step whose
        newest lease was granted first.
        """
        heaps = self._newest.get(step, {}).items()
        firsts = ((standing, heap.first_key()) for standing, heap in heaps)
        return [(standing, *self._open[lease_id]) for standing, lease_id in firsts if lease_id is not None]

    def of_group(self, group: GroupRef) -> tuple[int, ...]:
        return tuple(self._by_group.get(group, ()))

    def of_worker(self, worker_id: str) -> tuple[int, ...]:
        return tuple(self._by_worker.get(worker_id, ()))

    def samples_of(self, worker_id: str) -> int:
        """Samples that are leased to the worker and not delivered yet."""
        return self._samples.get(worker_id, 0)

    def open_leases(self) -> list[tuple[str, Lease]]:
        return list(self._open.values())

    def __len__(self) -> int:
        return len(self._open)
