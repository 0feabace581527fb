"""`echo2 serve status`: open requests and spending by tenant, printed, or as a page of tables without scripts, which
the browser reloads periodically. The service need not be running.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape as escape_html
from pathlib import Path
from typing import Any

import rich.table
from rich.console import Console
from rich.markup import escape
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response
from starlette.routing import Route

from echo2.config.rundir import read_json
from echo2.core.errors import UserError
from echo2.core.printable import printable
from echo2.views.serve import TokenGuard, asset, serve_pages
from echo2_service.commands.serve import open_database
from echo2_service.fleet.server import STATUS_FILE
from echo2_service.front.database import OPEN, Database, bills, models, requests, sessions

REFRESH_SECONDS = 3
PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>echo2 serve</title><link rel="stylesheet" href="page.css"></head>
<body><header><h1>echo2 serve</h1></header><main>{}</main></body></html>
"""
#: Age after which the service's last report on its fleet is ignored.
STALE_SECONDS = 15.0


@dataclass(frozen=True, slots=True)
class Table:
    """A table of text; each row has one cell per column head."""

    heads: Sequence[str]
    rows: Sequence[Sequence[str]]


class StatusPage:
    """The application `app`. `tell` returns the current tables; `token`: see `TokenGuard`."""

    def __init__(self, tell: Callable[[], Sequence[Table]], token: str) -> None:
        self._tell = tell
        guard = TokenGuard(token)
        self.app = Starlette(routes=[Route("/", guard(self._page)), Route("/page.css", guard(self._style))])

    def stop(self) -> None:
        """Do nothing: no response stays open."""

    async def _page(self, request: Request) -> Response:
        text = "".join(f'<section class="scroll">{_table(table)}</section>' for table in self._tell())
        return HTMLResponse(PAGE.format(text), headers={"Refresh": str(REFRESH_SECONDS)})

    async def _style(self, request: Request) -> Response:
        return asset("page.css")


def _table(table: Table) -> str:
    heads = "".join(f'<th scope="col">{escape_html(head)}</th>' for head in table.heads)
    rows = ("".join(f"<td>{escape_html(printable(cell))}</td>" for cell in row) for row in table.rows)
    return f"<table><thead><tr>{heads}</tr></thead><tbody>{''.join(f'<tr>{row}</tr>' for row in rows)}</tbody></table>"


def run(options: argparse.Namespace) -> int:
    """Print the status, or with a port serve it as a page until the process is told to end.

    Raises:
        UserError: there is no service in that directory, or the port is taken.
    """
    if not options.database and not (options.out / "service.sqlite").is_file():
        raise UserError(f"{options.out} is not a directory of `echo2 serve`: it has no service.sqlite.")
    database = open_database(options.out, options.database)

    def tell() -> dict[str, Any]:
        now = time.time()
        return {**status(database, now), **fleet(options.out, now)}

    if options.port is not None:
        return serve_pages(
            lambda token: StatusPage(lambda: tables(tell()), token), port=options.port, as_json=options.json
        )
    found = tell()
    database.close()
    if options.json:
        print(json.dumps(found))
    else:
        show(found, Console())
    return 0


def status(database: Database, now: float) -> dict[str, Any]:
    """Return by tenant: live sessions, their models, open requests by kind, oldest wait in seconds, tokens, dollars."""
    tenants: dict[str, dict[str, Any]] = {}

    def of(tenant: str) -> dict[str, Any]:
        empty = {"sessions": 0, "models": 0, "open": {}, "oldest_wait_seconds": 0.0, "tokens": 0, "usd": 0.0}
        return tenants.setdefault(tenant, empty)

    live = database.select(sessions, columns=["id", "tenant"], finished=None)
    for row in live:
        of(row.tenant)["sessions"] += 1
    for row in database.select(models, columns=["tenant"], session=tuple(row.id for row in live)):
        of(row.tenant)["models"] += 1
    for row in database.select(requests, columns=["tenant", "kind", "created"], state=OPEN):
        mine = of(row.tenant)
        mine["open"][row.kind] = mine["open"].get(row.kind, 0) + 1
        mine["oldest_wait_seconds"] = max(mine["oldest_wait_seconds"], now - row.created)
    for row in database.select(bills):
        of(row.tenant)["tokens"] += row.tokens
        of(row.tenant)["usd"] += row.usd
    return {"tenants": dict(sorted(tenants.items()))}


def fleet(out: Path, now: float) -> dict[str, Any]:
    """Return the machines that joined, and the number of calls for which no machine has room; empty if the service has
    no fleet or is not running.

    Raises:
        UserError: the file with the report on the fleet is damaged.
    """
    told = read_json(out / STATUS_FILE)
    if told is None or now - told["at"] > STALE_SECONDS:
        return {"machines": {}, "waiting_samples": 0}
    return {"machines": told["machines"], "waiting_samples": told["waiting"]}


def tables(found: dict[str, Any]) -> list[Table]:
    """Return the status as tables: tenants, and machines if there are any."""
    tenants = []
    for tenant, row in found["tenants"].items():
        waiting = ", ".join(f"{count} {kind}" for kind, count in row["open"].items()) or "-"
        numbers = f"{row['oldest_wait_seconds']:.1f} s", f"{row['tokens']:,}", f"${row['usd']:.4f}"
        tenants.append([tenant, str(row["sessions"]), str(row["models"]), waiting, *numbers])
    made = [Table(("tenant", "sessions", "models", "open", "oldest waits", "tokens", "dollars"), tenants)]
    machines = []
    for name, row in found["machines"].items():
        words = (str(row[key]) for key in ("host", "device", "doing"))
        numbers = f"{row['under_way']:,}", f"{row['sampled']:,}", f"{row['price_usd_per_hour']:g}"
        machines.append([name, *words, *numbers])
    if machines:
        made.append(Table(("machine", "host", "device", "doing", "under way", "sampled", "$/h"), machines))
    return made


def show(found: dict[str, Any], console: Console) -> None:
    """Print the status as tables."""
    for made in tables(found):
        table = rich.table.Table(box=None, pad_edge=False)
        for head in made.heads:
            table.add_column(head)
        for row in made.rows:
            table.add_row(*(escape(printable(cell)) for cell in row))
        console.print(table, highlight=False)
