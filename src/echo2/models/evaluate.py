"""`echo2 eval`: evaluates a checkpoint without a head, by set of held-out tasks, and shows what the model wrote."""

from __future__ import annotations

import argparse
import asyncio
import json
import shutil
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import aclosing, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import IO, Any, Literal

from rich.console import Console
from rich.progress import track

from echo2 import config as configuration
from echo2.config.rundir import RunDir, accuracies, best_version, read_metrics
from echo2.core.errors import UserError, counted, write_failed
from echo2.core.printable import LINE_CHARS_MAX, PlainLines, printable
from echo2.core.types import RolloutGroup
from echo2.head.ledger.books import eval_metrics
from echo2.head.ledger.rollout_log import best_and_worst, group_record, sample_line
from echo2.learner.core import checkpoint
from echo2.reward.reward_processes import RewardProcesses
from echo2.reward.score import RewardFailure
from echo2.weights.format.adapter_files import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from echo2.worker.alone import LocalSampler, load_engine, reward_processes

#: Number of tasks sampled, and then scored, together.
BATCH_TASKS = 64
#: Which tasks were evaluated.
HELD_OUT, TRAINING = "held-out", "training"
#: Settings of training rollouts alone.
NOT_OF_EVALUATIONS = frozenset({"sampling.temperature", "sampling.top_p", "sampling.top_k", "sampling.min_p"})
#: Files of a checkpoint that are the learner's own, not the model's.
LEARNER_FILES = ("optimizer.safetensors", "state.json")
MODEL_FILE = "model.safetensors"
#: Selects a checkpoint: of a step, of the version with the best held-out reward, or (None) the newest.
Step = int | Literal["best"] | None
#: Files of single ranks, in a checkpoint of several ranks.
PARTS = "*.*-of-*.safetensors"


def checkpoint_directory(rundir: RunDir, step: Step) -> Path:
    """Return the directory of the checkpoint of `step`.

    Raises:
        UserError: there is no such checkpoint, or this is not a run directory.
    """
    rundir.read_config()
    steps = rundir.checkpoints
    if step == "best":
        step = best_version(checkpoint.versions(steps), accuracies(read_metrics(rundir.metrics)))
        if step is None:
            raise UserError(
                f"{rundir.path} has no checkpoint of a version that was evaluated. Name a step; for the next run, make "
                "eval.every a multiple of learner.checkpoint_every."
            )
    directory = checkpoint.latest(steps) if step is None else checkpoint.step_directory(steps, step)
    if directory is None or not directory.is_dir():
        have = sorted(entry.name for entry in rundir.checkpoints.glob("step_*"))
        step_name = "" if step is None else f" step_{step}"
        raise UserError(f"{rundir.path} has no checkpoint{step_name}; there are: {', '.join(have) or 'none yet'}.")
    return directory


def run(options: argparse.Namespace) -> int:
    """Print the result of `evaluate`. Raises as `evaluate`."""
    values = evaluate(options.target, options.step, options.model, options.overrides, options.to, options.greedy)
    if options.json:
        print(json.dumps(values))
    else:
        console = Console()
        for line in report(values, console.width):
            console.print(line, highlight=False, markup=False, soft_wrap=True)
    return 0


def report(values: Mapping[str, Any], width: int) -> list[str]:
    """Return the lines for people: the held-out reward, that of each set with its best and its worst rollout, the
    share solved of several samples, and what failed."""
    reward, on = f"reward {values['eval/accuracy']:.4f} on {values['eval/num_tasks']}", f"({values['model']})"
    lines = [f"held-out {reward} tasks {on}"]
    if values["tasks"] == TRAINING:
        lines = [f"{reward} training tasks {on}: there are no held-out ones. Name some by --eval.source FILE"]
    solved = {name: value for name, value in values.items() if name.startswith("eval/pass@")}
    if solved:
        lines.append("  ".join(f"{name.removeprefix('eval/')} {value:.4f}" for name, value in solved.items()))
    lines.append(
        f"mean length {values['eval/mean_length']:.0f} tokens; {counted(int(values['eval/num_failed']), 'task')} failed"
    )
    for name, one_set in values["sets"].items():
        if name:
            lines.append(
                f"{printable(name)}: reward {one_set['reward']:.4f} on {counted(int(one_set['num_tasks']), 'task')}"
            )
        lines += [f"  {sample_line(one, min(width, LINE_CHARS_MAX) - 2)}" for one in one_set["samples"]]
    return lines


def evaluate(
    target: Path, step: Step, model: str, overrides: Mapping[str, str], to: Path | None = None, greedy: bool = False
) -> dict[str, Any]:
    """Sample the held-out tasks, `eval.samples` rollouts each, and score them as a run does. Return the metrics, and
    under `sets` of each set the mean reward, the number of tasks, and the best and the worst rollout. `to`: a new file
    for all rollouts, one task a line, in the form of a run's `rollouts/eval_N.jsonl`. `greedy`: take the likeliest
    token each time, in place of sampling as a run does.

    Raises:
        UserError: no such run, model or tasks; no task could be evaluated; the file exists or cannot be written; a
            setting has no effect here.
    """
    if unheard := sorted(NOT_OF_EVALUATIONS & overrides.keys()):
        raise UserError(
            f"--{unheard[0]} {overrides[unheard[0]]} has no effect on an evaluation, which samples from the whole "
            "distribution at temperature 1. Leave it out; --greedy takes the likeliest token each time."
        )
    with _new_file(to) as file:
        return _evaluate(target, step, model, overrides, file, greedy)


@contextmanager
def _new_file(path: Path | None) -> Iterator[IO[str] | None]:
    """Open a file that must not exist yet. If nothing was written, it is removed."""
    if path is None:
        yield None
        return
    try:
        file = open(path, "x", buffering=1, encoding="utf-8")  # noqa: SIM115 (closed below)
    except FileExistsError as error:
        raise UserError(f"{path} exists: choose another --to.") from error
    except OSError as error:
        raise write_failed(error, f"Cannot write {path}: {error.strerror}.") from error
    try:
        yield file
    finally:
        with suppress(OSError):  # of a write that failed, and was told; it would be made again
            file.close()
        if not path.stat().st_size:
            path.unlink()


def _evaluate(
    target: Path, step: Step, model: str, overrides: Mapping[str, str], file: IO[str] | None, greedy: bool
) -> dict[str, Any]:
    rundir = RunDir(target) if target.is_dir() else None
    config = configuration.load(rundir.config if rundir is not None else target, overrides)
    where = model or (str(checkpoint_directory(rundir, step)) if rundir is not None else config.model.path)
    with _whole(where) as directory:
        sampler = LocalSampler(config, "eval", *load_engine(config, directory, BATCH_TASKS), greedy=greedy)
    groups = asyncio.run(_scored(config, sampler, file))
    failures, kind = sampler.failures, HELD_OUT if config.eval.source else TRAINING
    if not groups:
        raise UserError(f"No {kind} task could be evaluated. The last failure: {failures[-1] if failures else 'none'}")
    if failures:
        print(f"warning: {counted(len(failures), 'task')} failed; the last: {printable(failures[-1])}", file=sys.stderr)
    metrics = eval_metrics(groups, len(failures), sampler.tasks.source_of)
    return {"model": where, "tasks": kind, **metrics, "sets": _by_set(groups, sampler)}


def _by_set(groups: Iterable[RolloutGroup], sampler: LocalSampler) -> dict[str, Any]:
    """Return of each set, by name, the mean reward, the number of tasks, and the best and the worst rollout. The name
    of a single set is empty."""
    records_by_set: dict[str, list[dict[str, Any]]] = {}
    for group in sorted(groups, key=lambda group: group.cursor):
        record = group_record(group, sampler.tasks.task(group.cursor))
        records_by_set.setdefault(sampler.tasks.source_of(group.cursor), []).append(record)
    return {
        name: {
            "reward": fmean(fmean(one["reward"] for one in record["rollouts"]) for record in records),
            "num_tasks": len(records),
            "samples": best_and_worst(records),
        }
        for name, records in sorted(records_by_set.items())
    }


@contextmanager
def _whole(where: str) -> Iterator[str]:
    """Yield a model directory; a checkpoint of several ranks is joined into a temporary one."""
    if not any(Path(where).glob(PARTS)):
        yield where
        return
    with tempfile.TemporaryDirectory() as directory:
        copy_model(Path(where), Path(directory))
        yield directory


def load_model(rundir: RunDir, step: Step, device: str) -> tuple[Any, Any, Mapping[str, bytes]]:
    """Return a checkpoint's model in float32, its tokenizer and its files. An adapter is merged into its base.

    Raises:
        UserError: there is no such checkpoint, or it cannot be loaded.
    """
    from echo2.engines.tokenizer import load_tokenizer
    from echo2.learner.core.adapters import load_merged
    from echo2.learner.core.model import load_policy

    config = rundir.read_config()
    source = checkpoint_directory(rundir, step)
    if (source / ADAPTER_CONFIG).is_file():
        policy = load_merged(config.model.path, source, device, config.learner.quantised == "base")
    else:
        with _whole(str(source)) as directory:
            policy = load_policy(directory, "float32", device)
    tokenizer = load_tokenizer(policy.files, config.model.chat_template_args)
    return policy.module.eval(), tokenizer, policy.files


def copy_model(source: Path, to: Path, dtype: str = "") -> None:
    """Copy the model part of a checkpoint to the directory `to`, joining the parts of several ranks into one file.
    `dtype`: of the copied weights, if not as stored.

    Raises:
        UserError: a rank's part is missing, or a weight is too large for `dtype`.
    """
    weights = ADAPTER_WEIGHTS if (source / ADAPTER_CONFIG).is_file() else MODEL_FILE
    is_rewritten = bool(dtype) or any(source.glob(PARTS))
    excluded = (*LEARNER_FILES, PARTS, *([weights] if is_rewritten else []))
    to.mkdir(parents=True, exist_ok=True)
    for file in sorted(source.iterdir()):
        if file.is_file() and not any(file.match(pattern) for pattern in excluded):
            shutil.copy2(file, to)
    if is_rewritten:
        from echo2.learner.core.state import write_whole  # imports torch, which a plain copy does not need

        write_whole(source, weights, to / weights, dtype)
    if dtype and weights == MODEL_FILE:
        from echo2.learner.core.model import with_dtype

        (to / "config.json").write_bytes(with_dtype((to / "config.json").read_bytes(), dtype))


def _write(file: IO[str], line: str) -> None:
    try:
        file.write(f"{line}\n")
    except OSError as error:
        raise write_failed(error, f"Cannot write {file.name}: {error.strerror}.") from error


async def _scored(config: configuration.Config, sampler: LocalSampler, file: IO[str] | None) -> list[RolloutGroup]:
    """Return the groups of all held-out tasks that could be sampled and scored; write them to the file, if any."""
    size, console = len(sampler.tasks), Console(stderr=True)
    if not config.eval.source:  # without held-out tasks, training tasks are evaluated
        size = min(size, config.eval.limit)
    scored, plain = list[RolloutGroup](), PlainLines(console.is_terminal)
    batches = [range(first, min(first + BATCH_TASKS, size)) for first in range(0, size, BATCH_TASKS)]

    async def score(processes: RewardProcesses, group: RolloutGroup) -> None:
        try:
            rollouts, _ = await sampler.score(processes, group)
        except RewardFailure as failure:
            sampler.failures.append(str(failure))
        else:
            scored.append(replace(group, rollouts=rollouts, samples=()))
            if file is not None:
                record = group_record(scored[-1], sampler.tasks.task(group.cursor))
                _write(file, json.dumps(record, ensure_ascii=False))

    async with aclosing(sampler), reward_processes(config) as processes:
        for cursors in track(batches, "evaluating", console=console, transient=True, disable=not console.is_terminal):
            groups = await sampler.sample(cursors)
            await asyncio.gather(*(score(processes, group) for group in groups))
            plain.print_due(f"evaluated {cursors.stop} of {size} tasks", is_last=cursors.stop == size)
    return scored
