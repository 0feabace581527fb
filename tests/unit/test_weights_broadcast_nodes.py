"""The nodes of the broadcast carry chunks from the origin through peers to everybody, over either kind of link."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from broadcast_fleet import CHUNK_BYTES, SECONDS, Content, Fleet, Worker, content, opened, until
from echo2.core.errors import UserError
from echo2.core.types import PayloadId
from echo2.transport import message_bytes
from echo2.transport import wire_pb2 as wire
from echo2.weights.broadcast.probe import MAX_RATE, NO_LINK
from echo2.weights.broadcast.serving import encode_payload
from echo2.weights.format.manifest import Manifest
from echo2.weights.store.store import ChunkStore

BOTH = pytest.mark.parametrize("backend", ["memory", "grpc"])


def run(scenario: Coroutine[Any, Any, None]) -> None:
    """Run to the end, or fail instead of hanging."""
    asyncio.run(asyncio.wait_for(scenario, 3 * SECONDS))


def routes(payload: PayloadId, sources: Mapping[str, str]) -> wire.Order:
    """Take one stripe of each of these; address "" where it dials."""
    named = [wire.Source(peer_id=name, address=address) for name, address in sources.items()]
    return wire.Order(routes=wire.Routes(payload=encode_payload(payload), sources=named, stripes=range(len(named))))


def give(store: ChunkStore, made: Content) -> Manifest:
    """Let this store have all of it."""
    for hash_, data in made[1].items():
        store.put(hash_, data)
    return made[0]


def address(fleet: Fleet, worker: Worker) -> str:
    return fleet.origin.address_of(worker.peer_id)


@BOTH
@pytest.mark.parametrize("scheme", ["star", "chain", "trees"])
def test_all_nodes_get_all_chunks(tmp_path: Path, backend: str, scheme: str) -> None:
    async def scenario() -> None:
        async with opened(tmp_path, backend, scheme=scheme) as fleet:
            workers = [await fleet.join(f"w-{number}") for number in range(4)]
            manifest = fleet.publish(content(1))
            for worker in workers:
                await worker.has(manifest)
            await until(lambda: len(fleet.origin.finished[manifest.payload]) == 4, "all were reported")
            total = manifest.total_bytes
            sent = fleet.origin.origin_bytes / total
            most = {"star": 4.1, "chain": 1.1, "trees": 1.1}[scheme]
            assert (4.0 if scheme == "star" else 1.0) <= sent < most
            assert fleet.origin.peer_bytes / total == pytest.approx(4 - sent, abs=0.1)
            assert {each.bytes_stored for each in fleet.origin.progress().values()} == {total}
            assert sum(worker.node.bytes_from_peers for worker in workers) == fleet.origin.peer_bytes

    run(scenario())


@BOTH
def test_relay_passes_on_what_it_has_while_it_waits_for_the_rest(tmp_path: Path, backend: str) -> None:
    async def scenario() -> None:
        async with opened(tmp_path, backend) as fleet:
            relay, child = await fleet.join("w-1"), await fleet.join("w-2")
            manifest, data = content(1)
            hashes = list(manifest.hashes)
            for hash_ in hashes[:10]:
                relay.store.put(hash_, data[hash_])
            relay.expects(manifest)
            child.node.obey(routes(manifest.payload, {relay.peer_id: address(fleet, relay)}))
            child.node.fetch(manifest)
            for count, hash_ in enumerate(hashes[10:], 10):
                await until(lambda count=count: child.node.bytes_received >= count * len(data[hashes[0]]), "passed on")
                assert manifest.payload not in child.whole
                await relay.node.keep("", hash_, message_bytes.pack(hash_, data[hash_]), data[hash_])
            await child.has(manifest)

    run(scenario())


def test_chunks_evicted_before_they_are_written_are_relayed_from_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("echo2.weights.broadcast.serving.RECENT_BYTES", 0)

    async def scenario() -> None:
        async with opened(tmp_path, "memory") as fleet:
            relay, child = await fleet.join("w-1"), await fleet.join("w-2")
            manifest, data = content(1)
            relay.expects(manifest)
            child.node.obey(routes(manifest.payload, {relay.peer_id: address(fleet, relay)}))
            child.node.fetch(manifest)
            waiting = relay.node._cache._waiting
            hashes = list(manifest.hashes)
            await until(lambda: hashes[0] in waiting, "the child has asked")
            asked = [hash_ for hash_ in hashes if hash_ in waiting]
            for hash_ in asked:
                await relay.node.keep("", hash_, message_bytes.pack(hash_, data[hash_]), data[hash_])
            await until(lambda: all(map(child.store.has, asked)), "passed on")

    run(scenario())


def test_chunks_that_arrive_at_an_ending_node_are_dropped(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with opened(tmp_path, "memory") as fleet:
            worker = await fleet.join("w-1")
            manifest, data = content(1)
            worker.node.fetch(manifest)
            await fleet.leave("w-1")
            hash_ = manifest.hashes[0]
            await worker.node.keep("", hash_, message_bytes.pack(hash_, data[hash_]), data[hash_])
            assert not worker.node._chores
            assert not worker.store.has(hash_)

    run(scenario())


@BOTH
def test_a_worker_that_can_only_dial_gives_by_dialling(tmp_path: Path, backend: str) -> None:
    async def scenario() -> None:
        async with opened(tmp_path, backend) as fleet:
            giver, taker = await fleet.join("w-1", listens=False), await fleet.join("w-2")
            for version in (1, 2):  # the second time, over the same edge
                manifest = give(giver.store, content(version))
                taker.node.obey(routes(manifest.payload, {giver.peer_id: ""}))
                giver.node.obey(wire.Order(dial=wire.DialPeer(peer_id=taker.peer_id, address=address(fleet, taker))))
                taker.node.fetch(manifest)
                await taker.has(manifest)
            assert taker.node.bytes_from_peers == taker.node.bytes_received == 2 * manifest.total_bytes
            assert fleet.origin.origin_bytes == 0

    run(scenario())


@BOTH
def test_two_that_cannot_be_dialled_still_get_everything(tmp_path: Path, backend: str) -> None:
    async def scenario() -> None:
        async with opened(tmp_path, backend) as fleet:
            workers = [await fleet.join(f"w-{number}", is_dialable=number > 1) for number in range(4)]
            manifest = fleet.publish(content(1))
            for worker in workers:
                await worker.has(manifest)

    run(scenario())


@BOTH
def test_chunks_that_a_dialling_peer_lacks_come_from_elsewhere(tmp_path: Path, backend: str) -> None:
    async def scenario() -> None:
        async with opened(tmp_path, backend) as fleet:
            giver, taker = await fleet.join("w-1", listens=False), await fleet.join("w-2")
            manifest, data = content(1)
            for hash_ in manifest.hashes[:7]:
                giver.store.put(hash_, data[hash_])
            fleet.put((manifest, data))
            giver.node.stop_fetching(manifest.payload)  # it does not expect the rest
            taker.node.obey(routes(manifest.payload, {giver.peer_id: ""}))
            giver.node.obey(wire.Order(dial=wire.DialPeer(peer_id=taker.peer_id, address=address(fleet, taker))))
            taker.node.fetch(manifest)
            await taker.has(manifest)
            assert taker.node.bytes_from_peers > 0

    run(scenario())


@BOTH
def test_the_death_of_a_relay_loses_the_payload_for_none(tmp_path: Path, backend: str) -> None:
    async def scenario() -> None:
        async with opened(tmp_path, backend) as fleet:
            workers = [await fleet.join(f"w-{number}") for number in range(4)]
            victim, others = workers[0], workers[1:]
            disk = victim.node._store = SlowStore(tmp_path / "slow")  # so that it is not done, however fast all is
            manifest = fleet.publish(content(1, num_chunks=400))
            await until(lambda: others[0].node.bytes_from_peers > 0, "peers give")
            assert manifest.payload not in victim.whole
            disk.go_on.set()
            await victim.node.close()
            fleet.workers.pop(victim.peer_id)
            for worker in others:
                await worker.has(manifest)
            await victim.link.close()

    run(scenario())


@BOTH
def test_origin_that_restarts_goes_on(tmp_path: Path, backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What waits for the disk when new routes come is asked for again: on a slow disk that is as much as may wait."""
    monkeypatch.setattr("echo2.weights.broadcast.peer.UNWRITTEN_BYTES", 1 << 20)

    async def scenario() -> None:
        async with opened(tmp_path, backend) as fleet:
            workers = [await fleet.join(f"w-{number}") for number in range(3)]
            manifest = fleet.publish(content(1, num_chunks=400))
            await until(lambda: workers[0].node.bytes_received > 5 << 20, "much of it is there")
            await fleet.stop()
            for worker in workers:
                worker.node.disconnected()
            before = [worker.node.bytes_received for worker in workers]
            await fleet.start(backend)
            if fleet.memory is not None:
                fleet.memory.rejoin("")
            for worker in workers:
                fleet.origin.joined(worker.peer_id, wire.WorkerHello(), "")
                worker.node.connected()
            fleet.origin.assign(manifest.payload, list(fleet.workers), manifest)
            for worker, had in zip(workers, before, strict=True):
                await worker.has(manifest)
                assert worker.node.bytes_received - had <= manifest.total_bytes - had + (4 << 20)  # not from the start

    run(scenario())


@BOTH
def test_newer_payload_takes_the_place_and_what_is_shared_stays(tmp_path: Path, backend: str) -> None:
    async def scenario() -> None:
        async with opened(tmp_path, backend) as fleet:
            workers = [await fleet.join(f"w-{number}") for number in range(3)]
            old = fleet.publish(content(1, num_chunks=200))
            await until(lambda: len(workers[0].store.missing(old)) < 120, "much of it is there")
            new = fleet.publish(content(2, num_chunks=40))
            for worker in workers:
                await worker.has(new)
                assert worker.node.progress is None
            missing = set(workers[0].store.missing(old))
            assert len(missing) < 120
            come, keep = set[bytes](), workers[0].node.keep

            async def noted(source: str, hash_: bytes, message: bytes, data: memoryview) -> None:
                come.add(hash_)
                await keep(source, hash_, message, data)

            workers[0].node.keep = noted  # type: ignore[method-assign]
            fleet.assign(old, workers[0])
            await workers[0].has(old)
            assert come == missing  # some may come twice, from a slow source and a quick one; nothing that was there

    run(scenario())


@BOTH
def test_late_joiner_is_fed_by_workers_with_the_content_on_disk(tmp_path: Path, backend: str) -> None:
    async def scenario() -> None:
        async with opened(tmp_path, backend) as fleet:
            holder = await fleet.join("w-1")
            manifest, data = content(1)
            fleet.put((manifest, data))
            for hash_, chunk in data.items():
                holder.store.put(hash_, chunk)
            fleet.origin.has_installed(holder.peer_id, manifest.ref)
            late = await fleet.join("w-2")
            fleet.assign(manifest, late)
            await late.has(manifest)
            assert late.node.bytes_from_peers > 0

    run(scenario())


@BOTH
def test_unknown_payload_is_waited_for_a_moment_and_a_forgotten_one_is_not(tmp_path: Path, backend: str) -> None:
    """A child may hear of a payload before its relay does."""

    async def scenario() -> None:
        async with opened(tmp_path, backend) as fleet:
            relay, child = await fleet.join("w-1"), await fleet.join("w-2")
            made = content(1)
            child.node.obey(routes(made[0].payload, {relay.peer_id: address(fleet, relay)}))
            child.node.fetch(made[0])
            await until(lambda: bool(relay.node._server._orders), "it was asked")
            relay.node.obey(routes(made[0].payload, {"": ""}))
            fleet.put(made)
            relay.node.fetch(made[0])
            await child.has(made[0])
            assert child.node.bytes_from_peers == made[0].total_bytes

    run(scenario())


def test_a_payload_missing_everywhere_is_reported(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with opened(tmp_path, "memory") as fleet:
            worker = await fleet.join("w-1")
            manifest, _ = content(1)
            fleet.assign(manifest)  # and the origin's store does not have it
            await until(lambda: worker.gone == [manifest.payload], "told that it is gone")
            assert worker.node.progress is None

    run(scenario())


class FullStore(ChunkStore):
    """Of a disk with room for a few chunks."""

    room = 5

    def put_checked(self, chunks: Sequence[tuple[bytes, bytes | memoryview]]) -> None:
        self.room -= len(chunks)
        if self.room < 0:
            raise UserError("no space left")
        super().put_checked(chunks)


class SlowStore(ChunkStore):
    """Of a disk that writes nothing until it is let."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self.begun, self.go_on, self.batches = threading.Event(), threading.Event(), list[int]()

    def put_checked(self, chunks: Sequence[tuple[bytes, bytes | memoryview]]) -> None:
        self.begun.set()
        assert self.go_on.wait(SECONDS)
        self.batches.append(sum(len(data) for _, data in chunks))
        super().put_checked(chunks)


def test_writes_that_wait_for_a_slow_disk_are_bounded_and_batched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("echo2.weights.broadcast.peer.UNWRITTEN_BYTES", 4 * CHUNK_BYTES)

    async def scenario() -> None:
        async with opened(tmp_path, "memory") as fleet:
            worker = await fleet.join("w-1")
            store = worker.store = worker.node._store = SlowStore(tmp_path / "slow")
            manifest = fleet.publish(content(1))
            await until(lambda: worker.node._unwritten_bytes > 4 * CHUNK_BYTES, "more has come than may wait")
            for _ in range(1000):
                await asyncio.sleep(0)  # whoever could go on would
            assert worker.node._unwritten_bytes == 5 * CHUNK_BYTES, "the one source waits with what it brings"
            store.go_on.set()
            await worker.has(manifest)
            assert len(store.batches) < 40
            assert max(store.batches) <= 5 * CHUNK_BYTES, "nor is more than that passed on and not stored"

    run(scenario())


def test_a_full_disk_is_reported_once(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with opened(tmp_path, "memory") as fleet:
            worker = await fleet.join("w-1")
            worker.node._store = FullStore(tmp_path / "small")
            manifest = fleet.publish(content(1))
            await until(lambda: bool(fleet.errors), "told")
            assert {str(error) for error in fleet.errors} == {"no space left"}
            assert manifest.payload not in worker.whole
            worker.node.stop_fetching(manifest.payload)
            fleet.errors.clear()

    run(scenario())


def test_closing_leaves_nothing_behind(tmp_path: Path) -> None:
    async def scenario() -> None:
        before = asyncio.all_tasks()
        async with opened(tmp_path, "memory") as fleet:
            for number in range(3):
                await fleet.join(f"w-{number}", is_dialable=number > 0)
            fleet.publish(content(1, num_chunks=400))
            await until(lambda: fleet.origin.origin_bytes > 0, "it began")
        await asyncio.sleep(0)
        assert asyncio.all_tasks() == before

    run(scenario())


def test_a_source_that_moved_is_asked_at_its_new_address(tmp_path: Path) -> None:
    """A worker that was restarted listens on another port."""

    async def scenario() -> None:
        async with opened(tmp_path, "memory") as fleet:
            before, after, taker = await fleet.join("w-1"), await fleet.join("w-2"), await fleet.join("w-3")
            manifest = give(after.store, content(1))
            before.expects(manifest)  # it has nothing
            taker.node.obey(routes(manifest.payload, {"w-1": address(fleet, before)}))
            taker.node.fetch(manifest)
            await until(lambda: bool(before.node._server._orders), "it was asked")
            at, handlers, check = fleet.memory.listeners[address(fleet, after)]  # type: ignore[union-attr]
            fleet.memory.listeners[address(fleet, after)] = ("w-1", handlers, check)  # type: ignore[union-attr]
            taker.node.obey(routes(manifest.payload, {"w-1": address(fleet, after)}))
            await taker.has(manifest)
            assert at == "w-2"
            assert not before.node._server._orders

    run(scenario())


@BOTH
def test_links_are_measured_one_after_the_other(tmp_path: Path, backend: str) -> None:
    async def scenario() -> None:
        async with opened(tmp_path, backend) as fleet:
            far = {"is_dialable": False, "host": "203.0.113.9"}
            workers = [await fleet.join(f"w-{number}", **far) for number in range(3)]
            await until(lambda: all(worker.node.rates is not None for worker in workers), "all are measured")
            for worker in workers:
                rates = worker.node.rates
                assert rates is not None
                assert 0 < rates.up <= MAX_RATE  # how fast a busy machine is, is not for a test
                assert 0 < rates.down <= MAX_RATE
            await until(lambda: all(not worker.node._reports._news for worker in workers), "and the origin knows")

    run(scenario())


@BOTH
def test_within_one_machine_no_link_is_measured(tmp_path: Path, backend: str) -> None:
    async def scenario() -> None:
        async with opened(tmp_path, backend) as fleet:
            workers = [await fleet.join(f"w-{number}") for number in range(3)]
            await until(lambda: all(worker.node.rates == NO_LINK for worker in workers), "all count as equal")
            known = fleet.origin._machine.members
            await until(lambda: all(member.up == MAX_RATE for member in known.values()), "and the origin knows")

    run(scenario())
