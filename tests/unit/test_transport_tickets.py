"""Tickets: their text, what they admit, and how they are renewed, closed and revoked."""

from __future__ import annotations

import base64
import datetime
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from hypothesis import given
from hypothesis import strategies as st

from echo2.core.errors import PeerError, UserError
from echo2.transport import certificates
from echo2.transport.identity import Enrolment, PeerIdentity, RunIdentity
from echo2.transport.tickets import TICKET_CHARS_MAX, Ticket
from seeds import examples

ADDRESS = "203.0.113.5:4700"
HOUR = 1.0


@pytest.fixture
def run(tmp_path: Path) -> RunIdentity:
    return RunIdentity.create_or_load(tmp_path / "identity")


@pytest.fixture(scope="module")
def ticket_text(tmp_path_factory: pytest.TempPathFactory) -> str:
    return RunIdentity.create_or_load(tmp_path_factory.mktemp("run")).make_ticket("worker", ADDRESS, 1, HOUR)


def ticket_id(text: str) -> str:
    return Ticket.parse(text).ticket_id


def refusal(call: Callable[[], Any]) -> tuple[str, str]:
    with pytest.raises(PeerError) as caught:
        call()
    return caught.value.reason, caught.value.detail


# ---- text ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("role", ["worker", "learner"])
def test_a_ticket_names_address_and_run(run: RunIdentity, role: str) -> None:
    ticket = Ticket.parse(run.make_ticket(role, ADDRESS, 3, HOUR))
    assert (ticket.run_id, ticket.address, ticket.role) == (run.run_id, ADDRESS, role)
    assert ticket.credentials.ca_pem == run.credentials.ca_pem


def test_ticket_names_the_addresses_of_standbys(run: RunIdentity) -> None:
    addresses = "203.0.113.5:4700,[2001:db8::5]:4701,b.example:4702"
    assert Ticket.parse(run.make_ticket("worker", addresses, 3, HOUR)).address == addresses


def test_ticket_from_a_file(tmp_path: Path, ticket_text: str) -> None:
    path = tmp_path / "ticket"
    path.write_text(f"\n  {ticket_text}\n")
    assert Ticket.parse(f"@{path}") == Ticket.parse(f" {ticket_text}\n")


@pytest.mark.parametrize("name", ["absent", ".", "a\0b"])
def test_ticket_file_that_cannot_be_read(tmp_path: Path, name: str) -> None:
    with pytest.raises(UserError, match="Cannot read the ticket file"):
        Ticket.parse(f"@{tmp_path}/{name}")


@pytest.mark.parametrize("data", [b"", b"\xff\xfe\x00", b"echo2-" + b"A" * 2 * TICKET_CHARS_MAX], ids=len)
def test_a_file_without_a_ticket(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "ticket"
    path.write_bytes(data)
    with pytest.raises(UserError, match="is not a ticket"):
        Ticket.parse(f"@{path}")


def rewritten(text: str, **changes: Any) -> str:
    plain = json.loads(base64.urlsafe_b64decode(text.removeprefix("echo2-")))
    return "echo2-" + base64.urlsafe_b64encode(json.dumps({**plain, **changes}).encode()).decode()


def encoded(data: bytes) -> str:
    return "echo2-" + base64.urlsafe_b64encode(data).decode()


def certified(name: str) -> str:
    """A certificate of this name, as it stands in a ticket."""
    return base64.b64encode(certificates.certificate_der(certificates.issue_ca(name, certificates.make_key()))).decode()


BAD_TICKETS: dict[str, Callable[[str], str]] = {
    "empty": lambda t: "",
    "wrong prefix": lambda t: t.replace("echo2-", "echo3-"),
    "no prefix": lambda t: t.removeprefix("echo2-"),
    "truncated": lambda t: t[:-1],
    "half": lambda t: t[: len(t) // 2],
    "a line break within": lambda t: t[:40] + "\n" + t[40:],
    "not ASCII": lambda t: t[:40] + "é" + t[41:],
    "endless": lambda t: t + "A" * TICKET_CHARS_MAX,
    "not JSON": lambda t: encoded(b"hello"),
    "a list": lambda t: encoded(b"[1]"),
    "deeply nested": lambda t: encoded(b"[" * 6000),
    "no fields": lambda t: encoded(b"{}"),
    "wrong letters": lambda t: t[:60] + "9" * 8 + t[68:],
    "no version": lambda t: rewritten(t, v="two"),
    "path in role": lambda t: rewritten(t, cert=certified("join-worker/../..:0123456789abcdef")),
    "a worker's certificate": lambda t: rewritten(t, cert=certified("worker:w-0123456789")),
    "path in run": lambda t: rewritten(t, ca=certified("echo2 ../../../home")),
    "address of another kind": lambda t: rewritten(t, addr="unix:///run/docker.sock"),
    "address without a port": lambda t: rewritten(t, addr="203.0.113.5"),
    "too many addresses": lambda t: rewritten(t, addr=",".join(["a:1"] * 9)),
    "an address that is missing": lambda t: rewritten(t, addr="a:1,,b:1"),
    "another certificate": lambda t: rewritten(
        t, cert=json.loads(base64.urlsafe_b64decode(t.removeprefix("echo2-")))["ca"]
    ),
    "no CA": lambda t: rewritten(t, ca=""),
    "certificate of no bytes": lambda t: rewritten(t, cert=7),
    "key 0": lambda t: rewritten(t, key=base64.b64encode(bytes(32)).decode()),
    "key too large": lambda t: rewritten(t, key=base64.b64encode(b"\xff" * 40).decode()),
}


@pytest.mark.parametrize("spoil", BAD_TICKETS.values(), ids=BAD_TICKETS)
def test_invalid_ticket(ticket_text: str, spoil: Callable[[str], str]) -> None:
    with pytest.raises(UserError, match=r"is not a ticket: (it|its) .*\. Copy the complete text"):
        Ticket.parse(spoil(ticket_text))


@pytest.mark.parametrize("name", ["truncated", "half", "wrong letters", "no CA"])
def test_a_damaged_ticket_is_reported_as_damaged(ticket_text: str, name: str) -> None:
    with pytest.raises(UserError, match=r"^'echo2-eyJ.*\.\.\.' is not a ticket: it is incomplete or damaged\. Copy"):
        Ticket.parse(BAD_TICKETS[name](ticket_text))


@pytest.mark.parametrize("version", [1, 99])
def test_ticket_of_another_version(ticket_text: str, version: int) -> None:
    with pytest.raises(UserError, match=f"of version {version}, and this program reads version 2. Install") as caught:
        Ticket.parse(rewritten(ticket_text, v=version))
    assert "Copy" not in str(caught.value)


def test_complaint_does_not_repeat_the_secret(ticket_text: str) -> None:
    with pytest.raises(UserError) as caught:
        Ticket.parse(ticket_text[:-5])
    assert len(str(caught.value)) < 300
    assert ticket_text[40:80] not in str(caught.value)


def with_odd_bytes(text: str, field: str, place: int, piece: bytes) -> str:
    """As if whoever wrote the ticket had put other bytes into one of its fields."""
    der = base64.b64decode(json.loads(base64.urlsafe_b64decode(text.removeprefix("echo2-")))[field])
    place %= len(der)
    return rewritten(text, **{field: base64.b64encode(der[:place] + piece + der[place + len(piece) :]).decode()})


def test_certificate_of_an_odd_version(ticket_text: str) -> None:
    der = base64.b64decode(json.loads(base64.urlsafe_b64decode(ticket_text.removeprefix("echo2-")))["cert"])
    place = der.index(bytes.fromhex("a003020102")) + 4  # version 3
    with pytest.raises(UserError, match="is not a ticket"):
        Ticket.parse(with_odd_bytes(ticket_text, "cert", place, b"\x07"))


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=5,
)


@examples(300)
@given(st.sampled_from(["ca", "cert", "key"]), st.integers(0, 2000), st.binary(min_size=1, max_size=4))
def test_altered_certificates_give_a_valid_ticket_or_a_user_error(
    ticket_text: str, field: str, place: int, piece: bytes
) -> None:
    try:
        ticket = Ticket.parse(with_odd_bytes(ticket_text, field, place, piece))
    except UserError:
        return
    assert ticket.ticket_id == Ticket.parse(ticket_text).ticket_id or field == "cert"


@examples(200)
@given(st.sampled_from(["v", "addr", "ca", "cert", "key"]), JSON)
def test_invalid_fields_are_user_errors(ticket_text: str, field: str, value: Any) -> None:
    try:
        ticket = Ticket.parse(rewritten(ticket_text, **{field: value}))
    except UserError:
        return
    assert (field, value) in (("addr", ticket.address), ("v", 2), ("v", 2.0))


@given(st.data())
def test_an_altered_ticket_is_valid_or_a_user_error(ticket_text: str, data: st.DataObject) -> None:
    place = data.draw(st.integers(0, len(ticket_text) - 1))
    piece = data.draw(st.text(max_size=3))
    try:
        Ticket.parse(ticket_text[:place] + piece + ticket_text[place + len(piece) :])
    except UserError:
        pass


# ---- terms ----------------------------------------------------------------------------------------------------------


def test_revoked_machine_is_not_back_with_another_key(run: RunIdentity, tmp_path: Path) -> None:
    """The ticket by which it came is closed: members stay, nobody new comes by it until it is renewed."""
    ticket = ticket_id(run.make_ticket("worker", ADDRESS, 9, HOUR))
    first, second, third = (PeerIdentity(tmp_path / name).request() for name in "abc")
    peer_id, _ = run.enrol(ticket, "worker", first)
    other, _ = run.enrol(ticket, "worker", second)
    assert run.revoke(peer_id) == ticket
    word, detail = refusal(lambda: run.enrol(ticket, "worker", third))
    assert word == "ticket"
    assert "closed" in detail
    run.check_not_revoked(other)
    assert run.revoked() == {peer_id}
    run.renew_ticket(ticket, 1, HOUR)
    newcomer, _ = run.enrol(ticket, "worker", third)
    assert run.revoked() == {peer_id}
    assert refusal(lambda: run.check_not_revoked(peer_id))[0] == "revoked"
    run.check_not_revoked(newcomer)
    [known] = run.tickets()
    assert (known.terms.uses, known.refuses, set(known.members)) == (3, "used up", {peer_id, other, newcomer})


def test_revoked_ticket_shuts_out_all_its_workers(run: RunIdentity, tmp_path: Path) -> None:
    text = run.make_ticket("worker", ADDRESS, 9, HOUR)
    ticket = ticket_id(text)
    came = [run.enrol(ticket, "worker", PeerIdentity(tmp_path / name).request())[0] for name in "abc"]
    untouched, _ = run.enrol(
        ticket_id(run.make_ticket("worker", ADDRESS, 9, HOUR)), "worker", PeerIdentity(tmp_path / "d").request()
    )
    assert RunIdentity.create_or_load(tmp_path / "identity").revoke(ticket) == ""  # `echo2 revoke`
    assert run.revoked() == set(came)
    for peer_id in came:
        assert refusal(lambda peer_id=peer_id: run.check_not_revoked(peer_id))[0] == "revoked"
    run.check_not_revoked(untouched)
    assert refusal(lambda: run.check_not_revoked(ticket))[0] == "revoked"  # what a join connection is asked
    for name in "ae":  # a key that is known, and a new one
        request = PeerIdentity(tmp_path / name).request()
        assert refusal(lambda request=request: run.enrol(ticket, "worker", request))[0] == "ticket"
    with pytest.raises(UserError, match="was revoked"):
        run.renew_ticket(ticket, 5, HOUR)


@pytest.mark.parametrize("uses", [0, 1])
def test_renewed_ticket_admits_more_by_the_same_text(run: RunIdentity, tmp_path: Path, uses: int) -> None:
    text = run.make_ticket("worker", ADDRESS, uses, -HOUR)
    first, second, third = (PeerIdentity(tmp_path / name).request() for name in "abc")
    assert "expired" in refusal(lambda: run.enrol(ticket_id(text), "worker", first))[1]
    RunIdentity.create_or_load(tmp_path / "identity").renew_ticket(ticket_id(text), 2, HOUR)  # `echo2 invite --renew`
    run.enrol(ticket_id(text), "worker", first)
    run.enrol(ticket_id(text), "worker", second)
    assert "used up" in refusal(lambda: run.enrol(ticket_id(text), "worker", third))[1]
    run.renew_ticket(ticket_id(text), 1, HOUR)
    run.enrol(ticket_id(text), "worker", third)
    certificate = x509.load_pem_x509_certificate(Ticket.parse(text).credentials.certificate_pem)
    assert certificate.not_valid_after_utc > datetime.datetime.now(datetime.UTC) + datetime.timedelta(days=3000)


def test_a_request_with_an_exhausted_ticket_is_not_parsed(run: RunIdentity) -> None:
    """What is no signing request at all is not found to be malformed: nobody has looked."""
    expired = ticket_id(run.make_ticket("worker", ADDRESS, 1, -HOUR))
    revoked = ticket_id(run.make_ticket("worker", ADDRESS, 1, HOUR))
    run.revoke(revoked)
    for ticket in (expired, revoked, "0" * 16, "../members"):
        assert refusal(lambda ticket=ticket: run.enrol(ticket, "worker", b"junk"))[0] == "ticket"


def test_members_have_their_ticket_and_owner(run: RunIdentity, tmp_path: Path) -> None:
    for is_own in (True, False):
        ticket = ticket_id(run.make_ticket("worker", ADDRESS, 1, HOUR, is_own))
        peer_id, _ = run.enrol(ticket, "worker", PeerIdentity(tmp_path / str(is_own)).request())
        for identity in (run, RunIdentity.create_or_load(tmp_path / "identity")):
            assert identity.member(peer_id) == Enrolment(ticket, is_own)
    assert refusal(lambda: run.member("w-0000000000"))[0] == "unknown"


@pytest.mark.parametrize("data", [b"", b"[]", b"{}", b'{"role": 1}', b"[" * 100_000])
def test_damaged_terms_admit_no_machine_and_harm_no_other_ticket(run: RunIdentity, tmp_path: Path, data: bytes) -> None:
    damaged, other = (ticket_id(run.make_ticket("worker", ADDRESS, 1, HOUR)) for _ in range(2))
    (tmp_path / "identity" / "tickets" / f"{damaged}.json").write_bytes(data)
    request = PeerIdentity(tmp_path / "peer").request()
    assert refusal(lambda: run.enrol(damaged, "worker", request))[0] == "busy"
    with pytest.raises(UserError, match=damaged):
        run.tickets()
    run.enrol(other, "worker", request)


def test_a_worker_that_cannot_be_recorded_is_not_admitted(run: RunIdentity, tmp_path: Path) -> None:
    ticket = ticket_id(run.make_ticket("worker", ADDRESS, 1, HOUR))
    request, book = PeerIdentity(tmp_path / "peer").request(), tmp_path / "identity" / "members.json"
    book.mkdir()
    assert refusal(lambda: run.enrol(ticket, "worker", request))[0] == "busy"
    assert run.tickets()[0].members == ()
    book.rmdir()
    run.enrol(ticket, "worker", request)
