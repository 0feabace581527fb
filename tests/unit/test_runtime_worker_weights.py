"""A worker's weights against a real origin over real links: deltas applied, refused, kept, and where it listens."""

from __future__ import annotations

import asyncio
import dataclasses
import random
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from echo2.broadcast.origin import OriginNode
from echo2.control import relay_events as ev
from echo2.control.broadcast import BroadcastOptions
from echo2.control.fleet import Worker
from echo2.errors import PeerError, UserError
from echo2.runtime.archive import Archive
from echo2.runtime.clock import Clock
from echo2.runtime.distribution import Distribution
from echo2.runtime.worker_weights import DELTAS_MAX, WorkerWeights, listen_address
from echo2.transport import wire_pb2 as wire
from echo2.transport.base import Peer
from echo2.transport.grpc_link import Membership, join
from echo2.transport.grpc_server import GrpcServer
from echo2.transport.identity import RunIdentity
from echo2.types import PayloadId, Snapshot, SnapshotRef, TensorBytes
from echo2.weights import ChunkStore, Manifest, encode, encode_delta

ITEMS = 4000
SECONDS = 30.0


def ref(version: int) -> SnapshotRef:
    return SnapshotRef(1, version)


def content(version: int) -> Snapshot:
    data = bytearray(random.Random(0).randbytes(2 * ITEMS))
    for step in range(1, version + 1):
        for place in random.Random(step).sample(range(2 * ITEMS), 20):
            data[place] = (data[place] + 1) % 256
    return Snapshot(ref(version), {"w": TensorBytes("I16", (ITEMS,), bytes(data))}, {"config.json": b"{}"})


def same(one: Snapshot | None, other: Snapshot) -> bool:
    assert one is not None
    return {n: bytes(t.data) for n, t in one.tensors.items()} == {n: bytes(t.data) for n, t in other.tensors.items()}


def whole(version: int) -> tuple[Manifest, Mapping[bytes, memoryview]]:
    return encode(ref(version), content(version).tensors, content(version).files)


def delta(version: int, base: int) -> tuple[Manifest, Mapping[bytes, memoryview]]:
    encoded = encode_delta(content(base), content(version))
    assert encoded is not None
    return encoded


@pytest.mark.parametrize(
    ("listen", "relays", "head", "expected"),
    [
        ("", True, "127.0.0.1:7341", ("127.0.0.1", 0)),
        ("", True, "203.0.113.5:7341", ("0.0.0.0", 0)),
        ("", False, "203.0.113.5:7341", None),
        ("0.0.0.0:7342", True, "203.0.113.5:7341", ("0.0.0.0", 7342)),
        ("[::]:7342", True, "203.0.113.5:7341", ("[::]", 7342)),
        ("0.0.0.0:7342", False, "203.0.113.5:7341", None),
    ],
)
def test_where_a_worker_listens(listen: str, relays: bool, head: str, expected: tuple[str, int] | None) -> None:
    assert listen_address(listen, relays, head) == expected


@pytest.mark.parametrize("listen", ["7342", ":7342", "host:", "host:port", "host:70000", "host:-1"])
def test_an_address_that_is_none_is_refused(listen: str) -> None:
    with pytest.raises(UserError, match="HOST:PORT"):
        listen_address(listen, True, "127.0.0.1:1")


class Head:
    """The head's part of the broadcast, on a port of its own; what it orders goes straight to its one worker."""

    def __init__(self, path: Path) -> None:
        self.identity = RunIdentity.create_or_load(path / "identity")
        store = ChunkStore(path / "head")
        self.origin = OriginNode(store, BroadcastOptions(), self._order, Clock())
        self.archive = Archive(store)
        self.worker: Worker | None = None
        self.weights: WorkerWeights | None = None
        self.tasks: list[asyncio.Task[None]] = []
        self.distribution = Distribution(
            self.archive, self.origin, self.identity, self._order, lambda worker_id: self.worker, self._spawn
        )
        handlers = {**self.origin.handlers(), "FetchManifest": self._fetch_manifest}
        self.server = GrpcServer("127.0.0.1", 0, self.identity, handlers)

    async def start(self) -> str:
        """Returns a ticket."""
        return self.identity.make_ticket("worker", f"127.0.0.1:{await self.server.start()}", 10, 1.0)

    def _order(self, worker_id: str, order: wire.Order) -> None:
        assert self.weights is not None
        if order.HasField("snapshot"):
            self.weights.announced(order.snapshot)
        else:
            self.weights.obey(order)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        self.tasks.append(asyncio.ensure_future(work))

    async def _fetch_manifest(self, peer: Peer, request: wire.ManifestRequest) -> wire.SnapshotNotice:
        return await self.distribution.fetch_manifest(peer.peer_id, request)

    async def publish(self, manifest: Manifest, chunks: Mapping[bytes, memoryview]) -> None:
        assert self.worker is not None
        for name in self.archive.offer(manifest):
            await self.archive.put(name, bytes(chunks[name]))
        await self.archive.take(manifest)
        self.distribution.announce(manifest.ref, [self.worker.worker_id])
        await self.archive.rebuild(manifest.ref)

    async def close(self) -> None:
        await self.server.stop()
        await self.distribution.close()


class Machine:
    """A worker's machine: fetches what is announced, installs what is whole. `outcomes` has a word for each."""

    def __init__(
        self, path: Path, member: Membership, load: Callable[[Snapshot], float] = lambda snapshot: 0.0
    ) -> None:
        self.link, self.load = member.link(), load
        self.outcomes: asyncio.Queue[str] = asyncio.Queue()
        self.weights = WorkerWeights(member, self.link, path, ("127.0.0.1", 0), "", True, self._happen, self._failed)
        self.tasks: list[asyncio.Task[None]] = []

    def _happen(self, event: ev.Event) -> None:
        if isinstance(event, ev.SnapshotAnnounced):
            self.weights.fetch(event.payload)
        elif isinstance(event, ev.SnapshotWhole):
            self.tasks.append(asyncio.ensure_future(self._install(event.payload)))
        elif isinstance(event, ev.SnapshotRefused):
            self.outcomes.put_nowait(f"refused: {event.reason}")
        else:
            self.outcomes.put_nowait(type(event).__name__)

    def _failed(self, error: BaseException) -> None:
        self.outcomes.put_nowait(repr(error))

    async def _install(self, payload: PayloadId) -> None:
        if await self.weights.install(payload, self.load) is not None:
            await self.weights.keep(payload)
            self.outcomes.put_nowait(str(payload))

    async def close(self) -> None:
        await self.weights.close()
        await self.link.close()


@asynccontextmanager
async def joined(path: Path) -> AsyncIterator[tuple[Head, Membership]]:
    head = Head(path)
    ticket = await head.start()
    member = await join(ticket, path / "state")
    head.worker = Worker(member.peer_id, 1, 0.0, None, 0.0)
    try:
        yield head, member
    finally:
        await head.close()


@asynccontextmanager
async def attending(head: Head, member: Membership, path: Path, **more: Any) -> AsyncIterator[Machine]:
    machine = Machine(path / "worker", member, **more)
    head.weights = machine.weights
    await machine.weights.start()
    assert head.worker is not None
    head.worker.installed = machine.weights.content.ref if machine.weights.content is not None else None
    hello = wire.WorkerHello()
    machine.weights.introduce(hello)
    head.origin.joined(member.peer_id, hello, "127.0.0.1")
    machine.weights.connected()
    try:
        yield machine
    finally:
        head.origin.left(member.peer_id, "done")
        await machine.close()


async def publish_and_install(head: Head, machine: Machine, version: int) -> str:
    publication = whole(version) if version == 0 else delta(version, version - 1)
    await head.publish(*publication)
    outcome = await asyncio.wait_for(machine.outcomes.get(), SECONDS)
    assert head.worker is not None
    head.worker.installed = ref(version)
    return outcome


def test_deltas_are_applied_and_a_restarted_worker_goes_on_from_its_disk(tmp_path: Path) -> None:
    async def story() -> None:
        async with joined(tmp_path) as (head, member):
            async with attending(head, member, tmp_path) as machine:
                assert await publish_and_install(head, machine, 0) == "1.0"
                for version in range(1, 4):
                    assert await publish_and_install(head, machine, version) == f"1.{version} over 1.{version - 1}"
            async with attending(head, member, tmp_path) as machine:
                content_now = machine.weights.content
                assert content_now is not None
                assert same(content_now, content(3))
                loaded: list[SnapshotRef] = []
                assert await machine.weights.reload(lambda snapshot: loaded.append(snapshot.ref) or 0.0) == ref(3)
                assert loaded == [ref(3)]
                assert await publish_and_install(head, machine, 4) == "1.4 over 1.3"
                assert same(machine.weights.content, content(4))

    asyncio.run(story())


def test_the_disk_of_a_worker_is_bounded(tmp_path: Path) -> None:
    async def story() -> None:
        async with joined(tmp_path) as (head, member), attending(head, member, tmp_path) as machine:
            for version in range(DELTAS_MAX + 4):
                await publish_and_install(head, machine, version)
            store = ChunkStore(tmp_path / "worker" / "snapshots")
            deltas = [manifest for manifest in store.manifests() if manifest.base is not None]
            assert len(deltas) < DELTAS_MAX, "the whole content was written in their place"
            assert same(store.load(ref(DELTAS_MAX + 3)), content(DELTAS_MAX + 3))

    asyncio.run(story())


def test_what_the_engine_refuses_is_not_installed(tmp_path: Path) -> None:
    def load(snapshot: Snapshot) -> float:
        if snapshot.ref.version == 1:
            raise PeerError("architecture", "another model")
        return 0.25

    async def story() -> None:
        async with joined(tmp_path) as (head, member), attending(head, member, tmp_path, load=load) as machine:
            await publish_and_install(head, machine, 0)
            await head.publish(*delta(1, 0))
            outcome = await asyncio.wait_for(machine.outcomes.get(), SECONDS)
            assert outcome == "refused: architecture: another model"
            assert machine.weights.content is not None
            assert machine.weights.content.ref == ref(0)

    asyncio.run(story())


def test_a_delta_over_other_weights_and_one_with_another_digest_are_refused(tmp_path: Path) -> None:
    async def story() -> None:
        async with joined(tmp_path) as (head, member), attending(head, member, tmp_path) as machine:
            await publish_and_install(head, machine, 0)
            assert machine.weights.content is not None
            machine.weights.content = dataclasses.replace(machine.weights.content, ref=ref(7))
            await head.publish(*delta(1, 0))
            assert "over another content than 1.7" in await asyncio.wait_for(machine.outcomes.get(), SECONDS)
            tampered = {"w": TensorBytes("I16", (ITEMS,), bytes(2 * ITEMS))}
            machine.weights.content = Snapshot(ref(1), tampered, {"config.json": b"{}"})
            assert head.worker is not None
            head.worker.installed = ref(1)
            await head.publish(*delta(2, 1))
            assert "corrupt" in await asyncio.wait_for(machine.outcomes.get(), SECONDS)
            assert machine.weights.content.ref == ref(1), "what was there stays"

    asyncio.run(story())


def test_a_manifest_that_the_head_did_not_sign_is_refused(tmp_path: Path) -> None:
    async def story() -> None:
        async with joined(tmp_path) as (head, member), attending(head, member, tmp_path) as machine:
            raw = whole(0)[0].to_wire()
            for signature in (b"", b"no signature", head.identity.sign_manifest(raw + b" ")):
                with pytest.raises(PeerError, match="signature"):
                    machine.weights.announced(wire.SnapshotNotice(manifest=raw, signature=signature))
            machine.weights.announced(wire.SnapshotNotice(manifest=raw, signature=head.identity.sign_manifest(raw)))

    asyncio.run(story())


def test_old_files_are_deleted_beside_the_event_loop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sweep, threads = ChunkStore.sweep, []

    def watched(store: ChunkStore, hashes: Iterable[bytes]) -> None:
        threads.append(threading.current_thread())
        sweep(store, hashes)

    monkeypatch.setattr(ChunkStore, "sweep", watched)

    async def story() -> None:
        async with joined(tmp_path) as (head, member), attending(head, member, tmp_path) as machine:
            await publish_and_install(head, machine, 0)
            threads.clear()
            head.worker.installed = None  # type: ignore[union-attr]
            await head.publish(*whole(5))  # nothing of version 0 is needed any more
            await asyncio.wait_for(machine.outcomes.get(), SECONDS)
            assert len(threads) == 1
            assert threading.main_thread() not in threads
            folder = tmp_path / "worker" / "snapshots" / "chunks"
            assert {path.name for path in folder.iterdir()} == {hash_.hex() for hash_ in whole(5)[0].hashes}

    asyncio.run(story())
