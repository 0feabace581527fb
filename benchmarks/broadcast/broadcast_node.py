"""One node of a broadcast by echo2: the head's `OriginNode` or a worker's `PeerNode`, over gRPC with mutual TLS.

Enrolment, tickets, signed manifests, probes, dialling back and the chunk store are the real ones; what the rest of a
head and of a worker would do (leases, engines) is left out. `wan/lines.py` says how the benchmark talks to it.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

from broadcast_schemes import SCHEMES
from wan.lines import content, described, digest, hear, say, seed_of
from weights_cases import new_content

from echo2.core.errors import LinkError
from echo2.core.types import RUN_POLICY, PayloadId, Snapshot, SnapshotRef, TensorBytes
from echo2.transport import wire_pb2 as wire
from echo2.transport.base import Handlers, Peer
from echo2.transport.grpc_link import GrpcNetwork, Membership, join
from echo2.transport.grpc_server import GrpcServer
from echo2.transport.identity import RunIdentity, verify_manifest
from echo2.transport.limits import PROTOCOL_VERSION
from echo2.weights.broadcast.decide.origin import BroadcastOptions
from echo2.weights.broadcast.origin import OriginNode
from echo2.weights.broadcast.peer import PeerNode
from echo2.weights.format.manifest import Manifest
from echo2.weights.format.segments import Encoder
from echo2.weights.store.store import ChunkStore

NUM_TENSORS = 16
PORT = 4700
PROBE_LIMIT_SECONDS = 150.0  # links are measured one after the other, in some seconds each


class Origin:
    """The part of a head that the broadcast needs."""

    def __init__(self, node: Mapping[str, Any]) -> None:
        self._described = node
        directory = Path(node["directory"])
        self._identity = RunIdentity.create_or_load(directory / "identity")
        store = ChunkStore(directory / "store")
        self._manifests = [_stored(store, node, nth) for nth in range(1, node["num_broadcasts"] + 1)]
        self._outboxes: dict[str, asyncio.Queue[wire.Order]] = {}
        self._names: dict[str, str] = {}
        self._routes: dict[str, tuple[str, ...]] = {}
        dialler = GrpcNetwork(self._identity.credentials)
        options = BroadcastOptions(SCHEMES[node["broadcast"]["scheme"]], node["broadcast"]["fan_out"])
        self._origin = OriginNode(store, self._order, dialler.to_peer, _failed, options=options)

    async def run(self) -> None:
        host = self._described["addresses"][self._described["name"]]
        handlers: Handlers = {**self._origin.handlers(), "Attend": self._attend, "ReportFetch": self._report_fetch}
        server = GrpcServer(host, PORT, self._identity, handlers, _failed)
        await server.start()
        say("ready", ticket=self._identity.make_ticket("worker", f"{host}:{PORT}", 1000, 1.0))
        while (order := await asyncio.to_thread(hear)) != "quit":
            if order == "publish":
                self._publish()
            elif order == "busiest":
                say("busiest", worker=self._names[busiest(self._routes)])
        await server.stop()
        await self._origin.close()

    def _publish(self) -> None:
        say("published")
        manifest = self._manifests.pop(0)
        data, ref = manifest.to_wire(), manifest.ref
        signature = self._identity.sign_manifest(data)
        notice = wire.SnapshotNotice(
            policy=ref.policy, lineage=ref.lineage, version=ref.version, manifest=data, signature=signature
        )
        for outbox in self._outboxes.values():
            outbox.put_nowait(wire.Order(snapshot=notice))
        self._origin.assign(manifest.payload, list(self._outboxes), manifest)

    def _order(self, worker_id: str, order: wire.Order) -> None:
        if order.HasField("routes"):
            sources = [source.peer_id for source in order.routes.sources]
            self._routes[worker_id] = tuple(sources[at] for at in order.routes.stripes)
        if worker_id in self._outboxes:
            self._outboxes[worker_id].put_nowait(order)

    async def _attend(self, peer: Peer, hello: wire.WorkerHello) -> AsyncIterator[wire.Order]:
        outbox = self._outboxes[peer.peer_id] = asyncio.Queue()
        self._names[peer.peer_id] = hello.host
        outbox.put_nowait(wire.Order(settings=wire.RunSettings(run_id=self._identity.run_id)))
        self._origin.joined(peer.peer_id, hello, peer.host)
        try:
            while True:
                yield await outbox.get()
        finally:
            if self._outboxes.get(peer.peer_id) is outbox:
                del self._outboxes[peer.peer_id]
                self._origin.left(peer.peer_id, "its connection closed")

    async def _report_fetch(self, peer: Peer, report: wire.FetchReport) -> wire.Empty:
        if report.failure:
            names = {"": "origin", **self._names}
            source = names.get(report.failed_source, report.failed_source)
            say("note", kind="gave up", worker=names[peer.peer_id], source=source, reason=report.failure)
        answer: wire.Empty = await self._origin.handlers()["ReportFetch"](peer, report)
        return answer


def _stored(store: ChunkStore, node: Mapping[str, Any], nth: int) -> Manifest:
    """What is broadcast as the nth, encoded into the store: nothing in it is in what was broadcast before."""
    whole, part = content(node["num_bytes"], seed_of(node["seed"], nth)), -(-node["num_bytes"] // NUM_TENSORS)
    pieces = [memoryview(whole)[at : at + part] for at in range(0, len(whole), part)]
    tensors = {f"tensor{at:02}": TensorBytes("U8", (len(piece),), piece) for at, piece in enumerate(pieces)}
    encoder = Encoder(Snapshot(SnapshotRef(RUN_POLICY, 0, nth), tensors, {}))
    for chunks in encoder.parts():
        for hash_, chunk in chunks.items():
            store.put(hash_, chunk)
    manifest = encoder.manifest()
    store.put_manifest(manifest)
    return manifest


def busiest(routes: Mapping[str, tuple[str, ...]]) -> str:
    """The worker through which most stripes of most others come, however far below it they are."""
    carried: dict[str, int] = defaultdict(int)
    for worker, sources in routes.items():
        for stripe, source in enumerate(sources):
            passed = {worker}
            while source and source not in passed:
                carried[source] += 1
                passed.add(source)
                source = routes[source][stripe] if source in routes else ""
    return max(sorted(carried), key=carried.__getitem__, default=min(routes))


class Worker:
    """The part of a worker that the broadcast needs."""

    def __init__(self, node: Mapping[str, Any]) -> None:
        self._described, self._directory = node, Path(node["directory"])
        self._store = ChunkStore(self._directory / "store")
        self._manifest: Manifest | None = None
        self._node: PeerNode | None = None
        self._chores: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        member = await join(self._described["origin"]["ticket"], self._directory / "state")
        link = member.link()
        self._node = PeerNode(
            member.peer_id,
            self._store,
            member.network(),
            link,
            on_whole=self._whole,
            on_gone=lambda payload: say("failed", detail=f"{payload} is gone"),
            on_error=_failed,
        )
        port = await self._node.start()
        hello = wire.WorkerHello(
            protocol=PROTOCOL_VERSION,
            slots=1,
            pid=os.getpid(),
            host=self._described["name"],
            listen_port=port,
        )
        attending = asyncio.ensure_future(self._attend(member, link, hello))
        while (order := await asyncio.to_thread(hear)) != "quit":
            if order == "verify":
                say("digest", digest=await asyncio.to_thread(self._digest))
        attending.cancel()
        await self._node.close()
        await link.close()

    async def _attend(self, member: Membership, link: Any, hello: wire.WorkerHello) -> None:
        assert self._node is not None
        try:
            async for order in link.stream("Attend", hello):
                if order.HasField("settings"):
                    self._node.connected()
                    self._chores.add(asyncio.ensure_future(self._say_joined()))
                elif order.HasField("snapshot"):
                    notice = order.snapshot
                    verify_manifest(member.credentials.ca_pem, notice.manifest, notice.signature)
                    self._manifest = Manifest.from_wire(notice.manifest)
                    self._node.fetch(self._manifest)
                else:
                    self._node.obey(order)
        except LinkError as error:
            say("failed", detail=f"the origin is away: {error}")
        except Exception as error:  # nobody awaits this task
            _failed(error)

    async def _say_joined(self) -> None:
        """Once the link is measured."""
        assert self._node is not None
        give_up_at = time.monotonic() + PROBE_LIMIT_SECONDS
        while self._node.rates is None and time.monotonic() < give_up_at:  # noqa: ASYNC110 - it has no such event
            await asyncio.sleep(0.05)
        say("joined", rates=repr(self._node.rates))

    def _whole(self, payload: PayloadId) -> None:
        assert self._node is not None
        say("whole", bytes_from_peers=self._node.bytes_from_peers)

    def _digest(self) -> str:
        assert self._manifest is not None
        applied = new_content()
        applied.apply(self._manifest, self._store.get)
        snapshot = applied.snapshot()
        return digest(tensor.read(0, tensor.num_bytes) for _, tensor in sorted(snapshot.tensors.items()))


def _failed(error: BaseException) -> None:
    say("failed", detail=f"{type(error).__name__}: {error}")


def main() -> None:
    node = described()
    part = Origin(node) if node["role"] == "origin" else Worker(node)
    asyncio.run(part.run())


if __name__ == "__main__":
    main()
