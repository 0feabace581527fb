"""Which worker gets which groups next. Frontier first: the earliest step's groups go out before any later one's, with
backfill up to what the staleness bound lets be sampled ahead (RolloutPipe's frontier dispatch as a priority, not a
gate).
"""

from __future__ import annotations

import itertools
from collections.abc import Container, Iterator

from echo2.control import commands as do
from echo2.control import portions, results, staleness, strangers
from echo2.control.fleet import Kind, Worker
from echo2.control.groups import GroupRecord
from echo2.control.seeds import group_seed
from echo2.control.state import PlannerState
from echo2.errors import InvariantError
from echo2.types import GroupRef, Lease, SnapshotRef

#: Batches a worker may hold: one that runs and one that waits, so that a round trip to the head costs it nothing.
BATCHES_PER_WORKER = 2
#: Groups in the queue that are passed over for one worker, because others are to have them.
UNITS_LEFT_MAX = 64


def grant(state: PlannerState, now: float) -> None:
    """Keep every worker busy: first everybody gets a batch to run, then one to wait, earliest step first.

    Workers of one kind (by snapshot, and by a stranger's ticket) may sample the same groups, and what there is to
    sample only gets less while leases are granted: once there is nothing for one of them, there is nothing for any.
    """
    state.settle(now)
    if not state.published:
        return
    for depth in range(BATCHES_PER_WORKER):
        served: set[Kind] = set()
        while (worker := next_worker(state, depth, served)) is not None:
            if not fill(state, worker, depth, now):
                served.add((worker.installed, worker.ticket))
            state.settle(now)


def next_worker(state: PlannerState, depth: int, served: Container[Kind]) -> Worker | None:
    """The least loaded of those with room for a batch at this depth, who came first among equals; not of the kinds that
    are in `served`.
    """
    firsts = (
        ranking.first()
        for kind, ranking in state.fleet.rankings(depth).items()
        if kind not in served and (state.options.deterministic or is_published(state, kind[0]))
    )
    best = min((rank for rank in firsts if rank is not None), default=None)
    return None if best is None else state.fleet.get(best[-1])


def fill(state: PlannerState, worker: Worker, depth: int, now: float) -> bool:
    """Give it batches until it has more than `depth` of them; False if there were too few."""
    most = depth * state.fleet.at_once(worker) * state.options.group_size
    while state.leases.samples_of(worker.worker_id) <= most:
        if (depth > 0 and not is_plenty(state, worker)) or not grant_batch(state, worker, now):
            return False
    return True


def is_plenty(state: PlannerState, worker: Worker) -> bool:
    """A second batch may wait at this worker only while there is a batch for everybody. Otherwise who is done first
    shall have it: a group that waits behind another batch is the last of its step, and the learner waits with it.
    """
    if state.fleet.num_active == 1:
        return True
    last = min(last_step(state, worker), state.options.max_steps - 1)
    num_unleased = sum(room(state, step) for step in range(state.version, last + 1))
    num_unleased += state.groups.first_pending() is not None
    fleet = state.fleet
    groups = fleet.active_groups if fleet.most_groups is None else fleet.num_active * fleet.most_groups
    return num_unleased >= min(groups, fleet.active_groups)


def grant_batch(state: PlannerState, worker: Worker, now: float) -> bool:
    leases = eval_leases(state, worker, now) or train_leases(state, worker, now)
    if not leases:
        return False
    steps = sorted({lease.step for lease in leases})
    reason = f"room at the worker for {leases[0].group.kind} groups of step{'s' if len(steps) > 1 else ''} "
    reason += ", ".join(map(str, steps))
    state.emit(do.GrantLeases, reason, worker_id=worker.worker_id, leases=tuple(leases))
    return True


def eval_leases(state: PlannerState, worker: Worker, now: float) -> list[Lease]:
    """Held-out tasks for a machine of the owner: what a stranger would say of them is not evidence."""
    if not worker.is_own or worker.installed is None or not is_published(state, worker.installed):
        return []
    taken = state.evaluation.take(worker.installed.version, worker.capacity_groups * state.options.group_size)
    if taken is None:
        return []
    version = taken[0].ref.version
    leases = [new_lease(state, state.evaluation.group(version, at), version, at, range(1), now) for at in taken[1]]
    for lease in leases:
        state.open_lease(worker.worker_id, lease)
    return leases


def train_leases(state: PlannerState, worker: Worker, now: float) -> list[Lease]:
    """The earliest groups this worker may sample: queued ones, else new ones. Deterministic mode: exactly one unit."""
    leases: list[Lease] = []
    idle = not state.leases.samples_of(worker.worker_id)
    is_first, most = batch_groups(state, worker, idle)
    most = strangers.most_leases(state, worker, most)
    while len(leases) < most and (unit := next_unit(state, worker)):
        for record in unit:
            if is_first:
                portions.cut(state, record)
            leases.append(lease_portion(state, worker, record, now))
    if state.frontier is not None and leases:
        state.frontier.leased(leases[0].step, now, idle)
    return leases


def batch_groups(state: PlannerState, worker: Worker, idle: bool) -> tuple[bool, int]:
    """Groups for this worker's next batch, at most; before that, whether it is to begin a step with a portion of one
    instead.
    """
    if state.options.deterministic:
        return False, 1
    if state.frontier is None:
        return False, worker.capacity_groups
    last = min(last_step(state, worker), state.options.max_steps - 1)
    left = {step: num for step in range(state.version, last + 1) if (num := room(state, step)) > 0}
    step, num_left, num_workers = min(left, default=last), sum(left.values()), max(1, state.fleet.num_active)
    if portions.most_portions(state) > 1 and state.frontier.is_first(step, num_workers, idle):
        return True, 1
    return False, min(state.fleet.at_once(worker), state.frontier.batch(step, num_left, num_workers, idle))


def lease_portion(state: PlannerState, worker: Worker, record: GroupRecord, now: float) -> Lease:
    """A lease for this worker on what is still to be sampled of the group: all of it, or its next portion."""
    is_whole = record.num_portions == 1
    first = 0 if is_whole else portions.next_unleased(state, record)
    if first is None:
        raise InvariantError(f"group {record.number} was queued, and nothing of it is to be leased")
    lease = lease_of(state, record, first, now)
    state.open_lease(worker.worker_id, lease)
    if record.state == "pending":
        if is_whole or portions.next_unleased(state, record) is None:
            state.groups.move(record, "leased")
        else:
            state.groups.push_pending(record)
    return lease


def lease_of(state: PlannerState, record: GroupRecord, first_sample: int, now: float) -> Lease:
    """A lease on the portion of this group that begins there, not yet in the table."""
    samples = range(first_sample, first_sample + portions.num_samples(state, record))
    return new_lease(state, GroupRef("train", record.number), record.step, record.number, samples, now)


def new_lease(state: PlannerState, group: GroupRef, step: int, cursor: int, samples: range, now: float) -> Lease:
    """A lease for these attempts of a group, not yet in the table. An evaluation is of exactly version `step`."""
    options = state.options
    exact = step if group.kind == "eval" else None
    if group.kind == "train" and options.deterministic:
        exact = staleness.fixed_version(step, options.max_staleness, options.publish_every)
    return Lease(
        lease_id=state.leases.new_id(),
        group=group,
        step=step,
        cursor=cursor,
        num_samples=len(samples),
        min_version=staleness.min_version(step, options.max_staleness) if exact is None else exact,
        exact_version=exact,
        deadline=now + options.lease_seconds,
        seconds=options.lease_seconds,
        seed=group_seed(options.seed, group),
        first_sample=samples.start,
    )


def next_unit(state: PlannerState, worker: Worker) -> list[GroupRecord]:
    """Groups to lease to this worker, taken from the queue or new: the earliest it may sample. Attempts of a group that
    it samples a portion of already are left to others while their step has something else.
    """
    last = min(last_step(state, worker), state.options.max_steps - 1)
    with_room: Iterator[int] = (step for step in range(state.version, last + 1) if room(state, step) > 0)
    if state.options.deterministic:  # groups are numbered step by step
        with_room = itertools.islice(with_room, 1)
    new_step = next((step for step in with_room if strangers.may_supply(state, worker, step)), None)
    left: list[GroupRecord] = []
    found: list[GroupRecord] = []
    while not found and (pending := state.groups.first_pending()) is not None and len(left) < UNITS_LEFT_MAX:
        if pending[0] > (last if new_step is None else new_step):
            break
        unit = state.groups.pop_unit()
        if _is_left(state, unit, worker, new_step):
            left += unit
        else:
            found = unit
    if not found and new_step is not None and (pending is None or pending[0] > new_step):
        issue_unit(state, new_step)
        state.groups.first_pending()  # drops what is queued and not pending any more
        found = state.groups.pop_unit()  # new groups are queued ahead of every later step
    for record in left:
        state.groups.push_pending(record)
    return found


def _is_left(state: PlannerState, unit: list[GroupRecord], worker: Worker, new_step: int | None) -> bool:
    """Whether others shall have this unit: they sample the other portions, or the worker's ticket may not."""
    if new_step == unit[0].step and portions.is_shared_with(state, unit[0], worker):
        return True
    return not strangers.may_supply(state, worker, unit[0].step) or strangers.leaves_to_others(state, worker, unit)


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
    if worker.installed is None or not is_published(state, worker.installed):
        return -1
    return staleness.last_step(worker.installed.version, state.admission.bound)


def is_published(state: PlannerState, ref: SnapshotRef | None) -> bool:
    """Whether it counts: of the surviving history, and young enough."""
    return ref is not None and state.published.get(ref.version) == ref
