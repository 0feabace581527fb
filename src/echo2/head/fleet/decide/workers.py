"""Handles workers that join, report, fall silent and leave; their leases end with them."""

from __future__ import annotations

import itertools
from collections.abc import Iterable

from echo2.head.decide import commands as do
from echo2.head.decide import events as ev
from echo2.head.decide import lease_times
from echo2.head.decide.results import end_lease
from echo2.head.decide.state import PlannerState
from echo2.head.fleet.decide.fleet import Worker
from echo2.head.strangers.decide import checks, strangers

#: Minimum limit of leases that a returning worker may claim to hold; otherwise twice the most that it is ever granted.
CLAIMS_MIN = 64


def worker_joined(state: PlannerState, event: ev.WorkerJoined, now: float) -> None:
    """A worker joined or returned: end the leases that it no longer has, and add it to the fleet."""
    checks.interrupted(state, event.worker_id, is_gone=False)
    lost = [lease_id for lease_id in state.leases.of_worker(event.worker_id) if lease_id not in event.held_leases]
    for lease_id in lost:
        end_lease(state, lease_id, "lost", "the worker came back without it")
    most = state.options.groups_per_batch * state.options.group_size
    slots = min(event.slots, most) if event.ticket else event.slots
    installed = state.own_snapshot(event.installed)
    worker = Worker(event.worker_id, slots, event.price_usd_per_hour, installed, now, idle_since=now)
    worker.samples, worker.offer = state.leases.samples_of(event.worker_id), event.offer
    worker.ticket, worker.draws = event.ticket, event.draws
    if not worker.is_own:
        worker.failures_in_a_row = state.conducts.of(event.worker_id).num_failed
    before = state.fleet.get(event.worker_id)
    if before is not None:
        worker.rate, worker.rate_variance, worker.returned = before.rate, before.rate_variance, before.returned
    if before is not None and not lost:  # it kept working, so its measurements continue
        worker.done_samples, worker.unmeasured_samples = before.done_samples, before.unmeasured_samples
        worker.busy_seconds, worker.busy_since = before.busy_seconds, before.busy_since
        worker.occupancy = before.occupancy
    else:
        worker.unmeasured_samples = worker.samples
    worker.standby = _joins_standing_by(state, event, before)
    worker.standby_since = now if worker.standby else None
    state.fleet.join(worker, now)
    if installed is not None and not worker.standby and (before is None or before.installed != installed):
        state.gauge.installed(installed, state.fleet.num_active, now)
    held = set(state.leases.of_worker(event.worker_id))
    ended = tuple(lease_id for lease_id in possible_claims(state, event.held_leases) if lease_id not in held)
    if ended:
        reason = "these leases ended while the worker was away"
        state.emit(do.RevokeLease, reason, worker_id=event.worker_id, lease_ids=ended)
    if not worker.standby:
        announce_newest(state, "newest when the worker joined", (event.worker_id,))


def possible_claims(state: PlannerState, lease_ids: Iterable[int]) -> tuple[int, ...]:
    """Return those of the claimed leases that were ever granted, and no more of them than a worker can hold."""
    most = max(CLAIMS_MIN, 4 * state.options.groups_per_batch)
    granted = (lease_id for lease_id in dict.fromkeys(lease_ids) if 0 < lease_id < state.leases.next_id)
    return tuple(itertools.islice(granted, most))


def _joins_standing_by(state: PlannerState, event: ev.WorkerJoined, before: Worker | None) -> bool:
    """Whether a joining worker starts on standby. A returning one continues as before. A new one is active at once if
    the needed rate is unknown or its machine was just rented; otherwise it waits to be activated.
    """
    activation = state.activation
    if activation is None:
        return before is not None and before.standby
    was_lost = activation.gone.pop(event.worker_id, None) is not None
    if before is not None:
        return before.standby
    if not was_lost and (rents := activation.rents.get(event.offer)):
        rents.pop(0)
        activation.failures.pop(event.offer, None)
        return False
    return activation.needed_rate is not None


def announce_newest(state: PlannerState, reason: str, worker_ids: tuple[str, ...]) -> None:
    """Tell these workers the newest available snapshot."""
    if state.retained and worker_ids:
        ref = state.retained[max(state.retained)]
        state.emit(do.AnnounceSnapshot, reason, ref=ref, worker_ids=worker_ids)


def workers_heard(state: PlannerState, worker_ids: Iterable[str], now: float) -> None:
    """Record that these workers are alive, if they are connected."""
    for worker_id in worker_ids:
        worker = state.fleet.get(worker_id)
        if worker is not None and not worker.detached:
            state.fleet.heard(worker_id, now)


def worker_reported(state: PlannerState, event: ev.WorkerReported, now: float) -> bool:
    """Handle a report. Return whether the installed snapshot changed."""
    worker = state.fleet.get(event.worker_id)
    if worker is None or worker.detached:
        return False
    state.fleet.heard(event.worker_id, now)
    worker.refused = event.refused
    installed = state.own_snapshot(event.installed)
    if worker.installed == installed:
        return False
    worker.installed = installed
    state.fleet.file(worker)
    if installed is not None and not worker.standby:
        state.gauge.installed(installed, state.fleet.num_active, now)
    return True


def stand_by(state: PlannerState, worker: Worker, now: float) -> None:
    """Give the worker no more leases; it finishes those that it has."""
    worker.standby, worker.standby_since = True, now
    state.fleet.file(worker)
    state.gauge.fewer_active(state.fleet.num_active, now)


def lose_worker(state: PlannerState, worker_id: str, reason: str, now: float) -> None:
    """Remove a lost worker from the fleet and end its leases."""
    worker = state.fleet.get(worker_id)
    if worker is None:
        return
    if state.activation is not None and worker.offer and not worker.returned:
        state.activation.gone[worker_id] = (worker.offer, now)
    for lease_id in state.leases.of_worker(worker_id):
        end_lease(state, lease_id, "lost", reason)
    state.fleet.remove(worker_id)
    checks.interrupted(state, worker_id, is_gone=True)
    state.gauge.fewer_active(state.fleet.num_active, now)
    state.emit(do.WorkerGone, reason, worker_id=worker_id)


def expire(state: PlannerState, now: float) -> bool:
    """End all overdue rests, silent workers and expired leases. Return whether there were any."""
    any_over = state.fleet.end_rests(now) | state.standings.end_rests(now)
    for worker_id in state.fleet.silence.pop_until(now):
        any_over = True
        worker = state.fleet.get(worker_id)
        away = worker is not None and worker.detached
        lose_worker(
            state, worker_id, "its connection closed and it did not come back" if away else "silent for too long", now
        )
    for lease_id in state.leases.deadlines.pop_until(now):
        any_over = True
        held = state.leases.get(lease_id)
        if held is None:
            continue  # its group was just given up with another of its leases
        if lease_times.extend(state, lease_id, now):
            continue
        worker_id, _ = held
        if (late := state.fleet.get(worker_id)) is not None:
            state.fleet.rest(late, now)  # others come first: a hung engine may still send heartbeats
        end_lease(state, lease_id, "expired", "the lease's deadline passed")
        state.emit(do.RevokeLease, "the lease's deadline passed", worker_id=worker_id, lease_ids=(lease_id,))
    return any_over


def expel(state: PlannerState, now: float) -> None:
    """Expel workers with too many refusals or wrong logprobs."""
    to_expel, state.conducts.to_expel = state.conducts.to_expel, {}
    for worker_id, reason in to_expel.items():
        lose_worker(state, worker_id, strangers.expel(state, worker_id, reason), now)
