"""The tickets of a run: the head replaces the owner's before they become unusable; `echo2 invite`, `echo2 tickets` and
`echo2 revoke` control which machines may join.

`<out>/ticket` is for workers on machines of the owner: those that `echo2 run` starts, and those that the run rents. A
ticket that is half used up (machines that got it may still be starting), expired or closed is replaced by a new one,
never renewed, so that a copy of the old text admits no further machines.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from echo2.config.rundir import RunDir, write_atomically
from echo2.core.addresses import Addresses
from echo2.core.errors import UserError
from echo2.transport.identity import KnownTicket, RunIdentity
from echo2.transport.tickets import OWN_TICKET_USES, Ticket

log = logging.getLogger(__name__)

OWN_TICKET_HOURS = 24 * 90.0


def own_files(rundir: RunDir) -> dict[Path, str]:
    """Return the files of a run with tickets for its owner's machines -> the role that each ticket gives."""
    return {rundir.ticket: "worker", rundir.learner_ticket: "learner"}


class OwnTickets:
    """Keeps the owner's tickets usable. `files`: path -> role; `address`: the head's address in new tickets."""

    def __init__(self, identity: RunIdentity, files: Mapping[Path, str], address: str) -> None:
        self._identity, self._address, self._files = identity, address, files
        self._ticket_ids: dict[Path, str] = {}

    def keep(self) -> None:
        """Replace tickets that are missing, half used up, no longer valid, or name another head.

        Raises:
            UserError: a ticket can't be read or written.
        """
        for path, role in self._files.items():
            why = self._flaw(path)
            if why:
                text = self._identity.make_ticket(role, self._address, OWN_TICKET_USES, OWN_TICKET_HOURS, is_own=True)
                write_atomically(path, text, mode=0o600)
                self._ticket_ids[path] = Ticket.parse(text).ticket_id
                log.info("wrote a new %s: %s", path.name, why)

    def _flaw(self, path: Path) -> str:
        if not path.exists():
            return "there was none"
        if path not in self._ticket_ids:  # written by an earlier head
            try:
                ticket = Ticket.parse(f"@{path}")
                self._identity.ticket(ticket.ticket_id)
            except UserError as error:
                return str(error)
            if ticket.run_id != self._identity.run_id or ticket.address != self._address:
                return f"the last one named the head at {ticket.address}"
            self._ticket_ids[path] = ticket.ticket_id
        known_ticket = self._identity.ticket(self._ticket_ids[path])
        if known_ticket.refuses:
            return f"the last one is {known_ticket.refuses}"
        return "the last one is half used up" if 2 * len(known_ticket.members) > known_ticket.terms.uses else ""


def open_identity(directory: Path) -> RunIdentity:
    """Open the identity of an existing run.

    Raises:
        UserError: this run has had no head yet.
    """
    rundir = RunDir(directory)
    if not rundir.ticket.is_file():
        raise UserError(f"{directory} is not a run that was started: there is no {rundir.ticket}. Start it first.")
    return RunIdentity.create_or_load(rundir.identity)


def invite(directory: Path, uses: int, days: float) -> str:
    """Return a new ticket for other people's machines, which are trusted less than the owner's.

    Raises:
        UserError: this run has had no head yet, or `uses` or `days` is out of range.
    """
    _check(uses, days)
    identity = open_identity(directory)
    address = Ticket.parse(f"@{RunDir(directory).ticket}").address
    return identity.make_ticket("worker", address, uses, days * 24)


def renew(directory: Path, ticket_id: str, uses: int, days: float) -> None:
    """Let a ticket admit more machines, for longer.

    Raises:
        UserError: there is no such ticket, it was revoked, or `uses` or `days` is out of range.
    """
    _check(uses, days)
    open_identity(directory).renew_ticket(ticket_id, uses, days * 24)


def _check(uses: int, days: float) -> None:
    if uses < 1:
        raise UserError(f"A ticket cannot admit {uses} machines: give it at least 1.")
    if not 0 < days <= 3650:
        raise UserError(f"A ticket cannot last {days:g} days: give it more than 0 days, and at most 3650.")


def describe(ticket: KnownTicket) -> dict[str, Any]:
    """Return a ticket as plain values, for `echo2 tickets --json`."""
    terms = ticket.terms
    return {
        "id": ticket.ticket_id,
        "role": terms.role,
        "own": terms.is_own,
        "used": len(ticket.members),
        "uses": terms.uses,
        "expires": terms.expires,
        "refuses": ticket.refuses,
        "members": list(ticket.members),
    }


def describe_revoked(identity: RunIdentity, revoked_id: str, closed: str) -> dict[str, Any]:
    """Return the effect of a revocation for `echo2 revoke --json`: the workers that are shut out, and the tickets that
    no longer admit machines. `closed`: the result of `RunIdentity.revoke`."""
    tickets = [ticket for ticket in identity.tickets() if ticket.ticket_id in (revoked_id, closed)]
    is_ticket = any(ticket.ticket_id == revoked_id for ticket in tickets)
    workers = list(tickets[0].members) if is_ticket else [revoked_id]
    return {
        "id": revoked_id,
        "kind": "ticket" if is_ticket else "worker",
        "workers": workers,
        "tickets": [ticket.ticket_id for ticket in tickets],
    }


def show(tickets: list[KnownTicket], console: Console) -> None:
    """Print the tickets as a table."""
    table = Table(box=None, pad_edge=False)
    for name in ("ticket", "for", "used", "expires", "admits", "members"):
        table.add_column(name, no_wrap=name in ("ticket", "used", "expires"))
    for ticket in tickets:
        terms = ticket.terms
        expires = time.strftime("%Y-%m-%d %H:%M", time.localtime(terms.expires))
        whose = f"{terms.role}s of {'the owner' if terms.is_own else 'others'}"
        members = " ".join(ticket.members[:4]) + (" ..." if len(ticket.members) > 4 else "")
        used = f"{len(ticket.members)}/{terms.uses}"
        table.add_row(ticket.ticket_id, whose, used, expires, ticket.refuses or "yes", members)
    console.print(table, highlight=False)


def invite_command(options: argparse.Namespace) -> int:
    """Print a new ticket, or renew one.

    Raises:
        UserError: the run had no head yet, or there is no such ticket.
    """
    if options.renew:
        renew(options.directory, options.renew, options.uses, options.days)
        ticket, ticket_id, address = "", options.renew, ""
    else:
        ticket = invite(options.directory, options.uses, options.days)
        parsed = Ticket.parse(ticket)
        ticket_id, address = parsed.ticket_id, parsed.address
    note = ""
    if address and Addresses(address).are_loopback:
        note = f"it names {address}, where no other machine can reach the head: set head.listen and head.advertise"
        note += ", then --resume"
    if options.json:
        tickets = open_identity(options.directory).tickets()
        description = next(describe(one) for one in tickets if one.ticket_id == ticket_id)
        print(json.dumps({"ticket": ticket or None, "address": address or None, "note": note, **description}))
        return 0
    print(ticket or f"{ticket_id} admits {options.uses} more, for {options.days:g} days")
    if note:
        print(f"note: {note}", file=sys.stderr)
    return 0


def list_command(options: argparse.Namespace) -> int:
    """List the tickets. Raises as `invite_command`."""
    tickets = open_identity(options.directory).tickets()
    if options.json:
        print(json.dumps([describe(ticket) for ticket in tickets]))
    else:
        show(tickets, Console())
    return 0


def revoke_command(options: argparse.Namespace) -> int:
    """Revoke a worker or a ticket. Raises as `invite_command`."""
    identity = open_identity(options.directory)
    closed = identity.revoke(options.id)
    if options.json:
        print(json.dumps(describe_revoked(identity, options.id, closed)))
        return 0
    also = f"; ticket {closed}, with which it joined, admits no more machines" if closed else ""
    print(f"{options.id} is revoked{also}")
    return 0
