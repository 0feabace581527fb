"""Stops a run in order: the learner saves a checkpoint while the head still records, then all processes end."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

from echo2.rundir import newest_checkpoint
from echo2.transport import wire_pb2 as wire

if TYPE_CHECKING:
    from echo2.runtime.head.head import Head

log = logging.getLogger(__name__)

#: Seconds that the learner has to end its step and to save.
SAVE_SECONDS = 600.0
#: Seconds in which a learner that is gone may come back.
LOST_SECONDS = 5.0
LOOK_SECONDS = 0.1


def told_to_stop(head: Head, reason: str) -> None:
    """A person or the supervisor says that the run is to stop. Said again, it stops at once; the first time it does
    not, even if it is about to stop for a reason of its own.
    """
    if head.was_told_to_stop:
        head.end("stopped", head.stopping)
    head.was_told_to_stop = True
    stop(head, reason)


def stop(head: Head, reason: str) -> None:
    """End the run once the learner has saved. Does nothing if this is under way."""
    if head.stopping or head.outcome is not None:
        return
    head.stopping = reason
    log.info("stopping: %s; the learner saves a checkpoint of step %d", reason, head.planner.version)
    if head.learner is not None:
        head.learner.orders.put_nowait(wire.LearnerWelcome(stop=reason))
        if head.learner.feed is not None:
            head.learner.feed.put_nowait(wire.StepDone(stop=True, reason=reason))
    head.spawn(_end_when_saved(head))


async def _end_when_saved(head: Head) -> None:
    here_at = head.clock.now()
    try:
        async with asyncio.timeout(SAVE_SECONDS):
            while not has_saved(head) and head.clock.now() - here_at < LOST_SECONDS:
                await asyncio.sleep(LOOK_SECONDS)  # the learner need not tell, and may be dead
                if head.learner is not None:
                    here_at = head.clock.now()
    except TimeoutError:
        log.warning("the learner saved no checkpoint of step %d within %.0f s", head.planner.version, SAVE_SECONDS)
    head.end("stopped", head.stopping)


def has_saved(head: Head) -> bool:
    """Whether a checkpoint covers every recorded step, or nothing was trained and no learner is there."""
    version = head.planner.version
    if version == 0 and head.learner is None:
        return True
    return head.planner.checkpoint_version >= version or newest_checkpoint(head.rundir.checkpoints) == version
