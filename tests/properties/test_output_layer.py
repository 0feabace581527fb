"""Scores in tiles are those of all logits at once, and so are their gradients."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from echo2.learner.core import output_layer
from echo2.learner.core.output_layer import Choice, OutputLayer, plain_scores, tiled_scores
from seeds import examples

Cut = tuple[int, int]


def random_choices(rng: random.Random, positions: int, vocabulary: int) -> list[Choice]:
    """Several tokens at one position, the same token twice, and widths from one token to more than the vocabulary."""
    choices = []
    for _ in range(rng.randint(0, 3)):
        count, width = rng.randint(1, 2 * positions), rng.choice([1, 2, vocabulary + 2])
        tokens = [[rng.randrange(vocabulary) for _ in range(width)] for _ in range(count)]
        choices.append(Choice(torch.tensor([rng.randrange(positions) for _ in range(count)]), torch.tensor(tokens)))
    return choices


def weighted_sum(found: output_layer.Scores, wants_total: bool) -> Tensor:
    """A number that depends on every score, on each in its own way."""
    parts = [*found.chosen, *([found.log_total_u] if wants_total else [])]
    return sum((torch.sin(part * 1.3 + 0.2).sum() for part in parts), torch.zeros((), dtype=torch.float64))


def gradients(total: Tensor, inputs: Sequence[Tensor]) -> list[Tensor]:
    found = torch.autograd.grad(total, inputs, allow_unused=True) if total.requires_grad else [None] * len(inputs)
    return [torch.zeros_like(tensor) if grad is None else grad for tensor, grad in zip(inputs, found, strict=True)]


@given(
    seed=st.integers(0, 10**6),
    sizes=st.tuples(st.integers(1, 9), st.integers(1, 5), st.integers(1, 17)),
    tile=st.tuples(st.integers(1, 10), st.integers(1, 18)),
    temperature=st.sampled_from([1.0, 0.6, 2.5]),
    scale=st.sampled_from([1.0, 0.25]),
    softcap=st.sampled_from([None, 3.0]),
    has_bias=st.booleans(),
    wants_total=st.booleans(),
    together=st.integers(1, 3),
)
@examples(150)
def test_tiled_scores_equal_those_of_all_logits(
    seed: int,
    sizes: tuple[int, int, int],
    tile: Cut,
    temperature: float,
    scale: float,
    softcap: float | None,
    has_bias: bool,
    wants_total: bool,
    together: int,
) -> None:
    positions, hidden, vocabulary = sizes
    torch.manual_seed(seed)
    shapes = [(positions, hidden), (vocabulary, hidden), *([(vocabulary,)] if has_bias else [])]
    inputs = [(3 * torch.randn(shape, dtype=torch.float64)).requires_grad_() for shape in shapes]
    choices = random_choices(random.Random(seed), positions, vocabulary)
    layer = OutputLayer(inputs[1], inputs[2] if has_bias else None, scale, softcap)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(output_layer, "CHOICES_TOGETHER", (together, together))
        found = tiled_scores(inputs[0], layer, choices, temperature, wants_total, tile)
        found_gradients = gradients(weighted_sum(found, wants_total), inputs)
    logits_uV = scale * torch.nn.functional.linear(inputs[0], inputs[1], inputs[2] if has_bias else None)
    if softcap is not None:
        logits_uV = softcap * torch.tanh(logits_uV / softcap)
    expected = plain_scores(logits_uV, choices, temperature)
    logp_uV = (logits_uV / temperature).log_softmax(-1)
    close = {"rtol": 1e-9, "atol": 1e-9}
    for ours, theirs in zip(found.chosen, expected.chosen, strict=True):
        torch.testing.assert_close(ours, theirs, **close)
    if wants_total:
        torch.testing.assert_close(found.log_total_u, expected.log_total_u, **close)
        entropy_u = -(logp_uV.exp() * logp_uV).sum(-1).detach()
        torch.testing.assert_close(found.entropy_u, entropy_u, **close)
        torch.testing.assert_close(expected.entropy_u, entropy_u, **close)
    for ours, theirs in zip(found_gradients, gradients(weighted_sum(expected, wants_total), inputs), strict=True):
        torch.testing.assert_close(ours, theirs, **close)


@pytest.mark.parametrize("trained", [(True, False), (False, True), (False, False)])
def test_only_the_gradients_that_are_wanted_are_made(trained: tuple[bool, bool]) -> None:
    torch.manual_seed(0)
    hidden_uD, weight_VD = (
        torch.randn(shape, requires_grad=on) for shape, on in zip([(5, 3), (11, 3)], trained, strict=True)
    )
    choice = Choice(torch.tensor([0, 4]), torch.tensor([[1, 2], [3, 3]]))
    found = tiled_scores(hidden_uD, OutputLayer(weight_VD), [choice], tile=(2, 4))
    total = found.log_total_u.sum() + found.chosen[0].sum()
    assert total.requires_grad == any(trained)
    assert not found.entropy_u.requires_grad
    if any(trained):
        total.backward()
    assert (hidden_uD.grad is not None, weight_VD.grad is not None) == trained


@pytest.mark.parametrize("autocast", [False, True])
def test_bfloat16_sums_are_float32(autocast: bool) -> None:
    """4,096 positions push one row of a float32 weight: sums rounded to bfloat16 on the way would lose most of them."""
    torch.manual_seed(0)
    hidden_uD = torch.randn(4096, 8).bfloat16()
    weight_VD = (torch.randn(64, 8) * 0.3).bfloat16().float().requires_grad_()
    logp_uV = (hidden_uD.float() @ weight_VD.t()).log_softmax(-1)
    (expected,) = torch.autograd.grad(-logp_uV[:, 5].sum(), [weight_VD])
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        read = hidden_uD.float() if autocast else hidden_uD
        found = tiled_scores(
            read, OutputLayer(weight_VD), [Choice(torch.arange(4096), torch.full((4096, 1), 5))], tile=(64, 16)
        )
        (grad,) = torch.autograd.grad((found.log_total_u - found.chosen[0][:, 0]).sum(), [weight_VD])
    assert found.log_total_u.dtype == grad.dtype == torch.float32
    torch.testing.assert_close(found.log_total_u - found.chosen[0][:, 0], -logp_uV[:, 5], rtol=1e-5, atol=1e-5)
    assert float((grad - expected).norm() / expected.norm()) < 1e-3


def test_a_pass_before_for_the_hidden_states_alone_adds_nothing() -> None:
    torch.manual_seed(0)
    hidden_uD, weight_VD = (torch.randn(shape, requires_grad=True) for shape in [(5, 3), (11, 3)])
    found = tiled_scores(hidden_uD, OutputLayer(weight_VD), [Choice(torch.tensor([0]), torch.tensor([[1, 2]]))])
    total = found.log_total_u.sum() + found.chosen[0].sum()
    (first,) = torch.autograd.grad(total, [hidden_uD], retain_graph=True)
    both = torch.autograd.grad(total, [hidden_uD, weight_VD], retain_graph=True)
    again = torch.autograd.grad(total, [hidden_uD, weight_VD])
    for ours, theirs in zip(both, again, strict=True):
        torch.testing.assert_close(ours, theirs)
    torch.testing.assert_close(first, both[0])
