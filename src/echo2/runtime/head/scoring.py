"""Scores delivered groups: the head decodes their tokens, and separate processes compute the rewards."""

from __future__ import annotations

from echo2.control.head import commands as do
from echo2.control.head import events as ev
from echo2.errors import PeerError, UserError
from echo2.reward.score import RewardFailure
from echo2.runtime.head.head import Head
from echo2.transport.limits import TEXT_CHARS_MAX
from echo2.transport.messages import encode_scores, parse_group, with_scores
from echo2.types import Attachment, RolloutGroup


async def score(head: Head, command: do.ScoreGroup) -> None:
    """Compute the rewards of a delivered group. A failure ends the group, not the run."""
    ref, delivered = command.group, command.rollouts
    await head.reader.loaded()  # a restarted head may hold groups before it has a snapshot
    event: ev.GroupScored | ev.GroupUnfit
    try:
        group = delivered.group if delivered is not None else None
        event = await _scored(head, group or parse_group(head.ledger.rollouts(ref.number)))
    except RewardFailure as error:
        event = ev.GroupUnfit(ref, "reward_failed", str(error), error.seconds, error.traceback)
    except UserError as error:
        event = ev.GroupUnfit(ref, "reward_failed", str(error))
    except PeerError as error:  # a text is too long for a reward function
        event = ev.GroupUnfit(ref, error.reason, error.detail)
    await head.tell(event)


async def _scored(head: Head, group: RolloutGroup) -> ev.GroupScored:
    """Return the event with the rewards of a group, and the seconds that they took."""
    task = await head.tasks.task(group.group, group.cursor)
    texts = head.reader.texts(group, task)
    if (longest := max(map(len, texts))) > TEXT_CHARS_MAX:
        raise PeerError("oversized", f"a rollout's text has {longest} characters; the limit is {TEXT_CHARS_MAX}")
    scores, seconds = await head.reward.scores(task, group.rollouts, texts)
    is_flat = len({reward for reward, _ in scores}) == 1
    # The scored group is attached only if `HeadEffects` uses it; the ledger stores just the scores.
    is_read = group.group.kind == "eval" or head.train_tasks.source_of(group.cursor)
    whole = with_scores(group, texts, scores) if is_read else None
    return ev.GroupScored(group.group, is_flat, seconds, Attachment(encode_scores(scores), whole))
