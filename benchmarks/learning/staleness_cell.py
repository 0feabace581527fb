"""One cell of the staleness grid: a loss at a fixed lag, trained in this process, without network and without a clock.

The parts are the product's own: the learner's `GrpoClient`, an engine, the task stream, the reward. Step t is sampled
with version max(0, t - S) and nothing else, so that the staleness of every token is S after a ramp of S steps.
Snapshots of the last S + 1 versions wait in memory.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from echo2.config import Config
from echo2.core.decide.seeds import group_seed
from echo2.core.errors import InvariantError, UserError
from echo2.core.types import RUN_POLICY, GroupRef, Lease, Rollout, RolloutGroup, Snapshot, SnapshotRef, Task
from echo2.engines.registry import make_engine
from echo2.engines.tokenizer import encode_prompt, load_tokenizer, with_texts
from echo2.learner.core.adapters import Adapter, load_trained
from echo2.learner.core.model import DTYPES, Policy
from echo2.learner.grpo.loop import GrpoClient
from echo2.learner.grpo.step_meter import StepStats
from echo2.reward.score import Scorer
from echo2.rollouts.generate import assignment_of, sample_groups
from echo2.tasks.streams import held_out_tasks, training_tasks

EVAL_ATTEMPTS = 4  # of each held-out problem


class Sampling:
    """The workers' side: an engine, and the snapshots that it may be given."""

    def __init__(self, config: Config, seed: int, engine: str) -> None:
        self._config, self._seed = config, seed
        self._params = config.sampling_params
        self._engine = make_engine(engine, "cpu")
        self._scorer = Scorer(config.reward.functions)
        self._snapshots: dict[int, Snapshot] = {}
        self._train = training_tasks(config.tasks, seed)
        held_out = held_out_tasks(config.eval, 0)
        assert held_out is not None, "the config names no held-out problems"
        self._held_out = held_out

    def keep(self, trainer: GrpoClient, oldest: int) -> None:
        """Take the trainer's weights; forget versions before `oldest`."""
        policy = trainer.policy
        tensors, files = policy.tensors(DTYPES[self._config.model.snapshot_dtype]), policy.files
        if not self._snapshots:
            self._tokenizer = load_tokenizer(files)
            self._base = policy.base.snapshot if isinstance(policy, Adapter) else None
        ref = SnapshotRef(RUN_POLICY, 0, trainer.version)
        self._snapshots[trainer.version] = Snapshot(ref, tensors, files, policy.base_model)
        self._snapshots = {version: kept for version, kept in self._snapshots.items() if version >= oldest}

    def step_groups(self, step: int, version: int) -> list[RolloutGroup]:
        """The groups of one training step, scored, in order of issue, all sampled by `version`."""
        per_step = self._config.schedule.groups_per_step
        tasks = [self._train.task(cursor) for cursor in range(step * per_step, (step + 1) * per_step)]
        return self._sample("train", tasks, step, version, self._config.sampling.group_size, per_step)

    def accuracy(self, version: int) -> float:
        """Share of right answers to the held-out problems, sampled like the rollouts."""
        tasks = [self._held_out.task(cursor) for cursor in range(len(self._held_out))]
        groups = self._sample("eval", tasks, version, version, EVAL_ATTEMPTS, len(tasks))
        return statistics.fmean(rollout.reward or 0.0 for group in groups for rollout in group.rollouts)

    def _sample(
        self, kind: Any, tasks: Sequence[Task], step: int, version: int, num_samples: int, batch: int
    ) -> list[RolloutGroup]:
        if self._engine.installed != (snapshot := self._snapshots[version]).ref:
            base = None if self._engine.base_model == snapshot.base_model else self._base
            asyncio.run(self._engine.update_weights(snapshot, base))
        refs = [
            GroupRef(RUN_POLICY, kind, task.cursor if kind == "train" else version * batch + task.cursor)
            for task in tasks
        ]
        assignments = [
            assignment_of(
                Lease(
                    ref.number,
                    ref,
                    step,
                    task.cursor,
                    num_samples,
                    version,
                    version,
                    0.0,
                    0.0,
                    group_seed(self._seed, ref),
                ),
                task,
                encode_prompt(task, self._tokenizer),
                self._params,
            )
            for ref, task in zip(refs, tasks, strict=True)
        ]
        by_cursor = {task.cursor: task for task in tasks}
        done: list[RolloutGroup] = []

        def finish(group: RolloutGroup, _: Lease) -> None:
            read = with_texts(group.rollouts, self._tokenizer)
            scored = self._scorer.score_each(by_cursor[group.cursor], read)
            done.append(replace(group, rollouts=tuple(one for one in scored if isinstance(one, Rollout))))

        def fail(lease: Lease, failure: Any) -> None:
            raise InvariantError(f"{lease.group} failed: {failure}")

        asyncio.run(sample_groups(self._engine, self._tokenizer, assignments, "grid", finish, fail))
        return sorted(done, key=lambda group: group.group)


def train_cell(
    config: Config,
    staleness: int,
    seed: int,
    steps: int,
    engine: str = "compact",
    make_client: Callable[[Policy, Config], GrpoClient] = GrpoClient,
) -> dict[str, Any]:
    """Train one cell from the config's model; its accuracies and the mismatch between them."""
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    config = replace(config, run=replace(config.run, max_steps=steps))
    trainer = make_client(load_trained(config, "cpu"), config)
    sampling = Sampling(config, seed, engine)
    sampling.keep(trainer, 0)
    started = time.process_time()
    points: list[dict[str, float]] = [{"step": 0, "accuracy": sampling.accuracy(0)}]
    since: list[StepStats] = []
    rewards: list[float] = []
    diverged: str | None = None
    for step in range(steps):
        version = max(0, step - staleness)
        groups = sampling.step_groups(step, version)
        if {group.oldest_version for group in groups} != {version}:
            raise InvariantError(f"step {step} was to be sampled by version {version} alone")
        rewards += [rollout.reward or 0.0 for group in groups for rollout in group.rollouts]
        trainer.forward_backward(groups)
        try:
            since.append(trainer.optim_step())
        except UserError as error:
            diverged = f"step {step}: {error}"
            break
        sampling.keep(trainer, max(0, trainer.version - staleness))
        if trainer.version % config.eval.every == 0 or trainer.version == steps:
            accuracy = sampling.accuracy(trainer.version)
            points.append({"step": trainer.version, "accuracy": accuracy} | means(since, rewards))
            since, rewards = [], []
    return {"points": points, "diverged": diverged, "cpu_seconds": round(time.process_time() - started, 1)}


def means(steps: Sequence[StepStats], rewards: Sequence[float]) -> dict[str, float]:
    """What the steps between two evaluations had on average; the mismatch is a mean over their tokens."""
    total = sum((step.losses for step in steps[1:]), steps[0].losses)
    tokens = max(1.0, total.tokens)
    return {
        "abs_log_ratio": total.abs_log_ratio / tokens,
        "k3": total.k3 / tokens,
        "dropped_positive": total.dropped_positive / tokens,
        "dropped_negative": total.dropped_negative / tokens,
        "vetoed": total.vetoed_sequences / max(1.0, total.sequences),
        "ess": statistics.fmean(step.losses.ess_ratio for step in steps),
        "grad_norm": statistics.fmean(step.grad_norm for step in steps),
        "lr": statistics.fmean(step.lr for step in steps),
        "reward": statistics.fmean(rewards),
        "tokens_per_step": statistics.fmean(step.num_tokens for step in steps),
    }
