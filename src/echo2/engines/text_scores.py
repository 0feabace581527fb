"""Scores a given text with a policy: logprobs of its tokens, and of other tokens in their places.

One forward pass over the text gives all scores. A token is scored given the tokens before it, so the first token has no
score. Logprobs are at temperature 1 unless stated otherwise.

Shape suffixes: N = scored places of one tile, V = vocabulary, K = most likely tokens, M = cells of one tile, D = draws.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import torch
from torch import Tensor

from echo2.core.errors import UserError
from echo2.engines.engine import stream_keys, uniforms
from echo2.engines.sampler import invert
from echo2.engines.torch_engine import Model

if TYPE_CHECKING:
    Ints: TypeAlias = array[int]
    Floats: TypeAlias = array[float]

#: Tokens of a text whose logits exist at once.
LOGITS_TOKENS = 256
#: The random stream of the first draw: far from the streams of samples, which are counted from 0.
FIRST_DRAW = 1 << 32


@dataclass(frozen=True, slots=True)
class ScoreRequest:
    """The scores to compute for a text of P tokens from the place `first` >= 1 on.

    top_k        how many of the most likely tokens at each place, with their logprobs at `top_temperature`
    cell_places  'i' [M], ascending, and cell_tokens 'i' [M]: tokens whose logprobs are wanted at these places
    num_draws    how many tokens are drawn at each place at `draw_temperature`, from random streams of `seed`
    """

    text: Ints
    first: int = 1
    top_k: int = 0
    top_temperature: float = 1.0
    cell_places: Ints = field(default_factory=lambda: array("i"))
    cell_tokens: Ints = field(default_factory=lambda: array("i"))
    num_draws: int = 0
    draw_temperature: float = 1.0
    seed: int = 0


@dataclass(frozen=True, slots=True)
class TextScores:
    """Scores of the N = P - first places: `logprobs` [N] of the text's own tokens; ids and logprobs of the most likely
    tokens [N * K], row by row; `cell_logprobs` [M]; drawn tokens and their logprobs at temperature 1 [N * D].
    """

    logprobs: Floats = field(default_factory=lambda: array("f"))
    top_tokens: Ints = field(default_factory=lambda: array("i"))
    top_logprobs: Floats = field(default_factory=lambda: array("f"))
    cell_logprobs: Floats = field(default_factory=lambda: array("f"))
    drawn_tokens: Ints = field(default_factory=lambda: array("i"))
    drawn_logprobs: Floats = field(default_factory=lambda: array("f"))


def score(policy: Model, request: ScoreRequest) -> TextScores:
    """Score a text in one forward pass. May be called from any thread.

    Raises:
        UserError: a cell's token is not in the vocabulary.
    """
    found, place = TextScores(), request.first
    with torch.inference_mode():
        for logits_NV in policy.logits([request.text], [request.first - 1], LOGITS_TOKENS):
            _score_tile(logits_NV, place, request, found)
            place += len(logits_NV)
    return found


def _score_tile(logits_NV: Tensor, place: int, request: ScoreRequest, found: TextScores) -> None:
    """Add the scores of one tile, whose first place is `place`."""
    end, device = place + len(logits_NV), logits_NV.device
    logprobs_NV = logits_NV.log_softmax(-1)
    own_N = torch.tensor(request.text[place:end], dtype=torch.long, device=device)
    _add(found.logprobs, logprobs_NV.gather(1, own_N[:, None]))
    if request.top_k:
        tempered_NV = _tempered(logprobs_NV, request.top_temperature)
        top_NK, ids_NK = tempered_NV.topk(min(request.top_k, logits_NV.shape[1]), dim=-1)
        _add(found.top_logprobs, top_NK)
        found.top_tokens.frombytes(ids_NK.int().cpu().numpy().tobytes())
    places = np.frombuffer(request.cell_places, dtype="i")
    cells = slice(*np.searchsorted(places, (place, end)).tolist())
    if len(tokens := request.cell_tokens[cells]):
        if not 0 <= min(tokens) <= max(tokens) < logits_NV.shape[1]:
            raise UserError(f"A token to score is outside of 0..{logits_NV.shape[1] - 1}, the vocabulary.")
        rows_M = torch.from_numpy(places[cells] - place).to(device, torch.long)
        _add(found.cell_logprobs, logprobs_NV[rows_M, torch.tensor(tokens, dtype=torch.long, device=device)])
    if request.num_draws:
        drawn_ND = _draw(logprobs_NV, place, request)
        found.drawn_tokens.frombytes(drawn_ND.int().cpu().numpy().tobytes())
        _add(found.drawn_logprobs, logprobs_NV.gather(1, drawn_ND))


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


def _add(found: Floats, values: Tensor) -> None:
    found.frombytes(values.float().cpu().numpy().tobytes())
