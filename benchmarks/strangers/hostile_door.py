"""Attacks on the door of a real head over loopback: connections, handshakes, bodies, calls, tickets. One line for each.

    make bench-hostile_door ARGS='[ATTACK ...] [--out FILE]'

The head is `echo2 head`, with 1,024 descriptors at most, and two honest members, a machine of the owner and a stranger,
are another process; the attacker is this one. Linux only: memory of the head is read below /proc.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import resource
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
from recording import output_of, save

from echo2.core.errors import LinkError, PeerError
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
[sampling]
max_tokens = 16
[workers]
count = 0
"""
JOINING = wire.WorkerHello(protocol=limits.PROTOCOL_VERSION, slots=1, engine="compact")
DESCRIPTORS, BODY_BYTES = 1024, 60 << 20
SECONDS = 30.0
HEARTBEAT_SECONDS = 10.0  # a member that is not heard for so long is lost
HELLO = b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03"  # as a TLS handshake begins

Figures = dict[str, float]


class Head:
    """A real head, and what it costs."""

    def __init__(self, directory: Path) -> None:
        self.directory, self.out = directory, directory / "run"
        from echo2.demo.small_models import character_tokenizer, small_qwen3, write_model  # torch: not for the honest

        model, config = directory / "model", directory / "run.toml"
        tokenizer = character_tokenizer("0123456789=")
        write_model(small_qwen3(tokenizer, 64), tokenizer, model)
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
        return output_of(made)

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


def be_honest(address: str, shown: dict[str, Credentials], begun: Any, over: Any, told: Any) -> None:
    """Attend and report twenty times a second, until `over`; tell the milliseconds waited, and who was not served."""

    async def attend(link: GrpcLink) -> None:
        while True:
            with suppress(LinkError, PeerError):
                async for _ in link.stream("Attend", JOINING):
                    pass
            await asyncio.sleep(0.1)

    async def ask(name: str, credentials: Credentials) -> tuple[str, list[float], list[str]]:
        link, waited, failed = GrpcLink(address, credentials), list[float](), list[str]()
        attending = asyncio.ensure_future(attend(link))
        while not over.is_set():
            began = time.perf_counter()
            for method, request in (("Report", wire.WorkerReport()), ("Deliver", wire.Deliveries())):
                try:
                    await link.call(method, request, HEARTBEAT_SECONDS)
                except PeerError:
                    pass  # an answer, too: this head has no learner
                except LinkError as error:
                    failed.append(str(error))
            waited.append((time.perf_counter() - began) * 1e3)
            begun.set()
            await asyncio.sleep(0.05)
        attending.cancel()
        await link.close()
        return name, waited, failed

    async def both() -> list[tuple[str, list[float], list[str]]]:
        return await asyncio.gather(*(ask(*each) for each in shown.items()))

    told.put(asyncio.run(both()))


@contextmanager
def honest_members(head: Head, shown: dict[str, Credentials], figures: Figures) -> Iterator[None]:
    """Adds to `figures` how they fared."""
    context = multiprocessing.get_context("spawn")
    begun, over, told = context.Event(), context.Event(), context.Queue()
    process = context.Process(target=be_honest, args=(head.ticket.address, shown, begun, over, told))
    process.start()
    begun.wait()
    yield
    over.set()
    for name, waited, failed in told.get(timeout=SECONDS):
        figures[f"{name}: calls"], figures[f"{name}: not served"] = 2 * len(waited), len(failed)
        figures[f"{name}: median ms"], figures[f"{name}: longest ms"] = statistics.median(waited), max(waited)
    process.join()


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


# ---- of strangers who joined -----------------------------------------------------------------------------------------


async def strangers(head: Head, num_tickets: int, each: int = 1) -> list[Credentials]:
    """So many members by each of so many tickets."""
    tickets = [head.invite() for _ in range(num_tickets)]
    return [
        (await enrol(ticket, head.directory / f"s{number}-{at}"))[1]
        for number, ticket in enumerate(tickets)
        for at in range(each)
    ]


async def bodies_without_end(head: Head) -> Figures:
    """4 tickets, 4 members each: every one begins 16 heartbeats and 16 results and ends none, for 20 s."""
    never = asyncio.Event()

    async def nothing() -> AsyncIterator[bytes]:
        await never.wait()
        yield b""

    async with AsyncExitStack() as stack:
        begun: list[Any] = []
        for credentials in await strangers(head, 4, 4):
            channel = await stack.enter_async_context(bare(head, credentials))
            for method in ("Report", "Deliver"):
                begun += [channel.stream_unary(f"/{SERVICE}/{method}")(nothing(), timeout=SECONDS) for _ in range(16)]
        await asyncio.sleep(20.0)
        under_way = sum(not each.done() for each in begun)
        for each in begun:
            each.cancel()
        never.set()
    return {"bodies under way": under_way}


async def many_connections(head: Head) -> Figures:
    """2 members of one ticket keep 150 connections each open, for 20 s, and dial again where they are cut."""
    end_at, opened = time.monotonic() + 20.0, 0

    async def keep(credentials: Credentials) -> None:
        nonlocal opened
        while time.monotonic() < end_at:
            link = GrpcLink(head.ticket.address, credentials)
            with suppress(LinkError, PeerError):
                async for _ in link.stream("Attend", JOINING):
                    opened += 1
            await link.close()
            await asyncio.sleep(0.1)

    members = await strangers(head, 1, 2)
    keeping = [asyncio.ensure_future(keep(credentials)) for credentials in members for _ in range(150)]
    await asyncio.sleep(20.0)
    for each in keeping:
        each.cancel()
    await asyncio.wait(keeping)
    return {"connections that were served": opened}


async def squeezed_bodies(head: Head) -> Figures:
    """2 tickets, 4 members each: 32 results of 60 MiB in all, of gzip, which makes 61 kB of each."""
    members = await strangers(head, 2, 4)
    async with Watch(head) as watch, AsyncExitStack() as stack:
        channels = [await stack.enter_async_context(bare(head, credentials)) for credentials in members]
        body, squeeze = bytes(BODY_BYTES), grpc.Compression.Gzip
        calls = [
            channel.unary_unary(f"/{SERVICE}/Deliver")(body, timeout=SECONDS, compression=squeeze)
            for channel in channels
            for _ in range(4)
        ]
        ends = await asyncio.gather(*calls, return_exceptions=True)
    told = [end.code() for end in ends if isinstance(end, grpc.aio.AioRpcError)]
    return {"MiB more": watch.grown, "refused unread of 32": told.count(grpc.StatusCode.UNIMPLEMENTED)}


async def probes(head: Head) -> Figures:
    """A stranger measures its link without end, for 12 s, over 3 connections 8 times each."""
    [credentials], num_bytes = await strangers(head, 1), 0

    async def take(link: GrpcLink) -> None:
        nonlocal num_bytes
        while True:
            with suppress(LinkError, PeerError):
                async for message in link.frames("Probe", wire.ProbeRequest(num_bytes=16 << 20)):
                    num_bytes += len(message)
            await asyncio.sleep(0.01)

    links = [GrpcLink(head.ticket.address, credentials) for _ in range(3)]
    taking = [asyncio.ensure_future(take(link)) for link in links for _ in range(8)]
    await asyncio.sleep(12.0)
    for each in taking:
        each.cancel()
    await asyncio.wait(taking)
    for link in links:
        await link.close()
    return {"MB in 12 s": num_bytes / 1e6}


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
        bodies_without_end,
        many_connections,
        squeezed_bodies,
        probes,
    )
}


async def attempt(attack: Callable[[Head], Awaitable[Figures]]) -> Figures:
    """Against a new head, while an honest machine of the owner and an honest stranger ask."""
    with tempfile.TemporaryDirectory() as directory:
        head, honest = Head(Path(directory)), dict[str, Credentials]()
        try:
            for name, ticket in (("owner", head.ticket), ("stranger", head.invite())):
                _, honest[name] = await enrol(ticket, head.directory / name)
            fared: Figures = {}
            with honest_members(head, honest, fared):
                figures = await attack(head)
        finally:
            head.close()
        return {**figures, **fared}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("attacks", nargs="*", metavar="ATTACK", help=f"one of {', '.join(ATTACKS)} (default: all)")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    found: dict[str, Any] = {}

    async def all_of_them() -> None:
        for name in arguments.attacks or ATTACKS:
            found[name] = await attempt(ATTACKS[name])
            print(f"{name}: {', '.join(f'{what}: {value:.4g}' for what, value in found[name].items())}", flush=True)

    asyncio.run(all_of_them())
    print(f"figures are in {save('hostile_door', json.loads(json.dumps(found)), arguments.out)}")


if __name__ == "__main__":
    main()
