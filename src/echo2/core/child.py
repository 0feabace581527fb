"""A child process: the one way to start a program that this process watches, hears the end of, and ends.

A child leads a process group of its own, unless it is to end with its parent's: Ctrl-C reaches its parent alone, and
`kill` ends all that it started. A child with pipes reads the end of its stdin, and one with a lifeline the end of that,
so that neither outlives its parent, whatever kills that; what they started ends with them. A child with neither goes
on, as do the processes that it leaves. What its owner says to it, and whether it is started again, is the owner's
affair.

A lifeline is a pipe: its owner holds the writing end and hands the reading end to each child. When the owner dies, even
by ``kill -9``, the kernel closes its end, and every child reads end-of-file. Works on every system with pipes.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import subprocess
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import IO, BinaryIO

import echo2
from echo2.core import logs
from echo2.core.loop_thread import call_in

log = logging.getLogger(__name__)

#: Entries of `no_proxy`: OpenAI clients and the like would send calls of the model to a proxy.
LOOPBACK_NAMES = ("127.0.0.1", "localhost", "::1")
PACKAGE_ROOT = str(Path(echo2.__file__).resolve().parent.parent)  # the child imports the same echo2
#: Environment variable that carries the file descriptor of a lifeline's reading end.
LIFELINE_VARIABLE = "ECHO2_LIFELINE_FD"


class ChildProcess:
    """A program that was started with `environment` (None: this process's) in `directory` (None: this process's).

    Its output goes to the end of `log_path` (None: to this process's stderr); with `has_pipes`, stdin and stdout are
    pipes. It inherits `descriptors`. `on_end` is called with its status in a thread of its own. May be used from any
    thread, but for `kill` after `streams`.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        log_path: Path | None = None,
        environment: Mapping[str, str] | None = None,
        directory: str | None = None,
        has_pipes: bool = False,
        has_lifeline: bool = False,
        descriptors: Sequence[int] = (),
        leads_group: bool = True,
        on_end: Callable[[int], object] = lambda _: None,
    ) -> None:
        """Raises: OSError, the program, the log or a descriptor is not there."""
        self._log_path, self._log_start, self._on_end = log_path, 0, on_end
        self._exit: Future[int] = Future()
        self._transports: list[asyncio.BaseTransport] = []
        variables = dict(os.environ if environment is None else environment)
        with contextlib.ExitStack() as opened, contextlib.ExitStack() as failing:
            self._lifeline: IO[bytes] | None = None
            inherited = tuple(descriptors)
            if has_lifeline:
                reading, writing = os.pipe()
                opened.callback(os.close, reading)
                self._lifeline = failing.enter_context(os.fdopen(writing, "wb"))
                variables[LIFELINE_VARIABLE] = str(reading)
                inherited += (reading,)
            output = None
            if log_path is not None:
                logs.cut_log(log_path)
                output = opened.enter_context(log_path.open("ab"))  # appending: it may be cut while the child writes
                self._log_start = output.tell()
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE if has_pipes else subprocess.DEVNULL,
                stdout=subprocess.PIPE if has_pipes else output,
                stderr=output,
                env=variables,
                cwd=directory,
                pass_fds=inherited,
                start_new_session=leads_group,
            )
            failing.pop_all()
        self.pid = self._process.pid
        self._leads_group, self._maker = leads_group, os.getpid()
        self._ends_group = leads_group and (has_pipes or has_lifeline)
        self._in_loop: tuple[asyncio.AbstractEventLoop, asyncio.Event] | None = None
        threading.Thread(target=self._watch, name=f"child-{self.pid}", daemon=True).start()

    @property
    def status(self) -> int | None:
        """The exit status, -N if signal N ended it; None while it runs."""
        return self._exit.result() if self._exit.done() else None

    @property
    def pipes(self) -> tuple[IO[bytes], IO[bytes]]:
        """The pipes to its stdin and from its stdout."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        return self._process.stdin, self._process.stdout

    async def streams(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Return its stdout and its stdin for the running event loop, instead of `pipes`. `kill` closes them."""
        loop, (inbox, outbox) = asyncio.get_running_loop(), self.pipes
        answers, unused = asyncio.StreamReader(), asyncio.StreamReader()
        try:
            reading, _ = await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(answers), outbox)
            self._transports.append(reading)
            writing, protocol = await loop.connect_write_pipe(lambda: asyncio.StreamReaderProtocol(unused), inbox)
            self._transports.append(writing)
        except BaseException:  # given up before its end
            inbox.close()
            if not self._transports:
                outbox.close()
            raise
        return answers, asyncio.StreamWriter(writing, protocol, None, loop)

    def log_tail(self, bytes_max: int) -> bytes:
        """Return the end of what it wrote to its log; empty if there is none. The log may have been cut meanwhile."""
        return b"" if self._log_path is None else log_end(self._log_path, bytes_max, self._log_start)

    def wait(self, seconds: float | None = None) -> int | None:
        """Wait for its end, at most this long. Return its status; None if it still runs."""
        with contextlib.suppress(TimeoutError):
            return self._exit.result(seconds)
        return None

    async def ended(self, seconds: float | None = None) -> int | None:
        """Wait as `wait` does, without blocking the event loop."""
        if self.status is None:
            loop = asyncio.get_running_loop()
            if self._in_loop is None or self._in_loop[0] is not loop:
                over = asyncio.Event()
                self._exit.add_done_callback(lambda _: call_in(loop, over.set))  # once: it can't be detached again
                self._in_loop = loop, over
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(seconds):
                    await self._in_loop[1].wait()
        return self.status

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the child alone, if it runs."""
        if self.status is None and os.getpid() == self._maker:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def kill(self) -> None:
        """Kill the child and everything that it started, and close its pipes. A fork of this process kills nothing."""
        if self.status is None and os.getpid() == self._maker:
            self._kill_group()
        for transport in self._transports:
            if isinstance(transport, asyncio.WriteTransport) and not transport.is_closing():
                transport.abort()  # does not wait until the child has read
            transport.close()

    def end_lifeline(self) -> None:
        """Let the child know, as the death of this process would, that it is to end."""
        if self._lifeline is not None:
            self._lifeline.close()

    def _kill_group(self) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            if self._leads_group:
                os.killpg(self.pid, signal.SIGKILL)
            else:
                os.kill(self.pid, signal.SIGKILL)

    def _watch(self) -> None:
        """Consumes: the child's end. Produces: the status, for all that wait. Waits for: the child."""
        status = self._process.wait()
        if self._ends_group:
            self._kill_group()  # now: later its number may be another's
        self.end_lifeline()
        self._exit.set_result(status)
        try:
            self._on_end(status)
        except Exception:
            log.exception("hearing of the end of process %d", self.pid)


def log_end(path: Path, bytes_max: int, start: int = 0) -> bytes:
    """Return the end of a log from `start` on, at most `bytes_max`; from its beginning if it is shorter than `start`.
    Empty if it can't be read.
    """
    try:
        with path.open("rb") as log:
            size = log.seek(0, os.SEEK_END)
            log.seek(max(start if start <= size else 0, size - bytes_max))
            return log.read()
    except OSError:
        return b""


def ending(status: int | None) -> str:
    """Return how a process ended, in words."""
    if status is None:
        return "went away"
    return f"was killed by {signal.Signals(-status).name}" if status < 0 else f"exited with status {status}"


def child_environment() -> dict[str, str]:
    """Environment variables with which a child imports the same echo2, and calls this machine without a proxy."""
    paths = [PACKAGE_ROOT, os.environ.get("PYTHONPATH", "")]
    direct = {
        name: ",".join(filter(None, [os.environ.get(name, ""), *LOOPBACK_NAMES])) for name in ("no_proxy", "NO_PROXY")
    }
    return {**os.environ, **direct, "PYTHONPATH": os.pathsep.join(path for path in paths if path)}


def take_pipes() -> tuple[BinaryIO, BinaryIO]:
    """In a child with pipes, return those from and to the parent. From then on, stdin is empty and stdout is stderr."""
    inbox, outbox = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    os.dup2(2, 1)
    return inbox, outbox


def end_with_supervisor(may_save: bool = False) -> None:
    """End this process when its supervisor dies: at once, or by SIGTERM if `may_save`. No effect without supervisor."""
    text = os.environ.pop(LIFELINE_VARIABLE, "")
    if text:
        threading.Thread(target=_wait_for_end, args=(int(text), may_save), daemon=True, name="lifeline").start()


def _wait_for_end(descriptor: int, may_save: bool) -> None:
    while os.read(descriptor, 1):
        pass
    if may_save:
        os.kill(os.getpid(), signal.SIGTERM)
    else:
        os._exit(143)
