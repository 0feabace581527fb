"""`echo2 run`, from configuration file to summary: resolves, checks, starts, shows progress, sums up."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape

from echo2 import config as configuration
from echo2.config import Config
from echo2.devices import require_torch
from echo2.rundir import RunDir, claimed, create, read_json
from echo2.runtime.launch.checks import check, check_place, check_port, check_prompts, check_trained
from echo2.runtime.launch.publish_every import settle
from echo2.runtime.launch.resume import changes
from echo2.runtime.launch.supervisor import Supervisor
from echo2.runtime.lifeline import LIFELINE_VARIABLE
from echo2.runtime.process_log import keep_private
from echo2.tasks.harness_process import OWN
from echo2.views import display


def resolve(
    path: Path, overrides: Mapping[str, str], out: Path | None, resume: bool = False, like: Path | None = None
) -> tuple[Config, Path]:
    """Return the configuration, with a number for "auto" and absolute paths, and the absolute run directory. Both are
    valid in any working directory. Prints the changes of a resumed run.

    Raises:
        UserError: the configuration is invalid, or a resumed run can't continue with it.
    """
    config = absolute(configuration.load(path, overrides))
    where = directory(path, out)
    settled = settle(config, where, resume, like)
    if settled.reason:
        number = settled.config.schedule.publish_every
        print(f'schedule.publish_every = "auto" is {number}: {settled.reason}', file=sys.stderr)
    if resume and RunDir(where).config.is_file():
        for change in changes(RunDir(where).read_config(), settled.config):
            print(f"resumed with {change}", file=sys.stderr)
    return settled.config, where


def directory(path: Path, out: Path | None) -> Path:
    """Return the absolute run directory: `out`, or one named after the configuration file."""
    return (out or Path("outputs") / path.stem).resolve()


def absolute(config: Config) -> Config:
    """Return the configuration with absolute paths, where a setting names an existing file or directory."""

    def named(text: str) -> str:
        """Resolve `name`, `name#split` or `file.py:Name`, with or without a weight before it."""
        weight, star, name = text.rpartition("*")
        for mark in ("", "#", ":"):
            file, _, rest = name.strip().partition(mark) if mark else (name.strip(), "", "")
            if ("/" in file or "." in file) and Path(file).exists():  # else it may be a built-in's name
                found = str(Path(file).resolve()) + (mark + rest if rest else "")
                return f"{weight.strip()} * {found}" if star else found
        return text

    def named_all(source: Any) -> Any:
        """Resolve one source, a list of sources with weights, or sources by the name of their set."""
        if isinstance(source, str):
            return named(source)
        return {k: named(v) for k, v in source.items()} if isinstance(source, dict) else [named(v) for v in source]

    model = Path(config.model.path or "/nowhere")
    environment = config.tasks.environment
    kind = OWN if environment.startswith(OWN) else ""
    environment = kind + named(environment.removeprefix(kind))
    return replace(
        config,
        model=replace(config.model, path=str(model.resolve()) if model.is_dir() else config.model.path),
        lora=replace(config.lora, path=str(Path(config.lora.path).resolve()) if config.lora.path else ""),
        tasks=replace(config.tasks, source=named_all(config.tasks.source), environment=environment),
        eval=replace(config.eval, source=named_all(config.eval.source)),
        reward=replace(config.reward, functions=[named(entry) for entry in config.reward.functions]),
        fleet=replace(config.fleet, offers=named(config.fleet.offers)),
    )


def open_run(
    target: Path, out: Path | None, resume: bool, overrides: Mapping[str, str], like: Path | None = None
) -> RunDir:
    """Open an existing run directory for a head, or create one from a configuration file."""
    if target.is_dir():
        rundir = RunDir(target)
        rundir.read_config()
        return rundir
    with _claimed_to_resume(directory(target, out), "head", resume):
        config, where = resolve(target, overrides, out, resume, like)
        check(config, has_learner=False)
        if not resume:
            check_port(config)
        return create(where, config, resume)


def _claimed_to_resume(where: Path, role: str, resume: bool) -> AbstractContextManager[None]:
    """Claim the directory of a run to resume: a run that is alive is refused before its changes are printed."""
    return claimed(where, role) if resume and RunDir(where).config.is_file() else nullcontext()


def run(
    path: Path,
    out: Path | None,
    resume: bool,
    dry_run: bool,
    overrides: Mapping[str, str],
    as_json: bool,
    like: Path | None = None,
    has_page: bool = False,
    has_learner: bool = True,
) -> int:
    """Carry out `echo2 run`. Return the exit status. `has_page`: also start `echo2 view`. `has_learner`: start the
    learner here; otherwise it is started elsewhere, and joins with the learner's ticket."""
    keep_private()
    if has_learner:
        require_torch()
    with _claimed_to_resume(directory(path, out), "run", resume and not dry_run):
        config, where = resolve(path, overrides, out, resume, like)
    check(config, has_learner)
    if dry_run:
        check_place(config, where, resume)
        check_prompts(config)
        if has_learner:
            check_trained(config)
        print(configuration.to_json(config))
        return 0
    with claimed(where, "run"):
        if not resume:  # the killed head of a resumed run may still listen; the next head waits for its end
            check_port(config)
        rundir = create(where, config, resume)
        outcome = _supervise(rundir, config, has_page, has_learner)
    summary, reason = read_json(rundir.summary), outcome["reason"]
    if as_json:
        print(json.dumps(summary))
    elif summary is not None:
        display.show_summary(summary, Console(), reason)
    if outcome["kind"] != "finished":
        status = 2 if outcome["kind"] in ("stopped", "user_error") else 1
        print(json.dumps({"error": reason, "status": status}) if as_json else f"error: {reason}", file=sys.stderr)
        return status
    return 0


def _supervise(rundir: RunDir, config: Config, has_page: bool, has_learner: bool) -> dict[str, str]:
    """Start the run's processes, show its progress, and wait for its end. Return its outcome."""
    workers = config.workers
    arguments = ["--price-usd-per-hour", str(workers.price_usd_per_hour)]
    if config.tasks.environment:
        arguments += ["--allow-environment", config.tasks.environment]
    supervisor = Supervisor(rundir, workers.count, arguments, config.learner.ranks, has_learner)
    console = Console(stderr=True)
    for line in joining(rundir, config):
        console.print(line, highlight=False, soft_wrap=True)
    page = _page(rundir, console) if has_page else nullcontext()
    with page, display.RunDisplay(rundir, config.run.max_steps, console) as shown:
        return supervisor.run(shown.poll)


def joining(rundir: RunDir, config: Config) -> list[str]:
    """Return lines that say where the run is, and how other machines join it."""
    where, ticket = escape(shlex.quote(str(rundir.path))), escape(shlex.quote(f"@{rundir.ticket}"))
    lines = [f"run directory [bold]{escape(str(rundir.path))}[/bold]"]
    if config.head.is_local:
        listen = escape(config.head.listen)
        return [*lines, f"no other machine can join: head.listen is {listen}; set it to 0.0.0.0:7341 to let them"]
    return [
        *lines,
        f"your machines join with: echo2 worker {ticket}",
        f"other people's machines: echo2 invite {where}",
    ]


@contextmanager
def _page(rundir: RunDir, console: Console) -> Iterator[None]:
    """Run `echo2 view` of this run inside the context."""
    reading, writing = os.pipe()
    command = [sys.executable, "-m", "echo2", "view", str(rundir.path)]
    lifeline = {**os.environ, LIFELINE_VARIABLE: str(reading)}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env=lifeline, pass_fds=(reading,), start_new_session=True
    ) as page:
        assert page.stdout is not None
        console.print(page.stdout.readline().strip(), highlight=False, soft_wrap=True, markup=False)
        try:
            yield
        finally:
            page.terminate()
            page.wait()  # before the lifeline ends, which would cut off its last output
            os.close(reading)
            os.close(writing)
