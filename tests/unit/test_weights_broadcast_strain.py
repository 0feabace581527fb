"""What one member can cost another: time, connections and tasks stay bounded, whatever it asks for."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest
from blake3 import blake3

from broadcast_fleet import SECONDS, content, disk_threads, fail, opened, until
from echo2.core.errors import PeerError
from echo2.core.types import RUN_POLICY, PayloadId, SnapshotRef
from echo2.transport import message_bytes
from echo2.transport import wire_pb2 as wire
from echo2.transport.base import Peer
from echo2.weights.broadcast.edges import EDGES_MAX
from echo2.weights.broadcast.origin import PROBE_SECONDS_MAX, PROBE_SLOT_SECONDS, OriginNode
from echo2.weights.broadcast.probe import DONE
from echo2.weights.broadcast.serving import ChunkCache, Server, encode_payload
from echo2.weights.broadcast.sources import GIVES_MAX, REDIAL_SECONDS, AwaitedSource
from echo2.weights.store.store import ChunkStore
from memory_links import LOOPBACK, MemoryNetwork

PAYLOAD = encode_payload(PayloadId(SnapshotRef(RUN_POLICY, 1, 1)))


def run(scenario: Coroutine[Any, Any, None]) -> None:
    """Run to the end, or fail instead of hanging."""
    asyncio.run(asyncio.wait_for(scenario, 3 * SECONDS))


Want = Callable[[Peer, wire.Empty], AsyncIterator[wire.ChunkRequest]]


async def dialled_by(network: MemoryNetwork, dial: Callable[[wire.Order], bool], want: Want) -> None:
    """A peer that has itself dialled, and wants this."""
    port = await network.member("w-bad").listen(LOOPBACK, 0, {"AskWanted": want}, lambda peer_id: None)
    dial(wire.Order(dial=wire.DialPeer(peer_id="w-bad", address=f"{LOOPBACK}:{port}")))


def test_peer_that_hangs_up_at_once_is_not_dialled_without_pause(tmp_path: Path) -> None:
    times: list[float] = []

    async def want(peer: Peer, request: wire.Empty) -> AsyncIterator[wire.ChunkRequest]:
        times.append(time.monotonic())
        for nothing in ():
            yield nothing

    async def scenario() -> None:
        async with opened(tmp_path, "memory") as fleet:
            giver = await fleet.join("w-1")
            assert fleet.memory is not None
            began_at = time.monotonic()  # not when the first call arrived, which may have been late
            await dialled_by(fleet.memory, giver.node.obey, want)
            await until(lambda: len(times) >= 4, "it was dialled four times")
            assert times[3] - began_at >= 2.9 * REDIAL_SECONDS

    run(scenario())


def test_a_paced_peer_gets_chunks_at_its_rate_and_notice_of_more(tmp_path: Path) -> None:
    store, pieces = (
        ChunkStore(tmp_path),
        {blake3(data).digest(): data for data in (b"a" * 1000, b"b" * 1000, b"c" * 1000)},
    )
    store.put_checked(list(pieces.items()))

    async def scenario() -> None:
        async with disk_threads() as disk:
            paces = iter((1e5, 1050.0, 1050.0))  # bytes per second after each chunk: .01 s, then .95 s
            server = Server(ChunkCache(store, disk), lambda payload: False, lambda peer_id, payload: next(paces))
            request, began_at = wire.ChunkRequest(hashes=list(pieces), payload=PAYLOAD), time.monotonic()
            given = server.serve(Peer("w-1", "worker"), request)
            came = [(time.monotonic(), message) async for message in given]
        kinds = [message if len(message) < 1000 else b"chunk" for _, message in came]
        alive = message_bytes.ALIVE
        assert kinds == [alive, b"chunk", b"chunk", alive, b"chunk"]
        assert came[4][0] - began_at >= 1000 / 1e5 + 1000 / 1050.0

    run(scenario())


def test_requests_of_a_greedy_peer_are_bounded(tmp_path: Path) -> None:
    heard = 0

    async def want(peer: Peer, request: wire.Empty) -> AsyncIterator[wire.ChunkRequest]:
        nonlocal heard
        while True:
            heard += 1
            yield wire.ChunkRequest(hashes=[bytes(32)], payload=PAYLOAD)

    async def scenario() -> None:
        async with opened(tmp_path, "memory") as fleet:
            giver = await fleet.join("w-1")
            giver.expects(content(1)[0])  # what it is asked for
            assert fleet.memory is not None
            await dialled_by(fleet.memory, giver.node.obey, want)
            await until(lambda: heard >= GIVES_MAX, "it is heard")
            for _ in range(1000):
                await asyncio.sleep(0)
            assert heard <= GIVES_MAX + 2
            giver.node.stop_fetching(PayloadId(SnapshotRef(RUN_POLICY, 1, 1)))

    run(scenario())


def test_no_member_keeps_the_turn_to_measure_forever(tmp_path: Path) -> None:
    async def scenario() -> None:
        seconds = 0.0
        dial, store = MemoryNetwork().member("head").to_peer, ChunkStore(tmp_path)
        origin = OriginNode(store, lambda worker_id, order: None, dial, fail, lambda: seconds)
        put = origin.handlers()["PutProbe"]
        greedy, other = Peer("w-1", "worker"), Peer("w-2", "worker")
        while seconds < PROBE_SECONDS_MAX:
            await put(greedy, message_bytes.ALIVE)
            with pytest.raises(PeerError, match="busy"):
                await put(other, message_bytes.ALIVE)
            seconds += 0.9 * PROBE_SLOT_SECONDS
        with pytest.raises(PeerError, match="overlong"):
            await put(greedy, message_bytes.ALIVE)
        seconds += PROBE_SLOT_SECONDS
        await put(other, message_bytes.ALIVE)
        with pytest.raises(PeerError, match="busy"):
            await put(greedy, message_bytes.ALIVE)
        await put(other, DONE)
        await put(greedy, message_bytes.ALIVE)
        await origin.close()

    run(scenario())


def test_no_link_is_measured_while_weights_are_on_it(tmp_path: Path) -> None:
    async def scenario() -> None:
        store, data = ChunkStore(tmp_path), b"a" * 1000
        store.put(blake3(data).digest(), data)
        origin = OriginNode(store, lambda *_: None, MemoryNetwork().member("head").to_peer, fail)
        put, fetch = origin.handlers()["PutProbe"], origin.handlers()["FetchChunks"]
        request = wire.ChunkRequest(hashes=[blake3(data).digest()], payload=PAYLOAD)
        async with aclosing(fetch(Peer("w-1", "worker"), request)) as messages:
            assert await anext(messages) == message_bytes.ALIVE
            with pytest.raises(PeerError, match="busy"):
                await put(Peer("w-2", "worker"), message_bytes.ALIVE)
        await put(Peer("w-2", "worker"), message_bytes.ALIVE)
        await origin.close()

    run(scenario())


def test_a_worker_that_joins_again_and_again_is_dialled_back_once_at_a_time(tmp_path: Path) -> None:
    async def scenario() -> None:
        waiting = 0

        async def never(peer: Peer, message: bytes) -> wire.Empty:
            nonlocal waiting
            waiting += 1
            try:
                await asyncio.Event().wait()
            finally:
                waiting -= 1
            return wire.Empty()

        network = MemoryNetwork()
        port = await network.member("w-1").listen(LOOPBACK, 0, {"GiveChunk": never}, lambda peer_id: None)
        dial = network.member("head").to_peer
        store = ChunkStore(tmp_path)
        origin = OriginNode(store, lambda worker_id, order: None, dial, fail)
        for _ in range(20):
            origin.joined("w-1", wire.WorkerHello(listen_port=port), LOOPBACK)
            await until(lambda: waiting == 1, "one is under way")
        origin.left("w-1", "gone")
        await until(lambda: waiting == 0, "none is under way")
        await origin.close()

    run(scenario())


def test_connection_in_use_is_not_closed_for_a_new_one(tmp_path: Path) -> None:
    """The origin's is made first, and long before those of peers that have come and gone."""

    async def scenario() -> None:
        async with opened(tmp_path, "memory") as fleet:
            worker = await fleet.join("w-1")
            manifest, _ = content(1)
            fleet.assign(manifest, worker)  # the origin waits for it to be stored
            edges = worker.node._edges
            begun = edges.source("")
            begun.ask(manifest.payload, manifest.hashes[:1])
            names = [f"w-{number}" for number in range(2, 2 * EDGES_MAX)]
            edges.acquaint(
                wire.Source(peer_id=name, address=f"{LOOPBACK}:{number + 1}") for number, name in enumerate(names)
            )
            assert edges.source("") is begun
            assert len(edges._dialled) <= EDGES_MAX
            assert edges.source(names[-1]) in edges._dialled.values()
            begun.cancel()

    run(scenario())


class Fetcher:
    """Asks again what failed, at once."""

    def __init__(self, hashes: list[bytes]) -> None:
        self.source, self.hashes, self.failures = AwaitedSource("w-2", self), hashes, list[str]()

    def ask(self) -> None:
        self.source.ask(PayloadId(SnapshotRef(RUN_POLICY, 1, 1)), self.hashes)

    async def keep(self, source: str, hash_: bytes, message: bytes, data: memoryview) -> None:
        raise AssertionError("nothing comes")

    def alive(self, source: str) -> None:
        raise AssertionError("nothing comes")

    def failed(self, source: str, reason: str) -> None:
        self.failures.append(reason)
        self.ask()


@pytest.mark.parametrize("was_told", [False, True])
def test_a_peer_that_dials_again_gets_the_requests_again(was_told: bool) -> None:
    """Its older call is half open: nobody reads from it, and nothing has ended it yet."""

    async def scenario() -> None:
        fetcher = Fetcher([bytes(32)])
        older, newer = fetcher.source.attach(), fetcher.source.attach()
        if was_told:
            fetcher.ask()
            assert (await anext(older)).hashes == fetcher.hashes
        else:
            waiting = asyncio.ensure_future(anext(older))
            await asyncio.sleep(0)
        following = asyncio.ensure_future(anext(newer))
        await asyncio.sleep(0)
        if not was_told:
            fetcher.ask()
        assert (await following).hashes == fetcher.hashes
        assert fetcher.failures == (["broken"] if was_told else [])
        with pytest.raises(StopAsyncIteration):
            await (anext(older) if was_told else waiting)
        assert fetcher.source.awaited, "the end of the older call is not that of the newer"
        fetcher.source.cancel()

    run(scenario())
