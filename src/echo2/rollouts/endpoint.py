"""The HTTP endpoint at which harnesses call the model, on this machine's loopback, with a key for each rollout.

    POST /inference/v1/generate   vLLM's token form: token ids in, token ids with their logprobs and versions out
    POST /v1/chat/completions     OpenAI's form, with the token ids of prompt and answer and the logprobs beside it
    GET  /v1/models               the model's name and context length

The key is checked before a body is read. Bodies, calls, tokens and seconds are bounded. Other sampling options of a
call are refused, or the run's settings replace them (docs/tasks.md). Logprobs name their token twice, as `token_id`
(vLLM) and as the text `token_id:N` (read by renderers).

Chat clients send the whole conversation with every call. Each message is tokenised once, when it appears: the model's
own answers are recognised and keep the tokens that were sampled; only the messages after them are tokenised. A
conversation with a changed message counts as a new conversation.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import re
import secrets
import socket
import time
from array import array
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from echo2.core.addresses import LOOPBACK, join
from echo2.core.background import spawn
from echo2.core.documents import parse_json
from echo2.core.errors import InvariantError, PeerError, UserError
from echo2.engines.engine import Completion
from echo2.engines.tokenizer import decoded, following_tokens, rendered_tokens
from echo2.rollouts.recorded import CallRefused, RecordedRollout

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response

log = logging.getLogger(__name__)

MESSAGES_MAX = 10_000
TOOLS_MAX = 128
#: The syntax of tool calls in the Qwen and Hermes families.
TOOL_CALL = re.compile(r"<tool_call>\s*(\{.*?\})\s*</tool_call>", re.DOTALL)
MODEL_NAME = "policy"
#: A rollout's key, from a library that keeps one client, and so one Authorization, for all rollouts.
KEY_HEADER = "X-Echo2-Rollout-Key"
#: A million token ids take about 7 MB as JSON.
BODY_BYTES_MAX = 16 << 20
BODY_SECONDS = 30.0
CONNECTIONS_MAX = 4096
KEEP_ALIVE_SECONDS = 75  # above the clients' 5 s: a connection that the server drops first fails the next call
BACKLOG = 1024
TOKEN_ID_MAX = 2**31 - 1
#: A longer context counts as unknown: tokenizers write 1e30 if they do not know theirs.
TOKENS_MAX = 1 << 24
STOP_TOKENS_MAX = 1024
#: How long calls under way may take to end when the worker ends.
CLOSE_SECONDS = 1


@dataclass(frozen=True, slots=True)
class ChatAnswer:
    """An answer of the model: its tokens, the prompt they were sampled after, and the message they form."""

    completion: Completion
    prompt: array[int]
    message: dict[str, Any]


@dataclass(frozen=True, slots=True)
class _Said:
    """A conversation up to and including an answer: its messages (as `_essence`), its tools and its tokens."""

    essences: list[tuple[Any, ...]]
    tools: Any
    tokens: array[int]


class ChatRollout:
    """A recorded rollout whose harness speaks in messages, or in tokens."""

    def __init__(self, recorded: RecordedRollout) -> None:
        self.recorded = recorded
        self._said: list[_Said] = []

    async def answer(self, messages: Any, tools: Any, max_tokens: int | None) -> ChatAnswer:
        """Sample the model's next message.

        Raises:
            CallRefused: the messages are malformed; or as `RecordedRollout.complete`.
        """
        said = _checked(messages)
        if tools and not (isinstance(tools, list) and len(tools) <= TOOLS_MAX):
            raise CallRefused(400, "malformed", f"tools is no list of at most {TOOLS_MAX}")
        prompt = self._prompt(said, tools or None)
        completion = await self.recorded.complete(prompt, max_tokens)
        message = _message(decoded(self.recorded.tokenizer, completion.tokens), bool(tools))
        essences = [_essence(one) for one in [*said, message]]
        self._said.append(_Said(essences, tools or None, prompt + completion.tokens))
        return ChatAnswer(completion, prompt, message)

    def _prompt(self, said: list[dict[str, Any]], tools: Any) -> array[int]:
        tokenizer, essences = self.recorded.tokenizer, [_essence(one) for one in said]
        known = [one for one in self._said if one.tools == tools and essences[: len(one.essences)] == one.essences]
        before = max(known, key=lambda one: len(one.essences), default=None)
        try:
            if before is None or len(before.essences) == len(said):
                return rendered_tokens(tokenizer, said, tools)
            return before.tokens + following_tokens(tokenizer, said[len(before.essences) :], before.tokens[-1])
        except UserError as error:
            raise CallRefused(400, "malformed", str(error)) from error


def _checked(messages: Any) -> list[dict[str, Any]]:
    if not isinstance(messages, list) or not 0 < len(messages) <= MESSAGES_MAX:
        raise CallRefused(400, "malformed", f"messages is no list of 1 to {MESSAGES_MAX}")
    return [_plain(message) for message in messages]


def _plain(message: Any) -> dict[str, Any]:
    """Return the message with its content as one text: OpenAI's clients may send the content in parts."""
    content = message.get("content") if isinstance(message, Mapping) else None
    if isinstance(content, list) and all(isinstance(p, Mapping) and isinstance(p.get("text"), str) for p in content):
        content = "".join(part["text"] for part in content)
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise CallRefused(400, "malformed", "a message has no role")
    if not isinstance(content, str | None):
        raise CallRefused(400, "malformed", "the content of a message is no text")
    return {**message, "content": content or ""}


def _essence(message: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return the fields by which messages are compared. Other fields, which clients may add, are ignored."""
    calls: Sequence[Mapping[str, Any]] = message.get("tool_calls") or ()
    return message["role"], message["content"], [call.get("function") for call in calls], message.get("tool_call_id")


def _message(text: str, has_tools: bool) -> dict[str, Any]:
    """Return the answer as an OpenAI message. Tool calls are parsed only if the request named tools."""
    calls: list[dict[str, Any]] = []
    for found in TOOL_CALL.finditer(text) if has_tools else ():
        try:
            call = parse_json(found.group(1))
        except ValueError:
            continue  # not a valid call: it stays in the text, and the harness decides what to reply
        if isinstance(call, dict) and isinstance(call.get("name"), str):
            function = {"name": call["name"], "arguments": json.dumps(call.get("arguments") or {})}
            calls.append({"id": f"call_{len(calls)}", "type": "function", "function": function})
    message: dict[str, Any] = {"role": "assistant", "content": text}
    if calls:
        message["tool_calls"] = calls
    return message


class LoopbackEndpoint:
    """Serves the calls of all open rollouts. For one event loop."""

    def __init__(self) -> None:
        self._rollouts: dict[str, ChatRollout] = {}
        self._secrets: dict[int, str] = {}
        self._listening: socket.socket | None = None
        self._port = 0
        self._server: Any = None
        self._serving: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Start listening, unless the endpoint listens already.

        Raises:
            UserError: the packages of the HTTP server are not installed.
        """
        if self._server is not None:
            return
        try:
            import uvicorn
            from starlette.applications import Starlette
            from starlette.routing import Route
        except ImportError as error:
            raise UserError(f"Harnesses need {error.name}: pip install 'echo2[environments]'.") from error

        class Server(uvicorn.Server):
            @contextlib.contextmanager
            def capture_signals(self) -> Iterator[None]:
                yield  # the worker handles signals

        routes = [
            Route("/inference/v1/generate", self._handler(self._generate), methods=["POST"]),
            Route("/v1/chat/completions", self._handler(self._chat), methods=["POST"]),
            Route("/v1/models", self._handler(self._models), methods=["GET"]),
        ]
        listening = socket.socket()
        listening.bind((LOOPBACK, 0))
        listening.listen(BACKLOG)
        self._listening, self._port = listening, listening.getsockname()[1]
        config = uvicorn.Config(
            Starlette(routes=routes),
            lifespan="off",
            log_config=None,
            access_log=False,
            limit_concurrency=CONNECTIONS_MAX,
            timeout_keep_alive=KEEP_ALIVE_SECONDS,
            timeout_graceful_shutdown=CLOSE_SECONDS,
        )
        self._server = Server(config)
        self._serving = spawn(self._server.serve(sockets=[listening]), self._serving_failed)

    def _serving_failed(self, error: Exception) -> None:
        """Every rollout under way fails, for its harness can't call the model; the next `start` listens again."""
        log.error("the endpoint of harnesses ended", exc_info=error)
        self._server, self._port = None, 0
        for rollout in self._rollouts.values():
            rollout.recorded.fail("engine_failed", f"the endpoint ended: {error!r}")

    def open(self, recorded: RecordedRollout) -> dict[str, str]:
        """Serve one rollout. Returns what its harness needs to call the model: URL, key and model name."""
        if not self._port:
            raise InvariantError("a rollout was opened at an endpoint that does not listen")
        secret = secrets.token_urlsafe(24)
        self._rollouts[secret], self._secrets[id(recorded)] = ChatRollout(recorded), secret
        return {"base_url": f"http://{join(LOOPBACK, self._port)}/v1", "api_key": secret, "model": MODEL_NAME}

    def close_rollout(self, recorded: RecordedRollout) -> None:
        """Stop serving a rollout, and abort its calls under way."""
        del self._rollouts[self._secrets.pop(id(recorded))]
        recorded.close()

    async def close(self) -> None:
        """Stop listening, and abort all calls under way."""
        for rollout in self._rollouts.values():
            rollout.recorded.close()
        if self._server is not None and self._serving is not None and self._listening is not None:
            self._server.should_exit = True
            await self._serving
            self._listening.close()  # the server may have ended before closing it

    def _handler(
        self, answer: Callable[[ChatRollout, dict[str, Any]], Awaitable[dict[str, Any]]]
    ) -> Callable[[Request], Awaitable[Response]]:
        from starlette.responses import JSONResponse

        async def handle(request: Request) -> Response:
            scheme, _, secret = request.headers.get("authorization", "").partition(" ")
            key = request.headers.get(KEY_HEADER) or (secret if scheme.lower() == "bearer" else "")
            rollout = self._rollouts.get(key)
            if rollout is None:
                return JSONResponse(_error("unknown_rollout", "no rollout has this key, or it is over"), 401)
            try:
                return JSONResponse(await answer(rollout, await _read(request)))
            except CallRefused as error:
                return JSONResponse(_error(error.code, str(error)), error.status)
            except (UserError, PeerError) as error:
                rollout.recorded.fail("engine_failed", str(error))
                return JSONResponse(_error("engine_failed", str(error)), 500)

        return handle

    async def _models(self, rollout: ChatRollout, _: dict[str, Any]) -> dict[str, Any]:
        card: dict[str, Any] = {"id": MODEL_NAME, "object": "model", "owned_by": "echo2"}
        if (longest := rollout.recorded.tokenizer.model_max_length) <= TOKENS_MAX:  # else unknown
            card["max_model_len"] = longest
        return {"object": "list", "data": [card]}

    async def _generate(self, rollout: ChatRollout, body: dict[str, Any]) -> dict[str, Any]:
        sampling = body.get("sampling_params") or {}
        if not isinstance(sampling, dict):
            raise _bad("sampling_params is no object")
        for refused in ("features", "content_parts", "stop"):
            if body.get(refused) or sampling.get(refused):
                raise _bad(f"{refused} is not supported: tokens go in, and stop tokens end them")
        if body.get("stream") or sampling.get("n", 1) != 1:
            raise _bad("one answer at a time, and whole: no stream, n = 1")
        prompt = _token_ids("token_ids", body.get("token_ids"))
        stops = _token_ids("stop_token_ids", sampling.get("stop_token_ids") or [])
        if not prompt or len(stops) > STOP_TOKENS_MAX:
            raise _bad(f"token_ids may not be empty, and stop_token_ids not more than {STOP_TOKENS_MAX}")
        longest = _longest(sampling.get("max_tokens"))
        completion = await rollout.recorded.complete(prompt, longest, frozenset(stops))
        choice = {
            "index": 0,
            "token_ids": completion.tokens.tolist(),
            "finish_reason": completion.finish,
            "logprobs": {"content": _logprobs(completion)},
            "weight_versions": _versions(completion),
        }
        return {"request_id": _request_id(body), "model": MODEL_NAME, "choices": [choice]}

    async def _chat(self, rollout: ChatRollout, body: dict[str, Any]) -> dict[str, Any]:
        for refused in ("stop", "functions", "response_format"):
            if body.get(refused):
                raise _bad(f"{refused} is not supported")
        if body.get("stream") or body.get("n", 1) not in (None, 1):
            raise _bad("one answer at a time, and whole: no stream, n = 1")
        longest = _longest(body.get("max_completion_tokens", body.get("max_tokens")))
        answer = await rollout.answer(body.get("messages"), body.get("tools"), longest)
        completion = answer.completion
        choice = {
            "index": 0,
            "message": answer.message,
            "finish_reason": "tool_calls" if "tool_calls" in answer.message else completion.finish,
            "token_ids": completion.tokens.tolist(),
            "logprobs": {"content": _logprobs(completion)},
            "weight_versions": _versions(completion),
        }
        num_read, num_written = len(answer.prompt), len(completion.tokens)
        return {
            "id": _request_id(body),
            "object": "chat.completion",
            "created": int(time.time()),
            "model": MODEL_NAME,
            "prompt_token_ids": answer.prompt.tolist(),
            "choices": [choice],
            "usage": {
                "prompt_tokens": num_read,
                "completion_tokens": num_written,
                "total_tokens": num_read + num_written,
            },
        }


async def _read(request: Request) -> dict[str, Any]:
    """Return the JSON object in the body; {} for an empty body."""
    data = bytearray()
    try:
        async with asyncio.timeout(BODY_SECONDS):
            async for part in request.stream():
                data += part
                if len(data) > BODY_BYTES_MAX:
                    raise CallRefused(413, "oversized", f"a body of more than {BODY_BYTES_MAX} bytes")
    except TimeoutError as error:
        raise CallRefused(408, "too_slow", f"the body took longer than {BODY_SECONDS:g} s") from error
    try:
        body = parse_json(data) if data else {}
    except ValueError as error:
        raise _bad(f"the body is not JSON: {error}") from error
    if not isinstance(body, dict):
        raise _bad("the body is no JSON object")
    return body


def _bad(complaint: str) -> CallRefused:
    return CallRefused(400, "malformed", complaint)


def _error(code: str, message: str) -> dict[str, Any]:
    """An error in OpenAI's format."""
    return {"error": {"message": message, "type": "invalid_request_error", "code": code}}


def _token_ids(name: str, value: Any) -> array[int]:
    is_ids = isinstance(value, list) and all(type(one) is int and 0 <= one <= TOKEN_ID_MAX for one in value)
    if not is_ids:
        raise _bad(f"{name} is no list of token ids")
    return array("i", value)


def _longest(value: Any) -> int | None:
    if value is not None and (type(value) is not int or value < 1):
        raise _bad("max_tokens is no whole number above 0")
    return value


def _request_id(body: Mapping[str, Any]) -> str:
    given = body.get("request_id")
    return given if isinstance(given, str) and len(given) <= 200 else secrets.token_hex(8)


def _logprobs(completion: Completion) -> list[dict[str, Any]]:
    pairs = zip(completion.tokens, completion.logprobs, strict=True)
    return [
        {"token": f"token_id:{token}", "token_id": token, "logprob": logprob, "top_logprobs": []}
        for token, logprob in pairs
    ]


def _versions(completion: Completion) -> list[dict[str, int]]:
    starts = [start for start, _ in completion.version_spans]
    ends = [*starts[1:], len(completion.tokens)]
    return [
        {"version": version, "start": start, "end": end}
        for (start, version), end in zip(completion.version_spans, ends, strict=True)
    ]
