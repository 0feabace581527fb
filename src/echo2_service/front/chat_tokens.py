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
    Tokenizer,
    decoded_all,
    encode_prompt,
    load_tokenizer,
    rendered_tokens,
)
from echo2.weights.format.model_files import model_files
from echo2_service.backend import Answer, Call, PromptCall, ReplyCall
from echo2_service.calling import serve


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
    if not call.messages:
        return Answer(number, prompt=encode_prompt(Task(0, call.text), tokenizer))
    tools = msgspec.json.decode(call.tools) if call.tools else None
    return Answer(number, prompt=rendered_tokens(tokenizer, msgspec.json.decode(call.messages), tools))


if __name__ == "__main__":
    serve("chat tokens", _carry_out)
