"""Checks the addresses that workers tell of themselves."""

from __future__ import annotations

from echo2.addresses import PORT_MAX, is_loopback, join, split
from echo2.control.broadcast.origin_events import ONE_MACHINE
from echo2.transport import wire_pb2 as wire

HOST_CHARS_MAX = 253


def of_worker(hello: wire.WorkerHello, host: str) -> str:
    """Return the address "host:port" of a worker that connects from `host`; "" if it does not listen, or advertises an
    invalid address."""
    if not 0 < hello.listen_port <= PORT_MAX:
        return ""
    if not hello.advertise:
        return _joined(host, hello.listen_port)
    said, port = split(hello.advertise)
    return _joined(said, port or hello.listen_port)


def reach(address: str) -> str:
    """Return `MemberJoined.reach` for an address: ONE_MACHINE for the loopback interface, else ""."""
    return ONE_MACHINE if is_loopback(split(address)[0]) else ""


def _joined(host: str, port: int) -> str:
    if not host or len(host) > HOST_CHARS_MAX or not host.isascii() or not host.isprintable() or set(host) & set(" []"):
        return ""
    return join(host, port)
