"""Draws one token per row from logits, with its logprob.

The order of operations is temperature, then top-k, top-p and min-p (as in transformers' `generate`). The behaviour
logprob is that of the distribution actually drawn from; where it was narrowed, the surviving token ids (the support)
are reported too, because a learner can only repeat the computation if it knows them. Greedy rows (temperature 0) report
the logprob under the untempered, unnarrowed distribution.

Drawing is by inversion: the first token whose cumulative probability exceeds u * total, with u from `uniforms`.

Shape suffixes: B = rows, V = vocabulary, W = candidates kept for narrowing, N = blocks of the vocabulary, T = tokens
of one block.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from echo2.core.errors import PeerError
from echo2.core.types import SamplingParams
from echo2.engines.engine import Keys, uniforms
from echo2.transport.limits import SUPPORT_WIDTH_MAX

MAX_SAMPLER_ITEMS = 1 << 26
"""Logits worked on at once (rows x vocabulary); more rows are done in slices. Bounds the sampler's memory."""

BLOCK_TOKENS = 128
"""Tokens whose probabilities are summed before a draw."""
BELOW_ONE = 1.0 - 2.0**-53
"""The largest share of a block's mass that is not all of it."""

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Draw:
    """One token for each row. `supports[row]` exists only for narrowed rows."""

    tokens_B: Ints
    logprobs_B: npt.NDArray[np.float32]
    supports: dict[int, npt.NDArray[np.int32]]


class Sampler:
    """Draws for a fixed set of rows, each with parameters and a random stream of its own."""

    def __init__(self, keys: Keys, params: Sequence[SamplingParams], device: torch.device) -> None:
        self._keys = keys
        self._params = tuple(params)
        self._device = device
        temperatures = [p.temperature if p.temperature > 0.0 else 1.0 for p in params]
        self._temperature_B1 = torch.tensor(temperatures, device=device)[:, None]
        self._is_tempered = any(temperature != 1.0 for temperature in temperatures)
        self._top_k_B1 = torch.tensor([p.top_k or SUPPORT_WIDTH_MAX for p in params], device=device)[:, None]
        self._top_p_B1 = torch.tensor([p.top_p for p in params], device=device)[:, None]
        self._min_p_B1 = torch.tensor([p.min_p for p in params], device=device)[:, None]
        kinds = np.array([_kind(p) for p in params])
        self._rows = {kind: np.flatnonzero(kinds == kind) for kind in ("greedy", "plain", "narrow")}

    def draw(self, logits_BV: Tensor, place_B: Ints) -> Draw:
        """Draw one token per row of `logits_BV`. `place_B`: the position of each token in its completion, from 0.

        Raises:
            PeerError: the logits are not finite.
        """
        num_rows, vocab = logits_BV.shape
        tokens_B = np.empty(num_rows, dtype=np.int64)
        logprobs_B = np.empty(num_rows, dtype=np.float32)
        supports: dict[int, npt.NDArray[np.int32]] = {}
        slice_rows = max(1, MAX_SAMPLER_ITEMS // vocab)
        for kind, rows in self._rows.items():
            for start in range(0, len(rows), slice_rows):
                part = rows[start : start + slice_rows]
                drawn = self._draw_kind(kind, part, logits_BV, place_B, supports)
                # One copy to the CPU for both: float64 holds every token id and every float32 exactly.
                tokens_B[part], logprobs_B[part] = torch.stack([drawn[0].double(), drawn[1].double()]).cpu().numpy()
        if not np.isfinite(logprobs_B).all():
            raise PeerError("not_finite", "The policy gives logits that are not finite; its training has diverged.")
        return Draw(tokens_B, logprobs_B, supports)

    def _draw_kind(
        self,
        kind: str,
        rows: Ints,
        logits_BV: Tensor,
        place_B: Ints,
        supports: dict[int, npt.NDArray[np.int32]],
    ) -> tuple[Tensor, Tensor]:
        """Tokens and logprobs of `rows`, which are all of one kind; adds their supports."""
        index = None if len(rows) == len(self._params) else torch.from_numpy(rows).to(self._device)
        logits_BV = logits_BV if index is None else logits_BV[index]
        if kind == "greedy":
            logprobs_BV = logits_BV.log_softmax(-1)
            token_B1 = logits_BV.argmax(-1, keepdim=True)
            return token_B1[:, 0], logprobs_BV.gather(1, token_B1)[:, 0]
        if self._is_tempered:
            logits_BV = logits_BV / (self._temperature_B1 if index is None else self._temperature_B1[index])
        uniform_B = torch.from_numpy(uniforms(self._keys[rows], place_B[rows])).to(self._device)
        if kind == "plain":
            return invert(logits_BV.log_softmax(-1), uniform_B)
        limits = self._top_k_B1, self._top_p_B1, self._min_p_B1
        logits_BW, ids_BW = narrow(logits_BV, *(limit if index is None else limit[index] for limit in limits))
        kept_BW = logits_BW.isfinite()
        ids, is_kept = ids_BW.int().cpu().numpy(), kept_BW.cpu().numpy()
        supports.update((int(row), ids[i][is_kept[i]]) for i, row in enumerate(rows))
        rank_B, logprob_B = invert(logits_BW.log_softmax(-1), uniform_B)
        return ids_BW.gather(1, rank_B[:, None])[:, 0], logprob_B


def _kind(params: SamplingParams) -> str:
    if params.temperature == 0.0:
        return "greedy"
    return "narrow" if params.is_narrow else "plain"


def invert(logprobs_BV: Tensor, uniform_B: Tensor) -> tuple[Tensor, Tensor]:
    """Return token and logprob for each uniform number: the first token whose cumulative probability exceeds it.

    Blocks of tokens are summed first, and only the block that holds the number is gone through: all cumulative
    probabilities would be an array twice as large as the logits. Blocks are added up in float64: over 150 000 tokens,
    float32 sums would be off by more than rare tokens' probabilities. Within a block the number is a share of the
    block's mass, so the rounding of its sum never leads behind its last possible token.
    """
    probs_BV, vocab = logprobs_BV.exp(), logprobs_BV.shape[1]
    whole = vocab - vocab % BLOCK_TOKENS
    sums_BN = probs_BV[:, :whole].unflatten(1, (-1, BLOCK_TOKENS)).sum(-1)
    if whole < vocab:
        sums_BN = torch.cat((sums_BN, probs_BV[:, whole:].sum(-1, keepdim=True)), dim=1)
    cumulative_BN = sums_BN.double().cumsum(-1)
    target_B1 = (uniform_B * cumulative_BN[:, -1])[:, None]
    block_B1 = _first_above(cumulative_BN, target_B1)
    left_B1 = (cumulative_BN.gather(1, block_B1) - target_B1) / sums_BN.gather(1, block_B1)
    ids_BT = (block_B1 * BLOCK_TOKENS + torch.arange(BLOCK_TOKENS, device=probs_BV.device)).clamp_(max=vocab - 1)
    within_BT = probs_BV.gather(1, ids_BT).double()
    within_BT[:, 1:].masked_fill_(ids_BT[:, 1:] == ids_BT[:, :-1], 0.0)  # behind the last token
    within_BT = within_BT.cumsum(-1)
    token_B1 = ids_BT.gather(1, _first_above(within_BT, (1.0 - left_B1).clamp_(0.0, BELOW_ONE) * within_BT[:, -1:]))
    return token_B1[:, 0], logprobs_BV.gather(1, token_B1)[:, 0]


def _first_above(cumulative_BN: Tensor, target_B1: Tensor) -> Tensor:
    """Return the place [B, 1] of the first value above the target; the last one if rounding, or a value that is not
    finite, leaves none. `draw` refuses the latter."""
    return torch.searchsorted(cumulative_BN, target_B1, right=True).clamp_(max=cumulative_BN.shape[1] - 1)


def narrow(logits_BV: Tensor, top_k_B1: Tensor, top_p_B1: Tensor, min_p_B1: Tensor) -> tuple[Tensor, Tensor]:
    """Return the tokens that top-k, top-p and min-p leave: logits [B, W] in descending order, -inf where cut; ids.

    The nucleus is the smallest set of most likely tokens with at least the share top-p of the mass that top-k leaves.
    Min-p cuts tokens less likely than this share of the most likely token's probability (arXiv 2407.01082).
    """
    width = min(logits_BV.shape[1], SUPPORT_WIDTH_MAX, int(top_k_B1.max()))
    logits_BW, ids_BW = logits_BV.topk(width, dim=-1)
    rank_W = torch.arange(width, device=logits_BV.device)
    logits_BW = logits_BW.masked_fill(rank_W >= top_k_B1, float("-inf"))
    # Without top-k the mass is that of all tokens, not only of the first W.
    is_cut_by_k_B1 = top_k_B1 < logits_BV.shape[1]
    is_cut_by_k_B1 &= top_k_B1 < SUPPORT_WIDTH_MAX
    total_B1 = torch.where(is_cut_by_k_B1, logits_BW.logsumexp(-1, True), logits_BV.logsumexp(-1, True))
    mass_BW = (logits_BW - total_B1).exp().double()
    mass_before_BW = mass_BW.cumsum(-1) - mass_BW
    is_cut_BW = (mass_before_BW >= top_p_B1) & (top_p_B1 < 1.0) | (logits_BW < logits_BW[:, :1] + min_p_B1.log())
    is_cut_BW[:, 0] = False
    return logits_BW.masked_fill(is_cut_BW, float("-inf")), ids_BW
