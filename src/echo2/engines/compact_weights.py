"""Weights of the engine `compact`: a model's tensors, several of which are parts of one that is computed with.

Shape suffixes: D = hidden, H = query heads, then key-value heads, E = head dim.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from echo2.engines.adapter import Linear, LowRank, RowAdapters
from echo2.engines.compact_delta import DeltaLayer
from echo2.engines.model_values import Architecture, Attention, DeltaSizes

GATE_UP, DOWN = ("mlp.gate_proj", "mlp.up_proj"), ("mlp.down_proj",)
FUSED = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), ("self_attn.o_proj",), GATE_UP, DOWN
"""Linear maps of a layer that are computed as one, in the order of `LayerAdapters`."""
DELTA_FUSED = (
    ("linear_attn.in_proj_qkv", "linear_attn.in_proj_z", "linear_attn.in_proj_b", "linear_attn.in_proj_a"),
    ("linear_attn.out_proj",),
    GATE_UP,
    DOWN,
)
"""The same of a layer with the delta rule."""


class LayerAdapters(NamedTuple):
    """Adapters of the linear maps of one layer, fused as these are."""

    mix: LowRank | RowAdapters | None = None
    out: LowRank | RowAdapters | None = None
    gate_up: LowRank | RowAdapters | None = None
    down: LowRank | RowAdapters | None = None


NO_ADAPTERS = LayerAdapters()


@dataclass(frozen=True, slots=True)
class Layer:
    """Weights of one layer. `at`: its number among the layers of its kind. `mix`: the map to queries, keys and values,
    or to what the delta rule reads. `qk_norm_HE`: the norm of queries and keys, one row per head. `after_*`: of Gemma.
    """

    at: int
    delta: DeltaLayer | None
    attention_norm_D: Tensor
    mix: Linear
    qk_norm_HE: Tensor | None
    out: Linear
    ffn_norm_D: Tensor
    gate_up: Linear
    down: Linear
    after_attention_D: Tensor | None = None
    after_ffn_D: Tensor | None = None
    adapters: LayerAdapters = NO_ADAPTERS


class CompactWeights:
    """Allocates weights. `places`: the destination of each tensor of a snapshot, by name; several may be parts of one
    fused tensor."""

    def __init__(self, arch: Architecture, dtype: torch.dtype, device: torch.device) -> None:
        self._arch, self._dtype, self._device = arch, dtype, device
        self._shapes = arch.tensor_shapes()
        self.places: dict[str, tuple[Tensor, ...]] = {}

    def new(self, *names: str) -> Tensor:
        """Allocate one tensor that holds these parameters one behind the other."""
        shapes = [self._shapes[name] for name in names]
        # The hub keeps the decay's rate in float32, and it is computed so.
        dtype = torch.float32 if names[0].endswith(("A_log", "dt_bias")) else self._dtype
        whole = torch.empty((sum(shape[0] for shape in shapes), *shapes[0][1:]), dtype=dtype, device=self._device)
        parts = whole.split([shape[0] for shape in shapes])
        self.places.update((name, (part,)) for name, part in zip(names, parts, strict=True))
        return whole

    def layer(self, number: int, kinds: Sequence[Attention | None]) -> Layer:
        """Allocate a layer. `kinds`: of all layers."""
        prefix, has_delta = f"{self._arch.prefixes.stored}layers.{number}.", kinds[number] is None
        at = sum((kind is None) == has_delta for kind in kinds[:number])
        delta = self._delta(f"{prefix}linear_attn.", self._arch.delta) if has_delta and self._arch.delta else None

        def fused(names: Sequence[str]) -> Linear:
            has_bias = f"{prefix}{names[0]}.bias" in self._shapes
            matrix = self.new(*(f"{prefix}{name}.weight" for name in names))
            return Linear(matrix, self.new(*(f"{prefix}{name}.bias" for name in names)) if has_bias else None)

        # Gemma's `post_attention_layernorm` is what its name says; the others' comes before the feed-forward.
        gemma = self._arch.gemma
        ffn, (mix, out, gate_up, down) = "pre_feedforward" if gemma else "post_attention", fused_maps(delta)
        return Layer(
            at,
            delta,
            self.new(f"{prefix}input_layernorm.weight"),
            fused(mix),
            self._qk_norm(f"{prefix}self_attn.") if self._arch.qk_norm and delta is None else None,
            fused(out),
            self.new(f"{prefix}{ffn}_layernorm.weight"),
            fused(gate_up),
            fused(down),
            self.new(f"{prefix}post_attention_layernorm.weight") if gemma else None,
            self.new(f"{prefix}post_feedforward_layernorm.weight") if gemma else None,
        )

    def _delta(self, prefix: str, sizes: DeltaSizes) -> DeltaLayer:
        conv, log_rate, rate_bias = (self.new(prefix + name) for name in ("conv1d.weight", "A_log", "dt_bias"))
        return DeltaLayer(sizes, self._arch.rms_eps, conv, log_rate, rate_bias, self.new(f"{prefix}norm.weight"))

    def _qk_norm(self, prefix: str) -> Tensor:
        """Allocate the query and key norms as one tensor: a row for each query head, then one for each key head."""
        heads, kv_heads = self._arch.num_heads, self._arch.num_kv_heads
        norm_HE = torch.empty((heads + kv_heads, self._arch.head_dim), dtype=self._dtype, device=self._device)
        self.places[f"{prefix}q_norm.weight"] = norm_HE[:heads].unbind()
        self.places[f"{prefix}k_norm.weight"] = norm_HE[heads:].unbind()
        return norm_HE


def fused_maps(delta: DeltaLayer | None) -> tuple[tuple[str, ...], ...]:
    """Return the linear maps of a layer of this kind, those together that are computed as one."""
    return FUSED if delta is None else DELTA_FUSED
