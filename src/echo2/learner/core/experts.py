"""Products with stacked weights, as a mixture's experts have them, in autocast's dtype.

Autocast converts the factors of ordinary matrix products. The grouped product of a mixture's experts is none of them:
transformers converts its inputs to the weights' dtype, and would compute in float32 what a dense model computes in
bfloat16. So the weights are converted here, on use, and their gradients come back in their own dtype.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn
from torch.func import functional_call


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
