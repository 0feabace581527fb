"""What may leave a run directory: its settings, its logs without tickets, and `echo2 bundle`, which packs what a bug
report needs into one file, without keys, tickets, prompts or completions.
"""

from __future__ import annotations

import json
import os
import re
import tarfile
import time
from collections.abc import Iterator, Mapping
from io import BytesIO
from pathlib import Path
from typing import Any

from echo2 import config as configuration
from echo2.config.rundir import RunDir, read_json
from echo2.core.documents import is_number
from echo2.core.errors import UserError, write_failed
from echo2.core.printable import printable_lines
from echo2.head.ledger.audit import audit
from echo2.transport.tickets import TICKET_PREFIX

#: Bytes of a log that are shown, from its end.
LOG_BYTES = 64 << 10
_LOG = re.compile(r"[\w.-]{1,100}\.log(\.\d{1,2})?", re.ASCII)
#: A ticket in the output of a command that rents machines: whoever has it can join.
_TICKET = re.compile(rf"{TICKET_PREFIX}[A-Za-z0-9_=-]{{40,}}")
#: A name and password in an address.
_CREDENTIALS = re.compile(r"://[^/\s:@\"']+:[^/\s@\"']+@")
#: Environment variables whose values a bundle leaves out, from this length on.
_SECRET_NAME = re.compile(r"KEY|TOKEN|SECRET|PASSW|CREDENTIAL", re.IGNORECASE)
SECRET_CHARS_MIN = 8
#: Newest bytes of metrics.jsonl and of events.jsonl in a bundle.
ROWS_BYTES = 4 << 20
#: Logs of the user's own functions and commands, which may print anything.
OWN_OUTPUT = ("reward", "machines")
#: Keys of events and of status.json whose values quote rollouts and rewards, or are secret while the run goes on.
LEFT_OUT = frozenset({"check_seed", "detail", "traceback"})


def all_settings(rundir: RunDir) -> list[dict[str, Any]]:
    """Return every setting in file order: its name, its value as JSON, and whether it is the default.

    Raises:
        UserError: this is not a run directory.
    """
    config = rundir.read_config()
    settings = []
    for section, key, _, default, _ in configuration.all_fields():
        value = getattr(getattr(config, section), key)
        settings.append({"name": f"{section}.{key}", "value": json.dumps(value), "is_default": value == default})
    return settings


def log_names(rundir: RunDir) -> list[str]:
    """Return the names of the files in logs/, the one that was written last first."""
    try:
        paths = [path for path in rundir.logs.iterdir() if _LOG.fullmatch(path.name) and path.is_file()]
        return [path.name for path in sorted(paths, key=lambda path: -path.stat().st_mtime)]
    except FileNotFoundError:
        return []


def log_end(rundir: RunDir, name: str) -> str:
    """Return the last `LOG_BYTES` of a log, as text that nothing obeys. Tickets are left out.

    Raises:
        UserError: there is no such log.
    """
    if name not in log_names(rundir):
        raise UserError(f"There is no log {name!r}.")
    lines = (printable_lines(line, LOG_BYTES) for line in _end(rundir.logs / name, LOG_BYTES).split("\n"))
    return _TICKET.sub(f"{TICKET_PREFIX}(a ticket)", "\n".join(lines))


def _end(path: Path, bytes_max: int) -> str:
    """Return the last whole lines of a file."""
    with path.open("rb") as file:
        size = file.seek(0, 2)
        file.seek(max(0, size - bytes_max))
        text = file.read(bytes_max).decode("utf-8", errors="replace")
    return text.partition("\n")[2] if size > bytes_max else text


def pack(rundir: RunDir, to: Path, machine: object, environment: Mapping[str, str] = os.environ) -> list[str]:
    """Write the bundle, a .tar.gz, and return the names of its files. `machine`: what is known of this machine and its
    packages. It leaves out keys, tickets, inputs, rollouts, weights, the output of the user's own functions,
    credentials in addresses, and the values of secret environment variables.

    Raises:
        UserError: this is not a run directory, a file of it is damaged, or `to` exists or can't be written.
    """
    rundir.read_config()
    contents = [(name, _without_secrets(text, environment).encode()) for name, text in _contents(rundir, machine)]
    try:
        with tarfile.open(to, "x:gz") as file:
            for name, content in contents:
                entry = tarfile.TarInfo(f"echo2-bundle/{name}")
                entry.size, entry.mtime = len(content), int(time.time())
                file.addfile(entry, BytesIO(content))
    except FileExistsError:
        raise UserError(f"{to} exists. Choose another --to.") from None
    except OSError as error:
        raise write_failed(error, f"Cannot write {to}: {error.strerror}. Choose another --to.") from error
    return [name for name, _ in contents]


def _contents(rundir: RunDir, machine: object) -> Iterator[tuple[str, str]]:
    yield "machine.json", json.dumps(machine, indent=1)
    for path in (rundir.config, rundir.status, rundir.outcome, rundir.summary, rundir.processes):
        if (document := read_json(path)) is not None:
            yield path.name, json.dumps(_harmless(document), indent=1)
    if rundir.ledger.is_file():
        yield "audit.json", json.dumps(audit(rundir.ledger).to_dict(), indent=1)
    yield rundir.metrics.name, "\n".join(json.dumps(_numbers(row)) for row in _newest_rows(rundir.metrics))
    yield rundir.events.name, "\n".join(json.dumps(_harmless(row)) for row in _newest_rows(rundir.events))
    for name in sorted(log_names(rundir)):
        if not name.startswith(OWN_OUTPUT):
            yield f"logs/{name}", log_end(rundir, name)


def _newest_rows(path: Path) -> Iterator[Mapping[str, Any]]:
    """Yield the objects on the last lines of a file; a line that was cut is passed over."""
    for line in _end(path, ROWS_BYTES).split("\n") if path.is_file() else ():
        try:
            row = json.loads(line)
        except ValueError:
            continue
        if isinstance(row, dict):
            yield row


def _numbers(row: Mapping[str, Any]) -> Mapping[str, Any]:
    return {name: value for name, value in row.items() if is_number(value)}


def _harmless(value: Any) -> Any:
    """Return the JSON value without the keys `LEFT_OUT`."""
    if isinstance(value, dict):
        return {name: _harmless(inner) for name, inner in value.items() if name not in LEFT_OUT}
    return [_harmless(inner) for inner in value] if isinstance(value, list) else value


def _without_secrets(text: str, environment: Mapping[str, str]) -> str:
    text = _CREDENTIALS.sub("://(credentials)@", _TICKET.sub(f"{TICKET_PREFIX}(a ticket)", text))
    for name, content in environment.items():
        value = content.strip()  # a file's last line break may be a part of it, and is none of what uses it
        if _SECRET_NAME.search(name) and len(value) >= SECRET_CHARS_MIN:
            text = text.replace(value, f"(${name})").replace(json.dumps(value)[1:-1], f"(${name})")
    return text.replace(str(Path.home()), "~") if len(str(Path.home())) > 1 else text
