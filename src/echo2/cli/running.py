"""The commands that train: run, demo, head, learner, worker."""

from __future__ import annotations

import argparse
import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path

from echo2 import config
from echo2.cli.adding import Add, begin_process, service_module
from echo2.config.values import AUTO, ENGINES, NO_SLOT_LIMIT
from echo2.core.printable import printable

#: The demo's configuration, and its model as the configuration names it.
DEMO = Path(__file__).parents[1] / "demo" / "sort.toml"
DEMO_MODEL = Path("outputs/models/digit_sorting")


def add_run(add: Add) -> None:
    """Add `run`."""
    text = "Train: start head, learner and workers on this machine, and restart those that die."
    parser = add("run", text, _run, takes_settings=True, has_json=True)
    parser.epilog = config.settings_help()
    text = "configuration file (TOML), or config.json of a run"
    parser.add_argument("config", type=Path, nargs="?", metavar="CONFIG", help=text)
    _add_out(parser)
    parser.add_argument("--view", action="store_true", help="also serve the dashboard, as `echo2 view` does")
    parser.add_argument("--no-learner", action="store_true", help="let a learner from elsewhere, or TRL, join")
    parser.add_argument("--dry-run", action="store_true", help="check the configuration and print it; start nothing")


def add_demo(add: Add) -> None:
    """Add `demo`."""
    text = "Train a model of 7 M parameters to sort digits, on this machine: three minutes, no download."
    parser = add("demo", text, _demo, has_json=True)
    parser.add_argument("--out", type=Path, metavar="DIR", help="run directory (default: outputs/demo-<time>)")


def _add_out(parser: argparse.ArgumentParser) -> None:
    where = "run directory (default: outputs/<name of the file>)"
    parser.add_argument("--out", type=Path, metavar="DIR", help=where)
    parser.add_argument("--resume", action="store_true", help="continue the run in that directory")
    text = "continue the run that this store keeps (its head.store) in an empty --out; takes no CONFIG"
    parser.add_argument("--resume-from", default="", metavar="URL", help=text)
    text = "with --resume-from: do so when the run's head gives no sign of life any more, and wait until then"
    parser.add_argument("--standby", action="store_true", help=text)


def add_processes(add: Add) -> None:
    """Add `head`, `learner` and `worker`."""
    text = "Start only the head of a run, which leases tasks to workers and hands rollouts to the learner."
    parser = add("head", text, _head, takes_settings=True)
    text = "run directory, or configuration file with --out, --resume and settings, as for `echo2 run`"
    parser.add_argument("target", type=Path, nargs="?", metavar="DIR|CONFIG", help=text)
    _add_out(parser)
    text = "Start only the learner of a run, from its newest checkpoint."
    parser = add("learner", text, _learner, directory="run directory (config.json, checkpoints/)")
    parser.add_argument("--ticket", default="", help="the learner's ticket, if the head is on another machine")
    _add_card(parser)
    _add_worker(add("worker", "Join a run with a ticket, and sample rollouts for it.", _worker, has_json=True))


def _add_worker(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(interrupted="left the run; its leases go to other workers")
    flag = parser.add_argument
    flag("ticket", metavar="TICKET", help="the ticket, or @FILE that contains it")
    text = f"software that samples tokens: {', '.join(ENGINES)} (default: the run's engine)"
    flag("--engine", default=AUTO, choices=ENGINES, metavar="NAME", help=text)
    text = "Python that has vLLM installed (default: $ECHO2_ENGINE_PYTHON, or this Python)"
    flag("--engine-python", default="", metavar="PATH", help=text)
    text = "use a running server, which shares the worker's disk, instead of starting one"
    flag("--engine-url", default="", metavar="URL", help=text)
    text = 'arguments for the server that is started, for example --engine-args="--max-model-len 8192"'
    flag("--engine-args", default="", metavar="ARGS", help=text)
    flag("--device", default="auto", help="cpu | cuda | cuda:0 | mps | xpu ... | auto (a GPU if there is one)")
    flag("--price-usd-per-hour", type=float, default=0.0, metavar="USD", help="price of this machine (default: 0)")
    flag("--offer", default="", metavar="NAME", help="name that the rent command of an offer gave this machine")
    flag("--slots", type=_num_slots, default=0, help="most rollouts to decode at once (0: as many as the run says)")
    text = "directory or hub id of the base model of a LoRA run (default: fetch it from the run)"
    flag("--base", default="", metavar="MODEL", help=text)
    text = "an environment installed on this machine that the run may use; may be repeated"
    flag("--allow-environment", dest="allow_environments", action="append", default=[], metavar="SPEC", help=text)
    text = "sample only while other programs need little and there is mains, on half the cores, in half the memory"
    flag("--at-home", action="store_true", help=text)
    text = "memory that the worker may use (default: .9 of the machine's; with --at-home, half)"
    flag("--max-memory-gb", type=_positive, default=0.0, metavar="GB", help=text)
    text = "cores that the worker may use (default: one thread computes; with --at-home, half the cores)"
    flag("--max-cores", type=_num_cores, default=0, metavar="N", help=text)
    text = "where to listen for other workers that fetch weights (default: any free port)"
    flag("--listen", default="", metavar="HOST:PORT", help=text)
    text = "address at which other workers reach this one (default: the one that the head sees)"
    flag("--advertise", default="", metavar="HOST[:PORT]", help=text)
    flag("--no-relay", dest="relays", action="store_false", help="send no weights to other workers")
    text = "directory for the worker's key and weights (default: in the user's state directory)"
    flag("--state", type=Path, metavar="DIR", help=text)
    _add_card(parser)
    text = "how long to wait for a head that is away (default: 600)"
    flag("--patience-seconds", type=float, default=600.0, metavar="SECONDS", help=text)


def _add_card(parser: argparse.ArgumentParser) -> None:
    text = "take turns with the run's other processes on one GPU, by locks in this directory"
    parser.add_argument("--card", default="", metavar="DIR", help=text)


def _num_slots(text: str) -> int:
    if not text.isdecimal() or int(text) > NO_SLOT_LIMIT:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 0 to {NO_SLOT_LIMIT}")
    return int(text)


def _num_cores(text: str) -> int:
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of cores, 1 or more")
    return int(text)


def _positive(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0.0 < number < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0")
    return number


# ---- commands ----------------------------------------------------------------------------------------------------


def _run(options: argparse.Namespace) -> int:
    from echo2.core.child import end_with_supervisor
    from echo2.launch.start import directory, how_to_continue, run

    fetched = ["run", f"{options.out}/config.json", "--out", str(options.out)]
    then = how_to_continue(fetched if options.resume_from else options.argv)
    end_with_supervisor(may_save=True)  # the supervisor is the session that called echo2.start
    target = _target(options, options.config, has_learner=not options.no_learner, has_workers=True)
    if target is None:
        return 0
    arguments = target, options.out, options.resume, options.dry_run, options.overrides, options.json
    with _interrupted(options, directory(target, options.out), "" if options.dry_run else then):
        return run(*arguments, has_page=options.view, has_learner=not options.no_learner, then=then)


@contextmanager
def _interrupted(options: argparse.Namespace, where: Path, then: str) -> Iterator[None]:
    """Say how a run goes on that is interrupted, if it has begun."""
    try:
        yield
    except KeyboardInterrupt:
        is_begun = (where / "config.json").is_file()
        state = then if is_begun or not then else "the run had not begun"
        options.interrupted = f"interrupted; {state}" if state else "interrupted"
        raise


def _demo(options: argparse.Namespace) -> int:
    """Build the model unless it exists, in a separate process, and start an ordinary run.

    Raises:
        UserError: torch is not installed, the model was not built, or as `start.run`.
    """
    from echo2.core.devices import require_torch
    from echo2.core.errors import UserError
    from echo2.launch.start import how_to_continue, run

    require_torch()
    if not (DEMO_MODEL / "config.json").is_file():
        print("Building the demo's model and warming it up (once; about a minute) ...", file=sys.stderr)
        command = [sys.executable, "-m", "echo2.demo.digit_sorting", "--out", str(DEMO_MODEL)]
        options.interrupted = "interrupted; the next `echo2 demo` builds the model from the start"
        if subprocess.run(command, check=False, stdout=sys.stderr).returncode:
            raise UserError(f"The demo's model was not built in {DEMO_MODEL}. The lines above say why.")
    where = options.out or Path("outputs") / time.strftime("demo-%Y%m%d-%H%M%S")
    then = how_to_continue(["run", str(where / "config.json"), "--out", str(where)])
    with _interrupted(options, where, then):
        return run(DEMO, where, False, False, {}, options.json, then=then)


def _target(
    options: argparse.Namespace, path: Path | None, has_learner: bool = False, has_workers: bool = False
) -> Path | None:
    """Return the configuration or directory to start from; with --resume-from, after the run was fetched. None: it
    ended while this standby waited.

    Raises:
        UserError: there must be one of both.
    """
    from echo2.core.errors import UserError

    if bool(path) == bool(options.resume_from):
        raise UserError("Give a configuration file, or --resume-from URL with an empty --out DIR; one of both.")
    if options.standby and not options.resume_from:
        raise UserError("--standby needs --resume-from URL, the head.store of the run that it waits for.")
    if path is not None:
        return path
    if options.out is None:
        raise UserError(f"--resume-from {options.resume_from} needs --out DIR, an empty directory on this machine.")
    from echo2.launch.start import fetched

    options.resume = True
    is_standby = options.standby and not getattr(options, "dry_run", False)
    outcome = fetched(options.resume_from, options.out, options.overrides, is_standby, has_learner, has_workers)
    if isinstance(outcome, str):
        print(f"the run is over, and this standby is not needed: {printable(outcome)}", file=sys.stderr)
        return None
    target, options.overrides = outcome
    return target


def _head(options: argparse.Namespace) -> int:
    import asyncio

    from echo2.core.devices import forbid_torch
    from echo2.head.serve.head_process import run_head
    from echo2.launch import start as launch

    begin_process("head")
    target = _target(options, options.target)
    if target is None:
        return 0
    rundir = launch.open_run(target, options.out, options.resume, options.overrides)
    forbid_torch()
    asyncio.run(run_head(rundir))
    return 0


def _learner(options: argparse.Namespace) -> int:
    from echo2.config.rundir import RunDir
    from echo2.learner.learner_process import run_learner

    begin_process("learner")
    return run_learner(RunDir(options.directory), options.ticket, options.card)


@contextmanager
def leaving_on_sigterm() -> Iterator[list[int]]:
    """Have SIGTERM do what Ctrl-C does within the block, so that a worker that a machine manager ends leaves the run
    properly. Its value is a list to which the signal is added: then its end is no error.

    asyncio takes SIGINT over and cancels the main task. Where SIGINT is ignored, as in a process that a script started
    with "&", it does not; a KeyboardInterrupt raised anywhere within the loop makes it cancel all tasks at once, and
    gRPC's server, without its own ones, writes to freed memory. So SIGINT is blocked there, and not ignored.
    """
    ended: list[int] = []

    def end(number: int, _frame: object) -> None:
        ended.append(number)
        os.kill(os.getpid(), signal.SIGINT)  # one with any that was blocked
        signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGINT,))

    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    try:
        if handlers[signal.SIGINT] is signal.SIG_IGN:
            signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT,))
            signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGTERM, end)
        yield ended
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def _worker(options: argparse.Namespace) -> int:
    from echo2.core.errors import UserError
    from echo2.transport.tickets import Ticket
    from echo2.worker.at_home import give_cores
    from echo2.worker.joining import run_worker
    from echo2.worker.worker_process import WorkerOptions

    give_cores(options.at_home, options.max_cores)
    begin_process("worker")
    names = [entry.name for entry in fields(WorkerOptions)]
    worker_options = WorkerOptions(**{name: getattr(options, name) for name in names})
    run, role = run_worker, Ticket.parse(options.ticket).role
    if role == "learner":
        raise UserError(
            "This is the ticket of the run's learner: `echo2 learner DIR --ticket @FILE`. A worker joins with the "
            "file `ticket` in the run directory, or with one that `echo2 invite` prints."
        )
    if role == "sampler":
        run = service_module("sampler.machine").run_machine
    with leaving_on_sigterm() as ended:
        try:
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
