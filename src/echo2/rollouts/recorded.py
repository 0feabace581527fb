"""A rollout that a harness plays: the harness calls the model, and each call is recorded here.

A harness is an environment that calls the model by itself, whenever it wants; `turns.py` instead drives environments
turn by turn. A call continues a conversation if its prompt begins with all tokens read and written there. Otherwise it
starts a new conversation. One conversation becomes the rollout: the token sequence to train on, in which sampled tokens
are marked and nothing is tokenised again. A harness that holds several conversations (with a judge, an opponent, a
summary of itself) must name the one to train on; otherwise the rollout's group fails.

The run's settings decide how tokens are drawn. A call sets only its prompt, its longest answer and its stop tokens.
"""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from echo2.core.errors import UserError
from echo2.core.types import Assignment, Rollout, SamplingParams
from echo2.engines.engine import Completion, Conversation, Engine, Outcome, RequestFailure, SampleRequest
from echo2.engines.random_streams import derived_seed
from echo2.engines.tokenizer import Tokenizer
from echo2.rollouts.turns import Lockstep, check_sum

#: Conversations of one rollout, including those with opponents and judges and a harness's retries.
CONVERSATIONS_MAX = 64


class CallRefused(UserError):
    """A harness's call is refused. `status`: the HTTP status; `code`: one word."""

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
    """One conversation. `prompt`: that of its first call; `is_asking`: a call is under way; `is_cut`: it was cut off
    for lack of room."""

    prompt: array[int]
    spoken: Conversation = field(default_factory=Conversation)
    is_asking: bool = False
    is_cut: bool = False

    @property
    def tokens(self) -> array[int]:
        """All tokens that were read and written so far."""
        return self.prompt + self.spoken.tokens


class RecordedRollout:
    """Passes the calls of one rollout's harness to the engine, and records them. For one event loop."""

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
        """Sample a completion of `prompt`, which is either a conversation so far and the tokens that the harness adds,
        or the start of a new conversation. `max_tokens`: the longest answer (None: as long as the run allows).

        Raises:
            CallRefused: with the reason. The rollout may be valid nevertheless; see `played`.
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
        """Close the rollout. Returns it with the harness's reward, or the reason of its failure. `trained`: the tokens
        of the conversation to train on, if there are several.

        Raises:
            UserError: the reward is out of range.
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
        """Whether the rollout was cut off for lack of room, and has not failed."""
        return any(branch.is_cut for branch in self._branches) and self._failure is None

    def fail(self, reason: str, detail: str, traceback: str = "") -> None:
        """Mark the rollout as failed: it is not trained on. The first reason counts."""
        self._failure = self._failure or RequestFailure(reason, detail, traceback)

    def close(self) -> None:
        """Accept no more calls, and abort those under way."""
        self._is_over = True
        for asked in self._asked:
            asked.cancel()

    def _branch(self, prompt: array[int]) -> _Branch:
        """Return the longest conversation that this prompt continues, or a new one."""
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
