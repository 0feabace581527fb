"""The learner's client of the head: its half of `wire.proto`. It waits for a head that restarts.

Every call is repeated while the head is away, with growing pauses, for at most `patience_seconds` in a row. All calls
may be repeated: the head knows a step it has recorded and chunks it has. A restarted head gets again what it forgot:

* the learner: LearnerHello, with the version that it has. Each hello gives a new epoch, which every later call carries;
  while another learner is connected, the head refuses (`_hello`);
* the groups it has fed: TakeGroups again; groups already received are skipped;
* the step whose report was under way, which the head may or may not have recorded: see `_report_again`.

Runs in one asyncio loop; `session.py` wraps it for the training thread.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from echo2.core.background import spawn
from echo2.core.errors import InvariantError, LinkError, PeerError, UserError
from echo2.core.types import RUN_POLICY, RolloutGroup, SnapshotRef
from echo2.learner.core.publication import BasePayload, BorrowedWeights, ChunkedPayload, Payload, Publisher
from echo2.learner.link.sending import (
    AGAIN,
    CALL_SECONDS,
    UNKNOWN_LEARNER,
    WEIGHTS,
    WHOLE,
    OtherRanks,
    Patience,
    send_parts,
    upload,
)
from echo2.transport import wire_pb2 as wire
from echo2.transport.base import Link
from echo2.transport.limits import PROTOCOL_VERSION
from echo2.transport.message_bytes import LearnerLogprobs, encode_logprobs
from echo2.transport.messages import parse_group
from echo2.transport.routes import RouteShape, encode_shape
from echo2.weights.format.manifest import Manifest

log = logging.getLogger(__name__)

SENDS_MAX = 3  # attempts to send one payload, if the head loses chunks that it had when they were offered
MISSING = "missing"  # the head's reason: it no longer has chunks that it said it had
REFUSED = "refused"  # the head's reason: the run is not at the learner's version
TAKEN = "taken"  # the head's reason: another learner is connected
OVER = "over"  # the head's reason: the run is over
TAKEN_SECONDS = 30.0  # longer than the head needs to notice that a machine vanished without a word
TAKEN_PAUSE_SECONDS = 1.0
UNUSABLE_DELTA = "base"  # the head's reason: it needs the whole content instead of a delta

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class LearnerInfo:
    """A learner's report about itself. `vocab_size`: rows of its embedding; rollouts with tokens beyond are refused.
    `routes`: shape of the routes that it replays, if it replays any; others are refused."""

    device: str
    vocab_size: int
    routes: RouteShape | None = None


class HeadClient:
    """One learner's side of the protocol over `link`, usable after the first hello: see `join_head`."""

    def __init__(
        self,
        link: Link,
        version: int,
        info: LearnerInfo,
        publisher: Publisher,
        patience_seconds: float,
        on_stop: Callable[[str], None],
        others: OtherRanks,
        on_group: Callable[[RolloutGroup], object],
    ) -> None:
        self._others, self._on_group = others, on_group
        self._link = link
        self._publisher = publisher
        self._version = version  # the last version that the head acknowledged
        self._trained = version  # the version that the learner has: one more while a report is under way
        self._info = info
        self._patience_seconds = patience_seconds
        self._epoch = 0  # of the last welcome
        self._session: asyncio.Task[None] | None = None
        self._fault: Exception | None = None  # of the session: orders to stop are not heard any more
        self._on_stop = on_stop
        self.is_stopping = False  # calls no longer wait for an absent head
        self._joins = 0
        self._fed_at_join = 0  # the value of _joins when the last step's groups were complete
        self._join_lock = asyncio.Lock()
        self._publish_lock = asyncio.Lock()  # in order: each snapshot is encoded over the one before
        self.lineage = 0
        self.max_steps = 0
        self.published: set[int] = set()
        self._base_models: set[str] = set()  # ids of the base models that the head has

    async def take_groups(self, step: int) -> AsyncIterator[RolloutGroup | wire.StepDone]:
        """Yield the groups of `step` as they become available, each once, then a StepDone: no more groups follow for
        this step, or, with `stop`, for any other.

        Raises:
            LinkError: the head was away for too long.
            PeerError: the head sent a malformed message.
        """
        seen: set[int] = set()
        patience = Patience("TakeGroups", self._patience_seconds)
        while True:
            self._check()
            joins = self._joins
            try:
                async for fed in self._link.stream("TakeGroups", wire.TakeGroups(step=step, epoch=self._epoch)):
                    patience = Patience("TakeGroups", self._patience_seconds)
                    for group in map(parse_group, fed.groups):
                        if group.group.number not in seen:
                            seen.add(group.group.number)
                            yield group
                    if fed.HasField("done"):
                        self._fed_at_join = joins
                        yield fed.done
                        return
                raise LinkError("the head closed the stream before the step was whole")
            except LinkError as error:
                await self._pause(patience, error)
            except PeerError as error:
                if error.reason == OVER:
                    yield wire.StepDone(stop=True, reason=error.detail)
                    return
                if error.reason not in (UNKNOWN_LEARNER, REFUSED):
                    raise
                await self._pause(patience, error)
            # The head treats a broken stream as a lost learner, even if the head was not restarted.
            await self._patiently("LearnerHello", lambda joins=joins: self._join_again(joins))  # type: ignore[misc]

    async def report_step(
        self, step: int, numbers: Sequence[int], metrics: Mapping[str, Any], logprobs: LearnerLogprobs
    ) -> None:
        """Report a step as trained on exactly these groups. On return the head has recorded it."""
        self._trained = step + 1
        text = json.dumps(dict(metrics), allow_nan=False)
        request = wire.StepReport(step=step, groups=numbers, metrics_json=text, logprobs=encode_logprobs(logprobs))

        async def attempt() -> None:
            async with self._join_lock:  # no other call may say hello meanwhile
                if self._joins == self._fed_at_join:
                    try:
                        request.epoch = self._epoch
                        await self._link.call("ReportStep", request, CALL_SECONDS)
                        return
                    except PeerError as error:
                        if error.reason != UNKNOWN_LEARNER:
                            raise
                await self._report_again(request)

        await self._patiently("ReportStep", attempt)
        self._version = step + 1

    async def publish(self, version: int, weights: BorrowedWeights) -> None:
        """Encode a snapshot, send the chunks that the head lacks, and have it announced; one snapshot after the other.
        The weights are given back when they are encoded.
        """
        started = asyncio.get_running_loop().time()
        async with self._publish_lock:
            while version not in self.published:
                await self._publish(SnapshotRef(RUN_POLICY, self.lineage, version), weights, started)

    async def _publish(self, ref: SnapshotRef, weights: BorrowedWeights, started: float) -> None:
        base_model = self._publisher.base_model
        if base_model is not None and base_model.ref.policy not in self._base_models:
            await self._send(BasePayload(base_model), started)
            self._base_models.add(base_model.ref.policy)
        try:
            sent = await self._send(self._publisher.payload(ref, weights), started)
        except PeerError as error:
            if error.reason != UNUSABLE_DELTA:
                raise
            log.warning("version %d goes whole: %s", ref.version, error)
            sent = await self._send(self._publisher.whole(ref), started, WHOLE)
        if ref.lineage != self.lineage:
            return  # the head fell back meanwhile, and dropped the snapshots of the old lineage
        if self._publisher.published(sent):
            self._publisher.published(await self._send(self._publisher.whole(ref), started, WHOLE))
        self.published.add(ref.version)

    async def report_checkpoint(self, version: int, oldest_kept: int, versions: Sequence[int]) -> Collection[int]:
        """Report that a checkpoint of `version` is durable, and that the learner will resume from none older than
        `oldest_kept`. Return those of `versions` (all versions with checkpoints) that the head wants spared.
        """
        request = wire.CheckpointReport(version=version, oldest_kept=oldest_kept, versions=versions)

        async def attempt() -> Collection[int]:
            request.epoch = self._epoch
            return frozenset((await self._link.call("ReportCheckpoint", request, CALL_SECONDS)).spared)

        return await self._patiently("ReportCheckpoint", attempt)

    async def report_doing(self, text: str) -> None:
        """Report one line for people. Tried only once, because the next line follows in a moment."""
        await self._link.call("LearnerReport", wire.LearnerReport(doing=text, epoch=self._epoch), CALL_SECONDS)

    async def close(self) -> None:
        if self._session is not None:
            self._session.cancel()
        await self._link.close()

    async def _hello(self, version: int) -> None:
        """Say hello. If another learner is connected, wait a while: it may have died without a word. This learner must
        not take the place of a live one.
        """
        until = asyncio.get_running_loop().time() + TAKEN_SECONDS
        while True:
            try:
                return await self._hello_once(version)
            except PeerError as error:
                if error.reason != TAKEN:
                    raise
                if self.is_stopping or asyncio.get_running_loop().time() > until:
                    raise LinkError(f"the head refuses this learner: {error.detail}") from error
                log.warning("waiting up to %.0f s for its place: %s", TAKEN_SECONDS, error.detail)
                await asyncio.sleep(TAKEN_PAUSE_SECONDS)

    async def _hello_once(self, version: int) -> None:
        hello = wire.LearnerHello(
            protocol=PROTOCOL_VERSION,
            policy=RUN_POLICY,
            version=version,
            pid=os.getpid(),
            host=socket.gethostname(),
            device=self._info.device,
            vocab_size=self._info.vocab_size,
            epoch=self._epoch,
            routes=encode_shape(self._info.routes),
        )
        session = self._link.stream("LearnerHello", hello)
        try:
            async with asyncio.timeout(CALL_SECONDS):
                welcome = await anext(session)
        except (TimeoutError, StopAsyncIteration) as error:
            raise LinkError(f"the head did not welcome this learner within {CALL_SECONDS:.0f} s") from error
        if self._session is not None:
            self._session.cancel()
        self._session = spawn(self._attend(session), self._session_failed)
        self._epoch = welcome.epoch
        self.lineage, self.max_steps, self.published = welcome.lineage, welcome.max_steps, set(welcome.published)
        self._base_models = set(welcome.base_models)
        self._joins += 1
        if self._joins > 1:
            log.info("connected to the head again")

    async def _attend(self, session: AsyncIterator[wire.LearnerWelcome]) -> None:
        """Keep the session open. If the head ends it or goes away, the calls that need the head notice."""
        try:
            async for order in session:
                if order.stop:
                    self._on_stop(order.stop)
                if order.unscored:
                    self._on_group(parse_group(order.unscored))
        except (LinkError, PeerError) as error:
            seconds = self._patience_seconds
            log.info("the session with the head ended (%s); each call tries again for %.0f s", error, seconds)

    def _session_failed(self, error: Exception) -> None:
        self._fault = error

    def _check(self) -> None:
        if self._fault is not None:
            raise InvariantError(f"the session with the head failed: {self._fault!r}") from self._fault

    async def _join_again(self, joins: int) -> None:
        """Say hello, unless another call has done so since `joins` was read."""
        async with self._join_lock:
            if self._joins == joins:
                await self._hello_again()

    async def _hello_again(self) -> int:
        """Say hello at the version that the learner has; if the head has not recorded its last step, at the one before.
        Return the version. A head that has recorded the step would fall back if it heard the one before.
        """
        if self._trained > self._version:
            try:
                await self._hello(self._trained)
                return self._trained
            except PeerError as error:
                if error.reason != REFUSED:
                    raise
        await self._hello(self._version)
        return self._version

    async def _report_again(self, request: wire.StepReport) -> None:
        """Report a step to a head that may or may not have recorded it. If it has, all is well. If not, the step is
        repeated: the head feeds the same groups, which are skipped.
        """
        if await self._hello_again() > request.step:
            return
        fed_again: set[int] = set()
        async for fed in self._link.stream("TakeGroups", wire.TakeGroups(step=request.step, epoch=self._epoch)):
            fed_again.update(group.number for group in fed.groups)
            if fed.HasField("done"):
                break
        else:
            raise LinkError("the head closed the stream before the step was whole")
        if fed.done.stop:
            raise PeerError(OVER, f"the run is over; step {request.step} was not recorded")
        if fed_again != set(request.groups):
            raise InvariantError(
                f"step {request.step} was trained on groups {sorted(request.groups)}; the restarted head feeds "
                f"{sorted(fed_again)} for it"
            )
        request.epoch = self._epoch
        await self._link.call("ReportStep", request, CALL_SECONDS)

    async def _send(self, payload: ChunkedPayload, started: float, verb: str = WEIGHTS) -> Manifest:
        """Send a payload and have it announced. `started`: when the weights were lent. Chunks that the head dropped
        meanwhile are sent again. `verb`: what the other ranks do for it."""
        await self._send_shares(payload, verb)
        manifest = payload.manifest
        for sends_left in reversed(range(SENDS_MAX)):
            try:
                await self._patiently("Publish", partial(self._announce, manifest, started))
                return manifest
            except PeerError as error:
                if error.reason != MISSING or not sends_left:
                    raise
            await self._send_shares(payload, AGAIN)
        raise InvariantError("a payload is sent at least once")

    async def _send_shares(self, payload: ChunkedPayload, verb: str) -> None:
        """Send this rank's share of a payload, and have the other ranks send theirs. A base model is sent by the first
        rank alone."""
        others = self._others if isinstance(payload, Payload) else OtherRanks()
        await others.call(verb, payload.ref, self._epoch)
        if verb == AGAIN:
            await self._upload(payload, payload.names)
        else:
            await send_parts(payload, partial(self._upload, payload))
        sent = await others.answers()
        if verb != AGAIN and isinstance(payload, Payload):
            payload.others = [one.segments for one in sent]

    async def _upload(self, payload: ChunkedPayload, names: Sequence[bytes]) -> None:
        await self._patiently("PutChunk", lambda: upload(self._link, self._epoch, payload, names))

    async def _announce(self, manifest: Manifest, started: float) -> None:
        encode_seconds = asyncio.get_running_loop().time() - started
        request = wire.PublishRequest(manifest=manifest.text, encode_seconds=encode_seconds, epoch=self._epoch)
        await self._link.call("Publish", request, CALL_SECONDS)

    async def _patiently(self, what: str, attempt: Callable[[], Awaitable[T]]) -> T:
        """Repeat `attempt` while the head is away; join again if the head was restarted.

        Raises:
            LinkError: the head was away for `patience_seconds`.
            PeerError: the head refused.
        """
        patience = Patience(what, self._patience_seconds)
        while True:
            self._check()
            joins = self._joins
            try:
                return await attempt()
            except LinkError as error:
                await self._pause(patience, error)
            except PeerError as error:
                if error.reason != UNKNOWN_LEARNER:
                    raise
                await self._pause(patience, error)
                await self._patiently("LearnerHello", lambda joins=joins: self._join_again(joins))  # type: ignore[misc]

    async def _pause(self, patience: Patience, error: Exception) -> None:
        if self.is_stopping:
            raise LinkError(f"the head is away, and this learner is to stop: {error}") from error
        await patience.pause(error)


async def join_head(
    link: Link,
    version: int,
    info: LearnerInfo,
    publisher: Publisher,
    patience_seconds: float,
    on_stop: Callable[[str], None],
    others: OtherRanks | None = None,
    on_group: Callable[[RolloutGroup], object] = lambda group: None,
) -> HeadClient:
    """Say hello and return the connected client. `on_stop` is called with the reason why the run is over. `others`: the
    other ranks, if there are several. `on_group` is called with each group that the head announces, without its
    rewards.

    Raises:
        LinkError: the head did not answer within `patience_seconds`.
        UserError: the run is not at this learner's version, or it is over.
    """
    client = HeadClient(link, version, info, publisher, patience_seconds, on_stop, others or OtherRanks(), on_group)
    try:
        await client._patiently("LearnerHello", lambda: client._join_again(0))
    except BaseException as error:
        await client.close()
        if not isinstance(error, PeerError) or error.reason not in (REFUSED, OVER):
            raise
        raise UserError(f"The head refuses this learner: {error.detail}") from error
    return client
