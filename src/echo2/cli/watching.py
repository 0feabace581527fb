"""The commands that show a run or let machines in: status, view, bundle, audit, replay, invite, trust ..."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path

from echo2.cli.adding import Add, module_command


def add_views(add: Add) -> None:
    """Add `status`, `view`, `bundle`, `audit` and `replay`."""
    parser = add("status", "Show who waits for whom, since when, until when, and why.", _status, has_json=True)
    where = "run directory (default: the newest below outputs/)"
    parser.add_argument("directory", type=Path, nargs="?", metavar="DIR", help=where)
    text = "Serve the dashboard: progress, waits, workers, cost, and rollouts token by token, in your browser."
    parser = add("view", text, _view, has_json=True)
    where = "run directories to show side by side (default: the newest below outputs/)"
    parser.add_argument("directories", type=Path, nargs="*", metavar="DIR", help=where)
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: 127.0.0.1)")
    parser.add_argument("--port", type=int, default=0, help="port to listen on (default: any free one)")
    text = "Pack what a bug report needs into one file, without keys, tickets, prompts and completions."
    parser = add("bundle", text, _bundle, directory="run directory", has_json=True)
    parser.add_argument("--to", type=Path, metavar="FILE", help="file to write (default: echo2-bundle-NAME.tar.gz)")
    text = "Count every group in a run's ledger: trained, retired, open, lost, doubled."
    add("audit", text, module_command("echo2.head.ledger.audit"), directory="run directory", has_json=True)
    text = "Check that the planner decides again as it did: feed it a run's logged events, and compare its commands."
    add("replay", text, _replay, directory="run directory", has_json=True)


def add_tickets(add: Add) -> None:
    """Add `invite`, `tickets`, `doctor`, `trust` and `revoke`."""
    where = "run directory, on the head's machine"
    invite, show, revoke = (
        module_command("echo2.head.strangers.tickets", f"{name}_command") for name in ("invite", "list", "revoke")
    )
    text = "Print a ticket for other people's machines, or renew one."
    parser = add("invite", text, invite, directory=where, has_json=True)
    parser.add_argument("--uses", type=int, default=20, help="how many (more) machines it admits (default: 20)")
    parser.add_argument("--days", type=float, default=30.0, help="days until it expires (default: 30)")
    text = "let this ticket admit more machines, or reopen it; its text does not change"
    parser.add_argument("--renew", default="", metavar="TICKET_ID", help=text)
    text = "List the tickets of a run: for whom, how often used, until when, and who joined with them."
    add("tickets", text, show, directory=where, has_json=True)
    text = "Check this machine, and with a ticket its way to the head: what is wrong, and what to do."
    parser = add("doctor", text, module_command("echo2.planning.doctor"), has_json=True)
    parser.add_argument("ticket", nargs="?", default="", metavar="TICKET", help="a ticket, or @FILE that contains it")
    text = "Show what checks of strangers' rollouts found, by ticket, and which tickets are in quarantine."
    add("trust", text, module_command("echo2.views.status", "trust_command"), directory=where, has_json=True)
    text = "Shut a worker, or all that joined with a ticket, out of a run for good; others get their leases."
    parser = add("revoke", text, revoke, directory=where, has_json=True)
    parser.add_argument(
        "id", metavar="ID", help="a worker (w-..., see `echo2 status`) or a ticket (see `echo2 tickets`)"
    )


def _view(options: argparse.Namespace) -> int:
    from echo2.core import child
    from echo2.views import serve

    child.end_with_supervisor()  # the supervisor is `echo2 run --view`
    return serve.run(options)


def _status(options: argparse.Namespace) -> int:
    from echo2.config.rundir import RunDir, newest_run
    from echo2.views.run_view import read_status

    status = read_status(RunDir(options.directory) if options.directory else newest_run())
    if options.json:
        print(json.dumps(status))
        return 0
    from rich.console import Console

    from echo2.views.status import show_status

    show_status(status, Console())
    return 0


def _bundle(options: argparse.Namespace) -> int:
    from echo2.config.rundir import RunDir
    from echo2.planning.doctor import machine
    from echo2.views.run_files import pack

    to = options.to or Path(f"echo2-bundle-{options.directory.resolve().name}.tar.gz")
    names = pack(RunDir(options.directory), to, [asdict(finding) for finding in machine(options.directory)])
    if options.json:
        print(json.dumps({"bundle": str(to), "files": names}))
    else:
        print(f"{to}: {', '.join(names)}")
        print("Errors in logs/ may quote your data: read them before you send the file.")
    return 0


def _replay(options: argparse.Namespace) -> int:
    from echo2.config.rundir import RunDir
    from echo2.head.ledger.eventlog import replay

    comparison = replay(RunDir(options.directory).events)
    if options.json:
        print(json.dumps(asdict(comparison)))
    else:
        differ = f"{comparison.num_different} differ; the first: {comparison.first_difference}"
        verdict = differ if comparison.num_different else "all the same"
        heads = f"{comparison.num_heads} head{'' if comparison.num_heads == 1 else 's'}"
        print(f"{comparison.num_events} events of {heads}, {comparison.num_commands} commands: {verdict}")
        if comparison.num_headless:
            print(f"{comparison.num_headless} events before them can't be replayed: the log's oldest part is gone")
    return 0 if not comparison.num_different else 1
