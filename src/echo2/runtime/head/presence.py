"""What the head holds in memory of who is connected and of what is being judged."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from echo2.transport import wire_pb2 as wire
from echo2.types import Lease, SnapshotRef


@dataclass(slots=True)
class Presence:
    """What the head knows of an attending worker beyond what the planner needs. `outbox`: what its stream says next, in
    order; None ends it. `unsent`: the newest list of leases in the outbox, which takes more in; None: it was sent.
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
    """The connected learner. `feed`: what is to be sent on the stream of its step; groups as the ledger holds them.
    `orders`: what its session's stream says after the welcome. None ends either stream.
    """

    epoch: int
    host: str
    pid: int
    device: str
    doing: str = ""
    orders: asyncio.Queue[wire.LearnerWelcome | None] = field(default_factory=asyncio.Queue)
    feed: asyncio.Queue[bytes | wire.StepDone | None] | None = None

    def end(self) -> None:
        """End its streams: it is gone, or has a new session."""
        self.orders.put_nowait(None)
        if self.feed is not None:
            self.feed.put_nowait(None)
