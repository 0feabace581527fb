"""The model as a harness calls it: HTTP over loopback with the standard library. Any OpenAI client works, too."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any
from urllib.parse import urlsplit

from echo2.core.documents import parse_json
from echo2.core.errors import UserError

#: Ends the key of calls that are not trained on.
UNTRAINED = ".untrained"
#: The endpoint's code for a call that the rollout has no room for, and the start of its message in Anthropic's form,
#: whose errors have no code. Both are those of the real servers, which agents know.
CUT, TOO_LONG = "context_length_exceeded", "prompt is too long: "


class OutOfRoomError(UserError):
    """The rollout has used up its turns or tokens and was cut off; its reward so far may still count."""


def is_out_of_room(error: BaseException) -> bool:
    """Whether an exception is the endpoint's refusal of a call that the rollout has no room for, as it is or as
    frameworks pass it on: in words, as the cause of another, in a group. What failed while it was handled is not."""
    if isinstance(error, BaseExceptionGroup):
        return all(map(is_out_of_room, error.exceptions))
    words = f"{error} {getattr(error, 'code', '')}"  # within a stream, OpenAI's client tells the code apart
    if isinstance(error, OutOfRoomError) or CUT in words or TOO_LONG in words:
        return True
    return error.__cause__ is not None and is_out_of_room(error.__cause__)


@dataclass(frozen=True, slots=True)
class LoopbackModel:
    """A client of the policy, for one rollout. `base_url` ends with /v1, as OpenAI clients expect; `api_key` belongs to
    the rollout; `tokenizer_path` has the model's tokenizer."""

    base_url: str
    api_key: str
    model: str
    tokenizer_path: str

    @property
    def untrained(self) -> LoopbackModel:
        """The same model, whose answers are not trained on: for an opponent, a judge, a user who is played."""
        return replace(self, api_key=self.api_key + UNTRAINED)

    async def generate(self, token_ids: Sequence[int], **sampling_params: Any) -> dict[str, Any]:
        """Sample a continuation of these tokens; returns the first choice of vLLM's `/inference/v1/generate`.

        Raises:
            UserError: the endpoint refused; the message says why.
        """
        body = {"model": self.model, "token_ids": list(token_ids), "sampling_params": sampling_params}
        answer = await self._post("/inference/v1/generate", body)
        choice: dict[str, Any] = answer["choices"][0]
        return choice

    async def chat(self, messages: Sequence[dict[str, Any]], **more: Any) -> dict[str, Any]:
        """Return the model's next message in this conversation, in the form of OpenAI's `/v1/chat/completions`.

        Raises:
            UserError: the endpoint refused; the message says why.
        """
        body = {"model": self.model, "messages": list(messages), **more}
        answer = await self._post("/v1/chat/completions", body)
        message: dict[str, Any] = answer["choices"][0]["message"]
        return message

    async def _post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """Send one request on a new connection: on loopback, that costs less than keeping one open."""
        where, data = urlsplit(self.base_url), json.dumps(body).encode()
        head = (
            f"POST {path} HTTP/1.1\r\nHost: {where.netloc}\r\nAuthorization: Bearer {self.api_key}\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(data)}\r\nConnection: close\r\n\r\n"
        )
        reader, writer = await asyncio.open_connection(where.hostname, where.port)
        try:
            writer.write(head.encode() + data)
            status, _, rest = (await reader.read()).partition(b"\r\n")
            _, _, content = rest.partition(b"\r\n\r\n")
        finally:
            writer.close()
        try:
            answer = parse_json(content)
        except ValueError as error:
            raise UserError(f"The model's endpoint answered {status[:80]!r} without JSON: {error}") from error
        if b" 200 " not in status:
            refusal = answer["error"]
            kind = OutOfRoomError if refusal["code"] == CUT else UserError
            raise kind(f"The model's endpoint refused: {refusal['message']}")
        reply: dict[str, Any] = answer
        return reply


#: Plays one rollout, given its columns, seed and model; returns its reward.
Play = Callable[[Mapping[str, Any], int, LoopbackModel], Awaitable[float]]
