"""Reads tasks, tokenises their prompts and decodes rollouts at the head, so that no worker is trusted with them.

The user's task source is read on a separate thread, so that a slow row delays its lease but not the heartbeats. The
tokenizer comes with the snapshots and is loaded by `engines/tokenizer.py`, without torch.
"""

from __future__ import annotations

import asyncio
import threading
import time
from array import array
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from queue import SimpleQueue
from types import MappingProxyType
from typing import Any

from echo2.core.errors import PeerError, UserError
from echo2.core.loop_thread import call_in
from echo2.core.types import LOGGED_ROLLOUTS, GroupKind, GroupRef, Rollout, RolloutGroup, Task
from echo2.engines.model_values import read_context
from echo2.engines.tokenizer import (
    Tokenizer,
    decoded_all,
    encode_prompt,
    is_known,
    load_tokenizer,
    stop_rule,
    tokens_with,
)
from echo2.head.strangers.replay import TurnRules
from echo2.rollouts.logged import logged_rollouts
from echo2.tasks.streams import Tasks
from echo2.tasks.teaching import task_for_teacher
from echo2.transport.messages import check_lengths
from echo2.weights.format.snapshot_files import end_tokens

#: Timeout for reading a row; a slower row is unfit.
ROW_SECONDS = 60.0
#: Number of tasks read ahead, at least half of it, and of tasks kept: a delivery needs the task of its lease again.
#: Twice as many are kept as leases are open, if that is more.
AHEAD = 32
KEPT = 4096
#: Tokens of all cached prompts (16 MiB), of which each takes the bytes of so many more: a delivery and a second lease
#: need the prompt of a lease again, and 10,000 workers have 20,000 leases.
KEPT_PROMPT_TOKENS, PROMPT_TOKENS = 4 << 20, 64
#: Maximum number of tokens of a teacher's prompt: half of what a message has room for beside a group.
TEACHER_TOKENS_MAX = 1 << 17


@dataclass(slots=True)
class _Job:
    """A row to read. `outcome`: the task, or the error."""

    stream: Tasks
    cursor: int
    loop: asyncio.AbstractEventLoop
    done: asyncio.Event = field(default_factory=asyncio.Event)
    outcome: Task | UserError | None = None

    def end(self, outcome: Task | UserError) -> None:
        """Set the result, on the event loop. Only the first call counts."""
        if self.outcome is None:
            self.outcome = outcome
            self.done.set()


class TaskReader:
    """Returns the task of a group. `evaluation`: held-out tasks, if the run has any. `num_leases`: open now."""

    def __init__(self, train: Tasks, evaluation: Tasks | None, num_leases: Callable[[], int] = lambda: 0) -> None:
        self._streams, self._num_leases, self._newest = {"train": train, "eval": evaluation}, num_leases, -1
        self._jobs: OrderedDict[tuple[str, int], _Job] = OrderedDict()
        self._thread = _ReadingThread()

    async def task(self, group: GroupRef, cursor: int) -> Task:
        """Return the task of this group.

        Raises:
            UserError: its row is unfit, or took longer than `ROW_SECONDS`; the message names the row.
        """
        if group.kind == "eval" or cursor > self._newest:  # else a group is delivered or leased again, not the next one
            self._read_ahead(group.kind, cursor)
        job = self._begin(group.kind, cursor)
        while job.outcome is None:
            try:
                async with asyncio.timeout(ROW_SECONDS):
                    await job.done.wait()
            except TimeoutError:
                self._give_up_hung()
        if isinstance(job.outcome, UserError):
            raise job.outcome
        return job.outcome

    def _read_ahead(self, kind: GroupKind, cursor: int) -> None:
        self._newest = cursor if kind == "train" else self._newest
        first = cursor + AHEAD
        while first > cursor and (kind, first - 1) not in self._jobs:
            first -= 1
        if first > cursor + AHEAD // 2:
            return  # enough is read: the thread wakes for many rows, and not for one with each lease
        for ahead in range(first, cursor + AHEAD):
            self._begin(kind, ahead)

    def close(self) -> None:
        """Stop reading. A hanging row is abandoned; its daemon thread does not keep the process alive."""
        self._thread.jobs.put(None)

    def _begin(self, kind: str, cursor: int) -> _Job:
        job = self._jobs.get((kind, cursor))
        if job is None:
            stream = self._streams[kind]
            if stream is None:
                raise UserError(f"There are no {kind} tasks any more; the run had some when group {cursor} was leased.")
            job = self._jobs[kind, cursor] = _Job(stream, cursor, asyncio.get_running_loop())
            self._thread.jobs.put(job)
            while len(self._jobs) > max(KEPT, 2 * self._num_leases()):
                self._jobs.popitem(last=False)
        return job

    def _give_up_hung(self) -> None:
        """If the row being read takes too long, fail it, abandon its thread, and start another."""
        thread = self._thread
        job, since = thread.job, thread.since
        if job is not None and time.monotonic() - since >= ROW_SECONDS:
            self._thread = _ReadingThread(thread.jobs)
            thread.is_left = True
            reason = f"Task {job.cursor}: reading its row took longer than {ROW_SECONDS:g} s."
            job.end(UserError(f"{reason} Make the task source's __getitem__ faster, or prepare the rows beforehand."))


class _ReadingThread:
    """Reads rows in order of request, on a daemon thread, which does not keep the process alive."""

    def __init__(self, jobs: SimpleQueue[_Job | None] | None = None) -> None:
        self.jobs: SimpleQueue[_Job | None] = SimpleQueue() if jobs is None else jobs
        self.job: _Job | None = None
        self.since = 0.0
        self.is_left = False
        threading.Thread(target=self._run, name="tasks", daemon=True).start()

    def _run(self) -> None:
        while not self.is_left and (job := self.jobs.get()) is not None:
            self.since, self.job = time.monotonic(), job
            outcome: Task | UserError
            try:
                outcome = job.stream.task(job.cursor)
            except UserError as error:
                outcome = error
            self.job = None
            call_in(job.loop, job.end, outcome)


class RunTokenizer:
    """The run's tokenizer, from the files of any snapshot: they are the same in all."""

    def __init__(
        self,
        files: Mapping[str, bytes],
        template_arguments: Mapping[str, Any] = MappingProxyType({}),
        stop: str = "",
        stop_strings: tuple[str, ...] = (),
    ) -> None:
        """Takes a second. `stop`: the character that ends a turn in the run's environment; `stop_strings`:
        `sampling.stop`.

        Raises:
            UserError: transformers can't read a tokenizer from the files.
        """
        try:
            self.tokenizer: Tokenizer = load_tokenizer(files, template_arguments)
            self._ends = frozenset(end_tokens(files)) | (tokens_with(self.tokenizer, stop) if stop else frozenset())
            context = read_context(files) if "config.json" in files else None
        except PeerError as error:
            raise UserError(f"The model's tokenizer can't be used: {error.detail}.") from error
        self._context = context or 0  # 0: not stated
        self._stop = stop_rule(self.tokenizer, stop_strings) if stop_strings else None
        self._prompts: OrderedDict[tuple[GroupKind, int], array[int]] = OrderedDict()
        self._num_kept = 0
        self._pieces: dict[int, str] = {}  # token id -> text; bounded by the vocabulary

    def prompt(self, kind: GroupKind, task: Task) -> array[int]:
        """Return the token ids of a task's prompt.

        Raises:
            UserError: the prompt has no tokens, or the chat template fails on it; the message names the task.
        """
        tokens = self._prompts.get((kind, task.cursor))
        if tokens is None:
            tokens = encode_prompt(task, self.tokenizer)
            if not tokens:
                raise UserError(
                    f"Task {task.cursor}: its prompt has no tokens. Give it text, or the model a start token."
                )
            self._keep((kind, task.cursor), tokens)
        return tokens

    def teacher_prompt(self, task: Task) -> array[int]:
        """Return the token ids of the prompt that a teacher reads in place of the task's; none if it is the same.

        Raises:
            UserError: as `prompt`, or it has more than `TEACHER_TOKENS_MAX`.
        """
        shown = task_for_teacher(task)
        tokens = array("i") if shown is None else encode_prompt(shown, self.tokenizer)
        if (shown is not None and not tokens) or len(tokens) > TEACHER_TOKENS_MAX:
            raise UserError(
                f"Task {task.cursor}: its teacher_prompt has {len(tokens)} tokens, not 1 to {TEACHER_TOKENS_MAX}."
            )
        return tokens

    def _keep(self, key: tuple[GroupKind, int], prompt: array[int]) -> None:
        self._prompts[key] = prompt
        self._num_kept += PROMPT_TOKENS + len(prompt)
        while self._num_kept > KEPT_PROMPT_TOKENS:
            self._num_kept -= PROMPT_TOKENS + len(self._prompts.popitem(last=False)[1])

    def turn_rules(self, stop: str, is_chat: bool, max_turns: int, max_tokens: int) -> TurnRules:
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
        texts = zip(group.rollouts, self.texts(group, task), strict=True)
        return replace(group, rollouts=tuple(replace(one, text=text) for one, text in texts))

    def pieces(self, tokens: Sequence[int]) -> list[str]:
        """Return the text of each token by itself, including special tokens. A part of a character becomes a
        replacement character.
        """
        return [self._piece(token) for token in tokens]

    def _piece(self, token: int) -> str:
        text = self._pieces.get(token)
        if text is None:
            is_there = is_known(self.tokenizer, token)
            text = self.tokenizer.decode([token], skip_special_tokens=False) if is_there else ""
            self._pieces[token] = text
        return text

    def logged(self, task: Task, num_samples: int, max_tokens: int, version: int) -> list[Rollout]:
        """Return the rollouts in the task's log, with their text. They count as sampled by `version`.

        Raises:
            UserError: the log does not have such rollouts.
        """
        column, is_chat = task.columns[LOGGED_ROLLOUTS], not isinstance(task.prompt, str)
        return logged_rollouts(column, num_samples, max_tokens, self.tokenizer, version, is_chat)
