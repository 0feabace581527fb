"""What is needed of a tokenizer, and how the words of an environment become tokens. Imports no tokenizer."""

from __future__ import annotations

from array import array
from functools import lru_cache
from typing import Any, Protocol

from echo2.errors import UserError

#: Stands for an earlier answer where a chat template is asked what follows one.
ANSWER_MARK = "echo2-answer-mark"


class Tokenizer(Protocol):
    """The part of a Hugging Face tokenizer that is used."""

    bos_token: str | None
    eos_token_id: int | None
    chat_template: Any

    def __len__(self) -> int: ...

    def __hash__(self) -> int: ...

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]: ...

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> str: ...

    def apply_chat_template(
        self, conversation: list[dict[str, str]], *, tokenize: bool, add_generation_prompt: bool
    ) -> str: ...


def reply_tokens(tokenizer: Tokenizer, is_chat: bool, text: str, last_token: int) -> array[int]:
    """Token ids of what an environment said, to be appended to a turn that ended with `last_token`. Chat: the rest of
    the assistant's turn, the text as the user's message, and the opening of the assistant's next turn.

    Raises:
        UserError: the chat template does not write what follows an answer.
    """
    if not is_chat:
        return array("i", tokenizer.encode(text, add_special_tokens=False))
    from jinja2 import TemplateError

    talk = [("user", "."), ("assistant", ANSWER_MARK), ("user", text)]
    messages = [{"role": role, "content": content} for role, content in talk]
    try:
        rendered = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    except (TemplateError, ValueError, TypeError) as error:
        raise UserError(f"the chat template refuses a conversation of several turns: {error}") from error
    _, mark, tail = rendered.partition(ANSWER_MARK)
    if not mark:
        raise UserError("the chat template leaves earlier answers away, so that turns cannot follow each other")
    if not tokenizer.decode([last_token], skip_special_tokens=True):  # an end token, which the template writes too
        tail = tail.removeprefix(tokenizer.decode([last_token], skip_special_tokens=False))
    return array("i", tokenizer.encode(tail, add_special_tokens=False))


@lru_cache(maxsize=4)
def tokens_with(tokenizer: Tokenizer, character: str) -> frozenset[int]:
    """Every token whose text holds `character`. (A second or two for a vocabulary of 150 000, once.)"""
    return frozenset(
        token for token in range(len(tokenizer)) if character in tokenizer.decode([token], skip_special_tokens=True)
    )
