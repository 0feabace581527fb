"""Measures tokens that are given by a policy's logits, tile by tile, so that memory does not grow with the text: the
`Prefill` of tokens already drawn, and scores of a text.

One forward pass over a text gives all its scores: logprobs of its tokens, and of others in their places. A token is
scored given the tokens before it, so the first token has no score. Logprobs are at temperature 1 unless stated
otherwise.

Shape suffixes: N = tokens or places of one tile, V = vocabulary, W = width of the widest support, K = most likely
tokens, M = cells of one tile, D = draws.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from echo2.core.devices import exact
from echo2.core.errors import UserError
from echo2.engines.engine import Prefill, PrefillRequest, stream_keys, uniforms
from echo2.engines.sampler import invert
from echo2.transport.limits import SUPPORT_WIDTH_MAX

TILE_ITEMS = 1 << 22
"""Logits processed at once (tokens x vocabulary; at least one token): some 100 MB with intermediate results."""
BATCH_TOKENS = 1 << 12
"""Tokens read between two decoding steps (at least one sequence)."""
LOGITS_TOKENS = 256
"""Tokens of a scored text whose logits exist at once."""
FIRST_DRAW = 1 << 32
"""The random stream of the first draw: far from the streams of samples, which are counted from 0."""
TIE_NATS = {32: 1e-3, 16: 0.25}
"""Tokens whose logits are this close may be in either order in a support, by bits of the computing dtype."""


def sequence_of(request: PrefillRequest) -> array[int]:
    """Return the tokens that the policy reads: the prompt and the completion."""
    return request.prompt_tokens + request.tokens


def batches(requests: Sequence[PrefillRequest]) -> Iterator[list[int]]:
    """Yield the indices of requests that are read together: shortest first, at most `BATCH_TOKENS` padded tokens."""
    order = sorted(range(len(requests)), key=lambda place: len(sequence_of(requests[place])))
    batch: list[int] = []
    for place in order:
        if batch and (len(batch) + 1) * len(sequence_of(requests[place])) > BATCH_TOKENS:
            yield batch
            batch = []
        batch.append(place)
    if batch:
        yield batch


def measure(tiles: Iterator[Tensor], request: PrefillRequest, bits: int) -> Prefill:
    """Return the `Prefill` of a request. `tiles`: its logits [n, V] float32, tile by tile; more may follow."""
    count, at, parts = len(request.tokens), request.first, list[Tensor]()
    tokens = torch.tensor(request.tokens, dtype=torch.long)
    while at < count:
        logits_NV = exact(next(tiles))
        picked = slice(at, at + len(logits_NV))
        tokens_N = tokens[picked].to(logits_NV.device)
        scaled_NV = logits_NV / (request.params.temperature or 1.0)
        if request.params.is_narrow:
            parts.append(_narrow(scaled_NV, tokens_N, request, picked, TIE_NATS[bits]))
        else:
            parts.append(_plain(scaled_NV, tokens_N))
        at = picked.stop
    columns = torch.cat(parts).cpu().numpy().T
    low, high, logprobs, entropies, variances, support_errors = columns
    return Prefill(low, high, logprobs, entropies, variances, support_errors, bits)


def _plain(logits_NV: Tensor, tokens_N: Tensor) -> Tensor:
    """Return the array fields of `Prefill` [N, 6]. Inversion goes through the vocabulary in order."""
    logprobs_NV = logits_NV.log_softmax(-1)
    probs_NV = logprobs_NV.exp()
    is_behind_NV = torch.arange(logits_NV.shape[1], device=logits_NV.device) >= tokens_N[:, None]
    total_N = probs_NV.sum(-1, dtype=torch.float64)
    low_N = probs_NV.masked_fill(is_behind_NV, 0.0).sum(-1, dtype=torch.float64) / total_N
    high_N = low_N + probs_NV.gather(1, tokens_N[:, None])[:, 0] / total_N
    logprob_N = logprobs_NV.gather(1, tokens_N[:, None])[:, 0].double()
    return torch.stack([low_N, high_N, logprob_N, *_moments(logprobs_NV, probs_NV), torch.zeros_like(low_N)], dim=1)


def _moments(logprobs: Tensor, probs: Tensor) -> tuple[Tensor, Tensor]:
    """Return mean and variance of -logprob [N]; tokens of probability 0 contribute 0."""
    nats = logprobs.clamp(min=-1e4)
    parts = probs * nats
    entropy_N = -parts.sum(-1, dtype=torch.float64)
    return entropy_N, ((parts * nats).sum(-1, dtype=torch.float64) - entropy_N.square()).clamp(min=0.0)


def _narrow(logits_NV: Tensor, tokens_N: Tensor, request: PrefillRequest, picked: slice, tie: float) -> Tensor:
    """Like `_plain`, over the reported supports. Inversion goes through a support from the most likely token down, so
    tokens that are nearly equally likely may have changed places.
    """
    supports = _supports(request, picked)
    if supports is None:
        plain = _plain(logits_NV, tokens_N)
        plain[:, 5] = 1.0  # narrowed tokens must come with their supports
        return plain
    ids_NW, is_in_NW = (torch.from_numpy(part).to(logits_NV.device) for part in supports)
    of_support_NW = logits_NV.gather(1, ids_NW).masked_fill(~is_in_NW, float("-inf"))
    logprobs_NW = of_support_NW.log_softmax(-1)
    probs_NW = logprobs_NW.exp().double()
    own_N1 = logits_NV.gather(1, tokens_N[:, None])
    low_N = (probs_NW * (of_support_NW > own_N1 + tie)).sum(-1)
    high_N = (probs_NW * (of_support_NW >= own_N1 - tie)).sum(-1)
    logprob_N = own_N1[:, 0].double() - of_support_NW.double().logsumexp(-1)
    error_N = _support_error(logits_NV, of_support_NW, is_in_NW, request, tie)
    error_N = error_N.masked_fill(_names_twice(ids_NW, is_in_NW), 1.0)
    return torch.stack([low_N, high_N, logprob_N, *_moments(logprobs_NW, probs_NW), error_N], dim=1)


def _supports(request: PrefillRequest, picked: slice) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_]] | None:
    """Return the token ids of the supports [N, W] and which entries are used; None if no supports were reported."""
    if request.support_tokens is None or request.support_offsets is None:
        return None
    offsets = np.frombuffer(request.support_offsets, dtype=np.int32)[picked.start : picked.stop + 1]
    widths = np.diff(offsets)
    is_in_NW = np.arange(max(1, int(widths.max()))) < widths[:, None]
    ids_NW = np.zeros(is_in_NW.shape, dtype=np.int64)
    ids_NW[is_in_NW] = np.frombuffer(request.support_tokens, dtype=np.int32)[offsets[0] : offsets[-1]]
    return ids_NW, is_in_NW


def _names_twice(ids_NW: Tensor, is_in_NW: Tensor) -> Tensor:
    """Return whether a support [N] names a token more than once, which would count its probability as often."""
    unused_W = -1 - torch.arange(ids_NW.shape[1], device=ids_NW.device)
    sorted_NW = torch.where(is_in_NW, ids_NW, unused_W).sort(-1).values
    return (sorted_NW[:, 1:] == sorted_NW[:, :-1]).any(-1)


def _support_error(
    logits_NV: Tensor, of_support_NW: Tensor, is_in_NW: Tensor, request: PrefillRequest, tie: float
) -> Tensor:
    """Return by how much probability [N] the supports miss the most likely tokens, or hold too few or too many."""
    params, vocab, width = request.params, logits_NV.shape[1], is_in_NW.shape[1]
    top_k = min(params.top_k or vocab, vocab, SUPPORT_WIDTH_MAX)
    best_NW = logits_NV.topk(min(max(width + 1, top_k if params.top_k else 0), vocab), dim=-1).values
    total_N1 = (best_NW[:, :top_k] if params.top_k else logits_NV).logsumexp(-1, keepdim=True)
    size_N = is_in_NW.sum(-1)
    probs_NW = (of_support_NW - total_N1).exp().double()
    mass_N = probs_NW.sum(-1)
    is_best_NW = torch.arange(best_NW.shape[1], device=best_NW.device) < size_N[:, None]
    best_N = ((best_NW - total_N1).exp().double() * is_best_NW).sum(-1)
    least_N = probs_NW.masked_fill(~is_in_NW, float("inf")).amin(-1)
    likely_enough_N = params.min_p * (best_NW[:, 0] - total_N1[:, 0]).exp().double()
    surely_enough_N = likely_enough_N * (1.0 + tie)
    next_N = (best_NW.gather(1, size_N.clamp(max=best_NW.shape[1] - 1)[:, None]) - total_N1)[:, 0].exp().double()
    is_full_N = (size_N >= top_k) | (next_N < surely_enough_N)
    too_few_N = params.top_p - mass_N
    if params.top_p >= 1.0:
        too_few_N = torch.ones_like(mass_N)  # the number of tokens, which top-k names, is not a matter of rounding
    if params.top_p >= 1.0 and params.min_p:
        probs_NW = ((best_NW[:, :top_k] if params.top_k else logits_NV) - total_N1).exp().double()
        too_few_N = probs_NW.masked_fill(probs_NW < surely_enough_N[:, None], 0.0).sum(-1) - mass_N
    too_few_N = too_few_N.masked_fill(is_full_N, 0.0)
    too_many_N = mass_N - least_N - params.top_p
    too_wide_N = (size_N > top_k).double()
    errors = [best_N - mass_N, too_few_N, too_many_N, too_wide_N, likely_enough_N - least_N]
    return torch.stack(errors).amax(0).clamp(min=0.0)


@dataclass(frozen=True, slots=True)
class ScoreRequest:
    """The scores to compute for a text of P tokens from the place `first` >= 1 on.

    top_k        how many of the most likely tokens at each place, with their logprobs at `top_temperature`
    cell_places  'i' [M], ascending, and cell_tokens 'i' [M]: tokens whose logprobs are wanted at these places
    num_draws    how many tokens are drawn at each place at `draw_temperature`, from random streams of `seed`
    """

    text: array[int]
    first: int = 1
    top_k: int = 0
    top_temperature: float = 1.0
    cell_places: array[int] = field(default_factory=lambda: array("i"))
    cell_tokens: array[int] = field(default_factory=lambda: array("i"))
    num_draws: int = 0
    draw_temperature: float = 1.0
    seed: int = 0


@dataclass(frozen=True, slots=True)
class TextScores:
    """Scores of the N = P - first places: `logprobs` [N] of the text's own tokens; ids and logprobs of the most likely
    tokens [N * K], row by row; `cell_logprobs` [M]; drawn tokens and their logprobs at temperature 1 [N * D].
    """

    logprobs: array[float] = field(default_factory=lambda: array("f"))
    top_tokens: array[int] = field(default_factory=lambda: array("i"))
    top_logprobs: array[float] = field(default_factory=lambda: array("f"))
    cell_logprobs: array[float] = field(default_factory=lambda: array("f"))
    drawn_tokens: array[int] = field(default_factory=lambda: array("i"))
    drawn_logprobs: array[float] = field(default_factory=lambda: array("f"))


def score(
    logits: Callable[[Sequence[array[int]], Sequence[int], int], Iterator[Tensor]], request: ScoreRequest
) -> TextScores:
    """Score a text in one forward pass. `logits`: of the policy (`Model.logits`). May be called from any thread.

    Raises:
        UserError: a cell's token is not in the vocabulary.
    """
    scores, place = TextScores(), request.first
    with torch.inference_mode():
        for logits_NV in logits([request.text], [request.first - 1], LOGITS_TOKENS):
            _score_tile(exact(logits_NV), place, request, scores)
            place += len(logits_NV)
    return scores


def _score_tile(logits_NV: Tensor, place: int, request: ScoreRequest, scores: TextScores) -> None:
    """Add the scores of one tile, whose first place is `place`."""
    end, device = place + len(logits_NV), logits_NV.device
    logprobs_NV = logits_NV.log_softmax(-1)
    own_N = torch.tensor(request.text[place:end], dtype=torch.long, device=device)
    _add(scores.logprobs, logprobs_NV.gather(1, own_N[:, None]))
    if request.top_k:
        tempered_NV = _tempered(logprobs_NV, request.top_temperature)
        top_NK, ids_NK = tempered_NV.topk(min(request.top_k, logits_NV.shape[1]), dim=-1)
        _add(scores.top_logprobs, top_NK)
        scores.top_tokens.frombytes(ids_NK.int().cpu().numpy().tobytes())
    places = np.frombuffer(request.cell_places, dtype="i")
    cells = slice(*np.searchsorted(places, (place, end)).tolist())
    if len(tokens := request.cell_tokens[cells]):
        if not 0 <= min(tokens) <= max(tokens) < logits_NV.shape[1]:
            raise UserError(f"A token to score is outside of 0..{logits_NV.shape[1] - 1}, the vocabulary.")
        rows_M = torch.from_numpy(places[cells] - place).to(device, torch.long)
        _add(scores.cell_logprobs, logprobs_NV[rows_M, torch.tensor(tokens, dtype=torch.long, device=device)])
    if request.num_draws:
        drawn_ND = _draw(logprobs_NV, place, request)
        scores.drawn_tokens.frombytes(drawn_ND.int().cpu().numpy().tobytes())
        _add(scores.drawn_logprobs, logprobs_NV.gather(1, drawn_ND))


def _tempered(logprobs_NV: Tensor, temperature: float) -> Tensor:
    """Return the logprobs at another temperature; unchanged at 0, where one token would have all the mass."""
    return logprobs_NV if temperature in (0.0, 1.0) else (logprobs_NV / temperature).log_softmax(-1)


def _draw(logprobs_NV: Tensor, place: int, request: ScoreRequest) -> Tensor:
    """Draw tokens [N, D] with replacement; at temperature 0 always the most likely token."""
    if request.draw_temperature == 0.0:
        return logprobs_NV.argmax(-1, keepdim=True).expand(-1, request.num_draws).contiguous()
    tempered_NV = _tempered(logprobs_NV, request.draw_temperature)
    places = np.arange(place, place + len(tempered_NV))
    columns = []
    for draw in range(request.num_draws):
        keys = stream_keys([request.seed], [FIRST_DRAW + draw]).repeat(len(places))
        columns.append(invert(tempered_NV, torch.from_numpy(uniforms(keys, places)).to(tempered_NV.device))[0])
    return torch.stack(columns, dim=1)


def _add(scores: array[float], values: Tensor) -> None:
    scores.frombytes(values.float().cpu().numpy().tobytes())
