"""Scores delivered groups: the head decodes their tokens, and processes beside it compute the rewards."""

from __future__ import annotations

from typing import TYPE_CHECKING

from echo2.control.head import commands as do
from echo2.control.head import events as ev
from echo2.errors import PeerError, UserError
from echo2.reward.score import RewardFailure
from echo2.transport.limits import TEXT_CHARS_MAX
from echo2.transport.messages import encode_scores, parse_group, with_rollouts
from echo2.types import Attachment, RolloutGroup

if TYPE_CHECKING:
    from echo2.runtime.head.head import Head


async def score(head: Head, command: do.ScoreGroup) -> None:
    """Rewards for a delivered group. What fails here is the group's end, not the run's."""
    ref, delivered = command.group, command.rollouts
    await head.reader.loaded()  # a head that was restarted may hold groups before it has a snapshot
    try:
        group = delivered.group if delivered is not None else None
        scored, seconds = await _scored(head, group or parse_group(head.ledger.rollouts(ref.number)))
    except RewardFailure as error:
        await head.tell(ev.GroupUnfit(ref, "reward_failed", str(error), error.seconds, error.traceback))
    except UserError as error:
        await head.tell(ev.GroupUnfit(ref, "reward_failed", str(error)))
    except PeerError as error:  # its text is too long to be handed to a reward function
        await head.tell(ev.GroupUnfit(ref, error.reason, error.detail))
    else:
        scores = Attachment(encode_scores(scored.rollouts), scored)
        await head.tell(ev.GroupScored(ref, scored.is_flat, seconds, scores))


async def _scored(head: Head, group: RolloutGroup) -> tuple[RolloutGroup, float]:
    """The group with texts and rewards, and the seconds that the rewards took."""
    task = await head.tasks.task(group.group, group.cursor)
    read = head.reader.read(group, task)
    longest = max(len(rollout.text) for rollout in read)
    if longest > TEXT_CHARS_MAX:
        raise PeerError("oversized", f"a rollout's text has {longest} characters; the limit is {TEXT_CHARS_MAX}")
    rollouts, seconds = await head.reward.score(task, read)
    return with_rollouts(group, rollouts), seconds
