"""The commands that the worker's scheduler can give to its driver."""

from __future__ import annotations

from typing import Any

from echo2.control.machine import Command as Command  # part of this module's vocabulary, too
from echo2.control.machine import WakeAt as WakeAt
from echo2.types import Lease, PayloadId, SnapshotRef


class AskManifest(Command):
    """Ask the head for this snapshot's manifest; lineage 0 means the newest lineage that has the version. `base`: the
    snapshot that a delta may build on; None asks for the whole content.
    """

    ref: SnapshotRef
    base: SnapshotRef | None = None


class FetchSnapshot(Command):
    """Fetch the missing chunks of this payload (again), replacing the current download."""

    payload: PayloadId


class StopFetching(Command):
    """Stop fetching this payload, which is no longer needed."""

    payload: PayloadId


class InstallSnapshot(Command):
    """Decode (over the installed weights, if it is a delta), verify the digest, load into a shadow, swap. An adapter's
    base model is stored already; it is loaded first if the engine has another one."""

    payload: PayloadId


class StartLease(Command):
    """Sample this lease with the installed snapshot. `assignment`: the data that came with the lease."""

    lease: Lease
    assignment: Any


class StartUnit(Command):
    """Sample these leases together and alone, with the installed snapshot (`run.deterministic`)."""

    leases: tuple[Lease, ...]
    assignments: tuple[Any, ...]


class AbortLease(Command):
    """End the rollouts of this running lease now; its result is no longer needed."""

    lease_id: int


class Deliver(Command):
    """Send the result of this lease to the head."""

    lease_id: int
    result: Any


class FailLease(Command):
    """Tell the head that this lease gives no result. `failure` as in `leases.FAILURES`."""

    lease_id: int
    failure: str


class ReportInstalled(Command):
    """Tell the head now what is installed, not at the next heartbeat."""
