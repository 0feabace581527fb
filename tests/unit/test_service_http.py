"""Connections of the service's HTTP server: they end where no request comes, never where an answer is waited for."""

from __future__ import annotations

import asyncio
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from echo2.core.errors import UserError
from echo2_service import limits
from echo2_service.front import http_server
from echo2_service.front.http_server import HttpServer

REQUEST = b"GET /held HTTP/1.1\r\nHost: x\r\n\r\n"


def run(client: Callable[[int, asyncio.Event], Awaitable[None]], servers: list[HttpServer] | None = None) -> None:
    """A client and the event on which the server's one page waits, against a server on loopback, which is added to
    `servers`."""

    async def both() -> None:
        may_answer = asyncio.Event()

        async def held(request: Request) -> Response:
            await may_answer.wait()
            return PlainTextResponse("answered")

        server = HttpServer(Starlette(routes=[Route("/held", held)]), may_answer.set)
        server.config.load()
        server.lifespan = server.config.lifespan_class(server.config)
        if servers is not None:
            servers.append(server)
        await server.startup([http_server.listening("127.0.0.1", 0)])
        try:
            await client(server.servers[0].sockets[0].getsockname()[1], may_answer)
        finally:
            server.should_exit = True
            await server.shutdown()

    asyncio.run(asyncio.wait_for(both(), 60.0))


@asynccontextmanager
async def connected(port: int) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        yield reader, writer
    finally:
        writer.close()
        with suppress(ConnectionError):
            await writer.wait_closed()


async def is_closed(reader: asyncio.StreamReader) -> bool:
    """Waits until it is, or something comes."""
    try:
        return await reader.read(1) == b""
    except ConnectionError:
        return True


def test_a_body_whose_header_does_not_arrive_costs_its_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "HEAD_SECONDS", 5.0)

    async def client(port: int, may_answer: asyncio.Event) -> None:
        async with connected(port) as (reader, writer):
            writer.write(REQUEST)
            async with connected(port) as (silent, _), connected(port) as (slow, slow_writer):
                slow_writer.write(REQUEST[:-10])
                assert await is_closed(silent)
                assert await is_closed(slow)
            may_answer.set()  # this one has waited as long as those that were closed
            assert (await reader.readuntil(b"answered")).startswith(b"HTTP/1.1 200")
            writer.write(REQUEST[:9])
            assert await is_closed(reader)

    run(client)


def test_connections_above_the_limit_are_closed_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server, "connections_max", lambda: 2)

    async def client(port: int, may_answer: asyncio.Event) -> None:
        async with connected(port) as (reader, writer), connected(port), connected(port) as (third, _):
            assert await is_closed(third)
            may_answer.set()
            writer.write(REQUEST)
            assert await reader.readuntil(b"answered")

    run(client)


def test_the_second_part_of_an_answer_does_not_wait_until_the_first_is_acknowledged() -> None:
    servers = list[HttpServer]()

    async def client(port: int, may_answer: asyncio.Event) -> None:
        may_answer.set()
        async with connected(port) as (reader, writer):
            writer.write(REQUEST)
            assert await reader.readuntil(b"answered")
            (connection,) = servers[0].server_state.connections
            accepted = connection.transport.get_extra_info("socket")
            assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)

    run(client, servers)


def test_a_port_that_is_taken_is_refused_before_anything_starts() -> None:
    with http_server.listening("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(UserError, match=f"port = {port} cannot be used: Address already in use. Choose another"):
            http_server.listening("127.0.0.1", port)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_service_ends_in_order_on_sigterm(tmp_path: Path, number: signal.Signals) -> None:
    (tmp_path / "serve.toml").write_text('[bases]\n"me/tiny" = ""\n')
    command = [
        sys.executable,
        "-m",
        "echo2",
        "serve",
        str(tmp_path / "serve.toml"),
        "--port",
        "0",
        "--out",
        str(tmp_path),
    ]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert "serving at" in process.stdout.readline()
        process.send_signal(number)
        _, errors = process.communicate()
    assert (process.returncode, errors) == (0, "")
