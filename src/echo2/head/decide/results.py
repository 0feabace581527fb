"""The end of a lease, with a result that is accepted or refused or without one; and the groups that are given up.

A refusal is one word, which is counted, and a readable reason; so is the retirement of a group.

A stranger's group wastes the seconds of the head beyond `FAR` times the usual ones, by its rewards or by its replay in
the environment. Usual is the mean of the owner's groups, which no stranger can raise; until there is one, the mean of
all groups that wasted nothing. Each whole second costs the ticket a lease of its credit, as when a reward fails.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

from echo2.core.errors import counted
from echo2.core.types import GroupRef, Lease, LostRollout
from echo2.head.decide import commands as do
from echo2.head.decide import events as ev
from echo2.head.decide import pacing
from echo2.head.decide.groups import FAILURES, MAX_ATTEMPTS, OWN, TOP_UPS_MAX, UNINFORMATIVE, PlannedGroup
from echo2.head.decide.state import PlannerState
from echo2.head.fleet.decide.fleet import UNKNOWN, Worker
from echo2.head.fleet.decide.measurements import UsualSeconds
from echo2.head.strangers.decide import checks, strangers
from echo2.head.strangers.decide.trust import MALFORMED_COST, REFUSED_COST

#: Groups that dynamic sampling replaces for one step, at most, as a multiple of the step's size. A step must end even
#: if every task is too easy or too hard. If two in three tasks teach nothing, the task set should be changed instead.
RESAMPLED_MAX = 2.0
#: A stranger's group may take this many times the usual seconds: some honest texts take longer than others.
FAR = 10.0


def judge(state: PlannerState, event: ev.GroupDelivered) -> tuple[str, str] | None:
    """Return None if the result is the first valid one of an open lease; otherwise (refusal, reason).

    late: the lease is over, or its weights are no longer valid.  duplicate: the group has a result already.
    malformed: the result does not match the lease, or names weights that never existed.  stale: a token is older than
    the lease allowed.
    """
    done = has_result(state, event.group)
    open_lease = state.leases.get(event.lease_id)
    if open_lease is None:
        if done:
            return "duplicate", f"{event.group} has a result already"
        return "late", f"lease {event.lease_id} is over"
    worker_id, lease = open_lease
    if worker_id != event.worker_id:
        return "malformed", f"lease {event.lease_id} is held by {worker_id}"
    if lease.group != event.group or lease.num_samples != event.num_samples:
        return (
            "malformed",
            f"leased {counted(lease.num_samples, 'sample')} of {lease.group}, got {event.num_samples} of {event.group}",
        )
    if done:
        return "duplicate", f"{event.group} has a result already"
    if event.oldest_version < lease.min_version:
        age = pacing.staleness(lease.step, event.oldest_version)
        return "stale", f"its oldest token would be {age} versions old at step {lease.step}"
    if (unknown := _unknown_weights(state, event, lease)) is not None:
        return "late" if is_from_before(state, lease) else "malformed", unknown
    if lease.exact_version is not None and event.newest_version != lease.exact_version:
        return "malformed", f"sampled with version {event.newest_version}, leased for exactly {lease.exact_version}"
    return None


def is_from_before(state: PlannerState, lease: Lease) -> bool:
    """Whether a lease was granted before the learner fell back or a new head took over, or up to a lease later: its
    worker may not have heard.
    """
    return lease.granted_at < state.training.took_over_at + state.options.lease_seconds


def _unknown_weights(state: PlannerState, event: ev.GroupDelivered, lease: Lease) -> str | None:
    """Return why the named weights are invalid or can't be checked, or None. They are invalid if a version is above the
    step's own; if a stranger names one below what it had installed, for versions never fall; and if one whose tokens
    are checked names several, for it would choose where they change (`Config.swap_of`). They can't be checked if a
    stranger names a version that is not published in its lineage.

    Honest workers send such a group after the learner fell back, or after a new head took over that does not know every
    earlier version: if the lease was granted before that, or shortly after. Machines of the owner are trusted, and in
    deterministic runs the weights are the same in every lineage.
    """
    if event.newest_version > lease.step:
        return f"tokens of version {event.newest_version}; step {lease.step} trains version {lease.step}"
    worker = state.fleet.get(event.worker_id)
    if state.options.deterministic or (worker is not None and worker.is_own):
        return None
    had = state.leases.installed_at[event.lease_id]
    if had is not None and had.lineage == event.lineage and event.oldest_version < had.version:
        return f"tokens of version {event.oldest_version}; the worker had version {had.version} when it got the lease"
    if worker is not None and worker.draws and event.oldest_version != event.newest_version:
        return f"tokens of versions {event.oldest_version} to {event.newest_version}; a stranger's group has one"
    for version in (event.oldest_version, *event.versions_between, event.newest_version):
        ref = state.snapshots.published.get(version)
        if ref is None or ref.lineage != event.lineage:
            named = f"version {version} of lineage {event.lineage}"
            return f"sampled with {named}, which is not published, so it cannot be checked"
    return None


def has_result(state: PlannerState, group: GroupRef) -> bool:
    """Whether no further result is expected for this group: it has a valid one, or was given up."""
    if group.kind == "eval":
        return state.evaluation.is_done(group)
    record = state.groups.get(group.number)
    return record is None or record.state not in ("pending", "leased")


def end_lease(state: PlannerState, lease_id: int, outcome: str, reason: str) -> None:
    """Close a lease that gave no result, and queue its group again, or give the group up after too many tries. Does
    nothing if the lease was just closed, because its group was given up with another of its leases.
    """
    if state.leases.get(lease_id) is None:
        return
    worker_id, lease = state.close_lease(lease_id)
    _emit_closed(state, worker_id, lease, outcome, reason)
    if lease.group.kind == "eval":
        if state.evaluation.put_back(lease.group) >= MAX_ATTEMPTS and outcome != "retired":
            give_up(state, lease.group, "gave_up", f"{MAX_ATTEMPTS} leases brought no result; the last: {reason}")
        return
    worker = state.fleet.get(worker_id)
    if outcome not in strangers.NO_FAULT:
        strangers.failed(state, worker, strangers.held_seconds(state, lease))
    record = state.groups.get(lease.group.number)
    if record is None or record.state not in ("pending", "leased"):
        return
    if record.state == "leased" and not state.leases.of_group(lease.group):
        state.groups.move(record, "pending")
    if outcome not in ("revoked", "superseded"):  # these outcomes say nothing about the group
        strangers.count_attempt(state, record, worker)
    if record.attempts >= MAX_ATTEMPTS:
        give_up(state, lease.group, "gave_up", f"{record.attempts} leases brought no result; the last: {reason}")


def release(state: PlannerState, group: GroupRef, reason: str) -> None:
    """Take back all leases on a group whose result is no longer needed."""
    take_back(state, state.leases.of_group(group), reason, "revoked")


def take_back(state: PlannerState, lease_ids: Iterable[int], reason: str, outcome: str) -> None:
    """End these leases and tell their workers."""
    for lease_id in lease_ids:
        worker_id, _ = state.leases.get(lease_id) or ("", None)
        end_lease(state, lease_id, outcome, reason)
        state.emit(do.RevokeLease, reason, worker_id=worker_id, lease_ids=(lease_id,))


def delivered(state: PlannerState, event: ev.GroupDelivered, now: float) -> None:
    """Handle a delivered group: refuse it with a reason, or accept it and ask for its rewards."""
    _replayed(state, event.worker_id, event.replay_seconds)
    refusal = judge(state, event)
    if refusal is not None:
        word, reason = refusal
        cost = MALFORMED_COST if word == "malformed" else REFUSED_COST
        _refuse(state, event, word, reason, cost, event.group, event.num_tokens, event.seconds)
        return
    _, lease = state.close_lease(event.lease_id, is_in=True)
    worker = state.fleet.get(event.worker_id)
    if worker is not None and worker.ticket == UNKNOWN and event.is_own:
        state.fleet.recognise(worker)
    is_usual = worker is None or worker.is_own or not strangers.own_can_work(state)
    is_whole = event.group.kind == "train" and lease.num_samples == state.options.group_size
    if is_usual and is_whole:  # held-out tasks and top-ups usually have fewer samples
        state.measurements.lease_done(strangers.held_seconds(state, lease))
    state.penalties.succeed(event.worker_id, state.newest_had(event.worker_id, event.newest_version))
    if worker is not None:
        if not worker.is_proven:
            state.leases.prove(worker.worker_id)
        seconds = state.fleet.deliver(worker, event.num_samples, not state.options.deterministic, now)
        state.measurements.batch_done(seconds)
    record = state.groups.get(event.group.number) if event.group.kind == "train" else None
    _accept(state, event, lease)
    if record is not None:
        state.groups.deliver(record, event.worker_id, event.oldest_version, now)
        if not state.options.deterministic:  # there, other leases keep their batch's shape
            overtaken(state, lease, worker is not None and worker.is_own, now)
            take_back(state, state.leases.of_group(event.group), "another result came first", "superseded")
        if not event.logged:
            checks.delivered(state, record, worker, state.snapshots.published.get(event.newest_version))
    is_retired = record is not None and record.state == "retired"
    is_unproven = record is not None and (record.is_held or is_retired)
    if worker is not None and not (worker.is_own or is_unproven):
        strangers.earn(state, worker.ticket)
    if is_retired:
        return
    num_rollouts = event.num_samples if event.num_rollouts is None else event.num_rollouts
    if record is not None and num_rollouts < state.options.min_group and (event.lost or lease.first_sample):
        _top_up(state, record, num_rollouts, event.lost)
        return
    state.emit(do.ScoreGroup, "all its rollouts are in", group=event.group, rollouts=event.rollouts)


def overtaken(state: PlannerState, lease: Lease, is_own: bool, now: float) -> None:
    """Record which workers began this lease's group earlier and are not done. `is_own`: a machine of the owner is; a
    stranger's result, which may be false, says nothing about the owner's machines.
    """
    for lease_id in state.leases.of_group(lease.group):
        worker_id, _ = state.leases.get(lease_id) or ("", lease)
        worker = state.fleet.get(worker_id)
        if worker is not None and lease_id < lease.lease_id and (is_own or not worker.is_own):
            seconds = state.fleet.came_late(worker, state.measurements.lease_seconds, now)
            reason = f"others were done sooner with {counted(worker.late_in_a_row, 'group')} of its in a row"
            state.tell_rest(worker_id, seconds, reason)


def _accept(state: PlannerState, event: ev.GroupDelivered, lease: Lease) -> None:
    """Accept the result for its group, and close its lease."""
    reason = "the first valid result for this group"
    state.emit(
        do.AcceptDelivery,
        reason,
        worker_id=event.worker_id,
        lease_id=event.lease_id,
        group=event.group,
        oldest_version=event.oldest_version,
        newest_version=event.newest_version,
        num_tokens=event.num_tokens,
        seconds=event.seconds,
        rollouts=event.rollouts,
        lost=event.lost,
    )
    _emit_closed(state, event.worker_id, lease, "accepted", reason)


def _emit_closed(state: PlannerState, worker_id: str, lease: Lease, outcome: str, reason: str) -> None:
    state.emit(
        do.CloseLease,
        reason,
        lease_id=lease.lease_id,
        group=lease.group,
        worker_id=worker_id,
        outcome=outcome,
        held_seconds=strangers.held_seconds(state, lease),
    )


def delivery_malformed(state: PlannerState, event: ev.DeliveryMalformed) -> None:
    """Handle a delivery that broke the protocol: refuse it, count it against its worker, and lease the group again. One
    that came too late to be replayed before its lease ended is no breach.
    """
    is_late = event.reason == "late"
    _replayed(state, event.worker_id, event.replay_seconds, is_failed=not is_late)
    open_lease = state.leases.get(event.lease_id)
    group = open_lease[1].group if open_lease is not None and open_lease[0] == event.worker_id else None
    _refuse(state, event, event.reason, event.detail, REFUSED_COST if is_late else MALFORMED_COST, group)


def _refuse(
    state: PlannerState,
    event: ev.GroupDelivered | ev.DeliveryMalformed,
    word: str,
    reason: str,
    cost: float,
    group: GroupRef | None,
    num_tokens: int = 0,
    seconds: float = 0.0,
) -> None:
    """Refuse a result and end its lease. If the worker is at fault, it rests, so that others try the group."""
    state.emit(
        do.RefuseDelivery,
        reason,
        worker_id=event.worker_id,
        lease_id=event.lease_id,
        group=group,
        refusal=word,
        num_tokens=num_tokens,
        seconds=seconds,
    )
    worker = state.fleet.get(event.worker_id)
    # The ledger does not hold leases of evaluations, which an earlier head granted to machines of the owner.
    is_stranger = worker is not None and not worker.is_own and worker.ticket != UNKNOWN
    if cost == MALFORMED_COST or event.lease_id >= state.leases.first_id or is_stranger:
        state.penalties.refused(event.worker_id, cost, reason, state.now)
    open_lease = state.leases.get(event.lease_id)
    if open_lease is not None and open_lease[0] == event.worker_id:
        if worker is not None and word not in strangers.NO_FAULT:
            state.tell_rest(event.worker_id, state.fleet.rest(worker, state.now), f"a result of it was refused: {word}")
        end_lease(state, event.lease_id, word, reason)


def lease_failed(state: PlannerState, event: ev.LeaseFailed, now: float) -> None:
    """Handle a worker's report that it cannot produce a group. One machine's report does not retire a group while
    another could try, because that machine may be broken. The worker rests, so that others try the group. A group that
    keeps rollouts of an earlier lease gets other samples before it is given up.
    """
    open_lease = state.leases.get(event.lease_id)
    if open_lease is None or open_lease[0] != event.worker_id:
        detail = f"lease {event.lease_id} failed, which it does not hold"
        state.penalties.refused(event.worker_id, REFUSED_COST, detail, now)
        return
    _replayed(state, event.worker_id, event.replay_seconds, is_failed=True)
    group = open_lease[1].group
    reason = event.reason
    is_overtaken = reason == "snapshot_gone" and is_from_before(state, open_lease[1])
    end_lease(state, event.lease_id, "late" if is_overtaken else "failed", f"{reason}: {event.detail}")
    worker = state.fleet.get(event.worker_id)
    if worker is not None:
        state.tell_rest(event.worker_id, state.fleet.rest(worker, now), f"it failed a lease: {reason}")
    if FAILURES[reason] or has_result(state, group):
        return
    voice, record = _voice(worker, event.worker_id), state.groups.get(group.number)
    failed_by: Mapping[str, None] = {}
    if group.kind == "eval":
        failed_by = state.evaluation.fail(group, voice)
    elif record is not None:
        failed_by = record.fail(voice)
    is_heard = worker is None or worker.is_own or not strangers.own_can_work(state)
    active = (one for one in state.fleet if not (one.detached or one.standby))  # usually the first one ends the look
    others = (one for one in active if one.is_own or group.kind == "train")
    if not ((len(failed_by) > 1 and is_heard) or all(_voice(one, one.worker_id) in failed_by for one in others)):
        return
    if record is not None and record.num_kept and reason == "environment_failed":
        release(state, group, "all rollouts of this lease failed")
        _top_up(state, record, record.num_kept, (LostRollout(0, reason, event.detail),))
        return
    give_up(state, group, reason, event.detail)


def _voice(worker: Worker | None, worker_id: str) -> str:
    """Return the name under which a report counts once: of each machine of the owner, or of a stranger's ticket."""
    return worker_id if worker is None or worker.is_own else f"ticket {worker.ticket}"


def scored(state: PlannerState, event: ev.GroupScored) -> None:
    """Handle the rewards of a group: it becomes ready, or is replaced if it is uninformative. Does nothing if the group
    was given up or scored meanwhile.
    """
    group = event.group
    _rewarded(state, event)
    record = state.groups.get(group.number) if group.kind == "train" else None
    if group.kind == "eval":
        if not state.evaluation.finish(group):
            return
    elif record is None or record.state != "delivered":
        return
    if record is not None and event.lost and event.num_rollouts < state.options.min_group:
        _top_up(state, record, event.num_rollouts, event.lost, event)
        return
    state.health.succeed()
    state.emit(
        do.KeepScores,
        "its rewards are known",
        group=group,
        is_flat=event.is_flat,
        scores=event.scores,
        lost=event.lost,
        rollouts=event.rollouts,
    )
    if record is not None:
        state.groups.score(record, event.is_flat, state.now)
        replace_flat(state, record)


def _top_up(
    state: PlannerState,
    record: PlannedGroup,
    num_left: int,
    lost: Sequence[LostRollout],
    scored: ev.GroupScored | None = None,
) -> None:
    """Lease a group again for the rollouts that it lacks, which are other samples, or give it up after `TOP_UPS_MAX`
    times: with what is left, its rollouts could not be compared. A batch of fixed shape does not change. A stranger's
    group is lost as a whole before (`serve/results.py`). `scored`: its rewards failed, and `lost` is not recorded yet.
    """
    cause, last = (lost[-1].cause, lost[-1].detail) if lost else ("environment_failed", "before")
    detail = f"{counted(num_left, 'rollout')} left, {state.options.min_group} needed. The last lost: {last}"
    if state.options.deterministic or not num_left or record.num_top_ups >= TOP_UPS_MAX:
        give_up(state, state.train_group(record.number), cause, detail, scored.seconds if scored else 0.0)
        return
    state.groups.top_up(record, num_left)
    state.emit(
        do.TopUpGroup,
        detail,
        number=record.number,
        num_kept=num_left,
        num_top_ups=record.num_top_ups,
        lost=scored.lost if scored else (),
        rollouts=scored.rollouts if scored else None,
    )


def replace_flat(state: PlannerState, record: PlannedGroup) -> None:
    """Dynamic sampling (DAPO, arXiv 2503.14476): a group whose rewards are all equal has no gradient. It is retired,
    and its step gets another one. A step may replace `RESAMPLED_MAX` times its size; further flat groups are kept.
    """
    most = math.ceil(RESAMPLED_MAX * state.options.groups_per_step)
    if not (state.options.dynamic_sampling and record.is_flat and record.state == "ready"):
        return
    if state.groups.num_uninformative(record.step) >= most:
        return
    reason = "its rewards are all equal: there is nothing to learn from it"
    state.groups.retire(record, UNINFORMATIVE)
    release(state, state.train_group(record.number), reason)
    state.emit(do.RetireGroup, reason, number=record.number, why=UNINFORMATIVE)


def give_up(state: PlannerState, group: GroupRef, why: str, detail: str, seconds: float = 0.0) -> None:
    """Retire a group that no further try can help (an evaluation task counts as failed). Too many groups in a row that
    machines of the owner failed stop the run; groups that only strangers failed are replaced. `seconds`: time that the
    head spent on the group.
    """
    is_own_word = True
    if group.kind == "eval":
        state.evaluation.finish(group, why)
        take_back(state, state.leases.of_group(group), detail, "retired")
    else:
        record = state.groups.get(group.number)
        if record is None or record.state not in ("pending", "leased", "delivered"):
            return
        is_own_word = _is_own_word(record, why)
        if record.state == "delivered":
            if (ticket := _sole_supplier(state, record)) is not None:
                strangers.blame(state, ticket, seconds, int(seconds))
        elif not is_own_word and state.options.deterministic and state.groups.num_live(record.step) == 1:
            record.forgive()  # strangers alone can't retire the last group of a step without replacements
            return
        state.groups.retire(record, why)
        take_back(state, state.leases.of_group(group), detail, "retired")
        state.emit(do.RetireGroup, detail, number=group.number, why=why)
    if not is_own_word:
        state.health.fail_at_strangers(f"{why}: {detail}")
        return
    if why == "bad_task":  # found before sampling; good rows take longer and come later: count by number
        num_in_a_row = state.groups.num_alike(group.number) if group.kind == "train" else 0
    else:
        num_in_a_row = state.health.fail()
    if num_in_a_row >= state.options.max_failures:
        stop(state, f"{counted(num_in_a_row, 'group')} failed in a row ({why}). The last: {detail}")


def _is_own_word(record: PlannedGroup, why: str) -> bool:
    """Whether the head or machines of the owner failed this group. If its delivered results are at fault: whether only
    machines of the owner sampled it.
    """
    if why == "bad_task":
        return True
    if record.state == "delivered":
        return not record.supplied_by
    return OWN in record.tried_by


def stop(state: PlannerState, reason: str) -> None:
    """Stop the run; the first reason counts."""
    if state.health.end(reason):
        state.emit(do.StopRun, reason)


def _rewarded(state: PlannerState, event: ev.GroupScored) -> None:
    """Record how long the rewards of a group took, and blame the stranger that wasted some of it."""
    record = state.groups.get(event.group.number) if event.group.kind == "train" else None
    worker = state.fleet.get(record.worker_id) if record is not None else None
    is_own = event.group.kind == "eval" or (worker is not None and worker.is_own)
    ticket = _sole_supplier(state, record) if record is not None else None
    _spent(state, state.measurements.rewards, event.seconds, is_own, ticket, "rewards")


def _replayed(state: PlannerState, worker_id: str, seconds: float, is_failed: bool = False) -> None:
    """Record how long the environment's replay of a worker's result took, likewise. One that failed wasted it all."""
    worker = state.fleet.get(worker_id)
    if worker is None or seconds <= 0:
        return
    if not is_failed:
        ticket = None if worker.is_own else worker.ticket
        _spent(state, state.measurements.replay, seconds, worker.is_own, ticket, "replay in the environment")
    elif not worker.is_own and seconds >= 1.0:
        strangers.blame(state, worker.ticket, seconds, int(seconds))


def _sole_supplier(state: PlannerState, record: PlannedGroup) -> str | None:
    """Return the ticket of the stranger that alone supplied all rollouts of a delivered group, else None."""
    if len(record.supplied_by) == 1 and sum(record.supplied_by.values()) >= state.options.group_size:
        return next(iter(record.supplied_by))
    return None


def _spent(
    state: PlannerState, time: UsualSeconds, seconds: float, is_own: bool, ticket: str | None, what: str
) -> None:
    usual = time.usual
    wasted = 0.0 if is_own or usual is None else seconds - FAR * usual
    if wasted < 1.0:
        time.add(seconds, is_own)
    elif ticket is not None:
        reason = f"the {what} of its group took {seconds:.1f} s, where {usual:.2g} s are usual"
        strangers.blame(state, ticket, wasted, int(wasted), reason)
