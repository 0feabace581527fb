"""The experts that routers choose are recorded and replayed: in every family, row by row, and across swaps."""

from __future__ import annotations

import random
import threading
from typing import Any

import numpy as np
import pytest
import torch

from echo2.core.errors import UserError
from echo2.core.types import RolloutGroup
from echo2.engines.routing import LIVE, Routing
from echo2.learner.core.model import Policy
from echo2.learner.core.trainer import Trainer
from hub_models import FAMILIES
from mixture_cases import (
    CHOSEN,
    EXPERTS,
    LAYERS,
    SHAPE,
    any_routes,
    data_of,
    dense,
    engine_with,
    leased,
    mixture,
    sampled,
    snapshot,
)
from rollout_cases import hooked, requests, run

MIXTURES = [
    *("qwen3_moe", "qwen3_5_moe_text", "qwen3_next", "gpt_oss", "glm4_moe", "deepseek_v3", "olmoe", "mixtral"),
    *("lfm2_moe", "granitemoehybrid", "nemotron_h"),
]


def family(model_type: str) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **FAMILIES[model_type])).float().eval()


def gradients(module: Any, tokens: torch.Tensor) -> list[torch.Tensor]:
    module.zero_grad()
    module(tokens).logits.square().sum().backward()
    return [parameter.grad.clone() for parameter in module.parameters() if parameter.grad is not None]


@pytest.mark.parametrize("model_type", MIXTURES)
def test_own_routes_give_the_same_gradients_and_others_other_logits(model_type: str) -> None:
    module = family(model_type)
    routing, tokens = Routing(module), torch.randint(2, 70, (2, 5))
    shape, own = routing.shape, gradients(module, tokens)
    with torch.no_grad(), routing.watching() as watched:
        logits = module(tokens).logits
    chosen_NLk = watched.ids_NLk
    assert chosen_NLk.shape == (10, shape.layers, shape.chosen)
    with routing.replaying(chosen_NLk):
        replayed = gradients(module, tokens)
    assert len(own) == len(replayed)
    assert all(torch.equal(one, other) for one, other in zip(own, replayed, strict=True))
    shifted_NLk = (chosen_NLk + 1) % shape.experts
    with torch.no_grad(), routing.replaying(shifted_NLk), routing.watching() as judged:
        others = module(tokens).logits
    assert not torch.allclose(others, logits, atol=1e-2)
    assert float(judged.regret_N.mean()) > 0.3
    shifted_NLk[3:] = LIVE
    with torch.no_grad(), routing.replaying(shifted_NLk):
        partly = module(tokens).logits
    assert torch.allclose(partly[1], logits[1], atol=1e-4)  # the second row chose by itself
    assert not torch.allclose(partly[0], logits[0], atol=1e-2)


def test_a_second_pass_in_another_thread_takes_the_same_experts() -> None:
    """Where autograd computes activations again on a GPU."""
    module, tokens = mixture(), torch.randint(2, 31, (2, 5))
    routing, shape = Routing(module), (10, LAYERS, CHOSEN)
    ids_NLk = torch.tensor(any_routes(random.Random(0), 10).astype(np.int64)).view(shape)
    with routing.replaying(ids_NLk):
        once = gradients(module, tokens)
    Policy(module, {}, torch.device("cpu")).checkpoint_activations()
    module.zero_grad()
    with routing.replaying(ids_NLk):
        loss = module(tokens, use_cache=False).logits.square().sum()  # as the learner; else older versions cache twice
        thread = threading.Thread(target=loss.backward)
        thread.start()
        thread.join()
    again = [parameter.grad for parameter in module.parameters() if parameter.grad is not None]
    assert all(torch.equal(one, other) for one, other in zip(once, again, strict=True))


def test_models_without_such_routers_are_refused_by_name() -> None:
    from transformers import PhimoeConfig, PhimoeForCausalLM

    with pytest.raises(UserError, match="qwen3 is not a mixture of experts"):
        Routing(dense())
    sizes: dict[str, Any] = {"vocab_size": 31, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    other = PhimoeConfig(**sizes, num_key_value_heads=1, intermediate_size=16, num_local_experts=4)
    with pytest.raises(UserError, match="the routers of phimoe do not choose"):
        Routing(PhimoeForCausalLM(other))
    routing = Routing(module := mixture())
    module.model.layers[1].mlp.gate.top_k = 3
    with (
        pytest.raises(UserError, match=f"2 of {LAYERS} routers of qwen3_moe chose 2 of {EXPERTS} experts"),
        routing.watching(),
    ):
        module(torch.tensor([[3, 4]]))


def live_routes(module: Any, tokens: list[int]) -> np.ndarray[Any, Any]:
    """What the routers choose where the whole sequence is read at once."""
    with torch.no_grad(), Routing(module).watching() as watched:
        module(torch.tensor([tokens]))
    return watched.ids_NLk.numpy()


def test_each_row_has_the_routes_of_its_tokens_while_others_join_and_end() -> None:
    """Prompts of several lengths, more requests than slots, rows that end early, and one that did not ask."""
    module = mixture()
    engine = engine_with(snapshot(module))
    asked = [
        one
        for seed in range(5)
        for one in requests(seed, length=2 + seed, samples=2, max_tokens=4 + 7 * seed, routes=seed != 2)
    ]
    for request, completion in zip(asked, run(engine, asked), strict=True):
        if not request.params.routes:
            assert completion.routes == b""
            continue
        tokens = [*request.prompt_tokens, *completion.tokens]
        routes = SHAPE.read(completion.routes)
        assert routes.dtype == np.uint8
        assert np.array_equal(routes, live_routes(module, tokens)[:-1])


def test_a_row_keeps_the_routes_of_the_weights_that_read_each_token_across_a_swap() -> None:
    before, after = mixture(0), mixture(1)
    engine, _ = hooked("transformers", lambda step: None, snapshot(before))
    swapped, _ = hooked(
        "transformers", lambda step: swapped._decoder.load(snapshot(after, 1)) if step == 5 else None, snapshot(before)
    )
    (alone,) = run(engine, requests(3, samples=1, max_tokens=12, routes=True))
    (crossed,) = run(swapped, requests(3, samples=1, max_tokens=12, routes=True))
    assert [version for _, version in crossed.version_spans] == [0, 1]
    border = 5 - 1 + crossed.version_spans[1][0]
    one, other = SHAPE.read(alone.routes), SHAPE.read(crossed.routes)
    assert len(other) == 5 + len(crossed.tokens) - 1
    assert np.array_equal(one[:border], other[:border])
    assert not np.array_equal(one[border : border + 4], other[border : border + 4])


def logprob_errors(module: Any, groups: list[RolloutGroup], with_routes: bool) -> np.ndarray[Any, Any]:
    policy = Policy(module, {"config.json": b"{}"}, torch.device("cpu"))
    policy.computes_in_bfloat16 = True
    if with_routes:
        policy.routing = Routing(module)
    trainer, data = Trainer(10_000), data_of(groups, with_routes)
    trainer.add("policy", policy)
    found = trainer.forward("policy", data)
    errors = [np.array(one) - np.array(datum.behaviour_logprobs) for one, datum in zip(found, data, strict=True)]
    return np.abs(np.concatenate(errors))


def test_replay_takes_the_mismatch_of_a_mixture_in_bfloat16_to_that_of_a_dense_model() -> None:
    """Without it, experts that are nearly equal are flipped: few tokens, far off."""
    leases = [leased(seed, num_samples=6, max_tokens=40) for seed in range(4)]
    module = mixture()
    groups = sampled(engine_with(snapshot(module, is_half=True)), *leases)
    plain = sampled(engine_with(snapshot(dense(), is_half=True)), *leases)
    assert all(group.routes for group in groups)
    assert not any(group.routes for group in plain)
    live, replayed = logprob_errors(module, groups, False), logprob_errors(module, groups, True)
    of_dense = logprob_errors(dense(), plain, False)
    assert live.max() > 0.8
    assert replayed.max() < 0.4
    assert replayed.mean() < 1.5 * of_dense.mean() < live.mean()
