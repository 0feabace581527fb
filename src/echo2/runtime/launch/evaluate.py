"""`echo2 eval` and `echo2 export`: a checkpoint, judged or handed on, without any head."""

from __future__ import annotations

import asyncio
import json
import shutil
import statistics
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import aclosing, contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import track

from echo2 import config as configuration
from echo2.documents import parse_json
from echo2.errors import UserError
from echo2.learner import checkpoint
from echo2.planning.local_sampler import LocalSampler, load_engine, reward_processes
from echo2.printable import printable
from echo2.reward.process import RewardProcesses
from echo2.reward.score import RewardFailure
from echo2.rundir import RunDir
from echo2.types import RolloutGroup
from echo2.weights.adapter_files import ADAPTER_CONFIG

#: Tasks sampled together, and then scored.
BATCH_TASKS = 64
#: Files of a checkpoint that are the learner's own, not the model's.
LEARNER_FILES = ("optimizer.safetensors", "state.json")
MODEL_FILE = "model.safetensors"
#: What each of several ranks wrote.
PARTS = "*.*-of-*.safetensors"


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
    """Sample the held-out tasks once each and score them as a run does.

    Raises:
        UserError: no such run, model or tasks; no task could be evaluated.
    """
    rundir = RunDir(target) if target.is_dir() else None
    config = configuration.load(rundir.config if rundir is not None else target, overrides)
    where = model or (str(checkpoint_directory(rundir, step)) if rundir is not None else config.model.path)
    with _whole(where) as directory:
        sampler = LocalSampler(config, "eval", *load_engine(config, directory, BATCH_TASKS))
    rewards = asyncio.run(_rewards(config, sampler))
    failures = sampler.failures
    if not rewards:
        raise UserError(
            f"No held-out task could be evaluated. The last failure: {failures[-1] if failures else 'none'}"
        )
    if failures:
        print(f"warning: {len(failures)} tasks failed; the last: {printable(failures[-1])}", file=sys.stderr)
    return {
        "model": where,
        "eval/accuracy": statistics.fmean(rewards),
        "eval/num_tasks": len(rewards),
        "eval/num_failed": len(failures),
    }


@contextmanager
def _whole(where: str) -> Iterator[str]:
    """A model directory, or a checkpoint of several ranks as one."""
    if not any(Path(where).glob(PARTS)):
        yield where
        return
    with tempfile.TemporaryDirectory() as directory:
        copy_model(Path(where), Path(directory))
        yield directory


def copy_model(source: Path, to: Path) -> None:
    """Copy the model part of a checkpoint to the directory `to`, what several ranks wrote as one file.

    Raises:
        UserError: not all ranks' parts are there.
    """
    from echo2.learner.shard_files import write_whole

    shutil.copytree(source, to, ignore=shutil.ignore_patterns(*LEARNER_FILES, PARTS), dirs_exist_ok=True)
    if any(source.glob(PARTS)):
        write_whole(source, MODEL_FILE, to / MODEL_FILE)


async def _rewards(config: configuration.Config, sampler: LocalSampler) -> list[float]:
    """Of all held-out tasks that could be sampled and scored, task by task."""
    size, console = min(config.eval.limit, sampler.num_tasks), Console(stderr=True)
    rewards: list[float] = []
    batches = [range(first, min(first + BATCH_TASKS, size)) for first in range(0, size, BATCH_TASKS)]

    async def score(processes: RewardProcesses, group: RolloutGroup) -> None:
        try:
            rollouts, _ = await sampler.score(processes, group)
        except RewardFailure as failure:
            sampler.failures.append(str(failure))
        else:
            rewards.extend(rollout.reward for rollout in rollouts if rollout.reward is not None)

    async with aclosing(sampler), reward_processes(config) as processes:
        for cursors in track(batches, "evaluating", console=console, transient=True, disable=not console.is_terminal):
            groups = await sampler.sample(cursors)
            await asyncio.gather(*(score(processes, group) for group in groups))
    return rewards


def export(directory: Path, step: int | None, to: Path, is_merged: bool = False) -> str:
    """Copy the model part of a checkpoint to `to`, a directory that must not exist; the checkpoint's name. An adapter's
    is a PEFT directory; `is_merged`: the whole model that it makes of its base, in float32.

    Raises:
        UserError: no such checkpoint; the target exists or can't be written; there is nothing to merge.
    """
    rundir = RunDir(directory)
    source, base = checkpoint_directory(rundir, step), rundir.read_config().model.path
    if to.exists():
        raise UserError(f"{to} exists already. Choose another directory with --to.")
    is_adapter = (source / ADAPTER_CONFIG).is_file()
    if is_merged and not is_adapter:
        raise UserError(f"--merged: {source.name} is a whole model already, not an adapter. Leave --merged out.")
    partial = to.with_name(f".{to.name}.partial")
    try:
        if is_merged:
            from echo2.learner.adapters import load_merged  # with torch, which a copy does not need

            policy = load_merged(base, source, "cpu")
            policy.module.save_pretrained(partial)
            for name, data in policy.files.items():
                (partial / name).write_bytes(data)
        else:
            copy_model(source, partial)
        if is_adapter and not is_merged:
            values = parse_json((partial / ADAPTER_CONFIG).read_bytes())
            text = json.dumps(values | {"base_model_name_or_path": base}, indent=2, sort_keys=True)
            (partial / ADAPTER_CONFIG).write_text(text)
        partial.rename(to)
    except OSError as error:
        shutil.rmtree(partial, ignore_errors=True)
        raise UserError(f"Cannot write {to}: {error.strerror or error}. Nothing was exported.") from error
    return source.name
