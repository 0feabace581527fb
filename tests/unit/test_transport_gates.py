"""Gates: all that a head promises its peers, where other processes take their connections."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from door_cases import linked, report
from echo2.core.errors import LinkError, PeerError
from echo2.core.types import Backoff
from echo2.transport import gates, limits
from echo2.transport import wire_pb2 as wire
from echo2.transport.base import Handlers, Link
from echo2.transport.gate_channel import WINDOW_BYTES, Channel, Frame, Window
from echo2.transport.gates import GATES_MIN, GatedServer
from echo2.transport.grpc_link import GrpcLink, connect
from echo2.transport.identity import PeerIdentity, RunIdentity
from echo2.transport.tickets import Credentials, Ticket
from test_transport_grpc import Cable, enrolled
from transport_cases import SECONDS, Desk, LinkCases, attend, run

LOOPBACK = "127.0.0.1"
#: So many connections that usually each gate has some.
MANY = 20


@pytest.fixture
def identity(tmp_path: Path) -> RunIdentity:
    return RunIdentity.create_or_load(tmp_path / "run")


@pytest.fixture(autouse=True)
def _two_gates(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many cores this machine has."""
    monkeypatch.setattr(gates, "GATES_MAX", GATES_MIN)


async def until(holds: Callable[[], object]) -> None:
    """Wait for what another process does, of which there is no event here."""
    while not holds():  # noqa: ASYNC110
        await asyncio.sleep(0.01)


async def all_open(server: GatedServer) -> None:
    async with asyncio.timeout(SECONDS):
        await until(lambda: len(server.gates._gates) == GATES_MIN)


def pids(server: GatedServer) -> set[int]:
    return {gate._process.pid for gate in server.gates._gates if gate._process is not None}


def is_running(pid: int) -> bool:
    with suppress(ProcessLookupError):
        os.kill(pid, 0)
        return True
    return False


@asynccontextmanager
async def gated(
    identity: RunIdentity, handlers: Handlers, failures: list[BaseException] | None = None
) -> AsyncIterator[tuple[int, GatedServer]]:
    """A server whose gates are open."""
    unforeseen: list[BaseException] = []
    server = GatedServer(LOOPBACK, 0, identity, handlers, (unforeseen if failures is None else failures).append)
    try:
        port = await server.start()
        server.gates.open()
        await all_open(server)
        yield port, server
    finally:
        await server.stop()
    assert unforeseen == []


@asynccontextmanager
async def many(port: int, credentials: Credentials, count: int = MANY) -> AsyncIterator[list[GrpcLink]]:
    """So many connections of one peer, each of which has made a call."""
    async with AsyncExitStack() as kept:
        links = [await kept.enter_async_context(linked(port, credentials)) for _ in range(count)]
        await asyncio.gather(*map(report, links))
        yield links


class TestGatedLink(LinkCases):
    @pytest.fixture(autouse=True)
    def _identity(self, tmp_path: Path) -> None:
        self.identity, self.state = RunIdentity.create_or_load(tmp_path / "run"), tmp_path / "peer"

    def linked(self, desk: Desk, role: str = "worker") -> AbstractAsyncContextManager[Link]:
        @asynccontextmanager
        async def opened() -> AsyncIterator[Link]:
            async with gated(self.identity, desk.handlers()) as (port, _):
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


# ---- what all gates share --------------------------------------------------------------------------------------------


def test_who_enrols_through_one_gate_is_known_to_all(identity: RunIdentity, tmp_path: Path) -> None:
    """Only a gate that knows by which ticket a peer came refuses it when that ticket is revoked."""

    async def scenario() -> None:
        async with gated(identity, Desk().handlers()) as (port, server):
            ticket = identity.make_ticket("worker", f"{LOOPBACK}:{port}", 1, 1.0)
            first, _ = await connect(ticket, tmp_path / "peer")
            await first.close()
            [kept] = (tmp_path / "peer").rglob("peer.pem")
            loaded = PeerIdentity(kept.parent).load()
            assert loaded is not None
            assert not server._door.connections()  # it came through a gate
            async with many(port, loaded[1]) as links:
                identity.revoke(Ticket.parse(ticket).ticket_id)
                for link in links:
                    with pytest.raises((PeerError, LinkError)):
                        await report(link)

    run(scenario())


def test_a_member_of_before_a_gate_started_is_known_to_it(identity: RunIdentity, tmp_path: Path) -> None:
    _, credentials = enrolled(identity, "worker", tmp_path / "peer")

    async def scenario() -> None:
        async with gated(identity, Desk().handlers()) as (port, _), many(port, credentials) as links:
            identity.revoke(next(iter(identity.members.values()))["ticket"])
            for link in links:
                with pytest.raises((PeerError, LinkError)):
                    await report(link)

    run(scenario())


def test_calls_of_a_peer_are_counted_over_all_gates(
    identity: RunIdentity, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The limits are changed in this process alone: a gate's own would let all pass."""
    monkeypatch.setattr(limits, "CALLS_PER_SECOND_MAX", 1e-9)
    monkeypatch.setattr(limits, "CALLS_BURST", MANY + 3.0)
    desk = Desk()
    _, credentials = enrolled(identity, "worker", tmp_path / "peer")

    async def scenario() -> None:
        async with gated(identity, desk.handlers()) as (port, _), many(port, credentials) as links:
            outcomes = await asyncio.gather(*map(report, links), return_exceptions=True)
        busy = [outcome for outcome in outcomes if outcome is not None]
        assert len(outcomes) - len(busy) == 3
        assert all(
            isinstance(outcome, LinkError) and "more than 1e-09 calls a second" in str(outcome) for outcome in busy
        )
        assert len(desk.peers) == MANY + 3

    run(scenario())


def test_a_peer_that_floods_the_head_loses_its_connections(
    identity: RunIdentity, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "CALLS_PER_SECOND_MAX", 1e-9)
    monkeypatch.setattr(limits, "CALLS_BURST", 2.0)
    monkeypatch.setattr(limits, "REFUSALS_MAX", 2.0)
    _, credentials = enrolled(identity, "worker", tmp_path / "peer")

    async def scenario() -> None:
        desk = Desk()
        async with gated(identity, desk.handlers()) as (port, _), linked(port, credentials) as link:
            attending = asyncio.ensure_future(attend(link))
            await desk.attended.wait()
            while not attending.done():  # each is refused, until one is too many
                with suppress(LinkError):
                    await report(link)
            assert isinstance(attending.exception(), LinkError)
            await asyncio.wait_for(desk.left.wait(), SECONDS)

    run(scenario())


def test_a_peer_that_was_not_known_shares_its_own_budgets_once_it_is(identity: RunIdentity, tmp_path: Path) -> None:
    other = RunIdentity.create_or_load(tmp_path / "other")
    peer = PeerIdentity(tmp_path / "peer")

    def enrol(run: RunIdentity) -> str:
        ticket = Ticket.parse(run.make_ticket("worker", "nowhere:1", 1, 1.0, is_own=True))
        return run.enrol(ticket.ticket_id, "worker", peer.request())[0]

    async def scenario() -> None:
        server = GatedServer(LOOPBACK, 0, identity, {}, lambda error: None)
        peer_id = enrol(other)  # by its key, and so the same in each run
        for owner in (False, True):
            _, parties = server.gates.caller(f"worker:{peer_id}", LOOPBACK)
            assert any(party.name == "machines of the owner" for party in parties) == owner
            enrol(identity)

    run(scenario())


def test_a_failing_handler_is_the_heads_failure_and_its_caller_hears(identity: RunIdentity, tmp_path: Path) -> None:
    async def broken(peer: Any, request: Any) -> wire.Empty:
        raise ZeroDivisionError("of ours")

    async def breaks(peer: Any, request: Any) -> AsyncIterator[wire.Order]:
        yield wire.Order()
        raise ZeroDivisionError("of ours")

    _, credentials = enrolled(identity, "worker", tmp_path / "peer")
    failures: list[BaseException] = []

    async def scenario() -> None:
        handlers = {"Report": broken, "Attend": breaks}
        async with gated(identity, handlers, failures) as (port, _), linked(port, credentials) as link:
            with pytest.raises(LinkError, match="the other end failed: of ours"):
                await report(link)
            with pytest.raises(LinkError, match="the other end failed: of ours"):
                await attend(link)
        assert [type(failure) for failure in failures] == [ZeroDivisionError, ZeroDivisionError]

    run(scenario())


# ---- streams ---------------------------------------------------------------------------------------------------------


def test_a_stream_is_made_as_fast_as_it_is_read(identity: RunIdentity, tmp_path: Path) -> None:
    """A handler that never waits would fill the memory of both processes before the first item arrives."""
    num_made, chunk = 0, wire.Chunk(data=bytes(1 << 20))

    async def endless(peer: Any, request: Any) -> AsyncIterator[wire.Chunk]:
        nonlocal num_made
        while True:
            num_made += 1
            yield chunk

    _, credentials = enrolled(identity, "worker", tmp_path / "peer")

    async def scenario() -> None:
        async with gated(identity, {"FetchChunks": endless}) as (port, _), linked(port, credentials) as link:
            items = link.stream("FetchChunks", wire.ChunkRequest())
            for num_read in range(1, 65):
                assert (await anext(items)).data == chunk.data
                assert num_made <= num_read + 24  # what sockets, gRPC and the window hold

    run(scenario())


def test_a_window_has_room_for_one_item_of_any_size() -> None:
    async def scenario() -> None:
        window = Window()
        await window.room_for(3 * WINDOW_BYTES)
        waiting = asyncio.ensure_future(window.room_for(1))
        await asyncio.sleep(0)
        assert not waiting.done()
        window.taken()
        await asyncio.wait_for(waiting, SECONDS)
        await window.room_for(WINDOW_BYTES - 1)
        waiting = asyncio.ensure_future(window.room_for(1))
        await asyncio.sleep(0)
        assert not waiting.done()
        waiting.cancel()

    run(scenario())


@pytest.mark.parametrize("step", [1, 3, 16, 17, 1000])
def test_frames_arrive_in_whatever_pieces(step: int) -> None:
    async def scenario() -> None:
        heard: list[tuple[Frame, int, bytes]] = []
        near, far = socket.socketpair()
        far.setblocking(False)
        channel = Channel(lambda *frame: heard.append(frame), lambda: None)
        loop = asyncio.get_running_loop()
        await loop.create_unix_connection(lambda: channel, sock=near)
        said = [(Frame.CALL, 1, b""), (Frame.ANSWER, 1 << 60, bytes(range(256)) * 9), (Frame.END, 7, b"z")]
        for kind, number, body in said:
            channel.send(kind, number, body[:5], body[5:])
        data = b""
        while len(data) < 3 * 13 + 9 * 256 + 1:
            data += await loop.sock_recv(far, 1 << 16)
        for at in range(0, len(data), step):
            channel.data_received(data[at : at + step])
        assert heard == said
        channel.close()
        far.close()

    run(scenario())


# ---- gates that come and go ------------------------------------------------------------------------------------------


def test_gates_open_when_there_is_a_crowd(
    identity: RunIdentity, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gates, "CROWD", 3)
    _, credentials = enrolled(identity, "worker", tmp_path / "peer")

    async def scenario() -> None:
        server = GatedServer(LOOPBACK, 0, identity, Desk().handlers(), lambda error: None)
        port = await server.start()
        try:
            async with many(port, credentials, 2):
                assert not server.gates._work
                async with many(port, credentials, 1) as first:
                    await all_open(server)
                    async with many(port, credentials) as others:
                        assert len(server._door.connections()) == 3
                        await asyncio.gather(*map(report, [*first, *others]))
        finally:
            await server.stop()

    run(scenario())


def test_gates_of_a_run_with_many_members_are_open_from_the_start(
    identity: RunIdentity, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gates, "CROWD", 2)

    async def scenario() -> None:
        for number in (1, 2, 3):  # few members, many, and many where no gate can be started
            credentials = enrolled(identity, "worker", tmp_path / f"peer-{number}")[1]
            server = GatedServer(LOOPBACK, 0, identity, Desk().handlers(), lambda error: None)
            if number == 3:
                server.gates._command = [sys.executable, "-c", "raise SystemExit(3)"]
            port = await server.start()
            try:
                async with many(port, credentials, 1):
                    assert bool(server._door.connections()) == (number != 2)
            finally:
                await server.stop()

    run(scenario())


def test_a_gate_that_dies_takes_its_connections_alone_and_another_takes_its_place(
    identity: RunIdentity, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    num_attending = 0

    async def attends(peer: Any, hello: Any) -> AsyncIterator[wire.Order]:
        nonlocal num_attending
        num_attending += 1
        try:
            yield wire.Order()
            await asyncio.Event().wait()
        finally:
            num_attending -= 1

    _, credentials = enrolled(identity, "worker", tmp_path / "peer")

    async def scenario() -> None:
        handlers = {**Desk().handlers(), "Attend": attends}
        async with gated(identity, handlers) as (port, server), AsyncExitStack() as kept:
            links: list[GrpcLink] = []
            attending: list[asyncio.Future[None]] = []
            while not all(gate._calls for gate in server.gates._gates):  # one gate may take many in a row
                links.append(await kept.enter_async_context(linked(port, credentials)))
                attending.append(asyncio.ensure_future(attend(links[-1])))
                await until(lambda: num_attending == len(attending))
            before, [victim, *_] = pids(server), server.gates._gates
            num_lost = len(victim._calls)
            assert victim._process is not None
            os.kill(victim._process.pid, signal.SIGKILL)
            await until(lambda: num_attending == len(attending) - num_lost)
            await until(lambda: sum(task.done() for task in attending) == num_lost)
            await all_open(server)
            await until(lambda: len(pids(server) - before) == 1)
            await asyncio.gather(*map(report, links))  # those that lost their connection make another
            for task in attending:
                task.cancel()
        assert "a gate was killed by SIGKILL: its connections are gone" in caplog.text
        assert not any(map(is_running, before))

    with caplog.at_level(logging.ERROR):
        run(scenario())


def test_a_gate_that_says_nothing_is_given_up(identity: RunIdentity, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        async with gated(identity, Desk().handlers()) as (_, server):
            [one, *_] = server.gates._gates
            assert one._process is not None
            os.kill(one._process.pid, signal.SIGSTOP)
            monkeypatch.setattr(gates, "ALIVE_SECONDS", 0.01)
            await asyncio.wait_for(one.gone(), SECONDS)
            one.kill()
            assert await one.end(SECONDS) == "was killed by SIGKILL"

    run(scenario())


def test_without_gates_the_head_takes_connections_itself(
    identity: RunIdentity, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(gates, "BACKOFF", Backoff(0.01, 0.01))
    _, credentials = enrolled(identity, "worker", tmp_path / "peer")

    async def scenario() -> None:
        async with gated(identity, Desk().handlers()) as (port, server):
            server.gates._command = [sys.executable, "-c", "raise SystemExit(3)"]
            for pid in pids(server):
                os.kill(pid, signal.SIGKILL)
            await until(lambda: not server.gates._gates)
            async with many(port, credentials, 3):
                assert len(server._door.connections()) == 3
            await until(lambda: "a gate could not be started, it exited with status 3" in caplog.text)

    with caplog.at_level(logging.ERROR):
        run(scenario())


def test_gates_end_with_the_server(identity: RunIdentity) -> None:
    async def scenario() -> None:
        async with gated(identity, Desk().handlers()) as (_, server):
            before = pids(server)
        assert len(before) == GATES_MIN
        assert not any(map(is_running, before))

    run(scenario())


HEAD = """
import asyncio, sys
from pathlib import Path
from echo2.transport import gates
from echo2.transport.identity import PeerIdentity, RunIdentity

async def main():
    server = gates.GatedServer("127.0.0.1", 0, RunIdentity.create_or_load(Path(sys.argv[1])), {}, print)
    port = await server.start()
    server.gates.open()
    while not server.gates._gates:
        await asyncio.sleep(0.01)
    print(port, flush=True)
    await asyncio.Event().wait()

asyncio.run(main())
"""


def test_gates_end_with_a_head_that_is_killed_and_its_port_is_free(identity: RunIdentity, tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    command = [sys.executable, "-c", HEAD, str(tmp_path / "run")]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as head:
        assert head.stdout is not None
        port = int(head.stdout.readline())
        head.kill()

    async def scenario() -> None:
        server = GatedServer(LOOPBACK, port, identity, {}, lambda error: None)
        async with asyncio.timeout(SECONDS):
            await until(lambda: not is_listening(port))
        assert await server.start() == port
        await server.stop()

    run(scenario())


def is_listening(port: int) -> bool:
    with socket.socket() as caller:
        return caller.connect_ex((LOOPBACK, port)) == 0
