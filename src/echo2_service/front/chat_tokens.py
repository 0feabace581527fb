"""The process that writes the prompts of chats and decodes the answers: chat templates are slow programs of others, and
what loads tokenizers takes seconds and 200 MB. It begins with the first chat, and ends with its parent.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

import msgspec

from echo2.core.errors import PeerError, UserError
from echo2.core.types import Task
from echo2.engines.tokenizer import (
    TOKENIZER_SUFFIXES,
    Tokenizer,
    decoded_all,
    encode_prompt,
    load_tokenizer,
    rendered_tokens,
)
from echo2_service.backend import Answer, Call, CancelCall, PromptCall, ReplyCall, Request
from echo2_service.calling import begin, failed, receive

#: Longer files of a model's directory are no tokenizer's.
FILE_BYTES_MAX = 64 << 20


@cache
def _tokenizer(directory: str) -> Tokenizer:
    files = (path for path in Path(directory).iterdir() if path.suffix in TOKENIZER_SUFFIXES)
    found = {path.name: path.read_bytes() for path in files if path.stat().st_size <= FILE_BYTES_MAX}
    try:
        return load_tokenizer(found)
    except PeerError as error:
        raise UserError(f"This base model has no tokenizer that the service reads: {error.detail}") from error


def _carry_out(call: Call, number: int) -> Answer:
    if isinstance(call, ReplyCall):
        return Answer(number, texts=decoded_all(_tokenizer(call.directory), call.rows))
    assert isinstance(call, PromptCall)
    tokenizer = _tokenizer(call.directory)
    if not call.messages:
        return Answer(number, prompt=encode_prompt(Task(0, call.text), tokenizer))
    tools = msgspec.json.decode(call.tools) if call.tools else None
    return Answer(number, prompt=rendered_tokens(tokenizer, msgspec.json.decode(call.messages), tools))


if __name__ == "__main__":
    inbox, tell = begin("chat tokens")

    def take(request: Request) -> None:
        """Answer one call; its cancellation comes too late, and is no call."""
        call, number = request.call, request.number
        if isinstance(call, CancelCall):
            return
        tell(Answer(number, has_begun=True))
        try:
            tell(_carry_out(call, number))
        except Exception as error:  # later chats are read
            tell(failed(number, error, type(call).__name__))

    receive(inbox, take)
