"""Parses worker addresses, and tells addresses of the local machine from those of the network."""

from __future__ import annotations

import ipaddress
import re

from echo2.control.broadcast.origin_events import ONE_MACHINE
from echo2.transport import wire_pb2 as wire

PORT_MAX = 65535
HOST_CHARS_MAX = 253
_ADDRESS = re.compile(r"(?:\[(?P<v6>[^]]+)\]|(?P<host>[^:\[\]]+))(?::(?P<port>[0-9]{1,5}))?")


def of_worker(hello: wire.WorkerHello, host: str) -> str:
    """Return the address "host:port" of a worker that connects from `host`; "" if it does not listen, or advertises an
    invalid address."""
    if not 0 < hello.listen_port <= PORT_MAX:
        return ""
    if not hello.advertise:
        return _joined(host, hello.listen_port)
    said, port = split(hello.advertise)
    return _joined(said, port or hello.listen_port)


def split(address: str) -> tuple[str, int]:
    """Return (host, port) of "host", "host:port", "[v6]" or "[v6]:port". Port 0: none given, or invalid."""
    match = _ADDRESS.fullmatch(address)
    if match is None:
        return address.strip("[]"), 0
    port = int(match["port"] or 0)
    return match["v6"] or match["host"], port if port <= PORT_MAX else 0


def reach(address: str) -> str:
    """Return `MemberJoined.reach` for an address: ONE_MACHINE for the loopback interface, else ""."""
    host = split(address)[0]
    try:
        return ONE_MACHINE if ipaddress.ip_address(host).is_loopback else ""
    except ValueError:
        return ONE_MACHINE if host == "localhost" else ""


def _joined(host: str, port: int) -> str:
    if not host or len(host) > HOST_CHARS_MAX or not host.isascii() or not host.isprintable() or set(host) & set(" []"):
        return ""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
