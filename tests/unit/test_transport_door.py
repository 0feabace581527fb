"""The door against strangers: who is honest is still served."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import gc
import logging
import socket
import ssl
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from door_cases import (
    LOOPBACK,
    dialled,
    enrolled,
    head_process,
    is_closed,
    linked,
    report,
    serving,
    until_closed,
)
from echo2.core.addresses import network
from echo2.core.errors import PeerError, UserError
from echo2.transport import door as doors
from echo2.transport import grpc_options, limits, sockets
from echo2.transport import wire_pb2 as wire
from echo2.transport.grpc_link import GrpcLink
from echo2.transport.grpc_server import GrpcServer
from echo2.transport.identity import SERVER_NAME, RunIdentity
from echo2.transport.tickets import Credentials
from transport_cases import SECONDS, Desk, run

#: Another address of this machine.
ELSEWHERE = "127.0.0.2"


@pytest.fixture
def identity(tmp_path: Path) -> RunIdentity:
    return RunIdentity.create_or_load(tmp_path / "run")


# ---- strangers -------------------------------------------------------------------------------------------------------


def test_idle_connections_of_one_address_are_bounded_and_block_no_other(
    identity: RunIdentity, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(doors, "connections_max", lambda: 4096)  # whatever limit of descriptors this process has
    monkeypatch.setattr(doors, "FIRST_BYTES_SECONDS", 3600.0)  # nobody is dropped for saying nothing

    async def scenario() -> None:
        credentials = enrolled(identity, tmp_path / "peer")[1]
        async with serving(identity, Desk()) as port, linked(port, credentials) as link:
            await report(link)
            with dialled(port, limits.UNPROVEN_PER_ADDRESS_MAX + 70, ELSEWHERE) as idle:
                await until_closed(idle, 70)
                await report(link)
                async with linked(port, credentials) as another:
                    await report(another)
                assert sum(map(is_closed, idle)) == 70

    with caplog.at_level(logging.WARNING):
        run(scenario())
    told = [record.getMessage() for record in caplog.records if record.name == "echo2.transport.door"]
    assert len(told) == 1  # not one a connection
    assert "refused 70 connections: 70 of 127.0.0.2" in told[0]


def test_connections_without_a_call_leave_three_quarters_to_members(
    identity: RunIdentity, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From several addresses, so that no bound of one address is reached."""
    monkeypatch.setattr(doors, "connections_max", lambda: 40)
    monkeypatch.setattr(doors, "FIRST_BYTES_SECONDS", 3600.0)  # nobody is dropped for saying nothing

    async def scenario() -> None:
        credentials = enrolled(identity, tmp_path / "peer")[1]
        async with serving(identity, Desk()) as port, linked(port, credentials) as link:
            await report(link)
            with ExitStack() as stack:
                idle = [one for at in range(2, 6) for one in stack.enter_context(dialled(port, 5, f"127.0.0.{at}"))]
                await until_closed(idle, 10)
                await report(link)
                assert sum(map(is_closed, idle)) == 10

    run(scenario())


def test_a_connection_without_a_whole_handshake_is_dropped(
    identity: RunIdentity, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(grpc_options, "HANDSHAKE_SECONDS", 3.0)  # enough for the honest one, too

    async def scenario() -> None:
        credentials = enrolled(identity, tmp_path / "peer")[1]
        async with serving(identity, Desk()) as port, linked(port, credentials) as link:
            await report(link)
            loop = asyncio.get_running_loop()
            with dialled(port, 2) as (web, half):
                await loop.sock_sendall(web, b"GET / HTTP/1.1\r\n\r\n")
                await loop.sock_sendall(half, b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03")
                await until_closed([web], 1)
                monkeypatch.setattr(doors, "FIRST_BYTES_SECONDS", 0.2)  # who has something to say has said it
                with dialled(port, 1) as silent:
                    await until_closed(silent, 1)
                await until_closed([half], 1)  # by gRPC
                await report(link)

    with caplog.at_level(logging.WARNING):
        run(scenario())
    assert "refused 2 connections" in caplog.text  # those that never reached gRPC
    assert "1 of 127.0.0.1 (did not speak TLS)" in caplog.text
    assert "1 of 127.0.0.1 (said nothing)" in caplog.text


def client_context(credentials: Credentials, folder: Path) -> ssl.SSLContext:
    for name, pem in (("cert", credentials.certificate_pem), ("key", credentials.key_pem)):
        (folder / name).write_bytes(pem)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.load_verify_locations(cadata=credentials.ca_pem.decode())
    context.load_cert_chain(folder / "cert", folder / "key")
    context.set_alpn_protocols(["h2"])
    return context


def test_a_member_that_asks_for_nothing_or_was_revoked_is_dropped(
    identity: RunIdentity, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """TLS knows nothing of revocations: a certificate alone must not keep a connection."""

    async def scenario() -> None:
        credentials = enrolled(identity, tmp_path / "peer")[1]
        revoked_id, revoked = enrolled(identity, tmp_path / "revoked")
        async with serving(identity, Desk()) as port, linked(port, credentials) as link:
            await report(link)
            with monkeypatch.context() as hasty:  # the honest have the usual time to make their calls
                hasty.setattr(grpc_options, "HANDSHAKE_SECONDS", 2.0)
                hasty.setattr(doors, "NAMELESS_SECONDS", 0.0)
                reader, writer = await asyncio.open_connection(
                    LOOPBACK, port, ssl=client_context(credentials, tmp_path), server_hostname=SERVER_NAME
                )
                writer.write(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\4\0\0\0\0\0")  # a preface, no settings
                with contextlib.suppress(ConnectionError):
                    while await reader.read(1 << 16):
                        pass
                writer.close()
            identity.revoke(revoked_id)
            async with linked(port, revoked) as late:
                with pytest.raises(PeerError, match="revoked"):
                    await report(late)
            await report(link)

    run(scenario())


def test_the_kernel_probes_the_machine_of_a_silent_caller_and_sends_at_once(
    identity: RunIdentity, tmp_path: Path
) -> None:
    async def scenario() -> None:
        server = GrpcServer(LOOPBACK, 0, identity, {"Report": Desk().report})
        async with linked(await server.start(), enrolled(identity, tmp_path / "peer")[1]) as link:
            await report(link)
            (connection,) = server._door.connections()
            taken = connection.outer.transport.get_extra_info("socket")
            assert taken.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
            assert taken.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
        await server.stop()

    run(scenario())


def test_handshakes_of_one_address_are_slowed_down(
    identity: RunIdentity, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "HANDSHAKES_BURST_PER_ADDRESS", 5.0)
    monkeypatch.setattr(limits, "HANDSHAKES_PER_SECOND_PER_ADDRESS", 0.01)
    monkeypatch.setattr(grpc_options, "HANDSHAKE_SECONDS", 10 * SECONDS)  # nobody is dropped for being slow

    async def scenario() -> None:
        credentials = enrolled(identity, tmp_path / "peer")[1]
        async with serving(identity, Desk()) as port:
            loop = asyncio.get_running_loop()
            with dialled(port, 20, ELSEWHERE) as eager:
                for one in eager:
                    await loop.sock_sendall(one, b"\x16\x03\x01\x02\x00\x01")
                await until_closed(eager, 15)
                async with linked(port, credentials) as link:
                    await report(link)
                assert sum(map(is_closed, eager)) == 15

    run(scenario())


@pytest.mark.parametrize("first_bytes", [b"", b"\x16\x03\x01\x02\x00\x01"], ids=["idle", "half a handshake"])
def test_few_descriptors_are_not_used_up(identity: RunIdentity, tmp_path: Path, first_bytes: bytes) -> None:
    """1,100 connections at a process that can open 256 files."""
    credentials = enrolled(identity, tmp_path / "peer")[1]

    async def scenario(port: int) -> None:
        loop = asyncio.get_running_loop()
        async with linked(port, credentials) as link:
            await report(link)
            with dialled(port, 1100) as many:
                for number, one in enumerate(many):
                    await asyncio.wait([asyncio.ensure_future(loop.sock_sendall(one, first_bytes))])
                    if number % 100 == 0:
                        await report(link)
                await until_closed(many, 1000)
                await report(link)

    with head_process(tmp_path / "run", 256) as (port, _):
        run(scenario(port))


def test_listener_that_runs_out_of_descriptors_goes_on(
    identity: RunIdentity, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doors, "PAUSE_SECONDS", 0.05)

    class Scarce:
        """A listening socket in a process that has no descriptors left the first five times."""

        def __init__(self, listener: socket.socket) -> None:
            self._listener, self.failed_at = listener, list[float]()

        def accept(self) -> Any:
            if len(self.failed_at) < 5:
                self.failed_at.append(time.monotonic())
                raise OSError(errno.EMFILE, "Too many open files")
            return self._listener.accept()

        def fileno(self) -> int:
            return self._listener.fileno()

        def close(self) -> None:
            self._listener.close()

        def getsockname(self) -> Any:
            return self._listener.getsockname()

    made: list[Scarce] = []
    listen = sockets._listen

    def scarce(family: int, address: str, port: int) -> Any:
        made.append(Scarce(listen(family, address, port)))
        return made[-1]

    monkeypatch.setattr(sockets, "_listen", scarce)

    async def scenario() -> None:
        credentials = enrolled(identity, tmp_path / "peer")[1]
        async with serving(identity, Desk()) as port, linked(port, credentials) as link:
            await report(link)
        failed_at = made[0].failed_at
        assert failed_at[4] - failed_at[0] >= 3.9 * doors.PAUSE_SECONDS  # it waits, and does not spin

    run(scenario())


# ---- the port --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "[::]", "localhost", "127.0.0.1"])
def test_callers_address_is_known_whatever_is_listened_on(host: str, identity: RunIdentity, tmp_path: Path) -> None:
    async def scenario() -> None:
        credentials, desk = enrolled(identity, tmp_path / "peer")[1], Desk()
        server = GrpcServer(host, 0, identity, desk.handlers())
        port = await server.start()
        async with linked(port, credentials) as link:
            await report(link)
        await server.stop()
        assert [peer.host for peer in desk.peers] == [LOOPBACK]

    run(scenario())


@pytest.mark.parametrize("starts", [False, True])
def test_a_server_whose_stop_is_given_up_has_stopped(identity: RunIdentity, starts: bool) -> None:
    """Ctrl-C while a process ends must not leave a server that runs into the end of the loop."""

    async def scenario(moments: int) -> bool:
        server = GrpcServer(LOOPBACK, 0, identity, {})
        if starts:
            await server.start()
            stopping = asyncio.ensure_future(server.stop())
        else:
            stopping = asyncio.ensure_future(server.start())
        for _ in range(moments):
            await asyncio.sleep(0)
        was_given_up = stopping.cancel()
        await asyncio.wait([stopping])
        if not starts:
            await server.stop()
        assert not server._server._server.is_running(), f"given up after {moments} moments"
        assert not server._door.listeners
        return was_given_up

    moments = 1  # by then it has begun
    while asyncio.run(scenario(moments)):
        moments += 1


def test_a_server_whose_stop_fails_still_ends_its_connections(
    identity: RunIdentity, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doors, "FIRST_BYTES_SECONDS", 1000.0)

    async def scenario() -> None:
        server = GrpcServer(LOOPBACK, 0, identity, {})
        reader, writer = await asyncio.open_connection(LOOPBACK, await server.start())
        while not server._door._open:  # noqa: ASYNC110
            await asyncio.sleep(0)

        async def fail(grace: float) -> None:
            raise OSError("a bug")

        with monkeypatch.context() as patch:
            patch.setattr(server._server, "stop", fail)
            with pytest.raises(OSError, match="a bug"):
                await server.stop()
        assert await reader.read() == b""
        writer.close()
        await server.stop()

    run(scenario())


@pytest.mark.parametrize("port", [65_536, 10**9])
def test_invalid_port(identity: RunIdentity, port: int) -> None:
    async def scenario() -> None:
        with pytest.raises(UserError, match=f"Cannot listen on 127.0.0.1:{port}"):
            await GrpcServer(LOOPBACK, port, identity, {}).start()

    run(scenario())


def test_addresses_of_one_machine_count_as_one() -> None:
    assert network("203.0.113.5") == "203.0.113.5"
    assert network(sockets.plain("2001:db8:1:2:3::4")) == network("2001:db8:1:2::ffff")
    assert network("2001:db8:1:2::") != network("2001:db8:1:3::")
    assert sockets.plain("::ffff:203.0.113.5") == "203.0.113.5"
    assert sockets.plain("fe80::1%eth0") == "fe80::1"


def test_door_forgets_closed_connections(identity: RunIdentity, tmp_path: Path) -> None:
    async def scenario() -> None:
        credentials = enrolled(identity, tmp_path / "peer")[1]
        server = GrpcServer(LOOPBACK, 0, identity, Desk().handlers())
        port, door = await server.start(), server._door
        for _ in range(3):
            async with linked(port, credentials) as link:
                await report(link)
            with dialled(port, 5):
                pass
        while door._open:  # noqa: ASYNC110 (see `until_closed`)
            await asyncio.sleep(0.01)
        counts = (door._inside, door._unproven, door._by_address, door._unproven_by_address, door._by_party)
        assert [len(kept) for kept in counts] == [0] * 5
        assert door._named == set()
        await server.stop()

    run(scenario())


def test_a_link_that_is_closed_takes_its_connection_with_it(identity: RunIdentity, tmp_path: Path) -> None:
    """And not only once Python's collector comes by: a connection takes three descriptors of the head."""

    async def scenario() -> None:
        credentials = enrolled(identity, tmp_path / "peer")[1]
        server = GrpcServer(LOOPBACK, 0, identity, Desk().handlers())
        port = await server.start()
        gc.disable()
        try:
            for _ in range(8):
                link = GrpcLink(f"{LOOPBACK}:{port}", credentials)
                async with contextlib.aclosing(link.frames("Attend", wire.WorkerHello())) as orders:
                    await anext(orders)
                await link.close()
            while server._door.connections():  # noqa: ASYNC110 (what happens at the other end has no event here)
                await asyncio.sleep(0.01)
        finally:
            gc.enable()
            await server.stop()

    run(scenario())
