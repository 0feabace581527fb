"""`echo2 cost DIR`: the bill of a run, dollars by machine and by cause, from the accounts of the head
(`head/fleet/accounts.py`), its ledger and metrics. Works on running, ended and copied runs.

Causes of a worker: useful (results that were trained on or wait for training), each reason of refusal or loss (stale,
duplicate, late, malformed, expired, lost, failed ...), standby, idle. Causes of the learner: training, idle. For each
machine and for the whole run, the causes add up to the total. What checks of strangers' groups cost, and what a cheat
can expect to be paid, is estimated.
"""

from __future__ import annotations

import argparse
import json
import math
import sqlite3
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from echo2.config.rundir import RunDir, read_metrics
from echo2.core.documents import parse_json
from echo2.core.errors import UserError
from echo2.core.printable import duration
from echo2.head.ledger.schema import open_for_reading, unusable
from echo2.head.strangers.decide.checks import CHECK_SHARE

LEARNER = "learner"
#: Causes that are not wasted work, in the order in which they are shown; the others are shown in between.
FIRST, LAST = ("training", "useful"), ("standby", "idle")
#: Causes that a total always lists, even if they are zero.
ALWAYS = ("useful", "stale", "failed", "duplicate", "idle")
#: Cost of a check over the cost of sampling the same group, measured on a CPU (`make bench-hostile_sampling`).
CHECK_PER_SAMPLED = 0.89
#: Mean number of groups, all of them false, that a trusted ticket delivers until one is checked.
GROUPS_UNTIL_FOUND = 1.0 / CHECK_SHARE
#: Explanations of the causes, shown in the table.
MEANINGS = {
    "training": "the learner at work",
    "useful": "rollouts that were trained on, or wait for it",
    "stale": "too old on arrival",
    "failed": "could not be sampled or scored",
    "duplicate": "another worker's result came first",
    "late": "came after their lease had ended",
    "malformed": "malformed",
    "expired": "unfinished when their lease ended",
    "lost": "lost with their worker",
    "untrusted": "not drawn as its worker says, or of a worker of which that was found",
    "standby": "standing by, not needed",
    "idle": "paid, but without work",
}
#: Machines that have a line of their own; the rest share one.
MACHINES_SHOWN = 20


@dataclass(frozen=True, slots=True)
class Bill:
    """The cost of one machine, or of all machines. `seconds`: paid time."""

    name: str
    usd: float
    seconds: float
    by_cause: dict[str, float]
    groups: int = 0


def itemise(accounts: Mapping[str, Mapping[str, Any]], learner_idle_ratio: float = 0.0) -> list[Bill]:
    """Return one bill per machine, the learner's first. `learner_idle_ratio`: share of the learner's time spent waiting
    for groups.
    """
    bills = []
    for name, account in accounts.items():
        if name.partition(" ")[0] == LEARNER:
            seconds = float(account["attended_seconds"])
            idle = seconds * min(1.0, max(0.0, learner_idle_ratio))
            bills.append(_bill(name, account, {"training": seconds - idle, "idle": idle}))
        else:
            bills.append(_bill(name, account, worker_seconds(account)))
    return sorted(bills, key=lambda bill: (bill.name.partition(" ")[0] != LEARNER, -bill.usd, bill.name))


def worker_seconds(account: Mapping[str, Any]) -> dict[str, float]:
    """Return a worker's paid seconds by cause. If the causes, some of them estimates, add up to more than the paid
    time, they are scaled down to it.
    """
    paid = float(account["attended_seconds"])
    claimed = {"useful": float(account["useful_seconds"]), "standby": float(account.get("standby_seconds", 0.0))}
    for cause, seconds in account["wasted_seconds"].items():
        claimed[cause] = claimed.get(cause, 0.0) + float(seconds)
    busy = math.fsum(claimed.values())
    if busy > paid:
        claimed = {cause: seconds * (paid / busy) for cause, seconds in claimed.items()}
    return {**claimed, "idle": max(0.0, paid - busy)}


def total(bills: list[Bill]) -> Bill:
    """Return the sum of all bills, with the causes that are always listed."""
    causes = sorted({*ALWAYS, *(cause for bill in bills for cause in bill.by_cause)}, key=_place)
    return Bill(
        name="total",
        usd=math.fsum(bill.usd for bill in bills),
        seconds=math.fsum(bill.seconds for bill in bills),
        by_cause={cause: math.fsum(bill.by_cause.get(cause, 0.0) for bill in bills) for cause in causes},
        groups=sum(bill.groups for bill in bills),
    )


def _bill(name: str, account: Mapping[str, Any], seconds: Mapping[str, float]) -> Bill:
    usd_per_second = float(account["price_usd_per_hour"]) / 3600
    paid = float(account["attended_seconds"])
    by_cause = {cause: seconds[cause] * usd_per_second for cause in sorted(seconds, key=_place) if seconds[cause] > 0}
    return Bill(name, paid * usd_per_second, paid, by_cause, round(account["useful_groups"]))


def _place(cause: str) -> tuple[int, str]:
    return (0 if cause in FIRST else 2 + LAST.index(cause) if cause in LAST else 1, cause)


@dataclass(frozen=True, slots=True)
class CheckCosts:
    """Costs in dollars. `checks_usd`: of the checks; `cheat_usd`: paid to a trusted ticket for false groups until the
    first of them is found."""

    checks_usd: float
    cheat_usd: float


def check_costs(num_checks: float, usd_per_group: float) -> CheckCosts:
    """Return the costs for this number of checks and this price of sampling a group."""
    return CheckCosts(num_checks * CHECK_PER_SAMPLED * usd_per_group, GROUPS_UNTIL_FOUND * usd_per_group)


def run(options: argparse.Namespace) -> int:
    """Print the bill.

    Raises:
        UserError: this is no run directory, or its head has not saved accounts yet.
    """
    report = read_report(options.directory)
    if options.json:
        print(json.dumps(report))
    else:
        show(report, Console())
    return 0


def read_report(directory: Path) -> dict[str, Any]:
    """Return the bills by machine, the total, and the cost per step and per million trained tokens.

    Raises:
        UserError: as `run`.
    """
    return report(directory, read_metrics(RunDir(directory).metrics, refuses_damage=True))


def report(directory: Path, metrics: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Like `read_report`, with rows of metrics that have already been read.

    Raises:
        UserError: as `run`.
    """
    accounts, trained_tokens, trust = _read_ledger(directory / "ledger.sqlite")
    rows = [row for row in metrics if row["step"] > 0]
    waited = sum(row.get("time/wait_for_batch", 0.0) for row in rows)
    whole = sum(row.get("time/step", 0.0) for row in rows)
    try:
        bills = itemise(accounts, waited / whole if whole > 0 else 0.0)
    except (KeyError, TypeError, AttributeError) as error:
        raise UserError(f"The accounts in {directory / 'ledger.sqlite'} are damaged: {error!r}.") from error
    everything = total(bills)
    return {
        "steps": len(rows),
        "usd_per_step": everything.usd / len(rows) if rows else None,
        "usd_per_mtok": everything.usd / trained_tokens * 1e6 if trained_tokens else None,
        "total": asdict(everything),
        "machines": [asdict(bill) for bill in bills],
        "strangers": _strangers(accounts, bills, trust),
    }


def _strangers(
    accounts: Mapping[str, Mapping[str, Any]], bills: Iterable[Bill], trust: list[Mapping[str, Any]]
) -> dict[str, Any] | None:
    """Return the cost of checking strangers, by the price of their groups, and the pay of a cheat; None without any
    paid groups of strangers.
    """
    paid = total([bill for bill in bills if not accounts[bill.name].get("is_own", True)])
    if not trust or not paid.groups:
        return None
    num_failed = sum(one["num_failed"] for one in trust)
    num_checks = num_failed + sum(one["num_passed"] for one in trust)
    costs = check_costs(num_checks, paid.by_cause["useful"] / paid.groups)
    return {"tickets": len(trust), "groups": paid.groups, "checks": num_checks, "failed": num_failed, **asdict(costs)}


def _read_ledger(path: Path) -> tuple[dict[str, Any], int, list[Mapping[str, Any]]]:
    if not path.is_file():
        raise UserError(f"{path.parent} is not a run directory: it has no {path.name}.")
    connection = open_for_reading(path)
    try:
        row = connection.execute("SELECT value FROM meta WHERE key = 'caller.costs'").fetchone()
        tokens = connection.execute(
            "SELECT coalesce(sum(num_tokens), 0) FROM groups WHERE state = 'trained'"
        ).fetchone()
        trust = connection.execute("SELECT value FROM meta WHERE key LIKE ?", ("%.trust.%",)).fetchall()
        tickets = [parse_json(entry[0]) for entry in trust]
        accounts: dict[str, Any] | None = None if row is None else parse_json(row[0])
    except (sqlite3.Error, ValueError, TypeError, AttributeError) as error:
        raise unusable(path, error) from error
    finally:
        connection.close()
    if accounts is None:
        raise UserError(f"{path.parent} has no accounts yet: the head writes them when a step is recorded.")
    return accounts, int(tokens[0]), tickets


def show(report: dict[str, Any], console: Console) -> None:
    """Print the bill as two tables, one by machine and one by cause."""
    machines = Table(box=None, padding=(0, 1, 0, 0))
    machines.add_column("machine")
    for heading in ("$", "time", "groups"):
        machines.add_column(heading, justify="right", no_wrap=True)
    machines.add_column("of it")
    bills = [Bill(**plain) for plain in report["machines"]]
    shown = bills[:MACHINES_SHOWN]
    if len(bills) > len(shown):
        shown.append(replace(total(bills[MACHINES_SHOWN:]), name=f"{len(bills) - MACHINES_SHOWN} others"))
    everything = Bill(**report["total"])
    for bill in shown:
        split = ", ".join(f"{cause} {usd:.4f}" for cause, usd in bill.by_cause.items() if usd)
        machines.add_row(*_cells(bill), split)
    machines.add_row(*_cells(everything), style="bold")
    console.print(machines, highlight=False)
    causes = Table(box=None, padding=(0, 1, 0, 0))
    for heading in ("cause", "$", "share", "what it is"):
        causes.add_column(heading, justify="right" if heading in ("$", "share") else "left")
    for cause, usd in everything.by_cause.items():
        share = f"{usd / everything.usd:.1%}" if everything.usd > 0 else ""
        causes.add_row(cause, f"{usd:.4f}", share, MEANINGS.get(cause, ""))
    console.print(causes, highlight=False)
    if report["usd_per_step"] is not None:
        tokens = "" if report["usd_per_mtok"] is None else f", ${report['usd_per_mtok']:.4g} a million trained tokens"
        console.print(f"${report['usd_per_step']:.4g} a step over {report['steps']} steps{tokens}", highlight=False)
    if (found := report["strangers"]) is not None:
        console.print(
            f"Strangers of {found['tickets']} tickets: {found['groups']} groups are paid, {found['checks']} were read "
            f"again for about ${found['checks_usd']:.2g}, {found['failed']} of them false. Who cheats in every group "
            f"is paid ${found['cheat_usd']:.2g} on average before it is found.",
            highlight=False,
        )
    if everything.usd == 0:
        console.print(
            "No machine has a price: set learner.price_usd_per_hour, workers.price_usd_per_hour, or `echo2 worker "
            "--price-usd-per-hour`.",
            highlight=False,
        )


def _cells(bill: Bill) -> tuple[str, str, str, str]:
    return bill.name, f"{bill.usd:.4f}", duration(bill.seconds), str(bill.groups)
