"""The events of the worker's scheduler, facts in the past tense, and its commands to its driver.

An assignment and the result of a lease travel with the events, and come back with the commands: the scheduler does not
look into either.
"""

from __future__ import annotations

from typing import Any

from echo2.core.decide.machine import Command as Command  # part of this module's vocabulary, too
from echo2.core.decide.machine import Event as _Event
from echo2.core.decide.machine import Tick as Tick  # part of this module's vocabulary, too
from echo2.core.decide.machine import WakeAt as WakeAt
from echo2.core.types import Lease, PayloadId, SamplingFailure, SnapshotRef


class SchedulerEvent(_Event):
    """Base class of the scheduler's events."""


class Connected(SchedulerEvent):
    """The head accepted this worker (again)."""


class Disconnected(SchedulerEvent):
    """The link to the head broke."""


class LeasesGranted(SchedulerEvent):
    """The head granted these leases together. `assignments`: one for each lease."""

    leases: tuple[Lease, ...]
    assignments: tuple[Any, ...]


class LeaseRevoked(SchedulerEvent):
    """The head took a lease back."""

    lease_id: int
    reason: str


class SnapshotAnnounced(SchedulerEvent):
    """A manifest arrived: of the snapshot that is the newest from now on, or of one that was requested (`asked_for`).
    `progress`: the stored share of the payload being fetched now (0 if none is). `base_model`: set for an adapter.
    """

    payload: PayloadId
    asked_for: bool = False
    progress: float = 0.0
    base_model: SnapshotRef | None = None


class SnapshotUnknown(SchedulerEvent):
    """The head has no snapshot with the requested name (lineage 0: none of this version)."""

    ref: SnapshotRef


class ManifestFailed(SchedulerEvent):
    """The request for a manifest did not get through."""


class SnapshotWhole(SchedulerEvent):
    """Every chunk of this payload is stored."""

    payload: PayloadId


class SnapshotGone(SchedulerEvent):
    """No source has this payload any more."""

    payload: PayloadId


class SnapshotRefused(SchedulerEvent):
    """A whole payload, or the base model below it, failed verification, does not fit the installed weights, or was
    rejected by the engine. Chunks of it that are no longer stored are fetched again.
    """

    payload: PayloadId
    reason: str


class SnapshotInstalled(SchedulerEvent):
    """The engine samples with this snapshot from now on."""

    ref: SnapshotRef


class SnapshotTooLarge(SchedulerEvent):
    """The engine has no room to load this snapshot beside the installed one, which stays."""

    payload: PayloadId
    reason: str


class SlotsSet(SchedulerEvent):
    """The head says how many rollouts are to be decoded at once, from now on."""

    slots: int


class RolloutEnded(SchedulerEvent):
    """A rollout of this lease no longer needs its slot."""

    lease_id: int


class GroupProduced(SchedulerEvent):
    """The group of this lease is complete. `result`: the data to deliver."""

    lease_id: int
    result: Any


class LeaseAbandoned(SchedulerEvent):
    """This lease can't give a group."""

    lease_id: int
    failure: SamplingFailure
    detail: str


class DeliveryAnswered(SchedulerEvent):
    """The head accepted or refused a result; either way it need not be delivered again."""

    lease_id: int


class DeliveryFailed(SchedulerEvent):
    """A result did not get through."""

    lease_id: int


Event = SchedulerEvent | Tick


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
    """Tell the head that this lease gives no result."""

    lease_id: int
    failure: SamplingFailure


class ReportInstalled(Command):
    """Tell the head now what is installed, not at the next heartbeat."""
