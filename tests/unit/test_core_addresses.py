"""Addresses as text, and which of them are near; the head's IPv6 addresses, from listening to joining."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from door_cases import report
from echo2.core import addresses
from echo2.transport.grpc_link import connect
from echo2.transport.grpc_server import GrpcServer
from echo2.transport.identity import RunIdentity
from echo2.transport.tickets import Ticket
from transport_cases import Desk, run


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
def test_what_is_joined_can_be_split(host: str, port: int, address: str) -> None:
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
def test_which_hosts_are_near(host: str, is_loopback: bool, is_private: bool) -> None:
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
