"""The events of the origin's state machine (`origin.Broadcast`), as facts in the past tense.

Rates are in bytes per second of payload; None where nothing was measured yet.
"""

from __future__ import annotations

from dataclasses import dataclass

from echo2.control.machine import Event as _Event
from echo2.types import PayloadId

#: Why a worker gave a source up.
SOURCE_FAILURES = ("broken", "stalled", "slow", "corrupt", "missing", "unreachable")


ONE_MACHINE = "loopback"


class BroadcastEvent(_Event):
    """Base of everything that can happen to a broadcast."""


class MemberJoined(BroadcastEvent):
    """A worker can be sent payloads (again). `address`: where others can dial it, "" where nobody can. `reach`: members
    with different words here can't reach each other by address ("" is the internet, ONE_MACHINE that of the origin).
    `ticket`: by which a stranger joined; "" for a machine of the run's owner.
    """

    worker_id: str
    address: str
    reach: str = ""
    ticket: str = ""


class MemberLeft(BroadcastEvent):
    """A worker is gone, for whatever reason."""

    worker_id: str
    reason: str


class LinkMeasured(BroadcastEvent):
    """A worker's own link was probed: what it can send and receive."""

    worker_id: str
    up: float | None
    down: float | None


class PayloadAssigned(BroadcastEvent):
    """These workers are to have this payload, of so many chunks."""

    payload: PayloadId
    worker_ids: tuple[str, ...]
    num_chunks: int


class PayloadDropped(BroadcastEvent):
    """The origin does not store it any more."""

    payload: PayloadId


@dataclass(frozen=True, slots=True)
class Tally:
    """What one source gave one worker of one payload: bytes, and the seconds from its first chunk to its last."""

    source: str
    num_bytes: int
    seconds: float


class PayloadReceived(BroadcastEvent):
    """A worker has all chunks of a payload and can serve every one of them."""

    worker_id: str
    payload: PayloadId
    tallies: tuple[Tally, ...] = ()


class SnapshotHeld(BroadcastEvent):
    """A worker has this content whole (installed), so it can serve the whole payload of it to those who join late; and
    that of the base model which it is an adapter over."""

    worker_id: str
    payload: PayloadId
    base_model: PayloadId | None = None


class SourceFailed(BroadcastEvent):
    """A worker gave up a source of a payload; `reason` is one of SOURCE_FAILURES. It waits for other routes."""

    worker_id: str
    payload: PayloadId
    source: str
    reason: str


Event = BroadcastEvent
