"""The command `echo2`. Modules that need torch are imported only by the commands that use them."""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import textwrap
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, fields
from functools import partial
from importlib import import_module
from pathlib import Path

from echo2 import __version__, config
from echo2.config.engines import ENGINES, NO_SLOT_LIMIT
from echo2.devices import NO_TORCH
from echo2.errors import Echo2Error, did_you_mean
from echo2.printable import printable, printable_lines

Command = Callable[[argparse.Namespace], int]
#: `_add` with its first argument.
Add = Callable[..., argparse.ArgumentParser]
#: Maximum length of a printed error, which may quote a peer or a file.
ERROR_CHARS_MAX = 10_000


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command. Return the exit status: 0 success, 1 a bug or a peer's fault, 2 the user's mistake, 3 a full
    disk, 130 interrupted.
    """
    parser = build_parser()
    options, unknown = parser.parse_known_args(arguments)
    options.given = sys.argv[1:] if arguments is None else arguments
    try:
        if options.takes_settings:
            refuse_unknown_settings(word for word in unknown if not _near_flag(word, options.parser, 0.8))
            options.overrides = {name: value for name, value in vars(options).items() if "." in name}
        if unknown:
            near = next((_near_flag(word, options.parser, 0.5) for word in unknown if word.startswith("--")), "")
            options.parser.error(f"unrecognized arguments: {' '.join(unknown)}{'.' if near else ''}{near}")
        command: Command = options.command
        return command(options)
    except Echo2Error as error:
        said, code = printable_lines(str(error), ERROR_CHARS_MAX), error.exit_status
        is_json = getattr(options, "json", False)
        print(json.dumps({"error": said, "status": code}) if is_json else f"error: {said}", file=sys.stderr)
        return code
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        print(f"error: {NO_TORCH}", file=sys.stderr)
        return 2
    except BrokenPipeError:
        return 0
    except KeyboardInterrupt:
        said = getattr(options, "interrupted", "interrupted")
        as_json = {"error": said or "interrupted", "status": 130}
        print(json.dumps(as_json) if getattr(options, "json", False) else said, file=sys.stderr)
        return 130


def _near_flag(word: str, parser: argparse.ArgumentParser, cutoff: float) -> str:
    """Return " Did you mean ...?" with the command's nearest flag that is no setting; empty if none is similar."""
    known = [flag for flag in parser._option_string_actions if flag.startswith("--") and "." not in flag]
    return did_you_mean(word.partition("=")[0], known, cutoff)


def refuse_unknown_settings(unknown: Iterable[str]) -> None:
    """Refuse a flag that argparse does not know: it may be a misspelt setting, or a setting without its section.

    Raises:
        UserError: names the nearest setting.
    """
    for word in unknown:
        if word.startswith("--"):
            section, _, name = word.removeprefix("--").partition("=")[0].partition(".")
            config.check_keys({section: {name: None} if name else None}, word)


def build_parser() -> argparse.ArgumentParser:
    """Build the parser of all commands."""
    parser = argparse.ArgumentParser(
        prog="echo2",
        description="Reinforcement learning for language models: one learner, rollout workers on machines anywhere.",
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
    """Add one command. `directory`: help text of its first argument DIR; empty: the command has none."""
    parser = commands.add_parser(name, help=text, description=textwrap.fill(text, 80), allow_abbrev=False)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter  # keeps the lines of `config.settings_help`
    parser.set_defaults(command=command, parser=parser, takes_settings=takes_settings)
    if directory:
        parser.add_argument("directory", type=Path, metavar="DIR", help=directory)
    if has_json:
        parser.add_argument("--json", action="store_true", help="print JSON")
    if takes_settings:
        for section, key, *_ in config.all_fields():
            parser.add_argument(f"--{section}.{key}", default=argparse.SUPPRESS, help=argparse.SUPPRESS)
    return parser


def _add_run(add: Add) -> None:
    text = "Train: start head, learner and workers on this machine, and restart those that die."
    parser = add("run", text, _run, takes_settings=True, has_json=True)
    parser.epilog = config.settings_help()
    text = "configuration file (TOML), or config.json of a run"
    parser.add_argument("config", type=Path, metavar="CONFIG", help=text)
    _add_out(parser)
    parser.add_argument("--view", action="store_true", help="also serve the dashboard, as `echo2 view` does")
    parser.add_argument("--no-learner", action="store_true", help="let a learner from elsewhere, or TRL, join")
    parser.add_argument("--dry-run", action="store_true", help="check the configuration and print it; start nothing")
    _add_from(parser)


def _add_demo(add: Add) -> None:
    text = "Train a model of 7 M parameters to sort digits, on this machine: two minutes, no download."
    parser = add("demo", text, _module("demo.command"), has_json=True)
    parser.add_argument("--out", type=Path, metavar="DIR", help="run directory (default: outputs/demo-<time>)")


def _add_out(parser: argparse.ArgumentParser) -> None:
    where = "run directory (default: outputs/<name of the file>)"
    parser.add_argument("--out", type=Path, metavar="DIR", help=where)
    parser.add_argument("--resume", action="store_true", help="continue the run in that directory")


def _add_from(parser: argparse.ArgumentParser) -> None:
    text = 'run whose measured times `publish_every = "auto"` uses (default with --resume: this run)'
    parser.add_argument("--from", dest="like", type=Path, metavar="DIR", help=text)


def _add_processes(add: Add) -> None:
    text = "Start only the head of a run, which leases tasks to workers and hands rollouts to the learner."
    parser = add("head", text, _head, takes_settings=True)
    text = "run directory, or configuration file with --out, --resume and settings, as for `echo2 run`"
    parser.add_argument("target", type=Path, metavar="DIR|CONFIG", help=text)
    _add_out(parser)
    _add_from(parser)
    text = "Start only the learner of a run, from its newest checkpoint."
    parser = add("learner", text, _learner, directory="run directory (config.json, checkpoints/)")
    parser.add_argument("--ticket", default="", help="the learner's ticket, if the head is on another machine")
    _add_worker(add("worker", "Join a run with a ticket, and sample rollouts for it.", _worker, has_json=True))


def _add_worker(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(interrupted="left the run; its leases go to other workers")
    flag = parser.add_argument
    flag("ticket", metavar="TICKET", help="the ticket, or @FILE that contains it")
    engines = ["auto", *ENGINES]
    flag("--engine", default="auto", choices=engines, help="software that samples tokens (default: the run's engine)")
    text = "Python that has vLLM installed (default: $ECHO2_ENGINE_PYTHON, or this Python)"
    flag("--engine-python", default="", metavar="PATH", help=text)
    text = "use a running server, which shares the worker's disk, instead of starting one"
    flag("--engine-url", default="", metavar="URL", help=text)
    text = 'arguments for the server that is started, for example --engine-args="--max-model-len 8192"'
    flag("--engine-args", default="", metavar="ARGS", help=text)
    flag("--device", default="auto", help="cpu | cuda | cuda:0 ... | auto (a GPU if there is one)")
    flag("--price-usd-per-hour", type=float, default=0.0, metavar="USD", help="price of this machine (default: 0)")
    flag("--offer", default="", metavar="NAME", help="name that the rent command of an offer gave this machine")
    flag("--slots", type=_num_slots, default=0, help="most rollouts to decode at once (0: as many as the run asks for)")
    text = "directory or hub id of the base model of a LoRA run (default: fetch it from the run)"
    flag("--base", default="", metavar="MODEL", help=text)
    text = "an environment installed on this machine that the run may use; may be repeated"
    flag("--allow-environment", dest="allow_environments", action="append", default=[], metavar="SPEC", help=text)
    text = "where to listen for other workers that fetch weights (default: any free port)"
    flag("--listen", default="", metavar="HOST:PORT", help=text)
    text = "address at which other workers reach this one (default: the one that the head sees)"
    flag("--advertise", default="", metavar="HOST[:PORT]", help=text)
    flag("--no-relay", dest="relays", action="store_false", help="send no weights to other workers")
    text = "directory for the worker's key and weights (default: in the user's state directory)"
    flag("--state", type=Path, metavar="DIR", help=text)
    text = "how long to wait for a head that is away (default: 600)"
    flag("--patience-seconds", type=float, default=600.0, metavar="SECONDS", help=text)


def _num_slots(text: str) -> int:
    if not text.isdecimal() or int(text) > NO_SLOT_LIMIT:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 0 to {NO_SLOT_LIMIT}")
    return int(text)


def _add_views(add: Add) -> None:
    parser = add("status", "Show who waits for whom, since when, until when, and why.", _status, has_json=True)
    where = "run directory (default: the newest below outputs/)"
    parser.add_argument("directory", type=Path, nargs="?", metavar="DIR", help=where)
    text = "Serve the dashboard: progress, waits, workers, cost, and rollouts token by token, in your browser."
    parser = add("view", text, _view, has_json=True)
    where = "run directories to show side by side (default: the newest below outputs/)"
    parser.add_argument("directories", type=Path, nargs="*", metavar="DIR", help=where)
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: 127.0.0.1)")
    parser.add_argument("--port", type=int, default=0, help="port to listen on (default: any free one)")
    text = "Count every group in a run's ledger: trained, retired, open, lost, doubled."
    add("audit", text, _module("views.audit"), directory="run directory", has_json=True)
    text = "Check that the planner decides again as it did: feed it a run's logged events, and compare its commands."
    add("replay", text, _replay, directory="run directory", has_json=True)


def _add_tickets(add: Add) -> None:
    where = "run directory, on the head's machine"
    invite, show, revoke = (_module("runtime.head.ticket_commands", name) for name in ("invite", "show", "revoke"))
    text = "Print a ticket for other people's machines, or renew one."
    parser = add("invite", text, invite, directory=where, has_json=True)
    parser.add_argument("--uses", type=int, default=20, help="how many (more) machines it admits (default: 20)")
    parser.add_argument("--days", type=float, default=30.0, help="days until it expires (default: 30)")
    text = "let this ticket admit more machines, or reopen it; its text does not change"
    parser.add_argument("--renew", default="", metavar="TICKET_ID", help=text)
    text = "List the tickets of a run: for whom, how often used, until when, and who joined with them."
    add("tickets", text, show, directory=where, has_json=True)
    text = "Check this machine, and with a ticket its way to the head: what is wrong, and what to do."
    parser = add("doctor", text, _module("planning.doctor"), has_json=True)
    parser.add_argument("ticket", nargs="?", default="", metavar="TICKET", help="a ticket, or @FILE that contains it")
    text = "Show what checks of strangers' rollouts found, by ticket, and which tickets are in quarantine."
    add("trust", text, _module("views.trust"), directory=where, has_json=True)
    text = "Shut a worker, or all that joined with a ticket, out of a run for good; others get their leases."
    parser = add("revoke", text, revoke, directory=where, has_json=True)
    parser.add_argument(
        "id", metavar="ID", help="a worker (w-..., see `echo2 status`) or a ticket (see `echo2 tickets`)"
    )


def _add_model_commands(add: Add) -> None:
    text = "Evaluate a checkpoint of a run, or any model, on the run's held-out tasks."
    parser = add("eval", text, _module("runtime.launch.evaluate"), takes_settings=True, has_json=True)
    parser.add_argument("target", type=Path, metavar="DIR|CONFIG", help="run directory, or configuration file")
    parser.add_argument("--step", type=_step, help="checkpoint to evaluate: a step, or `best` (default: the newest)")
    parser.add_argument("--model", default="", help="evaluate this model directory or hub id instead of a checkpoint")
    parser.add_argument("--greedy", action="store_true", help="take the likeliest token each time; a run samples")
    text = "also write all rollouts to this new file, one task a line (JSON)"
    parser.add_argument("--to", type=Path, metavar="FILE", help=text)
    text = "Write a checkpoint as a Hugging Face model directory."
    parser = add("export", text, _module("runtime.launch.export"), directory="run directory", has_json=True)
    parser.add_argument("--to", type=Path, required=True, metavar="PATH", help="directory to write")
    parser.add_argument("--step", type=_step, help="checkpoint to export: a step, or `best` (default: the newest)")
    text = "for a LoRA run: merge the adapter into its base model, instead of writing a PEFT directory"
    parser.add_argument("--merged", action="store_true", help=text)
    text = "precision of the weights (default: float32, as in the checkpoint)"
    parser.add_argument("--dtype", default="", choices=["float32", "bfloat16", "float16"], help=text)
    text = "also upload it to the Hugging Face hub, with a model card; a new repository is private"
    parser.add_argument("--push", default="", metavar="OWNER/NAME", help=text)
    parser.add_argument("--public", action="store_true", help="with --push: allow a public repository")
    text = "Supervised fine-tuning before a run, on the tasks of CONFIG and the answers in one of their columns."
    parser = add("sft", text, _module("runtime.launch.sft"), takes_settings=True, has_json=True)
    parser.add_argument("config", type=Path, metavar="CONFIG", help="configuration file; set --learner.lr, too")
    parser.add_argument("--to", type=Path, required=True, metavar="PATH", help="model directory to write")
    parser.add_argument("--column", default="completion", help="column that has the answers (default: completion)")
    parser.add_argument("--steps", type=int, required=True, metavar="N", help="training steps")
    parser.add_argument("--rows-per-step", type=int, default=32, metavar="N", help="rows in one step (default: 32)")
    parser.add_argument("--resume", action="store_true", help="continue what was interrupted")
    text = "Talk to a checkpoint of a run, or to any model. Piped text is one message."
    parser = add("chat", text, _module("runtime.launch.chat"), has_json=True)
    parser.add_argument("target", type=Path, metavar="DIR|MODEL", help="run directory, model directory or hub id")
    parser.add_argument("--step", type=_step, help="checkpoint of the run: a step, or `best` (default: the newest)")
    parser.add_argument("--system", default="", metavar="TEXT", help="system prompt before the conversation")
    parser.add_argument("--device", default="auto", help="cpu | cuda | cuda:0 ... | auto (a GPU if there is one)")
    parser.add_argument("--temperature", type=float, default=1.0, help="0: the most likely token (default: 1)")
    parser.add_argument("--max-tokens", type=int, default=512, help="most tokens in one answer (default: 512)")


def _add_plan(add: Add) -> None:
    text = "Plan a run: the cheapest machines that keep the learner busy, and the bill."
    parser = add("plan", text, _module("planning.plan_command"), takes_settings=True, has_json=True)
    parser.add_argument("config", type=Path, metavar="CONFIG", help="configuration file of the run")
    text = "machines on offer, as in examples/offers.toml (default: offers.toml)"
    parser.add_argument("--offers", type=Path, default=Path("offers.toml"), metavar="FILE", help=text)
    parser.add_argument("--budget", type=float, metavar="USD", help="most that the run may cost")
    parser.add_argument("--rehearse", action="store_true", help="also simulate the plan with the real control code")
    given = parser.add_argument_group("measured or estimated", "Flags override what --from DIR supplies.")
    given.add_argument("--from", dest="source", type=Path, metavar="DIR", help="a similar run that was measured")
    for flag, symbol, what in (
        ("--train-seconds", "T", "seconds of training in one step"),
        ("--reward-seconds", "R", "seconds that your reward functions need for one group"),
        ("--broadcast-seconds", "Tb", "seconds from publication until workers have a snapshot"),
        ("--snapshot-bytes", "G", "bytes of a full snapshot (default: from the model)"),
        ("--delta-bytes", "D", "bytes of a delta, where deltas are sent"),
        ("--uplink-mbps", "B0", "upload rate of the head in Mbit/s (default: 1000)"),
        ("--reload-seconds", "L", "seconds that a worker pauses to load a snapshot"),
        ("--learner-memory-gb", "M", "memory of each GPU of the learner in GB (default: this machine's)"),
    ):
        given.add_argument(flag, type=float, metavar=symbol, help=what)
    mode = parser.add_argument_group("choices")
    mode.add_argument("--publish-every", type=int, metavar="K", help="steps between snapshots (default: search)")
    mode.add_argument("--max-idle", type=float, default=0.02, help="share of time the learner may wait (default: 0.02)")
    mode.add_argument("--pause-during-broadcast", action="store_true", help="workers stop while a snapshot is sent")


def _add_planning(add: Add) -> None:
    text = "Measure this machine's rollouts per second, and print an entry for the offers file."
    parser = add("probe", text, _module("planning.probe"), takes_settings=True, has_json=True)
    what = "configuration file, or a model directory"
    parser.add_argument("target", type=Path, metavar="CONFIG|MODEL_DIR", help=what)
    parser.add_argument("--engine", default="", choices=ENGINES, help="engine to measure (default: the run's)")
    parser.add_argument("--seconds", type=float, default=30.0, help="how long to sample (default: 30)")
    parser.add_argument("--name", default="this-machine", help="name of the entry (default: this-machine)")
    parser.add_argument("--price-usd-per-hour", type=float, default=0.0, metavar="USD", help="its price (default: 0)")
    text = "Simulate a run before you pay for it: the real control code with virtual machines and a virtual clock."
    parser = add("simulate", text, _module("planning.simulate"), has_json=True)
    what = "scenario file (TOML), as in simulations/"
    parser.add_argument("scenario", type=Path, metavar="SCENARIO", help=what)
    parser.add_argument("--seed", type=int, default=0, help="seed of all randomness (default: 0)")
    text = "Show what a run has cost: dollars by machine and by cause."
    add("cost", text, _module("planning.cost_report"), directory="run directory", has_json=True)


def _add_service(add: Add) -> None:
    text = "Serve training and sampling on your machines to users of the Tinker and Logits SDKs."
    parser = add("serve", text, _serve, has_json=True)
    parser.set_defaults(interrupted="")
    text = "configuration file, like examples/serve.toml; or `status`: show requests, spending and machines"
    parser.add_argument("config", type=Path, metavar="CONFIG", help=text)
    parser.add_argument("--port", type=int, help="port, instead of the file's (0: any); with `status`: serve a page")
    where = "directory for models, database and the first API key (default: outputs/service)"
    parser.add_argument("--out", type=Path, default=Path("outputs/service"), metavar="DIR", help=where)
    parser.add_argument("--database", default="", metavar="URL", help="with `status`: database, if not SQLite in DIR")
    text = "List, add and revoke the API keys of a service."
    parser = add("keys", text, _module("service.keys_command"), directory="directory of the service", has_json=True)
    parser.add_argument("--add", default="", metavar="TENANT", help="print a new key for this tenant")
    parser.add_argument("--scopes", default="train,sample", help="what the new key may do (default: train,sample)")
    parser.add_argument("--days", type=float, help="days until the new key expires (default: never)")
    parser.add_argument("--per-minute", type=int, default=100_000, help="most calls a minute (default: 100000)")
    parser.add_argument("--revoke", default="", metavar="KEY_ID", help="refuse this key from now on")
    parser.add_argument("--database", default="", metavar="URL", help="database, if it is not SQLite in DIR")


# ---- commands ----------------------------------------------------------------------------------------------------


def _run(options: argparse.Namespace) -> int:
    from echo2.runtime.launch.resume import how_to_continue
    from echo2.runtime.launch.start import run
    from echo2.runtime.lifeline import end_with_supervisor

    options.interrupted = "interrupted" if options.dry_run else how_to_continue(options.given)
    end_with_supervisor(may_save=True)  # the supervisor is the session that called echo2.start
    given = options.config, options.out, options.resume, options.dry_run, options.overrides, options.json, options.like
    return run(*given, has_page=options.view, has_learner=not options.no_learner)


def _module(name: str, function: str = "run") -> Command:
    """Return a command that imports a module when it runs, and calls the module's function."""
    return lambda options: int(getattr(import_module(f"echo2.{name}"), function)(options))


def _begin() -> None:
    """Do what head, learner and worker do before anything else."""
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
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported; see docs/operations.md
    from echo2.runtime.worker.process import WorkerOptions, run_worker
    from echo2.transport.tickets import Ticket

    ended: list[int] = []  # signals by which a machine manager ended this worker: no error

    def end(number: int, _frame: object) -> None:
        ended.append(number)
        if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as in a process that a script started with "&"
            signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.raise_signal(signal.SIGINT)  # in both cases the worker leaves the run in good order

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
        if options.json:
            print(json.dumps({"ended": options.interrupted}))
        else:
            print(options.interrupted, file=sys.stderr)
        return 0
    print(json.dumps({"ended": printable(reason)}) if options.json else f"the run is over: {printable(reason)}")
    return 0


def _view(options: argparse.Namespace) -> int:
    from echo2.runtime import lifeline
    from echo2.views import serve

    lifeline.end_with_supervisor()  # the supervisor is `echo2 run --view`
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
        heads = f"{found.num_heads} head{'' if found.num_heads == 1 else 's'}"
        print(f"{found.num_events} events of {heads}, {found.num_commands} commands: {verdict}")
        if found.num_headless:
            print(f"{found.num_headless} events before them can't be replayed: the log's oldest part is gone")
    return 0 if not found.num_different else 1


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
