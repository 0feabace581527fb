"""`echo2 serve status`: open requests and spending by tenant, and machines, printed. The service need not be running;
while it runs, the owner's page shows the same and more.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import rich.table
from rich.console import Console
from rich.markup import escape

from echo2.config.rundir import read_json
from echo2.core.errors import UserError
from echo2.core.printable import printable
from echo2_service.commands.serve import open_database
from echo2_service.fleet.server import STATUS_FILE
from echo2_service.front import overview

#: Age after which the service's last report on its fleet is ignored.
STALE_SECONDS = 15.0


def run(options: argparse.Namespace) -> int:
    """Print the status.

    Raises:
        UserError: there is no service in that directory, or a port is given.
    """
    if options.port is not None:
        raise UserError("`echo2 serve status` serves no page. The service does: /owner, for a key of the scope owner.")
    if not options.database and not (options.out / "service.sqlite").is_file():
        raise UserError(f"{options.out} is not a directory of `echo2 serve`: it has no service.sqlite.")
    database, now = open_database(options.out, options.database), time.time()
    status = {"tenants": overview.tenants(database, now), **fleet(options.out, now)}
    database.close()
    if options.json:
        print(json.dumps(status))
    else:
        show(status, Console())
    return 0


def fleet(out: Path, now: float) -> Mapping[str, Any]:
    """Return the machines that joined, and the number of calls for which no machine has room; empty if the service has
    no fleet or is not running.

    Raises:
        UserError: the file with the report on the fleet is damaged.
    """
    document = read_json(out / STATUS_FILE)
    if document is None or now - document["at"] > STALE_SECONDS:
        return overview.NO_FLEET
    return {name: document[name] for name in overview.NO_FLEET}


def show(status: dict[str, Any], console: Console) -> None:
    """Print the status as tables: tenants, and machines if there are any."""
    tenants, machines = [], []
    for tenant, row in status["tenants"].items():
        waiting = ", ".join(f"{count} {kind}" for kind, count in row["open"].items()) or "-"
        numbers = f"{row['oldest_wait_seconds']:.1f} s", f"{row['tokens']:,}", f"${row['usd']:.4f}"
        tenants.append([tenant, str(row["sessions"]), str(row["models"]), waiting, *numbers])
    for name, row in status["machines"].items():
        words = (str(row[key]) for key in ("host", "device", "doing"))
        numbers = f"{row['under_way']:,}", f"{row['sampled']:,}", f"{row['price_usd_per_hour']:g}"
        machines.append([name, *words, *numbers])
    _print(console, ("tenant", "sessions", "models", "open", "oldest waits", "tokens", "dollars"), tenants)
    if machines:
        _print(console, ("machine", "host", "device", "doing", "under way", "sampled", "$/h"), machines)


def _print(console: Console, heads: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    table = rich.table.Table(*heads, box=None, pad_edge=False)
    for row in rows:
        table.add_row(*(escape(printable(cell)) for cell in row))
    console.print(table, highlight=False)
