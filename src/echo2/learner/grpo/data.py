"""Turns scored groups into data: advantages, loss weights, and the divisor of the sums over a step's tokens.

Advantages depend on no other group, so groups can be trained on one by one as they arrive. With R_i the rewards of the
K rollouts of one group:

    grpo     (R_i - mean) / (std + 1e-6)      std is the sample standard deviation (K - 1), as in TRL and verl
    dr_grpo  R_i - mean
    rloo     R_i - mean of the other K - 1  =  K / (K - 1) * (R_i - mean)
    none     0: a teacher's part alone is trained on (`teachers.py`), which is added in the pass over the tokens

A rollout of several rows counts as one: K, mean, std and B count rollouts, and each row has its rollout's advantage.

Plain float64 arithmetic with `math.fsum`, so that the result does not depend on the order of the rollouts.

The normalisation has two parts, so that a step can be streamed: a weight for each token, known from its own sequence,
and one divisor, known when the step has all its groups. The divisors:

    token      N, the loss tokens of the step
    sequence   B, the rollouts of the step; each token is weighted by 1 / (loss tokens of all rows of its rollout)
    constant   B * max_tokens
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from dataclasses import dataclass

from echo2.config.values import Advantage, Normalisation
from echo2.core.errors import InvariantError
from echo2.core.types import Rollout, RolloutGroup
from echo2.learner.core.datum import Datum
from echo2.transport.routes import RouteShape, unpacked

STD_EPSILON = 1e-6


def group_advantages(rewards: Sequence[float | None], kind: Advantage) -> tuple[float, ...]:
    """Return the advantages of one group's rollouts, in the same order.

    A group whose rewards are all equal gives exact zeros: it has nothing to teach.

    Raises:
        InvariantError: a reward is missing or not finite; the head must never feed such a group.
    """
    scores = [reward for reward in rewards if reward is not None and math.isfinite(reward)]
    if not scores or len(scores) != len(rewards):
        raise InvariantError(
            f"a group reached the learner with the rewards {list(rewards)}; all must be finite numbers"
        )
    if kind == "none" or max(scores) == min(scores):
        return (0.0,) * len(scores)
    count = len(scores)
    mean = math.fsum(scores) / count
    centred = [score - mean for score in scores]
    if kind == "rloo":
        return tuple(value * count / (count - 1) for value in centred)
    if kind == "dr_grpo":
        return tuple(centred)
    std = math.sqrt(math.fsum(value * value for value in centred) / (count - 1))
    return tuple(value / (std + STD_EPSILON) for value in centred)


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
    routes: RouteShape | None = None,
) -> GroupData:
    """Convert the group's rollouts to data for the step that trains `version`. `keeps_flat`: also if all rewards are
    equal. `routes`: their shape, if the policy replays them.

    Raises:
        InvariantError: the group is unscored.
    """
    group = group if routes is None else unpacked(group)
    by_rollout = group.by_rollout
    advantages = group_advantages([rows[0].reward for rows in by_rollout], advantage)
    counts = [sum(row.loss_mask.count(1) for row in rows) for rows in by_rollout]
    has_gradient = keeps_flat or any(advantages)
    return GroupData(
        sum(counts),
        sum(1 for count in counts if count),
        tuple(
            _datum(group, row, version, value, 1.0 / count if normalisation == "sequence" else None, routes)
            for rows, value, count in zip(by_rollout, advantages, counts, strict=True)
            for row in rows
            if has_gradient and 1 in row.loss_mask
        ),
    )


def _datum(
    group: RolloutGroup, row: Rollout, version: int, advantage: float, weight: float | None, routes: RouteShape | None
) -> Datum:
    length = len(row.tokens)
    return Datum(
        prompt_tokens=group.prompt_tokens,
        tokens=row.tokens,
        loss_mask=row.loss_mask,
        weights=None if weight is None else array("d", [weight]) * length,
        advantages=array("d", [advantage]) * length,
        behaviour_logprobs=row.logprobs,
        version_spans=() if group.logged else row.version_spans,
        version=version,
        source=group.worker_id,
        support_tokens=row.support_tokens,
        support_offsets=row.support_offsets,
        routes=routes.read(row.routes) if routes is not None and row.routes else None,
    )


def divisor_of(kind: Normalisation, num_tokens: int, num_rollouts: int, max_tokens: int) -> float:
    """Return the divisor of a step, at least 1."""
    counts = {"token": num_tokens, "sequence": num_rollouts, "constant": num_rollouts * max_tokens}
    return float(max(1, counts[kind]))
