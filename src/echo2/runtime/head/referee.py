"""Replays delivered rollouts in the run's environment at the head, and takes their rewards from it.

The environment runs in a separate process, as at a worker. Rollouts are replayed concurrently; if the environment hangs
on one (30 s a call), the result of the worker that delivered it fails. A replay ends with the first rollout that fails,
and with its lease. Its seconds are kept for the planner, whatever its end.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from functools import partial

from echo2.control.head import events as ev
from echo2.errors import PeerError
from echo2.rollout.retrace import TurnRules, retrace
from echo2.rollout.turns import ENVIRONMENT_SAMPLE, derived_seed
from echo2.tasks.environment_process import Begun, EnvironmentProcess
from echo2.types import Lease, Rollout, RolloutGroup, Task

Result = ev.GroupDelivered | ev.LeaseFailed | ev.DeliveryMalformed
#: Maximum number of concurrent rollouts in the environment's process.
ROLLOUTS_TOGETHER_MAX = 1024


class Referee:
    """Judges rollouts with the environment `spec`. Its process starts at the first call."""

    def __init__(self, spec: str) -> None:
        self._environment = EnvironmentProcess(spec)
        self._room = asyncio.Semaphore(ROLLOUTS_TOGETHER_MAX)
        self._seconds: dict[int, float] = {}

    async def stop(self) -> str:
        """Return the character that ends a turn, besides the end token (empty: none).

        Raises:
            UserError: the environment can't be loaded.
        """
        return await self._environment.start()

    async def close(self) -> None:
        """End the environment's process."""
        await self._environment.close()

    def timed(self, event: Result) -> Result:
        """Return the event with the seconds that the environment took to replay this result, if it did."""
        return replace(event, replay_seconds=self._seconds.pop(event.lease_id, 0.0))

    async def judged(
        self, rules: TurnRules, lease: Lease, task: Task, group: RolloutGroup, seconds: float
    ) -> RolloutGroup:
        """Return the group, each rollout with the environment's reward. `seconds`: until the lease ends.

        Raises:
            PeerError: "malformed": a rollout differs from the environment's replay of its turns; "late": the lease has
                ended.
            UserError: the environment fails.
        """
        begun = [
            self._environment.begin(task.columns, derived_seed(lease.seed, sample, ENVIRONMENT_SAMPLE))
            for sample in range(len(group.rollouts))
        ]
        try:
            async with asyncio.timeout(seconds), asyncio.TaskGroup() as tasks:
                judging = [
                    tasks.create_task(self._judged(rules, group, rollout, one))
                    for rollout, one in zip(group.rollouts, begun, strict=True)
                ]
        except ExceptionGroup as failed:
            raise failed.exceptions[0] from None
        except TimeoutError as error:
            raise PeerError("late", "its lease ended before the environment had replayed it") from error
        finally:
            self._seconds[lease.lease_id] = sum(one.spent_seconds() for one in begun)
        return replace(group, rollouts=tuple(one.result() for one in judging))

    async def _judged(self, rules: TurnRules, group: RolloutGroup, rollout: Rollout, begun: Begun) -> Rollout:
        environment = self._environment
        async with self._room:
            try:
                turn_tokens, step = await environment.turn_tokens(begun), partial(environment.step, begun)
                reward = await retrace(rules, turn_tokens, len(group.prompt_tokens), rollout, step)
            finally:
                environment.end(begun)
        return replace(rollout, reward_parts={"environment": reward})
