"""Tokens of texts and chats: vocabularies with holes, end tokens, and prompts that the model continues."""

from __future__ import annotations

from array import array
from typing import Any

import pytest
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

from echo2.core.errors import UserError
from echo2.core.types import Message, Task
from echo2.engines.tokenizer import (
    decoded,
    encode_prompt,
    end_token,
    load_tokenizer,
    reply_tokens,
    stop_rule,
    tokens_with,
)
from echo2.rollouts.logged import logged_rollouts


def test_a_vocabulary_may_have_holes() -> None:
    """Five tokens, with ids up to 70: neither what is beyond the number of tokens nor what is between is special."""
    core = Tokenizer(models.WordLevel({"<pad>": 0, "<end>": 70, "a": 2, "b": 40, "c": 7}, unk_token="<pad>"))
    core.pre_tokenizer, core.decoder = pre_tokenizers.Split(Regex(r"<end>|."), "isolated"), decoders.Fuse()
    core.add_special_tokens(["<pad>", "<end>"])
    settings = b'{"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<end>"}'
    tokenizer = load_tokenizer({"tokenizer.json": core.to_str().encode(), "tokenizer_config.json": settings})
    assert len(tokenizer) == 5
    assert decoded(tokenizer, array("i", [2, 3, 40, 7, 69, 71, 70])) == "abc"
    assert tokens_with(tokenizer, "b") == {40}
    assert tokens_with(tokenizer, "bc>", special=True) >= {40, 7, 70}
    rule = stop_rule(tokenizer, ("bc",))
    assert rule.length(array("i", [2, 40, 3, 7, 2])) == 4
    assert rule.length(array("i", [40, 2, 7])) is None
    assert stop_rule(tokenizer, ("<end>",)).length(array("i", [2, 70])) == 2
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}<end>{% endfor %}"
    assert reply_tokens(tokenizer, True, "c", 70).tolist() == [7, 70]  # the answer's end token is there already
    column = {"rollouts": [{"tokens": [2, 40], "logprobs": [-1.0, -1.0]}]}
    assert logged_rollouts(column, 1, 9, tokenizer, 0, False)[0].text == "ab"
    column["rollouts"][0]["tokens"] = [2, 3]
    with pytest.raises(UserError, match="The log has token 3, which"):
        logged_rollouts(column, 1, 9, tokenizer, 0, False)


@pytest.mark.parametrize(
    ("template", "is_chat", "ends", "end"),
    [
        ("{% for m in messages %}{{ m.content }}<b>{% endfor %}<a>", True, (3, 4, 5), 4),
        ("{% for m in messages %}<c>{{ m.content }}{% endfor %}", True, (3, 4, 5), 5),  # the tokenizer's
        ("{% for m in messages %}{{ m.content }}<b>{% endfor %}<a>", False, (3, 4, 5), 5),
        ("{% for m in messages %}{{ m.content }}<b>{% endfor %}<a>", True, (3,), 3),
        (None, False, (3, 4), 3),
        (None, False, (), None),
    ],
)
def test_an_answer_ends_with_the_end_token_that_the_chat_template_writes(
    template: str | None, is_chat: bool, ends: tuple[int, ...], end: int | None
) -> None:
    core = Tokenizer(models.WordLevel({"<pad>": 0, "x": 2, "<a>": 3, "<b>": 4, "<c>": 5}, unk_token="<pad>"))
    core.pre_tokenizer = pre_tokenizers.Split(Regex(r"<[abc]>|."), "isolated")
    core.add_special_tokens(["<a>", "<b>", "<c>"])
    settings = b'{"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<c>"}'
    tokenizer = load_tokenizer({"tokenizer.json": core.to_str().encode(), "tokenizer_config.json": settings})
    tokenizer.chat_template = template
    assert end_token(tokenizer, ends, is_chat) == end


ROLES = "{% for m in messages %}[{{ m.role[0] }}{{ m.content }}]{% endfor %}{% if add_generation_prompt %}[a{% endif %}"


@pytest.mark.parametrize(
    ("template", "said", "wanted"),
    [
        (ROLES, ["user", "1"], "[u1][a"),
        (ROLES, ["user", "1", "assistant", "2+"], "[u1][a2+"),
        (ROLES, ["user", "1", "assistant", ""], "[u1][a"),
        ("{% for m in messages %}[{{ m.content | trim }}]{% endfor %}", ["user", "1", "assistant", "2 "], "[1][2"),
    ],
)
def test_a_prompt_that_ends_in_an_assistants_message_is_continued(template: str, said: list[str], wanted: str) -> None:
    tokenizer = letters()
    tokenizer.chat_template = template
    messages = tuple(Message(role, content) for role, content in zip(said[::2], said[1::2], strict=True))
    tokens = encode_prompt(Task(0, messages), tokenizer)
    assert tokenizer.decode(tokens.tolist(), skip_special_tokens=False) == wanted


def test_a_template_that_drops_the_message_to_continue_is_refused() -> None:
    tokenizer = letters()
    tokenizer.chat_template = "{% for m in messages %}{% if m.role == 'user' %}{{ m.content }}{% endif %}{% endfor %}"
    with pytest.raises(UserError, match=r"Task 3: .*cannot continue .* last message.*end the prompt with another role"):
        encode_prompt(Task(3, (Message("user", "1"), Message("assistant", "2"))), tokenizer)


def letters() -> Any:
    """One token a character."""
    core = Tokenizer(models.WordLevel({sign: at for at, sign in enumerate("?[]ua12+ ")}, unk_token="?"))
    core.pre_tokenizer, core.decoder = pre_tokenizers.Split(Regex(r"."), "isolated"), decoders.Fuse()
    settings = b'{"tokenizer_class": "PreTrainedTokenizerFast"}'
    return load_tokenizer({"tokenizer.json": core.to_str().encode(), "tokenizer_config.json": settings})
