"""A head behind its door, and those who come to it: honest members, bare channels, and connections that say nothing."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import grpc
import grpc.aio

from echo2.transport import wire_pb2 as wire
from echo2.transport.grpc_link import GrpcLink
from echo2.transport.grpc_server import GrpcServer
from echo2.transport.identity import SERVER_NAME, PeerIdentity, RunIdentity
from echo2.transport.tickets import Credentials, Ticket
from transport_cases import SECONDS, Desk

LOOPBACK = "127.0.0.1"


def enrolled(identity: RunIdentity, state: Path, is_own: bool = False) -> tuple[str, Credentials]:
    ticket = Ticket.parse(identity.make_ticket("worker", "nowhere:1", 9, 1.0, is_own))
    peer = PeerIdentity(state)
    return peer.keep(ticket.credentials.ca_pem, identity.enrol(ticket.ticket_id, "worker", peer.request())[1])


@asynccontextmanager
async def serving(identity: RunIdentity, desk: Desk) -> AsyncIterator[int]:
    failures: list[BaseException] = []
    server = GrpcServer("0.0.0.0", 0, identity, desk.handlers(), failures.append)
    try:
        yield await server.start()
    finally:
        await server.stop()
        assert failures == []


@asynccontextmanager
async def channel(port: int, shown: Credentials, name: str = SERVER_NAME) -> AsyncIterator[grpc.aio.Channel]:
    """Without our client's own checks."""
    tls = grpc.ssl_channel_credentials(shown.ca_pem, shown.key_pem, shown.certificate_pem)
    options = [("grpc.ssl_target_name_override", name), ("grpc.max_send_message_length", -1)]
    async with grpc.aio.secure_channel(f"{LOOPBACK}:{port}", tls, options) as opened:
        yield opened


@asynccontextmanager
async def linked(port: int, credentials: Credentials, host: str = LOOPBACK) -> AsyncIterator[GrpcLink]:
    link = GrpcLink(f"{host}:{port}", credentials)
    try:
        yield link
    finally:
        await link.close()


async def report(link: GrpcLink) -> None:
    await link.call("Report", wire.WorkerReport(), SECONDS)


@contextmanager
def dialled(port: int, count: int, source: str = LOOPBACK) -> Iterator[list[socket.socket]]:
    """So many connections that say nothing."""
    with ExitStack() as kept:
        made = [kept.enter_context(socket.socket()) for _ in range(count)]
        for one in made:
            one.bind((source, 0))
            one.setblocking(False)
            one.connect_ex((LOOPBACK, port))
        yield made


def is_closed(one: socket.socket) -> bool:
    try:
        return one.recv(1) == b""
    except BlockingIOError:
        return False
    except OSError:
        return True


async def until_closed(connections: list[socket.socket], count: int) -> None:
    """Wait until the other end has closed so many of them."""
    while sum(map(is_closed, connections)) < count:  # noqa: ASYNC110 (what happens at the other end has no event here)
        await asyncio.sleep(0.01)


HEAD = """
import asyncio, json, resource, sys
from pathlib import Path
if int(sys.argv[2]):
    resource.setrlimit(resource.RLIMIT_NOFILE, (int(sys.argv[2]),) * 2)
from echo2.transport import limits
from echo2.transport import wire_pb2 as wire
from echo2.transport.grpc_server import GrpcServer
from echo2.transport.identity import RunIdentity
limits.BYTES_BURST = 1 << 40  # bodies are not to wait for that

async def report(peer, request):
    open("/dev/null").close()  # there is room for files
    return wire.Empty()

async def main():
    failures, identity = [], RunIdentity.create_or_load(Path(sys.argv[1]))
    handlers = {"Report": report, "LearnerReport": report, "Deliver": report}
    server = GrpcServer("127.0.0.1", 0, identity, handlers, failures.append)
    print(await server.start(), flush=True)
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
    await server.stop()
    print(json.dumps([repr(failure) for failure in failures]), flush=True)

asyncio.run(main())
"""


@contextmanager
def head_process(directory: Path, num_descriptors: int = 0) -> Iterator[tuple[int, int]]:
    """A head in a process of its own: (port, pid)."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    arguments = [sys.executable, "-c", HEAD, str(directory), str(num_descriptors)]
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(arguments, env=environment, text=True, **pipes) as head:
        try:
            assert head.stdout is not None
            yield int(head.stdout.readline()), head.pid
            told, errors = head.communicate("", timeout=SECONDS)
        finally:
            head.kill()
    assert json.loads(told) == []
    assert len(errors) < 2000


def peak_bytes(pid: int) -> int:
    """The most memory that a process has had."""
    [line] = [line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("VmHWM:")]
    return int(line.split()[1]) << 10
