"""A token server as a child of the worker: it ends with all processes that it started, also if the worker is killed."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from echo2.core.child import ChildProcess
from echo2.core.errors import LinkError, UserError
from echo2.engines.servers import guard

#: Limits of the log excerpt in an error message.
LAST_LINES, LAST_CHARS = 6, 1200
LOG_BYTES_READ = 16 << 20
#: A message quotes the first error. Later lines (shutdown messages, stacks of other processes) say less.
ERROR_LINE = re.compile(rb"(?:^|[\])(] ?)(?:[\w.]*(?:Error|Exception)|error): ")
#: Variables of the worker's Python environment. They are not passed on: the server has other modules.
OWN_VARIABLES = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")


class ServerProcess:
    """One process of the server: a command, with these environment variables in addition to the worker's. Its output
    goes to `log_path`.
    """

    def __init__(self, command: Sequence[str], variables: Mapping[str, str], log_path: Path) -> None:
        """Raises: UserError, there is no such program."""
        if not os.access(command[0], os.X_OK):
            raise UserError(f"--engine-python {command[0]}: there is no such program. Name the Python of the server.")
        others = {name: value for name, value in os.environ.items() if name not in OWN_VARIABLES}
        log_path.parent.mkdir(parents=True, exist_ok=True)
        self._log_path = log_path
        guarded = (sys.executable, "-S", guard.__file__, *command)
        environment = {**others, **variables}
        self.child = ChildProcess(guarded, log_path=log_path, environment=environment, has_lifeline=True)

    def check(self) -> None:
        """Raises LinkError if the process has ended, with its status and last output."""
        status = self.child.status
        if status is not None:
            how = f"signal {256 - status}" if status > 192 else f"status {status}"
            raise LinkError(f"its process has ended ({how}). {self.last_words()}")

    def last_words(self) -> str:
        """The last lines of its output, or the first error of this process."""
        lines = [line for line in self.child.said(LOG_BYTES_READ).splitlines() if b" WARNING " not in line]
        first = next((place for place, line in enumerate(lines) if ERROR_LINE.search(line)), None)
        told = lines[-LAST_LINES:] if first is None else lines[first : first + 1]
        text = b" | ".join(line.strip() for line in told if line.strip()).decode(errors="replace")
        return f"Its log {self._log_path} says: {text[:LAST_CHARS]}"

    async def kill(self) -> None:
        """Kill the server and all processes that it started."""
        self.child.end_lifeline()
        await self.child.ended()
