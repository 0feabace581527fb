"""Writes a snapshot in a form (`forms.py`), or an adapter, as a file for llama.cpp: GGUF. The engines' files have no
tokenizer; those of `echo2 export` have one (`home_files.py`), and their matrices may be in float16, too.

The names and types are llama.cpp's (package `gguf`). Llama models rotate pairs of neighbours there, so the rows of
their query and key matrices are in another order than Hugging Face's.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from echo2.core.errors import UserError
from echo2.core.types import Snapshot
from echo2.engines import forms
from echo2.engines.adapter import LowRank
from echo2.engines.compact import rope_frequencies
from echo2.engines.model_values import Architecture, Rope
from echo2.engines.snapshot_tensors import fill, pieces_of

#: It would log three lines for each version.
logging.getLogger("gguf").setLevel(logging.WARNING)

QUERY, KEY = "self_attn.q_proj", "self_attn.k_proj"
#: The rotary frequencies of a Llama model that are not the default ones; llama.cpp's name.
FREQUENCIES = "rope_freqs.weight"


def misfit(model_type: str, arch: Architecture, form: str = "q8_0") -> str:
    """Return what llama.cpp, or a form, has no place for in a model of `compact`; empty: nothing. Blocks of all rounded
    forms are as long."""
    trait = forms.misfit(arch.tensor_shapes(), form)
    if model_type != "llama" and arch.rope.kind != "default":
        trait = f"rope_type = {arch.rope.kind!r} in a {model_type} model"
    if model_type != "llama" and (arch.out_bias or arch.ffn_bias):
        trait = f"attention_bias in a {model_type} model"
    return trait


class _Names:
    """llama.cpp's names of tensors, and the order of rows."""

    def __init__(self, model_type: str, arch: Architecture) -> None:
        import gguf

        kind = {"llama": gguf.MODEL_ARCH.LLAMA, "qwen2": gguf.MODEL_ARCH.QWEN2, "qwen3": gguf.MODEL_ARCH.QWEN3}
        self._names = gguf.get_tensor_name_map(kind[model_type], arch.num_layers)
        self._heads = {QUERY: arch.num_heads, KEY: arch.num_kv_heads} if model_type == "llama" else {}

    def of(self, name: str) -> str:
        """llama.cpp's name of a tensor with this Hugging Face name."""
        gguf_name: str | None = self._names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert gguf_name is not None
        return gguf_name

    def ordered(self, name: str, rows: Tensor) -> Tensor:
        """Return the rows of a tensor of this name (with or without its suffix) in llama.cpp's order: of each head, row
        e is followed by the one with which it is rotated, e + E/2."""
        heads = next((heads for part, heads in self._heads.items() if f".{part}" in name), 0)
        if not heads:
            return rows
        paired = rows.view(heads, 2, len(rows) // heads // 2, -1)
        return paired.transpose(1, 2).reshape(rows.shape)


def write_model(
    path: Path,
    snapshot: Snapshot,
    model_type: str,
    arch: Architecture,
    dtype: torch.dtype,
    form: str,
    describe: Callable[[Any], None] | None = None,
) -> None:
    """Write a snapshot of a whole model in this form, or `forms.HALF`, tensor by tensor. `dtype`: that the engine
    `compact` computes in; weights of another dtype are converted to it first, as there. `describe`: adds the tokens to
    the package's writer; without it they are numbers.

    Raises:
        PeerError: a value is not finite, or the snapshot's bytes can't be read.
        UserError: a value is too large for float16.
    """
    import gguf

    names, writer = _Names(model_type, arch), gguf.GGUFWriter(path, model_type)
    _add_sizes(writer, arch)
    if describe is None:
        writer.add_tokenizer_model("no_vocab")
    else:
        describe(writer)
    shapes = {name: shape for name, shape in arch.tensor_shapes().items() if name in snapshot.tensors}
    if arch.tied and "model.embed_tokens.weight" not in shapes:
        shapes["model.embed_tokens.weight"] = (arch.vocab_size, arch.hidden_size)
    for name, shape in shapes.items():
        kind = forms.format_of(name, form)
        if kind == forms.HALF:
            writer.add_tensor_info(names.of(name), shape, np.dtype("float16"), 2 * math.prod(shape))
        elif kind:
            bytes_shape = (shape[0], shape[1] // forms.BLOCK * forms.BLOCK_BYTES[kind])
            raw = gguf.GGMLQuantizationType[kind.upper()]
            writer.add_tensor_info(names.of(name), bytes_shape, np.dtype("uint8"), bytes_shape[0] * bytes_shape[1], raw)
        else:
            writer.add_tensor_info(names.of(name), shape, np.dtype("float32"), 4 * math.prod(shape))
    frequencies = _frequency_factors(arch.rope, arch.head_dim)
    if frequencies is not None:
        writer.add_tensor_info(FREQUENCIES, tuple(frequencies.shape), np.dtype("float32"), 4 * len(frequencies))
    stored = {name: name if name in snapshot.tensors else "lm_head.weight" for name in shapes}
    read = (names.ordered(name, _read(snapshot, stored[name], shape, dtype, form)) for name, shape in shapes.items())
    _write(writer, chain(read, [] if frequencies is None else [frequencies]))


def _read(snapshot: Snapshot, name: str, shape: tuple[int, ...], dtype: torch.dtype, form: str) -> Tensor:
    """Return the rows of a tensor: blocks of bytes [rows, bytes] if the form rounds it, else float32 or float16."""
    kind = forms.format_of(name, form)
    if kind and kind != forms.HALF:
        pieces = (piece.to(dtype) for _, piece in pieces_of(snapshot, name))
        return torch.cat([forms.encode(piece, kind) for piece in pieces]).view(shape[0], -1)
    whole = torch.empty(shape, dtype=dtype)
    fill(snapshot, name, [whole])
    if not kind:
        return whole.float()
    if not (half := whole.half()).isfinite().all():
        most = whole.view(-1)[whole.abs().argmax()].item()
        raise UserError(f"{name} holds {most:g}, and float16 ends at 65504. Choose the form q8_0.")
    return half


def write_adapter(path: Path, adapter: Mapping[str, LowRank], model_type: str, arch: Architecture) -> None:
    """Write a LoRA adapter, whose B is multiplied by its scale, for a model that `write_model` wrote."""
    import gguf

    names, writer = _Names(model_type, arch), gguf.GGUFWriter(path, model_type)
    writer.add_type("adapter")
    writer.add_string("adapter.type", "lora")
    writer.add_float32("adapter.lora.alpha", 0.0)  # 0: no scale but that in B
    tensors = dict(_pairs(names, adapter))
    for name, tensor in tensors.items():
        writer.add_tensor_info(name, tuple(tensor.shape), np.dtype("float32"), 4 * tensor.numel())
    _write(writer, tensors.values())


def _pairs(names: _Names, adapter: Mapping[str, LowRank]) -> Iterator[tuple[str, Tensor]]:
    for module, low in adapter.items():
        name = names.of(f"{module}.weight")
        yield f"{name}.lora_a", low.a_RI.float().cpu().contiguous()
        yield f"{name}.lora_b", names.ordered(module, low.b_OR.float().cpu().contiguous())


def _add_sizes(writer: Any, arch: Architecture) -> None:
    writer.add_vocab_size(arch.vocab_size)
    writer.add_context_length(arch.max_positions)
    writer.add_embedding_length(arch.hidden_size)
    writer.add_block_count(arch.num_layers)
    writer.add_feed_forward_length(arch.ffn_size)
    writer.add_head_count(arch.num_heads)
    writer.add_head_count_kv(arch.num_kv_heads)
    writer.add_key_length(arch.head_dim)
    writer.add_value_length(arch.head_dim)
    writer.add_rope_dimension_count(arch.head_dim)
    writer.add_rope_freq_base(arch.rope.theta)
    writer.add_layer_norm_rms_eps(arch.rms_eps)


def _write(writer: Any, tensors: Iterable[Tensor]) -> None:
    """Write the file with these tensors, each as it comes, and close it."""
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    try:
        for tensor in tensors:
            writer.write_tensor_data(tensor.numpy())
    finally:
        writer.close()


def _frequency_factors(rope: Rope, head_dim: int) -> Tensor | None:
    """Return by what llama.cpp divides the default frequencies; None: by nothing."""
    if rope.kind == "default":
        return None
    return rope_frequencies(Rope("default", rope.theta), head_dim) / rope_frequencies(rope, head_dim)
