"""Tokenises prompts and environments' replies, and finds stop strings: one rule for all engines, and for the head,
which checks that a rollout ends with one. Imports no library before a tokenizer is loaded, and never torch.

A sample ends with the first token that completes a stop string in its text, where special tokens stand as their names.
Few tokens can complete a stop string. Text is decoded only behind these, and only as far back as the string can reach.
"""

from __future__ import annotations

import threading
from array import array
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from pathlib import Path
from tempfile import TemporaryDirectory
from types import MappingProxyType
from typing import Any, Protocol

import msgspec

from echo2.core.errors import PeerError, UserError
from echo2.core.types import Rollout, Task
from echo2.engines.model_values import read_context
from echo2.weights.format.snapshot_files import end_tokens

TOKENIZER_SUFFIXES = frozenset({".json", ".jinja", ".txt", ".model"})
#: Files with the texts of tokens.
VOCABULARY_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "merges.txt", "vocab.txt")

#: Stands for an earlier answer when a chat template is rendered to find the text that follows an answer.
ANSWER_MARK = "echo2-answer-mark"
#: Errors that a chat template's expressions raise, besides jinja2's own.
TEMPLATE_ERRORS = (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RecursionError)
_SEARCHING = threading.Lock()
#: transformers imports its classes when they are first used, which fails if several threads do so at once.
_LOADING = threading.Lock()
#: Decoders write this for an incomplete character.
BROKEN = "\ufffd"
#: Tokens decoded before the string's: for the first bytes of a character, and the first space that some decoders drop.
MARGIN_TOKENS = 4
#: Tokens of a whole rollout that are decoded at a time.
BLOCK_TOKENS = 256
#: Of a rendered conversation: no context has room for so much, and writing its tokens takes seconds.
TEXT_CHARS_MAX = 4 << 20
#: A longer text is written by the call that lets other threads go on, which costs more.
LONG_CHARS = 1 << 14


class TextTooLong(UserError):
    """A text has more characters than any context has room for."""


class Tokenizer(Protocol):
    """The part of a Hugging Face tokenizer that is used."""

    bos_token: str | None
    eos_token_id: int | None
    chat_template: Any
    model_max_length: int
    #: Of the model that it came with; set by `load_tokenizer`.
    model_ends: tuple[int, ...]

    def get_vocab(self) -> dict[str, int]:
        """Every token's id, added tokens included."""

    def __hash__(self) -> int: ...

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """The token ids of a text."""

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> str:
        """The text of token ids."""

    def save_pretrained(self, directory: str, /) -> Any:
        """Write its files."""

    def apply_chat_template(
        self, conversation: list[dict[str, Any]], *, tokenize: bool, add_generation_prompt: bool, **described: Any
    ) -> str:
        """The text that the chat template makes of `{"role", "content"}` messages."""


def prepare_tokenizers() -> None:
    """Import what `load_tokenizer` needs, which takes seconds, before there are files."""
    with _LOADING:
        from transformers import AutoTokenizer  # noqa: F401


def load_tokenizer(
    files: Mapping[str, bytes], template_arguments: Mapping[str, Any] = MappingProxyType({})
) -> Tokenizer:
    """Load the tokenizer among a snapshot's files; code that comes with it is never run. `template_arguments`, such as
    {"enable_thinking": False}, are passed to its chat template.

    Raises:
        PeerError: a file name would leave the directory, the model's end tokens are invalid, or there is no tokenizer
            that transformers can read.
    """
    with _LOADING, TemporaryDirectory() as folder:
        from transformers import AutoTokenizer

        for name, data in files.items():
            if Path(name).name != name:
                raise PeerError("bad_snapshot", f"file name {name!r} is a path")
            if Path(name).suffix in TOKENIZER_SUFFIXES:
                (Path(folder) / name).write_bytes(data)
        try:
            tokenizer: Any = AutoTokenizer.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
            _read_as_written(tokenizer, files)
        except Exception as error:  # each tokenizer class fails in its own way, and the files are untrusted
            first_line = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise PeerError("bad_snapshot", f"no tokenizer that transformers reads: {first_line}") from error
    if template_arguments:
        tokenizer.apply_chat_template = partial(tokenizer.apply_chat_template, **template_arguments)
    loaded: Tokenizer = tokenizer
    loaded.model_ends = end_tokens(files)
    positions = read_context(files) if "config.json" in files else None
    if positions is not None:  # the model's context length; a tokenizer's own value may be anything
        loaded.model_max_length = positions
    return loaded


class _Written(msgspec.Struct):
    """What a tokenizer.json says of texts before and behind their tokens."""

    normalizer: Any = None
    pre_tokenizer: Any = None
    decoder: Any = None


def _read_as_written(tokenizer: Any, files: Mapping[str, bytes]) -> None:
    """Make the tokenizer split texts as tokenizer.json says, if that works on bytes. transformers 5 takes only the
    vocabulary from there where it has a class for the tokenizer, and splits texts as most tokenizers of that class do.
    """
    core: Any = getattr(tokenizer, "backend_tokenizer", None)
    if core is None or "tokenizer.json" not in files or getattr(tokenizer, "add_prefix_space", False):
        return
    from tokenizers import Tokenizer

    written = msgspec.json.decode(files["tokenizer.json"], type=_Written)
    if "'ByteLevel'" not in str(written.pre_tokenizer):
        return
    parts = msgspec.to_builtins(written)
    empty = {"version": "1.0", "added_tokens": [], "model": {"type": "BPE", "vocab": {}, "merges": []}}
    read: Any = Tokenizer.from_str(msgspec.json.encode({**empty, **parts}).decode())
    for part in parts:
        ours, theirs = getattr(read, part), getattr(core, part)
        if (ours and ours.__getstate__()) != (theirs and theirs.__getstate__()):
            setattr(core, part, ours)


def refuse_other_tokenizer(ours: Mapping[str, bytes], theirs: Mapping[str, bytes], teacher: str) -> None:
    """Refuse a teacher that reads another text in the policy's tokens. It may know more tokens. Both are given by the
    files of their models; tokenizers are loaded only where these differ.

    Raises:
        UserError: names a token that differs, or says that one of the tokenizers cannot be read.
    """
    if all(ours.get(name) == theirs.get(name) for name in VOCABULARY_FILES):
        return
    try:
        own, other = (load_tokenizer(files).get_vocab() for files in (ours, theirs))
    except PeerError as error:
        raise UserError(f"distill.teacher = {teacher!r}: its tokens can't be compared: {error.detail}.") from error
    differ = [token for token, number in own.items() if other.get(token) != number]
    if differ:
        token = min(differ, key=own.__getitem__)
        raise UserError(
            f"distill.teacher = {teacher!r} has another tokenizer: of the policy's {len(own)} tokens {len(differ)} "
            f"are others there, for example number {own[token]}, {token!r}. A teacher scores the policy's own tokens: "
            "take one of the same family."
        )


def encode_prompt(task: Task, tokenizer: Tokenizer) -> array[int]:
    """Return the token ids of a prompt. Text is tokenised as it is, behind the start token that the tokenizer adds
    (unless the text has it). An end token that it adds is left out: the policy is to go on. Chat messages go through
    the chat template, followed by the opening of the assistant's turn; if the last one is the assistant's, it is left
    open, to be continued.

    Raises:
        UserError: chat messages without a chat template, or refused by it; or the tokenizer fails.
    """
    if isinstance(task.prompt, str):
        has_start = bool(tokenizer.bos_token) and task.prompt.startswith(tokenizer.bos_token or "")
        return _ids(tokenizer, task.prompt) if has_start else _begun_ids(tokenizer, task.prompt)
    if not tokenizer.chat_template:
        raise UserError(
            f"Task {task.cursor} has chat messages, but the model's tokenizer has no chat template. "
            "Add chat_template.jinja to the model directory, or give prompts as text."
        )
    messages = [{"role": message.role, "content": message.content} for message in task.prompt]
    try:
        return rendered_tokens(tokenizer, messages, continues=messages[-1]["role"] == "assistant")
    except UserError as error:
        raise UserError(f"Task {task.cursor}: {error}") from error


def rendered_tokens(
    tokenizer: Tokenizer, messages: list[dict[str, Any]], tools: Any = None, *, continues: bool = False
) -> array[int]:
    """Return the token ids of chat messages and the opening of the assistant's turn. `tools`: in OpenAI's format.
    `continues`: the last message is the beginning of the assistant's turn.

    Raises:
        UserError: there is no chat template, or it refuses them.
    """
    from jinja2 import TemplateError

    if not tokenizer.chat_template:
        raise UserError("the model's tokenizer has no chat template: add chat_template.jinja to the model directory")
    described = {"tools": tools} if tools else {}
    how = {"add_generation_prompt": not continues, **({"continue_final_message": True} if continues else {})}
    try:
        text = tokenizer.apply_chat_template(messages, tokenize=False, **how, **described)
    except (TemplateError, *TEMPLATE_ERRORS) as error:
        if continues:
            why = (str(error) or type(error).__name__).splitlines()[0]
            raise UserError(
                f"the chat template cannot continue the assistant's last message, {messages[-1]['content'][-80:]!r}: "
                f"{why} Leave that message out, or end the prompt with another role's."
            ) from error
        raise UserError(f"the chat template refuses its messages: {error}.") from error
    return _ids(tokenizer, text)  # templates write the special tokens themselves


def continued_ids(tokenizer: Tokenizer, text: str, before: str = "") -> array[int]:
    """Return the token ids of a text that does not begin a conversation. Some tokenizers put a space before every text,
    or have special tokens that take spaces behind them: they read it behind `before`, the text of a special token.

    Raises:
        UserError: the tokenizer fails.
    """
    before = before or ("\n" if _puts_space_before(tokenizer) else "")
    if before:
        anchor, both = _ids(tokenizer, before), _ids(tokenizer, before + text)
        if both[: len(anchor)] == anchor:
            return both[len(anchor) :]
    return _ids(tokenizer, text)


def answer_ids(tokenizer: Tokenizer, is_chat: bool, text: str) -> array[int]:
    """Return the token ids of an answer, as the policy is to write it behind its prompt, without an end token.

    Raises:
        UserError: the tokenizer fails.
    """
    space = _space_before_answers(tokenizer) if is_chat and _puts_space_before(tokenizer) else ""
    return continued_ids(tokenizer, space + text)


@lru_cache(maxsize=16)
def _space_before_answers(tokenizer: Tokenizer) -> str:
    """Return the spaces that the chat template writes between the opening of the assistant's turn and an answer."""
    from jinja2 import TemplateError

    question, answer = {"role": "user", "content": "."}, {"role": "assistant", "content": ANSWER_MARK}
    with suppress(TemplateError, *TEMPLATE_ERRORS):
        opening = tokenizer.apply_chat_template([question], tokenize=False, add_generation_prompt=True)
        whole = tokenizer.apply_chat_template([question, answer], tokenize=False, add_generation_prompt=False)
        space, mark, _ = whole.removeprefix(opening).partition(ANSWER_MARK)
        return space if mark and not space.strip() else ""
    return ""


@lru_cache(maxsize=16)
def _puts_space_before(tokenizer: Tokenizer) -> bool:
    with suppress(UserError):  # it has no such characters
        line, letter, both = (_ids(tokenizer, text) for text in ("\n", "a", "\na"))
        return both[: len(line)] == line and both[len(line) :] != letter
    return False


def _begun_ids(tokenizer: Tokenizer, text: str) -> array[int]:
    """Return the token ids of a text behind the tokens that the tokenizer adds before it, without those behind it."""
    whole = _ids(tokenizer, text, add_special_tokens=True)
    if whole and whole[-1] in (tokenizer.eos_token_id, *tokenizer.model_ends) and (plain := _ids(tokenizer, text)):
        for start in range(len(whole) - len(plain) + 1):
            if whole[start : start + len(plain)] == plain:
                return whole[: start + len(plain)]
    return whole


def _ids(tokenizer: Tokenizer, text: str, *, add_special_tokens: bool = False) -> array[int]:
    if len(text) > TEXT_CHARS_MAX:
        raise TextTooLong(f"a text has {len(text)} characters, and no more than {TEXT_CHARS_MAX} can be read")
    core = _core(tokenizer)
    try:
        if core is not None and len(text) > LONG_CHARS:
            return array("i", core.encode_batch([text], add_special_tokens=add_special_tokens)[0].ids)
        if core is not None:
            return array("i", core.encode(text, add_special_tokens=add_special_tokens).ids)
        return array("i", tokenizer.encode(text, add_special_tokens=add_special_tokens))
    except Exception as error:  # its native code raises plain Exception
        raise UserError(f"the model's tokenizer can't write {text[:80]!r}: {error}") from error


@lru_cache(maxsize=16)
def _core(tokenizer: Tokenizer) -> Any:
    """Return the Rust tokenizer if transformers' wrapper around it adds nothing, else None. The wrapper takes two
    thirds of the time of a short text.
    """
    from transformers import PreTrainedTokenizerBase, TokenizersBackend

    wrapper: Any = tokenizer
    if not isinstance(wrapper, TokenizersBackend):
        return None
    kind: Any = type(wrapper)
    is_plain = kind.encode is PreTrainedTokenizerBase.encode and kind.decode is PreTrainedTokenizerBase.decode
    is_plain &= kind._encode_plus is TokenizersBackend._encode_plus and kind._decode is TokenizersBackend._decode
    # For some kinds of tokenizers the wrapper removes spaces from texts.
    is_bpe = type(wrapper.backend_tokenizer.model).__name__ == "BPE"
    is_bpe &= not wrapper.clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output
    if not is_plain or (wrapper.clean_up_tokenization_spaces and not is_bpe):
        return None
    wrapper.encode("", add_special_tokens=False)  # turns truncation and padding off
    return wrapper.backend_tokenizer


@lru_cache(maxsize=16)
def known_tokens(tokenizer: Tokenizer) -> bytes:
    """Return for each id, up to the largest, 1 if the tokenizer has such a token, else 0. Ids may leave holes, so the
    number of tokens bounds no id.
    """
    ids = tokenizer.get_vocab().values()
    table = bytearray(max(ids, default=-1) + 1)
    for token in ids:
        table[token] = 1
    return bytes(table)


def is_known(tokenizer: Tokenizer, token: int) -> bool:
    """Whether the tokenizer has a token of this id. A model's vocabulary may have more, unused ones."""
    table = known_tokens(tokenizer)
    return 0 <= token < len(table) and table[token] == 1


def appends_text(tokenizer: Tokenizer) -> bool:
    """Whether the text of tokens begins with the text of the first of them, half of a character aside. Wrappers that
    tidy up spaces may change it."""
    return _core(tokenizer) is not None


def decoded(tokenizer: Tokenizer, tokens: array[int]) -> str:
    """Return the text of sampled tokens; see `decoded_all`."""
    return decoded_all(tokenizer, (tokens,))[0]


def decoded_all(tokenizer: Tokenizer, rows: Iterable[array[int]]) -> list[str]:
    """Return the texts of sampled tokens, without special tokens. Ids that only pad the model's vocabulary and are
    unknown to the tokenizer are skipped: some tokenizers would raise.
    """
    table, core = known_tokens(tokenizer), _core(tokenizer)
    has_no_hole = 0 not in table
    id_rows = [
        row.tolist()
        if not row or (has_no_hole and max(row) < len(table))
        else [token for token in row if token < len(table) and table[token]]
        for row in rows
    ]
    if core is None:
        return [tokenizer.decode(ids, skip_special_tokens=True) for ids in id_rows]
    texts: list[str] = core.decode_batch(id_rows, skip_special_tokens=True)
    return texts


def with_texts(rollouts: Sequence[Rollout], tokenizer: Tokenizer) -> tuple[Rollout, ...]:
    """Return the rollouts with their texts decoded."""
    texts = decoded_all(tokenizer, (rollout.tokens for rollout in rollouts))
    return tuple(replace(rollout, text=text) for rollout, text in zip(rollouts, texts, strict=True))


def reply_tokens(tokenizer: Tokenizer, is_chat: bool, text: str, last_token: int) -> array[int]:
    """Return the token ids of an environment's reply, to append to a turn that ended with `last_token`. In a chat the
    reply is a user message.

    Raises:
        UserError: the chat template cannot write what follows an answer, or the tokenizer fails.
    """
    if not is_chat:
        return continued_ids(tokenizer, text)
    return following_tokens(tokenizer, [{"role": "user", "content": text}], last_token)


def following_tokens(
    tokenizer: Tokenizer, new_messages: Sequence[dict[str, Any]], last_token: int, *, opens: bool = True
) -> array[int]:
    """Return the token ids of the messages after an answer that ended with `last_token`: the rest of the assistant's
    turn, the messages, and (`opens`) the opening of the assistant's next turn.

    Raises:
        UserError: the chat template cannot write what follows an answer, or the tokenizer fails.
    """
    from jinja2 import TemplateError

    messages = [{"role": "user", "content": "."}, {"role": "assistant", "content": ANSWER_MARK}, *new_messages]
    try:
        rendered = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=opens)
    except (TemplateError, *TEMPLATE_ERRORS) as error:
        raise UserError(f"the chat template refuses a conversation of several turns: {error}") from error
    _, mark, tail = rendered.partition(ANSWER_MARK)
    if not mark:
        raise UserError("the chat template drops earlier answers, so turns cannot be appended")
    is_end = is_known(tokenizer, last_token) and not tokenizer.decode([last_token], skip_special_tokens=True)
    end = tokenizer.decode([last_token], skip_special_tokens=False) if is_end else ""
    if end and tail.lstrip().startswith(end):  # it is sampled already
        tail = tail.lstrip().removeprefix(end)
    return continued_ids(tokenizer, tail, end)


@lru_cache(maxsize=16)
def end_token(tokenizer: Tokenizer, ends: tuple[int, ...], is_chat: bool) -> int | None:
    """Return which of the model's end tokens ends an answer: in a chat the one that the chat template writes behind it,
    else the tokenizer's, else the first; None if there are none.
    """
    tail: Sequence[int] = ()
    if is_chat and tokenizer.chat_template:
        with suppress(UserError):  # a template without earlier answers
            tail = following_tokens(tokenizer, (), -1, opens=False)
    candidates = [token for token in (*tail, tokenizer.eos_token_id) if token in ends]
    return next(iter((*candidates, *ends)), None)


def tokens_with(tokenizer: Tokenizer, characters: str, *, special: bool = False) -> frozenset[int]:
    """Return every token whose text contains one of `characters`, or may end an incomplete one. `special`: the text of
    a special token is its name, else empty. The first call takes a second or two for a vocabulary of 150,000: do not
    call this in the event loop. Threads take turns."""
    with _SEARCHING:
        return _tokens_with(tokenizer, characters, special)


@lru_cache(maxsize=16)
def _tokens_with(tokenizer: Tokenizer, characters: str, special: bool) -> frozenset[int]:
    before = tokenizer.encode("a", add_special_tokens=False)  # some decoders drop the first space
    length = len(tokenizer.decode(before, skip_special_tokens=True))
    character_set = {*characters, *("" if characters.isascii() else BROKEN)}
    ids = [token for token, is_there in enumerate(known_tokens(tokenizer)) if is_there]
    texts = (tokenizer.decode([*before, token], skip_special_tokens=not special)[length:] for token in ids)
    return frozenset(token for token, text in zip(ids, texts, strict=True) if not character_set.isdisjoint(text))


@dataclass(frozen=True, slots=True, eq=False)
class StopRule:
    """`tokens`: those that can complete a stop string; `window`: how many of the last tokens are decoded then."""

    strings: tuple[str, ...]
    tokens: frozenset[int]
    window: int
    tokenizer: Tokenizer

    def ends(self, tokens: Sequence[int]) -> bool:
        """Whether a sample that has not ended before ends with the last of these tokens. The last `window` suffice."""
        return tokens[-1] in self.tokens and self._is_in(tokens[-self.window :])

    def length(self, tokens: array[int]) -> int | None:
        """Return the number of tokens up to the first that completes a stop string; None if there is none. However many
        tokens may complete one: those of a block are looked at one by one only if the block has a stop string.
        """
        for begin in range(0, len(tokens), BLOCK_TOKENS):
            block = range(begin, min(begin + BLOCK_TOKENS, len(tokens)))
            ends = [at + 1 for at in block if tokens[at] in self.tokens]
            if len(ends) < 2 or self._is_in(tokens[max(0, begin - self.window) : block.stop]):
                for end in ends:
                    if self.ends(tokens[max(0, end - self.window) : end]):
                        return end
        return None

    def _is_in(self, tokens: Sequence[int]) -> bool:
        ids = [token for token in tokens if is_known(self.tokenizer, token)]
        text = self.tokenizer.decode(ids, skip_special_tokens=False)
        return any(string in text for string in self.strings)


@lru_cache(maxsize=16)
def stop_rule(tokenizer: Tokenizer, strings: tuple[str, ...]) -> StopRule:
    """Return the rule of these strings, none of which may be empty. The first call is as slow as `tokens_with`."""
    tokens = tokens_with(tokenizer, "".join(sorted({string[-1] for string in strings})), special=True)
    window = max(len(string.encode()) for string in strings) + MARGIN_TOKENS
    return StopRule(strings, tokens, window, tokenizer)
