"""The losses that a client of the service can name: sums over tokens, exactly as written here, without clamps.

The client provides both the data and the behaviour logprobs, so these losses need not guard against forged input
(those of a run do). Legend: lp = log pi of the target, q = the given behaviour logprob, A = advantage,
w = weight, r = exp(lp - q), sg = no gradient.

    cross_entropy        -w lp
    importance_sampling  -r A
    ppo                  -min(r A, clip(r, low, high) A)
    cispo                -sg(clip(r, low, high)) lp A
    dro                  -(lp A - beta / 2 (lp - q)^2)
    gspo                 as ppo, with r the geometric mean over the sequence's tokens of weight > 0, and each token's
                         own gradient
    stable_reinforce     -sg(min(r, high)) lp A + kl_coeff / 2 (lp - q)^2: a stand-in. The service that this protocol
                         comes from has not published the formula of its loss of that name

A datum's own bounds replace low and high.

Sources: the Tinker documentation (losses); PPO arXiv 1707.06347, CISPO arXiv 2506.13585, DRO arXiv 2405.19107, GSPO
arXiv 2507.18071.

Shape suffixes: n = loss tokens of all sequences, flat; S = sequences.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from echo2.core.errors import UserError, did_you_mean
from echo2.learner.core.losses import LossTokens

Params = Mapping[str, float]
LOW, HIGH, BETA, KL = "clip_low_threshold", "clip_high_threshold", "beta", "kl_coeff"


def cross_entropy(logp_n: Tensor, tokens: LossTokens, p: Params) -> Tensor:
    """Negative log-likelihood. The trainer multiplies by the weights."""
    return -logp_n


def importance_sampling(logp_n: Tensor, tokens: LossTokens, p: Params) -> Tensor:
    """Policy gradient with the unclipped ratio."""
    return -(logp_n - tokens.behaviour_n).exp() * tokens.advantage_n


def ppo(logp_n: Tensor, tokens: LossTokens, p: Params) -> Tensor:
    """Clipped surrogate."""
    return _clipped((logp_n - tokens.behaviour_n).exp(), tokens, p)


def cispo(logp_n: Tensor, tokens: LossTokens, p: Params) -> Tensor:
    """Policy gradient, the ratio clipped and without gradient."""
    ratio_n = (logp_n - tokens.behaviour_n).exp().detach()
    return -_clamped(ratio_n, tokens, p) * logp_n * tokens.advantage_n


def dro(logp_n: Tensor, tokens: LossTokens, p: Params) -> Tensor:
    """Policy gradient with a quadratic penalty towards the behaviour policy."""
    return p[BETA] / 2.0 * (logp_n - tokens.behaviour_n).square() - logp_n * tokens.advantage_n


def gspo(logp_n: Tensor, tokens: LossTokens, p: Params) -> Tensor:
    """Clipped surrogate with one ratio a sequence."""
    with torch.no_grad():
        counts_n = (tokens.weight_n > 0).to(logp_n.dtype)
        zeros_S = logp_n.new_zeros(tokens.num_sequences)
        total_S = zeros_S.index_add(0, tokens.sequence_n, counts_n * (logp_n - tokens.behaviour_n))
        mean_S = total_S / zeros_S.index_add(0, tokens.sequence_n, counts_n).clamp(min=1.0)
        ratio_n = mean_S.exp()[tokens.sequence_n]
    own_n = (logp_n - logp_n.detach()).exp()  # 1, with the gradient of log pi
    return _clipped(ratio_n * own_n, tokens, p)


def stable_reinforce(logp_n: Tensor, tokens: LossTokens, p: Params) -> Tensor:
    """Policy gradient with a capped ratio, and a quadratic penalty towards the behaviour policy."""
    log_ratio_n = logp_n - tokens.behaviour_n
    ratio_n = torch.minimum(log_ratio_n.exp().detach(), _given(tokens.clip_high_n, p[HIGH]))
    return p[KL] / 2.0 * log_ratio_n.square() - ratio_n * logp_n * tokens.advantage_n


def _clipped(ratio_n: Tensor, tokens: LossTokens, p: Params) -> Tensor:
    return -torch.minimum(ratio_n * tokens.advantage_n, _clamped(ratio_n, tokens, p) * tokens.advantage_n)


def _clamped(ratio_n: Tensor, tokens: LossTokens, p: Params) -> Tensor:
    return ratio_n.clamp(_given(tokens.clip_low_n, p[LOW]), _given(tokens.clip_high_n, p[HIGH]))


def _given(bound_n: Tensor, default: float) -> Tensor:
    """Return the data's own bounds, with `default` where they name none."""
    return bound_n.nan_to_num(nan=default)


@dataclass(frozen=True, slots=True)
class ClientLoss:
    """One entry of the table, with the defaults of its parameters."""

    function: Callable[[Tensor, LossTokens, Params], Tensor]
    defaults: Params


CLIENT_LOSSES: Mapping[str, ClientLoss] = {
    "cross_entropy": ClientLoss(cross_entropy, {}),
    "importance_sampling": ClientLoss(importance_sampling, {}),
    "ppo": ClientLoss(ppo, {LOW: 0.8, HIGH: 1.2}),
    "cispo": ClientLoss(cispo, {LOW: 0.0, HIGH: 4.0}),
    "dro": ClientLoss(dro, {BETA: 0.05}),
    "gspo": ClientLoss(gspo, {LOW: 0.8, HIGH: 1.2}),
    "stable_reinforce": ClientLoss(stable_reinforce, {HIGH: 2.0, KL: 0.0}),
}


def client_loss(name: str, params: Params) -> Callable[[Tensor, LossTokens], tuple[Tensor, float]]:
    """Return the loss for the trainer, with `params` in place of its defaults. Its output is the weighted sum.

    Raises:
        UserError: there is no such loss, or it has no such parameter.
    """
    kind = CLIENT_LOSSES.get(name)
    if kind is None:
        names = ", ".join(CLIENT_LOSSES)
        raise UserError(f"There is no loss {name!r}; there are {names}.{did_you_mean(name, CLIENT_LOSSES)}")
    unknown = sorted(params.keys() - kind.defaults.keys())
    if unknown:
        names = ", ".join(kind.defaults) or "none"
        raise UserError(f"The loss {name} has no parameter {unknown[0]!r}; it has {names}.")
    values = {**kind.defaults, **params}

    def loss(logp_n: Tensor, tokens: LossTokens) -> tuple[Tensor, float]:
        loss_n = kind.function(logp_n, tokens, values)
        return loss_n, float((loss_n.detach() * tokens.weight_n).sum())

    return loss
