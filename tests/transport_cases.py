"""What every kind of link does, as one suite: `test_transport_memory` and `test_transport_grpc` run it on their own."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Coroutine
from contextlib import AbstractAsyncContextManager, aclosing
from dataclasses import dataclass, field
from typing import Any

import pytest

from echo2.core.errors import LinkError, PeerError
from echo2.transport import limits
from echo2.transport import wire_pb2 as wire
from echo2.transport.base import Handlers, Link, Peer

#: For what must happen, however slow the machine.
SECONDS = 60.0
#: A deadline meant to pass, and a pause meant to be noticed.
SHORT_SECONDS = 0.05


def run(scenario: Coroutine[Any, Any, None]) -> None:
    """Run to the end, or fail instead of hanging."""
    asyncio.run(asyncio.wait_for(scenario, 2 * SECONDS))


async def attend(link: Link) -> None:
    """Read orders until the stream ends."""
    async for _ in link.stream("Attend", wire.WorkerHello()):
        pass


@dataclass
class Desk:
    """A head of little brain: it echoes, refuses and waits as told, and notes what becomes of its handlers."""

    peers: list[Peer] = field(default_factory=list)
    attended: asyncio.Event = field(default_factory=asyncio.Event)
    left: asyncio.Event = field(default_factory=asyncio.Event)
    given: list[Any] = field(default_factory=list)

    def handlers(self) -> Handlers:
        return {
            "Report": self.report,
            "FailLease": self.refuse,
            "Deliver": self.wait,
            "FetchManifest": self.weigh,
            "Attend": self.attend,
            "FetchChunks": self.chunks,
            "TakeGroups": self.chunks,
            "Probe": self.filler,
            "GiveChunk": self.accept,
            "LearnerReport": self.report,
        }

    async def report(self, peer: Peer, request: wire.WorkerReport) -> wire.Empty:
        self.peers.append(peer)
        return wire.Empty()

    async def refuse(self, peer: Peer, request: wire.LeaseFailed) -> wire.Empty:
        raise PeerError(request.reason, request.detail)

    async def weigh(self, peer: Peer, request: wire.ManifestRequest) -> wire.SnapshotNotice:
        return wire.SnapshotNotice(version=request.version, manifest=bytes(request.lineage))

    async def wait(self, peer: Peer, request: wire.Delivery) -> wire.DeliveryReply:
        self.attended.set()
        try:
            await asyncio.Event().wait()
        finally:
            self.left.set()
        raise AssertionError("nothing ends that wait")

    async def attend(self, peer: Peer, hello: wire.WorkerHello) -> AsyncIterator[wire.Order]:
        """One order; then silence, until the caller goes."""
        try:
            yield wire.Order(stop=wire.Stop(reason=f"hello {peer.peer_id}"))
            self.attended.set()
            await asyncio.Event().wait()
        finally:
            self.left.set()

    async def chunks(self, peer: Peer, request: wire.ChunkRequest) -> AsyncIterator[wire.Chunk]:
        """As many as hashes were asked for; then a refusal, if the last hash is a word."""
        try:
            for hash_ in request.hashes:
                if hash_.isalpha():
                    raise PeerError(hash_.decode(), "as you like it")
                yield wire.Chunk(hash=hash_, data=bytes(1 << 16))
        finally:
            self.left.set()

    async def filler(self, peer: Peer, request: wire.ProbeRequest) -> AsyncIterator[bytes]:
        """Bytes that are a message already."""
        yield wire.Chunk(hash=b"1", data=bytes(request.num_bytes)).SerializeToString()
        yield b""

    async def accept(self, peer: Peer, message: Any) -> wire.Empty:
        self.peers.append(peer)
        self.given.append(message)
        return wire.Empty()


class LinkCases(ABC):
    """The semantics of `base.Link`. A backend says how to get a link, and how to break one."""

    @abstractmethod
    def linked(self, desk: Desk, role: str = "worker") -> AbstractAsyncContextManager[Link]:
        """A link to this desk as a peer of this role."""

    @abstractmethod
    def cut(self, link: Link) -> None:
        """From now on nothing gets through, in either direction."""

    @abstractmethod
    def mend(self, link: Link) -> None:
        """The way is free again."""

    # ---- answers -----------------------------------------------------------------------------------------------------

    def test_call(self) -> None:
        async def scenario() -> None:
            desk = Desk()
            async with self.linked(desk) as link:
                reply = await link.call("FetchManifest", wire.ManifestRequest(lineage=3, version=7), SECONDS)
                assert reply == wire.SnapshotNotice(version=7, manifest=b"\0\0\0")
                assert await link.call("Report", wire.WorkerReport(doing="x"), SECONDS) == wire.ReportReply()
            assert [peer.role for peer in desk.peers] == ["worker"]
            assert desk.peers[0].peer_id

        run(scenario())

    def test_concurrent_calls_keep_apart(self) -> None:
        async def scenario() -> None:
            async with self.linked(Desk()) as link:
                asked = range(50)
                requests = [wire.ManifestRequest(version=number) for number in asked]
                replies = await asyncio.gather(*(link.call("FetchManifest", each, SECONDS) for each in requests))
                assert [reply.version for reply in replies] == list(asked)

        run(scenario())

    def test_stream_gives_all_in_order_and_ends(self) -> None:
        async def scenario() -> None:
            hashes = [bytes([number, 0]) for number in range(100)]
            desk = Desk()
            async with self.linked(desk) as link:
                stream = link.stream("FetchChunks", wire.ChunkRequest(hashes=hashes))
                assert [chunk.hash async for chunk in stream] == hashes
                assert desk.left.is_set()
                assert [c async for c in link.stream("FetchChunks", wire.ChunkRequest())] == []

        run(scenario())

    def test_bytes_pass_for_messages_both_ways(self) -> None:
        async def scenario() -> None:
            desk = Desk()
            async with self.linked(desk) as link:
                chunk = wire.Chunk(hash=b"1", data=bytes(1000))
                asked = wire.ProbeRequest(num_bytes=1000)
                assert [frame async for frame in link.frames("Probe", asked)] == [chunk.SerializeToString(), b""]
                assert [reply async for reply in link.stream("Probe", asked)] == [chunk, wire.Chunk()]
                await link.call("GiveChunk", chunk.SerializeToString(), SECONDS)
                await link.call("GiveChunk", chunk, SECONDS)
            assert desk.given == [chunk.SerializeToString()] * 2

        run(scenario())

    def test_server_knows_where_the_caller_is(self) -> None:
        async def scenario() -> None:
            desk = Desk()
            async with self.linked(desk) as link:
                link.open()
                await link.call("GiveChunk", b"", SECONDS)
            assert [peer.host for peer in desk.peers] == ["127.0.0.1"]

        run(scenario())

    # ---- refusals ----------------------------------------------------------------------------------------------------

    @pytest.mark.parametrize(
        ("reason", "detail"),
        [("late", "lease 3 is over"), ("stale", ""), ("malformed", "a: b: c\nand é"), ("odd", "\N{SNOWMAN}" * 300)],
        ids=["late", "stale", "malformed", "odd"],
    )
    def test_a_refusal_has_a_reason(self, reason: str, detail: str) -> None:
        async def scenario() -> None:
            async with self.linked(Desk()) as link:
                with pytest.raises(PeerError) as caught:
                    await link.call("FailLease", wire.LeaseFailed(reason=reason, detail=detail), SECONDS)
                assert (caught.value.reason, caught.value.detail) == (reason, detail)
                await link.call("Report", wire.WorkerReport(), SECONDS)  # the link is none the worse for it

        run(scenario())

    def test_a_refusal_within_a_stream_follows_the_sent_messages(self) -> None:
        async def scenario() -> None:
            async with self.linked(Desk()) as link:
                chunks = aiter(link.stream("FetchChunks", wire.ChunkRequest(hashes=[b"1", b"2", b"missing"])))
                assert [(await anext(chunks)).hash, (await anext(chunks)).hash] == [b"1", b"2"]
                with pytest.raises(PeerError) as caught:
                    await anext(chunks)
            assert caught.value.reason == "missing"

        run(scenario())

    @pytest.mark.parametrize(
        ("role", "method", "request_"),
        [
            ("worker", "LearnerReport", wire.LearnerReport()),
            ("learner", "Report", wire.WorkerReport()),
            ("join-worker", "Report", wire.WorkerReport()),
            ("join-learner", "LearnerReport", wire.LearnerReport()),
        ],
        ids=lambda value: value if isinstance(value, str) else "",
    )
    def test_role_decides_what_may_be_called(self, role: str, method: str, request_: Any) -> None:
        async def scenario() -> None:
            desk = Desk()
            async with self.linked(desk, role) as link:
                with pytest.raises(PeerError) as caught:
                    await link.call(method, request_, SECONDS)
            assert caught.value.reason == "forbidden"
            assert desk.peers == []

        run(scenario())

    def test_role_decides_what_may_be_streamed(self) -> None:
        async def scenario() -> None:
            desk = Desk()
            async with self.linked(desk) as link:
                with pytest.raises(PeerError) as caught:
                    await anext(aiter(link.stream("TakeGroups", wire.TakeGroups())))
            assert caught.value.reason == "forbidden"
            assert not desk.left.is_set()

        run(scenario())

    def test_unserved_method(self) -> None:
        async def scenario() -> None:
            async with self.linked(Desk(), "learner") as link:
                with pytest.raises(PeerError) as caught:
                    await link.call("Publish", wire.PublishRequest(), SECONDS)
            assert caught.value.reason == "unimplemented"

        run(scenario())

    def test_oversized_request(self) -> None:
        async def scenario() -> None:
            desk = Desk()
            async with self.linked(desk) as link:
                report = wire.WorkerReport(doing="a" * (limits.MESSAGE_BYTES_MAX + 1))
                with pytest.raises(PeerError) as caught:
                    await link.call("Report", report, SECONDS)
            assert caught.value.reason == "oversized"
            assert desk.peers == []

        run(scenario())

    def test_oversized_reply(self) -> None:
        async def scenario() -> None:
            async with self.linked(Desk()) as link:
                request = wire.ManifestRequest(lineage=limits.MESSAGE_BYTES_MAX + 1)
                with pytest.raises(PeerError) as caught:
                    await link.call("FetchManifest", request, SECONDS)
                assert caught.value.reason == "oversized"
                await link.call("Report", wire.WorkerReport(), SECONDS)

        run(scenario())

    # ---- ends --------------------------------------------------------------------------------------------------------

    def test_deadline(self) -> None:
        """The caller gets LinkError, and the handler does not go on for nobody."""

        async def scenario() -> None:
            desk = Desk()
            async with self.linked(desk) as link:
                with pytest.raises(LinkError):
                    await link.call("Deliver", wire.Delivery(), SHORT_SECONDS)
                if desk.attended.is_set():  # else the deadline passed on the way there
                    await asyncio.wait_for(desk.left.wait(), SECONDS)
                await link.call("Report", wire.WorkerReport(), SECONDS)

        run(scenario())

    def test_handler_of_a_stream_is_closed_when_the_caller_closes_it(self) -> None:
        async def scenario() -> None:
            desk = Desk()
            async with self.linked(desk) as link:
                async with aclosing(link.stream("Attend", wire.WorkerHello())) as orders:  # type: ignore[type-var]
                    assert (await anext(orders)).stop.reason.startswith("hello ")
                    assert not desk.left.is_set()
                await asyncio.wait_for(desk.left.wait(), SECONDS)

        run(scenario())

    def test_handler_of_a_stream_is_closed_when_the_caller_breaks_off(self) -> None:
        async def scenario() -> None:
            desk = Desk()
            async with self.linked(desk) as link:
                async for _ in link.stream("Attend", wire.WorkerHello()):
                    break
                await asyncio.wait_for(desk.left.wait(), SECONDS)

        run(scenario())

    def test_handler_of_a_stream_is_closed_when_the_caller_is_cancelled(self) -> None:
        async def scenario() -> None:
            desk = Desk()
            async with self.linked(desk) as link:
                reading = asyncio.ensure_future(attend(link))
                await desk.attended.wait()
                reading.cancel()
                await asyncio.wait_for(desk.left.wait(), SECONDS)
                await asyncio.wait({reading})
                assert reading.cancelled()

        run(scenario())

    def test_handler_of_a_stream_is_closed_while_it_is_sending(self) -> None:
        """The caller reads one reply of far more than fits on the way, then goes."""

        async def scenario() -> None:
            desk = Desk()
            async with self.linked(desk) as link:
                request = wire.ChunkRequest(hashes=[b"1"] * 2000)
                async with aclosing(link.stream("FetchChunks", request)) as chunks:  # type: ignore[type-var]
                    await anext(chunks)
                    assert not desk.left.is_set()
                await asyncio.wait_for(desk.left.wait(), SECONDS)

        run(scenario())

    def test_cancelled_caller_is_cancelled(self) -> None:
        async def scenario() -> None:
            desk = Desk()
            async with self.linked(desk) as link:
                calling = asyncio.ensure_future(link.call("Deliver", wire.Delivery(), SECONDS))
                await desk.attended.wait()
                calling.cancel()
                await asyncio.wait({calling})
                assert calling.cancelled()
                await asyncio.wait_for(desk.left.wait(), SECONDS)

        run(scenario())

    @pytest.mark.parametrize("how", ["cut", "close"])
    def test_stream_on_a_broken_link(self, how: str) -> None:
        async def scenario() -> None:
            desk = Desk()
            async with self.linked(desk) as link:
                reading = asyncio.ensure_future(attend(link))
                await desk.attended.wait()
                await self._break(link, how)
                with pytest.raises(LinkError):
                    await reading
                await asyncio.wait_for(desk.left.wait(), SECONDS)
                with pytest.raises(LinkError):
                    await attend(link)

        run(scenario())

    @pytest.mark.parametrize("how", ["cut", "close"])
    def test_call_on_a_broken_link(self, how: str) -> None:
        async def scenario() -> None:
            desk = Desk()
            async with self.linked(desk) as link:
                calling = asyncio.ensure_future(link.call("Deliver", wire.Delivery(), SECONDS))
                await desk.attended.wait()
                await self._break(link, how)
                with pytest.raises(LinkError):
                    await calling
                await asyncio.wait_for(desk.left.wait(), SECONDS)
                with pytest.raises(LinkError):
                    await link.call("Report", wire.WorkerReport(), SECONDS)
            assert desk.peers == []

        run(scenario())

    def test_mended_link_is_used_again(self) -> None:
        async def scenario() -> None:
            async with self.linked(Desk()) as link:
                await link.call("Report", wire.WorkerReport(), SECONDS)
                self.cut(link)
                with pytest.raises(LinkError):
                    await link.call("Report", wire.WorkerReport(), SECONDS)
                self.mend(link)
                await self._patiently(link)

        run(scenario())

    async def _break(self, link: Link, how: str) -> None:
        if how == "cut":
            self.cut(link)
        else:
            await link.close()

    @staticmethod
    async def _patiently(link: Link) -> None:
        """A link may take its time to find that it is mended."""
        while True:
            try:
                await link.call("Report", wire.WorkerReport(), SECONDS)
                return
            except LinkError:
                await asyncio.sleep(SHORT_SECONDS)
