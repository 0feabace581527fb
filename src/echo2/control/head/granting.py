"""Decides which worker gets which groups next. Frontier first: groups of the earliest step are leased before any later
ones, with backfill of later steps up to the staleness bound (RolloutPipe's frontier dispatch as a priority, not a
gate).
"""

from __future__ import annotations

import itertools
from collections.abc import Container, Iterator

from echo2.control.head import commands as do
from echo2.control.head import results, staleness, strangers
from echo2.control.head.fleet import LOOK_AHEAD, Kind, Worker
from echo2.control.head.groups import PlannedGroup
from echo2.control.head.leases import duration
from echo2.control.head.state import PlannerState
from echo2.control.seeds import group_seed
from echo2.types import GroupRef, Lease, SnapshotRef

#: Queued groups that are skipped at most for one worker, because they are reserved for other workers.
UNITS_LEFT_MAX = 64


def grant(state: PlannerState, now: float) -> None:
    """Keep every worker's slots full, group by group and earliest step first. The worker with the fewest samples comes
    next. Groups are leased to wait at workers only when no slot is free. In deterministic mode, units take the place of
    groups.

    Workers of one kind (same snapshot, and same ticket if strangers) may sample the same groups, and the supply only
    shrinks while leases are granted: once there is nothing for one worker, there is nothing for its whole kind.
    """
    state.settle(now)
    if not state.published:
        return
    grants: dict[tuple[str, str, int], list[Lease]] = {}
    for depth in range(LOOK_AHEAD):
        served: set[Kind] = set()
        while (worker := next_worker(state, depth, served)) is not None:
            leases = next_leases(state, worker, depth, now)
            if not leases:
                served.add((worker.installed, worker.ticket))
            else:  # in deterministic mode leases granted together are sampled together: grant unit by unit
                unit = leases[0].lease_id if state.options.deterministic else 0
                grants.setdefault((worker.worker_id, leases[0].group.kind, unit), []).extend(leases)
            state.settle(now)
    for (worker_id, kind, _), granted in grants.items():
        steps = sorted({lease.step for lease in granted})
        reason = f"free slots at the worker for {kind} groups of step{'s' if len(steps) > 1 else ''} "
        reason += ", ".join(map(str, steps))
        state.emit(do.GrantLeases, reason, worker_id=worker_id, leases=tuple(granted))


def next_worker(state: PlannerState, depth: int, served: Container[Kind]) -> Worker | None:
    """Return the least loaded worker with room at this depth, the first to join among equals, excluding the kinds in
    `served`.
    """
    firsts = (
        ranking.first()
        for kind, ranking in state.fleet.rankings(depth).items()
        if kind not in served and (state.options.deterministic or is_published(state, kind[0]))
    )
    best = min((rank for rank in firsts if rank is not None), default=None)
    return None if best is None else state.fleet.get(best[-1])


def next_leases(state: PlannerState, worker: Worker, depth: int, now: float) -> list[Lease]:
    """Return the next leases for this worker, evaluations first; empty if there is nothing for it now."""
    if depth > 0 and not is_plenty(state, worker):
        return []
    return eval_leases(state, worker, depth, now) or train_leases(state, worker, now)


def is_plenty(state: PlannerState, worker: Worker) -> bool:
    """Whether groups may wait at this worker: only if there are enough to fill the slots of all workers. Otherwise they
    are kept for the first worker to finish, because a group that waits behind others becomes the last of its step, and
    the learner waits for it.
    """
    if state.fleet.num_active == 1:
        return True
    last = min(last_step(state, worker.installed), state.options.max_steps - 1)
    num_unleased = sum(room(state, step) for step in range(state.version, last + 1))
    return num_unleased + state.groups.num_queued >= state.fleet.active_groups


def eval_leases(state: PlannerState, worker: Worker, depth: int, now: float) -> list[Lease]:
    """Lease held-out tasks to a machine of the owner; results of strangers would be no evidence."""
    if not worker.is_own or worker.installed is None or not is_published(state, worker.installed):
        return []
    samples = state.options.eval_samples
    taken = state.evaluation.take(worker.installed.version, -(-state.fleet.room(worker, depth) // samples))
    if taken is None:
        return []
    version = taken[0].ref.version
    leases = [
        new_lease(state, state.evaluation.group(version, at), version, at, samples, now, worker) for at in taken[1]
    ]
    for lease in leases:
        state.open_lease(worker.worker_id, lease)
    return leases


def train_leases(state: PlannerState, worker: Worker, now: float) -> list[Lease]:
    """Lease the earliest group that this worker may sample, from the queue or new; in deterministic mode a unit."""
    if not strangers.has_credit(state, worker):
        return []
    leases: list[Lease] = []
    for record in next_unit(state, worker):
        lease = lease_of(state, record, now, worker)
        state.open_lease(worker.worker_id, lease)
        if record.state == "pending":
            state.groups.move(record, "leased")
            record.leased_at = now
        leases.append(lease)
    if state.frontier is not None and leases:
        state.frontier.leased(leases[0].step, now)
        if not worker.samples:
            worker.first_groups = state.frontier.begin(leases[0].step, state.fleet.num_active)
    return leases


def lease_of(state: PlannerState, record: PlannedGroup, now: float, worker: Worker | None = None) -> Lease:
    """Return a lease on this train group for this worker, not yet in the table."""
    number = record.number
    return new_lease(state, state.train_group(number), record.step, number, state.options.group_size, now, worker)


def new_lease(
    state: PlannerState,
    group: GroupRef,
    step: int,
    cursor: int,
    num_samples: int,
    now: float,
    worker: Worker | None = None,
) -> Lease:
    """Return a lease on a group, not yet in the table. An evaluation samples with exactly version `step`. `worker`:
    who gets it; None: unknown."""
    options = state.options
    full_seconds = state.fleet.full_seconds(worker) if worker is not None and worker.is_own else 0.0
    seconds = duration(options.lease_seconds, full_seconds)
    exact = step if group.kind == "eval" else None
    if group.kind == "train" and options.deterministic:
        exact = staleness.fixed_version(step, options.max_staleness, options.publish_every)
    return Lease(
        lease_id=state.leases.take_id(),
        group=group,
        step=step,
        cursor=cursor,
        num_samples=num_samples,
        min_version=staleness.min_version(step, options.max_staleness) if exact is None else exact,
        exact_version=exact,
        deadline=now + seconds,
        seconds=seconds,
        seed=group_seed(options.seed, group),
    )


def next_unit(state: PlannerState, worker: Worker) -> list[PlannedGroup]:
    """Return the groups to lease to this worker, taken from the queue or new: the earliest it may sample."""
    last = min(last_step(state, worker.installed), state.options.max_steps - 1)
    with_room: Iterator[int] = (step for step in range(state.version, last + 1) if room(state, step) > 0)
    if state.options.deterministic:  # groups are numbered step by step
        with_room = itertools.islice(with_room, 1)
    new_step = next((step for step in with_room if strangers.may_supply(state, worker, step)), None)
    left: list[PlannedGroup] = []
    found: list[PlannedGroup] = []
    while not found and (pending := state.groups.first_pending()) is not None and len(left) < UNITS_LEFT_MAX:
        if pending[0] > (last if new_step is None else new_step):
            break
        unit = state.groups.pop_unit()
        if not strangers.may_supply(state, worker, unit[0].step) or strangers.leaves_to_others(state, worker, unit):
            left += unit
        else:
            found = unit
    if not found and new_step is not None and (pending is None or pending[0] > new_step):
        issue_unit(state, new_step)
        state.groups.first_pending()  # drops queued units that are no longer pending
        found = state.groups.pop_unit()  # new groups are queued ahead of every later step
    for record in left:
        state.groups.push_pending(record)
    return found


def issue_unit(state: PlannerState, step: int) -> None:
    """Issue new groups of `step` up to the end of a unit, or of the step."""
    while room(state, step) > 0:
        record = state.groups.issue(step)
        record.issued_at = state.now
        state.emit(do.IssueGroup, f"step {step} still needs groups", number=record.number, step=step)
        if state.groups.next_number % state.groups.groups_per_unit == 0:
            break


def mend_units(state: PlannerState) -> None:
    """Repair units after the head was killed between the commands of one event. A partly issued unit is completed. If
    some leases of a unit had ended, the others are taken back, because the groups of a unit are sampled in one batch of
    fixed shape.
    """
    if not state.options.deterministic:
        return
    last = state.groups.get(state.groups.next_number - 1)
    if last is not None and last.step >= state.version and state.groups.next_number % state.groups.groups_per_unit != 0:
        issue_unit(state, last.step)
    for record in list(state.groups):
        if record.state == "pending":
            for other in state.groups.unit_records(state.groups.unit_of(record)):
                results.release(state, state.train_group(other.number), "its batch was broken up by a kill of the head")


def room(state: PlannerState, step: int) -> int:
    """Return how many groups the step still needs. A retired group is replaced, except in deterministic mode, where the
    replacement's number would depend on when the failure was noticed.
    """
    counted = state.groups.num_issued(step) if state.options.deterministic else state.groups.num_live(step)
    return state.options.groups_per_step - counted


def last_step(state: PlannerState, installed: SnapshotRef | None) -> int:
    """Return the last step that a worker with this snapshot may sample for (rule 1, pacing at admission); -1: none."""
    options = state.options
    if options.deterministic:
        last = max(state.published) + options.max_staleness
        while last >= state.version:
            needed = staleness.fixed_version(last, options.max_staleness, options.publish_every)
            if needed in state.retained:
                break
            last -= 1
        return last
    if installed is None or not is_published(state, installed):
        return -1
    return staleness.last_step(installed.version, options.max_staleness)


def is_published(state: PlannerState, ref: SnapshotRef | None) -> bool:
    """Whether this snapshot is valid: it belongs to the surviving history and is recent enough."""
    return ref is not None and state.published.get(ref.version) == ref
