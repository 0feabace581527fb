"""The real link, on the loopback interface: the promises of every link, and who is let in."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest

from echo2.core.errors import LinkError, PeerError, UserError
from echo2.transport import door as doors
from echo2.transport import grpc_options, limits
from echo2.transport import wire_pb2 as wire
from echo2.transport.base import Handlers, Link
from echo2.transport.grpc_link import GrpcLink, connect
from echo2.transport.grpc_server import GrpcServer
from echo2.transport.identity import SERVER_NAME, PeerIdentity, RunIdentity
from echo2.transport.tickets import Credentials, Ticket
from transport_cases import SECONDS, SHORT_SECONDS, Desk, LinkCases, attend, run

LOOPBACK = "127.0.0.1"
HOUR = 1.0


def enrolled(identity: RunIdentity, role: str, state: Path) -> tuple[str, Credentials]:
    """What a machine of this role has after joining. For join-worker and join-learner: what the ticket brings."""
    ticket = identity.make_ticket(role.removeprefix("join-"), "nowhere:1", 1, HOUR)
    parsed = Ticket.parse(ticket)
    credentials = parsed.credentials
    if role.startswith("join-"):
        return "", credentials
    peer = PeerIdentity(state)
    return peer.keep(credentials.ca_pem, identity.enrol(parsed.ticket_id, role, peer.request())[1])


@asynccontextmanager
async def serving(identity: RunIdentity, handlers: Handlers, on_error: Any = None) -> AsyncIterator[int]:
    server = GrpcServer(LOOPBACK, 0, identity, handlers, on_error)
    try:
        yield await server.start()
    finally:
        await server.stop()


class Cable:
    """Forwards TCP to `target`, `delay_seconds` later, and can be cut. Use with `async with`, which gives the port to
    dial."""

    def __init__(self, target: int, delay_seconds: float = 0.0) -> None:
        self._target, self._delay_seconds, self._is_cut = target, delay_seconds, False
        self._ends: set[asyncio.StreamWriter] = set()
        self._pumps: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> int:
        self._server = await asyncio.start_server(self._accept, LOOPBACK, 0)
        return int(self._server.sockets[0].getsockname()[1])

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        self.cut()
        await asyncio.gather(*self._pumps)

    def cut(self) -> None:
        self._is_cut = True
        for end in self._ends:
            end.transport.abort()
        self._ends.clear()

    def mend(self) -> None:
        self._is_cut = False

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._is_cut:
            writer.transport.abort()
            return
        far_reader, far_writer = await asyncio.open_connection(LOOPBACK, self._target)
        self._ends |= {writer, far_writer}
        for source, target in ((reader, far_writer), (far_reader, writer)):
            self._pumps.add(asyncio.ensure_future(self._pump(source, target)))

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while data := await reader.read(1 << 16):
                if self._delay_seconds:
                    await asyncio.sleep(self._delay_seconds)
                writer.write(data)
                await writer.drain()
        except ConnectionError:
            pass  # one end was aborted
        writer.close()


class TestGrpcLink(LinkCases):
    @pytest.fixture(autouse=True)
    def _identity(self, tmp_path: Path) -> None:
        self.identity, self.state = RunIdentity.create_or_load(tmp_path / "run"), tmp_path / "peer"

    def linked(self, desk: Desk, role: str = "worker") -> AbstractAsyncContextManager[Link]:
        @asynccontextmanager
        async def opened() -> AsyncIterator[Link]:
            async with serving(self.identity, desk.handlers()) as port:
                self.cable = Cable(port)
                _, credentials = enrolled(self.identity, role, self.state)
                async with self.cable as dialled:
                    link = GrpcLink(f"{LOOPBACK}:{dialled}", credentials)
                    try:
                        yield link
                    finally:
                        await link.close()

        return opened()

    def cut(self, link: Link) -> None:
        self.cable.cut()

    def mend(self, link: Link) -> None:
        self.cable.mend()


@pytest.fixture
def identity(tmp_path: Path) -> RunIdentity:
    return RunIdentity.create_or_load(tmp_path / "run")


async def report(link: Link) -> Any:
    return await link.call("Report", wire.WorkerReport(), SECONDS)


async def refusal(link: Link) -> str:
    with pytest.raises(PeerError) as caught:
        await report(link)
    return caught.value.reason


# ---- joining ---------------------------------------------------------------------------------------------------------


def test_join_with_a_ticket_and_again_without_using_it(identity: RunIdentity, tmp_path: Path) -> None:
    async def scenario() -> None:
        desk = Desk()
        async with serving(identity, desk.handlers()) as port:
            ticket = identity.make_ticket("worker", f"{LOOPBACK}:{port}", 1, HOUR)
            ids = []
            for _ in range(2):
                link, peer_id = await connect(ticket, tmp_path / "state")
                await report(link)
                await link.close()
                ids.append(peer_id)
            assert ids == [peer.peer_id for peer in desk.peers]
            assert len(set(ids)) == 1
            with pytest.raises(UserError, match="used up"):
                await connect(ticket, tmp_path / "another machine")

    run(scenario())


def test_an_older_program_that_joins_is_asked_to_upgrade(identity: RunIdentity, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with serving(identity, Desk().handlers()) as port:
            _, credentials = enrolled(identity, "join-worker", tmp_path / "peer")
            link = GrpcLink(f"{LOOPBACK}:{port}", credentials)
            request = wire.EnrolRequest(protocol=limits.PROTOCOL_VERSION + 1, csr_der=b"")
            with pytest.raises(PeerError, match="upgrade") as caught:
                await link.call("Enrol", request, SECONDS)
            assert caught.value.reason == "protocol"
            await link.close()

    run(scenario())


# ---- who is let in ---------------------------------------------------------------------------------------------------


def test_certificate_of_another_run_is_refused(identity: RunIdentity, tmp_path: Path) -> None:
    async def scenario() -> None:
        desk, other = Desk(), RunIdentity.create_or_load(tmp_path / "other")
        _, strange = enrolled(other, "worker", tmp_path / "peer")
        async with serving(identity, desk.handlers()) as port:
            for credentials in (
                strange,  # it does not even believe this head
                Credentials(identity.credentials.ca_pem, strange.certificate_pem, strange.key_pem),
            ):
                link = GrpcLink(f"{LOOPBACK}:{port}", credentials)
                with pytest.raises(LinkError):
                    await report(link)
                await link.close()
        assert desk.peers == []

    run(scenario())


def test_caller_without_certificate_is_refused(identity: RunIdentity) -> None:
    async def scenario() -> None:
        desk = Desk()
        async with serving(identity, desk.handlers()) as port:
            tls = grpc.ssl_channel_credentials(identity.credentials.ca_pem)
            for channel in (
                grpc.aio.secure_channel(f"{LOOPBACK}:{port}", tls, [("grpc.ssl_target_name_override", SERVER_NAME)]),
                grpc.aio.insecure_channel(f"{LOOPBACK}:{port}"),
            ):
                async with channel:
                    with pytest.raises(grpc.aio.AioRpcError) as caught:
                        await channel.unary_unary("/echo2.Head/Report")(b"", timeout=SECONDS)
                    assert caught.value.code() == grpc.StatusCode.UNAVAILABLE
        assert desk.peers == []

    run(scenario())


def test_worker_cannot_pose_as_the_head(identity: RunIdentity, tmp_path: Path) -> None:
    """Its certificate is of the same CA, but not for the head's name."""

    async def scenario() -> None:
        _, own = enrolled(identity, "worker", tmp_path / "thief")
        _, credentials = enrolled(identity, "worker", tmp_path / "victim")
        server = grpc.aio.server()
        port = server.add_secure_port(
            f"{LOOPBACK}:0", grpc.ssl_server_credentials([(own.key_pem, own.certificate_pem)])
        )
        await server.start()
        link = GrpcLink(f"{LOOPBACK}:{port}", credentials)
        with pytest.raises(LinkError):
            await report(link)
        await link.close()
        await server.stop(None)

    run(scenario())


def test_the_heads_own_certificate_belongs_to_no_peer(identity: RunIdentity) -> None:
    async def scenario() -> None:
        async with serving(identity, Desk().handlers()) as port:
            link = GrpcLink(f"{LOOPBACK}:{port}", identity.credentials)
            assert await refusal(link) == "forbidden"
            await link.close()

    run(scenario())


def test_revoked_peer_is_refused_at_its_next_call_and_the_next_message_of_a_stream(
    identity: RunIdentity, tmp_path: Path
) -> None:
    async def scenario() -> None:
        peer_id, credentials = enrolled(identity, "worker", tmp_path / "peer")
        got: list[bytes] = []
        async with serving(identity, Desk().handlers()) as port:
            link = GrpcLink(f"{LOOPBACK}:{port}", credentials)
            await report(link)

            async def read() -> None:
                async for chunk in link.stream("FetchChunks", wire.ChunkRequest(hashes=[b"1"] * 10_000)):
                    if not got:
                        identity.revoke(peer_id)
                    got.append(chunk.hash)

            with pytest.raises(PeerError) as caught:
                await read()
            assert caught.value.reason == "revoked"
            assert 0 < len(got) < 1000  # what was on the way
            assert await refusal(link) == "revoked"
            await link.close()

    run(scenario())


# ---- the server bears with everything --------------------------------------------------------------------------------


def bare_channel(port: int, credentials: Credentials, **options: Any) -> grpc.aio.Channel:
    """Without our client's own checks."""
    tls = grpc.ssl_channel_credentials(credentials.ca_pem, credentials.key_pem, credentials.certificate_pem)
    target = [("grpc.ssl_target_name_override", SERVER_NAME), ("grpc.max_send_message_length", -1)]
    return grpc.aio.secure_channel(f"{LOOPBACK}:{port}", tls, target, **options)


@pytest.mark.parametrize(
    "data",
    [b"\xff", b"\x1a\x05abc", b"\x1a\x02\xff\xfe", random.Random(0).randbytes(100)],
    ids=lambda data: data.hex()[:8],
)
def test_malformed_bytes_are_refused_as_such(identity: RunIdentity, tmp_path: Path, data: bytes) -> None:
    async def scenario() -> None:
        desk, errors = Desk(), []
        _, credentials = enrolled(identity, "worker", tmp_path / "peer")
        async with (
            serving(identity, desk.handlers(), errors.append) as port,
            bare_channel(port, credentials) as channel,
        ):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await channel.unary_unary("/echo2.Head/Report")(data, timeout=SECONDS)
            assert (caught.value.details() or "").startswith("malformed: ")
            with pytest.raises(grpc.aio.AioRpcError, match="malformed: "):
                await anext(aiter(channel.unary_stream("/echo2.Head/Attend")(b"\xff", timeout=SECONDS)))
            assert await channel.unary_unary("/echo2.Head/Report")(b"", timeout=SECONDS) == b""
        assert len(desk.peers) == 1
        assert errors == []

    run(scenario())


@pytest.mark.parametrize("compression", [grpc.Compression.NoCompression, grpc.Compression.Gzip], ids=["plain", "bomb"])
def test_server_refuses_what_a_bare_client_may_send(
    identity: RunIdentity, tmp_path: Path, compression: grpc.Compression
) -> None:
    """More than a message may be; or that much squeezed into a few kilobytes."""

    async def scenario() -> None:
        desk = Desk()
        _, credentials = enrolled(identity, "worker", tmp_path / "peer")
        data = wire.WorkerReport(doing="a" * (limits.MESSAGE_BYTES_MAX + 1)).SerializeToString()
        async with serving(identity, desk.handlers()) as port, bare_channel(port, credentials) as channel:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await channel.unary_unary("/echo2.Head/Report")(data, timeout=SECONDS, compression=compression)
            assert caught.value.code() in (grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.UNIMPLEMENTED)
            await channel.unary_unary("/echo2.Head/Report")(b"", timeout=SECONDS)
        assert len(desk.peers) == 1

    run(scenario())


def test_a_long_refusal_is_truncated_and_keeps_its_reason(identity: RunIdentity, tmp_path: Path) -> None:
    async def scenario() -> None:
        _, credentials = enrolled(identity, "worker", tmp_path / "peer")
        async with serving(identity, Desk().handlers()) as port:
            link = GrpcLink(f"{LOOPBACK}:{port}", credentials)
            with pytest.raises(PeerError) as caught:
                await link.call("FailLease", wire.LeaseFailed(reason="odd", detail="\N{SNOWMAN}" * 5000), SECONDS)
            assert caught.value.reason == "odd"
            assert set(caught.value.detail) == {"\N{SNOWMAN}"}
            await link.close()

    run(scenario())


def test_bytes_other_than_tls(identity: RunIdentity, tmp_path: Path) -> None:
    async def scenario() -> None:
        _, credentials = enrolled(identity, "worker", tmp_path / "peer")
        async with serving(identity, Desk().handlers()) as port:
            for data in (b"GET / HTTP/1.1\r\n\r\n", bytes(10_000), b"\x16\x03\x01\xff\xff" + os.urandom(1000)):
                _, writer = await asyncio.open_connection(LOOPBACK, port)
                writer.write(data)
                writer.transport.abort()
            link = GrpcLink(f"{LOOPBACK}:{port}", credentials)
            await report(link)
            await link.close()

    run(scenario())


def test_our_bug_is_reported_as_such_and_not_as_a_refusal(identity: RunIdentity, tmp_path: Path) -> None:
    async def broken(peer: Any, request: Any) -> wire.Empty:
        raise ZeroDivisionError("a bug")

    async def broken_stream(peer: Any, request: Any) -> AsyncIterator[wire.Order]:
        yield wire.Order()
        raise ZeroDivisionError("another bug")

    async def scenario() -> None:
        errors: list[BaseException] = []
        _, credentials = enrolled(identity, "worker", tmp_path / "peer")
        async with serving(identity, {"Report": broken, "Attend": broken_stream}, errors.append) as port:
            link = GrpcLink(f"{LOOPBACK}:{port}", credentials)
            with pytest.raises(LinkError, match="a bug"):
                await report(link)
            with pytest.raises(LinkError, match="another bug"):
                await attend(link)
            await link.close()
        assert [type(error) for error in errors] == [ZeroDivisionError, ZeroDivisionError]

    run(scenario())


def test_a_thousand_quick_calls(identity: RunIdentity, tmp_path: Path) -> None:
    async def scenario() -> None:
        _, credentials = enrolled(identity, "worker", tmp_path / "peer")
        async with serving(identity, Desk().handlers()) as port:
            link = GrpcLink(f"{LOOPBACK}:{port}", credentials)
            for wave in range(10):
                asked = range(100 * wave, 100 * (wave + 1))
                requests = [wire.ManifestRequest(version=number) for number in asked]
                replies = await asyncio.gather(*(link.call("FetchManifest", each, SECONDS) for each in requests))
                assert [reply.version for reply in replies] == list(asked)
            await link.close()

    run(scenario())


def test_a_long_path_does_not_end_the_handshake(identity: RunIdentity, tmp_path: Path) -> None:
    """Until both ends have proven who they are takes four round trips, and gRPC's own limit is the pause between its
    attempts: with 0.2 s nobody farther away than 50 ms could join."""

    async def scenario() -> None:
        _, credentials = enrolled(identity, "worker", tmp_path / "peer")
        async with serving(identity, Desk().handlers()) as port, Cable(port, delay_seconds=0.15) as dialled:
            link = GrpcLink(f"{LOOPBACK}:{dialled}", credentials)
            await report(link)
            await link.close()

    run(scenario())


# ---- coming and going ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("host", [LOOPBACK, "192.0.2.1", "no such host"])
def test_unusable_address(identity: RunIdentity, host: str) -> None:
    async def scenario() -> None:
        async with serving(identity, {}) as port:
            with pytest.raises(UserError, match=f"Cannot listen on {host}:{port}"):
                await GrpcServer(host, port, identity, {}).start()

    run(scenario())


def test_call_to_an_absent_head(identity: RunIdentity, tmp_path: Path) -> None:
    async def scenario() -> None:
        _, credentials = enrolled(identity, "worker", tmp_path / "peer")
        async with serving(identity, Desk().handlers()) as port:
            link = GrpcLink(f"{LOOPBACK}:{port}", credentials)
            await report(link)
        told = ""
        while told != f"{LOOPBACK}:{port} does not answer: Connection refused":
            with pytest.raises(LinkError) as error:  # the first call may still find the stream that is being closed
                await report(link)
            told = str(error.value)
        with pytest.raises(LinkError):
            await attend(link)
        await link.close()

    run(scenario())


def test_stopping_head_ends_streams(identity: RunIdentity, tmp_path: Path) -> None:
    async def scenario() -> None:
        desk = Desk()
        _, credentials = enrolled(identity, "worker", tmp_path / "peer")
        async with serving(identity, desk.handlers()) as port:
            link = GrpcLink(f"{LOOPBACK}:{port}", credentials)
            reading = asyncio.ensure_future(attend(link))
            await desk.attended.wait()
        with pytest.raises(LinkError):
            await reading
        assert desk.left.is_set()
        await link.close()

    run(scenario())


CLIENT = """
import asyncio, sys
from pathlib import Path
from echo2.transport import wire_pb2 as wire
from echo2.transport.grpc_link import connect

async def attend():
    link, _ = await connect(sys.argv[1], Path(sys.argv[2]))
    async for _ in link.stream("Attend", wire.WorkerHello()):
        pass

asyncio.run(attend())
"""


def test_killed_caller_is_noticed_at_once(
    identity: RunIdentity, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Because the kernel closes its connections: here nobody asks whether it lives, and no time runs out."""
    quiet = [(name, value) for name, value in grpc_options._SERVER if "keepalive" not in name]
    monkeypatch.setattr(grpc_options, "_SERVER", quiet)
    monkeypatch.setattr(doors, "CLOSE_SECONDS", 10 * SECONDS)

    async def scenario() -> None:
        desk = Desk()
        async with serving(identity, desk.handlers()) as port:
            ticket = identity.make_ticket("worker", f"{LOOPBACK}:{port}", 1, HOUR)
            arguments = ["-c", CLIENT, f"@{tmp_path / 'ticket'}", str(tmp_path / "state")]
            (tmp_path / "ticket").write_text(ticket)
            environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
            client = await asyncio.create_subprocess_exec(sys.executable, *arguments, env=environment)
            await asyncio.wait_for(desk.attended.wait(), SECONDS)
            await asyncio.sleep(SHORT_SECONDS)
            assert not desk.left.is_set()
            client.send_signal(signal.SIGKILL)
            await client.wait()
            await asyncio.wait_for(desk.left.wait(), SECONDS)

    run(scenario())
