"""`echo2 invite`, `echo2 tickets` and `echo2 revoke`: control which machines may join a run."""

from __future__ import annotations

import argparse
import json
import sys

from rich.console import Console

from echo2.core.addresses import is_loopback, split
from echo2.head.strangers import tickets
from echo2.transport.tickets import Ticket


def invite(options: argparse.Namespace) -> int:
    """Print a new ticket, or renew one.

    Raises:
        UserError: the run had no head yet, or there is no such ticket.
    """
    if options.renew:
        tickets.renew(options.directory, options.renew, options.uses, options.days)
        ticket, ticket_id, address = "", options.renew, ""
    else:
        ticket = tickets.invite(options.directory, options.uses, options.days)
        parsed = Ticket.parse(ticket)
        ticket_id, address = parsed.ticket_id, parsed.address
    note = ""
    if address and is_loopback(split(address)[0]):
        note = f"it names {address}, where no other machine can reach the head: set head.listen and head.advertise"
        note += ", then --resume"
    if options.json:
        known = tickets.open_identity(options.directory).tickets()
        found = next(tickets.describe(one) for one in known if one.ticket_id == ticket_id)
        print(json.dumps({"ticket": ticket or None, "address": address or None, "note": note, **found}))
        return 0
    print(ticket or f"{ticket_id} admits {options.uses} more, for {options.days:g} days")
    if note:
        print(f"note: {note}", file=sys.stderr)
    return 0


def show(options: argparse.Namespace) -> int:
    """List the tickets. Raises as `invite`."""
    found = tickets.open_identity(options.directory).tickets()
    if options.json:
        print(json.dumps([tickets.describe(ticket) for ticket in found]))
    else:
        tickets.show(found, Console())
    return 0


def revoke(options: argparse.Namespace) -> int:
    """Revoke a worker or a ticket. Raises as `invite`."""
    identity = tickets.open_identity(options.directory)
    closed = identity.revoke(options.id)
    if options.json:
        print(json.dumps(tickets.describe_revoked(identity, options.id, closed)))
        return 0
    told = f"; ticket {closed}, by which it came, admits nobody any more" if closed else ""
    print(f"{options.id} is revoked{told}")
    return 0
