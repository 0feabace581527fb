"""Streams tell an answer while it is drawn, and nothing that they would have to take back."""

from __future__ import annotations

import asyncio
import json
import random
from array import array
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from agent_cases import AGENTS_TOKENIZER, ScriptedEngine, events, posted, sampled, texts, trained
from echo2.core.errors import PeerError, UserError
from echo2.core.types import RolloutGroup
from echo2.engines.engine import Completion, Outcome, RequestFailure, SampleRequest
from echo2.engines.registry import make_engine
from echo2.engines.tokenizer import appends_text, decoded
from echo2.rollouts.chat_forms import message_of
from echo2.rollouts.telling import BROKEN_TOKENS_MAX, Telling
from echo2.tasks.loopback_model import LoopbackModel
from harness_cases import LEASE, Plays, failure_of, group_of, played
from rollout_cases import END, load, outcomes, requests, snapshot_of, tiny_module
from seeds import examples
from test_engines_stop_strings import byte_tokenizer
from test_rollouts_harness import TOKENIZER

ADD = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
PIECES = (CALL, "<tool_call>", "</tool_call>", "<tool", "_call>", "<", " ", "\n", "é", "日本", "two", "Question:", ": ")
STOPS = ("<tool", "\n\n", "é", "本", ": ", "two\n", "Question: w")


@examples(300)
@given(st.lists(st.sampled_from(STOPS), max_size=3), st.booleans(), st.integers(0, 1 << 30))
def test_streamed_text_is_a_prefix_of_the_message(stops: list[str], has_tools: bool, seed: int) -> None:
    tokenizer, rng = byte_tokenizer(), random.Random(seed)
    tokens = array("i", [])
    for _ in range(rng.randrange(1, 12)):
        strange = [rng.randrange(len(tokenizer) + 3)]  # a part of a character; an id beyond the tokenizer's
        piece = tokenizer.encode(rng.choice(PIECES), add_special_tokens=False)
        tokens.extend(strange if rng.random() < 0.1 else piece)
    text = decoded(tokenizer, tokens)
    at = min((text.find(stop) for stop in stops if stop in text), default=len(text))
    content = message_of(text[:at], has_tools, 0)["content"] or ""
    said: list[str] = []
    telling = Telling(tokenizer, stops, has_tools, said.append)
    for token in tokens:
        telling.take(token)
        assert content.startswith("".join(said)), (seed, content, said)
    telling.end(content)
    assert "".join(said) == content
    assert "" not in said


def test_text_is_streamed_as_soon_as_it_is_final() -> None:
    said: list[str] = []
    telling = Telling(AGENTS_TOKENIZER, ("END",), True, said.append)
    for character in "a <b ENx <tool ":
        telling.take(AGENTS_TOKENIZER.encode(character, add_special_tokens=False)[0])
    assert "".join(said) == "a <b ENx <tool"  # the space may be before a tool call
    with pytest.raises(UserError, match="without `stream`"):
        telling.end("something else")
    broken = Telling(byte_tokenizer(), (), False, said.append)
    half, whole = (byte_tokenizer().encode(one, add_special_tokens=False) for one in ("ÿ", "two"))
    said.clear()
    for token in [half[0]] * (BROKEN_TOKENS_MAX + 1) + whole:
        broken.take(token)
    assert said == []  # no text: the rest is told at the end


@pytest.mark.parametrize("name", ["compact", "transformers", "fake"])
@pytest.mark.parametrize("together", [False, True])
def test_engines_stream_each_token_as_it_is_sampled(name: str, together: bool) -> None:
    engine = make_engine(name, "cpu", 4)
    load(engine, snapshot_of(tiny_module("qwen3")))
    asked = [one for seed in range(4) for one in requests(seed, max_tokens=4 + 5 * seed)]
    plain = outcomes(engine, asked, together)
    heard: list[list[int]] = [[] for _ in asked]
    hearing = [
        replace(one, on_token=mine.append) if place % 4 else one
        for place, (one, mine) in enumerate(zip(asked, heard, strict=True))
    ]
    assert outcomes(engine, hearing, together) == plain
    for place, (one, mine) in enumerate(zip(plain, heard, strict=True)):
        assert isinstance(one, Completion)
        assert mine == (list(one.tokens) if place % 4 else [])
    asyncio.run(engine.close())


class Steps(ScriptedEngine):
    """Says the first half of an answer, and the rest when `goes_on`, in which it may `fail`."""

    def __init__(self, speak: Callable[[str], str]) -> None:
        super().__init__(speak)
        self.goes_on = asyncio.Event()
        self.fails: Exception | None = None
        self.begun = asyncio.Event()
        self.was_cancelled = asyncio.Event()

    def submit(self, request: SampleRequest) -> asyncio.Future[Outcome]:
        """See `Engine.submit`."""
        answer = super().submit(request)
        if request.on_token is None:
            return answer
        record = self.heard.pop()

        async def drawn(hear: Callable[[int], object]) -> Outcome:
            made = await answer
            assert isinstance(made, Completion)
            half = len(made.tokens) // 2
            for place, token in enumerate(made.tokens):
                if place == half:
                    self.begun.set()
                    try:
                        await self.goes_on.wait()
                    except asyncio.CancelledError:
                        self.was_cancelled.set()
                        raise
                    if self.fails is not None:
                        raise self.fails
                hear(token)
            self.heard.append(record)
            return made

        return asyncio.ensure_future(drawn(request.on_token))


def rollouts(engine: ScriptedEngine, plays: Plays) -> RolloutGroup:
    group = group_of(played(engine, plays, AGENTS_TOKENIZER, 4000, 16))
    assert trained(group) == sampled(engine.heard)
    return group


@asynccontextmanager
async def streaming(model: LoopbackModel, path: str, **body: Any) -> AsyncIterator[asyncio.StreamReader]:
    """A call whose answer is read as it comes."""
    host, port = model.base_url.removeprefix("http://").removesuffix("/v1").split(":")
    data = json.dumps({"messages": [{"role": "user", "content": "1"}], "stream": True, **body}).encode()
    reader, writer = await asyncio.open_connection(host, int(port))
    head = f"POST {path} HTTP/1.0\r\nHost: x\r\nx-api-key: {model.api_key}\r\nContent-Length: {len(data)}\r\n\r\n"
    try:
        writer.write(head.encode() + data)
        assert b" 200 " in await reader.readuntil(b"\r\n\r\n")
        yield reader
    finally:
        writer.close()


async def event(reader: asyncio.StreamReader) -> Any:
    return events((await reader.readuntil(b"\n\n")).decode())[0][1]


async def rest(reader: asyncio.StreamReader) -> list[Any]:
    return [data for _, data in events((await reader.read()).decode())]


def content_of(chunks: list[Any]) -> str:
    return "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks if chunk["choices"])


def test_openais_chunks_come_while_the_answer_is_drawn() -> None:
    answer = "so, let me add <tool " + CALL

    async def agent(model: LoopbackModel, rng: random.Random) -> float:
        more = {"tools": [ADD], "stream_options": {"include_usage": True}}
        async with streaming(model, "/v1/chat/completions", **more) as stream:
            first = await event(stream)  # the engine waits for this
            assert first["choices"][0]["delta"]["role"] == "assistant"
            engine.goes_on.set()
            *chunks, usage, done = [first, *await rest(stream)]
        assert (content_of(chunks), done) == ("so, let me add <tool", "[DONE]")
        assert [chunk["choices"][0]["delta"].get("tool_calls") for chunk in chunks[-2:]][1] is None
        (call,) = chunks[-2]["choices"][0]["delta"]["tool_calls"]
        assert json.loads(call["function"]["arguments"]) == {"a": 1}
        last = chunks[-1]["choices"][0]
        assert (last["finish_reason"], len(last["token_ids"])) == ("tool_calls", len(answer) + 1)
        assert usage["usage"]["completion_tokens"] == len(last["logprobs"]["content"]) == len(answer) + 1
        return 1.0

    engine = Steps(lambda prompt: answer)
    rollouts(engine, agent)


def test_anthropics_deltas_come_while_the_answer_is_drawn_and_the_conversation_goes_on() -> None:
    async def agent(model: LoopbackModel, rng: random.Random) -> float:
        async with streaming(model, "/v1/messages", max_tokens=500, stop_sequences=["STOP"]) as stream:
            told = [await event(stream) for _ in range(3)]
            assert [one["type"] for one in told] == ["message_start", "content_block_start", "content_block_delta"]
            assert told[0]["message"]["usage"]["input_tokens"] > 0
            engine.goes_on.set()
            told += await rest(stream)
        text = "".join(one["delta"]["text"] for one in told if one["type"] == "content_block_delta")
        assert text == "what the answer says. STO "
        assert [one["type"] for one in told[-3:]] == ["content_block_stop", "message_delta", "message_stop"]
        assert told[-2]["delta"] == {"stop_reason": "stop_sequence", "stop_sequence": "STOP"}
        talk = [("user", "1"), ("assistant", text), ("user", "2")]
        body = {"max_tokens": 500, "messages": [{"role": role, "content": said} for role, said in talk]}
        assert (await posted(model, "/v1/messages", body, "x-api-key: "))[0] == 200
        return 1.0

    engine = Steps(lambda prompt: "what the answer says. STO STOP, and more")
    group = rollouts(engine, agent)
    assert [len(rows) for rows in texts(group)] == [1] * LEASE.num_samples  # what was told is known again


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages"])
def test_a_stream_whose_answer_fails_ends_with_the_error(path: str) -> None:
    async def agent(model: LoopbackModel, rng: random.Random) -> float:
        async with streaming(model, path, max_tokens=500) as stream:
            await event(stream)
            engine.goes_on.set()
            assert "logits" in (await rest(stream))[-1]["error"]["message"]
        return 1.0

    engine = Steps(lambda prompt: "what the answer says")
    engine.fails = PeerError("not_finite", "the logits are not finite")
    outcome = played(engine, agent, AGENTS_TOKENIZER, 4000, 16)
    assert "logits" in failure_of(outcome).detail


def test_an_error_before_the_first_text_has_its_own_status() -> None:
    class Full(ScriptedEngine):
        def submit(self, request: SampleRequest) -> asyncio.Future[Outcome]:
            done: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()
            done.set_result(RequestFailure("prompt_too_long", "too long"))
            return done

    async def agent(model: LoopbackModel, rng: random.Random) -> float:
        body = {"messages": [{"role": "user", "content": "1"}], "stream": True}
        status, _, content = await posted(model, "/v1/chat/completions", body)
        assert (status, json.loads(content)["error"]["code"]) == (400, "prompt_too_long")
        return 1.0

    assert failure_of(played(Full(lambda prompt: ""), agent, AGENTS_TOKENIZER)).reason == "prompt_too_long"


def test_an_answer_is_given_up_when_its_client_hangs_up_in_the_midst() -> None:
    hangs_up = iter([True])

    async def agent(model: LoopbackModel, rng: random.Random) -> float:
        if next(hangs_up, False):
            async with streaming(model, "/v1/chat/completions") as stream:
                await event(stream)
            await engine.was_cancelled.wait()
        body = {"messages": [{"role": "user", "content": "1"}]}
        assert (await posted(model, "/v1/chat/completions", body))[0] == 200
        return 1.0

    engine = Steps(lambda prompt: "what the answer says")
    group = rollouts(engine, agent)
    assert [len(rows) for rows in texts(group)] == [1] * LEASE.num_samples


def test_text_that_may_still_change_is_streamed_at_the_end() -> None:
    core = Tokenizer(models.WordPiece({"do": 0, "n": 1, "'": 2, "t": 3, "<pad>": 4}, unk_token="<pad>"))
    core.pre_tokenizer, core.decoder = pre_tokenizers.Whitespace(), decoders.WordPiece(cleanup=False)
    tidy: Any = PreTrainedTokenizerFast(tokenizer_object=core, pad_token="<pad>", clean_up_tokenization_spaces=True)
    texts = [tidy.decode(tokens) for tokens in ([0, 1], [0, 1, 2, 3])]
    assert not texts[1].startswith(texts[0])
    assert not appends_text(tidy)
    assert appends_text(byte_tokenizer())


def test_a_model_of_ours_is_streamed_token_by_token() -> None:
    engine = make_engine("compact", "cpu", 8)
    load(engine, snapshot_of(tiny_module("qwen3")))
    num_chunks: list[int] = []

    async def agent(model: LoopbackModel, rng: random.Random) -> float:
        more = {"stop": ["7"], "max_tokens": 24}
        async with streaming(model, "/v1/chat/completions", **more) as stream:
            *chunks, last, done = await rest(stream)
        assert done == "[DONE]"
        tokens = array("i", last["choices"][0]["token_ids"])
        whole = decoded(TOKENIZER, tokens)
        assert content_of(chunks) == whole.partition("7")[0]
        assert len(tokens) == 24 or "7" in whole or tokens[-1] == END
        num_chunks.append(len(chunks))
        return 1.0

    group_of(played(engine, agent, TOKENIZER, 60))
    assert max(num_chunks) > 3
    asyncio.run(engine.close())
