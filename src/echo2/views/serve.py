"""`echo2 view`: serves the dashboard."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import secrets
import socket
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType
from typing import Protocol

import uvicorn
from starlette.applications import Starlette

from echo2.config.rundir import newest_run
from echo2.core.addresses import LOOPBACK, family, is_loopback, join
from echo2.core.errors import UserError
from echo2.views.app import Dashboard

#: Seconds that open connections get to finish at shutdown.
LAST_SECONDS = 5
BYTES_OF_TOKEN = 16
#: Environment variable with a fixed token, for programs that connect repeatedly.
TOKEN_VARIABLE = "ECHO2_VIEW_TOKEN"


def run(options: argparse.Namespace) -> int:
    """The command.

    Raises:
        UserError: as `serve`; or there is no run below outputs/.
    """
    return serve(options.directories or [newest_run().path], options.host, options.port, options.json)


def serve(directories: Sequence[Path], host: str = LOOPBACK, port: int = 0, as_json: bool = False) -> int:
    """Serve the dashboard of these runs until the process is told to end. `port` 0: any free port.

    Raises:
        UserError: the address is taken, or a directory is not there.
    """
    for directory in directories:
        if not directory.is_dir():
            raise UserError(
                f"There is no directory {directory}. Name a run directory, or an empty one for a run to come."
            )
    return serve_pages(lambda token: Dashboard(directories, token), host, port, as_json)


class Pages(Protocol):
    """The application `app` to serve. `stop` ends the event streams of open pages."""

    app: Starlette

    def stop(self) -> None: ...


def serve_pages(make: Callable[[str], Pages], host: str = LOOPBACK, port: int = 0, as_json: bool = False) -> int:
    """Serve pages until the process is told to end. `make` builds the pages for the token that they require. Their
    address is printed first.

    Raises:
        UserError: the address is taken.
    """
    token = os.environ.get(TOKEN_VARIABLE) or secrets.token_urlsafe(BYTES_OF_TOKEN)
    listening = _listen(host, port)
    server = _Server(make(token))
    url = f"http://{join(host, listening.getsockname()[1])}/?token={token}"
    print(json.dumps({"url": url}) if as_json else f"open {url}", flush=True)
    if not is_loopback(host):
        note = "Whoever can read this network's traffic can read the page, and its token: it is not encrypted."
        print(note, file=sys.stderr if as_json else sys.stdout, flush=True)
    asyncio.run(server.serve(sockets=[listening]))
    return 0


class _Server(uvicorn.Server):
    """uvicorn, which ends the event streams of open pages when it is told to end."""

    def __init__(self, pages: Pages) -> None:
        settings = uvicorn.Config(
            pages.app, log_level="warning", http="h11", ws="none", timeout_graceful_shutdown=LAST_SECONDS
        )
        super().__init__(settings)
        self._pages = pages

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """End the event streams of the pages before the server."""
        self._pages.stop()
        super().handle_exit(sig, frame)


def _listen(host: str, port: int) -> socket.socket:
    try:
        return socket.create_server((host, port), family=family(host))
    except OSError as error:
        raise UserError(f"Cannot listen on {join(host, port)}: {error.strerror}. Choose another --port.") from error
