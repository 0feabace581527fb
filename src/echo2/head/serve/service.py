"""The head's side of every connection: requests become events, and the planner's commands become answers. The learner's
calls are in `learner_calls`.

The transport has checked size and form of a message. A handler bounds every value in it, refuses values that no honest
caller sends, passes an event to the planner (`EventQueue.dispatch`: at once; `tell`: batched with other pending
events), and reads the answer from the returned commands. The planner makes all other decisions.
"""

from __future__ import annotations

import asyncio
import inspect
import json
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from dataclasses import replace
from functools import partial
from typing import Any, cast

from echo2.config.sections import SamplingConfig
from echo2.config.values import NO_SLOT_LIMIT
from echo2.core.errors import PeerError, UserError
from echo2.core.printable import printable, printable_lines
from echo2.core.types import GroupRef, SamplingFailure, SnapshotRef
from echo2.head.decide import commands as do
from echo2.head.decide import events as ev
from echo2.head.decide.groups import FAILURES
from echo2.head.fleet.decide.widths import GROWTH
from echo2.head.fleet.decide.workers import adapts
from echo2.head.serve import claims
from echo2.head.serve.connections import WorkerConnection, check_hello
from echo2.head.serve.effects import orders
from echo2.head.serve.head import Head
from echo2.head.serve.learner_calls import LearnerCalls
from echo2.head.serve.results import check_own
from echo2.learner.core.fitting import model_config
from echo2.learner.decide.memory import BYTES_PER_VALUE
from echo2.sandbox.plugins import TRACEBACK_CHARS, traceback_of
from echo2.tasks.harness_process import is_harness
from echo2.transport import messages
from echo2.transport import wire_pb2 as wire
from echo2.transport.base import Peer
from echo2.transport.grpc_server import enrol
from echo2.transport.limits import DURATION_SECONDS_MAX, NAME_CHARS_MAX

#: Maximum number of results in one call.
DELIVERIES_PER_CALL_MAX = 4096
#: Results that a call reads in one turn, and calls that have a turn at once. Other calls wait for a turn. A heartbeat
#: waits at most for the results of these turns, however many workers deliver: a tenth of a millisecond each.
READ_TOGETHER_MAX = 16
READ_SLOTS = 4
#: Maximum characters of a worker's explanation of a failure; each is a line of events.jsonl.
DETAIL_CHARS_MAX = 500
#: Maximum characters of a verdict, which the ticket's history stores.
FAULT_CHARS_MAX = 300

#: Of the learner's calls, those whose answers follow from the ledger. They wait for the store whatever its lag, so that
#: a learner is never ahead of the head that takes over.
_LEARNERS = ("LearnerHello", "TakeGroups", "ReportStep", "Publish", "ReportCheckpoint")

_Result = ev.GroupDelivered | ev.DeliveryMalformed | ev.LeaseFailed
Handler = Callable[[Peer, Any], Awaitable[Any]] | Callable[[Peer, Any], AsyncIterator[Any]]


class Service:
    """Handlers by method name."""

    def __init__(self, head: Head) -> None:
        self._head = head
        self.learner = LearnerCalls(head)
        self._revoked: frozenset[str] = frozenset()
        self._reading: dict[tuple[str, int], asyncio.Task[wire.DeliveryReply | PeerError]] = {}  # by worker and lease
        self._read_slots = asyncio.Semaphore(READ_SLOTS)

    def handlers(self) -> dict[str, Handler]:
        """Handlers by method. With a store, what follows from the ledger leaves once the store has it."""
        made = self._handlers()
        if self._head.mirror is not None:
            for waits, names in (
                (self._head.mirror.covered, ("Enrol", "Attend", "Leave", "FailLease", "Deliver", "ReportCheck")),
                (self._head.mirror.stored, _LEARNERS),
            ):
                made |= {name: _waiting(made[name], self._head.mirror.check, waits) for name in names}
        return made

    def _handlers(self) -> dict[str, Handler]:
        return {
            "Enrol": partial(enrol, self._head.identity),
            "Describe": self.describe,
            "Attend": self.attend,
            "Report": self.report,
            "Leave": self.leave,
            "FailLease": self.fail_lease,
            "Deliver": self.deliver,
            "ReportCheck": self.report_check,
            "FetchManifest": self.fetch_manifest,
            "LearnerHello": self.learner.learner_hello,
            "TakeGroups": self.learner.take_groups,
            "ReportStep": self.learner.report_step,
            "OfferChunks": self.learner.offer_chunks,
            "PutChunk": self.learner.put_chunk,
            "Publish": self.learner.publish,
            "ReportCheckpoint": self.learner.report_checkpoint,
            "LearnerReport": self.learner.learner_report,
            **self._head.distribution.origin.handlers(),
        }

    # ---- workers -------------------------------------------------------------------------------------------------

    async def describe(self, peer: Peer, _: wire.Empty) -> wire.RunFacts:
        """Say what a worker needs to choose its engine before it attends."""
        config = self._head.config
        model = await asyncio.to_thread(model_config, config.model.path)
        return wire.RunFacts(
            engine=config.workers.engine,
            forms=claims.forms_for(self._head, peer.peer_id),
            model_config="" if model is None else json.dumps(model),
            slots=_slots(config.sampling),
            max_tokens=config.sampling.max_tokens,
            value_bytes=BYTES_PER_VALUE[config.model.snapshot_dtype],
            has_adapter=config.lora.rank > 0,
        )

    async def attend(self, peer: Peer, hello: wire.WorkerHello) -> AsyncIterator[wire.Order]:
        """Yield a worker's orders. The worker is connected as long as it keeps this stream open."""
        head = self._head
        joined = worker_joined(peer, hello, head.config.sampling)
        environment = head.config.tasks.environment
        if environment and environment not in hello.environments:
            raise PeerError(
                "no_environment",
                f"this run plays {environment}, which the worker does not run. If you trust that code and have it, "
                f"start the worker with --allow-environment {environment}",
            )
        if is_harness(environment):
            check_own(head.config, head.identity, peer.peer_id)
        engine, server = claims.engine_of(head, peer.peer_id, hello)
        joined = claims.known(head, claims.with_engine(joined, engine), hello.engine)
        # Last: a rented machine whose worker is turned away must not count as having one.
        joined = self._at_offer(joined, hello.offer)
        connection = WorkerConnection(
            printable(hello.host),
            claims.process_id(hello.pid),
            printable(engine, 50),
            printable(hello.device, 50),
        )
        head.connections.attend(peer.peer_id, connection)
        head.distribution.origin.joined(peer.peer_id, hello, peer.host, joined.ticket)
        if joined.installed is not None:
            head.distribution.has_installed(peer.peer_id, joined.installed)
        head.books.costs.joined(peer.peer_id, joined.price_usd_per_hour, head.clock.now(), is_own=not joined.ticket)
        connection.put(wire.Order(settings=self._settings(joined, server)))
        if self._revoked:
            connection.put(wire.Order(revoked_peers=wire.RevokedPeers(peer_ids=sorted(self._revoked))))
        try:
            head.events.dispatch(joined)
            worker = head.planner.fleet.get(peer.peer_id)
            if worker is not None and worker.standby:
                head.books.costs.stands_by(peer.peer_id, head.clock.now())
            async for order in orders(head, connection):
                yield order
        finally:
            if head.connections.leave(peer.peer_id, connection):
                head.books.costs.left(peer.peer_id, head.clock.now())
                head.distribution.origin.left(peer.peer_id, "its connection closed")
                head.events.dispatch(ev.WorkerDetached(peer.peer_id, "its connection closed"))

    def _at_offer(self, joined: ev.WorkerJoined, machine: str) -> ev.WorkerJoined:
        """Set offer and price of a worker whose machine the run rented; such workers join by the owner's ticket."""
        offer = None if joined.ticket else self._head.machines.bind(machine, joined.worker_id)
        if offer is None:
            return joined
        return replace(joined, offer=offer.name, price_usd_per_hour=offer.price_usd_per_hour)

    def _settings(self, joined: ev.WorkerJoined, server: str) -> wire.RunSettings:
        config = self._head.config
        return wire.RunSettings(
            run_id=self._head.run_id,
            heartbeat_seconds=self._head.planner.fleet.report_seconds,
            swap=config.swap_of(is_own=not joined.ticket, draws=joined.draws),
            slots=joined.slots if adapts(self._head.planner, not joined.ticket) else _slots(config.sampling),
            engine=config.workers.engine,
            server=server,
            deterministic=config.run.deterministic,
            chat_template_args=json.dumps(config.model.chat_template_args),
            routes=config.learner.routing_replay,
        )

    def _connection(self, peer: Peer) -> WorkerConnection:
        connection = self._head.connections.workers.get(peer.peer_id)
        if connection is None:
            raise PeerError("unknown_worker", f"{peer.peer_id} does not attend; attend first")
        return connection

    async def report(self, peer: Peer, report: wire.WorkerReport) -> wire.ReportReply:
        """Keep what a worker says of itself. Answer when to report again, and if it is of no use, why."""
        connection, installed = self._connection(peer), _installed(report)
        if not 0 <= report.pause_seconds <= DURATION_SECONDS_MAX:
            raise PeerError("malformed", f"pause_seconds is {report.pause_seconds}")
        doing, refused = printable(report.doing, NAME_CHARS_MAX), printable(report.refused, DETAIL_CHARS_MAX)
        engine = printable(report.engine, NAME_CHARS_MAX)
        report.ClearField("doing")
        report.ClearField("refused")
        report.ClearField("engine")
        report.MergeFrom(wire.WorkerReport(doing=doing, refused=refused, engine=engine))
        is_new, is_refused = connection.hear(report, installed)
        if report.refused and is_refused:
            self._head.books.failures.refused(peer.peer_id, report.refused)
        if installed is not None:
            if is_new:
                self._head.distribution.has_installed(peer.peer_id, installed)
            self._head.books.broadcast_times.installed(peer.peer_id, installed, self._head.clock.now())
        if is_new or is_refused:
            await self._head.events.tell(ev.WorkerReported(peer.peer_id, installed, report.refused))
        else:
            self._head.events.seen(peer.peer_id)
        planner = self._head.planner
        of_no_use = planner.why_of_no_use(peer.peer_id)
        return wire.ReportReply(heartbeat_seconds=planner.fleet.report_seconds, of_no_use=of_no_use)

    async def leave(self, peer: Peer, _: wire.Empty) -> wire.Empty:
        """Remove a worker that its owner ends. Other workers get its leases at once."""
        self._connection(peer)
        self._head.events.dispatch(ev.WorkerLeft(peer.peer_id, "its owner ended it"))
        return wire.Empty()

    async def fail_lease(self, peer: Peer, failed: wire.LeaseFailed) -> wire.Empty:
        lease_id = messages.whole_number("lease_id", failed.lease_id)
        claims.check_not_expelled(self._head, peer.peer_id)
        known = (one for one in FAILURES if one == failed.reason)
        reason: SamplingFailure = next(known, "engine_failed")
        first, _, rest = failed.detail.partition("\n")
        detail, worker = printable(first, DETAIL_CHARS_MAX), self._head.planner.fleet.get(peer.peer_id)
        traceback = printable_lines(rest, TRACEBACK_CHARS) if worker is not None and worker.is_own else ""
        await self._head.events.tell(ev.LeaseFailed(peer.peer_id, lease_id, reason, detail, traceback))
        return wire.Empty()

    async def deliver(self, peer: Peer, deliveries: wire.Deliveries) -> wire.DeliveryReplies:
        if len(deliveries.items) > DELIVERIES_PER_CALL_MAX:
            raise PeerError("oversized", f"{len(deliveries.items)} results at once; {DELIVERIES_PER_CALL_MAX} allowed")
        if not self._head.tokenizer.done():
            raise PeerError("busy", "the head has just started and cannot read results yet; deliver again")
        claims.delivers(self._head, peer.peer_id)
        replies: list[wire.DeliveryReply] = []
        while len(replies) < len(deliveries.items):
            part = deliveries.items[len(replies) : len(replies) + READ_TOGETHER_MAX]
            if self._head.deliveries.are_replayed:
                replies += await asyncio.gather(*(self._deliver_played(peer, delivery) for delivery in part))
                continue
            async with self._read_slots:
                events = [await self._read(peer, delivery) for delivery in part]
                answers = [self._head.events.tell(event) for event in events]
                replies += [self._reply(event, await answer) for event, answer in zip(events, answers, strict=True)]
        return wire.DeliveryReplies(items=replies)

    async def _deliver_played(self, peer: Peer, delivery: wire.Delivery) -> wire.DeliveryReply:
        """Judge a result with the environment. This may outlast the call: it goes on then, and the worker's next call
        gets the answer, or learns that the result was answered already.
        """
        key = peer.peer_id, messages.whole_number("lease_id", delivery.lease_id)
        reading = self._reading.get(key)
        if reading is None:
            reading = self._reading[key] = self._head.spawn(self._answer_to(peer, delivery))
            reading.add_done_callback(lambda _: self._reading.pop(key, None))
        reply = await asyncio.shield(reading)
        if isinstance(reply, PeerError):
            raise reply
        return reply

    async def _answer_to(self, peer: Peer, delivery: wire.Delivery) -> wire.DeliveryReply | PeerError:
        """Return the caller's PeerError instead of raising it: an exception in a spawned task ends the run."""
        try:
            event = await self._read(peer, delivery)
            return self._reply(event, await self._head.events.tell(event))
        except PeerError as error:
            return error

    async def _read(self, peer: Peer, delivery: wire.Delivery) -> _Result:
        """Return the event that tells the planner of a result."""
        head, lease_id = self._head, messages.whole_number("lease_id", delivery.lease_id)
        claims.check_not_expelled(head, peer.peer_id)
        open_lease = head.planner.leases.get(lease_id)
        event: _Result
        try:
            if open_lease is None or open_lease[0] != peer.peer_id:  # not read: the planner refuses it, and says why
                return ev.GroupDelivered(peer.peer_id, lease_id, messages.group_ref(delivery.group), 0, 0, 0, 0)
            event = await head.deliveries.read(peer.peer_id, open_lease[1], delivery)
        except UserError as error:  # reported as if the environment had failed at the worker
            event = ev.LeaseFailed(peer.peer_id, lease_id, "environment_failed", str(error), traceback_of(error))
        except PeerError as error:
            detail = printable(error.detail, DETAIL_CHARS_MAX)
            event = ev.DeliveryMalformed(peer.peer_id, lease_id, error.reason, detail)
        return head.deliveries.timed(event)

    def _reply(self, event: _Result, commands: list[do.Command]) -> wire.DeliveryReply:
        """Return the reply to a delivery, from the planner's commands."""
        if isinstance(event, ev.LeaseFailed):
            return wire.DeliveryReply(accepted=False, reason=f"{event.reason}: {event.detail}")
        for command in commands:
            if isinstance(command, do.AcceptDelivery):
                return wire.DeliveryReply(accepted=True, reason=command.reason)
            if isinstance(command, do.RefuseDelivery):
                return wire.DeliveryReply(accepted=False, reason=f"{command.refusal}: {command.reason}")
        claims.check_not_expelled(self._head, event.worker_id)
        return wire.DeliveryReply(accepted=False, reason="late: the run is over")

    async def report_check(self, peer: Peer, report: wire.CheckReport) -> wire.Empty:
        """Pass a verdict to the planner, which knows whether it was requested."""
        group = GroupRef(messages.policy_id(report.policy), "train", messages.whole_number("number", report.number))
        if group.policy != self._head.options.policy:
            raise PeerError("malformed", f"a verdict on {group}; this run's policy is {self._head.options.policy}")
        event = ev.GroupChecked(
            peer.peer_id,
            group,
            messages.whole_number("num_tokens", report.num_tokens),
            printable(report.fault, FAULT_CHARS_MAX),
            printable(report.missed, FAULT_CHARS_MAX),
            messages.whole_number("num_skipped", report.num_skipped),
            messages.finite("surprise", report.surprise),
            messages.finite("variance", report.variance),
        )
        await self._head.events.tell(event)
        return wire.Empty()

    async def fetch_manifest(self, peer: Peer, request: wire.ManifestRequest) -> wire.SnapshotNotice:
        self._connection(peer)
        return await self._head.distribution.fetch_manifest(peer.peer_id, request)

    def expel(self, revoked: frozenset[str]) -> None:
        """Disconnect revoked workers at once: their leases and streams end, and other workers avoid them."""
        if revoked != self._revoked:
            self._revoked = revoked
            self._head.distribution.origin.revoked(revoked)
        for worker_id in sorted(revoked):
            if self._head.planner.fleet.get(worker_id) is not None:
                self._head.events.dispatch(ev.WorkerLeft(worker_id, "it was revoked"))


def _waiting(handler: Handler, check: Callable[[], None], waits: Callable[[], Awaitable[None]]) -> Handler:
    """Return a handler each of whose messages waits before it leaves. `check` refuses calls that would wait long."""

    async def call(peer: Peer, request: Any) -> Any:
        check()
        answer = await handler(peer, request)  # type: ignore[misc]
        await waits()
        return answer

    async def stream(peer: Peer, request: Any) -> AsyncIterator[Any]:
        check()
        async with aclosing(cast(AsyncGenerator[Any], handler(peer, request))) as messages:
            async for message in messages:
                await waits()
                yield message

    return stream if inspect.isasyncgenfunction(handler) else call


def worker_joined(peer: Peer, hello: wire.WorkerHello, sampling: SamplingConfig) -> ev.WorkerJoined:
    """Return the event of a worker that joins, from its checked message. Its slots are one batch, unless its owner says
    for how many it has room.
    """
    check_hello(hello)
    batch = _slots(sampling)
    return ev.WorkerJoined(
        worker_id=peer.peer_id,
        slots=batch if hello.slots >= NO_SLOT_LIMIT else min(hello.slots, GROWTH * batch),
        price_usd_per_hour=hello.price_usd_per_hour,
        installed=_installed(hello),
        held_leases=tuple(messages.whole_number("lease_id", lease_id) for lease_id in hello.held_leases),
    )


def _slots(sampling: SamplingConfig) -> int:
    """Rollouts of one batch: what a worker decodes at once, unless it has fewer slots."""
    return sampling.groups_per_batch * sampling.group_size


def _installed(message: wire.WorkerHello | wire.WorkerReport) -> SnapshotRef | None:
    return messages.decode_ref(message.installed) if message.HasField("installed") else None
