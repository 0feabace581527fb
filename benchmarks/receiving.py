"""CPU seconds that it takes a worker to receive a GiB of chunks, by part.

    python benchmarks/receiving.py [--mb 128] [--rounds 3] [--chunk-kb 64 256 1024]

A process gives chunks from memory over the real transport (mutual TLS, the door in front), a second one takes them and
does so much with each: nothing at all (`transport`), hashes it on a thread (`hash`), stores it as a worker does
(`store`), and in the end reads all of them back into a content, segment by segment (`apply`). The figures are user and
system seconds of the taking process, less what it had used before the first chunk; and of the giving one. All sides in
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
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from blake3 import blake3
from recording import save
from weights_cases import encode

from echo2.transport import chunks
from echo2.transport import wire_pb2 as wire
from echo2.transport.base import Peer
from echo2.transport.grpc_link import join
from echo2.transport.grpc_server import GrpcServer
from echo2.transport.identity import RunIdentity
from echo2.types import RUN_POLICY, SnapshotRef, TensorBytes
from echo2.weights.content import Content
from echo2.weights.manifest import Manifest
from echo2.weights.store import ChunkStore

PARTS = ("transport", "hash", "store", "apply")
DISK_THREADS = 2


def cpu_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


async def take(part: str, ticket: str, folder: Path) -> float:
    """The taking process; its CPU seconds."""
    link = (await join(ticket, folder / "state")).link()
    store, disk = ChunkStore(folder / "store"), ThreadPoolExecutor(DISK_THREADS)
    loop, under_way = asyncio.get_running_loop(), set[asyncio.Future[Any]]()
    manifest = Manifest.from_bytes((folder / "manifest").read_bytes())
    before = cpu_seconds()
    async for message in link.frames("FetchChunks", wire.ChunkRequest()):
        name, data = chunks.unpack(message)
        if part == "transport" or not name:
            continue
        work = (
            (lambda kept=data: blake3(kept).digest())
            if part == "hash"
            else (lambda kept=data, of=name: store.put(of, kept))
        )
        under_way.add(loop.run_in_executor(disk, work))
        if len(under_way) > 2 * DISK_THREADS:
            under_way = (await asyncio.wait(under_way, return_when=asyncio.FIRST_COMPLETED))[1]
    if under_way:
        await asyncio.wait(under_way)
    if part == "apply":
        await loop.run_in_executor(disk, Content(folder / "content").apply, manifest, store.get)
    await link.close()
    return cpu_seconds() - before


async def give(num_bytes: int, rounds: int, chunk_bytes: int | None) -> dict[str, dict[str, float]]:
    """The giving process: chunks as a payload of this size has them."""
    weights = TensorBytes("BF16", (num_bytes // 2,), os.urandom(num_bytes))
    manifest, made = encode(SnapshotRef(RUN_POLICY, 1, 0), {"w": weights}, {}, chunk_bytes)

    async def fetch(peer: Peer, request: wire.ChunkRequest) -> AsyncIterator[bytes]:
        for name, data in made.items():
            yield chunks.pack(name, data)

    seconds: dict[str, list[float]] = {part: [] for part in (*PARTS, "give")}
    for part in [part for _ in range(rounds) for part in PARTS]:
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            (folder / "manifest").write_bytes(manifest.text)
            identity = RunIdentity.create_or_load(folder / "identity")
            server = GrpcServer("127.0.0.1", 0, identity, {"FetchChunks": fetch})
            ticket = identity.make_ticket("worker", f"127.0.0.1:{await server.start()}", 10, 1.0)
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
    parser.add_argument("--take", nargs=3)
    options = parser.parse_args()
    if options.take:
        part, ticket, folder = options.take
        print(asyncio.run(take(part, ticket, Path(folder))))
        return
    found = {}
    for kb in options.chunk_kb:
        figures = found[f"{kb} KiB"] = asyncio.run(give(options.mb << 20, options.rounds, kb << 10))
        for part, values in figures.items():
            print(f"{kb:5} KiB {part:10}", json.dumps({name: round(value, 2) for name, value in values.items()}))
        whole = figures["apply"]["median"] / figures["transport"]["median"]
        print(f"{kb:5} KiB all of it to transport alone: {whole:.2f}", flush=True)
    print(save("receiving", {"cpu_seconds_per_gib": found}, options.out))


if __name__ == "__main__":
    main()
