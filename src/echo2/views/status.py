"""The text of a run's status: who waits for whom, what failed, the fleet, strangers and the trust in them."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from echo2.config.rundir import RunDir
from echo2.core.errors import counted
from echo2.core.printable import LINE_CHARS_MAX, printable
from echo2.views.run_view import read_status

#: State shown for a process, by whether it is alive; None: it runs on another machine.
PROCESS_STATES = {True: "[green]alive[/green]", False: "[red]gone[/red]", None: "remote"}
#: Maximum length of a reason or state; echo2's own have at most half of that.
REASON_CHARS = 1000
#: Characters of a reason in the table; `--json` has them whole.
TRUST_REASON_CHARS = 160
_LOST = ("rollout or group", "rollouts or groups")
#: By kind of failure: one and several of what failed, how, and the log that lists every failure.
FAILURE_WORDS = {
    "reward_failed": (*_LOST, "lost to your reward function", "reward.log"),
    "reward_retried": ("call", "calls", "of your reward function raised, then tried again", "reward.log"),
    "judge_failed": (*_LOST, "lost because the judge gave no verdict", "head.log"),
    "judge_retried": ("request", "requests", "to the judge brought no verdict, then tried again", "head.log"),
    "environment_failed": (*_LOST, "lost to your environment", "head.log"),
    "bad_task": ("group", "groups", "lost to rows that are not valid tasks", "head.log"),
    "prompt_too_long": ("group", "groups", "with a prompt that is too long for the model", "head.log"),
    "log_unfit": ("group", "groups", "with logged rollouts that the model cannot read", "head.log"),
    "snapshot_refused": ("snapshot", "snapshots", "refused by a worker", "head.log"),
    "engine_failed": ("lease", "leases", "failed in the worker's engine", "head.log"),
}


def fleet_words(fleet: dict[str, Any] | None) -> list[str]:
    """Describe whether the workers suffice, and the predicted and measured idle ratio of the learner."""
    if not fleet:
        return []
    words = [f"{fleet['active']} active"]
    if fleet["standby"]:
        words.append(f"{fleet['standby']} standing by")
    if fleet["rented"]:
        words.append(f"{len(fleet['rented'])} rented")
    needed = fleet["needed_rate"]
    rates = "" if needed is None else f": {_rate(fleet['rate'])} of {_rate(needed)} rollouts/s needed"
    words.append(f"{fleet['text']}{rates}")
    if fleet["idle_predicted"] is not None and fleet["idle_ratio"] is not None:
        steps = fleet.get("idle_steps", 1)
        over = f" over the last {steps} steps" if steps > 1 else ""
        words.append(f"learner idle {fleet['idle_ratio']:.1%}{over}, predicted {fleet['idle_predicted']:.1%}")
    return words


def _rate(rate: float) -> str:
    """Write a rate with three digits that count: `0.125`, `17,500`."""
    return f"{float(f'{rate:.3g}'):,.12g}"


def strangers_lines(status: Mapping[str, Any]) -> list[str]:
    """Return lines about skipped evaluations, the prices strangers ask, and the strangers that were turned away."""
    lines = []
    if versions := sorted(status.get("not_evaluated") or {}, key=int):
        names = ", ".join(versions)
        lines.append(f"not evaluated: version {names}: no machine of yours is connected; run `echo2 eval DIR`")
    asks = {w["id"]: w["price_usd_per_hour"] for w in status.get("workers", []) if w.get("is_own") is False}
    if asks := {worker_id: price for worker_id, price in asks.items() if price}:
        lines.append("strangers ask: " + ", ".join(f"{worker_id} ${price:g}/h" for worker_id, price in asks.items()))
    return lines + [f"turned away: {name}: {why}" for name, why in (status.get("turned_away") or {}).items()]


def failure_lines(status: Mapping[str, Any], with_tracebacks: bool = False) -> list[str]:
    """Return a line per process that died and was started again, with its last words, and one per kind of failure: the
    count, the first failure in full, and the log that has the others."""
    lines = [printable(_death(entry), REASON_CHARS) for entry in status.get("deaths") or []]
    for failure in status.get("failures") or []:
        unknown = ("group", "groups", f"failed ({failure['kind']})", "head.log")
        one, several, how, log = FAILURE_WORDS.get(failure["kind"], unknown)
        before = failure.get("num_before", 0)
        when = " before the head was started again" if before == failure["count"] else ""
        first = "The first since the head was started again" if 0 < before < failure["count"] else "The first"
        line = (
            f"{counted(failure['count'], one, several)} {how}{when}; logs/{log} has all. {first}: {failure['message']}"
        )
        lines.append(printable(line, REASON_CHARS))
        if with_tracebacks:
            lines += [printable(one, REASON_CHARS) for one in failure["traceback"].rstrip().split("\n") if one]
    return lines


def _death(entry: Mapping[str, Any]) -> str:
    times = "once" if entry["deaths"] == 1 else f"{entry['deaths']} times in a row"
    when = time.strftime("%H:%M:%S", time.localtime(entry["died_at"]))
    died = f"{entry['name']} died {times}, last at {when}, and was started again (logs/{entry['name']}.log)"
    return f"{died}: {entry['last_words']}"


def safe(text: str, chars_max: int = LINE_CHARS_MAX) -> str:
    """Make text that may come from a peer safe for a table: no control characters, no markup."""
    return escape(printable(text, chars_max))


def version_words(version: int | None) -> str:
    """Write a version; None: there is none."""
    return "none" if version is None else str(version)


def show_status(status: Mapping[str, Any], console: Console) -> None:
    """Print `echo2 status`: progress of the run, who waits for whom, and the processes."""
    done = f"step {status['version']} of {status['max_steps']}, lineage {status['lineage']}"
    published = f"snapshot {version_words(status['published'])}, checkpoint {version_words(status['checkpoint'])}"
    where, state = escape(status["directory"]), safe(status["state"], REASON_CHARS)
    console.print(f"[bold]{where}[/bold]  {state}  {done}  {published}  ${status['cost_usd']:.4f}", highlight=False)
    if judge := status.get("judge"):
        console.print(f"judge: {judge['answers']} answers, ${judge['usd']:.4f}", highlight=False)
    if fleet := fleet_words(status.get("fleet")):
        console.print(f"fleet: {safe('; '.join(fleet), REASON_CHARS)}", highlight=False)
    for line in failure_lines(status, with_tracebacks=True):
        console.print(escape(line), style="red", highlight=False)
    for line in strangers_lines(status):
        console.print(escape(line), highlight=False)
    waits = Table("who", "waits for", "since", "until", "why", title="Waits", title_justify="left")
    now = status["time"]
    for wait in status["waits"]:
        since = f"{max(0.0, now - wait['since']):.1f} s" if wait["since"] else "-"
        until = f"in {wait['until'] - now:.1f} s" if wait["until"] is not None else "-"
        waits.add_row(safe(wait["waiter"]), safe(wait["waits_for"]), since, until, safe(wait["reason"], REASON_CHARS))
    console.print(waits if status["waits"] else "no process waits")
    table = Table("role", "id", "pid", "state", "engine", "weights", "doing", title="Processes", title_justify="left")
    for process in status["processes"]:
        state = PROCESS_STATES[process["alive"]] if process["host"] else "away"
        pid, texts = str(process["pid"] or "-"), (safe(process.get(key, "")) for key in ("engine", "weights", "doing"))
        table.add_row(process["role"], safe(process["id"]), pid, state, *texts)
    console.print(table)


def trust_command(options: argparse.Namespace) -> int:
    """Print the results of checks by ticket. Raises as `read_status`."""
    rows = trust_rows(read_status(RunDir(options.directory)))
    if options.json:
        print(json.dumps(rows))
    else:
        show_trust(rows, Console())
    return 0


def trust_rows(status: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return a row for each ticket of strangers that delivered groups, the least trusted first. Times are in seconds
    before the status.
    """
    rows = []
    for ticket, trust in (status.get("trust") or {}).items():
        history = [{"seconds_ago": status["time"] - at, "what": what} for at, what in trust["history"]]
        rows.append({"ticket": ticket, **trust, "history": history})
    return sorted(rows, key=lambda row: (row["score"], row["ticket"]))


def show_trust(rows: list[dict[str, Any]], console: Console) -> None:
    """Print the rows as a table."""
    if not rows:
        console.print("no stranger has delivered a group")
        return
    table = Table(box=None, pad_edge=False)
    for name in ("ticket", "trust", "groups", "passed", "failed", "no verdict", "stands", "last"):
        table.add_column(name, no_wrap=name != "last")
    for row in rows:
        stands = "in quarantine" if row["is_quarantined"] else "new" if row["is_new"] else "trusted"
        last = row["history"][-1] if row["history"] else None
        event = "" if last is None else f"{last['seconds_ago']:.0f} s ago: {safe(last['what'], TRUST_REASON_CHARS)}"
        numbers = (row[name] for name in ("num_groups", "num_passed", "num_failed", "num_missed"))
        table.add_row(safe(row["ticket"]), f"{row['score']:.2f}", *map(str, numbers), stands, event)
    console.print(table, highlight=False)
