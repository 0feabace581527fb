"""What forged behaviour logprobs within the wire's bounds do to the demo: held-out accuracy after N steps, by loss.

    make bench-hostile_logprobs ARGS='--model outputs/models/digit_sorting --steps 40'

No network: sampling, rewards and training steps are the run's own, one after the other, on-policy. Every other group
is a liar's, who edits the logprobs of honestly sampled tokens after the fact:

    honest      nothing
    one_-100    one token of each group has the least logprob that the wire takes
    one_-12     one has e^-12: the ratio to the policy is far beyond every cap and not beyond the clamp
    all_0       every token was certain
    all_random  each token has a logprob drawn evenly from -20 to 0

Prints one line for each loss and way of lying, the seeds side by side.
"""

from __future__ import annotations

import argparse
import asyncio
import random
from array import array
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from recording import there

from echo2.config import Config
from echo2.config.sections import LearnerConfig, RunConfig, SamplingConfig
from echo2.core.decide.seeds import group_seed
from echo2.core.types import (
    RUN_POLICY,
    Assignment,
    GroupKind,
    GroupRef,
    Lease,
    Rollout,
    RolloutGroup,
    SamplingParams,
    Snapshot,
    SnapshotRef,
)
from echo2.engines.registry import make_engine
from echo2.engines.tokenizer import Tokenizer, encode_prompt, load_tokenizer, with_texts
from echo2.learner.core.model import DTYPES, load_policy
from echo2.learner.grpo.loop import GrpoClient
from echo2.reward.score import Scorer
from echo2.rollouts import generate
from echo2.tasks.base import TaskStream
from echo2.tasks.streams import load_tasks
from echo2.transport.limits import LOGPROB_MIN

GROUP_SIZE = 8
MAX_TOKENS = 12
HELD_OUT = 256
DIGITS = {"min_digits": 5, "max_digits": 10}
Forgery = Callable[[random.Random, RolloutGroup], RolloutGroup]


def one(value: float) -> Forgery:
    def forge(rng: random.Random, group: RolloutGroup) -> RolloutGroup:
        first = group.rollouts[0]
        logprobs = array("f", first.logprobs)
        logprobs[rng.randrange(len(logprobs))] = value
        return replace(group, rollouts=(replace(first, logprobs=logprobs), *group.rollouts[1:]))

    return forge


def every(draw: Callable[[random.Random], float]) -> Forgery:
    def edited(rng: random.Random, rollout: Rollout) -> Rollout:
        return replace(rollout, logprobs=array("f", [draw(rng) for _ in rollout.logprobs]))

    return lambda rng, group: replace(group, rollouts=tuple(edited(rng, rollout) for rollout in group.rollouts))


FORGERIES: dict[str, Forgery] = {
    "honest": lambda _, group: group,
    "one_-100": one(LOGPROB_MIN),
    "one_-12": one(-12.0),
    "all_0": every(lambda _: 0.0),
    "all_random": every(lambda rng: rng.uniform(-20.0, 0.0)),
}


class Sampler:
    """An engine with the policy's weights, and what its answers are worth."""

    def __init__(self, seed: int) -> None:
        self._seed, self._engine = seed, make_engine("compact", "cpu")
        self._scorer = Scorer(["exact_match"])
        self._tokenizer: Tokenizer | None = None

    def load(self, trainer: GrpoClient) -> None:
        tensors = trainer.policy.tensors(DTYPES[trainer.config.model.snapshot_dtype])
        files = trainer.policy.files
        snapshot = Snapshot(SnapshotRef(RUN_POLICY, 1, trainer.version), tensors, files)
        asyncio.run(self._engine.update_weights(snapshot))
        self._tokenizer = self._tokenizer or load_tokenizer({name: bytes(data) for name, data in files.items()})

    def groups(self, kind: GroupKind, stream: TaskStream, cursors: range, size: int, step: int) -> list[RolloutGroup]:
        """Scored groups of these tasks, in order."""
        assert self._tokenizer is not None, "load weights first"
        tokenizer, params = self._tokenizer, SamplingParams(temperature=1.0, max_tokens=MAX_TOKENS)
        assignments, found = list[Assignment](), dict[int, RolloutGroup]()
        for cursor in cursors:
            group = GroupRef(RUN_POLICY, kind, cursor)
            lease = Lease(cursor, group, step, cursor, size, 0, None, 0.0, 0.0, group_seed(self._seed, group))
            task = stream.task(cursor)
            assignments.append(generate.assignment_of(lease, task, encode_prompt(task, tokenizer), params))

        def finished(group: RolloutGroup, lease: Lease) -> None:
            scored = self._scorer.score_each(stream.task(lease.cursor), with_texts(group.rollouts, tokenizer))
            found[lease.cursor] = replace(group, rollouts=tuple(one for one in scored if isinstance(one, Rollout)))

        asyncio.run(generate.sample_groups(self._engine, tokenizer, assignments, "w", finished, lambda *_: None))
        return [found[cursor] for cursor in cursors]


def accuracy_after(model: Path, loss: str, forge: Forgery, steps: int, groups: int, seed: int) -> float:
    """Held-out accuracy after so many steps of so many groups, every other of which is forged."""
    train = TaskStream(load_tasks("digit_sorting", {"split": "train", **DIGITS}, seed), seed, True)
    held_out = TaskStream(load_tasks("digit_sorting", {"split": "heldout", **DIGITS}, seed), seed, False)
    learner: dict[str, Any] = {"lr": 2e-4, "warmup_steps": 5, "advantage": "grpo", "loss": loss}
    config = Config(
        run=RunConfig(max_steps=steps),
        sampling=SamplingConfig(max_tokens=MAX_TOKENS),
        learner=LearnerConfig(**learner),
    )
    trainer, sampler, rng = (
        GrpoClient(load_policy(str(model), "float32", "cpu"), config),
        Sampler(seed),
        random.Random(seed),
    )
    for step in range(steps):
        sampler.load(trainer)
        batch = sampler.groups("train", train, range(step * groups, (step + 1) * groups), GROUP_SIZE, step)
        trainer.forward_backward([forge(rng, group) if at % 2 else group for at, group in enumerate(batch)])
        trainer.optim_step()
    sampler.load(trainer)
    answers = [r.reward or 0.0 for g in sampler.groups("eval", held_out, range(HELD_OUT), 1, steps) for r in g.rollouts]
    return sum(answers) / len(answers)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=there, required=True)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--groups", type=int, default=32)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--losses", nargs="+", default=["dppo"])
    parser.add_argument("--forgeries", nargs="+", choices=FORGERIES, default=list(FORGERIES))
    options = parser.parse_args()
    for loss in options.losses:
        for name in options.forgeries:
            found = [
                accuracy_after(options.model, loss, FORGERIES[name], options.steps, options.groups, seed)
                for seed in options.seeds
            ]
            print(f"{loss:10} {name:10} " + " ".join(f"{value:.3f}" for value in found), flush=True)


if __name__ == "__main__":
    main()
