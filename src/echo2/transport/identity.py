"""Who is who: a run's own certificate authority, tickets, enrolment, revocation.

    ticket      "echo2-" + base64url(JSON): the head's address, the CA's certificate, and a short-lived *join
                certificate* with its key. Even enrolment thus runs over mutual TLS, on the one port
                (docs/decisions/0001).
    enrolment   a peer makes its own key, sends a signing request over a join connection and gets a certificate for
                "worker:<id>", which also names it "<id>.echo2" to those who dial it; the id is derived from the key,
                so enrolling again gives the same id and burns no use.
    revocation  a revoked id is refused at every call and at every message of a stream, whatever certificate it shows.
                It is a file below revoked/, so that `echo2 revoke` and a running head share it without a lock. Who
                still has a ticket with uses left can enrol again with another key.

Keys are EC P-256 and never leave their machine; files are private (mode 0600) and survive restarts.
"""

from __future__ import annotations

import base64
import datetime
import hashlib
import json
import os
import re
import secrets
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from echo2.errors import PeerError, UserError

#: The name in the head's certificate; links check it instead of an address, which may change.
SERVER_NAME = "head.echo2"
TICKET_PREFIX = "echo2-"
TICKET_VERSION = 1
TICKET_CHARS_MAX = 8192
CSR_BYTES_MAX = 4096
CERTIFICATE_DAYS = 3650
#: Hex digits of an id: 40 bits keep 10,000 workers apart but for one chance in 20,000.
ID_DIGITS = 10
RUN_ID = re.compile(r"[0-9a-f]{12}")
TICKET_ROLES = ("worker", "learner")
#: Clocks of strangers' machines may differ by this much.
CLOCK_SLACK = datetime.timedelta(hours=24)

Key = ec.EllipticCurvePrivateKey
_REVOKED = "revoked"
#: Put before what is signed, so that no signature over one kind of thing passes for one over another.
_MANIFEST_DOMAIN = b"echo2 manifest\0"


@dataclass(frozen=True, slots=True)
class Credentials:
    """What one end of a TLS connection shows, and whom it trusts; PEM."""

    ca_pem: bytes
    certificate_pem: bytes
    key_pem: bytes


@dataclass(frozen=True, slots=True)
class Ticket:
    """A parsed ticket. `role`: worker or learner."""

    run_id: str
    address: str
    role: str
    credentials: Credentials

    @staticmethod
    def parse(text: str) -> Ticket:
        """From the ticket itself, or ``@FILE``.

        Raises:
            UserError: it is not a ticket.
        """
        text = (_read_ticket(text[1:]) if text.startswith("@") else text).strip()
        try:
            return _parse_ticket(text)
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            shown = text[:24] + ("..." if len(text) > 24 else "")
            raise UserError(
                f"{shown!r} is not a ticket ({error}). Copy it whole from the run's `ticket` file."
            ) from error


def _read_ticket(path: str) -> str:
    try:
        with open(path, encoding="ascii", errors="replace") as file:
            return file.read(TICKET_CHARS_MAX + 1)
    except (OSError, ValueError) as error:  # ValueError: a name with a NUL
        raise UserError(f"Cannot read the ticket file {path!r}: {error}.") from error


def _parse_ticket(text: str) -> Ticket:
    if not text.startswith(TICKET_PREFIX):
        raise ValueError(f"it does not begin with {TICKET_PREFIX}")
    if len(text) > TICKET_CHARS_MAX:
        raise ValueError(f"it has more than {TICKET_CHARS_MAX} characters")
    plain = json.loads(base64.b64decode(text.removeprefix(TICKET_PREFIX), b"-_", validate=True))
    if plain["v"] != TICKET_VERSION:
        raise ValueError(f"it is of version {plain['v']}, this program knows {TICKET_VERSION}")
    run_id, address, role = str(plain["run"]), str(plain["addr"]), str(plain["role"])
    if not RUN_ID.fullmatch(run_id) or role not in TICKET_ROLES:  # both become part of a path
        raise ValueError("its run or role is none")
    der = {name: base64.b64decode(plain[name], validate=True) for name in ("ca", "cert", "key")}
    key = ec.derive_private_key(int.from_bytes(der["key"], "big"), ec.SECP256R1())
    ca, certificate = (x509.load_der_x509_certificate(der[name]) for name in ("ca", "cert"))
    return Ticket(
        run_id, address, role, Credentials(_certificate_pem(ca), _certificate_pem(certificate), _key_pem(key))
    )


@dataclass(frozen=True, slots=True)
class Member:
    """By which ticket a peer enrolled, and whether that is for machines of the run's owner."""

    ticket_id: str
    is_own: bool


class RunIdentity:
    """The head's side: the run's CA and server certificate, tickets given out, members and revocations."""

    def __init__(
        self, directory: Path, ca_key: Key, ca: x509.Certificate, credentials: Credentials, book: dict[str, Any]
    ) -> None:
        self._directory, self._ca_key, self._ca, self._book = directory, ca_key, ca, book
        self.credentials = credentials
        self.run_id = str(ca.subject.get_attributes_for_oid(NameOID.COMMON_NAME)[0].value).removeprefix("echo2 ")

    @staticmethod
    def create_or_load(directory: Path) -> RunIdentity:
        """The identity kept in `directory`; made at the first call.

        Raises:
            UserError: the directory can't be used, or what is in it is damaged.
        """
        try:
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            if not (directory / "server.pem").exists():
                _create(directory)
            read = {name: (directory / name).read_bytes() for name in ("ca.key", "ca.pem", "server.key", "server.pem")}
            (directory / _REVOKED).mkdir(mode=0o700, exist_ok=True)
            ca_key, _ = (_load_key(read[name]) for name in ("ca.key", "server.key"))
            ca, _ = (x509.load_pem_x509_certificate(read[name]) for name in ("ca.pem", "server.pem"))
            credentials = Credentials(read["ca.pem"], read["server.pem"], read["server.key"])
            return RunIdentity(directory, ca_key, ca, credentials, _read_book(directory / "members.json"))
        except (OSError, ValueError) as error:
            raise UserError(
                f"Cannot use the run's identity in {directory}: {error}. Restore it from a copy."
            ) from error

    def make_ticket(self, role: str, address: str, uses: int, hours: float, is_own: bool = False) -> str:
        """A ticket that admits `uses` peers as worker or learner within `hours`. `is_own`: for machines of the run's
        owner, which are believed more than those of strangers."""
        ticket_id, key = secrets.token_hex(8), ec.generate_private_key(ec.SECP256R1())
        until = _now() + datetime.timedelta(hours=hours)
        certificate = self._sign(f"join-{role}:{ticket_id}", key.public_key(), until)
        self._book["tickets"][ticket_id] = {
            "role": role,
            "uses": uses,
            "expires": time.time() + hours * 3600,
            "is_own": is_own,
        }
        self._save()
        plain = {
            "v": TICKET_VERSION,
            "run": self.run_id,
            "addr": address,
            "role": role,
            "ca": base64.b64encode(self._ca.public_bytes(serialization.Encoding.DER)).decode(),
            "cert": base64.b64encode(certificate.public_bytes(serialization.Encoding.DER)).decode(),
            "key": base64.b64encode(key.private_numbers().private_value.to_bytes(32, "big")).decode(),
        }
        return TICKET_PREFIX + base64.urlsafe_b64encode(json.dumps(plain, separators=(",", ":")).encode()).decode()

    def enrol(self, ticket_id: str, role: str, csr_der: bytes) -> tuple[str, bytes]:
        """Admit the key in a signing request: (peer id, its certificate in DER). The same key gets the same id, free.

        Raises:
            PeerError: "malformed" request, or "ticket": expired, used up or unknown; "revoked".
        """
        key = _requested_key(csr_der)
        fingerprint = _fingerprint(key)
        peer_id = f"{role[0]}-{fingerprint[:ID_DIGITS]}"
        self.check_not_revoked(peer_id)
        member = self._book["members"].get(peer_id)
        if member is not None and member["key"] != fingerprint:
            raise PeerError("ticket", f"another key is enrolled as {peer_id}; remove this machine's key and join again")
        if member is None:
            ticket = self._book["tickets"].get(ticket_id)
            if ticket is None or ticket["role"] != role:
                raise PeerError("ticket", "this ticket is not of this run")
            if time.time() > ticket["expires"]:
                raise PeerError("ticket", "this ticket has expired; ask for a new one")
            if ticket["uses"] < 1:
                raise PeerError("ticket", "this ticket is used up; ask for a new one")
            ticket["uses"] -= 1
            self._book["members"][peer_id] = {
                "role": role,
                "key": fingerprint,
                "ticket": ticket_id,
                "since": time.time(),
            }
            self._save()
        until = _now() + datetime.timedelta(days=CERTIFICATE_DAYS)
        certificate = self._sign(f"{role}:{peer_id}", key, until, peer_name(peer_id))
        return peer_id, certificate.public_bytes(serialization.Encoding.DER)

    def member(self, peer_id: str) -> Member:
        """Whose machine an enrolled peer is.

        Raises:
            PeerError: "unknown", nobody enrolled under this id.
        """
        entry = self._book["members"].get(peer_id)
        if entry is None:
            raise PeerError("unknown", f"nobody enrolled as {peer_id}")
        ticket = self._book["tickets"].get(entry["ticket"], {})
        return Member(entry["ticket"], bool(ticket.get("is_own")))

    def revoke(self, peer_id: str) -> None:
        """Refuse this peer from now on, at every call; also heeded by a head that is running.

        Raises:
            UserError: nobody enrolled under this id.
        """
        if peer_id not in self._book["members"]:
            known = ", ".join(sorted(self._book["members"])) or "nobody"
            raise UserError(f"There is no {peer_id!r} to revoke. Enrolled: {known}.")
        try:
            (self._directory / _REVOKED / peer_id).touch(mode=0o600)
        except OSError as error:
            raise UserError(f"Cannot revoke {peer_id} in {self._directory}: {error.strerror}.") from error

    def revoked(self) -> frozenset[str]:
        """Ids of all revoked peers.

        Raises:
            UserError: the directory can't be read.
        """
        try:
            return frozenset(os.listdir(self._directory / _REVOKED))
        except OSError as error:
            raise UserError(f"Cannot read {self._directory / _REVOKED}: {error.strerror}.") from error

    def check_not_revoked(self, peer_id: str) -> None:
        """Raises PeerError("revoked") for a revoked peer. Asks the file system (microseconds): no cache goes stale."""
        if (self._directory / _REVOKED / peer_id).exists():
            raise PeerError("revoked", f"{peer_id} was revoked")

    def sign_manifest(self, manifest: bytes) -> bytes:
        """The CA's signature over a manifest: whoever trusts the ticket can tell that the head vouches for it."""
        return self._ca_key.sign(_MANIFEST_DOMAIN + manifest, ec.ECDSA(hashes.SHA256()))

    def _sign(
        self, name: str, key: ec.EllipticCurvePublicKey, until: datetime.datetime, dns: str = ""
    ) -> x509.Certificate:
        return _certificate(name, key, self._ca.subject, self._ca_key, until, dns)

    def _save(self) -> None:
        _write_private(self._directory / "members.json", json.dumps(self._book).encode())


@dataclass(frozen=True, slots=True)
class PeerIdentity:
    """A worker's or learner's side, per run: its key, and its certificate once enrolled."""

    directory: Path

    def load(self) -> tuple[str, Credentials] | None:
        """(peer id, credentials) if enrolled before.

        Raises:
            UserError: the files are damaged or can't be read.
        """
        try:
            ca, certificate, key = (self.directory / name for name in ("ca.pem", "peer.pem", "peer.key"))
            credentials = Credentials(ca.read_bytes(), certificate.read_bytes(), key.read_bytes())
            subject = x509.load_pem_x509_certificate(credentials.certificate_pem).subject
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            raise UserError(
                f"Cannot use this machine's identity: {error}. Remove {self.directory} to join anew."
            ) from error
        name = str(subject.get_attributes_for_oid(NameOID.COMMON_NAME)[0].value)
        return name.partition(":")[2], credentials

    def request(self) -> bytes:
        """A signing request (DER) for this machine's key, which is made at the first call.

        Raises:
            UserError: the directory can't be written.
        """
        path = self.directory / "peer.key"
        try:
            self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            if not path.exists():
                _write_private(path, _key_pem(ec.generate_private_key(ec.SECP256R1())))
            key = _load_key(path.read_bytes())
        except (OSError, ValueError) as error:
            raise UserError(
                f"Cannot keep this machine's key in {self.directory}: {error}. Choose another --state."
            ) from error
        request = x509.CertificateSigningRequestBuilder().subject_name(_name("peer")).sign(key, hashes.SHA256())
        return request.public_bytes(serialization.Encoding.DER)

    def keep(self, ca_pem: bytes, certificate_der: bytes) -> tuple[str, Credentials]:
        """Store the certificate that enrolment gave.

        Raises:
            PeerError: "malformed", when it is no certificate.
        """
        try:
            certificate = x509.load_der_x509_certificate(certificate_der)
        except ValueError as error:
            raise PeerError("malformed", f"the head gave no certificate: {error}") from error
        _write_private(self.directory / "ca.pem", ca_pem)
        _write_private(self.directory / "peer.pem", _certificate_pem(certificate))
        loaded = self.load()
        assert loaded is not None
        return loaded


def peer_name(peer_id: str) -> str:
    """The name in the certificate of a member, which those who dial it check."""
    return f"{peer_id}.echo2"


def has_peer_name(certificate_pem: bytes) -> bool:
    """Whether others can dial the holder: certificates of earlier versions name nobody that could be dialled."""
    try:
        certificate = x509.load_pem_x509_certificate(certificate_pem)
        certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName)
    except x509.ExtensionNotFound:
        return False
    return True


def verify_manifest(ca_pem: bytes, manifest: bytes, signature: bytes) -> None:
    """Raises PeerError("signature") unless the head of the run with this CA signed the manifest."""
    key = x509.load_pem_x509_certificate(ca_pem).public_key()
    if not isinstance(key, ec.EllipticCurvePublicKey):
        raise PeerError("signature", "the run's CA has no EC key")
    try:
        key.verify(signature, _MANIFEST_DOMAIN + manifest, ec.ECDSA(hashes.SHA256()))
    except InvalidSignature as error:
        raise PeerError("signature", f"a manifest of {len(manifest)} bytes that the head did not sign") from error


def _create(directory: Path) -> None:
    until = _now() + datetime.timedelta(days=CERTIFICATE_DAYS)
    ca_key, server_key = ec.generate_private_key(ec.SECP256R1()), ec.generate_private_key(ec.SECP256R1())
    name = _name(f"echo2 {secrets.token_hex(6)}")
    builder = _builder(name, ca_key.public_key(), name, until)
    builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
    ca = builder.sign(ca_key, hashes.SHA256())
    server = _certificate(SERVER_NAME, server_key.public_key(), ca.subject, ca_key, until, dns=SERVER_NAME)
    _write_private(directory / "ca.key", _key_pem(ca_key))
    _write_private(directory / "ca.pem", _certificate_pem(ca))
    _write_private(directory / "server.key", _key_pem(server_key))
    _write_private(directory / "server.pem", _certificate_pem(server))  # last: its presence means all are there


def _certificate(
    name: str, key: ec.EllipticCurvePublicKey, issuer: x509.Name, ca_key: Key, until: datetime.datetime, dns: str = ""
) -> x509.Certificate:
    builder = _builder(_name(name), key, issuer, until)
    builder = builder.add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
    if dns:
        builder = builder.add_extension(x509.SubjectAlternativeName([x509.DNSName(dns)]), critical=False)
    return builder.sign(ca_key, hashes.SHA256())


def _builder(
    subject: x509.Name, key: ec.EllipticCurvePublicKey, issuer: x509.Name, until: datetime.datetime
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(_now() - CLOCK_SLACK)
        .not_valid_after(until + CLOCK_SLACK)
    )


def _requested_key(csr_der: bytes) -> ec.EllipticCurvePublicKey:
    if len(csr_der) > CSR_BYTES_MAX:
        raise PeerError("oversized", f"a signing request of {len(csr_der)} bytes")
    try:
        request = x509.load_der_x509_csr(csr_der)
        key = request.public_key()
        is_signed = request.is_signature_valid
    except (ValueError, InvalidSignature, UnsupportedAlgorithm, x509.InvalidVersion) as error:
        raise PeerError("malformed", f"not a signing request: {error}") from error
    if not is_signed or not isinstance(key, ec.EllipticCurvePublicKey) or not isinstance(key.curve, ec.SECP256R1):
        raise PeerError("malformed", "the signing request is not signed by a P-256 key")
    return key


def _read_book(path: Path) -> dict[str, Any]:
    try:
        book: dict[str, Any] = json.loads(path.read_bytes())
    except FileNotFoundError:
        book = {"tickets": {}, "members": {}}
    return book


def _load_key(pem: bytes) -> Key:
    key = serialization.load_pem_private_key(pem, None)
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise ValueError("the key is not an EC key")
    return key


def _fingerprint(key: ec.EllipticCurvePublicKey) -> str:
    der = key.public_bytes(serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo)
    return hashlib.sha256(der).hexdigest()


def _name(common_name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common_name)])


def _now() -> datetime.datetime:
    return datetime.datetime.now(datetime.UTC)


def _certificate_pem(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(serialization.Encoding.PEM)


def _key_pem(key: Key) -> bytes:
    plain = serialization.NoEncryption()
    return key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, plain)


def _write_private(path: Path, data: bytes) -> None:
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())  # a power failure right after must not leave an empty key
    os.replace(temporary, path)
