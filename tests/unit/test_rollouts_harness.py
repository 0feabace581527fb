"""Harnesses call the model themselves: every call is written down as it was, within bounds, or the group is lost."""

from __future__ import annotations

import asyncio
import json
import random
import re
from array import array
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest

from echo2.core.errors import PeerError, UserError
from echo2.core.types import RUN_POLICY, GroupRef, Lease, RolloutGroup, SamplingParams, Task
from echo2.engines.engine import Engine, RequestFailure
from echo2.engines.registry import make_engine
from echo2.engines.tokenizer import load_tokenizer
from echo2.rollouts import endpoint as http
from echo2.rollouts.generate import sample_group
from echo2.rollouts.harness import HarnessEnvironment
from echo2.tasks.loopback_model import LoopbackModel
from echo2.transport import messages
from rollout_cases import END, VOCAB, assigned, load, snapshot_of, tiny_module, tokenizer_files, until

TEMPLATE = (
    b"{% for m in messages %}{{ {'user': 'h', 'tool': 'o'}.get(m.role, 'a') }}={{ m.content }}<eos>{% endfor %}"
    b"{% if add_generation_prompt %}a={% endif %}"
)
TOKENIZER = load_tokenizer(
    {**tokenizer_files(), "chat_template.jinja": TEMPLATE, "config.json": b'{"max_position_embeddings": 64}'}
)
LEASE = Lease(3, GroupRef(RUN_POLICY, "train", 5), 2, 5, 3, 0, None, 9e9, 60.0, 77)
Plays = Callable[[LoopbackModel, random.Random], Awaitable[Any]]


class Own:
    """A harness in this process: what a test gives it to play."""

    def __init__(self, plays: Plays) -> None:
        self._plays = plays
        self.models: list[LoopbackModel] = []

    async def start(self) -> None: ...

    async def play(self, columns: Mapping[str, Any], seed: int, model: Mapping[str, str], seconds: float) -> Any:
        self.models.append(LoopbackModel(**model))
        outcome = await self._plays(self.models[-1], random.Random(seed))
        return outcome if isinstance(outcome, tuple) else (outcome, ())

    async def close(self) -> None: ...


@pytest.fixture(scope="module")
def engine() -> Engine:
    made = make_engine("compact", "cpu", 8)
    load(made, snapshot_of(tiny_module("qwen3")))
    return made


def played(engine: Engine, plays: Plays, max_tokens: int = 40, max_turns: int = 8) -> RolloutGroup | RequestFailure:
    task = Task(5, "12+3=", {"a": 1})
    leased = assigned(LEASE, task, SamplingParams(max_tokens=max_tokens), "harness:own", max_turns, TOKENIZER)

    async def play() -> RolloutGroup | RequestFailure:
        environment = HarnessEnvironment(Own(plays))
        await environment.start()
        try:
            return await sample_group(engine, TOKENIZER, leased, "w", {"harness:own": environment})
        finally:
            await environment.close()

    return asyncio.run(play())


def group_of(outcome: RolloutGroup | RequestFailure) -> RolloutGroup:
    assert isinstance(outcome, RolloutGroup), outcome
    return outcome


def failure_of(outcome: RolloutGroup | RequestFailure) -> RequestFailure:
    assert isinstance(outcome, RequestFailure)
    return outcome


async def tokens_only(model: LoopbackModel, rng: random.Random) -> float:
    """Three turns; every prompt after the first is all that was said, and three tokens more."""
    said = [2, 3, rng.randrange(4, 9)]
    for _ in range(3):
        choice = await model.generate(said, max_tokens=5, logprobs=1)
        content = choice["logprobs"]["content"]
        assert [one["token_id"] for one in content] == choice["token_ids"]
        assert [one["token"] for one in content] == [f"token_id:{token}" for token in choice["token_ids"]]
        assert choice["weight_versions"] == [{"version": 0, "start": 0, "end": len(choice["token_ids"])}]
        said += [*choice["token_ids"], 7, 8, 9]
    return 0.25


def test_what_a_harness_asked_is_one_rollout(engine: Engine) -> None:
    group = group_of(played(engine, tokens_only))
    assert group.by_harness
    assert list(group.prompt_tokens) == [2, 3]  # each begins with a third of its own
    for rollout in group.rollouts:
        runs = rollout.loss_mask.split(b"\x01")
        assert rollout.loss_mask[0] == 0
        assert rollout.loss_mask[-1] == 1
        assert [run for run in runs if run] == [bytes(1), bytes(3), bytes(3)]
        assert all(
            (logprob < 0) == bool(mask) for logprob, mask in zip(rollout.logprobs, rollout.loss_mask, strict=True)
        )
        assert (rollout.finish, dict(rollout.reward_parts)) == ("stop", {"environment": 0.25})
    messages.check_turns(group, 3, is_played=True)
    with pytest.raises(PeerError, match="begin"):
        messages.check_turns(group, 3)
    with pytest.raises(PeerError, match="3 turns; 2"):
        messages.check_turns(group, 2, is_played=True)
    again = group_of(played(engine, tokens_only))
    assert [one.tokens for one in again.rollouts] == [one.tokens for one in group.rollouts]  # seeded by the lease


def test_prompt_and_rewards_of_a_harness_travel(engine: Engine) -> None:
    group = group_of(played(engine, tokens_only))
    sent = messages.encode_delivery(LEASE.lease_id, group)
    got = messages.decode_played(sent, LEASE, "w")
    assert (got.prompt_tokens, got.rollouts) == (group.prompt_tokens, group.rollouts)
    plain = messages.encode_delivery(LEASE.lease_id, replace(group, by_harness=False))
    assert not plain.prompt_tokens
    assert not plain.rewards
    with pytest.raises(PeerError, match="without a prompt"):
        messages.decode_played(plain, LEASE, "w")
    sent.rewards[1] = float("nan")
    with pytest.raises(PeerError, match="not finite"):
        messages.decode_played(sent, LEASE, "w")
    with pytest.raises(PeerError, match="outside the vocabulary"):
        messages.check_vocabulary(replace(group, prompt_tokens=array("i", [VOCAB])), VOCAB)


def test_chat_messages_are_tokenised_once(engine: Engine) -> None:
    said: list[list[int]] = []

    async def chat(model: LoopbackModel, rng: random.Random) -> float:
        talk: list[dict[str, Any]] = [{"role": "user", "content": "1+2="}]
        for turn in range(2):
            answer = await model._post("/v1/chat/completions", {"messages": talk, "max_tokens": 4, "temperature": 0})
            choice = answer["choices"][0]
            said.append([*answer["prompt_token_ids"], *choice["token_ids"]])
            assert (
                answer["usage"]["completion_tokens"] == len(choice["token_ids"]) == len(choice["logprobs"]["content"])
            )
            parts = [{"type": "text", "text": f"{turn}"}]  # a text in parts
            talk += [choice["message"], {"role": "tool", "content": parts}]
        return 1.0

    group = group_of(played(engine, chat))
    assert TOKENIZER.decode(list(group.prompt_tokens), skip_special_tokens=False) == "h=1+2=<eos>a="
    rollout = group.rollouts[0]
    whole = [*group.prompt_tokens, *rollout.tokens]
    assert whole in said
    between = [token for token, mask in zip(rollout.tokens, rollout.loss_mask, strict=True) if not mask]
    text = TOKENIZER.decode(between, skip_special_tokens=False)
    assert text in ("<eos>o=0<eos>a=", "o=0<eos>a=")  # the end of the answer, unless it was sampled


def test_tools_are_called_in_the_form_of_openai(engine: Engine) -> None:
    from echo2.rollouts.endpoint import _message

    text = 'so <tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call><tool_call>{"x": 1}</tool_call>'
    (call,) = _message(text, True)["tool_calls"]
    assert call["function"] == {"name": "add", "arguments": '{"a": 1}'}
    assert "tool_calls" not in _message(text, False)


async def elsewhere(model: LoopbackModel, rng: random.Random) -> float:
    await model.generate([2, 3, 4], max_tokens=5)
    await model.generate([2, 3, 5], max_tokens=5)
    return 1.0


async def twice(model: LoopbackModel, rng: random.Random) -> float:
    await asyncio.gather(*(model.generate([2, 3, 4], max_tokens=30) for _ in range(2)), return_exceptions=True)
    return 1.0


async def silent(model: LoopbackModel, rng: random.Random) -> float:
    return 1.0


async def huge(model: LoopbackModel, rng: random.Random) -> float:
    await model.generate([2], max_tokens=1)
    return 1e9


async def raising(model: LoopbackModel, rng: random.Random) -> float:
    await model.generate([2], max_tokens=1)
    raise UserError("the harness is out of order")


async def changed(model: LoopbackModel, rng: random.Random) -> float:
    talk = [{"role": "user", "content": "1"}]
    answer = await model.chat(talk, max_tokens=3)
    await model.chat([*talk, {**answer, "content": "better"}, {"role": "user", "content": "2"}])
    return 1.0


async def misnamed(model: LoopbackModel, rng: random.Random) -> tuple[float, list[int]]:
    await model.generate([2, 3, 4], max_tokens=5)
    return 1.0, [9, 9, 9]


async def many(model: LoopbackModel, rng: random.Random) -> float:
    for first in range(100):
        await model.generate([2, first % 20, 3 + first // 20], max_tokens=1)
    return 1.0


async def no_token(model: LoopbackModel, rng: random.Random) -> float:
    await model.generate([VOCAB + 5], max_tokens=1)
    return 1.0


@pytest.mark.parametrize(
    ("plays", "reason", "complaint"),
    [
        (elsewhere, "environment_failed", r"held 2 conversations \(the second leaves the first at token 2 of \d+"),
        (twice, "environment_failed", "held 2 conversations"),
        (silent, "environment_failed", "without having called the model"),
        (huge, "environment_failed", "add up to 1e"),
        (raising, "environment_failed", "out of order"),
        (changed, "environment_failed", "held 2 conversations"),
        (misnamed, "environment_failed", "named tokens to train on that 0"),
        (many, "environment_failed", "more than 64 conversations"),
        (no_token, "engine_failed", "outside 0..30"),
    ],
)
def test_what_is_no_rollout_costs_its_group(engine: Engine, plays: Plays, reason: str, complaint: str) -> None:
    failure = failure_of(played(engine, plays))
    assert failure.reason == reason
    assert re.search(complaint, failure.detail), failure.detail
    group_of(played(engine, tokens_only))  # the engine goes on


def test_a_harness_says_which_of_its_conversations_is_the_rollout(engine: Engine) -> None:
    """Two players by turns, and the same model is both: the second one is trained."""

    async def duel(model: LoopbackModel, rng: random.Random) -> tuple[float, list[int]]:
        said = [[2, 3], [2, 4]]
        for turn in range(4):
            choice = await model.generate(said[turn % 2], max_tokens=3)
            said[turn % 2] += [*choice["token_ids"], 7, 8]
        return 0.5, said[1]

    group = group_of(played(engine, duel))
    assert list(group.prompt_tokens) == [2, 4]
    for rollout in group.rollouts:
        assert 1 + rollout.loss_mask.count(b"\x00\x01") == 2
        assert rollout.reward_parts == {"environment": 0.5}


def test_a_rollout_ends_at_its_bounds_and_keeps_what_it_has(engine: Engine) -> None:
    async def on_and_on(model: LoopbackModel, rng: random.Random) -> float:
        said, total = [2, 3], 0.0
        while True:
            choice = await model.generate(said, max_tokens=3)
            said += [*choice["token_ids"], 7]
            total += 1.0

    for bounds, num_turns in (
        ({"max_tokens": 400, "max_turns": 2}, 2),
        ({"max_tokens": 6}, None),
        ({"max_tokens": 400}, None),
    ):
        group = group_of(played(engine, on_and_on, **bounds))
        for rollout in group.rollouts:
            assert (rollout.finish, rollout.reward_parts["environment"]) == ("length", 0.0)
            assert len(rollout.tokens) <= min(bounds["max_tokens"], 64)
            turns = 1 + rollout.loss_mask.count(b"\x00\x01")
            assert turns == (num_turns or turns)


async def _raw(model: LoopbackModel, text: bytes) -> bytes:
    host, port = model.base_url.removeprefix("http://").removesuffix("/v1").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(text)
    answer = await reader.read()
    writer.close()
    return answer.partition(b"\r\n")[0]


def test_strangers_and_what_is_no_request_are_refused(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "BODY_BYTES_MAX", 1000)
    key = b"Connection: close\r\nAuthorization: Bearer "
    bad: list[dict[str, Any]] = [
        {"token_ids": [1.5]},
        {"token_ids": "x"},
        {"token_ids": []},
        {"token_ids": [-1]},
        {"token_ids": [True]},
        {"token_ids": [2], "sampling_params": 3},
        {"token_ids": [2], "sampling_params": {"n": 2}},
        {"token_ids": [2], "sampling_params": {"stop": ["x"]}},
        {"token_ids": [2], "sampling_params": {"max_tokens": 0}},
        {"token_ids": [2], "stream": True},
    ]

    async def attack(model: LoopbackModel, rng: random.Random) -> float:
        path = b"POST /inference/v1/generate HTTP/1.1\r\nHost: x\r\n"
        stranger = path + key + b"nobody\r\nContent-Length: 99999999\r\n\r\n"  # no byte of the body is waited for
        assert b" 401 " in await _raw(model, stranger)
        assert b" 401 " in await _raw(model, path + b"Connection: close\r\nContent-Length: 0\r\n\r\n")
        large = path + key + model.api_key.encode() + b"\r\nContent-Length: 2000\r\n\r\n" + b"x" * 2000
        assert b" 413 " in await _raw(model, large)
        broken = path + key + model.api_key.encode() + b"\r\nContent-Length: 3\r\n\r\n{{{"
        assert b" 400 " in await _raw(model, broken)
        for body in bad:
            with pytest.raises(UserError, match="refused"):
                await model._post("/inference/v1/generate", body)
        for talk in ([], "x", [{"content": "x"}], [{"role": "user", "content": 5}]):
            with pytest.raises(UserError, match="refused"):
                await model._post("/v1/chat/completions", {"messages": talk})
        assert json.dumps(await _models(model)).count("64") == 1
        await model.generate([2, 3], max_tokens=1, stop_token_ids=[END])
        return 1.0

    group_of(played(engine, attack))


async def _models(model: LoopbackModel) -> dict[str, Any]:
    host, port = model.base_url.removeprefix("http://").removesuffix("/v1").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    ask = f"GET /v1/models HTTP/1.1\r\nHost: x\r\nConnection: close\r\nAuthorization: Bearer {model.api_key}\r\n\r\n"
    writer.write(ask.encode())
    answer = await reader.read()
    writer.close()
    found: dict[str, Any] = json.loads(answer.partition(b"\r\n\r\n")[2])
    return found


def test_a_rollout_that_is_given_up_frees_its_slot(engine: Engine) -> None:
    """A lease is revoked while its harness waits: its key is worth nothing any more."""
    started = asyncio.Event()
    models: list[LoopbackModel] = []

    async def stuck(model: LoopbackModel, rng: random.Random) -> float:
        await model.generate([2, 3], max_tokens=2)
        models.append(model)
        started.set()
        await asyncio.Event().wait()
        return 0.0

    async def scene() -> None:
        environment = HarnessEnvironment(Own(stuck))
        await environment.start()
        leased = assigned(LEASE, Task(5, "1", {}), SamplingParams(max_tokens=40), "harness:own", 8, TOKENIZER)
        work = asyncio.ensure_future(sample_group(engine, TOKENIZER, leased, "w", {"harness:own": environment}))
        await started.wait()
        work.cancel()
        await asyncio.gather(work, return_exceptions=True)
        with pytest.raises(UserError, match="no rollout has this key"):
            await models[0].generate([2, 3], max_tokens=2)
        await until(lambda: engine.free_slots == engine.slots)
        await environment.close()

    asyncio.run(scene())
