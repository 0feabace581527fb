"""The costs of a run: the head's accounts of its machines, and `echo2 cost DIR`, which makes a bill of them, of the
ledger and the metrics: dollars by machine and by cause. Works on running, ended and copied runs.

A machine of the run's owner costs its price while it attends, a stranger's only for the time of its accepted results.
Time spent on a result is useful, or wasted under the reason of its refusal; groups that are sampled together share the
time of their batch. A lease that ended without a result is charged the worker's mean time for a group (at most the
duration of the lease), as an estimate. The rest is standby or idle. A worker that returns at another price opens a
second account.

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
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from echo2.config.rundir import RunDir, read_metrics
from echo2.core.documents import parse_json
from echo2.core.errors import UserError, counted
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


@dataclass(slots=True)
class MachineCost:
    """One machine's account at one price, in seconds; `wasted_seconds` by cause. `counted_until`: time up to here is
    already counted as useful or wasted. `is_own`: a machine of the run's owner. Strangers are paid for accepted results
    only: their `attended_seconds` are the time of these results.
    """

    price_usd_per_hour: float = 0.0
    attended_seconds: float = 0.0
    attending_since: float | None = None
    useful_seconds: float = 0.0
    useful_groups: int = 0
    wasted_seconds: dict[str, float] = field(default_factory=dict)
    standby_seconds: float = 0.0
    standing_by_since: float | None = None
    counted_until: float = float("-inf")
    is_own: bool = True

    def seconds(self, now: float) -> float:
        return self.attended_seconds + (now - self.attending_since if self.attending_since is not None else 0.0)

    def standby(self, now: float) -> float:
        return self.standby_seconds + (now - self.standing_by_since if self.standing_by_since is not None else 0.0)

    def claim(self, seconds: float, now: float | None) -> float:
        """Return the part of the `seconds` up to `now` that no other result has claimed, and claim it."""
        if now is None:
            return seconds
        claimed = max(0.0, min(seconds, now - self.counted_until))
        self.counted_until = max(self.counted_until, now)
        return claimed

    def usd(self, now: float) -> float:
        return self.seconds(now) / 3600 * self.price_usd_per_hour

    def wasted(self, now: float) -> dict[str, float]:
        """Return the wasted seconds by cause, within what is paid for, as on the bill: leases that a stopped head held
        last on in its absence, and those of one worker side by side."""
        if not self.wasted_seconds:
            return {}  # most of a fleet, which is looked through after each step
        paid = {"attended_seconds": self.seconds(now), "standby_seconds": self.standby(now)}
        seconds_by_cause = worker_seconds(asdict(self) | paid)
        return {cause: seconds_by_cause[cause] for cause in self.wasted_seconds}

    def wasted_usd(self, now: float) -> float:
        return sum(self.wasted(now).values()) / 3600 * self.price_usd_per_hour


class CostBook:
    """All machines of a run. `to_plain` and the constructor carry it over a restart of the head."""

    def __init__(self, plain: dict[str, Any] | None = None) -> None:
        self.machines = {name: MachineCost(**values) for name, values in (plain or {}).items()}

    def to_plain(self, now: float) -> dict[str, Any]:
        plain = {}
        for name, machine in self.machines.items():
            values = {**asdict(machine), "attended_seconds": machine.seconds(now), "attending_since": None}
            values |= {"standby_seconds": machine.standby(now), "standing_by_since": None}
            del values["counted_until"]  # the next head counts anew
            plain[name] = values
        return plain

    def useful_groups(self, name: str) -> int:
        return self.machines[name].useful_groups if name in self.machines else 0

    def joined(self, name: str, price_usd_per_hour: float, now: float, is_own: bool = True) -> None:
        machine = self.machines.setdefault(name, MachineCost(price_usd_per_hour))
        if machine.price_usd_per_hour != price_usd_per_hour:
            self.left(name, now)
            self._put_away(name)
            machine = self.machines.setdefault(name, MachineCost(price_usd_per_hour))
        machine.is_own = is_own
        if not is_own:
            machine.counted_until = max(machine.counted_until, now)  # time before it joined is not charged again
        elif machine.attending_since is None:
            machine.attending_since = now

    def _put_away(self, name: str) -> None:
        """Move a machine's account at its old price to an account named after that price."""
        machine = self.machines.pop(name)
        old = self.machines.setdefault(
            f"{name} at ${machine.price_usd_per_hour:g}/h", MachineCost(machine.price_usd_per_hour)
        )
        old.attended_seconds += machine.attended_seconds
        old.useful_seconds += machine.useful_seconds
        old.useful_groups += machine.useful_groups
        old.standby_seconds += machine.standby_seconds
        for cause, seconds in machine.wasted_seconds.items():
            old.wasted_seconds[cause] = old.wasted_seconds.get(cause, 0.0) + seconds

    def left(self, name: str, now: float) -> None:
        machine = self.machines.get(name)
        if machine is not None:
            self.activated(name, now)
            machine.attended_seconds, machine.attending_since = machine.seconds(now), None

    def stands_by(self, name: str, now: float) -> None:
        """Record that a connected worker is on standby, without leases."""
        machine = self.machines.get(name)
        if machine is not None and machine.attending_since is not None and machine.standing_by_since is None:
            machine.standing_by_since = now

    def activated(self, name: str, now: float) -> None:
        machine = self.machines.get(name)
        if machine is not None:
            machine.standby_seconds, machine.standing_by_since = machine.standby(now), None

    def useful(self, name: str, seconds: float, now: float | None = None) -> None:
        """Count a result that took `seconds` up to `now` as useful. Without `now`, all of these seconds count."""
        machine = self.machines.setdefault(name, MachineCost())
        claimed = machine.claim(seconds, now)
        machine.useful_seconds += claimed
        machine.useful_groups += 1
        machine.attended_seconds += 0.0 if machine.is_own else claimed

    def wasted(self, name: str, cause: str, seconds: float, now: float | None = None) -> None:
        machine = self.machines.setdefault(name, MachineCost())
        if not machine.is_own:
            return  # strangers are not paid for wasted work
        wasted = machine.claim(seconds, now)
        machine.wasted_seconds[cause] = machine.wasted_seconds.get(cause, 0.0) + wasted

    def wasted_lease(self, name: str, cause: str, lasted_seconds: float) -> None:
        """Count a lease that ended without a result as waste: the mean time of this worker's groups, at most the
        duration of the lease.
        """
        machine = self.machines.setdefault(name, MachineCost())
        mean = machine.useful_seconds / machine.useful_groups if machine.useful_groups else lasted_seconds
        self.wasted(name, cause, min(mean, lasted_seconds))

    def count_as_wasted(self, name: str, cause: str) -> None:
        """Move a result from useful to waste, because it is not trained on after all: the mean time of this worker's
        groups.
        """
        machine = self.machines.setdefault(name, MachineCost())
        if machine.useful_groups:
            seconds = machine.useful_seconds / machine.useful_groups
            machine.useful_seconds -= seconds
            machine.useful_groups -= 1
            machine.wasted_seconds[cause] = machine.wasted_seconds.get(cause, 0.0) + seconds

    def cum_usd(self, now: float) -> float:
        return sum(machine.usd(now) for machine in self.machines.values())

    def wasted_usd(self, now: float) -> float:
        return sum(machine.wasted_usd(now) for machine in self.machines.values())


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


def check_costs(num_checks: float, usd_per_group: float) -> dict[str, float]:
    """Return what this number of checks costs, and what is paid to a trusted ticket for false groups until the first of
    them is found, at this price of sampling a group.
    """
    checks_usd = num_checks * CHECK_PER_SAMPLED * usd_per_group
    return {"checks_usd": checks_usd, "cheat_usd": GROUPS_UNTIL_FOUND * usd_per_group}


def run(options: argparse.Namespace) -> int:
    """Print the bill.

    Raises:
        UserError: this is not a run directory, or its head has not saved accounts yet.
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
    return {"tickets": len(trust), "groups": paid.groups, "checks": num_checks, "failed": num_failed, **costs}


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
        shown.append(replace(total(bills[MACHINES_SHOWN:]), name=counted(len(bills) - MACHINES_SHOWN, "other")))
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
    if (strangers := report["strangers"]) is not None:
        console.print(
            f"Strangers of {strangers['tickets']} tickets: {strangers['groups']} groups are paid, "
            f"{strangers['checks']} were read again for about ${strangers['checks_usd']:.2g}, {strangers['failed']} of "
            f"them false. Who cheats in every group is paid ${strangers['cheat_usd']:.2g} on average before it is "
            "found.",
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
