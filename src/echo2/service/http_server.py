"""The service's HTTP server: uvicorn, with bounds on connections of which nobody is known yet, and a prompt end."""

from __future__ import annotations

import asyncio
import functools
import signal
from collections.abc import Callable
from typing import Any

import uvicorn
from starlette.applications import Starlette
from uvicorn.protocols.http.h11_impl import H11Protocol

from echo2.transport.door import raise_descriptor_limit

#: Connections that wait to be taken: 2000 samples of an SDK are 2000 polls.
BACKLOG = 4096
HEADER_BYTES_MAX = 64 << 10
#: From a connection's beginning, or from its last answer, to the whole head of its next request.
HEAD_SECONDS = 75.0
#: Descriptors that are left for files, the database and other processes.
DESCRIPTORS_LEFT = 256
LAST_SECONDS = 5


class BoundedConnection(H11Protocol):
    """A connection that is closed where its next request does not come, whole or byte by byte, or where there are too
    many: uvicorn itself waits for the head of a first request for ever.
    """

    _waiting: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """It begins."""
        super().connection_made(transport)
        if len(self.connections) > connections_max():
            transport.abort()
        else:
            self._wait_for_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """It has ended."""
        self._stop_waiting()
        super().connection_lost(exc)

    def handle_events(self) -> None:
        """Bytes have come."""
        super().handle_events()
        if not getattr(self.cycle, "response_complete", True):  # None before the first request
            self._stop_waiting()

    def on_response_complete(self) -> None:
        """The next request may come."""
        self._stop_waiting()
        self._wait_for_head()
        super().on_response_complete()

    def _wait_for_head(self) -> None:
        self._waiting = self.loop.call_later(HEAD_SECONDS, self.transport.close)

    def _stop_waiting(self) -> None:
        if self._waiting is not None:
            self._waiting.cancel()
            self._waiting = None


@functools.cache
def connections_max() -> int:
    """As many as there can be descriptors, but for those that the process itself needs."""
    return max(64, raise_descriptor_limit() - DESCRIPTORS_LEFT)


class HttpServer(uvicorn.Server):
    """uvicorn, which lets polls go by `stop` when it is told to end, and says where it listens."""

    def __init__(self, app: Starlette, stop: Callable[[], None], host: str, port: int) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                host=host,
                port=port,
                log_level="warning",
                backlog=BACKLOG,
                h11_max_incomplete_event_size=HEADER_BYTES_MAX,
                timeout_graceful_shutdown=LAST_SECONDS,
                timeout_keep_alive=int(HEAD_SECONDS),
                http=BoundedConnection,
                ws="none",
            )
        )
        self._stop = stop

    async def startup(self, sockets: Any = None) -> None:
        """Listen, then say so."""
        await super().startup(sockets)
        for server in self.servers:
            for socket in server.sockets:
                host, port = socket.getsockname()[:2]
                print(f"serving at http://{host}:{port}", flush=True)

    def handle_exit(self, sig: int, frame: Any) -> None:
        """Ends the polls, too."""
        self._stop()
        super().handle_exit(signal.SIGTERM, frame)
