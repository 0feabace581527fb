"""Budgets of one peer at a server: connections, calls a second, calls under way, large bodies read at a time, bytes a
second in both directions.

Each peer belongs to *parties* that share a budget: the peer itself, all peers of its ticket, all strangers together.
Nobody waits for another ticket: what is waited for (a rate, a slot) belongs to a peer or to a ticket. What strangers
share is memory and connections. Where these are used up, `PeerServer` cuts off the peer with most of them.
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from weakref import WeakValueDictionary

from echo2.transport import limits

#: A body's size on the wire, as a factor and bytes per call: TLS, frames and header come on top.
UNREAD_OVERHEAD, UNREAD_PER_CALL = 1.02, 1024
#: Unread bytes are forgotten over this time: calls that wait for their turn have ended by then.
UNREAD_SECONDS = 2 * limits.READ_SECONDS


@dataclass(frozen=True, slots=True)
class Party:
    """Peers that share a budget, and its bounds; 0: no bound. `*_burst`: allowed at once after a while of rest.
    `reads`: large bodies that are read at a time. `unread`: received bytes of bodies that wait, or are read or handled.
    `sent_*`: bytes of answers."""

    name: str
    calls_per_second: float = 0.0
    calls_burst: float = 0.0
    reads: int = 0
    bytes_per_second: float = 0.0
    bytes_burst: float = 0.0
    unread: float = 0.0
    connections: int = 0
    sent_per_second: float = 0.0
    sent_burst: float = 0.0


def worst(over: Party, chains: Sequence[tuple[Party, ...]], measure: Callable[[Party], float]) -> Party:
    """The peer that has most of what a party has too much of: in all strangers, the worst peer of the worst ticket. So
    a ticket is safe as long as it has less than another, however many peers share the other. `chains`: for each
    connection, the peer and the parties around it."""
    while within := {chain[at - 1]: None for chain in chains if over in chain and (at := chain.index(over))}:
        over = max(within, key=measure)
    return over


class OverBudget(Exception):
    """A peer exceeded its budget. `is_flood`: by so much that even refusing costs too much."""

    def __init__(self, detail: str, is_flood: bool = False) -> None:
        super().__init__(detail)
        self.is_flood = is_flood


class Buckets:
    """Token buckets by name: `rate` a second, `burst` at once. Buckets that are full again are forgotten."""

    def __init__(self) -> None:
        self._levels: dict[str, tuple[float, float, float, float]] = {}  # level, then; rate, burst

    def take(
        self, name: str, rate: float, burst: float, now: float, amount: float = 1.0, debt_max: float = 0.0
    ) -> float:
        """Take `amount` from a bucket and return its level; below 0: over budget by that much, of which at most
        `debt_max` is carried over as debt."""
        if len(self._levels) >= limits.BUCKETS_MAX:
            self._forget(now)
        level, then, _, _ = self._levels.get(name, (burst, now, rate, burst))
        level = min(burst, min(burst, level + (now - then) * rate) - amount)
        self._levels[name] = max(level, -debt_max), now, rate, burst
        return level

    def _forget(self, now: float) -> None:
        full = [
            name for name, (level, then, rate, burst) in self._levels.items() if level + (now - then) * rate >= burst
        ]
        for name in full or [next(iter(self._levels))]:
            del self._levels[name]


class Budgets:
    """The budgets of all peers of one server."""

    def __init__(self) -> None:
        self._calls, self._bytes, self._unread, self._sent = Buckets(), Buckets(), Buckets(), Buckets()
        self._under_way: Counter[str] = Counter()
        self._read_slots: WeakValueDictionary[str, asyncio.Semaphore] = (
            WeakValueDictionary()
        )  # to read a body, by party

    def called(self, parties: tuple[Party, ...]) -> None:
        """Count a call.

        Raises:
            OverBudget: too many calls in too short a time.
        """
        now = asyncio.get_running_loop().time()
        for party in parties:
            if not party.calls_per_second:
                continue
            rate, burst, debt_max = party.calls_per_second, party.calls_burst, limits.REFUSALS_MAX
            allowance = self._calls.take(party.name, rate, burst, now, debt_max=debt_max)
            if allowance < 0:
                raise OverBudget(f"more than {rate:g} calls a second of {party.name}", allowance < -debt_max)

    @contextmanager
    def under_way(self, name: str) -> Iterator[None]:
        """Count a call of this peer as under way while the context is open.

        Raises:
            OverBudget: too many calls of this peer are under way already.
        """
        if self._under_way[name] >= limits.CALLS_PER_PEER_MAX:
            raise OverBudget(f"{limits.CALLS_PER_PEER_MAX} calls of {name} are under way")
        self._under_way[name] += 1
        try:
            yield
        finally:
            self._under_way[name] -= 1
            if not self._under_way[name]:
                del self._under_way[name]

    @asynccontextmanager
    async def reading(self, parties: tuple[Party, ...], is_large: bool) -> AsyncGenerator[None]:
        """Read one body. Waits until the byte debt of earlier bodies is paid off and, for a large body, a slot is free:
        a small one, such as a heartbeat, does not wait for large ones that come slowly, or never to their end."""
        for party in parties:
            if (owed := -self._charge(party, 0.0)) > 0:
                await asyncio.sleep(owed / party.bytes_per_second)
        slots, num_held = [self._read_slots_of(party) for party in parties if party.reads and is_large], 0
        try:
            for each in slots:
                await each.acquire()
                num_held += 1
            yield
        finally:
            for each in slots[:num_held]:
                each.release()

    def _read_slots_of(self, party: Party) -> asyncio.Semaphore:
        slots = self._read_slots.get(party.name)
        if slots is None:
            slots = self._read_slots[party.name] = asyncio.Semaphore(party.reads)
        return slots

    def has_read(self, parties: tuple[Party, ...], num_bytes: int) -> None:
        """Charge a body that has been read."""
        for party in parties:
            self._charge(party, num_bytes)

    def handled(self, parties: tuple[Party, ...], num_bytes: int) -> None:
        """Remove a body from the bytes that are held: its handler is done with it."""
        self.count_unread(parties, -UNREAD_OVERHEAD * num_bytes - UNREAD_PER_CALL)

    def count_unread(self, parties: tuple[Party, ...], num_bytes: float) -> Party | None:
        """Count bytes that arrived (negative: that are no longer held). Returns a party that is over its `unread`."""
        now, over = asyncio.get_running_loop().time(), None
        for party in parties:
            if party.unread:
                rate, debt_max = party.unread / UNREAD_SECONDS, party.unread
                if self._unread.take(party.name, rate, party.unread, now, num_bytes, debt_max) < 0:
                    over = party
        return over

    async def sending(self, parties: tuple[Party, ...], num_bytes: int) -> None:
        """Charge an answer. Waits until the debt of all answers is paid off; an empty answer does not."""
        if (wait_seconds := self.sent(parties, num_bytes, asyncio.get_running_loop().time())) > 0.0:
            await asyncio.sleep(wait_seconds)

    def sent(self, parties: tuple[Party, ...], num_bytes: int, now: float) -> float:
        """Charge an answer. Return the seconds to wait before it is sent."""
        wait_seconds = 0.0
        for party in parties:
            if num_bytes and (rate := party.sent_per_second):
                allowance = self._sent.take(party.name, rate, party.sent_burst, now, num_bytes, debt_max=math.inf)
                wait_seconds = max(wait_seconds, -allowance / rate)
        return wait_seconds

    def unread(self, party: Party) -> float:
        """Return how many bytes of this party gRPC holds, at most."""
        now = asyncio.get_running_loop().time()
        return party.unread - self._unread.take(party.name, party.unread / UNREAD_SECONDS, party.unread, now, 0.0)

    def _charge(self, party: Party, num_bytes: float) -> float:
        if not party.bytes_per_second:
            return 0.0
        now, rate, burst = asyncio.get_running_loop().time(), party.bytes_per_second, party.bytes_burst
        return self._bytes.take(party.name, rate, burst, now, num_bytes, debt_max=burst)
