"""Handles workers that join, report, fall silent and leave; their leases end with them."""

from __future__ import annotations

import itertools
from collections.abc import Iterable

from echo2.core.types import SnapshotRef
from echo2.head.decide import commands as do
from echo2.head.decide import events as ev
from echo2.head.decide import granting
from echo2.head.decide.results import end_lease
from echo2.head.decide.state import PlannerState
from echo2.head.fleet.decide.fleet import Worker
from echo2.head.fleet.decide.throughput import Throughput
from echo2.head.fleet.decide.widths import GROWTH, Width
from echo2.head.strangers.decide import strangers

#: Lease durations, at most, for which a snapshot is held for workers that receive it, and for strangers alone: one that
#: only pretends to receive it keeps others from a snapshot that is held for them.
HELD_LEASES, STRANGERS_HELD_LEASES = 8.0, 1.0
#: Minimum limit of leases that a returning worker may claim to hold; otherwise twice the most that it is ever granted.
CLAIMS_MIN = 64


def worker_joined(state: PlannerState, event: ev.WorkerJoined, now: float) -> None:
    """A worker joined or returned: end the leases that it no longer has, and add it to the fleet."""
    state.trust.interrupt(event.worker_id, is_gone=False)
    lost = [lease_id for lease_id in state.leases.of_worker(event.worker_id) if lease_id not in event.held_leases]
    for lease_id in lost:
        end_lease(state, lease_id, "lost", "the worker came back without it")
    most = state.options.groups_per_batch * state.options.group_size
    before, installed = state.fleet.get(event.worker_id), state.own_snapshot(event.installed)
    samples = state.leases.samples_of(event.worker_id)
    if before is not None and not lost:
        speed = before.speed  # it kept working, so its measurements continue
    else:
        earlier_speed = Throughput() if before is None else before.speed
        speed = Throughput(earlier_speed.rate, earlier_speed.variance, num_unmeasured=samples)
    slots = min(event.slots, GROWTH * most if adapts(state, is_own=not event.ticket) else most)
    worker = Worker(
        event.worker_id,
        slots,
        event.price_usd_per_hour,
        installed,
        now,
        event.ticket,
        failures_in_a_row=state.penalties.of(event.worker_id).num_failed if event.ticket else 0,
        idle_since=now,
        standby_since=now if _joins_standing_by(state, event, before) else None,
        offer=event.offer,
        returned=before is not None and before.returned,
        samples=samples,
        speed=speed,
        is_proven=before is not None and before.is_proven,
        draws=event.draws,
        form=event.form,
        rounds=event.rounds,
        width=_width(state, before, slots, is_own=not event.ticket),
    )
    state.fleet.join(worker, now)
    if worker.width is not None and slots > most:
        _tell_width(state, worker, "it has room for more")
    if installed is not None and not worker.standby and (before is None or before.installed != installed):
        state.measurements.installed(installed, state.fleet.num_active, now)
    lease_ids = set(state.leases.of_worker(event.worker_id))
    if worker.width is not None:
        worker.width.resume(sorted(lease_ids), now)
    ended = tuple(
        lease_id for lease_id in possible_claims(state, event.worker_id, event.held_leases) if lease_id not in lease_ids
    )
    if ended:
        reason = "these leases ended while the worker was away"
        state.emit(do.RevokeLease, reason, worker_id=event.worker_id, lease_ids=ended)
    received = None if before is None or before.receives == installed else before.receives
    if worker.standby:
        return
    if received is not None and received == state.snapshots.held_ref and state.snapshots.has(received):
        announce(state, received, "held for the worker, which came back", (event.worker_id,))
    else:
        announce_newest(state, "newest when the worker joined", (event.worker_id,))


def adapts(state: PlannerState, is_own: bool) -> bool:
    """Whether the width of a worker is found from its durations. A stranger's count for nothing, batches of a fixed
    shape stay as they are, and with `order = "frontier"` one width is sought for all.
    """
    return is_own and not state.options.deterministic and state.width_search is None


def _width(state: PlannerState, before: Worker | None, slots: int, is_own: bool) -> Width | None:
    """Return how many groups a worker that joins decodes at once; None: as many as fill its slots."""
    options = state.options
    if not adapts(state, is_own):
        return None
    most = -(-slots // options.group_size)
    width = None if before is None else before.width
    if width is None:
        return Width(min(options.groups_per_batch, most), most)
    width.resize(most)
    return width


def _tell_width(state: PlannerState, worker: Worker, reason: str) -> None:
    groups = state.fleet.at_once(worker)
    slots = min(worker.slots, groups * state.options.group_size)
    state.emit(do.SetWidth, reason, worker_id=worker.worker_id, num_groups=groups, num_slots=slots)


def adapt(state: PlannerState, worker_id: str, now: float) -> None:
    """After a result of this worker: change how many groups it decodes at once, if the durations say so."""
    worker, measured = state.fleet.get(worker_id), state.measurements
    if worker is None or worker.width is None:
        return
    is_waited_for = measured.typical_train_seconds() is None or measured.waits_for_workers()
    if state.fleet.adapt(worker, is_waited_for, now):
        _tell_width(state, worker, worker.width.why)


def possible_claims(state: PlannerState, worker_id: str, lease_ids: Iterable[int]) -> tuple[int, ...]:
    """Return those of the claimed leases that were ever granted, and no more of them than a worker can hold."""
    most = max(CLAIMS_MIN, 4 * state.options.groups_per_batch, len(state.leases.of_worker(worker_id)))
    granted = (lease_id for lease_id in dict.fromkeys(lease_ids) if 0 < lease_id < state.leases.next_id)
    return tuple(itertools.islice(granted, most))


def _joins_standing_by(state: PlannerState, event: ev.WorkerJoined, before: Worker | None) -> bool:
    """Whether a joining worker starts on standby. A returning one continues as before. A new one is active at once if
    the needed rate is unknown or its machine was just rented; otherwise it waits to be activated.
    """
    rentals, is_known = state.rentals, before is not None
    is_new_machine = rentals is not None and rentals.join(event.worker_id, event.offer, is_known)
    if before is not None:
        return before.standby
    return rentals is not None and not is_new_machine and rentals.needed_rate is not None


def announce_newest(state: PlannerState, reason: str, worker_ids: tuple[str, ...]) -> None:
    """Tell these workers the newest available snapshot."""
    if (ref := state.snapshots.newest_retained()) is not None:
        announce(state, ref, reason, worker_ids)


def announce(state: PlannerState, ref: SnapshotRef, reason: str, worker_ids: tuple[str, ...]) -> None:
    """Tell these workers of a snapshot that is stored."""
    if worker_ids:
        state.fleet.tell(worker_ids, ref)
        state.emit(do.AnnounceSnapshot, reason, ref=ref, worker_ids=worker_ids)


def announce_published(state: PlannerState, reason: str, now: float) -> None:
    """Tell the active workers of the newest snapshot, but not those that still receive the one that is held for them:
    it would take its place again and again, before they have it, where snapshots follow each other faster than they
    arrive. One snapshot that others have is held at a time, and not for ever, for a worker whose link is broken.
    """
    snapshots, active = state.snapshots, state.fleet.active()
    if not _is_held(state, active, now):
        before = None if state.options.deterministic else snapshots.before()
        is_there = before is not None and any(worker.installed == before for worker in active)
        is_received = is_there and any(worker.receives == before for worker in active)
        snapshots.hold(before if is_received else None, now)
    held_ref = snapshots.held_ref
    worker_ids = (worker.worker_id for worker in active if held_ref is None or worker.receives != held_ref)
    announce_newest(state, reason, tuple(worker_ids))


def _is_held(state: PlannerState, active: Iterable[Worker], now: float) -> bool:
    """Whether a snapshot is held, and goes on being held."""
    held_ref = state.snapshots.held_ref
    receivers = [worker for worker in active if worker.receives == held_ref] if state.snapshots.has(held_ref) else []
    num_leases = HELD_LEASES if any(worker.is_own for worker in receivers) else STRANGERS_HELD_LEASES
    return bool(receivers) and now - state.snapshots.held_since < num_leases * state.options.lease_seconds


def workers_heard(state: PlannerState, worker_ids: Iterable[str], now: float) -> None:
    """Record that these workers are alive, if they are connected."""
    for worker_id in worker_ids:
        worker = state.fleet.get(worker_id)
        if worker is not None and not worker.detached:
            state.fleet.seen(worker_id, now)


def worker_reported(state: PlannerState, event: ev.WorkerReported, now: float) -> bool:
    """Handle a report. Return whether the installed snapshot changed."""
    worker = state.fleet.get(event.worker_id)
    if worker is None or worker.detached:
        return False
    installed = state.own_snapshot(event.installed)
    was_held = worker.receives is not None and worker.receives == state.snapshots.held_ref
    is_new = state.fleet.report(worker, installed, event.refused, now)
    if was_held and worker.receives is None and not worker.standby:
        announce_newest(state, "newest when the worker had the one that was held for it", (worker.worker_id,))
    if is_new and installed is not None and not worker.standby:
        state.measurements.installed(installed, state.fleet.num_active, now)
        counts = state.snapshots.has(installed) or installed.lineage == state.training.lineage
        if counts and not state.options.deterministic:
            behind = state.training.version - installed.version
            state.fleet.came_in(worker, behind, _is_too_late(state, installed, behind))
    return is_new


def _is_too_late(state: PlannerState, installed: SnapshotRef, steps_behind: int) -> bool:
    """Whether the steps that a snapshot may sample are over, or all sampled while the learner trains the last of them.
    Earlier than that it is no wonder that none is left: others had the snapshot, too, and suffice.
    """
    options = state.options
    if steps_behind < max(1, options.max_staleness) or state.training.version >= options.max_steps:
        return False
    last = min(granting.last_step(state, installed), options.max_steps - 1)
    pending = state.groups.first_pending()
    is_queued = pending is not None and pending[0] <= last
    return not is_queued and all(granting.room(state, step) <= 0 for step in range(state.training.version, last + 1))


def stand_by(state: PlannerState, worker: Worker, now: float) -> None:
    """Give the worker no more leases; it finishes those that it has."""
    state.fleet.stand_by(worker, now)
    state.measurements.fewer_active(state.fleet.num_active, now)


def lose_worker(state: PlannerState, worker_id: str, reason: str, now: float) -> None:
    """Remove a lost worker from the fleet and end its leases."""
    worker = state.fleet.get(worker_id)
    if worker is None:
        return
    if state.rentals is not None and worker.offer and not worker.returned:
        state.rentals.lose(worker_id, worker.offer, now)
    for lease_id in state.leases.of_worker(worker_id):
        end_lease(state, lease_id, "lost", reason)
    state.fleet.lose(worker_id)
    state.trust.interrupt(worker_id, is_gone=True)
    state.measurements.fewer_active(state.fleet.num_active, now)
    state.emit(do.WorkerGone, reason, worker_id=worker_id)


def expire(state: PlannerState, now: float) -> bool:
    """End all overdue rests, silent workers and expired leases. Return whether there were any."""
    any_over = state.fleet.end_rests(now) | state.credits.end_rests(now)
    for worker_id in state.fleet.silence.pop_until(now):
        worker = state.fleet.get(worker_id)
        if worker is not None and state.fleet.waits_on(worker, now):
            continue
        any_over = True
        away = worker is not None and worker.detached
        lose_worker(
            state, worker_id, "its connection closed and it did not come back" if away else "silent for too long", now
        )
    for lease_id in state.leases.deadlines.pop_until(now):
        any_over = True
        open_lease = state.leases.get(lease_id)
        if open_lease is None:
            continue  # its group was just given up with another of its leases
        if granting.extend(state, lease_id, now):
            continue
        worker_id, _ = open_lease
        if (late := state.fleet.get(worker_id)) is not None:
            # Others come first: a hung engine may still send heartbeats.
            state.tell_rest(worker_id, state.fleet.rest(late, now), "it let a lease expire")
        end_lease(state, lease_id, "expired", "the lease's deadline passed")
        state.emit(do.RevokeLease, "the lease's deadline passed", worker_id=worker_id, lease_ids=(lease_id,))
    return any_over


def expel(state: PlannerState, now: float) -> None:
    """Expel workers with too many refusals or wrong logprobs."""
    for worker_id, reason in state.penalties.take_to_expel() if state.penalties.to_expel else ():
        lose_worker(state, worker_id, strangers.expel(state, worker_id, reason), now)
