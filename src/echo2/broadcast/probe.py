"""What the link between a worker and the head can do: rates each way, and whether several connections do better.

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

#: One measurement: at most so long, and so much in all. The rate is that of its second half, when it has got going.
PROBE_SECONDS = 1.0
PROBE_BYTES = 8 << 20
PIECE_BYTES = 64 << 10
#: Several connections are tried only where one needs longer than this for all the bytes (640 Mbit/s), and used
#: only where they do so much better.
FAST_SECONDS = 0.1
STRIPES = 8
STRIPES_GAIN = 1.3
#: Puts under way, on all connections together: 300 Mbit/s at 100 ms.
PUTS = 64
CALL_SECONDS = 10.0
FILLER = chunks.pack(bytes(32), bytes(PIECE_BYTES))


@dataclass(frozen=True, slots=True)
class Rates:
    """Bytes per second, and over how many connections bulk should go."""

    up: float
    down: float
    stripes: int


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
        """Of the second half of the time; of all of it where that is too short to tell."""
        half = self.seconds / 2
        late = [mark for mark in self.marks if mark[0] >= half]
        if len(late) < 2 or late[-1][0] <= late[0][0]:
            return self.num_bytes / max(self.seconds, 1e-6)
        return (late[-1][1] - late[0][1]) / (late[-1][0] - late[0][0])


async def measure(open_link: Callable[[], Link]) -> Rates:
    """Ask and send filler, over one connection and where that is slow over several. These connections are not used for
    anything else: what a sender's BBR learned of its path from such a short burst made it overrun the queue later on
    (17 % of 48 MiB were sent twice).

    Raises:
        LinkError, PeerError: the head is away, or busy.
    """
    links = [open_link()]
    try:
        return await _measure(links, open_link)
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
    return tape.rate(), tape.seconds < FAST_SECONDS


async def _pull(link: Link, tape: _Tape, share: int) -> None:
    frames = link.frames("Probe", wire.ProbeRequest(num_bytes=PROBE_BYTES // share))
    async with aclosing(frames) as messages:  # type: ignore[type-var]
        async for message in messages:
            tape.mark(len(message))


async def _push(link: Link, tape: _Tape, share: int) -> None:
    left = PROBE_BYTES // PIECE_BYTES // share

    async def put_some() -> None:
        nonlocal left
        while left > 0:
            left -= 1
            await link.call("PutProbe", FILLER, CALL_SECONDS)
            tape.mark(PIECE_BYTES)

    await asyncio.gather(*(put_some() for _ in range(PUTS // share)))
