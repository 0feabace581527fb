"""Lets machines join the service by ticket, over mutual TLS, as they join a run. Only the owner's machines can join,
because their samples are trusted.
"""

from __future__ import annotations

import asyncio
import json
import logging
import shlex
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import msgspec

from echo2.config.rundir import RunDir, write_atomically
from echo2.core.addresses import join
from echo2.core.background import Background
from echo2.core.errors import PeerError, UserError
from echo2.core.printable import printable
from echo2.head.serve.connections import check_hello
from echo2.head.strangers.tickets import OwnTickets
from echo2.transport import wire_pb2 as wire
from echo2.transport.base import Handler, Peer
from echo2.transport.grpc_server import GrpcServer
from echo2.transport.identity import RunIdentity
from echo2.transport.limits import NAME_CHARS_MAX
from echo2_service.calling import ANSWERS
from echo2_service.fleet.machines import JoinedMachine, Samplers
from echo2_service.fleet.payloads import Payloads
from echo2_service.settings import FleetSettings

log = logging.getLogger(__name__)

HEARTBEAT_SECONDS = 2.0
#: Seconds without a heartbeat after which a machine counts as lost.
SILENCE_SECONDS = 20.0
#: The file in the service's directory that `echo2 serve status` reads.
STATUS_FILE = "fleet.json"
#: Maximum number of sequences that a machine may claim to decode at once.
SLOTS_MAX = 4096
ADVICE = "Set fleet.listen to an address of this machine and another port."
#: Maximum number of answers in one call.
ANSWERS_MAX = 4096


class FleetServer:
    """Admits machines, and adds them to `samplers`."""

    def __init__(self, out: Path, settings: FleetSettings, bases: dict[str, str], samplers: Samplers) -> None:
        """`bases`: directories of the base models by name. `out`: the service's directory.

        Raises:
            UserError: identity or store can't be read.
        """
        self._settings, self._samplers = settings, samplers
        self._rundir = RunDir(out)
        self._identity = RunIdentity.create_or_load(self._rundir.identity)
        self._payloads = Payloads(self._rundir.snapshots, bases, self._identity, self._order, self._failed)
        self._machines: dict[str, JoinedMachine] = {}
        self._revoked: frozenset[str] = frozenset()
        host, port = settings.address
        self._server = GrpcServer(host, port, self._identity, self._handlers(), self._failed, ADVICE)
        self._watching = Background(self._failed)

    async def open(self) -> None:
        """Listen, and write the ticket.

        Raises:
            UserError: the address can't be listened on, or the ticket can't be written.
        """
        port = await self._server.start()
        address = join(self._settings.advertise or self._settings.address[0], port)
        tickets = OwnTickets(self._identity, {self._rundir.ticket: "sampler"}, address)
        tickets.keep()
        self._watching.spawn(self._watch(tickets))
        command = shlex.join(["echo2", "worker", f"@{self._rundir.ticket}"])
        print(f"your other machines sample for it with: {command}", flush=True)

    async def close(self) -> None:
        """Disconnect all machines; they reconnect if the service restarts."""
        async with AsyncExitStack() as closing:  # each of them closes, whatever becomes of the others
            closing.push_async_callback(self._payloads.distribution.close)
            closing.push_async_callback(self._server.stop)
            for machine in self._machines.values():
                closing.callback(machine.lose)
            closing.push_async_callback(self._watching.close)

    def status(self) -> dict[str, Any]:
        """Return host, device, activity, work and price of each machine by name, and the number of calls for which no
        machine has room.
        """
        under_way = self._samplers.placing.under_way()
        machines = {
            name: {
                "host": machine.host,
                "device": machine.device,
                "doing": machine.doing,
                "under_way": under_way.get(name, 0),
                "sampled": machine.num_sampled,
                "price_usd_per_hour": machine.price_usd_per_hour,
            }
            for name, machine in sorted(self._machines.items())
        }
        return {"machines": machines, "waiting_samples": self._samplers.placing.num_waiting}

    # ---- what machines ask -------------------------------------------------------------------------------------------

    def _handlers(self) -> dict[str, Handler]:
        origin = self._payloads.distribution.origin
        return {
            "Attend": self._attend,
            "Report": self._report,
            "AnswerSamples": self._answer,
            "FetchManifest": self._fetch_manifest,
            **origin.handlers(),
        }

    async def _attend(self, peer: Peer, hello: wire.WorkerHello) -> AsyncIterator[wire.Order]:
        check_hello(hello)
        if peer.role != "sampler" or not self._identity.member(peer.peer_id).is_own:
            raise PeerError("forbidden", "a service takes samples of its owner's machines alone")
        if hello.slots > SLOTS_MAX:
            raise PeerError("malformed", f"slots = {hello.slots}: {SLOTS_MAX} at most")
        self._lose(peer.peer_id)  # an earlier stream of the same machine
        machine, origin = JoinedMachine(hello, self._payloads), self._payloads.distribution.origin
        self._machines[peer.peer_id] = machine
        settings = wire.RunSettings(run_id=self._identity.run_id, heartbeat_seconds=HEARTBEAT_SECONDS)
        machine.outbox.put_nowait(wire.Order(settings=settings))
        if self._revoked:
            self._order(peer.peer_id, wire.Order(revoked_peers=wire.RevokedPeers(peer_ids=sorted(self._revoked))))
        origin.joined(peer.peer_id, hello, peer.host)
        log.info("%s joined: %s, %s", peer.peer_id, machine.host, machine.device)
        self._samplers.joined(peer.peer_id, hello.slots, machine)
        try:
            while (order := await machine.outbox.get()) is not None:
                yield order
        finally:
            if self._machines.get(peer.peer_id) is machine:
                self._lose(peer.peer_id)

    async def _report(self, peer: Peer, report: wire.WorkerReport) -> wire.Empty:
        machine = self._attending(peer)
        machine.doing, machine.heard_at = printable(report.doing, NAME_CHARS_MAX), time.monotonic()
        return wire.Empty()

    async def _answer(self, peer: Peer, message: wire.SampleAnswers) -> wire.Empty:
        machine = self._attending(peer)
        if len(message.answers) > ANSWERS_MAX:
            raise PeerError("oversized", f"{len(message.answers)} answers at once; {ANSWERS_MAX} allowed")
        for data in message.answers:
            try:
                answer = ANSWERS.decode(data)
            except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
                raise PeerError("malformed", f"an answer: {error}") from error
            machine.answered(answer)
        return wire.Empty()

    async def _fetch_manifest(self, peer: Peer, request: wire.ManifestRequest) -> wire.SnapshotNotice:
        self._attending(peer)
        return await self._payloads.distribution.fetch_manifest(peer.peer_id, request)

    def _attending(self, peer: Peer) -> JoinedMachine:
        machine = self._machines.get(peer.peer_id)
        if machine is None:
            raise PeerError("unknown_worker", f"{peer.peer_id} does not attend; attend first")
        return machine

    # ---- looking after them ------------------------------------------------------------------------------------------

    def _lose(self, name: str) -> None:
        machine = self._machines.pop(name, None)
        if machine is None:
            return
        self._samplers.remove(name)
        machine.lose()
        self._payloads.distribution.origin.left(name, "its connection closed")
        log.info("%s left", name)

    async def _watch(self, tickets: OwnTickets) -> None:
        """Consumes: revocations by `echo2 revoke`, and heartbeats. Produces: lost machines; tickets. Waits for: the
        clock."""
        while True:
            await asyncio.sleep(HEARTBEAT_SECONDS)
            try:
                revoked = self._identity.revoked()
                tickets.keep()
            except UserError as error:
                log.warning("%s", error)
                continue
            if revoked != self._revoked:
                self._revoked = revoked
                self._payloads.distribution.origin.revoked(revoked)
            late = time.monotonic() - SILENCE_SECONDS
            for name, machine in list(self._machines.items()):
                if name in revoked or machine.heard_at < late:
                    self._lose(name)
            self._write_status()

    def _write_status(self) -> None:
        try:
            write_atomically(self._rundir.path / STATUS_FILE, json.dumps({"at": time.time(), **self.status()}))
        except UserError as error:
            log.warning("%s", error)

    def _order(self, name: str, order: wire.Order) -> None:
        if (machine := self._machines.get(name)) is not None:
            machine.outbox.put_nowait(order)

    def _failed(self, error: BaseException) -> None:
        log.error("the fleet of the service", exc_info=error)  # tenants are served without it
