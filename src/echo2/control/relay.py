"""A worker's machine: what to fetch, when to swap weights, what to sample next, what to deliver again.

It holds leases in order of arrival, one batch of them at the engine, results until the head has answered for them, and
at most one snapshot on its way in. The engine is asked for one thing at a time: a batch, or a swap between batches
(with swap = "during", also within a batch, between two tokens). Like the planner it is pure: events in, commands out.

    announced -> fetching (from the origin and peers, while the engine generates) -> whole -> installing -> installed
    lease:  waiting -> generating -> produced -> answered
"""

from __future__ import annotations

from dataclasses import dataclass

from echo2.control import relay_commands as do
from echo2.control import relay_events as ev
from echo2.errors import InvariantError
from echo2.types import Lease, PayloadId, SnapshotRef

#: Times a snapshot is fetched in a row although it proved corrupt.
MAX_FETCHES = 3
#: Seconds before a snapshot that proved corrupt so often is asked for again, unless a newer one comes first. (Never to
#: ask again would be a deadlock where the learner waits for this worker and so publishes nothing newer.)
REFUSED_SECONDS = 30.0
#: Seconds between tries to deliver a result that the head did not answer for.
REDELIVER_SECONDS = 2.0
#: Seconds before a manifest that did not come is asked for again.
RETRY_SECONDS = 1.0
#: An unfinished snapshot of which this share is here is finished first, though a newer one is announced.
NEARLY_WHOLE = 0.5


@dataclass(slots=True)
class Incoming:
    """The snapshot on its way in."""

    payload: PayloadId
    is_nearly_whole: bool = False
    is_whole: bool = False

    @property
    def ref(self) -> SnapshotRef:
        return self.payload.ref


class Relay:
    """State, and one method a kind of event."""

    def __init__(self, groups_per_batch: int, swap_during: bool) -> None:
        self.groups_per_batch = groups_per_batch
        self.swap_during = swap_during
        self.connected = False
        self.stopped: str | None = None
        self.installed: SnapshotRef | None = None
        self.newest: SnapshotRef | None = None
        self.incoming: Incoming | None = None
        self.installing: SnapshotRef | None = None
        self.engine_busy = False
        self.waiting: dict[int, Lease] = {}
        self.generating: dict[int, Lease] = {}
        self.produced: dict[int, float] = {}
        self.num_events = 0
        self._grant_of: dict[int, int] = {}
        self._asked_manifest = False
        self._has_superseded = False
        self._refusals: tuple[SnapshotRef | None, int] = (None, 0)
        self._retry_at = 0.0
        self._wake_at: float | None = None
        self._out: list[do.Command] = []

    def handle(self, event: ev.Event, now: float) -> list[do.Command]:
        """Take one event at time `now` (seconds of the worker's clock) and say what is to be done, in order."""
        self.num_events += 1
        self._out = []
        match event:
            case ev.Connected():
                self._connected(now)
            case ev.Disconnected():
                self.connected = False
            case ev.LeasesGranted():
                self._granted(event.leases)
            case ev.LeaseRevoked():
                self._revoked(event.lease_id, event.reason)
            case ev.SnapshotAnnounced():
                self._announced(event)
            case ev.SnapshotUnknown():
                self._unknown(event.ref)
            case ev.ManifestFailed():
                self._asked_manifest, self._retry_at = False, now + RETRY_SECONDS
            case ev.SnapshotWhole():
                if self.incoming is not None and self.incoming.payload == event.payload:
                    self.incoming.is_whole = True
            case ev.SnapshotGone():
                self._gone(event.payload, now)
            case ev.SnapshotRefused():
                self._refused(event, now)
            case ev.SnapshotInstalled():
                self._installed(event.ref)
            case ev.GroupProduced():
                self._produced(event.lease_id)
            case ev.LeaseAbandoned():
                self._abandoned(event)
            case ev.BatchEnded():
                self._batch_ended(event.error)
            case ev.DeliveryAnswered():
                self.produced.pop(event.lease_id, None)
            case ev.DeliveryFailed():
                if event.lease_id in self.produced:
                    self.produced[event.lease_id] = now + REDELIVER_SECONDS
            case ev.StopOrdered():
                self.stopped = event.reason
                self._do(do.Stop, event.reason)
            case ev.Tick():
                self._wake_at = None
        if self.stopped is None:
            self._advance(now)
        return self._out

    def _do(self, kind: type[do.Command], reason: str, **fields: object) -> None:
        self._out.append(kind(cause=self.num_events, reason=reason, **fields))

    def _advance(self, now: float) -> None:
        self._redeliver(now)
        self._install()
        self._ask(now)
        self._stop_unwanted()
        self._start_batch()
        dues = [at for at in (self._retry_at, *self.produced.values()) if at > now]
        if (
            dues
            and self.connected
            and min(dues) < float("inf")
            and (self._wake_at is None or min(dues) < self._wake_at)
        ):
            self._wake_at = min(dues)
            self._do(do.WakeAt, "next try to deliver or to fetch", at=self._wake_at)

    # ---- leases and results ------------------------------------------------------------------------------------------

    def _connected(self, now: float) -> None:
        self.connected = True
        self._asked_manifest = False
        for lease_id in self.produced:
            self.produced[lease_id] = now

    def _granted(self, leases: tuple[Lease, ...]) -> None:
        for lease in leases:
            if lease.lease_id not in self.generating and lease.lease_id not in self.produced:
                self.waiting[lease.lease_id] = lease
                self._grant_of[lease.lease_id] = self.num_events

    def _revoked(self, lease_id: int, reason: str) -> None:
        if self.waiting.pop(lease_id, None) is not None:
            del self._grant_of[lease_id]
        self.produced.pop(lease_id, None)
        if self.generating.pop(lease_id, None) is not None and not self.generating:
            self._do(do.CancelBatch, f"every lease of it is over: {reason}")

    def _produced(self, lease_id: int) -> None:
        if self.generating.pop(lease_id, None) is None:
            return  # revoked meanwhile
        self.produced[lease_id] = float("inf")
        self._do(do.Deliver, "the group is complete", lease_id=lease_id)

    def _abandoned(self, event: ev.LeaseAbandoned) -> None:
        if self.generating.pop(event.lease_id, None) is not None:
            self._do(do.FailLease, event.detail, lease_id=event.lease_id, failure=event.failure)

    def _batch_ended(self, error: str | None) -> None:
        for lease_id in self.generating:
            detail = error or "the engine ended the batch without this group"
            self._do(do.FailLease, detail, lease_id=lease_id, failure="engine_failed")
        self.generating = {}
        self.engine_busy = False

    def _redeliver(self, now: float) -> None:
        if not self.connected:
            return
        for lease_id, at in self.produced.items():
            if at <= now:
                self.produced[lease_id] = float("inf")
                self._do(do.Deliver, "the head has not answered for it yet", lease_id=lease_id)

    # ---- snapshots ---------------------------------------------------------------------------------------------------

    def _announced(self, event: ev.SnapshotAnnounced) -> None:
        self._asked_manifest = False
        ref, before = event.payload.ref, self.newest
        if not event.asked_for:
            # The head's word counts, not the order of names: after a fall-back an older one may be the newest.
            self.newest = ref
            if before is not None and ref != before:
                self._retry_at = 0.0
                self._fell_back(ref, before)
        if ref in (self.installed, self.installing) or (self.incoming is not None and self.incoming.ref == ref):
            return
        if self.incoming is not None:
            self.incoming.is_nearly_whole |= event.progress > NEARLY_WHOLE
        if self._is_wanted(ref) and not self._finishes_first() and self._fits_base(event.payload):
            self._begin(event.payload, f"{event.payload} is announced")  # else `_ask` asks for it when it is its turn

    def _begin(self, payload: PayloadId, reason: str) -> None:
        """A newer snapshot takes the place of an unfinished one; chunks they share are stored already."""
        self._has_superseded |= self.incoming is not None and not self.incoming.is_whole
        self._retry_at = 0.0
        self.incoming = Incoming(payload)
        self._do(do.FetchSnapshot, reason, payload=payload)

    def _finishes_first(self) -> bool:
        """Is the unfinished snapshot to be installed before the newest is begun? If much of it is here; and always if
        it has itself taken the place of another, or a publisher that is faster than the link would starve the engine.
        """
        incoming = self.incoming
        if incoming is None or self._demanded() is not None:
            return False
        if self.newest is not None and incoming.ref.lineage != self.newest.lineage:
            return False  # nothing made with it could be trained on
        return incoming.is_whole or incoming.is_nearly_whole or self._has_superseded

    def _fits_base(self, payload: PayloadId) -> bool:
        if payload.base is None:
            return True
        return payload.base == (self.installing or self.installed) and self._refusals[0] != payload.ref

    def _fell_back(self, ref: SnapshotRef, before: SnapshotRef) -> None:
        """If the learner came back to an older version, what was granted before may wait for one that never comes."""
        if ref.lineage == before.lineage and ref.version > before.version:
            return
        for lease_id in [key for key, lease in self.waiting.items() if lease.min_version > ref.version]:
            least = self.waiting[lease_id].min_version
            self._fail_waiting(lease_id, f"the learner fell back to {ref}; version {least} is not to be had")

    def _fail_waiting(self, lease_id: int, detail: str) -> None:
        del self.waiting[lease_id], self._grant_of[lease_id]
        self._do(do.FailLease, detail, lease_id=lease_id, failure="snapshot_gone")

    def _demanded(self) -> int | None:
        """The version that the first waiting lease demands exactly, if it does."""
        first = next(iter(self.waiting.values()), None)
        return None if first is None else first.exact_version

    def _is_wanted(self, ref: SnapshotRef) -> bool:
        """Is this the snapshot to have next: the one demanded, else the newest?"""
        demanded = self._demanded()
        return ref.version == demanded if demanded is not None else ref == self.newest

    def _unknown(self, ref: SnapshotRef) -> None:
        """The origin has no such snapshot (any more)."""
        self._asked_manifest = False
        if self.newest == ref:
            self.newest = self.installed
        newest = -1 if self.newest is None else self.newest.version
        for lease_id, lease in list(self.waiting.items()):
            gone = lease.exact_version == ref.version
            if gone or (lease.min_version == ref.version and newest < lease.min_version):
                self._fail_waiting(lease_id, f"no snapshot of version {ref.version} is to be had")

    def _ask(self, now: float) -> None:
        """Ask for the manifest of what is wanted and is neither here nor on its way."""
        if not self.connected or now < self._retry_at or self.newest is None or self._asked_manifest:
            return
        if any(ref is not None and self._is_wanted(ref) for ref in (self.installed, self.installing)):
            return
        if self.incoming is not None and (self._is_wanted(self.incoming.ref) or self._finishes_first()):
            return
        demanded = self._demanded()
        ref = self.newest if demanded in (None, self.newest.version) else SnapshotRef(0, demanded or 0)
        refused = self._refusals[0]
        base = None if refused and refused.version == ref.version else self.installing or self.installed
        self._asked_manifest = True
        self._do(do.AskManifest, f"version {ref.version} is needed", ref=ref, base=base)

    def _gone(self, payload: PayloadId, now: float) -> None:
        """What comes next is announced, or asked for anew."""
        if self.incoming is not None and self.incoming.payload == payload and self.installing != payload.ref:
            self.incoming, self._retry_at = None, now + RETRY_SECONDS

    def _refused(self, event: ev.SnapshotRefused, now: float) -> None:
        """It was whole and did not verify, or the engine would not take it: never installed, fetched again; whole, if
        it was a delta.
        """
        if self.installing == event.payload.ref:
            self.installing = None
        if self.incoming is None or self.incoming.payload != event.payload:
            return
        ref, count = self._refusals
        count = count + 1 if ref == event.payload.ref else 1
        self._refusals = (event.payload.ref, count)
        if count >= MAX_FETCHES:
            self.incoming, self._retry_at = None, now + REFUSED_SECONDS
            self._refusals = (event.payload.ref, 0)
        elif event.payload.base is not None:
            self.incoming = None
        else:
            self.incoming = Incoming(event.payload)
            self._do(do.FetchSnapshot, f"it was refused: {event.reason}", payload=event.payload)

    def _install(self) -> None:
        incoming = self.incoming
        if self.installing is not None or incoming is None or not incoming.is_whole or not self._is_due(incoming.ref):
            return
        base = incoming.payload.base
        if base is not None and base != self.installed:
            self._refusals = (incoming.ref, 0)
            self.incoming = None
            return  # it stands on weights that are not here; `_ask` asks for all of it
        exact_pending = any(lease.exact_version is not None for lease in self.generating.values())
        if self.engine_busy and (not self.swap_during or exact_pending):
            return
        self.installing = incoming.ref
        when = "between two tokens" if self.engine_busy else "between generations"
        self._do(do.InstallSnapshot, f"{incoming.payload} is whole; swapped {when}", payload=incoming.payload)

    def _is_due(self, ref: SnapshotRef) -> bool:
        """May this one, which is whole, go in now? What a lease demands keeps others out until it is sampled."""
        if self._demanded() is not None or self.newest is None:
            return self._is_wanted(ref)
        return ref == self.newest or (ref.lineage == self.newest.lineage and self.installed != self.newest)

    def _stop_unwanted(self) -> None:
        incoming = self.incoming
        if incoming is None or self._demanded() is not None or self.newest in (incoming.ref, None):
            return
        if self.newest in (self.installed, self.installing):
            self.incoming = None
            self._do(do.StopFetching, f"{self.newest} is the newest, and is here", payload=incoming.payload)

    def _installed(self, ref: SnapshotRef) -> None:
        if self.installing != ref:
            raise InvariantError(f"{ref} was installed, {self.installing} was asked for")
        self.installed, self.installing = ref, None
        self._has_superseded = False
        if self._refusals[0] == ref:
            self._refusals = (None, 0)
        if self.incoming is not None and self.incoming.ref == ref:
            self.incoming = None
        self._do(do.Report, f"{ref} is installed")

    # ---- generating --------------------------------------------------------------------------------------------------

    def _start_batch(self) -> None:
        """Give the engine what waits, in order, as far as the installed version may sample it. Leases that demand a
        version exactly are sampled grant by grant: the batch's shape is part of what they demand.
        """
        if self.engine_busy or self.installing is not None or self.installed is None or not self.waiting:
            return
        first = next(iter(self.waiting.values()))
        batch: list[Lease] = []
        for lease in self.waiting.values():
            same_grant = self._grant_of[lease.lease_id] == self._grant_of[first.lease_id]
            both_loose = lease.exact_version is None and first.exact_version is None
            full = both_loose and len(batch) >= self.groups_per_batch
            if full or not (same_grant or both_loose) or not self._fits(lease, self.installed.version):
                break
            batch.append(lease)
        if not batch:
            return
        for lease in batch:
            self.generating[lease.lease_id] = self.waiting.pop(lease.lease_id)
            del self._grant_of[lease.lease_id]
        self.engine_busy = True
        ids = tuple(lease.lease_id for lease in batch)
        reason = f"the engine is free and has version {self.installed.version}"
        self._do(do.StartBatch, reason, lease_ids=ids, ref=self.installed)

    @staticmethod
    def _fits(lease: Lease, version: int) -> bool:
        return version == lease.exact_version if lease.exact_version is not None else version >= lease.min_version

    def check_invariants(self) -> None:
        """Raise InvariantError if a lease is in two places, or weights are half-installed while a batch starts."""
        places = [set(self.waiting), set(self.generating), set(self.produced)]
        if sum(map(len, places)) != len(set().union(*places)):
            raise InvariantError(f"a lease is in two places: {places}")
        if self.generating and not self.engine_busy:
            raise InvariantError("leases are generating at an idle engine")
