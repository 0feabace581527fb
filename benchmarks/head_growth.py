"""What grows in a head while the same things happen to it again and again, and whether it is Python's or malloc's.

    python benchmarks/head_growth.py [steps deaths connections ...] [--rounds 4] [--out FILE]

The head is `echo2 head`, a process of its own that writes down what it has when it is told to; all others are on
loopback. steps: small steps of workers that sample nothing and a learner that trains nothing. deaths: machines come
over connections of their own, hear the run's settings and are gone. connections: 300 at once; half speak no TLS, half
begin a handshake and say no more. The head's limits of handshakes a second are lifted. After each round: its resident
memory; what malloc has given out and what it holds free; threads; blocks of Python's own allocator; and the objects by
type that are more than before the round. The first round warms up.
"""

from __future__ import annotations

import argparse
import asyncio
import ctypes
import gc
import json
import os
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from pathlib import Path
from typing import Any

import head_load
import recording
from head_load import RealHead

from echo2.errors import LinkError, PeerError
from echo2.transport import limits
from echo2.transport import wire_pb2 as wire
from echo2.transport.grpc_link import GrpcLink
from echo2.transport.identity import PeerIdentity
from echo2.transport.limits import PROTOCOL_VERSION

WORKERS = 4
HELLO = b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03"  # as a TLS handshake begins
#: Of each kind in a round.
TIMES = {"steps": 1000, "deaths": 300, "connections": 6000}
TOGETHER, FLOOD, HELD_SECONDS = 16, 300, 1.0
#: For the head to notice that the last ones are gone.
SETTLE_SECONDS = 8.0
ROUND_SECONDS = 600.0
MIB = 1 << 20
TELL, TOLD = signal.SIGUSR1, "told.json"


# ---- in the head's process -------------------------------------------------------------------------------------------


class MallocInfo(ctypes.Structure):
    """`struct mallinfo2` of glibc. [4] and [7]: bytes given out, by mmap and otherwise; [8]: bytes held free."""

    _fields_ = (("counts", ctypes.c_size_t * 10),)


def be_head(words: list[str]) -> int:
    """`echo2 WORDS`, which also answers `TELL`."""
    from echo2.cli import main

    limits.HANDSHAKES_PER_SECOND_PER_ADDRESS = limits.HANDSHAKES_PER_SECOND = 1e6
    told, info = Path(words[-1]) / TOLD, ctypes.CDLL(None).mallinfo2
    info.restype = MallocInfo

    def tell(*_: object) -> None:
        garbage = gc.collect()
        of_type, malloc = Counter(type(one).__qualname__ for one in gc.get_objects()), info().counts
        found = {
            "rss_mib": head_load.mebibytes(os.getpid()),
            "malloc_given_out_mib": (malloc[4] + malloc[7]) / MIB,
            "malloc_free_mib": malloc[8] / MIB,
            "threads": threading.active_count(),
            "all_threads": len(os.listdir("/proc/self/task")),
            "blocks": sys.getallocatedblocks(),
            "garbage": garbage,
            "of_type": of_type,
        }
        temporary = told.with_suffix(".tmp")
        temporary.write_text(json.dumps(found))
        temporary.replace(told)

    signal.signal(TELL, tell)
    return main(words)


# ---- what happens to it ----------------------------------------------------------------------------------------------


async def train(head: RealHead, options: argparse.Namespace, times: int) -> None:
    """So many steps more; the workers are there already."""
    until = len(options.marks) + times
    async with asyncio.timeout(ROUND_SECONDS):  # the learner may have died
        while len(options.marks) < until:  # noqa: ASYNC110
            await asyncio.sleep(0.1)


async def die(head: RealHead, options: argparse.Namespace, times: int) -> None:
    """Machines that come and are gone."""

    async def one(index: int) -> None:
        known = PeerIdentity(head.directory / f"w{WORKERS + index % TOGETHER}").load()
        assert known is not None
        link = GrpcLink(head.address, known[1])
        try:
            hello = wire.WorkerHello(protocol=PROTOCOL_VERSION, slots=1)
            async with aclosing(link.frames("Attend", hello)) as orders:
                await anext(orders)
        except (LinkError, PeerError) as error:
            print(f"machine {index}: {error}", file=sys.stderr)
        await link.close()

    for first in range(0, times, TOGETHER):
        await asyncio.gather(*(one(index) for index in range(first, min(times, first + TOGETHER))))


async def knock(head: RealHead, options: argparse.Namespace, times: int) -> None:
    """Connections that come to nothing."""
    host, _, port = head.address.rpartition(":")

    async def one(index: int) -> None:
        try:
            _, writer = await asyncio.open_connection(host, int(port))
            writer.write(HELLO if index % 2 else b"GET / HTTP/1.1\r\n\r\n")
            await writer.drain()
            await asyncio.sleep(HELD_SECONDS)
            writer.close()
            await writer.wait_closed()
        except OSError:
            pass  # the head hung up first

    for first in range(0, times, FLOOD):
        await asyncio.gather(*(one(index) for index in range(first, first + FLOOD)))


HAPPENS: dict[str, Callable[[RealHead, argparse.Namespace, int], Awaitable[None]]] = {
    "steps": train,
    "deaths": die,
    "connections": knock,
}


# ---- measuring -------------------------------------------------------------------------------------------------------


def ask(head: RealHead) -> dict[str, Any]:
    told = head.run / TOLD
    told.unlink(missing_ok=True)
    head.process.send_signal(TELL)
    while not told.exists():
        if head.process.poll() is not None:
            raise SystemExit((head.directory / "head.log").read_text()[-2000:])
        time.sleep(0.05)
    found: dict[str, Any] = json.loads(told.read_text())
    return found


async def rounds(head: RealHead, kind: str, options: argparse.Namespace) -> list[dict[str, Any]]:
    before, found = ask(head), []
    for number in range(options.rounds + 1):
        began = time.perf_counter()
        await HAPPENS[kind](head, options, TIMES[kind])
        await asyncio.sleep(SETTLE_SECONDS)
        after = ask(head)
        grown = Counter(after.pop("of_type"))
        last, before = before.get("of_type", Counter()), {**after, "of_type": grown}
        more = Counter({name: count - last.get(name, 0) for name, count in grown.items()})
        row = {name: round(value, 2) for name, value in after.items()}
        found.append({**row, "more": dict(more.most_common(6)), "seconds": round(time.perf_counter() - began, 1)})
        print(kind, number, json.dumps(found[-1]), flush=True)
    return found


async def measure(head: RealHead, options: argparse.Namespace) -> dict[str, Any]:
    found = {kind: await rounds(head, kind, options) for kind in options.kinds if kind != "steps"}
    if "steps" in options.kinds:
        async with head_load.at_work(head, WORKERS, options, options.marks):
            found["steps"] = await rounds(head, "steps", options)
    return found


def main() -> None:
    if sys.argv[1:2] == ["head"]:
        sys.exit(be_head(sys.argv[1:]))
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("kinds", nargs="*", default=list(HAPPENS), metavar="KIND")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    sizes = {"samples": 2, "tokens": 6, "batch": 4, "step": 4, "sampling_seconds": 0.0, "join_seconds": 60.0}
    vars(options).update(sizes, profile="", marks=list[tuple[int, float]]())
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        head = RealHead(Path(folder), WORKERS + TOGETHER, options, (__file__,))
        try:
            found = asyncio.run(measure(head, options))
        finally:
            head.close()
    print(recording.save("head_growth", {"times": TIMES, **found}, options.out))


if __name__ == "__main__":
    main()
