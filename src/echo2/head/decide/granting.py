"""Decides which worker gets which groups next. Frontier first: groups of the earliest step are leased before any later
ones, with backfill of later steps up to the staleness bound (RolloutPipe's frontier dispatch as a priority, not a
gate).

A worker with a free slot gets a second lease on a group that is late, before any group without a lease, and the
first valid result counts. A group is late when its lease has run `LATE_AFTER` times as long as leases usually take, or
for `lease_seconds` while that is not known; whether the learner waits for its step already does not matter, because by
then a second lease would come too late.
The one group of a worker that was too slow before is late at once: it shows whether the worker is quicker now, and
nobody waits for it.
Deterministic mode, where a batch's shape is fixed, has no second leases. Both workers sample with the group's seed, so
that taking the first result does not favour shorter completions.

While a snapshot travels, a worker that has it already takes no more than its share of the steps that only this snapshot
may sample. Otherwise the first few to install it would take them all, and the others, a few seconds later, would have
nothing to sample, while the step waits for groups that share an engine or wait at a worker.

A lease lasts for `lease_seconds`, or for twice as long as its worker needs for all that it may hold, at its measured
rate: a worker that is slower than `lease_seconds` must not lose its groups only to get the same ones again. At its
deadline it is extended while the rate is not known yet. Meanwhile a free worker samples the group, too, so nobody waits
for the slow one, and its work is not lost if it comes first. Both are bounded, so that an engine that hangs loses its
groups: `ends_at` says by what. A worker that is away, because its connection closed or the head was restarted, keeps
its leases until it counts as lost.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Iterator
from dataclasses import replace

from echo2.core.decide.seeds import group_seed
from echo2.core.types import GroupRef, Lease, SnapshotRef, Wait
from echo2.head.decide import commands as do
from echo2.head.decide import pacing, results
from echo2.head.decide.groups import OWN, PlannedGroup, Standing
from echo2.head.decide.state import PlannerState
from echo2.head.fleet.decide.fleet import LOOK_AHEAD, UNKNOWN, Rank, Worker
from echo2.head.strangers.decide import strangers

#: Queued groups that are skipped at most for one worker, because they are reserved for other workers.
UNITS_LEFT_MAX = 64
#: Accepted results after which the usual duration of a lease counts as known.
LEASES_KNOWN = 8
#: As a multiple of the usual time from lease to result. In simulations (docs/overlap.md), equal machines sample one
#: group in seven twice at 1.5, and stragglers cost more time at 3.
LATE_AFTER = 2.0
#: Leases on a group, beside which only a worker without work gets one more: in most runs two in a row are late by
#: chance, and hardly ever three.
LEASES_MOST = 3
#: Workers of each kind, the least loaded first, of which one may help with a late group: its own worker may be among
#: them, and others that are on trial.
HELPERS_MOST = 4
#: Steps from the next one on whose groups may have second leases: this is looked through at every event.
LATE_STEPS_MAX = 8
#: While a snapshot travels, its steps are shared, but no longer than this multiple of the usual time of a broadcast: a
#: worker whose link is broken must not keep others from its share.
SHARED_TIMES = 1.5
#: The longest lease, as a multiple of `lease_seconds`.
LEASE_STRETCH_MAX = 8.0
#: How long a lease lasts at least, as a multiple of the time that its worker needs for all groups that it may hold.
FULL_TIMES = 2.0
#: The longest lease of a stranger where no machine of the owner can work, as a multiple of `lease_seconds`; beside one,
#: a stranger's leases are never extended, whatever it did before.
STRANGER_STRETCH = 2.0


def grant(state: PlannerState, now: float) -> None:
    """Keep every worker's slots full, group by group and earliest step first. The worker with the fewest samples comes
    next. Groups are leased to wait at workers only when no slot is free. In deterministic mode, units take the place of
    groups.

    Workers of one kind (same snapshot, and same ticket if strangers) may sample the same groups, and the supply only
    shrinks while leases are granted: once there is nothing for one worker, there is nothing for its whole kind.
    """
    state.settle(now)
    if not state.snapshots.published:
        return
    grants: dict[tuple[str, str, int], list[Lease]] = {}
    for depth in range(LOOK_AHEAD):
        firsts = _first_of_kinds(state, depth)
        while firsts:
            rank, installed, ticket = heapq.heappop(firsts)
            worker, leases = state.fleet.get(rank[-1]), list[Lease]()
            if worker is not None and _has_work(state, installed, depth):
                leases = eval_leases(state, worker, depth, now) or train_leases(state, worker, now)
            if not leases:
                continue
            # in deterministic mode leases granted together are sampled together: grant unit by unit
            unit = leases[0].lease_id if state.options.deterministic else 0
            grants.setdefault((rank[-1], leases[0].group.kind, unit), []).extend(leases)
            state.settle(now)
            if (following := state.fleet.first(depth, (installed, ticket))) is not None:
                heapq.heappush(firsts, (following, installed, ticket))
    for (worker_id, kind, _), granted in grants.items():
        steps = sorted({lease.step for lease in granted})
        reason = f"free slots at the worker for {kind} groups of step{'s' if len(steps) > 1 else ''} "
        reason += ", ".join(map(str, steps))
        state.emit(do.GrantLeases, reason, worker_id=worker_id, leases=tuple(granted))


def _first_of_kinds(state: PlannerState, depth: int) -> list[tuple[Rank, SnapshotRef | None, str]]:
    """Return the least loaded worker with room at this depth, the first to join among equals, of each kind for which
    there may be work: a heap.
    """
    firsts = [
        (rank, installed, ticket)
        for installed, by_ticket in state.fleet.rankings(depth).items()
        if (state.options.deterministic or state.snapshots.has(installed)) and _has_work(state, installed, depth)
        for ticket, ranking in by_ticket.items()
        if (rank := ranking.first()) is not None
    ]
    heapq.heapify(firsts)
    return firsts


def _has_work(state: PlannerState, installed: SnapshotRef | None, depth: int) -> bool:
    """Whether there may be a group for a worker with this snapshot. Groups may wait at a worker (depth 1) only if there
    are enough to fill the slots of all workers. Otherwise they are kept for the first worker to finish, because a group
    that waits behind others becomes the last of its step, and the learner waits for it.
    """
    last = min(last_step(state, installed), state.options.max_steps - 1)
    if depth == 0 or state.fleet.num_active == 1:
        is_there = bool(state.evaluation.rounds) or state.groups.is_queued(last)
        return is_there or any(room(state, step) > 0 for step in range(state.training.version, last + 1))
    num_unleased = sum(room(state, step) for step in range(state.training.version, last + 1))
    return num_unleased + state.groups.num_queued >= state.fleet.active_groups


def eval_leases(state: PlannerState, worker: Worker, depth: int, now: float) -> list[Lease]:
    """Lease held-out tasks to a machine of the owner; results of strangers would be no evidence."""
    if not worker.is_own or worker.installed is None or not state.snapshots.has(worker.installed):
        return []
    samples = state.options.eval_samples
    next_tasks = state.evaluation.take(worker.installed.version, -(-state.fleet.room(worker, depth) // samples))
    if next_tasks is None:
        return []
    version, positions = next_tasks
    seconds = granted_seconds(state, worker)
    leases = [
        new_lease(state, state.evaluation.group(version, at), version, at, samples, now, seconds) for at in positions
    ]
    for lease in leases:
        state.open_lease(worker.worker_id, lease)
    return leases


def train_leases(state: PlannerState, worker: Worker, now: float) -> list[Lease]:
    """Lease the earliest group that this worker may sample, from the queue or new; in deterministic mode a unit."""
    if not strangers.has_credit(state, worker):
        return []
    leases: list[Lease] = []
    seconds = granted_seconds(state, worker)
    for record in next_unit(state, worker):
        lease = lease_of(state, record, now, seconds, num_samples_for(state, record, worker))
        state.open_lease(worker.worker_id, lease)
        state.groups.lease(record, now)
        leases.append(lease)
    if state.width_search is not None and leases:
        state.width_search.leased(leases[0].step, now)
        if not worker.samples:
            state.fleet.begin_step(worker, state.width_search.begin(leases[0].step, state.fleet.num_active))
    return leases


def num_samples_for(state: PlannerState, record: PlannedGroup, worker: Worker) -> int:
    """Return how many samples this worker is to draw for a group: those that it lacks. A stranger draws all of them, so
    that its group is checked and trained on as a whole.
    """
    return state.options.group_size - (record.num_kept if worker.is_own else 0)


def lease_of(state: PlannerState, record: PlannedGroup, granted_at: float, seconds: float, num_samples: int) -> Lease:
    """Return a lease on this train group, not yet in the table. Samples in place of others have other numbers."""
    number = record.number
    lease = new_lease(state, state.train_group(number), record.step, number, num_samples, granted_at, seconds)
    size = state.options.group_size
    return lease if num_samples == size else replace(lease, first_sample=size * record.num_top_ups)


def new_lease(
    state: PlannerState, group: GroupRef, step: int, cursor: int, num_samples: int, granted_at: float, seconds: float
) -> Lease:
    """Return a lease on a group, not yet in the table. An evaluation samples with exactly version `step`."""
    options = state.options
    exact = step if group.kind == "eval" else None
    if group.kind == "train" and options.deterministic:
        exact = pacing.fixed_version(step, options.max_staleness, options.publish_every)
    return Lease(
        lease_id=state.leases.take_id(),
        group=group,
        step=step,
        cursor=cursor,
        num_samples=num_samples,
        min_version=pacing.min_version(step, options.max_staleness) if exact is None else exact,
        exact_version=exact,
        deadline=granted_at + seconds,
        seconds=seconds,
        seed=group_seed(options.seed, group),
    )


def next_unit(state: PlannerState, worker: Worker) -> list[PlannedGroup]:
    """Return the groups to lease to this worker, taken from the queue or new: the earliest it may sample."""
    last = min(last_step(state, worker.installed), state.options.max_steps - 1)
    with_room: Iterator[int] = (step for step in range(state.training.version, last + 1) if room(state, step) > 0)
    if state.options.deterministic:  # groups are numbered step by step
        with_room = itertools.islice(with_room, 1)
    may_take = (step for step in with_room if not has_share(state, worker, step))
    new_step = next((step for step in may_take if strangers.may_supply(state, worker, step)), None)
    skipped_groups: list[PlannedGroup] = []
    groups: list[PlannedGroup] = []
    while not groups and (pending := state.groups.first_pending()) is not None and len(skipped_groups) < UNITS_LEFT_MAX:
        if pending[0] > (last if new_step is None else new_step):
            break
        unit = state.groups.pop_unit()
        if not strangers.may_supply(state, worker, unit[0].step) or strangers.leaves_to_others(state, worker, unit):
            skipped_groups += unit
        else:
            groups = unit
    if not groups and new_step is not None and (pending is None or pending[0] > new_step):
        issue_unit(state, new_step)
        state.groups.first_pending()  # drops queued units that are no longer pending
        groups = state.groups.pop_unit()  # new groups are queued ahead of every later step
    for record in skipped_groups:
        state.groups.push_pending(record)
    return groups


def has_share(state: PlannerState, worker: Worker, step: int) -> bool:
    """Whether this worker holds its share, by slots, of a step that is shared for now."""
    if step <= state.snapshots.last_before(state.options.max_staleness) or state.now >= shared_until(state):
        return False
    leases = (state.leases.get(lease_id) for lease_id in state.leases.of_worker(worker.worker_id))
    num_held = sum(one is not None and one[1].group.kind == "train" and one[1].step == step for one in leases)
    slots = max(1, state.fleet.active_groups)
    return num_held >= math.ceil(state.options.groups_per_step * state.fleet.at_once(worker) / slots)


def shared_until(state: PlannerState) -> float:
    """Return until when the steps that only the newest snapshot may sample are shared; -inf: they are not."""
    if state.options.deterministic or not state.measurements.is_spreading:
        return -math.inf
    usual = state.measurements.typical_broadcast_seconds() or state.options.lease_seconds
    return state.snapshots.published_at + SHARED_TIMES * usual


def issue_unit(state: PlannerState, step: int) -> None:
    """Issue new groups of `step` up to the end of a unit, or of the step."""
    while room(state, step) > 0:
        record = state.groups.issue(step, state.now)
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
    number = state.groups.next_number
    last = state.groups.get(number - 1)
    if last is not None and last.step >= state.training.version and number % state.groups.groups_per_unit != 0:
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
        last = max(state.snapshots.published) + options.max_staleness
        while last >= state.training.version:
            needed = pacing.fixed_version(last, options.max_staleness, options.publish_every)
            if needed in state.snapshots.retained:
                break
            last -= 1
        return last
    if installed is None or not state.snapshots.has(installed):
        return -1
    return pacing.last_step(installed.version, options.max_staleness)


def grant_backup_leases(state: PlannerState, now: float) -> None:
    """Grant second leases on late groups of the steps that may be sampled, the earliest step's first, before any slot
    goes to a group without a lease.
    """
    for step in _open_steps(state):
        while (late := _latest(state, step)) is not None and late[0] <= now:
            _, late_lease, holder = late
            worker, record = _free_worker(state, late_lease, holder), state.groups.get(late_lease.group.number)
            if worker is None or record is None:
                break
            size = num_samples_for(state, record, worker)
            lease = lease_of(state, record, now, granted_seconds(state, worker), size)
            state.open_lease(worker.worker_id, lease)
            reason = f"group {record.number} is late at {holder}: the first result counts"
            state.emit(do.GrantLeases, reason, worker_id=worker.worker_id, leases=(lease,), is_second=True)
            state.settle(now)


def next_at(state: PlannerState) -> float | None:
    """Return when the next group becomes late that a worker with a free slot could take."""
    dues = []
    for step in _open_steps(state):
        late = _latest(state, step)
        if late is not None and _free_worker(state, late[1], late[2]) is not None:
            dues.append(late[0])
    return min(dues, default=None)


def _open_steps(state: PlannerState) -> range:
    """Return the steps of which groups may have second leases: none where no worker has a free slot."""
    options, version = state.options, state.training.version
    if options.deterministic or not state.training.learner_joined or not state.fleet.rankings(0):
        return range(0)
    return range(version, min(version + min(options.max_staleness + 1, LATE_STEPS_MAX), options.max_steps))


def _latest(state: PlannerState, step: int) -> tuple[float, Lease, str] | None:
    """Return when the newest lease on a missing group becomes late, of the group whose is the first: (time, lease,
    worker).
    """
    candidates = state.leases.longest_held(step)
    dues = (
        (_late_at(state, standing, worker_id, lease), lease, worker_id) for standing, worker_id, lease in candidates
    )
    return min(dues, key=lambda due: (due[0], due[1].lease_id), default=None)


def _late_at(state: PlannerState, standing: Standing, worker_id: str, lease: Lease) -> float:
    """Return when a lease is late: of a slow worker at once, of others after the instant in which it was granted. That
    a new worker has brought nothing yet says more if it samples more groups.
    """
    if standing == "slow":
        return min(lease.granted_at, state.now)
    worker, seconds = state.fleet.get(worker_id), state.options.lease_seconds
    if state.measurements.num_leases >= LEASES_KNOWN:
        times = 1 + 1 / state.fleet.at_once(worker) if standing == "new" and worker is not None else LATE_AFTER
        seconds = times * state.measurements.lease_seconds
    return lease.granted_at + max(seconds, math.ulp(lease.granted_at))


def _free_worker(state: PlannerState, lease: Lease, holder: str) -> Worker | None:
    """Return a worker with a free slot that may sample this late group, other than the late worker and those of its
    ticket; preferably the owner's, and with a newer snapshot. The last two may both be slow; with more leases than that
    the answer is long, and the next one only goes to a worker without work.
    """
    late, is_long = state.fleet.get(holder), len(state.leases.of_group(lease.group)) >= LEASES_MOST
    ticket = "" if late is None else late.ticket

    def may_help(worker_id: str) -> bool:
        worker = state.fleet.get(worker_id)
        if worker is None or worker_id == holder or (is_long and worker.samples) or state.fleet.is_on_trial(worker):
            return False
        return strangers.has_credit(state, worker) and strangers.may_supply(state, worker, lease.step)

    usable = [
        (installed.version, by_ticket)
        for installed, by_ticket in state.fleet.rankings(0).items()
        if installed is not None and state.snapshots.has(installed) and last_step(state, installed) >= lease.step
    ]
    usable.sort(key=lambda one: -one[0])
    own = (by_ticket[OWN] for _, by_ticket in usable if OWN in by_ticket)
    others = (one for _, by_ticket in usable for other, one in by_ticket.items() if other not in (OWN, ticket))
    for ranking in itertools.chain(own, others):
        if (worker_id := ranking.first_that(may_help, HELPERS_MOST)) is not None:
            return state.fleet.get(worker_id)
    return None


def granted_seconds(state: PlannerState, worker: Worker) -> float:
    """Return for how many seconds this worker gets a lease."""
    seconds = state.options.lease_seconds
    full_seconds = state.fleet.full_seconds(worker) if worker.is_own else 0.0
    return min(LEASE_STRETCH_MAX * seconds, max(seconds, FULL_TIMES * full_seconds))


def ends_at(state: PlannerState, worker: Worker, lease: Lease) -> float:
    """Return until when this worker may hold the lease."""
    at = lease.granted_at + _longest(state, worker)
    # After a restart of the head a worker may be a stranger until it is back.
    lost_at = state.fleet.silence.get(worker.worker_id) if worker.ticket == UNKNOWN else None
    return at if lost_at is None else min(at, lost_at)


def _longest(state: PlannerState, worker: Worker) -> float:
    seconds = state.options.lease_seconds
    if worker.is_own or worker.ticket == UNKNOWN:
        return granted_seconds(state, worker) if worker.speed.rate > 0 else LEASE_STRETCH_MAX * seconds
    return seconds * (1.0 if strangers.own_can_work(state) else STRANGER_STRETCH)


def extend(state: PlannerState, lease_id: int, now: float) -> bool:
    """Let a lease whose deadline has come go on as long as its worker may hold it. Return whether it does."""
    worker_id, lease = state.leases.get(lease_id) or ("", None)
    worker = state.fleet.get(worker_id)
    if lease is None or worker is None or (until := ends_at(state, worker, lease)) <= now:
        return False
    state.leases.prolong(lease_id, until)
    return True


def waits_for_slow(state: PlannerState, now: float) -> list[Wait]:
    """Return a wait for each worker that has held a lease for longer than `lease_seconds`."""
    oldest: dict[str, tuple[int, float]] = {}
    for worker_id, lease in state.leases.open_leases():
        if now - lease.granted_at > state.options.lease_seconds:
            count, since = oldest.get(worker_id, (0, lease.granted_at))
            oldest[worker_id] = count + 1, min(since, lease.granted_at)
    waits = []
    for worker_id, (count, since) in oldest.items():
        if (worker := state.fleet.get(worker_id)) is not None and not worker.detached:
            waits.append(Wait("head", worker_id, since, since + _longest(state, worker), _why(state, worker, count)))
    return waits


def _why(state: PlannerState, worker: Worker, count: int) -> str:
    full_seconds = state.fleet.full_seconds(worker)
    rate = f"it needs {full_seconds:.0f} s for all that it may hold" if full_seconds else "its rate is not known yet"
    return (
        f"it has held {count} group{'s' * (count > 1)} for longer than schedule.lease_seconds = "
        f"{state.options.lease_seconds:g} ({rate}), and may keep them for {_longest(state, worker):.0f} s. With fewer "
        "--slots a group is done sooner; a larger schedule.lease_seconds gives it more time"
    )
