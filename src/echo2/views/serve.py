"""`echo2 view`: the dashboard's HTTP application, with the newest metrics in Prometheus' text format, and its server.
Anybody with the token can see the runs; nothing can be changed here.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import secrets
import socket
import sys
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any

import msgspec
import uvicorn
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.gzip import GZipMiddleware
from starlette.requests import Request
from starlette.responses import PlainTextResponse, RedirectResponse, Response, StreamingResponse
from starlette.routing import Route

from echo2.config.rundir import RunDir, newest_run
from echo2.core.addresses import LOOPBACK, family, is_loopback, join
from echo2.core.disk import free_bytes
from echo2.core.documents import is_number
from echo2.core.errors import UserError
from echo2.head.ledger import rollout_log
from echo2.views.assets import HEADERS, PARTS, asset
from echo2.views.run_files import all_settings, log_end, log_names
from echo2.views.run_view import RunView
from echo2.views.watch import Watch, fleet_page

#: Seconds that open connections get to finish at shutdown.
LAST_SECONDS = 5
BYTES_OF_TOKEN = 16
#: Environment variable with a fixed token, for programs that connect repeatedly.
TOKEN_VARIABLE = "ECHO2_VIEW_TOKEN"
METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"
#: Names of exported metrics. A metric with a third part, such as the name of a data source, is left out.
METRIC_NAME = re.compile(r"[a-z0-9_]+(/[a-z0-9_]+)?")
#: Pages that may be open at once.
LISTENERS_MAX = 64
#: Groups shown of a file of rollouts; a held-out set may have thousands, too many to draw in time.
GROUPS_SHOWN = 200
FILES = (*PARTS, "page.js", "fleet.js", "rollouts.js", "files.js")
REFUSED = "Open the address that the command printed: it has the token that this page asks for.\n"
Handler = Callable[[Request], Awaitable[Response]]


def run(options: argparse.Namespace) -> int:
    """The command.

    Raises:
        UserError: as `serve`; or there is no run below outputs/.
    """
    return serve(options.directories or [newest_run().path], options.host, options.port, options.json)


def serve(directories: Sequence[Path], host: str = LOOPBACK, port: int = 0, as_json: bool = False) -> int:
    """Serve the dashboard of these runs until the process gets a signal to end. `port` 0: any free port.

    Raises:
        UserError: the address is taken, or a directory is not there.
    """
    for directory in directories:
        if not directory.is_dir():
            raise UserError(
                f"There is no directory {directory}. Name a run directory, or an empty one for a run to come."
            )
    token = os.environ.get(TOKEN_VARIABLE) or secrets.token_urlsafe(BYTES_OF_TOKEN)
    listening = _listen(host, port)
    server = _Server(Dashboard(directories, token))
    url = f"http://{join(host, listening.getsockname()[1])}/?token={token}"
    print(json.dumps({"url": url}) if as_json else f"open {url}", flush=True)
    if not is_loopback(host):
        note = "Whoever can read this network's traffic can read the page, and its token: it is not encrypted."
        print(note, file=sys.stderr if as_json else sys.stdout, flush=True)
    asyncio.run(server.serve(sockets=[listening]))
    return 0


class _Server(uvicorn.Server):
    """uvicorn, which ends the event streams of open pages at its shutdown."""

    def __init__(self, dashboard: Dashboard) -> None:
        settings = uvicorn.Config(
            dashboard.app, log_level="warning", http="h11", ws="none", timeout_graceful_shutdown=LAST_SECONDS
        )
        super().__init__(settings)
        self._dashboard = dashboard

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self._dashboard.stop()
        super().handle_exit(sig, frame)


def _listen(host: str, port: int) -> socket.socket:
    try:
        listening = socket.create_server((host, port), family=family(host))
    except OSError as error:
        raise UserError(f"Cannot listen on {join(host, port)}: {error.strerror}. Choose another --port.") from error
    listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # also of what it accepts: responses are two writes
    return listening


def exposition(views: Sequence[RunView]) -> str:
    """Return the newest value of each metric of each run, and what `_state` says of it."""
    samples: dict[str, list[str]] = {}
    for view in views:
        label = view.name.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
        newest = {name: value for row in view.rows for name, value in row.items()}
        for name, value in {**newest, **_state(view)}.items():
            if is_number(value) and METRIC_NAME.fullmatch(name) and name != "step":
                samples.setdefault(f"echo2_{name.replace('/', '_')}", []).append(f'{{run="{label}"}} {value!r}')
    lines = [
        line
        for name, values in sorted(samples.items())
        for line in (f"# TYPE {name} gauge", *(name + value for value in values))
    ]
    return "\n".join(lines) + "\n"


def _state(view: RunView) -> dict[str, float]:
    """Return what a person should hear of before the next step: whether the run goes on or is paused, its version,
    bytes left on the disk, the budget in dollars (0: none), and results of the checks of strangers."""
    state: dict[str, float] = {"version": view.version, "run/goes_on": int(view.status.get("goes_on", False))}
    state["run/paused"] = int(bool(view.status.get("paused")))
    with suppress(UserError, OSError):  # there is no directory, or no run in it, yet
        state["disk/free_bytes"] = free_bytes(view.rundir.path)
        state["cost/budget_usd"] = view.rundir.read_config().fleet.budget_usd
    tickets = (view.status.get("trust") or {}).values()
    state["checks/quarantined_tickets"] = sum(ticket.get("is_quarantined", False) for ticket in tickets)
    for verdict in ("passed", "failed", "missed"):
        state[f"checks/{verdict}"] = sum(ticket.get(f"num_{verdict}", 0) for ticket in tickets)
    return state


class TokenGuard:
    """Checks the token of a request. A browser sends it once as `/?token=...` and then as a cookie; programs send the
    header `Authorization: Bearer ...`."""

    def __init__(self, token: str) -> None:
        self._token = token

    def __call__(self, handler: Handler) -> Handler:
        """Wrap a handler so that it requires the token and answers with `HEADERS`."""

        async def guarded(request: Request) -> Response:
            cookie = f"echo2_view_{request.url.port or 80}"  # browsers share cookies between ports
            token = request.query_params.get("token", "")
            response: Response
            if request.url.path == "/" and self._lets_in(token):
                response = RedirectResponse("/", status_code=303)
                response.set_cookie(cookie, token, httponly=True, samesite="strict")
            elif self._lets_in(request.cookies.get(cookie, "")) or self._lets_in(_bearer(request)):
                try:
                    response = await handler(request)
                except UserError as error:
                    response = PlainTextResponse(str(error), status_code=404)
            else:
                response = PlainTextResponse(REFUSED, status_code=403)
            response.headers.update(HEADERS)
            return response

        return guarded

    def _lets_in(self, token: str) -> bool:
        return secrets.compare_digest(token.encode(), self._token.encode())


class Dashboard:
    """The application `app` for run directories, which may still be empty. `token`: see `TokenGuard`."""

    def __init__(self, directories: Sequence[Path], token: str) -> None:
        self._rundirs = [RunDir(directory) for directory in directories]
        self._watch = Watch(directories)
        self._scraping = asyncio.Lock()
        routes = [("/", self._page), ("/events", self._events), ("/rollouts", self._rollouts), ("/task", self._task)]
        routes += [("/workers", self._workers), ("/metrics", self._metrics)]
        routes += [("/settings", self._settings), ("/logs", self._logs)]
        routes += [(f"/{name}", self._file) for name in FILES]
        guard = TokenGuard(token)
        self.app = Starlette(
            routes=[Route(path, guard(handler)) for path, handler in routes],
            middleware=[Middleware(GZipMiddleware, compresslevel=6)],  # not of events, which would wait to fill a block
        )

    def stop(self) -> None:
        """End the event streams of the open pages."""
        self._watch.stop()

    async def _page(self, request: Request) -> Response:
        return asset("index.html")

    async def _file(self, request: Request) -> Response:
        return asset(request.url.path.removeprefix("/"))

    async def _events(self, request: Request) -> Response:
        if self._watch.num_listeners >= LISTENERS_MAX:
            return PlainTextResponse(f"{LISTENERS_MAX} pages are open; close one.\n", status_code=503)
        return StreamingResponse(self._watch.events(), media_type="text/event-stream")

    async def _metrics(self, request: Request) -> Response:
        """Return the newest metrics for Prometheus."""
        async with self._scraping:
            views = await asyncio.to_thread(self._watch.newest)
        return Response(await asyncio.to_thread(exposition, views), media_type=METRICS_TYPE)  # it reads the disk

    async def _rollouts(self, request: Request) -> Response:
        """Without `name`: return the names of the files of rollouts; else the first groups of that file."""
        folder, name = self._rundir(request).rollouts, request.query_params.get("name")
        if name is None:
            return _json(await asyncio.to_thread(rollout_log.names, folder))
        return _json(await asyncio.to_thread(rollout_log.read_groups, folder, name, GROUPS_SHOWN))

    async def _task(self, request: Request) -> Response:
        name, number = request.query_params.get("name", ""), _number(request, "group")
        return _json(await asyncio.to_thread(rollout_log.task_over_steps, self._rundir(request).rollouts, name, number))

    async def _workers(self, request: Request) -> Response:
        """Return one page of the workers that contain the words `find`, from index `first` on."""
        view, first, words = self._watch.views[self._index(request)], _number(request, "first"), request.query_params
        return _json(await asyncio.to_thread(fleet_page, view, first, words.get("find", "")))

    async def _settings(self, request: Request) -> Response:
        return _json(await asyncio.to_thread(all_settings, self._rundir(request)))

    async def _logs(self, request: Request) -> Response:
        """Without `name`: return the names of the logs; else the end of that log."""
        rundir, name = self._rundir(request), request.query_params.get("name")
        if name is None:
            return _json(await asyncio.to_thread(log_names, rundir))
        return _json(await asyncio.to_thread(log_end, rundir, name))

    def _rundir(self, request: Request) -> RunDir:
        return self._rundirs[self._index(request)]

    def _index(self, request: Request) -> int:
        index = _number(request, "run")
        if index >= len(self._rundirs):
            raise UserError(f"There is no run {index}; this page has {len(self._rundirs)}.")
        return index


def _bearer(request: Request) -> str:
    scheme, _, token = request.headers.get("authorization", "").partition(" ")
    return token if scheme.lower() == "bearer" else ""


def _number(request: Request, name: str) -> int:
    text = request.query_params.get(name, "0")
    if not (text.isascii() and text.isdecimal() and len(text) < 16):
        raise UserError(f"{name} must be a whole number.")
    return int(text)


def _json(value: Any) -> Response:
    return Response(msgspec.json.encode(value), media_type="application/json")
