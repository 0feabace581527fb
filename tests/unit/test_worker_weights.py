"""A worker's weights against a real origin over real links: deltas applied, refused, kept, and where it listens."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from weights_cases import (
    base_model,
    bytes_of,
    encode,
    encode_delta,
    holding,
    new_content,
    payload,
    spoil,
    stored_hashes,
)

from broadcast_fleet import fail
from echo2.core.addresses import Addresses
from echo2.core.errors import PeerError, UserError
from echo2.core.types import RUN_POLICY, PayloadId, Snapshot, SnapshotRef, TensorBytes
from echo2.engines.engine import OutOfMemoryError
from echo2.head.fleet.decide.fleet import Worker
from echo2.transport import wire_pb2 as wire
from echo2.transport.base import Peer
from echo2.transport.grpc_link import Membership, join
from echo2.transport.grpc_server import GrpcServer
from echo2.transport.identity import RunIdentity
from echo2.weights.broadcast.distribution import Distribution
from echo2.weights.broadcast.origin import OriginNode
from echo2.weights.broadcast.peer import WeightsReceiver, listen_address
from echo2.weights.format.manifest import MAX_DELTAS, Manifest, compose
from echo2.weights.format.model_files import rounded
from echo2.weights.format.segments import Encoder, base_model_of
from echo2.weights.store.archive import Archive
from echo2.weights.store.store import ChunkStore
from echo2.worker.decide import messages as ev
from echo2.worker.weights import WorkerWeights
from memory_links import MemoryNetwork

ITEMS = 4000
SECONDS = 30.0


def ref(version: int) -> SnapshotRef:
    return SnapshotRef(RUN_POLICY, 1, version)


def content(version: int) -> Snapshot:
    data = bytearray(random.Random(0).randbytes(2 * ITEMS))
    for step in range(1, version + 1):
        for place in random.Random(step).sample(range(2 * ITEMS), 20):
            data[place] = (data[place] + 1) % 256
    return Snapshot(ref(version), {"w": TensorBytes("I16", (ITEMS,), bytes(data))}, {"config.json": b"{}"})


def whole(version: int) -> tuple[Manifest, Mapping[bytes, memoryview]]:
    return encode(ref(version), content(version).tensors, content(version).files)


def delta(version: int, base: int) -> tuple[Manifest, Mapping[bytes, memoryview]]:
    return encode_delta(content(base), content(version))


@pytest.mark.parametrize(
    ("listen", "relays", "head", "expected"),
    [
        ("", True, "127.0.0.1:7341", ("127.0.0.1", 0)),
        ("", True, "[::1]:7341", ("::1", 0)),
        ("", True, "127.0.0.1:7341,[2001:db8::5]:7341", ("0.0.0.0", 0)),
        ("", False, "203.0.113.5:7341", None),
        ("0.0.0.0:7342", True, "203.0.113.5:7341", ("0.0.0.0", 7342)),
        ("[::]:7342", True, "203.0.113.5:7341", ("::", 7342)),
        ("0.0.0.0:7342", False, "203.0.113.5:7341", None),
    ],
)
def test_the_listening_address_of_a_worker(
    listen: str, relays: bool, head: str, expected: tuple[str, int] | None
) -> None:
    assert listen_address(listen, relays, Addresses(head)) == expected


@pytest.mark.parametrize("listen", ["7342", ":7342", "host:", "host:port", "host:70000", "host:-1"])
def test_an_invalid_address_is_refused(listen: str) -> None:
    with pytest.raises(UserError, match="HOST:PORT"):
        listen_address(listen, True, Addresses("127.0.0.1:1"))


class Head:
    """The head's part of the broadcast, on a port of its own; what it orders goes straight to its one worker."""

    def __init__(self, path: Path) -> None:
        self.identity = RunIdentity.create_or_load(path / "identity")
        store = ChunkStore(path / "head")
        self.origin = OriginNode(store, self._order, MemoryNetwork().member("head").to_peer, fail)
        self.archive = Archive(store)
        self.worker: Worker | None = None
        self.weights: WorkerWeights | None = None
        self.distribution = Distribution(
            self.archive, self.origin, self.identity, self._order, lambda worker_id: self.worker, asyncio.ensure_future
        )
        handlers = {**self.origin.handlers(), "FetchManifest": self._fetch_manifest}
        self.server = GrpcServer("127.0.0.1", 0, self.identity, handlers)

    async def start(self) -> str:  # a ticket
        return self.identity.make_ticket("worker", f"127.0.0.1:{await self.server.start()}", 10, 1.0)

    def _order(self, worker_id: str, order: wire.Order) -> None:
        assert self.weights is not None
        if order.HasField("snapshot"):
            self.weights.announced(order.snapshot)
        else:
            self.weights.node.obey(order)

    async def _fetch_manifest(self, peer: Peer, request: wire.ManifestRequest) -> wire.SnapshotNotice:
        return await self.distribution.fetch_manifest(peer.peer_id, request)

    async def publish(self, manifest: Manifest, chunks: Mapping[bytes, memoryview]) -> None:
        assert self.worker is not None
        await self.archive.take(await stored(self, (manifest, chunks)))
        self.worker.announced = manifest.ref
        self.distribution.announce(manifest.ref, [self.worker.worker_id])

    async def close(self) -> None:
        await self.server.stop()
        await self.distribution.close()


class Machine:
    """A worker's machine: fetches what is announced, installs what is whole. `outcomes` has a word for each."""

    def __init__(
        self,
        path: Path,
        member: Membership,
        load: Callable[[Snapshot], float] = lambda snapshot: 0.0,
        own_base: Snapshot | None = None,
    ) -> None:
        self.link, self.load = member.link(), load
        self.outcomes: asyncio.Queue[str] = asyncio.Queue()
        receive = partial(WeightsReceiver, member, self.link, path, "127.0.0.1:0", True)
        self.weights = WorkerWeights(receive, self._happen, self._failed, own_base)
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

    async def loaded(self, snapshot: Snapshot) -> float:
        return self.load(snapshot)

    def _failed(self, error: BaseException) -> None:
        self.outcomes.put_nowait(repr(error))

    async def _install(self, payload: PayloadId) -> None:
        if await self.weights.install(payload, self.loaded) is not None:
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
async def attending(
    head: Head, member: Membership, path: Path, kind: type[Machine] = Machine, **more: Any
) -> AsyncIterator[Machine]:
    machine = kind(path / "worker", member, **more)
    head.weights = machine.weights
    await machine.weights.start()
    assert head.worker is not None
    head.worker.installed = machine.weights.content.ref
    hello = wire.WorkerHello()
    hello.listen_port = machine.weights.port
    head.origin.joined(member.peer_id, hello, "127.0.0.1")
    machine.weights.node.connected()
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
                assert await publish_and_install(head, machine, 0) == str(PayloadId(ref(0)))
                for version in range(1, 4):
                    assert await publish_and_install(head, machine, version) == str(
                        PayloadId(ref(version), ref(version - 1))
                    )
            async with attending(head, member, tmp_path) as machine:
                assert bytes_of(machine.weights.content.snapshot()) == bytes_of(content(3))
                loaded: list[SnapshotRef] = []
                machine.load = lambda snapshot: loaded.append(snapshot.ref) or 0.0
                assert await machine.weights.reload(machine.loaded) == ref(3)
                assert loaded == [ref(3)]
                assert await publish_and_install(head, machine, 4) == "policy@1.4 over policy@1.3"
                assert bytes_of(machine.weights.content.snapshot()) == bytes_of(content(4))

    asyncio.run(story())


def test_the_disk_of_a_worker_is_bounded(tmp_path: Path) -> None:
    async def story() -> None:
        async with joined(tmp_path) as (head, member), attending(head, member, tmp_path) as machine:
            last = MAX_DELTAS + 3
            for version in range(last + 1):
                if version == MAX_DELTAS + 1:  # as the learner does
                    await head.archive.take(await stored(head, whole(MAX_DELTAS)))
                await publish_and_install(head, machine, version)
            store = ChunkStore(tmp_path / "worker" / "snapshots")
            anchor, *deltas = store.chain(ref(last)) or []
            assert anchor == whole(MAX_DELTAS)[0], "the whole content was written, in the chunks that the learner made"
            assert len(deltas) == last - MAX_DELTAS
            assert len(store.manifests()) == 1 + len(deltas)
            again = new_content()
            again.apply(compose([anchor, *deltas]), store.get)
            assert bytes_of(again.snapshot()) == bytes_of(content(last))

    asyncio.run(story())


async def stored(head: Head, publication: tuple[Manifest, Mapping[bytes, memoryview]]) -> Manifest:
    """The manifest, with all its chunks at the head."""
    manifest, chunks = publication
    for name in head.archive.offer(manifest.hashes):
        await head.archive.put(name, bytes(chunks[name]))
    return manifest


@pytest.mark.parametrize(
    ("error", "outcome"),
    [
        (PeerError("architecture", "another model"), "refused: architecture: another model"),
        (OutOfMemoryError("cuda:0 has no room"), "SnapshotTooLarge"),
        (MemoryError(), "SnapshotTooLarge"),
    ],
)
def test_a_snapshot_that_the_engine_refuses_is_not_installed(tmp_path: Path, error: Exception, outcome: str) -> None:
    def load(snapshot: Snapshot) -> float:
        if snapshot.ref.version == 1:
            raise error
        return 0.25

    async def story() -> None:
        async with joined(tmp_path) as (head, member), attending(head, member, tmp_path, load=load) as machine:
            await publish_and_install(head, machine, 0)
            await head.publish(*delta(1, 0))
            assert await asyncio.wait_for(machine.outcomes.get(), SECONDS) == outcome
            await head.publish(*delta(2, 1))  # over what the engine has
            assert await asyncio.wait_for(
                machine.outcomes.get(), SECONDS
            ) == "refused: base: payload policy@1.2 over policy@1.0 " + ("cannot be applied to snapshot policy@1.1")
            head.worker.installed = None  # type: ignore[union-attr]  # as the relay asks then
            await head.publish(*delta(3, 2))
            assert await asyncio.wait_for(machine.outcomes.get(), SECONDS) == "policy@1.3"

    asyncio.run(story())


def test_a_delta_over_other_weights_and_one_with_another_digest_are_refused(tmp_path: Path) -> None:
    async def story() -> None:
        async with joined(tmp_path) as (head, member), attending(head, member, tmp_path) as machine:
            await publish_and_install(head, machine, 0)
            machine.weights.content.ref = ref(7)
            await head.publish(*delta(1, 0))
            assert "cannot be applied to snapshot policy@1.7" in await asyncio.wait_for(machine.outcomes.get(), SECONDS)
            tampered = {"w": TensorBytes("I16", (ITEMS,), bytes(2 * ITEMS))}
            vars(machine.weights.content).update(vars(holding(Snapshot(ref(1), tampered, {"config.json": b"{}"}))))
            assert head.worker is not None
            head.worker.installed = ref(1)
            await head.publish(*delta(2, 1))
            assert "corrupt" in await asyncio.wait_for(machine.outcomes.get(), SECONDS)
            assert machine.weights.content.ref is None, "what did not verify is no content"
            head.worker.installed = None
            await head.publish(*delta(3, 2))
            assert await asyncio.wait_for(machine.outcomes.get(), SECONDS) == "policy@1.3"
            assert bytes_of(machine.weights.content.snapshot()) == bytes_of(content(3))

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


class Patient(Machine):
    """Does as the scheduler does where a payload that is being fetched is announced again: nothing."""

    def _happen(self, event: ev.Event) -> None:
        if isinstance(event, ev.SnapshotAnnounced) and self.weights.node.progress is not None:
            return
        super()._happen(event)


def test_a_payload_that_is_announced_again_with_other_chunks_ends_as_it_began(tmp_path: Path) -> None:
    """The head was restarted meanwhile, and has added up other deltas."""

    def signed(head: Head, manifest: Manifest) -> wire.SnapshotNotice:
        raw = manifest.to_wire()
        return wire.SnapshotNotice(manifest=raw, signature=head.identity.sign_manifest(raw))

    async def story() -> None:
        async with joined(tmp_path) as (head, member), attending(head, member, tmp_path, kind=Patient) as machine:
            await publish_and_install(head, machine, 0)
            steps = [delta(1, 0), delta(2, 1)]
            in_a_row, (at_once, chunks) = compose([manifest for manifest, _ in steps]), delta(2, 0)
            assert in_a_row.payload == at_once.payload
            assert set(in_a_row.hashes) - set(at_once.hashes)
            machine.weights.announced(signed(head, at_once))
            machine.weights.announced(signed(head, in_a_row))
            await stored(head, (at_once, chunks))
            head.origin.assign(at_once.payload, [member.peer_id], at_once)
            assert await asyncio.wait_for(machine.outcomes.get(), SECONDS) == str(at_once.payload)
            assert bytes_of(machine.weights.content.snapshot()) == bytes_of(content(2))
            assert at_once in ChunkStore(tmp_path / "worker" / "snapshots").manifests(), "kept for others"

    asyncio.run(story())


def test_old_files_are_deleted_beside_the_event_loop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sweep, threads = ChunkStore.sweep, []

    def watched(store: ChunkStore) -> None:
        threads.append(threading.current_thread())
        sweep(store)

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
            assert stored_hashes(tmp_path / "worker" / "snapshots") == set(whole(5)[0].hashes)

    asyncio.run(story())


async def take_base(head: Head, machine: Machine, base: Snapshot) -> str:
    """As the scheduler has it done: ask, fetch; what came of it."""
    await machine.weights.ask(base.ref, None)
    return await asyncio.wait_for(machine.outcomes.get(), SECONDS)


class BaseTaker(Machine):
    """Says when a base model is whole."""

    def _happen(self, event: ev.Event) -> None:
        if isinstance(event, ev.SnapshotWhole):
            self.outcomes.put_nowait(str(event.payload))
        else:
            super()._happen(event)


@asynccontextmanager
async def taking(head: Head, member: Membership, path: Path, own: Snapshot | None = None) -> AsyncIterator[Machine]:
    async with attending(head, member, path, kind=BaseTaker, own_base=own) as machine:
        yield machine


def test_a_base_model_is_fetched_once_and_survives_adapters_and_restarts(tmp_path: Path) -> None:
    async def story() -> None:
        base = base_model()
        async with joined(tmp_path) as (head, member):
            await head.archive.take(await stored(head, payload(Encoder(base))))
            async with taking(head, member, tmp_path) as machine:
                assert machine.weights.base_models == set()
                assert await take_base(head, machine, base) == str(base.ref)
            async with attending(head, member, tmp_path) as machine:
                for version in range(4):
                    now = replace(content(version), base_model=base.ref)
                    await head.publish(*payload(Encoder(now)))
                    assert await asyncio.wait_for(machine.outcomes.get(), SECONDS) == str(PayloadId(ref(version)))
                    head.worker.installed = None  # type: ignore[union-attr]
            async with attending(head, member, tmp_path) as machine:
                assert machine.weights.content.ref == ref(3)
                assert machine.weights.base_models == {base.ref}
                assert bytes_of(await machine.weights.base(base.ref)) == bytes_of(base)
                assert machine.weights.node.bytes_received == 0

    asyncio.run(story())


def test_a_base_model_altered_on_disk_is_reported_as_altered(tmp_path: Path) -> None:
    async def story() -> None:
        base = base_model()
        async with joined(tmp_path) as (head, member):
            await head.archive.take(await stored(head, payload(Encoder(base))))
            async with taking(head, member, tmp_path) as machine:
                await take_base(head, machine, base)
                spoil(tmp_path / "worker" / "snapshots", payload(Encoder(base))[0].hashes[-1])
                with pytest.raises(PeerError, match="base_model"):
                    await machine.weights.base(base.ref)
                assert await take_base(head, machine, base) == str(base.ref)
                assert bytes_of(await machine.weights.base(base.ref)) == bytes_of(base)

    asyncio.run(story())


def test_only_the_small_files_of_the_owners_base_model_are_fetched(tmp_path: Path) -> None:
    async def story() -> None:
        base = base_model()
        async with joined(tmp_path) as (head, member):
            await head.archive.take(await stored(head, payload(Encoder(base))))
            async with taking(head, member, tmp_path, own=replace(base, files={})) as machine:
                assert await take_base(head, machine, base) == str(base.ref)
                assert bytes_of(await machine.weights.base(base.ref)) == bytes_of(base)
                assert machine.weights.node.bytes_received == sum(map(len, base.files.values()))

    asyncio.run(story())


def test_a_base_model_of_the_owner_in_32_bits_serves_a_run_that_has_it_in_16(tmp_path: Path) -> None:
    async def story() -> None:
        stem = base_model()
        weights = {name: TensorBytes("F32", (one.num_bytes // 4,), one.data) for name, one in stem.tensors.items()}
        own = Snapshot(base_model_of(weights, stem.files["config.json"]), weights, stem.files)
        base = rounded(own)
        assert base.ref != own.ref
        async with joined(tmp_path) as (head, member):
            await head.archive.take(await stored(head, payload(Encoder(base))))
            async with taking(head, member, tmp_path, own=own) as machine:
                assert await take_base(head, machine, base) == str(base.ref)
                assert bytes_of(await machine.weights.base(base.ref)) == bytes_of(base)
                assert machine.weights.node.bytes_received == sum(map(len, base.files.values()))

    asyncio.run(story())


@pytest.mark.parametrize("is_changed", [False, True])
def test_a_base_model_of_the_owner_that_is_another_is_one_clear_error(tmp_path: Path, is_changed: bool) -> None:
    """It was another from the beginning, or its file has changed since its name was taken."""
    base, own = base_model(0), base_model(1)
    words = (base.ref.policy, own.ref.policy, "leave --base out")
    if is_changed:
        own, words = replace(base, tensors=own.tensors), ("--base", base.ref.policy, "start the worker again")

    async def story() -> None:
        async with joined(tmp_path) as (head, member):
            await head.archive.take(await stored(head, payload(Encoder(base))))
            async with taking(head, member, tmp_path, own=own) as machine:
                said = await take_base(head, machine, base)
                assert said.startswith("UserError")
                assert [word for word in words if word not in said] == []

    asyncio.run(story())
