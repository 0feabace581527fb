"""Tickets, with which a machine joins a run: as text to pass on, and as the run stores them.

text     "echo2-" + base64url(JSON): the head's addresses, the CA's certificate, and a *join certificate* with its
         key. Even enrolment thus runs over mutual TLS, on the one port (docs/decisions/0001).
terms    how many machines a ticket admits, until when, and whether they are the owner's: one file a ticket, read at
         every enrolment and replaced whole, so that `echo2 invite` and a running head share it without a lock. The
         admitted peers are in the list of members, which only the head writes.
"""

from __future__ import annotations

import base64
import json
import os
import re
from dataclasses import asdict, dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec

from echo2.core.addresses import LISTED_MAX
from echo2.core.errors import UserError
from echo2.transport import certificates

TICKET_PREFIX = "echo2-"
TICKET_VERSION = 2
TICKET_CHARS_MAX = 8192
#: A sampler is a worker of a service (`echo2 serve`): it makes samples for tenants, not rollouts of a run.
TICKET_ROLES = ("worker", "learner", "sampler")
#: Machines that the owner's ticket admits. (`echo2 invite` has its own number.)
OWN_TICKET_USES = 64
RUN_ID = re.compile(r"[0-9a-f]{12}")
TICKET_ID = re.compile(r"[0-9a-f]{16}")
_ADDRESS = r"[0-9A-Za-z._%\[\]:-]{1,300}:[0-9]{1,5}"
_ADDRESSES = re.compile(f"{_ADDRESS}(,{_ADDRESS}){{0,{LISTED_MAX - 1}}}")


@dataclass(frozen=True, slots=True)
class Credentials:
    """The certificate and key that one end of a TLS connection uses, and the CA that it trusts; PEM."""

    ca_pem: bytes
    certificate_pem: bytes
    key_pem: bytes


@dataclass(frozen=True, slots=True)
class Ticket:
    """A parsed ticket. `address`: of the head, or several joined by commas. `role`: one of `TICKET_ROLES`."""

    run_id: str
    address: str
    role: str
    credentials: Credentials
    ticket_id: str

    @staticmethod
    def parse(text: str) -> Ticket:
        """Parse a ticket's text, or the file in ``@FILE``.

        Raises:
            UserError: the text is not a ticket, or one of another version, or the file can't be read.
        """
        text = (_read_ticket(text[1:]) if text.startswith("@") else text).strip()
        try:
            return _parse_ticket(text)
        except UserError:
            raise
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise _no_ticket(text, "it is incomplete or damaged") from error


def ticket_text(
    address: str, ca: x509.Certificate, certificate: x509.Certificate, key: ec.EllipticCurvePrivateKey
) -> str:
    """Return a ticket as text, for `Ticket.parse`."""
    number = key.private_numbers().private_value
    der = {
        "ca": certificates.certificate_der(ca),
        "cert": certificates.certificate_der(certificate),
        "key": number.to_bytes(32, "big"),
    }
    coded = {name: base64.b64encode(data).decode() for name, data in der.items()}
    plain = {"v": TICKET_VERSION, "addr": address, **coded}
    return TICKET_PREFIX + base64.urlsafe_b64encode(json.dumps(plain, separators=(",", ":")).encode()).decode()


def _read_ticket(path: str) -> str:
    try:
        with open(path, encoding="ascii", errors="replace") as file:
            return file.read(TICKET_CHARS_MAX + 1)
    except (OSError, ValueError) as error:  # ValueError: a name with a NUL
        raise UserError(f"Cannot read the ticket file {path!r}: {error}.") from error


def _no_ticket(text: str, why: str) -> UserError:
    shown = text[:24] + ("..." if len(text) > 24 else "")
    return UserError(f"{shown!r} is not a ticket: {why}. Copy the complete text of the run's `ticket` file.")


def _parse_ticket(text: str) -> Ticket:
    if not text.startswith(TICKET_PREFIX):
        raise _no_ticket(text, f"it does not begin with {TICKET_PREFIX}")
    if len(text) > TICKET_CHARS_MAX:
        raise _no_ticket(text, f"it has more than {TICKET_CHARS_MAX} characters")
    plain = json.loads(base64.b64decode(text.removeprefix(TICKET_PREFIX), b"-_", validate=True))
    if isinstance(plain["v"], int) and plain["v"] != TICKET_VERSION:
        raise UserError(
            f"This ticket is of version {plain['v']}, and this program reads version {TICKET_VERSION}. Install the "
            "version of echo2 that the run's head has."
        )
    if plain["v"] != TICKET_VERSION:
        raise ValueError("its version is not a number")
    address = str(plain["addr"])
    if not _ADDRESSES.fullmatch(address):
        raise _no_ticket(text, f"its address {address[:100]!r} is not HOST:PORT")
    der = {name: base64.b64decode(plain[name], validate=True) for name in ("ca", "cert", "key")}
    key = ec.derive_private_key(int.from_bytes(der["key"], "big"), ec.SECP256R1())
    ca, certificate = (certificates.read_der(der[name]) for name in ("ca", "cert"))
    run_id = certificates.common_name(ca).removeprefix("echo2 ")
    named, _, ticket_id = certificates.common_name(certificate).partition(":")
    role = named.removeprefix("join-")
    if not RUN_ID.fullmatch(run_id) or role not in TICKET_ROLES or not TICKET_ID.fullmatch(ticket_id):
        raise _no_ticket(text, "its certificates are none to join with")  # run id and role become part of a path
    shown = Credentials(
        certificates.certificate_pem(ca), certificates.certificate_pem(certificate), certificates.key_pem(key)
    )
    return Ticket(run_id, address, role, shown, ticket_id)


@dataclass(frozen=True, slots=True)
class Terms:
    """What a ticket admits: `uses` machines in all, as `role`, until `expires` (Unix time). `is_own`: the machines are
    the run owner's. `is_closed`: it admits no more machines, since a peer that joined with it was revoked.
    `valid_until`: the limit of renewals, as the ticket's certificate expires then."""

    role: str
    uses: int
    expires: float
    is_own: bool
    valid_until: float
    is_closed: bool = False


class TermsFiles:
    """The terms of a run's tickets, in one directory."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def ids(self) -> list[str]:
        """The ids of all tickets, sorted. Raises OSError."""
        names = (name.removesuffix(".json") for name in os.listdir(self._directory))
        return sorted(name for name in names if TICKET_ID.fullmatch(name))

    def read(self, ticket_id: str) -> Terms | None:
        """Read a ticket's terms; None: the ticket is not of this run.

        Raises:
            ValueError: the file is damaged.
            OSError: the file can't be read.
        """
        if not TICKET_ID.fullmatch(ticket_id):
            return None
        try:
            terms = Terms(**json.loads((self._directory / f"{ticket_id}.json").read_bytes()))
        except FileNotFoundError:
            return None
        except (TypeError, RecursionError) as error:
            raise ValueError(f"the terms of ticket {ticket_id} are none: {error}") from error
        numbers = (terms.uses, terms.expires, terms.valid_until)
        if not all(isinstance(number, int | float) for number in numbers) or terms.role not in TICKET_ROLES:
            raise ValueError(f"the terms of ticket {ticket_id} are none")
        return terms

    def write(self, ticket_id: str, terms: Terms) -> None:
        """Write or replace a ticket's terms. Raises OSError."""
        certificates.write_private(self._directory / f"{ticket_id}.json", json.dumps(asdict(terms)).encode())
