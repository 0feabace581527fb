"""The learner replays the sampler's experts: in every layout, with activation checkpointing, and beside data without.

Of two ranks: `test_learner_ranks.py`.
"""

from __future__ import annotations

import random
from array import array
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from echo2.core.errors import UserError
from echo2.core.types import RolloutGroup
from echo2.engines.routing import LIVE
from echo2.learner.core.adapters import check_trained
from echo2.learner.core.batch import collate
from echo2.learner.core.datum import Datum
from echo2.learner.core.model import Policy
from echo2.learner.grpo.loop import GrpoClient
from echo2.learner.grpo.step_meter import StepMeter
from echo2.transport.routes import packed
from learner_cases import config_of, gradients
from mixture_cases import LAYERS, SHAPE, any_routes, dense, groups_of, mixture

OPTIONS = config_of(routing_replay=True, tokens_per_microbatch=60, lr=1e-3)


def client_of(layout: Any = "auto", module: Any = None, **changes: Any) -> GrpoClient:
    policy = Policy(module or mixture(), {"config.json": b"{}"}, torch.device("cpu"))
    return GrpoClient(policy, config_of(OPTIONS, **changes), layout)


def gradient_of(client: GrpoClient, groups: list[RolloutGroup]) -> torch.Tensor:
    client.forward_backward(groups)
    return gradients(client)


def test_every_layout_has_the_gradient_of_the_given_experts() -> None:
    groups = groups_of()
    shared = gradient_of(client_of("shared", tokens_per_microbatch=500), groups)
    plain = gradient_of(client_of("plain"), groups)
    assert torch.allclose(shared, plain, rtol=1e-3, atol=1e-4)
    one_by_one = client_of("plain", tokens_per_microbatch=1)
    assert torch.allclose(gradient_of(one_by_one, groups), plain, rtol=1e-3, atol=1e-4)
    live = gradient_of(client_of(), groups_of(with_routes=False))
    assert not torch.allclose(live, plain, rtol=1e-2, atol=1e-2)
    ignored = gradient_of(client_of(routing_replay=False), groups)
    assert torch.equal(ignored, live)


@pytest.mark.parametrize("layout", ["shared", "plain"])
def test_own_routes_change_no_bit_and_a_second_pass_takes_the_same_experts(layout: Any) -> None:
    client, groups = client_of(layout), groups_of(with_routes=False)
    assert client.policy.routing is not None
    others, live = groups_of(), gradient_of(client, groups)
    own = []
    for group in groups:
        routes = []
        for rollout in group.rollouts:
            tokens = torch.tensor([[*group.prompt_tokens, *rollout.tokens][:-1]])
            with torch.no_grad(), client.policy.routing.watching() as watched:
                client.policy.module(tokens)
            routes.append(watched.ids_NLk.numpy().astype("u1").tobytes())
        pairs = zip(group.rollouts, routes, strict=True)
        own.append(packed(replace(group, rollouts=tuple(replace(one, routes=ids) for one, ids in pairs))))
    assert torch.equal(gradient_of(client_of(layout), own), live)
    again = client_of(layout)
    assert again.policy.checkpoint_activations()
    assert torch.equal(gradient_of(again, others), gradient_of(client_of(layout), others))


def test_data_without_routes_choose_by_themselves_beside_others() -> None:
    """In one row of packed strips, too; padding has no routes."""
    rng = random.Random(3)
    prompt, others = array("i", [3, 4, 5]), array("i", [6, 7])

    def datum(of: array[int], *tokens: int, with_routes: bool = True) -> Datum:
        routes = any_routes(rng, len(of) + len(tokens) - 1) if with_routes else None
        return Datum(of, array("i", tokens), b"\x01" * len(tokens), routes=routes)

    data = [datum(prompt, 8, 9, 10), datum(prompt, 8, 9, 11, 12), datum(others, 8, 9, with_routes=False)]
    for layout in ("shared", "plain"):
        batch = collate(data, layout, 1e-9)  # type: ignore[arg-type]
        assert batch.routes_BTLk is not None
        routes_BTLk = batch.routes_BTLk
        assert routes_BTLk.shape == (*batch.tokens_BT.shape, LAYERS, 2)
        for ids_TLk, tokens in zip(routes_BTLk, batch.tokens_BT.tolist(), strict=True):
            own = [token for token, ids_Lk in zip(tokens, ids_TLk, strict=True) if bool((ids_Lk == LIVE).all())]
            assert own == [token for at, token in enumerate(tokens) if token in (0, 6, 7) or tokens[at - 1] == 7]
    assert collate(data[2:], "plain", 0.0).routes_BTLk is None


def test_the_reference_and_its_penalty_do_not_see_the_routes() -> None:
    client, seen = client_of(reference_kl=0.1), list[Datum]()
    forward = client.trainer.forward

    def watched(name: str, data: list[Datum], *rest: Any) -> Any:
        seen.extend(data)
        return forward(name, data, *rest)

    client.trainer.forward = watched  # type: ignore[method-assign, assignment]
    client.forward_backward(groups_of())
    assert seen
    assert all(datum.routes is None for datum in seen)


def test_step_metrics_have_the_share_of_replayed_rollouts() -> None:
    meter = StepMeter(0, OPTIONS)
    with_routes, without = groups_of()[0], groups_of(with_routes=False)[1]
    for group in (with_routes, without):
        meter.see(replace(group, step=0))
    found = meter.rollout_metrics()
    assert found["routes/replayed_share"] == 0.5
    num_read = sum(len(with_routes.prompt_tokens) + len(one.tokens) - 1 for one in with_routes.rollouts)
    assert found["routes/bytes_per_token"] == len(with_routes.routes) / num_read
    assert "routes/replayed_share" not in StepMeter(0, config_of()).rollout_metrics()


def test_a_dense_model_is_refused_before_a_run_begins(tmp_path: Path) -> None:
    for name, module in (("dense", dense()), ("mixture", mixture())):
        module.save_pretrained(tmp_path / name)
    config = replace(OPTIONS, model=replace(OPTIONS.model, path=str(tmp_path / "mixture")))
    assert check_trained(config) == SHAPE
    with pytest.raises(UserError, match="qwen3 is not a mixture of experts"):
        check_trained(replace(config, model=replace(config.model, path=str(tmp_path / "dense"))))
    with pytest.raises(UserError, match="qwen3 is not a mixture of experts"):
        client_of(module=dense())
    with pytest.raises(UserError, match="compact"):
        replace(OPTIONS, workers=replace(OPTIONS.workers, engine="compact"))
    with pytest.raises(UserError, match="a log does not say"):
        replace(OPTIONS, tasks=replace(OPTIONS.tasks, source="logs:x"))
