"""The processes that a plain environment's calls are spread over: one, and more while calls are slow and others wait.

A plain `step` blocks its process. Quick ones need no second process, also where a busy machine holds them up: what
counts is the time within the user's code. Where that is long on the average, or one call takes very long, the number of
processes is doubled until nobody waits, PROCESSES_MAX run, or half of the memory that was free is gone.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from echo2.devices import available_memory_bytes
from echo2.errors import UserError
from echo2.sandbox.process import CodeProcess

log = logging.getLogger(__name__)

PROCESSES_MAX = 32
SLOW_SECONDS = 0.02  # mean of a call within the user's code, from which processes more are worth their start
MEAN_CALLS = 16  # that the mean remembers
LONG_SECONDS = 2.0  # of a call that has not ended, whatever the mean is
GROWTH_SECONDS = 0.1  # between two looks at who waits


@dataclass(eq=False, slots=True)
class Member:
    """One process. `called_at`: since when it answers a call, by the loop's clock (None: it is free); `num_rollouts`:
    begun in it; `waiting`: calls that only it can answer."""

    process: CodeProcess
    called_at: float | None = None
    num_rollouts: int = 0
    waiting: deque[asyncio.Future[Member]] = field(default_factory=deque)


class ProcessPool:
    """Processes that `make` makes alike. For one event loop."""

    def __init__(self, make: Callable[[], CodeProcess]) -> None:
        self._make = make
        self.members = [Member(make())]
        self._waiting: deque[asyncio.Future[Member]] = deque()
        self._mean_seconds = 0.0
        self._growing: asyncio.Task[None] | None = None
        self._memory_bytes = available_memory_bytes()

    @asynccontextmanager
    async def turn(self, begun_in: Member | None, is_bound: bool) -> AsyncIterator[Member]:
        """A process, for one call: the one that a rollout was begun in where it is bound to that, else any."""
        member = await self._free(begun_in, is_bound)
        member.called_at = asyncio.get_running_loop().time()
        try:
            yield member
        finally:
            self._release(member)

    def took(self, seconds: float) -> None:
        """A call has taken so long within the user's code."""
        self._mean_seconds += (seconds - self._mean_seconds) / MEAN_CALLS

    async def close(self) -> None:
        """End all processes; whatever they were doing is abandoned."""
        if self._growing is not None:
            self._growing.cancel()
            await asyncio.wait([self._growing])
        await asyncio.gather(*(member.process.close() for member in self.members))

    async def _free(self, begun_in: Member | None, is_bound: bool) -> Member:
        candidates = [begun_in] if is_bound and begun_in is not None else self.members
        free = [member for member in candidates if member.called_at is None]
        if free:
            return min(free, key=lambda member: member.num_rollouts - (member is begun_in))
        turn: asyncio.Future[Member] = asyncio.get_running_loop().create_future()
        if candidates is not self.members:
            candidates[0].waiting.append(turn)
            return await turn
        self._waiting.append(turn)
        if len(self.members) < PROCESSES_MAX and (self._growing is None or self._growing.done()):
            self._growing = asyncio.ensure_future(self._grow())
        return await turn

    def _release(self, member: Member) -> None:
        """The next call: of rollouts that were begun in it, then of those that can go anywhere."""
        for waiting in (member.waiting, self._waiting):
            while waiting:
                turn = waiting.popleft()
                if not turn.done():
                    turn.set_result(member)  # which stays taken
                    return
        member.called_at = None

    async def _grow(self) -> None:
        """Consumes: calls that wait for any process. Produces: processes. Waits for: calls to be slow."""
        while self._waiting and len(self.members) < PROCESSES_MAX:
            await asyncio.sleep(GROWTH_SECONDS)
            if not self._waiting or not self._is_slow() or 2 * available_memory_bytes() < self._memory_bytes:
                continue
            room = PROCESSES_MAX - len(self.members)
            added = [Member(self._make()) for _ in range(min(room, len(self.members), len(self._waiting)))]
            try:
                await asyncio.gather(*(member.process.start() for member in added))
            except UserError as error:
                log.warning("No further process: %s", error)
                return
            finally:
                self.members += added  # one that did not start does at its first call, or says again why not
            for member in added:
                self._release(member)

    def _is_slow(self) -> bool:
        now = asyncio.get_running_loop().time()
        longest = max(now - member.called_at for member in self.members if member.called_at is not None)
        return self._mean_seconds >= SLOW_SECONDS or longest >= LONG_SECONDS
