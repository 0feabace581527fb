"""Samples in OpenAI's form, for clients and tools that speak it: `chat/completions`, `completions` and `models`.

`model` is a base model or the path of a checkpoint saved for sampling. A call becomes a sample of the tenant, with the
order, the limits and the price of every other. Its answer is sent when it is whole, also as a stream. Each
`POLL_SECONDS` the caller is looked for; if it has hung up, its sample is cancelled and costs nothing.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import time
from array import array
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta
from starlette.requests import Request
from starlette.responses import Response

from echo2.core.documents import parse_json
from echo2.core.errors import InvariantError, PeerError, UserError
from echo2.engines.engine import Completion
from echo2.rollouts.chat_forms import OPENAI, ChatAnswer, Piece, message_of, openai_error, server_sent
from echo2_service import tinker_pb2 as pb
from echo2_service.backend import Ints, PromptCall, ReplyCall
from echo2_service.calling import AnsweringProcess
from echo2_service.front.bodies import ChunkBody, PromptBody, SampleBody, SamplingBody, parse
from echo2_service.front.body_reader import off_loop
from echo2_service.front.cleaning import Cleaning
from echo2_service.front.data import sample_as_json
from echo2_service.front.database import OPEN, Row, checkpoints, samplers, sessions
from echo2_service.front.dispatch import Dispatcher
from echo2_service.front.request_guard import STATUS, Caller, Handler, answer, for_tenants
from echo2_service.front.requests_api import POLL_SECONDS, RequestsApi
from echo2_service.front.work import SCHEMES, Work, sample_spec

#: Checkpoints told by `models`, the newest.
MODELS_TOLD = 100
LABELS = {"made_by": "OpenAI's form"}


class ChatBody(msgspec.Struct, kw_only=True):
    """What both forms say of how tokens are drawn. The other fields of a chat are read by `chat_forms`."""

    model: Annotated[str, Meta(max_length=1000)]
    temperature: Annotated[float, Meta(ge=0.0, le=100.0)] | None = None
    top_p: Annotated[float, Meta(gt=0.0, le=1.0)] | None = None
    top_k: Annotated[int, Meta(ge=-1, lt=2**31)] | None = None
    seed: int | None = None
    logprobs: bool | int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None


class CompletionBody(ChatBody, kw_only=True):
    """A completion's, beside these. The prompt is one text, or the ids of its tokens."""

    prompt: str | list[Annotated[int, Meta(ge=0, lt=2**31)]]
    max_tokens: Annotated[int, Meta(ge=1, lt=2**31)] | None = 16  # as OpenAI's
    stop: str | list[str] | None = None
    n: Annotated[int, Meta(ge=1, le=128)] | None = None
    stream: bool | None = None
    echo: bool | None = None


_Body = TypeVar("_Body", bound=ChatBody)


@dataclass(slots=True)
class _Tenant:
    """The session of a tenant's calls, and its samplers by what they sample from."""

    session: str
    samplers: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _Answers:
    """The answers to a call: the id of its request, its prompt, and for each answer its tokens and its text, which a
    stop string ends."""

    request: str
    prompt: Ints
    completions: list[Completion]
    texts: list[str]


class ChatApi:
    """Answers calls in OpenAI's form. For one event loop."""

    def __init__(
        self, work: Work, dispatcher: Dispatcher, requests: RequestsApi, cleaning: Cleaning, log_path: Path
    ) -> None:
        self._work, self._database, self._dispatcher = work, work.database, dispatcher
        self._requests, self._cleaning = requests, cleaning
        self._process = AnsweringProcess("echo2_service.front.chat_tokens", "", log_path)
        self._tenants: dict[str, _Tenant] = {}
        #: One call of each tenant at a time: a chat of a megabyte takes seconds, and others' must not wait for many.
        self._turns = defaultdict[str, asyncio.Lock](asyncio.Lock)

    async def close(self) -> None:
        """End the process of the tokenizers."""
        await self._process.close()

    def handlers(self) -> dict[str, tuple[str, Handler]]:
        """The method and the handler of each path."""
        return {
            "chat/completions": ("POST", _in_form(self._chat)),
            "completions": ("POST", _in_form(self._completion)),
            "models": ("GET", _in_form(self._models)),
        }

    async def _models(self, caller: Caller, request: Request, body: bytes) -> Response:
        rows = self._database.select(checkpoints, "-created", MODELS_TOLD, tenant=caller.tenant, kind="sampler_weights")
        paths = [(f"{SCHEMES[0]}{row.model}/{row.kind}/{row.name}", int(row.created)) for row in rows]
        named = [*((base, 0) for base in self._work.backend.bases), *paths]
        cards = [{"id": name, "object": "model", "created": created, "owned_by": "echo2"} for name, created in named]
        return answer({"object": "list", "data": cards})

    async def _chat(self, caller: Caller, request: Request, body: bytes) -> Response:
        fields, call = await off_loop(len(body), lambda: (_drawn(parse(ChatBody, body)), OPENAI.call(_untyped(body))))
        sampler = self._sampler(caller, fields.model)
        messages, tools = (json.dumps(part).encode() if part else b"" for part in (call.messages, call.tools))
        prompt = await self.prompt(caller.tenant, PromptCall(self._directory(sampler), messages, tools))
        params = _params(fields, call.max_tokens, call.stop)
        outcome = await self._answers(caller, request, sampler, prompt, params, call.num_answers)
        number = int(outcome.request[-8:], 16)  # names tool calls
        answers = [
            ChatAnswer(completion, prompt, message_of(text, bool(call.tools), number), "")
            for completion, text in zip(outcome.completions, outcome.texts, strict=True)
        ]
        whole = _without_versions(OPENAI.answer(outcome.request, answers), fields)
        if not call.is_streamed:
            return answer(whole)
        stream = OPENAI.stream(outcome.request, call)
        texts = [choice["message"]["content"] or "" for choice in whole["choices"]]
        events = [event for at, text in enumerate(texts) for event in stream.piece(Piece(at, text, len(prompt)))]
        return _streamed({**event, "model": fields.model} for event in (*events, *stream.end(whole)))

    async def _completion(self, caller: Caller, request: Request, body: bytes) -> Response:
        fields = await off_loop(len(body), lambda: parse(CompletionBody, body))
        if _drawn(fields).echo:
            raise UserError("echo is not supported: the prompt is not sent back.")
        sampler, stop = (
            self._sampler(caller, fields.model),
            [fields.stop] if isinstance(fields.stop, str) else fields.stop,
        )
        if isinstance(fields.prompt, str):
            prompt = await self.prompt(caller.tenant, PromptCall(self._directory(sampler), text=fields.prompt))
        else:
            prompt = array("i", fields.prompt)
        params = _params(fields, fields.max_tokens, stop or ())
        outcome = await self._answers(caller, request, sampler, prompt, params, fields.n or 1)
        choices = [
            {
                "index": index,
                "text": text,
                "finish_reason": completion.finish,
                "token_ids": completion.tokens.tolist(),
                "logprobs": {"token_logprobs": completion.logprobs.tolist()} if fields.logprobs is not None else None,
            }
            for index, (completion, text) in enumerate(zip(outcome.completions, outcome.texts, strict=True))
        ]
        shared = {"id": outcome.request, "object": "text_completion", "created": int(time.time())}
        shared |= {"model": fields.model}
        if fields.stream:
            return _streamed({**shared, "choices": [choice]} for choice in choices)
        read, written = len(prompt), sum(len(one.tokens) for one in outcome.completions)
        usage = {"prompt_tokens": read, "completion_tokens": written, "total_tokens": read + written}
        return answer({**shared, "choices": choices, "usage": usage})

    async def prompt(self, tenant: str, call: PromptCall) -> Ints:
        """Return the tokens of a prompt.

        Raises:
            UserError: the base model has no tokenizer or no chat template, or its template refuses the messages.
        """
        async with self._turns[tenant]:
            written = await self._process.call(call)
        if written.prompt is None:
            raise InvariantError("the process of the tokenizers has answered another call")
        return written.prompt

    async def _answers(
        self, caller: Caller, request: Request, sampler: Row, prompt: Ints, params: SamplingBody, num_answers: int
    ) -> _Answers:
        """Sample as a request of the tenant's, which is cancelled if the caller hangs up or the service ends."""
        sample_body = SampleBody(
            PromptBody([ChunkBody(prompt.tolist())]), params, num_answers, sampler.id, ends_with_model=True
        )
        most, body = self._work.max_tokens(sampler.base), msgspec.json.encode(sample_body)
        await off_loop(len(body), lambda: sample_spec(sample_body, most, ""))
        self._work.storage.check(caller.tenant, 1.0, len(body))
        submitted = self._dispatcher.submit(
            caller, sampler.session, sampler.id, "sample", None, "", body, parsed_body=sample_body
        )
        try:
            while (row := await self._requests.ended(submitted, caller.tenant, POLL_SECONDS)) and row.state in OPEN:
                self._cleaning.note_alive(sampler.session)
                if self._requests.is_stopping:
                    raise PeerError("ending", "the service ends; call again.")
                if await request.is_disconnected():
                    raise PeerError("left", "the caller has hung up.")
        finally:
            self._dispatcher.cancel_sample(submitted, caller.tenant)  # unless it has ended
        if row is None or row.state == "failed" or row.answer is None:
            raise UserError(row.error if row is not None and row.error else "The answer is gone; call again.")
        sample_fields = await off_loop(
            len(row.answer), lambda: sample_as_json(pb.SampleResponse.FromString(row.answer))
        )
        completions = [
            Completion(array("i", one["tokens"]), array("f", one["logprobs"]), ((0, 0),), one["stop_reason"])
            for one in sample_fields["sequences"]
        ]
        directory, rows = self._directory(sampler), [one.tokens for one in completions]
        async with self._turns[caller.tenant]:
            texts = (await self._process.call(ReplyCall(directory, rows))).texts or []
        stops = [stop for stop in params.stop or () if isinstance(stop, str)]
        return _Answers(submitted, prompt, completions, [_until(text, stops) for text in texts])

    def _directory(self, sampler: Row) -> str:
        self._work.max_tokens(sampler.base)  # there is such a base still
        return self._work.backend.bases[sampler.base].directory

    def _sampler(self, caller: Caller, model: str) -> Row:
        """Return the sampler of a base model or of a checkpoint as it is now, in a session that lives."""
        is_path = model.startswith(SCHEMES)
        source = str(self._work.checkpoint(model, caller.tenant).directory) if is_path else model
        tenant = self._tenants.get(caller.tenant)
        live = tenant and self._database.find(sessions, columns=["id"], id=tenant.session, finished=None)
        if tenant is None or not live:
            tenant = self._tenants[caller.tenant] = _Tenant(self._work.open_session(caller.tenant, LABELS))
        self._cleaning.note_alive(tenant.session)
        sampler_id = tenant.samplers.get(source)
        row = self._database.find(samplers, id=sampler_id) if sampler_id else None
        if row is not None:
            return row
        sampler = f"{tenant.session}:sample:{secrets.token_hex(8)}"
        self._work.storage.check_rows(samplers, caller.tenant)
        self._requests.new_sampler(caller, tenant.session, sampler, *((None, model) if is_path else (model, None)))
        tenant.samplers[source] = sampler
        made = self._database.find(samplers, id=sampler)
        if made is None:
            raise InvariantError(f"the sampler {sampler} was stored, and is not there")
        return made


def _in_form(handle: Callable[[Caller, Request, bytes], Awaitable[Response]]) -> Handler:
    """Return a handler whose refusals have OpenAI's form."""

    async def handler(caller: Caller, request: Request, body: bytes) -> Response:
        try:
            return await handle(caller, request, body)
        except PeerError as error:
            status = 503 if error.reason == "ending" else STATUS.get(error.reason, 400)
            return answer(openai_error(status, error.reason, for_tenants(error.detail)), status)
        except UserError as error:
            return answer(openai_error(400, "refused", for_tenants(str(error))), 400)

    return handler


def _untyped(body: bytes) -> Any:
    """Raises PeerError: it is nested deeper than what passes it on can write."""
    try:
        return parse_json(body)
    except ValueError as error:
        raise PeerError("malformed", str(error)) from error


def _drawn(fields: _Body) -> _Body:
    """Refuse what is not sampled here, for another distribution would be drawn from than was asked for."""
    for name in ("presence_penalty", "frequency_penalty", "logit_bias"):
        if getattr(fields, name):
            raise UserError(f"{name} is not supported: leave it out.")
    return fields


def _params(fields: ChatBody, max_tokens: int | None, stop: Sequence[str]) -> SamplingBody:
    return SamplingBody(
        max_tokens,
        fields.seed,
        list(stop) or None,
        1.0 if fields.temperature is None else fields.temperature,
        -1 if fields.top_k is None else fields.top_k,
        1.0 if fields.top_p is None else fields.top_p,
    )


def _until(text: str, stops: Sequence[str]) -> str:
    return text[: min((text.find(stop) for stop in stops if stop in text), default=len(text))]


def _without_versions(whole: dict[str, Any], fields: ChatBody) -> dict[str, Any]:
    """Return an answer as the service gives it: a sampler has one version, and logprobs come to whom asks for them."""
    for choice in whole["choices"]:
        del choice["weight_versions"]
        if not fields.logprobs:
            choice["logprobs"] = None
    return {**whole, "model": fields.model}


def _streamed(events: Iterator[dict[str, Any]]) -> Response:
    return Response("".join([*map(server_sent, events), OPENAI.last]), media_type="text/event-stream")
