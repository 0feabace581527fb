"""Members that want too much, or what is not theirs: they are told or cut, and others are served."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import grpc.aio
import pytest

from door_cases import (
    LOOPBACK,
    channel,
    dialled,
    enrolled,
    head_process,
    linked,
    peak_bytes,
    report,
    serving,
    until_closed,
)
from echo2.core.errors import LinkError
from echo2.transport import limits
from echo2.transport import wire_pb2 as wire
from echo2.transport.grpc_link import GrpcLink, GrpcNetwork
from echo2.transport.grpc_server import SERVICE
from echo2.transport.identity import PeerIdentity, RunIdentity
from echo2.transport.tickets import Ticket
from transport_cases import SECONDS, Desk, run

BODY_BYTES = 60 << 20


@pytest.fixture
def identity(tmp_path: Path) -> RunIdentity:
    return RunIdentity.create_or_load(tmp_path / "run")


# ---- members ---------------------------------------------------------------------------------------------------------


@pytest.mark.skipif(sys.platform != "linux", reason="memory of another process is read below /proc")
@pytest.mark.parametrize("who", ["ticket", "revoked ticket", "revoked worker", "wrong role"])
def test_bodies_of_unauthorized_callers_are_not_read(identity: RunIdentity, tmp_path: Path, who: str) -> None:
    """Eight bodies of 60 MiB at once."""
    peer_id, credentials = enrolled(identity, tmp_path / "peer")
    honest, method = enrolled(identity, tmp_path / "honest")[1], "LearnerReport" if who == "wrong role" else "Report"
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
        word = "protocol" if who == "ticket" else "forbidden" if who == "wrong role" else "revoked"
        refused = [end for end in ends if isinstance(end, grpc.aio.AioRpcError)]
        assert len(refused) == 8
        told = [end.details() or "" for end in refused if end.code() is grpc.StatusCode.PERMISSION_DENIED]
        assert all(each.startswith(f"{word}: ") for each in told)  # the others were cut before they heard it
        async with channel(port, credentials) as opened:
            with pytest.raises(grpc.aio.AioRpcError, match=f"{word}: "):
                await opened.unary_unary(f"/{SERVICE}/{method}")(b"", timeout=SECONDS)
        assert grown < BODY_BYTES, grown  # gRPC's windows of 32 MiB and their copies: less than one body

    with head_process(tmp_path / "run") as (port, pid):
        run(scenario(port, pid))


@pytest.mark.skipif(sys.platform != "linux", reason="memory of another process is read below /proc")
def test_bodies_of_a_member_are_held_up_to_a_bound(identity: RunIdentity, tmp_path: Path) -> None:
    """Ten results of 60 MiB at once: two are read at a time, and what gRPC holds of the others is bounded. Before that,
    and after, it is served."""
    credentials, honest = (enrolled(identity, tmp_path / name)[1] for name in ("a", "b"))
    body = wire.Deliveries(items=[wire.Delivery(group={"rollouts": [{"tokens": bytes(BODY_BYTES)}]})])
    data = body.SerializeToString()

    async def scenario(port: int, pid: int) -> None:
        async with linked(port, honest) as link, channel(port, credentials) as opened:
            deliver = opened.unary_unary(f"/{SERVICE}/Deliver")
            await deliver(data, timeout=SECONDS)
            before = peak_bytes(pid)
            ends = await asyncio.gather(*(deliver(data, timeout=SECONDS) for _ in range(10)), return_exceptions=True)
            assert len(ends) == 10  # some are told, or all that are under way are cut; or it was slow enough
            await report(link)
            grown = peak_bytes(pid) - before
        assert grown < limits.UNREAD_PER_PEER_MAX + (128 << 20), grown  # that, and a copy of what is read
        async with linked(port, credentials) as again:
            await report(again)

    with head_process(tmp_path / "run") as (port, pid):
        run(scenario(port, pid))


def test_a_flooding_peer_is_refused_with_a_reason_and_cut_off_while_another_is_served(
    identity: RunIdentity, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "CALLS_BURST", 50.0)
    monkeypatch.setattr(limits, "CALLS_PER_SECOND_MAX", 0.01)  # none is earned during the test
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
                    said.append("busy" if "busy: more than 0.01 calls a second of w-" in str(error) else str(error))
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
    async def scenario() -> None:
        credentials = enrolled(identity, tmp_path / "peer")[1]
        async with serving(identity, Desk()) as port, channel(port, credentials) as opened:
            never = asyncio.Event()

            async def nothing() -> AsyncIterator[bytes]:
                await never.wait()
                yield b""

            with monkeypatch.context() as hasty:
                hasty.setattr(limits, "READ_SECONDS", 0.2)
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


def test_a_peers_port_has_the_same_admission_checks(identity: RunIdentity, tmp_path: Path) -> None:
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
