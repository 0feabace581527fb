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
    """Base of everything that can happen to the scheduler."""


class Connected(SchedulerEvent):
    """The head has taken us in (again)."""


class Disconnected(SchedulerEvent):
    """The link to the head broke."""


class LeasesGranted(SchedulerEvent):
    """The head granted these at once. `assignments`: one for each."""

    leases: tuple[Lease, ...]
    assignments: tuple[Any, ...]


class LeaseRevoked(SchedulerEvent):
    """The head took a lease back."""

    lease_id: int
    reason: str


class SnapshotAnnounced(SchedulerEvent):
    """A manifest came: of the snapshot that is the newest from now on, or one that was asked for. `progress`: the share
    of the payload being fetched that is stored already (0 where none is). `base_model`: what it is an adapter over.
    """

    payload: PayloadId
    asked_for: bool = False
    progress: float = 0.0
    base_model: SnapshotRef | None = None


class SnapshotUnknown(SchedulerEvent):
    """The head has no snapshot of this name, as it was asked for (lineage 0: of this version)."""

    ref: SnapshotRef


class ManifestFailed(SchedulerEvent):
    """Asking for a manifest failed on the way."""


class SnapshotWhole(SchedulerEvent):
    """Every chunk of this payload is stored."""

    payload: PayloadId


class SnapshotGone(SchedulerEvent):
    """Nobody has this payload any more."""

    payload: PayloadId


class SnapshotRefused(SchedulerEvent):
    """A whole payload, or the base model that it went in over, did not verify, does not fit the installed weights, or
    the engine would not take it. What is not stored any more of it is fetched again.
    """

    payload: PayloadId
    reason: str


class SnapshotInstalled(SchedulerEvent):
    """The engine samples with this snapshot from now on."""

    ref: SnapshotRef


class SnapshotTooLarge(SchedulerEvent):
    """The engine has no room to put this one beside the installed one, which stays."""

    payload: PayloadId
    reason: str


class RolloutEnded(SchedulerEvent):
    """A rollout of this lease needs its slot no more."""

    lease_id: int


class GroupProduced(SchedulerEvent):
    """The group of this lease is complete. `result`: what is to be delivered."""

    lease_id: int
    result: Any


class LeaseAbandoned(SchedulerEvent):
    """This lease can't give a group. `failure` as in `leases.FAILURES`."""

    lease_id: int
    failure: str
    detail: str


class DeliveryAnswered(SchedulerEvent):
    """The head accepted or refused a result; either way it is dealt with."""

    lease_id: int


class DeliveryFailed(SchedulerEvent):
    """A result did not get through."""

    lease_id: int


Event = SchedulerEvent | Tick
