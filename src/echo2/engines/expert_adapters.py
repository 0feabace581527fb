"""Low-rank adapters of a mixture's experts, computed beside their weights, which are one tensor for all experts.

    y_e = W_e x + B_e (A_e x) scale

The experts' products are transformers' own, in its order: one grouped product over tokens sorted by their experts.
PEFT computes W_e + B_e A_e of all experts instead, whenever they are called: a copy of their weights at each decoded
token, which the learner's backward pass would keep for every layer.

Files are PEFT's: A of all experts is one matrix, B another. A layer's adapter of the products before the activation is
called `experts.base_layer`, that of the products behind it `experts` (`peft.tuners.lora.layer.ParamWrapper`).

Shape suffixes: E = experts, R = rank, I = inputs, O = outputs, T = tokens, K = experts of a token, S = T * K, D =
hidden size.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from echo2.engines.adapter import LowRank

#: What `adapt` asks at each call: the adapters of the products before and behind the activation, or None.
Applied = Callable[[], "tuple[LowRank | None, LowRank | None]"]
#: Grouped products on a GPU take rows of whole 16 bytes, so ranks are filled up with zeros.
RANK_STEP = 8


class StackedMap(NamedTuple):
    """The linear maps of all experts in one tensor. `parameter`: its name; `suffix`: what the adapter's name has more
    than the experts' module."""

    parameter: str
    suffix: str
    outputs: int
    inputs: int
    num_experts: int


def stacked_maps(part: Any) -> tuple[StackedMap, ...]:
    """Return a module's stacked maps, before and behind the activation; (): it is no experts' module of a kind that
    `adapt` knows."""
    if not hasattr(part, "is_transposed") or getattr(part, "has_post_expert_norm", False):
        return ()
    found = []
    for parameter, suffix in (("gate_up_proj" if part.has_gate else "up_proj", ".base_layer"), ("down_proj", "")):
        num_experts, *sizes = getattr(part, parameter).shape
        outputs, inputs = reversed(sizes) if part.is_transposed else sizes
        found.append(StackedMap(parameter, suffix, outputs, inputs, num_experts))
    return tuple(found)


def adapt(part: Any, applied: Applied) -> None:
    """Make an experts' module, and this one only, add adapters to its products."""
    part.forward = partial(_forward, part, part.forward, applied)


def _forward(part: Any, plain: Any, applied: Applied, hidden_TD: Tensor, ids_TK: Tensor, scores_TK: Tensor) -> Tensor:
    up, down = applied()
    if up is None and down is None:
        result: Tensor = plain(hidden_TD, ids_TK, scores_TK)
        return result
    first, last = stacked_maps(part)
    ids_S, order_S = ids_TK.flatten().sort()
    ends_E = torch.searchsorted(ids_S, torch.arange(first.num_experts, device=ids_S.device), right=True, out_int32=True)
    x_SD = hidden_TD[order_S // ids_TK.shape[1]]
    inner = _product(part, first.parameter, up, x_SD, ids_S, ends_E)
    inner = part._apply_gate(inner) if part.has_gate else part.act_fn(inner)
    y_SD = _product(part, last.parameter, down, inner, ids_S, ends_E) * scores_TK.flatten()[order_S, None]
    y_TKD = torch.empty_like(y_SD).index_copy(0, order_S, y_SD).view(*ids_TK.shape, -1)
    return y_TKD.sum(1).to(hidden_TD.dtype)


def _product(
    part: nn.Module, parameter: str, low: LowRank | None, x_S: Tensor, ids_S: Tensor, ends_E: Tensor
) -> Tensor:
    weight: Tensor = getattr(part, parameter)
    x_SI = x_S.to(weight.dtype)
    y_SO = functional.grouped_mm(x_SI, weight if part.is_transposed else weight.mT, offs=ends_E)
    if part.has_bias:
        y_SO = y_SO + getattr(part, f"{parameter}_bias")[ids_S]
    if low is None:
        return y_SO
    missing = -low.a_RI.shape[1] % RANK_STEP
    a_ERI = functional.pad(low.a_RI, (0, 0, 0, missing)).to(weight.dtype).contiguous()
    b_EOR = functional.pad(low.b_OR, (0, missing)).to(weight.dtype).contiguous()
    low_SR = functional.grouped_mm(x_SI, a_ERI.mT, offs=ends_E)
    return y_SO + functional.grouped_mm(low_SR, b_EOR.mT, offs=ends_E)
