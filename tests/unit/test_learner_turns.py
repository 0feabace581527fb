"""What an environment wrote is read and not trained on: no gradient, no share of a divisor, no lag, no mismatch."""

from __future__ import annotations

import dataclasses
import random
from array import array

import pytest
import torch

from echo2.core.types import Rollout, RolloutGroup
from echo2.learner.core.losses import LOSSES
from echo2.learner.grpo.loop import GrpoClient
from learner_cases import config_of, gradients, group, tiny_policy

TURNS = 3


def played(rng: random.Random, reward: float) -> Rollout:
    """A rollout as `rollouts/turns.py` makes it: turns of the policy's, and between them words of the environment."""
    tokens, mask, spans = [], b"", []
    for turn in range(TURNS):
        spans.append((len(tokens), turn))
        mine, theirs = rng.randint(1, 3), rng.randint(1, 4) if turn < TURNS - 1 else 0
        tokens += [rng.randrange(13) for _ in range(mine + theirs)]
        mask += b"\x01" * mine + b"\x00" * theirs
    logprobs = array("f", [rng.uniform(-4.0, -0.1) * bit for bit in mask])
    return Rollout(array("i", tokens), logprobs, mask, tuple(spans), "stop", "", reward)


def games(seed: int) -> list[RolloutGroup]:
    rng = random.Random(seed)
    return [group(n, [1, 2, 3], [played(rng, float(k)) for k in range(3)]) for n in range(2)]


def altered(made: RolloutGroup) -> RolloutGroup:
    """The same rollouts, other numbers where the environment wrote: logprobs, and versions that begin there."""

    def other(r: Rollout) -> Rollout:
        logprobs = array("f", [lp if bit else -3.0 for lp, bit in zip(r.logprobs, r.loss_mask, strict=True)])
        silent = [at for at, bit in enumerate(r.loss_mask) if not bit]
        spans = []
        for start, version in r.version_spans:
            spans.append((start, version))
            behind = [at for at in silent if at > start]
            if behind and version < TURNS - 1:
                spans.append((behind[0], 9))
        return dataclasses.replace(r, logprobs=logprobs, version_spans=tuple(spans))

    return dataclasses.replace(made, rollouts=tuple(other(r) for r in made.rollouts))


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("normalisation", ["token", "sequence"])
def test_logprobs_of_environment_tokens_have_no_effect(loss: str, normalisation: str) -> None:
    found = []
    for batch in (games(4), [altered(made) for made in games(4)]):
        options = config_of(loss=loss, normalisation=normalisation, reference_kl=0.1, lr=1e-3)
        trainer = GrpoClient(tiny_policy(), options)
        trainer.version = 3
        stats = trainer.forward_backward(batch)
        found.append((gradients(trainer), stats, trainer.optim_step()))
    torch.testing.assert_close(found[0][0], found[1][0], rtol=0, atol=0)
    assert dataclasses.asdict(found[0][1]) == dataclasses.asdict(found[1][1])
    assert found[0][2].divisor == found[1][2].divisor
    assert float(found[0][0].norm()) > 0


@pytest.mark.parametrize("layout", ["shared", "plain"])
def test_the_gradient_is_that_of_the_policys_tokens_alone(layout: str) -> None:
    """In float64, against the sum written out: every token is read, the policy's own are weighed."""
    batch = games(7)
    trainer = GrpoClient(tiny_policy(), config_of(loss="none", lr=1e-3), layout)
    trainer.forward_backward(batch)
    found = gradients(trainer)
    policy = tiny_policy()
    total, count = torch.zeros((), dtype=torch.float64), 0
    for made in batch:
        mean = sum(r.reward or 0.0 for r in made.rollouts) / len(made.rollouts)
        for r in made.rollouts:
            logits = policy.module(input_ids=torch.tensor([[*made.prompt_tokens, *r.tokens]])).logits[0]
            for t, bit in enumerate(r.loss_mask):
                if bit:
                    logp = logits[len(made.prompt_tokens) + t - 1].log_softmax(-1)[r.tokens[t]]
                    total, count = total - ((r.reward or 0.0) - mean) * logp, count + 1
    total.backward()
    expected = torch.cat([p.grad.flatten() for p in policy.module.parameters() if p.grad is not None])
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-11)
    assert trainer.optim_step().num_tokens == count
