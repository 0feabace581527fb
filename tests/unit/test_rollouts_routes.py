"""A check reads a group along the routes that its worker tells, and finds those that its weights do not choose."""

from __future__ import annotations

import asyncio
import itertools
from array import array
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from echo2.core.types import Assignment, Rollout, RolloutGroup
from echo2.engines.engine import stream_keys, uniforms
from echo2.engines.routing import LIVE, Routing
from echo2.rollouts.verification import Verdict, check_group
from echo2.transport.routes import Routes, packed, unpacked
from mixture_cases import CHOSEN, EXPERTS, LAYERS, SHAPE, engine_with, leased, mixture, sampled, snapshot
from rollout_cases import VOCAB
from test_engines_replay import Beside, Talking, library, swapping, talk
from test_engines_replay import sampled as sampled_by

#: Tokens that a liar favours.
TARGETS = range(2, 10)


def judged(engine: Any, assignment: Assignment, group: RolloutGroup) -> Verdict:
    return asyncio.run(check_group(engine, engine.installed, assignment, group))


def changed(group: RolloutGroup, change: Callable[[Routes], None]) -> RolloutGroup:
    rollouts = []
    for rollout in unpacked(group).rollouts:
        ids = SHAPE.read(rollout.routes).copy()
        change(ids)
        rollouts.append(replace(rollout, routes=ids.tobytes()))
    return packed(replace(group, rollouts=tuple(rollouts), routes=b""))


def at_random(ids: Routes) -> None:
    rng = np.random.default_rng(0)
    ids[:] = rng.permuted(np.tile(np.arange(EXPERTS, dtype=np.uint8), (*ids.shape[:2], 1)), axis=-1)[..., :CHOSEN]


def one_token(ids: Routes) -> None:
    ids[-4] = (ids[-4] + 3) % EXPERTS


def one_layer(ids: Routes) -> None:
    ids[:, 1] = (ids[:, 1] + 3) % EXPERTS


@pytest.mark.parametrize("is_half", [False, True])
def test_honest_groups_pass_and_made_up_routes_do_not(is_half: bool) -> None:
    """In 16 bits an honest group is far off where the checker chooses by itself."""
    engine = engine_with(snapshot(mixture(), is_half=is_half))
    leases = [leased(seed, num_samples=6, max_tokens=40) for seed in range(4)]
    groups, found, live = sampled(engine, *leases), [], []
    for assignment, group in zip(leases, groups, strict=True):
        verdict = judged(engine, assignment, group)
        assert (verdict.fault, verdict.num_skipped) == ("", 0)
        assert verdict.worst_regret < 0.1
        found.append(verdict.worst_logprob)
        live.append(judged(engine, assignment, replace(group, routes=b"")).worst_logprob)
        for lie in (at_random, one_token, one_layer):
            assert "its experts are not those" in judged(engine, assignment, changed(group, lie)).fault
    assert not is_half or max(live) > 3 * max(found)


def steered(module: Any, assignment: Assignment, sample: int) -> Rollout:
    """Exactly drawn by the head's random numbers, along routes that make some tokens likely."""
    seed, count = assignment.lease.seed, assignment.params.max_tokens
    numbers = uniforms(np.repeat(stream_keys([seed], [sample]), count), np.arange(count, dtype=np.int64))
    pairs = list(itertools.combinations(range(EXPERTS), CHOSEN))
    routing, tokens, logprobs = Routing(module), assignment.prompt_tokens[:], array("f")
    routes = torch.full((len(tokens) - 1, LAYERS, CHOSEN), LIVE)
    for number in numbers:
        tries = torch.full((len(pairs), 1, LAYERS, CHOSEN), LIVE)
        tries[:, 0] = torch.tensor(pairs)[:, None]
        whole = torch.cat((routes.expand(len(pairs), *routes.shape), tries), dim=1)
        with torch.no_grad(), routing.replaying(whole.flatten(0, 1)):
            logits = module(torch.tensor([list(tokens)] * len(pairs))).logits[:, -1]
        best = int(logits.softmax(-1)[:, TARGETS].sum(-1).argmax())
        routes, logp = whole[best], logits[best].log_softmax(-1)
        token = int((logp.exp().double().cumsum(0) <= number).sum().clamp(max=VOCAB - 1))
        tokens.append(token)
        logprobs.append(float(logp[token]))
    with torch.no_grad(), routing.replaying(routes), routing.watching() as watched:
        module(torch.tensor([list(tokens[:-1])]))
    ids = torch.where(routes == LIVE, watched.ids_NLk, routes)
    drawn = tokens[len(assignment.prompt_tokens) :]
    told = ids.numpy().astype(np.uint8).tobytes()
    return Rollout(drawn, logprobs, b"\x01" * count, ((0, 0),), "length", routes=told)


def test_tokens_sampled_exactly_along_biased_routes_are_detected() -> None:
    module = mixture()
    engine, asked = engine_with(snapshot(module)), leased(0, num_samples=4, max_tokens=8)
    (honest,) = sampled(engine, asked)
    lie = replace(honest, rollouts=tuple(steered(mixture(), asked, at) for at in range(4)), routes=b"")
    told, expected = ([token for one in group.rollouts for token in one.tokens] for group in (lie, honest))
    assert sum(token in TARGETS for token in told) > 1.3 * sum(token in TARGETS for token in expected)
    verdict = judged(engine, asked, packed(lie))
    assert "its experts are not those" in verdict.fault
    assert (verdict.worst_interval, verdict.worst_logprob) == pytest.approx((0.0, 0.0), abs=1e-3)


def test_routes_are_those_of_the_weights_that_read_a_token_first() -> None:
    """Within turns and between them: a later turn is read again by other weights, which choose again."""
    versions = [snapshot(mixture(number), number) for number in range(3)]
    asked = replace(talk(0), params=replace(talk(0).params, routes=True))
    checker = library("transformers", *versions)
    for every in (3, 7):
        sampler = swapping("transformers", {every: versions[1], 3 * every: versions[2]}, versions[0], slots=3)
        (group,) = sampled_by(sampler, asked, environments={"talking": Beside(Talking())})
        assert max(len(one.version_spans) for one in group.rollouts) > 1
        assert group.routes
        verdict = judged(checker, asked, group)
        assert (verdict.fault, verdict.num_skipped) == ("", 0)
        assert judged(checker, asked, changed(group, one_layer)).fault
