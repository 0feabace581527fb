"""What is needed of a tokenizer, and how prompts and the words of an environment become tokens. Imports no tokenizer
before one is loaded, and never torch.
"""

from __future__ import annotations

import threading
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Protocol

from echo2.errors import PeerError, UserError
from echo2.types import Rollout, Task

TOKENIZER_SUFFIXES = frozenset({".json", ".jinja", ".txt", ".model"})

#: Stands for an earlier answer where a chat template is asked what follows one.
ANSWER_MARK = "echo2-answer-mark"
#: What a chat template's expressions raise, beside jinja2's own.
TEMPLATE_ERRORS = (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RecursionError)
_SEARCHING = threading.Lock()


class Tokenizer(Protocol):
    """The part of a Hugging Face tokenizer that is used."""

    bos_token: str | None
    eos_token_id: int | None
    chat_template: Any

    def __len__(self) -> int: ...

    def __hash__(self) -> int: ...

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """The token ids of a text."""

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> str:
        """The text of token ids."""

    def apply_chat_template(
        self, conversation: list[dict[str, str]], *, tokenize: bool, add_generation_prompt: bool
    ) -> str:
        """The text that the chat template makes of `{"role", "content"}` messages."""


def load_tokenizer(files: Mapping[str, bytes]) -> Tokenizer:
    """The tokenizer among a snapshot's files; code that comes with it is never run.

    Raises:
        PeerError: a file name would leave the directory, or there is no tokenizer that transformers can read.
    """
    from transformers import AutoTokenizer

    with TemporaryDirectory() as folder:
        for name, data in files.items():
            if Path(name).name != name:
                raise PeerError("bad_snapshot", f"file name {name!r} is a path")
            if Path(name).suffix in TOKENIZER_SUFFIXES:
                (Path(folder) / name).write_bytes(data)
        try:
            tokenizer: Any = AutoTokenizer.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
        except Exception as error:  # each tokenizer class fails in its own way; files are not ours to trust
            first_line = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise PeerError("bad_snapshot", f"no tokenizer that transformers reads: {first_line}") from error
    loaded: Tokenizer = tokenizer
    return loaded


def encode_prompt(task: Task, tokenizer: Tokenizer) -> array[int]:
    """Token ids of a prompt. Text is tokenised as it is, with the start token that the tokenizer itself adds (unless
    the text has it); chat messages go through the chat template, followed by the opening of the assistant's turn.

    Raises:
        UserError: chat messages, but there is no chat template or it refuses them; or the tokenizer fails.
    """
    if isinstance(task.prompt, str):
        has_start = bool(tokenizer.bos_token) and task.prompt.startswith(tokenizer.bos_token or "")
        return _ids(tokenizer, task.prompt, add_special_tokens=not has_start)
    if not tokenizer.chat_template:
        raise UserError(
            f"Task {task.cursor} has chat messages, but the model's tokenizer has no chat template. "
            "Add chat_template.jinja to the model directory, or give prompts as text."
        )
    from jinja2 import TemplateError

    messages = [{"role": message.role, "content": message.content} for message in task.prompt]
    try:
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    except (TemplateError, *TEMPLATE_ERRORS) as error:
        raise UserError(f"Task {task.cursor}: the chat template refuses its messages: {error}.") from error
    return _ids(tokenizer, text, add_special_tokens=False)  # templates write the special tokens themselves


def _ids(tokenizer: Tokenizer, text: str, *, add_special_tokens: bool) -> array[int]:
    try:
        return array("i", tokenizer.encode(text, add_special_tokens=add_special_tokens))
    except Exception as error:  # of its native code: the plainest kind
        raise UserError(f"the model's tokenizer can't write {text[:80]!r}: {error}") from error


def decoded(tokenizer: Tokenizer, tokens: array[int]) -> str:
    """The text of what was sampled, without special tokens. Models have ids that their tokenizer has not, which pad the
    vocabulary: they say nothing, and some tokenizers would raise.
    """
    size = len(tokenizer)
    ids = tokens.tolist() if not tokens or max(tokens) < size else [token for token in tokens if token < size]
    return tokenizer.decode(ids, skip_special_tokens=True)


def with_texts(rollouts: Sequence[Rollout], tokenizer: Tokenizer) -> tuple[Rollout, ...]:
    """The same rollouts with their tokens decoded."""
    return tuple(replace(rollout, text=decoded(tokenizer, rollout.tokens)) for rollout in rollouts)


def reply_tokens(tokenizer: Tokenizer, is_chat: bool, text: str, last_token: int) -> array[int]:
    """Token ids of what an environment said, to be appended to a turn that ended with `last_token`. Chat: the rest of
    the assistant's turn, the text as the user's message, and the opening of the assistant's next turn.

    Raises:
        UserError: the chat template does not write what follows an answer, or the tokenizer fails.
    """
    if not is_chat:
        return _ids(tokenizer, text, add_special_tokens=False)
    from jinja2 import TemplateError

    talk = [("user", "."), ("assistant", ANSWER_MARK), ("user", text)]
    messages = [{"role": role, "content": content} for role, content in talk]
    try:
        rendered = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    except (TemplateError, *TEMPLATE_ERRORS) as error:
        raise UserError(f"the chat template refuses a conversation of several turns: {error}") from error
    _, mark, tail = rendered.partition(ANSWER_MARK)
    if not mark:
        raise UserError("the chat template leaves earlier answers away, so that turns cannot follow each other")
    is_known = last_token < len(tokenizer)
    if is_known and not tokenizer.decode([last_token], skip_special_tokens=True):  # an end token: it is written already
        tail = tail.removeprefix(tokenizer.decode([last_token], skip_special_tokens=False))
    return _ids(tokenizer, tail, add_special_tokens=False)


def tokens_with(tokenizer: Tokenizer, character: str) -> frozenset[int]:
    """Every token whose text holds `character`. A second or two for a vocabulary of 150,000, once: not for the event
    loop, and not for several threads at once."""
    with _SEARCHING:
        return _tokens_with(tokenizer, character)


@lru_cache(maxsize=4)
def _tokens_with(tokenizer: Tokenizer, character: str) -> frozenset[int]:
    return frozenset(
        token for token in range(len(tokenizer)) if character in tokenizer.decode([token], skip_special_tokens=True)
    )
