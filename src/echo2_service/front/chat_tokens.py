"""The process that writes the prompts of chats and decodes the answers: chat templates are slow programs of others, and
what loads tokenizers takes seconds and 200 MB. It begins with the first chat, and ends with its parent.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import msgspec

from echo2.core.errors import PeerError, UserError
from echo2.core.types import Task
from echo2.engines.tokenizer import (
    Tokenizer,
    decoded_all,
    encode_prompt,
    load_tokenizer,
    rendered_tokens,
)
from echo2.weights.format.model_files import model_files
from echo2_service.backend import Answer, Call, PromptCall, ReplyCall
from echo2_service.calling import serve

#: Of the processor, for the prompt of one chat: 4 million characters, the most that are taken, need seconds.
PROMPT_SECONDS = 10.0


class _TooLongError(BaseException):
    """No template, and nothing that renders one, takes this for an error of its own."""


@contextmanager
def _bounded() -> Iterator[None]:
    """End what takes longer, for all other chats wait. In the main thread.

    Raises:
        UserError: it took too long.
    """

    def stop(*_: object) -> None:
        raise _TooLongError

    signal.signal(signal.SIGVTALRM, stop)
    signal.setitimer(signal.ITIMER_VIRTUAL, PROMPT_SECONDS)
    try:
        yield
    except _TooLongError as error:
        raise UserError(
            f"This chat template did not end within {PROMPT_SECONDS:g} s of the processor. Send fewer or shorter "
            "messages and tools; if it ends with none, its model's chat_template.jinja must be mended."
        ) from error
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0.0)


@cache
def _tokenizer(directory: str) -> Tokenizer:
    try:
        return load_tokenizer(model_files(Path(directory)))
    except PeerError as error:
        raise UserError(f"This base model has no tokenizer that the service reads: {error.detail}") from error


def _carry_out(call: Call, number: int) -> Answer:
    if isinstance(call, ReplyCall):
        return Answer(number, texts=decoded_all(_tokenizer(call.directory), call.rows))
    assert isinstance(call, PromptCall)
    tokenizer = _tokenizer(call.directory)
    with _bounded():
        if not call.messages:
            return Answer(number, prompt=encode_prompt(Task(0, call.text), tokenizer))
        tools = msgspec.json.decode(call.tools) if call.tools else None
        return Answer(number, prompt=rendered_tokens(tokenizer, msgspec.json.decode(call.messages), tools))


if __name__ == "__main__":
    serve("chat tokens", _carry_out)
