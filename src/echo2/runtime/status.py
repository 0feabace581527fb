"""`echo2 status`: the head's last word (status.json) held against the processes that really live."""

from __future__ import annotations

import os
import socket
from typing import Any

from echo2.errors import UserError
from echo2.runtime.rundir import RunDir, read_json


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
    else:
        status["state"] = "running" if head_lives else "the head is not running; continue with `echo2 run ... --resume`"
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
    return [
        {
            "role": entry["role"],
            "id": entry["id"],
            "pid": entry["pid"],
            "host": entry["host"],
            "alive": _is_alive(entry["pid"]) if entry["host"] == here and entry["pid"] else None,
            "doing": entry.get("doing") or "",
        }
        for entry in known
    ]


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
