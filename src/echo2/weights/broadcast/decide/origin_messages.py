"""The events of the origin's state machine (`origin.Broadcast`), facts in the past tense, and its commands to its
driver.

Rates are in bytes per second of payload; None where nothing was measured yet. A payload's distinct chunks, numbered
0.. in stream order, are dealt to `len(sources)` stripes: chunk i is of stripe i % len(sources). A route names the
source of each stripe; "" is the origin.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from echo2.core.decide.machine import Command as Command  # part of this module's vocabulary, too
from echo2.core.decide.machine import Event as _Event
from echo2.core.types import PayloadId

#: Why a worker gave a source up.
SOURCE_FAILURES = ("broken", "stalled", "slow", "corrupt", "missing", "unreachable")
ONE_MACHINE = "loopback"
ORIGIN = ""


class BroadcastEvent(_Event):
    """Base class of the events of a broadcast."""


class MemberJoined(BroadcastEvent):
    """A worker can receive payloads (again). `address`: where peers can dial it, "" if they can't. `reach`: members
    with different values can't reach each other by address ("" is the internet, ONE_MACHINE the origin's machine).
    `ticket`: the ticket with which a stranger joined; "" for a machine of the run's owner.
    """

    worker_id: str
    address: str
    reach: str = ""
    ticket: str = ""


class MemberLeft(BroadcastEvent):
    """A worker left or was lost."""

    worker_id: str
    reason: str


class LinkMeasured(BroadcastEvent):
    """A worker's own link was probed: `up` is its uplink, `down` its downlink."""

    worker_id: str
    up: float | None
    down: float | None


class PayloadAssigned(BroadcastEvent):
    """These workers shall receive this payload of `num_chunks` chunks."""

    payload: PayloadId
    worker_ids: tuple[str, ...]
    num_chunks: int


class PayloadDropped(BroadcastEvent):
    """The origin no longer stores this payload."""

    payload: PayloadId


@dataclass(frozen=True, slots=True)
class Tally:
    """Bytes of one payload that one source gave one worker, and seconds from the download's start to its last chunk."""

    source: str
    num_bytes: int
    seconds: float


class PayloadReceived(BroadcastEvent):
    """A worker has all chunks of a payload and can serve each of them."""

    worker_id: str
    payload: PayloadId
    tallies: tuple[Tally, ...] = ()


class SnapshotHeld(BroadcastEvent):
    """A worker has this snapshot installed, so it can serve the whole payload to members that join late. If the
    snapshot is an adapter, the worker can also serve the payload of its base model."""

    worker_id: str
    payload: PayloadId
    base_model: PayloadId | None = None


class SourceFailed(BroadcastEvent):
    """A worker gave up a source of a payload and waits for new routes; `reason` is one of SOURCE_FAILURES."""

    worker_id: str
    payload: PayloadId
    source: str
    reason: str


Event = BroadcastEvent


class SetRoutes(Command):
    """Tell this worker the source of each stripe from now on. `addresses`: of those sources that the worker dials
    itself; the other sources dial the worker (`DialPeer`).
    """

    worker_id: str
    payload: PayloadId
    sources: tuple[str, ...]
    addresses: Mapping[str, str]


class DialPeer(Command):
    """Tell this worker, which can't be dialled, to dial a peer that takes chunks from it."""

    worker_id: str
    peer_id: str
    address: str


class NameSuspect(Command):
    """A peer sent wrong bytes: warn the operator. No member takes chunks from this peer any more."""

    worker_id: str
    accused_by: str
