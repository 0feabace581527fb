"""Which train group is where. One record a group; one table says which moves are legal.

    pending --lease--> leased --result--> delivered --score--> ready --feed--> fed --step--> trained
       ^------expiry------'                                      ^------------- fall-back -----'
    any of the first four --> retired (with a reason)

A group that is cut (`portions`) is pending until every portion is leased or in.

`delivered` waits for the head's reward process; a result that the worker scored goes from leased to ready. A group
stays bound to the step it was issued for through every move. Trained groups are remembered until a checkpoint covers
their step, because a learner that falls back trains the same groups at the same step again.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from echo2.errors import InvariantError

MOVES: dict[str, frozenset[str]] = {
    "pending": frozenset({"leased", "ready", "delivered", "retired"}),
    "leased": frozenset({"pending", "delivered", "ready", "retired"}),
    "delivered": frozenset({"ready", "retired"}),
    "ready": frozenset({"fed", "retired"}),
    "fed": frozenset({"trained", "ready"}),
    "trained": frozenset({"ready"}),
    "retired": frozenset(),
}


#: Why a group is retired whose rewards are all equal: it has no gradient, and dynamic sampling replaces it.
UNINFORMATIVE = "uninformative"
#: All machines of the run's owner, where strangers are told apart by their tickets.
OWN = ""


@dataclass(slots=True)
class GroupRecord:
    """What the planner knows of one group. `why` it was retired; `is_flat`: its rewards are all equal. `portions_in`:
    of a group that is cut (see `portions`), the first attempts of those that are in. `tried_by`: whose leases on it
    brought nothing, `OWN` or a stranger's ticket; `failed_by`: who said that it can't be produced. `supplied_by`:
    samples that strangers hold or have delivered, by ticket.
    """

    number: int
    step: int
    state: str = "pending"
    attempts: int = 0
    failed_by: dict[str, None] = field(default_factory=dict)
    tried_by: dict[str, None] = field(default_factory=dict)
    supplied_by: dict[str, int] = field(default_factory=dict)
    oldest_version: int | None = None
    num_tokens: int = 0
    worker_id: str = ""
    is_flat: bool = False
    why: str = ""
    num_portions: int = 1
    portions_in: tuple[int, ...] = ()


@dataclass(slots=True)
class StepGroups:
    """The groups of one step in issue order, and what would take a look at each of them: how many are not retired, how
    many are fed and how many were uninformative, those that are ready, in the order in which they became so, and the
    samples that strangers supply, by ticket.
    """

    records: list[GroupRecord] = field(default_factory=list)
    num_live: int = 0
    num_fed: int = 0
    num_uninformative: int = 0
    ready: OrderedDict[int, GroupRecord] = field(default_factory=OrderedDict)
    supplied: dict[str, int] = field(default_factory=dict)


@dataclass(slots=True)
class GroupBook:
    """All groups that are not covered by a checkpoint yet, by number and by step.

    `batch` groups make a *unit*, the smallest thing that is leased: 1, or in deterministic mode the fixed batch.
    """

    groups_per_unit: int = 1
    next_number: int = 0
    _records: dict[int, GroupRecord] = field(default_factory=dict)
    _by_step: dict[int, StepGroups] = field(default_factory=dict)
    _pending: list[tuple[int, int]] = field(default_factory=list)
    _is_pending: set[tuple[int, int]] = field(default_factory=set)

    def issue(self, step: int) -> GroupRecord:
        """A new group for `step`, pending."""
        record = GroupRecord(self.next_number, step)
        self._add(record)
        self.push_pending(record)
        return record

    def restore(self, record: GroupRecord) -> None:
        """A group from the ledger."""
        self._add(record)
        if record.state == "pending":
            self.push_pending(record)

    def _add(self, record: GroupRecord) -> None:
        if record.number in self._records:
            raise InvariantError(f"group {record.number} issued twice")
        self._records[record.number] = record
        of_step = self._by_step.get(record.step)
        if of_step is None:
            of_step = self._by_step[record.step] = StepGroups()
        of_step.records.append(record)
        of_step.num_live += record.state != "retired"
        of_step.num_fed += record.state == "fed"
        of_step.num_uninformative += record.why == UNINFORMATIVE
        if record.state == "ready":
            of_step.ready[record.number] = record
        self.next_number = max(self.next_number, record.number + 1)

    def get(self, number: int) -> GroupRecord | None:
        return self._records.get(number)

    def of_step(self, step: int) -> list[GroupRecord]:
        """Groups bound to this step in issue order, retired ones too."""
        of_step = self._by_step.get(step)
        return [] if of_step is None else list(of_step.records)

    def num_issued(self, step: int) -> int:
        of_step = self._by_step.get(step)
        return 0 if of_step is None else len(of_step.records)

    def num_live(self, step: int) -> int:
        """Issued and not retired."""
        of_step = self._by_step.get(step)
        return 0 if of_step is None else of_step.num_live

    def num_fed(self, step: int) -> int:
        of_step = self._by_step.get(step)
        return 0 if of_step is None else of_step.num_fed

    def num_ready(self, step: int) -> int:
        of_step = self._by_step.get(step)
        return 0 if of_step is None else len(of_step.ready)

    def num_uninformative(self, step: int) -> int:
        """Retired because their rewards were all equal."""
        of_step = self._by_step.get(step)
        return 0 if of_step is None else of_step.num_uninformative

    def supplied(self, step: int) -> Mapping[str, int]:
        """Samples of this step that strangers hold or have delivered, by ticket; not of retired groups."""
        of_step = self._by_step.get(step)
        return {} if of_step is None else of_step.supplied

    def supply(self, record: GroupRecord, ticket: str, num_samples: int) -> None:
        """A stranger has so many more samples of this group in hand; less, where it lost them."""
        if record.state != "retired":
            _add(record.supplied_by, ticket, num_samples)
            _add(self._by_step[record.step].supplied, ticket, num_samples)

    def first_ready(self, step: int) -> GroupRecord | None:
        """Of the groups that are ready, the one that became so first."""
        of_step = self._by_step.get(step)
        return next(iter(of_step.ready.values()), None) if of_step is not None else None

    def nth(self, step: int, index: int) -> GroupRecord | None:
        """The group that was issued for this step after `index` others."""
        of_step = self._by_step.get(step)
        return of_step.records[index] if of_step is not None and index < len(of_step.records) else None

    def highest_number(self, last_step: int) -> int | None:
        """Of all groups of steps up to `last_step` that are remembered."""
        highest = [max(r.number for r in of.records) for step, of in self._by_step.items() if step <= last_step]
        return max(highest, default=None)

    def move(self, record: GroupRecord, state: str) -> None:
        """Change a record's state.

        Raises:
            InvariantError: the table has no such move.
        """
        if state not in MOVES[record.state]:
            raise InvariantError(
                f"group {record.number} of step {record.step}: {record.state} -> {state} is no legal move"
            )
        of_step = self._by_step[record.step]
        if record.state == "ready":
            del of_step.ready[record.number]
        elif record.state == "fed":
            of_step.num_fed -= 1
        record.state = state
        if state == "pending":
            self.push_pending(record)
        elif state == "ready":
            of_step.ready[record.number] = record
        elif state == "fed":
            of_step.num_fed += 1
        elif state == "retired":
            of_step.num_live -= 1

    def retire(self, record: GroupRecord, why: str) -> None:
        """It will never be trained on.

        Raises:
            InvariantError: it is fed, trained or retired already.
        """
        for ticket, num_samples in list(record.supplied_by.items()):
            self.supply(record, ticket, -num_samples)
        self.move(record, "retired")
        record.why = why
        self._by_step[record.step].num_uninformative += why == UNINFORMATIVE

    def unit_of(self, record: GroupRecord) -> tuple[int, int]:
        return record.step, record.number - record.number % self.groups_per_unit

    def push_pending(self, record: GroupRecord) -> None:
        """Queue the record's unit for a lease, earliest step first, then in issue order."""
        unit = self.unit_of(record)
        if unit not in self._is_pending:
            self._is_pending.add(unit)
            heapq.heappush(self._pending, unit)

    def first_pending(self) -> tuple[int, int] | None:
        """(step, first number) of the next unit to lease; units with nothing pending are dropped on the way."""
        while self._pending:
            unit = self._pending[0]
            if any(record.state == "pending" for record in self.unit_records(unit)):
                return unit
            self._drop_first()
        return None

    def pop_unit(self) -> list[GroupRecord]:
        """Take the first unit: its groups that are not retired. In a unit of several, groups with a result are
        sampled again for the sake of the batch's shape, and their second result is refused as a duplicate.
        """
        unit = self._drop_first()
        return [record for record in self.unit_records(unit) if record.state != "retired"]

    def _drop_first(self) -> tuple[int, int]:
        unit = heapq.heappop(self._pending)
        self._is_pending.discard(unit)
        return unit

    def unit_records(self, unit: tuple[int, int]) -> list[GroupRecord]:
        step, first = unit
        numbers = range(first, first + self.groups_per_unit)
        return [r for r in (self._records.get(n) for n in numbers) if r is not None and r.step == step]

    def forget_below(self, step: int) -> None:
        """Drop the groups of steps below `step`: a checkpoint covers them."""
        for old in [key for key in self._by_step if key < step]:
            for record in self._by_step.pop(old).records:
                del self._records[record.number]

    def __iter__(self) -> Iterator[GroupRecord]:
        return iter(self._records.values())

    def __len__(self) -> int:
        return len(self._records)

    def check_invariants(self) -> None:
        for step, of_step in self._by_step.items():
            states = [record.state for record in of_step.records]
            counts = (len(states) - states.count("retired"), states.count("fed"), states.count("ready"))
            if counts != (of_step.num_live, of_step.num_fed, len(of_step.ready)):
                raise InvariantError(f"step {step}: {counts} groups are live, fed and ready, and counted otherwise")
            supplied: dict[str, int] = {}
            for record in of_step.records:
                for ticket, num_samples in record.supplied_by.items():
                    _add(supplied, ticket, num_samples)
            if supplied != of_step.supplied or min(supplied.values(), default=1) < 1:
                raise InvariantError(f"step {step}: strangers supply {supplied}, counted as {of_step.supplied}")
            if of_step.num_uninformative != sum(record.why == UNINFORMATIVE for record in of_step.records):
                raise InvariantError(f"step {step}: {of_step.num_uninformative} uninformative groups are counted")
        for record in self._records.values():
            if record.state == "pending" and self.unit_of(record) not in self._is_pending:
                raise InvariantError(f"group {record.number} is pending but not queued")
            if record.state in ("ready", "fed", "trained") and record.oldest_version is None:
                raise InvariantError(f"group {record.number} is {record.state} without a version")


def _add(counts: dict[str, int], key: str, count: int) -> None:
    """Zeros are not kept."""
    counts[key] = counts.get(key, 0) + count
    if not counts[key]:
        del counts[key]
