"""The command `echo2`. Light: whatever needs torch is imported by the command that needs it."""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, fields
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Literal, get_args, get_origin

from echo2 import __version__, config
from echo2.config.engines import ENGINES, NO_SLOT_LIMIT
from echo2.errors import Echo2Error, NoRoomError, UserError
from echo2.printable import printable, printable_lines

Command = Callable[[argparse.Namespace], int]
#: `_add` with its first argument.
Add = Callable[..., argparse.ArgumentParser]
#: Of an error, which may quote a peer or a file.
ERROR_CHARS_MAX = 10_000


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command. Exit status: 0 done, 1 our fault or a peer's, 2 the user's mistake, 3 a full disk,
    130 interrupted.
    """
    parser = build_parser()
    options, unknown = parser.parse_known_args(arguments)
    try:
        if options.takes_settings:
            refuse_unknown_settings(unknown)
            options.overrides = {name: value for name, value in vars(options).items() if "." in name}
        if unknown:
            parser.error(f"unrecognized arguments: {' '.join(unknown)}")
        command: Command = options.command
        return command(options)
    except Echo2Error as error:
        print(f"error: {printable_lines(str(error), ERROR_CHARS_MAX)}", file=sys.stderr)
        return 3 if isinstance(error, NoRoomError) else 2 if isinstance(error, UserError) else 1
    except BrokenPipeError:
        return 0
    except KeyboardInterrupt:
        print(getattr(options, "interrupted", "interrupted"), file=sys.stderr)
        return 130


def refuse_unknown_settings(unknown: Iterable[str]) -> None:
    """A flag that argparse does not know may be a misspelt setting, or one without its section: say which.

    Raises:
        UserError: with the nearest setting.
    """
    for word in unknown:
        if word.startswith("--"):
            section, _, name = word.removeprefix("--").partition("=")[0].partition(".")
            config.check_keys({section: {name: None} if name else None}, word)


def settings_help() -> str:
    """Every setting of the configuration file, as a flag."""
    lines, last = ["settings (keys of the configuration file, section by section):"], ""
    for section, name, kind, default, description in config.all_fields():
        if section != last:
            lines.append(f"\n  [{section}]")
            last = section
        shown = json.dumps(default)
        choices = f" {' | '.join(get_args(kind))}" if get_origin(kind) is Literal else ""
        lines.append(f"  --{section}.{name}{choices} ({shown})\n        {description}")
    return "\n".join(lines)


def build_parser() -> argparse.ArgumentParser:
    """All commands with their flags."""
    parser = argparse.ArgumentParser(
        prog="echo2",
        description="Reinforcement learning for language models: one learner, kept busy by cheap machines anywhere.",
    )
    parser.add_argument("--version", action="version", version=f"echo2 {__version__}")
    add = partial(_add, parser.add_subparsers(title="commands", required=True, metavar="COMMAND"))
    _add_demo(add)
    _add_run(add)
    _add_processes(add)
    _add_views(add)
    _add_tickets(add)
    _add_model_commands(add)
    _add_plan(add)
    _add_planning(add)
    _add_service(add)
    return parser


def _add(
    commands: argparse._SubParsersAction[argparse.ArgumentParser],
    name: str,
    text: str,
    command: Command,
    directory: str = "",
    takes_settings: bool = False,
    has_json: bool = False,
) -> argparse.ArgumentParser:
    """One command. `directory`: what its first argument DIR is; empty: it has none."""
    parser = commands.add_parser(
        name, help=text, description=text, allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.set_defaults(command=command, takes_settings=takes_settings)
    if directory:
        parser.add_argument("directory", type=Path, metavar="DIR", help=directory)
    if has_json:
        parser.add_argument("--json", action="store_true")
    if takes_settings:
        for section, key, *_ in config.all_fields():
            parser.add_argument(f"--{section}.{key}", default=argparse.SUPPRESS, help=argparse.SUPPRESS)
    return parser


def _add_run(add: Add) -> None:
    text = "Train: start head, learner and workers on this machine and look after them."
    parser = add("run", text, _run, takes_settings=True, has_json=True)
    parser.set_defaults(interrupted="interrupted; continue the run with --resume")
    parser.epilog = settings_help()
    parser.add_argument(
        "config", type=Path, metavar="CONFIG", help="configuration file (TOML), or config.json of a run"
    )
    parser.add_argument("--out", type=Path, help="run directory (default: outputs/<name of the file>)")
    parser.add_argument("--resume", action="store_true", help="continue the run in that directory")
    parser.add_argument("--view", action="store_true", help="serve a page that shows the run, as `echo2 view` does")
    parser.add_argument("--no-learner", action="store_true", help="start none: `echo2 learner --ticket` joins, or TRL")
    parser.add_argument(
        "--dry-run", action="store_true", help="check everything, print the resolved configuration, start nothing"
    )
    _add_from(parser)


def _add_demo(add: Add) -> None:
    text = "A model of 0.3 M parameters learns to sort digits on this machine: two minutes, no download."
    parser = add("demo", text, _module("demo.command"), has_json=True)
    parser.set_defaults(interrupted="interrupted; continue the run with `echo2 run --resume`")
    parser.add_argument("--out", type=Path, metavar="DIR", help="run directory (default: outputs/demo-<time>)")


def _add_from(parser: argparse.ArgumentParser) -> None:
    text = 'a run whose measured times `publish_every = "auto"` is to follow (default with --resume: this run)'
    parser.add_argument("--from", dest="like", type=Path, metavar="DIR", help=text)


def _add_processes(add: Add) -> None:
    parser = add("head", "Start the control plane of a run alone.", _head, takes_settings=True)
    parser.epilog = "Give a run directory, or a configuration file (then --out, --resume and settings as for `run`)."
    parser.add_argument("target", type=Path, metavar="DIR|CONFIG")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--resume", action="store_true")
    _add_from(parser)
    text = "Start the learner of a run alone; it goes on from the newest checkpoint."
    parser = add("learner", text, _learner, directory="the run directory (config.json, checkpoints/)")
    parser.add_argument("--ticket", default="", help="learner ticket, when the head is on another machine")
    _add_worker(add("worker", "Join a run with a ticket and make rollouts for it.", _worker))


def _add_worker(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(interrupted="left the run; its leases go to other workers")
    flag = parser.add_argument
    flag("ticket", metavar="TICKET", help="the ticket, or @FILE that holds it")
    engines = ["auto", *ENGINES]
    flag("--engine", default="auto", choices=engines, help="what samples tokens (default: the run's engine)")
    text = "Python of the environment that has the token server (default: $ECHO2_ENGINE_PYTHON, else this one)"
    flag("--engine-python", default="", metavar="PATH", help=text)
    text = "a token server that runs already, on a disk in common with the worker, instead of one that it starts"
    flag("--engine-url", default="", metavar="URL", help=text)
    text = 'more arguments for the token server, for example --engine-args="--max-model-len 8192"'
    flag("--engine-args", default="", metavar="ARGS", help=text)
    flag("--device", default="auto", help="cpu | cuda | cuda:0 ... | auto (a GPU if there is one)")
    flag("--price-usd-per-hour", type=float, default=0.0, help="what this machine costs")
    flag("--offer", default="", metavar="NAME", help="name of this machine, as the rent command of an offer got it")
    flag("--slots", type=_num_slots, default=0, help="rollouts to decode at once at most (0: as the run asks)")
    text = "directory or hub id of the model that the run's adapters are over (default: it is fetched from the run)"
    flag("--base", default="", metavar="MODEL", help=text)
    text = "an environment installed here that the run may play"
    flag("--allow-environment", dest="allow_environments", action="append", default=[], metavar="SPEC", help=text)
    text = "where other workers reach this one (default: any free port)"
    flag("--listen", default="", metavar="HOST:PORT", help=text)
    text = "where they dial it (default: where the head sees it)"
    flag("--advertise", default="", metavar="HOST[:PORT]", help=text)
    flag("--no-relay", dest="relays", action="store_false", help="never send weights to other workers")
    text = "where key and snapshots are kept (default: the user's state directory)"
    flag("--state", type=Path, help=text)
    flag("--patience-seconds", type=float, default=600.0, help="how long to look for a head that is away")


def _num_slots(text: str) -> int:
    if not text.isdecimal() or int(text) > NO_SLOT_LIMIT:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 0 to {NO_SLOT_LIMIT}")
    return int(text)


def _add_views(add: Add) -> None:
    parser = add("status", "Who waits for whom, since when, until when, and why.", _status, has_json=True)
    where = "run directory (default: the newest below outputs/)"
    parser.add_argument("directory", type=Path, nargs="?", metavar="DIR", help=where)
    text = "A page in your browser: how runs go, who waits for whom, what it costs, and their rollouts token by token."
    parser = add("view", text, _view)
    where = "run directories, side by side (default: the newest below outputs/)"
    parser.add_argument("directories", type=Path, nargs="*", metavar="DIR", help=where)
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (127.0.0.1: this machine alone)")
    parser.add_argument("--port", type=int, default=0, help="port to listen on (0: any that is free)")
    text = "Count every group of a run's ledger: trained, retired, open, lost, doubled."
    add("audit", text, _module("views.audit"), directory="run directory", has_json=True)
    text = "Feed a run's logged events to the planner again and compare its commands."
    add("replay", text, _replay, directory="run directory", has_json=True)


def _add_tickets(add: Add) -> None:
    where = "run directory, on the head's machine"
    invite, show, revoke = (_module("runtime.head.ticket_commands", name) for name in ("invite", "show", "revoke"))
    parser = add("invite", "Print a ticket for machines of others, or renew one.", invite, directory=where)
    parser.add_argument("--uses", type=int, default=20, help="machines that it admits (with --renew: more of them)")
    parser.add_argument("--days", type=float, default=30.0, help="how long from now")
    text = "let this one admit more, or open it again; its text stays"
    parser.add_argument("--renew", default="", metavar="TICKET_ID", help=text)
    text = "The tickets of a run: whose, used, until when, who came by them."
    add("tickets", text, show, directory=where, has_json=True)
    text = "What is wrong with this machine for a run, or for a ticket, and what to do."
    parser = add("doctor", text, _module("planning.doctor"), has_json=True)
    parser.add_argument("ticket", nargs="?", default="", metavar="TICKET", help="a ticket, or @FILE that holds it")
    text = "Whose rollouts are believed, what checks of them found, and who is in quarantine."
    add("trust", text, _trust, directory=where, has_json=True)
    text = "Shut a worker, or all who came by a ticket, out of a run, now and for good; their leases go to others."
    parser = add("revoke", text, revoke, directory=where, has_json=True)
    parser.add_argument("id", metavar="ID", help="w-..., as `echo2 status` shows it, or of a ticket")


def _add_model_commands(add: Add) -> None:
    text = "Evaluate a checkpoint of a run, or any model, on the run's held-out tasks."
    parser = add("eval", text, _module("runtime.launch.evaluate"), takes_settings=True, has_json=True)
    parser.add_argument("target", type=Path, metavar="DIR|CONFIG", help="run directory, or configuration file")
    parser.add_argument("--step", type=_step, help="checkpoint to evaluate: a step, or best (default: the newest)")
    parser.add_argument("--model", default="", help="a model directory or hub id instead of a checkpoint")
    text = "Write a checkpoint as a Hugging Face model directory."
    parser = add("export", text, _module("runtime.launch.export"), directory="run directory", has_json=True)
    parser.add_argument("--to", type=Path, required=True, metavar="PATH", help="directory to write")
    parser.add_argument("--step", type=_step, help="checkpoint to export: a step, or best (default: the newest)")
    text = "of an adapter: the whole model that it makes of its base, in place of a PEFT directory"
    parser.add_argument("--merged", action="store_true", help=text)
    text = "of the weights (default: as the checkpoint stores them, float32; bfloat16 takes half as much room)"
    parser.add_argument("--dtype", default="", choices=["float32", "bfloat16", "float16"], help=text)
    text = "upload it to the Hugging Face hub, too, with a model card; a new repository is private"
    parser.add_argument("--push", default="", metavar="OWNER/NAME", help=text)
    parser.add_argument("--public", action="store_true", help="of --push: into a repository that all may read")
    text = "Teach a model by answers, before a run rewards its own: the tasks of CONFIG, with the answer in a column."
    parser = add("sft", text, _module("runtime.launch.sft"), takes_settings=True, has_json=True)
    parser.add_argument("config", type=Path, metavar="CONFIG", help="a run's file; set --learner.lr for it")
    parser.add_argument("--to", type=Path, required=True, metavar="PATH", help="model directory to write")
    parser.add_argument("--column", default="completion", help="that has the answers (default: completion)")
    parser.add_argument("--steps", type=int, required=True, help="of --rows-per-step rows each")
    parser.add_argument("--rows-per-step", type=int, default=32)
    parser.add_argument("--resume", action="store_true", help="go on with what was stopped")
    text = "Talk to a checkpoint of a run, or to any model; piped text is one message."
    parser = add("chat", text, _module("runtime.launch.chat"), has_json=True)
    parser.add_argument("target", type=Path, metavar="DIR|MODEL", help="run directory, model directory or hub id")
    parser.add_argument("--step", type=_step, help="checkpoint of the run: a step, or best (default: the newest)")
    parser.add_argument("--device", default="auto", help="cpu | cuda | cuda:0 ... | auto (a GPU if there is one)")
    parser.add_argument("--temperature", type=float, default=1.0, help="0: always the most likely token (default: 1)")
    parser.add_argument("--max-tokens", type=int, default=512, help="of one answer")


def _add_plan(add: Add) -> None:
    text = "What a run needs: the cheapest machines that keep the learner busy, and the bill."
    parser = add("plan", text, _module("planning.plan_command"), takes_settings=True, has_json=True)
    parser.add_argument("config", type=Path, metavar="CONFIG", help="configuration file of the run")
    parser.add_argument("--offers", type=Path, default=Path("offers.toml"), help="machines on offer (TOML)")
    parser.add_argument("--budget", type=float, metavar="USD", help="most that the whole run may cost")
    parser.add_argument("--rehearse", action="store_true", help="simulate the plan, too, with the real control code")
    given = parser.add_argument_group("measured or estimated", "Taken from --from DIR where a run of the kind exists.")
    given.add_argument("--from", dest="source", type=Path, metavar="DIR", help="a run whose metrics are to be used")
    for flag, symbol, what in (
        ("--train-seconds", "T", "the learner's seconds for one step"),
        ("--reward-seconds", "R", "your reward functions' seconds for one group"),
        ("--broadcast-seconds", "Tb", "publication until workers have it"),
        ("--snapshot-bytes", "G", "bytes of a full snapshot (default: the model)"),
        ("--delta-bytes", "D", "bytes of an update, where deltas are sent"),
        ("--uplink-mbps", "B0", "the head's upload (default: 1000)"),
        ("--reload-seconds", "L", "a worker's pause to load a snapshot"),
        ("--learner-memory-gb", "M", "memory of each of the learner's GPUs (default: this machine's)"),
    ):
        given.add_argument(flag, type=float, metavar=symbol, help=what)
    mode = parser.add_argument_group("what may be chosen")
    mode.add_argument("--publish-every", type=int, metavar="K", help="fix kappa instead of searching")
    mode.add_argument("--max-idle", type=float, default=0.02, help="learner's share of waiting that is fine (0.02)")
    mode.add_argument("--pause-during-broadcast", action="store_true", help="workers stop while a snapshot travels")


def _add_planning(add: Add) -> None:
    text = "Measure this machine's rollouts per second, as an entry for the offers file."
    parser = add("probe", text, _module("planning.probe"), takes_settings=True, has_json=True)
    what = "configuration file, or a model directory"
    parser.add_argument("target", type=Path, metavar="CONFIG|MODEL_DIR", help=what)
    parser.add_argument("--engine", default="", choices=["", *ENGINES])
    parser.add_argument("--seconds", type=float, default=30.0, help="how long to sample (30)")
    parser.add_argument("--name", default="this-machine", help="name of the offer")
    parser.add_argument("--price-usd-per-hour", type=float, default=0.0)
    text = "Run a scenario: the real control code, virtual machines, a virtual clock."
    parser = add("simulate", text, _module("planning.simulate"), has_json=True)
    what = "scenario file (TOML), as in simulations/"
    parser.add_argument("scenario", type=Path, metavar="SCENARIO", help=what)
    parser.add_argument("--seed", type=int, default=0, help="of all chance in it (0)")
    text = "What a run has cost: dollars by worker and by cause."
    add("cost", text, _module("planning.cost_report"), directory="run directory", has_json=True)


def _add_service(add: Add) -> None:
    text = "RL as a service: train and sample with the Tinker and Logits SDKs on machines of your own."
    parser = add("serve", text, _serve, has_json=True)
    parser.set_defaults(interrupted="")
    text = "the service's file, as examples/serve.toml; or `status`: who waits, who spent what (--port: as a page)"
    parser.add_argument("config", type=Path, metavar="CONFIG", help=text)
    parser.add_argument("--port", type=int, help="in place of the file's (0: any that is free)")
    where = "what it keeps: models, store, first API key (default: outputs/service)"
    parser.add_argument("--out", type=Path, default=Path("outputs/service"), metavar="DIR", help=where)
    parser.add_argument("--database", default="", metavar="URL", help="of status: if it is not SQLite in DIR")
    text = "The API keys of a service: list, add, revoke."
    parser = add("keys", text, _module("service.keys_command"), directory="directory of the service", has_json=True)
    parser.add_argument("--add", default="", metavar="TENANT", help="print a new key of this tenant")
    parser.add_argument("--scopes", default="train,sample", help="what it may do (train,sample)")
    parser.add_argument("--days", type=float, help="how long from now (default: for ever)")
    parser.add_argument("--per-minute", type=int, default=100_000, help="calls that it may make (100000)")
    parser.add_argument("--revoke", default="", metavar="KEY_ID", help="refuse this key from now on")
    parser.add_argument("--database", default="", metavar="URL", help="if it is not SQLite in the directory")


# ---- commands ----------------------------------------------------------------------------------------------------


def _run(options: argparse.Namespace) -> int:
    from echo2.runtime.launch.start import run
    from echo2.runtime.lifeline import end_with_supervisor

    end_with_supervisor(may_save=True)  # the session that called echo2.start
    given = options.config, options.out, options.resume, options.dry_run, options.overrides, options.json, options.like
    return run(*given, has_page=options.view, has_learner=not options.no_learner)


def _module(name: str, function: str = "run") -> Command:
    """A function of a module, which is imported when it runs."""
    return lambda options: int(getattr(import_module(f"echo2.{name}"), function)(options))


def _begin() -> None:
    """What head, learner and worker do before anything else."""
    from echo2.runtime import lifeline, process_log
    from echo2.transport.door import raise_descriptor_limit

    lifeline.end_with_supervisor()
    raise_descriptor_limit()
    process_log.start()


def _head(options: argparse.Namespace) -> int:
    import asyncio

    from echo2.runtime.head.process import forbid_torch, run_head
    from echo2.runtime.launch import start as launch

    _begin()
    rundir = launch.open_run(options.target, options.out, options.resume, options.overrides, options.like)
    forbid_torch()
    asyncio.run(run_head(rundir))
    return 0


def _learner(options: argparse.Namespace) -> int:
    from echo2.rundir import RunDir
    from echo2.runtime.learner.process import run_learner

    _begin()
    return run_learner(RunDir(options.directory), options.ticket)


def _worker(options: argparse.Namespace) -> int:
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is there; docs/operations.md
    from echo2.runtime.worker.process import WorkerOptions, run_worker
    from echo2.transport.tickets import Ticket

    ended: list[int] = []  # by SIGTERM, as who looks after machines ends them: no error

    def end(number: int, _frame: object) -> None:
        ended.append(number)
        if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as of a process that a script started with "&"
            signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.raise_signal(signal.SIGINT)  # either way it takes its leave

    signal.signal(signal.SIGTERM, end)
    _begin()
    names = [entry.name for entry in fields(WorkerOptions)]
    worker_options = WorkerOptions(**{name: getattr(options, name) for name in names})
    try:
        run = run_worker
        if Ticket.parse(options.ticket).role == "sampler":
            from echo2.service.sampler.machine import run_machine as run
        reason = run(options.ticket, options.state, worker_options)
    except KeyboardInterrupt:
        if not ended:
            raise
        print(options.interrupted, file=sys.stderr)
        return 0
    print(f"the run is over: {printable(reason)}")
    return 0


def _view(options: argparse.Namespace) -> int:
    from echo2.runtime import lifeline
    from echo2.views import serve

    lifeline.end_with_supervisor()  # that of `echo2 run --view`
    return serve.run(options)


def _status(options: argparse.Namespace) -> int:
    from echo2.rundir import RunDir, newest_run
    from echo2.views.status import read_status

    status = read_status(RunDir(options.directory) if options.directory else newest_run())
    if options.json:
        print(json.dumps(status))
        return 0
    from rich.console import Console

    from echo2.views.display import show_status

    show_status(status, Console())
    return 0


def _replay(options: argparse.Namespace) -> int:
    from echo2.rundir import RunDir
    from echo2.runtime.head.eventlog import replay

    found = replay(RunDir(options.directory).events)
    if options.json:
        print(json.dumps(asdict(found)))
    else:
        differ = f"{found.num_different} differ; the first: {found.first_difference}"
        verdict = differ if found.num_different else "all the same"
        print(f"{found.num_events} events of {found.num_heads} heads, {found.num_commands} commands: {verdict}")
        if found.num_headless:
            print(f"{found.num_headless} events before them can't be replayed: the log's oldest part is gone")
    return 0 if not found.num_different else 1


def _trust(options: argparse.Namespace) -> int:
    from echo2.rundir import RunDir
    from echo2.views import trust
    from echo2.views.status import read_status

    found = trust.rows(read_status(RunDir(options.directory)))
    if options.json:
        print(json.dumps(found))
        return 0
    from rich.console import Console

    trust.show(found, Console())
    return 0


def _step(text: str) -> int | str:
    if text == "best":
        return text
    if text.isdecimal():
        return int(text)
    raise argparse.ArgumentTypeError(f"{text!r} is neither a step nor `best`")


def _serve(options: argparse.Namespace) -> int:
    if options.config == Path("status"):
        return _module("service.status_command")(options)
    from echo2.service.serve import serve

    _begin()
    return serve(options.config, options.out, options.port)
