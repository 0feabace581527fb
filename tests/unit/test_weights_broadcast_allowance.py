"""What a peer may be sent of chunks: each about once, and everything again now and then, but not without end."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from pathlib import Path

import pytest
from blake3 import blake3
from hypothesis import given
from hypothesis import strategies as st

from echo2.core.types import RUN_POLICY, PayloadId, SnapshotRef
from echo2.transport import message_bytes
from echo2.transport import wire_pb2 as wire
from echo2.transport.base import Peer
from echo2.weights.broadcast import serving
from echo2.weights.broadcast.origin import OriginNode
from echo2.weights.broadcast.serving import COPIES, COPIES_BYTES_MIN, COPIES_SECONDS, Allowance, encode_payload
from echo2.weights.store.store import ChunkStore
from memory_links import LOOPBACK, MemoryNetwork

PAYLOAD = encode_payload(PayloadId(SnapshotRef(RUN_POLICY, 1, 1)))
EVENTS = st.lists(st.tuples(st.floats(0.0, 100.0), st.integers(0, 2), st.integers(0, 1 << 30)), max_size=60)


@given(EVENTS)
def test_no_peer_is_sent_more_than_copies_of_what_is_new_and_of_the_largest_payload(
    events: list[tuple[float, int, int]],
) -> None:
    allowance, now, new, largest, sent = Allowance(), 1e6, 0, COPIES_BYTES_MIN // COPIES, 0
    for pause, kind, num_bytes in events:
        now += pause
        if kind == 0:
            allowance.add(num_new_bytes=num_bytes)
            new += num_bytes
        elif kind == 1:
            allowance.add(payload_bytes=num_bytes)
            largest = max(largest, num_bytes)
        else:
            wait_seconds = allowance.take("w-1", num_bytes, now)
            sent += num_bytes
            earned = COPIES * largest / COPIES_SECONDS * (now + wait_seconds - 1e6)
            assert sent <= COPIES * (new + largest) + earned + 1.0


@given(st.lists(st.integers(1, 1 << 30), min_size=1, max_size=30))
def test_a_worker_that_takes_the_content_and_each_delta_never_waits_whatever_others_take(deltas: list[int]) -> None:
    allowance, content = Allowance(), 1 << 30
    assert allowance.take("w-1", 1000, 0.0) == 0.0  # before the payload is announced, as after a restart of the head
    allowance.add(payload_bytes=content)
    assert allowance.take("w-1", content - 1000, 0.0) == 0.0
    for delta in deltas:  # all at once: nothing is earned by time
        allowance.add(num_new_bytes=delta, payload_bytes=delta)
        assert allowance.take("w-1", delta, 0.0) == 0.0
        allowance.take("w-2", 1 << 40, 0.0)
    assert allowance.take("w-1", content, 0.0) == 0.0  # its disk is lost
    assert allowance.take("w-2", 1, 0.0) > 0.0


def test_origin_gives_strangers_so_many_copies_and_the_owner_any_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serving, "COPIES_BYTES_MIN", 4000)
    monkeypatch.setattr(serving, "COPIES_SECONDS", 1e9)

    async def scenario() -> None:
        store, data = ChunkStore(tmp_path), b"a" * 1000
        name = blake3(data).digest()
        store.put(name, data)
        dial = MemoryNetwork().member("head").to_peer
        origin = OriginNode(store, lambda *_: None, dial, lambda error: None)
        for worker_id, ticket in (("w-own", ""), ("w-bad", "t-1"), ("w-good", "t-2")):
            origin.joined(worker_id, wire.WorkerHello(), LOOPBACK, ticket)
        fetch, request = origin.handlers()["FetchChunks"], wire.ChunkRequest(hashes=[name], payload=PAYLOAD)

        async def has_come(worker_id: str) -> bool:
            """Whether the chunk comes, and not a word that it will."""
            is_told = False  # at once that the request is here, and a second time that the chunk will come
            async with aclosing(fetch(Peer(worker_id, "worker"), request)) as messages:
                async for message in messages:
                    if message != message_bytes.ALIVE:
                        return True
                    if is_told:
                        return False
                    is_told = True
            raise AssertionError("neither came")

        assert [await has_come("w-bad") for _ in range(5)] == [True, True, True, False, False]
        assert [await has_come("w-own") for _ in range(20)] == [True] * 20
        assert await has_come("w-good")
        origin.stored(name, data)  # as if it were new: everybody may take it again
        assert await has_come("w-good")
        await origin.close()

    asyncio.run(asyncio.wait_for(scenario(), 60.0))
