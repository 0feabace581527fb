"""Advantages, losses and logprobs against values worked out by hand in float64, and against finite differences."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from echo2.errors import InvariantError
from echo2.learner.advantages import group_advantages
from echo2.learner.losses import KL_WEIGHT, LossStats, LossTokens, dppo, ppo


def tokens_of(behaviour: list[float], advantage: list[float], sequence: list[int]) -> LossTokens:
    return LossTokens(
        torch.tensor(behaviour, dtype=torch.float64),
        torch.tensor(advantage, dtype=torch.float64),
        torch.tensor(sequence),
        max(sequence) + 1,
    )


def gradient(
    loss: Callable[[Tensor, LossTokens], tuple[Tensor, LossStats]], logp: Tensor, tokens: LossTokens
) -> Tensor:
    leaf = logp.clone().requires_grad_()
    value, _ = loss(leaf, tokens)
    (grad,) = torch.autograd.grad(value, leaf)
    return grad


def test_advantages_by_hand() -> None:
    rewards = [1.0, 0.0, 0.0, 1.0, 3.0]  # mean 1, squares 0 1 1 0 4, sample std sqrt(6 / 4)
    assert group_advantages(rewards, "dr_grpo") == (0.0, -1.0, -1.0, 0.0, 2.0)
    assert group_advantages(rewards, "rloo") == pytest.approx((0.0, -1.25, -1.25, 0.0, 2.5), abs=1e-15)
    std = math.sqrt(1.5)
    assert group_advantages(rewards, "grpo") == pytest.approx([a / (std + 1e-6) for a in (0, -1, -1, 0, 2)], abs=1e-15)


@pytest.mark.parametrize("kind", ["grpo", "dr_grpo", "rloo"])
def test_equal_rewards_give_exact_zeros(kind: str) -> None:
    assert group_advantages([0.1] * 3, kind) == (0.0, 0.0, 0.0)  # type: ignore[arg-type]


@pytest.mark.parametrize("bad", [None, math.nan, math.inf])
def test_unscored_group_is_our_bug(bad: float | None) -> None:
    with pytest.raises(InvariantError):
        group_advantages([1.0, bad], "dr_grpo")


@given(st.lists(st.floats(-100, 100), min_size=2, max_size=9), st.sampled_from(["grpo", "dr_grpo", "rloo"]))
def test_advantages_always_sum_to_zero_and_keep_the_order(rewards: list[float], kind: str) -> None:
    advantages = group_advantages(rewards, kind)  # type: ignore[arg-type]
    assert abs(math.fsum(advantages)) < 1e-6
    ranked = sorted(range(len(rewards)), key=lambda i: rewards[i])
    assert all(advantages[a] <= advantages[b] + 1e-9 for a, b in itertools.pairwise(ranked))


def test_ppo_by_hand() -> None:
    # r = 1.5 (clipped at 1.28, A = 2), 0.5 (clipped at 0.8, A = -1), 1.1 (inside, A = 1), 1.5 with A = -1 (not clipped)
    logp = torch.tensor([1.5, 0.5, 1.1, 1.5], dtype=torch.float64).log() - 3.0
    tokens = tokens_of([-3.0] * 4, [2.0, -1.0, 1.0, -1.0], [0, 0, 1, 1])
    value, stats = ppo(0.2, 0.28)(logp, tokens)
    assert float(value) == pytest.approx(-2.56 + 0.8 - 1.1 + 1.5, abs=1e-12)
    assert gradient(ppo(0.2, 0.28), logp, tokens).tolist() == pytest.approx([0.0, 0.0, -1.1, 1.5], abs=1e-12)
    assert (stats.dropped_positive, stats.dropped_negative) == (1, 1)
    assert stats.ratio_max == pytest.approx(1.5)
    assert stats.weight == pytest.approx(1.5 * 0.5 + 1.1 * 1.5)
    assert stats.weight_squared == pytest.approx(0.75**2 + 1.65**2)
    assert stats.k3 == pytest.approx(sum(r - 1 - math.log(r) for r in (1.5, 0.5, 1.1, 1.5)))
    assert stats.abs_log_ratio == pytest.approx(sum(abs(math.log(r)) for r in (1.5, 0.5, 1.1, 1.5)))


def test_dppo_by_hand() -> None:
    mu = [0.5, 0.5, 0.5, 0.5, 0.01, 0.9]
    pi = [0.75, 0.25, 0.75, 0.6, 0.19, 0.00005]
    advantage = [1.0, -1.0, -1.0, 1.0, 1.0, 1.0]
    #            dropped, dropped, kept, kept, capped at r = 10, vetoed (r = 5.6e-5 < 1e-4)
    sequence = [0, 0, 0, 0, 1, 2]
    tokens = tokens_of([math.log(m) for m in mu], advantage, sequence)
    logp = torch.tensor(pi, dtype=torch.float64).log()
    log_ratio = [math.log(p / m) for p, m in zip(pi, mu, strict=True)]
    weight = [0.0, 0.0, -1.5, 1.2, 10.0, 0.0]
    alive = [1, 1, 1, 1, 1, 0]
    expected = sum(
        a * KL_WEIGHT * lr**2 - w * math.log(p) for a, lr, w, p in zip(alive, log_ratio, weight, pi, strict=True)
    )
    value, stats = dppo(logp, tokens)
    assert float(value) == pytest.approx(expected, abs=1e-12)
    slopes = [a * 2 * KL_WEIGHT * lr - w for a, lr, w in zip(alive, log_ratio, weight, strict=True)]
    assert gradient(dppo, logp, tokens).tolist() == pytest.approx(slopes, abs=1e-12)
    assert (stats.dropped_positive, stats.dropped_negative, stats.capped, stats.vetoed_sequences) == (1, 1, 1, 1)


def test_veto_takes_the_whole_sequence_and_no_other() -> None:
    tokens = tokens_of([-0.1, -0.1, -1.0], [1.0, 1.0, 1.0], [0, 0, 1])
    grad = gradient(dppo, torch.tensor([-12.0, -0.2, -1.0], dtype=torch.float64), tokens)
    assert grad[:2].tolist() == [0.0, 0.0]
    assert float(grad[2]) == pytest.approx(-1.0)


@given(st.lists(st.tuples(st.floats(-5, -0.01), st.floats(-5, -0.01), st.floats(-2, 2)), min_size=1, max_size=8))
@settings(max_examples=50, deadline=None)
def test_ppo_gradient_equals_finite_differences(rows: list[tuple[float, float, float]]) -> None:
    logp = torch.tensor([row[0] for row in rows], dtype=torch.float64)
    tokens = tokens_of([row[1] for row in rows], [row[2] for row in rows], [0] * len(rows))
    ratio = (logp - tokens.behaviour_n).exp()
    if bool(((ratio - 0.8).abs() < 1e-4).any() | ((ratio - 1.28).abs() < 1e-4).any()):
        return  # at the kink there is no derivative
    loss = ppo(0.2, 0.28)
    grad, step = gradient(loss, logp, tokens), 1e-6
    for index in range(len(rows)):
        nudge = torch.zeros_like(logp)
        nudge[index] = step
        slope = (loss(logp + nudge, tokens)[0] - loss(logp - nudge, tokens)[0]) / (2 * step)
        assert float(grad[index]) == pytest.approx(float(slope), rel=1e-5, abs=1e-5)


@given(st.lists(st.tuples(st.floats(-5, -0.01), st.floats(-5, -0.01), st.floats(-2, 2)), min_size=1, max_size=8))
@settings(max_examples=50, deadline=None)
def test_dppo_gradient_equals_finite_differences_at_frozen_weights(rows: list[tuple[float, float, float]]) -> None:
    logp = torch.tensor([row[0] for row in rows], dtype=torch.float64)
    tokens = tokens_of([row[1] for row in rows], [row[2] for row in rows], [0] * len(rows))
    ratio = (logp - tokens.behaviour_n).exp()
    shift = logp.exp() - tokens.behaviour_n.exp()
    dropped = ((tokens.advantage_n > 0) & (shift > 0.2)) | ((tokens.advantage_n < 0) & (shift < -0.2))
    frozen = torch.where(dropped, 0.0, ratio.clamp(max=10.0) * tokens.advantage_n)

    def surrogate(at: Tensor) -> Tensor:
        return (KL_WEIGHT * (at - tokens.behaviour_n) ** 2 - frozen * at).sum()

    grad, step = gradient(dppo, logp, tokens), 1e-6
    for index in range(len(rows)):
        nudge = torch.zeros_like(logp)
        nudge[index] = step
        slope = (surrogate(logp + nudge) - surrogate(logp - nudge)) / (2 * step)
        assert float(grad[index]) == pytest.approx(float(slope), rel=1e-5, abs=1e-5)


def test_effective_sample_size() -> None:
    assert LossStats().ess_ratio == 1.0
    # weights 2 and 1 (log ratios summed over each sequence): (2 + 1)^2 / (2 * (4 + 1))
    logp = torch.tensor([math.log(4.0), math.log(0.5), 0.0], dtype=torch.float64) - 2.0
    _, stats = ppo(0.2, 0.28)(logp, tokens_of([-2.0] * 3, [1.0] * 3, [0, 0, 1]))
    assert stats.ess_ratio == pytest.approx(0.9)
    _, stats = ppo(0.2, 0.28)(
        torch.tensor([-0.1, -5.0]), LossTokens(torch.tensor([-50.0, -5.0]), torch.ones(2), torch.tensor([0, 1]), 2)
    )
    assert stats.weight == pytest.approx(11.0)  # clamped, not exp(49.9)


def test_statistics_stream() -> None:
    parts = [
        LossStats(tokens=1, loss=2, ratio_max=3, weight=1, weight_squared=1, sequences=1),
        LossStats(1, 1, 1, ratio_max=2),
    ]
    whole = parts[0] + parts[1]
    assert (whole.tokens, whole.loss, whole.ratio_max, whole.sequences) == (2, 3, 3, 2)
