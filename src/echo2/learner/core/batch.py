"""Turns data into the tensors of one forward pass. Its two layouts have the same gradient.

*plain*: one row per datum, [prompt, tokens], right padded. Causal attention keeps the padding out; no mask is needed.

*shared*: one strip for neighbouring data with equal prompts that holds their *prefix tree*: the prompt once, and of
every datum only the tokens after the prefix that it shares with earlier data. Each token attends to its ancestors and
itself; its position id is its depth. A token's hidden state depends on its ancestors only, so this is the plain
computation without the repetitions. Descendants follow a token without a gap, so one number per token, the end of its
descendants, defines the mask. Strips are packed into rows of about equal length, because padding costs as much as
tokens do.

Attention is quadratic in the row, so long data are cheaper plain: `auto` takes the layout with the lower estimated
cost. In both, the tokens after which no loss token follows (the last one of every datum) are not run at all.

Micro-batches are limited by the tokens that are run, never by groups: the memory of a forward pass grows with tokens.
A mask grows with the square of the row length, so neither a strip nor the strips of a row exceed SHARED_ROW_TOKENS.

Shape suffixes: B = rows, T = longest row, n = loss tokens, S = sequences (data), u = distinct positions that predict
loss tokens, W = widest support; L = a mixture's layers with a router, k = experts chosen for a token in each.
"""

from __future__ import annotations

import heapq
import itertools
import math
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from echo2.core.errors import InvariantError
from echo2.engines.routing import LIVE
from echo2.learner.core.datum import Datum
from echo2.learner.core.losses import LOGGED_LAG, LossTokens
from echo2.transport.routes import Routes

Layout = Literal["auto", "shared", "plain"]
Ints = npt.NDArray[np.int64]
MOST_STRIPS_PER_ROW = 8
#: Maximum tokens of a row with a mask: at most 16 KiB of mask, in float32, per token; a fraction of its activations.
SHARED_ROW_TOKENS = 4096
#: Data that share a prompt, each with its index among all.
_Family = Sequence[tuple[int, Datum]]


@dataclass(frozen=True, slots=True)
class Support:
    """The tokens that could have been drawn, for some of the loss tokens of a narrowed distribution (top-k, top-p).

    rows_m     index of these tokens among the n loss tokens
    tokens_mW  the token ids, padded with 0
    valid_mW   False where padded
    """

    rows_m: Tensor
    tokens_mW: Tensor
    valid_mW: Tensor


@dataclass(frozen=True, slots=True)
class PackedBatch:
    """One forward pass.

    positions_BT and ends_BT are None in the plain layout. Otherwise a row's token i attends to j <= i if i < ends[j].
    predict_u indexes the flattened B * T positions; loss token i is predicted at predict_u[position_n[i]]. Its row of
    candidates_nW has the token itself, and then a teacher's k most likely ones (W = 1 + k; k may be 0). Sequence s
    is datum data_S[s] of the packed data. routes_BTLk (int16; None: no datum has routes) are the experts of each token:
    where data share a token, the first one's. `LIVE` where there are none.
    """

    tokens_BT: Tensor
    positions_BT: Tensor | None
    ends_BT: Tensor | None
    predict_u: Tensor
    position_n: Tensor
    candidates_nW: Tensor
    loss_tokens: LossTokens
    supports: tuple[Support, ...]
    data_S: tuple[int, ...]
    routes_BTLk: Tensor | None = None

    def to(self, device: torch.device, dtype: torch.dtype) -> PackedBatch:
        """Return the batch on `device`, with floating-point tensors in `dtype`."""

        def move(part: Any) -> Any:
            if isinstance(part, Tensor):
                return part.to(device, dtype if part.is_floating_point() else None, non_blocking=True)
            if isinstance(part, PackedBatch | LossTokens | Support):
                return replace(part, **{field.name: move(getattr(part, field.name)) for field in fields(part)})
            return tuple(move(each) for each in part) if isinstance(part, tuple) else part

        moved: PackedBatch = move(self)
        return moved


@dataclass(frozen=True, slots=True)
class _Strip:
    """A prefix tree, whose tokens go into one row together. A token's descendants are the tokens after it and before
    its entry in `ends`. `losses` and `predict` hold, datum by datum, the indices of loss tokens and where each is
    predicted; `places` are the data's indices. `routes`: the experts of each token, if the data have any. `tokens` are
    views of the data, one behind the other.
    """

    tokens: tuple[npt.NDArray[np.int32], ...]
    positions: Ints
    ends: Ints
    predict: tuple[Ints, ...]
    data: tuple[Datum, ...]
    losses: tuple[Ints, ...]
    places: tuple[int, ...]
    routes: Routes | None


def _families(data: Sequence[Datum]) -> list[_Family]:
    """Group neighbouring data with equal prompts."""
    by_prompt = itertools.groupby(enumerate(data), key=lambda item: item[1].prompt_tokens)
    return [list(family) for _, family in by_prompt]


def num_tokens_run(data: Sequence[Datum], shares_prompts: bool) -> int:
    """Return the number of tokens in a forward pass over the data. With `shares_prompts` a prompt that neighbours share
    counts once, and tokens that they share after it each time; otherwise the data are rows padded to the longest.
    """
    if not shares_prompts:
        return len(data) * max((len(datum.prompt_tokens) + datum.num_inputs for datum in data), default=0)
    prompts = sum(len(family[0][1].prompt_tokens) for family in _families(data))
    return prompts + sum(datum.num_inputs for datum in data)


def microbatches(data: Sequence[Datum], tokens_max: int, shares_prompts: bool) -> list[list[Datum]]:
    """Split the data, in order, so that no part runs more than `tokens_max` tokens (`num_tokens_run`), and data that
    share a prompt have no more than SHARED_ROW_TOKENS. A single datum may exceed either limit.
    """
    parts: list[list[Datum]] = []
    num_tokens = longest = strip = 0
    prompt = None
    for datum in data:
        row = len(datum.prompt_tokens) + datum.num_inputs
        grown = strip + datum.num_inputs if datum.prompt_tokens == prompt else row
        if shares_prompts:
            added = num_tokens + (datum.num_inputs if datum.prompt_tokens == prompt else row)
        else:
            added = (len(parts[-1]) + 1 if parts else 1) * max(longest, row)
        if not parts or added > tokens_max or (shares_prompts and grown > max(row, SHARED_ROW_TOKENS)):
            parts.append([])
            added, grown, longest = row, row, 0
        parts[-1].append(datum)
        num_tokens, strip, longest, prompt = added, grown, max(longest, row), datum.prompt_tokens
    return parts


def collate(data: Sequence[Datum], layout: Layout, pair_cost: float, tokens_max: int | None = None) -> PackedBatch:
    """Return the tensors (on the CPU) of one forward pass over `data`, which is not empty.

    `pair_cost`: cost of one attended pair of tokens, in units of one token's cost in the rest of the model. `auto`
    takes the plain layout only if its rows hold no more than `tokens_max` tokens.

    Raises:
        InvariantError: a datum has an empty prompt.
    """
    families, plain = _families(data), [len(datum.prompt_tokens) + datum.num_inputs for datum in data]
    if layout != "plain":
        rows = _pack([_prefix_tree(family) for family in families], pair_cost)
        is_large = tokens_max is not None and len(plain) * max(plain) > tokens_max
        if layout == "shared" or is_large or _cost(_row_lengths(rows), pair_cost) <= _cost(plain, pair_cost / 2):
            return _tensors(rows, masked=True)
    # Causal kernels skip half of the pairs (hence pair_cost / 2 above); with a custom mask they don't.
    return _tensors([[_prefix_tree([item])] for family in families for item in family], masked=False)


def by_datum(logp_n: Tensor, batch: PackedBatch, part: Sequence[Datum]) -> list[array[float]]:
    """Return the logprobs by datum, in the data's order, each at its token's index."""
    logprobs = [array("d", bytes(8 * len(datum.tokens))) for datum in part]
    values = iter(logp_n.double().tolist())
    for place in batch.data_S:
        for at, counts in enumerate(part[place].loss_mask):
            if counts:
                logprobs[place][at] = next(values)
    return logprobs


def rows_by_datum(table_nk: Tensor, batch: PackedBatch, part: Sequence[Datum]) -> list[bytes]:
    """Return the bytes of the table's rows by datum, in the data's order."""
    counts = [part[place].loss_mask.count(1) for place in batch.data_S]
    rows = dict(zip(batch.data_S, table_nk.cpu().split(counts), strict=True))
    return [rows[place].numpy().tobytes() for place in range(len(part))]


def _view(tokens: array[int]) -> npt.NDArray[np.int32]:
    return np.frombuffer(tokens, np.int32)


def _prefix_tree(family: _Family) -> _Strip:
    """Build the strip of data with one prompt, in lexicographic order; each datum adds only the tokens after the prefix
    that it shares with the previous one.

    In this order the longest prefix shared with any earlier datum is the one shared with the previous datum, if all
    data end with a loss token; else some tokens may be run twice.
    """
    data = [datum for _, datum in family]
    prompt = _view(data[0].prompt_tokens)
    if not len(prompt):
        raise InvariantError("a datum with an empty prompt reached the learner: nothing predicts its first token")
    losses = [np.flatnonzero(np.frombuffer(datum.loss_mask, dtype=np.uint8)) for datum in data]
    # Inputs stop before the last loss token: nothing is predicted after it.
    inputs = [_view(datum.tokens)[: datum.num_inputs] for datum in data]
    order = sorted(range(len(data)), key=lambda index: data[index].tokens)
    roots = np.arange(len(prompt))
    tokens, positions = [prompt], [roots]
    finished: list[tuple[Ints, int]] = []  # tokens, and where their descendants end
    predict: list[Ints] = []
    routes = [_routes(data[order[0]], 0, len(prompt))]
    previous, path, size = prompt[:0], roots[-1:], len(prompt)  # path: last prompt token, then one entry per input
    for index in order:
        own = inputs[index]
        common = _common_prefix(previous, own)
        grown = len(own) - common
        if grown:
            finished.append((path[common + 1 :], size))
            path = np.concatenate([path[: common + 1], np.arange(size, size + grown)])
            tokens.append(own[common:])
            positions.append(np.arange(len(prompt) + common, len(prompt) + len(own)))
            routes.append(_routes(data[index], len(prompt) + common, len(prompt) + len(own)))
            size += grown
        predict.append(path[losses[index]])
        previous = own
    ends = np.full(size, size)
    for indices, end in finished:
        ends[indices] = end
    return _Strip(
        tuple(tokens),
        np.concatenate(positions),
        ends,
        tuple(predict),
        tuple(data[index] for index in order),
        tuple(losses[index] for index in order),
        tuple(family[index][0] for index in order),
        _joined(routes),
    )


def _routes(datum: Datum, start: int, stop: int) -> Routes | int:
    """Return the experts of a datum's tokens from `start` to `stop`; without routes, the number of these tokens."""
    return stop - start if datum.routes is None else datum.routes[start:stop].astype(np.int16)


def _joined(parts: Sequence[Routes | int]) -> Routes | None:
    """Return the experts of all parts, `LIVE` in those without routes; None if no part has any."""
    example = next((part for part in parts if not isinstance(part, int)), None)
    if example is None:
        return None
    nothing = (np.full((part, *example.shape[1:]), LIVE, np.int16) if isinstance(part, int) else part for part in parts)
    return np.concatenate(list(nothing))


def _common_prefix(left: npt.NDArray[np.int32], right: npt.NDArray[np.int32]) -> int:
    length = min(len(left), len(right))
    different = np.flatnonzero(left[:length] != right[:length])
    return int(different[0]) if len(different) else length


def _row_lengths(rows: Sequence[Sequence[_Strip]]) -> list[int]:
    return [sum(len(strip.ends) for strip in row) for row in rows]


def _cost(lengths: Sequence[int], pair_cost: float) -> float:
    """Return the cost of rows padded to the longest, in units of one token."""
    return len(lengths) * max(lengths) * (1.0 + pair_cost * max(lengths))


def _pack(strips: Sequence[_Strip], pair_cost: float) -> list[list[_Strip]]:
    """Pack strips into rows of about equal length: longest strip first, always into the shortest row. The number of
    rows is the cheapest.
    """
    ordered = sorted(strips, key=lambda strip: -len(strip.ends))
    counts = sorted({-(-len(strips) // share) for share in range(1, MOST_STRIPS_PER_ROW + 1)}, reverse=True)
    longest = max(len(ordered[0].ends), SHARED_ROW_TOKENS)
    spread = [rows for rows in (_spread(ordered, count) for count in counts) if max(_row_lengths(rows)) <= longest]
    return min(spread, key=lambda rows: _cost(_row_lengths(rows), pair_cost))


def _spread(ordered: Sequence[_Strip], num_rows: int) -> list[list[_Strip]]:
    rows: list[list[_Strip]] = [[] for _ in range(num_rows)]
    shortest = [(0, index) for index in range(num_rows)]
    for strip in ordered:
        length, index = shortest[0]
        rows[index].append(strip)
        heapq.heapreplace(shortest, (length + len(strip.ends), index))
    return rows


def _tensors(rows: Sequence[Sequence[_Strip]], masked: bool) -> PackedBatch:
    longest = max(_row_lengths(rows))
    tokens_BT = np.zeros((len(rows), longest), dtype=np.int64)
    positions_BT = np.zeros_like(tokens_BT)
    # Padding attends to itself, because a softmax over nothing is NaN.
    ends_BT = np.tile(np.arange(longest) + 1, (len(rows), 1))
    predict: list[Ints] = []
    routes: list[Routes | int] = []
    for index, row in enumerate(rows):
        start = 0
        for strip in row:
            stop = start + len(strip.ends)
            np.concatenate(strip.tokens, out=tokens_BT[index, start:stop])
            positions_BT[index, start:stop] = strip.positions
            ends_BT[index, start:stop] = strip.ends + start
            predict.extend(index * longest + start + where for where in strip.predict)
            routes.append(len(strip.ends) if strip.routes is None else strip.routes)
            start = stop
        routes.append(longest - start)
    predict_u, position_n = np.unique(np.concatenate(predict), return_inverse=True)
    strips = [strip for row in rows for strip in row]
    candidates_nW, loss_tokens, supports = _loss_side(strips)
    places = tuple(place for strip in strips for place in strip.places)
    routes_NLk = _joined(routes)
    return PackedBatch(
        torch.from_numpy(tokens_BT),
        torch.from_numpy(positions_BT) if masked else None,
        torch.from_numpy(ends_BT) if masked else None,
        torch.from_numpy(predict_u),
        torch.from_numpy(position_n),
        candidates_nW,
        loss_tokens,
        supports,
        places,
        None if routes_NLk is None else torch.from_numpy(routes_NLk).unflatten(0, tokens_BT.shape),
    )


def _loss_side(strips: Sequence[_Strip]) -> tuple[Tensor, LossTokens, tuple[Support, ...]]:
    data = [datum for strip in strips for datum in strip.data]
    losses = [at for strip in strips for at in strip.losses]

    def column(of: str, dtype: type[np.generic], default: float = 0.0) -> Tensor:
        pieces = []
        for datum, at in zip(data, losses, strict=True):
            values = getattr(datum, of)
            whole = np.full(len(at), default, dtype) if values is None else np.frombuffer(values, dtype)[at]
            pieces.append(whole)
        return torch.from_numpy(np.concatenate(pieces))

    sources = tuple(sorted({datum.source for datum in data}))
    candidates_nW, top_teacher_nk = _candidates(data, losses)
    loss_tokens = LossTokens(
        behaviour_n=column("behaviour_logprobs", np.float32),
        advantage_n=column("advantages", np.float64),
        sequence_n=torch.from_numpy(np.repeat(np.arange(len(data)), [len(at) for at in losses])),
        lag_n=torch.from_numpy(np.concatenate([_lags(datum, at) for datum, at in zip(data, losses, strict=True)])),
        source_S=torch.tensor([sources.index(datum.source) for datum in data]),
        sources=sources,
        weight_n=column("weights", np.float64, default=1.0),
        reference_n=column("reference_logprobs", np.float64),
        teacher_n=column("teacher_logprobs", np.float64),
        top_teacher_nk=top_teacher_nk,
        top_policy_nk=top_teacher_nk,
        entropy_n=torch.zeros(sum(len(at) for at in losses)),
        clip_low_n=column("clip_low", np.float64, default=math.nan),
        clip_high_n=column("clip_high", np.float64, default=math.nan),
    )
    return candidates_nW, loss_tokens, _supports(data, losses)


def _lags(datum: Datum, at: Ints) -> Ints:
    """Return the lag of each token of `at`: the trained version minus the version that sampled the token."""
    if not datum.version_spans:
        return np.full(len(at), LOGGED_LAG)
    starts, versions = (np.asarray(column, dtype=np.int64) for column in zip(*datum.version_spans, strict=True))
    lags: Ints = datum.version - versions[np.searchsorted(starts, at, side="right") - 1]
    return lags


def _candidates(data: Sequence[Datum], losses: Sequence[Ints]) -> tuple[Tensor, Tensor]:
    """Return the tokens to predict, each with a teacher's most likely tokens behind it [n, 1 + k], and the logprobs of
    the latter [n, k], -inf where a datum has fewer than another."""
    widths = [len(datum.top_tokens) // len(at) for datum, at in zip(data, losses, strict=True)]
    num_tokens, most = sum(map(len, losses)), max(widths)
    tokens_nW = np.zeros((num_tokens, 1 + most), np.int64)
    logprobs_nk = np.full((num_tokens, most), -np.inf, np.float32)
    start = 0
    for datum, at, width in zip(data, losses, widths, strict=True):
        rows = slice(start, start + len(at))
        tokens_nW[rows, 0] = _view(datum.tokens if datum.targets is None else datum.targets)[at]
        tokens_nW[rows, 1 : 1 + width] = _view(datum.top_tokens).reshape(len(at), width)
        logprobs_nk[rows, :width] = np.frombuffer(datum.top_logprobs, np.float32).reshape(len(at), width)
        start += len(at)
    return torch.from_numpy(tokens_nW), torch.from_numpy(logprobs_nk)


def _supports(data: Sequence[Datum], losses: Sequence[Ints]) -> tuple[Support, ...]:
    """Return the narrowed distributions of all loss tokens that have one, as padded tables: one for each power of two
    of their widths, so that at most half of a table is padding. In a single table, one wide distribution would widen
    all rows.
    """
    rows: dict[int, list[int]] = {}
    pieces: dict[int, list[npt.NDArray[np.int32]]] = {}
    start = 0
    for datum, at in zip(data, losses, strict=True):
        if datum.support_tokens is not None and datum.support_offsets is not None:
            allowed = np.frombuffer(datum.support_tokens, dtype=np.int32)
            offsets = datum.support_offsets
            for row, t in enumerate(at.tolist(), start):
                piece = allowed[offsets[t] : offsets[t + 1]]
                rows.setdefault(len(piece).bit_length(), []).append(row)
                pieces.setdefault(len(piece).bit_length(), []).append(piece)
        start += len(at)
    return tuple(_support(rows[bits], pieces[bits]) for bits in sorted(rows))


def _support(rows: Sequence[int], pieces: Sequence[npt.NDArray[np.int32]]) -> Support:
    widths = np.asarray([len(piece) for piece in pieces])
    valid_mW = np.arange(int(widths.max()))[None, :] < widths[:, None]
    tokens_mW = np.zeros(valid_mW.shape, dtype=np.int64)
    tokens_mW[valid_mW] = np.concatenate(pieces)
    return Support(torch.tensor(rows), torch.from_numpy(tokens_mW), torch.from_numpy(valid_mW))
