"""From a configuration file to a run: resolve, check what can be checked beforehand, start, show, sum up."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path

from rich.console import Console
from rich.markup import escape

from echo2 import config as configuration
from echo2.config import Config
from echo2.errors import UserError
from echo2.offers import Offer
from echo2.reward.load import load_reward
from echo2.runtime import display
from echo2.runtime.planner_options import planner_options, read_offers
from echo2.runtime.process_log import keep_private
from echo2.runtime.publish_every import settle
from echo2.runtime.rundir import RunDir, claimed, create, read_json
from echo2.runtime.supervisor import Supervisor
from echo2.tasks.base import TaskSource, TaskStream
from echo2.tasks.environments import BUILT_IN, load_environment
from echo2.tasks.load import load_tasks

#: Rows of a file that are checked before a run starts; the others when their turn comes.
ROWS_CHECKED_MAX = 10_000


def resolve(
    path: Path, overrides: Mapping[str, str], out: Path | None, resume: bool = False, like: Path | None = None
) -> tuple[Config, Path]:
    """The configuration, with a number for "auto", and the run directory it names."""
    config = configuration.load(path, overrides)
    where = out or Path(config.run.out or f"outputs/{path.stem}")
    settled = settle(replace(config, run=replace(config.run, out=str(where))), where, resume, like)
    if settled.reason:
        number = settled.config.schedule.publish_every
        print(f'schedule.publish_every = "auto" is {number}: {settled.reason}', file=sys.stderr)
    return settled.config, where


def check(config: Config) -> None:
    """Find the user's mistakes before processes are started: tasks, rewards, model path.

    Raises:
        UserError: the first mistake found.
    """
    check_model(config.model.path)
    if not config.tasks.source:
        raise UserError(
            "tasks.source is empty: name your tasks (rows.jsonl, reasoning_gym:<name>, file.py:Class, ...)."
        )
    if not config.reward.functions:
        raise UserError('reward.functions is empty: name at least one, for example ["exact_match"].')
    for section in (config.tasks, config.eval):
        if section.source:
            check_tasks(load_tasks(section.source, section.params, config.run.seed))
    for spec in config.reward.functions:
        load_reward(spec)
    if config.tasks.environment:
        load_environment(config.tasks.environment)
    elif "environment" in config.reward.functions:
        raise UserError(
            'reward.functions has "environment", and tasks.environment is empty: name one, or another reward.'
        )
    offers = read_offers(config)
    planner_options(config, 0, offers)
    if offers and not any(offer.rent for offer in offers.values()):
        raise UserError(
            f"fleet.offers = {config.fleet.offers!r}: none of its offers has a `rent` command: no machine could be "
            "rented. Add one (docs/capacity.md), or leave fleet.offers out."
        )
    check_budget(config, offers.values())


def check_budget(config: Config, offers: Iterable[Offer]) -> None:
    """A budget is of no use where nothing costs anything. Workers that only join later bring their own prices.

    Raises:
        UserError: with the settings that have the prices.
    """
    prices = [config.learner.price_usd_per_hour, *(offer.price_usd_per_hour for offer in offers if offer.rent)]
    if config.workers.count:
        prices.append(config.workers.price_usd_per_hour)
    are_known = config.workers.count or len(prices) > 1
    if config.fleet.budget_usd and are_known and not any(prices):
        raise UserError(
            f"fleet.budget_usd = {config.fleet.budget_usd:g} would never be spent: learner, workers and offers cost "
            "$0. Set learner.price_usd_per_hour, workers.price_usd_per_hour or an offer's price, or leave the budget "
            "out."
        )


def check_tasks(tasks: TaskSource) -> None:
    """Find bad rows. Rows that lie in a file are all looked at, up to a limit; of those that are made, the first.

    Raises:
        UserError: naming the first bad row.
    """
    stream = TaskStream(tasks, 0, False)
    for cursor in range(min(len(tasks), ROWS_CHECKED_MAX) if hasattr(tasks, "where") else 1):
        stream.task(cursor)


def check_model(path: str) -> None:
    """Find a model that can't be loaded, as far as that shows without torch.

    Raises:
        UserError: no path, no model at it, or a hub id that is not in the cache while the hub is switched off.
    """
    if not path:
        raise UserError("model.path is empty: name a Hugging Face model directory or hub id.")
    where = Path(path)
    if where.is_dir():
        if not (where / "config.json").is_file():
            raise UserError(f"model.path = {path!r}: that directory holds no model (no config.json). Check the path.")
    elif path.startswith(("/", ".", "~")) or path.count("/") != 1 or where.parent.is_dir():
        raise UserError(
            f"model.path = {path!r}: there is no such directory below {Path.cwd()}, and it is no hub id (owner/name)."
        )
    elif not _is_reachable(path):
        raise UserError(
            f"model.path = {path!r}: no such directory, and the hub's cache does not hold it while HF_HUB_OFFLINE is "
            "set. Unset that to download the model, or name a model directory."
        )


def _is_reachable(hub_id: str) -> bool:
    """Whether a hub id is worth a try. Only the learner needs the hub, and only its machine has the hub's package."""
    try:
        from huggingface_hub import constants, try_to_load_from_cache
    except ImportError:
        return True
    return not constants.HF_HUB_OFFLINE or isinstance(try_to_load_from_cache(hub_id, "config.json"), str)


def open_run(
    target: Path, out: Path | None, resume: bool, overrides: Mapping[str, str], like: Path | None = None
) -> RunDir:
    """A run directory that exists, or a new one from a configuration file."""
    if target.is_dir():
        rundir = RunDir(target)
        rundir.read_config()
        return rundir
    config, where = resolve(target, overrides, out, resume, like)
    check(config)
    return create(where, config, resume)


def run(
    path: Path,
    out: Path | None,
    resume: bool,
    dry_run: bool,
    overrides: Mapping[str, str],
    as_json: bool,
    like: Path | None = None,
) -> int:
    """`echo2 run`. Returns the exit status."""
    keep_private()
    config, where = resolve(path, overrides, out, resume, like)
    check(config)
    if dry_run:
        print(configuration.to_json(config))
        return 0
    with claimed(where, "run"):
        rundir = create(where, config, resume)
        outcome = _supervise(rundir, config)
    summary = read_json(rundir.summary)
    if as_json:
        print(json.dumps(summary))
    elif summary is not None:
        display.show_summary(summary, Console())
    if outcome["kind"] != "finished":
        print(f"error: {outcome['reason']}", file=sys.stderr)
        return 2 if outcome["kind"] in ("stopped", "user_error") else 1
    return 0


def _supervise(rundir: RunDir, config: Config) -> dict[str, str]:
    """Start the run's processes, show how it goes, and wait for its end."""
    workers = config.workers
    arguments = ["--engine", workers.engine, "--device", workers.device]
    arguments += ["--price-usd-per-hour", str(workers.price_usd_per_hour)]
    if config.tasks.environment not in ("", *BUILT_IN):
        arguments += ["--allow-environment", config.tasks.environment]
    supervisor = Supervisor(rundir, workers.count, arguments)
    console = Console(stderr=True)
    where, ticket = escape(str(rundir.path)), escape(str(rundir.ticket))
    told = f"run directory [bold]{where}[/bold]   your other machines join with: echo2 worker @{ticket}"
    told += f"   those of others: echo2 invite {where}"
    console.print(told, highlight=False, soft_wrap=True)
    with display.RunDisplay(rundir, config.run.max_steps, console) as shown:
        return supervisor.run(shown.poll)
