"""`echo2 trust`: the results of checks by ticket, from the head's last status.json."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from echo2.config.rundir import RunDir
from echo2.core.printable import printable
from echo2.views.status import read_status

#: Characters of a reason in the table; `--json` has them whole.
REASON_CHARS = 160


def run(options: argparse.Namespace) -> int:
    """Print the rows. Raises as `read_status`."""
    found = rows(read_status(RunDir(options.directory)))
    if options.json:
        print(json.dumps(found))
    else:
        show(found, Console())
    return 0


def rows(status: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return a row for each ticket of strangers that delivered groups, the least trusted first. Times are in seconds
    before the status.
    """
    found = []
    for ticket, trust in (status.get("trust") or {}).items():
        history = [{"seconds_ago": status["time"] - at, "what": what} for at, what in trust["history"]]
        found.append({"ticket": ticket, **trust, "history": history})
    return sorted(found, key=lambda row: (row["score"], row["ticket"]))


def show(found: list[dict[str, Any]], console: Console) -> None:
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
