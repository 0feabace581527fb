"""Decides what strangers may hold and supply, and what follows when they deliver nothing. A stranger is a worker that
joined with a ticket for other people's machines; all workers of one ticket count as one.

credit    leases that a ticket may hold at once: 1 at first, one more for each accepted result, two less for each lease
          without a result, and one less for each second of the head that it wastes (`waste`, and rewards that fail).
          At 0 the ticket rests for as long as it held that lease or wasted, doubled at each rest; then its credit is 1.
          A group that is held for its check counts as a lease, and adds credit only when it passes.
checks    where the run requires them, a newcomer's ticket gets leases only while a machine of the owner can check.
share     while a machine of the owner can work, a ticket supplies at most half of a step, or one batch if batches of a
          fixed shape are larger than that.
attempts  a group that a ticket tried and failed is left to others that can try; the ticket's tries count once against
          the group.
refusals  a worker that causes more refusals than `penalties` allows is expelled.
mismatch  so is any worker, the owner's included, whose logprobs are not those of the weights that it names.

Groups that only strangers failed never stop a run: see `results.give_up`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from echo2.core.types import Backoff, Lease
from echo2.head.decide import commands as do
from echo2.head.decide import events as ev
from echo2.head.decide.groups import OWN, PlannedGroup
from echo2.head.decide.state import PlannerState
from echo2.head.fleet.decide.fleet import UNKNOWN, Worker
from echo2.head.strangers.decide.trust import RESULTS_PER_PARDON

#: Bounds of the rest of a ticket without credit: minimum; maximum; maximum if no other worker can sample.
REST_SECONDS, MOST_REST_SECONDS, MOST_REST_ALONE_SECONDS = 1.0, 3600.0, 60.0
#: Leases in a row without a result after which a machine of the owner counts as one that can't work.
OWN_FAILURES_MAX = 3
#: Outcomes of a lease that say nothing against its worker.
NO_FAULT = frozenset({"accepted", "revoked", "retired", "duplicate", "late"})
#: Why a stranger gets no leases in a run that requires checks.
NOT_CHECKABLE = (
    "its engine does not draw from the head's random numbers, so its rollouts can't be checked: start it with "
    "--engine compact or transformers, or set workers.require_checks = false"
)
NO_CHECKER = (
    "its ticket is not trusted yet, and no machine of yours is connected that can check it: start one with the engine "
    "compact or, unless it rounds its weights, transformers (`echo2 worker @DIR/ticket`), or set "
    "workers.require_checks = false"
)


# ---- available workers -------------------------------------------------------------------------------------------


def own_can_work(state: PlannerState) -> bool:
    """Whether any machine of the owner is connected, active, and gives results. A machine that lacks a usable snapshot
    still counts for the duration of a lease after it joined or the newest snapshot was published.
    """
    return any(_can_work(state, worker) for worker in state.fleet.own())


def _can_work(state: PlannerState, worker: Worker) -> bool:
    if worker.detached or worker.standby or worker.failures_in_a_row >= OWN_FAILURES_MAX:
        return False
    since = max(worker.joined_at, state.snapshots.published_at)
    return _can_sample(state, worker, state.training.version) or state.now - since < state.options.lease_seconds


def _can_sample(state: PlannerState, worker: Worker, step: int) -> bool:
    """Whether the worker may sample this step with its installed snapshot."""
    if state.options.deterministic:
        return True
    ref = worker.installed
    return ref is not None and state.snapshots.has(ref) and ref.version + state.options.max_staleness >= step


def checkers(state: PlannerState, form: str = "") -> Iterator[Worker]:
    """Iterate over the owner's machines that can check rollouts of strangers, drawn with weights in this form."""
    return (
        worker
        for worker in state.fleet.own()
        if worker.can_check(form) and worker.installed is not None and not (worker.detached or worker.standby)
    )


def why_unchecked(state: PlannerState, worker: Worker) -> str:
    """Return why the worker's ticket gets no leases in a run that requires checks; empty if it may get some."""
    options = state.options
    if worker.is_own or options.check_seed is None or options.deterministic or not options.require_checks:
        return ""
    if not worker.draws:
        return NOT_CHECKABLE
    return "" if state.trust.of(worker.ticket).is_believed or any(checkers(state, worker.form)) else NO_CHECKER


def others_can_try(state: PlannerState, owner: str, step: int, tried_by: Iterable[str] = ()) -> bool:
    """Whether another owner could sample a group of this step and has not failed it yet."""
    failed = {owner, *tried_by}
    if OWN not in failed and own_can_work(state):
        return True
    there = (worker for worker in state.fleet if not (worker.is_own or worker.detached or worker.standby))
    return any(
        worker.ticket not in failed and not state.credits.is_resting(worker.ticket) and _can_sample(state, worker, step)
        for worker in there
    )


# ---- permissions -------------------------------------------------------------------------------------------------


def has_credit(state: PlannerState, worker: Worker) -> bool:
    """Whether the worker's ticket may hold another lease."""
    if worker.is_own or state.credits.is_resting(worker.ticket):
        return worker.is_own
    account = state.credits.of(worker.ticket)
    num_used = account.num_held + state.trust.num_held(worker.ticket)
    return account.credit > num_used and not why_unchecked(state, worker)


def may_supply(state: PlannerState, worker: Worker, step: int) -> bool:
    """Whether the worker's ticket may get another unit of this step."""
    if worker.is_own:
        return True
    used = state.groups.supplied(step).get(worker.ticket, 0)
    unit = state.groups.groups_per_unit * state.options.group_size
    most = max(unit, state.options.groups_per_step * state.options.group_size // 2)
    return used == 0 or used + unit <= most or not own_can_work(state)


def leaves_to_others(state: PlannerState, worker: Worker, unit: Iterable[PlannedGroup]) -> bool:
    """Whether this worker's ticket failed one of these groups, and another owner can try it."""
    return not worker.is_own and any(
        worker.ticket in record.tried_by and others_can_try(state, worker.ticket, record.step, record.tried_by)
        for record in unit
    )


# ---- consequences ------------------------------------------------------------------------------------------------


def earn(state: PlannerState, ticket: str) -> None:
    """Record that a result of this ticket is good."""
    most = state.options.groups_per_step * (state.options.max_staleness + 1)
    if state.credits.earn(ticket, max(2, most)):
        _record(state, ticket, f"{RESULTS_PER_PARDON} of its results make up for a rest")


def failed(state: PlannerState, worker: Worker | None, held_seconds: float) -> None:
    """Record that a lease of this worker gave no result: it rests, and other workers of its ticket come before it."""
    if worker is not None and not worker.is_own:
        state.tell_rest(worker.worker_id, state.fleet.rest(worker, state.now), "a lease of it gave no result")
        state.fleet.set_failures(worker, state.penalties.fail(worker.worker_id))
        blame(state, worker.ticket, held_seconds)


def blame(
    state: PlannerState,
    ticket: str,
    held_seconds: float,
    more: int = 0,
    reason: str = "too many of its leases brought nothing",
) -> None:
    """Reduce the credit of this ticket, by `more` beyond the usual; with no credit left, it rests."""
    if state.credits.blame(ticket, more):
        is_alone = not others_can_try(state, ticket, state.training.version)
        most = MOST_REST_ALONE_SECONDS if is_alone else MOST_REST_SECONDS
        num_rests = state.credits.of(ticket).num_rests
        seconds = Backoff(max(REST_SECONDS, held_seconds), most).after(num_rests + 1)
        rest(state, ticket, seconds, reason)


def rest(state: PlannerState, ticket: str, seconds: float, reason: str, is_fault: bool = True) -> None:
    """Give the ticket no leases for this many seconds, even if the head restarts meanwhile. `is_fault`: its next rest
    is longer.
    """
    state.credits.rest(ticket, state.now + seconds, is_fault)
    _record(state, ticket, reason)


def _record(state: PlannerState, ticket: str, reason: str) -> None:
    """Record the ticket's rest durably. Skips workers that have not returned since a restart of the head: their ticket
    is unknown.
    """
    if ticket != UNKNOWN:
        state.emit(do.RecordRest, reason, rest=state.credits.recorded(ticket))


def count_attempt(state: PlannerState, record: PlannedGroup, worker: Worker | None) -> None:
    """Record that a lease on this group gave no result. A ticket's tries count once while others can try."""
    owner = UNKNOWN if worker is None else worker.ticket  # one that has left counts as a stranger
    is_again = owner != OWN and owner in record.tried_by
    record.count_try(owner, not (is_again and others_can_try(state, owner, record.step, record.tried_by)))


def held_seconds(state: PlannerState, lease: Lease) -> float:
    """Return for how many seconds this lease has been held."""
    return max(0.0, state.now - lease.granted_at)


def recover(state: PlannerState, event: ev.HeadStarted) -> None:
    """Restore rests and expulsions from before a restart of the head."""
    for old in event.rests:
        state.credits.restore(old, state.now)
    for gone in sorted(event.expulsions, key=lambda gone: gone.until):  # the book keeps the latest
        state.penalties.restore(gone.worker_id, gone.num_expelled, gone.until, gone.reason)


def expel(state: PlannerState, worker_id: str, reason: str) -> str:
    """Refuse everything from this worker for a while. Return the reason for ending its leases."""
    seconds, num_expelled = state.penalties.expel(worker_id, reason, state.now)
    state.emit(do.ExpelWorker, reason, worker_id=worker_id, seconds=seconds, num_expelled=num_expelled)
    return f"expelled for {seconds:.0f} s: {reason}"
