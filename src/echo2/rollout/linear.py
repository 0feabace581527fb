"""Linear layers of the engine `compact`: weights, bias, and on a CPU a packed copy.

A packed matrix is laid out for the processor's vector units: a product with few rows is 1.2 to 4 times as fast, one
with a thousand rows 1.1 times. Small matrices are not packed: the packed product has 12 microseconds more overhead.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from echo2.rollout.adapter import LowRank, RowAdapters

PACK_ITEMS = 1 << 17
"""Smaller matrices are not packed."""


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
