"""Harnesses call the model themselves: every call is written down as it was, within bounds, or the group is lost."""

from __future__ import annotations

import asyncio
import json
import random
import re
import socket
from array import array
from dataclasses import replace
from typing import Any

import pytest

from agent_cases import sampled, trained
from echo2.core.addresses import LOOPBACK
from echo2.core.errors import PeerError, UserError
from echo2.core.types import RolloutGroup, SamplingParams, SnapshotRef, Task
from echo2.engines.engine import Completion, Engine, Outcome, RequestFailure, SampleRequest
from echo2.engines.registry import make_engine
from echo2.engines.tokenizer import load_tokenizer
from echo2.rollouts import endpoint as http
from echo2.rollouts.generate import sample_group
from echo2.rollouts.harness import HarnessEnvironment
from echo2.tasks.loopback_model import LoopbackModel
from echo2.transport import messages
from harness_cases import LEASE, Own, Plays, failure_of, group_of
from harness_cases import played as played_by
from rollout_cases import END, VOCAB, assigned, load, snapshot_of, tiny_module, tokenizer_files, until

TEMPLATE = (
    b"{% for m in messages %}{{ {'user': 'h', 'tool': 'o'}.get(m.role, 'a') }}={{ m.content }}<eos>{% endfor %}"
    b"{% if add_generation_prompt %}a={% endif %}"
)
TOKENIZER = load_tokenizer(
    {**tokenizer_files(), "chat_template.jinja": TEMPLATE, "config.json": b'{"max_position_embeddings": 64}'}
)


def played(engine: Any, plays: Plays, max_tokens: int = 40, max_turns: int = 8) -> RolloutGroup | RequestFailure:
    return played_by(engine, plays, TOKENIZER, max_tokens, max_turns)


class Overheard:
    """An engine that keeps every request and its answer, as nobody else sees them."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.heard: list[tuple[SampleRequest, Completion]] = []

    @property
    def installed(self) -> SnapshotRef | None:
        return self._engine.installed

    def refusal(self, request: SampleRequest) -> Any:
        return self._engine.refusal(request)

    def submit(self, request: SampleRequest) -> asyncio.Future[Outcome]:
        asked = self._engine.submit(request)

        def keep(done: asyncio.Future[Outcome]) -> None:
            if not done.cancelled() and isinstance(done.result(), Completion):
                self.heard.append((request, done.result()))

        asked.add_done_callback(keep)
        return asked


@pytest.fixture(scope="module")
def engine() -> Engine:
    made = make_engine("compact", "cpu", 8)
    load(made, snapshot_of(tiny_module("qwen3")))
    return made


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


def test_the_calls_of_a_harness_become_one_rollout(engine: Engine) -> None:
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


async def forking(model: LoopbackModel, rng: random.Random) -> float:
    """Two answers at the same time to what was said, a history that forgets the first turn, and a judge."""
    said = [2, 3, *(await model.generate([2, 3], max_tokens=5))["token_ids"], 7]
    first, _ = await asyncio.gather(*(model.generate(said, max_tokens=4) for _ in range(2)))
    said += [*first["token_ids"], 8]
    await model.untrained.generate(said, max_tokens=1)
    await model.generate(said, max_tokens=4)
    await model.generate([2, *said[4:]], max_tokens=4)
    return rng.random()


def test_every_sampled_token_is_trained_on_once(engine: Engine) -> None:
    overheard = Overheard(engine)
    group = group_of(played(overheard, forking))
    assert [len(rows) for rows in group.by_rollout] == [3] * LEASE.num_samples
    judged = [(request, made) for request, made in overheard.heard if request.params.max_tokens == 1]
    assert trained(group) == sampled(overheard.heard) - sampled(judged)


def test_prompt_and_rewards_of_a_harness_travel(engine: Engine) -> None:
    group = group_of(played(engine, tokens_only))
    sent = messages.encode_delivery(LEASE.lease_id, group)
    got = messages.decode_played(sent, LEASE, "w")
    assert (got.prompt_tokens, got.rollouts) == (group.prompt_tokens, group.rollouts)
    plain = messages.encode_delivery(LEASE.lease_id, replace(group, by_harness=False))
    assert not plain.group.prompt_tokens
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
    from echo2.rollouts.chat_forms import message_of

    text = 'so <tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call><tool_call>{"x": 1}</tool_call>'
    message = message_of(text, True, 3)
    (call,) = message["tool_calls"]
    assert (call["id"], message["content"]) == ("call_3_0", 'so <tool_call>{"x": 1}</tool_call>')
    assert call["function"] == {"name": "add", "arguments": '{"a": 1}'}
    assert message_of(text, False, 3) == {"role": "assistant", "content": text}


async def silent(model: LoopbackModel, rng: random.Random) -> float:
    return 1.0


async def huge(model: LoopbackModel, rng: random.Random) -> float:
    await model.generate([2], max_tokens=1)
    return 1e9


async def raising(model: LoopbackModel, rng: random.Random) -> float:
    await model.generate([2], max_tokens=1)
    raise UserError("the harness is out of order")


async def no_token(model: LoopbackModel, rng: random.Random) -> float:
    await model.generate([VOCAB + 5], max_tokens=1)
    return 1.0


@pytest.mark.parametrize(
    ("plays", "reason", "complaint"),
    [
        (silent, "environment_failed", "without a call of the model"),
        (huge, "environment_failed", "add up to 1e"),
        (raising, "environment_failed", "out of order"),
        (no_token, "engine_failed", "outside 0..30"),
    ],
)
def test_an_invalid_rollout_costs_its_group(engine: Engine, plays: Plays, reason: str, complaint: str) -> None:
    failure = failure_of(played(engine, plays))
    assert failure.reason == reason
    assert re.search(complaint, failure.detail), failure.detail
    group_of(played(engine, tokens_only))  # the engine goes on


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


def test_strangers_and_invalid_requests_are_refused(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_a_body_that_is_too_large_is_refused_in_words(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """To a sender that is still sending, as with a huge observation."""
    monkeypatch.setattr(http, "BODY_BYTES_MAX", 1 << 20)

    async def attack(model: LoopbackModel, rng: random.Random) -> float:
        with pytest.raises(UserError, match="refused: a body of more than 1048576 bytes"):
            await model.chat([{"role": "user", "content": "x" * (17 << 20)}])
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


def test_the_second_part_of_an_answer_does_not_wait_until_the_harness_acknowledges_the_first() -> None:
    async def scenario() -> None:
        endpoint = http.LoopbackEndpoint()
        await endpoint.start()
        _, writer = await asyncio.open_connection(LOOPBACK, endpoint._port)
        connections = endpoint._server.server_state.connections
        await until(lambda: bool(connections))
        (connection,) = connections
        accepted = connection.transport.get_extra_info("socket")
        assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
        writer.close()
        await endpoint.close()

    asyncio.run(asyncio.wait_for(scenario(), 60.0))
