"""The connection to the head for a busy training thread: an asyncio loop in a thread of its own does the networking.

Groups of the wanted step are received while the trainer works and wait in a queue (at most one step's groups).
Snapshots are encoded and sent in the background, one at a time and in order.
"""

from __future__ import annotations

import asyncio
import queue
import time
from collections.abc import Awaitable, Callable, Collection, Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError, Future
from typing import Any, TypeVar

from echo2.core.errors import LinkError, PeerError
from echo2.core.loop_thread import LoopThread
from echo2.core.types import RolloutGroup
from echo2.learner.core.publication import BorrowedWeights, Publisher
from echo2.learner.link.head_client import HeadClient, LearnerInfo, join_head
from echo2.learner.link.sending import OtherRanks
from echo2.transport import wire_pb2 as wire
from echo2.transport.base import Link
from echo2.transport.message_bytes import LearnerLogprobs

DOING_SECONDS = 1.0  # between reports of the learner's activity
T = TypeVar("T")


class HeadSession:
    """A connection to the head. All methods but `stop` are for the one training thread; `close` ends the session.

    Errors of background work (LinkError, PeerError, UserError) are raised by the next call that waits for it. A call
    that waits for a session which is closed raises LinkError.
    """

    def __init__(
        self,
        connect: Callable[[], Awaitable[Link]],
        version: int,
        info: LearnerInfo,
        publisher: Publisher,
        patience_seconds: float = 120.0,
        others: OtherRanks | None = None,
        on_group: Callable[[RolloutGroup], object] = lambda group: None,
    ) -> None:
        """Connect and say hello. `others`: the other ranks, if there are several. `on_group` is called with each group
        when its rewards begin to be computed, as far as the head says so, and when it arrives, in the session's thread.

        Raises:
            LinkError: the head did not answer within `patience_seconds`.
            UserError: the run is not at this learner's version, or it is over.
        """

        self._others, self._on_group = others or OtherRanks(), on_group

        async def join() -> HeadClient:
            await self._others.open()
            link = await connect()
            return await join_head(link, version, info, publisher, patience_seconds, self.stop, self._others, on_group)

        self.doing = "starting"
        self.stop_reason = ""  # why training must end; empty: it goes on
        self._joined: HeadClient | None = None
        self._publisher = publisher
        self._thread = LoopThread("head-session")
        self._feed: queue.SimpleQueue[RolloutGroup | wire.StepDone | Exception] = queue.SimpleQueue()
        self._publications: dict[int, Future[None]] = {}
        try:
            self._client = self._joined = self._wait(join())
        except BaseException:
            self._thread.close(self._leave)
            raise
        if self.stop_reason:  # the head stopped the run before `_joined` was there
            self._client.is_stopping = True
        self._reporter = self._start(self._report_doing())

    def stop(self, reason: str) -> None:
        """End training soon: `groups` ends, and no call waits for the head any more. From any thread or signal."""
        if not self.stop_reason:
            self.stop_reason = reason
            self._feed.put(wire.StepDone(stop=True, reason=reason))
            self._publisher.stop()
            if self._joined is not None:
                self._joined.is_stopping = True

    @property
    def max_steps(self) -> int:
        """Training steps of the run, as the head last said."""
        return self._client.max_steps

    @property
    def lineage(self) -> int:
        """The lineage that versions belong to now; it changes when the head falls back to a checkpoint."""
        return self._client.lineage

    @property
    def published(self) -> frozenset[int]:
        """Versions that workers can get, now or soon: publications under way count."""
        return frozenset(self._client.published | set(self._publications))

    def want_groups(self, step: int) -> None:
        """Start receiving the groups of `step`; the stream of the previous step must have ended."""
        self._start(self._pump(step))

    def groups(self) -> Iterator[RolloutGroup | wire.StepDone]:
        """Yield the groups of the wanted step in order of arrival, waiting for each; the last item is a StepDone."""
        while True:
            item = self._feed.get()
            if isinstance(item, Exception):
                raise item
            yield item
            if isinstance(item, wire.StepDone):
                return

    @property
    def has_arrived(self) -> bool:
        """Whether `groups` has an item without waiting."""
        return not self._feed.empty()

    def report_step(
        self, step: int, numbers: Sequence[int], metrics: Mapping[str, Any], logprobs: LearnerLogprobs
    ) -> None:
        """Wait until the head has recorded the step."""
        self.doing = f"reporting step {step}"
        self._wait(self._client.report_step(step, numbers, metrics, logprobs))

    def publish(self, version: int, weights: BorrowedWeights) -> None:
        """Send a snapshot in the background, after earlier ones. At most one waits, because the weights can't change
        before they are given back."""
        self.doing = f"publishing version {version}"
        publication = self._start(self._client.publish(version, weights))
        publication.add_done_callback(lambda _: weights.release())  # also if it never began
        publication.add_done_callback(self._end_waiting)
        for before in [before for before, sent in self._publications.items() if sent.done()]:
            _result(self._publications.pop(before))
        self._publications[version] = publication

    def finish_publishing(self, but: int = -1) -> None:
        """Wait for the snapshots under way, except that of version `but`."""
        for version in list(self._publications):
            if version != but or self._publications[version].done():
                _result(self._publications.pop(version))

    def report_checkpoint(self, version: int, oldest_kept: int, versions: Sequence[int]) -> Collection[int]:
        """Wait until the head knows that this checkpoint is durable. Return those of `versions` to be spared."""
        return self._wait(self._client.report_checkpoint(version, oldest_kept, versions))

    def close(self) -> None:
        """End the session; work under way is abandoned, but an encoding runs to its end. A second call does nothing."""
        self.stop("the session with the head is closed")  # a signal during `close` finds the reason, and does nothing
        self._thread.close(self._leave)

    def _end_waiting(self, publication: Future[None]) -> None:
        """End the wait for groups if a publication fails: rollouts of a snapshot that can't be sent never come."""
        error = None if publication.cancelled() else publication.exception()
        if isinstance(error, Exception):
            self._feed.put(error)

    async def _leave(self) -> None:
        self._others.close()
        if self._joined is not None:
            await self._joined.close()

    async def _pump(self, step: int) -> None:
        try:
            async for item in self._client.take_groups(step):
                if isinstance(item, RolloutGroup):
                    self._on_group(item)
                self._feed.put(item)
        except Exception as error:  # handled by the training thread
            self._feed.put(error)

    async def _report_doing(self) -> None:
        reported, reported_at = "", 0.0
        while True:
            doing = self._publisher.trouble or self.doing
            if doing != reported or time.monotonic() - reported_at > DOING_SECONDS * 10:
                reported, reported_at = doing, time.monotonic()
                try:
                    await self._client.report_doing(reported)
                except (LinkError, PeerError):
                    reported = ""  # the head is away; the calls that matter wait for it and say so
            await asyncio.sleep(DOING_SECONDS)

    def _start(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        return self._thread.start(work)

    def _wait(self, work: Coroutine[Any, Any, T]) -> T:
        return _result(self._start(work))


def _result(work: Future[T]) -> T:
    """Wait for work of the session. Raises LinkError if the session was closed before it ended; and what it raised."""
    try:
        return work.result()
    except CancelledError as error:
        raise LinkError("the session with the head is closed") from error
