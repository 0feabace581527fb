"""float32 weights with bfloat16 products, and weights in which updates would vanish."""

from __future__ import annotations

import random

import pytest
import torch

from echo2.core.errors import UserError
from echo2.learner.core.model import Policy, computes_in_bfloat16
from echo2.learner.core.optimizer import refuse_vanishing_updates
from echo2.learner.grpo.loop import GrpoClient
from learner_cases import config_of, random_group, tiny_module, tiny_policy


def client_in(dtype: str, **settings: object) -> GrpoClient:
    policy = Policy(tiny_module(hidden=64), {"config.json": b"{}"}, torch.device("cpu"))
    return GrpoClient(policy, config_of(compute_dtype=dtype, **settings))


@pytest.mark.parametrize("layout_seed", [0, 1])
def test_bfloat16_products_leave_weights_and_gradients_in_float32_and_near(layout_seed: int) -> None:
    groups = [random_group(random.Random(layout_seed), number) for number in range(4)]
    found = {}
    for dtype in ("float32", "bfloat16"):
        client = client_in(dtype)
        client.forward_backward(groups)
        grads = {name: parameter.grad for name, parameter in client.policy.trained_parameters().items()}
        assert {grad.dtype for grad in grads.values() if grad is not None} == {torch.float32}
        assert client.policy.dtype == torch.float32
        found[dtype] = torch.cat([grad.flatten() for grad in grads.values() if grad is not None])
    assert not torch.equal(found["float32"], found["bfloat16"])
    assert torch.cosine_similarity(found["float32"], found["bfloat16"], dim=0) > 0.99


def test_auto_is_float32_on_a_cpu() -> None:
    assert not computes_in_bfloat16("auto", torch.device("cpu"))
    assert computes_in_bfloat16("bfloat16", torch.device("cpu"))


def test_a_reference_and_activations_that_are_computed_again_go_together() -> None:
    group = random_group(random.Random(0), 0)
    values = []
    for tokens in (None, 10**12):  # so many tokens fit nowhere: activations are computed again
        settings = {} if tokens is None else {"tokens_per_microbatch": tokens}
        client = client_in("float32", reference_kl=0.1, **settings)
        assert hasattr(client.policy.module.model.layers[0].forward, "func") == (tokens is not None)
        client.forward_backward([group])
        values.append([p.grad.clone() for p in client.policy.trained_parameters().values() if p.grad is not None])
    assert all(torch.equal(*pair) for pair in zip(*values, strict=True))


def test_an_update_that_would_be_rounded_away_is_refused_with_the_way_out() -> None:
    policy = tiny_policy()
    policy.module.to(torch.bfloat16)
    with pytest.raises(UserError, match=r"learner\.lr = 1e-06 would change next to nothing.*float32.*lora\.rank"):
        GrpoClient(policy, config_of(lr=1e-6))
    refuse_vanishing_updates(policy.trained_parameters(), 1e-2)


@pytest.mark.parametrize("weight", [0.02, 0.3, 7.0])
def test_a_refused_update_changes_nothing(weight: float) -> None:
    """At the bound nothing moves; at four times it, which is accepted, everything does."""
    held = torch.full((100,), weight, dtype=torch.bfloat16)
    bound = float(held[0]) * torch.finfo(torch.bfloat16).eps / 4
    with pytest.raises(UserError):
        refuse_vanishing_updates({"it": held}, bound * 0.99)
    refuse_vanishing_updates({"it": held}, bound * 4.01)
    assert torch.equal(held - bound * 0.99, held) or bool((held + bound * 0.99 == held).all())
    assert bool((held + bound * 4.01 != held).all())
