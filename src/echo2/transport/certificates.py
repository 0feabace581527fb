"""X.509 for this package: EC P-256 keys, certificates of a run's own CA, files that only their owner can read."""

from __future__ import annotations

import datetime
import hashlib
import os
import warnings
from collections.abc import Callable
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.utils import CryptographyDeprecationWarning
from cryptography.x509.oid import NameOID

from echo2.core.errors import PeerError

CSR_BYTES_MAX = 4096
CERTIFICATE_DAYS = 3650
#: Clocks of strangers' machines may be off by this much.
CLOCK_SLACK = datetime.timedelta(hours=24)

Key = ec.EllipticCurvePrivateKey


def make_key() -> Key:
    """A new private key on P-256."""
    return ec.generate_private_key(ec.SECP256R1())


def issue(
    common_name: str, key: ec.EllipticCurvePublicKey, issuer: x509.Name, ca_key: Key, dns: str = ""
) -> x509.Certificate:
    """Issue a certificate for this key, signed by the CA. `dns`: the name that peers check when dialling its holder."""
    builder = _builder(_name(common_name), key, issuer)
    builder = builder.add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
    if dns:
        builder = builder.add_extension(x509.SubjectAlternativeName([x509.DNSName(dns)]), critical=False)
    return builder.sign(ca_key, hashes.SHA256())


def issue_ca(common_name: str, key: Key) -> x509.Certificate:
    """The certificate of a CA, signed by itself."""
    name = _name(common_name)
    builder = _builder(name, key.public_key(), name)
    builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
    return builder.sign(key, hashes.SHA256())


def _builder(subject: x509.Name, key: ec.EllipticCurvePublicKey, issuer: x509.Name) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - CLOCK_SLACK)
        .not_valid_after(now + datetime.timedelta(days=CERTIFICATE_DAYS) + CLOCK_SLACK)
    )


def _name(common_name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common_name)])


# ---- reading ---------------------------------------------------------------------------------------------------------


def read_der(data: bytes) -> x509.Certificate:
    """Parse a certificate in DER. Raises ValueError if it is none."""
    return _read(x509.load_der_x509_certificate, data)


def read_pem(data: bytes) -> x509.Certificate:
    """Parse a certificate in PEM. Raises ValueError if it is none."""
    return _read(x509.load_pem_x509_certificate, data)


def _read(load: Callable[[bytes], x509.Certificate], data: bytes) -> x509.Certificate:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", CryptographyDeprecationWarning)  # odd, and an error in later versions
            return load(data)
    except (x509.InvalidVersion, UnsupportedAlgorithm, CryptographyDeprecationWarning) as error:
        raise ValueError(str(error)) from error


def common_name(certificate: x509.Certificate) -> str:
    """Return the subject's common name. Raises ValueError if there is none."""
    names = certificate.subject.get_attributes_for_oid(NameOID.COMMON_NAME)
    if not names:
        raise ValueError("the certificate has no common name")
    return str(names[0].value)


def read_key(pem: bytes) -> Key:
    """Parse an unencrypted EC private key in PEM. Raises ValueError if it is none."""
    try:
        key = serialization.load_pem_private_key(pem, None)
    except (TypeError, UnsupportedAlgorithm) as error:  # TypeError: the key is encrypted
        raise ValueError(str(error)) from error
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise ValueError("the key is not an EC key")
    return key


def make_request(key: Key) -> bytes:
    """A signing request for this key, in DER."""
    request = x509.CertificateSigningRequestBuilder().subject_name(_name("peer")).sign(key, hashes.SHA256())
    return request.public_bytes(serialization.Encoding.DER)


def requested_key(csr_der: bytes) -> ec.EllipticCurvePublicKey:
    """Return the public key of a signing request, after checking its signature.

    Raises:
        PeerError: "malformed" or "oversized".
    """
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


# ---- writing ---------------------------------------------------------------------------------------------------------


def fingerprint(key: ec.EllipticCurvePublicKey) -> str:
    """SHA-256 of the public key, in hexadecimal: the peer's identity is derived from it."""
    der = key.public_bytes(serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo)
    return hashlib.sha256(der).hexdigest()


def certificate_der(certificate: x509.Certificate) -> bytes:
    """The certificate in DER."""
    return certificate.public_bytes(serialization.Encoding.DER)


def certificate_pem(certificate: x509.Certificate) -> bytes:
    """The certificate in PEM."""
    return certificate.public_bytes(serialization.Encoding.PEM)


def key_pem(key: Key) -> bytes:
    """The private key in PEM (PKCS 8), not encrypted."""
    plain = serialization.NoEncryption()
    return key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, plain)


def write_private(path: Path, data: bytes) -> None:
    """Replace a file atomically; only its owner can read it. Raises OSError."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())  # a power failure right after must not leave an empty key
    os.replace(temporary, path)
