"""A check replays the swaps of weights that a rollout went through: honest rollouts pass however far the weights are
apart, and a claimed swap hides nothing, because it makes no tolerance wider."""

from __future__ import annotations

import asyncio
import itertools
import random
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st
from packaging.version import Version

from echo2.core.errors import PeerError
from echo2.core.types import (
    RUN_POLICY,
    Assignment,
    GroupRef,
    Lease,
    Message,
    Reply,
    Rollout,
    RolloutGroup,
    SamplingParams,
    Snapshot,
    SnapshotRef,
    Task,
)
from echo2.engines import compact, hf_engine
from echo2.engines.compact import build_compact
from echo2.engines.decode_loop import DecodeLoop
from echo2.engines.tokenizer import load_tokenizer
from echo2.engines.torch_engine import Model, TorchDecoder
from echo2.rollouts.generate import sample_group
from echo2.rollouts.verification import Comparison, Verdict, check_group, nearest, readings_of
from engine_builders import BUILDERS
from rollout_cases import END, VOCAB, Beside, Hooked, assigned, hf_logits, snapshot_of, tiny_module, tokenizer_files
from seeds import examples, pairs

TEMPLATE = (
    b"{% for m in messages %}{{ 'h' if m.role == 'user' else 'a' }}={{ m.content }}<eos>{% endfor %}"
    b"{% if add_generation_prompt %}a={% endif %}"
)


class Library(TorchDecoder):
    """Keeps every policy that it ever had."""

    def __init__(self, build: Any) -> None:
        super().__init__(build, "cpu")
        self._shelf: dict[SnapshotRef, Model] = {}

    def load(self, snapshot: Snapshot, base: Snapshot | None = None) -> float:
        seconds = super().load(snapshot, base)
        self._shelf[snapshot.ref] = self._policy()[1]
        return seconds

    @property
    def held_refs(self) -> tuple[SnapshotRef, ...]:
        return tuple(self._shelf)

    def _held(self, ref: SnapshotRef, form: str = "") -> Model:
        return self._shelf[ref].formed(form) if form else self._shelf[ref]


def library(name: str, *snapshots: Snapshot) -> DecodeLoop:
    decoder = Library(BUILDERS[name])
    for snapshot in snapshots:
        decoder.load(snapshot)
    return DecodeLoop(decoder)


def two_weights(name: str, old: Snapshot, new: Snapshot) -> DecodeLoop:
    """An engine that checks under both."""
    decoder = TorchDecoder(BUILDERS[name], "cpu")
    decoder.load(old)
    decoder.prefill(old.ref, [])  # from now on it keeps the weights before
    decoder.load(new)
    return DecodeLoop(decoder)


@lru_cache
def weights(version: int) -> Snapshot:
    """As far apart as weights can be."""
    return snapshot_of(tiny_module("qwen3", seed=version), version)


def swapping(name: str, swaps: Mapping[int, Snapshot], first: Snapshot, slots: int = 64) -> DecodeLoop:
    """An engine that gets these weights before these steps."""
    decoder = TorchDecoder(BUILDERS[name], "cpu")
    decoder.load(first)
    return DecodeLoop(Hooked(decoder, lambda step: step not in swaps or decoder.load(swaps[step])), slots)


def leased(number: int, num_samples: int = 6, **params: Any) -> Assignment:
    rng = random.Random(number)
    prompt = array("i", [rng.randrange(2, VOCAB) for _ in range(rng.randrange(1, 8))])
    lease = Lease(1, GroupRef(RUN_POLICY, "train", number), 0, number, num_samples, 0, None, 60.0, 60.0, 77 + number)
    return Assignment(lease, prompt, SamplingParams(**({"max_tokens": 24} | params)))


def sampled(engine: DecodeLoop, *assignments: Assignment, **kwargs: Any) -> list[RolloutGroup]:
    tokenizer = load_tokenizer(tokenizer_files() | {"chat_template.jinja": TEMPLATE})

    async def go() -> list[Any]:
        return await asyncio.gather(*(sample_group(engine, tokenizer, one, "w", **kwargs) for one in assignments))

    groups = asyncio.run(go())
    assert all(isinstance(group, RolloutGroup) for group in groups), groups
    return groups


def judged(engine: Any, assignment: Assignment, group: RolloutGroup, **kwargs: Any) -> Verdict:
    oldest = min(rollout.oldest_version for rollout in group.rollouts)
    ref = SnapshotRef(RUN_POLICY, group.lineage, oldest)
    return asyncio.run(check_group(engine, ref, assignment, group, **kwargs))


def assert_honest(engine: Any, assignment: Assignment, group: RolloutGroup) -> None:
    verdict = judged(engine, assignment, group)
    assert (verdict.fault, verdict.num_skipped) == ("", 0)
    assert verdict.num_tokens == sum(one.loss_mask.count(1) for one in group.rollouts)
    assert verdict.worst_interval < 1e-4
    assert verdict.worst_logprob < 1e-3


def num_spans(groups: Sequence[RolloutGroup]) -> set[int]:
    return {len(rollout.version_spans) for group in groups for rollout in group.rollouts}


@pytest.mark.parametrize(("name", "params"), pairs(BUILDERS, ({}, {"temperature": 0.7}, {"top_k": 8, "top_p": 0.9})))
def test_swaps_within_a_rollout_are_replayed_whichever_engine_samples_and_checks(
    name: str, params: dict[str, Any]
) -> None:
    """Several groups share few slots, so rows join late, and share the prompt of rows that run."""
    swaps = {4: weights(1), 13: weights(2), 25: weights(3), 31: weights(4)}
    asked = [leased(number, num_samples=5, max_tokens=24 - 7 * number, **params) for number in range(3)]
    groups = sampled(swapping(name, swaps, weights(0), slots=4), *asked)
    assert num_spans(groups) >= {1, 2, 3}
    for checker in BUILDERS:
        engine = library(checker, *map(weights, range(5)))
        for assignment, group in zip(asked, groups, strict=True):
            assert_honest(engine, assignment, group)


class Talking:
    """An environment that answers with a few characters, until it has had enough."""

    stop = ""

    def __init__(self, turns: int = 4) -> None:
        self._turns, self._told = turns, list[int]()

    def begin(self, columns: Mapping[str, Any], seed: int) -> int:
        self._told.append(0)
        return len(self._told) - 1

    def turn_tokens(self, rollout: int) -> int:
        return 5

    def step(self, rollout: int, action: str) -> Reply:
        self._told[rollout] += 1
        return Reply("7" * ((self._told[rollout] - 1) % 3), 0.0, self._told[rollout] == self._turns)

    def end(self, rollout: int) -> None:
        """Nothing to do."""


def talk(number: int, num_samples: int = 6, max_tokens: int = 48) -> Assignment:
    tokenizer = load_tokenizer(tokenizer_files() | {"chat_template.jinja": TEMPLATE})
    lease = Lease(1, GroupRef(RUN_POLICY, "train", number), 0, number, num_samples, 0, None, 60.0, 60.0, 77 + number)
    task = Task(number, (Message("user", str(number)),))
    return assigned(lease, task, SamplingParams(max_tokens=max_tokens), "talking", 4, tokenizer)


@pytest.mark.parametrize(("name", "slots"), pairs(BUILDERS, (3, 64)))
def test_swaps_within_and_between_turns_are_replayed(name: str, slots: int) -> None:
    """A later turn is read again, or kept if it was read, under the weights that draw its first token."""
    for every in (2, 5, 7):
        swaps = {every * version: weights(version) for version in range(1, 5)}
        asked = [talk(number) for number in range(2)]
        worlds = {"talking": Beside(Talking())}
        groups = sampled(swapping(name, swaps, weights(0), slots), *asked, environments=worlds)
        assert max(num_spans(groups)) > 2
        for checker in BUILDERS:
            engine = library(checker, *map(weights, range(5)))
            for assignment, group in zip(asked, groups, strict=True):
                assert_honest(engine, assignment, group)


def test_swaps_are_replayed_where_turns_do_not_show() -> None:
    """The first reply is empty, so nothing shows whether a swap is within a turn or between two."""
    engine = two_weights("compact", weights(0), weights(1))
    asked = replace(talk(0, num_samples=4), is_chat=False)
    for step in range(2, 16):
        sampler = swapping("compact", {step: weights(1)}, weights(0), slots=3)
        (group,) = sampled(sampler, asked, environments={"talking": Beside(Talking())})
        verdict = judged(engine, asked, group)
        assert (verdict.fault, verdict.num_skipped) == ("", 0)
        shifted = tuple(replace(one, logprobs=array("f", [x - 0.05 for x in one.logprobs])) for one in group.rollouts)
        assert judged(engine, asked, replace(group, rollouts=shifted)).fault != ""


def family(name: str, version: int) -> Snapshot:
    """Models with sliding windows (which are much shorter than a rollout), experts, and recurrent layers."""
    import transformers

    sizes: dict[str, Any] = {"vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 2}
    if not name.startswith("Mamba"):
        sizes |= {"num_attention_heads": 2, "intermediate_size": 32, "max_position_embeddings": 64}
    if name in ("Gemma2", "GptOss"):
        sizes |= {"num_key_value_heads": 1, "head_dim": 16, "sliding_window": 6}
    if name == "GptOss":
        sizes |= {"num_local_experts": 2, "num_experts_per_tok": 1, "rope_parameters": {"rope_type": "default"}}
    if name == "Mamba2":
        sizes |= {"num_heads": 4, "head_dim": 16, "state_size": 8, "n_groups": 1}
    if name == "Bamba":  # recurrent layers and one of attention
        sizes |= {"num_key_value_heads": 1, "attn_layer_indices": [1], "mamba_n_heads": 4, "mamba_d_state": 8}
    torch.manual_seed(version)
    ends = {"pad_token_id": 0, "bos_token_id": None, "eos_token_id": END}
    config = getattr(transformers, f"{name}Config")(**sizes, **ends, initializer_range=0.3)
    return snapshot_of(getattr(transformers, f"{name}ForCausalLM")(config).eval(), version)


@pytest.mark.parametrize("name", ["Gemma2", "GptOss", "Mamba", "Mamba2", "Bamba", "GPTNeoX"])
def test_swaps_are_replayed_by_every_family(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In pieces shorter than the sequences, too."""
    if name == "Bamba" and Version(transformers.__version__) < Version("5.14"):
        pytest.skip("transformers before 5.14 decodes a Bamba differently than it reads it")
    versions = [family(name, version) for version in range(3)]
    asked = [leased(number, num_samples=3) for number in range(2)]
    groups = sampled(swapping("transformers", {5: versions[1], 14: versions[2]}, versions[0], slots=4), *asked)
    assert max(num_spans(groups)) > 1
    for tokens in (hf_engine.PIECE_TOKENS, 4):
        monkeypatch.setattr(hf_engine, "PIECE_TOKENS", tokens)
        monkeypatch.setattr("echo2.engines.torch_engine.TILE_ITEMS", tokens * VOCAB)
        checker = library("transformers", *versions)
        for assignment, group in zip(asked, groups, strict=True):
            assert_honest(checker, assignment, group)


@pytest.mark.parametrize(("name", "most"), pairs(BUILDERS, (1, 5, 64)))
def test_a_sequence_read_in_parts_has_the_logits_of_the_whole(
    name: str, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compact, "PIECE_TOKENS", 7)
    monkeypatch.setattr(hf_engine, "PIECE_TOKENS", 7)
    decoder, rng = Library(BUILDERS[name]), random.Random(most)
    decoder.load(weights(0))
    _, model, _ = decoder._policy()
    sequence = array("i", [rng.randrange(VOCAB) for _ in range(40)])
    with torch.inference_mode():
        whole = torch.cat(list(model.logits([sequence], [0], 64)))
        for cuts, first in itertools.product([(39,), (1, 39), (20, 21, 39), (13, 26, 39)], [0, 3, 25]):
            cache, tiles, start = None, list[torch.Tensor](), 0
            for cut in cuts:
                cache, some = model.extend(cache, sequence[start:cut], max(0, first - start), most)
                tiles += some
                start = cut
            assert max(map(len, tiles)) <= max(1, most)
            assert (torch.cat(tiles) - whole[first:]).abs().max() < 1e-4


# ---- claimed swaps ---------------------------------------------------------------------------------------------------

Claim = Callable[[Rollout], tuple[tuple[int, int], ...]]
CLAIMS: dict[str, Claim] = {
    "one version twice": lambda _: ((0, 0), (1, 0)),
    "a swap at once": lambda one: ((0, 0), (1, 1)) if len(one.tokens) > 1 else ((0, 0),),
    "a swap halfway": lambda one: ((0, 0), (len(one.tokens) // 2, 1)) if len(one.tokens) > 1 else ((0, 0),),
    "one version again and again": lambda one: tuple((at, 0) for at in range(len(one.tokens))),
}


def near(version: int, by: float) -> Snapshot:
    module = tiny_module("qwen3")
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.mul_(1.0 + by * version)
    return snapshot_of(module, version)


def claiming(group: RolloutGroup, claim: Claim) -> RolloutGroup:
    return replace(group, rollouts=tuple(replace(one, version_spans=claim(one)) for one in group.rollouts))


def with_true_logprobs(assignment: Assignment, group: RolloutGroup) -> RolloutGroup:
    """As a liar computes them who knows the weights."""
    module, start, honest = tiny_module("qwen3"), len(assignment.prompt_tokens) - 1, list[Rollout]()
    for one in group.rollouts:
        logprobs_TV = hf_logits(module, assignment.prompt_tokens + one.tokens)[start:-1].log_softmax(-1)
        true = logprobs_TV.gather(1, torch.tensor(one.tokens)[:, None].long())[:, 0]
        honest.append(replace(one, logprobs=array("f", true.tolist())))
    return replace(group, rollouts=tuple(honest))


@pytest.mark.parametrize(
    ("claim", "params"), pairs(CLAIMS, ({"temperature": 0.9}, {"temperature": 0.7}, {"top_p": 0.9}))
)
def test_a_claimed_swap_does_not_weaken_the_check(claim: str, params: dict[str, Any]) -> None:
    """The weights are so near to each other that honest tokens of one pass as the other's."""
    old, new = near(0, 1e-7), near(1, 1e-7)
    engine, sampler = two_weights("compact", old, new), two_weights("compact", old, old)
    for number in range(3):
        asked = leased(number)
        (honest,) = sampled(sampler, asked)
        assert judged(engine, asked, claiming(honest, CLAIMS[claim])).fault == ""
        (cold,) = sampled(sampler, leased(number, **params))
        cheat = with_true_logprobs(asked, claiming(cold, CLAIMS[claim]))
        assert "random numbers" in judged(engine, asked, cheat).fault


def test_a_swap_claimed_at_the_wrong_token_is_detected() -> None:
    engine = two_weights("compact", weights(0), weights(1))
    asked = leased(3, num_samples=8)
    (group,) = sampled(swapping("compact", {8: weights(1)}, weights(0)), asked)
    assert_honest(engine, asked, group)
    for at in (6, 8):
        moved = claiming(group, lambda one, at=at: ((0, 0), (at, 1)) if one.version_spans[1:] else ((0, 0),))  # type: ignore[misc]
        assert judged(engine, asked, moved).fault != ""


def test_tokens_behind_weights_that_are_gone_are_skipped_and_those_before_are_judged() -> None:
    decoder = TorchDecoder(build_compact, "cpu")
    decoder.load(weights(0))
    engine = DecodeLoop(decoder)
    with pytest.raises(PeerError, match="does not hold"):  # from now on it keeps the weights before
        judged(engine, leased(0), sampled(swapping("compact", {}, weights(5)), leased(0))[0])
    decoder.load(weights(1))
    assert [one.version for one in engine.held_refs] == [1, 0]
    asked = leased(4, num_samples=8)
    (group,) = sampled(swapping("compact", {4: weights(1), 9: weights(2)}, weights(0)), asked)
    verdict = judged(engine, asked, group)
    late = sum(len(one.tokens) - 8 for one in group.rollouts if len(one.tokens) > 8)
    assert late
    assert (verdict.fault, verdict.num_skipped, verdict.num_tokens) == ("", late, group.num_tokens - late)
    decoder.load(weights(2))
    with pytest.raises(PeerError, match="does not hold"):
        judged(engine, asked, group)


# ---- what a check costs ----------------------------------------------------------------------------------------------


@st.composite
def claimed(draw: st.DrawFn) -> tuple[Rollout, bool]:
    """A rollout with any turns and spans, and whether its versions ascend."""
    length, ascends = draw(st.integers(1, 40)), draw(st.booleans())
    mask = bytes(draw(st.lists(st.integers(0, 1), min_size=length, max_size=length)))
    starts = [0, *sorted(draw(st.sets(st.integers(1, max(1, length - 1)), max_size=8)))]
    starts = [start for start in starts if start < length]
    versions = sorted(draw(st.sets(st.integers(0, 12), min_size=len(starts), max_size=len(starts))))
    if not ascends:
        versions = draw(st.lists(st.integers(0, 3), min_size=len(starts), max_size=len(starts)))
    spans = tuple(zip(starts, versions, strict=True))
    rollout = Rollout(array("i", [1] * length), array("f", [0.0] * length), mask, spans, "stop")
    return rollout, ascends


@examples(400)
@given(claimed(), st.sets(st.integers(0, 12)), st.booleans(), st.booleans())
def test_every_token_is_judged_once_by_few_prefills_whatever_is_claimed(
    case: tuple[Rollout, bool], held: set[int], in_turns: bool, is_chat: bool
) -> None:
    rollout, ascends = case
    assignment = replace(leased(0), environment="game" if in_turns else "", is_chat=is_chat)
    readings = list(readings_of(assignment, rollout, held))
    places = np.concatenate([np.zeros(0, dtype=np.int64), *(reading.places for reading in readings)])
    parts = [Comparison(*(reading.places + number / 9 for _ in range(6))) for number, reading in enumerate(readings)]
    kept = nearest(readings, parts)
    assert sum(len(part.logprobs) for part in kept) == len(set(places.tolist()))
    assert len(set(places.tolist())) == len(places) or (in_turns and not is_chat)
    sampled = {at for at, mask in enumerate(rollout.loss_mask) if mask}
    assert set(places.tolist()) <= sampled
    versions = {version for _, version in rollout.version_spans}
    if versions <= held:
        assert set(places.tolist()) == sampled
    if ascends:
        assert len(readings) <= max(0, 2 * len(versions & held) - 1)
    if not in_turns:
        assert len(readings) <= 1
    of_token = [
        version
        for (start, version), (stop, _) in itertools.pairwise([*rollout.version_spans, (len(rollout.tokens), -1)])
        for _ in range(start, stop)
    ]
    for reading in readings:
        request = reading.request
        assert request.reads[0][0] == 0
        assert all(one < other for (one, _), (other, _) in itertools.pairwise(request.reads))
        assert all(one != other for (_, one), (_, other) in itertools.pairwise(request.reads))
        assert {version for _, version in request.reads} <= held
        for place in reading.places.tolist():
            assert request.first <= place < len(request.tokens)
            assert [version for first, version in request.reads if first <= place][-1] == of_token[place]
