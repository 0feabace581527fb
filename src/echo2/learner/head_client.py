"""The head as the learner sees it: the learner's half of `wire.proto`, patient with a head that is restarted.

Every call is repeated while the head is away, with growing pauses, for at most `patience_seconds` in a row. All calls
may be repeated: the head knows a step it has recorded and chunks it has. What a restarted head no longer knows is
told again:

* it does not know the learner: LearnerHello, with the version whose report it last acknowledged;
* it does not know what it fed: TakeGroups again, groups already received are passed over;
* it may or may not have recorded the step whose report was under way: see `_report_again`.

Runs in one asyncio loop; `session.py` gives the training thread its plain face.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from echo2.errors import InvariantError, LinkError, PeerError, UserError
from echo2.learner.publication import Offer, Publisher, PublishOptions
from echo2.transport import wire_pb2 as wire
from echo2.transport.base import Link
from echo2.transport.limits import PROTOCOL_VERSION
from echo2.transport.messages import decode_group
from echo2.types import RolloutGroup, Snapshot, SnapshotRef, TensorBytes

log = logging.getLogger(__name__)

CALL_SECONDS = 30.0  # one attempt of a small call
FIRST_PAUSE_SECONDS = 0.1
LONGEST_PAUSE_SECONDS = 3.0
PUBLISH_SECONDS = 600.0  # the head answers when it has rebuilt the whole content of a delta
PARALLEL_CHUNKS = 8  # enough to hide the round trip of a chunk, few enough to be bounded in memory
OFFERS_MAX = 3  # of one payload, where the head lost chunks that it had when it was offered
MISSING = "missing"  # the head's word for: chunks that I said I had are gone
UNKNOWN_LEARNER = "unknown_learner"  # the head's word for: I was restarted, say hello
REFUSED = "refused"  # the head's word for: the run does not stand where you say
UNUSABLE_DELTA = ("base", "corrupt")  # the head's words for: send the whole content instead

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class StepEnd:
    """No more groups come for this step. `cursor`: position in the task stream after it. `stop`: nor for any other."""

    cursor: int
    num_groups: int
    stop: bool
    reason: str


@dataclass(frozen=True, slots=True)
class LearnerInfo:
    """What a learner tells of itself. `vocab_size`: rows of its embedding; a rollout with a token beyond is refused."""

    device: str
    vocab_size: int
    resumed: bool


class HeadClient:
    """One learner's dealings with the head over `link`, after its first hello (`join_head`)."""

    def __init__(
        self, link: Link, version: int, info: LearnerInfo, options: PublishOptions, patience_seconds: float
    ) -> None:
        self._link = link
        self._publisher = Publisher(options)
        self._version = version  # the last one that the head acknowledged
        self._info = info
        self._patience_seconds = patience_seconds
        self._joins = 0
        self._fed_at_join = 0  # the value of _joins when the last step's groups were complete
        self._join_lock = asyncio.Lock()
        self._publish_lock = asyncio.Lock()  # in order: each is encoded over the one before
        self.lineage = 0
        self.max_steps = 0
        self.published: set[int] = set()

    async def take_groups(self, step: int) -> AsyncIterator[RolloutGroup | StepEnd]:
        """The groups of `step` as they become available, each once, then a StepEnd.

        Raises:
            LinkError: the head was away for too long.
            PeerError: it sent something malformed.
        """
        seen: set[int] = set()
        patience = _Patience("TakeGroups", self._patience_seconds)
        while True:
            joins = self._joins
            try:
                async for fed in self._link.stream("TakeGroups", wire.TakeGroups(step=step)):
                    patience = _Patience("TakeGroups", self._patience_seconds)
                    for group in map(decode_group, fed.groups):
                        if group.group.number not in seen:
                            seen.add(group.group.number)
                            yield group
                    if fed.HasField("done"):
                        self._fed_at_join = joins
                        yield StepEnd(fed.done.cursor, fed.done.num_groups, fed.done.stop, fed.done.reason)
                        return
                raise LinkError("the head closed the stream before the step was whole")
            except LinkError as error:
                await patience.pause(error)
            except PeerError as error:
                if error.reason not in (UNKNOWN_LEARNER, REFUSED):
                    raise
                await patience.pause(error)
            # A broken stream counts as a lost learner at the head, even when it was not restarted.
            await self._patiently("LearnerHello", lambda joins=joins: self._join_again(joins))  # type: ignore[misc]

    async def report_step(self, step: int, numbers: Sequence[int], metrics: Mapping[str, Any]) -> None:
        """The step is done with exactly these groups. On return the head has recorded it."""
        request = wire.StepReport(step=step, groups=numbers, metrics_json=json.dumps(dict(metrics), allow_nan=False))

        async def attempt() -> None:
            async with self._join_lock:  # no other call may say hello in the middle of this
                if self._joins == self._fed_at_join:
                    try:
                        await self._link.call("ReportStep", request, CALL_SECONDS)
                        return
                    except PeerError as error:
                        if error.reason != UNKNOWN_LEARNER:
                            raise
                await self._report_again(request)

        await self._patiently("ReportStep", attempt)
        self._version = step + 1

    async def publish(self, version: int, tensors: Mapping[str, TensorBytes], files: Mapping[str, bytes]) -> None:
        """Encode a snapshot, send the chunks that the head lacks, and have it announced; one after the other.

        On return the head has the whole content, too. `tensors` stay in memory as the base of the next delta.
        """
        started = asyncio.get_running_loop().time()
        async with self._publish_lock:
            while version not in self.published:
                await self._publish(Snapshot(SnapshotRef(self.lineage, version), tensors, files), started)

    async def _publish(self, target: Snapshot, started: float) -> None:
        # Encoding takes as long as a few copies: beside the loop, so that arriving groups do not wait for it.
        delta = await asyncio.to_thread(self._publisher.delta, target)
        as_delta = delta is not None and await self._publish_delta(delta, started)
        if not as_delta:
            await self._publish_whole(target, started)
        if target.ref.lineage != self.lineage:
            return  # the head fell back meanwhile, and has dropped what was published under the old one
        if self._publisher.published(target, as_delta):
            await self._publish_whole(target, started)
            self._publisher.sent_whole()
        self.published.add(target.ref.version)

    async def _publish_delta(self, delta: Offer, started: float) -> bool:
        """False: the head can't use it."""
        try:
            await self._patiently("Publish", lambda: self._upload(delta, started))
        except PeerError as error:
            if error.reason not in UNUSABLE_DELTA:
                raise
            log.warning("version %d goes whole: %s", delta.manifest.version, error)
            return False
        return True

    async def _publish_whole(self, target: Snapshot, started: float) -> None:
        whole = await asyncio.to_thread(self._publisher.whole, target)
        await self._patiently("Publish", lambda: self._upload(whole, started))

    async def report_checkpoint(self, version: int, oldest_kept: int) -> None:
        """A checkpoint of `version` is durable; none older than `oldest_kept` exists any more."""
        request = wire.CheckpointReport(version=version, oldest_kept=oldest_kept)
        await self._patiently("ReportCheckpoint", lambda: self._link.call("ReportCheckpoint", request, CALL_SECONDS))

    async def report_doing(self, text: str) -> None:
        """One line for people. Tried once: the next one is along in a moment."""
        await self._link.call("LearnerReport", wire.LearnerReport(doing=text), CALL_SECONDS)

    async def close(self) -> None:
        await self._link.close()

    async def _hello(self, version: int) -> None:
        hello = wire.LearnerHello(
            protocol=PROTOCOL_VERSION,
            version=version,
            pid=os.getpid(),
            host=socket.gethostname(),
            device=self._info.device,
            resumed=self._info.resumed,
            vocab_size=self._info.vocab_size,
        )
        welcome = await self._link.call("LearnerHello", hello, CALL_SECONDS)
        self.lineage, self.max_steps, self.published = welcome.lineage, welcome.max_steps, set(welcome.published)
        self._joins += 1

    async def _join_again(self, joins: int) -> None:
        """Say hello, unless another call has done so since `joins` was read."""
        async with self._join_lock:
            if self._joins == joins:
                await self._hello(self._version)

    async def _report_again(self, request: wire.StepReport) -> None:
        """Report a step to a head that was restarted and may or may not have recorded it.

        If it has, it welcomes a learner that stands behind that step, and all is well. If not, it refuses one, and is
        led through the step again: it feeds the same groups, which are passed over.
        """
        try:
            await self._hello(request.step + 1)
            return
        except PeerError as error:
            if error.reason != REFUSED:
                raise
        await self._hello(request.step)
        fed_again: set[int] = set()
        async for fed in self._link.stream("TakeGroups", wire.TakeGroups(step=request.step)):
            fed_again.update(group.number for group in fed.groups)
            if fed.HasField("done"):
                break
        else:
            raise LinkError("the head closed the stream before the step was whole")
        if fed.done.stop:
            raise PeerError(REFUSED, f"the run is over; step {request.step} was not recorded")
        if fed_again != set(request.groups):
            raise InvariantError(
                f"step {request.step} was trained on groups {sorted(request.groups)}; the restarted head feeds "
                f"{sorted(fed_again)} for it"
            )
        await self._link.call("ReportStep", request, CALL_SECONDS)

    async def _upload(self, offer: Offer, started: float) -> None:
        """`started`: when the copy of the weights was there. What the head threw away meanwhile is sent again."""
        for offers_left in reversed(range(OFFERS_MAX)):
            try:
                await self._upload_once(offer, started)
                return
            except PeerError as error:
                if error.reason != MISSING or not offers_left:
                    raise

    async def _upload_once(self, offer: Offer, started: float) -> None:
        ref, raw = offer.manifest.ref, offer.manifest.to_bytes()
        request = wire.PublishRequest(lineage=ref.lineage, version=ref.version)
        if offer.is_delta:
            request.delta = raw
        else:
            request.manifest = raw
        missing = (await self._link.call("OfferSnapshot", request, CALL_SECONDS)).hashes
        at_once = asyncio.Semaphore(PARALLEL_CHUNKS)

        async def put(name: bytes) -> None:
            async with at_once:
                await self._link.call("PutChunk", wire.Chunk(hash=name, data=bytes(offer.chunks[name])), CALL_SECONDS)

        try:
            async with asyncio.TaskGroup() as tasks:
                for name in missing:
                    tasks.create_task(put(name))
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from errors
        request.encode_seconds = asyncio.get_running_loop().time() - started
        await self._link.call("Publish", request, PUBLISH_SECONDS)

    async def _patiently(self, what: str, attempt: Callable[[], Awaitable[T]]) -> T:
        """Repeat `attempt` while the head is away, joining again where it was restarted.

        Raises:
            LinkError: it was away for `patience_seconds`.
            PeerError: it refused.
        """
        patience = _Patience(what, self._patience_seconds)
        while True:
            joins = self._joins
            try:
                return await attempt()
            except LinkError as error:
                await patience.pause(error)
            except PeerError as error:
                if error.reason != UNKNOWN_LEARNER:
                    raise
                await patience.pause(error)
                await self._patiently("LearnerHello", lambda joins=joins: self._join_again(joins))  # type: ignore[misc]


async def join_head(
    connect: Callable[[], Awaitable[Link]],
    version: int,
    info: LearnerInfo,
    options: PublishOptions,
    patience_seconds: float = 120.0,
) -> HeadClient:
    """Connect and say hello; the client that can be used from then on.

    Raises:
        LinkError: the head did not come within `patience_seconds`.
        UserError: the run does not stand where this learner does.
    """
    link = await _connect_patiently(connect, patience_seconds)
    client = HeadClient(link, version, info, options, patience_seconds)
    try:
        await client._patiently("LearnerHello", lambda: client._join_again(0))
    except PeerError as error:
        await link.close()
        if error.reason != REFUSED:
            raise
        raise UserError(f"The head does not take this learner: {error.detail}") from error
    return client


async def _connect_patiently(connect: Callable[[], Awaitable[Link]], seconds: float) -> Link:
    patience = _Patience("connecting", seconds)
    while True:
        try:
            return await connect()
        except LinkError as error:
            await patience.pause(error)


class _Patience:
    """Growing pauses, until it runs out."""

    def __init__(self, what: str, seconds: float) -> None:
        self._what = what
        self._seconds = seconds
        self._since: float | None = None
        self._pause = FIRST_PAUSE_SECONDS

    async def pause(self, error: Exception) -> None:
        now = asyncio.get_running_loop().time()
        self._since = now if self._since is None else self._since
        if now - self._since >= self._seconds:
            raise LinkError(f"{self._what}: the head has not answered for {self._seconds:.0f} s: {error}") from error
        await asyncio.sleep(self._pause)
        self._pause = min(2 * self._pause, LONGEST_PAUSE_SECONDS)
