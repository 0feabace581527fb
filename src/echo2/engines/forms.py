"""Forms of weights: a snapshot rounded to fewer bits. A form is a function of the snapshot alone.

So forms are neither published nor sent: a worker derives it from the snapshot, and so does the machine that checks the
worker, which then computes with the same numbers. That holds because only single operations of IEEE arithmetic are used
(no sums, whose order may differ). What samples is the rounded policy, and its logprobs are its own.

Matrices are rounded in blocks of items along a row, in formats of llama.cpp (`ggml-quants.c`) and MLX (`quantize`):

    q8_0    item = d q      d = max |x| / 127, q a whole number in -127..127
    q4_0    item = d (q-8)  d = (the x of largest size) / -8, q a whole number in 0..15
    mlx-q8  item = d q + e  e = the x of largest size, or 0; d = about (min - max) / 255, positive if e < 0; q in 0..255
    mlx-q4  item = d q + e  the same with 15 in place of 255

A block has 32 items, and d in 16 bits; MLX's d and e have the dtype of the weights. Forms of 4 bits keep the embedding
and the output layer in 8. Norms, biases and adapters stay as they are.

MLX's blocks are those of its `quantize` on a CPU. On a GPU that function finds another maximum where all items are
negative, and rounds halves otherwise; so the engine `mlx` uses this one everywhere.

Shape suffixes: N = blocks, I = items of a block.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

BLOCK = 32
#: Bytes of a block of llama.cpp: d in 16 bits, then the q.
BLOCK_BYTES = {"q8_0": 2 + BLOCK, "q4_0": 2 + BLOCK // 2}
#: Bits of q in a format of MLX.
AFFINE_BITS = {"mlx-q8": 8, "mlx-q4": 4}
#: The form of files alone (`gguf_file.py`) in which matrices are not rounded in blocks, but to float16.
HALF = "f16"
#: The format of the embedding and the output layer in a form.
OF_TOKENS = {"q8_0": "q8_0", "q4_0": "q8_0", HALF: HALF, "mlx-q8": "mlx-q8", "mlx-q4": "mlx-q8"}
#: Items that are rounded at once: intermediate results stay in a processor's cache.
PIECE_ITEMS = 1 << 16


def format_of(name: str, form: str) -> str:
    """Return the format of a tensor (Hugging Face name) in this form; empty: it is not rounded."""
    if name.endswith("_proj.weight"):
        return form
    return OF_TOKENS[form] if name in ("model.embed_tokens.weight", "lm_head.weight") else ""


def misfit(shapes: Mapping[str, tuple[int, ...]], form: str) -> str:
    """Return why a model whose tensors have these shapes has no such form; empty: it has."""
    for name, shape in shapes.items():
        if format_of(name, form) not in ("", HALF) and shape[1] % BLOCK:
            return f"rows of {shape[1]} items in {name}, which is not a multiple of {BLOCK}"
    return ""


def encode(values: Tensor, kind: str) -> Tensor:
    """Return the blocks of a format [N, `BLOCK_BYTES`], uint8. `values`: N * 32 floats, in any shape."""
    return torch.cat([_encode(piece.view(-1, BLOCK).float(), kind) for piece in _pieces(values)])


def _encode(x_NI: Tensor, kind: str) -> Tensor:
    if kind == "q8_0":
        step_N1 = x_NI.abs().amax(1, True) / 127
        scaled_NI = x_NI * _inverse(step_N1)
        q_NI = torch.trunc(scaled_NI + torch.copysign(torch.full_like(scaled_NI, 0.5), scaled_NI))
        q_NI = q_NI.clamp(-127, 127).to(torch.int8).view(torch.uint8)
    else:
        low_N1, high_N1 = x_NI.amin(1, True), x_NI.amax(1, True)
        # Of a block of zeros, the smallest may be -0 or 0, as the processor likes it; + 0.0 makes both 0.
        step_N1 = torch.where(-low_N1 > high_N1, low_N1, high_N1) / -8 + 0.0
        # In float64 the product is exact, so a processor that fuses it with the sum gives the same.
        q_NI = (x_NI.double() * _inverse(step_N1).double() + 8.5).trunc().clamp(0, 15).to(torch.uint8)
        q_NI = q_NI[:, : BLOCK // 2] | (q_NI[:, BLOCK // 2 :] << 4)
    return torch.cat((step_N1.half().view(torch.uint8), q_NI), dim=1)


def _inverse(step_N1: Tensor) -> Tensor:
    """1 / step; 0 for blocks of zeros, and for those so small that it would be infinite."""
    inverse_N1 = 1.0 / step_N1
    return inverse_N1.masked_fill(~inverse_N1.isfinite(), 0.0)


def decode(blocks: Tensor, kind: str) -> Tensor:
    """Return the N * 32 values of these blocks [N, 32], float32."""
    step_N1 = blocks[:, :2].contiguous().view(torch.float16).float()
    if kind == "q8_0":
        return blocks[:, 2:].contiguous().view(torch.int8).float() * step_N1
    q_NI = torch.cat((blocks[:, 2:] & 15, blocks[:, 2:] >> 4), dim=1)
    return (q_NI.float() - 8.0) * step_N1


def affine(values: Tensor, kind: str) -> tuple[Tensor, Tensor, Tensor]:
    """Return q [N, 32], uint8, and d and e [N, 1], in the dtype of the values, of a format of MLX. `values`: N * 32
    floats, in any shape."""
    q, d, e = zip(*(_affine(piece.view(-1, BLOCK), AFFINE_BITS[kind]) for piece in _pieces(values)), strict=True)
    return torch.cat(q), torch.cat(d), torch.cat(e)


def _affine(values_NI: Tensor, bits: int) -> tuple[Tensor, Tensor, Tensor]:
    x_NI, most = values_NI.float(), (1 << bits) - 1
    low_N1, high_N1 = x_NI.amin(1, True), x_NI.amax(1, True)
    is_low_N1 = low_N1.abs() > high_N1.abs()
    step_N1 = ((high_N1 - low_N1) / most).clamp(min=1e-7)
    step_N1 = torch.where(is_low_N1, step_N1, -step_N1)
    edge_N1 = torch.where(is_low_N1, low_N1, high_N1)
    steps_N1 = (edge_N1 / step_N1).round()  # halves to even; the same below
    is_zero_N1 = steps_N1 == 0
    step_N1 = torch.where(is_zero_N1, step_N1, edge_N1 / steps_N1)
    edge_N1 = edge_N1.masked_fill(is_zero_N1, 0.0)
    q_NI = ((x_NI - edge_N1) / step_N1).round().clamp(0, most).to(torch.uint8)
    return q_NI, step_N1.to(values_NI.dtype), edge_N1.to(values_NI.dtype)


def packed(q_NI: Tensor, kind: str) -> Tensor:
    """Return the bytes in which MLX stores q [N, 32]: with 4 bits, an item of even place has the lower half."""
    return q_NI if AFFINE_BITS[kind] == 8 else q_NI[:, ::2] | (q_NI[:, 1::2] << 4)


def rounded(weight: Tensor, kind: str) -> Tensor:
    """Return the values of a matrix in a format, float32."""
    values = torch.empty(weight.shape, dtype=torch.float32, device=weight.device)
    for into, piece in zip(_pieces(values), _pieces(weight), strict=True):
        into.copy_(_rounded(piece, kind).view(-1))
    return values


def _rounded(piece: Tensor, kind: str) -> Tensor:
    if kind not in AFFINE_BITS:
        return decode(_encode(piece.view(-1, BLOCK).float(), kind), kind)
    q_NI, step_N1, edge_N1 = _affine(piece.view(-1, BLOCK), AFFINE_BITS[kind])
    return q_NI.float() * step_N1.float() + edge_N1.float()


def _pieces(values: Tensor) -> tuple[Tensor, ...]:
    pieces: tuple[Tensor, ...] = values.contiguous().view(-1).split(PIECE_ITEMS)
    return pieces
