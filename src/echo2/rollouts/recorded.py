"""A rollout that a harness plays: the harness calls the model, and each call is recorded here.

A harness is an environment that calls the model by itself, whenever it wants; `turns.py` instead drives environments
turn by turn. A call whose prompt begins with all tokens of an earlier row continues that row. Every other call begins a
new row: a history that was shortened, a sub-agent, a fork, a second answer to the same prompt. A row is a token
sequence to train on, in which the tokens that were sampled there are marked, and nothing is tokenised again: each
sampled token is in exactly one row as such. All rows of a rollout share its reward.

Calls of opponents, judges and the like are answered by the policy, too, and are not trained on, if they say so. The
run's settings decide how tokens are drawn. A call sets only its prompt, its longest answer and where it stops.
"""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace

from echo2.core.errors import UserError
from echo2.core.types import Assignment, Rollout, SamplingFailure, SamplingParams
from echo2.engines.engine import Completion, Conversation, Outcome, RequestFailure, SampleRequest, derived_seed
from echo2.engines.tokenizer import StopRule, Tokenizer
from echo2.rollouts.turns import Sampler, check_sum
from echo2.tasks.loopback_model import CUT
from echo2.transport.limits import GROUP_TOKENS_MAX, ROWS_MAX, TOKENS_MAX


class CallRefused(UserError):
    """A harness's call is refused. `status`: the HTTP status; `code`: one word."""

    def __init__(self, status: int, code: str, message: str) -> None:
        super().__init__(message)
        self.status, self.code = status, code


@dataclass(frozen=True, slots=True)
class CallBounds:
    """What a call says of its answer: the longest (None: as long as the run allows), and what ends it besides the end
    token. `is_trained`: whether the answer is trained on. `is_heard()`: whether the caller still waits for the answer.
    `on_token`: as `SampleRequest.on_token`.
    """

    max_tokens: int | None = None
    stop_tokens: frozenset[int] = frozenset()
    stop: StopRule | None = None
    is_trained: bool = True
    is_heard: Callable[[], Awaitable[bool]] | None = None
    on_token: Callable[[int], object] | None = None


@dataclass(frozen=True, slots=True)
class Played:
    """A rollout: its rows, each with the prompt that it follows."""

    rows: tuple[tuple[array[int], Rollout], ...]


@dataclass(slots=True, eq=False)
class _Row:
    """`prompt`: that of its first call; `is_asking`: a call is under way; `is_cut`: it was cut off for lack of room."""

    prompt: array[int]
    is_trained: bool
    spoken: Conversation = field(default_factory=Conversation)
    is_asking: bool = False
    is_cut: bool = False

    @property
    def tokens(self) -> array[int]:
        """All tokens that were read and written so far."""
        return self.prompt + self.spoken.tokens


class RecordedRollout:
    """Passes the calls of one rollout's harness to the engine, and records them. For one event loop."""

    def __init__(self, engine: Sampler, tokenizer: Tokenizer, assignment: Assignment, sample: int) -> None:
        self.tokenizer = tokenizer
        self._engine, self._assignment, self._sample = engine, assignment, sample
        self._rows: list[_Row] = []
        self._pending: set[asyncio.Future[Outcome]] = set()
        self._failure: RequestFailure | None = None
        self._is_over, self.num_calls = False, 0

    async def complete(self, prompt: array[int], bounds: CallBounds = CallBounds()) -> Completion:
        """Sample a completion of `prompt`: all that a row has so far and the tokens that the harness adds, or the start
        of a new row. An answer without a waiting client is forgotten.

        Raises:
            CallRefused: with the reason. The rollout may be valid nevertheless; see `played`.
        """
        self._refuse_if_over()
        row = self._row(prompt, bounds.is_trained)
        pending = prompt[len(row.tokens) :] if row.spoken.turns else array("i")
        room = self._room(row, prompt, len(row.spoken.tokens) + len(pending))
        params = replace(self._assignment.params, max_tokens=min(room, bounds.max_tokens or room))
        try:
            outcome = await self._sampled(row, prompt, params, bounds)
            if isinstance(outcome, RequestFailure):
                if outcome.reason == "prompt_too_long" and self._spoken():
                    raise self._cut(row, "the model's context is full")
                self._failure = self._failure or outcome
                raise CallRefused(400, outcome.reason, outcome.detail)
            if bounds.is_heard is not None and not await bounds.is_heard():
                raise CallRefused(409, "unheard", "the caller has gone")
            self._refuse_if_over()
            row.spoken.pending = pending
            row.spoken.take(outcome)
        finally:
            row.is_asking = False
            if not row.spoken.turns:
                self._rows.remove(row)
        row.is_cut = outcome.finish == "length" and params.max_tokens == room
        return outcome

    def played(self, reward: float) -> Played | RequestFailure:
        """Close the rollout. Returns it with the harness's reward, or the reason of its failure.

        Raises:
            UserError: the reward is out of range.
        """
        self.close()
        rows = self._spoken()
        if self._failure is not None:
            return self._failure
        if not rows:
            return RequestFailure("environment_failed", "The harness ended without a call of the model to train on.")
        check_sum(reward)
        for row in rows:
            row.spoken.reward, row.spoken.finish = reward, "length" if row.is_cut else "stop"
        return Played(tuple((row.prompt, row.spoken.rollout()) for row in rows))

    @property
    def is_cut(self) -> bool:
        """Whether the rollout was cut off for lack of room, and has not failed."""
        return any(row.is_cut for row in self._rows) and self._failure is None

    def fail(self, reason: SamplingFailure, detail: str, traceback: str = "") -> None:
        """Mark the rollout as failed: it is not trained on. The first reason counts."""
        self._failure = self._failure or RequestFailure(reason, detail, traceback)

    def full(self, why: str) -> CallRefused:
        """Return the refusal of a call that no context has room for. The rollout is cut off there, or, if nothing was
        said before, fails."""
        if spoken := self._spoken():
            return self._cut(spoken[-1], why)
        self.fail("prompt_too_long", why)
        return CallRefused(400, "prompt_too_long", why)

    def close(self) -> None:
        """Accept no more calls, and abort those under way."""
        self._is_over = True
        for future in self._pending:
            future.cancel()

    def _refuse_if_over(self) -> None:
        if self._is_over or self._failure is not None:
            raise CallRefused(409, "rollout_over", self._failure.detail if self._failure else "the rollout is over")

    def _spoken(self) -> list[_Row]:
        """Return the rows to train on."""
        return [row for row in self._rows if row.is_trained and row.spoken.turns]

    def _row(self, prompt: array[int], is_trained: bool) -> _Row:
        """Return the longest row that this prompt continues, or a new one."""
        candidates = [
            row for row in self._rows if row.is_trained == is_trained and row.spoken.turns and not row.is_asking
        ]
        candidates = [row for row in candidates if prompt[: len(row.tokens)] == row.tokens]
        return max(candidates, key=lambda row: len(row.tokens), default=_Row(prompt, is_trained))

    def _room(self, row: _Row, prompt: array[int], num_tokens: int) -> int:
        """Return the longest answer in a row that has `num_tokens` behind its first prompt.

        Raises:
            CallRefused: the rollout has no room for another answer.
        """
        others = [one for one in self._rows if one.is_trained == row.is_trained and one is not row]
        most, turns = self._assignment.params.max_tokens, self._assignment.max_turns
        if row.spoken.turns + sum(one.spoken.turns + one.is_asking for one in others) >= turns:
            raise self._cut(row, f"the rollout has had its turns: sampling.max_turns = {turns}")
        if len(others) >= ROWS_MAX:
            raise self._cut(row, f"the rollout has its rows: {ROWS_MAX} are the most")
        in_all = min(TOKENS_MAX, GROUP_TOKENS_MAX // self._assignment.lease.num_samples) if others else TOKENS_MAX
        room = min(most - num_tokens, in_all - len(prompt) - sum(len(one.tokens) for one in others))
        if room < 1:
            raise self._cut(row, f"the rollout has no room for more: sampling.max_tokens = {most}")
        return room

    def _cut(self, row: _Row, why: str) -> CallRefused:
        """Mark the row as cut off; if it has no answer yet, the one before."""
        for cut in [row] if row.spoken.turns else self._spoken()[-1:]:
            cut.is_cut = True
        return CallRefused(400, CUT, why)

    async def _sampled(self, row: _Row, prompt: array[int], params: SamplingParams, bounds: CallBounds) -> Outcome:
        seed = derived_seed(self._assignment.lease.seed, self._sample, self.num_calls)
        self.num_calls += 1
        if not row.spoken.turns:
            self._rows.append(row)
        row.is_asking = True
        request = SampleRequest(
            prompt, seed, 0, params, bounds.stop_tokens, in_turns=True, stop=bounds.stop, on_token=bounds.on_token
        )
        future = self._engine.submit(request)
        self._pending.add(future)
        try:
            return await future
        except asyncio.CancelledError as error:
            asking = asyncio.current_task()
            if asking is not None and asking.cancelling():
                raise
            raise CallRefused(409, "rollout_over", "the rollout was given up") from error
        finally:
            self._pending.discard(future)
