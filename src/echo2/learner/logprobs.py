"""Logprobs of the sampler's own distribution.

The sampler divides logits by the temperature and may narrow them (top-k, top-p). A ratio between the two sides only
means something if the learner does the same: a narrowed token's log-softmax runs over the support that the rollout
carries, because a token outside could not have happened.

Shape suffixes: u = positions, V = vocabulary, n = loss tokens, m = those of them with a support, W = widest support.
"""

from __future__ import annotations

import torch
from torch import Tensor

from echo2.learner.batch import PackedBatch


def token_logprobs(logits_uV: Tensor, batch: PackedBatch, temperature: float) -> Tensor:
    """Log-probability [n] of each loss token, at least in float32."""
    if logits_uV.dtype in (torch.bfloat16, torch.float16):
        logits_uV = logits_uV.float()
    if temperature != 1.0:
        logits_uV = logits_uV / temperature
    log_total_n = logits_uV.logsumexp(-1)[batch.position_n]
    for support in batch.supports:
        logits_mW = logits_uV[batch.position_n[support.rows_m, None], support.tokens_mW]
        logits_mW = logits_mW.masked_fill(~support.valid_mW, float("-inf"))
        log_total_n = log_total_n.index_copy(0, support.rows_m, logits_mW.logsumexp(-1))
    return logits_uV[batch.position_n, batch.target_n] - log_total_n
