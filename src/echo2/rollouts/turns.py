"""Rollouts of several turns: the policy writes and an environment answers, until one of them ends the rollout.

Rollouts do not wait for each other: each submits a turn, awaits it, awaits the environment's reply, and goes on. The
prompt of a later turn is all tokens read and written so far: they are never tokenised again, and an engine that keeps
turns prefills only the new ones. The environment's reply is tokenised alone, appended, and masked out of the loss. A
rollout ends with a token sampled by the policy.

`run.deterministic` requires that they do wait (`Lockstep`), with nothing else in the engine: the rounding of an engine
depends on the shapes of its computation. In lockstep the shapes depend on these rollouts only: a turn starts when every
unfinished rollout has asked for it.

Environments run in processes of their own, never in the event loop or the decode thread. Imports without torch.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any, Protocol, TypeAlias

from echo2.core.errors import UserError
from echo2.core.types import Assignment, Reply, Rollout, SnapshotRef
from echo2.engines.engine import Conversation, Engine, Outcome, RequestFailure, SampleRequest, derived_seed
from echo2.engines.tokenizer import Tokenizer, decoded, reply_tokens, tokens_with
from echo2.sandbox.plugins import traceback_of
from echo2.transport.limits import REWARD_MAX

#: Sample number of the environments' random streams; the policy's samples have smaller numbers.
ENVIRONMENT_SAMPLE = 1 << 32


class Lockstep:
    """The part of an `Engine` that rollouts need, for `num_rollouts` of them. Call `leave` once for each that ends."""

    def __init__(self, engine: Engine, num_rollouts: int) -> None:
        self._engine, self._num_left = engine, num_rollouts
        self._requests: list[tuple[SampleRequest, asyncio.Future[Outcome]]] = []

    @property
    def installed(self) -> SnapshotRef | None:
        """See `Engine.installed`."""
        return self._engine.installed

    def refusal(self, request: SampleRequest) -> RequestFailure | None:
        """See `Engine.refusal`."""
        return self._engine.refusal(request)

    def submit(self, request: SampleRequest) -> asyncio.Future[Outcome]:
        """See `Engine.submit`. Aborting one request does not change the shapes of the others' computation."""
        future: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()
        self._requests.append((request, future))
        self._start()
        return future

    def leave(self) -> None:
        """A rollout has ended or was given up: the others no longer wait for it."""
        self._num_left -= 1
        self._requests = [(request, future) for request, future in self._requests if not future.cancelled()]
        self._start()

    def _start(self) -> None:
        """Start one batch once every rollout has asked. The batch is aborted when no rollout waits for a result."""
        if not self._requests or len(self._requests) < self._num_left:
            return
        batch, self._requests = self._requests, []
        batch.sort(key=lambda each: (each[0].seed, each[0].sample))  # the order in which rollouts ask must not matter
        submitted = self._engine.submit_together([request for request, _ in batch])
        num_awaited = len(batch)

        def answered(_: asyncio.Future[Outcome]) -> None:
            nonlocal num_awaited
            num_awaited -= 1
            if num_awaited == 0:
                for future in submitted:
                    future.cancel()

        for (_, future), engines in zip(batch, submitted, strict=True):
            future.add_done_callback(answered)
            engines.add_done_callback(partial(_pass_on, future))


def _pass_on(to: asyncio.Future[Outcome], done: asyncio.Future[Outcome]) -> None:
    """Give the engine's answer to the rollout, if it still waits."""
    if to.done():
        return
    if done.cancelled():
        to.cancel()
    elif (error := done.exception()) is not None:
        to.set_exception(error)
    else:
        to.set_result(done.result())


class OneVersion:
    """The part of an `Engine` that rollouts need, for those that keep the weights which are installed now."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._version = None if engine.installed is None else engine.installed.version

    @property
    def installed(self) -> SnapshotRef | None:
        """See `Engine.installed`: the newest."""
        return self._engine.installed

    def refusal(self, request: SampleRequest) -> RequestFailure | None:
        """See `Engine.refusal`."""
        return self._engine.refusal(request)

    def submit(self, request: SampleRequest) -> asyncio.Future[Outcome]:
        """See `Engine.submit`."""
        return self._engine.submit(replace(request, version=self._version))


#: What rollouts submit to.
Sampler: TypeAlias = Engine | Lockstep | OneVersion


class Environment(Protocol):
    """Answers the turns of rollouts, each with an instance of its own (`tasks/environments.py`). `begin` returns
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


async def play(
    engine: Sampler, tokenizer: Tokenizer, environment: Environment, assignment: Assignment, sample: int
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
    engine: Sampler,
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


def check_sum(reward: float) -> None:
    """Raises UserError if the sum of an environment's rewards is beyond the limit."""
    if not abs(reward) <= REWARD_MAX:  # refuses NaN too
        raise UserError(
            f"The environment's rewards add up to {reward:g} over a rollout; +-{REWARD_MAX:g} is "
            "the most. Scale them down."
        )
