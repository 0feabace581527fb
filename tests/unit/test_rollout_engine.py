"""The decode loop, on both torch engines: true logprobs, independence, streaming, swaps, and snapshots that are
refused."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from dataclasses import replace
from threading import Thread
from typing import Any

import numpy as np
import pytest
import torch

from echo2.errors import InvariantError, PeerError, UserError
from echo2.rollout.compact import build_compact
from echo2.rollout.engine import Outcome, RequestFailure, SampleRequest
from echo2.rollout.engines import make_engine
from echo2.rollout.torch_engine import TorchEngine
from echo2.types import SamplingParams, Snapshot, TensorBytes
from rollout_cases import END, FAMILIES, VOCAB, hf_logits, request, run, snapshot_of, tiny_module

ENGINES = ("compact", "transformers")


def loaded(name: str, family: str = "qwen3", swap: Any = "between", version: int = 0) -> Any:
    engine = make_engine(name, "cpu", swap)
    engine.load_snapshot(snapshot_of(tiny_module(family), version))
    return engine


@pytest.mark.parametrize("params", [{"temperature": 0.7, "top_k": 9, "top_p": 0.8}, {}, {"temperature": 0.0}])
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("name", ENGINES)
def test_logprobs_are_those_of_transformers_from_scratch(name: str, family: str, params: dict[str, Any]) -> None:
    """After sampling, every sequence is run once more through transformers' forward, and its logprobs recomputed."""
    module = tiny_module(family)
    requests = [request(seed, length=3 + 2 * seed, samples=4, max_tokens=20, **params) for seed in range(3)]
    outcomes = run(loaded(name, family), requests)
    seen = set()
    for index, asked in enumerate(requests):
        assert len(outcomes[index]) == 4
        for completion in outcomes[index]:
            tokens = completion.tokens
            seen.add(completion.finish)
            assert (END in tokens) == (completion.finish == "stop")
            assert END not in tokens[:-1]
            assert len(tokens) == 20 or completion.finish == "stop"
            logits = hf_logits(module, [*asked.prompt_tokens, *tokens])[len(asked.prompt_tokens) - 1 : -1]
            logits = logits / (asked.params.temperature or 1.0)
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


@pytest.mark.parametrize("name", ENGINES)
def test_what_else_is_in_the_batch_changes_nothing(name: str) -> None:
    requests = [request(seed, length=2 + seed % 7, max_tokens=4 + seed) for seed in range(12)]
    engine = loaded(name)
    together = run(engine, requests)
    for index in (0, 5, 11):
        alone = run(engine, [requests[index]])[0]
        assert [c.tokens for c in alone] == [c.tokens for c in together[index]]
        for one, other in zip(alone, together[index], strict=True):
            assert np.allclose(one.logprobs, other.logprobs, atol=1e-5)
    few = run(engine, [replace(requests[3], num_samples=1)])[0]
    assert few[0].tokens == together[3][0].tokens


@pytest.mark.parametrize("name", ENGINES)
def test_portions_of_a_group_are_the_attempts_of_the_whole(name: str) -> None:
    engine, whole = loaded(name), request(3, samples=6, length=4)
    portions = run(engine, [replace(whole, first_sample=first, num_samples=2) for first in (4, 0, 2)])
    in_order = (*portions[1], *portions[2], *portions[0])
    assert [c.tokens for c in in_order] == [c.tokens for c in run(engine, [whole])[0]]


def test_both_engines_draw_the_same_tokens() -> None:
    requests = [request(seed, length=2 + seed) for seed in range(4)]
    compact, transformers = (run(loaded(name), requests) for name in ENGINES)
    for index in range(4):
        assert [c.tokens for c in compact[index]] == [c.tokens for c in transformers[index]]


def test_samples_differ_and_seeds_matter() -> None:
    engine = loaded("compact")
    first = run(engine, [request(0, samples=8)])[0]
    assert len({c.tokens.tobytes() for c in first}) > 4
    again = run(engine, [replace(request(0, samples=8), seed=1)])[0]
    assert [c.tokens for c in first] != [c.tokens for c in again]


def test_a_group_is_handed_over_when_its_last_sample_ends_not_at_the_end_of_the_batch() -> None:
    engine = loaded("compact")
    requests = [request(seed, samples=4, max_tokens=room) for seed, room in enumerate((20, 3, 9, 1))]
    polls, polls_at_finish = 0, {}

    def poll() -> bool:
        nonlocal polls
        polls += 1
        return False

    def finish(index: int, outcome: Outcome) -> None:
        assert isinstance(outcome, list)
        # One poll before the prefill, then one after every token.
        polls_at_finish[index] = (polls, max(len(c.tokens) for c in outcome))

    engine.generate(requests, finish, poll)
    assert all(at == longest for at, longest in polls_at_finish.values())
    assert sorted(polls_at_finish) == [0, 1, 2, 3]
    assert next(iter(polls_at_finish)) == 3  # the shortest first
    lengths = [longest for _, longest in polls_at_finish.values()]
    assert lengths == sorted(lengths)


def test_stopping_ends_the_batch_and_the_engine_can_be_used_again() -> None:
    engine = loaded("compact")
    finished: list[int] = []
    engine.generate([request(0, max_tokens=20)], lambda index, _: finished.append(index), lambda: True)
    assert finished == []
    assert run(engine, [request(0)])


@pytest.mark.parametrize("name", ENGINES)
def test_a_request_that_cannot_be_sampled_fails_alone(name: str) -> None:
    requests = [
        request(0, length=64),
        request(1),
        SampleRequest(array("i"), 2, 0, SamplingParams()),
        SampleRequest(array("i", [VOCAB]), 2, 0, SamplingParams()),
        request(2, length=60, max_tokens=50),
        request(3, samples=0),
        request(4, max_tokens=0),
    ]
    outcomes: dict[int, Outcome] = {}
    loaded(name).generate(requests, lambda i, outcome: outcomes.__setitem__(i, outcome), lambda: False)
    reasons = {i: o.reason for i, o in outcomes.items() if isinstance(o, RequestFailure)}
    assert reasons == {0: "prompt_too_long", 2: "engine_failed", 3: "engine_failed", 6: "engine_failed"}
    near_the_end = outcomes[4]
    assert isinstance(near_the_end, list)
    assert max(len(c.tokens) for c in near_the_end) <= 4  # 60 + 4 = the model's context
    assert outcomes[3 + 2] == []


@pytest.mark.parametrize("name", ENGINES)
def test_a_swap_during_a_generation_takes_effect_at_the_next_token(name: str) -> None:
    """should_stop is asked once a token, so it is where this test stands between two tokens."""
    engine = loaded(name, swap="during", version=3)
    new_module = tiny_module("qwen3", seed=1)
    asked = request(0, length=4, samples=6, max_tokens=12)
    polls = 0
    outcomes: list[Outcome] = []
    pauses: list[float] = []

    def swap_after_five_tokens() -> bool:
        nonlocal polls
        polls += 1
        if polls == 6:
            loader = Thread(target=lambda: pauses.append(engine.load_snapshot(snapshot_of(new_module, 4))))
            loader.start()
            loader.join()
        return False

    engine.generate([asked], lambda _, outcome: outcomes.append(outcome), swap_after_five_tokens)
    assert 0 <= pauses[0] < 0.05  # the swap alone: building went on beside the generation
    assert isinstance(outcomes[0], list)
    unswapped = run(loaded(name), [asked])[0]
    assert max(len(c.tokens) for c in outcomes[0]) > 5
    for completion, old in zip(outcomes[0], unswapped, strict=True):
        wanted = ((0, 3), (5, 4)) if len(completion.tokens) > 5 else ((0, 3),)
        assert completion.version_spans == wanted
        assert completion.tokens[:5] == old.tokens[:5]
    assert [c.tokens for c in outcomes[0]] != [c.tokens for c in unswapped]
    assert engine.installed.version == 4
    after = run(engine, [asked])[0]
    fresh = TorchEngine(build_compact, "cpu")
    fresh.load_snapshot(snapshot_of(new_module, 4))
    assert [c.tokens for c in after] == [c.tokens for c in run(fresh, [asked])[0]]


def test_an_engine_that_swaps_between_generations_says_so() -> None:
    engine = loaded("compact")

    def swap() -> bool:
        engine.load_snapshot(snapshot_of(tiny_module("qwen3"), 1))
        return False

    with pytest.raises(InvariantError, match="between"):
        engine.generate([request(0)], lambda _i, _o: None, swap)
    assert engine.load_snapshot(snapshot_of(tiny_module("qwen3"), 1)) > 0


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
    before = run(engine, [request(0)])[0]
    with pytest.raises(PeerError):
        engine.load_snapshot(broken(snapshot_of(tiny_module("qwen3", seed=5), 2), change))
    assert engine.installed.version == 1
    assert [c.tokens for c in run(engine, [request(0)])[0]] == [c.tokens for c in before]


@pytest.mark.parametrize("name", ENGINES)
def test_another_architecture_is_refused_and_so_is_a_config_that_is_not_json(name: str) -> None:
    engine = loaded(name)
    with pytest.raises(PeerError, match="another architecture"):
        engine.load_snapshot(snapshot_of(tiny_module("qwen3", intermediate_size=40), 1))
    for config in (b"{", b"[]"):
        torn = replace(snapshot_of(tiny_module("qwen3"), 1), files={"config.json": config})
        with pytest.raises(PeerError):
            engine.load_snapshot(torn)
    assert engine.installed.version == 0


def test_a_tied_model_may_carry_its_head_twice() -> None:
    snapshot = snapshot_of(tiny_module("qwen3"))
    tensors = {**snapshot.tensors, "lm_head.weight": snapshot.tensors["model.embed_tokens.weight"]}
    for name in ENGINES:
        make_engine(name, "cpu").load_snapshot(replace(snapshot, tensors=tensors))


def test_an_unknown_architecture_names_the_engine_that_may_know_it() -> None:
    snapshot = replace(snapshot_of(tiny_module("qwen3")), files={"config.json": b'{"model_type": "gpt2"}'})
    with pytest.raises(UserError, match=r"gpt2.*transformers"):
        make_engine("compact", "cpu").load_snapshot(snapshot)


@pytest.mark.parametrize(("name", "device"), [("vllm", "cpu"), ("compact", "cuda:99"), ("compact", "gpu")])
def test_unknown_engines_and_devices_are_named(name: str, device: str) -> None:
    with pytest.raises(UserError, match=name if device == "cpu" else device):
        make_engine(name, device)


def test_an_empty_engine_says_what_to_do() -> None:
    for name in (*ENGINES, "fake"):
        with pytest.raises(UserError, match="load a snapshot"):
            run(make_engine(name, "cpu"), [request(0)])


def test_gpt2_runs_on_the_transformers_engine() -> None:
    """Learned positions, no rotary embedding, other parameter names: nothing of it is known here."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    sizes = {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 16, "initializer_range": 0.3}
    module: Any = GPT2LMHeadModel(GPT2Config(vocab_size=VOCAB, bos_token_id=None, eos_token_id=END, **sizes)).eval()
    engine = make_engine("transformers", "cpu")
    engine.load_snapshot(snapshot_of(module))
    requests = [request(seed, length=2 + 6 * seed, max_tokens=14) for seed in range(3)]
    for index, completions in run(engine, requests).items():
        for completion in completions:
            prompt = requests[index].prompt_tokens
            assert len(prompt) + len(completion.tokens) <= 16
            logits = hf_logits(module, [*prompt, *completion.tokens])[len(prompt) - 1 : -1].log_softmax(-1)
            wanted = logits.gather(1, torch.tensor(completion.tokens.tolist())[:, None])[:, 0]
            assert np.allclose(completion.logprobs, wanted.numpy(), atol=1e-4)
