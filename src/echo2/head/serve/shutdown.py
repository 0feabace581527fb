"""Stops a run in order: the learner saves a checkpoint while the head still records, then all processes end."""

from __future__ import annotations

import asyncio
import logging

from echo2.config.rundir import newest_checkpoint
from echo2.head.serve.head import Head
from echo2.transport import wire_pb2 as wire

log = logging.getLogger(__name__)

#: Timeout for the learner to finish its step and save a checkpoint.
SAVE_SECONDS = 600.0
#: Time in which a disconnected learner may reconnect.
LOST_SECONDS = 5.0
LOOK_SECONDS = 0.1


def told_to_stop(head: Head, reason: str) -> None:
    """Stop the run at the request of a person or the supervisor. The first request waits for the learner's checkpoint,
    even if the run is already stopping for another reason; the second one stops the run at once.
    """
    if head.was_told_to_stop:
        head.end("stopped", head.stopping)
    head.was_told_to_stop = True
    stop(head, reason)


def stop(head: Head, reason: str) -> None:
    """End the run once the learner has saved a checkpoint. Does nothing if the run is already stopping or over."""
    if head.stopping or head.outcome is not None:
        return
    head.stopping = reason
    log.info("stopping: %s; the learner saves a checkpoint of step %d", reason, head.planner.training.version)
    if head.learner is not None:
        head.learner.orders.put_nowait(wire.LearnerWelcome(stop=reason))
        if head.learner.feed is not None:
            head.learner.feed.put_nowait(wire.StepDone(stop=True, reason=reason))
    head.spawn(_end_when_saved(head))


def check_budget(head: Head) -> None:
    """Stop the run once its budget is spent."""
    budget = head.config.fleet.budget_usd
    if budget and head.costs.cum_usd(head.clock.now()) >= budget:
        stop(head, f"the budget of ${budget:g} is spent; raise fleet.budget_usd and continue with --resume")


async def _end_when_saved(head: Head) -> None:
    here_at = head.clock.now()
    try:
        async with asyncio.timeout(SAVE_SECONDS):
            while not has_saved(head) and head.clock.now() - here_at < LOST_SECONDS:
                await asyncio.sleep(LOOK_SECONDS)  # poll: the learner may save without a report, or be dead
                if head.learner is not None:
                    here_at = head.clock.now()
    except TimeoutError:
        log.warning(
            "the learner saved no checkpoint of step %d within %.0f s", head.planner.training.version, SAVE_SECONDS
        )
    head.end("stopped", head.stopping)


def has_saved(head: Head) -> bool:
    """Whether a checkpoint covers every recorded step, or nothing was trained and no learner is connected."""
    version = head.planner.training.version
    if version == 0 and head.learner is None:
        return True
    return head.planner.training.checkpoint_version >= version or newest_checkpoint(head.rundir.checkpoints) == version
