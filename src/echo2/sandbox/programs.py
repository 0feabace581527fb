"""One program that is run to its end, as a container's command is: with limits on its time and output, watched, and
ended with all that it started.

Its time is that of the clock, less what it waited for a processor: that others compute, too, is not the program's
affair. A machine on which it waits too long is at fault.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field, replace

from echo2.core.background import together
from echo2.core.child import ChildProcess
from echo2.core.errors import UserError
from echo2.sandbox.process_table import Used, usage

log = logging.getLogger(__name__)

CHECK_SECONDS = 0.1  # between two looks at a command's processes
STORAGE_SECONDS = 0.5  # between two looks at its files, or longer
START_SECONDS = 60.0  # for the runtime to start or end a container
PRINTED_BYTES_MAX = 16 << 20  # what a command may print, whatever of it is kept
BUSY_FACTOR = 10.0  # so many times its limit may pass by the clock; then the machine gave it a tenth of a processor
#: Ends a program that waits for the machine all the time.
BUSY = "busy"
#: Of a command: the kernel gives a program no longer argument than 128 KiB.
COMMAND_BYTES_MAX = 120 << 10
#: Says that the container is there, then runs the command ($1) without input; what is put for END comes last. Output
#: and errors are one stream from there on: docker passes two on in any order.
WRAPPED = (
    'exec 2>&1; echo "$0"; if command -v bash >/dev/null; then bash -c "$1" </dev/null; else sh -c "$1" </dev/null; '
    "fi; status=$?; {END}exit $status"
)


class ContainerFault(UserError):
    """The machine is at fault: no runtime, or one that does not start or died."""


@dataclass(frozen=True, slots=True)
class ContainerLimits:
    """Limits of a container. `cpus` counts only with images, `storage_bytes` only without. Shared memory is counted
    once."""

    memory_bytes: int = 2 << 30
    num_processes: int = 256
    output_bytes: int = 8 << 10
    cpus: float = 1.0
    has_network: bool = False
    storage_bytes: int = 10 << 30


@dataclass(frozen=True, slots=True)
class Ran:
    """What a command did. `status`: its exit status; `output`: the first and last of what it printed, at most
    `ContainerLimits.output_bytes`; `stopped`: the limit that ended it (time, memory, processes, output, storage), or
    empty; `seconds`: the time that it took, without what it waited for a processor."""

    status: int
    output: str
    stopped: str = ""
    seconds: float = field(default=0.0, compare=False)


def refused(command: str) -> Ran | None:
    """Return what becomes of a command that no shell can be given: as for one that the shell does not know."""
    try:
        is_short = len(command.encode()) <= COMMAND_BYTES_MAX
    except UnicodeEncodeError:
        return Ran(126, "this is not a command: it has half a character of UTF-16")
    if "\0" in command:
        return Ran(126, "this is not a command: it has a character of value 0")
    return None if is_short else Ran(126, f"this is not a command: it has more than {COMMAND_BYTES_MAX} bytes")


class _PrintedOutput:
    """Keeps the first and the last of what a command prints."""

    def __init__(self, most: int) -> None:
        self._half, self.num_bytes = max(1, most // 2), 0
        self._first, self._last = bytearray(), bytearray()

    async def listen(self, stream: asyncio.StreamReader) -> None:
        while data := await stream.read(1 << 16):
            self.num_bytes += len(data)
            room = self._half - len(self._first)
            self._first += data[: max(0, room)]
            self._last = (self._last + data[max(0, room) :])[-self._half :]

    def text(self) -> str:
        gap = self.num_bytes - len(self._first) - len(self._last)
        between = b"\n... %d bytes left out ...\n" % gap if gap else b""
        return (bytes(self._first) + between + bytes(self._last)).decode(errors="replace")


class Stopwatch:
    """The time of processes from `now` on, without what they waited for a processor, as far as looks at them show: at
    each, one was ready that did not compute all the while since the last."""

    def __init__(self, now: float) -> None:
        self._began = self._seen_at = now
        self._computed = self.waited = 0.0

    def look(self, used: Used) -> None:
        if used.is_ready and used.at > self._seen_at:
            computed = max(0.0, used.cpu_seconds - self._computed)
            self.waited += max(0.0, used.at - self._seen_at - computed)
        self._seen_at, self._computed = max(used.at, self._seen_at), used.cpu_seconds

    def seconds(self, now: float) -> float:
        return max(0.0, now - self._began - self.waited)

    def is_starved(self, now: float, limit: float) -> bool:
        """Whether the machine is too busy for a program with this limit."""
        return now - self._began > BUSY_FACTOR * limit


@dataclass(frozen=True, slots=True)
class Program:
    """A program that is run to its end. `used(pid)`: what its processes use; `over` names a limit that this exceeds; so
    does `stored(pid)`, which may take long and is called in a thread; `end()` ends them."""

    words: tuple[str, ...]
    seconds: float
    output_bytes: int = 8 << 10
    environment: Mapping[str, str] | None = None
    used: Callable[[int], Used] = usage
    over: Callable[[Used], str] = lambda used: ""
    stored: Callable[[int], str] = lambda pid: ""
    end: Callable[[], Awaitable[None]] | None = None

    async def run(self) -> Ran:
        """Return what it did; its status is -N if signal N ended it.

        Raises:
            ContainerFault: it does not start, or the machine was too busy for it.
        """
        merged = ("/bin/sh", "-c", 'exec "$@" 2>&1', "sh", *self.words)
        output, stopped = _PrintedOutput(self.output_bytes), ""
        try:
            child = ChildProcess(merged, environment=self.environment, has_pipes=True)
        except OSError as error:
            raise ContainerFault(f"{self.words[0]} does not start: {error}.") from error
        clock = time.monotonic
        stopwatch = Stopwatch(clock())
        try:
            stream, _stdin = await child.streams()  # held: its end ends the command
            async with together() as group:
                group.create_task(output.listen(stream))
                looking = group.create_task(self._look(child))
                if stopped := await self._limit(child, output, looking, stopwatch):
                    await self._end(child)
        finally:
            if child.status is None:
                await asyncio.shield(self._end(child))
            child.kill()
        if stopped == BUSY:
            raise ContainerFault(
                f"The machine is too busy: a command with a limit of {self.seconds:g} s waited {stopwatch.waited:.0f} "
                "s for a processor. Let fewer programs run there, or give its worker fewer --slots."
            )
        return Ran(child.status or 0, output.text(), stopped, stopwatch.seconds(clock()))

    async def _look(self, child: ChildProcess) -> str:
        """Look at what is stored until it is too much; a tenth of the time, however long a look takes."""
        clock = asyncio.get_running_loop().time
        while child.status is None:
            began = clock()
            if exceeded := await asyncio.to_thread(self.stored, child.pid):
                return exceeded
            await child.ended(max(STORAGE_SECONDS, 9 * (clock() - began)))
        return ""

    async def _limit(
        self, child: ChildProcess, output: _PrintedOutput, looking: asyncio.Task[str], stopwatch: Stopwatch
    ) -> str:
        while await child.ended(min(CHECK_SECONDS, self.seconds)) is None:
            used = self.used(child.pid)
            stopwatch.look(used)
            now = time.monotonic()
            exceeded = "time" if stopwatch.seconds(now) > self.seconds else ""
            exceeded = exceeded or ("output" if output.num_bytes > PRINTED_BYTES_MAX else "") or self.over(used)
            exceeded = exceeded or (looking.result() if looking.done() else "")
            if exceeded := exceeded or (BUSY if stopwatch.is_starved(now, self.seconds) else ""):
                return exceeded
        return ""

    async def _end(self, child: ChildProcess) -> None:
        if self.end is not None:
            await self.end()
        for pid in usage(child.pid).inner:  # bubblewrap's own ends when the kernel has ended what it holds
            _kill(pid)
        if await child.ended(START_SECONDS if self.end is not None else 1.0) is None:
            child.kill()
            await child.ended(START_SECONDS)


def _kill(pid: int) -> None:
    try:
        os.kill(pid, 9)
    except ProcessLookupError:
        return


async def must(*program: str, seconds: float = START_SECONDS) -> str:
    """Run a program of the machine. Return what it printed. Raises ContainerFault: it failed, or took too long."""
    ran = await Program(program, seconds).run()
    if ran.status or ran.stopped:
        failed = f"failed with status {ran.status}: {ran.output.strip()[-1500:]}"
        reason = f"took longer than {seconds:g} s" if ran.stopped else failed
        raise ContainerFault(f"`{' '.join(program[:3])}` {reason}")
    return ran.output


async def tidy_up(*program: str) -> None:
    """Run a program that removes something. What fails is logged: it spoils no result."""
    try:
        await must(*program)
    except ContainerFault as error:
        log.warning("something is left on this machine: %s", error)


def outcome(nonce: str, ran: Ran, what: str) -> Ran:
    """Return what a wrapped command did. Raises ContainerFault: it was never begun."""
    line, _, output = ran.output.partition("\n")
    if line != nonce and not ran.stopped:
        raise ContainerFault(f"{what} does not run commands (status {ran.status}): {ran.output.strip()[-1500:]}")
    return replace(ran, status=128 - ran.status if ran.status < 0 else ran.status, output=output)
