"""Tokens of texts and chats: vocabularies with holes, end tokens, and prompts that the model continues."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from array import array
from copy import copy
from typing import Any

import pytest
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

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
from house import REPOSITORY


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


SPACED = (
    "{% for m in messages %}[{{ m.role[0] }}] {{ m.content }}{{ ' ' * pads }}<e>{% endfor %}"
    "{% if add_generation_prompt %}[a]{% endif %}"
)


@pytest.mark.parametrize("scheme", ["first", "always", "never"])
@pytest.mark.parametrize("pads", [0, 1])
def test_a_continuation_has_no_added_space(scheme: str, pads: int) -> None:
    """SentencePiece's tokenizers put a space before the first word of a text; some put one behind each special token,
    and there it stays."""
    tokenizer = spaced(scheme)
    assert tokenizer.encode("ab", add_special_tokens=False) == ([A, B] if scheme == "never" else [SPACE, A, B])
    assert reply_tokens(tokenizer, False, "ab", A).tolist() == [A, B]
    assert reply_tokens(tokenizer, False, " ab", A).tolist() == [SPACE, A, B]
    tokenizer.chat_template = SPACED.replace("pads", str(pads))
    behind = [SPACE] * (scheme == "always")
    written = [*behind, OPEN, tokenizer.get_vocab()["u"], CLOSE, SPACE, A, *[SPACE] * pads, SPACED_END]
    written += [*behind, OPEN, A, CLOSE]
    assert reply_tokens(tokenizer, True, "a", SPACED_END).tolist() == written
    cut = [*[SPACE] * pads, SPACED_END, *written]
    assert reply_tokens(tokenizer, True, "a", A).tolist() == cut


def test_an_answer_goes_on_from_its_prompt() -> None:
    """In a chat behind what the template writes before answers."""
    tokenizer = spaced("first")
    column = {"rollouts": [{"completion": "ab"}, {"completion": " ab"}]}
    for template, space in (("", []), (SPACED.replace("pads", "0"), [SPACE]), (ROLES, [])):
        tokenizer.chat_template = template
        rollouts = logged_rollouts(column, 2, 9, copy(tokenizer), 0, bool(template))
        expected = [[*space, A, B, SPACED_END], [*space, SPACE, A, B, SPACED_END]]
        assert [one.tokens.tolist() for one in rollouts] == expected


@pytest.mark.parametrize("added", ["<s> $A <e>", "$A <e>", "<s> $A", "<s> <u> $A <e>", "$A"])
@pytest.mark.parametrize("text", ["ab", "a<e>", "", "<e>"])
def test_no_end_token_is_put_behind_a_prompt(added: str, text: str) -> None:
    """Some tokenizers add one to every text, as an encoder's texts have it."""
    tokenizer = spaced("never", added)
    before = [tokenizer.get_vocab()[name] for name in added.partition("$A")[0].split()]
    found = encode_prompt(Task(0, text), tokenizer).tolist()
    if text:
        assert found == [*before, *tokenizer.encode(text, add_special_tokens=False)]


@pytest.mark.parametrize(
    "name", ["GPT2Tokenizer", "Qwen2Tokenizer", "GPTNeoXTokenizer", "CohereTokenizer", "LlamaTokenizer"]
)
def test_texts_are_split_as_the_tokenizers_file_says(name: str) -> None:
    """Whatever class its configuration names: transformers splits as most tokenizers of that class do."""
    vocab = {sign: at for at, sign in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    merges = [("1", "2"), ("12", "3"), ("123", "4"), ("x", "Ġ")]
    vocab |= {first + second: len(vocab) + at for at, (first, second) in enumerate(merges)}
    core = Tokenizer(models.BPE(vocab, merges))
    by_threes = pre_tokenizers.Split(Regex(r"\p{N}{1,3}|[^\p{N}]+"), "isolated")
    as_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.pre_tokenizer, core.decoder = pre_tokenizers.Sequence([by_threes, as_bytes]), decoders.ByteLevel()
    core.normalizer = normalizers.Lowercase()
    core.add_special_tokens(["<e>"])
    names = dict.fromkeys(("bos_token", "eos_token", "unk_token"), "<e>")
    settings = json.dumps({"tokenizer_class": f"{name}Tokenizer", "add_prefix_space": False, **names}).encode()
    tokenizer = load_tokenizer({"tokenizer.json": core.to_str().encode(), "tokenizer_config.json": settings})
    text = "X 1234é<e>12"
    assert encode_prompt(Task(0, text), tokenizer).tolist() == core.encode(text).ids
    assert decoded(tokenizer, array("i", core.encode(text).ids)) == "x 1234é12"


A, B, SPACE, OPEN, CLOSE, SPACED_END = 2, 3, 4, 5, 6, 7


def spaced(scheme: str, added: str = "$A") -> Any:
    """One token a character, and a space before texts."""
    vocab = {"<s>": 0, "<u>": 1, "a": A, "b": B, "▁": SPACE, "[": OPEN, "]": CLOSE, "<e>": SPACED_END, "u": 8, "\n": 9}
    core = Tokenizer(models.BPE(vocab, [], unk_token="<u>"))
    core.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=False)
    core.decoder = decoders.Metaspace(prepend_scheme=scheme, split=False)
    core.add_special_tokens(["<s>", "<u>", "<e>"])
    ids = [(name, core.token_to_id(name)) for name in ("<s>", "<u>", "<e>")]
    core.post_processor = processors.TemplateProcessing(single=added, special_tokens=ids)
    settings = b'{"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<e>", "bos_token": "<s>"}'
    return load_tokenizer({"tokenizer.json": core.to_str().encode(), "tokenizer_config.json": settings})


def letters() -> Any:
    """One token a character."""
    core = Tokenizer(models.WordLevel({sign: at for at, sign in enumerate("?[]ua12+ ")}, unk_token="?"))
    core.pre_tokenizer, core.decoder = pre_tokenizers.Split(Regex(r"."), "isolated"), decoders.Fuse()
    settings = b'{"tokenizer_class": "PreTrainedTokenizerFast"}'
    return load_tokenizer({"tokenizer.json": core.to_str().encode(), "tokenizer_config.json": settings})


#: Eight threads of a process that has imported nothing of transformers yet.
AT_ONCE = """
import threading
from echo2.engines.tokenizer import load_tokenizer
from house import REPOSITORY
from rollout_cases import tokenizer_files

files, gate, loaded = tokenizer_files(), threading.Barrier(8), []

def load():
    gate.wait()
    loaded.append(load_tokenizer(files))

threads = [threading.Thread(target=load) for _ in range(8)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
print(len(loaded))
"""


def test_threads_of_a_new_process_may_load_tokenizers_at_once() -> None:
    """transformers imports its classes when they are first used, which failed in two of three such processes."""
    folders = os.pathsep.join([str(REPOSITORY / "src"), str(REPOSITORY / "tests")])
    environment = {**os.environ, "PYTHONPATH": folders}
    done = subprocess.run([sys.executable, "-c", AT_ONCE], env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.split()[-1:]) == (0, ["8"]), done.stderr[-2000:]
