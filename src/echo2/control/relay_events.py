"""Everything that can happen to a worker's relay. Facts, in the past tense."""

from __future__ import annotations

from dataclasses import dataclass

from echo2.types import Lease, SnapshotRef


@dataclass(frozen=True, slots=True)
class Connected:
    """The head has taken us in (again)."""


@dataclass(frozen=True, slots=True)
class Disconnected:
    """The link to the head broke."""

    reason: str


@dataclass(frozen=True, slots=True)
class LeasesGranted:
    """The head granted these, to be sampled together."""

    leases: tuple[Lease, ...]


@dataclass(frozen=True, slots=True)
class LeaseRevoked:
    """The head took a lease back."""

    lease_id: int
    reason: str


@dataclass(frozen=True, slots=True)
class SnapshotAnnounced:
    """A manifest came: of the snapshot that is the newest from now on, or one that was asked for. `missing`: hashes of
    its chunks that are not stored here.
    """

    ref: SnapshotRef
    missing: tuple[bytes, ...]
    asked_for: bool = False


@dataclass(frozen=True, slots=True)
class SnapshotUnknown:
    """The head has no snapshot of this version."""

    version: int


@dataclass(frozen=True, slots=True)
class ManifestFailed:
    """Asking for a manifest failed on the way."""

    reason: str


@dataclass(frozen=True, slots=True)
class ChunkStored:
    """A chunk was verified and stored."""

    chunk: bytes


@dataclass(frozen=True, slots=True)
class ChunksFailed:
    """A fetch ended before all its chunks came. `is_gone`: the source does not have them any more."""

    ref: SnapshotRef
    reason: str
    is_gone: bool = False


@dataclass(frozen=True, slots=True)
class SnapshotRefused:
    """A whole snapshot did not verify, or the engine would not take it. `missing`: chunks to fetch again."""

    ref: SnapshotRef
    missing: tuple[bytes, ...]
    reason: str


@dataclass(frozen=True, slots=True)
class SnapshotInstalled:
    """The engine samples with this snapshot from now on."""

    ref: SnapshotRef


@dataclass(frozen=True, slots=True)
class GroupProduced:
    """The group of this lease is complete (and scored, where the worker scores)."""

    lease_id: int


@dataclass(frozen=True, slots=True)
class LeaseAbandoned:
    """This lease of the batch can't give a group. `failure` as in `leases.FAILURES`."""

    lease_id: int
    failure: str
    detail: str


@dataclass(frozen=True, slots=True)
class BatchEnded:
    """The engine is free again. `error`: what broke it, if something did."""

    error: str | None = None


@dataclass(frozen=True, slots=True)
class DeliveryAnswered:
    """The head accepted or refused a result; either way it is dealt with."""

    lease_id: int
    accepted: bool
    reason: str


@dataclass(frozen=True, slots=True)
class DeliveryFailed:
    """A result did not get through."""

    lease_id: int
    reason: str


@dataclass(frozen=True, slots=True)
class StopOrdered:
    """The run is over for us."""

    reason: str


@dataclass(frozen=True, slots=True)
class Tick:
    """The time asked for by `WakeAt` has come."""


Event = (
    Connected
    | Disconnected
    | LeasesGranted
    | LeaseRevoked
    | SnapshotAnnounced
    | SnapshotUnknown
    | ManifestFailed
    | ChunkStored
    | ChunksFailed
    | SnapshotRefused
    | SnapshotInstalled
    | GroupProduced
    | LeaseAbandoned
    | BatchEnded
    | DeliveryAnswered
    | DeliveryFailed
    | StopOrdered
    | Tick
)
