"""Tokens come with the probability that is reported for them, and from nothing but their own row and stream."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from echo2.core.errors import PeerError
from echo2.core.types import SamplingParams
from echo2.engines.engine import stream_keys, uniforms
from echo2.engines.sampler import Draw, Sampler, invert, narrow
from echo2.transport.limits import SUPPORT_WIDTH_MAX
from seeds import examples

CPU = torch.device("cpu")
MASK = (1 << 64) - 1


def splitmix(state: int) -> int:
    """The published generator's output for a state that was already advanced."""
    state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & MASK
    return state ^ (state >> 31)


@given(st.integers(0, MASK), st.integers(0, 1 << 20), st.integers(0, 1 << 20))
def test_uniforms_are_splitmix64_of_key_and_counter(seed: int, sample: int, index: int) -> None:
    gamma = 0x9E3779B97F4A7C15
    key = splitmix(splitmix((seed + gamma) & MASK) ^ (((sample + 1) * gamma) & MASK))
    keys = stream_keys([seed], [sample])
    assert int(keys[0]) == key
    value = uniforms(keys, np.array([index]))[0]
    assert value == (splitmix((key + (index + 1) * gamma) & MASK) >> 11) / 2**53
    assert 0.0 <= value < 1.0


def test_the_reference_sequence_of_splitmix64() -> None:
    """First outputs for seed 1234567, as in Vigna's splitmix64.c and Rosetta Code."""
    values = uniforms(np.array([1234567, 1234567], dtype=np.uint64), np.array([0, 1]))
    assert [int(v * 2**53) for v in values] == [6457827717110365317 >> 11, 3203168211198807973 >> 11]


def draw(logits: torch.Tensor, params: SamplingParams, seed: int = 0) -> Draw:
    rows = len(logits)
    return Sampler(stream_keys([seed] * rows, range(rows)), [params] * rows, CPU).draw(
        logits, np.zeros(rows, dtype=np.int64)
    )


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(),
        SamplingParams(temperature=0.7),
        SamplingParams(temperature=1.5, top_k=5),
        SamplingParams(top_p=0.8),
        SamplingParams(temperature=0.7, top_k=6, top_p=0.9),
    ],
)
def test_frequencies_match_the_reported_probabilities(params: SamplingParams) -> None:
    """Chi-square against probabilities computed here in float64: 40 000 draws, fixed seed, 99.9 % quantile."""
    logits = torch.tensor([1.5, -0.5, 0.2, 0.9, -2.0, 0.4, -1.0, 1.1], dtype=torch.float64)
    wanted = reference(logits, params)
    rows = 40_000
    drawn = draw(logits.float().expand(rows, -1), params, seed=7)
    counts = np.bincount(drawn.tokens_B, minlength=len(wanted))
    possible = wanted > 0
    assert counts[~possible].sum() == 0
    chi_square = ((counts - rows * wanted)[possible] ** 2 / (rows * wanted[possible])).sum()
    assert chi_square < 24.3  # 7 degrees of freedom; fewer have smaller quantiles
    assert np.abs(drawn.logprobs_B - np.log(wanted[drawn.tokens_B])).max() < 1e-6


def reference(logits: torch.Tensor, params: SamplingParams) -> np.ndarray:
    """Temperature, then top-k, then the smallest nucleus, written the slow way."""
    p = np.exp(logits.numpy() / params.temperature)
    order = np.argsort(-p)
    if params.top_k:
        p[order[params.top_k :]] = 0.0
    p /= p.sum()
    mass = 0.0
    for token in order:
        if mass >= params.top_p:
            p[token] = 0.0
        mass += p[token]
    return p / p.sum()


@given(
    st.lists(st.floats(-30, 30, width=32), min_size=2, max_size=12),
    st.floats(0.05, 3.0),
    st.integers(0, 14),
    st.floats(0.01, 1.0),
    st.floats(0.0, 0.99),
    st.integers(0, MASK),
)
def test_a_token_is_in_its_support_and_its_logprob_is_normalised_over_it(
    values: list[float], temperature: float, top_k: int, top_p: float, min_p: float, seed: int
) -> None:
    params = SamplingParams(temperature, top_p, top_k, min_p=min_p)
    logits = torch.tensor([values], dtype=torch.float32)
    drawn = draw(logits, params, seed)
    token, logprob = int(drawn.tokens_B[0]), float(drawn.logprobs_B[0])
    assert 0 <= token < len(values)
    assert logprob <= 0.0
    if top_k == 0 and top_p == 1.0 and min_p == 0.0:
        assert drawn.supports == {}
        support = list(range(len(values)))
    else:
        support = drawn.supports[0].tolist()
        assert len(set(support)) == len(support) <= (top_k or len(values))
    assert token in support
    scaled = logits[0].double() / temperature
    if min_p:
        assert float(scaled[support].min()) >= float(scaled.max()) + math.log(min_p) - 1e-4
    wanted = scaled[token] - scaled[support].logsumexp(0)
    assert logprob == pytest.approx(float(wanted), abs=1e-4)


def test_min_p_leaves_what_is_likely_enough_beside_the_likeliest() -> None:
    logits = torch.tensor([[0.5, 0.3, 0.1, 0.06, 0.04]]).log()
    for min_p, left in ((0.05, 5), (0.1, 4), (0.19, 3), (0.5, 2), (0.7, 1)):
        assert draw(logits, SamplingParams(min_p=min_p)).supports[0].tolist() == list(range(left))
    both = draw(logits, SamplingParams(min_p=0.15, top_p=0.7)).supports[0].tolist()
    assert both == [0, 1]


def test_greedy_takes_the_likeliest_and_reports_the_plain_logprob() -> None:
    logits = torch.tensor([[0.0, 2.0, 1.0], [3.0, -1.0, 0.0]])
    drawn = draw(logits, SamplingParams(temperature=0.0, top_k=1))
    assert drawn.tokens_B.tolist() == [1, 0]
    assert drawn.supports == {}
    assert drawn.logprobs_B[0] == pytest.approx(2.0 - math.log(1 + math.e**2 + math.e), abs=1e-6)


def test_rows_with_different_parameters_do_not_disturb_each_other() -> None:
    params = [
        SamplingParams(),
        SamplingParams(temperature=0.0),
        SamplingParams(top_p=0.5),
        SamplingParams(temperature=2.0, top_k=3),
        SamplingParams(temperature=0.5),
    ] * 3
    logits = torch.randn((15, 20), generator=torch.Generator().manual_seed(0)) * 2
    keys = stream_keys(range(15), [0] * 15)
    places = np.arange(15) % 4
    together = Sampler(keys, params, CPU).draw(logits, places)
    for row in range(15):
        alone = Sampler(keys[row : row + 1], params[row : row + 1], CPU).draw(
            logits[row : row + 1], places[row : row + 1]
        )
        assert alone.tokens_B[0] == together.tokens_B[row]
        assert alone.logprobs_B[0] == pytest.approx(together.logprobs_B[row], abs=1e-6)
        assert (row in together.supports) == (0 in alone.supports)
        if 0 in alone.supports:
            assert alone.supports[0].tolist() == together.supports[row].tolist()


def test_the_nucleus_of_a_flat_distribution_is_cut_at_the_named_limit() -> None:
    logits, _ = narrow(
        torch.zeros((1, SUPPORT_WIDTH_MAX * 2)),
        torch.tensor([[SUPPORT_WIDTH_MAX]]),
        torch.tensor([[0.9]]),
        torch.tensor([[0.0]]),
    )
    assert int(logits.isfinite().sum()) == SUPPORT_WIDTH_MAX


def test_impossible_tokens_are_not_drawn_at_the_ends_of_the_unit_interval() -> None:
    never = float("-inf")
    logprobs = torch.tensor([[never, math.log(0.5), never, math.log(0.5), never]]).expand(3, -1)
    tokens, _ = invert(logprobs, torch.tensor([0.0, 0.5, 1 - 2.0**-53], dtype=torch.float64))
    assert tokens.tolist() == [1, 3, 3]


@examples(100)
@given(data=st.data())
def test_a_draw_in_blocks_is_the_draw_from_the_whole(data: st.DataObject) -> None:
    """Whatever the vocabulary, with tokens that are impossible anywhere: never one of these, and the number lies
    between the sums of all tokens before it and of these and its own, up to the rounding of float32."""
    seed, vocab = data.draw(st.integers(0, 10**6), "seed"), data.draw(st.integers(1, 700), "vocabulary")
    rng = torch.Generator().manual_seed(seed)
    logits = torch.randn((8, vocab), generator=rng) * data.draw(st.sampled_from([0.0, 1.0, 30.0]), "spread")
    impossible = torch.rand((8, vocab), generator=rng) < data.draw(st.sampled_from([0.0, 0.5, 0.99]), "impossible")
    impossible[torch.arange(8), torch.randint(vocab, (8,), generator=rng)] = False
    logprobs = logits.masked_fill(impossible, float("-inf")).log_softmax(-1)
    ends = [0.0, 1e-9, 0.5, 1 - 1e-9, 1 - 2.0**-53]
    uniform = torch.tensor([*ends, *torch.rand(3, generator=rng).tolist()], dtype=torch.float64)
    tokens, told = invert(logprobs, uniform)
    assert torch.equal(told, logprobs[torch.arange(8), tokens])
    assert (told > float("-inf")).all()
    cumulative = logprobs.double().exp().cumsum(-1)
    high = cumulative[torch.arange(8), tokens] / cumulative[:, -1]
    low = high - told.double().exp() / cumulative[:, -1]
    assert (low <= uniform + 1e-6).all()
    assert (uniform <= high + 1e-6).all()


def test_logits_that_are_not_finite_are_refused() -> None:
    with pytest.raises(PeerError, match="diverged"):
        draw(torch.tensor([[0.0, float("nan")]]), SamplingParams())
