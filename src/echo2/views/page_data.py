"""The dashboard's data on the state of a run, as plain values; `chart_points.py` has the data of the charts."""

from __future__ import annotations

from collections.abc import Mapping
from heapq import nsmallest
from typing import Any

from echo2.errors import UserError
from echo2.views import trust
from echo2.views.display import failure_lines, fleet_words, strangers_lines
from echo2.views.run_view import RunView

#: Workers shown per page of the fleet, and waits that are listed individually.
WORKERS_SHOWN, WAITS_SHOWN = 50, 20


def run_data(view: RunView) -> dict[str, Any]:
    """Return the state of the run: everything on the page except charts, costs and rollouts."""
    status = view.status
    workers = _workers(status)
    trusted = trust.rows(status) if status else []
    return {
        "name": view.name,
        "directory": str(view.rundir.path),
        "state": view.state,
        "goes_on": bool(view.status.get("goes_on")),
        "version": view.version,
        "max_steps": view.max_steps,
        "max_staleness": status.get("max_staleness"),
        "published": status.get("published"),
        "checkpoint": status.get("checkpoint"),
        "time": status.get("time", 0.0),
        "fleet": fleet_words(status.get("fleet")),
        "notes": failure_lines(status) + strangers_lines(status),
        "waits": [
            {"who": wait.waiter, "for": wait.waits_for, "reason": wait.reason, "since": wait.since, "until": wait.until}
            for wait in view.waits[:WAITS_SHOWN]
        ],
        "num_waits": len(view.waits),
        "workers": [_worker(worker) for worker in nsmallest(WORKERS_SHOWN, workers, key=_place)],
        "num_workers": len(workers),
        "num_idle": sum(map(_is_idle, workers)),
        "num_current": sum(1 for worker in workers if _version(worker) == status.get("published")),
        "t_bcast": status.get("broadcast", {}).get("broadcast/t_bcast"),
        "origin_bytes": status.get("broadcast", {}).get("origin_bytes"),
        "peer_bytes": status.get("broadcast", {}).get("peer_bytes"),
        "trust": [
            {name: row[name] for name in ("ticket", "score", "num_groups", "num_passed", "num_failed")}
            for row in trusted
        ],
    }


def fleet_page(view: RunView, first: int, words: str) -> dict[str, Any]:
    """Return `WORKERS_SHOWN` workers from index `first` on, of those whose data contain `words` (see `_searched`)."""
    wanted = words.casefold()
    found = [worker for worker in _workers(view.status) if wanted in _searched(worker)]
    shown = sorted(found, key=_place)[first : first + WORKERS_SHOWN]
    return {"num_found": len(found), "workers": [_worker(worker) for worker in shown]}


def _searched(worker: Mapping[str, Any]) -> str:
    names = ("id", "host", "device", "engine", "doing", "suspected")
    return " ".join(str(worker.get(name) or "") for name in names).casefold()


def _workers(status: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the workers of the status. If the head is gone, none is shown as attending."""
    workers: list[Mapping[str, Any]] = status.get("workers", [])
    heads = [process for process in status.get("processes", []) if process["role"] == "head"]
    if any(head["alive"] is False for head in heads):
        return [{**worker, "attends": False} for worker in workers]
    return workers


def cost_data(view: RunView) -> dict[str, Any]:
    """Return the dollars by cause so far, and the forecast for the end of the run."""
    forecast = view.forecast()
    left = None if forecast is None else {"usd": forecast.usd, "seconds": forecast.seconds}
    try:
        bill = view.cost()
    except UserError:  # no head has saved accounts yet
        return {"usd": None, "by_cause": {}, "usd_per_step": None, "forecast": left}
    total = bill["total"]
    return {"usd": total["usd"], "by_cause": total["by_cause"], "usd_per_step": bill["usd_per_step"], "forecast": left}


def _place(worker: Mapping[str, Any]) -> tuple[bool, bool, float, str]:
    """Sort key: suspected workers first, then active before standby ones, then the fastest first."""
    return not worker.get("suspected"), bool(worker.get("standby")), -(worker.get("rate") or 0.0), worker["id"]


def _is_idle(worker: Mapping[str, Any]) -> bool:
    return bool(worker.get("attends")) and not worker.get("standby") and not worker.get("leases")


def _version(worker: Mapping[str, Any]) -> int | None:
    number = str(worker.get("installed") or "").rpartition(".")[2]
    return int(number) if number.isdecimal() else None


def _worker(worker: Mapping[str, Any]) -> dict[str, Any]:
    fetching = worker.get("fetching")
    names = ("id", "host", "device", "engine", "rate", "price_usd_per_hour", "is_own", "suspected", "mismatch")
    return {
        **{name: worker.get(name) for name in names},
        "doing": "stands by" if worker.get("standby") else worker.get("doing") or "",
        "is_idle": _is_idle(worker),
        "attends": bool(worker.get("attends")),
        "version": _version(worker),
        "fetching": None
        if fetching is None
        else {"version": fetching["version"], "share": fetching["bytes_stored"] / max(1, fetching["bytes_total"])},
        "sources": worker.get("sources", []),
        "sent": worker.get("bytes_sent", 0),
        "received": worker.get("bytes_received", 0),
    }
