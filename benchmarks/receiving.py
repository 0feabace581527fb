"""CPU seconds that it takes a worker to receive a GiB, by part, and to receive and relay one.

    python benchmarks/receiving.py [--mb 128] [--rounds 3] [--chunk-kb 64 256 1024]

A process gives chunks from memory over the real transport (mutual TLS, the door in front), a second one takes them. It
only reads them off the link (`transport`), is a worker's `PeerNode` that fetches them (`receive`), applies them to a
content in the end (`apply`), or gives them to a third process too, while they come (`relay`). The figures are user and
system seconds of the taking process, less what it had used before the first chunk; and of the giving one. All parts in
one run, in turn.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path

from recording import save
from weights_cases import encode

from echo2.broadcast.payloads import encode_payload, requested
from echo2.broadcast.peer import PeerNode
from echo2.transport import chunks
from echo2.transport import wire_pb2 as wire
from echo2.transport.base import Link, Peer
from echo2.transport.grpc_link import Membership, join
from echo2.transport.grpc_server import GrpcServer
from echo2.transport.identity import RunIdentity
from echo2.types import RUN_POLICY, PayloadId, SnapshotRef, TensorBytes
from echo2.weights.content import Content
from echo2.weights.manifest import Manifest
from echo2.weights.store import ChunkStore

PARTS = ("transport", "receive", "apply", "relay")
REQUEST_CHUNKS = 4096


def cpu_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


async def read_off(link: Link, manifest: Manifest) -> None:
    """All chunks, and nothing done with them."""
    for start in range(0, len(manifest.hashes), REQUEST_CHUNKS):
        names = manifest.hashes[start : start + REQUEST_CHUNKS]
        wanted = wire.ChunkRequest(hashes=names, payload=encode_payload(manifest.payload))
        left = len(names)
        async for message in link.frames("FetchChunks", wanted):
            left -= message != chunks.ALIVE
            if not left:
                break


async def fetch(member: Membership, link: Link, manifest: Manifest, folder: Path, relays: bool) -> PeerNode:
    """A worker's node, once it has everything, and whoever it relays to, too."""
    whole = asyncio.Event()

    def fail(error: BaseException | PayloadId) -> None:
        raise SystemExit(f"the taking process failed: {error}")

    node = PeerNode(
        member.peer_id,
        ChunkStore(folder / "store"),
        member.network(),
        link,
        on_whole=lambda payload: whole.set(),
        on_gone=fail,
        on_error=fail,
        listen=("127.0.0.1", 0) if relays else None,
        relays=relays,
    )
    port = await node.start()
    origin = wire.Routes(payload=encode_payload(manifest.payload), sources=[wire.Source()], stripes=[0])
    node.obey(wire.Order(routes=origin))
    node.fetch(manifest)
    if relays:
        command = [sys.executable, __file__, "--below", f"127.0.0.1:{port}", member.peer_id, str(folder)]
        assert await (await asyncio.create_subprocess_exec(*command)).wait() == 0
    await whole.wait()
    return node


async def take(part: str, ticket: str, folder: Path) -> float:
    """The taking process; its CPU seconds."""
    member = await join(ticket, folder / "state")
    link, before = member.link(), cpu_seconds()
    manifest = Manifest.from_bytes((folder / "manifest").read_bytes())
    if part == "transport":
        await read_off(link, manifest)
        return cpu_seconds() - before
    node = await fetch(member, link, manifest, folder, part == "relay")
    if part == "apply":
        store = ChunkStore(folder / "store")
        await asyncio.to_thread(Content(folder / "content").apply, manifest, store.get)
    spent = cpu_seconds() - before
    await node.close()
    await link.close()
    return spent


async def below(address: str, relay: str, folder: Path) -> None:
    """The third process: takes all of the relay."""
    member = await join((folder / "ticket").read_text(), folder / "below")
    link = member.network().to_peer(relay, address)
    await read_off(link, Manifest.from_bytes((folder / "manifest").read_bytes()))
    await link.close()


async def give(num_bytes: int, rounds: int, chunk_bytes: int | None) -> dict[str, dict[str, float]]:
    """The giving process: chunks as a payload of this size has them."""
    weights = TensorBytes("BF16", (num_bytes // 2,), os.urandom(num_bytes))
    manifest, made = encode(SnapshotRef(RUN_POLICY, 1, 0), {"w": weights}, {}, chunk_bytes)

    async def serve(peer: Peer, request: wire.ChunkRequest) -> AsyncIterator[bytes]:
        yield chunks.ALIVE
        for name in requested(request):
            yield chunks.pack(name, made[name])

    seconds: dict[str, list[float]] = {part: [] for part in (*PARTS, "give")}
    for part in [part for _ in range(rounds) for part in PARTS]:
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            (folder / "manifest").write_bytes(manifest.text)
            identity = RunIdentity.create_or_load(folder / "identity")
            server = GrpcServer("127.0.0.1", 0, identity, {"FetchChunks": serve})
            ticket = identity.make_ticket("worker", f"127.0.0.1:{await server.start()}", 10, 1.0)
            (folder / "ticket").write_text(ticket)
            before, command = cpu_seconds(), [sys.executable, __file__, "--take", part, ticket, name]
            taking = await asyncio.create_subprocess_exec(*command, stdout=subprocess.PIPE)
            said, _ = await taking.communicate()
            seconds[part].append(float(said))
            seconds["give"].append(cpu_seconds() - before)
            await server.stop()
    scale = (1 << 30) / num_bytes
    return {
        part: {"median": scale * statistics.median(all_), "min": scale * min(all_), "max": scale * max(all_)}
        for part, all_ in seconds.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mb", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--chunk-kb", nargs="+", type=int, default=[64, 256, 1024])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--take", nargs=3, help=argparse.SUPPRESS)
    parser.add_argument("--below", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.take:
        part, ticket, folder = options.take
        print(asyncio.run(take(part, ticket, Path(folder))))
        return
    if options.below:
        address, relay, folder = options.below
        asyncio.run(below(address, relay, Path(folder)))
        return
    found = {}
    for kb in options.chunk_kb:
        figures = found[f"{kb} KiB"] = asyncio.run(give(options.mb << 20, options.rounds, kb << 10))
        for part, values in figures.items():
            print(f"{kb:5} KiB {part:10}", json.dumps({name: round(value, 2) for name, value in values.items()}))
    print(save("receiving", {"cpu_seconds_per_gib": found}, options.out))


if __name__ == "__main__":
    main()
