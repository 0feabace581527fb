"""The engine `transformers`: any Hugging Face causal language model, slower than `compact`, in the same decode loop.

Prompts are padded on the left. Code that comes with a model (`trust_remote_code`) is never run.

Shape suffixes: R = prompts, B = rows, T = tokens of a row, V = vocabulary.
"""

from __future__ import annotations

import copy
import inspect
import json
from array import array
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer
from transformers.pytorch_utils import Conv1D

from echo2.core.decide.model_config import context_length
from echo2.core.errors import PeerError, UserError
from echo2.core.types import Snapshot
from echo2.engines.adapter import Adapter, LowRank, adapt, stacked_maps
from echo2.engines.causal import refuse_cache, unfit
from echo2.engines.decode_loop import DecodeLoop
from echo2.engines.engine import Engine, RouteCheck
from echo2.engines.hub_layout import HALVES, HubLayout, distinct, hub_layout, text_module
from echo2.engines.model_values import transformers_config, values_of
from echo2.engines.routing import LIVE, Recorded, routing_of
from echo2.engines.rows import Cache, Limits
from echo2.engines.snapshot_tensors import computing_dtype
from echo2.engines.torch_engine import Model, TorchDecoder
from echo2.weights.format.snapshot_files import end_tokens, read_config

NO_POSITION_LIMIT = 1 << 20
"""Context length of models whose config.json names none (relative positions); the longest max_tokens allowed."""
CACHE_NAMES = ("cache", "past_key_values", "cache_params")
"""Names of the cache argument of forward methods: since transformers 5.24, before, and before in models like Mamba."""
PROBE_ROWS = 11
"""Rows of the pass that looks for state in modules: unlike the sizes of what modules keep for all rows."""
PIECE_TOKENS = 128
"""Minimum number of tokens of a sequence that `HfModel.extend` reads at once (recurrent models read one)."""


def make_engine(device: str, slots: int) -> Engine:
    """The engine `transformers`."""
    return DecodeLoop(TorchDecoder(build_transformers, device), slots)


class HfCache(Cache):
    """transformers' own cache, the mask of its columns, and the experts that a mixture chose in them (None: they are
    not recorded). It cannot be copied: the format of its layers is not known here. Padding (0) is on the left of
    each row."""

    def __init__(self, past: Any, mask_BT: Tensor, chosen: Recorded | None = None) -> None:
        self.past = past
        self.mask_BT = mask_BT
        self.chosen = chosen

    @property
    def can_join(self) -> bool:
        """Whether all layers keep all keys and values: sliding windows and recurrent states of two caches cannot be
        joined."""
        return all(type(layer) is DynamicLayer for layer in self.past.layers)

    def routes(self, row: int, length: int) -> bytes:
        return b"" if self.chosen is None else self.chosen.read(row, self.mask_BT[row] == 1, length)

    def select(self, rows: Tensor) -> HfCache:
        self.past.reorder_cache(rows)
        columns = self.mask_BT.shape[1]
        return HfCache(self.past, self.mask_BT[rows], self.chosen and self.chosen.select(rows, columns, columns))

    def join(self, rows: Tensor, other: Cache, other_rows: Tensor) -> HfCache:
        """Append the rows of another cache, padded to one width."""
        assert isinstance(other, HfCache)
        masks = self.mask_BT[rows], other.mask_BT[other_rows]
        # Columns that only dropped rows needed are dropped too.
        widths = [int(mask_BT.sum(1).max()) for mask_BT in masks]
        width = max(widths)
        past = DynamicCache()
        for number, (own, others) in enumerate(zip(self.past.layers, other.past.layers, strict=True)):
            past.update(
                _side_by_side(own.keys, rows, others.keys, other_rows, widths),
                _side_by_side(own.values, rows, others.values, other_rows, widths),
                number,
            )
        padded = [functional.pad(mask, (width - mask.shape[1], 0)) for mask in masks]
        return HfCache(past, torch.cat(padded), self._chosen_beside(rows, other, other_rows, widths))

    def _chosen_beside(
        self, rows: Tensor, other: HfCache, other_rows: Tensor, widths: Sequence[int]
    ) -> Recorded | None:
        record = self.chosen or other.chosen
        if record is None:
            return None
        own, others = (
            (part.chosen or record.nothing(*part.mask_BT.shape)).select(picked, width, max(widths))
            for part, picked, width in ((self, rows, widths[0]), (other, other_rows, widths[1]))
        )
        return replace(own, ids_BTLk=torch.cat((own.ids_BTLk, others.ids_BTLk)))


def _side_by_side(own: Tensor, rows: Tensor, other: Tensor, other_rows: Tensor, widths: Sequence[int]) -> Tensor:
    """Return keys or values [rows + other rows, heads, widest, head dim], the newest `widths` columns on the right."""
    out = own.new_zeros((len(rows) + len(other_rows), own.shape[1], max(widths), own.shape[3]))
    for part, (source, picked, width) in zip(
        (out[: len(rows)], out[len(rows) :]), ((own, rows, widths[0]), (other, other_rows, widths[1])), strict=True
    ):
        part[:, :, part.shape[2] - width :] = source[:, :, source.shape[2] - width :][picked]
    return out


class HfModel(Model):
    """One policy."""

    def __init__(self, module: Any, end: tuple[int, ...], layout: HubLayout) -> None:
        self._module = module
        config = module.config
        self.places = _places(module, layout)
        self._device: torch.device = module.device
        self.dtype: torch.dtype = module.dtype
        values = values_of(config) | {"_name_or_path": ""}  # a temporary directory, different for each model
        self.limits = Limits(int(config.vocab_size), context_length(values) or NO_POSITION_LIMIT, end)
        takes = inspect.signature(module.forward).parameters
        self._cache_name = next(name for name in CACHE_NAMES if name in takes)
        self.architecture = json.dumps([values, str(module.dtype)], sort_keys=True, default=str)
        inner = {layout.outer_name(name): name for name, _ in module.named_modules()}
        self.linears: dict[str, tuple[int, ...]] = {}
        self._inner = inner  # by the name of a module in adapters
        self._adapter: Adapter = {}
        self._applied: dict[str, LowRank] = {}  # the running policy's adapter; shared by all policies over the module
        self._hooked: set[str] = set()
        for name, own in inner.items():
            part = module.get_submodule(own)
            if shape := _linear_shape(part):
                self.linears[name] = shape
            elif maps := stacked_maps(part):
                names = [name + one.suffix for one in maps]
                self.linears |= {key: one[2:] for key, one in zip(names, maps, strict=True)}
                self._hooked.update(names)
                adapt(part, partial(self._of_experts, *names))
        self._takes_positions = "position_ids" in takes
        self._is_recurrent = module._is_stateful and not self._takes_positions  # like Mamba: a step takes no mask
        self._routing = routing_of(module)

    def adapted(self, adapter: Adapter) -> HfModel:
        """See `Model.adapted`. Forward hooks add the adapter's part to the outputs of the module's linear maps."""
        model = copy.copy(self)
        model._adapter = adapter
        for name in adapter.keys() - self._hooked:
            self._module.get_submodule(self._inner[name]).register_forward_hook(partial(self._add, name))
            self._hooked.add(name)
        return model

    def _add(self, name: str, module: Any, inputs: tuple[Tensor], output: Tensor) -> Tensor:
        low = self._applied.get(name)
        return output if low is None else low.add(output, inputs[0])

    def _of_experts(self, first: str, last: str) -> tuple[LowRank | None, LowRank | None]:
        return self._applied.get(first), self._applied.get(last)

    def prefill(
        self, prompts: Sequence[array[int]], known: Sequence[Cache | None] = (), keeps_routes: bool = False
    ) -> HfCache:
        """See `Model.prefill`. `known` is not used: `HfCache.copy` gives no caches. If all prompts are empty, one
        column of padding is read."""
        columns = max(1, *(len(prompt) for prompt in prompts))
        tokens_RT = torch.zeros((len(prompts), columns), dtype=torch.long)
        mask_RT = torch.zeros((len(prompts), columns), dtype=torch.long)
        for row, prompt in enumerate(prompts):
            tokens_RT[row, columns - len(prompt) :] = torch.tensor(prompt, dtype=torch.long)
            mask_RT[row, columns - len(prompt) :] = 1
        cache = HfCache(DynamicCache(config=self._module.config), mask_RT.to(self._device))
        if keeps_routes and self._routing is not None:
            cache.chosen = Recorded(self._routing.shape, cache.mask_BT).nothing(len(prompts), 0)
        self._forward(cache, tokens_RT.to(self._device))
        return cache

    def extend(
        self, cache: Cache | None, tokens: array[int], first: int, most: int, routes: RouteCheck | None = None
    ) -> tuple[Cache, Iterator[Tensor]]:
        if cache is None:
            mask_1T = torch.ones((1, 0), dtype=torch.long, device=self._device)
            cache = HfCache(DynamicCache(config=self._module.config), mask_1T)
        assert isinstance(cache, HfCache)
        return cache, self._pieces(cache, tokens, first, most, routes)

    def _pieces(
        self, cache: HfCache, tokens: array[int], first: int, most: int, routes: RouteCheck | None
    ) -> Iterator[Tensor]:
        """Read tokens into a cache of one row in consecutive pieces, which every model supports."""
        size = 1 if self._is_recurrent else max(most, PIECE_TOKENS)
        for start in range(0, len(tokens), size):
            piece_1T = torch.tensor([tokens[start : start + size]], dtype=torch.long, device=self._device)
            cache.mask_BT = functional.pad(cache.mask_BT, (0, piece_1T.shape[1]), value=1)
            with nullcontext() if routes is None else self._judging(routes, cache, piece_1T.shape[1]):
                logits_1TV = self._all_logits(cache, piece_1T)
            if start + piece_1T.shape[1] > first:
                for tile_TV in logits_1TV[0, max(0, first - start) :].split(most):
                    yield tile_TV.float()

    @contextmanager
    def _judging(self, routes: RouteCheck, cache: HfCache, columns: int) -> Iterator[None]:
        """Inside, the newest columns are read along these routes, which are judged."""
        if self._routing is None:
            raise PeerError("no_routes", "routes of a model that has none here")
        start = cache.mask_BT.shape[1] - columns
        ids_NLk = self._routing.shape.read(routes.given)[start : start + columns].astype(np.int64)
        ids_NLk[np.frombuffer(routes.is_given, bool)[start : start + columns] == 0] = LIVE
        given_NLk = torch.from_numpy(ids_NLk).to(self._device)
        with self._routing.replaying(given_NLk), self._routing.watching() as watched:
            yield
        routes.regrets += watched.regret_N.tolist()

    def step(self, cache: Cache, tokens_B: Tensor) -> Tensor:
        assert isinstance(cache, HfCache)
        cache.mask_BT = torch.cat((cache.mask_BT, cache.mask_BT.new_ones((len(tokens_B), 1))), dim=1)
        return self._forward(cache, tokens_B[:, None])

    def _forward(self, cache: HfCache, tokens_BT: Tensor) -> Tensor:
        return self._all_logits(cache, tokens_BT)[:, -1].float()

    def _all_logits(self, cache: HfCache, tokens_BT: Tensor) -> Tensor:
        inputs: dict[str, Any] = {}
        self._applied.clear()
        self._applied.update(self._adapter)
        if self._takes_positions:
            # A row that has ended may be stepped past the last position until it is dropped; its logits are not used.
            position_BT = (cache.mask_BT.cumsum(-1) - 1).clamp(0, self.limits.max_positions - 1)
            inputs["position_ids"] = position_BT[:, -tokens_BT.shape[1] :]
        inputs[self._cache_name] = cache.past
        if not self._is_recurrent or tokens_BT.shape == cache.mask_BT.shape:
            inputs["attention_mask"] = cache.mask_BT
        if cache.chosen is None or self._routing is None:
            logits_BTV: Tensor = self._module(input_ids=tokens_BT, use_cache=True, **inputs).logits
            return logits_BTV
        with self._routing.watching() as watched:
            logits_BTV = self._module(input_ids=tokens_BT, use_cache=True, **inputs).logits
        cache.chosen = cache.chosen.add(watched.ids_NLk)
        return logits_BTV


def _places(module: Any, layout: HubLayout) -> dict[str, tuple[Tensor, ...]]:
    """Return where a snapshot's tensors go; tensors that the module lacks are passed over."""
    tensors = distinct(module)
    places: dict[str, tuple[Tensor, ...]] = {
        name: (place.of(tensors[place.name]),) for name, place in layout.places.items()
    }
    places |= {name: places[other] for name, other in layout.copies.items()}
    places |= dict.fromkeys(layout.others, ())
    return places | {name: (tensors[name],) for name in layout.missing}


def _linear_shape(part: Any) -> tuple[int, int] | None:
    """Return (outputs, inputs) of a linear map; None for any other module."""
    if isinstance(part, torch.nn.Linear):
        return part.out_features, part.in_features
    return (part.nf, part.nx) if isinstance(part, Conv1D) else None


@lru_cache(maxsize=2)
def _read_layout(
    config_json: bytes, shapes: tuple[tuple[str, tuple[int, ...]], ...], dtype: torch.dtype
) -> tuple[Any, HubLayout]:
    """Return transformers' configuration, and where tensors of these shapes go. Kept, for each version asks for it."""
    config = transformers_config(config_json)
    return config, hub_layout(config, dict(shapes), dtype if dtype in HALVES else torch.bfloat16)


def build_transformers(snapshot: Snapshot, device: torch.device) -> HfModel:
    """Build the model of a snapshot in the dtype of its largest tensor (config.json names the learner's dtype); its
    weights are not loaded yet.

    Raises:
        PeerError: the snapshot's files are wrong.
        UserError: transformers does not know the architecture, or its forward method has no cache argument.
    """
    from transformers.initialization import no_init_weights

    read_config(snapshot.files)
    dtype = computing_dtype(snapshot)
    shapes = tuple((name, tuple(tensor.shape)) for name, tensor in snapshot.tensors.items())
    try:
        config, layout = _read_layout(snapshot.files["config.json"], shapes, dtype)
        with torch.device(device), no_init_weights():
            module = text_module(config, dtype)
    except UserError as error:
        raise PeerError("bad_snapshot", str(error)) from error
    except (OSError, KeyError, ValueError, TypeError, ImportError) as error:
        first_line = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise UserError(
            f"transformers cannot build this model: {first_line}. Models with code of their own are not run."
        ) from error
    state = module.state_dict(keep_vars=True)
    for name in layout.float32_names if dtype in HALVES else ():
        state[layout.places[name].name].data = state[layout.places[name].name].data.float()
    if not set(CACHE_NAMES) & inspect.signature(module.forward).parameters.keys():
        # Most forward methods accept and ignore unknown arguments: each step would read one token without context.
        raise unfit(module, f"its forward method takes no cache (none of {', '.join(CACHE_NAMES)})")
    module.tie_weights()  # a part of weight initialisation, which is skipped above
    if snapshot.ref.is_base_model:  # a model directory byte for byte, and what transformers passes over may be in it
        layout = replace(layout, others=layout.others | layout.unknown)
    refuse_cache(module, DynamicCache(config=module.config).layers)
    model = HfModel(module.eval(), end_tokens(snapshot.files), layout)
    if device.type != "meta":
        _refuse_rows_in_modules(module, model)
    return model


@torch.inference_mode()
def _refuse_rows_in_modules(module: Any, model: HfModel) -> None:
    """Refuse a model that keeps the state of its rows in its modules, beside the cache, as RecurrentGemma does: rows
    that join, end or are checked would be read with the state of others. The weights may have any values.

    Raises:
        UserError: names the module.
    """
    try:
        model.prefill([array("i", [0])] * PROBE_ROWS)
    except (RuntimeError, IndexError):  # such values may be no model's
        pass
    except (ValueError, TypeError, AttributeError, AssertionError) as error:
        first_line = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise unfit(module, f"it cannot read with transformers' own cache ({first_line})") from error
    for name, part in module.named_modules():
        for key, value in vars(part).items():
            if isinstance(value, Tensor) and value.ndim and value.shape[0] == PROBE_ROWS:
                raise unfit(
                    module, f"its module {name} keeps {key} of the rows that it read last, so rows are not independent"
                )
