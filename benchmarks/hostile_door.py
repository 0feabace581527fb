"""Attacks on the door of a real head over loopback: connections, handshakes, bodies, calls, tickets. One line for each.

    python benchmarks/hostile_door.py [ATTACK ...] [--out FILE]

The head is `echo2 head`, with 1,024 descriptors at most, as a process of its own; attacker and honest member are this
one. Linux only: memory of the head is read below /proc.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import resource
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
from recording import save

from echo2.errors import LinkError, PeerError
from echo2.transport import limits
from echo2.transport import wire_pb2 as wire
from echo2.transport.grpc_link import GrpcLink
from echo2.transport.grpc_server import SERVICE
from echo2.transport.identity import SERVER_NAME, PeerIdentity
from echo2.transport.tickets import Credentials, Ticket

CONFIG = """
[model]
path = "{model}"
[tasks]
source = "digit_sorting"
params = {{split = "train"}}
[reward]
functions = ["exact_match"]
[workers]
count = 0
"""
DESCRIPTORS = 1024
BODY_BYTES = 60 << 20
SECONDS = 30.0
HELLO = b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03"  # as a TLS handshake begins

Figures = dict[str, float]


class Head:
    """A real head, and what it costs."""

    def __init__(self, directory: Path) -> None:
        self.directory, self.out = directory, directory / "run"
        model, config = directory / "model", directory / "run.toml"
        model.mkdir()
        (model / "config.json").write_text("{}")
        config.write_text(CONFIG.format(model=model))
        self._log = open(directory / "log", "wb")  # noqa: SIM115 (closed with the head)
        self.process = subprocess.Popen(
            [sys.executable, "-m", "echo2", "head", str(config), "--out", str(self.out)],
            stderr=self._log,
            preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (256, DESCRIPTORS)),
        )
        while not (self.out / "status.json").exists():
            self.check()
            time.sleep(0.1)
        self.ticket = Ticket.parse(f"@{self.out / 'ticket'}")
        self.port = int(self.ticket.address.rpartition(":")[2])

    def check(self) -> None:
        if self.process.poll() is not None:
            raise SystemExit(f"the head has ended: {(self.directory / 'log').read_text()[-2000:]}")

    def command(self, *words: str) -> str:
        made = [sys.executable, "-m", "echo2", words[0], str(self.out), *words[1:]]
        return subprocess.run(made, check=True, capture_output=True, text=True).stdout.strip()

    def invite(self) -> Ticket:
        """For a stranger."""
        return Ticket.parse(self.command("invite"))

    def mebibytes(self) -> float:
        [line] = [
            line
            for line in Path(f"/proc/{self.process.pid}/status").read_text().splitlines()
            if line.startswith("VmRSS:")
        ]
        return int(line.split()[1]) / 1024

    def descriptors(self) -> int:
        return len(os.listdir(f"/proc/{self.process.pid}/fd"))

    def log_bytes(self) -> int:
        return (self.directory / "log").stat().st_size

    def close(self) -> None:
        self.check()
        self.process.terminate()
        self.process.wait(SECONDS)
        self._log.close()


class Watch:
    """The most memory of a head while something is going on, above what it had before."""

    def __init__(self, head: Head) -> None:
        self._head, self._before, self.grown = head, head.mebibytes(), 0.0

    async def __aenter__(self) -> Watch:
        self._task = asyncio.ensure_future(self._watch())
        return self

    async def _watch(self) -> None:
        while True:
            self.grown = max(self.grown, self._head.mebibytes() - self._before)
            await asyncio.sleep(0.02)

    async def __aexit__(self, *_: object) -> None:
        self._task.cancel()


# ---- who is there ----------------------------------------------------------------------------------------------------


async def enrol(ticket: Ticket, state: Path) -> tuple[str, Credentials]:
    peer, link = PeerIdentity(state), GrpcLink(ticket.address, ticket.credentials)
    request = wire.EnrolRequest(protocol=limits.PROTOCOL_VERSION, csr_der=peer.request())
    try:
        reply = await link.call("Enrol", request, SECONDS)
    finally:
        await link.close()
    return peer.keep(ticket.credentials.ca_pem, reply.certificate_der)


@asynccontextmanager
async def honest_member(head: Head) -> AsyncIterator[list[float]]:
    """A machine of the owner that asks twenty times a second; the milliseconds it waited."""
    _, credentials = await enrol(head.ticket, head.directory / "honest")
    link, waited = GrpcLink(head.ticket.address, credentials), list[float]()

    async def ask() -> None:
        while True:
            began = time.perf_counter()
            try:
                await link.call("Report", wire.WorkerReport(), SECONDS)
            except PeerError as error:  # it answers that nobody attends under this name
                if error.reason != "unknown_worker":
                    raise
            waited.append((time.perf_counter() - began) * 1e3)
            await asyncio.sleep(0.05)

    asking = asyncio.ensure_future(ask())
    try:
        yield waited
    finally:
        asking.cancel()
        await asyncio.wait([asking])
        await link.close()
    if not asking.cancelled() and asking.exception() is not None:
        raise SystemExit(f"the honest member was not served: {asking.exception()}")


@contextmanager
def dialled(head: Head, count: int) -> Iterator[list[socket.socket]]:
    with ExitStack() as kept:
        made = [kept.enter_context(socket.socket()) for _ in range(count)]
        for one in made:
            one.setblocking(False)
            one.connect_ex(("127.0.0.1", head.port))
        yield made


def num_open(connections: list[socket.socket]) -> int:
    """How many the other end has not closed."""

    def is_open(one: socket.socket) -> bool:
        try:
            return one.recv(1 << 16) != b""
        except BlockingIOError:
            return True
        except OSError:
            return False

    return sum(map(is_open, connections))


@asynccontextmanager
async def bare(head: Head, shown: Credentials) -> AsyncIterator[grpc.aio.Channel]:
    tls = grpc.ssl_channel_credentials(shown.ca_pem, shown.key_pem, shown.certificate_pem)
    options = [("grpc.ssl_target_name_override", SERVER_NAME), ("grpc.max_send_message_length", -1)]
    async with grpc.aio.secure_channel(f"127.0.0.1:{head.port}", tls, options) as channel:
        yield channel


# ---- attacks ---------------------------------------------------------------------------------------------------------


async def idle_connections(head: Head) -> Figures:
    """1,100 connections that say nothing."""
    with dialled(head, 1100) as made:
        await asyncio.sleep(1.0)
        after_one, descriptors = num_open(made), head.descriptors()
        await asyncio.sleep(5.0)
        return {"open after 1 s": after_one, "descriptors of the head": descriptors, "open after 6 s": num_open(made)}


async def half_handshakes(head: Head) -> Figures:
    """200 begin TLS: half of them go on by a byte a second, the others say no more; 50 more speak HTTP."""
    before, loop = head.log_bytes(), asyncio.get_running_loop()
    with dialled(head, 250) as made:
        for one in made[:50]:
            await asyncio.gather(loop.sock_sendall(one, b"GET / HTTP/1.1\r\n\r\n"), return_exceptions=True)
        for one in made[50:]:
            await asyncio.gather(loop.sock_sendall(one, HELLO), return_exceptions=True)
        after_one = num_open(made)
        for _ in range(12):
            await asyncio.sleep(1.0)
            slow = [loop.sock_sendall(one, b"\0") for one in made[150:]]
            await asyncio.gather(*slow, return_exceptions=True)
        return {
            "open at once": after_one,
            "open after 12 s": num_open(made),
            "bytes of log": head.log_bytes() - before,
        }


async def send_bodies(head: Head, credentials: Credentials, method: str) -> Figures:
    async with Watch(head) as watch, bare(head, credentials) as channel:
        body = bytes(BODY_BYTES)
        calls = [channel.unary_unary(f"/{SERVICE}/{method}")(body, timeout=SECONDS) for _ in range(8)]
        ends = await asyncio.gather(*calls, return_exceptions=True)
        refused = sum(isinstance(end, grpc.aio.AioRpcError) for end in ends)
    return {"refused of 8": refused, "MiB more": watch.grown}


async def bodies_with_a_ticket(head: Head) -> Figures:
    """8 enrolments with bodies of 60 MiB."""
    return await send_bodies(head, head.invite().credentials, "Enrol")


async def bodies_of_the_revoked(head: Head) -> Figures:
    """8 bodies of 60 MiB from a revoked worker."""
    peer_id, credentials = await enrol(head.invite(), head.directory / "revoked")
    head.command("revoke", peer_id)
    return await send_bodies(head, credentials, "Deliver")


async def bodies_in_a_wrong_role(head: Head) -> Figures:
    """8 bodies of 60 MiB from a worker, for the learner's method."""
    _, credentials = await enrol(head.invite(), head.directory / "role")
    return await send_bodies(head, credentials, "Publish")


async def bodies_of_a_member(head: Head) -> Figures:
    """32 results of 60 MiB at once from a worker that may send results."""
    _, credentials = await enrol(head.invite(), head.directory / "large")
    async with Watch(head) as watch, bare(head, credentials) as channel:
        body = bytes(BODY_BYTES)
        calls = [channel.unary_unary(f"/{SERVICE}/Deliver")(body, timeout=SECONDS) for _ in range(32)]
        await asyncio.gather(*calls, return_exceptions=True)
    return {"MiB more": watch.grown}


async def flood_of_calls(head: Head) -> Figures:
    """A worker reports as fast as it can, 64 at a time, for 20 s."""
    _, credentials = await enrol(head.invite(), head.directory / "flood")
    link, said = GrpcLink(head.ticket.address, credentials), dict[str, int]()
    end_at = time.monotonic() + 20.0

    async def ask() -> None:
        while time.monotonic() < end_at:
            try:
                await link.call("Report", wire.WorkerReport(), SECONDS)
            except PeerError:
                said["answered"] = said.get("answered", 0) + 1
            except LinkError as error:
                word = "told busy" if "busy" in str(error) else "cut"
                said[word] = said.get(word, 0) + 1

    await asyncio.gather(*(ask() for _ in range(64)))
    await link.close()
    return {name: float(count) for name, count in said.items()}


async def flood_of_enrolments(head: Head) -> Figures:
    """New keys with one ticket, as fast as they are taken, for 20 s."""
    ticket, made, refused = head.invite(), 0, 0
    link, end_at = GrpcLink(ticket.address, ticket.credentials), time.monotonic() + 20.0
    while time.monotonic() < end_at:
        csr = PeerIdentity(head.directory / "keys" / str(made + refused)).request()
        try:
            await link.call("Enrol", wire.EnrolRequest(protocol=limits.PROTOCOL_VERSION, csr_der=csr), SECONDS)
            made += 1
        except (PeerError, LinkError):
            refused += 1
    await link.close()
    return {"identities": made, "refused": refused}


async def back_with_another_key(head: Head) -> Figures:
    """A revoked worker joins again with the same ticket and a new key."""
    ticket = head.invite()
    peer_id, _ = await enrol(ticket, head.directory / "back")
    head.command("revoke", peer_id)
    try:
        await enrol(ticket, head.directory / "back again")
    except PeerError as error:
        return {"back": float(error.reason != "ticket")}
    return {"back": 1}


ATTACKS: dict[str, Callable[[Head], Awaitable[Figures]]] = {
    attack.__name__: attack
    for attack in (
        idle_connections,
        half_handshakes,
        bodies_with_a_ticket,
        bodies_of_the_revoked,
        bodies_in_a_wrong_role,
        bodies_of_a_member,
        flood_of_calls,
        flood_of_enrolments,
        back_with_another_key,
    )
}


async def attempt(attack: Callable[[Head], Awaitable[Figures]]) -> Figures:
    """Against a new head, while an honest member asks."""
    with tempfile.TemporaryDirectory() as directory:
        head = Head(Path(directory))
        try:
            async with honest_member(head) as waited:
                await asyncio.sleep(0.5)
                waited.clear()
                figures = await attack(head)
        finally:
            head.close()
        figures["honest member: calls"] = len(waited)
        figures["median ms"], figures["longest ms"] = statistics.median(waited or [-1]), max(waited, default=-1)
        return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("attacks", nargs="*", metavar="ATTACK", help=f"one of {', '.join(ATTACKS)} (default: all)")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    found: dict[str, Any] = {}
    for name in arguments.attacks or ATTACKS:
        found[name] = asyncio.run(attempt(ATTACKS[name]))
        print(f"{name}: {', '.join(f'{value:.4g} {what}' for what, value in found[name].items())}", flush=True)
    print(f"figures are in {save('hostile_door', json.loads(json.dumps(found)), arguments.out)}")


if __name__ == "__main__":
    main()
