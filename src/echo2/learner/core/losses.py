"""Policy losses for stale data, as unnormalised losses per token, all in one table, `LOSSES`.

No loss divides by a batch size or depends on more than the given sequences: sums over any split of a step into whole
sequences add up to the step's sum, and the trainer divides once. All losses are anchored to the *behaviour* logprobs
(the sampler's own); there is no second forward pass.

Legend: pi = current policy, mu = behaviour, A = advantage, l = log pi - log mu, r = exp(clamp(l, -20, 20)), sg = no
gradient. Per token:

    dppo       -keep sg(min(r, cap)) A log pi + square l^2,  keep: |pi - mu| bounded on the side that A pushes to
    ppo        -min(r A, clip(r) A)
    decoupled  -sg(w [w <= cap]) min(u A, clip(u) A),  u = pi / prox, w = prox / mu, prox between mu and pi by lag
    tis        -sg(min(r, cap)) A log pi
    icepop     -sg(r [low <= r <= high]) A log pi
    cispo      -sg(clip(r, floor, cap)) A log pi
    gspo       -min(s A, clip(s) A),  s = exp(mean of l over the sequence)
    none       -A log pi: no correction at all, the negative control

The behaviour logprobs are a worker's unverified claim. Whatever their values, a loss is finite, and its gradient by the
log pi of a token is at most the bound of the token's weight times |A|: `cap`, `high` or 1 where the table says so.
Where r itself has the gradient (ppo, decoupled, gspo), r is limited to RATIO_LIMIT, or to the upper end of the
clip if that is higher. `square` adds at most 2 * square * LOG_RATIO_LIMIT.

Sources and reasons: docs/losses.md. A new loss: one entry in `LOSSES` and its parameters in `LOSS_PARAMS`
(`config/values.py`), one test by hand, one section in the docs.

Shape suffixes: n = loss tokens of all sequences, flat; S = sequences.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from echo2.config.values import loss_params

LOG_RATIO_LIMIT = 20.0  # exp(20) is still far from overflow in float32
RATIO_LIMIT = 10.0  # the largest weight of a token, relative to a token that the current policy sampled
LOGGED_LAG = -1  # lag of tokens from a log: no version of this run sampled them
Params = Mapping[str, float]


@dataclass(frozen=True, slots=True)
class LossTokens:
    """The inputs of a loss for n tokens of S whole sequences, apart from the policy's logprobs.

    behaviour_n  the sampler's logprobs
    sequence_n   index of the token's sequence, below S
    lag_n        versions between the one that sampled the token and the one that is trained; LOGGED_LAG: no version did
    source_S     index in `sources` of the sequence's source
    weight_n     factor of the token's loss in the sum (the loss itself may ignore it)
    reference_n  a reference policy's logprobs
    teacher_n    a teacher's logprobs
    top_teacher_nk  a teacher's logprobs of its k most likely tokens, -inf where there are fewer; k may be 0
    top_policy_nk   the policy's logprobs of these tokens, with gradient; set by the trainer after the forward pass
    entropy_n    entropy of the policy's distribution at the token; also set by the trainer
    clip_low_n, clip_high_n  bounds of the token's ratio that its datum names; NaN: it names none
    """

    behaviour_n: Tensor
    advantage_n: Tensor
    sequence_n: Tensor
    lag_n: Tensor
    source_S: Tensor
    sources: tuple[str, ...]
    weight_n: Tensor
    reference_n: Tensor
    teacher_n: Tensor
    top_teacher_nk: Tensor
    top_policy_nk: Tensor
    entropy_n: Tensor
    clip_low_n: Tensor
    clip_high_n: Tensor

    @property
    def num_sequences(self) -> int:
        return len(self.source_S)


@dataclass(frozen=True, slots=True)
class TokenLosses:
    """The result of a loss. `loss_n` carries the gradient; the flags say what happened to each token.

    dropped_n  no policy gradient: masked, or on the flat side of a clip
    capped_n   the token's weight was capped
    vetoed_S   the whole sequence adds nothing: no honest lag could have produced it
    """

    loss_n: Tensor
    dropped_n: Tensor
    capped_n: Tensor
    vetoed_S: Tensor


LossFunction = Callable[[Tensor, LossTokens, Params], TokenLosses]


#: A loss with its parameters.
PolicyLoss = Callable[[Tensor, LossTokens], TokenLosses]


def make_loss(name: str, params: Params | None = None) -> PolicyLoss:
    """Return the loss of that name, with `params` in place of its defaults.

    Raises:
        UserError: no such loss or parameter, a value out of bounds, or bounds the wrong way round.
    """
    values = loss_params(name, params or {})
    return lambda logp_n, tokens: LOSSES[name](logp_n, tokens, values)


def log_ratio(logp_n: Tensor, tokens: LossTokens) -> Tensor:
    """Return l, clamped to +-LOG_RATIO_LIMIT."""
    return (logp_n - tokens.behaviour_n).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)


def dppo(logp_n: Tensor, tokens: LossTokens, p: Params) -> TokenLosses:
    """Policy gradient weighted by the capped ratio, without tokens whose probability has moved too far already."""
    log_ratio_n, advantage_n = log_ratio(logp_n, tokens), tokens.advantage_n
    with torch.no_grad():
        ratio_n = log_ratio_n.exp()
        shift_n = logp_n.exp() - tokens.behaviour_n.exp()
        too_high_n = (advantage_n > 0) & (shift_n > p["tv_high"])
        too_low_n = (advantage_n < 0) & (shift_n < -p["tv_low"])
        vetoed_S = _sum_S(ratio_n < p["veto"], tokens) > 0
        alive_n = ~vetoed_S[tokens.sequence_n]
        dropped_n = too_high_n | too_low_n
        weight_n = (alive_n & ~dropped_n) * ratio_n.clamp(max=p["cap"]) * advantage_n
    loss_n = p["square"] * (alive_n * log_ratio_n.square()) - weight_n * logp_n
    return TokenLosses(loss_n, dropped_n, ratio_n > p["cap"], vetoed_S)


def ppo(logp_n: Tensor, tokens: LossTokens, p: Params) -> TokenLosses:
    """Clipped surrogate, the ratio against the behaviour policy."""
    return TokenLosses(*_clipped(log_ratio(logp_n, tokens).exp(), tokens.advantage_n, p), _none_S(tokens))


def decoupled(logp_n: Tensor, tokens: LossTokens, p: Params) -> TokenLosses:
    """Clipped surrogate against a proximal policy, times the proximal policy's own ratio to the behaviour.

    The proximal policy is one version back, interpolated: log prox = log mu + (1 - 1 / lag) l, lag at least 1.
    """
    with torch.no_grad():
        share_n = 1.0 - 1.0 / tokens.lag_n.clamp(min=1).to(logp_n.dtype)
        log_weight_n = share_n * log_ratio(logp_n, tokens)
        weight_n = log_weight_n.exp()
        trusted_n = weight_n <= p["cap"]
        log_prox_n = tokens.behaviour_n + log_weight_n
    step_n = (logp_n - log_prox_n).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()
    surrogate_n, clipped_n, capped_n = _clipped(step_n, tokens.advantage_n, p)
    loss_n = (trusted_n * weight_n) * surrogate_n
    return TokenLosses(loss_n, clipped_n | ~trusted_n, capped_n, _none_S(tokens))


def tis(logp_n: Tensor, tokens: LossTokens, p: Params) -> TokenLosses:
    """Policy gradient, the importance weight truncated from above."""
    ratio_n = log_ratio(logp_n, tokens).exp()
    return _weighted(logp_n, tokens, ratio_n.clamp(max=p["cap"]), _none_n(tokens), ratio_n > p["cap"])


def icepop(logp_n: Tensor, tokens: LossTokens, p: Params) -> TokenLosses:
    """Policy gradient over the tokens whose importance weight is within a band."""
    ratio_n = log_ratio(logp_n, tokens).exp()
    outside_n = (ratio_n < p["low"]) | (ratio_n > p["high"])
    return _weighted(logp_n, tokens, ratio_n * ~outside_n, outside_n, _none_n(tokens))


def cispo(logp_n: Tensor, tokens: LossTokens, p: Params) -> TokenLosses:
    """Policy gradient, the importance weight clipped and never dropped."""
    ratio_n = log_ratio(logp_n, tokens).exp()
    capped_n = (ratio_n < p["floor"]) | (ratio_n > p["cap"])
    return _weighted(logp_n, tokens, ratio_n.clamp(p["floor"], p["cap"]), _none_n(tokens), capped_n)


def gspo(logp_n: Tensor, tokens: LossTokens, p: Params) -> TokenLosses:
    """Clipped surrogate with one ratio a sequence, the geometric mean of its tokens' ratios.

    Each token carries the sequence's ratio and its own gradient, so that the mean over the sequence has the gradient
    of the sequence's surrogate (GSPO-token with equal advantages).
    """
    with torch.no_grad():
        mean_S = _sum_S(log_ratio(logp_n, tokens), tokens) / _sum_S(torch.ones_like(logp_n), tokens).clamp(min=1.0)
        ratio_n = mean_S.exp()[tokens.sequence_n]
    own_n = (logp_n - logp_n.detach()).exp()  # 1, with the gradient of log pi
    return TokenLosses(*_clipped(ratio_n * own_n, tokens.advantage_n, p), _none_S(tokens))


def none(logp_n: Tensor, tokens: LossTokens, p: Params) -> TokenLosses:
    """Policy gradient as if the current policy had sampled the tokens."""
    return _weighted(logp_n, tokens, torch.ones_like(logp_n), _none_n(tokens), _none_n(tokens))


def _clipped(ratio_n: Tensor, advantage_n: Tensor, p: Params) -> tuple[Tensor, Tensor, Tensor]:
    """Return PPO's pessimistic minimum, where it is flat, and where the ratio was capped.

    The minimum does not bound r A if A < 0 and r is large, and a forged behaviour logprob can make r arbitrarily large.
    """
    low, high = 1.0 - p["clip_low"], 1.0 + p["clip_high"]
    most = max(RATIO_LIMIT, high)
    capped_n = ratio_n > most
    bounded_n = ratio_n * (most / ratio_n.detach()).clamp(max=1.0)
    loss_n = -torch.minimum(bounded_n * advantage_n, bounded_n.clamp(low, high) * advantage_n)
    dropped_n = ((advantage_n > 0) & (ratio_n > high)) | ((advantage_n < 0) & (ratio_n < low))
    return loss_n, dropped_n, capped_n & ~dropped_n


def _weighted(logp_n: Tensor, tokens: LossTokens, weight_n: Tensor, dropped_n: Tensor, capped_n: Tensor) -> TokenLosses:
    return TokenLosses(-weight_n.detach() * tokens.advantage_n * logp_n, dropped_n, capped_n, _none_S(tokens))


def _sum_S(values_n: Tensor, tokens: LossTokens) -> Tensor:
    values_n = values_n if values_n.is_floating_point() else values_n.to(torch.float32)
    return values_n.new_zeros(tokens.num_sequences).index_add_(0, tokens.sequence_n, values_n)


def _none_n(tokens: LossTokens) -> Tensor:
    return torch.zeros_like(tokens.behaviour_n, dtype=torch.bool)


def _none_S(tokens: LossTokens) -> Tensor:
    return torch.zeros_like(tokens.source_S, dtype=torch.bool)


LOSSES: Mapping[str, LossFunction] = {
    "dppo": dppo,
    "ppo": ppo,
    "decoupled": decoupled,
    "tis": tis,
    "icepop": icepop,
    "cispo": cispo,
    "gspo": gspo,
    "none": none,
}
