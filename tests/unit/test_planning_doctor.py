"""What `echo2 doctor` finds of a machine and of a ticket. Heads here are TLS servers with a run's real identity."""

from __future__ import annotations

import json
import resource
import socket
import ssl
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest

from echo2 import __version__
from echo2.cli import main
from echo2.core.types import Hardware
from echo2.planning import doctor
from echo2.transport import certificates
from echo2.transport.identity import RunIdentity
from echo2.transport.limits import PROTOCOL_VERSION
from echo2.transport.tickets import Ticket


@contextmanager
def listening(identity: RunIdentity, directory: Path) -> Iterator[str]:
    """The address of a server that shakes hands as this run's head."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    shown = identity.credentials
    paths = [directory / name for name in ("shown.pem", "shown.key")]
    for path, pem in zip(paths, (shown.certificate_pem, shown.key_pem), strict=True):
        path.write_bytes(pem)
    context.load_cert_chain(*paths)
    context.load_verify_locations(cadata=shown.ca_pem.decode())
    context.verify_mode = ssl.CERT_REQUIRED
    server = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        try:
            while True:
                link, _ = server.accept()
                with link:
                    try:
                        context.wrap_socket(link, server_side=True).close()
                    except OSError:
                        pass  # whoever dialled does not believe us
        except OSError:
            pass  # closed

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield f"127.0.0.1:{server.getsockname()[1]}"
    finally:
        server.shutdown(socket.SHUT_RDWR)
        server.close()
        thread.join()


def verdicts(ticket: Ticket, now: float | None = None) -> dict[str, str]:
    found = doctor.at_ticket(ticket, time.time() if now is None else now)
    told = {finding.about: finding for finding in found}
    assert all(bool(finding.todo) == (finding.verdict != "fine") for finding in told.values())
    return {about: finding.verdict for about, finding in told.items()}


def ticket_of(identity: RunIdentity, address: str) -> Ticket:
    return Ticket.parse(identity.make_ticket("worker", address, 1, 1.0))


def test_a_head_that_is_the_tickets_is_found(tmp_path: Path) -> None:
    identity = RunIdentity.create_or_load(tmp_path / "run")
    with listening(identity, tmp_path) as address:
        found = verdicts(ticket_of(identity, address))
    assert found == {"ticket": "fine", "clock": "fine", "address": "doubtful", "link": "fine", "head": "fine"}


def test_the_head_of_another_run_at_the_address_is_detected(tmp_path: Path) -> None:
    ours, theirs = (RunIdentity.create_or_load(tmp_path / name) for name in ("ours", "theirs"))
    with listening(theirs, tmp_path) as address:
        assert verdicts(ticket_of(ours, address))["head"] == "wrong"


def test_doctor_tells_a_closed_port_from_an_unknown_host(tmp_path: Path) -> None:
    identity = RunIdentity.create_or_load(tmp_path / "run")
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
    said = [finding.said for finding in doctor.at_ticket(ticket_of(identity, address), time.time())]
    assert any("does not answer" in words for words in said)
    said = [finding.said for finding in doctor.at_ticket(ticket_of(identity, "no.such.host.invalid:1"), time.time())]
    assert any("no host" in words for words in said)


def test_a_link_waits_while_a_standby_does_not_answer(tmp_path: Path) -> None:
    identity = RunIdentity.create_or_load(tmp_path / "run")
    with socket.create_server(("127.0.0.1", 0)) as server:
        away = f"127.0.0.1:{server.getsockname()[1]}"
    with listening(identity, tmp_path) as address:
        for addresses in (f"{away},{address}", f"{address},{away}"):
            found = list(doctor.at_ticket(ticket_of(identity, addresses), time.time()))
            assert [one.verdict for one in found if one.about == "head"] == ["fine"]
            assert not any(one.verdict == "wrong" for one in found)
    found = list(doctor.at_ticket(ticket_of(identity, f"{away},{away}"), time.time()))
    assert [one.verdict for one in found if one.about == "link"] == ["wrong", "wrong"]


def test_a_clock_outside_the_tickets_validity_is_reported_before_any_call(tmp_path: Path) -> None:
    ticket = ticket_of(RunIdentity.create_or_load(tmp_path / "run"), "127.0.0.1:1")
    later = (certificates.CERTIFICATE_DAYS + 9) * 86_400
    for away in (-7 * 86_400, later):
        assert verdicts(ticket, time.time() + away) == {"ticket": "fine", "clock": "wrong"}


def test_a_clock_that_is_behind_the_heads_is_found_by_its_certificate(tmp_path: Path) -> None:
    """The ticket would still do: it was made with a day to spare."""
    identity = RunIdentity.create_or_load(tmp_path / "run")
    with listening(identity, tmp_path) as address:
        ticket = ticket_of(identity, address)
        for minutes, verdict in ((1, "fine"), (90, "doubtful")):
            assert verdicts(ticket, time.time() - 60 * minutes)["clock"] == verdict
        said = {one.about: one.said for one in doctor.at_ticket(ticket, time.time() - 5400)}["clock"]
        assert said.endswith((", at least 89 minutes behind the head's", ", at least 90 minutes behind the head's"))


def test_packages_that_are_missing_or_cannot_use_the_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def none(name: str) -> str:
        raise PackageNotFoundError(name)

    def build_for_cpus(name: str) -> str:
        return "2.13.0+cpu" if name == "torch" else none(name)

    found = {finding.about: finding.verdict for finding in doctor.machine(tmp_path, none)}
    assert found["torch"] == "doubtful"  # a head needs none
    driver = tmp_path / "version"
    driver.touch()
    monkeypatch.setattr(doctor, "NVIDIA_DRIVER", driver)
    found = {finding.about: finding.verdict for finding in doctor.machine(tmp_path, build_for_cpus)}
    assert (found["torch"], found["peft"]) == ("wrong", "wrong")
    assert found["GPU"] == "wrong"  # a driver, and no GPU that torch finds


def test_doctor_prints_gpus_with_their_memory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(doctor, "this_machine", lambda: Hardware(64 << 30, (80 << 30, 24 << 30)))
    found = {finding.about: finding.said for finding in doctor.machine(tmp_path)}
    assert (found["GPU 0"], found["GPU 1"], found["memory"]) == ("85.9 GB", "25.8 GB", "68.7 GB")


def test_doctor_prints_what_fits_in_memory_for_each_form(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """By hand: .9 of 16 GB less half a GB for the process; 16, 8.5 and 4.5 bits."""
    monkeypatch.setattr(doctor, "this_machine", lambda: Hardware(16_000_000_000))
    monkeypatch.setattr(doctor, "missing_packages", lambda engine: "" if "q8" in engine else "nothing is installed")
    found = {finding.about: finding.said for finding in doctor.machine(tmp_path)}
    assert found["engine compact"].startswith(
        "adapters over models of up to 7.0 billion weights, whole models of up to 7"
    )
    assert found["engine llamacpp-q8_0"].endswith("up to 13.1 billion weights, whole models of up to 6.5")
    assert found["engine llamacpp-q4_0"].startswith(
        "nothing is installed; would hold adapters over models of up to 24.7"
    )


def test_doctor_says_whether_a_worker_at_home_would_sample(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def at_home() -> doctor.Finding:
        return next(one for one in doctor.machine(tmp_path) if one.about == "at home")

    class Battery:
        power_plugged = False

    monkeypatch.setattr("psutil.sensors_battery", lambda: None, raising=False)
    assert "half of the memory and cores" in at_home().said
    monkeypatch.setattr("psutil.sensors_battery", Battery, raising=False)
    assert at_home().said.startswith("the machine is on battery, so it would wait for mains")
    monkeypatch.setattr("psutil.cpu_times", lambda: open("/nowhere"))  # noqa: SIM115
    assert at_home().verdict == "doubtful"
    assert "Leave --at-home out" in at_home().said


def test_doctor_reports_a_port_in_use_and_a_missing_engine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("ECHO2_ENGINE_PYTHON", "/nowhere/python")
    with socket.create_server(("0.0.0.0", 0)) as taken:
        monkeypatch.setattr(doctor, "HEAD_PORT", taken.getsockname()[1])
        found = {finding.about: finding for finding in doctor.machine(tmp_path)}
    assert (found["port"].verdict, found["vllm"].verdict) == ("doubtful", "wrong")
    assert found["echo2"].said.startswith(f"{__version__}, protocol {PROTOCOL_VERSION}")


def test_doctor_reports_scarce_resources(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(doctor, "free_bytes", lambda _: 1 << 20)
    monkeypatch.setattr(resource, "getrlimit", lambda _: (64, 64))
    found = {finding.about: finding.verdict for finding in doctor.machine(tmp_path)}
    assert (found["disk"], found["open files"]) == ("wrong", "doubtful")


def test_the_command_says_it_all_as_json_and_by_its_status(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    identity = RunIdentity.create_or_load(tmp_path / "run")
    path = tmp_path / "ticket"
    path.write_text(identity.make_ticket("worker", "no.such.host.invalid:1", 1, 1.0))
    assert main(["doctor", f"@{path}", "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert {"about": "python", "verdict": "fine"}.items() <= found[0].items()
    assert found[-1]["verdict"] == "wrong"
    assert main(["doctor", "nonsense"]) == 2
