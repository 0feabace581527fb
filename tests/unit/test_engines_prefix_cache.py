"""What is read once is not read again: between the turns of a rollout and between the rollouts of a group. The tokens
are those of an engine that reads everything."""

from __future__ import annotations

import asyncio
import random
from array import array
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from echo2.core.types import SamplingParams, Snapshot
from echo2.engines import torch_engine
from echo2.engines.compact import CompactModel, build_compact
from echo2.engines.decode_loop import DecodeLoop
from echo2.engines.engine import Completion, SampleRequest
from echo2.engines.rows import PrefixCache
from echo2.engines.torch_engine import TorchDecoder
from rollout_cases import VOCAB, Hooked, load, requests, run, snapshot_of, tiny_module
from seeds import examples

Told = list[tuple[list[int], list[float], tuple[tuple[int, int], ...]]]


class Reading(TorchDecoder):
    """Counts the prompt tokens that it reads before the first step."""

    def __init__(self) -> None:
        self.num_read = 0

        def build(snapshot: Snapshot, device: torch.device) -> CompactModel:
            model = build_compact(snapshot, device)
            prefill = model.prefill

            def counted(prompts: Sequence[array[int]], known: Sequence[Any], keeps_routes: bool) -> Any:
                told = [one.longest if one else 0 for one in known or [None] * len(prompts)]
                self.num_read += sum(len(prompt) - first for prompt, first in zip(prompts, told, strict=True))
                return prefill(prompts, known, keeps_routes)

            model.prefill = counted  # type: ignore[method-assign]
            return model

        super().__init__(build, "cpu")


@lru_cache
def weights(seed: int = 0, family: str = "qwen3") -> Snapshot:
    return snapshot_of(tiny_module(family, seed=seed), seed)


def made(slots: int = 8, family: str = "qwen3") -> tuple[DecodeLoop, Reading]:
    decoder = Reading()
    engine = DecodeLoop(decoder, slots)
    load(engine, weights(0, family))
    return engine, decoder


async def converse(engine: Any, seed: int, turns: int, in_turns: bool, told: Told) -> None:
    """A conversation whose other side says anything, nothing among it."""
    rng = random.Random(seed)
    tokens = array("i", [rng.randrange(2, VOCAB) for _ in range(rng.randint(1, 9))])
    for turn in range(turns):
        params = SamplingParams(max_tokens=rng.randint(1, 6))
        request = SampleRequest(array("i", tokens), 31 * seed + turn, 0, params, in_turns=in_turns)
        if not isinstance(completion := await engine.submit(request), Completion):
            return  # the context is full
        told.append((completion.tokens.tolist(), completion.logprobs.tolist(), completion.version_spans))
        said = [rng.randrange(2, VOCAB) for _ in range(rng.choice([0, 1, 2, 9]))]
        tokens += completion.tokens + array("i", said)


def assert_same(found: Told, wanted: Told) -> None:
    assert [one[0] for one in found] == [one[0] for one in wanted]
    assert [one[2] for one in found] == [one[2] for one in wanted]
    for (_, logprobs, _), (_, others, _) in zip(found, wanted, strict=True):
        assert np.allclose(logprobs, others, atol=1e-5)


@examples(15)
@given(data=st.data())
def test_many_cached_conversations_equal_those_without_a_cache(data: st.DataObject) -> None:
    """They take turns in few slots, some are aborted at any moment, and some rows find no room to be kept. States of a
    hybrid go on from where a turn ended, and nowhere else."""
    family = data.draw(st.sampled_from(["qwen3", "qwen3_5_text"]), "family")
    share = data.draw(st.sampled_from([0.0, 1e-6, 1 / 16]), "share of the memory")
    seeds = data.draw(st.lists(st.integers(0, 999), min_size=1, max_size=7, unique=True), "seeds")
    aborted = data.draw(st.sets(st.sampled_from(seeds)), "aborted")
    after = data.draw(st.integers(0, 30), "aborted after")

    def play(in_turns: bool) -> dict[int, Told]:
        engine, _ = made(data.draw(st.integers(1, 5), "slots"), family)
        told: dict[int, Told] = {seed: [] for seed in seeds}

        async def one(seed: int) -> None:
            task = asyncio.ensure_future(converse(engine, seed, 5, in_turns, told[seed]))
            if seed in aborted:
                for _ in range(after):
                    await asyncio.sleep(0)
                task.cancel()
            await asyncio.wait([task])

        async def everyone() -> None:
            await asyncio.gather(*map(one, seeds))

        asyncio.run(everyone())
        return told

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch_engine, "KEPT_SHARE", share)
        found, wanted = play(True), play(False)
    for seed in seeds:
        if seed not in aborted:
            assert len(found[seed]) == len(wanted[seed])
        both = min(len(found[seed]), len(wanted[seed]))
        assert_same(found[seed][:both], wanted[seed][:both])


@examples(15)
@given(seed=st.integers(0, 999), swaps=st.sets(st.integers(1, 25), max_size=3))
def test_every_prompt_is_read_again_after_new_weights(seed: int, swaps: set[int]) -> None:
    """They come before any token, within turns and between them."""
    found: list[Told] = []
    for in_turns in (True, False):
        decoder, told = Reading(), Told()

        def newer(step: int, decoder: Reading = decoder) -> None:
            if step in swaps:
                decoder.load(weights(step))

        decoder.load(weights())
        asyncio.run(converse(DecodeLoop(Hooked(decoder, newer)), seed, 6, in_turns, told))
        found.append(told)
    assert_same(*found)


@pytest.mark.parametrize("seed", range(5))
def test_no_prompt_token_is_read_twice(seed: int) -> None:
    (engine, decoder), told = made(), Told()
    asyncio.run(converse(engine, seed, 4, True, told))
    sampled = sum(len(tokens) for tokens, _, _ in told)
    rng, total = random.Random(seed), 0
    total += len([rng.randrange(2, VOCAB) for _ in range(rng.randint(1, 9))])
    for _ in told:
        rng.randint(1, 6)
        total += (said := len([rng.randrange(2, VOCAB) for _ in range(rng.choice([0, 1, 2, 9]))]))
    # A step reads one token and samples one: each sampled token stands for one that was read. The last turn's own last
    # token, and what was said to it, are read by nobody.
    assert decoder.num_read + sampled == total + sampled - 1 - said


def test_the_prompt_of_a_group_is_read_once_while_one_of_it_runs() -> None:
    engine, decoder = made(slots=3)
    asked = requests(0, length=9, samples=12, max_tokens=30)
    found = run(engine, asked)
    assert decoder.num_read == 8
    alone = [run(made()[0], [one])[0] for one in asked]
    assert [one.tokens for one in found] == [one.tokens for one in alone]


def test_requests_that_run_together_read_everything() -> None:
    """Bitwise the same, whatever was kept before."""
    first = [replace(one, in_turns=True) for one in requests(0, samples=3, max_tokens=4)]
    engine, _ = made()
    fresh, _ = made()
    written = run(engine, first)
    second = [
        replace(one, prompt_tokens=one.prompt_tokens + completion.tokens, in_turns=True)
        for one, completion in zip(first, written, strict=True)
    ]
    found, wanted = run(engine, second, together=True), run(fresh, second, together=True)
    assert [one.logprobs.tobytes() for one in found] == [one.logprobs.tobytes() for one in wanted]


class Weighed:
    """A cache that weighs so much, whatever is copied of it."""

    def __init__(self, num_bytes: int, length: int) -> None:
        self.num_bytes, self.length = num_bytes, length

    def copy(self, row: int, length: int) -> Weighed:
        assert row == 0
        assert 0 < length < self.length
        return Weighed(self.num_bytes, length)


def in_common(one: Sequence[int], other: Sequence[int]) -> int:
    return next((at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


owners = st.sampled_from(["tina", "tom"])
texts = st.lists(st.sampled_from([0, 1, 256, 1 << 24]), max_size=6)


@examples(200)
@given(
    st.lists(st.tuples(st.sampled_from(["tina", "tom"]), texts, st.integers(0, 9), st.booleans())), st.integers(0, 20)
)
def test_the_longest_common_part_is_found_and_kept_rows_take_no_more_than_their_share(
    rows: list[tuple[str, list[int], int, bool]], most: int
) -> None:
    """Beside a search through all of them, least recently used first."""
    kept: Any = PrefixCache(most)
    there: dict[tuple[str, tuple[int, ...]], Weighed] = {}
    for owner, tokens, weight, is_asked in rows:
        scope = owner.ljust(8).encode()
        key = scope + array("i", tokens).tobytes()
        if is_asked:
            lengths = {other: in_common(other[1], tokens) for other in there if other[0] == owner}
            longest = max(lengths.values(), default=0)
            found = kept.known(key, len(scope))
            whole = (owner, tuple(tokens[:longest]))
            if longest < 1 or (whole not in there and longest < len(tokens) / 2):
                assert found is None
                continue
            if whole in there:
                assert found is there.pop(whole)
                continue
            assert found.length == longest
            used = next(one for one in there if one[0] == owner and is_last(kept, scope, one))
            assert lengths[used] == longest < len(used[1])
            there[used] = there.pop(used)
        else:
            there.pop((owner, tuple(tokens)), None)
            there[owner, tuple(tokens)] = Weighed(weight, len(tokens))
            kept.keep(key, there[owner, tuple(tokens)])
            while sum(one.num_bytes for one in there.values()) > most:
                del there[next(iter(there))]
        assert kept.num_bytes == sum(one.num_bytes for one in there.values()) <= most


def is_last(kept: Any, scope: bytes, row: tuple[str, tuple[int, ...]]) -> bool:
    """Whether this row was used last."""
    return bool(list(kept._rows)[-1] == scope + array("i", row[1]).tobytes())


def test_an_engine_keeps_no_more_than_its_share(monkeypatch: pytest.MonkeyPatch) -> None:
    """512 rollouts that never come back, 8 slots."""
    monkeypatch.setattr(torch_engine, "free_memory_bytes", lambda device: 1 << 20)
    engine, decoder = made()
    run(engine, [replace(one, in_turns=True) for seed in range(512) for one in requests(seed, 9, 1, max_tokens=3)])
    assert decoder._prefixes is not None
    assert 0 < decoder._prefixes.num_bytes <= (1 << 20) / 16
