"""What can happen to a broadcast, as its machine at the origin (`broadcast.Broadcast`) is told: facts, in the past.

Rates are in bytes per second of payload; None where nothing was measured yet.
"""

from __future__ import annotations

from dataclasses import dataclass

from echo2.types import PayloadId

#: Why a worker gave a source up.
SOURCE_FAILURES = ("broken", "stalled", "slow", "corrupt", "missing", "unreachable")


ONE_MACHINE = "loopback"


@dataclass(frozen=True, slots=True)
class MemberJoined:
    """A worker can be sent payloads (again). `address`: where others can dial it, "" where nobody can. `reach`: members
    with different words here can't reach each other by address ("" is the internet, ONE_MACHINE that of the origin).
    `ticket`: by which a stranger joined; "" for a machine of the run's owner.
    """

    worker_id: str
    address: str
    reach: str = ""
    ticket: str = ""


@dataclass(frozen=True, slots=True)
class MemberLeft:
    """A worker is gone, for whatever reason."""

    worker_id: str
    reason: str


@dataclass(frozen=True, slots=True)
class LinkMeasured:
    """A worker's own link was probed: what it can send and receive."""

    worker_id: str
    up: float | None
    down: float | None


@dataclass(frozen=True, slots=True)
class PayloadAssigned:
    """These workers are to have this payload, of so many chunks and bytes."""

    payload: PayloadId
    worker_ids: tuple[str, ...]
    num_chunks: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class PayloadDropped:
    """The origin does not store it any more."""

    payload: PayloadId


@dataclass(frozen=True, slots=True)
class Tally:
    """What one source gave one worker of one payload: bytes, and the seconds from its first chunk to its last."""

    source: str
    num_bytes: int
    seconds: float


@dataclass(frozen=True, slots=True)
class PayloadReceived:
    """A worker has all chunks of a payload and can serve every one of them."""

    worker_id: str
    payload: PayloadId
    tallies: tuple[Tally, ...] = ()


@dataclass(frozen=True, slots=True)
class SnapshotHeld:
    """A worker has this content whole (installed), so it can serve the whole payload of it to those who join late."""

    worker_id: str
    payload: PayloadId


@dataclass(frozen=True, slots=True)
class SourceFailed:
    """A worker gave up a source of a payload; `reason` is one of SOURCE_FAILURES. It waits for other routes."""

    worker_id: str
    payload: PayloadId
    source: str
    reason: str


Event = (
    MemberJoined
    | MemberLeft
    | LinkMeasured
    | PayloadAssigned
    | PayloadDropped
    | PayloadReceived
    | SnapshotHeld
    | SourceFailed
)
