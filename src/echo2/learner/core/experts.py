"""A mixture's experts at the learner: their products in autocast's dtype, and the factors of their adapters.

Autocast converts the factors of ordinary matrix products. The grouped product of a mixture's experts is none of them:
transformers converts its inputs to the weights' dtype, and would compute in float32 what a dense model computes in
bfloat16. So the weights are converted here, on use, and their gradients come back in their own dtype.

Factors lie in the experts' own modules (`engines/adapter.py`), with the names and shapes that PEFT gives them:
an adapter's tensors are PEFT's as they are.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn
from torch.func import functional_call

from echo2.engines.adapter import LowRank, StackedMap, adapt, stacked, stacked_maps


def follow_autocast(module: nn.Module) -> None:
    """Make all parts of the module that hold stacked matrices compute in autocast's dtype where autocast is on."""
    for part in module.modules():
        already = vars(part).get("forward")
        if isinstance(already, partial) and already.func is _forward:
            continue  # another policy over the same module asked for it
        if any(parameter.dim() > 2 for parameter in part.parameters(recurse=False)):
            part.forward = partial(_forward, part, part.forward)  # on this part only


def _forward(part: nn.Module, forward: Any, *args: Any, **named: Any) -> Any:
    own = dict(part.named_parameters(recurse=False))
    device = next(iter(own.values())).device.type
    if not torch.is_autocast_enabled(device):
        return forward(*args, **named)
    dtype = torch.get_autocast_dtype(device)
    cast = {name: one.to(dtype) for name, one in own.items() if one.dtype == torch.float32}
    # Called again with converted weights, this function finds nothing more to convert.
    return functional_call(part, cast, args, named) if cast else forward(*args, **named)


class ExpertFactors:
    """The adapters of one model's experts, of which at most one is engaged. `parts`: the experts' modules by name."""

    def __init__(self, module: nn.Module) -> None:
        self.parts: dict[str, Any] = {name: part for name, part in module.named_modules() if stacked_maps(part)}
        self._scales: dict[str, float] = {}
        self._engaged: str | None = None

    def add(self, name: str, rank: int, scale: float) -> None:
        """Create an adapter's factors; its values are the caller's to set."""
        if not self._scales:
            for part in self.parts.values():
                part.base_layer = nn.Module()
                for holder in (part, part.base_layer):
                    holder.lora_A, holder.lora_B = nn.ModuleDict(), nn.ModuleDict()
                adapt(part, partial(self._applied, part))
        self._scales[name] = scale
        for part in self.parts.values():
            for one in stacked_maps(part):
                holder, device = _holder(part, one), getattr(part, one.parameter).device
                holder.lora_A[name] = nn.Linear(one.inputs, one.num_experts * rank, bias=False, device=device)
                holder.lora_B[name] = nn.Linear(rank * one.num_experts, one.outputs, bias=False, device=device)

    def remove(self, name: str) -> None:
        """Forget an adapter, if it is one of these."""
        for part in self.parts.values() if self._scales.pop(name, None) is not None else ():
            for one in stacked_maps(part):
                holder = _holder(part, one)
                del holder.lora_A[name], holder.lora_B[name]

    def engage(self, name: str | None) -> None:
        """Make this adapter the active one, if it is one of these; otherwise none is. Only the active one takes
        gradients: PEFT freezes what it does not know when it adds an adapter of its own."""
        self._engaged = name if name in self._scales else None
        for part in self.parts.values() if self._scales else ():
            for holder in (part, part.base_layer):
                for key, factor in (*holder.lora_A.items(), *holder.lora_B.items()):
                    factor.requires_grad_(key == self._engaged)

    def _applied(self, part: Any) -> tuple[LowRank | None, LowRank | None]:
        if (name := self._engaged) is None:
            return None, None
        up, down = (self._low_rank(_holder(part, one), one, name) for one in stacked_maps(part))
        return up, down

    def _low_rank(self, holder: Any, one: StackedMap, name: str) -> LowRank:
        weights = holder.lora_A[name].weight, holder.lora_B[name].weight * self._scales[name]
        return stacked(*weights, one.num_experts)


def _holder(part: Any, one: StackedMap) -> Any:
    return part.base_layer if one.suffix else part
