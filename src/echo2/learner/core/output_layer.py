"""Logits of chosen tokens, and the normaliser over all, from hidden states, without a [positions, vocabulary] array.

Logits are computed tile by tile (some positions, some of the vocabulary), summed and discarded. The backward pass
recomputes them, with the stored normaliser, only if the weight needs a gradient. The gradient of a hidden state needs
no second pass: d log sum exp(logits) / d hidden is the mean of the weight's rows under the probabilities. It is summed
beside the normaliser and rescaled as the normaliser grows (online softmax, arXiv 1805.02867, with these rows as
values). Logits of chosen tokens are products with the rows of these tokens alone.

Factors have the hidden states' dtype; products and sums are float32 (float64 if hidden states are).

Shape suffixes: u = positions, D = hidden size, V = vocabulary, R, C = positions and tokens of a tile, m = choices,
W = tokens of a choice, c = choices processed together, k = the distinct tokens in them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import torch
from torch import Tensor

#: Positions and tokens of the vocabulary in a tile. Its logits are 32 MiB in float32 on a CPU, and
#: 128 MiB on a GPU, which smaller products leave idle (benchmarks/gpu.py).
TILE, GPU_TILE = (1024, 8192), (4096, 8192)
#: Choices are processed together while they hold no more tokens than this; the bounds are numbers of choices.
#: Neighbouring choices share tokens, and the row of a token is read once for all of them.
CHOSEN_TOGETHER, CHOICES_TOGETHER = 16_384, (64, 2048)


#: Functions that add the gradients of weight and bias once all other gradients exist. The key is the id of the autograd
#: operation, so that an operation whose backward pass runs twice (retain_graph) adds once.
Waiting: TypeAlias = "dict[int, Callable[[_Gradients], None]]"


@dataclass(frozen=True, slots=True)
class OutputLayer:
    """Maps a decoder's last hidden states to logits: x = scale * (weight hidden + bias), and with a `softcap` c,
    c tanh(x / c).
    """

    weight_VD: Tensor
    bias_V: Tensor | None = None
    scale: float = 1.0
    softcap: float | None = None
    waiting: Waiting | None = None

    def with_late_gradients(self) -> OutputLayer:
        """Return the same layer with late gradients; call this before the decoder runs. The gradients of weight and
        bias, which are as large as the vocabulary, are then computed after those of the decoder's layers, when the
        activations are freed.
        """
        waiting: Waiting = {}
        apply: Any = _Late.apply
        weight_VD, bias_V = apply(self.weight_VD, self.bias_V, waiting)
        return replace(self, weight_VD=weight_VD, bias_V=bias_V, waiting=waiting)

    def finish(self, product: Tensor) -> Tensor:
        """Return the logits for the product weight hidden + bias."""
        return _Curve(self.scale, self.softcap).bend_(product.clone())


@dataclass(frozen=True, slots=True)
class Choice:
    """The tokens whose logits are wanted: tokens_mW[i] at position_m[i]."""

    position_m: Tensor
    tokens_mW: Tensor


@dataclass(frozen=True, slots=True)
class Scores:
    """For logits divided by the temperature: log sum exp [u] and entropy [u, without gradient] over the vocabulary, and
    the logits of each choice [m, W]. Do not read the first two if they were not wanted.
    """

    log_total_u: Tensor
    entropy_u: Tensor
    chosen: tuple[Tensor, ...]


def tiled_scores(
    hidden_uD: Tensor,
    layer: OutputLayer,
    choices: Sequence[Choice],
    temperature: float = 1.0,
    wants_total: bool = True,
    tile: tuple[int, int] | None = None,
) -> Scores:
    """Compute scores from hidden states. Without `wants_total`, no pass is made over the vocabulary. `tile`: positions
    and tokens of a tile, by default those of the device's type.
    """
    device = hidden_uD.device.type
    if torch.is_autocast_enabled(device):
        hidden_uD = hidden_uD.to(torch.get_autocast_dtype(device))
    curve = _Curve(layer.scale / temperature, None if layer.softcap is None else layer.softcap / temperature)
    cut = _Cut(tuple(choices), wants_total, *(tile or (GPU_TILE if hidden_uD.is_cuda else TILE)))
    apply: Any = _Tiled.apply
    layer = layer.with_late_gradients() if layer.waiting is None else layer
    inputs = hidden_uD, layer.weight_VD, layer.bias_V
    log_total_u, entropy_u, *chosen = apply(*inputs, curve, cut, layer.waiting)
    return Scores(log_total_u, entropy_u, tuple(chosen))


@torch.no_grad()
def tiled_likely(
    hidden_uD: Tensor,
    layer: OutputLayer,
    top_k: int,
    num_tokens: int,
    temperature: float = 1.0,
    tile: tuple[int, int] | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the most likely of the first `num_tokens` tokens at each position and their log-probabilities, [u, k]."""
    device = hidden_uD.device.type
    if torch.is_autocast_enabled(device):
        hidden_uD = hidden_uD.to(torch.get_autocast_dtype(device))
    curve = _Curve(layer.scale / temperature, None if layer.softcap is None else layer.softcap / temperature)
    cut = _Cut((), top_k > 0, *(tile or (GPU_TILE if hidden_uD.is_cuda else TILE)))
    with torch.autocast(device, enabled=False):
        return _Logits(hidden_uD, layer.weight_VD, layer.bias_V, curve, cut).likely(top_k, num_tokens)


def plain_likely(logits_uV: Tensor, top_k: int, num_tokens: int, temperature: float = 1.0) -> tuple[Tensor, Tensor]:
    """Return the same from all logits."""
    logp_uV = (logits_uV.float() if logits_uV.dtype.itemsize < 4 else logits_uV).div(temperature).log_softmax(-1)
    logp_uk, tokens_uk = logp_uV[:, :num_tokens].topk(min(top_k, num_tokens))
    return tokens_uk, logp_uk


def plain_scores(logits_uV: Tensor, choices: Sequence[Choice], temperature: float = 1.0) -> Scores:
    """Compute the same scores from all logits, for models that give nothing else."""
    if logits_uV.dtype in (torch.bfloat16, torch.float16):
        logits_uV = logits_uV.float()
    if temperature != 1.0:
        logits_uV = logits_uV / temperature
    log_total_u = logits_uV.logsumexp(-1)
    with torch.no_grad():
        entropy_u = log_total_u - torch.linalg.vecdot(logits_uV.softmax(-1), logits_uV)
    chosen = tuple(logits_uV[choice.position_m[:, None], choice.tokens_mW] for choice in choices)
    return Scores(log_total_u, entropy_u, chosen)


@dataclass(frozen=True, slots=True)
class _Curve:
    """Maps a product x to a logit divided by the temperature: gain x, or limit tanh(gain x / limit)."""

    gain: float
    limit: float | None

    def bend_(self, product: Tensor) -> Tensor:
        """Map products to logits, in place."""
        if self.limit is not None:
            return product.mul_(self.gain / self.limit).tanh_().mul_(self.limit)
        return product if self.gain == 1.0 else product.mul_(self.gain)

    def slope(self, logits: Tensor) -> Tensor | float:
        """Return d logit / d product as a function of the logit."""
        return self.gain if self.limit is None else (logits / self.limit).square_().neg_().add_(1.0).mul_(self.gain)


@dataclass(frozen=True, slots=True)
class _Cut:
    """The wanted scores, and the size of the tiles in which they are computed."""

    choices: tuple[Choice, ...]
    wants_total: bool
    num_positions: int
    num_tokens: int


class _Late(torch.autograd.Function):
    """(weight_VD, bias_V, waiting) -> the first two. Autograd runs from the newest operation to the oldest, so the
    waiting gradients are added up after those of every operation newer than this one.
    """

    @staticmethod
    def forward(ctx: Any, weight_VD: Tensor, bias_V: Tensor | None, waiting: Waiting) -> tuple[Tensor | None, ...]:
        ctx.like, ctx.waiting = (weight_VD.detach(), None if bias_V is None else bias_V.detach()), waiting
        return weight_VD.view_as(weight_VD), None if bias_V is None else bias_V.view_as(bias_V)

    @staticmethod
    def backward(ctx: Any, *_: Tensor | None) -> tuple[Tensor | None, ...]:
        sums = torch.promote_types(ctx.like[0].dtype, torch.float32)
        pairs = list(zip(ctx.like, ctx.needs_input_grad, strict=False))
        zeros = [torch.zeros_like(like, dtype=sums) if needed else None for like, needed in pairs]
        into = _Gradients(None, *zeros)
        with torch.autocast(ctx.like[0].device.type, enabled=False):
            while ctx.waiting:
                ctx.waiting.popitem()[1](into)
        return *(
            None if grad is None else grad.to(like.dtype) for grad, (like, _) in zip(zeros, pairs, strict=True)
        ), None


class _Tiled(torch.autograd.Function):
    """(hidden_uD, weight_VD, bias_V, curve, cut, waiting) -> (log_total_u, entropy_u, the logits_mW of each choice).

    The backward pass returns the gradient of the hidden states alone. The function that adds the gradients of weight
    and bias waits for `_Late`.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden_uD: Tensor,
        weight_VD: Tensor,
        bias_V: Tensor | None,
        curve: _Curve,
        cut: _Cut,
        waiting: Waiting,
    ) -> tuple[Tensor, ...]:
        with torch.autocast(hidden_uD.device.type, enabled=False):
            made = _Logits(hidden_uD, weight_VD, bias_V, curve, cut)
            total_u, entropy_u, mean_row_uD = made.normalisers(wants_gradient=ctx.needs_input_grad[0])
            chosen = [made.chosen(choice) for choice in cut.choices]
        ctx.save_for_backward(hidden_uD, weight_VD, bias_V, total_u, mean_row_uD, *chosen)
        ctx.curve, ctx.cut, ctx.waiting = curve, cut, waiting
        ctx.mark_non_differentiable(entropy_u)
        ctx.set_materialize_grads(False)
        return total_u, entropy_u, *chosen

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden_uD, weight_VD, bias_V, total_u, mean_row_uD, *chosen = ctx.saved_tensors
        made = _Logits(hidden_uD, weight_VD, bias_V, ctx.curve, ctx.cut)
        grad_total_u, _, *grads_chosen = grads

        def add(into: _Gradients) -> None:
            if grad_total_u is not None:
                made.add_total_gradients(into, total_u, grad_total_u)
            for choice, logits_mW, grad_mW in zip(made.cut.choices, chosen, grads_chosen, strict=True):
                if grad_mW is not None:
                    made.add_chosen_gradients(into, choice, grad_mW * made.curve.slope(logits_mW))

        needed, grad_uD = ctx.needs_input_grad, None
        if needed[0]:
            grad_uD = torch.zeros_like(hidden_uD, dtype=made.sums)
            with torch.autocast(hidden_uD.device.type, enabled=False):
                if grad_total_u is not None:
                    torch.mul(mean_row_uD, grad_total_u[:, None], out=grad_uD)
                add(_Gradients(grad_uD, None, None))
            grad_uD = grad_uD.to(hidden_uD.dtype)
        if any(needed[1:3]):
            ctx.waiting[id(ctx)] = add
        passed = (
            like.new_zeros(()).expand_as(like) if is_needed else None
            for like, is_needed in zip((weight_VD, bias_V), needed[1:3], strict=True)
        )
        return grad_uD, *passed, None, None, None


@dataclass(frozen=True, slots=True)
class _Gradients:
    """Sums of gradients; None where they are not wanted."""

    hidden_uD: Tensor | None
    weight_VD: Tensor | None
    bias_V: Tensor | None


@dataclass(frozen=True, slots=True)
class _Logits:
    """Computes pieces of the logits, and adds the gradients of pieces."""

    hidden_uD: Tensor
    weight_VD: Tensor
    bias_V: Tensor | None
    curve: _Curve
    cut: _Cut

    @property
    def sums(self) -> torch.dtype:
        return torch.float64 if self.hidden_uD.dtype == torch.float64 else torch.float32

    def normalisers(self, wants_gradient: bool) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return log sum exp [u], entropy [u] and, if wanted, the gradient of log sum exp by hidden states [u, D]."""
        total_u, mean_u = self.hidden_uD.new_zeros((2, len(self.hidden_uD)), dtype=self.sums)
        mean_row_uD = torch.zeros_like(self.hidden_uD, dtype=self.sums) if wants_gradient else None
        total_u.fill_(float("-inf"))
        for at, _, weight_CD, logits_RC in self._tiles():
            share_RC = logits_RC.softmax(1)  # one kernel; the greatest share is 1 / sum exp(logit - greatest logit)
            of_tile_R = logits_RC.amax(1) - share_RC.amax(1).log()
            new_R = torch.logaddexp(total_u[at], of_tile_R)
            kept_R, scale_R = (total_u[at] - new_R).exp_(), (of_tile_R - new_R).exp_()
            total_u[at] = new_R
            mean_u[at] = kept_R * mean_u[at] + scale_R * torch.linalg.vecdot(share_RC, logits_RC)
            if mean_row_uD is not None:
                factor_RC = self._factor(share_RC, scale_R, logits_RC, weight_CD.dtype)
                _add_product(mean_row_uD[at].mul_(kept_R[:, None]), factor_RC, weight_CD)
        return total_u, total_u - mean_u, mean_row_uD

    def likely(self, top_k: int, num_tokens: int) -> tuple[Tensor, Tensor]:
        """Return the most likely of the first `num_tokens` tokens and their log-probabilities, [u, k]."""
        top_k, num_positions = min(top_k, num_tokens), len(self.hidden_uD)
        total_u = self.hidden_uD.new_full((num_positions,), float("-inf"), dtype=self.sums)
        logits_uk = total_u[:, None].repeat(1, top_k)
        tokens_uk = torch.zeros_like(logits_uk, dtype=torch.long)
        for at, ids, _, logits_RC in self._tiles():
            total_u[at] = torch.logaddexp(total_u[at], logits_RC.logsumexp(1))
            kept_RC = logits_RC[:, : max(0, num_tokens - ids.start)]
            ids_RC = torch.arange(ids.start, ids.start + kept_RC.shape[1], device=kept_RC.device).expand_as(kept_RC)
            logits_uk[at], best_Rk = torch.cat([logits_uk[at], kept_RC], 1).topk(top_k)
            tokens_uk[at] = torch.cat([tokens_uk[at], ids_RC], 1).gather(1, best_Rk)
        return tokens_uk, logits_uk - total_u[:, None]

    def add_total_gradients(self, into: _Gradients, total_u: Tensor, grad_u: Tensor) -> None:
        """Add the gradients of weight and bias that pass through log sum exp."""
        if into.weight_VD is None and into.bias_V is None:
            return
        for at, ids, weight_CD, logits_RC in self._tiles():
            share_RC = (logits_RC if self.curve.limit is None else logits_RC.clone()).sub_(total_u[at, None]).exp_()
            dtype = weight_CD.dtype if into.bias_V is None else self.sums
            factor_RC = self._factor(share_RC, grad_u[at], logits_RC, dtype)
            if into.weight_VD is not None:
                _add_product(into.weight_VD[ids], factor_RC.to(weight_CD.dtype).t(), self.hidden_uD[at])
            if into.bias_V is not None:
                into.bias_V[ids] += factor_RC.sum(0)

    def _factor(self, share_RC: Tensor, scale_R: Tensor, logits_RC: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the shares, which are overwritten, times their row's scale and the curve's slope, rounded to `dtype`
        once; without a softcap in one pass over the tile.
        """
        if self.curve.limit is not None:
            share_RC.mul_(self.curve.slope(logits_RC))
        elif self.curve.gain != 1.0:
            scale_R = scale_R * self.curve.gain
        out = share_RC if share_RC.dtype == dtype else torch.empty_like(share_RC, dtype=dtype)
        return torch.mul(share_RC, scale_R[:, None], out=out)

    def chosen(self, choice: Choice) -> Tensor:
        """Return the logits [m, W] of a choice."""
        logits_mW = self.hidden_uD.new_empty(choice.tokens_mW.shape, dtype=self.sums)
        for some, tokens_k, place_cW in self._pieces(choice):
            hidden_cD = self.hidden_uD[choice.position_m[some]]
            parts = [self._of_tokens(hidden_cD, ids)[1] for ids in tokens_k.split(self.cut.num_tokens)]
            torch.gather(torch.cat(parts, 1), 1, place_cW, out=logits_mW[some])
        return logits_mW

    def add_chosen_gradients(self, into: _Gradients, choice: Choice, grad_mW: Tensor) -> None:
        """Add the gradients that pass through the products at chosen tokens."""
        for some, tokens_k, place_cW in self._pieces(choice):
            position_c = choice.position_m[some]
            hidden_cD = self.hidden_uD[position_c]
            grad_ck = grad_mW.new_zeros((len(hidden_cD), len(tokens_k))).scatter_add_(1, place_cW, grad_mW[some])
            grad_cD = torch.zeros_like(hidden_cD, dtype=self.sums)
            for ids, grad_cC in zip(
                *(all_k.split(self.cut.num_tokens, -1) for all_k in (tokens_k, grad_ck)), strict=True
            ):
                factor_cC = grad_cC.to(hidden_cD.dtype)
                if into.hidden_uD is not None:
                    _add_product(grad_cD, factor_cC, self.weight_VD[ids].to(hidden_cD.dtype))
                if into.weight_VD is not None:
                    into.weight_VD.index_add_(0, ids, _product(factor_cC.t(), hidden_cD))
                if into.bias_V is not None:
                    into.bias_V.index_add_(0, ids, grad_cC.sum(0))
            if into.hidden_uD is not None:
                into.hidden_uD.index_put_((position_c,), grad_cD, accumulate=True)

    def _tiles(self) -> Iterator[tuple[slice, slice, Tensor, Tensor]]:
        """Yield positions, tokens, the weight's rows [C, D] of the tokens, and logits [R, C]. The caller may overwrite
        the logits.
        """
        if not self.cut.wants_total:
            return
        for start in range(0, len(self.weight_VD), self.cut.num_tokens):
            ids = slice(start, start + self.cut.num_tokens)
            for first in range(0, len(self.hidden_uD), self.cut.num_positions):
                at = slice(first, first + self.cut.num_positions)
                yield at, ids, *self._of_tokens(self.hidden_uD[at], ids)

    def _of_tokens(self, hidden_RD: Tensor, ids: slice | Tensor) -> tuple[Tensor, Tensor]:
        """Return the weight's rows [C, D] for the tokens, in the hidden states' dtype, and the logits [R, C]."""
        weight_CD = self.weight_VD[ids].to(hidden_RD.dtype)
        product_RC = _product(hidden_RD, weight_CD.t())
        if self.bias_V is not None:
            product_RC += self.bias_V[ids]
        return weight_CD, self.curve.bend_(product_RC)

    def _pieces(self, choice: Choice) -> Iterator[tuple[slice, Tensor, Tensor]]:
        """Yield a slice of choices, their distinct tokens [k] in order, and each token's index among these [c, W]."""
        num_choices, width = choice.tokens_mW.shape
        fewest, most = CHOICES_TOGETHER
        together = min(max(CHOSEN_TOGETHER // width, fewest), most)
        for first in range(0, num_choices, together):
            some = slice(first, first + together)
            tokens_cW = choice.tokens_mW[some]
            is_chosen_V = torch.zeros(len(self.weight_VD), dtype=torch.bool, device=tokens_cW.device)
            is_chosen_V[tokens_cW.flatten()] = True
            yield some, is_chosen_V.nonzero()[:, 0], (is_chosen_V.cumsum(0) - 1)[tokens_cW]


def _product(left: Tensor, right: Tensor) -> Tensor:
    """Return left @ right, never rounded to less than float32."""
    if left.dtype in (torch.float32, torch.float64):
        return left @ right
    if left.is_cuda:
        return torch.mm(left, right, out_dtype=torch.float32)
    return left.float() @ right.float()


def _add_product(into: Tensor, left: Tensor, right: Tensor) -> None:
    if left.dtype == into.dtype:
        into.addmm_(left, right)
    else:
        into.add_(_product(left, right))
