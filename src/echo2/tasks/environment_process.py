"""An environment of the user's own, in a process beside the engine: it can stall that for one call, and not kill it.

This is the worker's side; what runs inside is `environment_child.py`. A call that takes too long is killed with
everything it started, a process that dies is replaced, and either costs the group that made the call. The other
attempts go on: environments are deterministic, so each is begun anew in the next process and its actions done again.
"""

from __future__ import annotations

import logging
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from echo2 import pipes
from echo2.errors import PeerError, UserError
from echo2.tasks.environments import BUILT_IN, LocalWorld, OpenWorld
from echo2.types import Reply

log = logging.getLogger(__name__)

STARTUP_SECONDS = 120.0  # imports of the user's module: some load a game or a word list
CALL_SECONDS = 30.0  # to begin an attempt, or to answer an action
EXIT_SECONDS = 5.0


@dataclass(slots=True)
class _Attempt:
    """What it takes to begin an attempt anew. `inside`: the process that has it, and its number there."""

    columns: Mapping[str, Any]
    seed: int
    actions: list[str] = field(default_factory=list)
    inside: tuple[int, int] | None = None
    turn_tokens: int = 0


class ProcessWorld:
    """Environments of one kind in a child process, which is started at once (`rollout/turns.py` calls it a world).

    Raises:
        UserError: the environment cannot be loaded; the message says why.
    """

    def __init__(self, spec: str, call_seconds: float = CALL_SECONDS) -> None:
        self._spec, self._call_seconds = spec, call_seconds
        self._attempts: dict[int, _Attempt] = {}
        self._next = self._number = 0
        self._closed = False
        self._lock = threading.RLock()  # against `close`, which another thread may call
        self._process: subprocess.Popen[bytes] | None = None
        self._stop = str(self._start()["stop"])

    @property
    def stop(self) -> str:
        return self._stop

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process is not None else None

    def begin(self, columns: Mapping[str, Any], seed: int) -> int:
        """A new attempt; its number.

        Raises:
            UserError: the class raised, hung, or ended its process.
        """
        with self._lock:
            attempt = _Attempt(columns, seed)
            self._enter(attempt)
            self._next += 1
            self._attempts[self._next] = attempt
            return self._next

    def turn_tokens(self, attempt: int) -> int:
        return self._attempts[attempt].turn_tokens

    def step(self, attempt: int, action: str) -> Reply:
        """What the environment answers.

        Raises:
            UserError: it raised, hung, ended its process, or answered what is no answer.
        """
        with self._lock:
            played = self._attempts[attempt]
            number = self._enter(played)
            played.actions.append(action)
            answer = self._call({"step": number, "action": action})
            return Reply(answer["text"], answer["reward"], answer["done"])

    def end(self, attempt: int) -> None:
        """Forget an attempt. A process that is found dead or hanging here is replaced at the next call."""
        with self._lock:
            inside = self._attempts.pop(attempt).inside
            if inside is not None and self._process is not None and inside[0] == self._number:
                try:
                    self._call({"end": inside[1]})
                except UserError as error:
                    log.warning("%s", error)

    def close(self) -> None:
        """End the child; whatever it was doing is abandoned."""
        self._closed, process = True, self._process
        if process is not None:
            pipes.kill_group(process.pid)  # a call under way ends by it
        with self._lock:
            self._kill()

    def _enter(self, attempt: _Attempt) -> int:
        """The attempt's number in the process that runs now."""
        if self._process is None:
            self._start()
        if attempt.inside is None or attempt.inside[0] != self._number:
            begun = self._call({"begin": dict(attempt.columns), "seed": attempt.seed})
            number, attempt.turn_tokens = begun["number"], begun["turn_tokens"]
            attempt.inside = (self._number, number)
            for action in attempt.actions:
                self._call({"step": number, "action": action})
        return attempt.inside[1]

    def _start(self) -> dict[str, Any]:
        if self._closed:
            raise UserError(f"The environment {self._spec} is closed: the worker ends.")
        try:
            self._process = subprocess.Popen(
                (sys.executable, "-m", "echo2.tasks.environment_child"),
                bufsize=0,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env=pipes.child_environment(),
                start_new_session=True,  # a group to kill as a whole; and Ctrl-C is the worker's to handle
            )
        except OSError as error:
            raise UserError(f"Cannot start the process of the environment {self._spec}: {error}.") from error
        self._number += 1
        try:
            if self._closed:  # by another thread, which may have found no process to kill
                raise UserError(f"The environment {self._spec} is closed: the worker ends.")
            return self._call({"spec": self._spec}, STARTUP_SECONDS)
        except BaseException:
            self._kill()
            raise

    def _call(self, request: dict[str, Any], seconds: float | None = None) -> dict[str, Any]:
        """Send one frame and await its answer. Whatever keeps it away leaves no child behind."""
        process, limit = self._process, seconds or self._call_seconds
        if process is None:
            raise UserError(f"The process of the environment {self._spec} was ended.")
        try:
            answer = pipes.exchange(process, pipes.encode(request), time.monotonic() + limit)
        except TimeoutError as error:
            self._kill()
            raise UserError(f"The environment {self._spec} took longer than {limit:g} s and was stopped.") from error
        except (EOFError, OSError) as error:
            ending = pipes.ending(self._kill(EXIT_SECONDS))
            raise UserError(
                f"The process of the environment {self._spec} {ending}; its worker's log says more."
            ) from error
        except PeerError as error:
            self._kill()
            raise UserError(f"The environment {self._spec} cannot go on: {error}.") from error
        if "failed" in answer:
            raise UserError(str(answer["failed"]))
        return answer

    def _kill(self, grace_seconds: float = 0.0) -> int | None:
        """End the child and everything it started. Its exit status: its own if it ended within `grace_seconds`."""
        process, self._process = self._process, None
        if process is None:
            return None
        try:
            process.wait(grace_seconds)
        except subprocess.TimeoutExpired:
            pipes.kill_group(process.pid)
            process.wait(EXIT_SECONDS)
        pipes.kill_group(process.pid)
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                pipe.close()
        return process.returncode


def open_world(spec: str) -> OpenWorld:
    """The world of an environment for a worker: a built-in here, any other in a process.

    Raises:
        UserError: there is no such environment.
    """
    return LocalWorld(spec) if spec in BUILT_IN else ProcessWorld(spec)
