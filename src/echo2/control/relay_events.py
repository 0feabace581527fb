"""Everything that can happen to a worker's relay. Facts, in the past tense."""

from __future__ import annotations

from dataclasses import dataclass

from echo2.control.events import Tick as Tick  # part of this module's vocabulary, too
from echo2.types import Lease, PayloadId, SnapshotRef


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
    """A manifest came: of the snapshot that is the newest from now on, or one that was asked for. `progress`: the share
    of the payload being fetched that is stored already (0 where none is).
    """

    payload: PayloadId
    asked_for: bool = False
    progress: float = 0.0


@dataclass(frozen=True, slots=True)
class SnapshotUnknown:
    """The head has no snapshot of this name, as it was asked for (lineage 0: of this version)."""

    ref: SnapshotRef


@dataclass(frozen=True, slots=True)
class ManifestFailed:
    """Asking for a manifest failed on the way."""

    reason: str


@dataclass(frozen=True, slots=True)
class SnapshotWhole:
    """Every chunk of this payload is stored."""

    payload: PayloadId


@dataclass(frozen=True, slots=True)
class SnapshotGone:
    """Nobody has this payload any more."""

    payload: PayloadId
    reason: str


@dataclass(frozen=True, slots=True)
class SnapshotRefused:
    """A whole payload did not verify, does not fit the installed weights, or the engine would not take it. What is not
    stored any more of it is fetched again.
    """

    payload: PayloadId
    reason: str


@dataclass(frozen=True, slots=True)
class SnapshotInstalled:
    """The engine samples with this snapshot from now on."""

    ref: SnapshotRef


@dataclass(frozen=True, slots=True)
class GroupProduced:
    """The group of this lease is complete."""

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


Event = (
    Connected
    | Disconnected
    | LeasesGranted
    | LeaseRevoked
    | SnapshotAnnounced
    | SnapshotUnknown
    | ManifestFailed
    | SnapshotWhole
    | SnapshotGone
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
