"""The head's side of the sandbox: sends completions to a process, started at the first call, and receives numbers.

That process has no secrets to lose: it inherits no environment variables, starts outside the working directory, and
lets only forks without rights read completions (`sandbox_child.py`).
"""

from __future__ import annotations

import atexit
import contextlib
import sys
import threading
from collections.abc import Sequence
from functools import cache
from typing import Any

from echo2.core.child import PACKAGE_ROOT, ChildProcess
from echo2.core.errors import PeerError, UserError
from echo2.sandbox import pipes

EXIT_SECONDS = 5.0  # for the system to end the killed process
STARTUP_SECONDS = 120.0  # imports of the scorer's library
SECONDS_PER_COMPLETION = 10.0  # more than the limits of `sandbox_child.py`; `reward.timeout_seconds` ends it before
#: One thread, because the process forks; the rest makes scores the same on every machine.
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "PYTHONHASHSEED": "0", "PYTHONUTF8": "1"}


class Sandbox:
    """Scores text in a process of its own. Safe to call from several threads; one group at a time."""

    def __init__(self) -> None:
        self._process: ChildProcess | None = None
        self._lock = threading.Lock()

    def score(self, scorer: str, column: Any, texts: Sequence[str]) -> list[float]:
        """Return one score in [0, 1] for each text, by `scorer` of `text_scorers.py` for one task's `column`.

        Raises:
            UserError: the scorer cannot be made for this column, or its process cannot run.
        """
        answer = self._answer_to({"scorer": scorer, "column": column, "texts": list(texts)}, len(texts))
        return [float(score) for score in answer["scores"]]

    def load(self, scorer: str) -> None:
        """Start the process and let it import the scorer's library, so that no group's time has to include that.

        Raises:
            UserError: its process cannot run, or the library cannot be imported.
        """
        self._answer_to({"scorer": scorer}, 0)

    def _answer_to(self, request: dict[str, Any], num_texts: int) -> dict[str, Any]:
        with self._lock:
            process = self._running()
            seconds = STARTUP_SECONDS + SECONDS_PER_COMPLETION * num_texts
            killer = threading.Timer(seconds, process.kill)  # which ends its pipes
            killer.start()
            try:
                answer = _exchanged(process, request)
            except (EOFError, OSError, PeerError) as error:
                self._kill()
                raise UserError(f"cannot run: its process did not answer ({type(error).__name__})") from error
            except BaseException:
                self._kill()  # a late answer must not be taken for the next group's
                raise
            finally:
                killer.cancel()
        if "failed" in answer:
            raise UserError(answer["failed"])
        return answer

    def close(self) -> None:
        """End the process, even while it scores; the next call starts another."""
        process = self._process
        if process is not None:
            process.kill()  # which ends a call under way
        with self._lock:
            self._kill()

    def _running(self) -> ChildProcess:
        if self._process is None:
            self._process = ChildProcess(
                (sys.executable, "-P", "-m", "echo2.reward.sandbox_child"),
                environment={**ENVIRONMENT, "PYTHONPATH": PACKAGE_ROOT},
                directory="/",
                has_pipes=True,
                leads_group=False,  # ends with the reward process, even while it scores
            )
        return self._process

    def _kill(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait(EXIT_SECONDS)
            for pipe in process.pipes:
                with contextlib.suppress(BrokenPipeError):  # data not sent yet is no longer needed
                    pipe.close()


def _exchanged(process: ChildProcess, request: dict[str, Any]) -> dict[str, Any]:
    inbox, outbox = process.pipes
    inbox.write(pipes.encode(request))
    inbox.flush()
    answer = pipes.read(outbox)
    if answer is None:
        raise EOFError
    return answer


@cache
def shared() -> Sandbox:
    """Return this process's sandbox. It ends with this process: if this process is killed, the pipe closes."""
    sandbox = Sandbox()
    atexit.register(sandbox.close)
    return sandbox
