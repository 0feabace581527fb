"""Who is who: a run's own certificate authority, tickets, enrolment, revocation.

    ticket      "echo2-" + base64url(JSON): the head's address, the CA's certificate, and a short-lived *join certificate* with its
                key. Even enrolment thus runs over mutual TLS, on the one port (docs/decisions/0001).
    enrolment   a peer makes its own key, sends a signing request over a join connection and gets a certificate for
                "worker:<id>"; the id is derived from the key, so enrolling again gives the same id and burns no use.
    revocation  a revoked id is refused at every call, whatever certificate it shows.

Keys are EC P-256 and never leave their machine; files are private (mode 0600) and survive restarts.
"""

from __future__ import annotations

import base64
import datetime
import hashlib
import json
import os
import secrets
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from echo2.errors import PeerError, UserError

#: The name in the head's certificate; links check it instead of an address, which may change.
SERVER_NAME = "head.echo2"
TICKET_PREFIX = "echo2-"
TICKET_CHARS_MAX = 8192
CSR_BYTES_MAX = 4096
CERTIFICATE_DAYS = 3650
#: Hex digits of an id: 40 bits keep 10,000 workers apart but for one chance in 20,000.
ID_DIGITS = 10
#: Clocks of strangers' machines may differ by this much.
CLOCK_SLACK = datetime.timedelta(hours=24)

Key = ec.EllipticCurvePrivateKey


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
        if text.startswith("@"):
            try:
                text = Path(text[1:]).read_text(encoding="utf-8")
            except OSError as error:
                raise UserError(f"Cannot read the ticket file {text[1:]}: {error.strerror}.") from error
        text = text.strip()
        try:
            if not text.startswith(TICKET_PREFIX) or len(text) > TICKET_CHARS_MAX:
                raise ValueError("it does not begin with echo2-")
            plain = json.loads(base64.urlsafe_b64decode(text.removeprefix(TICKET_PREFIX)))
            der = {name: base64.b64decode(plain[name]) for name in ("ca", "cert", "key")}
            key = ec.derive_private_key(int.from_bytes(der["key"], "big"), ec.SECP256R1())
            credentials = Credentials(
                _certificate_pem(x509.load_der_x509_certificate(der["ca"])),
                _certificate_pem(x509.load_der_x509_certificate(der["cert"])),
                _key_pem(key),
            )
            return Ticket(str(plain["run"]), str(plain["addr"]), str(plain["role"]), credentials)
        except (ValueError, KeyError, TypeError) as error:
            shown = text[:24] + ("..." if len(text) > 24 else "")
            raise UserError(f"{shown!r} is not a ticket ({error}). Copy it whole from the run's `ticket` file.") from error


class RunIdentity:
    """The head's side: the run's CA and server certificate, tickets given out, members and revocations."""

    def __init__(self, directory: Path, ca_key: Key, ca: x509.Certificate, credentials: Credentials) -> None:
        self._directory, self._ca_key, self._ca = directory, ca_key, ca
        self.credentials = credentials
        self.run_id = str(ca.subject.get_attributes_for_oid(NameOID.COMMON_NAME)[0].value).removeprefix("echo2 ")
        self._book = _read_book(directory / "members.json")

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
            ca_key = serialization.load_pem_private_key(read["ca.key"], None)
            if not isinstance(ca_key, ec.EllipticCurvePrivateKey):
                raise UserError(f"{directory}/ca.key is not an EC key. Restore the directory from a copy.")
            ca = x509.load_pem_x509_certificate(read["ca.pem"])
        except (OSError, ValueError) as error:
            raise UserError(f"Cannot use the run's identity in {directory}: {error}.") from error
        return RunIdentity(directory, ca_key, ca, Credentials(read["ca.pem"], read["server.pem"], read["server.key"]))

    def make_ticket(self, role: str, address: str, uses: int, hours: float) -> str:
        """A ticket that admits `uses` peers as worker or learner within `hours`."""
        ticket_id, key = secrets.token_hex(8), ec.generate_private_key(ec.SECP256R1())
        until = _now() + datetime.timedelta(hours=hours)
        certificate = self._sign(f"join-{role}:{ticket_id}", key.public_key(), until)
        self._book["tickets"][ticket_id] = {"role": role, "uses": uses, "expires": time.time() + hours * 3600}
        self._save()
        plain = {
            "v": 1,
            "run": self.run_id,
            "addr": address,
            "role": role,
            "ca": base64.b64encode(self._ca.public_bytes(serialization.Encoding.DER)).decode(),
            "cert": base64.b64encode(certificate.public_bytes(serialization.Encoding.DER)).decode(),
            "key": base64.b64encode(key.private_numbers().private_value.to_bytes(32, "big")).decode(),
        }
        return TICKET_PREFIX + base64.urlsafe_b64encode(json.dumps(plain, separators=(",", ":")).encode()).decode()

    def enrol(self, ticket_id: str, role: str, csr_der: bytes) -> tuple[str, bytes]:
        """Admit the key in a signing request: (peer id, its certificate in DER). The same key gets the same id, free of charge.

        Raises:
            PeerError: "malformed" request, or "ticket": expired, used up or unknown; "revoked".
        """
        key = _requested_key(csr_der)
        peer_id = f"{role[0]}-{_fingerprint(key)[:ID_DIGITS]}"
        self.check_not_revoked(peer_id)
        if peer_id not in self._book["members"]:
            ticket = self._book["tickets"].get(ticket_id)
            if ticket is None or ticket["role"] != role:
                raise PeerError("ticket", "this ticket is not of this run")
            if time.time() > ticket["expires"]:
                raise PeerError("ticket", "this ticket has expired; ask for a new one")
            if ticket["uses"] < 1:
                raise PeerError("ticket", "this ticket is used up; ask for a new one")
            ticket["uses"] -= 1
            self._book["members"][peer_id] = {"role": role, "ticket": ticket_id, "since": time.time()}
            self._save()
        until = _now() + datetime.timedelta(days=CERTIFICATE_DAYS)
        certificate = self._sign(f"{role}:{peer_id}", key, until)
        return peer_id, certificate.public_bytes(serialization.Encoding.DER)

    def revoke(self, peer_id: str) -> None:
        """Refuse this peer from now on, at every call."""
        self._book["revoked"] = sorted({*self._book["revoked"], peer_id})
        self._save()

    def check_not_revoked(self, peer_id: str) -> None:
        """Raises PeerError("revoked") for a revoked peer."""
        if peer_id in self._book["revoked"]:
            raise PeerError("revoked", f"{peer_id} was revoked")

    def _sign(self, name: str, key: ec.EllipticCurvePublicKey, until: datetime.datetime) -> x509.Certificate:
        return _certificate(name, key, self._ca.subject, self._ca_key, until)

    def _save(self) -> None:
        _write_private(self._directory / "members.json", json.dumps(self._book).encode())


@dataclass(frozen=True, slots=True)
class PeerIdentity:
    """A worker's or learner's side, per run: its key, and its certificate once enrolled."""

    directory: Path

    def load(self) -> tuple[str, Credentials] | None:
        """(peer id, credentials) if enrolled before."""
        try:
            ca, certificate, key = (self.directory / name for name in ("ca.pem", "peer.pem", "peer.key"))
            credentials = Credentials(ca.read_bytes(), certificate.read_bytes(), key.read_bytes())
        except FileNotFoundError:
            return None
        subject = x509.load_pem_x509_certificate(credentials.certificate_pem).subject
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
            key = serialization.load_pem_private_key(path.read_bytes(), None)
        except (OSError, ValueError) as error:
            raise UserError(f"Cannot keep this machine's key in {self.directory}: {error}. Choose another --state.") from error
        assert isinstance(key, ec.EllipticCurvePrivateKey)
        request = x509.CertificateSigningRequestBuilder().subject_name(_name("peer")).sign(key, hashes.SHA256())
        return request.public_bytes(serialization.Encoding.DER)

    def keep(self, ca_pem: bytes, certificate_der: bytes) -> tuple[str, Credentials]:
        """Store the certificate that enrolment gave."""
        certificate = x509.load_der_x509_certificate(certificate_der)
        _write_private(self.directory / "ca.pem", ca_pem)
        _write_private(self.directory / "peer.pem", _certificate_pem(certificate))
        loaded = self.load()
        assert loaded is not None
        return loaded


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
    except (ValueError, InvalidSignature) as error:
        raise PeerError("malformed", f"not a signing request: {error}") from error
    if not is_signed or not isinstance(key, ec.EllipticCurvePublicKey) or not isinstance(key.curve, ec.SECP256R1):
        raise PeerError("malformed", "the signing request is not signed by a P-256 key")
    return key


def _read_book(path: Path) -> dict[str, Any]:
    try:
        book: dict[str, Any] = json.loads(path.read_bytes())
    except FileNotFoundError:
        book = {"tickets": {}, "members": {}, "revoked": []}
    return book


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
    os.replace(temporary, path)
