"""The head's side of every link: what workers and the learner may ask, turned into events, and the planner's answers.

A handler checks what came (bounds and types were checked by the transport), calls `Head.happen`, and reads its answer
out of the returned commands. It decides nothing.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from typing import Any

from echo2.control import commands as do
from echo2.control import events as ev
from echo2.documents import parse_json
from echo2.errors import PeerError, UserError
from echo2.printable import printable
from echo2.runtime import strangers
from echo2.runtime.deliveries import read_delivery
from echo2.runtime.head import Head
from echo2.runtime.head_report import step_row
from echo2.runtime.metrics import ess_of
from echo2.runtime.presence import LearnerPresence, Presence
from echo2.transport import messages
from echo2.transport import wire_pb2 as wire
from echo2.transport.base import Peer
from echo2.transport.limits import DURATION_SECONDS_MAX, NAME_CHARS_MAX, PRICE_MAX_USD_PER_HOUR, PROTOCOL_VERSION
from echo2.types import Lease, SnapshotRef
from echo2.weights import Manifest

#: Results in one call.
DELIVERIES_PER_CALL_MAX = 4096
#: Bytes of groups that the learner is sent in one message, unless a single group is larger.
FEED_BYTES = 8 << 20
#: Leases a returning worker may claim to hold, and environments it may name.
CLAIMS_MAX = 10_000
#: Characters of a worker's word on why something failed; each is a line of events.jsonl.
DETAIL_CHARS_MAX = 500

Handler = Callable[[Peer, Any], Awaitable[Any]] | Callable[[Peer, Any], AsyncIterator[Any]]


class Service:
    """Handlers by method name."""

    def __init__(self, head: Head) -> None:
        self._head = head
        self._revoked: frozenset[str] = frozenset()
        self._reading: dict[int, asyncio.Task[wire.DeliveryReply]] = {}  # results, by lease

    def handlers(self) -> dict[str, Handler]:
        return {
            "Attend": self.attend,
            "Report": self.report,
            "FailLease": self.fail_lease,
            "Deliver": self.deliver,
            "FetchManifest": self.fetch_manifest,
            "LearnerHello": self.learner_hello,
            "TakeGroups": self.take_groups,
            "ReportStep": self.report_step,
            "OfferSnapshot": self.offer_snapshot,
            "PutChunk": self.put_chunk,
            "Publish": self.publish,
            "ReportCheckpoint": self.report_checkpoint,
            "LearnerReport": self.learner_report,
            **self._head.distribution.origin.handlers(),
        }

    # ---- workers -------------------------------------------------------------------------------------------------

    async def attend(self, peer: Peer, hello: wire.WorkerHello) -> AsyncIterator[wire.Order]:
        """A worker attends as long as it keeps this stream open."""
        head = self._head
        joined = worker_joined(peer, hello, head.config.sampling.groups_per_batch)
        environment = head.config.tasks.environment
        if environment and environment not in hello.environments:
            raise PeerError(
                "no_environment",
                f"this run plays {environment}, which the worker does not run. If you trust that code and have it, "
                f"start the worker with --allow-environment {environment}",
            )
        joined = strangers.known(head, joined)
        # Last: a rented machine whose worker is turned away must not count as having one.
        joined = self._at_offer(joined, hello.offer)
        outbox: asyncio.Queue[wire.Order | None] = asyncio.Queue()
        presence = Presence(
            outbox,
            printable(hello.host),
            strangers.process_id(hello.pid),
            printable(hello.engine, 50),
            printable(hello.device, 50),
            wire.WorkerReport(),
        )
        before = head.workers.get(peer.peer_id)
        if before is not None:
            before.outbox.put_nowait(None)
        head.workers[peer.peer_id] = presence
        head.distribution.origin.joined(peer.peer_id, hello, peer.host, joined.ticket)
        if joined.installed is not None:
            head.distribution.origin.held(peer.peer_id, joined.installed)
        head.costs.joined(peer.peer_id, joined.price_usd_per_hour, head.clock.now(), is_own=not joined.ticket)
        outbox.put_nowait(wire.Order(settings=self._settings()))
        if self._revoked:
            outbox.put_nowait(wire.Order(revoked_peers=wire.RevokedPeers(peer_ids=sorted(self._revoked))))
        try:
            head.happen(joined)
            worker = head.planner.fleet.get(peer.peer_id)
            if worker is not None and worker.standby:
                head.costs.stands_by(peer.peer_id, head.clock.now())
            while (order := await outbox.get()) is not None:
                yield order
        finally:
            if head.workers.get(peer.peer_id) is presence:
                del head.workers[peer.peer_id]
                head.costs.left(peer.peer_id, head.clock.now())
                head.distribution.origin.left(peer.peer_id, "its connection closed")
                head.happen(ev.WorkerDetached(peer.peer_id, "its connection closed"))

    def _at_offer(self, joined: ev.WorkerJoined, machine: str) -> ev.WorkerJoined:
        """What the machine was rented as, and at its price, if this is one that the run rented. Those join by the
        owner's ticket.
        """
        offer = None if joined.ticket else self._head.machines.bind(machine, joined.worker_id)
        if offer is None:
            return joined
        return replace(joined, offer=offer.name, price_usd_per_hour=offer.price_usd_per_hour)

    def _settings(self) -> wire.RunSettings:
        config = self._head.config
        return wire.RunSettings(
            run_id=self._head.run_id,
            heartbeat_seconds=config.schedule.heartbeat_seconds,
            swap=config.sampling.swap,
            groups_per_batch=config.sampling.groups_per_batch,
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
        presence.report = report
        is_news = installed is not None and installed != presence.installed
        if installed is not None:
            if is_news:
                presence.installed = installed
                self._head.distribution.origin.held(peer.peer_id, installed)
            self._head.broadcast.installed(peer.peer_id, installed, self._head.clock.now())
        now = self._head.clock.now()
        if is_news or now - presence.reported_at >= self._head.config.schedule.heartbeat_seconds / 2:
            presence.reported_at = now
            self._head.happen(ev.WorkerReported(peer.peer_id, installed))
        return wire.Empty()

    async def fail_lease(self, peer: Peer, failed: wire.LeaseFailed) -> wire.Empty:
        lease_id = messages.whole_number("lease_id", failed.lease_id)
        strangers.check_not_expelled(self._head, peer.peer_id)
        word = failed.reason if failed.reason.isidentifier() and len(failed.reason) <= 50 else "unspecified"
        detail = printable(failed.detail, DETAIL_CHARS_MAX)
        self._head.happen(ev.LeaseFailed(peer.peer_id, lease_id, word, detail))
        return wire.Empty()

    async def deliver(self, peer: Peer, deliveries: wire.Deliveries) -> wire.DeliveryReplies:
        if len(deliveries.items) > DELIVERIES_PER_CALL_MAX:
            raise PeerError("oversized", f"{len(deliveries.items)} results at once; {DELIVERIES_PER_CALL_MAX} allowed")
        return wire.DeliveryReplies(items=[await self._deliver(peer, delivery) for delivery in deliveries.items])

    async def _deliver(self, peer: Peer, delivery: wire.Delivery) -> wire.DeliveryReply:
        head, lease_id = self._head, messages.whole_number("lease_id", delivery.lease_id)
        strangers.check_not_expelled(head, peer.peer_id)
        if not head.reader.is_loaded:
            raise PeerError("busy", "the head has just started and cannot read results yet; deliver again")
        held = head.planner.leases.get(lease_id)
        if held is None or held[0] != peer.peer_id:  # nothing of it is read: the planner says why it is refused
            try:
                named = messages.delivered_group(delivery)
            except PeerError as error:
                return self._malformed(peer, lease_id, error)
            return _answer(head.happen(ev.GroupDelivered(peer.peer_id, lease_id, named, 0, 0, 0, 0)))
        reading = self._reading.get(lease_id)
        if reading is None:
            reading = self._reading[lease_id] = head.spawn(self._judged(peer, held[1], delivery))
            reading.add_done_callback(lambda _: self._reading.pop(lease_id, None))
        # Going through an environment may outlast the call. The reading goes on; the next call gets its answer, or
        # hears that there is one.
        return await asyncio.shield(reading)

    async def _judged(self, peer: Peer, lease: Lease, delivery: wire.Delivery) -> wire.DeliveryReply:
        head, lease_id = self._head, lease.lease_id
        try:
            pending = await read_delivery(head, peer.peer_id, lease, delivery)
        except UserError as error:  # as the worker would have said, had the environment failed there
            failed = ev.LeaseFailed(peer.peer_id, lease_id, "environment_failed", str(error))
            head.happen(failed)
            return wire.DeliveryReply(accepted=False, reason=f"{failed.reason}: {failed.detail}")
        except PeerError as error:
            return self._malformed(peer, lease_id, error)
        group = pending.group
        event = ev.GroupDelivered(
            worker_id=peer.peer_id,
            lease_id=lease_id,
            group=group.group,
            num_samples=len(group.rollouts),
            oldest_version=group.oldest_version,
            newest_version=group.newest_version,
            num_tokens=group.num_tokens,
        )
        head.pending[lease_id] = pending
        try:
            return _answer(head.happen(event))
        finally:
            head.pending.pop(lease_id, None)

    def _malformed(self, peer: Peer, lease_id: int, error: PeerError) -> wire.DeliveryReply:
        detail = printable(error.detail, DETAIL_CHARS_MAX)
        return _answer(self._head.happen(ev.DeliveryMalformed(peer.peer_id, lease_id, error.reason, detail)))

    async def fetch_manifest(self, peer: Peer, request: wire.ManifestRequest) -> wire.SnapshotNotice:
        self._presence(peer)
        for ref in (request, request.base):
            messages.whole_number("lineage", ref.lineage)
            messages.whole_number("version", ref.version)
        return await self._head.distribution.fetch_manifest(peer.peer_id, request)

    def expel(self, revoked: frozenset[str]) -> None:
        """Let go of revoked workers at once: their leases end, and so do their streams; others shun them."""
        if revoked != self._revoked:
            self._revoked = revoked
            self._head.distribution.origin.revoked(revoked)
        for worker in self._head.planner.fleet.all():
            if worker.worker_id in revoked:
                self._head.happen(ev.WorkerLeft(worker.worker_id, "it was revoked"))

    # ---- the learner ---------------------------------------------------------------------------------------------

    async def learner_hello(self, peer: Peer, hello: wire.LearnerHello) -> wire.LearnerWelcome:
        head = self._head
        if hello.protocol != PROTOCOL_VERSION:
            raise PeerError("protocol", f"the learner speaks protocol {hello.protocol}, the head {PROTOCOL_VERSION}")
        _raise_refused(head.happen(ev.LearnerJoined(hello.version)))
        if head.vocab_size != hello.vocab_size:
            head.vocab_size = hello.vocab_size
            head.ledger.set_meta("vocab_size", hello.vocab_size)
        head.learner = LearnerPresence(printable(hello.host), hello.pid, printable(hello.device, 50))
        head.costs.joined("learner", head.config.learner.price_usd_per_hour, head.clock.now())
        planner = head.planner
        return wire.LearnerWelcome(
            lineage=planner.lineage, max_steps=planner.options.max_steps, published=sorted(planner.retained)
        )

    def _learner(self) -> LearnerPresence:
        if self._head.learner is None:
            raise PeerError("unknown_learner", "say LearnerHello first: the head was restarted")
        return self._head.learner

    async def take_groups(self, peer: Peer, request: wire.TakeGroups) -> AsyncIterator[wire.FedGroups]:
        head, learner = self._head, self._learner()
        feed: asyncio.Queue[wire.RolloutGroup | wire.StepDone] = asyncio.Queue()
        learner.feed = feed
        is_whole = False
        try:
            _raise_refused(head.happen(ev.GroupsWanted(request.step)))
            if head.outcome is not None:
                feed.put_nowait(wire.StepDone(stop=True, reason=head.outcome[1]))
            while not is_whole:
                fed = await _together(feed)
                is_whole = fed.HasField("done")
                yield fed
        finally:
            if (
                head.learner is learner and learner.feed is feed
            ):  # else another stream, or another learner, took its place
                learner.feed = None
                if not is_whole:
                    head.happen(ev.LearnerLost("its stream closed before the step had all its groups"))

    async def report_step(self, peer: Peer, report: wire.StepReport) -> wire.Empty:
        self._learner()
        head = self._head
        try:
            metrics = parse_json(report.metrics_json, with_nan=False)
        except ValueError as error:
            raise PeerError("malformed", f"metrics_json is not JSON: {error}") from error
        if not isinstance(metrics, dict):
            raise PeerError("malformed", "metrics_json is not an object")
        # The row first: a kill in between leaves a row that is written again with its step, not a step without a row.
        head.metrics.write(step_row(head, report.step + 1, metrics, report.groups))
        head.happen(ev.StepTrained(report.step, tuple(report.groups), _busy_seconds(metrics), ess_of(metrics)))
        if head.planner.version <= report.step:
            raise PeerError("refused", f"the run is over; step {report.step} is not recorded")
        head.save_books()
        head.check_budget()
        return wire.Empty()

    async def offer_snapshot(self, peer: Peer, request: wire.PublishRequest) -> wire.MissingChunks:
        self._learner()
        return wire.MissingChunks(hashes=self._head.distribution.archive.offer(_offered(request)))

    async def put_chunk(self, peer: Peer, chunk: wire.Chunk) -> wire.Empty:
        await self._head.distribution.archive.put(chunk.hash, chunk.data)
        return wire.Empty()

    async def publish(self, peer: Peer, request: wire.PublishRequest) -> wire.Empty:
        """Announced at once; answered when the whole content is stored, so that any worker can be given it."""
        self._learner()
        head, manifest = self._head, _offered(request)
        if not 0 <= request.encode_seconds < math.inf:
            raise PeerError("malformed", f"encode_seconds is {request.encode_seconds}")
        is_known = head.planner.published.get(manifest.version) == manifest.ref
        is_anchor = is_known and manifest.base is None and head.distribution.archive.is_whole(manifest.ref)
        await head.distribution.archive.take(manifest)
        await head.read_files(manifest.base or manifest.ref)
        if is_anchor:
            return wire.Empty()
        active = [worker.worker_id for worker in head.planner.fleet.active()]
        head.broadcast.published(manifest.ref, head.clock.now() - request.encode_seconds, active)
        head.broadcast.sized(manifest.total_bytes, manifest.tensor_bytes + manifest.file_bytes)
        head.happen(ev.SnapshotPublished(manifest.ref, manifest.total_bytes))
        if head.planner.published.get(manifest.version) == manifest.ref:  # else it is of a history that was abandoned
            await head.distribution.archive.rebuild(manifest.ref)
        return wire.Empty()

    async def report_checkpoint(self, peer: Peer, report: wire.CheckpointReport) -> wire.Empty:
        self._learner()
        version, oldest = (messages.whole_number("version", number) for number in (report.version, report.oldest_kept))
        self._head.happen(ev.CheckpointSaved(version, oldest))
        return wire.Empty()

    async def learner_report(self, peer: Peer, report: wire.LearnerReport) -> wire.Empty:
        self._learner().doing = printable(report.doing)
        return wire.Empty()


async def _together(feed: asyncio.Queue[wire.RolloutGroup | wire.StepDone]) -> wire.FedGroups:
    """The next item, and those that wait behind it: a message costs far more than a group."""
    fed, size = wire.FedGroups(), 0
    item = await feed.get()
    while True:
        if isinstance(item, wire.StepDone):
            fed.done.CopyFrom(item)
            return fed
        fed.groups.append(item)
        size += item.ByteSize()
        if size > FEED_BYTES or feed.empty():
            return fed
        item = feed.get_nowait()


def worker_joined(peer: Peer, hello: wire.WorkerHello, groups_per_batch: int) -> ev.WorkerJoined:
    """What a worker says of itself, within bounds. It samples what the run asks for together, or less."""
    if hello.protocol != PROTOCOL_VERSION:
        raise PeerError(
            "protocol", f"the worker speaks protocol {hello.protocol}, the head {PROTOCOL_VERSION}: upgrade one"
        )
    if hello.capacity_groups < 1:
        raise PeerError("malformed", "capacity_groups must be at least 1")
    if max(len(hello.held_leases), len(hello.environments)) > CLAIMS_MAX:
        raise PeerError("oversized", f"more than {CLAIMS_MAX} leases or environments claimed")
    if any(len(name) > NAME_CHARS_MAX for name in hello.environments):
        raise PeerError("oversized", f"the name of an environment has over {NAME_CHARS_MAX} characters")
    if len(hello.advertise) > NAME_CHARS_MAX:
        raise PeerError("oversized", f"an address has more than {NAME_CHARS_MAX} characters")
    if len(hello.offer) > NAME_CHARS_MAX:
        raise PeerError("oversized", f"the name of a machine has more than {NAME_CHARS_MAX} characters")
    if not 0 <= hello.price_usd_per_hour <= PRICE_MAX_USD_PER_HOUR:
        raise PeerError("malformed", f"a price of {hello.price_usd_per_hour} dollars an hour")
    return ev.WorkerJoined(
        worker_id=peer.peer_id,
        capacity_groups=min(hello.capacity_groups, groups_per_batch),
        price_usd_per_hour=hello.price_usd_per_hour,
        installed=_installed(hello),
        held_leases=tuple(messages.whole_number("lease_id", lease_id) for lease_id in hello.held_leases),
    )


def _busy_seconds(metrics: dict[str, Any]) -> float:
    """Of a step, the seconds in which the learner did not wait; 0 where its metrics do not say."""
    seconds = [metrics.get(key, 0.0) for key in ("time/step", "time/wait_for_batch", "time/publish_wait")]
    if not all(isinstance(value, int | float) and math.isfinite(value) for value in seconds):
        return 0.0
    return max(0.0, float(seconds[0] - seconds[1] - seconds[2]))


def _offered(request: wire.PublishRequest) -> Manifest:
    manifest = Manifest.from_bytes(request.delta or request.manifest)
    if manifest.ref != SnapshotRef(request.lineage, request.version):
        raise PeerError("malformed", f"the manifest is of {manifest.ref}, not of {request.lineage}.{request.version}")
    return manifest


def _installed(said: wire.WorkerHello | wire.WorkerReport) -> SnapshotRef | None:
    if not said.HasField("installed_version"):
        return None
    lineage = messages.whole_number("lineage", said.installed_lineage)
    return SnapshotRef(lineage, messages.whole_number("version", said.installed_version))


def _answer(commands: list[do.Command]) -> wire.DeliveryReply:
    """The planner's verdict on a delivery."""
    for command in commands:
        if isinstance(command, do.AcceptDelivery):
            return wire.DeliveryReply(accepted=True, reason=command.reason)
        if isinstance(command, do.RefuseDelivery):
            return wire.DeliveryReply(accepted=False, reason=f"{command.refusal}: {command.reason}")
    return wire.DeliveryReply(accepted=False, reason="late: the run is over")


def _raise_refused(commands: list[do.Command]) -> None:
    for command in commands:
        if isinstance(command, do.RefuseLearner):
            raise PeerError("refused", command.reason)
