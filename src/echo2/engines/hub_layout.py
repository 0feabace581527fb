"""Where the tensors of a model's files lie in the module that is computed with: one map for loading, snapshots,
checkpoints, exports and engines.

Files have the names of the hub: a tensor for each expert where transformers' module has one for all, other prefixes,
and beside the text model perhaps a vision tower. The map is transformers' own conversion, done backwards on tensors
without memory: each tensor that comes out is a view, which says where its values are.

The module is the text model alone. config.json may name a class that has more (`Gemma3ForConditionalGeneration`); what
only that class has is kept as it is stored.
"""

from __future__ import annotations

import copy
import math
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate
from logging import CRITICAL
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from echo2.core.errors import UserError
from echo2.engines.causal import refuse_model

#: First and last + 1 in each dimension of a tensor.
Region: TypeAlias = "tuple[tuple[int, int], ...]"
#: Shapes of tensors by name.
Shapes: TypeAlias = "Mapping[str, tuple[int, ...]]"
META = torch.device("meta")
#: Dtypes of 16 bits.
HALVES = (torch.bfloat16, torch.float16)


@dataclass(frozen=True, slots=True)
class TensorPart:
    """The part of a module's tensor that one stored tensor is.

    name    of the module's tensor
    region  the part; of dimensions that the stored tensor lacks, it has length 1
    dims    the dimensions of the module's tensor in the order of the stored one's; None: a dimension of length 1 that
            only the stored one has
    """

    name: str
    region: Region
    dims: tuple[int | None, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(1 if dim is None else self.region[dim][1] - self.region[dim][0] for dim in self.dims)

    def of(self, tensor: Tensor, region: Region | None = None) -> Tensor:
        """Return the stored tensor as a view of the module's; `region`: only this part of the module's tensor."""
        spans = self.region if region is None else region
        cut = tensor[tuple(slice(*span) if dim in self.dims else span[0] for dim, span in enumerate(spans))]
        there = [dim for dim in self.dims if dim is not None]
        cut = cut.permute([sorted(there).index(dim) for dim in there])
        for at, dim in enumerate(self.dims):
            cut = cut if dim is not None else cut.unsqueeze(at)
        return cut

    def within(self, region: Region) -> tuple[Region, Region] | None:
        """Return what a part of the module's tensor has of the stored one: as a region of the part, and of the stored
        tensor. None: nothing."""
        spans = list(zip(self.region, region, strict=True))
        both = [(max(own[0], part[0]), min(own[1], part[1])) for own, part in spans]
        if any(low >= high and own[0] < own[1] for (low, high), (own, _) in zip(both, spans, strict=True)):
            return None
        inside = tuple((low - part[0], high - part[0]) for (low, high), (_, part) in zip(both, spans, strict=True))
        ours = tuple((low - own[0], high - own[0]) for (low, high), (own, _) in zip(both, spans, strict=True))
        return inside, tuple((0, 1) if dim is None else ours[dim] for dim in self.dims)


@dataclass(frozen=True, slots=True)
class HubLayout:
    """The map of one model.

    places   of the stored tensors that the module computes with, by stored name
    copies   stored tensors that are the same tensor of the module as another: name -> that one's name, in `places`
    others   stored tensors that only the class that config.json names has
    unknown  stored tensors that this class has not either
    missing  tensors of the module that stored tensors don't fill, by the module's names
    float32_names  stored tensors of `places` that transformers keeps in float32 in a model of 16 bits
    outer    the beginning of names in the module, and the same in the class that config.json names
    """

    places: Mapping[str, TensorPart]
    copies: Mapping[str, str]
    others: frozenset[str]
    unknown: frozenset[str]
    missing: tuple[str, ...]
    float32_names: frozenset[str]
    outer: tuple[str, str] = ("", "")

    def outer_name(self, name: str) -> str:
        """Return the name that a part of the module has in the class that config.json names."""
        return _renamed(name, *self.outer)


def identity_layout(module: nn.Module) -> HubLayout:
    """Return the map of a module whose tensors are stored under its own names."""
    places = {name: whole_place(name, tensor) for name, tensor in distinct(module).items()}
    return HubLayout(places, {}, frozenset(), frozenset(), (), frozenset())


def whole_place(name: str, tensor: Tensor) -> TensorPart:
    """Return the place of a stored tensor that is all of a module's."""
    return TensorPart(name, tuple((0, length) for length in tensor.shape), tuple(range(tensor.dim())))


def distinct(module: nn.Module) -> dict[str, Tensor]:
    """Return the tensors of a module that are stored, by name; tied ones once, under their first name."""
    tensors = module.state_dict(keep_vars=True)
    return {name: tensors[name] for name, first in _first_names(module).items() if name == first}


def _first_names(module: nn.Module) -> dict[str, str]:
    """Return the first name of each stored tensor of a module: tied ones have several."""
    first: dict[int, str] = {}
    return {name: first.setdefault(id(tensor), name) for name, tensor in module.state_dict(keep_vars=True).items()}


def text_module(config: Any, dtype: torch.dtype) -> Any:
    """Build the text model of a configuration, with weights of `dtype`. Code that comes with a model is never run.

    Raises:
        UserError: transformers has it, and would compute something else than config.json describes.
        OSError, KeyError, ValueError, TypeError, ImportError: transformers has no such model.
    """
    from transformers import AutoModelForCausalLM  # takes three seconds: only to build a model

    text = copy.deepcopy(config.get_text_config())
    if (tied := getattr(config, "tie_word_embeddings", None)) is not None:
        text.tie_word_embeddings = tied
    module = AutoModelForCausalLM.from_config(text, dtype=dtype, trust_remote_code=False)
    refuse_model(text, module)
    return module


def hub_layout(config: Any, stored: Shapes, half: torch.dtype = torch.bfloat16) -> HubLayout:
    """Return the map between stored tensors of these shapes and the module that `text_module` builds. `half`: the 16
    bits of `HubLayout.float32_names`.

    Raises:
        UserError: the files are of another model than config.json says.
        OSError, KeyError, ValueError, TypeError, ImportError: transformers has no such model.
    """
    with META:
        text = text_module(config, half)
    text.tie_weights()
    whole = _loaded(_class_of(config, text), config, stored, half)
    outer = ("", "") if type(whole) is type(text) else (_decoder(text), _decoder(whole))
    inner_name = {_renamed(name, *outer): own for name, own in _first_names(text).items()}
    back = _places(whole, stored)
    first: dict[tuple[str, Region], str] = {}
    places, copies = dict[str, TensorPart](), dict[str, str]()
    for key, place in back.items():
        name = inner_name.get(place.name)
        if name is not None and (other := first.setdefault((name, place.region), key)) == key:
            places[key] = TensorPart(name, place.region, place.dims)
        elif name is not None:
            copies[key] = other
    filled = Counter[str]()
    for place in places.values():
        filled[place.name] += math.prod(place.shape)
    wide = {name for name, tensor in whole.state_dict().items() if tensor.dtype == torch.float32}
    return HubLayout(
        places,
        copies,
        others=frozenset(back.keys() - places.keys() - copies.keys()),
        unknown=frozenset(stored.keys() - back.keys()),
        missing=tuple(name for name, tensor in distinct(text).items() if filled[name] < tensor.numel()),
        float32_names=frozenset(key for key in places if back[key].name in wide),
        outer=outer,
    )


def _renamed(name: str, inner: str, outer: str) -> str:
    return outer + name.removeprefix(inner) if name.startswith(inner) else name


def _class_of(config: Any, text: Any) -> Any:
    """Return the class that config.json names; of a model that is text alone, that of the module."""
    import transformers

    if config.get_text_config() is config:
        return type(text)
    named = getattr(transformers, next(iter(config.architectures or ()), ""), None)
    return transformers.AutoModelForImageTextToText if named is None else named


def _decoder(module: Any) -> str:
    """Return how the names of a model's decoder begin."""
    decoder = module.get_decoder()
    return next(f"{name}." for name, part in module.named_modules() if part is decoder)


def _loaded(kind: Any, config: Any, stored: Shapes, dtype: torch.dtype) -> Any:
    """Return a model without memory that transformers has loaded from tensors of these names and shapes, and so knows
    which of its conversions they need."""
    tensors = {name: torch.empty(shape, dtype=dtype, device=META) for name, shape in stored.items()}
    with _quiet(), _Alike():
        try:
            return kind.from_pretrained(
                None,
                config=copy.deepcopy(config),
                state_dict=tensors,
                device_map={"": "meta"},
                dtype=dtype,
                ignore_mismatched_sizes=True,
                trust_remote_code=False,
            )
        except RuntimeError as error:
            raise UserError(
                f"The tensors of the files do not make up the {config.model_type} that config.json describes: "
                "transformers cannot join them. Perhaps a part of the experts is missing: download the model again."
            ) from error


@contextmanager
def _quiet() -> Iterator[None]:
    """Inside, transformers reports nothing about what it loads: nothing is loaded in truth."""
    from transformers.utils import logging

    level, shows = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity(CRITICAL)
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if shows:
            logging.enable_progress_bar()


class _Alike(TorchFunctionMode):
    """Inside, tensors without values are equal: older versions of transformers compare those that config.json ties."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.equal and args[0].device == META:
            return True
        return func(*args, **(kwargs or {}))


class _Views(TorchFunctionMode):
    """Inside, `contiguous` copies nothing, so that parts of tensors stay views of them."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.contiguous:
            return args[0]
        return func(*args, **(kwargs or {}))


def _places(whole: Any, stored: Shapes) -> dict[str, TensorPart]:
    """Return the places of stored tensors in a loaded model, in the order of the model's tensors."""
    from transformers.core_model_loading import revert_weight_conversion

    tensors: dict[str, Tensor] = whole.state_dict(keep_vars=True)
    names = list(tensors)
    starts = list(accumulate((tensor.numel() for tensor in tensors.values()), initial=0))
    space = torch.empty(starts[-1], device=META)  # all tensors one after the other
    own = {
        name: space[start : start + tensor.numel()].view(tensor.shape)
        for (name, tensor), start in zip(tensors.items(), starts, strict=False)
    }
    with _Views():
        converted: dict[str, Tensor] = revert_weight_conversion(whole, dict(own))
    best: dict[str, TensorPart] = {}
    for candidate in (converted, own):
        places: dict[str, TensorPart] = {}
        for name, view in sorted(candidate.items(), key=lambda item: item[1].storage_offset()):
            key, offset = _stored_name(name, whole.base_model_prefix, stored), int(view.storage_offset())
            if key is None or view.untyped_storage().nbytes() != space.untyped_storage().nbytes():
                continue
            at = bisect_right(starts, offset) - 1
            module_name = names[at] if view.numel() else name
            place = _place(module_name, tuple(tensors[module_name].shape), view, offset - starts[at])
            if place is not None:
                places[key] = place
        best = max(best, places, key=len)
    return best


def _stored_name(name: str, prefix: str, stored: Shapes) -> str | None:
    """Return the name of a tensor in the files, which may lack the prefix of the model without its head, or have it."""
    names = (name, name.removeprefix(f"{prefix}."), f"{prefix}.{name}")
    return next((each for each in names if each in stored), None)


def _place(name: str, shape: tuple[int, ...], view: Tensor, offset: int) -> TensorPart | None:
    """Return the place of a view of a tensor of this shape, from its offset and strides; None: not a rectangle."""
    strides = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    start = [offset // stride % length for stride, length in zip(strides, shape, strict=True)]
    region, dims = [(first, first + 1) for first in start], list[int | None]()
    for length, stride in zip(view.shape, view.stride(), strict=True):
        fits = (
            dim
            for dim in range(len(shape))
            if strides[dim] == stride and dim not in dims and start[dim] + length <= shape[dim]
        )
        dim = next(fits, None) if length != 1 else None
        if dim is None and length != 1:
            return None
        dims.append(dim)
        if dim is not None:
            region[dim] = start[dim], start[dim] + length
    return TensorPart(name, tuple(region), tuple(dims))
