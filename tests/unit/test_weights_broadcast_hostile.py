"""Peers that lie, stall or are not who they should be: nobody takes harm, and the origin hears who it was."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from weights_cases import spoil

from broadcast_fleet import SECONDS, Fleet, content, opened, until
from echo2.core.addresses import split
from echo2.core.errors import LinkError, PeerError
from echo2.core.types import RUN_POLICY, PayloadId, SnapshotRef
from echo2.transport import message_bytes
from echo2.transport import wire_pb2 as wire
from echo2.transport.base import Handlers, Link, Peer
from echo2.transport.grpc_link import GrpcLink, GrpcNetwork
from echo2.transport.identity import PeerIdentity, RunIdentity, peer_name
from echo2.transport.tickets import Ticket
from echo2.weights.broadcast import origin
from echo2.weights.broadcast.serving import REQUEST_CHUNKS_MAX, REQUESTS_PER_PEER_MAX, encode_payload
from memory_links import LOOPBACK

PAYLOAD = encode_payload(PayloadId(SnapshotRef(RUN_POLICY, 1, 1)))


def run(scenario: Coroutine[Any, Any, None]) -> None:
    """Run to the end, or fail instead of hanging."""
    asyncio.run(asyncio.wait_for(scenario, 3 * SECONDS))


# ---- peers that serve wrongly ----------------------------------------------------------------------------------------

Lie = Callable[[bytes], bytes]
LIES: dict[str, Lie] = {
    "other bytes": lambda hash_: message_bytes.pack(hash_, b"not this chunk"),
    "more than a chunk may have": lambda hash_: message_bytes.pack(hash_, bytes((1 << 20) + 1)),
    "a chunk nobody asked for": lambda hash_: message_bytes.pack(bytes(32), b"hello"),
    "no chunk at all": lambda hash_: b"\xff\xff\xff",
    "a length that lies": lambda hash_: message_bytes.pack(hash_, bytes(1000))[:-1],
}


async def hostile(fleet: Fleet, name: str, serve: Callable[[wire.ChunkRequest], AsyncIterator[bytes]]) -> None:
    """Enrolled like any other, and dialable; what it serves is what `serve` makes of a request."""

    def fetch(peer: Peer, request: wire.ChunkRequest) -> AsyncIterator[bytes]:
        return serve(request)

    async def refuse(peer: Peer, request: bytes) -> wire.Empty:
        raise PeerError("forbidden", "whatever")

    assert fleet.memory is not None
    handlers: Handlers = {"FetchChunks": fetch, "GiveChunk": refuse}
    port = await fleet.memory.member(name).listen(LOOPBACK, 0, handlers, lambda peer_id: None)
    fleet.origin.joined(name, wire.WorkerHello(listen_port=port), LOOPBACK)
    await until(lambda: bool(fleet.origin.address_of(name)), f"{name} was dialled back")


async def sent_to(fleet: Fleet, serve: Callable[[wire.ChunkRequest], AsyncIterator[bytes]]) -> None:
    """A worker is told to take half of a payload of such a peer; it must come to have all of it."""
    await hostile(fleet, "w-bad", serve)
    worker = await fleet.join("w-1")
    manifest = fleet.put(content(1))
    fleet.origin.assign(manifest.payload, fleet.workers, manifest)
    sources = [wire.Source(), wire.Source(peer_id="w-bad", address=fleet.origin.address_of("w-bad"))]
    order = wire.Routes(payload=encode_payload(manifest.payload), sources=sources, stripes=[0, 1])
    worker.node.obey(wire.Order(routes=order))
    worker.node.fetch(manifest)
    await worker.has(manifest)


@pytest.mark.parametrize("lie", LIES.values(), ids=LIES)
def test_a_lying_source_is_named_and_avoided(tmp_path: Path, lie: Lie) -> None:
    async def serve(request: wire.ChunkRequest) -> AsyncIterator[bytes]:
        for hash_ in request.hashes:
            yield lie(hash_)

    async def scenario() -> None:
        async with opened(tmp_path, "memory", scheme="star") as fleet:
            await sent_to(fleet, serve)
            await until(lambda: fleet.suspects == ["w-bad"], "it was named")

    run(scenario())


@pytest.mark.parametrize("how", ["ends early", "refuses", "says nothing"])
def test_useless_peer_is_replaced(tmp_path: Path, how: str) -> None:
    async def serve(request: wire.ChunkRequest) -> AsyncIterator[bytes]:
        if how == "refuses":
            raise PeerError("busy", "come again")
        if how == "says nothing":
            await asyncio.Event().wait()
        yield message_bytes.ALIVE

    async def scenario() -> None:
        async with opened(tmp_path, "memory", scheme="star") as fleet:
            await sent_to(fleet, serve)
            assert fleet.suspects == []

    run(scenario())


def test_relay_whose_disk_altered_a_chunk_is_called_no_liar(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with opened(tmp_path, "memory", scheme="star") as fleet:
            relay, child = await fleet.join("w-1"), await fleet.join("w-2")
            manifest, data = content(1)
            fleet.put((manifest, data))
            for hash_, chunk in data.items():
                relay.store.put(hash_, chunk)
            relay.node.stop_fetching(manifest.payload)  # nothing of it is on its way any more
            spoil(relay.store.directory, manifest.hashes[7])
            fleet.origin.assign(manifest.payload, ["w-2"], manifest)
            source = wire.Source(peer_id="w-1", address=fleet.origin.address_of("w-1"))
            child.node.obey(wire.Order(routes=wire.Routes(payload=PAYLOAD, sources=[source], stripes=[0])))
            failures = []
            failed, child.node.failed = child.node.failed, lambda *what: (failures.append(what), failed(*what))
            child.node.fetch(manifest)
            await child.has(manifest)
            assert failures == [("w-1", "missing")]
            assert fleet.suspects == []

    run(scenario())


@pytest.mark.parametrize("word", ["corrupt", "oversized", "malformed", "busy"])
def test_a_refusal_is_never_counted_as_a_lie(tmp_path: Path, word: str) -> None:
    async def serve(request: wire.ChunkRequest) -> AsyncIterator[bytes]:
        yield message_bytes.ALIVE
        raise PeerError(word, "not today")

    async def scenario() -> None:
        async with opened(tmp_path, "memory", scheme="star") as fleet:
            await sent_to(fleet, serve)
            assert fleet.suspects == []

    run(scenario())


def test_a_lying_peer_that_dialled_is_named(tmp_path: Path) -> None:
    """And what was not asked for is refused, without harm to what is under way."""

    async def scenario() -> None:
        async with opened(tmp_path, "memory") as fleet:
            taker = await fleet.join("w-1")
            manifest = fleet.put(content(1))
            assert fleet.memory is not None
            bad = fleet.memory.member("w-bad").to_peer("w-1", fleet.origin.address_of("w-1"))
            with pytest.raises(PeerError, match="unasked"):
                await bad.call("GiveChunk", message_bytes.pack(bytes(32), b"x"), SECONDS)
            fleet.origin.joined("w-bad", wire.WorkerHello(), LOOPBACK)
            fleet.assign(manifest, taker)
            order = wire.Routes(payload=PAYLOAD, sources=[wire.Source(peer_id="w-bad")], stripes=[0])
            taker.node.obey(wire.Order(routes=order))
            request = await anext(aiter(bad.stream("AskWanted", wire.Empty())))
            with pytest.raises(PeerError, match=r"corrupt|unasked"):
                await bad.call("GiveChunk", message_bytes.pack(request.hashes[0], b"wrong"), SECONDS)
            await taker.has(manifest)

    run(scenario())


# ---- peers that ask wrongly ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("request_", "word"),
    [
        (wire.ChunkRequest(hashes=[bytes(32)] * (REQUEST_CHUNKS_MAX + 1), payload=PAYLOAD), "oversized"),
        (wire.ChunkRequest(hashes=[bytes(31)], payload=PAYLOAD), "malformed"),
        (
            wire.ChunkRequest(
                hashes=[bytes(32)], payload=wire.PayloadId(ref=wire.SnapshotId(policy=RUN_POLICY, version=2**60))
            ),
            "malformed",
        ),
        (wire.ChunkRequest(hashes=[bytes(32)], payload=PAYLOAD), "missing"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_request_that_is_refused(tmp_path: Path, request_: wire.ChunkRequest, word: str) -> None:
    async def scenario() -> None:
        async with opened(tmp_path, "memory") as fleet:
            assert fleet.memory is not None
            link = fleet.memory.member("w-1").to_head()
            with pytest.raises(PeerError) as caught:
                async for _ in link.frames("FetchChunks", request_):
                    pass
            assert caught.value.reason == word

    run(scenario())


def test_one_peer_can_have_so_many_requests_under_way(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with opened(tmp_path, "memory") as fleet:
            worker = await fleet.join("w-1")
            assert fleet.memory is not None
            link = fleet.memory.member("w-2").to_peer("w-1", fleet.origin.address_of("w-1"))
            worker.expects(content(1)[0])  # what it is asked for
            request = wire.ChunkRequest(hashes=content(1)[0].hashes, payload=PAYLOAD)
            streams = [aiter(link.frames("FetchChunks", request)) for _ in range(REQUESTS_PER_PEER_MAX)]
            for stream in streams:
                assert await anext(stream) == message_bytes.ALIVE
            with pytest.raises(PeerError, match="busy"):
                await anext(aiter(link.frames("FetchChunks", request)))
            for stream in streams:
                await stream.aclose()  # type: ignore[attr-defined]
            assert await anext(aiter(link.frames("FetchChunks", request))) == message_bytes.ALIVE
            worker.node.stop_fetching(PayloadId(SnapshotRef(RUN_POLICY, 1, 1)))

    run(scenario())


@pytest.mark.parametrize(
    "report",
    [
        wire.FetchReport(payload=PAYLOAD, failed_source="w-2", failure="boredom"),
        wire.FetchReport(payload=PAYLOAD, bytes_stored=2, bytes_total=1),
        wire.FetchReport(payload=PAYLOAD, bytes_total=2**60),
        wire.FetchReport(payload=PAYLOAD, whole=True, tallies=[wire.Tally(source="w-2", num_bytes=1, seconds=1.0)]),
        wire.FetchReport(
            payload=PAYLOAD, whole=True, bytes_total=1, tallies=[wire.Tally(num_bytes=1, seconds=float("nan"))]
        ),
    ],
    ids=["failure", "more than all", "too much", "tallies", "seconds"],
)
def test_report_that_is_refused(tmp_path: Path, report: wire.FetchReport) -> None:
    async def scenario() -> None:
        async with opened(tmp_path, "memory") as fleet:
            worker = await fleet.join("w-1")
            with pytest.raises(PeerError, match="malformed"):
                await worker.link.call("ReportFetch", report, SECONDS)
            assert fleet.memory is not None
            stranger = fleet.memory.member("w-9").to_head()
            with pytest.raises(PeerError, match="unknown_worker"):
                await stranger.call("ReportFetch", report, SECONDS)

    run(scenario())


# ---- who is who ------------------------------------------------------------------------------------------------------


async def outcome(link: Link) -> str:
    """The word with which a peer's server answers, "" where nobody is reached that is the right one."""
    try:
        async for message in link.frames("FetchChunks", wire.ChunkRequest(payload=PAYLOAD)):
            assert message == message_bytes.ALIVE
    except PeerError as error:
        return error.reason
    except LinkError:
        return ""
    finally:
        await link.close()
    return "served"


def test_only_members_are_served_and_only_the_right_one_serves(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with opened(tmp_path, "grpc") as fleet:
            worker = await fleet.join("w-1")
            at, own = fleet.origin.address_of(worker.peer_id), worker.peer_id
            other_id, credentials = fleet.credentials("w-2")
            other = GrpcNetwork(credentials)
            assert await outcome(other.to_peer(own, at)) == "served"
            assert await outcome(other.to_peer(other_id, at)) == ""  # somebody else answers at this address
            foreign = RunIdentity.create_or_load(tmp_path / "foreign")
            assert await outcome(GrpcNetwork(foreign.credentials).to_peer(own, at)) == ""
            assert fleet.identity is not None
            assert await outcome(GrpcNetwork(fleet.identity.credentials).to_peer(own, at)) == "forbidden"
            ticket = Ticket.parse(fleet.identity.make_ticket("worker", at, 1, 1.0)).credentials
            assert await outcome(GrpcLink(at, ticket, peer_name(own))) == "forbidden"
            learner = PeerIdentity(tmp_path / "learner")
            learner_ticket = Ticket.parse(fleet.identity.make_ticket("learner", at, 1, 1.0))
            _, certificate = fleet.identity.enrol(learner_ticket.ticket_id, "learner", learner.request())
            _, as_learner = learner.keep(learner_ticket.credentials.ca_pem, certificate)
            assert await outcome(GrpcNetwork(as_learner).to_peer(own, at)) == "forbidden"
            assert await outcome(other.to_peer(own, at)) == "served"

    run(scenario())


@pytest.mark.parametrize("backend", ["memory", "grpc"])
def test_revoked_peer_is_refused_by_peers_and_taken_from_no_more(tmp_path: Path, backend: str) -> None:
    async def scenario() -> None:
        async with opened(tmp_path, backend) as fleet:
            first, second = await fleet.join("w-1"), await fleet.join("w-2")
            at = fleet.origin.address_of(first.peer_id)
            network = second.node._network
            assert await outcome(network.to_peer(first.peer_id, at)) == "served"
            fleet.origin.revoked([second.peer_id])
            assert await outcome(network.to_peer(first.peer_id, at)) == "revoked"
            fleet.origin.revoked([])
            assert await outcome(network.to_peer(first.peer_id, at)) == "served"

    run(scenario())


# ---- addresses -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("port", "advertise", "host", "address"),
    [
        (0, "", "192.0.2.1", ""),
        (70_000, "", "192.0.2.1", ""),
        (4700, "", "192.0.2.1", "192.0.2.1:4700"),
        (4700, "", "2001:db8::1", "[2001:db8::1]:4700"),
        (4700, "", "", ""),
        (4700, "203.0.113.9", "10.0.0.1", "203.0.113.9:4700"),
        (4700, "worker.example:80", "10.0.0.1", "worker.example:80"),
        (4700, "[2001:db8::2]:80", "10.0.0.1", "[2001:db8::2]:80"),
        (4700, "two words", "10.0.0.1", ""),
        (4700, "a" * 300, "10.0.0.1", ""),
    ],
)
def test_address_of_a_worker(port: int, advertise: str, host: str, address: str) -> None:
    assert origin.of_worker(wire.WorkerHello(listen_port=port, advertise=advertise), host) == address


@given(st.integers(1, 65535), st.text(max_size=40), st.text(max_size=20))
def test_any_text_as_address(port: int, advertise: str, host: str) -> None:
    address = origin.of_worker(wire.WorkerHello(listen_port=port, advertise=advertise), host)
    assert address == "" or 0 < split(address)[1] <= 65535


@pytest.mark.parametrize(
    ("address", "reach"),
    [("127.0.0.1:4700", "loopback"), ("[::1]:1", "loopback"), ("localhost:1", "loopback"), ("192.0.2.1:1", "")],
)
def test_shots_within_reach(address: str, reach: str) -> None:
    assert origin.reach(address) == reach
