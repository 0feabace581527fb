"""Delivered groups become training data: the head reads their tokens, and the process beside it scores them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from echo2.control import events as ev
from echo2.errors import PeerError, UserError
from echo2.transport.limits import TEXT_CHARS_MAX
from echo2.transport.messages import with_rollouts
from echo2.types import GroupRef, RolloutGroup

if TYPE_CHECKING:
    from echo2.runtime.head import Head


async def score(head: Head, ref: GroupRef) -> None:
    """Texts and rewards for a delivered group. What fails here is the group's end, not the run's."""
    await head.reader.loaded()  # a head that was restarted may hold groups before it has a snapshot
    began = head.clock.now()
    try:
        group = head.delivered_group(ref)
        if group is None:
            return
        scored = await _scored(head, group)
        head.keep_scored(scored)
    except UserError as error:
        head.happen(ev.GroupUnfit(ref, "reward_failed", str(error), head.clock.now() - began))
    except PeerError as error:  # with its texts it is too large to be kept, or to be read by the learner
        head.happen(ev.GroupUnfit(ref, error.reason, error.detail))
    else:
        head.happen(ev.GroupScored(ref, scored.is_flat))


async def _scored(head: Head, group: RolloutGroup) -> RolloutGroup:
    read = group.rollouts if group.logged else head.reader.read(group.rollouts)
    longest = max(len(rollout.text) for rollout in read)
    if longest > TEXT_CHARS_MAX:
        raise PeerError("oversized", f"a rollout's text has {longest} characters; the limit is {TEXT_CHARS_MAX}")
    return with_rollouts(group, await head.reward.score(head.task_of(group.group, group.cursor), read))
