"""Samples and scores groups on this machine without a head, for `echo2 probe` and `echo2 eval`."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from echo2 import config as configuration
from echo2.config.values import SERVERS
from echo2.core.background import close_all
from echo2.core.decide.seeds import group_seed
from echo2.core.errors import UserError
from echo2.core.types import (
    RUN_POLICY,
    Assignment,
    GroupKind,
    GroupRef,
    Lease,
    Rollout,
    RolloutGroup,
    Snapshot,
    SnapshotRef,
)
from echo2.engines.engine import Engine
from echo2.engines.registry import EngineChoice, chosen, make_engine, servers_here
from echo2.engines.tokenizer import encode_prompt, load_tokenizer, with_texts
from echo2.learner.core.fitting import model_config
from echo2.reward.judge import open_judge
from echo2.reward.reward_processes import RewardProcesses
from echo2.rollouts import generate
from echo2.rollouts.verification import PrefillEngine, check_group
from echo2.tasks.streams import held_out_tasks, training_tasks
from echo2.transport.regroup import as_one_row
from echo2.weights.format.adapter_files import ADAPTER_CONFIG
from echo2.worker.sampling import open_environment

if TYPE_CHECKING:
    from echo2.engines.tokenizer import Tokenizer


def load_engine(config: configuration.Config, model: str, slots: int) -> tuple[Engine, Tokenizer]:
    """Return the run's engine with the weights of `model` (a directory or a hub id), and the model's tokenizer. An
    adapter is merged into the run's model.

    Raises:
        UserError: there is no such model, or the engine cannot run it.
    """
    from echo2.learner.core.adapters import load_merged  # imported here: nothing else in planning needs torch
    from echo2.learner.core.model import DTYPES, load_policy

    choice = local_engine(config, model)
    device = "cpu" if choice.name in SERVERS else "auto"  # a server takes most of a GPU
    if (Path(model) / ADAPTER_CONFIG).is_file():
        policy = load_merged(config.model.path, Path(model), device, config.learner.quantised == "base")
    else:
        policy = load_policy(model, "float32", device)
    tensors = policy.tensors(DTYPES[config.model.snapshot_dtype])
    files = {name: bytes(data) for name, data in policy.files.items()}
    engine = make_engine(choice.name, slots=slots)
    asyncio.run(engine.update_weights(Snapshot(SnapshotRef(RUN_POLICY, 1, 0), tensors, policy.files)))
    return engine, load_tokenizer(files, config.model.chat_template_args)


def local_engine(config: configuration.Config, model: str) -> EngineChoice:
    """Return the engine of a worker on this machine that has a GPU for itself, if there is one."""
    return chosen(config, model_config(model), servers_here("auto"))


@asynccontextmanager
async def reward_processes(config: configuration.Config) -> AsyncIterator[RewardProcesses]:
    """Start the run's reward functions; their output is discarded.

    Raises:
        UserError: a function cannot be loaded.
    """
    with TemporaryDirectory() as folder:
        log_path = Path(folder) / "reward.log"
        reward, judge = config.reward, open_judge(config)
        processes = RewardProcesses(reward.functions, reward.timeout_seconds, log_path, judge=judge)
        try:
            await processes.start()
            yield processes
        finally:
            await processes.close()


class LocalSampler:
    """Samples groups as a worker does: of training tasks in their shuffled order (`kind` "train"), or `eval.samples`
    rollouts of each held-out task ("eval"). `greedy`: the likeliest token each time. `failures`: why groups are
    missing, in order of failure.
    """

    def __init__(
        self,
        config: configuration.Config,
        kind: GroupKind,
        engine: Engine,
        tokenizer: Tokenizer,
        clock: Callable[[], float] = time.perf_counter,
        greedy: bool = False,
    ) -> None:
        is_eval = kind == "eval"
        judged = held_out_tasks(config.eval, config.run.seed) if is_eval else None
        self.tasks = judged if judged is not None else training_tasks(config.tasks, config.run.seed)
        self.failures: list[str] = []
        self._config, self._kind, self._engine, self._tokenizer, self._clock = config, kind, engine, tokenizer, clock
        self._num_samples = config.eval.samples if is_eval else config.sampling.group_size
        params = config.eval_params if is_eval else config.sampling_params
        self._params = replace(params, top_k=1) if greedy else params
        name = config.tasks.environment
        self._environments = {name: open_environment(name)} if name else {}

    async def sample(self, cursors: Iterable[int]) -> list[RolloutGroup]:
        """Sample one group per cursor, all at once, and return the groups in order of completion."""
        assignments: list[Assignment] = []
        for cursor in cursors:
            try:
                assignments.append(self._assignment(cursor))
            except UserError as error:  # concerns this task's prompt only
                self.failures.append(str(error))
        for environment in self._environments.values():
            await environment.start()
        groups: list[RolloutGroup] = []
        await generate.sample_groups(
            self._engine,
            self._tokenizer,
            assignments,
            "local",
            lambda group, _: groups.append(group),
            lambda _, failure: self.failures.append(failure.detail),
            self._environments,
            self._clock,
        )
        return groups

    async def score(self, processes: RewardProcesses, group: RolloutGroup) -> tuple[tuple[Rollout, ...], float]:
        """Return the group's rollouts with texts and rewards, each as one row, and the seconds that scoring took.

        Raises:
            RewardFailure: as `RewardProcesses.score`.
        """
        read = replace(group, rollouts=with_texts(group.rollouts, self._tokenizer))
        return await processes.score(self.tasks.task(group.cursor), as_one_row(read))

    def prompt_tokens(self, cursor: int) -> int:
        """Return the length of a task's prompt."""
        return len(encode_prompt(self.tasks.task(cursor), self._tokenizer))

    async def mismatch(self, reader: PrefillEngine, ref: SnapshotRef, groups: Iterable[RolloutGroup]) -> float | None:
        """Return the mean |log ratio| of the groups' tokens to what a reader with other weights says of them, in nats a
        token; None if it can judge none."""
        verdicts = [await check_group(reader, ref, self._assignment(group.cursor), group) for group in groups]
        num_tokens = sum(one.num_tokens for one in verdicts)
        return sum(one.mean_logprob * one.num_tokens for one in verdicts) / num_tokens if num_tokens else None

    async def aclose(self) -> None:
        """End environments and engine. An interpreter that ends while its thread computes would abort."""
        await close_all(*(one.close for one in self._environments.values()), self._engine.close)

    def _assignment(self, cursor: int) -> Assignment:
        group, task = GroupRef(RUN_POLICY, self._kind, cursor), self.tasks.task(cursor)
        seed = group_seed(self._config.run.seed, group)
        lease = Lease(cursor, group, 0, cursor, self._num_samples, 0, 0, 0.0, 0.0, seed)
        turns = (self._config.tasks.environment, self._config.sampling.max_turns)
        return generate.assignment_of(lease, task, encode_prompt(task, self._tokenizer), self._params, *turns)
