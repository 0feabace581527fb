"""Measures the link between a worker and the head: the rate in each direction, and whether several connections help.

Where the sender's congestion control takes loss for congestion (CUBIC), one connection of a long, slightly lossy path
reaches a fraction of the link; eight reach several times as much. With BBR one does as well.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass

from echo2.transport import chunks
from echo2.transport import wire_pb2 as wire
from echo2.transport.base import Link

#: One measurement: at most so long, and so much in all. At 100 ms a new connection needs half of it to get going, so
#: the rate is the best of any stretch of `WINDOW_SECONDS`.
PROBE_SECONDS = 1.6
PROBE_BYTES = 16 << 20
WINDOW_SECONDS = 0.4
PIECE_BYTES = 32 << 10
#: Several connections are tried only where one needs longer than this for all the bytes (1.3 Gbit/s), and used
#: only where they do so much better.
FAST_SECONDS = 0.1
#: Above this rate all links count as equal: so short a burst says more of the processors at its ends.
MAX_RATE = PROBE_BYTES / FAST_SECONDS
STRIPES = 8
STRIPES_GAIN = 1.5
#: Puts under way, on all connections together, to begin with and at most (130 Mbit/s at 100 ms): with many at once on a
#: slow link all would end together, and late.
FIRST_PUTS = 8
PUTS = 48
CALL_SECONDS = 10.0
FILLER = chunks.pack(bytes(32), bytes(PIECE_BYTES))
#: Sent last: another worker may measure now.
DONE = chunks.pack_missing(bytes(32))


@dataclass(frozen=True, slots=True)
class Rates:
    """Bytes per second, and over how many connections bulk should go."""

    up: float
    down: float
    stripes: int


#: Within one machine, where a burst would say how busy its processors are, and nothing else.
NO_LINK = Rates(MAX_RATE, MAX_RATE, 1)


class _Tape:
    """When bytes came by."""

    def __init__(self) -> None:
        self.began = time.monotonic()
        self.marks: list[tuple[float, int]] = []
        self.num_bytes = 0

    def mark(self, num_bytes: int) -> None:
        self.num_bytes += num_bytes
        self.marks.append((time.monotonic() - self.began, self.num_bytes))

    @property
    def seconds(self) -> float:
        return self.marks[-1][0] if self.marks else 0.0

    def rate(self) -> float:
        """The rate of the best stretch, or of everything if it was too short."""
        best, first = self.num_bytes / max(self.seconds, 1e-6) if self.seconds < WINDOW_SECONDS else 0.0, 0
        for at, (seconds, num_bytes) in enumerate(self.marks):
            while first < at and seconds - self.marks[first + 1][0] >= WINDOW_SECONDS:
                first += 1
            if seconds - self.marks[first][0] >= WINDOW_SECONDS:
                best = max(best, (num_bytes - self.marks[first][1]) / (seconds - self.marks[first][0]))
        return min(MAX_RATE, best or self.num_bytes / max(self.seconds, 1e-6))


async def measure(open_link: Callable[[], Link]) -> Rates:
    """Ask and send filler, over one connection and where that is slow over several. These connections are not used for
    anything else: what a sender's BBR learned of its path from such a short burst made it overrun the queue later on
    (17 % of 48 MiB were sent twice).

    Raises:
        LinkError, PeerError: the head is away, or "busy", or on this machine: "no_link".
    """
    links = [open_link()]
    try:
        rates = await _measure(links, open_link)
        await links[0].call("PutProbe", DONE, CALL_SECONDS)
        return rates
    finally:
        for link in links:
            await link.close()


async def _measure(links: list[Link], open_link: Callable[[], Link]) -> Rates:
    await links[0].call("PutProbe", chunks.ALIVE, CALL_SECONDS)  # connected
    down, is_fast = await _race(links, _pull)
    up, is_fast_up = await _race(links, _push)
    if is_fast and is_fast_up:
        return Rates(up, down, 1)
    links += [open_link() for _ in range(STRIPES - 1)]
    await asyncio.gather(*(link.call("PutProbe", chunks.ALIVE, CALL_SECONDS) for link in links))
    many_down, _ = await _race(links, _pull)
    many_up, _ = await _race(links, _push)
    is_better = many_down > STRIPES_GAIN * down or many_up > STRIPES_GAIN * up
    return Rates(max(up, many_up), max(down, many_down), STRIPES if is_better else 1)


async def _race(links: Sequence[Link], run: Callable[[Link, _Tape, int], Awaitable[None]]) -> tuple[float, bool]:
    """(bytes per second, whether all was through in no time)."""
    tape = _Tape()
    try:
        async with asyncio.timeout(PROBE_SECONDS):
            await asyncio.gather(*(run(link, tape, len(links)) for link in links))
    except TimeoutError:
        return tape.rate(), False
    except ExceptionGroup as errors:
        raise errors.exceptions[0] from errors
    return tape.rate(), tape.seconds < FAST_SECONDS


async def _pull(link: Link, tape: _Tape, share: int) -> None:
    frames = link.frames("Probe", wire.ProbeRequest(num_bytes=PROBE_BYTES // share))
    async with aclosing(frames) as messages:  # type: ignore[type-var]
        async for message in messages:
            tape.mark(len(message))


async def _push(link: Link, tape: _Tape, share: int) -> None:
    left = PROBE_BYTES // PIECE_BYTES // share
    async with asyncio.TaskGroup() as putting:
        under_way = 0

        def begin() -> None:
            nonlocal left, under_way
            if left > 0:
                left, under_way = left - 1, under_way + 1
                putting.create_task(put())

        async def put() -> None:
            nonlocal under_way
            await link.call("PutProbe", FILLER, CALL_SECONDS)
            under_way -= 1
            tape.mark(PIECE_BYTES)
            begin()
            if under_way < PUTS // share:
                begin()

        for _ in range(max(1, FIRST_PUTS // share)):
            begin()
