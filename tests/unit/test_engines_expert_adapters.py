"""Adapters of experts: their products and gradients are those of merged weights."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from echo2.engines.adapter import LowRank, adapt, stacked, stacked_maps
from hub_models import FAMILIES

#: Gate and upper values one behind the other; transposed, with biases and mixed; no gate.
KINDS = ("qwen3_moe", "gpt_oss", "nemotron_h")
RANK, SCALE = 3, 0.5


def experts_of(family: str) -> Any:
    """The first experts' module of a model of this family, and the family's own plain loop over experts in it."""
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(family, **FAMILIES[family], experts_implementation="grouped_mm")
    model = transformers.AutoModelForCausalLM.from_config(config)
    part: Any = next(part for part in model.modules() if stacked_maps(part)).eval()
    for parameter in part.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return part.requires_grad_(False)


def routed(num_tokens: int = 9) -> tuple[Tensor, Tensor, Tensor]:
    """Hidden states, the experts of each token (the last expert has none), and their scores."""
    return torch.randn(num_tokens, 32), torch.rand(num_tokens, 3).argsort(-1)[:, :2], torch.rand(num_tokens, 2)


def factors(part: Any) -> list[tuple[Tensor, Tensor]]:
    return [
        (torch.randn(one.num_experts * RANK, one.inputs), torch.randn(one.outputs, RANK * one.num_experts) * 0.1)
        for one in stacked_maps(part)
    ]


def merged(part: Any, pairs: list[tuple[Tensor, Tensor]]) -> Any:
    """The module with W + B A in place of W, as PEFT merges factors of experts."""
    whole = copy.deepcopy(part)
    for one, (a, b) in zip(stacked_maps(part), pairs, strict=True):
        a_ERI, b_ORE = a.view(one.num_experts, RANK, -1), b.view(one.outputs, RANK, one.num_experts)
        change = torch.einsum("ore,eri->eio" if part.is_transposed else "ore,eri->eoi", b_ORE, a_ERI) * SCALE
        weight = getattr(whole, one.parameter)
        del whole._parameters[one.parameter]
        setattr(whole, one.parameter, (weight + change).to(weight.dtype))
    return whole


@pytest.mark.parametrize("family", KINDS)
def test_products_and_gradients_are_those_of_merged_weights(family: str) -> None:
    part = experts_of(family)
    hidden, ids, scores = routed()
    pairs = factors(part)
    found = []
    for is_merged in (True, False):
        given = (hidden, scores, *itertools.chain(*pairs))
        leaves = [tensor.clone().requires_grad_() for tensor in given]
        own = list(zip(leaves[2::2], leaves[3::2], strict=True))
        module = merged(part, own) if is_merged else copy.deepcopy(part)
        if not is_merged:
            up, down = (stacked(a, b * SCALE, part.num_experts) for a, b in own)
            adapt(module, lambda up=up, down=down: (up, down))
        result = module(leaves[0], ids, leaves[1])
        (result * torch.arange(32.0)).sum().backward()
        found.append([result, *(leaf.grad for leaf in leaves)])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("family", KINDS)
def test_without_an_adapter_the_module_computes_as_before_to_the_bit(family: str) -> None:
    part, given = experts_of(family), routed()
    before = part(*given)
    applied: list[LowRank | None] = [None, None]
    adapt(part, lambda: (applied[0], applied[1]))
    assert torch.equal(part(*given), before)
    applied[:] = [stacked(a, torch.zeros_like(b), part.num_experts) for a, b in factors(part)]
    assert torch.equal(part(*given), before)
