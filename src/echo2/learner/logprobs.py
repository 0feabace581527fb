"""Logprobs under the sampler's own distribution.

The sampler divides logits by the temperature and may narrow them (top-k, top-p). The ratio of the learner's to the
sampler's probability is meaningful only if the learner does the same: a narrowed token's log-softmax runs over the
support in the rollout, because no token outside of it could have been drawn.

Shape suffixes: u = positions, n = loss tokens, m = loss tokens with a support, or without, W = widest support,
k = the sampler's most likely tokens (score centering; only without a support).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from echo2.learner.batch import PackedBatch
from echo2.learner.output_layer import Choice, Scores

#: (choices, whether the normaliser over the vocabulary is wanted) -> the policy's scores at the batch's positions.
Scorer = Callable[[Sequence[Choice], bool], Scores]


def token_logprobs(scorer: Scorer, batch: PackedBatch) -> tuple[Tensor, Tensor, Tensor]:
    """Return for each loss token its log-probability [n], the entropy [n, without gradient] of the distribution at the
    token, and the log-probabilities [n, k] of `LossTokens.top_tokens_nk`."""
    is_wide_n = torch.ones_like(batch.position_n, dtype=torch.bool)
    for support in batch.supports:
        is_wide_n[support.rows_m] = False
    wide_m = is_wide_n.nonzero()[:, 0]
    # The drawn token first, then the other candidates.
    top_tokens_nk = batch.loss_tokens.top_tokens_nk
    drawn_or_likely_mW = torch.cat([batch.target_n[wide_m, None], top_tokens_nk[wide_m]], dim=1)
    choices = [Choice(batch.position_n[wide_m], drawn_or_likely_mW)] + [
        Choice(batch.position_n[rows], torch.cat([batch.target_n[rows, None], support.tokens_mW], dim=1))
        for support in batch.supports
        for rows in (support.rows_m,)
    ]
    scores = scorer(choices, len(wide_m) > 0)
    logits_mW, *narrowed = scores.chosen
    position_m = batch.position_n[wide_m]
    logp_mW = logits_mW - scores.log_total_u[position_m, None]
    logp_n = logits_mW.new_zeros(len(batch.target_n)).index_copy(0, wide_m, logp_mW[:, 0])
    top_nk = logits_mW.new_zeros(top_tokens_nk.shape).index_copy(0, wide_m, logp_mW[:, 1:])
    entropy_n = torch.zeros_like(logp_n.detach()).index_copy_(0, wide_m, scores.entropy_u[position_m])
    for support, logits_mW in zip(batch.supports, narrowed, strict=True):
        allowed_mW = logits_mW[:, 1:].masked_fill(~support.valid_mW, float("-inf"))
        log_total_m = allowed_mW.logsumexp(-1)
        logp_n = logp_n.index_copy(0, support.rows_m, logits_mW[:, 0] - log_total_m)
        entropy_n.index_copy_(0, support.rows_m, _entropy(allowed_mW.detach()))
    return logp_n, entropy_n, top_nk


def _entropy(logits_mW: Tensor) -> Tensor:
    """Return the entropy of softmax over each row; entries of -inf contribute nothing."""
    logp_mW = logits_mW.log_softmax(-1)
    minus_mW = logp_mW.exp() * logp_mW.clamp(min=torch.finfo(logp_mW.dtype).min)
    return -minus_mW.sum(-1)
