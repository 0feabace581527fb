"""Rollout groups -> the tensors of one forward pass. Two layouts with the same gradient.

*plain*: one row per rollout, [prompt, rollout], right padded. Causal attention keeps the padding out; no mask is
needed.

*shared*: one strip per group that holds the group's *prefix tree*: the prompt once, and of every rollout only the
tokens after the point where it leaves the rollouts before it. Each token sees its ancestors and itself; position ids
say how deep it sits. A token's hidden state depends on its ancestors only, so this is the plain computation with the
repetitions left out. Strips are packed into rows of about equal length, because padding costs as much as tokens do.

Attention is quadratic in the row, so long rollouts are cheaper plain: `auto` takes the layout with the lower estimated
cost. In both, the tokens after which no loss token follows (the last one of every rollout) are not run at all.

Shape suffixes: B = rows, T = longest row, n = loss tokens, u = distinct positions that predict loss tokens, W =
widest support.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from echo2.errors import InvariantError
from echo2.learner.losses import LOGGED_LAG, LossTokens
from echo2.types import Rollout

Layout = Literal["auto", "shared", "plain"]
Ints = npt.NDArray[np.int64]
MOST_STRIPS_PER_ROW = 8


@dataclass(frozen=True, slots=True)
class TrainedGroup:
    """A group cut down to what is trained on: rollouts with at least one loss token, and their advantages.

    `version` is the one that is trained: lags count from it. `workers`: who sampled each rollout; `logged`: nobody did.
    """

    prompt_tokens: Sequence[int]
    rollouts: tuple[Rollout, ...]
    advantages: tuple[float, ...]
    version: int = 0
    workers: tuple[str, ...] = ()
    logged: bool = False


@dataclass(frozen=True, slots=True)
class Support:
    """For some of the loss tokens drawn from a narrowed distribution (top-k, top-p): which tokens could have come.

    rows_m     index of these tokens among the n loss tokens
    tokens_mW  the token ids, padded with 0
    valid_mW   False where padded
    """

    rows_m: Tensor
    tokens_mW: Tensor
    valid_mW: Tensor


@dataclass(frozen=True, slots=True)
class Batch:
    """One forward pass.

    positions_BT and visible_BTT (True: row's token may look at column's) are None in the plain layout.
    predict_u indexes the flattened B * T positions; loss token i is predicted at predict_u[position_n[i]].
    """

    tokens_BT: Tensor
    positions_BT: Tensor | None
    visible_BTT: Tensor | None
    predict_u: Tensor
    position_n: Tensor
    target_n: Tensor
    loss_tokens: LossTokens
    supports: tuple[Support, ...]

    def to(self, device: torch.device, dtype: torch.dtype) -> Batch:
        """The batch on `device`, its behaviour logprobs and advantages in `dtype`."""

        def move(tensor: Tensor) -> Tensor:
            return tensor.to(device, non_blocking=True)

        loss = self.loss_tokens
        return Batch(
            move(self.tokens_BT),
            None if self.positions_BT is None else move(self.positions_BT),
            None if self.visible_BTT is None else move(self.visible_BTT),
            move(self.predict_u),
            move(self.position_n),
            move(self.target_n),
            LossTokens(
                move(loss.behaviour_n.to(dtype)),
                move(loss.advantage_n.to(dtype)),
                move(loss.sequence_n),
                move(loss.lag_n),
                move(loss.worker_S),
                loss.workers,
            ),
            tuple(Support(move(s.rows_m), move(s.tokens_mW), move(s.valid_mW)) for s in self.supports),
        )


@dataclass(frozen=True, slots=True)
class _Strip:
    """Tokens that go into one row together. `pieces` are (start, stop, ancestors): tokens start..stop see `ancestors`
    and, causally, each other. `losses` and `predict` hold, rollout by rollout, which
    tokens are loss tokens and where each is predicted.
    """

    tokens: Ints
    positions: Ints
    pieces: tuple[tuple[int, int, Ints], ...]
    predict: tuple[Ints, ...]
    rollouts: tuple[Rollout, ...]
    losses: tuple[Ints, ...]
    advantages: tuple[float, ...]
    version: int
    workers: tuple[str, ...]
    logged: bool


def collate(groups: Sequence[TrainedGroup], layout: Layout, pair_cost: float) -> Batch:
    """Tensors (on the CPU) of one forward pass over `groups`, which must hold at least one rollout.

    `pair_cost`: what one attended pair of tokens costs, in units of what one token costs in the rest of the model.
    """
    if layout != "plain":
        rows = _pack([_prefix_tree(group) for group in groups], pair_cost)
        if layout == "shared" or _cost(_row_lengths(rows), pair_cost) <= _cost(_plain_lengths(groups), pair_cost / 2):
            return _tensors(rows, masked=True)
    # Causal kernels skip half of the pairs (hence pair_cost / 2 above); with a mask of our own they don't.
    return _tensors(_plain_rows(groups), masked=False)


def _loss_positions(rollout: Rollout) -> Ints:
    """Indices of the tokens that the policy itself sampled."""
    return np.flatnonzero(np.frombuffer(rollout.loss_mask, dtype=np.uint8))


def _int_array(tokens: Sequence[int]) -> Ints:
    return np.asarray(tokens, dtype=np.int64)


def _prefix_tree(group: TrainedGroup) -> _Strip:
    """The group's rollouts in lexicographic order, each adding only what the previous one does not already hold.

    In that order the longest prefix shared with any earlier rollout is the one shared with the previous rollout.
    """
    prompt = _int_array(group.prompt_tokens)
    if not len(prompt):
        raise InvariantError("a group with an empty prompt reached the learner: nothing predicts its first token")
    losses = [_loss_positions(rollout) for rollout in group.rollouts]
    # Inputs stop before the last loss token: nothing is predicted after it.
    inputs = [rollout.tokens[: int(loss[-1])] for rollout, loss in zip(group.rollouts, losses, strict=True)]
    order = sorted(range(len(inputs)), key=lambda index: inputs[index])
    roots = np.arange(len(prompt))
    tokens, positions = [prompt], [roots]
    pieces: list[tuple[int, int, Ints]] = [(0, len(prompt), roots[:0])]
    predict: list[Ints] = []
    previous, path, size = prompt[:0], roots[-1:], len(prompt)  # path: last prompt token, then one entry per input
    for index in order:
        own = _int_array(inputs[index])
        common = _common_prefix(previous, own)
        grown = len(own) - common
        if grown or len(own) != len(previous):
            path = np.concatenate([path[: common + 1], np.arange(size, size + grown)])
        if grown:
            tokens.append(own[common:])
            positions.append(np.arange(len(prompt) + common, len(prompt) + len(own)))
            pieces.append((size, size + grown, np.concatenate([roots, path[1 : common + 1]])))
            size += grown
        predict.append(path[losses[index]])
        previous = own
    return _Strip(
        np.concatenate(tokens),
        np.concatenate(positions),
        tuple(pieces),
        tuple(predict),
        tuple(group.rollouts[index] for index in order),
        tuple(losses[index] for index in order),
        tuple(group.advantages[index] for index in order),
        group.version,
        tuple(group.workers[index] for index in order) if group.workers else ("",) * len(order),
        group.logged,
    )


def _common_prefix(left: Ints, right: Ints) -> int:
    length = min(len(left), len(right))
    different = np.flatnonzero(left[:length] != right[:length])
    return int(different[0]) if len(different) else length


def _plain_rows(groups: Sequence[TrainedGroup]) -> list[list[_Strip]]:
    """One row per rollout."""
    return [
        [_prefix_tree(replace(group, rollouts=(rollout,), advantages=(advantage,), workers=group.workers[at : at + 1]))]
        for group in groups
        for at, (rollout, advantage) in enumerate(zip(group.rollouts, group.advantages, strict=True))
    ]


def _plain_lengths(groups: Sequence[TrainedGroup]) -> list[int]:
    return [len(g.prompt_tokens) + rollout.loss_mask.rindex(1) for g in groups for rollout in g.rollouts]


def _row_lengths(rows: Sequence[Sequence[_Strip]]) -> list[int]:
    return [sum(len(strip.tokens) for strip in row) for row in rows]


def _cost(lengths: Sequence[int], pair_cost: float) -> float:
    """Of rows padded to the longest, in tokens' worth."""
    return len(lengths) * max(lengths) * (1.0 + pair_cost * max(lengths))


def _pack(strips: Sequence[_Strip], pair_cost: float) -> list[list[_Strip]]:
    """Rows of about equal length: longest strip first, always into the shortest row; as many rows as cost least."""
    ordered = sorted(strips, key=lambda strip: -len(strip.tokens))
    counts = sorted({-(-len(strips) // share) for share in range(1, MOST_STRIPS_PER_ROW + 1)}, reverse=True)
    return min((_spread(ordered, count) for count in counts), key=lambda rows: _cost(_row_lengths(rows), pair_cost))


def _spread(ordered: Sequence[_Strip], num_rows: int) -> list[list[_Strip]]:
    rows: list[list[_Strip]] = [[] for _ in range(num_rows)]
    shortest = [(0, index) for index in range(num_rows)]
    for strip in ordered:
        length, index = shortest[0]
        rows[index].append(strip)
        heapq.heapreplace(shortest, (length + len(strip.tokens), index))
    return rows


def _tensors(rows: Sequence[Sequence[_Strip]], masked: bool) -> Batch:
    longest = max(_row_lengths(rows))
    tokens_BT = np.zeros((len(rows), longest), dtype=np.int64)
    positions_BT = np.zeros_like(tokens_BT)
    visible_BTT = np.zeros((len(rows), longest, longest) if masked else (0, 0, 0), dtype=np.bool_)
    predict: list[Ints] = []
    for index, row in enumerate(rows):
        start = 0
        for strip in row:
            stop = start + len(strip.tokens)
            tokens_BT[index, start:stop] = strip.tokens
            positions_BT[index, start:stop] = strip.positions
            if masked:
                _reveal(visible_BTT[index, start:stop, start:stop], strip)
            predict.extend(index * longest + start + where for where in strip.predict)
            start = stop
    if masked:
        # Padding sees itself, because a softmax over nothing is NaN.
        visible_BTT[:, np.arange(longest), np.arange(longest)] = True
    predict_u, position_n = np.unique(np.concatenate(predict), return_inverse=True)
    strips = [strip for row in rows for strip in row]
    target_n, loss_tokens, supports = _loss_side(strips)
    return Batch(
        torch.from_numpy(tokens_BT),
        torch.from_numpy(positions_BT) if masked else None,
        torch.from_numpy(visible_BTT) if masked else None,
        torch.from_numpy(predict_u),
        torch.from_numpy(position_n),
        target_n,
        loss_tokens,
        supports,
    )


def _reveal(visible_TT: npt.NDArray[np.bool_], strip: _Strip) -> None:
    for start, stop, ancestors in strip.pieces:
        visible_TT[start:stop, ancestors] = True
        visible_TT[start:stop, start:stop] = np.tri(stop - start, dtype=np.bool_)


def _loss_side(strips: Sequence[_Strip]) -> tuple[Tensor, LossTokens, tuple[Support, ...]]:
    rollouts = [rollout for strip in strips for rollout in strip.rollouts]
    losses = [at for strip in strips for at in strip.losses]
    target = np.concatenate(
        [np.frombuffer(r.tokens, dtype=np.int32)[at] for r, at in zip(rollouts, losses, strict=True)]
    )
    behaviour = np.concatenate(
        [np.frombuffer(r.logprobs, dtype=np.float32)[at] for r, at in zip(rollouts, losses, strict=True)]
    )
    counts = [len(at) for at in losses]
    advantages = [advantage for strip in strips for advantage in strip.advantages]
    lags = [
        np.full(len(at), LOGGED_LAG) if strip.logged else strip.version - _versions(rollout, at)
        for strip in strips
        for rollout, at in zip(strip.rollouts, strip.losses, strict=True)
    ]
    workers = tuple(sorted({worker for strip in strips for worker in strip.workers}))
    worker_S = [workers.index(worker) for strip in strips for worker in strip.workers]
    loss_tokens = LossTokens(
        torch.from_numpy(behaviour),
        torch.from_numpy(np.repeat(np.asarray(advantages), counts)),
        torch.from_numpy(np.repeat(np.arange(len(rollouts)), counts)),
        torch.from_numpy(np.concatenate(lags)),
        torch.tensor(worker_S),
        workers,
    )
    return torch.from_numpy(target.astype(np.int64)), loss_tokens, _supports(rollouts, losses)


def _versions(rollout: Rollout, at: Ints) -> Ints:
    """The policy version that sampled each of the tokens `at`."""
    starts, versions = (np.asarray(column, dtype=np.int64) for column in zip(*rollout.version_spans, strict=True))
    found: Ints = versions[np.searchsorted(starts, at, side="right") - 1]
    return found


def _supports(rollouts: Sequence[Rollout], losses: Sequence[Ints]) -> tuple[Support, ...]:
    """The narrowed distributions of all loss tokens that have one, as padded tables: one for each power of two of their
    widths, so that at most half of a table is padding. In a single one, one wide distribution would make all so wide.
    """
    rows: dict[int, list[int]] = {}
    pieces: dict[int, list[npt.NDArray[np.int32]]] = {}
    start = 0
    for rollout, at in zip(rollouts, losses, strict=True):
        if rollout.support_tokens is not None and rollout.support_offsets is not None:
            allowed = np.frombuffer(rollout.support_tokens, dtype=np.int32)
            offsets = rollout.support_offsets
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
