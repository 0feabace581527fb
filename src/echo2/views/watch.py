"""Sends the state of runs, as plain values, to all open pages. Runs are read only while a page is open, once for all
pages. However long a run is, a chart has at most `POINTS_MAX` points.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from bisect import bisect_left
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from heapq import nsmallest
from itertools import groupby
from pathlib import Path
from typing import Any

import msgspec

from echo2.core.background import spawn
from echo2.core.errors import UserError
from echo2.head.fleet.decide.measurements import CAUSES
from echo2.views.run_view import Row, RunView
from echo2.views.status import failure_lines, fleet_words, strangers_lines, trust_rows

log = logging.getLogger(__name__)

Values = Sequence[float]
Column = list[float | None]

#: Maximum number of points of a line on a chart.
POINTS_MAX = 500
#: Prefixes of metrics whose names depend on the run: held-out sets, and pass@k. Number of them that a page gets.
OPEN_PREFIXES = ("eval/accuracy/", "eval/pass@")
OPEN_MAX = 16

#: Workers shown per page of the fleet; waits and decisions that are listed individually.
WORKERS_SHOWN, WAITS_SHOWN, DECISIONS_SHOWN = 50, 20, 20
#: Seconds between two reads of the run directories; longer if reading would take more than this share of a core.
LOOK_SECONDS, LOOK_SHARE = 0.5, 0.1
#: Minimum seconds between two bills, which read the ledger. A bill is only made if a step has ended since the last.
BILL_SECONDS = 5.0
#: Seconds without an event after which a keep-alive is sent.
ALIVE_SECONDS = 15.0


def run_data(view: RunView) -> dict[str, Any]:
    """Return the state of the run: everything on the page except charts, costs and rollouts."""
    status = view.status
    workers = _workers(status)
    trusted = trust_rows(status) if status else []
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
        "decisions": status.get("decisions", [])[:DECISIONS_SHOWN],
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
    folded = words.casefold()
    matches = [worker for worker in _workers(view.status) if folded in _searched(worker)]
    shown = sorted(matches, key=_place)[first : first + WORKERS_SHOWN]
    return {"num_found": len(matches), "workers": [_worker(worker) for worker in shown]}


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
    forecast_left = None if forecast is None else {"usd": forecast.usd, "seconds": forecast.seconds}
    try:
        bill = view.cost()
    except UserError:  # no head has saved accounts yet
        return {"usd": None, "by_cause": {}, "usd_per_step": None, "forecast": forecast_left}
    total = bill["total"]
    return {
        "usd": total["usd"],
        "by_cause": total["by_cause"],
        "usd_per_step": bill["usd_per_step"],
        "forecast": forecast_left,
    }


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


@dataclass(frozen=True, slots=True)
class PageEvent:
    """A server-sent event. `whole`: complete, for any page; `news`: shorter, for a page that got number `since`."""

    number: int
    whole: bytes
    news: bytes
    since: int

    def after(self, number: int) -> bytes:
        """Return what to send to a page that got all events up to this number."""
        return self.news if number >= self.since else self.whole


class Watch:
    """The newest event of each kind about each run. A slow page skips superseded events."""

    def __init__(self, directories: Sequence[Path]) -> None:
        self.views = [RunView.read(directory) for directory in directories]
        self._newest = self.views
        self._points = [ChartPoints() for _ in self.views]
        self._messages: dict[tuple[str, int], PageEvent] = {}  # by kind and run
        self._number = 0
        self._billed_at = [float("-inf")] * len(self.views)
        self._is_unbilled = [True] * len(self.views)  # a step has ended since
        self._news = asyncio.Condition()
        self.num_listeners = 0  # pages that are open
        self._looking: asyncio.Task[None] | None = None
        self._is_over = False

    def stop(self) -> None:
        """End the event streams of all pages, within `LOOK_SECONDS`. Safe in a signal handler."""
        self._is_over = True

    def newest(self) -> list[RunView]:
        """Return the current state of the runs, for occasional requests. Not for two threads at once."""
        self._newest = [view.newer() for view in self._newest]
        return self._newest

    async def events(self) -> AsyncIterator[bytes]:
        """Yield server-sent events: the current state of all runs, then each change."""
        self.num_listeners += 1
        if self._looking is None:
            self._looking = spawn(self._look(), self._looking_failed)
        last_sent = 0
        try:
            while not self._is_over and self._looking is not None:
                newer = [message.after(last_sent) for message in self._messages.values() if message.number > last_sent]
                last_sent = self._number
                yield b"".join(newer) or b": alive\n\n"
                await self._wait(last_sent)
        finally:
            self.num_listeners -= 1

    async def _wait(self, number: int) -> None:
        """Wait for an event after number `number`, but at most `ALIVE_SECONDS`."""
        async with self._news:
            try:
                async with asyncio.timeout(ALIVE_SECONDS):
                    await self._news.wait_for(lambda: self._is_over or self._number > number)
            except TimeoutError:
                pass  # the caller sends a keep-alive

    def _looking_failed(self, error: Exception) -> None:
        """End the streams of all pages: each asks again, and that reads the runs again."""
        log.error("the run directories are no longer read", exc_info=error)
        self._looking = None

    async def _look(self) -> None:
        """Read the runs again and again while a page is open. The result of every read is published, because the next
        read reports only what differs from it."""
        while self.num_listeners:
            try:
                seconds, changed = await asyncio.to_thread(self._read)
            except Exception:  # open pages keep showing the last state; the reason is in the log
                log.exception("the run directories could not be read")
                seconds, changed = 0.0, []
                self._messages.clear()  # the next read sends everything again, in full
                self._points = [ChartPoints() for _ in self.views]
            for kind, index, whole, news in changed:
                self._number += 1
                before = self._messages.get((kind, index))
                since = self._number if before is None else before.number
                self._messages[kind, index] = PageEvent(self._number, whole, news, since)
            if changed or self._is_over:
                async with self._news:
                    self._news.notify_all()
            await asyncio.sleep(max(LOOK_SECONDS, seconds / LOOK_SHARE))
        self._looking = None  # no await since `num_listeners` was 0: no page is missed

    def _read(self) -> tuple[float, list[tuple[str, int, bytes, bytes]]]:
        """Return the CPU seconds used, and (kind, run, whole, news) of each event that has changed."""
        began, messages = time.thread_time(), []
        for index, before in enumerate(self.views):
            view = self.views[index] = before.newer()
            has_steps = view.rows is not before.rows or ("steps", index) not in self._messages
            if has_steps:
                messages.append(self._steps(index, view))
                self._is_unbilled[index] = True
            if has_steps or view.status is not before.status or view.problem != before.problem:
                messages.append(_message("run", index, run_data(view)))
            if self._is_unbilled[index] and time.monotonic() - self._billed_at[index] > BILL_SECONDS:
                self._is_unbilled[index] = False
                self._billed_at[index] = time.monotonic()
                messages.append(_message("cost", index, cost_data(view)))
        sent = {key: message.whole for key, message in self._messages.items()}
        changed = [one for one in messages if sent.get(one[:2]) != one[2]]
        return time.thread_time() - began, changed

    def _steps(self, index: int, view: RunView) -> tuple[str, int, bytes, bytes]:
        points = self._points[index]
        num_unchanged = points.take(view.rows)
        whole = _event("steps", index, points.tail(0))
        return "steps", index, whole, _event("steps", index, points.tail(num_unchanged)) if num_unchanged else whole


def _message(kind: str, index: int, data: Any) -> tuple[str, int, bytes, bytes]:
    whole = _event(kind, index, data)
    return kind, index, whole, whole


def _event(kind: str, index: int, data: Any) -> bytes:
    return f"event: {kind}\ndata: ".encode() + msgspec.json.encode({"run": index, **data}) + b"\n\n"


def _mean(values: Values) -> float:
    return math.fsum(values) / len(values)


def _last(values: Values) -> float:
    return values[-1]


#: By metric: how the values of several steps become one point.
COLUMNS: Mapping[str, Callable[[Values], float]] = {
    "eval/accuracy": _last,
    "reward/mean": _mean,
    "reward/frac_zero_std": _mean,
    "off_policy/mean": _mean,
    "off_policy/max": max,
    "off_policy/bound": max,
    "learner/idle_ratio": _mean,
    "learner/idle_predicted": _mean,
    "time/step": _mean,
    "time/wait_for_batch": _mean,
    "time/teacher": _mean,
    "time/teacher_wait": _mean,
    "distill/reverse_kl/mean": _mean,
    **{f"wait/{cause}": _mean for cause in CAUSES},
    "fleet/rate": _mean,
    "fleet/needed_rate": _mean,
    "workers/active": _last,
    "broadcast/t_bcast": _mean,
    "cost/cum_usd": _last,
    "cost/wasted_usd": _last,
    "entropy/mean": _mean,
    "loss/mean": _mean,
    "optim/grad_norm": _mean,
    "ess": _mean,
    "clip_ratio/mean": _mean,
    "mismatch_kl/mean": _mean,
    "mismatch/abs_log_ratio": _mean,
    "completions/mean_length": _mean,
    "completions/clipped_ratio": _mean,
    "eval/mean_length": _last,
}


class ChartPoints:
    """The points of a run's charts. All points cover the same number of steps, a power of two, so that points stay in
    place while the run continues. A new row recomputes only the point that it falls into.
    """

    def __init__(self) -> None:
        self.stride = 1  # steps per point
        self._rows: Sequence[Row] = ()
        self._steps: list[int] = []  # the last step of each point
        self._seconds: list[float] = []  # since the first step began, of each point; never falling
        self._began = 0.0
        self._columns: dict[str, Column] = {name: [] for name in COLUMNS}
        self._shown: list[str] = []

    def take(self, rows: Sequence[Row]) -> int:
        """Update the points to these rows, in ascending order of steps. Return how many of the leading points are
        unchanged; 0 means that a page needs all points, for example because other columns are shown."""
        last = rows[-1]["step"] if rows else 0
        stride = 1 << max(0, math.ceil(math.log2((last + 1) / POINTS_MAX)))
        num_unchanged = self._first_changed(rows) if stride == self.stride else 0
        first = self._first_row(rows, num_unchanged)
        began, named = _began(rows), _open_names(rows[first:]) - self._columns.keys()
        if began != self._began or named:
            num_unchanged = first = 0
            self._columns |= {name: [] for name in sorted(named)}
        self.stride, self._rows, self._began = stride, rows, began
        del self._steps[num_unchanged:], self._seconds[num_unchanged:]
        for column in self._columns.values():
            del column[num_unchanged:]
        for _, group in groupby(rows[first:], self._place_of):
            self._append(list(group))
        shown = [name for name, values in self._columns.items() if _is_shown(name, values)]
        hidden = {*sorted(name for name in shown if name.startswith(OPEN_PREFIXES))[OPEN_MAX:]}
        shown = [name for name in shown if name not in hidden]
        was_shown, self._shown = self._shown, shown
        return num_unchanged if shown == was_shown else 0

    def _first_row(self, rows: Sequence[Row], num_unchanged: int) -> int:
        """Return the index of the first row that is in none of the first `num_unchanged` points."""
        if not num_unchanged:
            return 0
        return bisect_left(rows, self._place(self._steps[num_unchanged - 1]) + 1, key=self._place_of)

    def _append(self, point: Sequence[Row]) -> None:
        self._steps.append(point[-1]["step"])
        before = self._seconds[-1] if self._seconds else 0.0
        seconds = _numbers("time/unix", point)[-1:] or [0.0]
        self._seconds.append(max(before, float(f"{seconds[0] - self._began:.6g}")))
        for name, values in self._columns.items():
            values.append(_point(name, COLUMNS.get(name, _last), point))

    def tail(self, first: int) -> dict[str, Any]:
        """Return the points from index `first` on, as they are sent to a page."""
        columns = {name: self._columns[name][first:] for name in self._shown}
        points = {"steps": self._steps[first:], "seconds": self._seconds[first:]}
        return {"from": first, **points, "stride": self.stride, "columns": columns}

    def _place(self, step: int) -> int:
        return -(-step // self.stride)

    def _place_of(self, row: Row) -> int:
        return self._place(row["step"])

    def _first_changed(self, rows: Sequence[Row]) -> int:
        """Return the index of the first point whose rows have changed. Unchanged rows are the same objects."""
        pairs = enumerate(zip(self._rows, rows, strict=False))
        same = next((number for number, (old, new) in pairs if old is not new), min(len(self._rows), len(rows)))
        changed = [self._place_of(each[same]) for each in (self._rows, rows) if same < len(each)]
        if not changed:
            return len(self._steps)
        return bisect_left(self._steps, min(changed), key=self._place)


def _is_shown(name: str, values: Iterable[float | None]) -> bool:
    """Whether a column has any value; for a cause of waiting (`wait/...`), whether the learner waited for it at all."""
    return any(values) if name.startswith("wait/") else any(value is not None for value in values)


def _point(name: str, merge: Callable[[Values], float], rows: Iterable[Row]) -> float | None:
    values = _numbers(name, rows)
    return float(f"{merge(values):.6g}") if values else None


def _numbers(name: str, rows: Iterable[Row]) -> list[float]:
    return [value for row in rows if isinstance(value := row.get(name), int | float) and math.isfinite(value)]


def _began(rows: Iterable[Row]) -> float:
    """Return the Unix time at which the first step began; 0 if no row has a time."""
    first = next((row for row in rows if _numbers("time/unix", [row])), None)
    return 0.0 if first is None else first["time/unix"] - sum(_numbers("time/step", [first]))


def _open_names(rows: Iterable[Row]) -> set[str]:
    return {name for row in rows for name in row if name.startswith(OPEN_PREFIXES)}
