"""A worker on a machine that its owner also uses: what the owner's programs need, when the worker steps back, and what
it has delivered.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from pathlib import Path
from typing import Any

from echo2.core.background import Background
from echo2.core.devices import num_cores
from echo2.core.errors import UserError, counted
from echo2.transport import wire_pb2 as wire
from echo2.worker.decide.home import Presence

log = logging.getLogger(__name__)

#: Seconds between measurements of the machine.
MEASURE_SECONDS = 2.0
#: The default share of a home machine's cores and of its memory.
HOME_SHARE = 0.5
#: Nice value of a worker at home: the owner's programs come first.
HOME_NICE = 10
#: On Linux desktops, `nice` ranks only the processes of one session; this ranks sessions.
SESSION_NICE = Path("/proc/self/autogroup")
#: Bytes of a token in a delivery.
TOKEN_BYTES = 4

#: Share of the processors that other programs use, whether the machine is on battery, and when that was measured.
Measurement = tuple[float, bool, float]


class Delivered:
    """What the head has accepted of a worker, and for how long the worker has attended. A machine of the run's owner
    has its price for that time, a stranger for the part of it that accepted results took."""

    def __init__(self, price_usd_per_hour: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._price, self._clock = price_usd_per_hour, clock
        self._seconds = 0.0
        self._since: float | None = None
        self.num_groups = self.num_rollouts = self.num_tokens = 0

    def begin(self) -> None:
        """The worker attends from now on."""
        self._since = self._clock()

    def end(self) -> None:
        """The worker attends no longer."""
        self._seconds, self._since = self._attended(), None

    def _attended(self) -> float:
        return self._seconds + (self._clock() - self._since if self._since is not None else 0.0)

    def add(self, delivery: wire.Delivery) -> None:
        rollouts = delivery.group.rollouts
        self.num_groups += 1
        self.num_rollouts += len(delivery.rows) or len(rollouts)
        self.num_tokens += sum(len(rollout.tokens) // TOKEN_BYTES for rollout in rollouts)

    def __str__(self) -> str:
        hours = self._attended() / 3600
        cost = f", at most {self._price * hours:.2f} dollars" if self._price else ""
        pairs = ((self.num_groups, "group"), (self.num_rollouts, "rollout"), (self.num_tokens, "token"))
        counts = ", ".join(counted(*pair) for pair in pairs)
        return f"delivered {counts} in {hours:.2f} hours{cost}"


def give_cores(at_home: bool, max_cores: int) -> None:
    """Keep this process, and those that it starts, to some of the cores; call it before torch is imported. On a Mac,
    where a process can't be kept to cores, only the threads that compute are as few."""
    cores = num_cores()
    core_limit = max_cores or (max(1, int(HOME_SHARE * cores)) if at_home else 0)
    if at_home:
        os.nice(HOME_NICE)
        with contextlib.suppress(OSError):  # a system without it, or whose kernel was told not to group by session
            SESSION_NICE.write_text(str(HOME_NICE))
    if not core_limit:
        os.environ.setdefault("OMP_NUM_THREADS", "1")  # see docs/operations.md
        return
    os.environ["OMP_NUM_THREADS"] = str(min(core_limit, cores))
    if sys.platform == "linux":
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[-core_limit:])


class OwnersPrograms:
    """Measures what share of the processors is used by programs that this process has not started."""

    def __init__(self) -> None:
        """Raises: UserError, the system does not say."""
        import psutil  # nothing else of a worker needs it

        self._psutil = psutil
        try:
            self._process = psutil.Process()
            self._before = self._read()
        except (psutil.Error, OSError) as error:
            raise UserError(
                f"--at-home: this system does not say what other programs use ({error}). Leave --at-home out."
            ) from error

    def share(self) -> float:
        all_before, busy_before, own_before = self._before
        self._before = total, busy, own = self._read()
        others = (busy - busy_before) - max(0.0, own - own_before)
        return min(1.0, max(0.0, others / max(1e-9, total - all_before)))

    def _read(self) -> tuple[float, float, float]:
        """Return seconds since the machine started: of all processors, those of them that were used, and our own."""
        times = self._psutil.cpu_times()
        # Guests' times are part of those of users.
        total = sum(times) - getattr(times, "guest", 0.0) - getattr(times, "guest_nice", 0.0)
        idle = times.idle + getattr(times, "iowait", 0.0)
        own = 0.0
        for process in (self._process, *self._process.children(recursive=True)):
            try:
                own += sum(process.cpu_times()[:4])  # with children that have ended
            except self._psutil.NoSuchProcess:
                continue
        return total, total - idle, own


def is_on_battery() -> bool:
    """Whether there is a battery, and no mains."""
    import psutil

    read = getattr(psutil, "sensors_battery", None)
    battery = read() if read is not None else None
    return battery is not None and battery.power_plugged is False


async def measurements() -> AsyncIterator[Measurement]:
    """Yield measurements of this machine, the first at once. Raises: as `OwnersPrograms`."""
    programs = OwnersPrograms()
    while True:
        yield programs.share(), is_on_battery(), time.monotonic()
        await asyncio.sleep(MEASURE_SECONDS)


async def attended_at_home(
    attend: Callable[[], Coroutine[Any, Any, None]],
    step_back: Callable[[str], Awaitable[bool]],
    background: Background,
    measured: AsyncIterator[Measurement],
) -> None:
    """Attend while the machine's owner needs it little. `attend`: runs until the run is over; `step_back`: gives back
    what the worker has, before `attend` is cancelled; False: it can't yet. Errors of `attend` reach the owner of
    `background`."""
    presence, attending = Presence(), None
    async for measurement in measured:
        presence.measured(*measurement)
        if attending is not None and attending.done():
            return
        if not presence.paused and attending is None:
            attending = background.spawn(attend())
        elif presence.paused and attending is not None and await step_back(presence.paused):
            attending.cancel()
            await asyncio.wait({attending})
            attending = None
