"""What the page is told of a run, as plain values: numbers thinned out for the charts, and how things stand."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from echo2.control.head.learner_waits import CAUSES
from echo2.errors import UserError
from echo2.views import trust
from echo2.views.display import failure_lines, fleet_line, strangers_lines
from echo2.views.metrics_file import Row
from echo2.views.run_view import RunView

#: Points of a line on a chart, at most.
POINTS_MAX = 500
#: Workers and waits that are shown one by one; of the others, how many there are.
WORKERS_SHOWN, WAITS_SHOWN = 200, 20

Values = Sequence[float]


def _mean(values: Values) -> float:
    return math.fsum(values) / len(values)


def _last(values: Values) -> float:
    return values[-1]


#: By metric: what stands for several steps that share a point.
COLUMNS: Mapping[str, Callable[[Values], float]] = {
    "eval/accuracy": _last,
    "reward/mean": _mean,
    "off_policy/mean": _mean,
    "off_policy/max": max,
    "off_policy/bound": max,
    "learner/idle_ratio": _mean,
    "learner/idle_predicted": _mean,
    "time/step": _mean,
    "time/wait_for_batch": _mean,
    **{f"wait/{cause}": _mean for cause in CAUSES},
    "fleet/rate": _mean,
    "fleet/needed_rate": _mean,
    "workers/active": _last,
    "broadcast/t_bcast": _mean,
    "cost/cum_usd": _last,
    "cost/wasted_usd": _last,
    "entropy/mean": _mean,
}


def chart_data(rows: Sequence[Row]) -> dict[str, Any]:
    """Columns over steps. Each point stands for equally many steps, a power of two of them, so that points keep their
    place as a run goes on; a point's step is its last.
    """
    last = rows[-1]["step"] if rows else 0
    stride = 1 << max(0, math.ceil(math.log2((last + 1) / POINTS_MAX)))
    points: dict[int, list[Row]] = {}
    for row in rows:
        points.setdefault(-(-row["step"] // stride), []).append(row)
    columns = {name: [_point(name, merge, point) for point in points.values()] for name, merge in COLUMNS.items()}
    return {
        "steps": [point[-1]["step"] for point in points.values()],
        "stride": stride,
        "columns": {name: values for name, values in columns.items() if _is_shown(name, values)},
    }


def _is_shown(name: str, values: Iterable[float | None]) -> bool:
    """Whether it is known; and of what the learner may wait for, what it did wait for."""
    return any(values) if name.startswith("wait/") else any(value is not None for value in values)


def _point(name: str, merge: Callable[[Values], float], rows: Iterable[Row]) -> float | None:
    found = [value for row in rows if isinstance(value := row.get(name), int | float) and math.isfinite(value)]
    return float(f"{merge(found):.6g}") if found else None


def run_data(view: RunView) -> dict[str, Any]:
    """How the run stands: everything on the page that is no chart and no rollout."""
    status = view.status
    now, workers = status.get("time", 0.0), status.get("workers", [])
    heads = [process for process in status.get("processes", []) if process["role"] == "head"]
    if any(head["alive"] is False for head in heads):  # what they do now nobody knows
        workers = [{**worker, "attends": False} for worker in workers]
    shown = sorted(workers, key=_place)[:WORKERS_SHOWN]
    trusted = trust.rows(status) if status else []
    return {
        "name": view.name,
        "directory": str(view.rundir.path),
        "state": view.state,
        "version": view.version,
        "max_steps": view.max_steps,
        "max_staleness": status.get("max_staleness"),
        "published": status.get("published"),
        "checkpoint": status.get("checkpoint"),
        "time": now,
        "fleet": fleet_line(status.get("fleet")),
        "notes": failure_lines(status) + strangers_lines(status),
        "waits": [
            {"who": wait.waiter, "for": wait.waits_for, "reason": wait.reason, "since": wait.since, "until": wait.until}
            for wait in view.waits[:WAITS_SHOWN]
        ],
        "num_waits": len(view.waits),
        "processes": [process for process in status.get("processes", []) if process["role"] != "worker"],
        "workers": [_worker(worker) for worker in shown],
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


def cost_data(view: RunView) -> dict[str, Any]:
    """Dollars by cause, and what they will be at the end."""
    forecast = view.forecast()
    left = None if forecast is None else {"usd": forecast.usd, "seconds": forecast.seconds}
    try:
        bill = view.cost()
    except UserError:  # no head has saved accounts yet
        return {"usd": None, "by_cause": {}, "usd_per_step": None, "forecast": left}
    total = bill["total"]
    return {"usd": total["usd"], "by_cause": total["by_cause"], "usd_per_step": bill["usd_per_step"], "forecast": left}


def _place(worker: Mapping[str, Any]) -> tuple[bool, bool, float, str]:
    """The suspected first, then those at work, the fastest before the others."""
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
