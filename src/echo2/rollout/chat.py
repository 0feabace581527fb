"""Converts chat messages to tokens of a recorded rollout and back. Each message is tokenised once, when it appears.

Chat clients send the whole conversation with every call. The model's own answers are recognised in it and keep the
tokens that were sampled; only the messages after them are tokenised. A conversation with a changed message counts as
a new conversation.
"""

from __future__ import annotations

import json
import re
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from echo2.documents import parse_json
from echo2.errors import UserError
from echo2.rollout.engine import Completion
from echo2.rollout.recorded import CallRefused, RecordedRollout
from echo2.rollout.tokenizer import decoded, following_tokens, rendered_tokens

MESSAGES_MAX = 10_000
TOOLS_MAX = 128
#: The syntax of tool calls in the Qwen and Hermes families.
TOOL_CALL = re.compile(r"<tool_call>\s*(\{.*?\})\s*</tool_call>", re.DOTALL)


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
