"""What a worker says of the tokens that were likely: what a sampler says passes, what none could have said does not."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from echo2.config.values import TOP_LOGPROBS_MAX
from echo2.core.errors import PeerError
from echo2.core.types import RUN_POLICY, GroupRef, Rollout, RolloutGroup, SamplingParams
from echo2.engines.random_streams import stream_keys
from echo2.engines.sampler import Sampler
from echo2.transport.codecs import check_top
from echo2.transport.limits import LOGPROB_MIN, TOP_WIDTH_MAX
from head_cases import OpenHead, delivery, rows, sample, settings, until
from rollout_cases import END

VOCAB = 6


def group(rollout: Rollout) -> RolloutGroup:
    return RolloutGroup(GroupRef(RUN_POLICY, "train", 0), 0, 1, 0, array("i", [1]), (rollout,))


def halves(*values: float) -> bytes:
    return np.array(values, dtype="<f2").tobytes()


def honest() -> Rollout:
    """Of probabilities .5, .25, .125, ... two tokens were drawn, the second not among the two most likely; between them
    the environment wrote one."""
    return Rollout(
        tokens=array("i", [4, 0, 1]),
        logprobs=array("f", np.log([0.5, 1.0, 0.125])),
        loss_mask=b"\1\0\1",
        version_spans=((0, 0),),
        finish="stop",
        top_tokens=array("i", [4, 2, 4, 2]),
        top_logprobs=halves(*np.log([0.5, 0.25] * 2)),
    )


def test_what_was_sampled_passes() -> None:
    check_top(group(honest()), 2, VOCAB)
    assert TOP_WIDTH_MAX == TOP_LOGPROBS_MAX


@given(st.integers(0, 10**6), st.integers(1, 12), st.sampled_from([0.3, 1.0, 3.0]), st.sampled_from([1.0, 10.0, 200.0]))
def test_what_the_sampler_says_always_passes(seed: int, asked: int, temperature: float, sharpness: float) -> None:
    logits = torch.randn(3, VOCAB, generator=torch.Generator().manual_seed(seed)) * sharpness
    params = SamplingParams(temperature=temperature, top_logprobs=asked)
    keys, places = stream_keys([seed] * 3, range(3)), np.zeros(3, dtype=np.int64)
    drawn = Sampler(keys, [params] * 3, torch.device("cpu")).draw(logits, places)
    exact = (logits / temperature).log_softmax(-1)
    for row in range(3):
        ids, logprobs = drawn.tops[row]
        expected = exact[row].sort(descending=True).values[:asked].clamp(min=LOGPROB_MIN)
        assert logprobs.tolist() == pytest.approx(expected.tolist(), rel=1e-3, abs=1e-6)
        assert logprobs.tolist() == pytest.approx(
            exact[row][ids.tolist()].clamp(min=LOGPROB_MIN).tolist(), rel=1e-3, abs=1e-6
        )
        if drawn.logprobs_B[row] >= LOGPROB_MIN:
            rollout = Rollout(
                tokens=array("i", [int(drawn.tokens_B[row])]),
                logprobs=array("f", [drawn.logprobs_B[row]]),
                loss_mask=b"\1",
                version_spans=((0, 0),),
                finish="stop",
                top_tokens=array("i", ids.tobytes()),
                top_logprobs=logprobs.tobytes(),
            )
            check_top(group(rollout), asked, VOCAB)


def test_rows_that_ask_for_fewer_get_fewer() -> None:
    params = [SamplingParams(top_logprobs=asked) for asked in (2, 0, 9)] + [SamplingParams(top_k=3, top_logprobs=2)]
    sampler = Sampler(stream_keys([0] * 4, range(4)), params, torch.device("cpu"))
    drawn = sampler.draw(torch.randn(4, VOCAB), np.zeros(4, dtype=np.int64))
    assert {row: len(ids) for row, (ids, _) in drawn.tops.items()} == {0: 2, 2: VOCAB}


LIES: dict[str, Callable[[Rollout], Rollout]] = {
    "none": lambda r: replace(r, top_tokens=array("i"), top_logprobs=b""),
    "fewer": lambda r: replace(r, top_tokens=r.top_tokens[:2], top_logprobs=r.top_logprobs[:4]),
    "of the environment's token too": lambda r: replace(
        r, top_tokens=r.top_tokens + r.top_tokens[:2], top_logprobs=r.top_logprobs + r.top_logprobs[:4]
    ),
    "fewer logprobs": lambda r: replace(r, top_logprobs=r.top_logprobs[:6]),
    "a token outside the vocabulary": lambda r: replace(r, top_tokens=array("i", [4, VOCAB, 4, 2])),
    "a token twice": lambda r: replace(r, top_tokens=array("i", [4, 4, 4, 2])),
    "NaN": lambda r: replace(r, top_logprobs=halves(-0.6931, np.nan, -0.6931, -1.386)),
    "minus infinity": lambda r: replace(r, top_logprobs=halves(-0.6931, -np.inf, -0.6931, -1.386)),
    "below any that is drawn": lambda r: replace(r, top_logprobs=halves(-0.6931, -101, -0.6931, -1.386)),
    "above 0": lambda r: replace(r, logprobs=array("f", [0.0, 0.0, -9.0]), top_logprobs=halves(0.01, -50, -0.7, -1.4)),
    "more than everything": lambda r: replace(r, top_logprobs=halves(-0.6931, -0.6, -0.6931, -1.386)),
    "the drawn token's own is another": lambda r: replace(r, top_logprobs=halves(-0.75, -1.386, -0.6931, -1.386)),
    "the drawn token is likelier, and not there": lambda r: replace(
        r, top_logprobs=halves(-0.6931, -1.386, -0.6931, -3)
    ),
}


@pytest.mark.parametrize("lie", LIES.values(), ids=LIES)
def test_what_no_sampler_could_have_said_is_refused(lie: Callable[[Rollout], Rollout]) -> None:
    with pytest.raises(PeerError, match="malformed"):
        check_top(group(lie(honest())), 2, VOCAB)


@pytest.mark.parametrize("count", [0, 2, 3])
def test_the_head_asks_for_them_and_feeds_them_to_the_learner(tmp_path: Path, count: int) -> None:
    async def scenario() -> None:
        raw = settings(rows(tmp_path / "rows.jsonl", "53="), learner={"loss_params": {"score_centering": 1}})
        async with OpenHead(tmp_path, raw) as open_head, open_head.attending() as leases:
            await until(lambda: leases)
            assert leases[0].top_logprobs == 1
            told = sample([5, 7, END])
            told.top_tokens = array("i", [5, 7, END][:count]).tobytes()
            told.top_logprobs = halves(*array("f", told.logprobs)[:count])
            ((accepted, reason),) = await open_head.deliver(delivery(leases[0], [told] * 4))
            assert accepted == (count == 3), reason
            if accepted:
                await until(lambda: open_head.fed)
                assert {rollout.top_tokens.tobytes() for rollout in open_head.fed[0].rollouts} == {told.top_tokens}

    asyncio.run(asyncio.wait_for(scenario(), 60.0))


def test_what_nobody_asked_for_is_refused() -> None:
    with pytest.raises(PeerError, match="4 top tokens, not 0"):
        check_top(group(honest()), 0, VOCAB)
