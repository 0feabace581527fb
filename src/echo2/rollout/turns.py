"""Attempts of several turns: the policy writes, an environment answers, until one of them ends it.

Turn by turn, each turn one batch of the engine over the attempts that are not over. An attempt's prompt is then all
that it has read and written so far: it is read again every turn (no cache is kept between turns), but never tokenised
again. What the environment writes is tokenised alone, appended, and marked in the loss mask: it is not trained on. An
attempt ends with a token of the policy's own.

A group is handed over when its last attempt is over; a turn lasts as long as its longest answer. Imports without torch.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from echo2.errors import InvariantError, UserError
from echo2.rollout.engine import Completion, Engine, Outcome, RequestFailure, SampleRequest
from echo2.rollout.random_streams import stream_keys
from echo2.rollout.tokenizer import Tokenizer, decoded, reply_tokens, tokens_with
from echo2.types import Assignment, FinishReason, Reply, Rollout

#: Sample number of the environments' own random streams: no sample of the policy's has it.
ENVIRONMENT_SAMPLE = 1 << 32
#: Size of the sum of an attempt's rewards; as the wire's.
ATTEMPT_REWARD_MAX = 1e6


class World(Protocol):
    """Environments of one kind, one for each attempt under way (`tasks/environments.py`).

    `stop`: the character that ends a turn, beside the end token (empty: none). Methods raise UserError where the
    environment fails.
    """

    @property
    def stop(self) -> str: ...

    def begin(self, columns: Mapping[str, Any], seed: int) -> int:
        """A new attempt at a task; its number."""

    def turn_tokens(self, attempt: int) -> int:
        """The longest turn (0: no limit of its own)."""

    def step(self, attempt: int, action: str) -> Reply: ...

    def end(self, attempt: int) -> None:
        """Forget an attempt."""


OnPlayed = Callable[[int, list[Rollout] | RequestFailure], None]


@dataclass(slots=True)
class _Attempt:
    """What one attempt has come to. `pending`: the environment's last words, kept only if the policy gets to answer."""

    index: int
    sample: int
    number: int
    tokens: array[int] = field(default_factory=lambda: array("i"))
    logprobs: array[float] = field(default_factory=lambda: array("f"))
    loss_mask: bytearray = field(default_factory=bytearray)
    spans: list[tuple[int, int]] = field(default_factory=list)
    support_tokens: array[int] | None = None
    support_offsets: array[int] = field(default_factory=lambda: array("i", [0]))
    pending: array[int] = field(default_factory=lambda: array("i"))
    turns: int = 0
    reward: float = 0.0
    finish: FinishReason | None = None

    def take(self, completion: Completion) -> None:
        """Append what the environment said before, and the policy's turn."""
        start = len(self.tokens) + len(self.pending)
        self.tokens += self.pending + completion.tokens
        self.logprobs += array("f", bytes(4 * len(self.pending))) + completion.logprobs
        self.loss_mask += bytes(len(self.pending)) + b"\x01" * len(completion.tokens)
        for first, version in completion.version_spans:
            if not self.spans or self.spans[-1][1] != version:
                # What the environment wrote counts to the turn before it.
                self.spans.append((start + first, version))
        if completion.support_tokens is not None and completion.support_offsets is not None:
            before = self.support_offsets[-1]
            self.support_offsets.extend([before] * len(self.pending))
            self.support_offsets.extend(before + offset for offset in completion.support_offsets[1:])
            self.support_tokens = (self.support_tokens or array("i")) + completion.support_tokens
        self.pending = array("i")
        self.turns += 1

    def rollout(self) -> Rollout:
        if self.finish is None or not self.tokens:
            raise InvariantError(f"attempt {self.sample} was handed over before it was over")
        return Rollout(
            tokens=self.tokens,
            logprobs=self.logprobs,
            loss_mask=bytes(self.loss_mask),
            version_spans=tuple(self.spans),
            finish=self.finish,
            reward_parts={"environment": self.reward},
            support_tokens=self.support_tokens,
            support_offsets=self.support_offsets if self.support_tokens is not None else None,
        )


class Play:
    """One batch of assignments in one world. `on_played(index, rollouts or failure)` is
    called once for each assignment that ended."""

    def __init__(
        self,
        engine: Engine,
        tokenizer: Tokenizer,
        world: World,
        assignments: Sequence[Assignment],
        on_played: OnPlayed,
    ) -> None:
        self._engine, self._tokenizer, self._world = engine, tokenizer, world
        self._assignments, self._on_played = assignments, on_played
        self._stop_tokens = tokens_with(tokenizer, world.stop) if world.stop else frozenset[int]()
        self._groups: dict[int, list[_Attempt]] = {}

    def run(self, should_stop: Callable[[], bool]) -> None:
        """Play until all groups have ended, or `should_stop`.

        Raises:
            UserError, PeerError: as `Engine.generate`.
        """
        try:
            for index in range(len(self._assignments)):
                if should_stop():
                    return
                self._begin(index)
            while self._groups and not should_stop():
                self._turn(should_stop)
        finally:
            for index in list(self._groups):
                self._forget(index)

    def _begin(self, index: int) -> None:
        assignment, attempts = self._assignments[index], self._groups.setdefault(index, [])
        if assignment.max_turns < 1:
            self._fail(index, RequestFailure("engine_failed", f"max_turns = {assignment.max_turns}: give at least 1."))
            return
        try:
            for sample in assignment.lease.samples:
                seed = derived_seed(assignment.lease.seed, sample, ENVIRONMENT_SAMPLE)
                attempts.append(_Attempt(index, sample, self._world.begin(assignment.columns, seed)))
        except UserError as error:
            self._fail(index, RequestFailure("environment_failed", str(error)))

    def _turn(self, should_stop: Callable[[], bool]) -> None:
        """One batch at the engine: the next turn of every attempt that is not over."""
        playing = [attempt for attempts in self._groups.values() for attempt in attempts if attempt.finish is None]

        def finished(place: int, outcome: Outcome) -> None:
            attempt = playing[place]
            if attempt.index in self._groups:  # else a sibling failed
                self._take(attempt, outcome)

        self._engine.generate([self._request(attempt) for attempt in playing], finished, should_stop)

    def _request(self, attempt: _Attempt) -> SampleRequest:
        assignment = self._assignments[attempt.index]
        room = self._room(attempt)
        return SampleRequest(
            prompt_tokens=assignment.prompt_tokens + attempt.tokens + attempt.pending,
            num_samples=1,
            seed=derived_seed(assignment.lease.seed, attempt.sample, attempt.turns),
            params=replace(assignment.params, max_tokens=min(room, self._world.turn_tokens(attempt.number) or room)),
            stop_tokens=self._stop_tokens,
        )

    def _room(self, attempt: _Attempt) -> int:
        """Tokens that the attempt may still grow by."""
        most = self._assignments[attempt.index].params.max_tokens
        return most - len(attempt.tokens) - len(attempt.pending)

    def _take(self, attempt: _Attempt, outcome: Outcome) -> None:
        """What the engine made of an attempt's turn."""
        if isinstance(outcome, RequestFailure):
            if outcome.reason != "prompt_too_long" or not attempt.turns:
                self._fail(attempt.index, outcome)
                return
            attempt.finish = "length"  # the context is full: what the environment said last is left away
        else:
            attempt.take(outcome[0])
            try:
                self._answer(attempt, outcome[0])
            except UserError as error:
                self._fail(attempt.index, RequestFailure("environment_failed", str(error)))
                return
        if attempt.finish is not None:
            self._over(attempt)

    def _answer(self, attempt: _Attempt, completion: Completion) -> None:
        """Let the environment answer a turn; `finish` is set where that was the last."""
        action = decoded(self._tokenizer, completion.tokens)
        reply = self._world.step(attempt.number, action.partition(self._world.stop)[0] if self._world.stop else action)
        attempt.reward += reply.reward
        check_sum(attempt.reward)
        if reply.done:
            attempt.finish = "stop"
            return
        assignment = self._assignments[attempt.index]
        attempt.pending = reply_tokens(self._tokenizer, assignment.is_chat, reply.text, completion.tokens[-1])
        if attempt.turns >= assignment.max_turns or self._room(attempt) < 1:
            attempt.finish = "length"

    def _over(self, attempt: _Attempt) -> None:
        attempts = self._groups[attempt.index]
        if all(other.finish is not None for other in attempts):
            rollouts = [other.rollout() for other in attempts]
            self._forget(attempt.index)
            self._on_played(attempt.index, rollouts)

    def _fail(self, index: int, failure: RequestFailure) -> None:
        self._forget(index)
        self._on_played(index, failure)

    def _forget(self, index: int) -> None:
        for attempt in self._groups.pop(index):
            self._world.end(attempt.number)


def derived_seed(seed: int, sample: int, turn: int) -> int:
    """A 63-bit seed of its own for every turn of every sample."""
    (of_sample,) = stream_keys([seed], [sample])
    (of_turn,) = stream_keys([int(of_sample)], [turn])
    return int(of_turn) >> 1


def check_sum(reward: float) -> None:
    """Raises UserError where an environment's rewards add up to more than a reward may be."""
    if abs(reward) > ATTEMPT_REWARD_MAX:
        raise UserError(
            f"The environment's rewards add up to {reward:g} over an attempt; +-{ATTEMPT_REWARD_MAX:g} is "
            "the most. Scale them down."
        )
