"""Loads a model directory: transformers builds the module from config.json, and weights are read to their final place.

Weights are read piece by piece, in the precision in which they are held, so that memory holds no second copy. A part of
the model is read before it is cut over ranks, so that a rank has at most one part whole. If the files name a tensor
differently from transformers, transformers reads the whole model on every rank.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import nn

from echo2.errors import UserError
from echo2.learner.mesh import Mesh
from echo2.types import StoredTensor
from echo2.weights.model_files import stored_weights

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


def load_module(directory: Path, dtype: torch.dtype | None, device: torch.device, mesh: Mesh) -> nn.Module:
    """Load the model, on `device` and cut over `mesh`. `dtype`: of its weights; None: as they are stored.

    Raises:
        UserError: the model is quantised, there are more ranks than it can be cut into, or a tensor has another shape
            than config.json says.
        OSError, ValueError, KeyError, TypeError, AttributeError, RuntimeError, SafetensorError: there is no such model.
    """
    from accelerate import init_empty_weights
    from transformers import AutoConfig, AutoModelForCausalLM  # takes three seconds: only to load a model

    options: dict[str, Any] = {"trust_remote_code": False}
    config = AutoConfig.from_pretrained(directory, local_files_only=True, **options)
    _require_unquantised(config)
    tensors, dtype = stored_weights(directory), dtype or config.dtype
    with init_empty_weights():
        empty: Any = AutoModelForCausalLM.from_config(config, dtype=dtype or torch.float32, **options)
    empty.tie_weights()
    if dtype is not None and _can_be_read(empty, dtype, tensors):
        module: nn.Module = empty.eval()
        _warn_of_untied(empty, tensors)
        mesh.shard(module, _Reader(module, tensors, device).fill)
        return module
    whole: Any = AutoModelForCausalLM.from_pretrained(
        directory, dtype=dtype or "auto", local_files_only=True, **options
    )
    module = whole.to(device)
    mesh.shard(module)
    return module


class _Reader:
    """Reads the weights of an empty module to their final place."""

    def __init__(self, module: nn.Module, tensors: Mapping[str, StoredTensor], device: torch.device) -> None:
        self._names = {parameter: name for name, parameter in module.named_parameters()}
        self._tensors, self._device = tensors, device
        self._read = WeakValueDictionary[nn.Parameter, nn.Parameter]()  # entries of cut parts vanish

    def fill(self, part: nn.Module) -> None:
        """Read the weights of a part; tied weights are read once."""
        for owner in part.modules():
            for key, empty in owner.named_parameters(recurse=False):
                if empty in self._names:
                    read = self._read.get(empty)
                    if read is None:
                        name = self._names[empty]
                        values = torch.empty(empty.shape, dtype=empty.dtype, device=self._device)
                        _read(values, self._tensors[name], name)
                        read = self._read[empty] = nn.Parameter(values)
                    owner.register_parameter(key, read)
            for key, buffer in owner.named_buffers(recurse=False):
                owner.register_buffer(key, buffer.to(self._device), persistent=False)


def _can_be_read(module: Any, dtype: torch.dtype, tensors: Mapping[str, StoredTensor]) -> bool:
    """Whether the files have every tensor of the module by its name, and the module holds all in `dtype`."""
    names = {name for name, _ in module.named_parameters()}
    has_buffers = any(name in module.state_dict() for name, _ in module.named_buffers())
    in_float32 = {  # modules that transformers' _get_dtype_plan keeps in float32
        torch.float16: ("_keep_in_fp32_modules", "_keep_in_fp32_modules_strict"),
        torch.bfloat16: ("_keep_in_fp32_modules_strict",),
    }
    is_mixed = any(getattr(module, kept, None) for kept in in_float32.get(dtype, ()))
    return (
        not has_buffers and not is_mixed and all(name in tensors and tensors[name].dtype in _DTYPES for name in names)
    )


def _require_unquantised(config: Any) -> None:
    for part in (config, config.get_text_config()):
        quantised = getattr(part, "quantization_config", None)
        if quantised:
            values = quantised if isinstance(quantised, dict) else quantised.to_dict()
            raise UserError(
                f"model.path: its config.json has a quantization_config ({values.get('quant_method')}), and weights "
                "that are quantised cannot be trained. Give the model without quantisation."
            )


def _warn_of_untied(module: Any, tensors: Mapping[str, StoredTensor]) -> None:
    """Warn of weights that config.json ties and the files store with different values. transformers would not tie them;
    here config.json decides, as in engines.
    """
    for name, source in module.all_tied_weights_keys.items():
        if name in tensors and source in tensors and not _are_equal(tensors[name], tensors[source]):
            log.warning(
                "model.path: config.json ties %s to %s, and the weights have both, with different values: the second "
                'is taken for both. If that is wrong, write "tie_word_embeddings": false into config.json.',
                name,
                source,
            )


def _are_equal(one: StoredTensor, other: StoredTensor) -> bool:
    if (one.dtype, one.shape, one.num_bytes) != (other.dtype, other.shape, other.num_bytes):
        return False
    pieces = ((first, min(first + PIECE_BYTES, one.num_bytes)) for first in range(0, one.num_bytes, PIECE_BYTES))
    return all(one.read(*piece) == other.read(*piece) for piece in pieces)


def _read(into: torch.Tensor, stored: StoredTensor, name: str) -> None:
    if tuple(into.shape) != stored.shape:
        raise UserError(
            f"model.path: config.json gives {name} the shape {list(into.shape)}, and the weights have "
            f"{list(stored.shape)}. They are of different models: download the model again."
        )
    items, dtype = into.view(-1), _DTYPES[stored.dtype]
    step = PIECE_BYTES // dtype.itemsize
    for first in range(0, math.prod(stored.shape), step):
        piece = items[first : first + step]
        data = stored.read(first * dtype.itemsize, (first + len(piece)) * dtype.itemsize)
        piece.copy_(torch.frombuffer(data, dtype=dtype))
