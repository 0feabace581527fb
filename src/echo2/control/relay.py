"""A worker's machine: what to fetch, when to swap weights, what to sample next, what to deliver again.

It holds leases in order of arrival, one batch of them at the engine, results until the head has answered for them, and
at most one snapshot on its way in. The engine is asked for one thing at a time: a batch, or a swap between batches
(with swap = "during", also within a batch, between two tokens). Like the planner it is pure: events in, commands out.

    announced -> fetching (chunk by chunk, while the engine generates) -> whole -> installing -> installed
    lease:  waiting -> generating -> produced -> answered
"""

from __future__ import annotations

from dataclasses import dataclass, field

from echo2.control import relay_commands as do
from echo2.control import relay_events as ev
from echo2.errors import InvariantError
from echo2.types import Lease, SnapshotRef

#: Chunks asked for at once; small enough that a torn connection loses little, large enough to fill a long link.
CHUNKS_PER_FETCH = 16
#: Times a snapshot is fetched in a row although it proved corrupt.
MAX_FETCHES = 3
#: Seconds before a snapshot that proved corrupt so often is asked for again, unless a newer one comes first. (Never to
#: ask again would be a deadlock where the learner waits for this worker and so publishes nothing newer.)
REFUSED_SECONDS = 30.0
#: Seconds between tries to deliver a result that the head did not answer for.
REDELIVER_SECONDS = 2.0
#: Seconds before a fetch that failed is tried again.
RETRY_SECONDS = 1.0


@dataclass(slots=True)
class Incoming:
    """The snapshot on its way in."""

    ref: SnapshotRef
    missing: dict[bytes, None]
    in_flight: set[bytes] = field(default_factory=set)
    fetches: int = 1
    is_whole: bool = False


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
                if self.incoming is not None:
                    self.incoming.in_flight.clear()
            case ev.LeasesGranted():
                self._granted(event.leases)
            case ev.LeaseRevoked():
                self._revoked(event.lease_id, event.reason)
            case ev.SnapshotAnnounced():
                self._announced(event)
            case ev.SnapshotUnknown():
                self._unknown(event.version)
            case ev.ManifestFailed():
                self._asked_manifest, self._retry_at = False, now + RETRY_SECONDS
            case ev.ChunkStored():
                self._chunk_stored(event.chunk)
            case ev.ChunksFailed():
                self._chunks_failed(event, now)
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
        self._fetch(now)
        self._install()
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
        if not event.asked_for:
            # The head's word counts, not the order of names: after a fall-back an older one may be the newest.
            self.newest = event.ref
        if event.ref in (self.installed, self.installing) or (self.incoming and self.incoming.ref == event.ref):
            return
        if self._is_wanted(event.ref):
            # A newer snapshot takes the place of an unfinished one; chunks they share are stored already.
            self._retry_at = 0.0
            self.incoming = Incoming(event.ref, dict.fromkeys(event.missing))

    def _demanded(self) -> int | None:
        """The version that the first waiting lease demands exactly, if it does."""
        first = next(iter(self.waiting.values()), None)
        return None if first is None else first.exact_version

    def _is_wanted(self, ref: SnapshotRef) -> bool:
        """Is this the snapshot to have next: the one demanded, else the newest?"""
        demanded = self._demanded()
        return ref.version == demanded if demanded is not None else ref == self.newest

    def _unknown(self, version: int) -> None:
        """The origin has no such snapshot (any more)."""
        self._asked_manifest = False
        for lease_id in [key for key, lease in self.waiting.items() if lease.exact_version == version]:
            del self.waiting[lease_id], self._grant_of[lease_id]
            detail = f"no snapshot of version {version} is to be had"
            self._do(do.FailLease, detail, lease_id=lease_id, failure="snapshot_gone")
        if self.newest is not None and self.newest.version == version:
            self.newest = self.installed

    def _fetch(self, now: float) -> None:
        if not self.connected or now < self._retry_at or self.newest is None:
            return
        if any(ref is not None and self._is_wanted(ref) for ref in (self.installed, self.installing)):
            return
        incoming = self.incoming
        if incoming is None or not self._is_wanted(incoming.ref):
            demanded = self._demanded()
            ref = self.newest if demanded in (None, self.newest.version) else SnapshotRef(0, demanded or 0)
            if not self._asked_manifest:
                self._asked_manifest = True
                self._do(do.AskManifest, f"version {ref.version} is needed", ref=ref)
        elif not incoming.missing:
            incoming.is_whole = True
        elif not incoming.in_flight:
            chunks = tuple(incoming.missing)[:CHUNKS_PER_FETCH]
            incoming.in_flight.update(chunks)
            reason = f"{len(incoming.missing)} chunks of {incoming.ref} are missing"
            self._do(do.FetchChunks, reason, ref=incoming.ref, chunks=chunks)

    def _chunk_stored(self, chunk: bytes) -> None:
        if self.incoming is not None:
            self.incoming.missing.pop(chunk, None)
            self.incoming.in_flight.discard(chunk)

    def _chunks_failed(self, event: ev.ChunksFailed, now: float) -> None:
        if self.incoming is None or self.incoming.ref != event.ref:
            return
        self.incoming.in_flight.clear()
        self._retry_at = now + RETRY_SECONDS
        if event.is_gone:
            self.incoming = None  # dropped at the origin; what comes next is announced, or asked for anew

    def _refused(self, event: ev.SnapshotRefused, now: float) -> None:
        """It was whole and did not verify, or the engine would not take it: never installed, fetched again."""
        self.installing = None
        incoming = self.incoming
        if incoming is None or incoming.ref != event.ref:
            return
        if incoming.fetches >= MAX_FETCHES:
            self.incoming, self._retry_at = None, now + REFUSED_SECONDS
            return
        self.incoming = Incoming(event.ref, dict.fromkeys(event.missing), fetches=incoming.fetches + 1)

    def _install(self) -> None:
        if self.installing is not None or self.incoming is None or not self.incoming.is_whole:
            return
        exact_pending = any(lease.exact_version is not None for lease in self.generating.values())
        if self.engine_busy and (not self.swap_during or exact_pending):
            return
        self.installing = self.incoming.ref
        when = "between two tokens" if self.engine_busy else "between generations"
        self._do(do.InstallSnapshot, f"{self.incoming.ref} is whole; swapped {when}", ref=self.incoming.ref)

    def _installed(self, ref: SnapshotRef) -> None:
        if self.installing != ref:
            raise InvariantError(f"{ref} was installed, {self.installing} was asked for")
        self.installed, self.installing = ref, None
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
