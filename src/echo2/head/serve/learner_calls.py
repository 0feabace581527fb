"""The head's side of the learner's calls: what it trained and published, and the groups of its next step."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Iterator
from typing import Any

from echo2.config.rundir import FRESH_MISMATCH, FRESH_SURPRISE, FRESH_TOKENS, best_version
from echo2.core.documents import is_number, parse_json
from echo2.core.errors import PeerError
from echo2.core.printable import printable
from echo2.core.types import SEVERAL
from echo2.head.decide import commands as do
from echo2.head.decide import events as ev
from echo2.head.serve.connections import Feed, LearnerConnection
from echo2.head.serve.head import Head
from echo2.head.serve.report import check_budget, step_row
from echo2.head.serve.results import FEED_BYTES
from echo2.head.store.contents import UPLOAD_SECONDS
from echo2.transport import messages
from echo2.transport import wire_pb2 as wire
from echo2.transport.base import Peer, packed
from echo2.transport.limits import PROTOCOL_VERSION
from echo2.transport.message_bytes import decode_logprobs, fed_group
from echo2.transport.routes import decode_shape
from echo2.weights.format.manifest import HASH_BYTES, Manifest


class LearnerCalls:
    """Handlers of the learner's calls."""

    def __init__(self, head: Head) -> None:
        self._head = head

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
        before = head.connections.learner
        if before is not None and hello.epoch != before.epoch:
            raise PeerError(
                "taken",
                f"the run has a learner, process {before.pid} on {before.host}; end that one, and start this again",
            )
        _raise_over(head)
        _raise_refused(head.events.dispatch(ev.LearnerJoined(hello.version)))
        routes = decode_shape(hello.routes) if hello.HasField("routes") else None
        head.deliveries.learn_sizes(hello.vocab_size, routes)
        epoch = head.ledger.get_meta("learner_epoch", 0) + 1
        head.ledger.set_meta("learner_epoch", epoch)
        learner = LearnerConnection(epoch, printable(hello.host), hello.pid, printable(hello.device, 50))
        head.connections.join(learner)
        head.books.costs.joined("learner", head.config.learner.price_usd_per_hour, head.clock.now())
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
            if head.connections.quit(learner):
                head.events.dispatch(ev.LearnerLost("its connection closed"))

    def _learner(self, epoch: int) -> LearnerConnection:
        """The connected learner, if the caller is that learner."""
        learner = self._head.connections.learner
        if learner is None or learner.epoch != epoch:
            raise PeerError("unknown_learner", "say LearnerHello first: the head was restarted, or another has joined")
        return learner

    async def take_groups(self, peer: Peer, request: wire.TakeGroups) -> AsyncIterator[bytes]:
        head, learner = self._head, self._learner(request.epoch)
        feed = learner.open_feed()
        left_over: list[tuple[bytes, ...]] = []
        is_whole = False
        try:
            _raise_refused(head.events.dispatch(ev.GroupsWanted(request.step)))
            _raise_over(head)
            if head.ending.stopping:
                feed.put_nowait(wire.StepDone(stop=True, reason=head.ending.stopping))
            while not is_whole:
                fed = await _together(feed, left_over)
                if fed is None:
                    raise PeerError("unknown_learner", "this learner has a new session, or another took its place")
                message, is_whole = fed
                yield message
        finally:
            if learner.close_feed(feed) and not is_whole and head.connections.learner is learner:
                head.events.dispatch(ev.LearnerLost("its stream closed before the step had all its groups"))

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
        head.events.dispatch(ev.StepTrained(report.step, tuple(report.groups), busy_seconds, mismatches))
        version = report.step + 1
        # One row, for the newest step only: a report may arrive late or twice. After a kill before this line the step
        # has no row, but the learner got no answer and reports the step again.
        if head.planner.training.version == version and head.books.metrics.last_step < version:
            head.books.metrics.write(step_row(head, version, metrics))
            head.books.rollout_log.trained(version, logprobs)
        head.books.save(head.distribution.origin)
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
            await _keep_snapshots(head)
            return wire.Empty()
        if manifest.ref.policy != head.options.policy:
            raise PeerError("malformed", f"a snapshot of {manifest.ref.policy}; this run's is {head.options.policy}")
        is_known = head.planner.snapshots.published.get(manifest.ref.version) == manifest.ref
        await head.distribution.archive.take(manifest)
        await head.read_files(manifest.ref)
        await _keep_snapshots(head)
        if is_known:  # an anchor, after its delta
            return wire.Empty()
        active = [worker.worker_id for worker in head.planner.fleet.active()]
        head.books.broadcast_times.published(manifest.ref, head.clock.now() - request.encode_seconds, active)
        head.books.broadcast_times.sized(manifest.total_bytes, manifest.content_bytes)
        head.events.dispatch(ev.SnapshotPublished(manifest.ref, manifest.total_bytes))
        return wire.Empty()

    async def report_checkpoint(self, peer: Peer, report: wire.CheckpointReport) -> wire.CheckpointReply:
        head = self._head
        self._learner(report.epoch)
        version, oldest = (messages.whole_number("version", number) for number in (report.version, report.oldest_kept))
        head.events.dispatch(ev.CheckpointSaved(version, oldest))
        spared = {best_version(report.versions, head.books.metrics.accuracies), *head.planner.evaluation.rounds}
        return wire.CheckpointReply(spared=[one for one in report.versions if one in spared])

    async def learner_report(self, peer: Peer, report: wire.LearnerReport) -> wire.Empty:
        self._learner(report.epoch).tell(printable(report.doing))
        return wire.Empty()


async def _together(feed: Feed, left_over: list[tuple[bytes, ...]]) -> tuple[bytes, bool] | None:
    """Return the next items of the feed in one message (`FedGroups`), which costs far more than a group, and whether
    the step is done. None: the stream ends.
    `left_over`: the group that did not fit into the previous message; on return, that which did not fit into this one.
    """
    pieces: list[bytes] = []
    size = 0
    item: tuple[bytes, ...] | wire.StepDone | None = left_over.pop() if left_over else await feed.get()
    while True:
        if item is None:
            return None
        if isinstance(item, wire.StepDone):
            return b"".join([*pieces, packed(wire.FedGroups(done=item))]), True
        size += sum(map(len, item))
        if pieces and size > FEED_BYTES:
            left_over.append(item)
            return b"".join(pieces), False
        pieces += fed_group(item)
        if feed.empty():
            return b"".join(pieces), False
        item = feed.get_nowait()


def _busy_seconds(metrics: dict[str, Any]) -> float:
    """Return the seconds of a step in which the learner did not wait; 0 if its metrics are not numbers."""
    seconds = [metrics.get(key, 0.0) for key in ("time/step", "time/wait_for_batch", "time/publish_wait")]
    if not all(map(is_number, seconds)):
        return 0.0
    return max(0.0, float(seconds[0] - seconds[1] - seconds[2]))


def _mismatches(metrics: dict[str, Any]) -> Iterator[ev.WorkerMismatch]:
    """Yield the mismatch of each worker named in the learner's metrics. The learner's numbers are trusted."""
    for key, mean in metrics.items():
        if key.startswith(FRESH_MISMATCH) and key != FRESH_MISMATCH + SEVERAL:
            worker_id = key.removeprefix(FRESH_MISMATCH)
            num, surprise = (metrics.get(name + worker_id, 0.0) for name in (FRESH_TOKENS, FRESH_SURPRISE))
            if all(map(is_number, (mean, num, surprise))):
                yield ev.WorkerMismatch(worker_id, num, mean * num, surprise * num)


async def _keep_snapshots(head: Head) -> None:
    """Have the snapshots that there are kept in the run's store, if it has one. Publishing waits for a while: without
    the snapshot, a head that takes over could not have its groups sampled again as they were."""
    if head.contents is None or head.mirror is None:
        return
    keeping = head.spawn(head.contents.keep_snapshots())
    if not head.mirror.lag_seconds:
        await asyncio.wait({keeping}, timeout=UPLOAD_SECONDS)


def _raise_over(head: Head) -> None:
    """Raise PeerError if the run is over. A head that ended for want of disk space will be restarted, so the learner is
    told that its session is gone."""
    if head.ending.outcome is not None:
        kind, reason = head.ending.outcome
        raise PeerError("unknown_learner" if kind == "no_room" else "over", f"the run is over: {reason}")


def _raise_refused(commands: list[do.Command]) -> None:
    for command in commands:
        if isinstance(command, do.RefuseLearner):
            raise PeerError("refused", command.reason)
