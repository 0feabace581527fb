"""The forms in which chat clients call the model: OpenAI's chat completions and Anthropic's messages.

Both are read into one form of call, a `ChatCall`, whose messages are OpenAI's with one text as their content. Streams
are streamed as by the real servers, event by event; tool calls, token ids and logprobs come when the answer is
whole. Options that a run's settings decide, such as the temperature, are not read.
"""

from __future__ import annotations

import json
import re
import time
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from echo2.core.documents import half_character, parse_json
from echo2.core.types import STOP_CHARS_MAX, STOP_STRINGS_MAX
from echo2.engines.engine import Completion
from echo2.rollouts.recorded import CallRefused
from echo2.tasks.loopback_model import CUT, TOO_LONG

MESSAGES_MAX = 10_000
TOOLS_MAX = 128
ANSWERS_MAX = 128
#: The syntax of tool calls in the Qwen and Hermes families: what begins one, and what ends it.
TOOL_CALL, TOOL_CALL_END = re.compile(r"<tool_call>\s*(?=\{)"), re.compile(r"\}\s*</tool_call>")
MODEL_NAME = "policy"
#: Anthropic's names of errors; others are of the request.
ERROR_TYPES = {401: "authentication_error", 413: "request_too_large", 500: "api_error"}

Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class ChatCall:
    """A call of a chat client. `stop`: strings that end an answer; `num_answers`: to the same messages."""

    messages: list[Json]
    tools: list[Json] | None
    max_tokens: int | None
    stop: tuple[str, ...] = ()
    num_answers: int = 1
    is_streamed: bool = False
    tells_usage: bool = True


@dataclass(frozen=True, slots=True)
class ChatAnswer:
    """An answer of the model: its tokens, the prompt they were sampled after, the message they form, in OpenAI's form,
    and the stop string that ended it (empty: none)."""

    completion: Completion
    prompt: array[int]
    message: Json
    stop: str


@dataclass(frozen=True, slots=True)
class Piece:
    """The next piece of the text of answer number `index`, to a prompt of `num_read` tokens."""

    index: int
    text: str
    num_read: int


class Stream(Protocol):
    """Writes the events of the answers to one call. Texts come in pieces; `end` gets the whole answer."""

    def piece(self, piece: Piece) -> Iterator[Json]: ...

    def end(self, answer: Json) -> Iterator[Json]: ...


@dataclass(frozen=True, slots=True)
class ChatForm:
    """Reads calls (`call` raises CallRefused), and writes answers with a request's id, their streams, and errors.
    `last`: the stream's last words."""

    call: Callable[[Json], ChatCall]
    answer: Callable[[str, Sequence[ChatAnswer]], Json]
    stream: Callable[[str, ChatCall], Stream]
    error: Callable[[int, str, str], Json]
    last: str = ""


def server_sent(event: Json) -> str:
    """Return an event as a server-sent one. Those of Anthropic's are named by their type."""
    name = f"event: {event['type']}\n" if "type" in event else ""
    return f"{name}data: {json.dumps(event)}\n\n"


def bad(complaint: str) -> CallRefused:
    """A call that is malformed."""
    return CallRefused(400, "malformed", complaint)


def longest(value: Any) -> int | None:
    """Return a call's longest answer. Raises CallRefused if it is not a number of tokens."""
    if value is not None and (type(value) is not int or value < 1):
        raise bad("max_tokens is not a whole number above 0")
    return value


def essence(message: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return the fields that are compared of messages. Other fields, which clients may add, are ignored."""
    calls: Sequence[Mapping[str, Any]] = message.get("tool_calls") or ()
    return message["role"], message["content"], [call["function"] for call in calls], message.get("tool_call_id")


def plain(message: Any) -> Json:
    """Return a message with its content as one text, which clients may send in parts, and the arguments of its tool
    calls as objects, which chat templates expect.

    Raises:
        CallRefused: it is none.
    """
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise bad("a message has no role")
    fields = {name: value for name, value in message.items() if value is not None}
    if calls := fields.get("tool_calls"):
        fields["tool_calls"] = list(map(_with_arguments, calls if isinstance(calls, list) else [calls]))
    role = "system" if message["role"] == "developer" else message["role"]
    return {**fields, "role": role, "content": _text(message.get("content"))}


def message_of(text: str, has_tools: bool, call_number: int) -> Json:
    """Return an answer as an OpenAI message. Tool calls are parsed only if the request named tools; what is not a valid
    call stays in the text, and the harness decides what to reply."""
    calls: list[Json] = []
    parts, at = [], 0
    # One expression for both ends would read the rest of the text at each beginning that has no end.
    while has_tools and (begin := TOOL_CALL.search(text, at)) and (end := TOOL_CALL_END.search(text, begin.end())):
        function = _function(text[begin.end() : end.start() + 1])
        if function is not None:
            calls.append({"id": f"call_{call_number}_{len(calls)}", "type": "function", "function": function})
        parts.append(text[at : end.end() if function is None else begin.start()])
        at = end.end()
    if not calls:
        return {"role": "assistant", "content": text}
    return {"role": "assistant", "content": "".join([*parts, text[at:]]).strip() or None, "tool_calls": calls}


def _function(text: str) -> Json | None:
    """Return the function of a call that the model has written; None: it is not a valid call."""
    try:
        call = parse_json(text)
    except ValueError:
        return None
    arguments = call.get("arguments") or {} if isinstance(call, dict) else None
    if not isinstance(arguments, dict) or not isinstance(call.get("name"), str) or half_character(call):
        return None
    return {"name": call["name"], "arguments": json.dumps(arguments)}


def _with_arguments(call: Any) -> Json:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise bad("a tool call has no function with a name")
    try:
        raw_arguments = function.get("arguments") or {}
        arguments = parse_json(raw_arguments) if isinstance(raw_arguments, str) else raw_arguments
    except ValueError as error:
        raise bad(f"the arguments of a tool call are not JSON: {error}") from error
    return {**call, "function": {"name": function["name"], "arguments": arguments}}


def _text(content: Any) -> str:
    if isinstance(content, list) and all(isinstance(p, Mapping) and isinstance(p.get("text"), str) for p in content):
        content = "".join(part["text"] for part in content)
    if not isinstance(content, str | None):
        raise bad("the content of a message is not text")
    return content or ""


def _inner(body: Json, outer: str, name: str) -> Any:
    inner = body.get(outer)
    return inner.get(name) if isinstance(inner, Mapping) else None


def _messages(messages: Any) -> list[Json]:
    if not isinstance(messages, list) or not 0 < len(messages) <= MESSAGES_MAX:
        raise bad(f"messages is not a list of 1 to {MESSAGES_MAX}")
    return list(map(plain, messages))


def _tools(tools: Any) -> list[Json] | None:
    if tools and not (isinstance(tools, list) and len(tools) <= TOOLS_MAX):
        raise bad(f"tools is not a list of at most {TOOLS_MAX}")
    return tools or None


def _stop(name: str, value: Any) -> tuple[str, ...]:
    strings = [value] if isinstance(value, str) else value or []
    is_bounded = isinstance(strings, list) and len(strings) <= STOP_STRINGS_MAX
    if not is_bounded or not all(isinstance(one, str) and 0 < len(one) <= STOP_CHARS_MAX for one in strings):
        raise bad(f"{name} is not up to {STOP_STRINGS_MAX} strings of 1 to {STOP_CHARS_MAX} characters")
    return tuple(strings)


# ---- OpenAI ----------------------------------------------------------------------------------------------------------


def _openai_call(body: Json) -> ChatCall:
    for refused in ("functions", "response_format"):
        if body.get(refused) not in (None, {"type": "text"}):
            raise bad(f"{refused} is not supported")
    count = 1 if body.get("n") is None else body["n"]
    if type(count) is not int or not 0 < count <= ANSWERS_MAX:
        raise bad(f"n is not a whole number of 1 to {ANSWERS_MAX}")
    return ChatCall(
        _messages(body.get("messages")),
        None if body.get("tool_choice") == "none" else _tools(body.get("tools")),
        longest(body.get("max_tokens") if (most := body.get("max_completion_tokens")) is None else most),
        _stop("stop", body.get("stop")),
        count,
        bool(body.get("stream")),
        bool(_inner(body, "stream_options", "include_usage")),
    )


def _openai_answer(request_id: str, answers: Sequence[ChatAnswer]) -> Json:
    read, written = len(answers[0].prompt), sum(len(one.completion.tokens) for one in answers)
    return {
        "id": request_id,
        "object": "chat.completion",
        "created": int(time.time()),
        "model": MODEL_NAME,
        "prompt_token_ids": answers[0].prompt.tolist(),
        "choices": [
            {
                "index": index,
                "message": one.message,
                "finish_reason": "tool_calls" if "tool_calls" in one.message else one.completion.finish,
                **tokens_of(one.completion),
            }
            for index, one in enumerate(answers)
        ],
        "usage": {"prompt_tokens": read, "completion_tokens": written, "total_tokens": read + written},
    }


class _OpenAIStream:
    def __init__(self, request_id: str, call: ChatCall) -> None:
        self._frame = {"id": request_id, "object": "chat.completion.chunk", "created": int(time.time())}
        self._tells_usage = call.tells_usage
        self._begun = set[int]()

    def piece(self, piece: Piece) -> Iterator[Json]:
        yield self._chunk(piece.index, {"content": piece.text})

    def end(self, answer: Json) -> Iterator[Json]:
        for choice in answer["choices"]:
            index = choice["index"]
            if index not in self._begun:
                yield self._chunk(index, {})
            for at, one in enumerate(choice["message"].get("tool_calls", ())):
                yield self._chunk(index, {"tool_calls": [{"index": at, **one}]})
            yield self._chunk(index, {}, **{name: choice[name] for name in ("finish_reason", "token_ids", "logprobs")})
        if self._tells_usage:
            yield {**self._frame, "model": MODEL_NAME, "choices": [], "usage": answer["usage"]}

    def _chunk(self, index: int, delta: Json, **more: Any) -> Json:
        role = {} if index in self._begun else {"role": "assistant"}
        self._begun.add(index)
        choice = {"index": index, "delta": {**role, **delta}, "finish_reason": None, **more}
        return {**self._frame, "model": MODEL_NAME, "choices": [choice]}


def openai_error(status: int, code: str, message: str) -> Json:
    """An error in OpenAI's form, which is vLLM's, too."""
    return {"error": {"message": message, "type": "invalid_request_error", "param": None, "code": code}}


def tokens_of(completion: Completion) -> Json:
    """Return the tokens of an answer with their logprobs and versions. A token is named twice, as `token_id` (vLLM)
    and as the text `token_id:N` (read by renderers)."""
    pairs = zip(completion.tokens, completion.logprobs, strict=True)
    ends = [*(start for start, _ in completion.version_spans[1:]), len(completion.tokens)]
    spans = zip(completion.version_spans, ends, strict=True)
    return {
        "token_ids": completion.tokens.tolist(),
        "logprobs": {
            "content": [
                {"token": f"token_id:{token}", "token_id": token, "logprob": logprob, "top_logprobs": []}
                for token, logprob in pairs
            ]
        },
        "weight_versions": [{"version": version, "start": start, "end": end} for (start, version), end in spans],
    }


# ---- Anthropic -------------------------------------------------------------------------------------------------------


def _anthropic_call(body: Json) -> ChatCall:
    if body.get("max_tokens") is None:
        raise bad("max_tokens: Field required")
    anthropic_messages = body.get("messages")
    if not isinstance(anthropic_messages, list):
        raise bad("messages is not a list")
    system = _text(body.get("system"))
    messages = [one for message in anthropic_messages for one in _openai_messages(message)]
    tools = [_openai_tool(tool) for tool in _tools(body.get("tools")) or ()]
    return ChatCall(
        _messages([*([{"role": "system", "content": system}] if system else []), *messages]),
        None if _inner(body, "tool_choice", "type") == "none" else tools or None,
        longest(body["max_tokens"]),
        _stop("stop_sequences", body.get("stop_sequences")),
        is_streamed=bool(body.get("stream")),
    )


def _openai_tool(tool: Any) -> Json:
    if not isinstance(tool, Mapping) or not isinstance(tool.get("name"), str) or "input_schema" not in tool:
        raise bad("a tool has no name or no input_schema: tools of the server are not supported")
    described = {"name": tool["name"], "description": tool.get("description", ""), "parameters": tool["input_schema"]}
    return {"type": "function", "function": described}


def _openai_messages(message: Any) -> Iterator[Json]:
    """Yield what a message of Anthropic's is in OpenAI's form: results of tools are messages of their own, and come
    first. Thoughts are left out, which the policy has not."""
    role, content = (message.get("role"), message.get("content")) if isinstance(message, Mapping) else (None, None)
    if not isinstance(content, list):
        yield {"role": role, "content": content}
        return
    texts, calls = [], []
    for block in content:
        match block:
            case {"type": "tool_result", "tool_use_id": used}:
                yield {"role": "tool", "tool_call_id": used, "content": _text(block.get("content"))}
            case {"type": "tool_use", "id": used, "name": name, "input": arguments}:
                calls.append({"id": used, "type": "function", "function": {"name": name, "arguments": arguments}})
            case {"type": "thinking" | "redacted_thinking"}:
                pass
            case _:
                texts.append(_text([block]))
    if texts or calls:
        yield {"role": role, "content": "".join(texts), **({"tool_calls": calls} if calls else {})}


def _anthropic_answer(request_id: str, answers: Sequence[ChatAnswer]) -> Json:
    (one,) = answers
    calls = one.message.get("tool_calls", ())
    blocks: list[Json] = [{"type": "text", "text": one.message["content"]}] if one.message["content"] else []
    for call in calls:
        name, arguments = call["function"]["name"], json.loads(call["function"]["arguments"])
        blocks.append({"type": "tool_use", "id": call["id"], "name": name, "input": arguments})
    ended = "stop_sequence" if one.stop else "max_tokens" if one.completion.finish == "length" else "end_turn"
    return {
        **_anthropic_message(request_id, len(one.prompt)),
        "content": blocks,
        "stop_reason": "tool_use" if calls else ended,
        "stop_sequence": one.stop or None,
        "usage": {"input_tokens": len(one.prompt), "output_tokens": len(one.completion.tokens)},
        "prompt_token_ids": one.prompt.tolist(),
        **tokens_of(one.completion),
    }


def _anthropic_message(request_id: str, num_read: int) -> Json:
    """Return a message of which nothing has been written yet."""
    return {
        "id": f"msg_{request_id}",
        "type": "message",
        "role": "assistant",
        "model": MODEL_NAME,
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
        "usage": {"input_tokens": num_read, "output_tokens": 0},
    }


class _AnthropicStream:
    def __init__(self, request_id: str, call: ChatCall) -> None:
        self._request_id = request_id
        self._has_begun = self._has_text = False

    def piece(self, piece: Piece) -> Iterator[Json]:
        yield from self._begin(piece.num_read)
        if not self._has_text:
            self._has_text = True
            yield {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}}
        yield self._delta(0, {"type": "text_delta", "text": piece.text})

    def end(self, answer: Json) -> Iterator[Json]:
        yield from self._begin(answer["usage"]["input_tokens"])
        for index, block in enumerate(answer["content"]):
            if block["type"] != "text":
                yield {"type": "content_block_start", "index": index, "content_block": {**block, "input": {}}}
                yield self._delta(index, {"type": "input_json_delta", "partial_json": json.dumps(block["input"])})
            yield {"type": "content_block_stop", "index": index}
        ended = {name: answer[name] for name in ("stop_reason", "stop_sequence")}
        yield {"type": "message_delta", "delta": ended, "usage": answer["usage"]}
        yield {"type": "message_stop"}

    def _begin(self, num_read: int) -> Iterator[Json]:
        if not self._has_begun:
            self._has_begun = True
            yield {"type": "message_start", "message": _anthropic_message(self._request_id, num_read)}

    def _delta(self, index: int, delta: Json) -> Json:
        return {"type": "content_block_delta", "index": index, "delta": delta}


def _anthropic_error(status: int, code: str, message: str) -> Json:
    kind = ERROR_TYPES.get(status, "invalid_request_error")
    return {"type": "error", "error": {"type": kind, "message": TOO_LONG + message if code == CUT else message}}


OPENAI = ChatForm(_openai_call, _openai_answer, _OpenAIStream, openai_error, "data: [DONE]\n\n")
ANTHROPIC = ChatForm(_anthropic_call, _anthropic_answer, _AnthropicStream, _anthropic_error)
