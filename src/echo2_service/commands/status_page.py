"""The status of a service as a page of tables without scripts, which the browser reloads periodically."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response
from starlette.routing import Route

from echo2.core.printable import printable
from echo2.views.app import TokenGuard, asset

REFRESH_SECONDS = 3
PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>echo2 serve</title><link rel="stylesheet" href="page.css"></head>
<body><header><h1>echo2 serve</h1></header><main>{}</main></body></html>
"""


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
    heads = "".join(f'<th scope="col">{escape(head)}</th>' for head in table.heads)
    rows = ("".join(f"<td>{escape(printable(cell))}</td>" for cell in row) for row in table.rows)
    return f"<table><thead><tr>{heads}</tr></thead><tbody>{''.join(f'<tr>{row}</tr>' for row in rows)}</tbody></table>"
