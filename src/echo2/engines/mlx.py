"""The engines `mlx`, `mlx-q8` and `mlx-q4`: Llama, Qwen2 and Qwen3 on Apple silicon, computed by MLX in this process
(package `mlx-lm`), with the weights as published or rounded to 8 or 4 bits (`forms.py`).

Tokens are drawn from MLX's logits by echo2's own sampler, with the head's random numbers. So the engine `compact`,
which rounds the same snapshot in the same way, can check them, and `mlx` can check others.

New weights replace the old ones tensor by tensor, so there is never more than one tensor too many; where there is much
room, they are loaded beside the old ones. Rounded weights are derived from the snapshot on disk.

Shape suffixes: B = rows, V = vocabulary.
"""

from __future__ import annotations

import copy
import os
import sys
from array import array
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from echo2.core.errors import UserError
from echo2.core.types import Snapshot
from echo2.engines import forms
from echo2.engines.adapter import Adapter, LowRank
from echo2.engines.compact import CompactModel, build_compact, right_padded
from echo2.engines.decode_loop import DecodeLoop
from echo2.engines.engine import Engine, RouteCheck
from echo2.engines.model_values import PLAIN_TYPES, UnsupportedError, read_architecture
from echo2.engines.rows import Cache
from echo2.engines.snapshot_tensors import fill, names_to_read
from echo2.engines.torch_engine import META, Model, TorchDecoder
from echo2.weights.format.snapshot_files import read_config

if TYPE_CHECKING:
    from echo2.engines.mlx_net import MlxCache

EMBEDDING, OUTPUT = "model.embed_tokens.weight", "lm_head.weight"
#: Tokens that are read at once; bounds the memory of long prompts.
READ_TOKENS = 1 << 11


def make_engine(device: str, slots: int, form: str = "") -> Engine:
    """The engines `mlx`, `mlx-q8` and `mlx-q4`."""
    return DecodeLoop(TorchDecoder(MlxBuilder(form, device), "cpu"), slots)


def has_gpu() -> bool:
    """Whether MLX computes on a GPU here.

    Raises:
        UserError: it does not load.
    """
    mx = library()
    return bool(mx.default_device() != mx.cpu)


def check_model(config: Mapping[str, Any], form: str) -> None:
    """Check that these engines can compute a model with this config.json in this form.

    Raises:
        UserError: mlx-lm, or the form, has no such model.
    """
    try:
        arch = read_architecture(config, PLAIN_TYPES)
    except UnsupportedError as error:
        raise _unfit(error.trait) from error
    if form and (trait := forms.misfit(arch.tensor_shapes(), form)):
        raise UserError(f"There is no form {form} of this model: {trait}. Start the worker with --engine mlx.")


class MlxBuilder:
    """Builds the models of snapshots. Implements `torch_engine.BuildModel`. `device`: "cpu" leaves the GPU alone."""

    def __init__(self, form: str = "", device: str = "auto") -> None:
        """Raises: UserError, MLX does not load, or finds no GPU on a Mac."""
        self._form, mx = form, library()
        if device == "cpu":
            mx.set_default_device(mx.cpu)
        elif sys.platform == "darwin" and not mx.metal.is_available():
            raise UserError(
                "The engine mlx finds no GPU (Metal) on this Mac, as in many virtual machines. Start the worker with "
                "--engine compact, or on the processors, which is slow, with --device cpu."
            )
        if mx.default_device() == mx.cpu:
            mx.disable_compile()  # else it runs a C++ compiler, and loads what that leaves in the temporary directory

    def __call__(self, snapshot: Snapshot, device: torch.device) -> Model:
        """Build the model of a snapshot; its weights are not loaded yet.

        Raises:
            UserError: mlx-lm, or the form, has no such model.
        """
        config = read_config(snapshot.files)
        check_model(config, self._form)
        outline = build_compact(snapshot, META)
        if outline.dtype is torch.float64:
            raise _unfit("weights in float64")
        return outline if device == META else MlxModel(outline, config["model_type"], self._form)


def library() -> Any:
    """MLX.

    Raises:
        UserError: it is not installed, or does not load.
    """
    # Else matrix products of float32 have 10 bits of precision where a GPU can do that.
    os.environ.setdefault("MLX_ENABLE_TF32", "0")
    try:
        import mlx.core
        import mlx_lm.models.cache  # noqa: F401
    except (ImportError, OSError) as error:
        raise UserError(
            f"The engine mlx needs MLX and mlx-lm, which do not load here: {error}. Install them with "
            "pip install 'echo2[mlx]', or start the worker with --engine auto."
        ) from error
    return mlx.core


def _unfit(trait: str) -> UserError:
    return UserError(
        f"The engine mlx does not support {trait}. Start the worker with --engine compact or transformers."
    )


class MlxModel(Model):
    """One policy."""

    def __init__(self, outline: CompactModel, model_type: str, form: str) -> None:
        from echo2.engines.mlx_net import Net

        self.limits, self.architecture, self.dtype = outline.limits, outline.architecture, outline.dtype
        self.places, self.linears = outline.places, outline.linears
        self._form, self._tied = form, outline.architecture[0].tied
        self._net, self._adapter = Net(model_type, outline.architecture[0]), dict[str, LowRank]()

    def fill(self, snapshot: Snapshot) -> None:
        for name in names_to_read(snapshot, self.places):
            weight = torch.empty(self.places[name][0].shape, dtype=self.dtype)
            fill(snapshot, name, [weight])
            place = EMBEDDING if self._tied and name == OUTPUT else name
            kind = forms.format_of(name, self._form) if self._form else ""
            self._net.set(place, weight, kind)

    def adapted(self, adapter: Adapter) -> MlxModel:
        model = copy.copy(self)
        model._adapter = dict(adapter)
        return model

    def prefill(
        self, prompts: Sequence[array[int]], known: Sequence[Cache | None] = (), keeps_routes: bool = False
    ) -> MlxCache:
        from echo2.engines.mlx_net import MlxCache

        self._net.use(self._adapter)
        cache = MlxCache.of(known or [None] * len(prompts), self._net.num_layers)
        parts = [prompt[length:] for prompt, length in zip(prompts, cache.lengths(), strict=True)]
        longest = max(map(len, parts))
        cache.pad([longest - len(part) for part in parts])
        tokens_RT, columns = right_padded(parts), max(1, READ_TOKENS // len(parts))
        for start in range(0, longest, columns):
            self._net.read(tokens_RT[:, start : start + columns], cache)
            cache.compute()
        cache.unpad()
        return cache

    def step(self, cache: Cache, tokens_B: Tensor) -> Tensor:
        self._net.use(self._adapter)
        return self._net.logits(self._net.read(tokens_B[:, None], cache)[:, 0])

    def extend(
        self, cache: Cache | None, tokens: array[int], first: int, most: int, routes: RouteCheck | None = None
    ) -> tuple[Cache, Iterator[Tensor]]:
        if self._form:
            return super().extend(cache, tokens, first, most)
        from echo2.engines.mlx_net import MlxCache

        mlx_cache = MlxCache.of([None], self._net.num_layers) if cache is None else cache
        assert isinstance(mlx_cache, MlxCache)
        return mlx_cache, self._pieces(mlx_cache, tokens, first, most)

    def _pieces(self, cache: MlxCache, tokens: array[int], first: int, most: int) -> Iterator[Tensor]:
        for start in range(0, len(tokens), READ_TOKENS):
            self._net.use(self._adapter)
            piece = right_padded([tokens[start : start + READ_TOKENS]])
            hidden_TD = self._net.read(piece, cache)[0]
            cache.compute()
            for at in range(max(0, first - start), piece.shape[1], most):
                yield self._net.logits(hidden_TD[at : at + most])
