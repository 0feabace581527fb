"""`echo2 cost DIR`: the bill of a run, from its ledger and metrics. Works on running, ended and copied runs."""

from __future__ import annotations

import json
import sqlite3
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from echo2.buffer.schema import open_for_reading, unusable
from echo2.control.bill import Bill, itemise, total
from echo2.documents import parse_json
from echo2.errors import UserError
from echo2.past_run import read_rows

#: What the causes mean, for those who read the table.
MEANINGS = {
    "training": "the learner at work",
    "useful": "rollouts that were trained on, or wait for it",
    "stale": "too old when they came",
    "failed": "could not be sampled or scored",
    "duplicate": "somebody else's came first",
    "late": "came after their lease had ended",
    "malformed": "broke the wire's rules",
    "expired": "not done when their lease ended",
    "lost": "of workers that vanished",
    "standby": "attending, and not needed",
    "idle": "paid, and nothing to do",
}
#: Columns of the table where it is written to a file.
WIDTH = 160
#: Machines shown one by one; the rest in one line.
MACHINES_SHOWN = 20


def run(directory: Path, as_json: bool) -> int:
    """Print the bill.

    Raises:
        UserError: this is no run directory, or its head has not saved accounts yet.
    """
    report = read_report(directory)
    if as_json:
        print(json.dumps(report))
    else:
        wide = Console()
        _show(report, wide if wide.is_terminal else Console(width=WIDTH))
    return 0


def read_report(directory: Path) -> dict[str, Any]:
    """Bills by machine, the total, and what a step and a million trained tokens cost.

    Raises:
        UserError: as `run`.
    """
    accounts, trained_tokens = _read_ledger(directory / "ledger.sqlite")
    path = directory / "metrics.jsonl"
    rows = [row for row in read_rows(path) if row.get("step", 0) > 0] if path.is_file() else []
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
    }


def _read_ledger(path: Path) -> tuple[dict[str, Any], int]:
    if not path.is_file():
        raise UserError(f"{path.parent} is no run directory: it has no {path.name}.")
    connection = open_for_reading(path)
    try:
        row = connection.execute("SELECT value FROM meta WHERE key = 'caller.costs'").fetchone()
        tokens = connection.execute(
            "SELECT coalesce(sum(num_tokens), 0) FROM groups WHERE state = 'trained'"
        ).fetchone()
        accounts: dict[str, Any] | None = None if row is None else parse_json(row[0])
    except (sqlite3.Error, ValueError, TypeError, AttributeError) as error:
        raise unusable(path, error) from error
    finally:
        connection.close()
    if accounts is None:
        raise UserError(f"{path.parent} has no accounts yet: the head writes them when a step is recorded.")
    return accounts, int(tokens[0])


def _show(report: dict[str, Any], console: Console) -> None:
    everything = Bill(**report["total"])
    table = Table(box=None, padding=(0, 1, 0, 0))
    causes = list(everything.by_cause)
    table.add_column("machine")
    for heading in ("$", "time", "groups", *causes):
        table.add_column(heading, justify="right", no_wrap=True)
    bills = [Bill(**plain) for plain in report["machines"]]
    shown = bills[:MACHINES_SHOWN]
    if len(bills) > len(shown):
        shown.append(_renamed(total(bills[MACHINES_SHOWN:]), f"{len(bills) - MACHINES_SHOWN} others"))
    for bill in shown:
        table.add_row(*_cells(bill, causes))
    table.add_section()
    table.add_row(*_cells(everything, causes), style="bold")
    if everything.usd > 0:
        shares = [f"{everything.by_cause[cause] / everything.usd:.1%}" for cause in causes]
        table.add_row("", "", "", "", *shares, style="dim")
    console.print(table, highlight=False)
    console.print("; ".join(f"{cause}: {MEANINGS[cause]}" for cause in causes if cause in MEANINGS), style="dim")
    if report["usd_per_step"] is not None:
        tokens = "" if report["usd_per_mtok"] is None else f", ${report['usd_per_mtok']:.4g} a million trained tokens"
        console.print(f"${report['usd_per_step']:.4g} a step over {report['steps']} steps{tokens}", highlight=False)
    if everything.usd == 0:
        console.print(
            "No machine has a price: set learner.price_usd_per_hour, workers.price_usd_per_hour, or `echo2 worker "
            "--price-usd-per-hour`.",
            highlight=False,
        )


def _cells(bill: Bill, causes: list[str]) -> list[str]:
    split = [f"{bill.by_cause[cause]:.4f}" if cause in bill.by_cause else "" for cause in causes]
    return [bill.name, f"{bill.usd:.4f}", _time(bill.seconds), str(bill.groups), *split]


def _time(seconds: float) -> str:
    if seconds >= 3600:
        return f"{seconds / 3600:.2f} h"
    return f"{seconds / 60:.1f} min" if seconds >= 60 else f"{seconds:.0f} s"


def _renamed(bill: Bill, name: str) -> Bill:
    return Bill(name, bill.usd, bill.seconds, bill.by_cause, bill.groups)
