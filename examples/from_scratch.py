"""Reinforcement learning from scratch, in one file: GRPO on one machine, over echo2's engine and trainer.

    make demo                              # once: makes the model
    .venv/bin/python examples/from_scratch.py

Everything that a researcher may want to change is here and is short: which tasks are sampled, the reward, the
advantage, the loss, and what is sampled while the learner trains. What is not here is what the framework is for:
machines that come and go, weights that travel, groups that are counted exactly once. docs/how-a-step-is-computed.md has
the formulas, and the place of each in the framework, where a loss or an advantage is one function, too.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import os
import time
from array import array
from collections.abc import Sequence
from dataclasses import dataclass

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported

import torch
from torch import Tensor

from echo2.core.types import RUN_POLICY, SamplingParams, Snapshot, SnapshotRef
from echo2.engines.engine import Completion, Engine, SampleRequest
from echo2.engines.registry import make_engine
from echo2.engines.tokenizer import load_tokenizer
from echo2.learner.core.datum import Datum
from echo2.learner.core.losses import LossTokens
from echo2.learner.core.model import load_policy
from echo2.learner.core.trainer import AdamParams, Trainer
from echo2.tasks.digit_sorting import DigitSorting

GROUPS, GROUP_SIZE, MAX_TOKENS = 32, 8, 12
LEARNING_RATE, WARMUP_STEPS = 2e-4, 5
CLIP_LOW, CLIP_HIGH = 0.2, 0.28
SEED = 0


@dataclass
class Rollout:
    """One answer to a task. `advantage` is set once its whole group has a reward."""

    prompt: array[int]
    completion: Completion
    reward: float
    advantage: float = 0.0


# ---- what you may want to change -------------------------------------------------------------------------------------


def tasks_of_step(step: int, tasks: DigitSorting) -> list[dict[str, str]]:
    """Which tasks a step trains on. A curriculum would look at earlier rewards here."""
    return [tasks[index % len(tasks)] for index in range(step * GROUPS, (step + 1) * GROUPS)]


def reward(text: str, task: dict[str, str]) -> float:
    return float(text.strip() == task["answer"])


def advantages(rewards: Sequence[float]) -> list[float]:
    """GRPO: relative to the group's mean, in its standard deviations (of the sample). Equal rewards teach nothing."""
    values = torch.tensor(rewards, dtype=torch.float64)
    return (
        ((values - values.mean()) / (values.std() + 1e-6)).tolist() if len(set(rewards)) > 1 else [0.0] * len(rewards)
    )


def loss(logp_n: Tensor, tokens: LossTokens) -> tuple[Tensor, float]:
    """PPO's clipped loss of each of n tokens, and the sum of |log ratio|, which says how stale the rollouts are.

    The ratio is the learner's probability over the sampler's, so it also corrects for rollouts of a version ago.
    """
    log_ratio_n = logp_n - tokens.behaviour_n
    ratio_n, clipped_n = log_ratio_n.exp(), log_ratio_n.exp().clamp(1 - CLIP_LOW, 1 + CLIP_HIGH)
    loss_n = -torch.minimum(ratio_n * tokens.advantage_n, clipped_n * tokens.advantage_n)
    return loss_n, float(log_ratio_n.detach().abs().sum())


# ---- the loop --------------------------------------------------------------------------------------------------------


class Loop:
    """A policy that is trained, and an engine that samples from its newest published version."""

    def __init__(self, model: str) -> None:
        policy = load_policy(model, "float32", "auto")
        self.tokenizer = load_tokenizer({name: bytes(data) for name, data in policy.files.items()})
        self.trainer = Trainer(tokens_per_microbatch=4096)
        self.trainer.add(RUN_POLICY, policy)
        self.engine: Engine = make_engine("compact", slots=GROUPS * GROUP_SIZE)

    async def publish(self, version: int) -> None:
        """Give the engine the current weights. Rollouts under way go on with them: each token knows its version."""
        lent = self.trainer.save_weights_for_sampler(RUN_POLICY, "float32")
        try:
            await self.engine.update_weights(Snapshot(SnapshotRef(RUN_POLICY, 1, version), lent.tensors, lent.files))
        finally:
            lent.release()

    async def sample(self, tasks: Sequence[dict[str, str]], seed: int, group_size: int) -> list[list[Rollout]]:
        """Return the group of each task. The same seed, tasks and weights give the same tokens."""
        return await asyncio.gather(*(self._group(task, seed + i, group_size) for i, task in enumerate(tasks)))

    async def _group(self, task: dict[str, str], seed: int, group_size: int) -> list[Rollout]:
        prompt = array("i", self.tokenizer.encode(task["prompt"], add_special_tokens=True))
        params = SamplingParams(max_tokens=MAX_TOKENS)
        requests = [SampleRequest(prompt, seed, sample, params) for sample in range(group_size)]
        group = []
        for outcome in await asyncio.gather(*map(self.engine.submit, requests)):
            if not isinstance(outcome, Completion):
                raise RuntimeError(f"a rollout failed: {outcome}")
            text = self.tokenizer.decode(list(outcome.tokens), skip_special_tokens=True)
            group.append(Rollout(prompt, outcome, reward(text, task)))
        for rollout, advantage in zip(group, advantages([one.reward for one in group]), strict=True):
            rollout.advantage = advantage
        return group

    def train(self, step: int, groups: Sequence[Sequence[Rollout]]) -> float:
        """Make one update from a step's groups, and return the mean |log ratio| of its tokens. Groups without an
        advantage are not run, but their tokens count in the divisor."""
        rollouts = list(itertools.chain.from_iterable(groups))
        num_tokens = sum(len(one.completion.tokens) for one in rollouts)
        data = [datum(one) for one in rollouts if one.advantage]
        sums = self.trainer.forward_backward(RUN_POLICY, data, loss).outputs if data else []
        rate = LEARNING_RATE * min(1.0, (step + 1) / WARMUP_STEPS)
        self.trainer.optim_step(RUN_POLICY, AdamParams(rate, grad_clip=1.0), divisor=num_tokens)
        return sum(sums) / max(1, sum(len(one.tokens) for one in data))

    async def accuracy(self, tasks: DigitSorting) -> float:
        groups = await self.sample([tasks[index] for index in range(256)], seed=1, group_size=1)
        return sum(one.reward for [one] in groups) / len(groups)


def datum(rollout: Rollout) -> Datum:
    """The rollout as the trainer takes it: every token that the policy drew is in the loss."""
    drawn = rollout.completion
    return Datum(
        prompt_tokens=rollout.prompt,
        tokens=drawn.tokens,
        loss_mask=b"\x01" * len(drawn.tokens),
        advantages=array("d", [rollout.advantage]) * len(drawn.tokens),
        behaviour_logprobs=drawn.logprobs,
        version_spans=drawn.version_spans,
    )


async def main(model: str, num_steps: int, staleness: int) -> float:
    """Train, and return the held-out accuracy."""
    loop, tasks, held_out = Loop(model), DigitSorting("train"), DigitSorting("heldout")
    await loop.publish(0)
    print(f"held-out accuracy before: {await loop.accuracy(held_out):.3f}", flush=True)
    sampling: list[asyncio.Task[list[list[Rollout]]]] = []
    begun = time.monotonic()
    for step in range(num_steps):
        # A step's groups were begun `staleness` versions ago, and are sampled while earlier steps are trained.
        while len(sampling) <= staleness and step + len(sampling) < num_steps:
            wanted = step + len(sampling)
            seed = SEED + 1_000_000 * (wanted + 1)
            sampling.append(asyncio.create_task(loop.sample(tasks_of_step(wanted, tasks), seed, GROUP_SIZE)))
        groups = await sampling.pop(0)
        off_policy = await asyncio.to_thread(loop.train, step, groups)
        await loop.publish(step + 1)
        mean = sum(one.reward for group in groups for one in group) / (GROUPS * GROUP_SIZE)
        seconds = (time.monotonic() - begun) / (step + 1)
        print(f"step {step + 1}: reward {mean:.3f}, |log ratio| {off_policy:.4f}, {seconds:.2f} s a step", flush=True)
    result = await loop.accuracy(held_out)
    print(f"held-out accuracy after:  {result:.3f}")
    return result


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="outputs/models/digit_sorting")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--staleness", type=int, default=1, help="0: a step is sampled after the one before is trained")
    options = parser.parse_args()
    asyncio.run(main(options.model, options.steps, options.staleness))
