"""`echo2 status`: the head's last word (status.json) held against the processes that really live."""

from __future__ import annotations

import os
import socket
from typing import Any

from echo2.disk import FLOOR_BYTES, free_bytes
from echo2.errors import UserError
from echo2.rundir import RunDir, read_json

#: Linux's largest.
PID_MAX = 1 << 22


def read_status(rundir: RunDir) -> dict[str, Any]:
    """The head's status, plus `state`, and `processes` with role, id, pid and whether each lives.

    Raises:
        UserError: no run was started in this directory.
    """
    status: dict[str, Any] | None = read_json(rundir.status)
    if status is None:
        raise UserError(f"{rundir.path} has no status yet: no head was started there. `echo2 run` starts one.")
    status["directory"] = str(rundir.path)
    status["processes"] = _processes(rundir, status)
    head_lives = any(p["role"] == "head" and p["alive"] for p in status["processes"])
    outcome = read_json(rundir.outcome)
    if outcome is not None:
        status["state"] = f"{outcome['kind']}: {outcome['reason']}"
    elif head_lives:
        status["state"] = f"paused: {status['paused']}" if status.get("paused") else "running"
    else:
        status["state"] = "the head is not running; continue with `echo2 run ... --resume`"
        if any(p["role"] == "supervisor" and p["alive"] for p in status["processes"]):
            room = free_bytes(rundir.path) >= FLOOR_BYTES
            status["state"] = "starting" if room else f"paused: no room on the disk that holds {rundir.path}"
    if not head_lives:
        status["waits"] = []
    return status


def _processes(rundir: RunDir, status: dict[str, Any]) -> list[dict[str, Any]]:
    """Every process known: those connected to the head, and those a supervisor on this machine started."""
    here = socket.gethostname()
    known: list[dict[str, Any]] = [{"role": "head", "id": "head", **status["head"], "doing": "serving the run"}]
    if status["learner"] is not None:
        known.append({"role": "learner", "id": "learner", **status["learner"]})
    known += [{"role": "worker", **worker} for worker in status["workers"]]
    pids = {entry["pid"] for entry in known if entry.get("host") == here}
    for entry in read_json(rundir.processes) or []:
        if entry["pid"] not in pids:
            known.append({"role": entry["role"], "id": entry["name"], "pid": entry["pid"], "host": here, "doing": ""})
    return [_process(entry, here) for entry in known]


def _process(entry: dict[str, Any], here: str) -> dict[str, Any]:
    alive = _is_alive(entry["pid"]) if entry["host"] == here and _is_pid(entry["pid"]) else None
    doing = "stands by" if entry.get("standby") else entry.get("doing") or ""
    named = {key: entry[key] for key in ("role", "id", "pid", "host")}
    return {**named, "alive": alive, "doing": "" if alive is False else doing, "weights": _weights(entry)}


def _weights(entry: dict[str, Any]) -> str:
    """A worker's weights in a few words: `v11, v12 63 %, up 3.1 MB, down 9.8 MB`."""
    words = [f"v{entry['installed'].rpartition('.')[2]}"] if entry.get("installed") else []
    if (fetching := entry.get("fetching")) is not None:
        share = fetching["bytes_stored"] / max(1, fetching["bytes_total"])
        words.append(f"v{fetching['version']} {share:.0%}")
    for word, key in (("up", "bytes_sent"), ("down", "bytes_received")):
        if entry.get(key):
            words.append(f"{word} {entry[key] / 1e6:.1f} MB")
    if entry.get("suspected"):
        words.append(f"suspected: {entry['suspected']}")
    return ", ".join(words)


def _is_pid(said: int | None) -> bool:
    """A worker says its own pid, and may say anything."""
    return said is not None and 0 < said <= PID_MAX


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass  # it lives, and is somebody else's
    return True
