"""Experts compute in autocast's dtype, and learn in their own."""

from __future__ import annotations

import copy
import random
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from echo2.learner.core.experts import follow_autocast
from echo2.learner.core.model import Policy
from echo2.learner.core.trainer import Trainer
from learner_cases import VOCAB, data_of, random_group


class Stacked(nn.Module):
    """A product that autocast does not know, as a grouped one is none: it adds up by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2, 3, 3))
        self.seen: list[torch.dtype] = []

    def forward(self, x_D: Tensor) -> Tensor:
        self.seen.append(self.weight.dtype)
        return (self.weight * x_D.to(self.weight.dtype)).sum()


def test_stacked_weights_are_converted_where_autocast_is_on() -> None:
    module = Stacked()
    follow_autocast(module)
    again = copy.deepcopy(module)
    with torch.no_grad():
        again.weight.mul_(2.0)
    assert [one(torch.ones(3)).item() for one in (module, again)] == [18.0, 36.0]
    with torch.autocast("cpu", torch.bfloat16):
        module(torch.ones(3)).backward()
        assert again(torch.ones(3)).item() == 36.0
    assert module.seen == again.seen == [torch.float32, torch.bfloat16]
    assert module.weight.dtype == torch.float32
    assert module.weight.grad is not None
    assert module.weight.grad.dtype == torch.float32


@pytest.mark.parametrize("checkpointing", [False, True])
def test_a_mixture_in_bfloat16_has_nearly_the_gradients_of_float32(checkpointing: bool) -> None:
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    found = []
    for in_bfloat16 in (False, True):
        torch.manual_seed(0)
        sizes: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 32, "moe_intermediate_size": 16}
        heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8, "num_hidden_layers": 2}
        experts = {"num_experts": 4, "num_experts_per_tok": 4}  # all of them: rounding changes no choice
        module: Any = Qwen3MoeForCausalLM(Qwen3MoeConfig(vocab_size=VOCAB, **sizes, **heads, **experts))
        policy = Policy(module, {}, torch.device("cpu"))
        policy.computes_in_bfloat16 = in_bfloat16
        if checkpointing:
            assert policy.checkpoint_activations()
        trainer = Trainer(1000)
        trainer.add("it", policy)
        rng = random.Random(0)
        trainer.forward_backward("it", data_of(random_group(rng, 0)), lambda logp_n, tokens: (-logp_n, None))
        found.append(torch.cat([p.grad.flatten() for n, p in module.named_parameters() if ".experts." in n]))
    assert torch.cosine_similarity(*found, dim=0) > 0.99
    assert not torch.equal(*found)


def test_policies_over_one_module_wrap_it_once() -> None:
    """Adapters of tenants come and go over one module: each wrapping more would end in a RecursionError."""
    module = nn.Module()
    module.stacked = nn.Parameter(torch.zeros(2, 3, 4))
    follow_autocast(module)
    once = vars(module)["forward"]
    for _ in range(3):
        follow_autocast(module)
    assert vars(module)["forward"] is once
