"""The head's side of every connection: requests become events, and the planner's commands become answers.

The transport has checked size and form of a message. A handler bounds every value in it, refuses values that no honest
caller sends, passes an event to the planner (`Head.dispatch`: at once; `Head.tell`: batched with other pending events),
and reads the answer from the returned commands. The planner makes all other decisions.
"""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

from echo2.config.rundir import FRESH_MISMATCH, FRESH_SURPRISE, FRESH_TOKENS, best_version
from echo2.config.sections import SamplingConfig
from echo2.config.values import STREAM_ENGINES
from echo2.core.documents import parse_json
from echo2.core.errors import PeerError, UserError
from echo2.core.printable import printable, printable_lines
from echo2.core.types import SnapshotRef
from echo2.head.decide import commands as do
from echo2.head.decide import events as ev
from echo2.head.serve import claims
from echo2.head.serve.effects import orders
from echo2.head.serve.head import Head
from echo2.head.serve.presence import LearnerPresence, Presence, check_hello
from echo2.head.serve.report import step_row
from echo2.head.serve.results import FEED_BYTES, read_delivery, report_check
from echo2.head.serve.shutdown import check_budget
from echo2.sandbox.plugins import TRACEBACK_CHARS, traceback_of
from echo2.tasks.harness_process import is_harness
from echo2.transport import messages
from echo2.transport import wire_pb2 as wire
from echo2.transport.base import Peer
from echo2.transport.codecs import decode_logprobs
from echo2.transport.limits import DURATION_SECONDS_MAX, NAME_CHARS_MAX, PROTOCOL_VERSION
from echo2.weights.format.manifest import HASH_BYTES, Manifest

#: Maximum number of results in one call.
DELIVERIES_PER_CALL_MAX = 4096
#: Results that a call reads in one turn, and calls that have a turn at once. Other calls wait for a turn. A heartbeat
#: waits at most for the results of these turns, however many workers deliver: a tenth of a millisecond each.
READ_TOGETHER_MAX = 16
TURNS_MAX = 4
#: Maximum characters of a worker's explanation of a failure; each is a line of events.jsonl.
DETAIL_CHARS_MAX = 500

_Result = ev.GroupDelivered | ev.DeliveryMalformed | ev.LeaseFailed
Handler = Callable[[Peer, Any], Awaitable[Any]] | Callable[[Peer, Any], AsyncIterator[Any]]


class Service:
    """Handlers by method name."""

    def __init__(self, head: Head) -> None:
        self._head = head
        self._revoked: frozenset[str] = frozenset()
        self._reading: dict[tuple[str, int], asyncio.Task[wire.DeliveryReply | PeerError]] = {}  # by worker and lease
        self._turns = asyncio.Semaphore(TURNS_MAX)

    def handlers(self) -> dict[str, Handler]:
        return {
            "Attend": self.attend,
            "Report": self.report,
            "Leave": self.leave,
            "FailLease": self.fail_lease,
            "Deliver": self.deliver,
            "ReportCheck": partial(report_check, self._head),
            "FetchManifest": self.fetch_manifest,
            "LearnerHello": self.learner_hello,
            "TakeGroups": self.take_groups,
            "ReportStep": self.report_step,
            "OfferChunks": self.offer_chunks,
            "PutChunk": self.put_chunk,
            "Publish": self.publish,
            "ReportCheckpoint": self.report_checkpoint,
            "LearnerReport": self.learner_report,
            **self._head.distribution.origin.handlers(),
        }

    # ---- workers -------------------------------------------------------------------------------------------------

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
            claims.check_own(head, peer.peer_id)
        engine, server = claims.engine_of(head, peer.peer_id, hello)
        joined = claims.known(head, replace(joined, draws=engine in STREAM_ENGINES), hello.engine)
        # Last: a rented machine whose worker is turned away must not count as having one.
        joined = self._at_offer(joined, hello.offer)
        presence = Presence(
            asyncio.Queue(),
            printable(hello.host),
            claims.process_id(hello.pid),
            printable(engine, 50),
            printable(hello.device, 50),
            wire.WorkerReport(),
        )
        if (before := head.workers.get(peer.peer_id)) is not None:
            before.outbox.put_nowait(None)
        head.workers[peer.peer_id] = presence
        head.distribution.origin.joined(peer.peer_id, hello, peer.host, joined.ticket)
        if joined.installed is not None:
            head.distribution.held(peer.peer_id, joined.installed)
        head.costs.joined(peer.peer_id, joined.price_usd_per_hour, head.clock.now(), is_own=not joined.ticket)
        presence.outbox.put_nowait(wire.Order(settings=self._settings(server)))
        if self._revoked:
            presence.outbox.put_nowait(wire.Order(revoked_peers=wire.RevokedPeers(peer_ids=sorted(self._revoked))))
        try:
            head.dispatch(joined)
            worker = head.planner.fleet.get(peer.peer_id)
            if worker is not None and worker.standby:
                head.costs.stands_by(peer.peer_id, head.clock.now())
            async for order in orders(head, presence):
                yield order
        finally:
            if head.workers.get(peer.peer_id) is presence:
                del head.workers[peer.peer_id]
                head.costs.left(peer.peer_id, head.clock.now())
                head.distribution.origin.left(peer.peer_id, "its connection closed")
                head.dispatch(ev.WorkerDetached(peer.peer_id, "its connection closed"))

    def _at_offer(self, joined: ev.WorkerJoined, machine: str) -> ev.WorkerJoined:
        """Set offer and price of a worker whose machine the run rented; such workers join by the owner's ticket."""
        offer = None if joined.ticket else self._head.machines.bind(machine, joined.worker_id)
        if offer is None:
            return joined
        return replace(joined, offer=offer.name, price_usd_per_hour=offer.price_usd_per_hour)

    def _settings(self, server: str) -> wire.RunSettings:
        config = self._head.config
        return wire.RunSettings(
            run_id=self._head.run_id,
            heartbeat_seconds=self._head.options.heartbeat_seconds,
            swap=config.swap,
            slots=config.sampling.groups_per_batch * config.sampling.group_size,
            engine=config.workers.engine,
            server=server,
            deterministic=config.run.deterministic,
            chat_template_args=json.dumps(config.model.chat_template_args),
        )

    def _presence(self, peer: Peer) -> Presence:
        presence = self._head.workers.get(peer.peer_id)
        if presence is None:
            raise PeerError("unknown_worker", f"{peer.peer_id} does not attend; attend first")
        return presence

    async def report(self, peer: Peer, report: wire.WorkerReport) -> wire.Empty:
        presence, installed = self._presence(peer), _installed(report)
        if not 0 <= report.pause_seconds <= DURATION_SECONDS_MAX:
            raise PeerError("malformed", f"pause_seconds is {report.pause_seconds}")
        report.doing = printable(report.doing, NAME_CHARS_MAX)
        report.refused = printable(report.refused, DETAIL_CHARS_MAX)
        if report.refused and report.refused != presence.report.refused:
            self._head.failures.refused(peer.peer_id, report.refused)
        is_new, is_refused = installed != presence.installed, report.refused != presence.report.refused
        presence.report, presence.installed = report, installed
        if installed is not None:
            if is_new:
                self._head.distribution.held(peer.peer_id, installed)
            self._head.broadcast_times.installed(peer.peer_id, installed, self._head.clock.now())
        if is_new or is_refused:
            await self._head.tell(ev.WorkerReported(peer.peer_id, installed, report.refused))
        else:
            self._head.heard(peer.peer_id)
        return wire.Empty()

    async def leave(self, peer: Peer, _: wire.Empty) -> wire.Empty:
        """Remove a worker that its owner ends. Other workers get its leases at once."""
        self._presence(peer)
        self._head.dispatch(ev.WorkerLeft(peer.peer_id, "its owner ended it"))
        return wire.Empty()

    async def fail_lease(self, peer: Peer, failed: wire.LeaseFailed) -> wire.Empty:
        lease_id = messages.whole_number("lease_id", failed.lease_id)
        claims.check_not_expelled(self._head, peer.peer_id)
        word = failed.reason if failed.reason.isidentifier() and len(failed.reason) <= 50 else "unspecified"
        first, _, rest = failed.detail.partition("\n")
        detail, worker = printable(first, DETAIL_CHARS_MAX), self._head.planner.fleet.get(peer.peer_id)
        traceback = printable_lines(rest, TRACEBACK_CHARS) if worker is not None and worker.is_own else ""
        await self._head.tell(ev.LeaseFailed(peer.peer_id, lease_id, word, detail, traceback))
        return wire.Empty()

    async def deliver(self, peer: Peer, deliveries: wire.Deliveries) -> wire.DeliveryReplies:
        if len(deliveries.items) > DELIVERIES_PER_CALL_MAX:
            raise PeerError("oversized", f"{len(deliveries.items)} results at once; {DELIVERIES_PER_CALL_MAX} allowed")
        if not self._head.reader.is_loaded:
            raise PeerError("busy", "the head has just started and cannot read results yet; deliver again")
        claims.delivers(self._head, peer.peer_id)
        replies: list[wire.DeliveryReply] = []
        while len(replies) < len(deliveries.items):
            part = deliveries.items[len(replies) : len(replies) + READ_TOGETHER_MAX]
            if self._head.referee is not None:
                replies += await asyncio.gather(*(self._deliver_played(peer, delivery) for delivery in part))
                continue
            async with self._turns:
                events = [await self._read(peer, delivery) for delivery in part]
                answers = [self._head.tell(event) for event in events]
                replies += [self._reply(event, await answer) for event, answer in zip(events, answers, strict=True)]
        return wire.DeliveryReplies(items=replies)

    async def _deliver_played(self, peer: Peer, delivery: wire.Delivery) -> wire.DeliveryReply:
        """Judge a result with the environment. This may outlast the call: it goes on then, and the worker's next call
        gets the answer, or learns that the result was answered already.
        """
        key = peer.peer_id, messages.whole_number("lease_id", delivery.lease_id)
        reading = self._reading.get(key)
        if reading is None:
            reading = self._reading[key] = self._head.spawn(self._judged(peer, delivery))
            reading.add_done_callback(lambda _: self._reading.pop(key, None))
        reply = await asyncio.shield(reading)
        if isinstance(reply, PeerError):
            raise reply
        return reply

    async def _judged(self, peer: Peer, delivery: wire.Delivery) -> wire.DeliveryReply | PeerError:
        """Return the caller's PeerError instead of raising it: an exception in a spawned task ends the run."""
        try:
            event = await self._read(peer, delivery)
            return self._reply(event, await self._head.tell(event))
        except PeerError as error:
            return error

    async def _read(self, peer: Peer, delivery: wire.Delivery) -> _Result:
        """Return the event that tells the planner of a result."""
        head, lease_id = self._head, messages.whole_number("lease_id", delivery.lease_id)
        claims.check_not_expelled(head, peer.peer_id)
        held = head.planner.leases.get(lease_id)
        event: _Result
        try:
            if held is None or held[0] != peer.peer_id:  # not read: the planner refuses it, and says why
                return ev.GroupDelivered(peer.peer_id, lease_id, messages.delivered_group(delivery), 0, 0, 0, 0)
            event = await read_delivery(head, peer.peer_id, held[1], delivery)
        except UserError as error:  # reported as if the environment had failed at the worker
            event = ev.LeaseFailed(peer.peer_id, lease_id, "environment_failed", str(error), traceback_of(error))
        except PeerError as error:
            detail = printable(error.detail, DETAIL_CHARS_MAX)
            event = ev.DeliveryMalformed(peer.peer_id, lease_id, error.reason, detail)
        return event if head.referee is None else head.referee.timed(event)

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

    async def fetch_manifest(self, peer: Peer, request: wire.ManifestRequest) -> wire.SnapshotNotice:
        self._presence(peer)
        return await self._head.distribution.fetch_manifest(peer.peer_id, request)

    def expel(self, revoked: frozenset[str]) -> None:
        """Disconnect revoked workers at once: their leases and streams end, and other workers avoid them."""
        if revoked != self._revoked:
            self._revoked = revoked
            self._head.distribution.origin.revoked(revoked)
        for worker in list(self._head.planner.fleet):
            if worker.worker_id in revoked:
                self._head.dispatch(ev.WorkerLeft(worker.worker_id, "it was revoked"))

    # ---- the learner ---------------------------------------------------------------------------------------------

    async def learner_hello(self, peer: Peer, hello: wire.LearnerHello) -> AsyncIterator[wire.LearnerWelcome]:
        """Yield the learner's orders. The learner is connected as long as it keeps this stream open. A second learner
        is refused, because it would take the run back to its own checkpoint.
        """
        head = self._head
        if hello.protocol != PROTOCOL_VERSION:
            raise PeerError("protocol", f"the learner speaks protocol {hello.protocol}, the head {PROTOCOL_VERSION}")
        if messages.policy_id(hello.policy) != head.options.policy:
            raise PeerError(
                "refused", f"the learner trains policy {hello.policy!r}; this run's is {head.options.policy!r}"
            )
        before = head.learner
        if before is not None and hello.epoch != before.epoch:
            raise PeerError(
                "taken",
                f"the run has a learner, process {before.pid} on {before.host}; end that one, and start this again",
            )
        _raise_over(head)
        _raise_refused(head.dispatch(ev.LearnerJoined(hello.version)))
        if head.vocab_size != hello.vocab_size:
            head.vocab_size = hello.vocab_size
            head.ledger.set_meta("vocab_size", hello.vocab_size)
        epoch = head.ledger.get_meta("learner_epoch", 0) + 1
        head.ledger.set_meta("learner_epoch", epoch)
        learner = LearnerPresence(epoch, printable(hello.host), hello.pid, printable(hello.device, 50))
        if before is not None:
            before.end()
        head.learner = learner
        head.costs.joined("learner", head.config.learner.price_usd_per_hour, head.clock.now())
        planner = head.planner
        welcome = wire.LearnerWelcome(
            lineage=planner.training.lineage,
            max_steps=planner.options.max_steps,
            published=sorted(planner.snapshots.retained),
            epoch=epoch,
            base_models=[ref.policy for ref in head.distribution.archive.retained if ref.is_base_model],
        )
        try:
            yield welcome
            while (order := await learner.orders.get()) is not None:
                yield order
        finally:
            if head.learner is learner:
                head.learner = None
                learner.end()
                head.dispatch(ev.LearnerLost("its connection closed"))

    def _learner(self, epoch: int) -> LearnerPresence:
        """The connected learner, if the caller is that learner."""
        learner = self._head.learner
        if learner is None or learner.epoch != epoch:
            raise PeerError("unknown_learner", "say LearnerHello first: the head was restarted, or another has joined")
        return learner

    async def take_groups(self, peer: Peer, request: wire.TakeGroups) -> AsyncIterator[wire.FedGroups]:
        head, learner = self._head, self._learner(request.epoch)
        feed: asyncio.Queue[bytes | wire.StepDone | None] = asyncio.Queue()
        if learner.feed is not None:
            learner.feed.put_nowait(None)
        learner.feed = feed
        held: list[bytes] = []
        is_whole = False
        try:
            _raise_refused(head.dispatch(ev.GroupsWanted(request.step)))
            _raise_over(head)
            if head.stopping:
                feed.put_nowait(wire.StepDone(stop=True, reason=head.stopping))
            while not is_whole:
                fed = await _together(feed, held)
                if fed is None:
                    raise PeerError("unknown_learner", "this learner has a new session, or another took its place")
                is_whole = fed.HasField("done")
                yield fed
        finally:
            if learner.feed is feed:  # else another stream has replaced this one
                learner.feed = None
                if not is_whole and head.learner is learner:
                    head.dispatch(ev.LearnerLost("its stream closed before the step had all its groups"))

    async def report_step(self, peer: Peer, report: wire.StepReport) -> wire.Empty:
        self._learner(report.epoch)
        head = self._head
        _raise_over(head)
        try:
            metrics = parse_json(report.metrics_json, with_nan=False)
        except ValueError as error:
            raise PeerError("malformed", f"metrics_json is not JSON: {error}") from error
        if not isinstance(metrics, dict):
            raise PeerError("malformed", "metrics_json is not an object")
        busy_seconds, mismatches = _busy_seconds(metrics), tuple(_mismatches(metrics))
        logprobs = decode_logprobs(report.logprobs)
        head.dispatch(ev.StepTrained(report.step, tuple(report.groups), busy_seconds, mismatches))
        version = report.step + 1
        # One row, for the newest step only: a report may arrive late or twice. After a kill before this line the step
        # has no row, but the learner got no answer and reports the step again.
        if head.planner.training.version == version and head.metrics.last_step < version:
            head.metrics.write(step_row(head, version, metrics))
            head.rollout_log.trained(version, logprobs)
        head.save_books()
        check_budget(head)
        return wire.Empty()

    async def offer_chunks(self, peer: Peer, offer: wire.ChunkOffer) -> wire.MissingChunks:
        self._learner(offer.epoch)
        if any(len(hash_) != HASH_BYTES for hash_ in offer.hashes):
            raise PeerError("malformed", f"a chunk hash that has not {HASH_BYTES} bytes")
        return wire.MissingChunks(hashes=self._head.distribution.archive.offer(offer.hashes))

    async def put_chunk(self, peer: Peer, chunk: wire.OfferedChunk) -> wire.Empty:
        self._learner(chunk.epoch)
        await self._head.distribution.archive.put(chunk.hash, chunk.data)
        return wire.Empty()

    async def publish(self, peer: Peer, request: wire.PublishRequest) -> wire.Empty:
        """Publish a payload whose chunks have arrived: announce it, unless its version is already published. A base
        model is not announced; workers request it when an adapter over it is announced.
        """
        self._learner(request.epoch)
        head, manifest = self._head, await asyncio.to_thread(Manifest.from_bytes, request.manifest)
        if not 0 <= request.encode_seconds < math.inf:
            raise PeerError("malformed", f"encode_seconds is {request.encode_seconds}")
        if manifest.ref.is_base_model:
            await head.distribution.archive.take(manifest)
            return wire.Empty()
        if manifest.ref.policy != head.options.policy:
            raise PeerError("malformed", f"a snapshot of {manifest.ref.policy}; this run's is {head.options.policy}")
        is_known = head.planner.snapshots.published.get(manifest.ref.version) == manifest.ref
        await head.distribution.archive.take(manifest)
        await head.read_files(manifest.ref)
        if is_known:  # an anchor, after its delta
            return wire.Empty()
        active = [worker.worker_id for worker in head.planner.fleet.active()]
        head.broadcast_times.published(manifest.ref, head.clock.now() - request.encode_seconds, active)
        head.broadcast_times.sized(manifest.total_bytes, manifest.content_bytes)
        head.dispatch(ev.SnapshotPublished(manifest.ref, manifest.total_bytes))
        return wire.Empty()

    async def report_checkpoint(self, peer: Peer, report: wire.CheckpointReport) -> wire.CheckpointReply:
        head = self._head
        self._learner(report.epoch)
        version, oldest = (messages.whole_number("version", number) for number in (report.version, report.oldest_kept))
        head.dispatch(ev.CheckpointSaved(version, oldest))
        spared = {best_version(report.versions, head.metrics.accuracies), *head.planner.evaluation.rounds}
        return wire.CheckpointReply(spared=[held for held in report.versions if held in spared])

    async def learner_report(self, peer: Peer, report: wire.LearnerReport) -> wire.Empty:
        self._learner(report.epoch).doing = printable(report.doing)
        return wire.Empty()


async def _together(feed: asyncio.Queue[bytes | wire.StepDone | None], held: list[bytes]) -> wire.FedGroups | None:
    """Return the next items of the feed in one message, which costs far more than a group. None: the stream ends.
    `held`: the group that did not fit into the previous message; on return, the one that did not fit into this one.
    """
    fed, size = wire.FedGroups(), 0
    item: bytes | wire.StepDone | None = held.pop() if held else await feed.get()
    while True:
        if item is None:
            return None
        if isinstance(item, wire.StepDone):
            fed.done.CopyFrom(item)
            return fed
        if fed.groups and size + len(item) > FEED_BYTES:
            held.append(item)
            return fed
        fed.groups.append(item)
        size += len(item)
        if feed.empty():
            return fed
        item = feed.get_nowait()


def worker_joined(peer: Peer, hello: wire.WorkerHello, sampling: SamplingConfig) -> ev.WorkerJoined:
    """Return the event of a worker that joins, from its checked message. Its slots are capped at one batch."""
    check_hello(hello)
    return ev.WorkerJoined(
        worker_id=peer.peer_id,
        slots=min(hello.slots, sampling.groups_per_batch * sampling.group_size),
        price_usd_per_hour=hello.price_usd_per_hour,
        installed=_installed(hello),
        held_leases=tuple(messages.whole_number("lease_id", lease_id) for lease_id in hello.held_leases),
    )


def _busy_seconds(metrics: dict[str, Any]) -> float:
    """Return the seconds of a step in which the learner did not wait; 0 if its metrics are not numbers."""
    seconds = [metrics.get(key, 0.0) for key in ("time/step", "time/wait_for_batch", "time/publish_wait")]
    if not all(isinstance(value, int | float) and math.isfinite(value) for value in seconds):
        return 0.0
    return max(0.0, float(seconds[0] - seconds[1] - seconds[2]))


def _mismatches(metrics: dict[str, Any]) -> Iterator[ev.WorkerMismatch]:
    """Yield the mismatch of each worker named in the learner's metrics. The learner's numbers are trusted."""
    for key, mean in metrics.items():
        if key.startswith(FRESH_MISMATCH):
            worker_id = key.removeprefix(FRESH_MISMATCH)
            num, surprise = (metrics.get(name + worker_id, 0.0) for name in (FRESH_TOKENS, FRESH_SURPRISE))
            if all(isinstance(value, int | float) and math.isfinite(value) for value in (mean, num, surprise)):
                yield ev.WorkerMismatch(worker_id, num, mean * num, surprise * num)


def _installed(said: wire.WorkerHello | wire.WorkerReport) -> SnapshotRef | None:
    return messages.decode_ref(said.installed) if said.HasField("installed") else None


def _raise_over(head: Head) -> None:
    """Raise PeerError if the run is over. A head that ended for want of disk space will be restarted, so the learner is
    told that its session is gone."""
    if head.outcome is not None:
        kind, reason = head.outcome
        raise PeerError("unknown_learner" if kind == "no_room" else "over", f"the run is over: {reason}")


def _raise_refused(commands: list[do.Command]) -> None:
    for command in commands:
        if isinstance(command, do.RefuseLearner):
            raise PeerError("refused", command.reason)
