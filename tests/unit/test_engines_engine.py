"""The decode loop, on both torch engines: true logprobs, independence of what else runs, joining, aborting, swaps, and
snapshots that are refused."""

from __future__ import annotations

import asyncio
import threading
from array import array
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from echo2.core.devices import nth_device
from echo2.core.errors import PeerError, UserError
from echo2.core.types import SamplingParams, Snapshot, TensorBytes
from echo2.engines import decode_loop
from echo2.engines.compact import build_compact
from echo2.engines.decode_loop import DecodeLoop
from echo2.engines.engine import RequestFailure, SampleRequest
from echo2.engines.fake_engine import FakeDecoder
from echo2.engines.registry import make_engine
from echo2.engines.torch_engine import TorchDecoder
from engine_builders import BUILDERS
from rollout_cases import (
    END,
    FAMILIES,
    VOCAB,
    Hooked,
    hf_logits,
    hooked,
    load,
    outcomes,
    requests,
    run,
    snapshot_of,
    tiny_module,
    until,
)
from seeds import examples, pairs

ENGINES = tuple(BUILDERS)


def loaded(name: str, family: str = "qwen3", version: int = 0, slots: int = 64) -> Any:
    engine = make_engine(name, "cpu", slots)
    load(engine, snapshot_of(tiny_module(family), version))
    return engine


def tokens_of(completions: Any) -> list[list[int]]:
    return [completion.tokens.tolist() for completion in completions]


@pytest.mark.parametrize(
    ("family", "params"), pairs(FAMILIES, ({"temperature": 0.7, "top_k": 9, "top_p": 0.8}, {}, {"temperature": 0.0}))
)
@pytest.mark.parametrize("name", ENGINES)
def test_logprobs_are_those_of_transformers_from_scratch(name: str, family: str, params: dict[str, Any]) -> None:
    """After sampling, every sequence is run once more through transformers' forward, and its logprobs recomputed. Five
    slots for twelve rollouts: most of them join others."""
    module = tiny_module(family)
    asked = [one for seed in range(3) for one in requests(seed, 1 + 2 * seed, samples=4, max_tokens=20, **params)]
    seen = set()
    for request, completion in zip(asked, run(loaded(name, family, slots=5), asked), strict=True):
        tokens, prompt = completion.tokens, request.prompt_tokens
        seen.add(completion.finish)
        assert (END in tokens) == (completion.finish == "stop")
        assert END not in tokens[:-1]
        assert len(tokens) == 20 or completion.finish == "stop"
        logits = hf_logits(module, [*prompt, *tokens])[len(prompt) - 1 : -1]
        logits = logits / (request.params.temperature or 1.0)
        for t, token in enumerate(tokens):
            support = range(VOCAB)
            if "top_k" in params:
                offsets, ids = completion.support_offsets, completion.support_tokens
                assert offsets is not None
                assert ids is not None
                support = ids[offsets[t] : offsets[t + 1]]
                assert len(support) <= 9
            wanted = logits[t, token] - logits[t, list(support)].logsumexp(0)
            assert completion.logprobs[t] == pytest.approx(float(wanted), abs=1e-4)
        if not params.get("temperature", 1.0):
            assert tokens.tolist() == logits.argmax(-1).tolist()
    assert seen <= {"stop", "length"}


@pytest.mark.parametrize("slots", [1, 3, 64])
@pytest.mark.parametrize("name", ENGINES)
def test_other_rows_of_the_batch_change_nothing(name: str, slots: int) -> None:
    groups = [requests(seed, length=2 + seed % 7, max_tokens=4 + seed) for seed in range(12)]
    engine = loaded(name, slots=slots)
    together = run(engine, [request for group in groups for request in group])
    for index in (0, 5, 11):
        alone = run(engine, groups[index])
        for one, other in zip(alone, together[3 * index : 3 * index + 3], strict=True):
            assert one.tokens == other.tokens
            assert np.allclose(one.logprobs, other.logprobs, atol=1e-5)
    assert run(engine, groups[3][2:])[0].tokens == together[11].tokens


def test_all_engines_draw_the_same_tokens() -> None:
    asked = [one for seed in range(4) for one in requests(seed, length=2 + seed)]
    found = [tokens_of(run(loaded(name), asked)) for name in ENGINES]
    assert all(one == found[0] for one in found)


def test_samples_differ_and_depend_on_seeds() -> None:
    engine = loaded("compact")
    first = run(engine, requests(0, samples=8))
    assert len({c.tokens.tobytes() for c in first}) > 4
    again = run(engine, [replace(one, seed=1) for one in requests(0, samples=8)])
    assert tokens_of(first) != tokens_of(again)


@examples(25)
@given(data=st.data())
def test_requests_that_come_and_go_change_no_others(data: st.DataObject) -> None:
    """Requests arrive at any token, some are aborted at any token: every other one is as if it had run alone."""
    engine = loaded("compact", slots=data.draw(st.integers(1, 6), "slots"))
    groups = st.tuples(st.integers(0, 9), st.integers(1, 9), st.integers(1, 14))
    asked = [
        request
        for seed, length, max_tokens in data.draw(st.lists(groups, min_size=1, max_size=5), "groups")
        for request in requests(seed, length, samples=2, max_tokens=max_tokens)
    ]
    wanted = {id(request): run(engine, [request])[0].tokens for request in asked}
    arrivals = data.draw(st.lists(st.integers(0, 20), min_size=len(asked), max_size=len(asked)), "arrivals")
    aborts = data.draw(st.sets(st.integers(0, len(asked) - 1), max_size=3), "aborts")

    async def one(place: int) -> Any:
        for _ in range(arrivals[place]):
            await asyncio.sleep(0)
        future = engine.submit(asked[place])
        if place in aborts:
            await asyncio.sleep(0)
            future.cancel()
            return None
        return (await future).tokens

    async def everything() -> list[Any]:
        return await asyncio.gather(*map(one, range(len(asked))))

    found = asyncio.run(everything())
    assert [tokens for place, tokens in enumerate(found) if place not in aborts] == [
        wanted[id(request)] for place, request in enumerate(asked) if place not in aborts
    ]


def test_a_request_is_answered_when_it_ends_and_others_join_in_its_place() -> None:
    """Four slots, eight requests: the short ones of the second half end before the long ones of the first."""
    engine = loaded("compact", slots=4)
    asked = [requests(seed, samples=1, max_tokens=2 if seed % 2 else 58)[0] for seed in range(8)]
    order: list[int] = []

    async def one(place: int) -> int:
        completion = await engine.submit(asked[place])
        order.append(place)
        return len(completion.tokens)

    async def everything() -> list[int]:
        return await asyncio.gather(*map(one, range(8)))

    lengths = asyncio.run(everything())
    assert sum(length > 20 for length in lengths) >= 2
    longest = max(range(4), key=lengths.__getitem__)
    assert all(order.index(place) < order.index(longest) for place in (1, 3, 5, 7))


def test_an_aborted_request_leaves_its_slot_at_the_next_token() -> None:
    steps: list[int] = []
    go_on = threading.Event()

    def wait_at_the_fifth(step: int) -> None:
        steps.append(step)
        if step == 5:
            go_on.wait()

    engine, _ = hooked("fake", wait_at_the_fifth, snapshot_of(tiny_module("qwen3")), slots=2)
    long = [replace(requests(0, samples=9, max_tokens=50)[sample]) for sample in range(9)]
    lengths = [len(completion.tokens) for completion in run(loaded("fake"), long)]
    first, second, third = (long[place] for place in sorted(range(9), key=lengths.__getitem__)[-3:])

    async def abort_one() -> None:
        futures = [engine.submit(one) for one in (first, second)]
        assert engine.free_slots == 0
        await until(lambda: len(steps) >= 5)
        futures[0].cancel()
        waiting = engine.submit(third)
        go_on.set()
        completions = [await futures[1], await waiting]
        assert tokens_of(completions) == tokens_of(run_alone)
        assert engine.free_slots == 2

    run_alone = run(loaded("fake"), [second, third])
    asyncio.run(abort_one())
    assert len(steps) <= 6 + max(lengths)  # else the third would have waited for the second


def test_requests_that_run_together_run_alone() -> None:
    """Whatever is submitted before and after, their batch is the same in every step: bitwise the same logprobs."""
    engine = loaded("compact", slots=8)
    unit = [one for seed in range(4) for one in requests(seed, 2 + seed, samples=3, max_tokens=15)]
    others = requests(7, samples=6, max_tokens=30)
    alone = run(engine, unit, together=True)

    async def crowded() -> Any:
        before = [engine.submit(one) for one in others]
        await asyncio.sleep(0)
        futures = engine.submit_together(unit)
        after = [engine.submit(one) for one in others]
        found = await asyncio.gather(*futures)
        await asyncio.gather(*before, *after)
        return found

    for _ in range(3):
        found = asyncio.run(crowded())
        assert [one.logprobs.tobytes() for one in found] == [one.logprobs.tobytes() for one in alone]
        assert tokens_of(found) == tokens_of(alone)


@pytest.mark.parametrize("name", ENGINES)
def test_a_request_that_cannot_be_sampled_fails_alone(name: str) -> None:
    asked = [
        *requests(0, length=64, samples=1),
        *requests(1, samples=1),
        SampleRequest(array("i"), 0, 0, SamplingParams()),
        SampleRequest(array("i", [VOCAB]), 0, 0, SamplingParams()),
        *requests(2, length=60, samples=1, max_tokens=50),
        *requests(4, samples=1, max_tokens=0),
    ]
    found = outcomes(loaded(name), asked)
    reasons = {i: o.reason for i, o in enumerate(found) if isinstance(o, RequestFailure)}
    assert reasons == {0: "prompt_too_long", 2: "engine_failed", 3: "engine_failed", 5: "engine_failed"}
    near_the_end = found[4]
    assert not isinstance(near_the_end, RequestFailure)
    assert len(near_the_end.tokens) <= 4  # 60 + 4 = the model's context


def test_an_error_that_breaks_the_engine_reaches_its_requests_and_the_engine_recovers() -> None:
    def out_of_memory(step: int) -> None:
        if step == 3:
            raise RuntimeError("CUDA out of memory")

    engine, _ = hooked("compact", out_of_memory, snapshot_of(tiny_module("qwen3")))
    long = requests(0, samples=4, max_tokens=40)

    async def broken() -> list[Any]:
        return await asyncio.gather(*map(engine.submit, long), return_exceptions=True)

    assert any("CUDA out of memory" in str(one) for one in asyncio.run(broken()))
    assert engine.free_slots == 64
    assert tokens_of(run(engine, long)) == tokens_of(run(loaded("compact"), long))


def test_requests_that_come_as_the_decode_thread_ends_keep_their_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread that ends empties the decoder before another can start on it."""
    monkeypatch.setattr(decode_loop, "LINGER_SECONDS", 0.0)
    is_joined, is_emptied = threading.Event(), threading.Event()
    late = requests(1, samples=8, max_tokens=20)
    elsewhere = ThreadPoolExecutor(1)
    found: list[Future[list[Any]]] = []

    class Ending(FakeDecoder):
        def step(self, added: Mapping[int, SampleRequest], dropped: Sequence[int]) -> Any:
            ended = super().step(added, dropped)
            if late[0] in added.values():
                is_joined.set()
                is_emptied.wait(30)
            return ended

        def clear(self) -> None:
            if not found:
                found.append(elsewhere.submit(run, engine, late))
                is_joined.wait(0.3)  # it must not; as long as this it may try
            super().clear()
            is_emptied.set()

    engine = DecodeLoop(Ending())
    load(engine, snapshot_of(tiny_module("qwen3")))
    run(engine, requests(0))
    assert is_emptied.wait(30)
    assert len(found[0].result(timeout=30)) == 8


def test_closing_aborts_what_is_under_way() -> None:
    engine = loaded("compact")

    async def close() -> None:
        futures = [engine.submit(one) for one in requests(0, samples=4, max_tokens=50)]
        await engine.close()
        await asyncio.wait(futures)
        assert any(future.cancelled() for future in futures)
        with pytest.raises(UserError, match="closed"):
            engine.submit(requests(0)[0])

    asyncio.run(close())


@pytest.mark.parametrize("name", ENGINES)
def test_a_swap_takes_effect_at_the_next_token(name: str) -> None:
    new_module = tiny_module("qwen3", seed=1)

    def swap_after_five_tokens(step: int) -> None:
        if step == 6:
            decoder.load(snapshot_of(new_module, 4))

    engine, decoder = hooked(name, swap_after_five_tokens, snapshot_of(tiny_module("qwen3"), 3))
    asked = requests(0, length=4, samples=6, max_tokens=12)
    found, unswapped = run(engine, asked), run(loaded(name), asked)
    assert max(len(c.tokens) for c in found) > 5
    for completion, old in zip(found, unswapped, strict=True):
        wanted = ((0, 3), (5, 4)) if len(completion.tokens) > 5 else ((0, 3),)
        assert completion.version_spans == wanted
        assert completion.tokens[:5] == old.tokens[:5]
    assert tokens_of(found) != tokens_of(unswapped)
    assert engine.installed is not None
    assert engine.installed.version == 4
    fresh = DecodeLoop(TorchDecoder(build_compact, "cpu"))
    load(fresh, snapshot_of(new_module, 4))
    assert tokens_of(run(engine, asked)) == tokens_of(run(fresh, asked))


def test_new_weights_come_while_requests_run_and_only_an_idle_engine_pauses() -> None:
    """Half of the tokens are sampled while the new policy is being built: nobody waits for that."""
    building, built = threading.Event(), threading.Event()

    def build(snapshot: Snapshot, device: torch.device) -> Any:
        if snapshot.ref.version:
            building.set()
            assert built.wait(30)
        return build_compact(snapshot, device)

    engine = DecodeLoop(Hooked(TorchDecoder(build, "cpu"), lambda step: step < 10 or built.set()))
    assert load(engine, snapshot_of(tiny_module("qwen3"), 0)) > 0
    asked = requests(0, samples=8, max_tokens=58)

    async def swap() -> tuple[float, Any]:
        futures = [engine.submit(one) for one in asked]
        pause = await engine.update_weights(snapshot_of(tiny_module("qwen3", seed=1), 1))
        return pause, await asyncio.gather(*futures)

    pause, found = asyncio.run(swap())
    assert pause == 0.0
    assert all(completion.version_spans[0] == (0, 0) for completion in found)
    assert engine.installed is not None
    assert engine.installed.version == 1


def broken(snapshot: Snapshot, change: Callable[[dict[str, TensorBytes]], object]) -> Snapshot:
    tensors = dict(snapshot.tensors)
    change(tensors)
    return replace(snapshot, tensors=tensors)


def overwrite(name: str, **changes: Any) -> Callable[[dict[str, TensorBytes]], object]:
    return lambda tensors: tensors.__setitem__(name, replace(tensors[name], **changes))


NORM = "model.layers.1.input_layernorm.weight"
TORN: list[Callable[[dict[str, TensorBytes]], object]] = [
    lambda tensors: tensors.pop(NORM),
    lambda tensors: tensors.__setitem__("model.layers.9.extra", tensors[NORM]),
    overwrite(NORM, shape=(31,), data=bytes(31 * 4)),
    overwrite(NORM, data=bytes(31 * 4)),
    overwrite(NORM, data=np.full(32, np.nan, np.float32).tobytes()),
    overwrite(NORM, data=np.full(32, np.inf, np.float32).tobytes()),
    overwrite(NORM, dtype="F8_E4M3"),
]


@pytest.mark.parametrize("change", TORN)
@pytest.mark.parametrize("name", ENGINES)
def test_a_torn_snapshot_is_refused_and_the_old_weights_stay(name: str, change: Any) -> None:
    engine = loaded(name, version=1)
    before = run(engine, requests(0))
    with pytest.raises(PeerError):
        load(engine, broken(snapshot_of(tiny_module("qwen3", seed=5), 2), change))
    assert engine.installed.version == 1
    assert tokens_of(run(engine, requests(0))) == tokens_of(before)


@pytest.mark.parametrize("name", ENGINES)
def test_another_architecture_is_refused_and_so_is_a_config_that_is_not_json(name: str) -> None:
    engine = loaded(name)
    with pytest.raises(PeerError, match="another architecture"):
        load(engine, snapshot_of(tiny_module("qwen3", intermediate_size=40), 1))
    for config in (b"{", b"[]"):
        torn = replace(snapshot_of(tiny_module("qwen3"), 1), files={"config.json": config})
        with pytest.raises(PeerError):
            load(engine, torn)
    assert engine.installed.version == 0


def test_a_tied_model_may_carry_its_head_twice() -> None:
    snapshot = snapshot_of(tiny_module("qwen3"))
    tensors = {**snapshot.tensors, "lm_head.weight": snapshot.tensors["model.embed_tokens.weight"]}
    for name in ENGINES:
        load(make_engine(name, "cpu"), replace(snapshot, tensors=tensors))


def test_an_unknown_architecture_names_the_engine_that_may_know_it() -> None:
    snapshot = replace(snapshot_of(tiny_module("qwen3")), files={"config.json": b'{"model_type": "gpt2"}'})
    with pytest.raises(UserError, match=r"gpt2.*transformers"):
        load(make_engine("compact", "cpu"), snapshot)


def test_processes_of_one_machine_share_its_gpus_in_turn() -> None:
    names = ["auto", *(f"auto:{number}" for number in range(1, 4))]
    assert [nth_device(name, 3) for name in names] == ["cuda:0", "cuda:1", "cuda:2", "cuda:0"]
    assert {nth_device(name, 0) for name in names} == {"cpu"}
    assert [nth_device(name, 2) for name in ("cuda:5", "cpu", "auto:x")] == ["cuda:5", "cpu", "auto:x"]


@pytest.mark.parametrize(("name", "device"), [("llama", "cpu"), ("compact", "cuda:99"), ("compact", "gpu")])
def test_the_error_names_unknown_engines_and_devices(name: str, device: str) -> None:
    with pytest.raises(UserError, match=name if device == "cpu" else device):
        make_engine(name, device)


def test_an_empty_engine_says_what_to_do() -> None:
    for name in (*ENGINES, "fake"):
        with pytest.raises(UserError, match="update its weights"):
            run(make_engine(name, "cpu"), requests(0))


def test_gpt2_runs_on_the_transformers_engine() -> None:
    """Learned positions, no rotary embedding, other parameter names: nothing of it is known here."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    sizes = {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 16, "initializer_range": 0.3}
    module: Any = GPT2LMHeadModel(GPT2Config(vocab_size=VOCAB, bos_token_id=None, eos_token_id=END, **sizes)).eval()
    engine = make_engine("transformers", "cpu", 4)
    load(engine, snapshot_of(module))
    asked = [one for seed in range(3) for one in requests(seed, length=2 + 6 * seed, max_tokens=14)]
    for request, completion in zip(asked, run(engine, asked), strict=True):
        prompt = request.prompt_tokens
        assert len(prompt) + len(completion.tokens) <= 16
        logits = hf_logits(module, [*prompt, *completion.tokens])[len(prompt) - 1 : -1].log_softmax(-1)
        wanted = logits.gather(1, torch.tensor(completion.tokens.tolist())[:, None])[:, 0]
        assert np.allclose(completion.logprobs, wanted.numpy(), atol=1e-4)
