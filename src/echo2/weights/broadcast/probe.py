"""Measures the link between a worker and the head, and decides how many connections the worker has to each source.

If the sender's congestion control treats loss as congestion (CUBIC), one connection on a long, slightly lossy path
reaches a fraction of the link's rate, and eight reach several times as much. With BBR, one reaches the rate, but may be
slow for seconds.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass

from echo2.core.background import close_all, together
from echo2.transport import message_bytes
from echo2.transport import wire_pb2 as wire
from echo2.transport.base import Link

#: Maximum duration and bytes of one measurement. At 100 ms round trip, a new connection needs half of that time to
#: reach its rate, so the result is the best rate over any stretch of `WINDOW_SECONDS`.
PROBE_SECONDS = 1.6
PROBE_BYTES = 16 << 20
WINDOW_SECONDS = 0.4
PIECE_BYTES = 32 << 10
#: `CONNECTIONS_MAX` are tried only if one needs longer than this for `PROBE_BYTES` (1.3 Gbit/s), and used only if they
#: are faster by `CONNECTIONS_GAIN`.
FAST_SECONDS = 0.1
#: Above this rate all links count as equal: so short a burst measures the processors at both ends, not the link.
MAX_RATE = PROBE_BYTES / FAST_SECONDS
CONNECTIONS_MAX = 8
CONNECTIONS_GAIN = 1.5
#: Connections used otherwise, so that one that is slow for seconds does not decide (`decide/dealing.py`).
CONNECTIONS = 4
#: Concurrent PutProbe calls over all connections, at the start and at most (130 Mbit/s at 100 ms). Starting with more
#: would make all calls on a slow link complete together, late in the measurement.
FIRST_PUTS = 8
PUTS = 48
CALL_SECONDS = 10.0
FILLER = message_bytes.pack(bytes(32), bytes(PIECE_BYTES))
#: The last message of a measurement: lets another worker measure.
DONE = message_bytes.pack_missing(bytes(32))


@dataclass(frozen=True, slots=True)
class Rates:
    """Measured rates in bytes per second, and the number of connections to each source."""

    up: float
    down: float
    num_connections: int


#: Rates assumed within one machine, where a burst would measure only the load of its processors.
NO_LINK = Rates(MAX_RATE, MAX_RATE, 1)


class _Tape:
    """Time stamps of the bytes transferred in one measurement."""

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
        """Return the best rate over `WINDOW_SECONDS`, or the overall rate of a shorter measurement."""
        best, first = self.num_bytes / max(self.seconds, 1e-6) if self.seconds < WINDOW_SECONDS else 0.0, 0
        for at, (seconds, num_bytes) in enumerate(self.marks):
            while first < at and seconds - self.marks[first + 1][0] >= WINDOW_SECONDS:
                first += 1
            if seconds - self.marks[first][0] >= WINDOW_SECONDS:
                best = max(best, (num_bytes - self.marks[first][1]) / (seconds - self.marks[first][0]))
        return min(MAX_RATE, best or self.num_bytes / max(self.seconds, 1e-6))


async def measure(open_link: Callable[[], Link]) -> Rates:
    """Measure both directions with filler bytes, over one connection and, if that is slow, over several. These
    connections are not reused: the path model that a sender's BBR built from such a short burst made it overrun the
    queue later (17 % of 48 MiB were sent twice).

    Raises:
        LinkError: the head cannot be reached.
        PeerError: "busy": another worker is measuring; "no_link": the head is on this machine.
    """
    links = [open_link()]
    try:
        rates = await _measure(links, open_link)
        await links[0].call("PutProbe", DONE, CALL_SECONDS)
        return rates
    finally:
        await close_all(*(link.close for link in links))


async def _measure(links: list[Link], open_link: Callable[[], Link]) -> Rates:
    await links[0].call("PutProbe", message_bytes.ALIVE, CALL_SECONDS)  # connects, outside the measured time
    down, is_fast = await _race(links, _pull)
    up, is_fast_up = await _race(links, _push)
    if is_fast and is_fast_up:
        return Rates(up, down, 1)
    links += [open_link() for _ in range(CONNECTIONS_MAX - 1)]
    await asyncio.gather(*(link.call("PutProbe", message_bytes.ALIVE, CALL_SECONDS) for link in links))
    many_down, _ = await _race(links, _pull)
    many_up, _ = await _race(links, _push)
    is_better = many_down > CONNECTIONS_GAIN * down or many_up > CONNECTIONS_GAIN * up
    return Rates(max(up, many_up), max(down, many_down), CONNECTIONS_MAX if is_better else CONNECTIONS)


async def _race(links: Sequence[Link], run: Callable[[Link, _Tape, int], Awaitable[None]]) -> tuple[float, bool]:
    """Return (bytes per second, whether all bytes took less than `FAST_SECONDS`)."""
    tape = _Tape()
    try:
        async with asyncio.timeout(PROBE_SECONDS):
            await asyncio.gather(*(run(link, tape, len(links)) for link in links))
    except TimeoutError:
        return tape.rate(), False
    return tape.rate(), tape.seconds < FAST_SECONDS


async def _pull(link: Link, tape: _Tape, share: int) -> None:
    frames = link.frames("Probe", wire.ProbeRequest(num_bytes=PROBE_BYTES // share))
    async with aclosing(frames) as messages:  # type: ignore[type-var]
        async for message in messages:
            tape.mark(len(message))


async def _push(link: Link, tape: _Tape, share: int) -> None:
    num_left = PROBE_BYTES // PIECE_BYTES // share
    async with together() as putting:
        under_way = 0

        def begin() -> None:
            nonlocal num_left, under_way
            if num_left > 0:
                num_left, under_way = num_left - 1, under_way + 1
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
