"""Advantages and losses against values worked out by hand in float64, and against finite differences."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from echo2 import config
from echo2.config.values import LOSS_PARAMS
from echo2.core.errors import InvariantError, UserError
from echo2.learner.core.losses import LOG_RATIO_LIMIT, LOSSES, RATIO_LIMIT, LossTokens, make_loss
from echo2.learner.grpo.data import group_advantages
from echo2.learner.grpo.step_meter import LossStats, measure
from echo2.learner.grpo.teachers import token_kl
from echo2.transport import limits
from learner_cases import loss_tokens
from seeds import examples

DOCS = Path(__file__).resolve().parents[2] / "docs" / "losses.md"


def ratios(values: Sequence[float], advantage: Sequence[float], **rest: object) -> tuple[Tensor, LossTokens]:
    """Logprobs with these ratios to behaviour logprobs of -3."""
    logp = torch.tensor(values, dtype=torch.float64).log() - 3.0
    return logp, loss_tokens([-3.0] * len(values), advantage, **rest)  # type: ignore[arg-type]


def evaluate(
    name: str, logp: Tensor, tokens: LossTokens, **params: float
) -> tuple[list[float], LossStats, list[float]]:
    """Token losses, statistics and the gradient of the sum."""
    leaf = logp.clone().requires_grad_()
    found = make_loss(name, params)(leaf, tokens)
    (grad,) = torch.autograd.grad(found.loss_n.sum(), leaf)
    stats = measure(found.loss_n.detach().sum(), logp, tokens, found, None)
    return found.loss_n.tolist(), stats, grad.tolist()


def close(values: Sequence[float]) -> object:
    return pytest.approx(list(values), abs=1e-12)


def test_advantages_by_hand() -> None:
    rewards = [1.0, 0.0, 0.0, 1.0, 3.0]  # mean 1, squares 0 1 1 0 4, sample std sqrt(6 / 4)
    assert group_advantages(rewards, "dr_grpo") == (0.0, -1.0, -1.0, 0.0, 2.0)
    assert group_advantages(rewards, "rloo") == pytest.approx((0.0, -1.25, -1.25, 0.0, 2.5), abs=1e-15)
    std = math.sqrt(1.5)
    assert group_advantages(rewards, "grpo") == pytest.approx([a / (std + 1e-6) for a in (0, -1, -1, 0, 2)], abs=1e-15)


def test_rloo_is_the_reward_minus_the_mean_of_the_others() -> None:
    rewards = [0.5, 2.0, -1.0, 7.0]
    others = [(sum(rewards) - reward) / 3 for reward in rewards]
    assert group_advantages(rewards, "rloo") == pytest.approx([r - o for r, o in zip(rewards, others, strict=True)])


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
    logp, tokens = ratios([1.5, 0.5, 1.1, 1.5], [2.0, -1.0, 1.0, -1.0], sequence=[0, 0, 1, 1])
    losses, stats, grad = evaluate("ppo", logp, tokens)
    assert losses == close([-2.56, 0.8, -1.1, 1.5])
    assert grad == close([0.0, 0.0, -1.1, 1.5])
    assert (stats.dropped_positive, stats.dropped_negative) == (1, 1)
    assert stats.ratio_max == pytest.approx(1.5)
    assert stats.weight == pytest.approx(1.5 * 0.5 + 1.1 * 1.5)
    assert stats.weight_squared == pytest.approx(0.75**2 + 1.65**2)
    assert stats.k3 == pytest.approx(sum(r - 1 - math.log(r) for r in (1.5, 0.5, 1.1, 1.5)))
    assert stats.k3_max == pytest.approx(0.5 - 1 - math.log(0.5))
    assert stats.abs_log_ratio == pytest.approx(sum(abs(math.log(r)) for r in (1.5, 0.5, 1.1, 1.5)))


def test_dppo_by_hand() -> None:
    mu = [0.5, 0.5, 0.5, 0.5, 0.01, 0.9]
    pi = [0.75, 0.25, 0.75, 0.6, 0.19, 0.00005]
    advantage = [1.0, -1.0, -1.0, 1.0, 1.0, 1.0]
    #            dropped, dropped, kept, kept, capped at r = 10, vetoed (r = 5.6e-5 < 1e-4)
    tokens = loss_tokens([math.log(m) for m in mu], advantage, [0, 0, 0, 0, 1, 2])
    logp = torch.tensor(pi, dtype=torch.float64).log()
    log_ratio = [math.log(p / m) for p, m in zip(pi, mu, strict=True)]
    weight = [0.0, 0.0, -1.5, 1.2, 10.0, 0.0]
    alive = [1, 1, 1, 1, 1, 0]
    losses, stats, grad = evaluate("dppo", logp, tokens)
    assert losses == close(
        [a * 1e-3 * lr**2 - w * math.log(p) for a, lr, w, p in zip(alive, log_ratio, weight, pi, strict=True)]
    )
    assert grad == close([a * 2e-3 * lr - w for a, lr, w in zip(alive, log_ratio, weight, strict=True)])
    assert (stats.dropped_positive, stats.dropped_negative, stats.capped, stats.vetoed_sequences) == (1, 1, 1, 1)


def test_veto_takes_the_whole_sequence_and_no_other() -> None:
    tokens = loss_tokens([-0.1, -0.1, -1.0], [1.0, 1.0, 1.0], [0, 0, 1])
    _, _, grad = evaluate("dppo", torch.tensor([-12.0, -0.2, -1.0], dtype=torch.float64), tokens)
    assert grad[:2] == [0.0, 0.0]
    assert grad[2] == pytest.approx(-1.0)


def test_decoupled_by_hand() -> None:
    # lag 4: w = r^.75, u = r^.25.  r = 2: u = 1.19 inside.  r = .1, A < 0: u = .56, clipped at .8
    # lag 1 and 0: w = 1, u = r = 1.5, clipped at 1.28.  lag 5, r = 16: w = 16^.8 = 9.2 > 5, dropped
    logp, tokens = ratios([2.0, 0.1, 1.5, 1.5, 16.0], [1.0, -1.0, 2.0, 2.0, -1.0], lag=[4, 4, 1, 0, 5])
    losses, stats, grad = evaluate("decoupled", logp, tokens)
    assert losses == close([-2.0, 0.1**0.75 * 0.8, -2.56, -2.56, 0.0])
    assert grad == close([-2.0, 0.0, 0.0, 0.0, 0.0])
    assert (stats.dropped_positive, stats.dropped_negative) == (2, 2)


@given(st.lists(st.tuples(st.floats(-5, -0.01), st.floats(-5, -0.01), st.floats(-2, 2)), min_size=1, max_size=8))
def test_decoupled_is_ppo_on_data_of_the_last_version(rows: list[tuple[float, float, float]]) -> None:
    logp = torch.tensor([row[0] for row in rows], dtype=torch.float64)
    tokens = loss_tokens([row[1] for row in rows], [row[2] for row in rows], lag=[1] * len(rows))
    expected, _, slope = evaluate("ppo", logp, tokens)
    losses, _, grad = evaluate("decoupled", logp, tokens)
    assert losses == close(expected)
    assert grad == close(slope)


def test_tis_by_hand() -> None:
    logp, tokens = ratios([1.5, 3.0, 0.1], [2.0, 1.0, -1.0])
    losses, stats, grad = evaluate("tis", logp, tokens)
    assert losses == close(
        [-w * a * p for w, a, p in zip([1.5, 2.0, 0.1], [2.0, 1.0, -1.0], logp.tolist(), strict=True)]
    )
    assert grad == close([-3.0, -2.0, 0.1])
    assert (stats.capped, stats.dropped_positive, stats.dropped_negative) == (1, 0, 0)


def test_icepop_by_hand() -> None:
    logp, tokens = ratios([0.4, 0.6, 4.9, 5.1, 5.1], [1.0, 1.0, -1.0, 1.0, -1.0])
    losses, stats, grad = evaluate("icepop", logp, tokens)
    assert grad == close([0.0, -0.6, 4.9, 0.0, 0.0])
    assert losses[1:3] == close([-0.6 * float(logp[1]), 4.9 * float(logp[2])])
    assert (stats.dropped_positive, stats.dropped_negative) == (2, 1)
    _, wider, _ = evaluate("icepop", logp, tokens, low=0.125, high=8.0)
    assert wider.dropped_positive + wider.dropped_negative == 0


def test_cispo_by_hand() -> None:
    logp, tokens = ratios([0.1, 1.2, 6.0], [1.0, -1.0, 2.0])
    _, stats, grad = evaluate("cispo", logp, tokens)
    assert grad == close([-0.1, 1.2, -10.0])
    assert (stats.capped, stats.dropped_positive, stats.dropped_negative) == (1, 0, 0)
    _, stats, grad = evaluate("cispo", logp, tokens, floor=0.5, cap=3.0)
    assert grad == close([-0.5, 1.2, -6.0])
    assert stats.capped == 2


def test_gspo_by_hand() -> None:
    # means of l: 3e-4 with A = 1 (inside), 5e-4 with A = 1 (above 4e-4), -4e-4 with A = -1 (below -3e-4)
    log_ratio = [0.0002, 0.0004, 0.001, 0.0, -0.0004]
    logp = torch.tensor(log_ratio, dtype=torch.float64) - 3.0
    tokens = loss_tokens([-3.0] * 5, [1.0, 1.0, 1.0, 1.0, -1.0], [0, 0, 1, 1, 2])
    losses, stats, grad = evaluate("gspo", logp, tokens)
    inside = math.exp(3e-4)
    assert losses == close([-inside, -inside, -1.0004, -1.0004, 0.9997])
    assert grad == close([-inside, -inside, 0.0, 0.0, 0.0])
    assert (stats.dropped_positive, stats.dropped_negative) == (2, 1)


def test_gspo_over_the_length_has_the_gradient_of_the_sequence_ratio() -> None:
    """Finite differences of -A exp(mean l), the paper's sequence loss inside the clip."""
    logp, tokens = ratios([1.1, 0.9, 1.3], [1.5] * 3)
    _, _, grad = evaluate("gspo", logp, tokens, clip_low=0.5, clip_high=0.5)
    for index in range(3):
        nudge = torch.zeros_like(logp)
        nudge[index] = 1e-6
        above, below = (-1.5 * (logp + sign * nudge + 3.0).mean().exp() for sign in (1, -1))
        assert grad[index] / 3 == pytest.approx(float(above - below) / 2e-6, rel=1e-6)


def test_the_correction_none_changes_nothing() -> None:
    logp, tokens = ratios([9.0, 0.001, 1.0], [1.0, -2.0, 0.0])
    losses, stats, grad = evaluate("none", logp, tokens)
    assert grad == close([-1.0, 2.0, 0.0])
    assert losses == close([-float(logp[0]), 2.0 * float(logp[1]), 0.0])
    assert (stats.dropped_positive, stats.dropped_negative, stats.capped) == (0, 0, 0)


@pytest.mark.parametrize("name", LOSSES)
def test_on_policy_all_losses_are_the_policy_gradient(name: str) -> None:
    logp = torch.tensor([-0.5, -2.0, -1.0], dtype=torch.float64)
    _, stats, grad = evaluate(name, logp, loss_tokens(logp.tolist(), [1.0, -2.0, 0.5], [0, 0, 1], [0, 3, 9]))
    assert grad == close([-1.0, 2.0, -0.5])
    assert stats.dropped_positive + stats.dropped_negative + stats.capped + stats.vetoed_sequences == 0
    assert stats.ess_ratio == pytest.approx(1.0)


#: The most that |d loss / d logp| of one token may be, for |A| = 1: from each loss's own parameters.
INFLUENCE: dict[str, Callable[[Mapping[str, float]], float]] = {
    "dppo": lambda p: p["cap"],
    "ppo": lambda p: max(RATIO_LIMIT, 1 + p["clip_high"]),
    "decoupled": lambda p: p["cap"] * max(RATIO_LIMIT, 1 + p["clip_high"]),
    "tis": lambda p: p["cap"],
    "icepop": lambda p: p["high"],
    "cispo": lambda p: p["cap"],
    "gspo": lambda p: max(RATIO_LIMIT, 1 + p["clip_high"]),
    "none": lambda p: 1.0,
}
BEHAVIOURS = st.floats(limits.LOGPROB_MIN, 0.0, width=32) | st.sampled_from([limits.LOGPROB_MIN, limits.LOGPROB_SLACK])
CURRENT = st.floats(-60, 0, width=32) | st.floats(-1e9, 0, width=32)
ADVANTAGES = st.floats(-2, 2, width=32) | st.sampled_from([2 * limits.REWARD_MAX, -2 * limits.REWARD_MAX])


@pytest.mark.parametrize("name", LOSSES)
@given(rows=st.lists(st.tuples(CURRENT, BEHAVIOURS, ADVANTAGES, st.integers(0, 2), st.integers(-1, 9)), min_size=1))
def test_no_token_has_more_influence_than_stated(name: str, rows: list[tuple[float, float, float, int, int]]) -> None:
    """Whatever a worker says of its logprobs, in the precision that is trained in."""
    current, behaviour, advantage, sequence, lag = (list(column) for column in zip(*rows, strict=True))
    tokens = loss_tokens(behaviour, advantage, sequence, lag)
    tokens = replace(tokens, behaviour_n=tokens.behaviour_n.float(), advantage_n=tokens.advantage_n.float())
    losses, stats, grad = evaluate(name, torch.tensor(current, dtype=torch.float32), tokens)
    assert all(map(math.isfinite, (*losses, *grad, stats.loss, stats.k3, stats.abs_log_ratio, stats.ess_ratio)))
    params = LOSS_PARAMS[name]
    square = 2 * params.get("square", 0.0) * LOG_RATIO_LIMIT
    for slope, of in zip(grad, advantage, strict=True):
        assert abs(slope) <= (INFLUENCE[name](params) * abs(of) + square) * (1 + 1e-5)


def test_a_forged_logprob_weighs_no_more_than_the_limit_where_the_ratio_has_the_gradient() -> None:
    # Sampled with probability 0.9, said to have had e^-12: without a bound, its slope would be 0.9 e^12 = 146,000.
    logp, tokens = torch.tensor([math.log(0.9)], dtype=torch.float64), loss_tokens([-12.0], [-1.0])
    for name in ("ppo", "gspo", "decoupled"):
        losses, stats, grad = evaluate(name, logp, tokens)
        assert (losses, grad, stats.capped) == (close([RATIO_LIMIT]), close([RATIO_LIMIT]), 1)


@given(rows=st.lists(st.tuples(CURRENT, BEHAVIOURS, st.floats(-1e9, 0)), min_size=1))
@examples(150)
def test_the_pull_towards_the_reference_is_bounded_too(rows: list[tuple[float, float, float]]) -> None:
    current, behaviour, reference = (list(column) for column in zip(*rows, strict=True))
    leaf = torch.tensor(current, dtype=torch.float64).requires_grad_()
    tokens = loss_tokens(behaviour, [1.0] * len(rows), reference=reference)
    term = token_kl(leaf, tokens, torch.tensor([False]))
    (grad,) = torch.autograd.grad(term.sum(), leaf)
    assert bool(term.isfinite().all())
    assert float(grad.abs().max()) <= 10 * LOG_RATIO_LIMIT * (1 + 1e-9)


@given(st.lists(st.tuples(st.floats(-5, -0.01), st.floats(-5, -0.01), st.floats(-2, 2)), min_size=1, max_size=8))
def test_ppo_gradient_equals_finite_differences(rows: list[tuple[float, float, float]]) -> None:
    logp = torch.tensor([row[0] for row in rows], dtype=torch.float64)
    tokens = loss_tokens([row[1] for row in rows], [row[2] for row in rows])
    ratio = (logp - tokens.behaviour_n).exp()
    if bool(((ratio - 0.8).abs() < 1e-4).any() | ((ratio - 1.28).abs() < 1e-4).any()):
        return  # at the kink there is no derivative
    _, _, grad = evaluate("ppo", logp, tokens)
    for index in range(len(rows)):
        if ratio[index] > RATIO_LIMIT - 1e-4 and tokens.advantage_n[index] < 0:
            continue  # counts as RATIO_LIMIT: bounded in value and slope, see below
        nudge = torch.zeros_like(logp)
        nudge[index] = 1e-6
        above, below = (sum(evaluate("ppo", logp + sign * nudge, tokens)[0]) for sign in (1, -1))
        assert grad[index] == pytest.approx((above - below) / 2e-6, rel=1e-5, abs=1e-5)


@given(st.lists(st.tuples(st.floats(-5, -0.01), st.floats(-5, -0.01), st.floats(-2, 2)), min_size=1, max_size=8))
def test_dppo_gradient_equals_finite_differences_at_frozen_weights(rows: list[tuple[float, float, float]]) -> None:
    logp = torch.tensor([row[0] for row in rows], dtype=torch.float64)
    tokens = loss_tokens([row[1] for row in rows], [row[2] for row in rows])
    ratio = (logp - tokens.behaviour_n).exp()
    shift = logp.exp() - tokens.behaviour_n.exp()
    dropped = ((tokens.advantage_n > 0) & (shift > 0.2)) | ((tokens.advantage_n < 0) & (shift < -0.2))
    frozen = torch.where(dropped, 0.0, ratio.clamp(max=10.0) * tokens.advantage_n)

    def surrogate(at: Tensor) -> float:
        return float((1e-3 * (at - tokens.behaviour_n) ** 2 - frozen * at).sum())

    _, _, grad = evaluate("dppo", logp, tokens)
    for index in range(len(rows)):
        nudge = torch.zeros_like(logp)
        nudge[index] = 1e-6
        slope = (surrogate(logp + nudge) - surrogate(logp - nudge)) / 2e-6
        assert grad[index] == pytest.approx(slope, rel=1e-5, abs=1e-5)


def test_reference_kl_by_hand() -> None:
    # mu = 1/4, pi = 1/2, rho = 1/8: r = 2, x = log(1/4).  In the vetoed sequence: nothing.
    leaf = torch.tensor([0.5, 0.5], dtype=torch.float64).log().requires_grad_()
    tokens = loss_tokens([math.log(0.25)] * 2, [1.0, 1.0], [0, 1], reference=[math.log(0.125)] * 2)
    term = token_kl(leaf, tokens, torch.tensor([False, True]))
    assert term.tolist() == close([2 * (0.25 - 1 + math.log(4)), 0.0])
    (grad,) = torch.autograd.grad(term.sum(), leaf)
    assert grad.tolist() == close([2 * math.log(4), 0.0])


def test_reference_kl_of_a_policy_that_hardly_moved_has_its_digits_in_float32() -> None:
    logp, tokens = torch.tensor([-1.0]), loss_tokens([-1.0], [0.0], reference=[-1.0 + 2**-12])
    tokens = replace(tokens, behaviour_n=tokens.behaviour_n.float(), reference_n=tokens.reference_n.float())
    assert token_kl(logp, tokens, torch.tensor([False])).item() == pytest.approx(2**-25, rel=1e-3)


def test_reference_kl_has_the_value_and_gradient_of_the_divergence_for_stale_samples_too() -> None:
    """Its mean over tokens drawn from mu, all four written out, against KL(pi || rho) itself."""
    logits = torch.tensor([0.3, -0.2, 0.9, -1.0], dtype=torch.float64, requires_grad=True)
    mu = torch.tensor([0.4, 0.3, 0.2, 0.1], dtype=torch.float64)
    rho = torch.tensor([0.1, 0.2, 0.3, 0.4], dtype=torch.float64)
    logp = logits.log_softmax(0)
    term = token_kl(
        logp, loss_tokens(mu.log().tolist(), [0.0] * 4, reference=rho.log().tolist()), torch.tensor([False])
    )
    divergence = (logp.exp() * (logp - rho.log())).sum()
    assert (mu * term).sum().item() == pytest.approx(divergence.item(), abs=1e-12)
    (found,) = torch.autograd.grad((mu * term).sum(), logits, retain_graph=True)
    (expected,) = torch.autograd.grad(divergence, logits)
    assert found.tolist() == close(expected.tolist())


def test_parameters_that_a_loss_does_not_take_are_refused() -> None:
    with pytest.raises(UserError, match="expected one of dppo"):
        make_loss("grpo")
    with pytest.raises(UserError, match="'tis' takes cap"):
        make_loss("tis", {"clip_low": 0.1})
    with pytest.raises(UserError, match="'none' takes none"):
        make_loss("none", {"cap": 2.0})
    with pytest.raises(UserError, match="low = 6"):
        make_loss("icepop", {"low": 6.0})
    with pytest.raises(UserError, match=">= 0"):
        make_loss("tis", {"cap": math.nan})


def test_the_table_the_settings_and_the_docs_name_the_same_losses() -> None:
    assert set(LOSSES) == set(LOSS_PARAMS)
    (choices,) = [plain for _, name, plain, *_ in config.all_fields() if name == "loss"]
    assert set(choices.__args__) == set(LOSSES)
    text = DOCS.read_text(encoding="utf-8")
    for name, params in LOSS_PARAMS.items():
        (section,) = re.findall(rf"^## `{name}`.*?(?=^## )", text, flags=re.MULTILINE | re.DOTALL)
        for param, value in params.items():
            assert re.search(rf"\b{param} = {value:g}\b", section), f"docs: {name} lacks `{param} = {value:g}`"
