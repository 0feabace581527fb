"""A request over several connections: each chunk is sent once, over the one that is free first, whatever others do."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import AsyncGenerator, Iterable
from pathlib import Path

import pytest
from blake3 import blake3

from broadcast_fleet import content, disk_threads, opened, until
from echo2.core.errors import PeerError
from echo2.core.types import RUN_POLICY, PayloadId, SnapshotRef
from echo2.transport import message_bytes
from echo2.transport import wire_pb2 as wire
from echo2.transport.base import Peer
from echo2.weights.broadcast.decide.dealing import CONNECTIONS_MAX, Dealing
from echo2.weights.broadcast.serving import REQUESTS_PER_PEER_MAX, ChunkCache, Server, encode_payload
from echo2.weights.store.store import ChunkStore
from memory_links import MemoryLink
from seeds import seeds

PAYLOAD = encode_payload(PayloadId(SnapshotRef(RUN_POLICY, 1, 1)))
PEER = Peer("w-1", "worker")
Stream = AsyncGenerator[bytes, None]


def chunks(count: int) -> dict[bytes, bytes]:
    data = [bytes([at % 256, at // 256]) * 500 for at in range(count)]
    return {blake3(piece).digest(): piece for piece in data}


def request(hashes: Iterable[bytes], number: int = 7) -> wire.ChunkRequest:
    return wire.ChunkRequest(hashes=hashes, payload=PAYLOAD, number=number)


@pytest.mark.parametrize("seed", seeds(20, 200))
def test_each_chunk_is_taken_once_whoever_is_free_and_whatever_can_not_be_read(seed: int) -> None:
    rng = random.Random(seed)
    asked = [bytes([at]) for at in range(rng.randint(0, 30))]
    dealing, to_come, taken = Dealing(asked), list(asked), Counter[bytes]()
    rng.shuffle(to_come)
    while dealing.remaining:
        if to_come and (not dealing.ready or rng.random() < 0.5):
            dealing.arrived(to_come.pop())
            continue
        chunk = dealing.take()
        if rng.random() < 0.2:  # dropped before it was read
            dealing.put_back(chunk)
            to_come.append(chunk)
        else:
            taken[chunk] += 1
        assert set(dealing.ready) <= dealing.remaining.keys(), f"seed {seed}"
    assert taken == Counter(asked), f"seed {seed}"


@pytest.mark.parametrize("seed", seeds(5, 50))
def test_slow_connections_hold_a_chunk_each_and_the_others_send_the_rest(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    pieces = chunks(rng.randint(1, 40))
    num_fast, num_slow = rng.randint(1, 3), rng.randint(1, 3)

    async def scenario() -> None:
        async with disk_threads() as disk:
            cache = ChunkCache(ChunkStore(tmp_path), disk)
            server = Server(cache, lambda payload: True)
            streams = [server.serve(PEER, request(pieces)) for _ in range(num_fast + num_slow)]
            for stream in streams:
                assert await anext(stream) == message_bytes.ALIVE
            for hash_, data in pieces.items():
                cache.arrived(hash_, message_bytes.pack(hash_, data))
            came = [await anext(stream, b"") for stream in streams[:num_slow]]  # and then they take no more
            fast = streams[num_slow:]
            while fast:
                stream = rng.choice(fast)
                if message := await anext(stream, b""):
                    came.append(message)
                else:
                    fast.remove(stream)
            sent = Counter(message_bytes.hash_of(message) for message in came if message)
            assert sent == Counter(pieces.keys()), f"seed {seed}"
            assert server.bytes_sent == sum(map(len, came))
            for stream in streams:
                await stream.aclose()
            assert not server.is_busy

    asyncio.run(asyncio.wait_for(scenario(), 60.0))


def test_only_the_same_peer_with_the_same_chunks_shares_a_request_and_over_so_many_connections(tmp_path: Path) -> None:
    store, pieces = ChunkStore(tmp_path), chunks(3)
    store.put_checked(list(pieces.items()))

    async def scenario() -> None:
        async with disk_threads() as disk:
            server = Server(ChunkCache(store, disk), lambda payload: True)

            async def begun(peer_id: str, asked: wire.ChunkRequest) -> Stream:
                stream = server.serve(Peer(peer_id, "worker"), asked)
                assert await anext(stream) == message_bytes.ALIVE
                return stream

            streams = [await begun("w-1", request(pieces)) for _ in range(CONNECTIONS_MAX)]
            for refused in (request(pieces), request([*pieces][:2])):
                with pytest.raises(PeerError, match="malformed"):
                    await begun("w-1", refused)
            own = [await begun("w-2", request(pieces)), await begun("w-1", request(pieces, 8))]
            own += [await begun("w-3", request(pieces, 0)) for _ in range(2)]
            for stream in own:
                assert len([message async for message in stream]) == len(pieces)
            assert len([message async for message in streams[0]]) == len(pieces)
            for stream in streams:
                await stream.aclose()
            many = [await begun("w-1", request(pieces, 1 + at)) for at in range(REQUESTS_PER_PEER_MAX)]
            with pytest.raises(PeerError, match="busy"):
                await begun("w-1", request(pieces, 1 + REQUESTS_PER_PEER_MAX))
            for stream in many:
                await stream.aclose()

    asyncio.run(asyncio.wait_for(scenario(), 60.0))


@pytest.mark.parametrize("cut", [0, 3])
def test_everything_comes_once_over_several_connections_also_where_some_can_not_be_made(
    tmp_path: Path, cut: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = Counter[int]()
    frames = MemoryLink.frames

    def counted(link: MemoryLink, method: str, message: wire.ChunkRequest) -> Stream:
        if method == "FetchChunks" and message.number:
            asked[message.number] += 1
            if asked[message.number] <= cut:
                link.cut()
        return frames(link, method, message)

    monkeypatch.setattr(MemoryLink, "frames", counted)

    async def scenario() -> None:
        async with opened(tmp_path, "memory") as fleet:
            workers = [await fleet.join(f"w-{at}") for at in range(3)]
            await until(lambda: all(worker.node.rates for worker in workers), "links are measured")
            for worker in workers:
                worker.node._edges.prepare(4)
            manifest = fleet.publish(content(1))
            for worker in workers:
                await worker.has(manifest)
                assert worker.node.bytes_received == sum(manifest.chunk_bytes.values())
            assert set(asked.values()) == {4}
            assert fleet.errors == []

    asyncio.run(asyncio.wait_for(scenario(), 120.0))
