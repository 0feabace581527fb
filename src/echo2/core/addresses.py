"""Network addresses as text: joins and splits host and port, and tells near hosts from far ones.

Every address of a run is written by `join` and read by `split`: an IPv6 host stands in brackets, as in `[::1]:7341`.
The head may have several, in one text with commas between them.
"""

from __future__ import annotations

import ipaddress
import re
import socket

from echo2.core.errors import UserError

PORT_MAX = 65535
LOOPBACK = "127.0.0.1"
#: Ends of host names that exist only in a private network (RFC 6761, 6762, 8375, and ICANN's .internal).
PRIVATE_NAMES = (".local", ".localhost", ".internal", ".home.arpa")
#: Most addresses of one head.
LISTED_MAX = 8
_HOST = re.compile(r"[0-9A-Za-z._-]{1,253}|(?=.*:.*:)[0-9A-Fa-f:.]{2,45}(%[0-9A-Za-z._-]{1,32})?")
_ADDRESS = re.compile(r"(?:\[(?P<v6>[^]]+)\]|(?P<host>[^:\[\]]+))(?::(?P<port>[0-9]{1,5}))?")


def join(host: str, port: int) -> str:
    """Return "host:port", or "[host]:port" for an IPv6 host, with or without brackets."""
    host = host.strip("[]")
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def split(address: str) -> tuple[str, int]:
    """Return (host, port) of "host", "host:port", "[v6]" or "[v6]:port". Port 0: none given, or invalid."""
    match = _ADDRESS.fullmatch(address)
    if match is None:
        return address.strip("[]"), 0
    port = int(match["port"] or 0)
    return match["v6"] or match["host"], port if port <= PORT_MAX else 0


def join_all(listed: str, port: int, setting: str) -> str:
    """Return "host:port,host:port" of a list "host, host:port". `port`: of hosts without one.

    Raises:
        UserError: an entry is not a host, or has no valid port, or there are more than `LISTED_MAX`.
    """
    entries = [entry.strip() for entry in listed.split(",")]
    for entry in entries:
        host, own = split(entry)
        if not _HOST.fullmatch(host) or not (own or entry.strip("[]") == host):
            raise UserError(
                f"{setting} = {listed!r}: {entry!r} is not HOST or HOST:PORT. Separate several by commas, as in "
                "a.example:7341, b.example:7341."
            )
    if len(entries) > LISTED_MAX:
        raise UserError(f"{setting} names {len(entries)} addresses. Name at most {LISTED_MAX}.")
    return ",".join(join(host, own or port) for host, own in map(split, entries))


class Addresses:
    """Where a peer may be found: a text as of `join_all`. All links of a process to that peer call the `current` one,
    until it fails."""

    def __init__(self, text: str) -> None:
        self.all = tuple(text.split(","))
        self.current = self.all[0]

    def after(self, failed: str) -> str:
        """Return the one to call after this one has failed."""
        if failed == self.current:
            self.current = self.all[(self.all.index(failed) + 1) % len(self.all)]
        return self.current

    @property
    def are_loopback(self) -> bool:
        """Whether only this machine itself can call them."""
        return all(is_loopback(split(address)[0]) for address in self.all)


def host_and_port(text: str, setting: str, example: str) -> tuple[str, int]:
    """HOST:PORT to listen on; an IPv6 address may stand in brackets.

    Raises:
        UserError: it is not.
    """
    host, _, port = text.rpartition(":")
    if not host or not port.isdecimal() or int(port) > PORT_MAX:
        raise UserError(f"{setting} = {text!r}: expected HOST:PORT, for example {example}.")
    return host.strip("[]"), int(port)


def family(host: str) -> socket.AddressFamily:
    """Return the family of sockets that listen on this host, which has no brackets."""
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def is_loopback(host: str) -> bool:
    """Whether this host, with or without brackets, is the machine that names it."""
    host = host.strip("[]")
    try:
        return _ip(host).is_loopback
    except ValueError:
        return host == "localhost" or host.endswith(".localhost")


def is_private(host: str) -> bool:
    """Whether this host, with or without brackets, can only be reached from its own network: loopback, private and
    link-local addresses, and names that no public server knows. Nothing that calls it uses a proxy."""
    host = host.strip("[]")
    try:
        return not _ip(host).is_global
    except ValueError:
        return "." not in host or host.endswith(PRIVATE_NAMES)


def network(host: str) -> str:
    """Return what counts as one address, of a host without brackets: for IPv6 the whole /64, which a single machine may
    own."""
    return str(ipaddress.ip_network((host, 64), strict=False).network_address) if ":" in host else host


def _ip(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    """Raises ValueError: not an address."""
    address = ipaddress.ip_address(host)
    return (isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped) or address
