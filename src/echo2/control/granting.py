"""Which worker gets which groups next. Frontier first: the earliest step's groups go out before any later one's, with
backfill up to what the staleness bound lets be sampled ahead (RolloutPipe's frontier dispatch as a priority, not a
gate).
"""

from __future__ import annotations

from echo2.control import commands as do
from echo2.control import results, staleness
from echo2.control.fleet import Worker
from echo2.control.groups import GroupRecord
from echo2.control.seeds import group_seed
from echo2.control.state import PlannerState
from echo2.types import GroupRef, Lease

#: Batches a worker may hold: one that runs and one that waits, so that a round trip to the head costs it nothing.
BATCHES_PER_WORKER = 2


def grant(state: PlannerState, now: float) -> None:
    """Keep every worker busy: first everybody gets a batch to run, then one to wait, earliest step first."""
    if not state.published:
        return
    for depth in range(BATCHES_PER_WORKER):
        for worker in by_load(state):
            capacity = worker.capacity_groups * state.options.group_size
            while state.leases.samples_of(worker.worker_id) <= depth * capacity and (
                depth == 0 or is_plenty(state, worker)
            ):
                if not grant_batch(state, worker, now):
                    break
    for worker in state.fleet.attending():
        busy = state.leases.count_of(worker.worker_id) > 0
        worker.idle_since = None if busy else (worker.idle_since if worker.idle_since is not None else now)


def by_load(state: PlannerState) -> list[Worker]:
    return sorted(
        (worker for worker in state.fleet.attending() if not state.fleet.is_resting(worker)),
        key=lambda worker: (state.leases.samples_of(worker.worker_id), worker.joined_at, worker.worker_id),
    )


def is_plenty(state: PlannerState, worker: Worker) -> bool:
    """A second batch may wait at this worker only if idle others would not starve for it."""
    idle = [
        other
        for other in state.fleet.attending()
        if other is not worker and state.leases.samples_of(other.worker_id) == 0
    ]
    if not idle:
        return True
    last = min(last_step(state, worker), state.options.max_steps - 1)
    num_unleased = sum(room(state, step) for step in range(state.version, last + 1))
    num_unleased += state.groups.first_pending() is not None
    return num_unleased > sum(other.capacity_groups for other in idle)


def grant_batch(state: PlannerState, worker: Worker, now: float) -> bool:
    leases = eval_leases(state, worker, now) or train_leases(state, worker, now)
    if not leases:
        return False
    for lease in leases:
        state.leases.add(worker.worker_id, lease)
    steps = sorted({lease.step for lease in leases})
    reason = f"room at the worker for {leases[0].group.kind} groups of step{'s' if len(steps) > 1 else ''} "
    reason += ", ".join(map(str, steps))
    state.emit(do.GrantLeases, reason, worker_id=worker.worker_id, leases=tuple(leases), worker_scores=worker.scores)
    return True


def eval_leases(state: PlannerState, worker: Worker, now: float) -> list[Lease]:
    if worker.installed is None or state.published.get(worker.installed.version) != worker.installed:
        return []
    taken = state.evaluation.take(worker.installed.version, worker.capacity_groups * state.options.group_size)
    if taken is None:
        return []
    version = taken[0].ref.version
    return [new_lease(state, state.evaluation.group(version, at), version, at, now) for at in taken[1]]


def train_leases(state: PlannerState, worker: Worker, now: float) -> list[Lease]:
    """The earliest groups this worker may sample: queued ones, else new ones. Deterministic mode: exactly one unit."""
    records: list[GroupRecord] = []
    options = state.options
    while len(records) < (1 if options.deterministic else worker.capacity_groups):
        unit = next_unit(state, worker)
        if not unit:
            break
        records.extend(unit)
    leases = []
    for record in records:
        leases.append(new_lease(state, GroupRef("train", record.number), record.step, record.number, now))
        if record.state == "pending":
            state.groups.move(record, "leased")
    return leases


def new_lease(state: PlannerState, group: GroupRef, step: int, cursor: int, now: float) -> Lease:
    """A lease for this group, not yet in the table. An evaluation is of exactly the version in `step`."""
    options = state.options
    exact = step if group.kind == "eval" else None
    if group.kind == "train" and options.deterministic:
        exact = staleness.fixed_version(step, options.max_staleness, options.publish_every)
    return Lease(
        lease_id=state.leases.new_id(),
        group=group,
        step=step,
        cursor=cursor,
        num_samples=1 if group.kind == "eval" else options.group_size,
        min_version=staleness.min_version(step, options.max_staleness) if exact is None else exact,
        exact_version=exact,
        deadline=now + options.lease_seconds,
        seconds=options.lease_seconds,
        seed=group_seed(options.seed, group),
    )


def next_unit(state: PlannerState, worker: Worker) -> list[GroupRecord]:
    last = min(last_step(state, worker), state.options.max_steps - 1)
    pending = state.groups.first_pending()
    new_step = next((step for step in range(state.version, last + 1) if room(state, step) > 0), None)
    if pending is not None and pending[0] <= last and (new_step is None or pending[0] <= new_step):
        return state.groups.pop_unit()
    if new_step is None:
        return []
    issue_unit(state, new_step)
    return state.groups.pop_unit()  # new groups are queued ahead of every later step


def issue_unit(state: PlannerState, step: int) -> None:
    """New groups of `step` up to the end of a unit, or of the step."""
    while room(state, step) > 0:
        record = state.groups.issue(step)
        state.emit(do.IssueGroup, f"step {step} still needs groups", number=record.number, step=step)
        if state.groups.next_number % state.groups.groups_per_unit == 0:
            break


def mend_units(state: PlannerState) -> None:
    """A kill of the head may come between the commands of one event. A unit that was issued in part is issued to its
    end, and one of whose leases a part had ended loses the others: its groups are sampled in one batch of fixed shape.
    """
    if not state.options.deterministic:
        return
    last = state.groups.get(state.groups.next_number - 1)
    if last is not None and last.step >= state.version and state.groups.next_number % state.groups.groups_per_unit != 0:
        issue_unit(state, last.step)
    for record in list(state.groups):
        if record.state == "pending":
            for other in state.groups.unit_records(state.groups.unit_of(record)):
                results.release(state, GroupRef("train", other.number), "its batch was broken up by a kill of the head")


def room(state: PlannerState, step: int) -> int:
    """Groups the step still needs. A retired group is replaced, except in deterministic mode, where a replacement's
    number would depend on when the failure was noticed.
    """
    counted = state.groups.num_issued(step) if state.options.deterministic else state.groups.num_live(step)
    return state.options.groups_per_step - counted


def last_step(state: PlannerState, worker: Worker) -> int:
    """The last step this worker may be leased a group of (rule 1, pacing at admission); -1: none."""
    options = state.options
    if options.deterministic:
        last = max(state.published) + options.max_staleness
        while last >= state.version:
            needed = staleness.fixed_version(last, options.max_staleness, options.publish_every)
            if needed in state.retained:
                break
            last -= 1
        return last
    if worker.installed is None or state.published.get(worker.installed.version) != worker.installed:
        return -1
    return staleness.last_step(worker.installed.version, options.max_staleness)
