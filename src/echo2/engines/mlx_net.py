"""A model of `mlx-lm` with weights that this engine sets: rounded (`forms.py`) or not, with an adapter or not, and its
keys and values. Imports MLX; only the engines `mlx*` import this.

mlx-lm's classes have the layers, norms, attention and masks. Linear maps, the embedding and the rotary frequencies are
objects of this module in the places of theirs, so that they are the ones of the engine `compact`.

MLX computes lazily, and only in the thread that asked for it: whatever leaves a function here that another thread may
use was computed with `mx.eval`.

Shape suffixes: I = inputs, O = outputs, R = rank, N = blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from typing import Any

import mlx.core as mx
import numpy as np
import torch
from mlx_lm.models.cache import BatchKVCache, KVCache
from torch import Tensor

from echo2.engines import forms
from echo2.engines.adapter import Adapter, LowRank
from echo2.engines.compact import rope_frequencies
from echo2.engines.home_files import mlx_arguments
from echo2.engines.model_values import Architecture
from echo2.engines.rows import Cache


class Matrix:
    """A matrix [O, I]: of a linear map, which may have a bias and an adapter, or of the embedding."""

    def __init__(self) -> None:
        self._weight: Any = None  # [O, I], or the whole numbers of a form in words of 32 bits
        self._steps: Any = None  # of a form: [O, N]
        self._edges: Any = None
        self._bits = 0
        self.bias: Any = None
        self._low: Any = None

    def set(self, weight_OI: Tensor, kind: str) -> None:
        """Take these weights, rounded to a format; "": as they are. Those before make room first."""
        self._weight = self._steps = self._edges = None
        if not kind:
            self._weight = mx.array(weight_OI)
            return
        rows, (q_NI, step_N1, edge_N1) = len(weight_OI), forms.affine(weight_OI, kind)
        self._weight = mx.array(forms.packed(q_NI, kind).numpy().view(np.uint32).reshape(rows, -1))
        self._steps, self._edges = mx.array(step_N1.view(rows, -1)), mx.array(edge_N1.view(rows, -1))
        self._bits = forms.AFFINE_BITS[kind]

    def adapt(self, low: LowRank | None) -> None:
        """Use this adapter from now on, or none."""
        self._low = None if low is None else (mx.array(low.a_RI.T.contiguous()), mx.array(low.b_OR.T.contiguous()))

    def as_linear(self, x: Any) -> Any:
        """Return y [..., O] for x [..., I], without bias or adapter. mlx-lm's name."""
        if self._steps is None:
            return x @ self._weight.T
        return mx.quantized_matmul(x, self._weight, self._steps, self._edges, group_size=forms.BLOCK, bits=self._bits)

    def __call__(self, x: Any) -> Any:
        """Return y [..., O] for x [..., I]."""
        y = self.as_linear(x)
        if self.bias is not None:
            y = y + self.bias
        if self._low is None:
            return y
        a_IR, b_RO = self._low
        return (y + (x.astype(a_IR.dtype) @ a_IR) @ b_RO).astype(y.dtype)

    def rows(self, tokens: Any) -> Any:
        if self._steps is None:
            return self._weight[tokens]
        steps, edges = (part[tokens].astype(mx.float32) for part in (self._steps, self._edges))
        values = mx.dequantize(self._weight[tokens], steps, edges, group_size=forms.BLOCK, bits=self._bits)
        return values.astype(self._steps.dtype)


class Embedding(Matrix):
    """An embedding: as a function, it gives rows."""

    def __call__(self, x: Any) -> Any:
        return self.rows(x)


class Rotation:
    """Rotary embedding of pairs (e, e + E/2) with given frequencies."""

    def __init__(self, frequencies: Tensor) -> None:
        self._dims, self._periods = 2 * len(frequencies), mx.array(1.0 / frequencies)

    def __call__(self, x: Any, offset: Any = 0) -> Any:
        """Rotate x [B, H, T, E], whose first token has the place `offset` in its row."""
        return mx.fast.rope(x, self._dims, traditional=False, base=None, scale=1.0, offset=offset, freqs=self._periods)


class Net:
    """A model of mlx-lm. It has no weights until all of `set`."""

    def __init__(self, model_type: str, arch: Architecture) -> None:
        family = import_module(f"mlx_lm.models.{model_type}")
        self._model = family.Model(family.ModelArgs.from_dict(mlx_arguments(model_type, arch) | {"rope_scaling": None}))
        self._tied, self.num_layers = arch.tied, arch.num_layers
        self._matrices: dict[str, Matrix] = {}
        for name, shape in arch.tensor_shapes().items():
            if len(shape) == 2:
                module = name.removesuffix(".weight")
                matrix = Embedding() if module == "model.embed_tokens" else Matrix()
                self._matrices[module] = matrix
                setattr(*self._place(module), matrix)
        frequencies = rope_frequencies(arch.rope, arch.head_dim)
        for layer in self._model.layers:
            layer.self_attn.rope, layer.self_attn.scale = Rotation(frequencies), arch.head_dim**-0.5
        self._adapter: Adapter = {}

    def _place(self, name: str) -> tuple[Any, str]:
        """Return the object that has the attribute of this name, and the last part of the name."""
        *path, last = name.split(".")
        owner = self._model
        for part in path:
            owner = owner[int(part)] if part.isdecimal() else getattr(owner, part)
        return owner, last

    def set(self, name: str, weight: Tensor, kind: str = "") -> None:
        """Take a tensor (Hugging Face name), rounded to a format."""
        module, _, part = name.rpartition(".")
        matrix = self._matrices.get(module)
        if matrix is None:
            setattr(*self._place(name), mx.array(weight))
        elif part == "bias":
            matrix.bias = mx.array(weight)
        else:
            matrix.set(weight, kind)

    def use(self, adapter: Adapter) -> None:
        if adapter is not self._adapter:
            for name, matrix in self._matrices.items():
                matrix.adapt(adapter.get(name))
            self._adapter = adapter

    def read(self, tokens_BT: Tensor, cache: Cache) -> Any:
        """Read tokens into the cache. Returns what the output layer takes, [B, T, hidden]; nothing is computed yet."""
        assert isinstance(cache, MlxCache)
        return self._model.model(mx.array(tokens_BT.int()), cache=cache.layers)

    def logits(self, hidden: Any) -> Tensor:
        """Compute the logits, float32, behind tokens read."""
        output = self._matrices["model.embed_tokens" if self._tied else "lm_head"]
        return torch.from_numpy(np.array(output.as_linear(hidden).astype(mx.float32)))


class MlxCache(Cache):
    """Keys and values of rows, each padded at its beginning: one cache of mlx-lm for each layer."""

    def __init__(self, layers: Sequence[Any]) -> None:
        self.layers = list(layers)

    @staticmethod
    def of(rows: Sequence[Cache | None], num_layers: int) -> MlxCache:
        """Return one cache of these rows, copies of caches of one row each; None: a row that has read nothing."""
        of_rows = [one._only() if isinstance(one, MlxCache) else [KVCache() for _ in range(num_layers)] for one in rows]
        return MlxCache([BatchKVCache.merge(list(of_layer)) for of_layer in zip(*of_rows, strict=True)])

    def _only(self, row: int = 0) -> list[Any]:
        return [KVCache() if layer.empty() else layer.extract(row) for layer in self.layers]

    @property
    def num_bytes(self) -> int:
        return sum(layer.nbytes for layer in self.layers)

    def copy(self, row: int, length: int) -> MlxCache:
        layers = self._only(row)
        for layer in layers:
            layer.trim(layer.offset - length)
        cache = MlxCache([BatchKVCache.merge([layer]) for layer in layers])
        cache.compute()
        return cache

    def compute(self) -> None:
        mx.eval([layer.state for layer in self.layers if not layer.empty()])

    def select(self, rows: Tensor) -> MlxCache:
        for layer in self.layers:
            layer.filter(mx.array(rows))
        return self

    def join(self, rows: Tensor, other: Cache, other_rows: Tensor) -> MlxCache:
        assert isinstance(other, MlxCache)
        for layer, more in zip(self.select(rows).layers, other.select(other_rows).layers, strict=True):
            layer.extend(more)
        return self

    def lengths(self) -> list[int]:
        lengths: list[int] = self.layers[0].offset.tolist()
        return lengths

    def pad(self, padding: Sequence[int]) -> None:
        """So many of the tokens that come are not tokens of their rows, at the end of each."""
        for layer in self.layers:
            layer.prepare(right_padding=list(padding))

    def unpad(self) -> None:
        """All of them came: move them before the rows' beginnings."""
        for layer in self.layers:
            layer.finalize()
