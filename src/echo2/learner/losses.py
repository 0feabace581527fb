"""Policy losses that survive stale data, as un-normalised sums over loss tokens.

Nothing here divides by a batch size: sums over any split of a step add up to the step's sum, and the trainer divides
once. Both losses are anchored to the *behaviour* logprobs (the sampler's own); there is no second forward pass.

Legend: pi = current policy, mu = behaviour, A = advantage, l = log pi - log mu, r = exp(clamp(l, -20, 20)), sg = no
gradient.

    ppo   sum_t -min(r A, clip(r, 1 - clip_low, 1 + clip_high) A)
    dppo  sum_t -keep * sg(min(r, 10)) * A * log pi  +  1e-3 * l^2
          keep drops A > 0 with pi - mu > 0.2 and A < 0 with pi - mu < -0.2 (Binary-TV, arXiv 2602.04879)
          a sequence with any r < 1e-4 is vetoed: it adds nothing, not even the l^2 term

Sources and reasons: docs/losses.md.

Shape suffixes: n = loss tokens of all sequences, flat; S = sequences.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, fields

import torch
from torch import Tensor

LOG_RATIO_LIMIT = 20.0  # exp(20) is still far from overflow in float32
TV_HIGH = 0.2  # dppo: a favoured token may gain this much probability
TV_LOW = 0.2  # dppo: a disfavoured token may lose this much
RATIO_CAP = 10.0  # dppo: largest weight of one token
VETO_RATIO = 1e-4  # dppo: no honest lag gets here; a sequence with such a token is corrupt
KL_WEIGHT = 1e-3  # dppo: weight of l^2


@dataclass(frozen=True, slots=True)
class LossTokens:
    """What a loss needs to know about n tokens of S sequences, apart from the policy's logprobs."""

    behaviour_n: Tensor
    advantage_n: Tensor
    sequence_n: Tensor
    num_sequences: int


@dataclass(frozen=True, slots=True)
class LossStats:
    """Sums over loss tokens and sequences (one maximum): `a + b` describes both parts together.

    k3 is Schulman's estimate of KL(mu || pi), r - 1 - l. `dropped_*` counts tokens without a policy gradient, by sign
    of the advantage: masked by dppo, clipped by ppo. `weight*` are sums of the sequences' importance weights and
    their squares, for the effective sample size.
    """

    tokens: float = 0.0
    sequences: float = 0.0
    loss: float = 0.0
    k3: float = 0.0
    abs_log_ratio: float = 0.0
    dropped_positive: float = 0.0
    dropped_negative: float = 0.0
    capped: float = 0.0
    vetoed_sequences: float = 0.0
    weight: float = 0.0
    weight_squared: float = 0.0
    ratio_max: float = 0.0

    def __add__(self, other: LossStats) -> LossStats:
        merged = {f.name: getattr(self, f.name) + getattr(other, f.name) for f in fields(self)}
        return LossStats(**merged | {"ratio_max": max(self.ratio_max, other.ratio_max)})

    @property
    def ess_ratio(self) -> float:
        """Effective sample size over the number of sequences, (sum w)^2 / (B sum w^2), at most 1; 1 without
        sequences.
        """
        if self.weight_squared == 0.0:
            return 1.0
        return min(1.0, self.weight**2 / (self.weight_squared * self.sequences))


Loss = Callable[[Tensor, LossTokens], tuple[Tensor, LossStats]]


def dppo(logp_n: Tensor, tokens: LossTokens) -> tuple[Tensor, LossStats]:
    """Sum of the dppo loss (scalar, with gradient to `logp_n`) and its statistics."""
    log_ratio_n = logp_n - tokens.behaviour_n
    with torch.no_grad():
        ratio_n = log_ratio_n.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()
        shift_n = logp_n.exp() - tokens.behaviour_n.exp()
        advantage_n = tokens.advantage_n
        up_n = (advantage_n > 0) & (shift_n > TV_HIGH)
        down_n = (advantage_n < 0) & (shift_n < -TV_LOW)
        vetoed_S = _any_per_sequence(ratio_n < VETO_RATIO, tokens)
        alive_n = ~vetoed_S[tokens.sequence_n]
        keep_n = alive_n & ~(up_n | down_n)
        weight_n = keep_n * ratio_n.clamp(max=RATIO_CAP) * advantage_n
    loss = (KL_WEIGHT * (alive_n * log_ratio_n.square()) - weight_n * logp_n).sum()
    return loss, _stats(loss, log_ratio_n, ratio_n, up_n, down_n, vetoed_S, tokens)


def ppo(clip_low: float, clip_high: float) -> Loss:
    """The clipped PPO loss against behaviour logprobs, ratio kept within [1 - clip_low, 1 + clip_high]."""

    def loss_of(logp_n: Tensor, tokens: LossTokens) -> tuple[Tensor, LossStats]:
        log_ratio_n = logp_n - tokens.behaviour_n
        ratio_n = log_ratio_n.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()
        advantage_n = tokens.advantage_n
        clipped_n = ratio_n.clamp(1.0 - clip_low, 1.0 + clip_high)
        loss = -torch.minimum(ratio_n * advantage_n, clipped_n * advantage_n).sum()
        up_n = (advantage_n > 0) & (ratio_n > 1.0 + clip_high)
        down_n = (advantage_n < 0) & (ratio_n < 1.0 - clip_low)
        vetoed_S = torch.zeros(tokens.num_sequences, dtype=torch.bool, device=logp_n.device)
        return loss, _stats(loss, log_ratio_n, ratio_n, up_n, down_n, vetoed_S, tokens)

    return loss_of


def _any_per_sequence(flag_n: Tensor, tokens: LossTokens) -> Tensor:
    count_S = torch.zeros(tokens.num_sequences, dtype=torch.float32, device=flag_n.device)
    return count_S.index_add_(0, tokens.sequence_n, flag_n.float()) > 0


@torch.no_grad()
def _stats(
    loss: Tensor,
    log_ratio_n: Tensor,
    ratio_n: Tensor,
    up_n: Tensor,
    down_n: Tensor,
    vetoed_S: Tensor,
    tokens: LossTokens,
) -> LossStats:
    log_n = log_ratio_n.double()
    log_weight_S = log_n.new_zeros(tokens.num_sequences).index_add_(0, tokens.sequence_n, log_n)
    # Clamped to the weight that the update itself can give: a single lucky sequence must not stop the learning.
    weight_S = log_weight_S.clamp(-math.log(RATIO_CAP), math.log(RATIO_CAP)).exp()
    sums = [
        loss.double(),
        (ratio_n.double() - 1.0 - log_n.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)).sum(),
        log_n.abs().sum(),
        up_n.sum().double(),
        down_n.sum().double(),
        (ratio_n > RATIO_CAP).sum().double(),
        vetoed_S.sum().double(),
        weight_S.sum(),
        weight_S.square().sum(),
        ratio_n.max().double(),
    ]
    values: list[float] = torch.stack(sums).tolist()  # one transfer from the device for all of them
    return LossStats(float(log_n.numel()), float(tokens.num_sequences), *values)
