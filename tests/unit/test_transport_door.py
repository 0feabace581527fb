"""The door against strangers and members who want too much: who is honest is still served."""

from __future__ import annotations

import asyncio
import errno
import json
import logging
import os
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest

from echo2.errors import LinkError, UserError
from echo2.transport import door as doors
from echo2.transport import grpc_options, limits
from echo2.transport import wire_pb2 as wire
from echo2.transport.grpc_link import GrpcLink, GrpcNetwork
from echo2.transport.grpc_server import SERVICE, GrpcServer
from echo2.transport.identity import SERVER_NAME, PeerIdentity, RunIdentity
from echo2.transport.tickets import Credentials, Ticket
from transport_cases import SECONDS, Desk, run

LOOPBACK = "127.0.0.1"
#: Another address of this machine.
ELSEWHERE = "127.0.0.2"
BODY_BYTES = 60 << 20


@pytest.fixture
def identity(tmp_path: Path) -> RunIdentity:
    return RunIdentity.create_or_load(tmp_path / "run")


def enrolled(identity: RunIdentity, state: Path, is_own: bool = False) -> tuple[str, Credentials]:
    ticket = Ticket.parse(identity.make_ticket("worker", "nowhere:1", 9, 1.0, is_own))
    peer = PeerIdentity(state)
    return peer.keep(ticket.credentials.ca_pem, identity.enrol(ticket.ticket_id, "worker", peer.request())[1])


@asynccontextmanager
async def serving(identity: RunIdentity, desk: Desk) -> AsyncIterator[int]:
    failures: list[BaseException] = []
    server = GrpcServer("0.0.0.0", 0, identity, desk.handlers(), failures.append)
    try:
        yield await server.start()
    finally:
        await server.stop()
        assert failures == []


@asynccontextmanager
async def channel(port: int, shown: Credentials) -> AsyncIterator[grpc.aio.Channel]:
    """Without our client's own checks."""
    tls = grpc.ssl_channel_credentials(shown.ca_pem, shown.key_pem, shown.certificate_pem)
    options = [("grpc.ssl_target_name_override", SERVER_NAME), ("grpc.max_send_message_length", -1)]
    async with grpc.aio.secure_channel(f"{LOOPBACK}:{port}", tls, options) as opened:
        yield opened


@asynccontextmanager
async def linked(port: int, credentials: Credentials, host: str = LOOPBACK) -> AsyncIterator[GrpcLink]:
    link = GrpcLink(f"{host}:{port}", credentials)
    try:
        yield link
    finally:
        await link.close()


async def report(link: GrpcLink) -> None:
    await link.call("Report", wire.WorkerReport(), SECONDS)


@contextmanager
def dialled(port: int, count: int, source: str = LOOPBACK) -> Iterator[list[socket.socket]]:
    """So many connections that say nothing."""
    with ExitStack() as kept:
        made = [kept.enter_context(socket.socket()) for _ in range(count)]
        for one in made:
            one.bind((source, 0))
            one.setblocking(False)
            one.connect_ex((LOOPBACK, port))
        yield made


def is_closed(one: socket.socket) -> bool:
    try:
        return one.recv(1) == b""
    except BlockingIOError:
        return False
    except OSError:
        return True


async def until_closed(connections: list[socket.socket], count: int) -> None:
    """Wait until the other end has closed so many of them."""
    while sum(map(is_closed, connections)) < count:  # noqa: ASYNC110 (what happens at the other end has no event here)
        await asyncio.sleep(0.01)


# ---- strangers -------------------------------------------------------------------------------------------------------


def test_idle_connections_of_one_address_are_bounded_and_keep_nobody_else_out(
    identity: RunIdentity, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
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


def test_who_says_nothing_or_no_tls_or_half_of_it_is_dropped(
    identity: RunIdentity, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(doors, "FIRST_BYTES_SECONDS", 0.2)
    monkeypatch.setattr(grpc_options, "HANDSHAKE_SECONDS", 0.4)

    async def scenario() -> None:
        credentials = enrolled(identity, tmp_path / "peer")[1]
        async with serving(identity, Desk()) as port, linked(port, credentials) as link:
            await report(link)
            loop = asyncio.get_running_loop()
            with dialled(port, 3) as (silent, web, half):
                await loop.sock_sendall(web, b"GET / HTTP/1.1\r\n\r\n")
                await loop.sock_sendall(half, b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03")
                await until_closed([web], 1)
                await until_closed([silent], 1)
                await until_closed([half], 1)  # by gRPC
                await report(link)

    with caplog.at_level(logging.WARNING):
        run(scenario())
    assert "refused 2 connections" in caplog.text  # those that never reached gRPC
    assert "1 of 127.0.0.1 (did not speak TLS)" in caplog.text
    assert "1 of 127.0.0.1 (said nothing)" in caplog.text


def test_handshakes_of_one_address_are_slowed_down(
    identity: RunIdentity, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "HANDSHAKES_BURST_PER_ADDRESS", 5.0)
    monkeypatch.setattr(limits, "HANDSHAKES_PER_SECOND_PER_ADDRESS", 0.01)

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


HEAD = """
import asyncio, json, resource, sys
from pathlib import Path
if int(sys.argv[2]):
    resource.setrlimit(resource.RLIMIT_NOFILE, (int(sys.argv[2]),) * 2)
from echo2.transport import limits
from echo2.transport import wire_pb2 as wire
from echo2.transport.grpc_server import GrpcServer
from echo2.transport.identity import RunIdentity
limits.BYTES_BURST = 1 << 40  # bodies are not to wait for that

async def report(peer, request):
    open("/dev/null").close()  # there is room for files
    return wire.Empty()

async def main():
    failures, identity = [], RunIdentity.create_or_load(Path(sys.argv[1]))
    handlers = {"Report": report, "LearnerHello": report, "Deliver": report}
    server = GrpcServer("127.0.0.1", 0, identity, handlers, failures.append)
    print(await server.start(), flush=True)
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
    await server.stop()
    print(json.dumps([repr(failure) for failure in failures]), flush=True)

asyncio.run(main())
"""


@contextmanager
def head_process(directory: Path, num_descriptors: int = 0) -> Iterator[tuple[int, int]]:
    """A head in a process of its own: (port, pid)."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    arguments = [sys.executable, "-c", HEAD, str(directory), str(num_descriptors)]
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(arguments, env=environment, text=True, **pipes) as head:
        try:
            assert head.stdout is not None
            yield int(head.stdout.readline()), head.pid
            told, errors = head.communicate("", timeout=SECONDS)
        finally:
            head.kill()
    assert json.loads(told) == []
    assert len(errors) < 2000


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
        """A listening socket in a process that has no descriptors left for a while."""

        def __init__(self, listener: socket.socket) -> None:
            self._listener, self.failures, self._until = listener, 0, time.monotonic() + 0.3

        def accept(self) -> Any:
            if time.monotonic() < self._until:
                self.failures += 1
                raise OSError(errno.EMFILE, "Too many open files")
            return self._listener.accept()

        def fileno(self) -> int:
            return self._listener.fileno()

        def close(self) -> None:
            self._listener.close()

        def getsockname(self) -> Any:
            return self._listener.getsockname()

    made: list[Scarce] = []
    listen = doors._listen

    def scarce(family: int, address: str, port: int) -> Any:
        made.append(Scarce(listen(family, address, port)))
        return made[-1]

    monkeypatch.setattr(doors, "_listen", scarce)

    async def scenario() -> None:
        credentials = enrolled(identity, tmp_path / "peer")[1]
        async with serving(identity, Desk()) as port, linked(port, credentials) as link:
            await report(link)
        assert 0 < made[0].failures < 10  # it waits, and does not spin

    run(scenario())


# ---- members ---------------------------------------------------------------------------------------------------------


def peak_bytes(pid: int) -> int:
    """The most memory that a process has had."""
    [line] = [line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("VmHWM:")]
    return int(line.split()[1]) << 10


@pytest.mark.skipif(sys.platform != "linux", reason="memory of another process is read below /proc")
@pytest.mark.parametrize("who", ["ticket", "revoked ticket", "revoked worker", "wrong role"])
def test_bodies_of_those_who_may_not_call_are_not_read(identity: RunIdentity, tmp_path: Path, who: str) -> None:
    """Eight bodies of 60 MiB at once."""
    peer_id, credentials = enrolled(identity, tmp_path / "peer")
    honest, method = enrolled(identity, tmp_path / "honest")[1], "LearnerHello" if who == "wrong role" else "Report"
    if "ticket" in who:
        ticket = Ticket.parse(identity.make_ticket("worker", "nowhere:1", 9, 1.0))
        credentials, method = ticket.credentials, "Enrol"
        if who == "revoked ticket":
            identity.revoke(ticket.ticket_id)
    elif who == "revoked worker":
        identity.revoke(peer_id)

    async def scenario(port: int, pid: int) -> None:
        async with linked(port, honest) as link, channel(port, credentials) as opened:
            await report(link)
            before, body = peak_bytes(pid), bytes(BODY_BYTES)
            calls = [opened.unary_unary(f"/{SERVICE}/{method}")(body, timeout=SECONDS) for _ in range(8)]
            ends = await asyncio.gather(*calls, return_exceptions=True)
            await report(link)
            grown = peak_bytes(pid) - before
        words = [(end.details() or "").partition(":")[0] for end in ends if isinstance(end, grpc.aio.AioRpcError)]
        word = "protocol" if who == "ticket" else "forbidden" if who == "wrong role" else "revoked"
        assert len(words) == 8
        assert {each for each in words if not each.startswith("Stream removed")} == {word}  # or it is cut at once
        assert grown < 32 << 20, grown  # what is on the way when the refusal comes; the bodies are 480 MiB

    with head_process(tmp_path / "run") as (port, pid):
        run(scenario(port, pid))


@pytest.mark.skipif(sys.platform != "linux", reason="memory of another process is read below /proc")
def test_bodies_of_a_member_are_held_up_to_a_bound(identity: RunIdentity, tmp_path: Path) -> None:
    """16 results of 60 MiB at once: two are read at a time, and what gRPC holds of the others is bounded. Before that,
    and after, it is served."""
    credentials, honest = (enrolled(identity, tmp_path / name)[1] for name in ("a", "b"))
    body = wire.Deliveries(items=[wire.Delivery(group=wire.RolloutGroup(prompt_tokens=bytes(BODY_BYTES)))])
    data = body.SerializeToString()

    async def scenario(port: int, pid: int) -> None:
        async with linked(port, honest) as link, channel(port, credentials) as opened:
            deliver = opened.unary_unary(f"/{SERVICE}/Deliver")
            await deliver(data, timeout=SECONDS)
            before = peak_bytes(pid)
            ends = await asyncio.gather(*(deliver(data, timeout=SECONDS) for _ in range(16)), return_exceptions=True)
            assert len(ends) == 16  # some are told, or all that are under way are cut; or it was slow enough
            await report(link)
            grown = peak_bytes(pid) - before
        assert grown < limits.UNREAD_PER_PEER_MAX + (128 << 20), grown  # that, and a copy of what is read
        async with linked(port, credentials) as again:
            await report(again)

    with head_process(tmp_path / "run") as (port, pid):
        run(scenario(port, pid))


def test_flood_of_calls_is_refused_with_a_word_and_then_cut_while_another_is_served(
    identity: RunIdentity, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "CALLS_BURST", 50.0)
    monkeypatch.setattr(limits, "CALLS_PER_SECOND_MAX", 1.0)
    monkeypatch.setattr(limits, "REFUSALS_MAX", 100.0)

    async def scenario() -> None:
        desk = Desk()
        flooding, honest = (enrolled(identity, tmp_path / name)[1] for name in ("a", "b"))
        async with serving(identity, desk) as port, linked(port, flooding) as flood, linked(port, honest) as link:
            said: list[str] = []
            for _ in range(50 + 100 + 50):
                try:
                    await report(flood)
                    said.append("served")
                except LinkError as error:  # it may try again, later
                    said.append("busy" if "busy: more than 1 calls a second of w-" in str(error) else str(error))
                if len(said) % 20 == 0:
                    await report(link)
            assert 50 <= said.count("served") <= 60
            assert said.count("busy") >= 90
            assert len(said) > said.count("busy") + said.count("served")  # its connection was cut
        assert len([peer for peer in desk.peers if peer.peer_id == desk.peers[-1].peer_id]) >= 10

    run(scenario())


def test_bodies_of_one_peer_are_read_in_turn_and_others_do_not_wait(identity: RunIdentity, tmp_path: Path) -> None:
    """A member begins as many large bodies as it may, and sends none whole."""

    async def scenario() -> None:
        slow, honest = (enrolled(identity, tmp_path / name)[1] for name in ("a", "b"))
        async with serving(identity, Desk()) as port, linked(port, honest) as link, channel(port, slow) as opened:
            call = opened.stream_unary(f"/{SERVICE}/Report")
            never = asyncio.Event()

            async def nothing() -> AsyncIterator[bytes]:
                await never.wait()
                yield b""

            begun = [call(nothing(), timeout=SECONDS) for _ in range(100)]
            for _ in range(20):
                await report(link)
            for each in begun:
                each.cancel()

    run(scenario())


def test_body_that_does_not_come_is_given_up(
    identity: RunIdentity, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "READ_SECONDS", 0.2)

    async def scenario() -> None:
        credentials = enrolled(identity, tmp_path / "peer")[1]
        async with serving(identity, Desk()) as port, channel(port, credentials) as opened:
            never = asyncio.Event()

            async def nothing() -> AsyncIterator[bytes]:
                await never.wait()
                yield b""

            with pytest.raises(grpc.aio.AioRpcError, match="busy: no request of Report"):
                await opened.stream_unary(f"/{SERVICE}/Report")(nothing(), timeout=SECONDS)
            assert await opened.unary_unary(f"/{SERVICE}/Report")(b"", timeout=SECONDS) == b""

    run(scenario())


def test_call_without_a_request_is_malformed(identity: RunIdentity, tmp_path: Path) -> None:
    async def scenario() -> None:
        credentials = enrolled(identity, tmp_path / "peer")[1]
        async with serving(identity, Desk()) as port, channel(port, credentials) as opened:

            async def nothing() -> AsyncIterator[bytes]:
                for each in list[bytes]():
                    yield each

            with pytest.raises(grpc.aio.AioRpcError, match="malformed: "):
                await opened.stream_unary(f"/{SERVICE}/Report")(nothing(), timeout=SECONDS)

    run(scenario())


def test_only_results_may_be_large(identity: RunIdentity, tmp_path: Path) -> None:
    async def scenario() -> None:
        credentials = enrolled(identity, tmp_path / "peer")[1]
        large = wire.WorkerReport(doing="a" * (limits.PEER_MESSAGE_BYTES_MAX + 1)).SerializeToString()
        async with serving(identity, Desk()) as port, channel(port, credentials) as opened:
            with pytest.raises(grpc.aio.AioRpcError, match="oversized: "):
                await opened.unary_unary(f"/{SERVICE}/Report")(large, timeout=SECONDS)

    run(scenario())


def test_connections_of_one_peer_are_bounded(
    identity: RunIdentity, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "CONNECTIONS_PER_PEER_MAX", 3)

    async def scenario() -> None:
        many, honest = (enrolled(identity, tmp_path / name)[1] for name in ("a", "b"))
        async with serving(identity, Desk()) as port:
            links = [GrpcLink(f"{LOOPBACK}:{port}", many) for _ in range(5)]
            served = 0
            for link in links:
                try:
                    await report(link)
                    served += 1
                except LinkError:
                    pass
            assert served == 3
            async with linked(port, honest) as link:
                await report(link)
            await links[0].close()
            while served == 3:  # until the server has noticed
                try:
                    await report(links[3])
                    served += 1
                except LinkError:
                    await asyncio.sleep(0.01)
            for link in links[1:]:
                await link.close()

    run(scenario())


def test_enrolments_with_one_ticket_are_slowed_down(
    identity: RunIdentity, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "ENROLMENTS_BURST", 2.0)
    monkeypatch.setattr(limits, "ENROLMENTS_PER_SECOND", 0.01)

    async def scenario() -> None:
        async with serving(identity, Desk()) as port:
            tickets = [Ticket.parse(identity.make_ticket("worker", "nowhere:1", 9, 1.0)) for _ in range(2)]
            for ticket, ends in zip(tickets, (["", "", "busy"], [""]), strict=True):
                async with linked(port, ticket.credentials) as link:
                    for number, end in enumerate(ends):
                        csr = PeerIdentity(tmp_path / f"{ticket.ticket_id}-{number}").request()
                        request = wire.EnrolRequest(protocol=limits.PROTOCOL_VERSION, csr_der=csr)
                        if end:
                            with pytest.raises(LinkError, match=end):
                                await link.call("Enrol", request, SECONDS)
                        else:
                            await link.call("Enrol", request, SECONDS)

    run(scenario())


def test_peers_port_has_the_same_door(identity: RunIdentity, tmp_path: Path) -> None:
    """That of a worker which others take chunks from."""

    async def scenario() -> None:
        (own, credentials), (_, other) = (enrolled(identity, tmp_path / name) for name in ("a", "b"))
        network, desk = GrpcNetwork(credentials), Desk()
        port = await network.listen("127.0.0.1", 0, {"GiveChunk": desk.accept}, identity.check_not_revoked)
        link = GrpcNetwork(other).to_peer(own, f"{LOOPBACK}:{port}")
        try:
            await link.call("GiveChunk", b"", SECONDS)
            with dialled(port, limits.UNPROVEN_PER_ADDRESS_MAX + 70) as idle:
                await until_closed(idle, 70)
                await link.call("GiveChunk", b"", SECONDS)
        finally:
            await link.close()
            await network.close()

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


@pytest.mark.parametrize("port", [65_536, 10**9])
def test_port_that_is_none(identity: RunIdentity, port: int) -> None:
    async def scenario() -> None:
        with pytest.raises(UserError, match=f"Cannot listen on 127.0.0.1:{port}"):
            await GrpcServer(LOOPBACK, port, identity, {}).start()

    run(scenario())


def test_addresses_of_one_machine_count_as_one() -> None:
    assert doors._network("203.0.113.5") == "203.0.113.5"
    assert doors._network(doors._plain("2001:db8:1:2:3::4")) == doors._network("2001:db8:1:2::ffff")
    assert doors._network("2001:db8:1:2::") != doors._network("2001:db8:1:3::")
    assert doors._plain("::ffff:203.0.113.5") == "203.0.113.5"
    assert doors._plain("fe80::1%eth0") == "fe80::1"


def test_door_forgets_who_has_gone(identity: RunIdentity, tmp_path: Path) -> None:
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
        counts = (door._inside, door._unproven, door._by_address, door._unproven_by_address, door._by_name)
        assert [len(kept) for kept in counts] == [0] * 5
        assert door._num_named == 0
        await server.stop()

    run(scenario())
