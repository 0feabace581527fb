"""`echo2 status` and `echo2 trust`: the head's last status.json, compared with the processes that are alive."""

from __future__ import annotations

import argparse
import json
import os
import socket
import time
from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from echo2.config.rundir import RunDir, newest_checkpoint, read_json
from echo2.core.disk import FLOOR_BYTES, free_bytes
from echo2.core.errors import UserError
from echo2.core.printable import printable

#: The largest process id of Linux.
PID_MAX = 1 << 22
#: A head on another machine (run directory copied or shared) counts as gone after this time without a new status.
SILENT_SECONDS = 60.0


def read_status(rundir: RunDir) -> dict[str, Any]:
    """Return the head's status, plus `state`, `goes_on` (whether a head serves the run or is being started) and
    `processes` (role, id, pid and whether each is alive).

    Raises:
        UserError: no run was started in this directory.
    """
    status: dict[str, Any] | None = read_json(rundir.status)
    if status is None:
        raise UserError(f"{rundir.path} has no status yet: no head was started there. `echo2 run` starts one.")
    return live_status(rundir, status)


def live_status(rundir: RunDir, told: Mapping[str, Any], with_workers: bool = True) -> dict[str, Any]:
    """Return the status that the head `told`, with the current state and processes of the run. Worker processes, of
    which there may be thousands, are included only with `with_workers`. Where no head serves the run, nobody waits, no
    fleet is wanted, and the newest checkpoint is the one on the disk: the learner may have saved it last.

    Raises:
        UserError: a file of the run directory is damaged.
    """
    processes = _processes(rundir, told, with_workers)
    head = processes[0]  # the head that wrote the status; a successor may be starting
    lives = {process["role"] for process in processes if process["alive"]}
    outcome = read_json(rundir.outcome)
    is_going_on = outcome is None and (
        head["alive"] or (head["alive"] is None and time.time() - told["time"] < SILENT_SECONDS)
    )
    if outcome is not None:
        state = f"{outcome['kind']}: {outcome['reason']}"
    elif is_going_on:
        state = f"paused: {told['paused']}" if told.get("paused") else "running"
    elif head["alive"] is None:
        state = f"no news from the head on {head['host']} for {SILENT_SECONDS:.0f} s"
    elif "supervisor" in lives:
        room = free_bytes(rundir.path) >= FLOOR_BYTES
        state = "starting" if room else f"paused: no room on the disk that holds {rundir.path}"
    else:
        state = "the head is not running; continue with `echo2 run ... --resume`"
    goes_on = is_going_on or (outcome is None and "supervisor" in lives)
    found = {**told, "directory": str(rundir.path), "processes": processes, "state": state, "goes_on": goes_on}
    found["deaths"] = [] if outcome is not None else _deaths(rundir)
    return found if is_going_on else {**found, "waits": [], "fleet": None, "checkpoint": _newest(rundir, told)}


def _deaths(rundir: RunDir) -> list[dict[str, Any]]:
    """Return the local processes that died and were started again, and have come no further since."""
    return [entry for entry in read_json(rundir.processes) or [] if entry.get("deaths")]


def _newest(rundir: RunDir, told: Mapping[str, Any]) -> int | None:
    """Return the newest checkpoint: on this disk, or told by a learner that saves elsewhere."""
    known = (newest_checkpoint(rundir.checkpoints), told.get("checkpoint"))
    return max((version for version in known if version is not None and version >= 0), default=None)


def _processes(rundir: RunDir, status: Mapping[str, Any], with_workers: bool) -> list[dict[str, Any]]:
    """Return all known processes: those connected to the head, and those that a supervisor on this machine started."""
    here = socket.gethostname()
    known: list[dict[str, Any]] = [{"role": "head", "id": "head", **status["head"], "doing": "serving the run"}]
    if status["learner"] is not None:
        known.append({"role": "learner", "id": "learner", **status["learner"]})
    pids = {entry["pid"] for entry in (*known, *status["workers"]) if entry.get("host") == here}
    if with_workers:
        known += [{"role": "worker", **worker} for worker in status["workers"]]
    for entry in read_json(rundir.processes) or []:
        if entry["pid"] not in pids and (with_workers or entry["role"] != "worker"):
            known.append({"role": entry["role"], "id": entry["name"], "pid": entry["pid"], "host": here, "doing": ""})
    return [_process(entry, here) for entry in known]


def _process(entry: dict[str, Any], here: str) -> dict[str, Any]:
    is_pid = 0 < (entry["pid"] or 0) <= PID_MAX  # workers report their own
    alive = _is_alive(entry["pid"]) if entry["host"] == here and is_pid else None
    doing = "stands by" if entry.get("standby") else entry.get("doing") or ""
    named = {key: entry[key] for key in ("role", "id", "pid", "host")}
    return {**named, "alive": alive, "doing": "" if alive is False else doing, "weights": _weights(entry)}


def _weights(entry: dict[str, Any]) -> str:
    """Describe a worker's weights in a few words: `v11, v12 63%, up 3.1 MB, down 9.8 MB`."""
    words = [f"v{entry['installed'].rpartition('.')[2]}"] if entry.get("installed") else []
    if (fetching := entry.get("fetching")) is not None:
        share = fetching["bytes_stored"] / max(1, fetching["bytes_total"])
        words.append(f"v{fetching['version']} {share:.0%}")
    for word, key in (("up", "bytes_sent"), ("down", "bytes_received")):
        if entry.get(key):
            words.append(f"{word} {entry[key] / 1e6:.1f} MB")
    if entry.get("mismatch") is not None:
        words.append(f"logprobs {entry['mismatch']:.2g} nats from the learner's")
    if entry.get("suspected"):
        words.append(f"suspected: {entry['suspected']}")
    return ", ".join(words)


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass  # it is alive, but belongs to another user
    return True


#: Characters of a reason in the table; `--json` has them whole.
REASON_CHARS = 160


def trust_command(options: argparse.Namespace) -> int:
    """Print the results of checks by ticket. Raises as `read_status`."""
    found = trust_rows(read_status(RunDir(options.directory)))
    if options.json:
        print(json.dumps(found))
    else:
        show_trust(found, Console())
    return 0


def trust_rows(status: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return a row for each ticket of strangers that delivered groups, the least trusted first. Times are in seconds
    before the status.
    """
    found = []
    for ticket, trust in (status.get("trust") or {}).items():
        history = [{"seconds_ago": status["time"] - at, "what": what} for at, what in trust["history"]]
        found.append({"ticket": ticket, **trust, "history": history})
    return sorted(found, key=lambda row: (row["score"], row["ticket"]))


def show_trust(found: list[dict[str, Any]], console: Console) -> None:
    """Print the rows as a table."""
    if not found:
        console.print("no stranger has delivered a group")
        return
    table = Table(box=None, pad_edge=False)
    for name in ("ticket", "trust", "groups", "passed", "failed", "no verdict", "stands", "last"):
        table.add_column(name, no_wrap=name != "last")
    for row in found:
        stands = "in quarantine" if row["is_quarantined"] else "new" if row["is_new"] else "trusted"
        last = row["history"][-1] if row["history"] else None
        told = (
            "" if last is None else f"{last['seconds_ago']:.0f} s ago: {escape(printable(last['what'], REASON_CHARS))}"
        )
        numbers = (row[name] for name in ("num_groups", "num_passed", "num_failed", "num_missed"))
        table.add_row(escape(printable(row["ticket"])), f"{row['score']:.2f}", *map(str, numbers), stands, told)
    console.print(table, highlight=False)
