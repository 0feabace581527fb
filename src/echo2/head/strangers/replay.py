"""Goes through delivered rollouts again in the run's environment, at the head. Replies that differ from the rollout are
refused, and the reward is that of the replay. This works because environments are deterministic.

The policy's turns are cut from the rollout's tokens by the rules of `rollouts/turns.py`. Whether they were sampled
honestly is not checked here. Imports without torch.

The environment runs in a separate process, as at a worker. Rollouts are replayed concurrently; if the environment hangs
on one (30 s a call), that rollout fails. A replay ends with a rollout that differs, and with its lease. Its seconds
are kept for the planner, whatever its end.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from functools import partial

from echo2.core.background import together
from echo2.core.errors import PeerError, UserError
from echo2.core.types import Lease, LostRollout, Reply, Rollout, RolloutGroup, Task
from echo2.engines.engine import derived_seed
from echo2.engines.tokenizer import Tokenizer, decoded, reply_tokens
from echo2.head.decide import events as ev
from echo2.rollouts.turns import ENVIRONMENT_SAMPLE, check_sum
from echo2.tasks.environments import EnvironmentProcess, RolloutHandle
from echo2.transport.regroup import without

Result = ev.GroupDelivered | ev.LeaseFailed | ev.DeliveryMalformed
#: Maximum number of concurrent rollouts in the environment's process.
ROLLOUTS_TOGETHER_MAX = 1024


@dataclass(frozen=True, slots=True)
class TurnRules:
    """The rules that end turns and rollouts. `ends`: tokens that end a turn; `stop`: the character that ends a turn
    (empty: none); `context`: the model's context length (0: unknown, then a rollout may end after any turn).
    """

    tokenizer: Tokenizer
    ends: frozenset[int]
    stop: str
    is_chat: bool
    max_turns: int
    max_tokens: int
    context: int


async def replay_rollout(
    rules: TurnRules,
    turn_tokens: int,
    prompt_tokens: int,
    rollout: Rollout,
    step: Callable[[str], Awaitable[Reply]],
) -> float:
    """Replay a rollout with the environment's `step` and return its reward. `turn_tokens`: the longest turn in tokens
    (0: no limit); `prompt_tokens`: the number of tokens of the prompt.

    Raises:
        PeerError: "malformed", a reply of the environment differs, or the rollout ends elsewhere than it must.
        UserError: the environment fails.
    """
    tokens, mask = rollout.tokens, rollout.loss_mask
    reward, turns, start = 0.0, 0, 0
    while True:
        end = _turn_end(rules, turn_tokens, prompt_tokens, rollout, start)
        action = decoded(rules.tokenizer, tokens[start:end])
        reply = await step(action.partition(rules.stop)[0] if rules.stop else action)
        reward, turns = reward + reply.reward, turns + 1
        check_sum(reward)
        if reply.done:
            _require(end == len(tokens), f"it goes on after turn {turns}, with which it was over")
            _require(rollout.finish == "stop", "it was over, but is reported as cut off")
            return reward
        replied = reply_tokens(rules.tokenizer, rules.is_chat, reply.text, tokens[end - 1])
        is_cut = turns >= rules.max_turns or end + len(replied) >= rules.max_tokens
        if end == len(tokens):
            is_full = not rules.context or prompt_tokens + end + len(replied) >= rules.context
            _require(is_cut or is_full, f"it ends after turn {turns}, where it was not over")
            _require(rollout.finish == "length", "it was cut off, but is reported as over")
            return reward
        _require(not is_cut, f"it goes on after turn {turns}, where it was cut off")
        start = end + len(replied)
        is_same = tokens[end:start] == replied and not any(mask[end:start])
        _require(is_same and mask[start : start + 1] == b"\x01", f"the environment did not say this after turn {turns}")


def _turn_end(rules: TurnRules, turn_tokens: int, prompt_tokens: int, rollout: Rollout, start: int) -> int:
    """Return the end of the turn that begins at `start`: behind an end token, at the longest turn, or before the next
    reply of the environment. A reply may be empty, and then only the first two rules separate turns.
    """
    room = rules.max_tokens - start
    longest = min(room, turn_tokens or room, rules.context - prompt_tokens - start if rules.context else room)
    stretch = rollout.loss_mask.find(b"\x00", start)
    last = min(start + max(1, longest), len(rollout.tokens) if stretch < 0 else stretch)
    return next((at + 1 for at in range(start, last) if rollout.tokens[at] in rules.ends), last)


def _require(holds: bool, complaint: str) -> None:
    if not holds:
        raise PeerError("malformed", f"a rollout in an environment: {complaint}")


class EnvironmentReplay:
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

    async def replay(
        self, rules: TurnRules, lease: Lease, task: Task, group: RolloutGroup, seconds: float, is_own: bool
    ) -> RolloutGroup:
        """Return the group, each rollout with the environment's reward. `seconds`: until the lease ends. A rollout of
        a machine of the owner (`is_own`) on which the environment fails is lost, and the others stay.

        Raises:
            PeerError: "malformed": a rollout differs from the environment's replay of its turns; "late": the lease has
                ended.
            UserError: the environment fails: on a stranger's rollout, or on all.
        """
        begun = [
            self._environment.begin(task.columns, derived_seed(lease.seed, sample, ENVIRONMENT_SAMPLE))
            for sample in group.sample_numbers
        ]
        try:
            async with asyncio.timeout(seconds), together() as tasks:
                judging = [
                    tasks.create_task(self._replayed(rules, group, rollout, one, is_own))
                    for rollout, one in zip(group.rollouts, begun, strict=True)
                ]
        except TimeoutError as error:
            raise PeerError("late", "its lease ended before the environment had replayed it") from error
        finally:
            self._seconds[lease.lease_id] = sum(one.spent_seconds() for one in begun)
        replays = [one.result() for one in judging]
        errors = {
            sample: one for sample, one in zip(group.sample_numbers, replays, strict=True) if isinstance(one, UserError)
        }
        if len(errors) == len(replays):
            raise next(iter(errors.values()))
        lost = [LostRollout(sample, "environment_failed", str(error)) for sample, error in errors.items()]
        remaining_rollouts = tuple(one for one in replays if isinstance(one, Rollout))
        return replace(without(group, lost), rollouts=remaining_rollouts)

    async def _replayed(
        self, rules: TurnRules, group: RolloutGroup, rollout: Rollout, begun: RolloutHandle, is_own: bool
    ) -> Rollout | UserError:
        environment = self._environment
        async with self._room:
            try:
                turn_tokens, step = await environment.turn_tokens(begun), partial(environment.step, begun)
                reward = await replay_rollout(rules, turn_tokens, len(group.prompt_tokens), rollout, step)
            except UserError as error:
                if is_own and group.group.kind == "train":
                    return error
                raise
            finally:
                environment.end(begun)
        return replace(rollout, reward_parts={"environment": reward})
