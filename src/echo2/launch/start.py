"""`echo2 run`, from configuration file to summary: resolves, checks, starts or resumes, shows progress, sums up.

A resumed run may change settings, except those that the ledger or the checkpoints depend on.
"""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import os
import shlex
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from rich.console import Console
from rich.markup import escape

from echo2 import config as configuration
from echo2.config import Config
from echo2.config.rundir import RunDir, claimed, create, read_json
from echo2.config.sections import DistillConfig
from echo2.config.values import SELF
from echo2.core.child import LIFELINE_VARIABLE, ChildProcess
from echo2.core.devices import require_torch
from echo2.core.errors import UserError
from echo2.core.logs import keep_private
from echo2.engines.tokenizer import TOKENIZER_SUFFIXES, load_tokenizer, refuse_other_tokenizer
from echo2.head.store.contents import fetch_run, stand_by
from echo2.launch.preflight import (
    check,
    check_place,
    check_port,
    check_prompts,
    check_trained,
    engine_here,
    take_turns,
)
from echo2.launch.supervisor import ProcessFailed, Supervisor
from echo2.learner.link.teacher_endpoint import greeted
from echo2.planning.memory_needs import TURNS
from echo2.tasks.harness_process import OWN
from echo2.views import display

P = ParamSpec("P")
T = TypeVar("T")

#: Settings that a resumed run can't change -> the reason.
FIXED = {
    "model.path": "the checkpoints are of that model",
    "lora.rank": "the checkpoints are of an adapter of that rank, or of a whole model",
    "lora.alpha": "the adapter in the checkpoints is scaled by it",
    "lora.targets": "the adapter in the checkpoints is of these layers",
    "lora.path": "the checkpoints go on from it",
    "sampling.group_size": "delivered groups have that many rollouts",
    "sampling.temperature": "delivered groups have logprobs at it, and the learner would score them at another",
    "distill.teacher": "scored groups name their teachers",
    "run.seed": "the tasks of issued groups follow from it",
    "tasks.source": "issued groups are of its tasks",
    "tasks.params": "issued groups are of the tasks that follow from it",
    "tasks.environment": "delivered groups were played in it",
}


def changes(old: Config, new: Config) -> list[str]:
    """Return one line per setting that differs: `learner.lr: 1e-06 -> 2e-06`.

    Raises:
        UserError: a setting of `FIXED` differs, or max_staleness was lowered.
    """
    lines = []
    for section, key, *_ in configuration.all_fields():
        name = f"{section}.{key}"
        before, after = (getattr(getattr(config, section), key) for config in (old, new))
        if before == after:
            continue
        change = f"{name}: {json.dumps(before)} -> {json.dumps(after)}"
        if name in FIXED and not (name == "distill.teacher" and _are_moved(old.distill, new.distill)):
            raise UserError(f"--resume cannot change {change}: {FIXED[name]}. Set it back, or start another --out.")
        lines.append(change)
    before, after = old.schedule.max_staleness, new.schedule.max_staleness
    if after < before:
        raise UserError(
            f"--resume cannot lower schedule.max_staleness ({before} -> {after}): groups that are sampled "
            f"already would be thrown away, and `echo2 audit` would find older ones. Set it to {before} or more."
        )
    return lines


def _are_moved(old: DistillConfig, new: DistillConfig) -> bool:
    """Whether the same teachers are only served at other addresses now."""
    same_names = list(old.teachers) == list(new.teachers) and list(old.endpoints) == list(new.endpoints)
    return same_names and old.loaded == new.loaded


def how_to_continue(arguments: Sequence[str]) -> str:
    """Return the command that continues a run that did not come to its end, from its `arguments`, those of `echo2`.
    Only --resume is named if Python started the run, for no command was typed."""
    if LIFELINE_VARIABLE in os.environ:
        return "continue the run with --resume"
    resume = [] if "--resume" in arguments else ["--resume"]
    return f"continue the run with: {shlex.join(['echo2', *arguments, *resume])}"


def resolve(path: Path, overrides: Mapping[str, str], out: Path | None, resume: bool = False) -> tuple[Config, Path]:
    """Return the configuration, with absolute paths, and the absolute run directory. Both are valid in any working
    directory. Prints the changes of a resumed run.

    Raises:
        UserError: the configuration is invalid, or a resumed run can't continue with it.
    """
    config = absolute(configuration.load(path, overrides))
    where = directory(path, out)
    if resume and RunDir(where).config.is_file():
        for change in changes(RunDir(where).read_config(), config):
            print(f"resumed with {change}", file=sys.stderr)
    return config, where


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
                full_name = str(Path(file).resolve()) + (mark + rest if rest else "")
                return f"{weight.strip()} * {full_name}" if star else full_name
        return text

    def named_all(source: Any) -> Any:
        """Resolve one source, a list of sources with weights, or sources by the name of their set."""
        if isinstance(source, str):
            return named(source)
        return {k: named(v) for k, v in source.items()} if isinstance(source, dict) else [named(v) for v in source]

    def directory_or_id(path: str) -> str:
        return str(Path(path).resolve()) if path and Path(path).is_dir() and path != SELF else path

    teacher = config.distill.teacher
    environment = config.tasks.environment
    kind = OWN if environment.startswith(OWN) else ""
    environment = kind + named(environment.removeprefix(kind))
    return replace(
        config,
        model=replace(config.model, path=directory_or_id(config.model.path)),
        distill=replace(
            config.distill,
            teacher=directory_or_id(teacher)
            if isinstance(teacher, str)
            else {name: directory_or_id(path) for name, path in teacher.items()},
        ),
        lora=replace(config.lora, path=str(Path(config.lora.path).resolve()) if config.lora.path else ""),
        tasks=replace(config.tasks, source=named_all(config.tasks.source), environment=environment),
        eval=replace(config.eval, source=named_all(config.eval.source)),
        reward=replace(config.reward, functions=[named(entry) for entry in config.reward.functions]),
        fleet=replace(config.fleet, offers=named(config.fleet.offers)),
    )


def open_run(target: Path, out: Path | None, resume: bool, overrides: Mapping[str, str]) -> RunDir:
    """Open an existing run directory for a head, or create one from a configuration file."""
    if target.is_dir():
        rundir = RunDir(target)
        rundir.read_config()
        return rundir
    with _claimed_to_resume(directory(target, out), "head", resume):
        config, where = resolve(target, overrides, out, resume)
        _aside(check, config, has_learner=False, has_workers=False)
        if not resume:
            check_port(config)
        return create(where, config, resume)


def fetched(
    url: str,
    out: Path,
    overrides: Mapping[str, str],
    is_standby: bool = False,
    has_learner: bool = False,
    has_workers: bool = False,
) -> tuple[Path, dict[str, str]] | str:
    """Fetch the run in a store into a directory. Return its configuration file, and the settings to resume it with.
    `is_standby`: wait first until its head is silent, and return why the run is over if it ends before. `has_learner`,
    `has_workers`: as of `check`.

    Raises:
        UserError: there is no run in the store, or one in the directory; or a standby could not run it here.
    """
    keep_private()
    rundir = RunDir(out)

    def usable(candidate: RunDir) -> None:
        _aside(check, configuration.load(candidate.config, overrides), has_learner, has_workers)

    with claimed(out, "run"):
        if not is_standby:
            fetch_run(url, out)
        elif over := stand_by(url, out, usable):
            return over
    is_moved = rundir.read_config().head.store_place[0] != url
    return rundir.config, {**({"head.store": url} if is_moved else {}), **overrides}


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
    has_page: bool = False,
    has_learner: bool = True,
    then: str = "",
) -> int:
    """Carry out `echo2 run`. Return the exit status. `has_page`: also start `echo2 view`. `has_learner`: start the
    learner here; otherwise it is started elsewhere, and joins with the learner's ticket. `then`: what to do if the run
    stops (`how_to_continue`)."""
    keep_private()
    if has_learner:
        require_torch()
    with _claimed_to_resume(directory(path, out), "run", resume and not dry_run):
        config, where = resolve(path, overrides, out, resume)
    if dry_run:
        check(config, has_learner)
        check_place(config, where, resume)
        check_prompts(config)
        check_teachers(config)
        if has_learner:
            check_trained(config)
        print(f"note: {engine_here(config)}", file=sys.stderr)
        if has_learner and take_turns(config):
            print(f"note: {TURNS}", file=sys.stderr)
        print(configuration.to_json(config))
        return 0
    engine, in_turns = _aside(_checked, config, has_learner)
    with claimed(where, "run"):
        if not resume:  # the killed head of a resumed run may still listen; the next head waits for its end
            check_port(config)
        rundir = create(where, config, resume)
        outcome = _supervise(rundir, config, engine, in_turns, has_page, has_learner)
    summary, reason = read_json(rundir.summary), outcome["reason"]
    if as_json:
        print(json.dumps(summary))
    elif summary is not None:
        display.show_summary(summary, Console(), reason)
    if outcome["kind"] != "finished":
        status = 2 if outcome["kind"] in ("stopped", "user_error") else 1
        print(json.dumps({"error": reason, "status": status}) if as_json else f"error: {reason}", file=sys.stderr)
        if then and not as_json and outcome["kind"] == "stopped":
            print(f"Once that is mended, {then}", file=sys.stderr)
        return status
    return 0


def check_teachers(config: Config) -> None:
    """Check that teachers have the policy's tokenizer, as far as that is in a directory, and they are, too, or answer
    now. Loads transformers if their files differ.

    Raises:
        UserError: one has another, or does not serve what is asked of it.
    """
    policy = Path(config.model.path)
    if not policy.is_dir():
        return
    for path in config.distill.loaded:
        if Path(path).is_dir():
            refuse_other_tokenizer(_tokenizer_files(policy), _tokenizer_files(Path(path)), path)
    for url in config.distill.endpoints.values():
        tokenizer = load_tokenizer(_tokenizer_files(policy))
        if trouble := asyncio.run(greeted(url, config.distill.num_likely, tokenizer)):
            print(f"note: distill.teacher = {url!r} does not answer now: {trouble}", file=sys.stderr)


def _tokenizer_files(where: Path) -> Mapping[str, bytes]:
    return {path.name: path.read_bytes() for path in where.iterdir() if path.suffix in TOKENIZER_SUFFIXES}


def _checked(config: Config, has_learner: bool) -> tuple[str, bool]:
    """Check the settings (`check`). Return the engine here, in words, and whether learner and workers take turns."""
    check(config, has_learner)
    return str(engine_here(config)), has_learner and take_turns(config)


def _aside(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Return what a function returns in a process of its own: what it imports, as torch, is not held for a whole run.

    Raises:
        ProcessFailed: the process was killed.
    """
    context = multiprocessing.get_context("spawn")
    quiet = (signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is this process's affair
    try:
        with ProcessPoolExecutor(1, context, initializer=signal.signal, initargs=quiet) as pool:
            return pool.submit(function, *args, **kwargs).result()
    except BrokenProcessPool as error:
        why = "The process that checks the settings was killed before the run began. Is this machine short of memory?"
        raise ProcessFailed(why) from error


def _supervise(
    rundir: RunDir, config: Config, engine: str, in_turns: bool, has_page: bool, has_learner: bool
) -> dict[str, str]:
    """Start the run's processes, show its progress, and wait for its end. Return its outcome."""
    workers = config.workers
    arguments = ["--price-usd-per-hour", str(workers.price_usd_per_hour)]
    if config.tasks.environment:
        arguments += ["--allow-environment", config.tasks.environment]
    supervisor = Supervisor(rundir, workers.count, arguments, config.learner.ranks, has_learner, in_turns)
    console = Console(stderr=True)
    for line in [*joining(rundir, config), escape(engine), *([TURNS] if in_turns else [])]:
        console.print(line, highlight=False, soft_wrap=True)
    page = _page(rundir, console) if has_page else nullcontext()
    with page, display.RunDisplay(rundir, config.run.max_steps, console) as shown:
        return supervisor.run(shown.poll)


def joining(rundir: RunDir, config: Config) -> list[str]:
    """Return lines that say where the run is, and how other machines join it."""
    where, ticket = escape(shlex.quote(str(rundir.path))), escape(shlex.quote(f"@{rundir.ticket}"))
    lines = [f"run directory [bold]{escape(str(rundir.path))}[/bold]"]
    if not config.head.is_reachable:
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
    command = [sys.executable, "-m", "echo2", "view", str(rundir.path)]
    page = ChildProcess(command, has_pipes=True, has_lifeline=True)
    with page.pipes[0], page.pipes[1] as output:
        try:
            console.print(output.readline().decode().strip(), highlight=False, soft_wrap=True, markup=False)
            yield
        finally:
            page.signal(signal.SIGTERM)
            page.wait()
