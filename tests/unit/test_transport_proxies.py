"""Which connections go through an HTTP proxy, and what an error says where one is set."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from door_cases import LOOPBACK, enrolled, report, serving
from echo2.core.addresses import join
from echo2.core.child import child_environment
from echo2.core.errors import LinkError
from echo2.planning import doctor
from echo2.transport import grpc_options
from echo2.transport.grpc_link import GrpcLink
from echo2.transport.identity import RunIdentity
from echo2.transport.tickets import Ticket
from transport_cases import Desk, run

READ_BY_GRPC = ("grpc_proxy", "https_proxy", "http_proxy")
EVERY = (*READ_BY_GRPC, *grpc_options.OTHERS, "no_proxy", "no_grpc_proxy", "NO_PROXY")
FAR = "head.example.org"


@pytest.fixture(autouse=True)
def _no_proxies(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in EVERY:
        monkeypatch.delenv(name, raising=False)


@dataclass
class Proxy:
    """An HTTP proxy that leads every CONNECT to one port here, or refuses it."""

    target: int = 0
    asked: list[str] = field(default_factory=list)
    url: str = ""
    writers: list[asyncio.StreamWriter] = field(default_factory=list)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection."""
        self.writers.append(writer)
        self.asked.append((await reader.readuntil(b"\r\n\r\n")).split(b"\r\n")[0].decode())
        if not self.target:
            writer.write(b"HTTP/1.1 403 Forbidden\r\n\r\n")
            writer.close()
            return
        far_reader, far_writer = await asyncio.open_connection(LOOPBACK, self.target)
        self.writers.append(far_writer)
        writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
        await asyncio.gather(_pass_on(reader, far_writer), _pass_on(far_reader, writer))


async def _pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(1 << 16):
        writer.write(data)
    writer.close()


@asynccontextmanager
async def proxy(target: int = 0) -> AsyncIterator[Proxy]:
    """A proxy that listens."""
    here = Proxy(target)
    server = await asyncio.start_server(here.serve, LOOPBACK, 0)
    here.url = f"http://user:secret@{join(LOOPBACK, server.sockets[0].getsockname()[1])}"
    try:
        yield here
    finally:
        server.close()
        for writer in here.writers:
            writer.close()
        await asyncio.gather(*(writer.wait_closed() for writer in here.writers), return_exceptions=True)


@pytest.mark.parametrize("variable", READ_BY_GRPC)
def test_no_proxy_gets_the_calls_to_this_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    async def scenario() -> None:
        identity = RunIdentity.create_or_load(tmp_path / "identity")
        _, credentials = enrolled(identity, tmp_path / "peer")
        async with serving(identity, Desk()) as port, proxy() as refusing:
            monkeypatch.setenv(variable, refusing.url)
            link = GrpcLink(join(LOOPBACK, port), credentials)
            await report(link)
            await link.close()
            assert refusing.asked == []

    run(scenario())


def test_a_far_head_is_called_through_the_proxy_that_its_worker_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        identity = RunIdentity.create_or_load(tmp_path / "identity")
        _, credentials = enrolled(identity, tmp_path / "peer")
        async with serving(identity, Desk()) as port, proxy(port) as leading:
            monkeypatch.setenv("grpc_proxy", leading.url)
            link = GrpcLink(join(FAR, port), credentials)
            await report(link)
            await link.close()
            assert leading.asked == [f"CONNECT {FAR}:{port} HTTP/1.1"]
            ticket = Ticket.parse(identity.make_ticket("worker", join(FAR, port), 1, 1.0))
            found = {each.about: each.verdict for each in await asyncio.to_thread(_at_ticket, ticket)}
            assert found["link"] == found["head"] == "fine"

    run(scenario())


def _at_ticket(ticket: Ticket) -> list[doctor.Finding]:
    return list(doctor.at_ticket(ticket, time.time()))


def test_an_error_and_the_doctor_name_a_proxy_that_refuses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        identity = RunIdentity.create_or_load(tmp_path / "identity")
        _, credentials = enrolled(identity, tmp_path / "peer")
        async with proxy() as refusing:
            monkeypatch.setenv("grpc_proxy", refusing.url)
            link = GrpcLink(join(FAR, 7341), credentials)
            shown = refusing.url.replace("user:secret@", "")
            with pytest.raises(LinkError, match=f"^{FAR}:7341 does not answer: .*through the proxy {shown}, as grpc_p"):
                await report(link)
            await link.close()
            ticket = Ticket.parse(identity.make_ticket("worker", join(FAR, 7341), 1, 1.0))
            told = {each.about: each for each in await asyncio.to_thread(_at_ticket, ticket)}["link"]
            assert (told.verdict, "403" in told.said, shown in told.todo) == ("wrong", True, True)

    run(scenario())


@pytest.mark.parametrize(
    ("variables", "host", "used", "said"),
    [
        ({}, FAR, "", ""),
        ({"https_proxy": "http://p:3128"}, FAR, "", f"https_proxy is set, and was not used: if only .* to {FAR}, set"),
        ({"HTTP_PROXY": "http://p:3128"}, FAR, "", "HTTP_PROXY is set, and was not used"),
        ({"http_proxy": "http://p:3128"}, "10.0.0.7", "", "private addresses are called directly"),
        ({"grpc_proxy": "http://p:3128"}, "10.0.0.7", "", "private addresses are called directly"),
        ({"grpc_proxy": "http://u:pw@p:3128"}, FAR, "http://u:pw@p:3128", "through the proxy http://p:3128, as grpc"),
        ({"grpc_proxy": "http://p:3128", "no_proxy": ".example.org"}, FAR, "", f"no_proxy excepts {FAR}"),
    ],
)
def test_the_chosen_proxy_and_its_log_line(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], host: str, used: str, said: str
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert grpc_options.proxy_of(host) == used
    note = grpc_options.note(host)
    assert re.search(said, note)
    assert bool(note) == bool(said)
    assert "pw" not in note


def test_a_child_with_the_users_code_calls_this_machine_directly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("no_proxy", "example.org")
    environment = child_environment()
    assert environment["no_proxy"] == "example.org,127.0.0.1,localhost,::1"
    assert environment["NO_PROXY"] == "127.0.0.1,localhost,::1"
