"""`echo2 view` as a process, and pages that are open on it, without a browser."""

from __future__ import annotations

import asyncio
import gzip
import json
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from echo2.views.app import FILES

HOST = "127.0.0.1"
#: Which files of rollouts there are; with `name`, what is in one.
NAMES = "/rollouts?run=0"
#: For anything that is waited for; longer means that it will not come.
PATIENCE_SECONDS = 120.0


@dataclass(frozen=True, slots=True)
class Served:
    """A process of `echo2 view` that shows one run."""

    address: str
    pid: int

    async def ask(self, path: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Where the answer to a browser's request is read, and the connection to close: HTTP/1.0, so not in chunks."""
        parts = urlsplit(self.address)
        reader, writer = await asyncio.open_connection(HOST, parts.port, limit=1 << 24)
        token = parse_qs(parts.query)["token"][0]
        lines = f"GET {path} HTTP/1.0", f"Host: {parts.netloc}", f"Authorization: Bearer {token}"
        writer.write("\r\n".join([*lines, "Accept-Encoding: gzip, deflate, br", "", ""]).encode())
        return reader, writer

    async def get(self, path: str) -> bytes:
        """The whole answer."""
        reader, writer = await self.ask(path)
        try:
            return await reader.read()
        finally:
            writer.close()


@contextmanager
def serve(directory: Path) -> Iterator[Served]:
    """`echo2 view` on this run, as long as it is needed."""
    command = [sys.executable, "-m", "echo2", "view", str(directory)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield Served(process.stdout.readline().split()[1], process.pid)
        finally:
            process.terminate()


class Listener:
    """What an open page is told."""

    def __init__(self, reader: asyncio.StreamReader) -> None:
        self._reader = reader
        self.num_bytes = 0

    async def until_step(self, step: int) -> float:
        """When the charts had this step, or a later one."""
        async with asyncio.timeout(PATIENCE_SECONDS):
            while True:
                event = await self._reader.readuntil(b"\n\n")
                now = time.perf_counter()
                self.num_bytes += len(event)
                kind, _, data = event.partition(b"\ndata: ")
                if kind == b"event: steps" and (json.loads(data)["steps"] or [-1])[-1] >= step:
                    return now

    async def forever(self) -> None:
        """Take what comes, as a page does."""
        while data := await self._reader.read(1 << 20):
            self.num_bytes += len(data)


@asynccontextmanager
async def listen(served: Served) -> AsyncIterator[Listener]:
    """An open page that has been told how all stands."""
    reader, writer = await served.ask("/events")
    try:
        await reader.readuntil(b"\r\n\r\n")
        listener = Listener(reader)
        await listener.until_step(-1)
        yield listener
    finally:
        writer.close()


async def weigh(served: Served, newest: str) -> dict[str, Any]:
    """Bytes of the page's own files, and of what it is told of the run at first."""
    own = [await weigh_one(served, path) for path in ("/", *(f"/{name}" for name in FILES))]
    names, groups = await weigh_one(served, NAMES), await weigh_one(served, f"{NAMES}&name={newest}")
    async with listen(served) as listener:
        events = listener.num_bytes
    kinds = ("bytes", "sent", "gzipped")
    return {
        "files": {kind: sum(one[kind] for one in own) for kind in kinds},
        "names_of_rollouts": names,
        "newest_rollouts": groups,
        "first_events": events,
    }


async def weigh_one(served: Served, path: str) -> dict[str, int]:
    """Bytes of an answer: as they are, as they are sent, as gzip would send them."""
    answer = await served.get(path)
    head, _, body = answer.partition(b"\r\n\r\n")
    if not head.startswith(b"HTTP/1.1 200 "):
        raise RuntimeError(f"{path}: {head[:200]!r}")
    content = gzip.decompress(body) if b"content-encoding: gzip" in head.lower() else body
    return {"bytes": len(content), "sent": len(answer), "gzipped": len(gzip.compress(content, 6))}
