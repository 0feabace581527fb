"""A token server as a child of the worker: started, watched, and killed with all processes that it started."""

from __future__ import annotations

import asyncio
import os
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import BinaryIO

from echo2.core.background import awaited
from echo2.core.errors import LinkError, UserError
from echo2.engines.servers import guard

#: Limits of the log excerpt in an error message.
LAST_LINES, LAST_CHARS = 6, 1200
LOG_BYTES_MAX = 16 << 20
#: A message quotes the first error. Later lines (shutdown messages, stacks of other processes) say less.
ERROR_LINE = re.compile(rb"(?:^|[\])(] ?)(?:[\w.]*(?:Error|Exception)|error): ")
#: Variables of the worker's Python environment. They are not passed on: the server has other modules.
OWN_VARIABLES = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")


class ServerProcess:
    """One process of the server. Its output goes to `log_path`."""

    def __init__(self, process: asyncio.subprocess.Process, log_path: Path, log_start: int) -> None:
        self._process, self._log_path, self._log_start = process, log_path, log_start
        self._exit = awaited(process.wait())

    @classmethod
    async def start(cls, command: Sequence[str], variables: Mapping[str, str], log_path: Path) -> ServerProcess:
        """Start a command, with these environment variables in addition to the worker's.

        Raises:
            UserError: there is no such program.
        """
        if not os.access(command[0], os.X_OK):
            raise UserError(f"--engine-python {command[0]}: there is no such program. Name the Python of the server.")
        environment = {name: value for name, value in os.environ.items() if name not in OWN_VARIABLES}
        with _open_log(log_path) as log:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-S", guard.__file__, *command),
                stdin=asyncio.subprocess.PIPE,
                stdout=log,
                stderr=log,
                env={**environment, **variables},
                start_new_session=True,  # the worker handles Ctrl-C
            )
            return cls(process, log_path, log.tell())

    async def ended(self, seconds: float) -> None:
        """Wait until the process has ended, but at most this many seconds."""
        await asyncio.wait({self._exit}, timeout=seconds)

    def check(self) -> None:
        """Raises LinkError if the process has ended, with its status and last output."""
        if self._exit.done():
            status = self._exit.result()
            how = f"signal {256 - status}" if status > 192 else f"status {status}"
            raise LinkError(f"its process has ended ({how}). {self.last_words()}")

    def last_words(self) -> str:
        """The last lines of its output, or the first error of this process."""
        try:
            with self._log_path.open("rb") as log:
                log.seek(max(self._log_start, self._log_path.stat().st_size - LOG_BYTES_MAX))
                lines = [line for line in log.read().splitlines() if b" WARNING " not in line]
        except OSError:
            return ""
        first = next((place for place, line in enumerate(lines) if ERROR_LINE.search(line)), None)
        told = lines[-LAST_LINES:] if first is None else lines[first : first + 1]
        text = b" | ".join(line.strip() for line in told if line.strip()).decode(errors="replace")
        return f"Its log {self._log_path} says: {text[:LAST_CHARS]}"

    async def kill(self) -> None:
        """Kill the server and all processes that it started."""
        if self._process.stdin is not None:
            self._process.stdin.close()
        await self._exit


def _open_log(path: Path) -> BinaryIO:
    path.parent.mkdir(parents=True, exist_ok=True)
    is_long = path.exists() and path.stat().st_size > LOG_BYTES_MAX
    return path.open("wb" if is_long else "ab")
