"""How many processes a plain environment gets, where some do not start, memory is short, or code computes all the time.

The processes here are not real: they only start or do not.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any

import pytest

from echo2.core.errors import UserError
from echo2.tasks import process_pool
from echo2.tasks.process_pool import ProcessPool

FREE_BYTES = 1 << 40


class Standin:
    """A process that starts when it may, and not where `fails`."""

    def __init__(self, fails: bool = False, may_start: asyncio.Event | None = None) -> None:
        self.fails, self.may_start, self.is_closed = fails, may_start, False
        self.num_starts = 0

    async def start(self) -> None:
        self.num_starts += 1
        if self.may_start is not None:
            await self.may_start.wait()
        if self.fails:
            raise UserError("the port is taken")

    async def close(self) -> None:
        self.is_closed = True


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of four cores and much memory, where calls are slow and nobody looks at the clock."""
    monkeypatch.setattr(process_pool, "available_memory_bytes", lambda: FREE_BYTES)
    monkeypatch.setattr(process_pool, "num_cores", lambda: 4)
    monkeypatch.setattr(process_pool, "GROWTH_SECONDS", 0.0)


async def waiting(pool: ProcessPool, number: int, until: Callable[[], bool]) -> list[asyncio.Task[None]]:
    """So many calls at once, none of which ends; what they are when something is so."""

    async def call() -> None:
        async with pool.acquire(None, is_bound=False):
            await asyncio.Event().wait()

    calls = [asyncio.ensure_future(call()) for _ in range(number)]
    for _ in range(1000):
        await asyncio.sleep(0)
        if until():
            break
    return calls


async def ended(pool: ProcessPool, calls: list[asyncio.Task[None]]) -> None:
    for call in calls:
        call.cancel()
    await asyncio.wait(calls)
    await pool.close()


def pool_of(*made: Standin) -> ProcessPool:
    queue: list[Any] = list(made)
    pool = ProcessPool(lambda: queue.pop(0))
    pool._mean_seconds = 1.0
    return pool


def test_processes_that_do_not_start_are_left_out_and_not_restarted(caplog: pytest.LogCaptureFixture) -> None:
    made = [Standin(), Standin(), Standin(), Standin(fails=True), *(Standin() for _ in range(9))]

    async def scene() -> None:
        pool = pool_of(*made)
        calls = await waiting(pool, 9, lambda: made[3].is_closed)
        assert [member.process for member in pool.members] == made[:3]
        assert all(member.called_at is not None for member in pool.members)  # each answers
        calls += await waiting(pool, 9, lambda: False)
        assert [each.num_starts for each in made] == [0, 1, 1, 1, *[0] * 9]
        await ended(pool, calls)

    with caplog.at_level(logging.WARNING):
        asyncio.run(scene())
    (record,) = caplog.records
    assert record.getMessage() == "No further process beside these 3 is started: the port is taken"


def test_starting_processes_end_with_the_pool() -> None:
    async def scene() -> None:
        made = [Standin(), Standin(may_start=asyncio.Event())]
        pool = pool_of(*made)
        calls = await waiting(pool, 5, lambda: made[1].num_starts > 0)
        await pool.close()
        assert [each.is_closed for each in made] == [True, True]
        assert len(pool.members) == 1
        await ended(pool, calls)

    asyncio.run(scene())


@pytest.mark.parametrize(
    ("cpu_share", "expected"),
    [
        (lambda count: min(1.0, 4 / count), 4),  # it computes all the time, on four cores
        (lambda count: min(1.0, 4 / (count + 4)), 4),  # beside four others that do
        (lambda count: 0.2, 10),  # it waits most of the time: ten keep half of the cores busy
        (lambda count: 0.0, 32),
    ],
)
def test_code_that_computes_gets_no_more_processes_than_cores(cpu_share: Callable[[int], float], expected: int) -> None:
    async def scene() -> None:
        pool = pool_of(*(Standin() for _ in range(40)))

        def look() -> bool:
            pool._mean_cpu_seconds = cpu_share(len(pool.members))
            return False

        look()
        calls = await waiting(pool, 100, look)
        assert len(pool.members) == expected
        await ended(pool, calls)

    asyncio.run(scene())


def test_means_are_of_the_time_and_of_what_was_computed() -> None:
    pool = pool_of(Standin())
    for _ in range(200):
        pool.observe(0.5, 0.125)
    assert (pool._mean_seconds, pool._mean_cpu_seconds) == pytest.approx((0.5, 0.125), rel=1e-4)


@pytest.mark.parametrize(("share", "expected"), [(1 / 6.5, 4), (1 / 100, 32)])
def test_processes_leave_half_of_the_memory(share: float, expected: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each takes a part of what was free. Of 1/6.5, three more are just under a half, and seven more than all."""
    made = [Standin() for _ in range(40)]
    taken = lambda: sum(each.num_starts for each in made)  # noqa: E731
    monkeypatch.setattr(
        process_pool, "available_memory_bytes", lambda: int(FREE_BYTES * max(0.0, 1.0 - share * taken()))
    )

    async def scene() -> None:
        pool = pool_of(*made)
        calls = await waiting(pool, 100, lambda: False)
        assert len(pool.members) == expected
        await ended(pool, calls)

    asyncio.run(scene())
