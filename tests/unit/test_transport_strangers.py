"""Strangers with several tickets do their worst to one port: it harms themselves, and whoever came by another ticket is
served."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from hypothesis import given
from hypothesis import strategies as st

from door_cases import LOOPBACK, channel, enrolled, linked, report, serving
from echo2.core.errors import LinkError, PeerError
from echo2.transport import budgets, limits
from echo2.transport import wire_pb2 as wire
from echo2.transport.base import Handlers
from echo2.transport.budgets import Budgets, Party, worst
from echo2.transport.grpc_link import GrpcLink, GrpcNetwork
from echo2.transport.grpc_server import SERVICE, GrpcServer
from echo2.transport.identity import SERVER_NAME, PeerIdentity, RunIdentity
from echo2.transport.tickets import Credentials, Ticket
from transport_cases import SECONDS, Desk, run

SQUEEZED = [grpc.Compression.Gzip, grpc.Compression.Deflate]


class Table(Desk):
    """A desk that answers deliveries at once."""

    def handlers(self) -> Handlers:
        return {**super().handlers(), "Deliver": self.accept}


@pytest.fixture
def identity(tmp_path: Path) -> RunIdentity:
    return RunIdentity.create_or_load(tmp_path / "run")


def members(identity: RunIdentity, state: Path, count: int) -> list[tuple[str, Credentials]]:
    """So many strangers of one ticket."""
    ticket = Ticket.parse(identity.make_ticket("worker", "nowhere:1", count, 1.0))
    peers = [PeerIdentity(state / f"{number}") for number in range(count)]
    return [
        peer.keep(ticket.credentials.ca_pem, identity.enrol(ticket.ticket_id, "worker", peer.request())[1])
        for peer in peers
    ]


async def deliver(link: GrpcLink) -> None:
    await link.call("Deliver", wire.Deliveries(), SECONDS)


# ---- what they send --------------------------------------------------------------------------------------------------


def test_endless_bodies_of_other_tickets_delay_no_one_else(
    identity: RunIdentity, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Five tickets with four members each begin heartbeats and results, and end none."""
    monkeypatch.setattr(limits, "READ_SECONDS", 10 * SECONDS)  # none is given up during the test

    async def scenario() -> None:
        own, honest = enrolled(identity, tmp_path / "own", True)[1], enrolled(identity, tmp_path / "honest")[1]
        server, never, begun = GrpcServer(LOOPBACK, 0, identity, Table().handlers()), asyncio.Event(), list[Any]()
        port = await server.start()

        async def nothing() -> AsyncIterator[bytes]:
            await never.wait()
            yield b""

        async with AsyncExitStack() as stack:
            for number in range(5):
                for _, hostile in members(identity, tmp_path / f"hostile {number}", 4):
                    opened = await stack.enter_async_context(channel(port, hostile))
                    for method in ["Report", "Deliver"] * 2:
                        begun.append(opened.stream_unary(f"/{SERVICE}/{method}")(nothing(), timeout=4 * SECONDS))
            while server._budgets._under_way.total() < len(begun):  # noqa: ASYNC110 (it has no event here)
                await asyncio.sleep(0.01)
            for credentials in (own, honest):
                async with linked(port, credentials) as link:
                    await report(link)
                    await deliver(link)
            assert not any(each.done() for each in begun)
            for each in begun:
                each.cancel()
            never.set()
        await server.stop()

    run(scenario())


@pytest.mark.parametrize(
    "items",
    [[wire.Delivery(group={"prompt_tokens": bytes(8 << 20)})], [wire.Delivery()] * (1 << 15)],
    ids=["bytes", "parts"],
)
def test_a_body_counts_until_its_handler_is_done(
    items: list[wire.Delivery], identity: RunIdentity, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bodies that were read and wait in a slow handler are memory, too, and so is what their parts became."""
    monkeypatch.setattr(budgets, "UNREAD_SECONDS", 1e9)  # nothing is forgotten during the test

    async def scenario() -> None:
        held, go_on = asyncio.Event(), asyncio.Event()

        async def slow(_: Any, deliveries: wire.Deliveries) -> wire.DeliveryReplies:
            held.set()
            await go_on.wait()
            return wire.DeliveryReplies()

        peer_id, credentials = enrolled(identity, tmp_path / "peer")
        server = GrpcServer(LOOPBACK, 0, identity, {**Desk().handlers(), "Deliver": slow})
        port = await server.start()
        own = Party(peer_id, unread=limits.UNREAD_PER_PEER_MAX)
        async with linked(port, credentials) as link:
            await report(link)  # from now on it is known whose bytes come
            calling = asyncio.ensure_future(link.call("Deliver", wire.Deliveries(items=items), SECONDS))
            await held.wait()
            assert server._budgets.unread(own) > 7 << 20
            go_on.set()
            await calling
            assert server._budgets.unread(own) < 1 << 20
        await server.stop()

    run(scenario())


@given(st.integers(1, 40), st.integers(1, 5), st.booleans())
def test_no_peer_waits_for_the_bodies_of_another_ticket(num_tickets: int, num_peers: int, is_large: bool) -> None:
    """Whatever the number of tickets that hold all turns which they can get: a peer of one more ticket gets its own."""

    async def scenario() -> None:
        budgets = Budgets()
        shared = Party("strangers", unread=limits.UNREAD_MAX)

        def chain(peer: int, ticket: int) -> tuple[Party, ...]:
            own = Party(f"w-{ticket}-{peer}", reads=limits.READS_PER_PEER_MAX)
            return own, Party(f"ticket {ticket}", reads=limits.READS_PER_TICKET_MAX), shared

        async def hold(parties: tuple[Party, ...]) -> None:
            async with budgets.reading(parties, True):
                await asyncio.Event().wait()

        holding = [
            asyncio.ensure_future(hold(chain(peer, ticket)))
            for ticket in range(num_tickets)
            for peer in range(num_peers)
            for _ in range(limits.READS_PER_PEER_MAX + 1)
        ]
        for _ in range(5):
            await asyncio.sleep(0)
        turn = budgets.reading(chain(0, num_tickets), is_large).__aenter__()
        with pytest.raises(StopIteration):
            turn.send(None)  # it does not wait at all
        small = budgets.reading(chain(0, 0), False).__aenter__()
        with pytest.raises(StopIteration):
            small.send(None)  # nor does a heartbeat of one that holds all its turns
        for each in holding:
            each.cancel()
        await asyncio.wait(holding)

    run(scenario())


@given(st.lists(st.lists(st.integers(0, 1000), min_size=1, max_size=6), min_size=2, max_size=20))
def test_a_caller_with_less_than_the_worst_ticket_is_not_cut_off(tickets: list[list[int]]) -> None:
    strangers, has = Party("strangers"), dict[str, float]()
    chains = []
    for number, peers in enumerate(tickets):
        has[f"ticket {number}"] = sum(peers)
        for at, amount in enumerate(peers):
            has[f"w-{number}-{at}"] = amount
            chains += [(Party(f"w-{number}-{at}"), Party(f"ticket {number}"), strangers)] * (1 + amount % 3)
    found = worst(strangers, chains, lambda party: has[party.name])
    ticket = next(chain[1] for chain in chains if chain[0] == found)
    assert has[ticket.name] == max(sum(peers) for peers in tickets)
    assert has[found.name] == max(has[chain[0].name] for chain in chains if ticket in chain)


# ---- how many there are ----------------------------------------------------------------------------------------------


def test_connections_of_strangers_are_shared_by_tickets(
    identity: RunIdentity, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two members of one ticket take all that strangers may have. One of another ticket comes, and they lose one."""

    async def scenario() -> None:
        own, honest = enrolled(identity, tmp_path / "own", True)[1], enrolled(identity, tmp_path / "honest")[1]
        server = GrpcServer(LOOPBACK, 0, identity, Table().handlers())
        monkeypatch.setattr(limits, "STRANGERS_SHARE", 6 / server._door.connections_max)
        port = await server.start()
        async with linked(port, own) as first:
            await report(first)
            kept = []
            for _, hostile in members(identity, tmp_path / "hostile", 2):
                for _ in range(3):
                    kept.append(GrpcLink(f"{LOOPBACK}:{port}", hostile))
                    await report(kept[-1])
            before = server._door.connections()
            assert len(before) == 7
            async with linked(port, honest) as link:
                await report(link)
                after = [each for each in server._door.connections() if each in server._door._named]
                assert len(after) == 7
                assert set(before) - set(after) <= set(before[1:])  # one of the hostile
                await report(first)
                await report(link)
            for each in kept:
                await each.close()
        await server.stop()

    run(scenario())


# ---- what is squeezed ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("algorithm", SQUEEZED)
def test_chunks_of_peers_are_not_decompressed(
    identity: RunIdentity, tmp_path: Path, algorithm: grpc.Compression
) -> None:
    """At the head, and at a worker."""

    async def scenario() -> None:
        desk, (name, credentials) = Table(), enrolled(identity, tmp_path / "peer")
        network = GrpcNetwork(credentials)
        async with serving(identity, desk) as port:
            peer_port = await network.listen(LOOPBACK, 0, desk.handlers(), identity.check_not_revoked)
            for at, method, server_name in ((port, "Deliver", SERVER_NAME), (peer_port, "GiveChunk", f"{name}.echo2")):
                async with channel(at, credentials, server_name) as opened:
                    call = opened.unary_unary(f"/{SERVICE}/{method}")
                    with pytest.raises(grpc.aio.AioRpcError, match="is disabled") as caught:
                        await call(bytes(1 << 20), timeout=SECONDS, compression=algorithm)
                    assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
                    assert desk.given == []
                    await call(b"", timeout=SECONDS)
                    assert len(desk.given) == 1
                    desk.given.clear()
            await network.close()

    run(scenario())


@pytest.mark.parametrize("algorithm", SQUEEZED)
def test_no_link_decompresses_an_answer(identity: RunIdentity, tmp_path: Path, algorithm: grpc.Compression) -> None:
    async def scenario() -> None:
        (name, own), (_, other) = (enrolled(identity, tmp_path / each) for each in ("a", "b"))

        async def give(request: bytes, context: Any) -> bytes:
            return wire.Empty().SerializeToString() + bytes(1 << 20)

        server = grpc.aio.server(compression=algorithm)
        handlers = {"GiveChunk": grpc.unary_unary_rpc_method_handler(give)}
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))
        tls = grpc.ssl_server_credentials([(own.key_pem, own.certificate_pem)], own.ca_pem, True)
        port = server.add_secure_port(f"{LOOPBACK}:0", tls)
        await server.start()
        link = GrpcNetwork(other).to_peer(name, f"{LOOPBACK}:{port}")
        with pytest.raises((PeerError, LinkError), match=r"is disabled|malformed"):
            await link.call("GiveChunk", b"", SECONDS)
        await link.close()
        await server.stop(None)

    run(scenario())


# ---- what they are sent ----------------------------------------------------------------------------------------------


def test_a_stranger_is_sent_so_much_and_the_owner_without_bound(
    identity: RunIdentity, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "SENT_BURST", 1 << 20)
    monkeypatch.setattr(limits, "SENT_PER_SECOND_MAX", 1e-6)  # nothing is earned during the test

    async def probe(link: GrpcLink) -> None:
        async for _ in link.frames("Probe", wire.ProbeRequest(num_bytes=1 << 18)):
            pass

    async def scenario() -> None:
        own, (_, hostile), (_, honest) = (
            enrolled(identity, tmp_path / "own", True)[1],
            *(enrolled(identity, tmp_path / name) for name in ("a", "b")),
        )
        async with serving(identity, Desk()) as port, linked(port, hostile) as link:
            for _ in range(3):
                await probe(link)
            waiting = asyncio.ensure_future(probe(link))
            await report(link)  # an answer without bytes costs nothing
            for credentials in (own, honest):
                async with linked(port, credentials) as other:
                    for _ in range(3):
                        await probe(other)
            async with linked(port, own) as other:
                for _ in range(10):
                    await probe(other)
            assert not waiting.done()
            waiting.cancel()

    run(scenario())


@given(st.lists(st.tuples(st.floats(0.0, 0.5), st.integers(1, 1000)), min_size=1, max_size=100))
def test_answers_keep_to_their_rate_over_any_time(answers: list[tuple[float, int]]) -> None:
    """By the seconds that each is made to wait, on a clock of its own."""
    rate, burst, now, sent = 100.0, 500.0, 0.0, 0.0
    budgets, party = Budgets(), Party("w-1", sent_per_second=rate, sent_burst=burst)
    for pause, num_bytes in answers:
        now += pause
        wait_seconds = budgets.sent((party,), num_bytes, now)
        sent += num_bytes
        assert wait_seconds >= (sent - burst) / rate - now - 1e-6
        assert budgets.sent((party,), 0, now) == 0.0
    assert budgets.sent((Party("w-2", sent_per_second=rate, sent_burst=burst),), 1, now) == 0.0


def test_late_calls_from_a_reused_port_harm_no_other_member(identity: RunIdentity, tmp_path: Path) -> None:
    """gRPC hands over a late call of a closed connection; another member's connection has its port by now."""

    async def scenario() -> None:
        own, hostile = enrolled(identity, tmp_path / "own", True)[1], enrolled(identity, tmp_path / "a")[1]
        server = GrpcServer(LOOPBACK, 0, identity, Table().handlers())
        port = await server.start()
        async with linked(port, own) as link, linked(port, hostile) as other:
            await report(link)
            await report(other)
            [first, second] = server._door.connections()
            ports = {connection: at for at, connection in server._door._inside.items()}
            server._door._inside[ports[second]] = first
            with pytest.raises(PeerError, match="call the port"):
                await report(other)
            await report(link)
            server._door._inside[ports[second]] = second
        await server.stop()

    run(scenario())
