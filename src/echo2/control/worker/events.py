"""The events of the worker's scheduler, as facts in the past tense.

An assignment and the result of a lease travel with the events, and come back with the commands: the scheduler does not
look into either.
"""

from __future__ import annotations

from typing import Any

from echo2.control.machine import Event as _Event
from echo2.control.machine import Tick as Tick  # part of this module's vocabulary, too
from echo2.types import Lease, PayloadId, SnapshotRef


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


class RolloutEnded(SchedulerEvent):
    """A rollout of this lease no longer needs its slot."""

    lease_id: int


class GroupProduced(SchedulerEvent):
    """The group of this lease is complete. `result`: the data to deliver."""

    lease_id: int
    result: Any


class LeaseAbandoned(SchedulerEvent):
    """This lease can't give a group. `failure` as in `leases.FAILURES`."""

    lease_id: int
    failure: str
    detail: str


class DeliveryAnswered(SchedulerEvent):
    """The head accepted or refused a result; either way it need not be delivered again."""

    lease_id: int


class DeliveryFailed(SchedulerEvent):
    """A result did not get through."""

    lease_id: int


Event = SchedulerEvent | Tick
