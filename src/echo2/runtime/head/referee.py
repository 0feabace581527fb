"""Replays delivered rollouts in the run's environment at the head, and takes their rewards from it.

The environment runs in a separate process, as at a worker. Rollouts are replayed concurrently; if the environment hangs
on one (30 s a call), the result of the worker that delivered it fails.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from functools import partial

from echo2.rollout.retrace import TurnRules, retrace
from echo2.rollout.turns import ENVIRONMENT_SAMPLE, derived_seed
from echo2.tasks.environment_process import EnvironmentProcess
from echo2.types import Lease, Rollout, RolloutGroup, Task

#: Maximum number of concurrent rollouts in the environment's process.
ROLLOUTS_TOGETHER_MAX = 1024


class Referee:
    """Judges rollouts with the environment `spec`. Its process starts at the first call."""

    def __init__(self, spec: str) -> None:
        self._environment = EnvironmentProcess(spec)
        self._room = asyncio.Semaphore(ROLLOUTS_TOGETHER_MAX)

    async def stop(self) -> str:
        """Return the character that ends a turn, besides the end token (empty: none).

        Raises:
            UserError: the environment can't be loaded.
        """
        return await self._environment.start()

    async def close(self) -> None:
        """End the environment's process."""
        await self._environment.close()

    async def judged(self, rules: TurnRules, lease: Lease, task: Task, group: RolloutGroup) -> RolloutGroup:
        """Return the group, each rollout with the environment's reward.

        Raises:
            PeerError: "malformed": a rollout differs from the environment's replay of its turns.
            UserError: the environment fails.
        """
        pairs = enumerate(group.rollouts)
        judging = (self._judged(rules, lease, sample, task, group, rollout) for sample, rollout in pairs)
        judged = await asyncio.gather(*judging, return_exceptions=True)
        if failed := [one for one in judged if isinstance(one, BaseException)]:
            raise failed[0]
        return replace(group, rollouts=tuple(one for one in judged if isinstance(one, Rollout)))

    async def _judged(
        self, rules: TurnRules, lease: Lease, sample: int, task: Task, group: RolloutGroup, rollout: Rollout
    ) -> Rollout:
        environment, seed = self._environment, derived_seed(lease.seed, sample, ENVIRONMENT_SAMPLE)
        async with self._room:
            begun = environment.begin(task.columns, seed)
            try:
                turn_tokens, step = await environment.turn_tokens(begun), partial(environment.step, begun)
                reward = await retrace(rules, turn_tokens, len(group.prompt_tokens), rollout, step)
            finally:
                environment.end(begun)
        return replace(rollout, reward_parts={"environment": reward})
