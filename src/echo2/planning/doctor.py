"""`echo2 doctor`: finds what is wrong with this machine, or with its way to the head of a ticket, and what to do.

The command changes nothing. With a ticket, it connects to the ticket's address as a worker would, up to the TLS
handshake; this does not count as a use of the ticket.
"""

from __future__ import annotations

import argparse
import base64
import http.client
import importlib.util
import json
import os
import resource
import shutil
import socket
import ssl
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime, timedelta
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Literal
from urllib.parse import unquote, urlsplit

from echo2 import __version__
from echo2.config.values import FORMS
from echo2.core.addresses import Addresses, is_loopback, split
from echo2.core.devices import NVIDIA_DRIVER, this_machine
from echo2.core.disk import FLOOR_BYTES, free_bytes
from echo2.core.errors import UserError
from echo2.core.types import Hardware
from echo2.engines.registry import missing_packages, rounding_engines, sampling_bytes
from echo2.learner.decide.memory import FORM_BITS, PROCESS_BYTES, USABLE
from echo2.transport import certificates, grpc_options
from echo2.transport.identity import SERVER_NAME
from echo2.transport.limits import PROTOCOL_VERSION
from echo2.transport.tickets import Ticket
from echo2.worker.at_home import OwnersPrograms, is_on_battery

#: Enough for a head with hundreds of workers: one connection per worker, and files.
DESCRIPTORS_MIN = 4096
MEMORY_MIN_BYTES = 2 << 30
DIAL_SECONDS = 5.0
#: Bits of a published weight where memory is short (`model.snapshot_dtype = "bfloat16"`).
PUBLISHED_BITS = 16
#: The port in the documentation's examples of `head.listen`.
HEAD_PORT = 7341
#: Seconds to connect beyond which a lease is mostly network latency.
SLOW_SECONDS = 1.0

#: A clock further behind the head's than this is reported; certificates tolerate a day.
CLOCK_DOUBT = timedelta(minutes=5)
STANDBY = "That is as it should be where a standby waits. Else the owner takes the address out of head.advertise."
SET_CLOCK = "Set this machine's clock (timedatectl set-ntp true): certificates are valid only within their dates."
#: X509_V_ERR_CERT_NOT_YET_VALID and X509_V_ERR_CERT_HAS_EXPIRED of OpenSSL.
OUTSIDE_ITS_TIME = (9, 10)

Verdict = Literal["fine", "doubtful", "wrong"]


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check. `todo`: what to do about it; empty if the check is fine."""

    about: str
    verdict: Verdict
    said: str
    todo: str = ""


def run(options: argparse.Namespace) -> int:
    """The command. Returns 0 if nothing is wrong, else 1.

    Raises:
        UserError: the text given as a ticket is not a ticket.
    """
    ticket = Ticket.parse(options.ticket) if options.ticket else None
    findings = [*machine(Path.cwd()), *(at_ticket(ticket, time.time()) if ticket else ())]
    if options.json:
        print(json.dumps([asdict(finding) for finding in findings]))
    else:
        for finding in findings:
            print(f"{finding.verdict:>8}  {finding.about}: {finding.said}")
            if finding.todo:
                print(f"          {finding.todo}")
    return int(any(finding.verdict == "wrong" for finding in findings))


# ---- this machine ----------------------------------------------------------------------------------------------------


def machine(directory: Path, version_of: Callable[[str], str] = version) -> Iterator[Finding]:
    """Check this machine, without contacting any other."""
    yield from _packages(version_of)
    yield _token_servers()
    hardware = this_machine()
    yield from _gpus(hardware.gpus)
    memory = hardware.memory_bytes
    todo = "A learner or worker needs some 2 GB for the smallest model; see `echo2 plan`."
    yield _finding("memory", memory >= MEMORY_MIN_BYTES, f"{memory / 1e9:.1f} GB", "doubtful", todo)
    yield from _engines(hardware)
    yield _at_home()
    free = free_bytes(directory)
    todo = f"A run pauses below {FLOOR_BYTES / 1e6:.0f} MB: make room."
    yield _finding("disk", free >= FLOOR_BYTES, f"{free / 1e9:.1f} GB free at {directory}", "wrong", todo)
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    is_enough = hard == resource.RLIM_INFINITY or hard >= DESCRIPTORS_MIN
    todo = f"A head with many workers needs {DESCRIPTORS_MIN}: raise ulimit -Hn, or limits.conf."
    yield _finding("open files", is_enough, f"{hard} at most", "doubtful", todo)
    yield _port(HEAD_PORT)


def _engines(hardware: Hardware) -> Iterator[Finding]:
    """Say how large a model a worker's weights leave room for, published and in each form. Keys and values come on top,
    for which the worker takes fewer rollouts at once.
    """
    room = USABLE * max(hardware.gpus, default=sampling_bytes(hardware.memory_bytes)) - PROCESS_BYTES
    for engine, bits in (
        ("compact", PUBLISHED_BITS),
        *((engine, FORM_BITS[FORMS[engine]]) for engine in rounding_engines()),
    ):
        most = max(0.0, room) * 8 / bits / 1e9
        whole = most if engine == "compact" else most / 2  # a form is loaded beside the one before
        sizes = f"adapters over models of up to {most:.1f} billion weights, whole models of up to {whole:.1f}"
        missing = missing_packages(engine) if engine in FORMS else ""
        yield Finding(f"engine {engine}", "fine", f"{missing}; would hold {sizes}" if missing else sizes)


def _at_home() -> Finding:
    """Check whether a worker that steps back for the machine's owner would sample now."""
    would = "takes half of the memory and cores, and steps back while other programs use half of all cores"
    try:
        OwnersPrograms()
    except UserError as error:
        return Finding("at home", "doubtful", str(error))
    waits = "the machine is on battery, so it would wait for mains; else " if is_on_battery() else ""
    return Finding("at home", "fine", f"{waits}a worker with --at-home {would}")


def _token_servers() -> Finding:
    """Check whether a worker here would find vLLM."""
    python = os.environ.get("ECHO2_ENGINE_PYTHON", "")
    if python:
        is_there = shutil.which(python) is not None
        return _finding(
            "vllm", is_there, f"by {python}", "wrong", "ECHO2_ENGINE_PYTHON names no program: correct or unset it."
        )
    is_here = importlib.util.find_spec("vllm") is not None
    return Finding("vllm", "fine", "in this environment" if is_here else "not installed; workers do without")


def _gpus(memory_bytes: Sequence[int]) -> Iterator[Finding]:
    for number, num_bytes in enumerate(memory_bytes):
        yield Finding(f"GPU {number}", "fine", f"{num_bytes / 1e9:.1f} GB")
    if not memory_bytes and NVIDIA_DRIVER.exists():
        todo = "Does `nvidia-smi` list one? A container needs --gpus all; CUDA_VISIBLE_DEVICES may hide it."
        yield Finding("GPU", "wrong", "there is a driver, but torch finds no GPU", todo)


def _port(port: int) -> Finding:
    """Check whether a head here can listen on the port that the documentation uses."""
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(("0.0.0.0", port))
        except OSError as error:
            todo = "A head here needs another port: --head.listen HOST:PORT. Workers are not affected."
            return Finding("port", "doubtful", f"{port} cannot be listened on: {error.strerror}", todo)
    return Finding("port", "fine", f"{port} is free for a head")


def _finding(about: str, is_fine: bool, state: str, otherwise: Verdict, todo: str) -> Finding:
    return Finding(about, "fine", state) if is_fine else Finding(about, otherwise, state, todo)


def _packages(version_of: Callable[[str], str]) -> Iterator[Finding]:
    yield Finding("python", "fine", sys.version.split()[0])
    yield Finding(
        "echo2", "fine", f"{__version__}, protocol {PROTOCOL_VERSION}; head, learner and workers need the same version"
    )
    try:
        torch = version_of("torch")
    except PackageNotFoundError:
        todo = "A head needs none. A learner or worker: pip install torch==2.13.0, then pip install 'echo2[train]'."
        yield Finding("torch", "doubtful", "not installed", todo)
        return
    if NVIDIA_DRIVER.exists() and "+cpu" in torch:
        todo = "pip install --force-reinstall torch==2.13.0 installs the build for GPUs."
        yield Finding("torch", "wrong", f"{torch} cannot use this machine's GPU", todo)
    else:
        yield Finding("torch", "fine", torch + ("" if NVIDIA_DRIVER.exists() else "; no NVIDIA driver here"))
    for name in ("transformers", "safetensors", "peft"):
        try:
            yield Finding(name, "fine", version_of(name))
        except PackageNotFoundError:
            yield Finding(name, "wrong", "not installed", "pip install 'echo2[train]'")


# ---- a ticket --------------------------------------------------------------------------------------------------------


def at_ticket(ticket: Ticket, now: float) -> Iterator[Finding]:
    """Check whether this machine could join with the ticket. `now`: Unix time."""
    yield Finding("ticket", "fine", f"of run {ticket.run_id}, for a {ticket.role}, at {ticket.address}")
    certificate = certificates.read_pem(ticket.credentials.certificate_pem)
    made, ends = certificate.not_valid_before_utc, certificate.not_valid_after_utc
    today = datetime.fromtimestamp(now, UTC)
    shown = f"{today:%Y-%m-%d %H:%M} UTC"
    if not made <= today <= ends:
        todo = f"The ticket is valid {made:%Y-%m-%d} to {ends:%Y-%m-%d}: set this machine's clock, or ask for a new one"
        yield Finding("clock", "wrong", shown, todo)
        return
    yield from _dial(ticket, now)


def _clock(certificate: bytes, now: float) -> Finding:
    """Compare this machine's clock with the head's certificate (DER), which was made when the run began: a clock that
    shows an earlier time is behind. A clock that is ahead does no harm, because certificates last for years.
    """
    shown = certificates.read_der(certificate)
    today, made = datetime.fromtimestamp(now, UTC), shown.not_valid_before_utc + certificates.CLOCK_SLACK
    text = f"{today:%Y-%m-%d %H:%M} UTC"
    if made - today > CLOCK_DOUBT:
        behind = f"{text}, at least {(made - today) / timedelta(minutes=1):.0f} minutes behind the head's"
        return Finding("clock", "doubtful" if today > shown.not_valid_before_utc else "wrong", behind, SET_CLOCK)
    return Finding("clock", "fine", text)


def _dial(ticket: Ticket, now: float) -> Iterator[Finding]:
    """Try the head's addresses in turn, as a worker does: up to the first that answers."""
    failed: list[Finding] = []
    for address in Addresses(ticket.address).all:
        findings = list(_dial_at(address, ticket, now))
        if not any(one.about == "link" and one.verdict == "wrong" for one in findings):
            yield from (replace(one, verdict="doubtful", todo=STANDBY) for one in failed if one.about == "link")
            yield from findings
            return
        failed += findings
    yield from failed


def _dial_at(address: str, ticket: Ticket, now: float) -> Iterator[Finding]:
    host, port = split(address)
    if is_loopback(host):
        todo = "If the head is elsewhere, its owner sets head.advertise and makes a new ticket."
        yield Finding("address", "doubtful", f"{host} is this machine itself", todo)
    began = time.monotonic()
    try:
        with _connected(host, port) as link:
            seconds = time.monotonic() - began
            answer = f"{address} answers in {seconds * 1e3:.0f} ms"
            todo = "Rollouts will be late: give this worker few slots, or the run a larger max_staleness."
            yield _finding("link", seconds < SLOW_SECONDS, answer, "doubtful", todo)
            yield from _shake_hands(ticket, link, now)
    except socket.gaierror as error:
        yield Finding("link", "wrong", f"no host {host!r}: {error.strerror}", "Check the name, and this machine's DNS.")
    except OSError as error:
        todo = (
            "Is the run going on (`echo2 status` at the head)? Is a firewall in the way? Workers only connect outwards."
        )
        todo = f"{todo} {grpc_options.note(host)}".rstrip()
        yield Finding("link", "wrong", f"{address} does not answer: {error.strerror or error}", todo)


def _connected(host: str, port: int) -> socket.socket:
    """Connect as a worker would: directly, or through the proxy that gRPC would use. Raises OSError."""
    url = urlsplit(grpc_options.proxy_of(host))
    if not url.hostname:
        return socket.create_connection((host, port), DIAL_SECONDS)
    tunnel = http.client.HTTPConnection(url.hostname, url.port or 80, timeout=DIAL_SECONDS)
    user = base64.b64encode(unquote(url.netloc.rpartition("@")[0]).encode()).decode()
    tunnel.set_tunnel(host, port, {"Proxy-Authorization": f"Basic {user}"} if user else {})
    tunnel.connect()
    assert isinstance(tunnel.sock, socket.socket)
    return tunnel.sock


def _shake_hands(ticket: Ticket, link: socket.socket, now: float) -> Iterator[Finding]:
    """Perform a worker's TLS handshake, in which both ends present certificates."""
    context = ssl.create_default_context(cadata=ticket.credentials.ca_pem.decode())
    context.set_alpn_protocols(["h2"])
    with tempfile.TemporaryDirectory() as folder:
        paths = Path(folder, "certificate.pem"), Path(folder, "key.pem")
        for path, pem in zip(paths, (ticket.credentials.certificate_pem, ticket.credentials.key_pem), strict=True):
            path.touch(mode=0o600)
            path.write_bytes(pem)
        context.load_cert_chain(*paths)
    try:
        with context.wrap_socket(link, server_hostname=SERVER_NAME) as secured:
            yield Finding("head", "fine", f"it is run {ticket.run_id}; {secured.version()}")
            yield _clock(secured.getpeercert(binary_form=True) or b"", now)
    except ssl.SSLCertVerificationError as error:
        if error.verify_code in OUTSIDE_ITS_TIME:
            problem = f"{datetime.fromtimestamp(now, UTC):%Y-%m-%d %H:%M} UTC: {error.verify_message}"
            yield Finding("clock", "wrong", problem, f"{SET_CLOCK} If it is right, the run's identity has expired.")
            return
        todo = (
            "Another run uses that address now, or the run was started anew: ask for a ticket of the run that is there."
        )
        yield Finding("head", "wrong", f"it is not run {ticket.run_id}: {error.verify_message}", todo)
    except OSError as error:
        todo = "The head refuses floods and revoked tickets: wait a minute, then ask its owner."
        yield Finding("head", "wrong", f"the connection broke: {error.strerror or error}", todo)
