"""Turns scored groups into data: advantages, loss weights, and the divisor of the sums over a step's tokens.

The normalisation has two parts, so that a step can be streamed: a weight for each token, known from its own sequence,
and one divisor, known when the step has all its groups. The divisors:

    token      N, the loss tokens of the step
    sequence   B, the rollouts of the step; each token is weighted by 1 / (loss tokens of its rollout)
    constant   B * max_tokens
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from typing import Literal

from echo2.learner.datum import Datum
from echo2.learner.grpo.advantages import Advantage, group_advantages
from echo2.types import RolloutGroup

Normalisation = Literal["token", "sequence", "constant"]


@dataclass(frozen=True, slots=True)
class GroupData:
    """A group's part of a step. `num_tokens` and `num_rollouts` count in N and B even if `data` is empty: a group
    without reward variance has no policy gradient, but it counts.
    """

    num_tokens: int
    num_rollouts: int
    data: tuple[Datum, ...]


def group_data(
    group: RolloutGroup,
    version: int,
    advantage: Advantage,
    normalisation: Normalisation,
    keeps_flat: bool,
) -> GroupData:
    """Convert the group's rollouts to data for the step that trains `version`. `keeps_flat`: also if all rewards are
    equal.

    Raises:
        InvariantError: the group is unscored.
    """
    advantages = group_advantages([rollout.reward for rollout in group.rollouts], advantage)
    data = []
    for rollout, value in zip(group.rollouts, advantages, strict=True):
        length, count = len(rollout.tokens), rollout.loss_mask.count(1)
        if not count:
            continue
        datum = Datum(
            prompt_tokens=group.prompt_tokens,
            tokens=rollout.tokens,
            loss_mask=rollout.loss_mask,
            weights=array("d", [1.0 / count]) * length if normalisation == "sequence" else None,
            advantages=array("d", [value]) * length,
            behaviour_logprobs=rollout.logprobs,
            version_spans=() if group.logged else rollout.version_spans,
            version=version,
            source=group.worker_id,
            support_tokens=rollout.support_tokens,
            support_offsets=rollout.support_offsets,
            top_tokens=rollout.top_tokens,
            top_logprobs=rollout.top_logprobs,
        )
        data.append((count, datum))
    has_gradient = keeps_flat or any(advantages)
    return GroupData(
        sum(count for count, _ in data), len(data), tuple(datum for _, datum in data) if has_gradient else ()
    )


def divisor_of(kind: Normalisation, num_tokens: int, num_rollouts: int, max_tokens: int) -> float:
    """Return the divisor of a step, at least 1."""
    counts = {"token": num_tokens, "sequence": num_rollouts, "constant": num_rollouts * max_tokens}
    return float(max(1, counts[kind]))
