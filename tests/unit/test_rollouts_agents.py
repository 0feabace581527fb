"""Agents as their authors wrote them call chat completions and Anthropic's messages over HTTP, and are answered as by
the real servers. Whatever an agent does with its history, the tokens that are trained on are those that were sampled.
"""

from __future__ import annotations

import asyncio
import json
import random
import re
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from agent_cases import AGENTS_TOKENIZER, ScriptedEngine, events, posted, sampled, texts, trained
from echo2.core.types import RolloutGroup
from echo2.engines import tokenizer as tokenizer_module
from echo2.engines.tokenizer import rendered_tokens
from echo2.rollouts import endpoint
from echo2.rollouts.chat_forms import message_of
from echo2.tasks.loopback_model import LoopbackModel, OutOfRoomError, is_out_of_room
from harness_cases import LEASE, Plays, group_of, played

CHAT, MESSAGES = "/v1/chat/completions", "/v1/messages"
ADD = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
CALL = 'so <tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>'


def rollouts(engine: ScriptedEngine, plays: Plays, max_turns: int = 16) -> RolloutGroup:
    """Play a group; what is trained must be what was sampled."""
    group = group_of(played(engine, plays, AGENTS_TOKENIZER, 4000, max_turns))
    assert trained(group) == sampled(engine.heard)
    return group


def adds(prompt: str) -> str:
    return "it is 3" if "<|im_start|>tool" in prompt else CALL


async def chat(model: LoopbackModel, **body: Any) -> dict[str, Any]:
    status, _, content = await posted(model, CHAT, {"model": "gpt-5", **body})
    assert status == 200, content
    found: dict[str, Any] = json.loads(content)
    return found


def test_a_tool_is_called_and_its_answer_continues_the_row() -> None:
    async def agent(model: LoopbackModel, rng: random.Random) -> float:
        talk: list[dict[str, Any]] = [{"role": "developer", "content": "be brief"}, {"role": "user", "content": "1+2"}]
        choice = (await chat(model, messages=talk, tools=[ADD], tool_choice="required"))["choices"][0]
        (call,) = choice["message"]["tool_calls"]
        assert (choice["finish_reason"], choice["message"]["content"]) == ("tool_calls", "so")
        assert json.loads(call["function"]["arguments"]) == {"a": 1, "b": 2}
        talk += [choice["message"], {"role": "tool", "tool_call_id": call["id"], "content": "3"}]
        choice = (await chat(model, messages=talk, tools=[ADD]))["choices"][0]
        assert (choice["finish_reason"], choice["message"]["content"]) == ("stop", "it is 3")
        return 1.0

    group = rollouts(ScriptedEngine(adds), agent)
    assert group.num_rollouts == len(group.rollouts) == LEASE.num_samples
    (text,) = texts(group)[0]
    assert text.startswith("<|im_start|>system\nadd <|im_end|>\n<|im_start|>system\nbe brief<|im_end|>")
    assert f"{CALL}<|im_end|>\n<|im_start|>tool\n3<|im_end|>\n<|im_start|>assistant\nit is 3<|im_end|>" in text


def test_several_answers_are_rows_and_each_can_be_continued() -> None:
    async def agent(model: LoopbackModel, rng: random.Random) -> float:
        talk: list[dict[str, Any]] = [{"role": "user", "content": "1"}]
        answer = await chat(model, messages=talk, n=3)
        assert [one["index"] for one in answer["choices"]] == [0, 1, 2]
        assert answer["usage"]["completion_tokens"] == sum(len(one["token_ids"]) for one in answer["choices"])
        second = answer["choices"][1]["message"]
        await chat(model, messages=[*talk, second, {"role": "user", "content": "more"}])
        return 1.0

    numbers = iter(range(1000))
    group = rollouts(ScriptedEngine(lambda prompt: f"answer {next(numbers)}"), agent)
    for rows in texts(group):
        assert sorted(text.count("answer") for text in rows) == [1, 1, 2]


def test_the_longest_answer_has_two_names_and_clients_may_send_one_of_them_empty() -> None:
    async def agent(model: LoopbackModel, rng: random.Random) -> float:
        talk: list[dict[str, Any]] = [{"role": "user", "content": "1"}]
        for more in ({"max_tokens": 9, "max_completion_tokens": 2}, {"max_completion_tokens": None, "max_tokens": 2}):
            assert (await chat(model, messages=talk, **more))["usage"]["completion_tokens"] == 2
        return 1.0

    rollouts(ScriptedEngine(lambda prompt: "a long answer"), agent)


def test_compacted_histories_dropped_thoughts_and_sub_agents_become_rows() -> None:
    def speak(prompt: str) -> str:
        return "<think>long</think>" + ("found" if "search" in prompt else "next" if "summary" in prompt else "yes")

    async def agent(model: LoopbackModel, rng: random.Random) -> float:
        first = [{"role": "user", "content": "go"}]
        answer = (await chat(model, messages=first))["choices"][0]["message"]
        thought = {**answer, "content": re.sub("<think>.*</think>", "", answer["content"])}
        await chat(model, messages=[*first, thought, {"role": "user", "content": "on"}])
        await chat(model, messages=[{"role": "system", "content": "search"}, {"role": "user", "content": "x"}])
        await chat(model, messages=[{"role": "user", "content": "summary: yes, found"}])
        await chat(model, messages=[*first, answer, {"role": "user", "content": "and on"}])  # continues the first
        return 1.0

    group = rollouts(ScriptedEngine(speak), agent)
    for rows in texts(group):
        assert len(rows) == 4
        assert [text.count("<|im_start|>assistant") for text in rows] == [2, 2, 1, 1]
        assert "<|im_start|>assistant\nyes<|im_end|>" in rows[1]


def test_stop_strings_end_an_answer_and_are_not_shown() -> None:
    async def agent(model: LoopbackModel, rng: random.Random) -> float:
        talk: list[dict[str, Any]] = [{"role": "user", "content": "1"}]
        choice = (await chat(model, messages=talk, stop=["Obs:", "never"]))["choices"][0]
        assert (choice["message"]["content"], choice["finish_reason"]) == ("do it. ", "stop")
        talk += [choice["message"], {"role": "user", "content": "2"}]
        choice = (await chat(model, messages=talk, stop="END"))["choices"][0]
        assert choice["message"]["content"] == "do it. Obs: none"
        return 1.0

    group = rollouts(ScriptedEngine(lambda prompt: "do it. Obs: none"), agent)
    (text,) = texts(group)[0]  # one row: the stop string was sampled, and stays
    assert "do it. Obs:<|im_end|>\n<|im_start|>user\n2<|im_end|>" in text


def test_a_stream_has_the_same_answer() -> None:
    async def agent(model: LoopbackModel, rng: random.Random) -> float:
        body = {"messages": [{"role": "user", "content": "1+2"}], "tools": [ADD], "stream": True}
        status, headers, content = await posted(model, CHAT, {**body, "stream_options": {"include_usage": True}})
        assert (status, headers["content-type"].split(";")[0]) == (200, "text/event-stream")
        *chunks, usage, done = [data for _, data in events(content)]
        assert (done, usage["choices"]) == ("[DONE]", [])
        assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
        deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
        assert (deltas[0]["role"], deltas[0]["content"]) == ("assistant", "so")
        assert json.loads(deltas[1]["tool_calls"][0]["function"]["arguments"]) == {"a": 1, "b": 2}
        assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None, None, "tool_calls"]
        status, _, content = await posted(model, CHAT, {**body, "n": 2})
        chunks = [data["choices"][0] for _, data in events(content)[:-1]]
        for index in range(2):
            mine = [chunk for chunk in chunks if chunk["index"] == index]
            assert [chunk["finish_reason"] for chunk in mine] == [None, None, "tool_calls"]
            assert len(mine[-1]["token_ids"]) == len(mine[-1]["logprobs"]["content"]) > len(CALL)
        return 1.0

    rollouts(ScriptedEngine(adds), agent)


ANTHROPIC_TOOL = {"name": "add", "input_schema": {"type": "object"}}
KEY = "x-api-key: "


def test_anthropics_messages_are_the_same_conversation() -> None:
    async def agent(model: LoopbackModel, rng: random.Random) -> float:
        talk: list[dict[str, Any]] = [{"role": "user", "content": "1+2"}]
        body = {"model": "claude", "max_tokens": 500, "system": [{"type": "text", "text": "be brief"}]}
        more = {"tools": [ANTHROPIC_TOOL], "temperature": 1.0, "metadata": {}}
        status, _, content = await posted(model, MESSAGES, {**body, **more, "messages": talk}, KEY)
        answer = json.loads(content)
        assert (status, answer["type"], answer["stop_reason"]) == (200, "message", "tool_use")
        text, used = answer["content"]
        assert (text, used["input"]) == ({"type": "text", "text": "so"}, {"a": 1, "b": 2})
        result = {"type": "tool_result", "tool_use_id": used["id"], "content": [{"type": "text", "text": "3"}]}
        talk += [{"role": "assistant", "content": answer["content"]}, {"role": "user", "content": [result]}]
        stopped = {**body, **more, "messages": talk, "stop_sequences": ["is"]}
        answer = json.loads((await posted(model, MESSAGES, stopped, KEY))[2])
        assert (answer["stop_reason"], answer["stop_sequence"]) == ("stop_sequence", "is")
        assert answer["content"] == [{"type": "text", "text": "it "}]
        assert answer["usage"]["output_tokens"] == 5
        assert AGENTS_TOKENIZER.decode(answer["token_ids"]) == "it is"  # beside the form, for an agent's own log
        assert len(answer["logprobs"]["content"]) == 5
        assert len(answer["prompt_token_ids"]) == answer["usage"]["input_tokens"]
        return 1.0

    group = rollouts(ScriptedEngine(adds), agent)
    assert [len(rows) for rows in texts(group)] == [1] * LEASE.num_samples
    assert "<|im_start|>tool\n3<|im_end|>" in texts(group)[0][0]


def test_anthropics_stream_has_its_events() -> None:
    async def agent(model: LoopbackModel, rng: random.Random) -> float:
        body = {"max_tokens": 500, "messages": [{"role": "user", "content": "1+2"}], "stream": True}
        _, _, content = await posted(model, MESSAGES, {**body, "tools": [ANTHROPIC_TOOL]}, KEY)
        told = events(content)
        assert all(data["type"] == name for name, data in told)
        block = ["content_block_start", "content_block_delta", "content_block_stop"]
        assert [name for name, _ in told] == ["message_start", *block, *block, "message_delta", "message_stop"]
        assert told[2][1]["delta"] == {"type": "text_delta", "text": "so"}
        assert json.loads(told[5][1]["delta"]["partial_json"]) == {"a": 1, "b": 2}
        assert told[7][1]["delta"]["stop_reason"] == "tool_use"
        _, _, content = await posted(model, MESSAGES, {**body, "tools": [ANTHROPIC_TOOL], "max_tokens": 4}, KEY)
        assert events(content)[-2][1]["delta"]["stop_reason"] == "max_tokens"
        return 1.0

    rollouts(ScriptedEngine(adds), agent)


BAD_CHATS: list[dict[str, Any]] = [
    {"messages": []},
    {"messages": "x"},
    {"messages": [{"content": "x"}]},
    {"messages": [{"role": "user", "content": 5}]},
    {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
    {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "add", "arguments": "{{"}}]}]},
    {"messages": [{"role": "assistant", "tool_calls": 3}]},
    *({"messages": [{"role": "user", "content": "x"}]} | more for more in (
        {"n": 0}, {"n": "2"}, {"n": 1000}, {"stop": [""]}, {"stop": ["x"] * 17}, {"stop": 3}, {"max_tokens": -1},
        {"tools": "add"}, {"functions": [1]}, {"response_format": {"type": "json_object"}},
    )),
]  # fmt: skip
BAD_MESSAGES: list[dict[str, Any]] = [
    {"messages": [{"role": "user", "content": "x"}]},
    {"max_tokens": 5, "messages": "x"},
    {"max_tokens": 5, "messages": [3]},
    {"max_tokens": 5, "messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]},
    {"max_tokens": 5, "messages": [{"role": "user", "content": [3]}]},
    {"max_tokens": 5, "messages": [{"role": "user", "content": "x"}], "tools": [{"type": "web_search", "name": "w"}]},
    {"max_tokens": 5, "messages": [{"role": "user", "content": "x"}], "tool_choice": 3, "stop_sequences": "x" * 200},
]


def test_errors_have_the_form_of_the_real_servers() -> None:
    async def agent(model: LoopbackModel, rng: random.Random) -> float:
        for body in BAD_CHATS:
            status, headers, content = await posted(model, CHAT, body)
            error = json.loads(content)["error"]
            assert (status, error["type"], error["code"]) == (400, "invalid_request_error", "malformed"), body
            assert headers["x-should-retry"] == "false"
        for body in BAD_MESSAGES:
            status, _, content = await posted(model, MESSAGES, body, KEY)
            told = json.loads(content)
            assert (status, told["type"], told["error"]["type"]) == (400, "error", "invalid_request_error"), body
        status, _, content = await posted(model, MESSAGES, {}, "x-api-key: no")
        assert (status, json.loads(content)["error"]["type"]) == (401, "authentication_error")
        talk = [{"role": "user", "content": "1"}]
        for _ in range(2):
            await chat(model, messages=talk)
        status, _, content = await posted(model, CHAT, {"messages": talk})
        assert (status, json.loads(content)["error"]["code"]) == (400, "context_length_exceeded")
        status, _, content = await posted(model, MESSAGES, {"messages": talk, "max_tokens": 9}, KEY)
        told = json.loads(content)["error"]
        assert (status, told["type"]) == (400, "invalid_request_error")
        assert told["message"].startswith("prompt is too long: the rollout has had its turns")
        assert is_out_of_room(ValueError(f"Error code: 400 - {content!r}"))  # as a client words it
        return 1.0

    rollouts(ScriptedEngine(lambda prompt: "x"), agent, max_turns=2)


def test_an_answer_of_beginnings_of_tool_calls_is_read_once() -> None:
    """The rest was read at each beginning: an answer of 32,000 tokens could keep all rollouts waiting for minutes, and
    in the service all tenants."""
    text = "<tool_call>{" * 100_000
    assert message_of(text, has_tools=True, call_number=0) == {"role": "assistant", "content": text}
    call = '<tool_call>{"name": "add", "arguments": {}}</tool_call>'
    text = f"one {call} two <tool_call>{{}} </tool_call> {call} <tool_call>{{"
    message = message_of(text, has_tools=True, call_number=7)
    assert message["content"] == "one  two <tool_call>{} </tool_call>  <tool_call>{"
    assert [one["id"] for one in message["tool_calls"]] == ["call_7_0", "call_7_1"]


def test_a_body_of_many_parts_is_refused_before_it_is_parsed(monkeypatch: pytest.MonkeyPatch) -> None:
    """16 MiB of empty lists took .4 GB, and the worker's event loop for seconds."""
    monkeypatch.setattr(endpoint, "PARTS_MAX", 1000)

    async def agent(model: LoopbackModel, rng: random.Random) -> float:
        for part in ([], {}):
            status, _, content = await posted(model, CHAT, {"messages": [part] * 1000})
            assert (status, json.loads(content)["error"]["code"]) == (413, "oversized")
        await model.chat([{"role": "user", "content": "1"}])
        return 1.0

    rollouts(ScriptedEngine(lambda prompt: "x"), agent)


def test_a_text_that_no_context_has_room_for_cuts_the_rollout_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """As when an agent reads a file of megabytes: it was tokenised in the event loop of the worker, for a minute."""
    monkeypatch.setattr(tokenizer_module, "TEXT_CHARS_MAX", 50_000)
    threads = set[int]()

    def encoded(*arguments: Any, **more: Any) -> Any:
        threads.add(threading.get_ident())
        return rendered_tokens(*arguments, **more)

    monkeypatch.setattr(endpoint, "rendered_tokens", encoded)

    async def agent(model: LoopbackModel, rng: random.Random) -> float:
        talk: list[dict[str, Any]] = [{"role": "user", "content": "read it"}]
        talk.append(await model.chat(talk))
        talk.append({"role": "user", "content": "x" * 50_000})
        with pytest.raises(OutOfRoomError):
            await model.chat(talk)
        return 1.0

    (rows, *_) = rollouts(ScriptedEngine(lambda prompt: "x"), agent).by_rollout
    assert [row.finish for row in rows] == ["length"]
    assert threads
    assert threading.get_ident() not in threads


def test_an_answer_to_a_closed_connection_is_not_trained_on() -> None:
    """A client that gives up hangs up. Its next try asks the same again."""
    asked, gone, first = asyncio.Event(), asyncio.Event(), iter([True])

    class Slow(ScriptedEngine):
        def submit(self, request: Any) -> Any:
            answer = super().submit(request)
            if asked.is_set():
                return answer
            self.heard.pop()

            async def later() -> Any:
                made = await answer
                asked.set()
                await gone.wait()
                return made

            return asyncio.ensure_future(later())

    async def agent(model: LoopbackModel, rng: random.Random) -> float:
        talk = [{"role": "user", "content": "1"}]
        if not next(first, False):
            await gone.wait()
        else:
            host, port = model.base_url.removeprefix("http://").removesuffix("/v1").split(":")
            _, writer = await asyncio.open_connection(host, int(port))
            data = json.dumps({"messages": talk}).encode()
            head = f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {model.api_key}\r\n"
            writer.write(f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data)
            await asked.wait()
            writer.close()
            await writer.wait_closed()
            status, _, _ = await posted(model, CHAT, {"messages": []})  # the server has read on meanwhile
            assert status == 400
            gone.set()
        await chat(model, messages=talk)
        return 1.0

    group = rollouts(Slow(lambda prompt: "x"), agent)
    assert [len(rows) for rows in texts(group)] == [1] * LEASE.num_samples


FULL_CHAT: dict[str, Any] = {
    "model": "m",
    "request_id": "r",
    "messages": [
        {"role": "system", "content": "s"},
        {"role": "user", "content": [{"type": "text", "text": "x"}], "name": "n"},
        {"role": "assistant", "content": None, "tool_calls": [{"id": "c", "type": "function", "function": {
            "name": "add", "arguments": "{}"}}]},
        {"role": "tool", "tool_call_id": "c", "content": "3"},
    ],
    "tools": [{"type": "function", "function": {"name": "add", "description": "d", "parameters": {"type": "object"}}}],
    "tool_choice": "auto",
    "stop": ["a", "b"],
    "user": "u",
}  # fmt: skip
FULL_MESSAGES: dict[str, Any] = {
    "model": "m",
    "max_tokens": 9,
    "system": [{"type": "text", "text": "s"}],
    "messages": [
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": [{"type": "thinking", "thinking": "t", "signature": "g"},
                                          {"type": "tool_use", "id": "c", "name": "add", "input": {"a": "1"}}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c", "content": "3"}]},
    ],
    "tools": [{"name": "add", "description": "d", "input_schema": {"type": "object"}}],
    "tool_choice": {"type": "auto"},
    "stop_sequences": ["a"],
    "metadata": {"user_id": "u"},
}  # fmt: skip
FULL_TOKENS: dict[str, Any] = {
    "model": "m",
    "request_id": "r",
    "token_ids": [2, 3],
    "sampling_params": {"max_tokens": 2, "x": "y"},
}
HALVES = ("\ud800", "x\udfff", "\udc00\ud800")


def with_half_a_character(body: Any, half: str, place: str = "") -> Iterator[tuple[str, Any]]:
    """The body with half of a character in each of its texts in turn, and in a key of each object, and where it is."""
    if isinstance(body, str):
        yield place, half
    elif isinstance(body, dict):
        yield place or "the body", {**body, half: 1}
        for key, inner in body.items():
            for at, changed in with_half_a_character(inner, half, f"{place}.{key}".lstrip(".")):
                yield at, {**body, key: changed}
    elif isinstance(body, list):
        for number, inner in enumerate(body):
            for at, changed in with_half_a_character(inner, half, f"{place}[{number}]"):
                yield at, [*body[:number], changed, *body[number + 1 :]]


def test_half_a_character_is_refused_in_every_field() -> None:
    routes = {CHAT: FULL_CHAT, MESSAGES: FULL_MESSAGES, "/inference/v1/generate": FULL_TOKENS}

    async def agent(model: LoopbackModel, rng: random.Random) -> float:
        half = HALVES[rng.randrange(3)]
        for path, body in routes.items():
            status, _, content = await posted(model, path, body)
            assert status == 200, content
            for place, changed in with_half_a_character(body, half):
                status, _, content = await posted(model, path, changed)
                message = json.loads(content)["error"]["message"]
                assert (status, message.partition(" has ")[0]) == (400, place), (path, half)
        emoji = [{"role": "user", "content": "\U0001f600"}]  # both halves
        assert (await posted(model, CHAT, {"messages": emoji}))[0] == 200
        return 1.0

    group = group_of(played(ScriptedEngine(lambda prompt: "x"), agent, AGENTS_TOKENIZER, 4000, 16))
    assert group.num_rollouts == LEASE.num_samples


def test_a_tool_call_with_half_a_character_is_dropped() -> None:
    """The policy may write anything, and an answer must be sent."""
    call = '<tool_call>{"name": "add", "arguments": {"a": "\\ud800"}}</tool_call>'

    async def agent(model: LoopbackModel, rng: random.Random) -> float:
        talk: list[dict[str, Any]] = [{"role": "user", "content": "1+2"}]
        for path, tool in ((CHAT, ADD), (MESSAGES, ANTHROPIC_TOOL)):
            status, _, content = await posted(model, path, {"messages": talk, "tools": [tool], "max_tokens": 500})
            answer = json.loads(content)
            assert status == 200
            text = answer["choices"][0]["message"]["content"] if path == CHAT else answer["content"][0]["text"]
            assert text == call
        return 1.0

    rollouts(ScriptedEngine(lambda prompt: call), agent)
