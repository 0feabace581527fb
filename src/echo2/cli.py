"""The command `echo2`. Light: whatever needs torch is imported by the command that needs it."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from echo2 import __version__, config
from echo2.errors import Echo2Error, NoRoomError, UserError
from echo2.planning import commands as planning
from echo2.printable import printable, printable_lines

Command = Callable[[argparse.Namespace], int]
#: Of an error, which may quote a peer or a file.
ERROR_CHARS_MAX = 10_000


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command. Exit status: 0 done, 1 our fault or a peer's, 2 the user's mistake, 3 a full disk,
    130 interrupted.
    """
    parser = build_parser()
    settings, others = split_settings(sys.argv[1:] if arguments is None else arguments)
    options, unknown = parser.parse_known_args(others)
    takes_settings = getattr(options, "takes_settings", False)
    try:
        if takes_settings:
            options.overrides = settings_from_flags(settings)
            refuse_bare_settings(unknown)
        elif settings:
            unknown += [flag for flag, _ in settings]
        if unknown:
            parser.error(f"unrecognized arguments: {' '.join(unknown)}")
        command: Command = options.command
        return command(options)
    except UserError as error:
        print(f"error: {printable_lines(str(error), ERROR_CHARS_MAX)}", file=sys.stderr)
        return 3 if isinstance(error, NoRoomError) else 2
    except Echo2Error as error:
        print(f"error: {printable_lines(str(error), ERROR_CHARS_MAX)}", file=sys.stderr)
        return 1
    except BrokenPipeError:
        return 0
    except KeyboardInterrupt:
        print("interrupted; continue a run with --resume", file=sys.stderr)
        return 130


def split_settings(arguments: Sequence[str]) -> tuple[list[tuple[str, str | None]], list[str]]:
    """The dotted flags with their values, and all other words. Done before argparse, which would take the value of a
    flag that it does not know for an argument of its own."""
    settings: list[tuple[str, str | None]] = []
    others: list[str] = []
    words = iter(arguments)
    for word in words:
        flag, equals, value = word.partition("=")
        if flag.startswith("--") and "." in flag:
            settings.append((flag, value if equals else next(words, None)))
        else:
            others.append(word)
    return settings, others


def settings_from_flags(settings: Iterable[tuple[str, str | None]]) -> dict[str, str]:
    """``[("--learner.lr", "1e-5")]`` as {"learner.lr": "1e-5"}; of a flag given twice, the last counts.

    Raises:
        UserError: no such setting, or no value.
    """
    overrides: dict[str, str] = {}
    for flag, value in settings:
        name = flag.removeprefix("--").replace("-", "_")
        section, _, key = name.partition(".")
        config.check_keys({section: {key: None}}, flag)
        if value is None:
            raise UserError(f"{flag} needs a value.")
        overrides[name] = value
    return overrides


def refuse_bare_settings(unknown: Sequence[str]) -> None:
    """An unknown flag may be a setting without its section: say which it could be.

    Raises:
        UserError: with the nearest setting.
    """
    for word in unknown:
        if word.startswith("--"):
            config.check_keys({word.removeprefix("--").partition("=")[0].replace("-", "_"): None}, word)


def settings_help() -> str:
    """Every setting of the configuration file, as a flag."""
    lines, last = ["settings (keys of the configuration file, section by section):"], ""
    for section, name, _, default, description in config.all_fields():
        if section != last:
            lines.append(f"\n  [{section}]")
            last = section
        shown = json.dumps(default)
        lines.append(f"  --{section}.{name} ({shown})\n        {description}")
    return "\n".join(lines)


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="echo2",
        description="Reinforcement learning for language models: one learner, kept busy by cheap machines anywhere.",
    )
    parser.add_argument("--version", action="version", version=f"echo2 {__version__}")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    _add_run(commands)
    _add_processes(commands)
    _add_views(commands)
    _add_tickets(commands)
    _add_model_commands(commands)
    planning.add_commands(lambda name, text, command: _add(commands, name, text, command))
    return parser


def _add(
    commands: argparse._SubParsersAction[argparse.ArgumentParser], name: str, text: str, command: Command
) -> argparse.ArgumentParser:
    parser = commands.add_parser(
        name, help=text, description=text, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.set_defaults(command=command)
    return parser


def _add_run(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = _add(commands, "run", "Train: start head, learner and workers on this machine and look after them.", _run)
    parser.epilog = settings_help()
    parser.set_defaults(takes_settings=True)
    parser.add_argument(
        "config", type=Path, metavar="CONFIG", help="configuration file (TOML), or config.json of a run"
    )
    parser.add_argument("--out", type=Path, help="run directory (default: outputs/<name of the file>)")
    parser.add_argument("--resume", action="store_true", help="continue the run in that directory")
    parser.add_argument(
        "--dry-run", action="store_true", help="check everything, print the resolved configuration, start nothing"
    )
    parser.add_argument("--json", action="store_true", help="print the summary as JSON")
    _add_from(parser)


def _add_from(parser: argparse.ArgumentParser) -> None:
    text = 'a run whose measured times `publish_every = "auto"` is to follow (default with --resume: this run)'
    parser.add_argument("--from", dest="like", type=Path, metavar="DIR", help=text)


def _add_processes(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = _add(commands, "head", "Start the control plane of a run alone.", _head)
    parser.epilog = "Give a run directory, or a configuration file (then --out, --resume and settings as for `run`)."
    parser.set_defaults(takes_settings=True)
    parser.add_argument("target", type=Path, metavar="DIR|CONFIG")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--resume", action="store_true")
    _add_from(parser)
    parser = _add(
        commands, "learner", "Start the learner of a run alone; it goes on from the newest checkpoint.", _learner
    )
    parser.add_argument("directory", type=Path, metavar="DIR", help="the run directory (config.json, checkpoints/)")
    parser.add_argument("--ticket", default="", help="learner ticket, when the head is on another machine")
    parser = _add(commands, "worker", "Join a run with a ticket and make rollouts for it.", _worker)
    parser.add_argument("ticket", metavar="TICKET", help="the ticket, or @FILE that holds it")
    parser.add_argument("--engine", default="compact", choices=["compact", "transformers", "fake"])
    parser.add_argument("--device", default="auto", help="cpu | cuda | cuda:0 ... | auto")
    parser.add_argument("--price-usd-per-hour", type=float, default=0.0, help="what this machine costs")
    parser.add_argument(
        "--offer", default="", metavar="NAME", help="name of this machine, as the rent command of an offer got it"
    )
    parser.add_argument(
        "--max-groups", type=int, default=0, help="groups to sample together at most (0: as the run asks)"
    )
    parser.add_argument(
        "--allow-environment",
        action="append",
        default=[],
        metavar="SPEC",
        help="an environment installed here that the run may play",
    )
    parser.add_argument(
        "--listen", default="", metavar="HOST:PORT", help="where other workers reach this one (default: any free port)"
    )
    parser.add_argument(
        "--advertise", default="", metavar="HOST[:PORT]", help="where they dial it (default: where the head sees it)"
    )
    parser.add_argument("--no-relay", action="store_true", help="never send weights to other workers")
    parser.add_argument(
        "--state", type=Path, help="where key and snapshots are kept (default: the user's state directory)"
    )
    parser.add_argument(
        "--patience-seconds", type=float, default=600.0, help="how long to look for a head that is away"
    )


def _add_views(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = _add(commands, "status", "Who waits for whom, since when, until when, and why.", _status)
    parser.add_argument(
        "directory", type=Path, nargs="?", metavar="DIR", help="run directory (default: the newest below outputs/)"
    )
    parser.add_argument("--json", action="store_true")
    parser = _add(
        commands, "audit", "Count every group of a run's ledger: trained, retired, open, lost, doubled.", _audit
    )
    parser.add_argument("directory", type=Path, metavar="DIR")
    parser.add_argument("--json", action="store_true")
    parser = _add(
        commands, "replay", "Feed a run's logged events to the planner again and compare its commands.", _replay
    )
    parser.add_argument("directory", type=Path, metavar="DIR")
    parser.add_argument("--json", action="store_true")


def _add_tickets(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    where = "run directory, on the head's machine"
    parser = _add(commands, "invite", "Print a ticket for machines of others, or renew one.", _invite)
    parser.add_argument("directory", type=Path, metavar="DIR", help=where)
    parser.add_argument("--uses", type=int, default=20, help="machines that it admits (with --renew: more of them)")
    parser.add_argument("--days", type=float, default=30.0, help="how long from now")
    parser.add_argument(
        "--renew", default="", metavar="TICKET_ID", help="let this one admit more, or open it again; its text stays"
    )
    parser = _add(commands, "tickets", "The tickets of a run: whose, used, until when, who came by them.", _tickets)
    parser.add_argument("directory", type=Path, metavar="DIR", help=where)
    parser.add_argument("--json", action="store_true")
    text = "Shut a worker, or all who came by a ticket, out of a run, now and for good; their leases go to others."
    parser = _add(commands, "revoke", text, _revoke)
    parser.add_argument("directory", type=Path, metavar="DIR", help=where)
    parser.add_argument("id", metavar="ID", help="w-..., as `echo2 status` shows it, or of a ticket")


def _add_model_commands(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = _add(commands, "eval", "Evaluate a checkpoint of a run, or any model, on the run's held-out tasks.", _eval)
    parser.set_defaults(takes_settings=True)
    parser.add_argument("target", type=Path, metavar="DIR|CONFIG", help="run directory, or configuration file")
    parser.add_argument("--step", type=int, help="checkpoint to evaluate (default: the newest)")
    parser.add_argument("--model", default="", help="a model directory or hub id instead of a checkpoint")
    parser.add_argument("--json", action="store_true")
    parser = _add(commands, "export", "Write a checkpoint as a Hugging Face model directory.", _export)
    parser.add_argument("directory", type=Path, metavar="DIR")
    parser.add_argument("--to", type=Path, required=True, metavar="PATH")
    parser.add_argument("--step", type=int, help="checkpoint to export (default: the newest)")


# ---- commands ----------------------------------------------------------------------------------------------------


def _run(options: argparse.Namespace) -> int:
    from echo2.runtime import launch

    return launch.run(
        options.config, options.out, options.resume, options.dry_run, options.overrides, options.json, options.like
    )


def _begin() -> None:
    """What head, learner and worker do before anything else."""
    from echo2.runtime import process_log
    from echo2.transport.door import raise_descriptor_limit

    raise_descriptor_limit()
    process_log.start()


def _head(options: argparse.Namespace) -> int:
    import asyncio

    from echo2.runtime import launch, lifeline
    from echo2.runtime.head_process import forbid_torch, run_head

    lifeline.hold_on()
    _begin()
    rundir = launch.open_run(options.target, options.out, options.resume, options.overrides, options.like)
    forbid_torch()
    asyncio.run(run_head(rundir))
    return 0


def _learner(options: argparse.Namespace) -> int:
    from echo2.runtime import lifeline
    from echo2.runtime.learner_process import run_learner
    from echo2.runtime.rundir import RunDir

    lifeline.hold_on()
    _begin()
    return run_learner(RunDir(options.directory), options.ticket)


def _worker(options: argparse.Namespace) -> int:
    from echo2.runtime import lifeline
    from echo2.runtime.worker import WorkerOptions, run_worker

    lifeline.hold_on()
    _begin()
    worker_options = WorkerOptions(
        engine=options.engine,
        device=options.device,
        price_usd_per_hour=options.price_usd_per_hour,
        max_groups=options.max_groups,
        allow_environments=tuple(options.allow_environment),
        patience_seconds=options.patience_seconds,
        listen=options.listen,
        advertise=options.advertise,
        relays=not options.no_relay,
        offer=options.offer,
    )
    reason = run_worker(options.ticket, options.state, worker_options)
    print(f"the run is over: {printable(reason)}")
    return 0


def _status(options: argparse.Namespace) -> int:
    from echo2.runtime.rundir import RunDir, newest_run
    from echo2.runtime.status import read_status

    status = read_status(RunDir(options.directory) if options.directory else newest_run())
    if options.json:
        print(json.dumps(status))
        return 0
    from rich.console import Console

    from echo2.runtime.display import show_status

    show_status(status, Console())
    return 0


def _audit(options: argparse.Namespace) -> int:
    from echo2.buffer.audit import audit
    from echo2.runtime.rundir import RunDir

    found = audit(RunDir(options.directory).ledger)
    if options.json:
        print(json.dumps(found.to_dict()))
    else:
        for key, value in found.to_dict().items():
            shown = (
                ", ".join(f"{count} {why}" for why, count in value.items()) or "0" if isinstance(value, dict) else value
            )
            print(f"{key:>14}  {shown}")
    return 0 if found.lost == found.doubled == 0 else 1


def _replay(options: argparse.Namespace) -> int:
    from echo2.runtime.eventlog import replay
    from echo2.runtime.rundir import RunDir

    found = replay(RunDir(options.directory).events)
    if options.json:
        from dataclasses import asdict

        print(json.dumps(asdict(found)))
    else:
        verdict = (
            "all the same"
            if not found.num_different
            else f"{found.num_different} differ; the first: {found.first_difference}"
        )
        print(f"{found.num_events} events of {found.num_heads} heads, {found.num_commands} commands: {verdict}")
        if found.num_headless:
            print(f"{found.num_headless} events before them can't be replayed: the log's oldest part is gone")
    return 0 if not found.num_different else 1


def _invite(options: argparse.Namespace) -> int:
    from echo2.runtime import tickets

    if options.renew:
        tickets.renew(options.directory, options.renew, options.uses, options.days)
        print(f"{options.renew} admits {options.uses} more, for {options.days:g} days")
    else:
        print(tickets.invite(options.directory, options.uses, options.days))
    return 0


def _tickets(options: argparse.Namespace) -> int:
    from echo2.runtime import tickets

    found = tickets.open_identity(options.directory).tickets()
    if options.json:
        print(json.dumps([tickets.describe(ticket) for ticket in found]))
        return 0
    from rich.console import Console

    tickets.show(found, Console())
    return 0


def _revoke(options: argparse.Namespace) -> int:
    from echo2.runtime import tickets

    closed = tickets.open_identity(options.directory).revoke(options.id)
    print(
        f"{options.id} is revoked" + (f"; ticket {closed}, by which it came, admits nobody any more" if closed else "")
    )
    return 0


def _eval(options: argparse.Namespace) -> int:
    from echo2.runtime.evaluate import evaluate

    values = evaluate(options.target, options.step, options.model, options.overrides)
    if options.json:
        print(json.dumps(values))
    else:
        print(f"accuracy {values['eval/accuracy']:.4f} on {values['eval/num_tasks']} tasks ({values['model']})")
    return 0


def _export(options: argparse.Namespace) -> int:
    from echo2.runtime.evaluate import export

    print(f"exported {export(options.directory, options.step, options.to)} to {options.to}")
    return 0
