"""An origin and workers of the broadcast in one process, over links in memory or over gRPC on loopback."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from broadcast_schemes import SCHEMES
from weights_cases import encode

from echo2.core.loop_thread import BlockingThreads
from echo2.core.types import RUN_POLICY, PayloadId, SnapshotRef, TensorBytes
from echo2.transport import wire_pb2 as wire
from echo2.transport.base import Link, Network
from echo2.transport.grpc_link import GrpcNetwork
from echo2.transport.grpc_server import GrpcServer
from echo2.transport.identity import PeerIdentity, RunIdentity
from echo2.transport.tickets import Credentials, Ticket
from echo2.weights.broadcast.decide.origin import BroadcastOptions
from echo2.weights.broadcast.origin import OriginNode
from echo2.weights.broadcast.peer import PeerNode
from echo2.weights.format.manifest import Manifest
from echo2.weights.store.store import ChunkStore
from memory_links import LOOPBACK, MemoryNetwork

#: For what must happen, however slow the machine. Several sources in a row may have to be given up for it.
SECONDS = 60.0
CHUNK_BYTES = 1 << 15

Content = tuple[Manifest, dict[bytes, memoryview]]


def fail(error: BaseException) -> None:
    raise error


@asynccontextmanager
async def disk_threads() -> AsyncIterator[BlockingThreads]:
    """A thread for a cache of chunks."""
    threads = BlockingThreads(1, "disk")
    try:
        yield threads
    finally:
        await threads.close()


def content(version: int, num_chunks: int = 40, seed: int = 0) -> Content:
    """A snapshot of random bytes, cut into so many chunks."""
    data = random.Random(seed * 1000 + version).randbytes(num_chunks * CHUNK_BYTES)
    tensors = {"weight": TensorBytes("U8", (len(data),), data)}
    return encode(SnapshotRef(RUN_POLICY, 1, version), tensors, {}, chunk_bytes=CHUNK_BYTES)


def stored(directory: Path, contents: list[Content]) -> ChunkStore:
    store = ChunkStore(directory)
    for manifest, chunks in contents:
        for hash_, data in chunks.items():
            store.put(hash_, data)
        store.put_manifest(manifest)
    return store


class Worker:
    """A node, and what it said."""

    def __init__(self, fleet: Fleet, peer_id: str, network: Network, link: Link, listens: bool) -> None:
        self.fleet, self.peer_id, self.link = fleet, peer_id, link
        self.store = ChunkStore(fleet.directory / "workers" / peer_id)
        self.whole: set[PayloadId] = set()
        self.gone: list[PayloadId] = []
        self.news = asyncio.Event()
        self.node = PeerNode(
            peer_id,
            self.store,
            network,
            link,
            on_whole=self._on_whole,
            on_gone=self._on_gone,
            on_error=fleet.errors.append,
            listen=(LOOPBACK, 0) if listens else None,
        )

    def _on_whole(self, payload: PayloadId) -> None:
        self.whole.add(payload)
        self.news.set()

    def _on_gone(self, payload: PayloadId) -> None:
        self.gone.append(payload)
        self.news.set()

    def expects(self, manifest: Manifest) -> None:
        """It waits for chunks that only the test gives it, for as long as that takes: with the head in reach, it would
        turn to the origin after a few seconds, and give up what the origin lacks."""
        self.node.disconnected()
        self.node.fetch(manifest)

    async def has(self, manifest: Manifest) -> None:
        """Wait until it is whole; then every byte is what it should be."""
        await until(lambda: manifest.payload in self.whole, f"{self.peer_id} has {manifest.payload}")
        assert self.store.missing(manifest) == ()
        for hash_, num_bytes in manifest.chunk_bytes.items():
            assert len(self.store.get(hash_)) == num_bytes


class Fleet:
    """`async with fleet(...)`, then `join`, `publish`."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.errors: list[BaseException] = []
        self.workers: dict[str, Worker] = {}
        self.origin_store = ChunkStore(directory / "origin")
        self.origin: OriginNode
        self.memory: MemoryNetwork | None = None
        self.identity: RunIdentity | None = None
        self._server: GrpcServer | None = None
        self._address = ""

    @property
    def suspects(self) -> list[str]:
        return list(self.origin.suspects)

    async def start(self, backend: str, **options: Any) -> None:
        """The origin, from what is stored; a second time: restarted."""
        dial: Callable[[str, str], Link]
        if backend == "grpc":
            self.identity = self.identity or RunIdentity.create_or_load(self.directory / "run")
            dial = GrpcNetwork(self.identity.credentials).to_peer
        else:
            self.memory = self.memory or MemoryNetwork()
            dial = self.memory.member("head").to_peer
        self.origin = OriginNode(
            self.origin_store,
            self._order,
            dial,
            self.errors.append,
            options=BroadcastOptions(SCHEMES[options.pop("scheme", "trees")], **options),
        )
        if self.identity is not None:
            port = int(self._address.rpartition(":")[2] or 0)
            self._server = GrpcServer(LOOPBACK, port, self.identity, self.origin.handlers(), self.errors.append)
            self._address = f"{LOOPBACK}:{await self._server.start()}"
        if self.memory is not None:
            self.memory.head_handlers.update(self.origin.handlers())

    async def stop(self) -> None:
        """The origin dies."""
        if self._server is not None:
            await self._server.stop()
        if self.memory is not None:
            self.memory.isolate("")
        await self.origin.close()

    async def close(self) -> None:
        for worker in list(self.workers.values()):
            await self.leave(worker.peer_id, "the test is over")
        await self.stop()
        assert self.errors == []

    def credentials(self, name: str) -> tuple[str, Credentials]:
        """Those of a machine of this name."""
        assert self.identity is not None
        ticket = Ticket.parse(self.identity.make_ticket("worker", "nowhere:1", 1, 1.0))
        peer = PeerIdentity(self.directory / "peers" / name)
        _, certificate = self.identity.enrol(ticket.ticket_id, "worker", peer.request())
        return peer.keep(ticket.credentials.ca_pem, certificate)

    async def join(self, name: str, listens: bool = True, is_dialable: bool = True, host: str = LOOPBACK) -> Worker:
        """A worker joins, from this address; when this returns, the origin knows whether it can be dialled."""
        network: Network
        if self.memory is not None:
            network = self.memory.member(name)
            link: Link = network.to_head()
        else:
            name, credentials = self.credentials(name)
            network = GrpcNetwork(credentials, self._address)
            link = network.to_head()
        worker = self.workers[name] = Worker(self, name, network, link, listens)
        port = await worker.node.start()
        hello = wire.WorkerHello(listen_port=port if is_dialable else 0)
        self.origin.joined(name, hello, host)
        worker.node.connected()
        if port and is_dialable:
            await until(lambda: bool(self.origin.address_of(name)), f"{name} was dialled back")
        return worker

    async def leave(self, name: str, reason: str = "it left") -> None:
        worker = self.workers.pop(name)
        self.origin.left(name, reason)
        await worker.node.close()
        await worker.link.close()

    def put(self, made: Content) -> Manifest:
        """Into the origin's store."""
        manifest, chunks = made
        for hash_, data in chunks.items():
            self.origin_store.put(hash_, data)
        self.origin_store.put_manifest(manifest)
        return manifest

    def publish(self, made: Content, *workers: Worker) -> Manifest:
        """To these workers; to all of them where none is named."""
        manifest = self.put(made)
        self.assign(manifest, *workers)
        return manifest

    def assign(self, manifest: Manifest, *workers: Worker) -> None:
        receivers = workers or tuple(self.workers.values())
        for worker in receivers:
            worker.node.fetch(manifest)
        self.origin.assign(manifest.payload, [worker.peer_id for worker in receivers], manifest)

    def _order(self, worker_id: str, order: wire.Order) -> None:
        if worker_id in self.workers:
            self.workers[worker_id].node.obey(wire.Order.FromString(order.SerializeToString()))


@asynccontextmanager
async def opened(directory: Path, backend: str, **options: Any) -> AsyncIterator[Fleet]:
    """A running fleet without workers."""
    fleet = Fleet(directory)
    await fleet.start(backend, **options)
    try:
        yield fleet
    finally:
        await fleet.close()


async def until(is_so: Callable[[], bool], what: str) -> None:
    """Wait for something that is to happen, however slow the machine is."""
    give_up_at = time.monotonic() + SECONDS
    while not is_so():
        assert time.monotonic() < give_up_at, f"never happened: {what}"
        await asyncio.sleep(0.005)
