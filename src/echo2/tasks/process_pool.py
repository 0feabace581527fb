"""The processes that share a synchronous environment's calls: one, and more while calls are slow and others wait.

A synchronous `step` blocks its process. Quick calls need no second process, even if a busy machine delays them: only
the time within the user's code counts. If that time is long on average, or one call takes very long, the number of
processes is doubled until no call waits, `PROCESSES_MAX` run, half of the memory free at the start is used, or a
process fails to start. More processes than cores help only if their code waits for something else: then they may keep
at most half of the cores busy. Half, because code that only computes gets less of a core the more processes run.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from echo2.core.background import spawn
from echo2.core.devices import available_memory_bytes, num_cores
from echo2.sandbox.code_process import CodeProcess

log = logging.getLogger(__name__)

PROCESSES_MAX = 32
SLOW_SECONDS = 0.02  # mean time of a call within the user's code from which more processes are worth starting
MEAN_CALLS = 16  # averaging length of the mean
LONG_SECONDS = 2.0  # a call that has run this long is slow, whatever the mean is
GROWTH_SECONDS = 0.1  # between two checks for waiting calls


@dataclass(eq=False, slots=True)
class Member:
    """One process. `called_at`: when its current call began, on the loop's clock (None: it is free); `num_rollouts`:
    rollouts that it holds; `waiting`: calls that only this process can answer."""

    process: CodeProcess
    called_at: float | None = None
    num_rollouts: int = 0
    waiting: deque[asyncio.Future[Member]] = field(default_factory=deque)


class ProcessPool:
    """A pool of identical processes, created by `make`. For one event loop."""

    def __init__(self, make: Callable[[], CodeProcess]) -> None:
        self._make = make
        self.members = [Member(make())]
        self._waiting: deque[asyncio.Future[Member]] = deque()
        self._mean_seconds = self._mean_cpu_seconds = 0.0
        self._growing: asyncio.Task[None] | None = None
        self._may_grow = True
        self._memory_bytes = available_memory_bytes()
        self._added_bytes = 0  # memory taken by the processes that were added last

    @asynccontextmanager
    async def acquire(self, begun_in: Member | None, is_bound: bool) -> AsyncIterator[Member]:
        """Hold a process for one call: `begun_in`, where the rollout was begun, if it is bound to that, else any."""
        member = await self._free(begun_in, is_bound)
        member.called_at = asyncio.get_running_loop().time()
        try:
            yield member
        finally:
            self._release(member)

    def observe(self, seconds: float, cpu_seconds: float) -> None:
        """Record a call's time within the user's code, and how much of it was CPU time."""
        self._mean_seconds += (seconds - self._mean_seconds) / MEAN_CALLS
        self._mean_cpu_seconds += (cpu_seconds - self._mean_cpu_seconds) / MEAN_CALLS

    async def close(self) -> None:
        """End all processes; calls under way are abandoned."""
        self._may_grow = False
        if self._growing is not None:
            self._growing.cancel()
            await asyncio.wait([self._growing])
        await asyncio.gather(*(member.process.close() for member in self.members))

    async def _free(self, begun_in: Member | None, is_bound: bool) -> Member:
        candidates = [begun_in] if is_bound and begun_in is not None else self.members
        free = [member for member in candidates if member.called_at is None]
        if free:
            return min(free, key=lambda member: member.num_rollouts - (member is begun_in))
        freed: asyncio.Future[Member] = asyncio.get_running_loop().create_future()
        if candidates is not self.members:
            candidates[0].waiting.append(freed)
            return await freed
        self._waiting.append(freed)
        if self._can_grow() and (self._growing is None or self._growing.done()):
            self._growing = spawn(self._grow(), self._growing_failed)
        return await freed

    def _release(self, member: Member) -> None:
        """Give the process to the next waiting call: of rollouts bound to it first, then of any other."""
        for waiting in (member.waiting, self._waiting):
            while waiting:
                freed = waiting.popleft()
                if not freed.done():
                    freed.set_result(member)  # the process stays taken
                    return
        member.called_at = None

    async def _grow(self) -> None:
        """Consumes: calls that wait for any process. Produces: processes. Waits for: calls to be slow."""
        while self._waiting and self._can_grow():
            await asyncio.sleep(GROWTH_SECONDS)
            room = self._room()
            if room > 0 and self._is_slow():
                await self._add(room)

    def _growing_failed(self, error: Exception) -> None:
        """The pool stays as it is; its processes take the calls that wait."""
        self._may_grow = False
        log.error("No further process beside these %d is started", len(self.members), exc_info=error)

    async def _add(self, number: int) -> None:
        """Start `number` more processes. If one does not start (say, it needs a lock or port that another process
        holds), the pool grows no more: the process would fail again and lose the rollouts begun in it."""
        available_bytes = available_memory_bytes()
        added = [Member(self._make()) for _ in range(number)]
        starts = [member.process.start() for member in added]
        try:
            outcomes = await asyncio.gather(*starts, return_exceptions=True)
        except asyncio.CancelledError:
            await asyncio.gather(*(member.process.close() for member in added))
            raise
        self._added_bytes = max(0, available_bytes - available_memory_bytes())
        failed = {at: outcome for at, outcome in enumerate(outcomes) if isinstance(outcome, BaseException)}
        started = [member for at, member in enumerate(added) if at not in failed]
        self.members += started
        for member in started:
            self._release(member)
        if failed:
            self._may_grow = False
            why = next(iter(failed.values()))
            log.warning("No further process beside these %d is started: %s", len(self.members), why)
            await asyncio.gather(*(added[at].process.close() for at in failed))

    def _can_grow(self) -> bool:
        return self._may_grow and len(self.members) < PROCESSES_MAX

    def _room(self) -> int:
        """Return how many more processes are worth starting; below 1: none."""
        if 2 * (available_memory_bytes() - 2 * self._added_bytes) < self._memory_bytes:  # at most twice as many follow
            return 0
        count, cores, cpu_seconds = len(self.members), num_cores(), max(self._mean_cpu_seconds, 1e-9)
        by_cores = max(cores, int(cores / 2 * self._mean_seconds / cpu_seconds)) - count
        return min(PROCESSES_MAX - count, count, len(self._waiting), by_cores)

    def _is_slow(self) -> bool:
        now = asyncio.get_running_loop().time()
        longest = max(now - member.called_at for member in self.members if member.called_at is not None)
        return self._mean_seconds >= SLOW_SECONDS or longest >= LONG_SECONDS
