"""The worker's scheduler, a state machine: what to fetch, when to swap weights, what to sample, what to deliver again.

It keeps leases in order of arrival (as many run in the engine as it has slots), results until the head has answered
them, and at most one incoming snapshot. `Swap` says when new weights are installed. Like the planner it is pure: events
in, commands out.

    announced -> fetching (from the origin and peers, while the engine generates) -> whole -> installing -> installed

An adapter is installed over its base model. A missing base model is fetched first, in the same way, and then kept; the
newest snapshot is requested again afterwards.

    lease:  waiting -> generating -> produced -> answered
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from echo2.core.decide.machine import StateMachine
from echo2.core.errors import InvariantError, UserError
from echo2.core.types import Lease, PayloadId, SnapshotRef
from echo2.worker.decide import messages as do
from echo2.worker.decide import messages as ev

#: When new weights are installed. "between": when nothing is sampled, and no lease starts before. "apart": at once,
#: beside the old ones, with which leases under way go on; never beside two older ones. "during": at once, between two
#: tokens of what is sampled.
Swap = Literal["between", "apart", "during"]
#: Fetches in a row of a snapshot that is refused each time.
MAX_FETCHES = 3
#: Seconds before a snapshot that was refused so often is requested again, unless a newer one comes first. (To give it
#: up would be a deadlock if the learner waits for this worker and therefore publishes nothing newer.)
REFUSED_SECONDS = 30.0
#: Seconds between attempts to deliver a result that the head did not answer.
REDELIVER_SECONDS = 2.0
#: Seconds before a manifest that did not arrive is requested again.
RETRY_SECONDS = 1.0
#: An unfinished snapshot with more than this share stored is finished first, even if a newer one is announced.
NEARLY_WHOLE = 0.5


@dataclass(slots=True)
class HeldLease:
    """A lease held by this worker. `assignment`: its `types.Assignment`, not read here. `grant`: number of the event
    that brought the lease. `num_running`: its rollouts that need a slot; `began_with`: the snapshot installed when it
    started."""

    lease: Lease
    assignment: Any
    grant: int
    num_running: int = 0
    began_with: SnapshotRef | None = None


@dataclass(slots=True)
class PendingResult:
    """A result that the head has not answered. It is delivered again at `due_at`."""

    result: Any
    due_at: float = float("inf")


@dataclass(slots=True)
class IncomingSnapshot:
    """The snapshot that is being fetched, or waits to be installed."""

    payload: PayloadId
    is_nearly_whole: bool = False
    is_whole: bool = False

    @property
    def ref(self) -> SnapshotRef:
        return self.payload.ref


class WorkerScheduler(StateMachine):
    """State, and one method per kind of event. `slots`: rollouts that the engine decodes at once, of
    `most_slots` that it has room for. `deterministic`:
    leases are sampled grant by grant, because the shape of a batch is part of the request."""

    def __init__(self, slots: int, swap: Swap, deterministic: bool) -> None:
        super().__init__()
        self.slots = self.most_slots = slots
        self.swap: Swap = swap
        self.deterministic = deterministic
        self.connected = False
        self.installed: SnapshotRef | None = None
        self.newest: SnapshotRef | None = None
        self.base_models: set[SnapshotRef] = set()  # stored completely on disk
        self.missing_base: SnapshotRef | None = None  # of the wanted adapter, to be fetched before it
        self.incoming: IncomingSnapshot | None = None
        self.installing: SnapshotRef | None = None
        self.waiting: dict[int, HeldLease] = {}
        self.generating: dict[int, HeldLease] = {}
        self.produced: dict[int, PendingResult] = {}
        self.refused = ""
        self._asked_manifest = False
        self._has_old_routes = False  # what is being fetched was last asked for, or announced, on another connection
        self._has_superseded = False
        self._refusals: tuple[SnapshotRef | None, int] = (None, 0)
        self._retry_at = 0.0

    def held(self) -> list[int]:
        """Return the leases that the worker has."""
        return [*self.waiting, *self.generating, *self.produced]

    def handle(self, event: ev.Event, now: float) -> list[do.Command]:
        """Handle one event at time `now` (seconds of the worker's clock) and return the commands, in order."""
        self.begin(event)
        match event:
            case ev.Connected():
                self._connected(now)
            case ev.Disconnected():
                self.connected = False
            case ev.LeasesGranted():
                self._granted(event)
            case ev.LeaseRevoked():
                self._revoked(event.lease_id, event.reason)
            case ev.SnapshotAnnounced():
                self._announced(event)
            case ev.SnapshotUnknown():
                self._unknown(event.ref, now)
            case ev.ManifestFailed():
                self._asked_manifest, self._retry_at = False, now + RETRY_SECONDS
            case ev.SnapshotWhole():
                self._whole(event.payload)
            case ev.SnapshotGone():
                self._gone(event.payload, now)
            case ev.SnapshotRefused():
                self._refused(event, now)
            case ev.SnapshotInstalled():
                self._installed(event.ref)
            case ev.SnapshotTooLarge():
                self._too_large(event, now)
            case ev.SlotsSet():
                self.slots = max(1, min(event.slots, self.most_slots))
            case ev.RolloutEnded():
                if (held_lease := self.generating.get(event.lease_id)) is not None:
                    held_lease.num_running = max(0, held_lease.num_running - 1)
            case ev.GroupProduced():
                self._produced(event)
            case ev.LeaseAbandoned():
                if self.generating.pop(event.lease_id, None) is not None:
                    self.emit(do.FailLease, event.detail, lease_id=event.lease_id, failure=event.failure)
            case ev.DeliveryAnswered():
                self.produced.pop(event.lease_id, None)
            case ev.DeliveryFailed():
                if (produced := self.produced.get(event.lease_id)) is not None:
                    produced.due_at = now + REDELIVER_SECONDS
        self._advance(now)
        return self.out

    def _advance(self, now: float) -> None:
        self._redeliver(now)
        self._install()
        self._ask(now)
        self._stop_unwanted()
        self._start_leases()
        dues = [at for at in (self._retry_at, *(produced.due_at for produced in self.produced.values())) if at > now]
        if dues and self.connected and min(dues) < float("inf"):
            self.wake_at(min(dues), "next try to deliver or to fetch")

    # ---- leases and results ------------------------------------------------------------------------------------------

    def _connected(self, now: float) -> None:
        self.connected = True
        self._asked_manifest = False
        self._has_old_routes = self.incoming is not None and not self.incoming.is_whole
        for produced in self.produced.values():
            produced.due_at = now

    def _granted(self, event: ev.LeasesGranted) -> None:
        for lease, assignment in zip(event.leases, event.assignments, strict=True):
            if lease.lease_id not in self.generating and lease.lease_id not in self.produced:
                self.waiting[lease.lease_id] = HeldLease(lease, assignment, self.num_events)

    def _revoked(self, lease_id: int, reason: str) -> None:
        self.waiting.pop(lease_id, None)
        self.produced.pop(lease_id, None)
        if self.generating.pop(lease_id, None) is not None:
            self.emit(do.AbortLease, reason, lease_id=lease_id)

    def _produced(self, event: ev.GroupProduced) -> None:
        if self.generating.pop(event.lease_id, None) is None:
            return  # revoked meanwhile
        self.produced[event.lease_id] = PendingResult(event.result)
        self.emit(do.Deliver, "the group is complete", lease_id=event.lease_id, result=event.result)

    def _redeliver(self, now: float) -> None:
        if not self.connected:
            return
        for lease_id, produced in self.produced.items():
            if produced.due_at <= now:
                produced.due_at = float("inf")
                reason = "the head has not answered for it yet"
                self.emit(do.Deliver, reason, lease_id=lease_id, result=produced.result)

    # ---- snapshots ---------------------------------------------------------------------------------------------------

    def _announced(self, event: ev.SnapshotAnnounced) -> None:
        self._asked_manifest = False
        ref, before = event.payload.ref, self.newest
        self._has_old_routes &= self.incoming is not None and self.incoming.ref != ref
        if ref == self.missing_base:
            if self.incoming is None or self.incoming.ref != ref:
                self._begin(event, f"{self.newest} is an adapter over {ref}")
            return
        if not event.asked_for:
            # The announcement decides, not the version number: after a fall-back the newest may be an older version.
            self.newest = ref
            if before is not None and ref != before:
                self._retry_at = 0.0
                self._fell_back(ref, before)
        if ref in (self.installed, self.installing) or (self.incoming is not None and self.incoming.ref == ref):
            return
        if self.incoming is not None:
            self.incoming.is_nearly_whole |= event.progress > NEARLY_WHOLE
        if self._is_wanted(ref) and not self._finishes_first() and self._fits_base(event.payload):
            is_ready = event.base_model is None or event.base_model in self.base_models
            self.missing_base = None if is_ready else event.base_model
            if is_ready:
                self._begin(event, f"{event.payload} is announced")  # else `_ask` requests it after its base model

    def _begin(self, event: ev.SnapshotAnnounced, reason: str) -> None:
        """Fetch a newer snapshot in place of an unfinished one. Chunks that both share are already stored."""
        before = self.incoming
        self._has_superseded |= before is not None and not before.is_whole and not before.ref.is_base_model
        self._retry_at, self._has_old_routes = 0.0, False
        self.incoming = IncomingSnapshot(event.payload)
        self.emit(do.FetchSnapshot, reason, payload=event.payload)

    def _whole(self, payload: PayloadId) -> None:
        if self.incoming is None or self.incoming.payload != payload:
            return
        self.incoming.is_whole = True
        if payload.ref.is_base_model:
            self.base_models.add(payload.ref)
            self.incoming = self.missing_base = None

    def _finishes_first(self) -> bool:
        """Whether the unfinished snapshot is installed before the newest is fetched: if much of it is stored, or if it
        replaced another, because a publisher faster than the link would otherwise starve the engine.
        """
        incoming = self.incoming
        if incoming is None or self._demanded() is not None:
            return False
        if self.newest is not None and incoming.ref.history != self.newest.history:
            return False  # nothing made with it could be trained on
        return incoming.is_whole or incoming.is_nearly_whole or self._has_superseded

    def _fits_base(self, payload: PayloadId) -> bool:
        if payload.base is None:
            return True
        return payload.base == (self.installing or self.installed) and self._refusals[0] != payload.ref

    def _fell_back(self, ref: SnapshotRef, before: SnapshotRef) -> None:
        """Fail waiting leases whose version may never come, because the learner fell back to an older version."""
        if ref.history == before.history and ref.version > before.version:
            return
        for lease_id in [key for key, one in self.waiting.items() if one.lease.min_version > ref.version]:
            least = self.waiting[lease_id].lease.min_version
            self._fail_waiting(lease_id, f"the learner fell back to {ref}; version {least} is no longer available")

    def _fail_waiting(self, lease_id: int, detail: str) -> None:
        del self.waiting[lease_id]
        self.emit(do.FailLease, detail, lease_id=lease_id, failure="snapshot_gone")

    def _demanded(self) -> SnapshotRef | None:
        """Return the exact version that the first waiting lease demands, with lineage 0 (any), or None."""
        first = next(iter(self.waiting.values()), None)
        if first is None or first.lease.exact_version is None:
            return None
        return SnapshotRef(first.lease.group.policy, 0, first.lease.exact_version)

    def _is_wanted(self, ref: SnapshotRef) -> bool:
        """Whether this is the next snapshot to get: the one demanded, or else the newest."""
        demanded = self._demanded()
        return ref == self.newest if demanded is None else _is_same_version(ref, demanded)

    def _unknown(self, ref: SnapshotRef, now: float) -> None:
        self._asked_manifest = self._has_old_routes = False
        if ref == self.missing_base:
            self.missing_base, self._retry_at = None, now + RETRY_SECONDS
        if self.newest == ref:
            self.newest = self.installed
        newest = -1 if self.newest is None else self.newest.version
        for lease_id, lease in [(lease_id, one.lease) for lease_id, one in self.waiting.items()]:
            gone = lease.exact_version == ref.version
            if gone or (lease.min_version == ref.version and newest < lease.min_version):
                self._fail_waiting(lease_id, f"no snapshot of version {ref.version} is to be had")

    def _ask(self, now: float) -> None:
        """Request the manifest of the wanted snapshot, unless it is installed or being fetched. What was being fetched
        when the connection to the head began is requested again: a restarted head has no routes for it, and without
        the head workers may have come to wait for each other.
        """
        if not self.connected or now < self._retry_at or self.newest is None or self._asked_manifest:
            return
        if self._has_old_routes and self.incoming is not None and not self.incoming.is_whole:
            self._asked_manifest, payload = True, self.incoming.payload
            self.emit(do.AskManifest, f"new routes for {payload} are needed", ref=payload.ref, base=payload.base)
            return
        if any(ref is not None and self._is_wanted(ref) for ref in (self.installed, self.installing)):
            return
        on_its_way = None if self.incoming is None else self.incoming.ref
        if on_its_way is not None and (self._is_wanted(on_its_way) or self._finishes_first()):
            return
        if self.missing_base is not None:
            if on_its_way != self.missing_base:
                self._asked_manifest = True
                reason = f"what is wanted is an adapter over {self.missing_base}"
                self.emit(do.AskManifest, reason, ref=self.missing_base)
            return
        demanded = self._demanded()
        ref = self.newest if demanded is None or _is_same_version(self.newest, demanded) else demanded
        refused, base = self._refusals[0], self.installing or self.installed
        if refused and _is_same_version(refused, ref):
            base = None
        self._asked_manifest = True
        self.emit(do.AskManifest, f"version {ref.version} is needed", ref=ref, base=base)

    def _gone(self, payload: PayloadId, now: float) -> None:
        """Handle a payload that no source has any more; the next one is announced or requested again."""
        if self.incoming is not None and self.incoming.payload == payload and self.installing != payload.ref:
            self.incoming, self._retry_at = None, now + RETRY_SECONDS

    def _refused(self, event: ev.SnapshotRefused, now: float) -> None:
        """A complete snapshot failed verification, or the engine refused it. It is not installed but fetched again, as
        a whole if it was a delta. A base model that is refused is requested again, and its adapter after it.
        """
        is_base = event.payload.ref in self.base_models
        if self.installing == event.payload.ref or is_base:
            self.installing = None
        if not is_base and (self.incoming is None or self.incoming.payload != event.payload):
            return
        self.base_models.discard(event.payload.ref)
        self._say(f"{event.payload}: {event.reason}")
        ref, count = self._refusals
        count = count + 1 if ref == event.payload.ref else 1
        self._refusals = (event.payload.ref, count)
        if count >= MAX_FETCHES:
            self.incoming, self._retry_at = None, now + REFUSED_SECONDS
            self._refusals = (event.payload.ref, 0)
        elif event.payload.base is not None or is_base:
            self.incoming = None
        else:
            self.incoming = IncomingSnapshot(event.payload)
            self.emit(do.FetchSnapshot, f"it was refused: {event.reason}", payload=event.payload)

    def _too_large(self, event: ev.SnapshotTooLarge, now: float) -> None:
        """There is no room for the snapshot. The worker keeps its weights and tries again with the next snapshot, or
        with this one after a while, because the learner may wait for this worker and publish no other. One that kept
        two sets of weights keeps one from now on.

        Raises:
            UserError: no snapshot is installed yet, so the worker can't go on.
        """
        if self.installed is None:
            raise UserError(
                f"This device has no room for the model: {event.reason}. Free its memory, or join with a larger one."
            )
        if self.installing == event.payload.ref:
            self.installing = None
        if self.swap == "apart":
            self.swap = "between"  # there is room for one, so it waits for the leases that need the old one
        elif self.incoming is not None and self.incoming.payload == event.payload:
            self.incoming, self._retry_at = None, now + REFUSED_SECONDS
        self._say(f"{event.payload}: no room for it beside {self.installed}: {event.reason}")

    def _say(self, refused: str) -> None:
        """Tell the head which snapshot was not installed, and why."""
        self.refused = refused
        self.emit(do.ReportInstalled, refused)

    def _install(self) -> None:
        incoming = self.incoming
        if self.installing is not None or incoming is None or not incoming.is_whole or not self._is_due(incoming.ref):
            return
        base = incoming.payload.base
        if base is not None and base != self.installed:
            self._refusals = (incoming.ref, 0)
            self.incoming = None
            return  # its base weights are not installed; `_ask` requests the full snapshot
        if self._is_kept_out():
            return
        self.installing = incoming.ref
        when = "between two tokens" if self.generating else "while nothing is sampled"
        self.emit(do.InstallSnapshot, f"{incoming.payload} is whole; swapped {when}", payload=incoming.payload)

    def _is_kept_out(self) -> bool:
        """Whether leases under way forbid to swap weights now."""
        if any(one.lease.exact_version is not None for one in self.generating.values()):
            return True
        if self.swap == "apart":
            return any(one.began_with != self.installed for one in self.generating.values())
        return bool(self.generating) and self.swap == "between"

    def _is_due(self, ref: SnapshotRef) -> bool:
        """Whether this complete snapshot may be installed now. If a lease demands a version, other versions wait until
        the lease is sampled.
        """
        if self._demanded() is not None or self.newest is None:
            return self._is_wanted(ref)
        return ref == self.newest or (ref.history == self.newest.history and self.installed != self.newest)

    def _stop_unwanted(self) -> None:
        incoming = self.incoming
        if incoming is None or self._demanded() is not None or self.newest in (incoming.ref, None):
            return
        if self.newest in (self.installed, self.installing):
            self.incoming = None
            self.emit(do.StopFetching, f"{self.newest} is the newest, and is here", payload=incoming.payload)

    def _installed(self, ref: SnapshotRef) -> None:
        if self.installing != ref:
            raise InvariantError(f"{ref} was installed, {self.installing} was asked for")
        self.installed, self.installing = ref, None
        self._has_superseded, self.refused = False, ""
        if self._refusals[0] == ref:
            self._refusals = (None, 0)
        if self.incoming is not None and self.incoming.ref == ref:
            self.incoming = None
        self.emit(do.ReportInstalled, f"{ref} is installed")

    # ---- generating --------------------------------------------------------------------------------------------------

    def _start_leases(self) -> None:
        """Start waiting leases in order, as far as the installed version may sample them and slots are free. A lease
        that waits for newer weights is skipped; a lease that needs an exact version blocks the rest.
        """
        if self.installed is None or self._is_swap_next():
            return
        if self.deterministic:
            self._start_unit(self.installed)
            return
        for lease in [one.lease for one in self.waiting.values()]:
            if sum(one.num_running for one in self.generating.values()) >= self.slots:
                return
            is_torn = self.installing is not None and lease.exact_version is not None
            if is_torn or not _fits(lease, self.installed):
                if lease.exact_version is not None:
                    return
                continue
            held_lease = self._start(lease.lease_id)
            reason = f"a slot is free, and {self.installed} is installed"
            self.emit(do.StartLease, reason, lease=lease, assignment=held_lease.assignment)

    def _start_unit(self, installed: SnapshotRef) -> None:
        """Start all leases of the next grant, once the previous grant has ended."""
        if self.generating or not self.waiting or self.installing is not None:
            return
        grant = next(iter(self.waiting.values())).grant
        unit = [one for one in self.waiting.values() if one.grant == grant]
        if not all(_fits(one.lease, installed) for one in unit):
            return
        for held_lease in unit:
            self._start(held_lease.lease.lease_id)
        leases, assignments = tuple(one.lease for one in unit), tuple(one.assignment for one in unit)
        reason = f"nothing is sampled, and {installed} is installed"
        self.emit(do.StartUnit, reason, leases=leases, assignments=assignments)

    def _start(self, lease_id: int) -> HeldLease:
        held_lease = self.generating[lease_id] = self.waiting.pop(lease_id)
        held_lease.num_running, held_lease.began_with = held_lease.lease.num_samples, self.installed
        return held_lease

    def _is_swap_next(self) -> bool:
        """Whether weights are being installed, or wait for running rollouts, so that no further lease may start."""
        if self.installing is not None:
            return self.swap == "between"
        incoming = self.incoming
        if incoming is None or not incoming.is_whole or not self._is_due(incoming.ref):
            return False
        return self.swap == "between"


def _fits(lease: Lease, installed: SnapshotRef) -> bool:
    """Whether the installed weights may sample this lease."""
    exact, version = lease.exact_version, installed.version
    return version >= lease.min_version if exact is None else version == exact


def _is_same_version(one: SnapshotRef, other: SnapshotRef) -> bool:
    """Whether both name the same version of a policy, of any lineage."""
    return (one.policy, one.version) == (other.policy, other.version)
