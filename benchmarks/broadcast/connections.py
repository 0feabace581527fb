"""What the connections alone do to a broadcast: n relays on plain sockets, the kernel's TCP, emulated links.

    sudo python benchmarks/broadcast/connections.py --workers 4 --rounds 20
    sudo python benchmarks/broadcast/connections.py --workers 8 --rounds 20 --loss 1 --congestion cubic

Processes without TLS, gRPC, hashes or disks: a tenth of the processor's time that `broadcast.py` needs, so that a busy
machine can run it. The plan is that of a run with up to nine workers: the origin sends each chunk to one worker, which
sends it to all others. In one round each setup runs once, over the same links, after one worker alone.

    before       one connection from each to each, Nagle's algorithm, a nudge 20 ms after what nothing follows; the
                 origin at .9 of its uplink
    at once      the same without Nagle and nudges, at .97
    shared       as "at once", but four connections, of which the first that is free takes the next chunk
"""

from __future__ import annotations

import argparse
import asyncio
import json
import queue
import socket
import struct
import subprocess
import sys
import threading
import time
from collections import defaultdict, deque
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

CHUNK_BYTES = 64 << 10
PORT = 5000
HEAD = struct.Struct("iI")  # chunk (-1: a nudge), number of the broadcast
BODY = bytes(CHUNK_BYTES + 150)  # with what TLS and HTTP/2 add
NUDGE = HEAD.pack(-1, 0) + bytes(30)
NUDGE_SECONDS = 0.02
UNSENT_BYTES = 64 << 10
TCP_NOTSENT_LOWAT = 25
PAYLOAD_SHARE = 0.945  # of a link's rate, what is payload
WAIT_SECONDS = 120.0


@dataclass(frozen=True, slots=True)
class Way:
    """How two nodes are connected. `unsent_bytes`: what the kernel holds unsent of a connection; 0: any number."""

    connections: int = 1
    has_nagle: bool = False
    has_nudges: bool = False
    unsent_bytes: int = 0
    pace: float = 0.97


WAYS = {
    "before": Way(has_nagle=True, has_nudges=True, pace=0.9),
    "at once": Way(),
    "shared": Way(connections=4, unsent_bytes=UNSENT_BYTES),
}


class Node:
    """The origin (0) or a worker."""

    def __init__(self, described: dict[str, Any]) -> None:
        self.me, self.addresses = int(described["me"]), list[str](described["addresses"])
        self.way, self.rate = Way(**described["way"]), float(described["rate"])
        self.num_workers = len(self.addresses) - 1
        self.num_chunks = described["num_bytes"] // CHUNK_BYTES // self.num_workers * self.num_workers
        self.nth, self.num_received = 0, 0
        self.owed: dict[int, deque[int]] = defaultdict(deque)
        self.news: dict[int, list[asyncio.Event]] = defaultdict(list)
        self.chores: list[asyncio.Task[None]] = []

    async def run(self) -> None:
        listener = socket.create_server(("", PORT), backlog=100)
        listener.setblocking(False)
        self.chores.append(asyncio.create_task(self._accept(listener)))
        say("up")
        await asyncio.to_thread(sys.stdin.readline)
        for other in range(self.num_workers + 1) if self.me else ():
            for _ in range(self.way.connections if other != self.me else 0):
                await self._connect(other)
        say("joined")
        while await asyncio.to_thread(sys.stdin.readline):
            self.nth += 1
            if not self.me:
                self.chores.append(asyncio.create_task(self._publish()))

    async def _connect(self, other: int) -> None:
        loop, link = asyncio.get_running_loop(), socket.socket()
        link.setblocking(False)
        await loop.sock_connect(link, (self.addresses[other], PORT))
        await loop.sock_sendall(link, HEAD.pack(self.me, 0))
        self.chores.append(asyncio.create_task(self._receive(link, other)))

    async def _accept(self, listener: socket.socket) -> None:
        while True:
            link, _ = await asyncio.get_running_loop().sock_accept(listener)
            link.setblocking(False)
            link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, int(not self.way.has_nagle))
            if self.way.unsent_bytes:
                link.setsockopt(socket.IPPROTO_TCP, TCP_NOTSENT_LOWAT, self.way.unsent_bytes)
            self.chores.append(asyncio.create_task(self._send(link)))

    async def _send(self, link: socket.socket) -> None:
        """Send what the other end is owed, a chunk whenever this connection has room for one."""
        loop, news, is_nudged = asyncio.get_running_loop(), asyncio.Event(), True
        other, _ = HEAD.unpack(await loop.sock_recv(link, HEAD.size))
        owed = self.owed[other]
        self.news[other].append(news)
        while True:
            if owed:
                is_nudged = not self.way.has_nudges
                await loop.sock_sendall(link, HEAD.pack(owed.popleft(), self.nth) + BODY)
                continue
            news.clear()
            try:
                await asyncio.wait_for(news.wait(), None if is_nudged else NUDGE_SECONDS)
            except TimeoutError:
                is_nudged = True
                await loop.sock_sendall(link, NUDGE)

    def _owe(self, other: int, chunk: int) -> None:
        self.owed[other].append(chunk)
        for news in self.news[other]:
            news.set()

    async def _publish(self) -> None:
        begun_at = time.monotonic()
        for chunk in range(self.num_chunks):
            self._owe(1 + chunk % self.num_workers, chunk)
            if self.num_workers > 1:
                due_at = begun_at + (chunk + 1) * CHUNK_BYTES / (self.way.pace * self.rate)
                await asyncio.sleep(max(0.0, due_at - time.monotonic()))

    async def _receive(self, link: socket.socket, other: int) -> None:
        loop, held, room = asyncio.get_running_loop(), bytearray(), bytearray(1 << 18)
        while num := await loop.sock_recv_into(link, room):
            held += memoryview(room)[:num]
            while len(held) >= HEAD.size:
                chunk, nth = HEAD.unpack_from(held)
                size = len(NUDGE) if chunk < 0 else HEAD.size + len(BODY)
                if len(held) < size:
                    break
                del held[:size]
                if chunk >= 0:
                    self._came(other, chunk, nth)

    def _came(self, other: int, chunk: int, nth: int) -> None:
        self.num_received += 1
        if other == 0:
            self.nth = nth
            for each in range(1, self.num_workers + 1):
                if each != self.me:
                    self._owe(each, chunk)
        if self.num_received % self.num_chunks == 0:
            say("whole")


def say(word: str) -> None:
    print(json.dumps([word, time.monotonic()]), flush=True)


def seconds_of(num_workers: int, way: Way, options: argparse.Namespace) -> list[float]:
    """The seconds until the last worker has each broadcast."""
    from wan.net import AccessLink, Wan

    names, said = [f"n{at}" for at in range(num_workers + 1)], queue.Queue[tuple[str, float]]()
    link = AccessLink(options.mbit, options.mbit, loss_percent=options.loss / 2)
    with Wan(dict.fromkeys(names, link), "" if options.congestion == "bbr" else options.congestion) as wan:
        told = []
        for at, name in enumerate(names):
            described = {
                "me": at,
                "addresses": [wan.addresses[each] for each in names],
                "way": asdict(way),
                "rate": PAYLOAD_SHARE * options.mbit * 125_000,
                "num_bytes": int(options.size_mib * (1 << 20)),
            }
            command = [sys.executable, "-S", __file__, "--node", json.dumps(described)]
            node = wan.popen(name, command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            threading.Thread(target=_hear, args=(node, said), daemon=True).start()
            assert node.stdin is not None
            told.append(node.stdin)

        def heard(word: str, count: int) -> float:
            last = 0.0
            while count:
                found, last = said.get(timeout=WAIT_SECONDS)
                count -= found == word
            return last

        def tell() -> None:
            for stdin in told:
                stdin.write("\n")
                stdin.flush()

        heard("up", len(names))
        tell()
        heard("joined", len(names))
        time.sleep(1.0)
        found = []
        for _ in range(options.broadcasts):
            begun_at = time.monotonic()
            tell()
            found.append(heard("whole", num_workers) - begun_at)
            time.sleep(0.7)
        return found


def _hear(node: Any, said: queue.Queue[tuple[str, float]]) -> None:
    for line in node.stdout:
        said.put(tuple(json.loads(line)))


def main() -> None:
    if sys.argv[1:2] == ["--node"]:  # without the packages of an installation
        asyncio.run(Node(json.loads(sys.argv[2])).run())
        return
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    from broadcast_figures import spread
    from recording import save

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--mbit", type=float, default=40.0)
    parser.add_argument("--size-mib", type=float, default=24.0)
    parser.add_argument("--broadcasts", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--loss", type=float, default=0.0, help="percent of the packets between any two")
    parser.add_argument("--congestion", default="bbr")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--out", type=Path, help="result file (default: below benchmarks/results)")
    options = parser.parse_args()
    ratios: dict[str, list[list[float]]] = {name: [] for name in options.ways}
    for number in range(options.rounds):
        with suppress(queue.Empty):  # a process did not get its turn on a full machine: this round does not count
            alone = seconds_of(1, Way(), options)
            order = options.ways if number % 2 == 0 else options.ways[::-1]
            found = {name: seconds_of(options.workers, WAYS[name], options) for name in order}
            for name, seconds in found.items():
                ratios[name].append([mine / its for mine, its in zip(seconds, alone, strict=True)])
                print(number, name, *(f"{seconds:.2f}" for seconds in seconds), file=sys.stderr, flush=True)
    summary = {
        name: {"first": spread(each[0] for each in rows), "later": spread(one for each in rows for one in each[1:])}
        for name, rows in ratios.items()
    }
    print(json.dumps(summary, indent=1))
    asked = {key: value for key, value in vars(options).items() if key != "out"}
    figures = {"asked": asked, "over_alone": summary, "ratios": ratios}
    save("broadcast_connections", figures, options.out)


if __name__ == "__main__":
    main()
