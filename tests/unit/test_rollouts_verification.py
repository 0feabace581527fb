"""One prefill tells honest rollouts from others: whoever sampled them, however they are narrowed, across versions."""

from __future__ import annotations

import asyncio
import itertools
import math
import random
from array import array
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from echo2.core.errors import PeerError
from echo2.core.types import (
    RUN_POLICY,
    Assignment,
    GroupRef,
    Lease,
    Rollout,
    RolloutGroup,
    SamplingParams,
    Snapshot,
    TensorBytes,
)
from echo2.engines import torch_engine
from echo2.engines.engine import Keys, PrefillRequest, derived_seed, uniforms
from echo2.engines.prefill import measure
from echo2.engines.registry import make_engine
from echo2.rollouts.generate import sample_group
from echo2.rollouts.verification import (
    OUTLIER_TOKENS,
    TOLERANCES,
    TYPICAL_TOKENS,
    Comparison,
    Verdict,
    check_group,
    numbers_of,
    tolerance_for,
    verdict,
)
from rollout_cases import VOCAB, hooked, load, plain_tokenizer, snapshot_of, tiny_module

PARAMS: list[dict[str, Any]] = [{}, {"temperature": 0.7}, {"top_k": 5}, {"top_p": 0.8}, {"top_k": 8, "top_p": 0.7}]
PARAMS += [{"min_p": 0.03}, {"min_p": 0.1, "top_p": 0.9}]


def leased(seed: int, num_samples: int = 6, **params: Any) -> Assignment:
    rng = random.Random(seed)
    prompt = array("i", [rng.randrange(2, VOCAB) for _ in range(rng.randrange(1, 8))])
    lease = Lease(1, GroupRef(RUN_POLICY, "train", seed), 0, seed, num_samples, 0, None, 60.0, 60.0, 12345 + seed)
    return Assignment(lease, prompt, SamplingParams(**({"max_tokens": 24} | params)))


def engine_with(name: str, *snapshots: Snapshot) -> Any:
    engine = make_engine(name, "cpu")
    for snapshot in snapshots:
        load(engine, snapshot)
    return engine


def sampled(engine: Any, assignment: Assignment) -> RolloutGroup:
    group = asyncio.run(sample_group(engine, plain_tokenizer(), assignment, "worker"))
    assert isinstance(group, RolloutGroup)
    return group


def judged(engine: Any, assignment: Assignment, group: RolloutGroup, **kwargs: Any) -> Verdict:
    return asyncio.run(check_group(engine, engine.installed, assignment, group, **kwargs))


@pytest.mark.parametrize("params", PARAMS)
@pytest.mark.parametrize("family", ["qwen3", "llama"])
def test_honest_groups_pass_whichever_engine_sampled_and_whichever_checks(family: str, params: dict[str, Any]) -> None:
    snapshot = snapshot_of(tiny_module(family))
    compact, hf = engine_with("compact", snapshot), engine_with("transformers", snapshot)
    for seed, (sampler, checker) in enumerate([(compact, compact), (compact, hf), (hf, compact)]):
        assignment = leased(seed, **params)
        group = sampled(sampler, assignment)
        verdict = judged(checker, assignment, group)
        assert verdict.fault == "", (seed, verdict)
        assert verdict.num_tokens == group.num_tokens
        assert verdict.worst_interval < 1e-4


@pytest.mark.parametrize("params", PARAMS)
def test_a_single_forged_token_is_detected(params: dict[str, Any]) -> None:
    """Another token of the support, with the logprob that it really has under the policy."""
    engine, num_seen, num_tried = engine_with("compact", snapshot_of(tiny_module("qwen3"))), 0, 0
    for seed in range(6):
        assignment = leased(seed, **params)
        group = sampled(engine, assignment)
        rollout = max(group.rollouts, key=lambda one: len(one.tokens))
        place = len(rollout.tokens) // 2
        support = range(VOCAB)
        if rollout.support_tokens is not None and rollout.support_offsets is not None:
            support = rollout.support_tokens[rollout.support_offsets[place] : rollout.support_offsets[place + 1]]
        others = [token for token in support if token not in (rollout.tokens[place], 1)]
        if not others:
            continue
        edited = replace(rollout, tokens=array("i", rollout.tokens))
        edited.tokens[place] = random.Random(seed).choice(others)
        rollouts = tuple(edited if one is rollout else one for one in group.rollouts)
        num_tried += 1
        num_seen += (
            "not those that its random numbers draw"
            in judged(engine, assignment, replace(group, rollouts=rollouts)).fault
        )
    assert num_tried > 3
    assert num_seen == num_tried


def test_other_weights_forged_logprobs_other_seeds_and_copies_are_detected() -> None:
    module = tiny_module("qwen3")
    engine = engine_with("compact", snapshot_of(module))
    assignment = leased(3)
    group = sampled(engine, assignment)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.mul_(1.02)
    near = sampled(engine_with("compact", snapshot_of(module)), assignment)
    assert "random numbers" in judged(engine, assignment, near).fault
    again = sampled(engine, replace(assignment, lease=replace(assignment.lease, seed=999)))
    assert "random numbers" in judged(engine, assignment, again).fault
    copied = replace(group, rollouts=(group.rollouts[0],) * 6)
    assert "random numbers" in judged(engine, assignment, copied).fault
    forged = tuple(replace(one, logprobs=array("f", [x - 0.05 for x in one.logprobs])) for one in group.rollouts)
    assert "logprobs are off" in judged(engine, assignment, replace(group, rollouts=forged)).fault


@pytest.mark.parametrize("params", [{"top_p": 0.8}, {"top_k": 5}, {"min_p": 0.03}])
def test_a_support_that_names_a_token_twice_is_detected(params: dict[str, Any]) -> None:
    """With the likeliest token alone in it, as often as top-p asks for, every random number draws that token."""
    engine, assignment = engine_with("compact", snapshot_of(tiny_module("qwen3"))), leased(4, **params)
    tokens, supports, logprobs = array("i"), list[list[int]](), array("f")
    while len(tokens) < assignment.params.max_tokens:
        sequence = assignment.prompt_tokens + tokens + array("i", [0])
        (logits_1V,) = engine._decoder._policy()[1].logits([sequence], [len(sequence) - 2], 1)
        probs_V = logits_1V[0].softmax(-1)
        best = int(probs_V.argmax())
        size = math.ceil(params.get("top_p", 0.0) / float(probs_V[best])) or params.get("top_k") or 2
        tokens.append(best)
        supports.append([best] * size)
        logprobs.append(-math.log(size))
    offsets = array("i", np.cumsum([0, *map(len, supports)]).tolist())
    rollout = Rollout(
        tokens=tokens,
        logprobs=logprobs,
        loss_mask=b"\x01" * len(tokens),
        version_spans=((0, 0),),
        finish="length",
        support_tokens=array("i", itertools.chain(*supports)),
        support_offsets=offsets,
    )
    honest = sampled(engine, assignment)
    verdict = judged(engine, assignment, replace(honest, rollouts=(rollout,) * len(honest.rollouts)))
    assert "a token was drawn from others than top-k and top-p leave" in verdict.fault, verdict


def test_a_support_that_top_k_would_not_leave_is_detected() -> None:
    """A worker that samples without the top-k that it was told, and names its tokens' supports as they would be."""
    engine = engine_with("compact", snapshot_of(tiny_module("qwen3")))
    assignment = leased(1, top_k=4)
    wide = sampled(engine, leased(1, top_k=12))
    assert judged(engine, assignment, wide).fault != ""
    bare = tuple(replace(one, support_tokens=None, support_offsets=None) for one in wide.rollouts)
    assert judged(engine, assignment, replace(wide, rollouts=bare)).fault != ""


def test_without_the_stream_a_check_relies_on_the_mean_surprise() -> None:
    """As for token servers: honest tokens of another stream pass, and tokens of a colder distribution do not."""
    engine = engine_with("compact", snapshot_of(tiny_module("qwen3")))
    assignment = leased(5, num_samples=24)
    other = sampled(engine, replace(assignment, lease=replace(assignment.lease, seed=7)))
    assert judged(engine, assignment, other, is_from_stream=False).fault == ""
    server = tuple(replace(one, logprobs=array("f", [x - 0.02 for x in one.logprobs])) for one in other.rollouts)
    assert judged(engine, assignment, replace(other, rollouts=server), is_from_stream=False).fault == ""
    cold = sampled(engine, leased(5, num_samples=24, temperature=0.3))
    found = judged(engine, assignment, cold)
    honest = judged(engine, leased(5, num_samples=24, temperature=0.3), cold)
    assert found.fault != ""
    assert honest.fault == ""
    assert found.surprise < -2.0
    assert abs(honest.surprise) < 4.0


def test_tokens_of_a_version_that_is_not_held_are_not_judged() -> None:
    assignment = leased(2, num_samples=4)
    engine = engine_with("compact", snapshot_of(tiny_module("qwen3"), 1))
    group = sampled(engine, assignment)
    changed = []
    for one in group.rollouts:
        place = len(one.tokens) // 2
        tokens = one.tokens[:place] + array("i", [5] * (len(one.tokens) - place))
        changed.append(replace(one, tokens=tokens, version_spans=((0, 1), (place, 2)) if place else ((0, 2),)))
    mixed = replace(group, rollouts=tuple(changed))
    verdict = judged(engine, assignment, mixed)
    assert verdict.fault == ""
    assert verdict.num_tokens == sum(len(one.tokens) // 2 for one in group.rollouts)
    assert verdict.num_skipped == group.num_tokens - verdict.num_tokens


def test_an_engine_that_checks_keeps_the_weights_before_the_installed_ones() -> None:
    versions = [snapshot_of(tiny_module("qwen3", seed=version), version) for version in range(3)]
    engine = engine_with("compact", versions[0])
    assignment = leased(4)
    group = sampled(engine, assignment)
    assert judged(engine, assignment, group).fault == ""
    load(engine, versions[1])
    assert asyncio.run(check_group(engine, versions[0].ref, assignment, group)).fault == ""
    newer = sampled(engine, assignment)
    assert judged(engine, assignment, newer).fault == ""
    load(engine, versions[2])
    with pytest.raises(PeerError, match="does not hold"):
        asyncio.run(check_group(engine, versions[0].ref, assignment, group))


def test_an_engine_that_checks_takes_more_memory_to_hold_two_sets_of_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    versions = [snapshot_of(tiny_module("qwen3", seed=version), version) for version in range(3)]
    num_bytes = sum(tensor.num_bytes for tensor in versions[0].tensors.values())
    monkeypatch.setattr(torch_engine, "free_memory_bytes", lambda _: 16 * num_bytes)
    engine = engine_with("compact", *versions[:2])
    assert engine.held_refs == (versions[1].ref,)  # copied over the old ones
    asyncio.run(engine.prefill(versions[1].ref, []))
    load(engine, versions[2])
    assert engine.held_refs == (versions[2].ref, versions[1].ref)


def test_an_edited_token_before_or_after_a_swap_is_detected() -> None:
    old, new = snapshot_of(tiny_module("qwen3"), 1), snapshot_of(tiny_module("qwen3", seed=1), 2)
    assignment = leased(8, num_samples=4, max_tokens=24)
    engine, decoder = hooked("compact", lambda step: step != 8 or decoder.load(new), old)
    decoder._checks = True
    group = sampled(engine, assignment)
    spanned = [one for one in group.rollouts if len(one.version_spans) == 2]
    assert spanned
    honest = asyncio.run(check_group(engine, old.ref, assignment, group))
    assert (honest.fault, honest.num_skipped) == ("", 0)
    start = spanned[0].version_spans[1][0]
    for place in (start - 1, start, start + 1):
        edited = replace(spanned[0], tokens=array("i", spanned[0].tokens))
        edited.tokens[place] = (edited.tokens[place] + 11) % VOCAB
        rollouts = tuple(edited if one is spanned[0] else one for one in group.rollouts)
        assert asyncio.run(check_group(engine, old.ref, assignment, replace(group, rollouts=rollouts))).fault != ""


def test_rollouts_are_read_while_others_are_sampled() -> None:
    engine = engine_with("compact", snapshot_of(tiny_module("qwen3")))
    assignment = leased(6)
    alone = sampled(engine, assignment)

    async def both() -> tuple[Verdict, Any]:
        sampling = asyncio.ensure_future(sample_group(engine, plain_tokenizer(), assignment, "worker"))
        return await check_group(engine, engine.installed, assignment, alone), await sampling

    verdict, group = asyncio.run(both())
    assert verdict.fault == ""
    assert group.rollouts == alone.rollouts


def in_16_bits(snapshot: Snapshot) -> Snapshot:
    tensors = {}
    for name, one in snapshot.tensors.items():
        values = torch.frombuffer(bytearray(one.read(0, one.num_bytes)), dtype=torch.float32).bfloat16()
        tensors[name] = TensorBytes("BF16", one.shape, values.view(torch.int16).numpy().tobytes())
    return replace(snapshot, tensors=tensors)


def test_a_small_deviation_is_detected_in_short_answers_in_16_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight rollouts of eight tokens: the typical distance of a small group is not diluted."""
    engine = engine_with("compact", in_16_bits(snapshot_of(tiny_module("qwen3"))))
    rng = np.random.default_rng(0)

    def moved(keys_B: Keys, token_B: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
        return np.clip(uniforms(keys_B, token_B) + rng.uniform(-0.15, 0.15, len(keys_B)), 0.0, 1.0 - 2.0**-53)

    for seed in range(6):
        assignment = leased(seed, num_samples=8, max_tokens=8)
        verdict = judged(engine, assignment, sampled(engine, assignment))
        assert verdict.fault == "", verdict
        assert verdict.num_tokens <= TYPICAL_TOKENS
        assert verdict.typical_interval < TOLERANCES[16].typical_interval / 2
        with monkeypatch.context() as patch:
            patch.setattr("echo2.engines.sampler.uniforms", moved)
            chosen = sampled(engine, assignment)
        assert "typically miss" in judged(engine, assignment, chosen).fault


def test_a_small_deviation_at_most_tokens_is_detected_in_16_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker that moves each random number by so little that no single token shows it, to have several rollouts to
    choose from; and one that samples a little colder."""
    snapshot = in_16_bits(snapshot_of(tiny_module("qwen3")))
    compact, hf = engine_with("compact", snapshot), engine_with("transformers", snapshot)
    for sampler, checker in [(compact, compact), (compact, hf), (hf, compact)]:
        for seed in range(3):
            assignment = leased(seed, num_samples=16, max_tokens=40)
            verdict = judged(checker, assignment, sampled(sampler, assignment))
            assert verdict.fault == "", verdict
            assert verdict.num_tokens > TYPICAL_TOKENS
            assert verdict.typical_interval < TOLERANCES[16].typical_interval / 3
    rng = np.random.default_rng(0)

    def moved(keys_B: Keys, token_B: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
        return np.clip(uniforms(keys_B, token_B) + rng.uniform(-0.15, 0.15, len(keys_B)), 0.0, 1.0 - 2.0**-53)

    for seed in range(3):
        assignment = leased(seed, num_samples=16, max_tokens=40)
        cold = sampled(compact, leased(seed, num_samples=16, max_tokens=40, temperature=0.8))
        with monkeypatch.context() as patch:
            patch.setattr("echo2.engines.sampler.uniforms", moved)
            chosen = sampled(compact, assignment)
        for cheat in (cold, chosen):
            verdict = judged(compact, assignment, cheat)
            assert verdict.worst_interval < TOLERANCES[16].interval
            assert "typically miss" in verdict.fault


@pytest.mark.parametrize(("num_tokens", "off", "is_fault"), [(64, 0.15, False), (64, 0.161, True), (160, 0.11, True)])
def test_the_mean_over_few_tokens_of_rounded_weights_may_be_further_off(
    num_tokens: int, off: float, is_fault: bool
) -> None:
    """llama.cpp rounds what it multiplies, too: of honest groups of 64 tokens of SmolLM2, 2 in 100 were outside."""
    zeros = np.zeros(num_tokens)
    for form, limit in (("q8_0", is_fault), ("", off > TOLERANCES[16].mean_logprob)):
        tolerance = tolerance_for(16, form, num_tokens)
        assert (
            bool(verdict([Comparison(zeros, zeros, zeros + off, zeros, zeros, zeros)], num_tokens, tolerance).fault)
            == limit
        )
        misses = zeros + TOLERANCES[16].typical_interval * off / TOLERANCES[16].mean_logprob
        assert (
            bool(verdict([Comparison(misses, zeros, zeros, zeros, zeros, zeros)], num_tokens, tolerance).fault) == limit
        )
    assert tolerance_for(16, "q8_0", 160) == tolerance_for(16, "", 1) == TOLERANCES[16]
    assert tolerance_for(16, "q8_0", 0).interval == TOLERANCES[16].interval


@pytest.mark.parametrize("bits", [16, 32])
def test_one_token_far_off_is_an_outlier_and_two_are_not(bits: int) -> None:
    """Of 418 honest groups of a real model two had one token in bfloat16 that was .21 and .23 off, and no other above
    .07."""
    limit = TOLERANCES[bits].interval

    def fault(num_tokens: int, *off: float, told: float = 0.6) -> str:
        """Of a group in which so many tokens miss their intervals, and told such a share of that as probability."""
        zeros, misses = np.zeros(num_tokens), np.zeros(num_tokens)
        misses[: len(off)] = off
        parts = [Comparison(misses, zeros, zeros, told * misses, zeros, zeros)]
        return verdict(parts, num_tokens, TOLERANCES[bits]).fault

    assert fault(153, 1.13 * limit) == ""
    assert fault(OUTLIER_TOKENS, 1.13 * limit, 1.03 * limit) == ""
    assert "2 of 153 tokens are not those" in fault(153, 1.13 * limit, 1.03 * limit)
    assert "1 of 153 tokens are not those" in fault(153, 2.1 * limit)
    assert "1 of 153 tokens are not those" in fault(153, 1.13 * limit, told=0.1)  # drawn otherwise than was told


def test_a_narrower_support_than_claimed_is_found_in_16_bits() -> None:
    """Each token alone may lack some tokens of its support by rounding; all of them do not."""
    snapshot = in_16_bits(snapshot_of(tiny_module("qwen3")))
    compact, hf = engine_with("compact", snapshot), engine_with("transformers", snapshot)
    for seed, (sampler, checker) in enumerate([(compact, compact), (compact, hf), (hf, compact)]):
        assignment = leased(seed, num_samples=16, max_tokens=40, top_p=0.9)
        verdict = judged(checker, assignment, sampled(sampler, assignment))
        assert verdict.fault == "", verdict
        assert verdict.typical_support < TOLERANCES[16].typical_support / 3
        narrow = sampled(sampler, leased(seed, num_samples=16, max_tokens=40, top_p=0.8))
        verdict = judged(checker, assignment, narrow)
        assert verdict.worst_support < TOLERANCES[16].support
        assert "others than top-k and top-p leave" in verdict.fault


def test_in_16_bits_min_p_may_cut_a_token_that_rounding_made_too_unlikely() -> None:
    """The error is the probability of what is missing; it had been 1 for any token, which ended in a quarantine."""
    likely, threshold = 0.5, 0.5 * 0.05
    probs = torch.tensor([likely, 1.3 * threshold, 0.4 * threshold])
    probs_V = torch.cat([probs, (1.0 - probs.sum()).expand(1) / 100 * torch.ones(100)])
    for support, most in (([0], 1.4 * threshold), ([0, 1], 1e-6)):
        request = PrefillRequest(
            array("i", [1]),
            array("i", [0]),
            SamplingParams(min_p=0.05),
            ((0, 0),),
            support_tokens=array("i", support),
            support_offsets=array("i", [0, len(support)]),
        )
        (error,) = measure(iter([probs_V.log()[None]]), request, 16).support_errors
        assert error <= most
    (error,) = measure(
        iter([probs_V.log()[None]]), replace(request, support_tokens=array("i", [0, 2])), 16
    ).support_errors
    assert error > threshold / 2


def test_each_turn_has_a_stream_of_its_own() -> None:
    assignment = replace(leased(0), environment="game", is_chat=True)
    rollout = Rollout(array("i", [1] * 7), array("f", [0.0] * 7), b"\1\1\0\0\1\1\1", ((0, 0),), "stop")
    numbers = numbers_of(assignment, 3, rollout)

    def drawn(turn: int, count: int) -> list[float]:
        of_turn = replace(leased(0), lease=replace(assignment.lease, seed=derived_seed(assignment.lease.seed, 3, turn)))
        alone = replace(rollout, tokens=rollout.tokens[:count], loss_mask=b"\1" * count)
        return list(numbers_of(of_turn, 0, alone))

    assert list(numbers[:2]) == drawn(0, 2)
    assert list(numbers[2:4]) == [0.0, 0.0]
    assert list(numbers[4:]) == drawn(1, 3)
