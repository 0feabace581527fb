"""A rollout that a harness plays: the harness calls the model, and each call is recorded here.

A harness is an environment that asks the model for what it wants to hear, when it wants to: nobody walks it turn by
turn, as `turns.py` does. A call goes on with a conversation where its prompt begins with all that was read and written
there, token by token; else it begins another one. One conversation is the rollout: the sequence to train on, in which
what was sampled is marked, and nothing is tokenised again. A harness that holds several (with a judge, an opponent, a
summary of itself) says which; one that does not costs the rollout's group.

How tokens are drawn is the run's matter: of a call, only its prompt, its longest answer and its stop tokens count.
"""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from echo2.errors import UserError
from echo2.rollout.engine import Completion, Engine, Outcome, RequestFailure, SampleRequest
from echo2.rollout.lockstep import Lockstep
from echo2.rollout.tokenizer import Tokenizer
from echo2.rollout.turns import Conversation, check_sum, derived_seed
from echo2.types import Assignment, Rollout, SamplingParams

#: With opponents, judges, and what a harness tries again.
CONVERSATIONS_MAX = 64


class CallRefused(UserError):
    """A call of a harness that gets no tokens. `status`: of HTTP; `code`: one word."""

    def __init__(self, status: int, code: str, message: str) -> None:
        super().__init__(message)
        self.status, self.code = status, code


@dataclass(frozen=True, slots=True)
class Played:
    """A rollout, and the prompt that it follows."""

    prompt: array[int]
    rollout: Rollout


@dataclass(slots=True)
class _Branch:
    """One conversation. `prompt`: of its first call; `is_asking`: a call of it is under way; `is_cut`: for want of
    room."""

    prompt: array[int]
    spoken: Conversation = field(default_factory=Conversation)
    is_asking: bool = False
    is_cut: bool = False

    @property
    def tokens(self) -> array[int]:
        """Everything that was read and written so far."""
        return self.prompt + self.spoken.tokens


class RecordedRollout:
    """What one rollout's harness asks of the engine, call by call. For one event loop."""

    def __init__(self, engine: Engine | Lockstep, tokenizer: Tokenizer, assignment: Assignment, sample: int) -> None:
        self.tokenizer = tokenizer
        self._engine, self._assignment, self._sample = engine, assignment, sample
        self._branches: list[_Branch] = []
        self._asked: set[asyncio.Future[Outcome]] = set()
        self._failure: RequestFailure | None = None
        self._is_over, self._num_calls = False, 0

    async def complete(
        self, prompt: array[int], max_tokens: int | None = None, stop_tokens: frozenset[int] = frozenset()
    ) -> Completion:
        """Sample what follows `prompt`: all that was read and written in a conversation and what the harness adds to
        it, or how another one begins. `max_tokens`: the longest answer (None: whatever the run leaves).

        Raises:
            CallRefused: with the reason; whether the rollout goes on, `played` knows.
        """
        branch = self._branch(prompt)
        said = prompt[len(branch.tokens) :] if branch.spoken.turns else array("i")
        most, turns = self._assignment.params.max_tokens, self._assignment.max_turns
        room = most - len(branch.spoken.tokens) - len(said)
        if branch.spoken.turns >= turns:
            raise _cut(branch, f"the rollout has had its turns: sampling.max_turns = {turns}")
        if room < 1:
            raise _cut(branch, f"the rollout has no room for more: sampling.max_tokens = {most}")
        params = replace(self._assignment.params, max_tokens=min(room, max_tokens or room))
        outcome = await self._sampled(branch, prompt, params, stop_tokens)
        if isinstance(outcome, RequestFailure):
            if outcome.reason == "prompt_too_long" and branch.spoken.turns:
                raise _cut(branch, "the model's context is full")
            self._failure = self._failure or outcome
            raise CallRefused(400, outcome.reason, outcome.detail)
        branch.spoken.pending = said
        branch.spoken.take(outcome)
        branch.is_cut = outcome.finish == "length" and params.max_tokens == room
        return outcome

    def played(self, reward: float, trained: Sequence[int] = ()) -> Played | RequestFailure:
        """What came of it, for the reward that the harness gave; or why there is nothing. `trained`: the tokens of the
        conversation that is the rollout, where there are several.

        Raises:
            UserError: no rollout may have such a reward.
        """
        self.close()
        if self._failure is not None:
            return self._failure
        spoken = [branch for branch in self._branches if branch.spoken.turns]
        if trained:
            named = array("i", trained)
            spoken = [branch for branch in spoken if branch.tokens == named[: len(branch.tokens)]]
        if len(spoken) != 1:
            return RequestFailure("environment_failed", self._not_one(len(spoken), bool(trained)))
        check_sum(reward)
        (branch,) = spoken
        branch.spoken.reward, branch.spoken.finish = reward, "length" if branch.is_cut else "stop"
        return Played(branch.prompt, branch.spoken.rollout())

    @property
    def is_cut(self) -> bool:
        """Whether the rollout ended for lack of room; how its harness takes that is its own matter."""
        return any(branch.is_cut for branch in self._branches) and self._failure is None

    def fail(self, reason: str, detail: str, traceback: str = "") -> None:
        """The rollout cannot be trained on, for this reason. The first reason counts."""
        self._failure = self._failure or RequestFailure(reason, detail, traceback)

    def close(self) -> None:
        """Accept no more calls, and abort those under way."""
        self._is_over = True
        for asked in self._asked:
            asked.cancel()

    def _branch(self, prompt: array[int]) -> _Branch:
        """The longest conversation that goes on with this prompt, or a new one."""
        if self._is_over or self._failure is not None:
            raise CallRefused(409, "rollout_over", self._failure.detail if self._failure else "the rollout is over")
        known = [one for one in self._branches if not one.is_asking and one.spoken.turns]
        known = [one for one in known if prompt[: len(one.tokens)] == one.tokens]
        if known:
            return max(known, key=lambda one: len(one.tokens))
        if len(self._branches) >= CONVERSATIONS_MAX:
            self.fail("environment_failed", f"The harness began more than {CONVERSATIONS_MAX} conversations.")
            raise CallRefused(409, "rollout_over", f"more than {CONVERSATIONS_MAX} conversations")
        self._branches.append(_Branch(prompt))
        return self._branches[-1]

    async def _sampled(
        self, branch: _Branch, prompt: array[int], params: SamplingParams, stop_tokens: frozenset[int]
    ) -> Outcome:
        seed = derived_seed(self._assignment.lease.seed, self._sample, self._num_calls)
        self._num_calls += 1
        asked = self._engine.submit(SampleRequest(prompt, seed, 0, params, stop_tokens, in_turns=True))
        self._asked.add(asked)
        branch.is_asking = True
        try:
            return await asked
        except asyncio.CancelledError as error:
            asking = asyncio.current_task()
            if asking is not None and asking.cancelling():
                raise
            raise CallRefused(409, "rollout_over", "the rollout was given up") from error
        finally:
            branch.is_asking = False
            self._asked.discard(asked)

    def _not_one(self, count: int, is_named: bool) -> str:
        if not self._num_calls:
            return "The harness ended without having called the model."
        if is_named:
            return f"The harness named tokens to train on that {count} of its conversations begin."
        first, *others = (branch.tokens for branch in self._branches)
        left = [next((i for i, (a, b) in enumerate(zip(first, one, strict=False)) if a != b), 0) for one in others]
        where = f" (the second leaves the first at token {left[0]} of {len(first)})" if left else ""
        return f"The harness held {count} conversations{where}, and did not say which of them is the rollout."


def _cut(branch: _Branch, why: str) -> CallRefused:
    branch.is_cut = True
    return CallRefused(400, "context_length_exceeded", why)
