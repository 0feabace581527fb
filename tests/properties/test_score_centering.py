"""Score centering: exact where the sampler's whole distribution is known, nothing on-policy, and bounded whatever a
worker says."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from echo2.config.values import LOSS_PARAMS
from echo2.learner.core.losses import LOSSES, RATIO_LIMIT, make_loss
from echo2.transport import limits
from learner_cases import loss_tokens
from seeds import examples

VOCAB = 6
CENTRED = [name for name in LOSSES if name != "gspo"]
LOGITS = st.lists(st.floats(-4, 4), min_size=VOCAB, max_size=VOCAB)
ADVANTAGES = st.floats(-2, 2).filter(lambda value: abs(value) > 1e-3)


def plain(name: str) -> dict[str, float]:
    """Without what is no policy gradient: dppo's regulariser, and its veto of whole sequences."""
    return {"square": 0.0, "veto": 0.0} if name == "dppo" else {}


def gradient(name: str, logits: Tensor, q: Tensor, drawn: int, advantage: float, top: Tensor, centred: bool) -> Tensor:
    """Of one token's loss with respect to the logits [V]; `q`: the sampler's logprobs [V]."""
    logp = logits.log_softmax(0)
    tokens = loss_tokens([float(q[drawn])], [advantage], lag=[2], top=(q[top][None], logp[top][None]))
    loss = make_loss(name, {**plain(name), "score_centering": float(centred * VOCAB)})
    (found,) = torch.autograd.grad(loss(logp[drawn, None], tokens).loss_n.sum(), logits)
    return found


def both(policy: list[float], sampler: list[float]) -> tuple[Tensor, Tensor]:
    logits = torch.tensor(policy, dtype=torch.float64, requires_grad=True)
    return logits, torch.tensor(sampler, dtype=torch.float64).log_softmax(0)


@pytest.mark.parametrize("name", CENTRED)
@given(LOGITS, LOGITS, ADVANTAGES)
def test_of_every_token_the_mean_under_the_sampler_is_taken_away_exactly(
    name: str, policy: list[float], sampler: list[float], advantage: float
) -> None:
    logits, q = both(policy, sampler)
    every = torch.arange(VOCAB)
    bare = torch.stack([gradient(name, logits, q, v, advantage, every, False) for v in range(VOCAB)])
    mean = q.exp() @ bare
    for drawn in range(VOCAB):
        centred = gradient(name, logits, q, drawn, advantage, every, True)
        torch.testing.assert_close(centred, bare[drawn] - mean, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("name", ["none", "tis", "icepop", "cispo", "ppo"])
@given(LOGITS, st.floats(0.23, 1.9), st.integers(1, VOCAB - 1), ADVANTAGES)
def test_a_tail_that_is_the_policys_own_but_for_its_mass_needs_no_record(
    name: str, policy: list[float], ratio: float, width: int, advantage: float
) -> None:
    """Then k tokens give what all of them would."""
    logits = torch.tensor(policy, dtype=torch.float64, requires_grad=True)
    p = logits.detach().softmax(0)
    top, rest = p.argsort(descending=True)[:width], p.argsort(descending=True)[width:]
    rho = min(ratio, 0.99 / float(p[rest].sum()))
    q = p.clone()
    q[rest] *= rho
    q[top] = (1.0 - q[rest].sum()) * p[top].flip(0) / p[top].sum()
    for drawn in (int(top[0]), int(rest[0])):
        found = gradient(name, logits, q.log(), drawn, advantage, top, True)
        whole = gradient(name, logits, q.log(), drawn, advantage, torch.arange(VOCAB), True)
        torch.testing.assert_close(found, whole, rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("name", CENTRED)
@given(LOGITS, st.integers(0, VOCAB), st.integers(0, VOCAB - 1), ADVANTAGES)
def test_on_policy_it_changes_nothing(name: str, policy: list[float], width: int, drawn: int, advantage: float) -> None:
    logits, q = both(policy, policy)
    top = q.argsort(descending=True)[:width]
    bare, centred = (gradient(name, logits, q, drawn, advantage, top, is_on) for is_on in (False, True))
    torch.testing.assert_close(centred, bare, rtol=1e-9, atol=1e-9)


@st.composite
def records(draw: st.DrawFn) -> tuple[list[float], list[float], float]:
    """What the head lets pass of one token: logprobs of k tokens that add up to at most everything; what the policy
    makes of the same; an advantage."""
    width = draw(st.integers(1, 5))
    logprob = st.floats(limits.LOGPROB_MIN, limits.LOGPROB_SLACK) | st.sampled_from([limits.LOGPROB_MIN, -12.0, 0.0])
    told, current = (draw(st.lists(kind, min_size=width, max_size=width)) for kind in (logprob, st.floats(-60, 0)))
    excess = math.log(sum(map(math.exp, told)) / (1.0 + limits.TOP_ERROR))
    told = [max(limits.LOGPROB_MIN, value - max(0.0, excess)) for value in told]
    total = math.log(sum(map(math.exp, current)))
    return told, [value - max(0.0, total) for value in current], draw(st.floats(-2, 2) | st.sampled_from([1e6, -1e6]))


#: The most that the loss's own weight may be, as in tests/unit/test_learner_losses.py.
WEIGHTS = {"dppo": "cap", "tis": "cap", "icepop": "high", "cispo": "cap"}


@pytest.mark.parametrize("name", CENTRED)
@given(st.lists(records(), min_size=1, max_size=4))
@examples(100)
def test_whatever_is_told_the_correction_is_finite_and_bounded(
    name: str, rows: list[tuple[list[float], list[float], float]]
) -> None:
    """In the precision that is trained in: over all k, at most the loss's largest weight for what is told and
    RATIO_LIMIT times it for the tail."""
    width = max(len(told) for told, _, _ in rows)
    told = torch.tensor([t + [-math.inf] * (width - len(t)) for t, _, _ in rows])
    leaf = torch.tensor([c + [0.0] * (width - len(c)) for _, c, _ in rows]).requires_grad_()
    advantages = [advantage for _, _, advantage in rows]
    tokens = loss_tokens([t[0] for t, _, _ in rows], advantages, top=(told, leaf))
    tokens = replace(tokens, behaviour_n=tokens.behaviour_n.float(), advantage_n=tokens.advantage_n.float())
    drawn = torch.tensor([c[0] for _, c, _ in rows], dtype=torch.float32)
    found = make_loss(name, {"score_centering": 5.0})(drawn, tokens)
    (slopes,) = torch.autograd.grad(found.loss_n.sum(), leaf)
    assert bool(found.loss_n.isfinite().all())
    assert bool(slopes.isfinite().all())
    params = LOSS_PARAMS[name]
    weight = 1.0 if name == "none" else params.get(WEIGHTS.get(name, ""), RATIO_LIMIT)
    weight *= params["cap"] if name == "decoupled" else 1.0
    for slope, advantage in zip(slopes.abs().sum(1).tolist(), advantages, strict=True):
        assert slope <= weight * abs(advantage) * (1.0 + limits.TOP_ERROR + RATIO_LIMIT) * (1 + 1e-5)
