"""Addresses as text, and which of them are near; the head's IPv6 addresses, from listening to joining; a head that has
several addresses, and answers at one of them."""

from __future__ import annotations

import asyncio
import socket
from contextlib import suppress
from pathlib import Path

import pytest

from door_cases import report
from echo2.core import addresses
from echo2.core.background import awaited
from echo2.core.errors import LinkError
from echo2.transport import wire_pb2 as wire
from echo2.transport.base import AWAY
from echo2.transport.grpc_link import GrpcLink, connect, join
from echo2.transport.grpc_server import GrpcServer
from echo2.transport.identity import RunIdentity
from echo2.transport.tickets import Ticket
from transport_cases import SECONDS, Desk, attend, run


@pytest.mark.parametrize(
    ("host", "port", "address"),
    [
        ("127.0.0.1", 1, "127.0.0.1:1"),
        ("head.example.org", 7341, "head.example.org:7341"),
        ("::1", 7341, "[::1]:7341"),
        ("[2001:db8::5]", 7341, "[2001:db8::5]:7341"),
        ("fe80::1%eth0", 65535, "[fe80::1%eth0]:65535"),
    ],
)
def test_joined_addresses_can_be_split(host: str, port: int, address: str) -> None:
    assert addresses.join(host, port) == address
    assert addresses.split(address) == (host.strip("[]"), port)


@pytest.mark.parametrize(
    ("host", "is_loopback", "is_private"),
    [
        ("127.0.0.1", True, True),
        ("127.3.2.1", True, True),
        ("::1", True, True),
        ("[::1]", True, True),
        ("::ffff:127.0.0.1", True, True),
        ("localhost", True, True),
        ("192.168.1.7", False, True),
        ("100.64.0.9", False, True),  # of a provider's or VPN's own network
        ("fd00::7", False, True),
        ("fe80::1%eth0", False, True),
        ("gpu-box", False, True),
        ("gpu-box.local", False, True),
        ("8.8.8.8", False, False),
        ("2606:4700::1", False, False),
        ("head.example.org", False, False),
    ],
)
def test_hosts_nearby(host: str, is_loopback: bool, is_private: bool) -> None:
    assert (addresses.is_loopback(host), addresses.is_private(host)) == (is_loopback, is_private)


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="no IPv6 here")
def test_a_machine_joins_a_head_at_an_ipv6_address(tmp_path: Path) -> None:
    async def scenario() -> None:
        identity, handlers = RunIdentity.create_or_load(tmp_path / "identity"), dict(Desk().handlers())
        server = GrpcServer("::1", 0, identity, handlers)
        port = await server.start()
        ticket = identity.make_ticket("worker", addresses.join("::1", port), 1, 1.0)
        assert Ticket.parse(ticket).address == f"[::1]:{port}"
        link, _ = await connect(ticket, tmp_path / "state")
        await report(link)
        await link.close()
        await server.stop()

    run(scenario())


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
        return port


async def reported(link: GrpcLink) -> int:
    """Report until the head takes it. Return the number of tries."""
    for tried in range(1, 100):
        with suppress(LinkError):
            await report(link)
            return tried
        await asyncio.sleep(0.05)
    raise AssertionError("no head took the report")


def test_links_find_the_head_that_took_over(tmp_path: Path) -> None:
    """The stream under way ends with the old head; all links of the machine go to the new one, and new links, too."""

    async def scenario() -> None:
        identity, ports = RunIdentity.create_or_load(tmp_path / "identity"), (free_port(), free_port())
        ticket = identity.make_ticket("worker", ",".join(f"127.0.0.1:{port}" for port in ports), 1, 1.0)
        desks = Desk(), Desk(), Desk()
        old = GrpcServer("127.0.0.1", ports[1], identity, desks[0].handlers())  # a standby's address is the first
        await old.start()
        member = await join(ticket, tmp_path / "state")
        link, other = member.link(), member.link()
        assert (await reported(link), await reported(other)) == (1, 1)  # joining has found out which one answers
        attending = awaited(attend(link))
        await desks[0].attended.wait()
        await old.stop()
        with pytest.raises(LinkError):
            await attending
        new = GrpcServer("127.0.0.1", ports[0], identity, desks[1].handlers())
        await new.start()
        await reported(link)
        assert await reported(other) <= 2
        assert await reported(member.network().to_head()) == 1
        await new.stop()
        back = GrpcServer("127.0.0.1", ports[1], identity, desks[2].handlers())
        await back.start()
        await reported(link)
        assert [len(desk.peers) for desk in desks] == [2, 3, 1]
        for one in (link, other):
            await one.close()
        await back.stop()

    run(scenario())


@pytest.mark.parametrize("whose", ["another run", "a web server", "nobody"])
def test_a_foreign_server_gets_no_ticket_and_the_next_address_is_called(tmp_path: Path, whose: str) -> None:
    """It hears no ticket, for it cannot prove to be the head, and the next one is called."""

    async def scenario() -> None:
        identity, desk, other = RunIdentity.create_or_load(tmp_path / "identity"), Desk(), Desk()
        foreign = GrpcServer("127.0.0.1", 0, RunIdentity.create_or_load(tmp_path / "foreign"), other.handlers())
        port, heard = await foreign.start(), bytearray()

        async def say(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
            heard.extend(await reader.read())
            writer.close()

        page = await asyncio.start_server(say, "127.0.0.1", 0)
        ports = {"another run": port, "a web server": page.sockets[0].getsockname()[1], "nobody": free_port()}
        head = GrpcServer("127.0.0.1", 0, identity, desk.handlers())
        listed = f"127.0.0.1:{ports[whose]},127.0.0.1:{await head.start()}"
        ticket = identity.make_ticket("worker", listed, 1, 1.0)
        link, _ = await connect(ticket, tmp_path / "state")
        await reported(link)
        assert (len(desk.peers), len(other.peers)) == (1, 0)
        assert ticket.encode() not in heard
        await link.close()
        page.close()
        for server in (foreign, head):
            await server.stop()

    run(scenario())


def test_links_leave_a_head_that_must_not_answer(tmp_path: Path) -> None:
    """It is alive, and its streams are open; its store has another head."""

    async def scenario() -> None:
        identity, old, new = RunIdentity.create_or_load(tmp_path / "identity"), Desk(), Desk()
        servers = [GrpcServer("127.0.0.1", 0, identity, desk.handlers()) for desk in (old, new)]
        addresses = ",".join([f"127.0.0.1:{await server.start()}" for server in servers])
        member = await join(identity.make_ticket("worker", addresses, 1, 1.0), tmp_path / "state")
        link, other = member.link(), member.link()
        attending = awaited(attend(other))
        await old.attended.wait()
        with pytest.raises(LinkError, match="is not the head now: it was taken over"):
            await link.call("FailLease", wire.LeaseFailed(reason=AWAY, detail="it was taken over"), SECONDS)
        await report(link)
        await report(other)
        with pytest.raises(LinkError):
            await attending
        assert (len(old.peers), len(new.peers)) == (0, 2)
        await link.close()
        await other.close()
        for server in servers:
            await server.stop()

    run(scenario())


def test_a_call_ends_as_a_broken_link_though_the_address_is_the_same_again(tmp_path: Path) -> None:
    async def scenario() -> None:
        identity, desk = RunIdentity.create_or_load(tmp_path / "identity"), Desk()
        server = GrpcServer("127.0.0.1", 0, identity, desk.handlers())
        listed = f"127.0.0.1:{await server.start()},127.0.0.1:{free_port()}"
        member = await join(identity.make_ticket("worker", listed, 1, 1.0), tmp_path / "state")
        link = member.link()
        attending = awaited(attend(link))
        await desk.attended.wait()
        for address in member.head.all:
            member.head.after(address)
            link.open()
        with pytest.raises(LinkError, match="the link was closed"):
            await attending
        await link.close()
        await server.stop()

    run(scenario())
