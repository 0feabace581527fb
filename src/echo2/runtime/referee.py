"""The run's environment at the head: it goes through the attempts that workers deliver and gives their rewards.

An environment of the user's own has a process of its own, as at a worker. One attempt after the other: an environment
that hangs (30 s a call) holds up the deliveries behind it, and costs the worker whose attempt it was.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import TypeVar

from echo2.rollout.retrace import TurnRules, retrace
from echo2.rollout.turns import ENVIRONMENT_SAMPLE, derived_seed
from echo2.tasks.environment_process import open_world
from echo2.tasks.environments import OpenWorld
from echo2.types import Lease, Reply, Rollout, RolloutGroup, Task

T = TypeVar("T")


class Referee:
    """Opened at once.

    Raises:
        UserError: the environment can't be loaded.
    """

    def __init__(self, spec: str) -> None:
        self._world: OpenWorld = open_world(spec)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="environment")
        self._turn = asyncio.Lock()

    @property
    def stop(self) -> str:
        return self._world.stop

    def close(self) -> None:
        self._world.close()
        self._thread.shutdown(wait=False, cancel_futures=True)

    async def judged(self, rules: TurnRules, lease: Lease, task: Task, group: RolloutGroup) -> RolloutGroup:
        """The group, each attempt with what the environment gives for it.

        Raises:
            PeerError: "malformed", an attempt is not what the environment makes of its turns.
            UserError: the environment fails.
        """
        async with self._turn:
            pairs = zip(lease.samples, group.rollouts, strict=True)
            judged = [await self._judged(rules, lease, sample, task, group, rollout) for sample, rollout in pairs]
        return replace(group, rollouts=tuple(judged))

    async def _judged(
        self, rules: TurnRules, lease: Lease, sample: int, task: Task, group: RolloutGroup, rollout: Rollout
    ) -> Rollout:
        world, seed = self._world, derived_seed(lease.seed, sample, ENVIRONMENT_SAMPLE)
        number = await self._beside(partial(world.begin, task.columns, seed))
        try:
            turn_tokens = world.turn_tokens(number)

            async def step(action: str) -> Reply:
                return await self._beside(partial(world.step, number, action))

            reward = await retrace(rules, turn_tokens, len(group.prompt_tokens), rollout, step)
        finally:
            await self._beside(partial(world.end, number))
        return replace(rollout, reward_parts={"environment": reward})

    async def _beside(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)
