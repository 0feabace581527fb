"""What the sums over a step's tokens are divided by, in two parts that both stream: a weight for each token, known from
its own sequence, and one divisor, known when the step has all its groups.

Shape suffixes: n = loss tokens.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from echo2.learner.losses import LossTokens

Normalisation = Literal["token", "sequence", "constant"]


def weigh(loss_n: Tensor, tokens: LossTokens, kind: Normalisation) -> Tensor:
    """Token losses as they enter the sum: with `sequence`, over the number of loss tokens of their sequence."""
    if kind != "sequence":
        return loss_n
    return loss_n / torch.bincount(tokens.sequence_n, minlength=tokens.num_sequences)[tokens.sequence_n]


def divisor_of(kind: Normalisation, num_tokens: int, num_rollouts: int, max_tokens: int) -> float:
    """The one division of a step, at least 1."""
    counts = {"token": num_tokens, "sequence": num_rollouts, "constant": num_rollouts * max_tokens}
    return float(max(1, counts[kind]))
