"""Linear layers with weights of 4 bits: nf4 of QLoRA (arXiv 2305.14314), in blocks of 64 with one float32 each, 4.5
bits a weight.

Such a layer computes with the values of its code, rounded to bfloat16, in the precision in which a whole bfloat16 model
would. So to everybody else it is a model in bfloat16 that has these values: workers receive them, and an adapter is
merged into them. A weight that was one of these values keeps it when it is quantised again.

Quantising is IEEE arithmetic in torch, with the same result on every device; kernels of bitsandbytes decode, in each
pass again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

#: Weights that share a factor.
BLOCK = 64
#: Weights that are quantised at a time.
PIECE = BLOCK << 18
#: Ends of the names of layers that choose experts. A weight of 16 bits may send a token to another one already.
ROUTERS = frozenset({"gate", "router", "shared_expert_gate"})


def codes() -> Tensor:
    """Return the 16 values [16] of nf4, ascending, from -1 to 1."""
    from bitsandbytes.functional import get_4bit_type

    values: Tensor = get_4bit_type("nf4", device="cpu")
    return values


class Nf4Linear(nn.Linear):
    """A frozen linear layer with its weight in 4 bits. `weight` decodes it, in bfloat16."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        nn.Module.__init__(self)
        self.out_features, self.in_features = weight.shape
        self.register_parameter("bias", None if bias is None else nn.Parameter(bias, requires_grad=False))
        self.packed, self.factors = packed_in_4_bits(weight)

    @property
    def weight(self) -> Tensor:  # type: ignore[override]  # in nn.Linear a parameter
        """The weight [out_features, in_features] that the layer computes with."""
        from bitsandbytes.functional import QuantState, dequantize_4bit

        blocks = torch.Size((len(self.factors), BLOCK))  # its kernel for CPUs errs in shorter rows
        code = QuantState(self.factors, blocks, blocksize=BLOCK, quant_type="nf4", dtype=torch.bfloat16)
        values: Tensor = dequantize_4bit(self.packed, code)
        return values.view(self.out_features, self.in_features)

    def forward(self, x: Tensor) -> Tensor:
        if torch.is_autocast_enabled(x.device.type):
            x = x.to(torch.get_autocast_dtype(x.device.type))
        bias: Tensor | None = self.bias
        apply: Any = _Product.apply
        product: Tensor = apply(x, self, bias if bias is None else bias.to(x.dtype))
        return product


class _Product(torch.autograd.Function):
    """The product with a decoded weight, which is not kept for the backward pass but decoded again."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: Nf4Linear, bias: Tensor | None) -> Tensor:
        ctx.layer = layer
        return nn.functional.linear(x, layer.weight.to(x.dtype), bias)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (grad,) = grads
        return grad @ ctx.layer.weight.to(grad.dtype), None, None


def packed_in_4_bits(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return a weight as codes, two in a byte [n / 2, 1], the first in the higher bits; and the factor [n / 64] of each
    block, its largest magnitude."""
    values = codes()
    borders = ((values[1:] + values[:-1]) / 2).to(weight.device)
    flat, bytes_, factors = weight.detach().reshape(-1), list[Tensor](), list[Tensor]()
    for start in range(0, flat.numel(), PIECE):
        blocks = flat[start : start + PIECE].to(torch.bfloat16).float().view(-1, BLOCK)
        factor = blocks.abs().amax(1, keepdim=True)
        code = torch.bucketize(blocks / factor.clamp(min=torch.finfo(torch.float32).tiny), borders, out_int32=True)
        code = code.to(torch.uint8).view(-1, 2)
        bytes_.append(code[:, 0] << 4 | code[:, 1])
        factors.append(factor[:, 0])
    return torch.cat(bytes_)[:, None], torch.cat(factors)


def num_weights(module: nn.Module) -> int:
    """Return the number of weights of a module, those in 4 bits included."""
    packed = sum(2 * layer.packed.numel() for layer in layers_in_4_bits(module).values())
    return packed + sum(parameter.numel() for parameter in module.parameters())


def layers_for_4_bits(module: Any) -> list[str]:
    """Return the names of the linear layers of a model that are to be held in 4 bits: all but its output, routers, and
    those that blocks do not fill."""
    return [
        name
        for name, part in module.named_modules()
        if isinstance(part, nn.Linear)
        and part is not module.get_output_embeddings()
        and name.rpartition(".")[2] not in ROUTERS
        and part.in_features * part.out_features % BLOCK == 0
    ]


def quantise(module: Any, fill: Callable[[nn.Module], None] | None = None) -> None:
    """Replace the linear layers of a model by layers in 4 bits, one after the other. `fill` reads a layer's weights."""
    for name in layers_for_4_bits(module):
        layer = module.get_submodule(name)
        if fill is not None:
            fill(layer)
        module.set_submodule(name, Nf4Linear(layer.weight, layer.bias))


def layers_in_4_bits(module: nn.Module) -> dict[str, Nf4Linear]:
    """Return the layers of a module that are held in 4 bits, by name."""
    return {name: part for name, part in module.named_modules() if isinstance(part, Nf4Linear)}


def round_to_nf4(module: Any) -> None:
    """Replace the weights of the linear layers that 4 bits would hold by the values that they would then have."""
    names = set(layers_for_4_bits(module))
    with torch.no_grad():
        for name, layer in module.named_modules():
            if name in names:
                layer.weight.copy_(Nf4Linear(layer.weight, None).weight)
