"""From a configuration file to a run: resolve, check what can be checked before anything is started, start, show, sum up."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from echo2 import config as configuration
from echo2.config import Config
from echo2.errors import UserError
from echo2.reward.load import load_reward
from echo2.runtime import display
from echo2.runtime.rundir import RunDir, create, read_json
from echo2.runtime.supervisor import Supervisor
from echo2.tasks.base import TaskStream
from echo2.tasks.load import load_tasks


def resolve(path: Path, overrides: Mapping[str, str], out: Path | None) -> tuple[Config, Path]:
    """The configuration and the run directory it names."""
    config = configuration.load(path, overrides)
    where = out or Path(config.run.out or f"outputs/{path.stem}")
    return replace(config, run=replace(config.run, out=str(where))), where


def check(config: Config) -> None:
    """Find the user's mistakes before processes are started: tasks, rewards, model path.

    Raises:
        UserError: the first mistake found.
    """
    if not config.model.path:
        raise UserError("model.path is empty: name a Hugging Face model directory or hub id.")
    looks_local = Path(config.model.path).exists() or config.model.path.startswith((".", "/", "~", "outputs/"))
    if looks_local and not (Path(config.model.path) / "config.json").is_file():
        raise UserError(f"model.path = {config.model.path}: no model there (no config.json). Check the path.")
    if not config.tasks.source:
        raise UserError(
            "tasks.source is empty: name your tasks (rows.jsonl, reasoning_gym:<name>, file.py:Class, ...)."
        )
    if not config.reward.functions:
        raise UserError('reward.functions is empty: name at least one, for example ["exact_match"].')
    for section in (config.tasks, config.eval):
        if section.source:
            TaskStream(load_tasks(section.source, section.params, config.run.seed), config.run.seed, False).task(0)
    for spec in config.reward.functions:
        load_reward(spec)


def open_run(target: Path, out: Path | None, resume: bool, overrides: Mapping[str, str]) -> RunDir:
    """A run directory that exists, or a new one from a configuration file."""
    if target.is_dir():
        rundir = RunDir(target)
        rundir.read_config()
        return rundir
    config, where = resolve(target, overrides, out)
    check(config)
    return create(where, config, resume)


def run(path: Path, out: Path | None, resume: bool, dry_run: bool, overrides: Mapping[str, str], as_json: bool) -> int:
    """`echo2 run`. Returns the exit status."""
    config, where = resolve(path, overrides, out)
    check(config)
    if dry_run:
        print(configuration.to_json(config))
        return 0
    rundir = create(where, config, resume)
    workers = config.workers
    arguments = ["--engine", workers.engine, "--device", workers.device]
    arguments += ["--price-usd-per-hour", str(workers.price_usd_per_hour)]
    supervisor = Supervisor(rundir, workers.count, arguments)
    console = Console(stderr=True)
    console.print(
        f"run directory [bold]{where}[/bold]   others join with: echo2 worker @{rundir.ticket}", highlight=False
    )
    with display.RunDisplay(rundir, config.run.max_steps, console) as shown:
        outcome = supervisor.run(shown.poll)
    summary = read_json(rundir.summary)
    if as_json:
        print(json.dumps(summary))
    elif summary is not None:
        display.show_summary(summary, Console())
    if outcome["kind"] != "finished":
        print(f"error: {outcome['reason']}", file=sys.stderr)
        return 2 if outcome["kind"] in ("stopped", "user_error") else 1
    return 0
