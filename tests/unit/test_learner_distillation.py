"""A teacher's part of the advantages and of the loss: by hand, against the divergence itself, and in whole updates."""

from __future__ import annotations

import math
import random
from array import array
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor

from echo2.config.sections import DistillConfig
from echo2.core.errors import UserError
from echo2.core.types import RolloutGroup, Teaching
from echo2.learner.core.losses import LOG_RATIO_LIMIT, make_loss
from echo2.learner.core.model import load_policy
from echo2.learner.core.output_layer import OutputLayer, plain_likely, tiled_likely
from echo2.learner.grpo.loop import GrpoClient, GrpoLoss
from echo2.learner.grpo.teachers import TAIL_LEAST, joined_divergence, towards_teacher
from learner_cases import (
    VOCAB,
    config_of,
    gradients,
    group,
    judge_resume,
    loss_tokens,
    model_directory,
    random_group,
    rollout,
    tiny_module,
    tiny_policy,
)

RHO = torch.tensor([0.1, 0.2, 0.3, 0.4], dtype=torch.float64)
MU = torch.tensor([0.4, 0.3, 0.2, 0.1], dtype=torch.float64)
#: A policy gradient with its whole importance weight, and nothing besides.
PLAIN: dict[str, Any] = {"loss": "tis", "loss_params": {"cap": 1e6}}


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(model_directory(tmp_path_factory.mktemp("teacher") / "model", seed=7))


def close(values: Sequence[float]) -> object:
    return pytest.approx(list(values), abs=1e-12)


def test_the_advantage_by_hand() -> None:
    logp = torch.tensor([0.5, 0.25, 1e-12], dtype=torch.float64).log()
    tokens = loss_tokens([-1.0] * 3, [1.0, -2.0, 0.0], teacher=[math.log(0.125), math.log(0.5), 0.0])
    found = towards_teacher(logp.requires_grad_(), tokens, 3.0)
    assert found.advantage_n.tolist() == close([1 - 3 * math.log(4), -2 + 3 * math.log(2), 3 * LOG_RATIO_LIMIT])
    assert not found.advantage_n.requires_grad


def sampled_gradient(logits: Tensor) -> Tensor:
    """The mean over tokens that mu samples of the gradient of the advantage's form."""
    logp = logits.log_softmax(0)
    tokens = towards_teacher(logp, loss_tokens(MU.log().tolist(), [0.0] * 4, teacher=RHO.log().tolist()), 1.0)
    (found,) = torch.autograd.grad((MU * make_loss("tis", {"cap": 1e6})(logp, tokens).loss_n).sum(), logits)
    return found


def test_the_advantage_has_the_gradient_of_the_divergence_also_for_stale_samples() -> None:
    """Its mean over tokens drawn from mu, all four written out, against KL(pi || rho) itself."""
    logits = torch.tensor([0.3, -0.2, 0.9, -1.0], dtype=torch.float64, requires_grad=True)
    logp = logits.log_softmax(0)
    (expected,) = torch.autograd.grad((logp.exp() * (logp - RHO.log())).sum(), logits)
    assert sampled_gradient(logits).tolist() == close(expected.tolist())


def test_a_policy_that_is_its_teacher_is_left_alone_by_any_sampler() -> None:
    assert sampled_gradient(RHO.log().requires_grad_()).tolist() == close([0.0] * 4)


def joined(logits: Tensor, log_rho: Tensor, top_k: int, beta: float) -> Tensor:
    """`joined_divergence` of one token of each row."""
    logp = logits.log_softmax(-1)
    top, ids = log_rho.topk(top_k)
    return joined_divergence(logp.gather(1, ids), top, beta)


def divergence_of(p: Tensor, q: Tensor, beta: float) -> Tensor:
    """The divergence of two whole distributions as TRL defines it (GKD, arXiv 2306.13649, equation 1)."""
    if beta == 1.0:
        return (p * (p / q).log()).sum(-1)
    if beta == 0.0:
        return (q * (q / p).log()).sum(-1)
    m = (1.0 - beta) * p + beta * q
    return beta * (q * (q / m).log()).sum(-1) + (1.0 - beta) * (p * (p / m).log()).sum(-1)


BETAS = [1.0, 0.0, 0.5, 0.1]


@pytest.mark.parametrize("beta", BETAS)
def test_the_divergence_by_hand(beta: float) -> None:
    """Its value and its gradient by the logits: of two likely tokens with the rest as one, and of all tokens."""
    logits = torch.tensor([[0.3, -0.2, 0.9, -1.0]], dtype=torch.float64, requires_grad=True)
    pi = logits.softmax(-1)[0]
    joined_rho = torch.stack([RHO[3], RHO[2], RHO[0] + RHO[1]])
    by_hand = divergence_of(torch.stack([pi[3], pi[2], pi[0] + pi[1]]), joined_rho, beta)
    found = joined(logits, RHO.log()[None], 2, beta)
    assert found.item() == pytest.approx(by_hand.item(), abs=1e-12)
    gradients_ = [torch.autograd.grad(each.sum(), logits, retain_graph=True)[0] for each in (found, by_hand)]
    torch.testing.assert_close(*gradients_, rtol=1e-9, atol=1e-12)
    whole, all_four = divergence_of(pi, RHO, beta), joined(logits, RHO.log()[None], 4, beta)
    assert all_four.item() == pytest.approx(whole.item(), abs=1e-9), "all tokens: the divergence itself"
    gradients_ = [torch.autograd.grad(each.sum(), logits, retain_graph=True)[0] for each in (all_four, whole)]
    torch.testing.assert_close(*gradients_, rtol=1e-4, atol=10 * TAIL_LEAST)


@pytest.mark.parametrize("beta", BETAS)
def test_vetoed_sequences_and_padding_add_nothing(beta: float) -> None:
    """The tokens' own part is 0 here: their advantages are."""
    top = torch.tensor([[0.6, 0.4], [0.6, 0.0]], dtype=torch.float64).log()
    policy = torch.tensor([[0.5, 0.5], [0.5, 0.4]], dtype=torch.float64).log().requires_grad_()
    logp = torch.tensor([-20.0, -1.0], dtype=torch.float64)
    tokens = loss_tokens([-0.1, -1.0], [0.0] * 2, [0, 1], top=(top, policy))
    distill = DistillConfig(teacher="self", weight=2.0, divergence={"top_k": 2, "beta": beta})
    found, stats = GrpoLoss(make_loss("dppo"), 0.0, distill)(logp, tokens)
    assert stats.vetoed_sequences == 1
    by_hand = divergence_of(*(torch.tensor([p, 1 - p], dtype=torch.float64) for p in (0.5, 0.6)), beta)
    assert found.tolist() == close([0.0, 2.0 * by_hand.item()])
    (grad,) = torch.autograd.grad(found.sum(), policy)
    assert grad[0].tolist() == [0.0, 0.0]
    assert grad[1, 0] != 0.0
    assert grad[1, 1] == 0.0


beta_values = st.sampled_from(BETAS) | st.floats(0.0, 1.0)


@given(st.integers(0, 10_000), st.integers(1, 9), beta_values)
def test_the_joined_divergence_is_between_0_and_the_whole_one(seed: int, top_k: int, beta: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(3, 9, generator=generator, dtype=torch.float64)
    rho = torch.randn(3, 9, generator=generator, dtype=torch.float64).softmax(-1)
    found, whole = joined(logits, rho.log(), top_k, beta), divergence_of(logits.softmax(-1), rho, beta)
    assert (found > -1e-9).all()
    assert (found < whole + 1e-9).all()
    same_ = rho.log().requires_grad_()
    equal = joined(same_, rho.log(), top_k, beta)
    assert equal.tolist() == pytest.approx([0.0] * 3, abs=1e-9)
    (grad,) = torch.autograd.grad(equal.sum(), same_)
    assert grad.abs().max() < 1e-6, "where they are equal it has its minimum"


#: Logits up to which scores of a model might go, and more.
hostile = st.lists(st.floats(-1e4, 1e4, width=32) | st.sampled_from([0.0, 30.0, -200.0]), min_size=7, max_size=7)


@given(hostile, hostile, st.integers(1, 7), beta_values)
@example([1e4] + [0.0] * 6, [0.0] * 6 + [1e4], 1, 0.0)
@example([40.0] + [0.0] * 6, [0.1] + [0.0] * 6, 1, 0.0)  # nothing is left of the policy, most of the teacher
@example([0.0, 1e4] + [0.0] * 5, [1e4] + [0.0] * 6, 7, 1.0)  # all of the policy is where the teacher never is
@example([0.0] * 7, [0.0] * 7, 7, 5e-324)
def test_no_logits_make_the_divergence_negative_or_its_gradient_large(
    own: list[float], theirs: list[float], top_k: int, beta: float
) -> None:
    """In float32, in which it is computed: by the logprobs within the bound that `teachers.py` states."""
    logp = torch.tensor([own]).log_softmax(-1)
    top, ids = torch.tensor([theirs]).log_softmax(-1).topk(top_k)
    policy = logp.gather(1, ids).requires_grad_()
    found = joined_divergence(policy, top, beta)
    assert found.isfinite().all()
    assert found.item() > -2 * TAIL_LEAST
    (grad,) = torch.autograd.grad(found.sum(), policy)
    assert grad.abs().max() <= 2 * LOG_RATIO_LIMIT


@given(st.integers(0, 10_000), st.integers(0, 12), st.integers(1, 23), st.tuples(st.integers(1, 4), st.integers(1, 24)))
def test_the_most_likely_tokens_from_tiles_are_those_of_all_logits(
    seed: int, top_k: int, num_tokens: int, tile: tuple[int, int]
) -> None:
    generator = torch.Generator().manual_seed(seed)
    hidden, weight = (torch.randn(n, 5, generator=generator, dtype=torch.float64) for n in (6, 23))
    bias = torch.randn(23, generator=generator, dtype=torch.float64)
    layer = OutputLayer(weight, bias, scale=0.5, softcap=3.0)
    logits = layer.finish(hidden @ weight.T + bias)
    tokens, logp = tiled_likely(hidden, layer, top_k, num_tokens, 0.7, tile)
    plain_tokens, plain_logp = plain_likely(logits, top_k, num_tokens, 0.7)
    assert tokens.tolist() == plain_tokens.tolist()
    torch.testing.assert_close(logp, plain_logp)


def logits_of(module: torch.nn.Module, prompt: Sequence[int], tokens: Sequence[int]) -> Tensor:
    """The logits at which each token is predicted, by transformers alone."""
    text = torch.tensor([[*prompt, *tokens]])
    found: Tensor = module(text, use_cache=False).logits[0, len(prompt) - 1 : -1]
    return found


def by_hand(client: GrpoClient, groups: Sequence[RolloutGroup], teachers: dict[str, torch.nn.Module]) -> Tensor:
    """The gradient of a step's sums, token by token, in float64; of groups whose rewards are all equal."""
    config, module = client.config, client.policy.module
    temperature, distill = config.sampling.temperature, config.distill
    total = torch.zeros((), dtype=torch.float64)
    for one in groups:
        shown = one.teaching.prompt_tokens or one.prompt_tokens
        for made in one.rollouts:
            mine = logits_of(module, one.prompt_tokens, made.tokens) / temperature
            with torch.no_grad():
                theirs = logits_of(teachers[one.teaching.teacher], shown, made.tokens).double() / temperature
            for at, counts in enumerate(made.loss_mask):
                token = made.tokens[at]
                pi, rho = mine[at].log_softmax(-1), theirs[at].log_softmax(-1)
                if counts and (in_loss := distill.in_loss) is not None:
                    best = rho.topk(in_loss.top_k).indices
                    p, q = (torch.cat([each[best].exp(), 1 - each[best].exp().sum(0, True)]) for each in (pi, rho))
                    total = total + distill.weight * divergence_of(p, q, in_loss.beta)
                elif counts:
                    if made.support_tokens is not None and made.support_offsets is not None:
                        allowed = made.support_tokens[made.support_offsets[at] : made.support_offsets[at + 1]].tolist()
                        pi, rho = (each - each[allowed].logsumexp(-1) for each in (pi, rho))
                    ratio = (pi[token] - made.logprobs[at]).exp().detach()
                    advantage = distill.weight * (rho[token] - pi[token].detach())
                    total = total - ratio * advantage * pi[token]
    grads = torch.autograd.grad(total, list(module.parameters()))
    return torch.cat([grad.flatten() for grad in grads])


def same(found: Tensor, expected: Tensor) -> None:
    """Up to the float32 of a teacher's weights and logprobs."""
    assert (found - expected).norm() < 1e-4 * expected.norm()


def flat_groups(seed: int, number: int = 3, top_k: int = 0) -> list[RolloutGroup]:
    made = [random_group(random.Random(seed + at), at, top_k=top_k) for at in range(number)]
    return [replace(one, rollouts=tuple(replace(each, reward=1.0) for each in one.rollouts)) for one in made]


@pytest.mark.parametrize(
    ("divergence", "support"),
    [
        ({}, 0),
        ({}, 4),
        ({"top_k": 4}, 0),
        ({"top_k": VOCAB - 1}, 0),
        ({"top_k": 4, "beta": 0.0}, 0),
        ({"top_k": 4, "beta": 0.5}, 0),
    ],
)
@pytest.mark.parametrize("layout", ["plain", "shared"])
def test_the_gradient_of_a_step_by_hand(teacher: str, divergence: dict[str, float], support: int, layout: Any) -> None:
    """Masks with holes, temperatures, narrowed sampling: all as transformers' own logits and autograd have it."""
    options = config_of(teacher=teacher, weight=0.7, divergence=divergence, temperature=0.8, **PLAIN)
    client = GrpoClient(tiny_policy(), options, layout)
    groups = flat_groups(3, top_k=support)
    client.forward_backward(groups)
    expected = by_hand(client, groups, {"": load_policy(teacher, "float32", "cpu").module})
    assert expected.norm() > 1.0
    same(gradients(client), expected)


def test_several_teachers_and_prompts_of_their_own(teacher: str, tmp_path: Path) -> None:
    other = str(model_directory(tmp_path / "other", seed=11))
    paths = {"maths": teacher, "code": other, "own": "self"}
    client = GrpoClient(tiny_policy(), config_of(teacher=paths, **PLAIN))
    groups = [
        replace(one, teaching=Teaching(name, array("i", prompt)))
        for one, name, prompt in zip(flat_groups(5), paths, ([], [4, 5, 6], [9, 1]), strict=True)
    ]
    client.forward_backward(groups)
    modules = {name: load_policy(path, "float32", "cpu").module for name, path in list(paths.items())[:2]}
    expected = by_hand(client, groups, {**modules, "own": client.policy.module})
    same(gradients(client), expected)
    stats = client.optim_step()
    assert set(stats.taught) == set(paths)
    assert sum(one.tokens for one in stats.taught.values()) == stats.num_tokens
    assert all(one.seconds > 0.0 for one in stats.taught.values())
    # The policy reads what it teaches as it is now.
    client.forward_backward([replace(groups[2], step=1)])
    expected = by_hand(client, [groups[2]], {"own": client.policy.module})
    same(gradients(client), expected)


def test_rewards_and_a_teacher_add_up(teacher: str) -> None:
    groups = [random_group(random.Random(2), at) for at in range(3)]
    found = {}
    for name, changes in {
        "both": {"teacher": teacher},
        "rewards": {},
        "teacher": {"teacher": teacher, "advantage": "none"},
    }.items():
        client = GrpoClient(tiny_policy(), config_of(**PLAIN, **changes))
        client.forward_backward(groups)
        found[name] = gradients(client)
    torch.testing.assert_close(found["both"], found["rewards"] + found["teacher"], rtol=1e-9, atol=1e-9)


def sampled(client: GrpoClient, seed: int) -> list[RolloutGroup]:
    """Groups that the policy draws, without a reward."""
    generator = torch.Generator().manual_seed(seed)
    made = []
    for number in range(4):
        prompt = [number, 12 - number]
        rollouts = []
        for _ in range(8):
            tokens, logprobs = list[int](), list[float]()
            for _ in range(3):
                with torch.no_grad():
                    logp = client.policy.module(torch.tensor([[*prompt, *tokens]])).logits[0, -1].log_softmax(-1)
                tokens.append(int(torch.multinomial(logp.exp(), 1, generator=generator)))
                logprobs.append(float(logp[tokens[-1]]))
            rollouts.append(rollout(tokens, 0.0, logprobs, version=client.version))
        made.append(replace(group(number, prompt, rollouts), step=client.version))
    return made


def divergence(module: torch.nn.Module, teacher: torch.nn.Module) -> float:
    """Mean of KL(pi || rho) at the tokens of fixed texts."""
    texts = [[number, 12 - number, first, second] for number in range(4) for first in range(3) for second in range(3)]
    with torch.no_grad():
        pi, rho = (each(torch.tensor(texts)).logits[:, 1:].double().log_softmax(-1) for each in (module, teacher))
    return float((pi.exp() * (pi - rho)).sum(-1).mean())


@pytest.mark.parametrize(
    "form",
    [{}, *(pytest.param({"top_k": 5, "beta": beta}, marks=pytest.mark.slow) for beta in (1.0, 0.5, 0.0))],
)
def test_a_student_without_a_reward_becomes_its_teacher(teacher: str, form: dict[str, float]) -> None:
    client = GrpoClient(tiny_policy(), config_of(teacher=teacher, divergence=form, lr=2e-2))
    rho = load_policy(teacher, "float32", "cpu").module
    before, told = divergence(client.policy.module, rho), []
    for seed in range(30):
        client.forward_backward(sampled(client, seed))
        stats = client.optim_step()
        told.append(stats.taught[""].log_ratio / stats.taught[""].tokens)
    after = divergence(client.policy.module, rho)
    assert after < 0.3 * before
    assert sum(told[-5:]) / 5 < 0.4 * told[0], "and the metric says so"


def test_a_resumed_run_has_the_same_teacher(teacher: str, tmp_path: Path) -> None:
    judge_resume(tmp_path, teacher=teacher, divergence={"top_k": 3})


def test_a_teacher_of_another_vocabulary_or_no_model_is_refused(tmp_path: Path) -> None:
    tiny_module(vocab=VOCAB - 1).save_pretrained(tmp_path / "small")
    with pytest.raises(UserError, match=r"vocabulary of 12 tokens, and the policy's has 13"):
        GrpoClient(tiny_policy(), config_of(teacher=str(tmp_path / "small")))
    with pytest.raises(UserError, match=r"distill\.teacher = .*nothing"):
        GrpoClient(tiny_policy(), config_of(teacher=str(tmp_path / "nothing")))


def test_a_teacher_with_more_tokens_teaches_those_of_the_policy(tmp_path: Path) -> None:
    tiny_module(seed=3, vocab=VOCAB + 4).save_pretrained(tmp_path / "large")
    client = GrpoClient(tiny_policy(), config_of(teacher=str(tmp_path / "large"), divergence={"top_k": 64}))
    (first,) = client.teachers.taught([made := flat_groups(1)[0]], [client.take_data(made)])[:1]  # type: ignore[union-attr]
    assert len(first.top_tokens) == VOCAB * first.loss_mask.count(1)
    assert max(first.top_tokens) == VOCAB - 1
    mass = torch.frombuffer(bytearray(first.top_logprobs), dtype=torch.float32).exp().view(-1, VOCAB).sum(1)
    assert (mass < 0.999).all(), "the others have their share"


def test_a_group_that_its_teacher_can_not_read_is_left_out(teacher: str) -> None:
    client = GrpoClient(tiny_policy(), config_of(teacher={"maths": teacher}))
    made = flat_groups(1)[0]
    assert "is none of maths" in client.why_unfit(made)
    assert client.why_unfit(replace(made, teaching=Teaching("maths"))) == ""
    long = replace(made, teaching=Teaching("maths", array("i", [1] * 256)))
    assert "the teacher maths has 256 positions" in client.why_unfit(long)
