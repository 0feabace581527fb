"""Harnesses in this process, played by an engine on this machine."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from echo2.core.types import RUN_POLICY, GroupRef, Lease, RolloutGroup, SamplingParams, Task
from echo2.engines.engine import RequestFailure
from echo2.engines.tokenizer import encode_prompt
from echo2.rollouts.generate import assignment_of, sample_group
from echo2.rollouts.harness import HarnessEnvironment
from echo2.tasks.loopback_model import LoopbackModel

LEASE = Lease(3, GroupRef(RUN_POLICY, "train", 5), 2, 5, 3, 0, None, 9e9, 60.0, 77)
Plays = Callable[[LoopbackModel, random.Random], Awaitable[Any]]


class Own:
    """A harness in this process: what a test gives it to play."""

    def __init__(self, plays: Plays) -> None:
        self._plays = plays
        self.models: list[LoopbackModel] = []

    async def start(self) -> None: ...

    async def play(self, columns: Mapping[str, Any], seed: int, model: Mapping[str, str], seconds: float) -> Any:
        self.models.append(LoopbackModel(**model))
        return await self._plays(self.models[-1], random.Random(seed))

    async def close(self) -> None: ...


def played(
    engine: Any, plays: Plays, tokenizer: Any, max_tokens: int = 40, max_turns: int = 8
) -> RolloutGroup | RequestFailure:
    task, params = Task(5, "12+3=", {"a": 1}), SamplingParams(max_tokens=max_tokens)
    leased = assignment_of(LEASE, task, encode_prompt(task, tokenizer), params, "harness:own", max_turns)

    async def play() -> RolloutGroup | RequestFailure:
        environment = HarnessEnvironment(Own(plays))
        await environment.start()
        try:
            return await sample_group(engine, tokenizer, leased, "w", {"harness:own": environment})
        finally:
            await environment.close()

    return asyncio.run(play())


def group_of(outcome: RolloutGroup | RequestFailure) -> RolloutGroup:
    assert isinstance(outcome, RolloutGroup), outcome
    return outcome


def failure_of(outcome: RolloutGroup | RequestFailure) -> RequestFailure:
    assert isinstance(outcome, RequestFailure)
    return outcome
