"""In-memory records of the workers and the learner that are connected to the head."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field

from echo2.core.errors import PeerError
from echo2.core.types import Lease, SnapshotRef
from echo2.transport import wire_pb2 as wire
from echo2.transport.limits import NAME_CHARS_MAX, PRICE_MAX_USD_PER_HOUR, PROTOCOL_VERSION

#: Maximum number of leases that a returning worker may claim to hold, and of environments that it may name.
CLAIMS_MAX = 10_000
#: Maximum number of orders queued for one worker, or for the learner.
OUTBOX_ORDERS_MAX = 1024


@dataclass(slots=True)
class WorkerConnection:
    """The head's record of an attending worker, beyond the planner's. `outbox`: the next messages of its stream, in
    order; None ends the stream. `unsent`: the newest list of leases in the outbox, to which further leases are added;
    None once it was sent.
    """

    host: str
    pid: int
    engine: str
    device: str
    report: wire.WorkerReport = field(default_factory=wire.WorkerReport)
    installed: SnapshotRef | None = None
    unsent: list[Lease] | None = None
    outbox: asyncio.Queue[wire.Order | list[Lease] | None] = field(default_factory=asyncio.Queue)

    def put(self, order: wire.Order | list[Lease]) -> None:
        """Add to the stream. It ends if the worker reads too slowly: it reconnects and gets the current state."""
        if self.outbox.qsize() >= OUTBOX_ORDERS_MAX:
            while not self.outbox.empty():
                self.outbox.get_nowait()
            self.end()
        else:
            self.outbox.put_nowait(order)

    def grant(self, leases: Sequence[Lease], is_alone: bool) -> None:
        """Send leases together with the unsent ones, or else in a message of their own (`is_alone`)."""
        if self.unsent is not None and not is_alone:
            self.unsent.extend(leases)
        else:
            self.unsent = list(leases)
            self.put(self.unsent)

    def end(self) -> None:
        self.outbox.put_nowait(None)

    async def orders(self) -> AsyncIterator[wire.Order | list[Lease]]:
        while (item := await self.outbox.get()) is not None:
            if item is self.unsent:
                self.unsent = None  # leases granted from now on go into another message
            yield item

    def hear(self, report: wire.WorkerReport, installed: SnapshotRef | None) -> tuple[bool, bool]:
        """Keep a report. Return whether the installed snapshot is new, and whether the refused one is."""
        is_new, is_refused = installed != self.installed, report.refused != self.report.refused
        self.report, self.installed = report, installed
        return is_new, is_refused


Feed = asyncio.Queue[tuple[bytes, ...] | wire.StepDone | None]


@dataclass(slots=True)
class LearnerConnection:
    """The connected learner. `feed`: messages for the stream of its current step; groups as the ledger's parts.
    `orders`: messages for its session's stream after the welcome. None ends either stream.
    """

    epoch: int
    host: str
    pid: int
    device: str
    doing: str = ""
    orders: asyncio.Queue[wire.LearnerWelcome | None] = field(default_factory=asyncio.Queue)
    feed: Feed | None = None

    def open_feed(self) -> Feed:
        """Begin the stream of a step, in place of an earlier one."""
        self.send(None)
        self.feed = asyncio.Queue()
        return self.feed

    def close_feed(self, feed: Feed) -> bool:
        """The stream is closed. Return False if another has replaced it."""
        is_current = self.feed is feed
        self.feed = None if is_current else self.feed
        return is_current

    def send(self, message: tuple[bytes, ...] | wire.StepDone | None) -> None:
        """Send to the stream of the current step, if there is one."""
        if self.feed is not None:
            self.feed.put_nowait(message)

    def stop(self, reason: str) -> None:
        """Tell the learner to save a checkpoint and to end."""
        self.orders.put_nowait(wire.LearnerWelcome(stop=reason))

    def foretell(self, group: bytes) -> None:
        """Send what a teacher is to be asked about a group that is not scored yet. A learner that reads too slowly
        does not get it: it asks when the group comes."""
        if self.orders.qsize() < OUTBOX_ORDERS_MAX:
            self.orders.put_nowait(wire.LearnerWelcome(unscored=group))

    def tell(self, doing: str) -> None:
        """Keep what the learner says it is doing."""
        self.doing = doing

    def end(self) -> None:
        """End the learner's streams: it is gone, or has a new session."""
        self.orders.put_nowait(None)
        self.send(None)


class Connections:
    """Who is connected: the workers by id, and the learner."""

    def __init__(self, is_deterministic: bool) -> None:
        self._is_deterministic = is_deterministic
        self.workers: dict[str, WorkerConnection] = {}
        self.learner: LearnerConnection | None = None

    def attend(self, worker_id: str, connection: WorkerConnection) -> None:
        if (before := self.workers.get(worker_id)) is not None:
            before.end()
        self.workers[worker_id] = connection

    def leave(self, worker_id: str, connection: WorkerConnection | None = None) -> bool:
        """Remove a worker. Return whether it was connected, and by this connection if one is named."""
        current = self.workers.get(worker_id)
        if current is None or (connection is not None and current is not connection):
            return False
        current.end()
        del self.workers[worker_id]
        return True

    def order(self, worker_id: str, order: wire.Order) -> None:
        """Send an order to a worker, if it is connected."""
        if (connection := self.workers.get(worker_id)) is not None:
            connection.put(order)

    def grant(self, worker_id: str, leases: Sequence[Lease]) -> None:
        """Send leases to a worker, if it attends. In deterministic mode each grant is a message of its own:
        leases that are granted together are sampled together.
        """
        if (connection := self.workers.get(worker_id)) is not None:
            connection.grant(leases, self._is_deterministic)

    def join(self, learner: LearnerConnection) -> None:
        if self.learner is not None:
            self.learner.end()
        self.learner = learner

    def foretell(self, group: bytes) -> None:
        """As the learner's, if one is connected."""
        if self.learner is not None:
            self.learner.foretell(group)

    def quit(self, learner: LearnerConnection) -> bool:
        """Remove the learner. Return False if it has a new session."""
        if self.learner is not learner:
            return False
        self.learner = None
        learner.end()
        return True


def check_hello(hello: wire.WorkerHello) -> None:
    """Raises PeerError if a value of the message is out of bounds."""
    if hello.protocol != PROTOCOL_VERSION:
        raise PeerError(
            "protocol", f"the worker speaks protocol {hello.protocol}, the head {PROTOCOL_VERSION}: upgrade one"
        )
    if hello.slots < 1:
        raise PeerError("malformed", "a worker must have at least 1 slot")
    if max(len(hello.held_leases), len(hello.environments), len(hello.servers)) > CLAIMS_MAX:
        raise PeerError("oversized", f"more than {CLAIMS_MAX} leases, environments or servers claimed")
    if any(len(name) > NAME_CHARS_MAX for name in hello.environments):
        raise PeerError("oversized", f"the name of an environment has over {NAME_CHARS_MAX} characters")
    if len(hello.advertise) > NAME_CHARS_MAX:
        raise PeerError("oversized", f"an address has more than {NAME_CHARS_MAX} characters")
    if len(hello.offer) > NAME_CHARS_MAX:
        raise PeerError("oversized", f"the name of a machine has more than {NAME_CHARS_MAX} characters")
    if not 0 <= hello.price_usd_per_hour <= PRICE_MAX_USD_PER_HOUR:
        raise PeerError("malformed", f"a price of {hello.price_usd_per_hour} dollars an hour")
