"""LoRA adapters in the torch engines: computed beside each linear layer of the base model, not merged into its weights.

    y = W x + b + B (A x) scale

Tensor names and configuration follow PEFT. Adapters that compute another formula are refused
(`weights/format/adapter_files.py`). The base model's weights stay unchanged, so many adapters can share one base model,
and a swap costs only the size of the adapter.

On a CPU the engine `compact` packs W for the processor's vector units (`Linear`): a product with few rows is 1.2 to 4
times as fast, one with a thousand rows 1.1 times. Small matrices are not packed: the packed product has 12 microseconds
more overhead.

Each expert of a mixture, whose weights are one tensor, has its own pair:

    y_e = W_e x + B_e (A_e x) scale

The experts' products are transformers' own, in its order: one grouped product over tokens sorted by their experts.
PEFT computes W_e + B_e A_e of all experts instead, whenever they are called: a copy of their weights at each decoded
token, which the learner's backward pass would keep for every layer. Files are PEFT's: A of all experts is one matrix, B
another. A layer's adapter of the products before the activation is called `experts.base_layer`, that of the products
behind it `experts` (`peft.tuners.lora.layer.ParamWrapper`).

Source: Hu et al., LoRA (arXiv 2106.09685).

Shape suffixes: R = rank, I = inputs, O = outputs, E = experts, T = tokens, K = experts of a token, S = T * K, D =
hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from echo2.core.errors import PeerError
from echo2.core.types import Snapshot
from echo2.engines.snapshot_tensors import FLOAT_DTYPES, check_layout, copy_tensors
from echo2.weights.format.snapshot_files import read_factors

PREFIX, DOWN, UP = "base_model.model.", ".lora_A.weight", ".lora_B.weight"
PACK_ITEMS = 1 << 17
"""Smaller matrices are not packed."""
#: Grouped products on a GPU take rows of whole 16 bytes, so ranks are filled up with zeros.
RANK_STEP = 8
#: What `adapt` asks at each call: the adapters of the products before and behind the activation, or None.
Applied = Callable[[], "tuple[LowRank | None, LowRank | None]"]


class LowRank(NamedTuple):
    """A and B of one linear map, in the adapter's dtype; B is multiplied by the scale. The maps of all experts, which
    are one tensor, are a_ERI and b_EOR."""

    a_RI: Tensor
    b_OR: Tensor

    def add(self, y: Tensor, x: Tensor) -> Tensor:
        """Return the base model's y [..., O] plus the adapter's part for x [..., I], rounded to y's dtype once."""
        low = functional.linear(functional.linear(x.to(self.a_RI.dtype), self.a_RI), self.b_OR)
        return (y + low).to(y.dtype)


class RowAdapters(NamedTuple):
    """Adapters of one linear map, each applied to its own rows of a batch."""

    parts: tuple[tuple[Tensor, LowRank], ...]

    def add(self, y: Tensor, x: Tensor) -> Tensor:
        """See `LowRank.add`; changes y [rows, ..., O] in place."""
        for rows, low in self.parts:
            y.index_copy_(0, rows, low.add(y.index_select(0, rows), x.index_select(0, rows)))
        return y


Adapter = Mapping[str, LowRank]
"""LoRA pairs by module name of the base model; empty: no adapter."""


def stacked(a_EI: Tensor, b_OE: Tensor, num_experts: int) -> LowRank:
    """Return a_ERI and b_EOR of PEFT's matrices for all experts, [E * R, I] and [O, R * E]."""
    a_ERI = a_EI.view(num_experts, -1, a_EI.shape[-1])
    return LowRank(a_ERI, b_OE.view(len(b_OE), -1, num_experts).permute(2, 0, 1))


def read_adapter(
    snapshot: Snapshot, linears: Mapping[str, tuple[int, ...]], device: torch.device
) -> dict[str, LowRank]:
    """Read the adapter of a snapshot, by module name of the base model.

    linears  (outputs, inputs) of the base model's linear maps, by module name; (outputs, inputs, experts) of maps of
             all experts

    Raises:
        PeerError: the snapshot is not a LoRA adapter, does not fit this base model, or is damaged.
    """
    factors = read_factors(snapshot)
    modules = {name.removeprefix(PREFIX).removesuffix(DOWN).removesuffix(UP) for name in snapshot.tensors}
    unknown = sorted(modules - linears.keys())
    if unknown or not modules:
        examples = ", ".join(sorted(linears)[:3])
        first = unknown[0] if unknown else "nothing"
        raise PeerError("bad_adapter", f"{snapshot.ref} is over {first}; the base model has {examples} and others")
    names = {PREFIX + module + part for module in modules for part in (DOWN, UP)}
    if names != set(snapshot.tensors):
        odd = min(names ^ set(snapshot.tensors))
        raise PeerError("bad_adapter", f"{snapshot.ref} has one half of a LoRA pair only, or something else: {odd}")
    low_ranks: dict[str, LowRank] = {}
    places: dict[str, tuple[Tensor]] = {}
    for module in sorted(modules):
        (outputs, inputs, *experts), dtype = linears[module], snapshot.tensors[PREFIX + module + DOWN].dtype
        if dtype not in FLOAT_DTYPES or snapshot.tensors[PREFIX + module + UP].dtype != dtype:
            raise PeerError("bad_adapter", f"{module} of {snapshot.ref} has A and B that are not floats of one kind")
        empty = partial(torch.empty, dtype=FLOAT_DTYPES[dtype], device=device)
        width = factors.rank * (experts[0] if experts else 1)
        low = low_ranks[module] = LowRank(empty((width, inputs)), empty((outputs, width)))
        places[PREFIX + module + DOWN], places[PREFIX + module + UP] = (low.a_RI,), (low.b_OR,)
    check_layout(snapshot, places)
    copy_tensors(snapshot, places)
    for module, low in low_ranks.items():
        low.b_OR.mul_(factors.scale)
        if len(linears[module]) == 3:
            low_ranks[module] = stacked(*low, linears[module][2])
    return low_ranks


def join(parts: list[tuple[LowRank | None, int]]) -> LowRank | None:
    """Join the adapters of linear maps whose outputs are concatenated into one adapter, whose B is block-diagonal.

    parts  (adapter or None, number of outputs) of each map
    """
    there = [part for part, _ in parts if part is not None]
    if not there:
        return None
    a_RI = torch.cat([part.a_RI for part in there])
    b_OR = a_RI.new_zeros((sum(outputs for _, outputs in parts), len(a_RI)))
    row = column = 0
    for part, outputs in parts:
        if part is not None:
            rank = part.b_OR.shape[1]
            b_OR[row : row + outputs, column : column + rank] = part.b_OR
            column += rank
        row += outputs
    return LowRank(a_RI, b_OR)


class Linear:
    """y [..., O] = x [..., I] W^T + b."""

    def __init__(self, weight_OI: Tensor, bias_O: Tensor | None = None) -> None:
        self._weight_OI, self._bias_O = weight_OI, bias_O
        self._packed: Tensor | None = None

    def pack(self) -> None:
        """Make a packed copy of the current weights. It takes as much memory as the weights."""
        weight_OI = self._weight_OI
        is_for_cpu = weight_OI.device.type == "cpu" and weight_OI.dtype is torch.float32
        if is_for_cpu and weight_OI.numel() >= PACK_ITEMS and torch.backends.mkldnn.is_available():
            self._packed = torch.ops.mkldnn._reorder_linear_weight(weight_OI)

    def unpack(self) -> None:
        """Drop the packed copy, before the weights change."""
        self._packed = None

    def __call__(self, x: Tensor, adapter: LowRank | RowAdapters | None = None) -> Tensor:
        """Return y [..., O] for x [..., I], including the adapter's part if there is one."""
        if self._packed is None:
            y = functional.linear(x, self._weight_OI, self._bias_O)
        else:
            y = torch.ops.mkldnn._linear_pointwise(x, self._packed, self._bias_O, "none", [], "")
        return y if adapter is None else adapter.add(y, x)


class StackedMap(NamedTuple):
    """The linear maps of all experts in one tensor. `parameter`: its name; `suffix`: what the adapter's name has more
    than the experts' module."""

    parameter: str
    suffix: str
    outputs: int
    inputs: int
    num_experts: int


def stacked_maps(part: Any) -> tuple[StackedMap, ...]:
    """Return a module's stacked maps, before and behind the activation; (): it is not an experts' module of a kind that
    `adapt` knows."""
    if not hasattr(part, "is_transposed") or getattr(part, "has_post_expert_norm", False):
        return ()
    maps = []
    for parameter, suffix in (("gate_up_proj" if part.has_gate else "up_proj", ".base_layer"), ("down_proj", "")):
        num_experts, *sizes = getattr(part, parameter).shape
        outputs, inputs = reversed(sizes) if part.is_transposed else sizes
        maps.append(StackedMap(parameter, suffix, outputs, inputs, num_experts))
    return tuple(maps)


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
