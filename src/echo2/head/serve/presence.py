"""In-memory records of the workers and the learner that are connected to the head."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from echo2.core.errors import PeerError
from echo2.core.types import Lease, SnapshotRef
from echo2.transport import wire_pb2 as wire
from echo2.transport.limits import NAME_CHARS_MAX, PRICE_MAX_USD_PER_HOUR, PROTOCOL_VERSION

#: Maximum number of leases that a returning worker may claim to hold, and of environments that it may name.
CLAIMS_MAX = 10_000


@dataclass(slots=True)
class Presence:
    """The head's record of an attending worker, beyond the planner's. `outbox`: the next messages of its stream, in
    order; None ends the stream. `unsent`: the newest list of leases in the outbox, to which further leases are added;
    None once it was sent.
    """

    outbox: asyncio.Queue[wire.Order | list[Lease] | None]
    host: str
    pid: int
    engine: str
    device: str
    report: wire.WorkerReport
    installed: SnapshotRef | None = None
    unsent: list[Lease] | None = None


@dataclass(slots=True)
class LearnerPresence:
    """The connected learner. `feed`: messages for the stream of its current step; groups as stored in the ledger.
    `orders`: messages for its session's stream after the welcome. None ends either stream.
    """

    epoch: int
    host: str
    pid: int
    device: str
    doing: str = ""
    orders: asyncio.Queue[wire.LearnerWelcome | None] = field(default_factory=asyncio.Queue)
    feed: asyncio.Queue[bytes | wire.StepDone | None] | None = None

    def end(self) -> None:
        """End the learner's streams: it is gone, or has a new session."""
        self.orders.put_nowait(None)
        if self.feed is not None:
            self.feed.put_nowait(None)


def check_hello(hello: wire.WorkerHello) -> None:
    """Raises PeerError if a value of the message is out of bounds."""
    if hello.protocol != PROTOCOL_VERSION:
        raise PeerError(
            "protocol", f"the worker speaks protocol {hello.protocol}, the head {PROTOCOL_VERSION}: upgrade one"
        )
    if hello.slots < 1:
        raise PeerError("malformed", "a worker must have at least 1 slot")
    if max(len(hello.held_leases), len(hello.environments)) > CLAIMS_MAX:
        raise PeerError("oversized", f"more than {CLAIMS_MAX} leases or environments claimed")
    if any(len(name) > NAME_CHARS_MAX for name in hello.environments):
        raise PeerError("oversized", f"the name of an environment has over {NAME_CHARS_MAX} characters")
    if len(hello.advertise) > NAME_CHARS_MAX:
        raise PeerError("oversized", f"an address has more than {NAME_CHARS_MAX} characters")
    if len(hello.offer) > NAME_CHARS_MAX:
        raise PeerError("oversized", f"the name of a machine has more than {NAME_CHARS_MAX} characters")
    if not 0 <= hello.price_usd_per_hour <= PRICE_MAX_USD_PER_HOUR:
        raise PeerError("malformed", f"a price of {hello.price_usd_per_hour} dollars an hour")
