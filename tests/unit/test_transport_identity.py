"""Enrolment, revocation, and the files that keep them."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from hypothesis import given
from hypothesis import strategies as st

from echo2.core.errors import PeerError, UserError
from echo2.transport.certificates import CSR_BYTES_MAX
from echo2.transport.identity import PeerIdentity, RunIdentity, peer_name, verify_manifest
from echo2.transport.tickets import Ticket

ADDRESS = "203.0.113.5:4700"
HOUR = 1.0


@pytest.fixture
def run(tmp_path: Path) -> RunIdentity:
    return RunIdentity.create_or_load(tmp_path / "identity")


def common_name(certificate: x509.Certificate) -> str:
    return str(certificate.subject.get_attributes_for_oid(x509.NameOID.COMMON_NAME)[0].value)


def ticket_id(text: str) -> str:
    return Ticket.parse(text).ticket_id


def refusal(call: Callable[[], Any]) -> tuple[str, str]:
    with pytest.raises(PeerError) as caught:
        call()
    return caught.value.reason, caught.value.detail


# ---- enrolment -------------------------------------------------------------------------------------------------------


def test_enrolment_names_the_key(run: RunIdentity, tmp_path: Path) -> None:
    peer = PeerIdentity(tmp_path / "peer")
    assert peer.load() is None
    peer_id, certificate_der = run.enrol(
        ticket_id(run.make_ticket("worker", ADDRESS, 1, HOUR)), "worker", peer.request()
    )
    certificate = x509.load_der_x509_certificate(certificate_der)
    assert common_name(certificate) == f"worker:{peer_id}"
    certificate.verify_directly_issued_by(x509.load_pem_x509_certificate(run.credentials.ca_pem))
    kept = peer.keep(run.credentials.ca_pem, certificate_der)
    assert kept == peer.load()
    assert kept[0] == peer_id
    key = serialization.load_pem_private_key(kept[1].key_pem, None)
    assert key.public_key() == certificate.public_key()


def test_enrolling_again_is_free_and_gives_the_same_id(run: RunIdentity, tmp_path: Path) -> None:
    ticket = ticket_id(run.make_ticket("worker", ADDRESS, 2, HOUR))
    first, second, third = (PeerIdentity(tmp_path / name).request() for name in "abc")
    ids = [run.enrol(ticket, "worker", request)[0] for request in [first, first, second, first]]
    assert len(set(ids)) == 2
    assert refusal(lambda: run.enrol(ticket, "worker", third))[0] == "ticket"
    assert (
        run.enrol(ticket, "worker", PeerIdentity(tmp_path / "a").request())[0] == ids[0]
    )  # a new request, the old key


def test_uses_are_counted_over_restarts(run: RunIdentity, tmp_path: Path) -> None:
    ticket = ticket_id(run.make_ticket("worker", ADDRESS, 1, HOUR))
    run.enrol(ticket, "worker", PeerIdentity(tmp_path / "a").request())
    again = RunIdentity.create_or_load(tmp_path / "identity")
    word, detail = refusal(lambda: again.enrol(ticket, "worker", PeerIdentity(tmp_path / "b").request()))
    assert word == "ticket"
    assert "used up" in detail


@pytest.mark.parametrize(
    ("uses", "hours", "role", "complaint"),
    [
        (0, HOUR, "worker", "used up"),
        (1, -HOUR, "worker", "expired"),
        (1, HOUR, "learner", "not of this run"),
    ],
)
def test_exhausted_ticket(run: RunIdentity, tmp_path: Path, uses: int, hours: float, role: str, complaint: str) -> None:
    ticket = ticket_id(run.make_ticket("worker", ADDRESS, uses, hours))
    word, detail = refusal(lambda: run.enrol(ticket, role, PeerIdentity(tmp_path / "peer").request()))
    assert word == "ticket"
    assert complaint in detail


def test_ticket_of_another_run(run: RunIdentity, tmp_path: Path) -> None:
    other = RunIdentity.create_or_load(tmp_path / "other")
    assert other.run_id != run.run_id
    ticket = ticket_id(other.make_ticket("worker", ADDRESS, 1, HOUR))
    assert refusal(lambda: run.enrol(ticket, "worker", PeerIdentity(tmp_path / "peer").request()))[0] == "ticket"


def test_same_machine_is_another_peer_in_another_role(run: RunIdentity, tmp_path: Path) -> None:
    request = PeerIdentity(tmp_path / "peer").request()
    worker, _ = run.enrol(ticket_id(run.make_ticket("worker", ADDRESS, 1, HOUR)), "worker", request)
    learner, _ = run.enrol(ticket_id(run.make_ticket("learner", ADDRESS, 1, HOUR)), "learner", request)
    assert worker != learner


def test_key_that_collides_with_a_members_id_is_refused(tmp_path: Path) -> None:
    """Ids are 40 bits of the key's hash: somebody could search for a key with a given id, and must not become it."""
    run = RunIdentity.create_or_load(tmp_path / "identity")
    ticket = ticket_id(run.make_ticket("worker", ADDRESS, 9, HOUR))
    request = PeerIdentity(tmp_path / "peer").request()
    peer_id, _ = run.enrol(ticket, "worker", request)
    book_path = tmp_path / "identity" / "members.json"
    book = json.loads(book_path.read_bytes())
    book["members"][peer_id]["key"] = "0" * 64  # as if another key had been there first
    book_path.write_text(json.dumps(book))
    assert (
        refusal(lambda: RunIdentity.create_or_load(tmp_path / "identity").enrol(ticket, "worker", request))[0]
        == "ticket"
    )


def signing_request(key: Any) -> bytes:
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "learner:l-0123456789")])
    request = x509.CertificateSigningRequestBuilder().subject_name(name).sign(key, hashes.SHA256())
    return request.public_bytes(serialization.Encoding.DER)


def test_requested_name_is_ignored(run: RunIdentity) -> None:
    request = signing_request(ec.generate_private_key(ec.SECP256R1()))
    peer_id, der = run.enrol(ticket_id(run.make_ticket("worker", ADDRESS, 1, HOUR)), "worker", request)
    assert common_name(x509.load_der_x509_certificate(der)) == f"worker:{peer_id}"


@pytest.mark.parametrize(
    ("make", "word"),
    [
        (lambda: b"", "malformed"),
        (lambda: b"\x30\x03abc", "malformed"),
        (lambda: signing_request(ec.generate_private_key(ec.SECP384R1())), "malformed"),
        (lambda: signing_request(rsa.generate_private_key(65537, 2048)), "malformed"),
        (lambda: signing_request(ec.generate_private_key(ec.SECP256R1()))[:-1] + b"\0", "malformed"),
        (lambda: bytes(CSR_BYTES_MAX + 1), "oversized"),
    ],
    ids=["empty", "garbage", "another curve", "RSA", "wrong signature", "oversized"],
)
def test_bad_signing_request_burns_nothing(
    run: RunIdentity, tmp_path: Path, make: Callable[[], bytes], word: str
) -> None:
    ticket = ticket_id(run.make_ticket("worker", ADDRESS, 1, HOUR))
    assert refusal(lambda: run.enrol(ticket, "worker", make()))[0] == word
    run.enrol(ticket, "worker", PeerIdentity(tmp_path / "peer").request())


@given(st.binary(max_size=300))
def test_any_bytes_as_signing_request(tmp_path_factory: pytest.TempPathFactory, data: bytes) -> None:
    run = RunIdentity.create_or_load(tmp_path_factory.getbasetemp() / "any-bytes")
    if not run.tickets():
        run.make_ticket("worker", ADDRESS, 1, HOUR)
    assert refusal(lambda: run.enrol(run.tickets()[0].ticket_id, "worker", data))[0] == "malformed"


def test_certificate_has_the_name_under_which_others_dial(run: RunIdentity, tmp_path: Path) -> None:
    peer = PeerIdentity(tmp_path / "peer")
    peer_id, der = run.enrol(ticket_id(run.make_ticket("worker", ADDRESS, 1, HOUR)), "worker", peer.request())
    names = x509.load_der_x509_certificate(der).extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.DNSName) == [peer_name(peer_id)]


# ---- signatures ------------------------------------------------------------------------------------------------------


@given(st.binary(max_size=200), st.binary(max_size=100), st.integers(0, 10_000))
def test_signature_is_over_every_bit(
    tmp_path_factory: pytest.TempPathFactory, manifest: bytes, noise: bytes, place: int
) -> None:
    run = RunIdentity.create_or_load(tmp_path_factory.getbasetemp() / "signatures")
    ca, signature = run.credentials.ca_pem, run.sign_manifest(manifest)
    verify_manifest(ca, manifest, signature)
    bit = place % (8 * len(signature))
    spoiled = bytearray(signature)
    spoiled[bit // 8] ^= 1 << bit % 8
    for wrong in (bytes(spoiled), noise, b""):
        assert refusal(lambda wrong=wrong: verify_manifest(ca, manifest, wrong))[0] == "signature"
    assert refusal(lambda: verify_manifest(ca, manifest + b"x", signature))[0] == "signature"


def test_signature_of_another_run_or_of_another_thing(run: RunIdentity, tmp_path: Path) -> None:
    other = RunIdentity.create_or_load(tmp_path / "other")
    ca = run.credentials.ca_pem
    assert refusal(lambda: verify_manifest(ca, b"manifest", other.sign_manifest(b"manifest")))[0] == "signature"
    certificate = x509.load_pem_x509_certificate(run.credentials.certificate_pem)
    signed = certificate.tbs_certificate_bytes  # by the same key
    assert refusal(lambda: verify_manifest(ca, signed, certificate.signature))[0] == "signature"


# ---- revocation ------------------------------------------------------------------------------------------------------


def test_revoked_peer_stays_out(run: RunIdentity, tmp_path: Path) -> None:
    ticket = ticket_id(run.make_ticket("worker", ADDRESS, 9, HOUR))
    request = PeerIdentity(tmp_path / "a").request()
    peer_id, _ = run.enrol(ticket, "worker", request)
    run.check_not_revoked(peer_id)
    assert run.revoked() == frozenset()
    run.revoke(peer_id)
    run.revoke(peer_id)  # once more is no mistake
    run.renew_ticket(ticket, 9, HOUR)
    for identity in (run, RunIdentity.create_or_load(tmp_path / "identity")):
        assert identity.revoked() == {peer_id}
        assert refusal(lambda identity=identity: identity.check_not_revoked(peer_id))[0] == "revoked"
        assert refusal(lambda identity=identity: identity.enrol(ticket, "worker", request))[0] == "revoked"


def test_revocation_by_another_process_is_seen_and_harms_no_enrolment(run: RunIdentity, tmp_path: Path) -> None:
    """`echo2 revoke` beside a running head: neither overwrites what the other wrote."""
    ticket, another = (ticket_id(run.make_ticket("worker", ADDRESS, 9, HOUR)) for _ in range(2))
    first, _ = run.enrol(ticket, "worker", PeerIdentity(tmp_path / "a").request())
    command_line = RunIdentity.create_or_load(tmp_path / "identity")
    second, _ = run.enrol(ticket, "worker", PeerIdentity(tmp_path / "b").request())
    command_line.revoke(first)
    assert refusal(lambda: run.check_not_revoked(first))[0] == "revoked"
    run.enrol(another, "worker", PeerIdentity(tmp_path / "c").request())
    reloaded = RunIdentity.create_or_load(tmp_path / "identity")
    assert reloaded.revoked() == {first}
    reloaded.revoke(second)  # still a member


@pytest.mark.parametrize("peer_id", ["w-0000000000", "../members.json", ""])
def test_revoking_an_unknown_name(run: RunIdentity, peer_id: str) -> None:
    with pytest.raises(UserError, match="Known peers and tickets: none"):
        run.revoke(peer_id)


# ---- files -----------------------------------------------------------------------------------------------------------


def test_reload_keeps_run_and_tickets(run: RunIdentity, tmp_path: Path) -> None:
    ticket = ticket_id(run.make_ticket("worker", ADDRESS, 1, HOUR))
    again = RunIdentity.create_or_load(tmp_path / "identity")
    assert (again.run_id, again.credentials) == (run.run_id, run.credentials)
    again.enrol(ticket, "worker", PeerIdentity(tmp_path / "peer").request())


def test_a_key_survives_a_kill_during_its_creation(tmp_path: Path) -> None:
    """Whatever was written before server.pem, which comes last, is written anew."""
    directory = tmp_path / "identity"
    run = RunIdentity.create_or_load(directory)
    (directory / "server.pem").unlink()
    (directory / "ca.pem").write_text("half")
    assert RunIdentity.create_or_load(directory).run_id != run.run_id
    RunIdentity.create_or_load(directory).make_ticket("worker", ADDRESS, 1, HOUR)


def test_files_are_private(run: RunIdentity, tmp_path: Path) -> None:
    peer = PeerIdentity(tmp_path / "peer")
    peer_id, der = run.enrol(ticket_id(run.make_ticket("worker", ADDRESS, 1, HOUR)), "worker", peer.request())
    peer.keep(run.credentials.ca_pem, der)
    run.revoke(peer_id)
    for directory in (tmp_path / "identity", tmp_path / "peer"):
        assert directory.stat().st_mode & 0o777 == 0o700
        modes = {path.name: path.stat().st_mode & 0o777 for path in directory.rglob("*") if path.is_file()}
        assert len(modes) >= 3
        assert set(modes.values()) == {0o600}, modes


@pytest.mark.parametrize("name", ["ca.key", "ca.pem", "server.key", "server.pem", "members.json"])
@pytest.mark.parametrize("data", [b"", b"garbage"])
def test_a_damaged_identity_is_a_user_error(run: RunIdentity, tmp_path: Path, name: str, data: bytes) -> None:
    (tmp_path / "identity" / name).write_bytes(data)
    with pytest.raises(UserError, match="Cannot use the run's identity"):
        RunIdentity.create_or_load(tmp_path / "identity")


def test_identity_where_nothing_can_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="Cannot use the run's identity"):
        RunIdentity.create_or_load(tmp_path / "file" / "identity")
    with pytest.raises(UserError, match="Choose another --state"):
        PeerIdentity(tmp_path / "file" / "peer").request()


def test_damaged_peer_files(run: RunIdentity, tmp_path: Path) -> None:
    peer = PeerIdentity(tmp_path / "peer")
    with pytest.raises(PeerError, match="no certificate"):
        peer.keep(run.credentials.ca_pem, b"garbage")
    peer.request()
    (tmp_path / "peer" / "peer.key").write_bytes(b"garbage")
    with pytest.raises(UserError, match="Cannot keep this machine's key"):
        peer.request()
    for name in ("ca.pem", "peer.pem"):
        (tmp_path / "peer" / name).write_bytes(b"garbage")
    with pytest.raises(UserError, match="Cannot use this machine's identity"):
        peer.load()


def test_the_key_is_kept(tmp_path: Path) -> None:
    before = PeerIdentity(tmp_path / "peer")
    before.request()
    key = (tmp_path / "peer" / "peer.key").read_bytes()
    PeerIdentity(tmp_path / "peer").request()
    assert (tmp_path / "peer" / "peer.key").read_bytes() == key
    assert sorted(os.listdir(tmp_path / "peer")) == ["peer.key"]  # nothing temporary is left
