"""The user's reward functions in a process of their own beside the head, which they can neither stall nor kill.

This is the head's side; what runs inside is `child.py`. It scores one group after the other, and groups that wait are
sent together, so that nobody waits for a round trip. A call that takes too long is killed with everything it started; a
process that dies is replaced at the next call; either is a `RewardFailure` of that one group.
"""

from __future__ import annotations

import asyncio
import sys
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from echo2 import pipes
from echo2.errors import InvariantError, PeerError, UserError
from echo2.reward import frames
from echo2.reward.score import RewardFailure
from echo2.types import Rollout, Task

STARTUP_SECONDS = 120.0  # imports of the user's module: some load a judge or a word list
EXIT_SECONDS = 1.0  # from closing its pipe to being gone, for a child that ends by itself
REAP_SECONDS = 5.0
MAX_LOG_BYTES = 16 << 20  # a longer log is begun anew at the next start of the process
LOG_CHARS_SHOWN = 1500
GROUPS_AT_ONCE = 16  # sent before the first of them is answered


@dataclass(frozen=True, slots=True)
class _Waiting:
    """A group to be scored, as a frame; and what the child will answer."""

    frame: bytes
    doing: str
    answer: asyncio.Future[dict[str, Any]]


class RewardProcess:
    """Scores groups in a child process, which is started at the first call (or by `start`) and lives until `close`.

    `specs` and `weights` as for `Scorer`; relative paths are relative to this process's working directory. `log_path`
    takes what the functions print.
    """

    def __init__(self, specs: Sequence[str], weights: Sequence[float], timeout_seconds: float, log_path: Path) -> None:
        self._setup = {"specs": list(specs), "weights": list(weights)}
        self._timeout_seconds = timeout_seconds
        self._log_path = log_path
        self._process: asyncio.subprocess.Process | None = None
        self._turn = asyncio.Lock()
        self._waiting: deque[_Waiting] = deque()

    @property
    def pid(self) -> int | None:
        """Of the child that is running now."""
        alive = self._process is not None and self._process.returncode is None
        return self._process.pid if alive and self._process is not None else None

    async def start(self) -> None:
        """Start the child now, so that a function that cannot be loaded is known before there is anything to score.

        Raises:
            UserError: it cannot be loaded; the message says which and why.
        """
        async with self._turn:
            await self._running()

    async def score(self, task: Task, rollouts: Sequence[Rollout]) -> tuple[Rollout, ...]:
        """The same rollouts with `reward_parts` and `reward` filled in.

        Raises:
            RewardFailure: a function raised, returned no score, took over `timeout_seconds` or ended the process.
            UserError: the functions cannot be loaded.
        """
        doing = f"scoring task {task.cursor}"
        try:
            frame = pipes.encode(frames.group_message(task, rollouts))
        except PeerError as error:
            raise RewardFailure(f"The reward process cannot go on while {doing}: {error}.") from error
        waiting = _Waiting(frame, doing, asyncio.get_running_loop().create_future())
        self._waiting.append(waiting)
        try:
            while not waiting.answer.done():
                async with self._turn:
                    if not waiting.answer.done():
                        await self._score_some()
        finally:
            if not waiting.answer.done():
                self._waiting = deque(one for one in self._waiting if one is not waiting)
        answer = waiting.answer.result()
        if "failed" in answer:
            raise RewardFailure(answer["failed"])
        return tuple(
            replace(rollout, reward=reward, reward_parts=parts)
            for rollout, (reward, parts) in zip(rollouts, answer["scores"], strict=True)
        )

    async def _score_some(self) -> None:
        """Send the groups that waited longest and take their answers, up to the first that costs the process. Those
        behind that one wait again.
        """
        process = await self._running()
        sent = deque(self._waiting.popleft() for _ in range(min(GROUPS_AT_ONCE, len(self._waiting))))
        writing = asyncio.ensure_future(_write(process, *(one.frame for one in sent)))
        try:
            while sent and self._process is process:
                try:
                    answer = await self._answer(process, self._timeout_seconds, sent[0].doing)
                except RewardFailure as failure:
                    answer = {"failed": str(failure)}
                sent.popleft().answer.set_result(answer)
        finally:
            writing.cancel()
            await asyncio.gather(writing, return_exceptions=True)  # a pipe that broke was seen by the reader too
            self._waiting.extendleft(reversed(sent))

    async def close(self) -> None:
        """End the child; whatever it was doing is abandoned."""
        await self._kill()

    async def _running(self) -> asyncio.subprocess.Process:
        if self._process is not None and self._process.returncode is None:
            return self._process
        self._process = process = await self._spawn()
        writing = asyncio.ensure_future(_write(process, pipes.encode(self._setup)))
        answer = await self._answer(process, STARTUP_SECONDS, "loading the reward functions")
        await asyncio.gather(writing, return_exceptions=True)
        if "failed" in answer:
            await self._kill()
            raise UserError(answer["failed"])
        return process

    async def _spawn(self) -> asyncio.subprocess.Process:
        try:
            with self._open_log() as log:
                return await asyncio.create_subprocess_exec(
                    *(sys.executable, "-m", "echo2.reward.child"),
                    stdin=asyncio.subprocess.PIPE,
                    stdout=asyncio.subprocess.PIPE,
                    stderr=log,
                    env=pipes.child_environment(),
                    start_new_session=True,  # a group to kill as a whole; and Ctrl-C is the head's to handle
                )
        except OSError as error:
            raise UserError(f"Cannot start the reward process (log {self._log_path}): {error}.") from error

    def _open_log(self) -> Any:
        self._log_path.parent.mkdir(parents=True, exist_ok=True)
        if self._log_path.exists() and self._log_path.stat().st_size > MAX_LOG_BYTES:
            self._log_path.write_bytes(b"")
        return self._log_path.open("ab")  # appending: it may be cut while it is written

    async def _answer(self, process: asyncio.subprocess.Process, seconds: float, doing: str) -> dict[str, Any]:
        """The next answer. Whatever keeps it away leaves no child behind: a late answer must not be taken for the next
        group's."""
        try:
            async with asyncio.timeout(seconds):
                return await _read(process)
        except TimeoutError as error:
            await self._kill()
            raise RewardFailure(
                f"The reward process took longer than {seconds:g} s for {doing} and was stopped. Make it faster, or "
                f"raise reward.timeout_seconds. {self._last_words()}"
            ) from error
        except (EOFError, ConnectionError) as error:  # asyncio's IncompleteReadError is an EOFError
            status = await self._kill(EXIT_SECONDS)
            raise RewardFailure(
                f"The reward process {pipes.ending(status)} while {doing}. {self._last_words()}"
            ) from error
        except PeerError as error:
            await self._kill()
            raise RewardFailure(f"The reward process cannot go on while {doing}: {error}.") from error
        except BaseException:
            await self._kill()
            raise

    async def _kill(self, grace_seconds: float = 0.0) -> int | None:
        """End the child and everything it started. Its exit status: its own if it ended within `grace_seconds`."""
        process, self._process = self._process, None
        if process is None:
            return None
        try:
            await asyncio.wait_for(process.wait(), grace_seconds)
        except TimeoutError:
            pass
        finally:
            pipes.kill_group(process.pid)
        try:
            return await asyncio.wait_for(process.wait(), REAP_SECONDS)
        except TimeoutError:
            return None  # something that left the process group holds a pipe; the child itself is dead

    def _last_words(self) -> str:
        """The end of the log, for the message: a crash says there what it has to say."""
        try:
            with self._log_path.open("rb") as log:
                log.seek(max(0, self._log_path.stat().st_size - LOG_CHARS_SHOWN))
                text = log.read().decode(errors="replace").strip().replace("\n", " | ")
        except OSError:
            text = ""
        return f"Its log {self._log_path} " + (f"ends: {text}" if text else "is empty.")


async def _write(process: asyncio.subprocess.Process, *sent: bytes) -> None:
    if process.stdin is None:
        raise InvariantError("the reward process was started without pipes")
    for frame in sent:
        process.stdin.write(frame)
        await process.stdin.drain()


async def _read(process: asyncio.subprocess.Process) -> dict[str, Any]:
    if process.stdout is None:
        raise InvariantError("the reward process was started without pipes")
    header = await process.stdout.readexactly(pipes.HEADER.size)
    length = pipes.checked_length(pipes.HEADER.unpack(header)[0])
    return pipes.decode(await process.stdout.readexactly(length))
