"""The HTTP endpoint at which harnesses call the model, on this machine's loopback, with a key for each rollout.

    POST /inference/v1/generate   vLLM's token form: token ids in, token ids with their logprobs and versions out
    POST /v1/chat/completions     OpenAI's form, with the token ids of prompt and answer and the logprobs beside it
    POST /v1/messages             Anthropic's form, with the same beside it, unless it is streamed
    GET  /v1/models               the model's name and context length

The key is checked before a body is read. Bodies, calls, tokens and seconds are bounded. Other sampling options of a
call are refused, or the run's settings replace them (docs/tasks.md). An answer is forgotten if its caller has gone.

Chat clients send the whole conversation with every call. Each message is tokenised once, when it appears: the model's
own answers are recognised and keep the tokens that were sampled; only the messages after them are tokenised. A
conversation with a changed message is tokenised anew, and begins a row (`recorded.py`).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import socket
from array import array
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from echo2.core.addresses import LOOPBACK, join
from echo2.core.background import awaited, spawn, together
from echo2.core.documents import half_character, may_have_half_character, parse_json
from echo2.core.errors import InvariantError, PeerError, UserError
from echo2.core.loop_thread import call_in
from echo2.engines.tokenizer import TextTooLong, appends_text, decoded, following_tokens, rendered_tokens, stop_rule
from echo2.rollouts.chat_forms import (
    ANTHROPIC,
    MODEL_NAME,
    OPENAI,
    ChatAnswer,
    ChatCall,
    ChatForm,
    Json,
    Piece,
    bad,
    essence,
    longest,
    message_of,
    openai_error,
    plain,
    server_sent,
    tokens_of,
)
from echo2.rollouts.recorded import CallBounds, CallRefused, RecordedRollout
from echo2.rollouts.telling import Telling
from echo2.tasks.loopback_model import UNTRAINED

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response

log = logging.getLogger(__name__)

#: A rollout's key, from a library that keeps one client, and so one Authorization, for all rollouts.
KEY_HEADER = "X-Echo2-Rollout-Key"
#: Clients of OpenAI and Anthropic try most refusals again, which would be refused again.
NO_RETRY = {"x-should-retry": "false"}
#: A million token ids take about 7 MB as JSON.
BODY_BYTES_MAX = 16 << 20
BODY_SECONDS = 30.0
#: Objects and lists in it: two bytes may be one, and reading each takes a microsecond, for which all rollouts wait.
PARTS_MAX = 1 << 18
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
class _Conversation:
    """A conversation up to and including an answer: its messages (as `essence`), its tools and its tokens."""

    essences: list[tuple[Any, ...]]
    tools: Any
    tokens: array[int]


class ChatRollout:
    """A recorded rollout whose harness speaks in messages, or in tokens."""

    def __init__(self, recorded: RecordedRollout) -> None:
        self.recorded = recorded
        self._conversations: list[_Conversation] = []

    async def answers(
        self, call: ChatCall, bounds: CallBounds, tell: Callable[[Piece], None] | None = None
    ) -> list[ChatAnswer]:
        """Sample the model's next message, as often as the call asks for. `tell` gets the texts piece by piece: as they
        are drawn if the engine can say that, else each when it is whole.

        Raises:
            CallRefused: the chat template refuses the messages; or as `RecordedRollout.complete`.
        """
        if call.stop:
            stop = await asyncio.to_thread(stop_rule, self.recorded.tokenizer, call.stop)
            bounds = replace(bounds, stop=stop)
        try:
            prompt = await asyncio.to_thread(self._prompt, call.messages, call.tools)  # long texts take seconds
        except TextTooLong as error:
            raise self.recorded.full(str(error)) from error
        async with together() as answers:
            tasks = [
                answers.create_task(self._answer(call, prompt, bounds, index, tell))
                for index in range(call.num_answers)
            ]
        return [one.result() for one in tasks]

    async def _answer(
        self,
        call: ChatCall,
        prompt: array[int],
        bounds: CallBounds,
        index: int,
        tell: Callable[[Piece], None] | None,
    ) -> ChatAnswer:
        telling = None
        if tell is not None:
            telling = Telling(
                self.recorded.tokenizer,
                call.stop,
                bool(call.tools),
                lambda text: tell(Piece(index, text, len(prompt))),
            )
            if appends_text(self.recorded.tokenizer):
                hear = partial(call_in, asyncio.get_running_loop(), telling.take)
                bounds = replace(bounds, on_token=hear)
        completion = await self.recorded.complete(prompt, bounds)
        text = decoded(self.recorded.tokenizer, completion.tokens)
        at, stop = min(((text.find(one), one) for one in call.stop if one in text), default=(len(text), ""))
        message = message_of(text[:at], bool(call.tools), self.recorded.num_calls)
        essences = [essence(one) for one in [*call.messages, plain(message)]]
        self._conversations.append(_Conversation(essences, call.tools, prompt + completion.tokens))
        if telling is not None:
            telling.end(message["content"] or "")
        return ChatAnswer(completion, prompt, message, stop)

    def _prompt(self, messages: list[Json], tools: Any) -> array[int]:
        tokenizer, essences = self.recorded.tokenizer, [essence(one) for one in messages]
        conversations = [
            one
            for one in tuple(self._conversations)
            if one.tools == tools and essences[: len(one.essences)] == one.essences
        ]
        before = max(conversations, key=lambda one: len(one.essences), default=None)
        try:
            if before is None or len(before.essences) == len(messages):
                return rendered_tokens(tokenizer, messages, tools)
            return before.tokens + following_tokens(tokenizer, messages[len(before.essences) :], before.tokens[-1])
        except TextTooLong:
            raise
        except UserError as error:
            raise bad(str(error)) from error


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
            Route("/inference/v1/generate", self._handler(_generate), methods=["POST"]),
            Route("/v1/chat/completions", self._handler(partial(_chat, OPENAI)), methods=["POST"]),
            Route("/v1/messages", self._handler(partial(_chat, ANTHROPIC), ANTHROPIC.error), methods=["POST"]),
            Route("/v1/models", self._handler(_models), methods=["GET"]),
        ]
        listening = socket.socket()
        # What it accepts has this, too: of the two writes of a response, the second would wait 40 ms until the harness
        # acknowledges the first.
        listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
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

    def _handler(self, answer: Answer, words: Callable[[int, str, str], Json] = openai_error) -> Handler:
        from starlette.responses import JSONResponse, StreamingResponse

        def error(status: int, code: str, message: str) -> Response:
            return JSONResponse(words(status, code, message), status, NO_RETRY)

        async def handle(request: Request) -> Response:
            headers = request.headers
            scheme, _, secret = headers.get("authorization", "").partition(" ")
            key = headers.get(KEY_HEADER) or headers.get("x-api-key") or (secret if scheme.lower() == "bearer" else "")
            rollout = self._rollouts.get(key.removesuffix(UNTRAINED))
            if rollout is None:
                return error(401, "unknown_rollout", "no rollout has this key, or it is over")

            async def is_heard() -> bool:
                return not await request.is_disconnected()

            bounds = CallBounds(is_trained=not key.endswith(UNTRAINED), is_heard=is_heard)
            try:
                reply = await answer(rollout, await _read(request), bounds)
            except (UserError, PeerError) as failure:
                return error(*_refusal(rollout, failure))
            if isinstance(reply, dict):
                return JSONResponse(reply)

            async def stream() -> AsyncIterator[str]:
                try:
                    async for event in reply:
                        yield event
                except (UserError, PeerError) as failure:  # the status has been sent
                    yield server_sent(words(*_refusal(rollout, failure)))

            return StreamingResponse(stream(), media_type="text/event-stream")

        return handle


def _refusal(rollout: ChatRollout, failure: UserError | PeerError) -> tuple[int, str, str]:
    if isinstance(failure, CallRefused):
        return failure.status, failure.code, str(failure)
    rollout.recorded.fail("engine_failed", str(failure))
    return 500, "engine_failed", str(failure)


#: Answers a call: by an object, or by a stream of events.
Answer = Callable[[ChatRollout, Json, CallBounds], Awaitable[Json | AsyncIterator[str]]]
Handler = Callable[["Request"], Awaitable["Response"]]


async def _models(rollout: ChatRollout, _: Json, bounds: CallBounds) -> Json:
    card: Json = {"id": MODEL_NAME, "object": "model", "owned_by": "echo2"}
    if (most := rollout.recorded.tokenizer.model_max_length) <= TOKENS_MAX:  # else unknown
        card["max_model_len"] = most
    return {"object": "list", "data": [card]}


async def _generate(rollout: ChatRollout, body: Json, bounds: CallBounds) -> Json:
    sampling = body.get("sampling_params") or {}
    if not isinstance(sampling, dict):
        raise bad("sampling_params is not an object")
    for refused in ("features", "content_parts", "stop"):
        if body.get(refused) or sampling.get(refused):
            raise bad(f"{refused} is not supported: tokens go in, and stop tokens end them")
    if body.get("stream") or sampling.get("n", 1) != 1:
        raise bad("one answer at a time, and whole: no stream, n = 1")
    prompt = _token_ids("token_ids", body.get("token_ids"))
    stops = _token_ids("stop_token_ids", sampling.get("stop_token_ids") or [])
    if not prompt or len(stops) > STOP_TOKENS_MAX:
        raise bad(f"token_ids may not be empty, and stop_token_ids not more than {STOP_TOKENS_MAX}")
    bounds = replace(bounds, max_tokens=longest(sampling.get("max_tokens")), stop_tokens=frozenset(stops))
    completion = await rollout.recorded.complete(prompt, bounds)
    choice = {"index": 0, "finish_reason": completion.finish, **tokens_of(completion)}
    return {"request_id": _request_id(body), "model": MODEL_NAME, "choices": [choice]}


async def _chat(form: ChatForm, rollout: ChatRollout, body: Json, bounds: CallBounds) -> Json | AsyncIterator[str]:
    call, request_id = form.call(body), _request_id(body)
    bounds = replace(bounds, max_tokens=call.max_tokens)
    if not call.is_streamed:
        return form.answer(request_id, await rollout.answers(call, bounds))
    events = _events(form, rollout, call, request_id, bounds)
    first = await anext(events)  # an error before has its own status

    async def all_events() -> AsyncIterator[str]:
        yield first
        async for event in events:
            yield event

    return all_events()


async def _events(
    form: ChatForm, rollout: ChatRollout, call: ChatCall, request_id: str, bounds: CallBounds
) -> AsyncIterator[str]:
    """Yield the events of a stream as they come. If the client hangs up, this is cancelled, and so are the answers."""
    stream = form.stream(request_id, call)
    pieces = asyncio.Queue[Piece | None]()  # as long as the answers at most
    answers = awaited(rollout.answers(call, bounds, pieces.put_nowait))
    answers.add_done_callback(lambda _: pieces.put_nowait(None))
    try:
        while (piece := await pieces.get()) is not None:
            for event in stream.piece(piece):
                yield server_sent(event)
        for event in stream.end(form.answer(request_id, await answers)):
            yield server_sent(event)
        if form.last:
            yield form.last
    finally:
        answers.cancel()


async def _read(request: Request) -> dict[str, Any]:
    """Return the JSON object in the body; {} for an empty body."""
    data = bytearray()
    try:
        async with asyncio.timeout(BODY_SECONDS):
            async for part in request.stream():
                if len(data) <= BODY_BYTES_MAX:  # its rest is read, too, else its sender would not hear of the refusal
                    data += part
    except TimeoutError as error:
        raise CallRefused(408, "too_slow", f"the body took longer than {BODY_SECONDS:g} s") from error
    if len(data) > BODY_BYTES_MAX:
        raise CallRefused(413, "oversized", f"a body of more than {BODY_BYTES_MAX} bytes")
    if (count := data.count(b"{") + data.count(b"[")) > PARTS_MAX:
        raise CallRefused(413, "oversized", f"a body of {count} objects and lists; {PARTS_MAX} are taken")
    try:
        body = parse_json(data) if data else {}
    except ValueError as error:
        raise bad(f"the body is not JSON: {error}") from error
    if not isinstance(body, dict):
        raise bad("the body is not a JSON object")
    if may_have_half_character(data) and (complaint := half_character(body)):
        raise bad(complaint)
    return body


def _token_ids(name: str, value: Any) -> array[int]:
    is_ids = isinstance(value, list) and all(type(one) is int and 0 <= one <= TOKEN_ID_MAX for one in value)
    if not is_ids:
        raise bad(f"{name} is not a list of token ids")
    return array("i", value)


def _request_id(body: Mapping[str, Any]) -> str:
    request_id = body.get("request_id")
    return request_id if isinstance(request_id, str) and len(request_id) <= 200 else secrets.token_hex(8)
