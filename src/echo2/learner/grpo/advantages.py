"""The advantage of each rollout over the others of its group.

Advantages depend on no other group, so groups can be trained on one by one as they arrive. With R_i the rewards of the
K rollouts of one group:

    grpo     (R_i - mean) / (std + 1e-6)      std is the sample standard deviation (K - 1), as in TRL and verl
    dr_grpo  R_i - mean
    rloo     R_i - mean of the other K - 1  =  K / (K - 1) * (R_i - mean)

Plain float64 arithmetic with `math.fsum`, so that the result does not depend on the order of the rollouts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

from echo2.errors import InvariantError

Advantage = Literal["grpo", "dr_grpo", "rloo"]
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
    if max(scores) == min(scores):
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
