"""Loads a model directory: transformers builds the module from config.json, and weights are read to their final place.

Weights are read piece by piece, in the precision in which they are held, so that memory holds no second copy: a tensor
of the files goes straight to its part of the module's (`engines/hub_layout.py`). A part of the model is read before it
is cut over ranks, so that a rank has at most one part whole.
"""

from __future__ import annotations

import logging
import math
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn

from echo2.core.errors import UserError
from echo2.core.types import StoredTensor
from echo2.engines.hub_layout import HALVES, META, HubLayout, TensorPart, distinct, hub_layout, text_module
from echo2.learner.core.mesh import Mesh
from echo2.learner.core.quantised import quantise
from echo2.weights.format.model_files import refuse_untied, stored_weights

log = logging.getLogger(__name__)

#: Bytes of weights that are read at a time.
PIECE_BYTES = 64 << 20
SAFETENSORS_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
#: Dtypes of weights, by name in safetensors. Weights stored as integers are quantised.
_DTYPES = {name: dtype for dtype, name in SAFETENSORS_NAMES.items() if dtype.is_floating_point}

#: quant_method of makers' own files -> transformers' class of settings to read them without quantisation.
_DEQUANTISING = {"mxfp4": "Mxfp4Config", "fp8": "FineGrainedFP8Config"}


def load_module(
    directory: Path, dtype: torch.dtype | None, device: torch.device, mesh: Mesh, in_4_bits: bool = False
) -> tuple[nn.Module, HubLayout]:
    """Load the model, on `device` and cut over `mesh`. `dtype`: of its weights; None: as they are stored.
    `in_4_bits`: its linear layers are quantised, one after the other as they are read.

    Raises:
        UserError: the model is quantised, its files lack tensors, there are more ranks than it can be cut into, or a
            tensor has another shape than config.json says.
        OSError, ValueError, KeyError, TypeError, AttributeError, RuntimeError, SafetensorError: there is no such model.
    """
    from accelerate import init_empty_weights

    config, tensors = _read_config(directory), stored_weights(directory)
    dtype = dtype or config.dtype or _DTYPES.get(next(iter(tensors.values())).dtype, torch.float32)
    layout = _fitting_layout(config, tensors, dtype if dtype in HALVES else torch.bfloat16)
    _warn_of_leftovers(layout)
    with init_empty_weights():
        module: Any = text_module(config, dtype).eval()
    module.tie_weights()
    reader = _Reader(module, layout, tensors, device, dtype)
    if in_4_bits:
        quantise(module, reader.fill)
    mesh.shard(module, reader.fill)
    return module, layout


def outline_module(directory: Path) -> tuple[nn.Module, HubLayout]:
    """Return the model without memory: what `load_module` refuses, this refuses, but for values and memory.

    Raises: as `load_module`.
    """
    config = _read_config(directory)
    layout = _fitting_layout(config, stored_weights(directory), torch.bfloat16)
    with META:
        module: Any = text_module(config, torch.float32).eval()
    module.tie_weights()
    return module, layout


def kept_in_float32(directory: Path, shapes: Mapping[str, tuple[int, ...]], dtype: str) -> frozenset[str]:
    """Return those stored tensors that transformers keeps in float32 in a model of `dtype`, where directory has its
    config.json."""
    half = next((each for each in HALVES if str(each) == f"torch.{dtype}"), None)
    return frozenset() if half is None else hub_layout(_read_config(directory), shapes, half).float32_names


def _read_config(directory: Path) -> Any:
    from transformers import AutoConfig  # takes three seconds: only to load a model

    config = AutoConfig.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
    _require_unquantised(config)
    return config


def _fitting_layout(config: Any, tensors: Mapping[str, StoredTensor], half: torch.dtype) -> HubLayout:
    """Return the map of files that have all tensors of the model, in shapes and dtypes that fit."""
    layout = hub_layout(config, {name: tuple(one.shape) for name, one in tensors.items()}, half)
    if layout.missing:
        raise UserError(
            f"model.path: the files do not fill {len(layout.missing)} tensors of the model that config.json describes, "
            f"for example {layout.missing[0]}. Download the model again; if transformers loads it whole, save it with "
            "save_pretrained(DIR, save_original_format=False) and name DIR."
        )
    for name, place in layout.places.items():
        stored = tensors[name]
        if place.shape != tuple(stored.shape):
            raise UserError(
                f"model.path: config.json gives {name} the shape {list(place.shape)}, and the weights have "
                f"{list(stored.shape)}. They are of different models: download the model again."
            )
        if stored.dtype not in _DTYPES:
            raise UserError(
                f"model.path: {name} is stored as {stored.dtype}, which is quantised, and weights that are quantised "
                "cannot be trained. Give the model without quantisation."
            )
    for name, source in layout.copies.items():
        refuse_untied(name, tensors[name], source, tensors[source])
    return layout


def _warn_of_leftovers(layout: HubLayout) -> None:
    if layout.unknown:
        log.warning(
            "model.path: %d tensors of the files are of no part of the model that transformers has, for example %s: "
            "checkpoints and snapshots do not have them",
            len(layout.unknown),
            min(layout.unknown),
        )


class _Reader:
    """Reads the tensors of an empty module to their final place."""

    def __init__(
        self,
        module: nn.Module,
        layout: HubLayout,
        tensors: Mapping[str, StoredTensor],
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        self._names = {tensor: name for name, tensor in distinct(module).items()}  # tensors are equal if identical
        self._tensors, self._device = tensors, device
        self._pieces = defaultdict[str, list[tuple[str, TensorPart]]](list)
        for key, place in layout.places.items():
            self._pieces[place.name].append((key, place))
        float32_names = {layout.places[key].name for key in layout.float32_names} if dtype in HALVES else set()
        self._dtypes = defaultdict[str, torch.dtype](lambda: dtype, dict.fromkeys(float32_names, torch.float32))
        self._read = WeakValueDictionary[nn.Parameter, nn.Parameter]()  # entries of cut parts vanish

    def fill(self, part: nn.Module) -> None:
        """Read the tensors of a part; tied weights are read once."""
        for owner in part.modules():
            for key, empty in owner.named_parameters(recurse=False):
                if empty in self._names:
                    read = self._read.get(empty)
                    if read is None:
                        read = self._read[empty] = nn.Parameter(self._values(empty))
                    owner.register_parameter(key, read)
            for key, buffer in owner.named_buffers(recurse=False):
                setattr(owner, key, self._values(buffer) if buffer in self._names else buffer.to(self._device))

    def _values(self, empty: Tensor) -> Tensor:
        name = self._names[empty]
        values = torch.empty(empty.shape, dtype=self._dtypes[name], device=self._device)
        for key, place in self._pieces[name]:
            _read(place.of(values), self._tensors[key])
        return values


def _require_unquantised(config: Any) -> None:
    for part in (config, config.get_text_config()):
        quantised = getattr(part, "quantization_config", None)
        if quantised:
            values = quantised if isinstance(quantised, dict) else quantised.to_dict()
            method = values.get("quant_method")
            raise UserError(
                f"model.path: its config.json has a quantization_config ({method}), and weights that are quantised "
                f"cannot be trained. {_without(config, method)}"
            )


def _without(config: Any, method: object) -> str:
    """Return how to get the model without quantisation."""
    setting = _DEQUANTISING.get(str(method))
    if setting is None:
        return "Give the model without quantisation."
    kind = next(iter(config.architectures or ()), "AutoModelForCausalLM")
    return (
        f"Write it in bfloat16 with transformers: {kind}.from_pretrained(DIR, dtype='bfloat16', "
        f"quantization_config={setting}(dequantize=True)).save_pretrained(NEW). Copy the tokenizer's files to NEW, and "
        "set model.path to it."
    )


def _read(into: torch.Tensor, stored: StoredTensor) -> None:
    dtype = _DTYPES[stored.dtype]
    whole = into if into.is_contiguous() else torch.empty(into.shape, dtype=into.dtype, device=into.device)
    items = whole.view(-1)
    step = PIECE_BYTES // dtype.itemsize
    for first in range(0, math.prod(stored.shape), step):
        piece = items[first : first + step]
        data = stored.read(first * dtype.itemsize, (first + len(piece)) * dtype.itemsize)
        piece.copy_(torch.frombuffer(data, dtype=dtype))
    if whole is not into:
        into.copy_(whole)
