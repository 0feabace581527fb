"""Checks the likely tokens that a worker reports (`types.Rollout.top_tokens`); impossible reports are refused.

The logprobs of tokens that were not drawn cannot be verified here; the losses bound their influence (docs/losses.md).

Shape suffixes: m = sampled tokens of a rollout, k = most likely tokens of each.
"""

from __future__ import annotations

import numpy as np

from echo2.errors import PeerError
from echo2.transport.limits import LOGPROB_MIN, LOGPROB_SLACK, TOP_ERROR
from echo2.types import Rollout, RolloutGroup


def check_top(group: RolloutGroup, num_asked: int, vocab_size: int) -> None:
    """Raises PeerError("malformed") unless each sampled token of each rollout has `num_asked` likely tokens (or
    `vocab_size` if that is less), consistent with a distribution that gives the sampled token its logprob."""
    width = min(num_asked, vocab_size)
    for rollout in group.rollouts:
        num_entries = rollout.loss_mask.count(1) * width
        _require(len(rollout.top_tokens) == num_entries, f"{len(rollout.top_tokens)} top tokens, not {num_entries}")
        _require(len(rollout.top_logprobs) == 2 * num_entries, "not as many top logprobs as top tokens")
        if num_entries:
            _check_values(rollout, width, vocab_size)


def _check_values(rollout: Rollout, width: int, vocab_size: int) -> None:
    ids_mk = np.frombuffer(rollout.top_tokens, dtype=np.int32).reshape(-1, width)
    logprobs_mk = np.frombuffer(rollout.top_logprobs, dtype="<f2").reshape(-1, width).astype(np.float32)
    _require(ids_mk.min() >= 0 and ids_mk.max() < vocab_size, "a top token is outside the vocabulary")
    _require(bool((np.diff(np.sort(ids_mk)) > 0).all()), "a top token comes twice")
    is_bounded = (logprobs_mk >= LOGPROB_MIN) & (logprobs_mk <= LOGPROB_SLACK)  # NaN: neither
    _require(bool(is_bounded.all()), "a top logprob is out of bounds")
    _require(bool((np.exp(logprobs_mk).sum(1) <= 1.0 + TOP_ERROR).all()), "top logprobs of more than everything")
    is_sampled = np.frombuffer(rollout.loss_mask, dtype=np.uint8) == 1
    drawn_m = np.frombuffer(rollout.tokens, dtype=np.int32)[is_sampled]
    logprob_m = np.frombuffer(rollout.logprobs, dtype=np.float32)[is_sampled]
    is_drawn_mk = ids_mk == drawn_m[:, None]
    # A sampled token outside the top k is at most as likely as each of them.
    told_m = np.where(is_drawn_mk, logprobs_mk, 0.0).sum(1)
    error_m = TOP_ERROR * (1.0 - logprob_m)
    is_same_m = np.abs(told_m - logprob_m) <= error_m
    is_rarer_m = logprob_m <= logprobs_mk.min(1) + error_m
    holds_m = np.where(is_drawn_mk.any(1), is_same_m, is_rarer_m)
    _require(bool(holds_m.all()), "top logprobs that the drawn token's own logprob contradicts")


def _require(holds: bool, complaint: str) -> None:
    if not holds:
        raise PeerError("malformed", complaint)
