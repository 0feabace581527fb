"""`echo2 eval` and `echo2 export`: a checkpoint, judged or handed on, without any head."""

from __future__ import annotations

import shutil
import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import track

from echo2 import config as configuration
from echo2.control.seeds import group_seed
from echo2.errors import UserError
from echo2.learner import checkpoint
from echo2.reward.score import Scorer
from echo2.rollout import generate
from echo2.rollout.engine import RequestFailure
from echo2.rollout.engines import make_engine
from echo2.rollout.tokenizer import Tokenizer, encode_prompt, load_tokenizer, with_texts
from echo2.runtime.rundir import RunDir
from echo2.tasks.base import TaskStream
from echo2.tasks.environment_process import open_world
from echo2.tasks.load import load_tasks
from echo2.types import Assignment, GroupRef, Lease, RolloutGroup, Snapshot, SnapshotRef, Task

#: Tasks sampled together.
BATCH_TASKS = 64
#: Files of a checkpoint that are the learner's own, not the model's.
LEARNER_FILES = ("optimizer.safetensors", "state.json")


def checkpoint_directory(rundir: RunDir, step: int | None) -> Path:
    """The checkpoint of `step`, or the newest.

    Raises:
        UserError: there is none, or this is no run directory.
    """
    rundir.read_config()
    steps = rundir.checkpoints
    found = checkpoint.latest(steps) if step is None else checkpoint.step_directory(steps, step)
    if found is None or not found.is_dir():
        have = sorted(entry.name for entry in rundir.checkpoints.glob("step_*"))
        wanted = "" if step is None else f" step_{step}"
        raise UserError(f"{rundir.path} has no checkpoint{wanted}; there are: {', '.join(have) or 'none yet'}.")
    return found


def evaluate(target: Path, step: int | None, model: str, overrides: Mapping[str, str]) -> dict[str, Any]:
    """Sample the held-out tasks once each and score them in this process.

    Raises:
        UserError: no such run, model or tasks; a reward function failed.
    """
    from echo2.learner.model import DTYPES, load_policy  # here: `export` is no reason to load torch

    rundir = RunDir(target) if target.is_dir() else None
    config = configuration.load(rundir.config if rundir is not None else target, overrides)
    where = model or (str(checkpoint_directory(rundir, step)) if rundir is not None else config.model.path)
    held_out = config.eval if config.eval.source else config.tasks
    tasks = load_tasks(held_out.source, held_out.params, config.run.seed)
    stream = TaskStream(tasks, config.run.seed, False)
    policy = load_policy(where, config.model.dtype, config.workers.device)
    snapshot = Snapshot(SnapshotRef(1, 0), policy.tensors(DTYPES[config.model.snapshot_dtype]), policy.files)
    engine = make_engine(config.workers.engine, config.workers.device, "between")
    engine.load_snapshot(snapshot)
    tokenizer = load_tokenizer({name: bytes(data) for name, data in snapshot.files.items()})
    environment = config.tasks.environment
    worlds = {environment: open_world(environment)} if environment else {}
    scorer = Scorer(list(config.reward.functions), list(config.reward.weights))
    rewards: list[float] = []
    failures: list[str] = []
    console = Console(stderr=True)
    size = min(config.eval.limit, len(tasks))
    batches = [range(first, min(first + BATCH_TASKS, size)) for first in range(0, size, BATCH_TASKS)]
    for cursors in track(batches, "evaluating", console=console, transient=True, disable=not console.is_terminal):
        assignments = []
        for cursor in cursors:
            try:
                assignments.append(_assignment(config, stream.task(cursor), tokenizer))
            except UserError as error:  # the prompt of this one
                failures.append(str(error))

        def score(group: RolloutGroup, lease: Lease) -> None:
            scored = scorer.score(stream.task(lease.cursor), with_texts(group.rollouts, tokenizer))
            rewards.extend(rollout.reward for rollout in scored if rollout.reward is not None)

        def failed(lease: Lease, failure: RequestFailure) -> None:
            failures.append(failure.detail)

        generate.sample_groups(engine, tokenizer, assignments, 1, "eval", score, failed, worlds=worlds)
    if not rewards:
        raise UserError(
            f"No held-out task could be evaluated. The last failure: {failures[-1] if failures else 'none'}"
        )
    return {
        "model": where,
        "eval/accuracy": statistics.fmean(rewards),
        "eval/num_tasks": len(rewards),
        "eval/num_failed": len(failures),
    }


def _assignment(config: configuration.Config, task: Task, tokenizer: Tokenizer) -> Assignment:
    group = GroupRef("eval", task.cursor)
    seed = group_seed(config.run.seed, group)
    lease = Lease(task.cursor, group, 0, task.cursor, 1, 0, 0, 0.0, 0.0, seed)
    turns = (config.tasks.environment, config.sampling.max_turns)
    return generate.assignment_of(lease, task, encode_prompt(task, tokenizer), config.eval_params, *turns)


def export(directory: Path, step: int | None, to: Path) -> str:
    """Copy the model part of a checkpoint to `to`, a directory that must not exist; the checkpoint's name.

    Raises:
        UserError: no such checkpoint; the target exists or can't be written.
    """
    source = checkpoint_directory(RunDir(directory), step)
    if to.exists():
        raise UserError(f"{to} exists already. Choose another directory with --to.")
    partial = to.with_name(f".{to.name}.partial")
    try:
        shutil.copytree(source, partial, ignore=shutil.ignore_patterns(*LEARNER_FILES))
        partial.rename(to)
    except OSError as error:
        shutil.rmtree(partial, ignore_errors=True)
        raise UserError(f"Cannot write {to}: {error.strerror or error}. Nothing was exported.") from error
    return source.name
