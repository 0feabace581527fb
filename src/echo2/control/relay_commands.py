"""Everything the relay can ask of its driver."""

from __future__ import annotations

from dataclasses import dataclass

from echo2.control.commands import Command as Command  # part of this module's vocabulary, too
from echo2.control.commands import WakeAt as WakeAt
from echo2.types import PayloadId, SnapshotRef


@dataclass(frozen=True, slots=True, kw_only=True)
class AskManifest(Command):
    """Ask the head for this snapshot's manifest; lineage 0 means the newest lineage that has the version. `base`: what
    a delta may stand on; None asks for the whole content.
    """

    ref: SnapshotRef
    base: SnapshotRef | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchSnapshot(Command):
    """Fetch what is missing of this payload (again), in the place of another one that was being fetched."""

    payload: PayloadId


@dataclass(frozen=True, slots=True, kw_only=True)
class StopFetching(Command):
    """Nobody wants this payload any more."""

    payload: PayloadId


@dataclass(frozen=True, slots=True, kw_only=True)
class InstallSnapshot(Command):
    """Decode (over the installed weights, if it is a delta), verify the digest, load into a shadow, swap."""

    payload: PayloadId


@dataclass(frozen=True, slots=True, kw_only=True)
class StartBatch(Command):
    """Sample these leases together with the installed snapshot."""

    lease_ids: tuple[int, ...]
    ref: SnapshotRef


@dataclass(frozen=True, slots=True, kw_only=True)
class CancelBatch(Command):
    """Nobody wants the running batch any more: end it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Deliver(Command):
    """Send the result of this lease to the head."""

    lease_id: int


@dataclass(frozen=True, slots=True, kw_only=True)
class FailLease(Command):
    """Tell the head that this lease gives no result. `failure` as in `leases.FAILURES`."""

    lease_id: int
    failure: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Report(Command):
    """Tell the head now what is installed, not at the next heartbeat."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stop(Command):
    """End the process in good order."""
