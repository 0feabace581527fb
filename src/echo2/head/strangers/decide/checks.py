"""Decides which groups of strangers the owner's machines check, and what follows from the verdicts.

drawn       a share of every ticket's groups, and all groups of a newcomer, of a ticket in quarantine, and of a worker
            whose tokens surprise the learner. The draw uses a secret seed that no worker can know (the run's seed could
            be derived from the seeds of its groups).
held        groups of newcomers and of tickets in quarantine are not trained before the verdict, and are retired if it
            is overdue. Until then each counts against the leases that the ticket may hold, so that nobody fills the
            queue. The machine that checks gets no other group before its verdict, which counts for the ticket also
            when it is late.
verdict     a group passes only if every token that the policy drew was judged. A fault quarantines the ticket: its
            groups that are not trained yet are retired `untrusted` and replaced. A fault in quarantine expels every
            worker of the ticket, and the ticket rests. Clean checks in a row end a quarantine.
none        a check without a verdict adds no trust, and several in a row make the ticket a newcomer again.

If the run requires checks and no machine of the owner can check, newcomers get no leases. If it does not, their groups
are trained unchecked. Deterministic runs can't replace groups, so nothing is checked there. Evaluations are sampled by
the owner's machines.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from echo2.core.decide.seeds import mix
from echo2.core.types import GroupRef, SnapshotRef
from echo2.head.decide import commands as do
from echo2.head.decide import events as ev
from echo2.head.decide.groups import PlannedGroup
from echo2.head.decide.state import PlannerState
from echo2.head.fleet.decide.fleet import UNKNOWN, Worker
from echo2.head.strangers.decide import strangers
from echo2.head.strangers.decide.trust import CLEAN_TO_LEAVE, SURPRISE_MAX, DrawnCheck, OpenCheck, Trust

#: Share of the groups of a ticket that are checked (benchmarks/strangers/hostile_sampling.py).
CHECK_SHARE = 0.05
#: A check without a verdict is overdue after this many lease durations, and given up after as many more as the second.
OVERDUE_LEASES, LATE_LEASES = 0.5, 1.0
#: Machines that try one check.
TRIES_MAX = 2
#: Limit of checks running or waiting; no more are drawn beyond it.
OPEN_MAX = 256
#: Seconds that an expelled ticket rests.
EXPELLED_REST_SECONDS = 3600.0
#: Reason for retiring groups of a worker that is not trusted, and for ending a check whose verdict came in time.
UNTRUSTED, VERDICT = "untrusted", "there is a verdict"


def delivered(state: PlannerState, record: PlannedGroup, worker: Worker | None, newest: SnapshotRef | None) -> None:
    """Draw whether an accepted result is checked, and hold it if its ticket is not believed. `newest`: the newest
    weights that it names.
    """
    secret = state.options.check_seed
    if worker is None or worker.is_own or newest is None or secret is None or state.options.deterministic:
        return
    trust = state.trust.of(worker.ticket)
    if worker.ticket != UNKNOWN:
        trust = replace(trust, num_groups=trust.num_groups + 1)
        state.trust.put(worker.ticket, trust)
    holds = trust.is_quarantined or (
        trust.is_new and (state.options.require_checks or any(strangers.checkers(state, worker.form)))
    )
    is_drawn = holds or state.penalties.is_odd(worker.worker_id)
    is_drawn |= mix(mix(secret) ^ record.number) < CHECK_SHARE * 2.0**64
    if not is_drawn:
        return
    if len(state.trust.open) >= OPEN_MAX:
        if holds:
            _reject_unchecked(state, record, worker.ticket, f"{OPEN_MAX} other groups wait to be checked")
        return
    drawn = DrawnCheck(record.number, worker.worker_id, worker.ticket, newest, holds, worker.draws, worker.form)
    _open(state, drawn)
    state.emit(do.RecordCheck, f"drawn of ticket {worker.ticket}", check=drawn)


def recover(state: PlannerState, checks: Iterable[DrawnCheck]) -> None:
    """Restart the checks that were running when the head stopped, so that a restart makes no ticket more trusted."""
    for drawn in checks:
        _open(state, drawn)


def _open(state: PlannerState, drawn: DrawnCheck) -> None:
    until = state.now + OVERDUE_LEASES * state.options.lease_seconds
    state.trust.begin(OpenCheck(drawn, until))
    record = state.groups.get(drawn.number)
    if drawn.holds and record is not None:
        state.groups.hold(record)


def _close(state: PlannerState, number: int, reason: str) -> None:
    if state.trust.end(number) is not None:
        state.emit(do.EndCheck, reason, number=number)


def assign(state: PlannerState) -> None:
    """Give each idle machine of the owner that can check one check, the oldest first."""
    if all(check.checker for check in state.trust.open.values()):
        return
    busy = {check.checker for check in (*state.trust.open.values(), *state.trust.late.values())}
    free = [worker for worker in strangers.checkers(state) if worker.worker_id not in busy]
    for check in state.trust.open.values() if free else ():
        if check.checker:
            continue
        # An engine that checks also keeps the weights that were installed before the current ones.
        able = [one for one in free if one.can_check(check.drawn.form)]
        able = [one for one in able if one.installed is not None and one.installed >= check.drawn.ref]
        able = [one for one in able if one.worker_id not in check.missed_by]
        if not able:
            continue
        chosen = min(able, key=lambda one: (one.installed, one.joined_at, one.worker_id))
        free.remove(chosen)
        check.give_to(chosen.worker_id)
        state.emit(
            do.CheckGroup,
            f"group {check.drawn.number} of {check.drawn.worker_id} is to be checked",
            worker_id=chosen.worker_id,
            group=state.train_group(check.drawn.number),
            ref=check.drawn.ref,
            is_from_stream=check.drawn.is_from_stream,
            form=check.drawn.form,
        )


def checked(state: PlannerState, event: ev.GroupChecked) -> None:
    """Handle a verdict. Ignores verdicts that were not requested or were given up."""
    number = event.group.number
    check = state.trust.asked(number, event.worker_id)
    if check is None:
        return
    is_late = state.trust.end_late(number)
    missed = event.missed or _why_undecided(event)
    if missed:
        if is_late:
            return
        check.miss(event.worker_id)
        others = any(one.worker_id not in check.missed_by for one in strangers.checkers(state, check.drawn.form))
        if len(check.missed_by) < TRIES_MAX and others:
            check.give_to("")  # another machine may still hold these weights
        else:
            _missed(state, check, missed)
        return
    _close(state, number, VERDICT)
    trust = state.trust.of(check.drawn.ticket)
    trust = trust.with_tokens(event.num_tokens, event.surprise, event.variance)
    fault = event.fault
    if not fault and abs(trust.deviations) > SURPRISE_MAX:
        fault = f"with the groups checked before, its tokens are {trust.deviations:+.1f} standard deviations more "
        fault += "surprising than their entropies say: its engine samples from another distribution"
    if fault:
        _fault(state, check, trust, f"group {check.drawn.number} of {check.drawn.worker_id}: {fault}")
        return
    trust = trust.passed()
    if trust.is_quarantined and trust.num_clean >= CLEAN_TO_LEAVE:
        reason = f"quarantine ends: {trust.num_clean} groups in a row were as they should be"
        trust = replace(trust, is_quarantined=False).noted(state.now, reason)
    _record(state, check.drawn.ticket, trust, f"group {check.drawn.number} was as it should be")
    if check.drawn.holds:
        strangers.earn(state, check.drawn.ticket)
        if (record := state.groups.get(check.drawn.number)) is not None:
            state.groups.release(record)


def _why_undecided(event: ev.GroupChecked) -> str:
    """Return why the group cannot pass although no fault was found; empty if it passes, or has a fault."""
    if event.fault or (event.num_tokens and not event.num_skipped):
        return ""
    return f"{event.num_skipped} of its tokens are of versions that the machine does not hold"


def expire(state: PlannerState, now: float) -> bool:
    """Wait no longer for overdue checks, and give up late ones. Returns whether there were any."""
    is_any = False
    while (check := next(iter(state.trust.open.values()), None)) is not None and check.until <= now:
        if check.checker:
            state.trust.wait_longer(check, now + LATE_LEASES * state.options.lease_seconds)
        _missed(state, check, "no verdict came in time")
        is_any = True
    return state.trust.expire_late(now) or is_any


def _record(state: PlannerState, ticket: str, trust: Trust, reason: str) -> None:
    """Record the trust in a ticket durably. Skips workers that have not returned since a restart of the head: their
    ticket is unknown, and a forgery by one of them says nothing about the others."""
    if ticket != UNKNOWN:
        state.trust.put(ticket, trust)
        state.emit(do.RecordTrust, reason, ticket=ticket, trust=trust)


def _missed(state: PlannerState, check: OpenCheck, reason: str) -> None:
    """End a check without a verdict. Its group is retired if it was held."""
    ticket, record = check.drawn.ticket, state.groups.get(check.drawn.number)
    _close(state, check.drawn.number, reason)
    _record(state, ticket, state.trust.of(ticket).missed(state.now), reason)
    if check.drawn.holds and record is not None:
        _reject_unchecked(state, record, ticket, reason)


def _reject_unchecked(state: PlannerState, record: PlannedGroup, ticket: str, reason: str) -> None:
    """Retire a group that could not be checked, and let its ticket rest until the owner's machines have caught up. Does
    nothing if the group was retired before, for another reason.
    """
    if record.state == "retired":
        return
    _retire(state, record, f"ticket {ticket} is not trusted yet, and this group has no verdict: {reason}")
    strangers.rest(state, ticket, state.options.lease_seconds, "its groups could not be checked", is_fault=False)


def _fault(state: PlannerState, check: OpenCheck, trust: Trust, reason: str) -> None:
    is_again = trust.is_quarantined
    trust = trust.failed(state.now, reason)
    if is_again:
        trust = trust.noted(state.now, "expelled: a second group in quarantine was not as it should be")
    _record(state, check.drawn.ticket, trust, reason)
    if check.drawn.ticket != UNKNOWN:
        for record in [record for record in state.groups if _is_of(state, record, check.drawn.ticket)]:
            _retire(state, record, f"ticket {check.drawn.ticket} is not believed: {reason}")
    if (checked_group := state.groups.get(check.drawn.number)) is not None:
        _retire(state, checked_group, reason)
    if not is_again:
        return
    for worker in [worker for worker in state.fleet if worker.ticket == check.drawn.ticket]:
        state.penalties.distrust(worker.worker_id, f"its rollouts were not drawn as it says; {reason}")
    strangers.rest(state, check.drawn.ticket, EXPELLED_REST_SECONDS, "its workers are expelled")


def _is_of(state: PlannerState, record: PlannedGroup, ticket: str) -> bool:
    """Whether the ticket supplied a group, also one from before a restart of the head, which knows only its worker."""
    worker = state.fleet.get(record.worker_id)
    return ticket in record.supplied_by or (worker is not None and worker.ticket == ticket)


def _retire(state: PlannerState, record: PlannedGroup, reason: str) -> None:
    """Retire this group, so that its step gets another one. Does nothing if the learner already has it."""
    if record.state not in ("delivered", "ready"):
        return
    state.groups.retire(record, UNTRUSTED)
    state.emit(do.RetireGroup, reason, number=record.number, why=UNTRUSTED)
    _close(state, record.number, reason)


def held_groups(state: PlannerState, step: int) -> list[tuple[GroupRef, OpenCheck]]:
    """Return the groups of this step that wait for a verdict, with their checks."""
    return [
        (state.train_group(record.number), state.trust.open[record.number])
        for record in state.groups.of_step(step)
        if record.is_held and record.number in state.trust.open
    ]
