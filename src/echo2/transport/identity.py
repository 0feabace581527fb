"""Identities: a run's own certificate authority, enrolment, revocation.

    enrolment   a peer makes its own key, sends a signing request over a join connection (`tickets`) and gets a
                certificate for "worker:<id>", with the DNS name "<id>.echo2" for peers that dial it; the id is derived
                from the key, so enrolling again gives the same id and costs no further use of the ticket.
    revocation  a revoked peer, or one that joined with a revoked ticket, is refused at every call and at every message
                of a stream, whatever certificate it shows. A revocation is a file below revoked/, so that
                `echo2 revoke` and a running head share it without a lock. The ticket of a revoked peer admits no
                further peers: else the same machine would return with another key (docs/decisions/0007).

Keys are EC P-256 and never leave their machine; files are private (mode 0600) and survive restarts.
"""

from __future__ import annotations

import json
import os
import secrets
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec

from echo2.core.documents import parse_json
from echo2.core.errors import PeerError, UserError, write_failed
from echo2.transport import certificates
from echo2.transport.certificates import Key
from echo2.transport.tickets import Credentials, Terms, TermsFiles, ticket_text

#: The name in the head's certificate; links check it instead of an address, which may change.
SERVER_NAME = "head.echo2"
#: Hex digits of an id: with 40 bits, the chance that two of 10,000 workers collide is one in 20,000.
ID_DIGITS = 10

_REVOKED, _TICKETS = "revoked", "tickets"
#: Prefix of signed data: a signature over a manifest cannot pass for a signature over something else.
_MANIFEST_DOMAIN = b"echo2 manifest\0"


@dataclass(frozen=True, slots=True)
class Enrolment:
    """The ticket with which a peer enrolled, and whether that ticket is for machines of the run's owner."""

    ticket_id: str
    is_own: bool


@dataclass(frozen=True, slots=True)
class KnownTicket:
    """A ticket of the run. `refuses`: why it admits no more peers (empty: it does)."""

    ticket_id: str
    terms: Terms
    members: tuple[str, ...]
    refuses: str


class RunIdentity:
    """The head's side: the run's CA and server certificate, its tickets, members and revocations. `on_enrolled` is
    called with each new member."""

    def __init__(self, directory: Path, ca_key: Key, ca: x509.Certificate, credentials: Credentials) -> None:
        self.directory, self._ca_key, self._ca = directory, ca_key, ca
        self.credentials = credentials
        self.run_id = certificates.common_name(ca).removeprefix("echo2 ")
        self._terms = TermsFiles(directory / _TICKETS)
        self._members = _read_members(directory / "members.json")
        self._of_ticket = defaultdict[str, list[str]](list)
        for peer_id, entry in self._members.items():
            self._of_ticket[entry["ticket"]].append(peer_id)
        self._own: dict[str, bool] = {}
        self.on_enrolled: Callable[[str, Mapping[str, Any]], None] = lambda peer_id, entry: None

    @staticmethod
    def create_or_load(directory: Path) -> RunIdentity:
        """Load the identity kept in `directory`; the first call creates it.

        Raises:
            UserError: the directory can't be used, or its files are damaged.
        """
        try:
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            if not (directory / "server.pem").exists():
                _create(directory)
            read = {name: (directory / name).read_bytes() for name in ("ca.key", "ca.pem", "server.key", "server.pem")}
            for name in (_REVOKED, _TICKETS):
                (directory / name).mkdir(mode=0o700, exist_ok=True)
            ca_key, _ = (certificates.read_key(read[name]) for name in ("ca.key", "server.key"))
            ca, _ = (certificates.read_pem(read[name]) for name in ("ca.pem", "server.pem"))
            credentials = Credentials(read["ca.pem"], read["server.pem"], read["server.key"])
            return RunIdentity(directory, ca_key, ca, credentials)
        except OSError as error:
            what = f"Cannot use the run's identity in {directory}: {error}."
            raise write_failed(error, f"{what} Free some space, or restore it from a copy.") from error
        except ValueError as error:
            raise UserError(
                f"Cannot use the run's identity in {directory}: {error}. Restore it from a copy."
            ) from error

    # ---- tickets -----------------------------------------------------------------------------------------------------

    def make_ticket(self, role: str, address: str, uses: int, hours: float, is_own: bool = False) -> str:
        """Make a ticket that admits `uses` peers in this role (see `TICKET_ROLES`) within `hours`. `is_own`: for
        machines of the run's owner, which are trusted more than strangers' machines.

        Raises:
            UserError: the ticket can't be stored.
        """
        ticket_id, key, now = secrets.token_hex(8), certificates.make_key(), time.time()
        certificate = certificates.issue(f"join-{role}:{ticket_id}", key.public_key(), self._ca.subject, self._ca_key)
        valid_until = now + certificates.CERTIFICATE_DAYS * 86_400.0
        self._write(ticket_id, Terms(role, uses, now + hours * 3600, is_own, valid_until))
        return ticket_text(address, self._ca, certificate, key)

    def renew_ticket(self, ticket_id: str, uses: int, hours: float) -> None:
        """Let a ticket admit `uses` more peers, within `hours` from now; its text stays the same. A closed ticket opens
        again.

        Raises:
            UserError: there is no such ticket, it was revoked, its certificate expires earlier, or it can't be stored.
        """
        ticket = self.ticket(ticket_id)
        until = time.time() + hours * 3600
        if ticket.refuses == "revoked":
            raise UserError(
                f"Ticket {ticket_id} was revoked, with all machines that joined with it. Make another: `echo2 invite`."
            )
        if until > ticket.terms.valid_until:
            days = max(0.0, ticket.terms.valid_until - time.time()) / 86_400
            raise UserError(f"Ticket {ticket_id} can be renewed for {days:.0f} days at most. Make another.")
        uses += len(ticket.members)
        self._write(ticket_id, replace(ticket.terms, uses=uses, expires=until, is_closed=False))

    def tickets(self) -> list[KnownTicket]:
        """All tickets of the run.

        Raises:
            UserError: the tickets' files are damaged or can't be read.
        """
        try:
            return [self.ticket(ticket_id) for ticket_id in self._terms.ids()]
        except OSError as error:
            raise UserError(f"Cannot read the tickets in {self.directory}: {error.strerror}.") from error

    def ticket(self, ticket_id: str) -> KnownTicket:
        """One ticket of the run.

        Raises:
            UserError: there is no such ticket, or its file is damaged or can't be read.
        """
        try:
            terms = self._terms.read(ticket_id)
        except (OSError, ValueError) as error:
            raise UserError(f"Cannot read ticket {ticket_id} in {self.directory}: {error}.") from error
        if terms is None:
            known_ids = ", ".join(self._terms.ids()) or "none"
            raise UserError(f"There is no ticket {ticket_id!r}. Known: {known_ids}.")
        members = tuple(self._of_ticket.get(ticket_id, ()))
        return KnownTicket(ticket_id, terms, members, self._refuses(ticket_id, terms, len(members)))

    def _refuses(self, ticket_id: str, terms: Terms, num_members: int) -> str:
        if self._is_revoked(ticket_id):
            return "revoked"
        if terms.is_closed:
            return "closed, since one who came by it was revoked"
        if time.time() > terms.expires:
            return "expired"
        return "used up" if num_members >= terms.uses else ""

    def _write(self, ticket_id: str, terms: Terms) -> None:
        try:
            self._terms.write(ticket_id, terms)
        except OSError as error:
            raise write_failed(
                error, f"Cannot write ticket {ticket_id} in {self.directory}: {error.strerror}."
            ) from error

    # ---- members -----------------------------------------------------------------------------------------------------

    def enrol(self, ticket_id: str, role: str, csr_der: bytes) -> tuple[str, bytes]:
        """Admit the key in a signing request; returns (peer id, its certificate in DER). The same key gets the same id
        and costs no further use. The request is parsed only after the ticket is found valid.

        Raises:
            PeerError: "malformed" request, or "ticket": expired, used up, closed or unknown; "revoked"; "busy", when
                the head can't read or write its files.
        """
        try:
            terms = self._terms.read(ticket_id)
        except (OSError, ValueError) as error:
            raise PeerError("busy", f"the head can't read this ticket: {error}") from error
        if terms is None or terms.role != role:
            raise PeerError("ticket", "this ticket is not of this run")
        refuses = self._refuses(ticket_id, terms, len(self._of_ticket.get(ticket_id, ())))
        if refuses not in ("", "used up"):
            raise PeerError("ticket", f"this ticket is {refuses}; ask for a new one")
        key = certificates.requested_key(csr_der)
        fingerprint = certificates.fingerprint(key)
        peer_id = f"{role[0]}-{fingerprint[:ID_DIGITS]}"
        self.check_not_revoked(peer_id)
        member = self._members.get(peer_id)
        if member is not None and member["key"] != fingerprint:
            raise PeerError("ticket", f"another key is enrolled as {peer_id}; remove this machine's key and join again")
        if member is None:
            if refuses:
                raise PeerError("ticket", f"this ticket is {refuses}; ask for a new one")
            self._admit(peer_id, {"role": role, "key": fingerprint, "ticket": ticket_id, "since": time.time()})
        name = peer_name(peer_id)
        certificate = certificates.issue(f"{role}:{peer_id}", key, self._ca.subject, self._ca_key, name)
        return peer_id, certificates.certificate_der(certificate)

    def _admit(self, peer_id: str, entry: dict[str, Any]) -> None:
        self._members[peer_id] = entry
        try:
            certificates.write_private(self.directory / "members.json", json.dumps({"members": self._members}).encode())
        except OSError as error:
            del self._members[peer_id]
            raise PeerError("busy", f"the head can't write down who joins: {error.strerror}") from error
        self._of_ticket[entry["ticket"]].append(peer_id)
        self.on_enrolled(peer_id, entry)

    def learn(self, peer_id: str, entry: dict[str, Any]) -> None:
        """Take in a member that another process of this run's head has enrolled."""
        if peer_id not in self._members:
            self._of_ticket[entry["ticket"]].append(peer_id)
        self._members[peer_id] = entry

    @property
    def members(self) -> Mapping[str, dict[str, Any]]:
        """Who has joined, by peer id, in the order of joining."""
        return self._members

    def member(self, peer_id: str) -> Enrolment:
        """Return the ticket of an enrolled peer, and whether the machine is the owner's.

        Raises:
            PeerError: "unknown", no peer enrolled under this id.
        """
        entry = self._members.get(peer_id)
        if entry is None:
            raise PeerError("unknown", f"no peer is enrolled as {peer_id}")
        return Enrolment(entry["ticket"], self._is_own(entry["ticket"]))

    def _is_own(self, ticket_id: str) -> bool:
        if ticket_id not in self._own:  # `is_own` of a ticket never changes
            try:
                terms = self._terms.read(ticket_id)
            except (OSError, ValueError):
                return False  # not cached: the file may be readable later
            self._own[ticket_id] = terms is not None and terms.is_own
        return self._own[ticket_id]

    # ---- revocation --------------------------------------------------------------------------------------------------

    def revoke(self, revoked_id: str) -> str:
        """Refuse a peer, or all peers of a ticket, from now on at every call; a running head applies it at once. The
        ticket of a revoked peer is closed: its other members stay, but it admits no new ones. Returns the id of that
        ticket; empty when a ticket was revoked.

        Raises:
            UserError: there is no such peer or ticket, or the revocation can't be stored.
        """
        entry = self._members.get(revoked_id)
        if entry is None and revoked_id not in self._terms.ids():
            known_ids = ", ".join([*sorted(self._members), *self._terms.ids()]) or "none"
            raise UserError(f"There is no {revoked_id!r} to revoke. Known peers and tickets: {known_ids}.")
        try:
            (self.directory / _REVOKED / revoked_id).touch(mode=0o600)
        except OSError as error:
            raise UserError(f"Cannot revoke {revoked_id} in {self.directory}: {error.strerror}.") from error
        if entry is None or entry["ticket"] not in self._terms.ids():
            return ""
        ticket = self.ticket(entry["ticket"])
        self._write(ticket.ticket_id, replace(ticket.terms, is_closed=True))
        return ticket.ticket_id

    def revoked(self) -> frozenset[str]:
        """Ids of all revoked peers, including the peers of revoked tickets.

        Raises:
            UserError: the directory can't be read.
        """
        try:
            names = set(os.listdir(self.directory / _REVOKED))
        except OSError as error:
            raise UserError(f"Cannot read {self.directory / _REVOKED}: {error.strerror}.") from error
        if not names:
            return frozenset()
        return frozenset(
            peer_id for peer_id, entry in self._members.items() if peer_id in names or entry["ticket"] in names
        )

    def check_not_revoked(self, peer_id: str) -> None:
        """Raises PeerError("revoked") for a revoked peer or ticket. Asks the file system each time (microseconds), so
        there is no cache to go stale."""
        if self._is_revoked(peer_id):
            raise PeerError("revoked", f"{peer_id} was revoked")
        entry = self._members.get(peer_id)
        if entry is not None and self._is_revoked(entry["ticket"]):
            raise PeerError("revoked", f"the ticket with which {peer_id} joined was revoked")

    def _is_revoked(self, name: str) -> bool:
        return os.path.exists(f"{self.directory}/{_REVOKED}/{name}") if name else False

    def sign_manifest(self, manifest: bytes) -> bytes:
        """Sign a manifest with the CA's key: a peer that trusts its ticket can verify that it is the head's."""
        return self._ca_key.sign(_MANIFEST_DOMAIN + manifest, ec.ECDSA(hashes.SHA256()))


@dataclass(frozen=True, slots=True)
class PeerIdentity:
    """A peer's side, per run: its key, and its certificate once enrolled."""

    directory: Path

    def load(self) -> tuple[str, Credentials] | None:
        """Return (peer id, credentials) if this machine has enrolled before, else None.

        Raises:
            UserError: the files are damaged or can't be read.
        """
        try:
            ca, certificate, key = (self.directory / name for name in ("ca.pem", "peer.pem", "peer.key"))
            credentials = Credentials(ca.read_bytes(), certificate.read_bytes(), key.read_bytes())
            name = certificates.common_name(certificates.read_pem(credentials.certificate_pem))
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            raise UserError(
                f"Cannot use this machine's identity: {error}. Remove {self.directory} to join again."
            ) from error
        return name.partition(":")[2], credentials

    def request(self) -> bytes:
        """Return a signing request (DER) for this machine's key; the first call makes the key.

        Raises:
            UserError: the directory can't be written.
        """
        path = self.directory / "peer.key"
        try:
            self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            if not path.exists():
                certificates.write_private(path, certificates.key_pem(certificates.make_key()))
            return certificates.make_request(certificates.read_key(path.read_bytes()))
        except (OSError, ValueError) as error:
            message = f"Cannot keep this machine's key in {self.directory}: {error}. Choose another --state."
            raise (write_failed(error, message) if isinstance(error, OSError) else UserError(message)) from error

    def keep(self, ca_pem: bytes, certificate_der: bytes) -> tuple[str, Credentials]:
        """Store the certificate from enrolment; returns (peer id, credentials).

        Raises:
            PeerError: "malformed", when it is not a certificate.
        """
        try:
            certificate = certificates.read_der(certificate_der)
        except ValueError as error:
            raise PeerError("malformed", f"the head gave no certificate: {error}") from error
        certificates.write_private(self.directory / "ca.pem", ca_pem)
        certificates.write_private(self.directory / "peer.pem", certificates.certificate_pem(certificate))
        loaded = self.load()
        assert loaded is not None
        return loaded


def peer_name(peer_id: str) -> str:
    """The DNS name in a member's certificate, checked by peers that dial the member."""
    return f"{peer_id}.echo2"


def verify_manifest(ca_pem: bytes, manifest: bytes, signature: bytes) -> None:
    """Raises PeerError("signature") unless the head of the run with this CA signed the manifest."""
    key = certificates.read_pem(ca_pem).public_key()
    if not isinstance(key, ec.EllipticCurvePublicKey):
        raise PeerError("signature", "the run's CA has no EC key")
    try:
        key.verify(signature, _MANIFEST_DOMAIN + manifest, ec.ECDSA(hashes.SHA256()))
    except InvalidSignature as error:
        raise PeerError("signature", f"a manifest of {len(manifest)} bytes that the head did not sign") from error


def _create(directory: Path) -> None:
    ca_key, server_key = certificates.make_key(), certificates.make_key()
    ca = certificates.issue_ca(f"echo2 {secrets.token_hex(6)}", ca_key)
    server = certificates.issue(SERVER_NAME, server_key.public_key(), ca.subject, ca_key, dns=SERVER_NAME)
    certificates.write_private(directory / "ca.key", certificates.key_pem(ca_key))
    certificates.write_private(directory / "ca.pem", certificates.certificate_pem(ca))
    certificates.write_private(directory / "server.key", certificates.key_pem(server_key))
    # Written last: its presence means that all files exist.
    certificates.write_private(directory / "server.pem", certificates.certificate_pem(server))


def _read_members(path: Path) -> dict[str, dict[str, Any]]:
    """The members by peer id; empty if there is no file. Raises ValueError and OSError."""
    try:
        members: dict[str, dict[str, Any]] = parse_json(path.read_bytes())["members"]
        if not all(isinstance(entry["ticket"], str) and isinstance(entry["key"], str) for entry in members.values()):
            raise TypeError("a member without a ticket or key")
    except FileNotFoundError:
        return {}
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path.name} is damaged: {error!r}") from error
    return members
