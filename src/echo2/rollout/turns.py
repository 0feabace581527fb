"""Rollouts of several turns: the policy writes and an environment answers, until one of them ends the rollout.

Rollouts do not wait for each other: each submits a turn, awaits it, awaits the environment's reply, and goes on. The
prompt of a later turn is all tokens read and written so far: they are never tokenised again, and an engine that keeps
turns prefills only the new ones. The environment's reply is tokenised alone, appended, and masked out of the loss. A
rollout ends with a token sampled by the policy.

Environments run in processes of their own, never in the event loop or the decode thread. Imports without torch.
"""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from echo2.errors import InvariantError, UserError
from echo2.rollout.engine import Completion, Engine, RequestFailure, SampleRequest
from echo2.rollout.lockstep import Lockstep
from echo2.rollout.random_streams import stream_keys
from echo2.rollout.tokenizer import Tokenizer, decoded, reply_tokens, tokens_with
from echo2.sandbox.plugins import traceback_of
from echo2.types import Assignment, FinishReason, Reply, Rollout

#: Sample number of the environments' random streams; the policy's samples have smaller numbers.
ENVIRONMENT_SAMPLE = 1 << 32
#: Largest absolute sum of a rollout's rewards, as on the wire.
ROLLOUT_REWARD_MAX = 1e6


class Environment(Protocol):
    """Answers the turns of rollouts, each with an instance of its own (`tasks/environment_process.py`). `begin` returns
    the handle by which later calls name a rollout. The coroutines raise UserError if the environment fails."""

    async def start(self) -> str:
        """Start the environment. Returns the character that ends a turn, besides the end token (empty: none)."""

    def begin(self, columns: Mapping[str, Any], seed: int) -> Any:
        """Begin a rollout of a task."""

    async def turn_tokens(self, rollout: Any) -> int:
        """Return the longest turn in tokens (0: no limit of its own)."""

    async def step(self, rollout: Any, action: str) -> Reply:
        """Return the environment's reply to the policy's turn."""

    def end(self, rollout: Any) -> None:
        """Forget a rollout."""


@dataclass(slots=True)
class Conversation:
    """The state of one rollout. `pending`: the environment's last reply, kept only if the policy answers it."""

    tokens: array[int] = field(default_factory=lambda: array("i"))
    logprobs: array[float] = field(default_factory=lambda: array("f"))
    loss_mask: bytearray = field(default_factory=bytearray)
    spans: list[tuple[int, int]] = field(default_factory=list)
    support_tokens: array[int] | None = None
    support_offsets: array[int] = field(default_factory=lambda: array("i", [0]))
    top_tokens: array[int] = field(default_factory=lambda: array("i"))
    top_logprobs: bytearray = field(default_factory=bytearray)
    pending: array[int] = field(default_factory=lambda: array("i"))
    turns: int = 0
    reward: float = 0.0
    finish: FinishReason | None = None

    def take(self, completion: Completion) -> None:
        """Append the environment's pending reply, and the policy's turn."""
        start = len(self.tokens) + len(self.pending)
        self.tokens += self.pending + completion.tokens
        self.logprobs += array("f", bytes(4 * len(self.pending))) + completion.logprobs
        self.loss_mask += bytes(len(self.pending)) + b"\x01" * len(completion.tokens)
        for first, version in completion.version_spans:
            if not self.spans or self.spans[-1][1] != version:
                # The environment's tokens belong to the version span of the turn before them.
                self.spans.append((start + first, version))
        if completion.support_tokens is not None and completion.support_offsets is not None:
            before = self.support_offsets[-1]
            self.support_offsets.extend([before] * len(self.pending))
            self.support_offsets.extend(before + offset for offset in completion.support_offsets[1:])
            self.support_tokens = (self.support_tokens or array("i")) + completion.support_tokens
        self.top_tokens += completion.top_tokens
        self.top_logprobs += completion.top_logprobs
        self.pending = array("i")
        self.turns += 1

    def completion(self, finish: FinishReason) -> Completion:
        """The whole rollout as one completion."""
        return Completion(
            self.tokens,
            self.logprobs,
            tuple(self.spans),
            finish,
            self.support_tokens,
            self.support_offsets if self.support_tokens is not None else None,
            self.top_tokens,
            bytes(self.top_logprobs),
        )

    def rollout(self) -> Rollout:
        if self.finish is None or not self.tokens:
            raise InvariantError("a rollout was handed over before it was over")
        return Rollout(
            tokens=self.tokens,
            logprobs=self.logprobs,
            loss_mask=bytes(self.loss_mask),
            version_spans=tuple(self.spans),
            finish=self.finish,
            reward_parts={"environment": self.reward},
            support_tokens=self.support_tokens,
            support_offsets=self.support_offsets if self.support_tokens is not None else None,
            top_tokens=self.top_tokens,
            top_logprobs=bytes(self.top_logprobs),
        )


async def play(
    engine: Engine | Lockstep, tokenizer: Tokenizer, environment: Environment, assignment: Assignment, sample: int
) -> Rollout | RequestFailure:
    """Play one rollout of an assignment, turn by turn.

    Raises:
        UserError, PeerError: as `Engine.submit` and its future.
    """
    begun = environment.begin(assignment.columns, derived_seed(assignment.lease.seed, sample, ENVIRONMENT_SAMPLE))
    try:
        return await _play(engine, tokenizer, environment, begun, assignment, sample)
    finally:
        environment.end(begun)


async def _play(
    engine: Engine | Lockstep,
    tokenizer: Tokenizer,
    environment: Environment,
    begun: Any,
    assignment: Assignment,
    sample: int,
) -> Rollout | RequestFailure:
    try:
        stop, turn_tokens = await environment.start(), await environment.turn_tokens(begun)
    except UserError as error:
        return RequestFailure("environment_failed", str(error), traceback_of(error))
    stop_tokens = await asyncio.to_thread(tokens_with, tokenizer, stop) if stop else frozenset[int]()
    spoken = Conversation()
    while spoken.finish is None:
        room = assignment.params.max_tokens - len(spoken.tokens) - len(spoken.pending)
        outcome = await engine.submit(
            SampleRequest(
                prompt_tokens=assignment.prompt_tokens + spoken.tokens + spoken.pending,
                seed=derived_seed(assignment.lease.seed, sample, spoken.turns),
                sample=0,
                params=replace(assignment.params, max_tokens=min(room, turn_tokens or room)),
                stop_tokens=stop_tokens,
                in_turns=True,
            )
        )
        if isinstance(outcome, RequestFailure):
            if outcome.reason != "prompt_too_long" or not spoken.turns:
                return outcome
            spoken.finish = "length"  # the context is full: the environment's last reply is dropped
            break
        spoken.take(outcome)
        action = decoded(tokenizer, outcome.tokens)
        try:
            reply = await environment.step(begun, action.partition(stop)[0] if stop else action)
            spoken.reward += reply.reward
            check_sum(spoken.reward)
            if reply.done:
                spoken.finish = "stop"
                break
            spoken.pending = reply_tokens(tokenizer, assignment.is_chat, reply.text, outcome.tokens[-1])
        except UserError as error:
            return RequestFailure("environment_failed", str(error), traceback_of(error))
        is_full = len(spoken.tokens) + len(spoken.pending) >= assignment.params.max_tokens
        if spoken.turns >= assignment.max_turns or is_full:
            spoken.finish = "length"
    return spoken.rollout()


def derived_seed(seed: int, sample: int, turn: int) -> int:
    """Return a separate 63-bit seed for every turn of every sample."""
    (of_sample,) = stream_keys([seed], [sample])
    (of_turn,) = stream_keys([int(of_sample)], [turn])
    return int(of_turn) >> 1


def check_sum(reward: float) -> None:
    """Raises UserError if the sum of an environment's rewards is beyond the limit."""
    if not abs(reward) <= ROLLOUT_REWARD_MAX:  # refuses NaN too
        raise UserError(
            f"The environment's rewards add up to {reward:g} over a rollout; +-{ROLLOUT_REWARD_MAX:g} is "
            "the most. Scale them down."
        )
