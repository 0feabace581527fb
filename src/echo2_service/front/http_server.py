"""The service's HTTP server: uvicorn, with limits on unauthenticated connections and a prompt shutdown."""

from __future__ import annotations

import asyncio
import functools
import math
import socket
from collections import Counter
from collections.abc import Callable
from typing import Any, ClassVar

import uvicorn
from starlette.applications import Starlette
from uvicorn.protocols.http.h11_impl import H11Protocol

from echo2.core.addresses import family, join, network
from echo2.core.devices import map_large_blocks
from echo2.core.errors import UserError
from echo2.transport.sockets import raise_descriptor_limit
from echo2_service import limits

#: Connections that wait to be accepted: an SDK with 2000 samples polls 2000 times at once.
BACKLOG = 4096
#: Descriptors reserved for files, the database and other processes.
DESCRIPTORS_LEFT = 256
LAST_SECONDS = 5


def listening(host: str, port: int) -> socket.socket:
    """Return a socket that listens there. `port`: 0: any free one.

    Raises:
        UserError: the address cannot be used.
    """
    try:
        return socket.create_server((host, port), family=family(host), backlog=BACKLOG)
    except OSError as error:
        reason = str(error.strerror).partition(" (")[0]  # behind it the address once more
        raise UserError(
            f"host = {host!r} and port = {port} cannot be used: {reason}. Choose another port in the file, or give "
            "--port (0: any free one)."
        ) from error


class BoundedConnection(H11Protocol):
    """A connection that is closed if the complete head of its next request does not arrive in time, if its client does
    not read an answer, or if there are too many connections, in all or of its address. uvicorn itself waits forever for
    the head of a first request, and for the reader of an answer.
    """

    _waiting: asyncio.TimerHandle | None = None
    _unread: asyncio.TimerHandle | None = None
    _of_address: ClassVar[Counter[str]] = Counter()  # connections that this process has
    _address = ""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Accept the connection, or abort it if there are too many."""
        super().connection_made(transport)
        # A response is two writes, and the second would wait up to 40 ms for the client to acknowledge the first.
        # asyncio sees to that only where the listener's socket has a protocol number.
        transport.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._address = network(self.client[0] if self.client else "")
        self._of_address[self._address] += 1
        if len(self.connections) > connections_max() or self._of_address[self._address] > address_connections_max():
            transport.abort()
        else:
            self._wait_for_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the timers of a closed connection."""
        self._stop_waiting()
        self._has_read()
        self._of_address[self._address] -= 1
        if not self._of_address[self._address]:
            del self._of_address[self._address]
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        """Close the connection unless its client reads on: `Counted` writes no more than so many bytes at once."""
        self._unread = self.loop.call_later(limits.PROGRESS_SECONDS, self.transport.abort)
        super().pause_writing()

    def resume_writing(self) -> None:
        """The client has read."""
        self._has_read()
        super().resume_writing()

    def handle_events(self) -> None:
        """Stop the timer once the head of a request is complete."""
        super().handle_events()
        if not getattr(self.cycle, "response_complete", True):  # None before the first request
            self._stop_waiting()

    def on_response_complete(self) -> None:
        """Start the timer for the next request."""
        self._stop_waiting()
        self._wait_for_head()
        super().on_response_complete()

    def _wait_for_head(self) -> None:
        self._waiting = self.loop.call_later(limits.HEAD_SECONDS, self.transport.close)

    def _has_read(self) -> None:
        if self._unread is not None:
            self._unread.cancel()
            self._unread = None

    def _stop_waiting(self) -> None:
        if self._waiting is not None:
            self._waiting.cancel()
            self._waiting = None


@functools.cache
def connections_max() -> int:
    """Return the maximum number of connections: the descriptor limit, less `DESCRIPTORS_LEFT`."""
    return max(64, raise_descriptor_limit() - DESCRIPTORS_LEFT)


def address_connections_max() -> int:
    """Return the maximum number of connections of one address."""
    return math.ceil(connections_max() * limits.ADDRESS_CONNECTIONS_SHARE)


class HttpServer(uvicorn.Server):
    """uvicorn, which prints its address, and which calls `stop` to answer open polls at its shutdown. `serve` it
    with a socket of `listening`; it returns after SIGTERM or SIGINT, which uvicorn would raise again instead.
    """

    def __init__(self, app: Starlette, stop: Callable[[], None]) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                log_level="warning",
                backlog=BACKLOG,
                h11_max_incomplete_event_size=limits.HEADER_BYTES_MAX,
                timeout_graceful_shutdown=LAST_SECONDS,
                timeout_keep_alive=int(limits.HEAD_SECONDS),
                http=BoundedConnection,
                ws="none",
            )
        )
        self._stop = stop

    async def startup(self, sockets: Any = None) -> None:
        """Listen, then print the address. Bodies of many MB come and go in several threads."""
        map_large_blocks()
        await super().startup(sockets)
        for server in self.servers:
            for listener in server.sockets:
                host, port = listener.getsockname()[:2]
                print(f"serving at http://{join(host, port)}", flush=True)

    def handle_exit(self, sig: int, frame: Any) -> None:
        """Answer the open polls, then end the server."""
        self._stop()
        self.should_exit = True
