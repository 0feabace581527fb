"""What the dashboard shows of a run's files: its settings, and the ends of its logs."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from echo2 import config as configuration
from echo2.config.rundir import RunDir
from echo2.core.errors import UserError
from echo2.core.printable import printable_lines
from echo2.transport.tickets import TICKET_PREFIX

#: Bytes of a log that are shown, from its end.
LOG_BYTES = 64 << 10
_LOG = re.compile(r"[\w.-]{1,100}\.log(\.\d{1,2})?", re.ASCII)
#: A ticket in the output of a command that rents machines: whoever has it can join.
_TICKET = re.compile(rf"{TICKET_PREFIX}[A-Za-z0-9_=-]{{40,}}")


def settings(rundir: RunDir) -> list[dict[str, Any]]:
    """Return every setting in file order: its name, its value as JSON, and whether it is the default.

    Raises:
        UserError: this is not a run directory.
    """
    config = rundir.read_config()
    found = []
    for section, key, _, default, _ in configuration.all_fields():
        value = getattr(getattr(config, section), key)
        found.append({"name": f"{section}.{key}", "value": json.dumps(value), "is_default": value == default})
    return found


def log_names(rundir: RunDir) -> list[str]:
    """Return the names of the files in logs/, the one that was written last first."""
    try:
        found = [path for path in rundir.logs.iterdir() if _LOG.fullmatch(path.name) and path.is_file()]
        return [path.name for path in sorted(found, key=lambda path: -path.stat().st_mtime)]
    except FileNotFoundError:
        return []


def log_end(rundir: RunDir, name: str) -> str:
    """Return the last `LOG_BYTES` of a log, as text that nothing obeys. Tickets are left out.

    Raises:
        UserError: there is no such log.
    """
    if name not in log_names(rundir):
        raise UserError(f"There is no log {name!r}.")
    with Path(rundir.logs / name).open("rb") as file:
        size = file.seek(0, 2)
        file.seek(max(0, size - LOG_BYTES))
        text = file.read(LOG_BYTES).decode("utf-8", errors="replace")
    if size > LOG_BYTES:
        text = text.partition("\n")[2]
    lines = (printable_lines(line, LOG_BYTES) for line in text.split("\n"))
    return _TICKET.sub(f"{TICKET_PREFIX}(a ticket)", "\n".join(lines))
