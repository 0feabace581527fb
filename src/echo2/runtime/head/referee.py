"""The run's environment at the head: it goes through the rollouts that workers deliver and gives their rewards.

It has a process of its own, as at a worker. One rollout after the other: an environment
that hangs (30 s a call) holds up the deliveries behind it, and costs the worker whose rollout it was.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from functools import partial

from echo2.rollout.retrace import TurnRules, retrace
from echo2.rollout.turns import ENVIRONMENT_SAMPLE, derived_seed
from echo2.tasks.environment_process import EnvironmentProcess
from echo2.types import Lease, Rollout, RolloutGroup, Task


class Referee:
    """Judges rollouts with the environment `spec`, whose process is started at the first call."""

    def __init__(self, spec: str) -> None:
        self._environment = EnvironmentProcess(spec)
        self._turn = asyncio.Lock()

    async def stop(self) -> str:
        """The character that ends a turn, beside the end token (empty: none).

        Raises:
            UserError: the environment can't be loaded.
        """
        return await self._environment.start()

    async def close(self) -> None:
        """End the environment's process."""
        await self._environment.close()

    async def judged(self, rules: TurnRules, lease: Lease, task: Task, group: RolloutGroup) -> RolloutGroup:
        """The group, each rollout with what the environment gives for it.

        Raises:
            PeerError: "malformed", a rollout is not what the environment makes of its turns.
            UserError: the environment fails.
        """
        async with self._turn:
            pairs = enumerate(group.rollouts)
            judged = [await self._judged(rules, lease, sample, task, group, rollout) for sample, rollout in pairs]
        return replace(group, rollouts=tuple(judged))

    async def _judged(
        self, rules: TurnRules, lease: Lease, sample: int, task: Task, group: RolloutGroup, rollout: Rollout
    ) -> Rollout:
        environment, seed = self._environment, derived_seed(lease.seed, sample, ENVIRONMENT_SAMPLE)
        begun = environment.begin(task.columns, seed)
        try:
            turn_tokens, step = await environment.turn_tokens(begun), partial(environment.step, begun)
            reward = await retrace(rules, turn_tokens, len(group.prompt_tokens), rollout, step)
        finally:
            environment.end(begun)
        return replace(rollout, reward_parts={"environment": reward})
