"""The owner's tickets are kept usable; commands make, renew, show and revoke others, beside a head or without one."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from echo2.cli import main
from echo2.config.rundir import RunDir
from echo2.core.errors import PeerError, UserError
from echo2.head.strangers.tickets import OwnTickets, open_identity, own_files
from echo2.transport.identity import Enrolment, PeerIdentity, RunIdentity
from echo2.transport.tickets import OWN_TICKET_USES, Ticket

ADDRESS = "203.0.113.5:4700"


class Head:
    """What a running head has, of what matters here."""

    def __init__(self, path: Path) -> None:
        self.path, self.rundir = path, RunDir(path / "run")
        self.rundir.path.mkdir(exist_ok=True)
        self.identity = RunIdentity.create_or_load(self.rundir.identity)
        self.tickets = OwnTickets(self.identity, own_files(self.rundir), ADDRESS)
        self.tickets.keep()
        self._num_peers = 0

    @property
    def ticket(self) -> Ticket:
        return Ticket.parse(f"@{self.rundir.ticket}")

    def enrol(self, ticket_id: str) -> str:
        self._num_peers += 1
        request = PeerIdentity(self.path / str(self._num_peers)).request()
        return self.identity.enrol(ticket_id, "worker", request)[0]


@pytest.fixture
def head(tmp_path: Path) -> Head:
    return Head(tmp_path)


def said(capsys: pytest.CaptureFixture[str], *words: Any) -> str:
    assert main([str(word) for word in words]) == 0
    return capsys.readouterr().out.strip()


def test_tickets_of_the_owner_are_written_once(head: Head) -> None:
    texts = [head.rundir.ticket.read_text(), head.rundir.learner_ticket.read_text()]
    assert [Ticket.parse(text).role for text in texts] == ["worker", "learner"]
    assert {path.stat().st_mode & 0o777 for path in (head.rundir.ticket, head.rundir.learner_ticket)} == {0o600}
    assert head.identity.member(head.enrol(head.ticket.ticket_id)).is_own
    head.tickets.keep()
    Head(head.path)  # a head that starts again
    assert texts == [head.rundir.ticket.read_text(), head.rundir.learner_ticket.read_text()]


def test_half_used_ticket_is_replaced_and_still_admits_its_workers(head: Head) -> None:
    old = head.ticket.ticket_id
    for _ in range(OWN_TICKET_USES // 2 + 1):
        assert head.ticket.ticket_id == old
        head.enrol(old)
        head.tickets.keep()
    assert head.ticket.ticket_id != old
    for _ in range(OWN_TICKET_USES // 2 - 1):
        head.enrol(old)
    with pytest.raises(PeerError, match="used up"):  # a copy of the old text gets nobody further
        head.enrol(old)
    head.enrol(head.ticket.ticket_id)


@pytest.mark.parametrize("how", ["expired", "closed", "revoked", "deleted", "damaged", "terms gone", "moved"])
def test_an_exhausted_ticket_is_replaced(head: Head, how: str, capsys: pytest.CaptureFixture[str]) -> None:
    old, restarted = head.ticket, head
    if how == "expired":
        head.identity.renew_ticket(old.ticket_id, 9, -1.0)
    elif how in ("closed", "revoked"):  # by a command, while the head runs
        said(capsys, "revoke", head.rundir.path, head.enrol(old.ticket_id) if how == "closed" else old.ticket_id)
    elif how == "deleted":
        head.rundir.ticket.unlink()
    elif how == "damaged":
        head.rundir.ticket.write_text("echo2-")
        restarted = Head(head.path)
    elif how == "terms gone":
        (head.rundir.identity / "tickets" / f"{old.ticket_id}.json").unlink()
        restarted = Head(head.path)
    else:
        OwnTickets(head.identity, own_files(head.rundir), "203.0.113.6:4700").keep()
        assert head.ticket.address == "203.0.113.6:4700"
    restarted.tickets.keep()
    assert head.ticket.ticket_id != old.ticket_id
    restarted.enrol(head.ticket.ticket_id)


def test_invitation_is_for_strangers_and_can_be_renewed(head: Head, capsys: pytest.CaptureFixture[str]) -> None:
    ticket = Ticket.parse(said(capsys, "invite", head.rundir.path, "--uses", 2, "--days", 3))
    assert (ticket.address, ticket.role, ticket.run_id) == (ADDRESS, "worker", head.identity.run_id)
    peer_id = head.enrol(ticket.ticket_id)
    assert head.identity.member(peer_id) == Enrolment(ticket.ticket_id, False)
    head.enrol(ticket.ticket_id)
    with pytest.raises(PeerError, match="used up"):
        head.enrol(ticket.ticket_id)
    said(capsys, "invite", head.rundir.path, "--renew", ticket.ticket_id, "--uses", 1)
    head.enrol(ticket.ticket_id)
    shown = {each["id"]: each for each in json.loads(said(capsys, "tickets", head.rundir.path, "--json"))}
    assert len(shown) == 3
    one = shown[ticket.ticket_id]
    assert (one["own"], one["role"], one["used"], one["uses"], one["refuses"]) == (False, "worker", 3, 3, "used up")
    assert one["expires"] == pytest.approx(time.time() + 30 * 86_400, abs=60)
    assert peer_id in one["members"]
    table = said(capsys, "tickets", head.rundir.path)
    assert ticket.ticket_id in table
    assert "3/3" in table


def test_invitation_says_to_scripts_what_it_made(head: Head, capsys: pytest.CaptureFixture[str]) -> None:
    made = json.loads(said(capsys, "invite", head.rundir.path, "--uses", 2, "--json"))
    assert Ticket.parse(made["ticket"]).ticket_id == made["id"]
    assert (made["address"], made["uses"], made["used"], made["own"], made["note"]) == (ADDRESS, 2, 0, False, "")
    renewed = json.loads(said(capsys, "invite", head.rundir.path, "--renew", made["id"], "--uses", 3, "--json"))
    assert (renewed["id"], renewed["uses"], renewed["ticket"]) == (made["id"], 3, None)
    OwnTickets(head.identity, own_files(head.rundir), "127.0.0.1:4700").keep()
    near = json.loads(said(capsys, "invite", head.rundir.path, "--json"))
    assert "no other machine can reach the head" in near["note"]


def test_revoked_ticket_revokes_all_its_workers(head: Head, capsys: pytest.CaptureFixture[str]) -> None:
    ticket = Ticket.parse(said(capsys, "invite", head.rundir.path)).ticket_id
    came, own = {head.enrol(ticket) for _ in range(3)}, head.enrol(head.ticket.ticket_id)
    assert said(capsys, "revoke", head.rundir.path, ticket) == f"{ticket} is revoked"
    assert head.identity.revoked() == came
    head.identity.check_not_revoked(own)
    assert main(["invite", str(head.rundir.path), "--renew", ticket]) == 2
    assert "was revoked" in capsys.readouterr().err


def test_revoking_names_the_worker_and_its_ticket(head: Head, capsys: pytest.CaptureFixture[str]) -> None:
    ticket = head.ticket.ticket_id
    peer_id = head.enrol(ticket)
    told = said(capsys, "revoke", head.rundir.path, peer_id)
    assert told == f"{peer_id} is revoked; ticket {ticket}, with which it joined, admits no more machines"


def test_revocation_prints_the_revoked_workers_as_json(head: Head, capsys: pytest.CaptureFixture[str]) -> None:
    ticket = Ticket.parse(said(capsys, "invite", head.rundir.path)).ticket_id
    came = [head.enrol(ticket) for _ in range(2)]
    one = json.loads(said(capsys, "revoke", head.rundir.path, came[0], "--json"))
    assert one == {
        "id": came[0],
        "kind": "worker",
        "workers": [came[0]],
        "tickets": [ticket],
    }
    every = json.loads(said(capsys, "revoke", head.rundir.path, ticket, "--json"))
    assert (every["kind"], every["tickets"]) == ("ticket", [ticket])
    assert set(every["workers"]) == set(came)
    assert main(["revoke", str(head.rundir.path), "w-nobody", "--json"]) == 2
    assert "There is no 'w-nobody' to revoke" in capsys.readouterr().err


@pytest.mark.parametrize(
    "words",
    [["--uses", "0"], ["--uses", "-1"], ["--days", "0"], ["--days", "nan"], ["--days", "4000"], ["--renew", "x"]],
)
def test_invitation_that_makes_no_sense(head: Head, words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["invite", str(head.rundir.path), *words]) == 2
    assert capsys.readouterr().err.startswith("error: ")


def test_run_without_a_head(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="not a run that was started"):
        open_identity(tmp_path)


@pytest.mark.parametrize(("address", "is_told"), [("127.0.0.1:4700", True), ("[::1]:4700", True), (ADDRESS, False)])
def test_an_invitation_for_this_machine_only_causes_a_warning(
    head: Head, address: str, is_told: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    OwnTickets(head.identity, own_files(head.rundir), address).keep()
    assert main(["invite", str(head.rundir.path)]) == 0
    printed = capsys.readouterr()
    assert Ticket.parse(printed.out.strip()).address == address  # the ticket alone, for scripts
    assert ("no other machine can reach the head" in printed.err) == is_told


@pytest.mark.parametrize(
    ("uses", "days", "wrong"),
    [
        (0, 2, "A ticket cannot admit 0 machines: give it at least 1."),
        (1, 0, "A ticket cannot last 0 days: give it more than 0 days, and at most 3650."),
        (1, 4000, "A ticket cannot last 4000 days: give it more than 0 days, and at most 3650."),
    ],
)
def test_the_error_about_a_ticket_names_the_wrong_number(
    head: Head, uses: int, days: int, wrong: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["invite", str(head.rundir.path), "--uses", str(uses), "--days", str(days)]) == 2
    assert capsys.readouterr().err == f"error: {wrong}\n"
