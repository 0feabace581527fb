"""Forms of weights: a snapshot rounded to fewer bits. A form is a function of the snapshot alone.

So nobody publishes or sends a form: a worker derives it from the snapshot, and so does the machine that checks the
worker, which then computes with the same numbers. That holds because only single operations of IEEE arithmetic are used
(no sums, whose order may differ). What samples is the rounded policy, and its logprobs are its own.

Matrices are rounded in blocks of 32 items along a row, in the formats Q8_0 and Q4_0 of llama.cpp (`ggml-quants.c`):

    q8_0    item = d q      d = max |x| / 127, q a whole number in -127..127
    q4_0    item = d (q-8)  d = (the x of largest size) / -8, q a whole number in 0..15

d is stored in 16 bits. q4_0 keeps the embedding and the output layer in q8_0. Norms, biases and adapters stay as they
are.

Shape suffixes: N = blocks, I = items of a block.
"""

from __future__ import annotations

import torch
from torch import Tensor

BLOCK = 32
#: Bytes of a block: d in 16 bits, then the q.
BLOCK_BYTES = {"q8_0": 2 + BLOCK, "q4_0": 2 + BLOCK // 2}
#: Items that are rounded at once: intermediate results stay in a processor's cache.
PIECE_ITEMS = 1 << 16


def format_of(name: str, form: str) -> str:
    """Return the format of a tensor (Hugging Face name) in this form; empty: it is not rounded."""
    if name.endswith("_proj.weight"):
        return form
    return "q8_0" if name in ("model.embed_tokens.weight", "lm_head.weight") else ""


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
    """Return the N * 32 values that these blocks stand for [N, 32], float32."""
    step_N1 = blocks[:, :2].contiguous().view(torch.float16).float()
    if kind == "q8_0":
        return blocks[:, 2:].contiguous().view(torch.int8).float() * step_N1
    q_NI = torch.cat((blocks[:, 2:] & 15, blocks[:, 2:] >> 4), dim=1)
    return (q_NI.float() - 8.0) * step_N1


def rounded(weight: Tensor, kind: str) -> Tensor:
    """Return what a matrix stands for in a format, float32."""
    found = torch.empty(weight.shape, dtype=torch.float32, device=weight.device)
    for into, piece in zip(_pieces(found), _pieces(weight), strict=True):
        into.copy_(decode(_encode(piece.view(-1, BLOCK).float(), kind), kind).view(-1))
    return found


def _pieces(values: Tensor) -> tuple[Tensor, ...]:
    pieces: tuple[Tensor, ...] = values.contiguous().view(-1).split(PIECE_ITEMS)
    return pieces
