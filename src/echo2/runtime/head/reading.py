"""Tokenises prompts and decodes rollouts at the head, so that no worker is trusted with either.

The tokenizer comes with the snapshots and is loaded by `rollout/tokenizer.py`, without torch.
"""

from __future__ import annotations

import asyncio
from array import array
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from echo2.errors import PeerError, UserError
from echo2.model_context import context_length
from echo2.rollout.logged import logged_rollouts
from echo2.rollout.retrace import TurnRules
from echo2.rollout.snapshot_files import end_tokens, read_config
from echo2.rollout.stop_strings import StopRule, stop_rule
from echo2.rollout.tokenizer import Tokenizer, decoded_all, encode_prompt, is_known, load_tokenizer, tokens_with
from echo2.transport.messages import check_lengths
from echo2.types import LOGGED_ROLLOUTS, GroupKind, Rollout, RolloutGroup, Task

#: Maximum number of cached prompts, as of tasks (`task_reader.py`), and of their tokens (16 MiB). A delivery and a
#: second lease need the prompt of a lease again. A short prompt takes ten times the bytes of its tokens.
KEPT_PROMPTS, KEPT_PROMPT_TOKENS = 4096, 4 << 20


class RunTokenizer:
    """The run's tokenizer. Call `load` once, first. Its files are the same in all snapshots of a run."""

    def __init__(self, template_arguments: Mapping[str, Any] = MappingProxyType({})) -> None:
        self._template_arguments = template_arguments
        self._tokenizer: Tokenizer | None = None
        self._ends, self._context = frozenset[int](), 0
        self._stop: StopRule | None = None
        self._loaded = asyncio.Event()
        self._prompts: OrderedDict[tuple[GroupKind, int], array[int]] = OrderedDict()
        self._num_kept = 0
        self._pieces: dict[int, str] = {}  # token id -> text; bounded by the vocabulary

    async def load(self, files: Mapping[str, bytes], stop: str = "", stop_strings: tuple[str, ...] = ()) -> None:
        """Load the tokenizer from a snapshot's files, on a thread: this takes a second. `stop`: the character that ends
        a turn in the run's environment; `stop_strings`: `sampling.stop`.

        Raises:
            UserError: transformers can't read a tokenizer from the files.
        """
        try:
            found = await asyncio.to_thread(_load, files, stop, self._template_arguments)
        except PeerError as error:
            raise UserError(f"The model's tokenizer can't be used: {error.detail}.") from error
        self._tokenizer, self._ends, self._context = found
        if stop_strings:
            self._stop = await asyncio.to_thread(stop_rule, self._tokenizer, stop_strings)
        self._loaded.set()

    @property
    def is_loaded(self) -> bool:
        return self._loaded.is_set()

    async def loaded(self) -> None:
        """Wait until the tokenizer is loaded. The learner publishes it with its first snapshot."""
        await self._loaded.wait()

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer. Raises UserError before one is loaded."""
        if self._tokenizer is None:
            raise UserError("No snapshot was published yet, so there is no tokenizer.")
        return self._tokenizer

    def prompt(self, kind: GroupKind, task: Task) -> array[int]:
        """Return the token ids of a task's prompt.

        Raises:
            UserError: the prompt has no tokens, or the chat template fails on it; the message names the task.
        """
        found = self._prompts.get((kind, task.cursor))
        if found is None:
            found = encode_prompt(task, self.tokenizer)
            if not found:
                raise UserError(
                    f"Task {task.cursor}: its prompt has no tokens. Give it text, or the model a start token."
                )
            self._keep((kind, task.cursor), found)
        return found

    def _keep(self, key: tuple[GroupKind, int], prompt: array[int]) -> None:
        self._prompts[key] = prompt
        self._num_kept += len(prompt)
        while self._num_kept > KEPT_PROMPT_TOKENS or len(self._prompts) > KEPT_PROMPTS:
            self._num_kept -= len(self._prompts.popitem(last=False)[1])

    def turn_rules(self, stop: str, is_chat: bool, max_turns: int, max_tokens: int) -> TurnRules:
        """Return the rules for replaying rollouts in the environment."""
        return TurnRules(self.tokenizer, self._ends, stop, is_chat, max_turns, max_tokens, self._context)

    def check_lengths(self, group: RolloutGroup, max_tokens: int) -> None:
        """Raise PeerError if a rollout is longer than its lease allows, or than the model's context."""
        room = self._context - len(group.prompt_tokens) if self._context else max_tokens
        check_lengths(group, min(max_tokens, room))

    def check_ends(self, group: RolloutGroup, max_tokens: int) -> None:
        """Raises PeerError("malformed") if a rollout of one turn does not end properly: with its only end token or stop
        string, or cut off at its maximum length. Not checked if the run has neither end tokens nor stop strings.
        """
        if not self._ends and self._stop is None:
            return
        for rollout in group.rollouts:
            *before, last = rollout.tokens
            if not self._ends.isdisjoint(before):
                raise PeerError("malformed", "a rollout goes on behind an end token")
            stopped = None if self._stop is None else self._stop.length(rollout.tokens)
            if stopped is not None and stopped < len(rollout.tokens):
                raise PeerError("malformed", f"a rollout goes on behind a stop string, which ends at token {stopped}")
            if (rollout.finish == "stop") != (last in self._ends or stopped is not None):
                raise PeerError("malformed", f"a rollout whose last token is {last} did not end by {rollout.finish!r}")
            length = len(rollout.tokens)
            is_full = not self._context or len(group.prompt_tokens) + length >= self._context
            if rollout.finish == "length" and length < max_tokens and not is_full:
                raise PeerError("malformed", f"a rollout was cut off after {length} of {max_tokens} tokens")

    def texts(self, group: RolloutGroup, task: Task) -> list[str]:
        """Return the texts of the group's rollouts, decoded from their tokens or read from their log."""
        if group.logged:
            longest = max(len(rollout.tokens) for rollout in group.rollouts)
            logged = self.logged(task, len(group.rollouts), longest, group.newest_version)
            return [one.text for one in logged]
        return decoded_all(self.tokenizer, (rollout.tokens for rollout in group.rollouts))

    def read(self, group: RolloutGroup, task: Task) -> RolloutGroup:
        """Return the group with the texts of its rollouts."""
        texts = zip(group.rollouts, self.texts(group, task), strict=True)
        return replace(group, rollouts=tuple(replace(one, text=text) for one, text in texts))

    def pieces(self, tokens: Sequence[int]) -> list[str]:
        """Return the text of each token by itself, including special tokens. A part of a character becomes a
        replacement character.
        """
        return [self._piece(token) for token in tokens]

    def _piece(self, token: int) -> str:
        found = self._pieces.get(token)
        if found is None:
            is_there = is_known(self.tokenizer, token)
            found = self.tokenizer.decode([token], skip_special_tokens=False) if is_there else ""
            self._pieces[token] = found
        return found

    def logged(self, task: Task, num_samples: int, max_tokens: int, version: int) -> list[Rollout]:
        """Return the rollouts in the task's log, with their text. They count as sampled by `version`.

        Raises:
            UserError: the log does not have such rollouts.
        """
        return logged_rollouts(task.columns[LOGGED_ROLLOUTS], num_samples, max_tokens, self.tokenizer, version)


def _load(
    files: Mapping[str, bytes], stop: str, template_arguments: Mapping[str, Any]
) -> tuple[Tokenizer, frozenset[int], int]:
    """Return the tokenizer, the tokens that end a turn, and the model's context length (0: not stated)."""
    tokenizer = load_tokenizer(files, template_arguments)
    ends = frozenset(end_tokens(files)) | (tokens_with(tokenizer, stop) if stop else frozenset())
    context = context_length(read_config(files)) if "config.json" in files else None
    return tokenizer, ends, context or 0
