"""The sockets of a server: those that listen, what the kernel does for those that it accepts, how many there may be."""

from __future__ import annotations

import asyncio
import errno
import ipaddress
import resource
import socket
import sys

from echo2.core.errors import UserError
from echo2.transport import limits

#: Callers that the kernel queues.
BACKLOG = 1024
#: Time until unacknowledged data closes a connection; a silent one is asked after the second time, by the kernel.
SILENCE_SECONDS, QUIET_SECONDS = 15, 5
#: Descriptors of a process that are kept for files, and its descriptors in all.
FILES_MIN = 256
DESCRIPTORS_MAX = 1 << 16
#: For one connection: the caller's socket, and both ends of the connection to the server.
DESCRIPTORS_PER_CONNECTION = 3

#: What opening a file or a socket fails with when there is no room for another.
EXHAUSTED = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})
#: The host name has an address that this machine lacks, such as IPv6 where that is switched off.
_ABSENT = frozenset({errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT})


def raise_descriptor_limit() -> int:
    """Raise this process's descriptor limit as far as the system allows; returns the limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = DESCRIPTORS_MAX if hard == resource.RLIM_INFINITY else min(hard, DESCRIPTORS_MAX)
    if soft != resource.RLIM_INFINITY and soft < limit:
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
        soft = limit
    return DESCRIPTORS_MAX if soft == resource.RLIM_INFINITY else soft


def connections_max() -> int:
    """Return how many connections leave `FILES_MIN` descriptors for files (or half of all descriptors, if less)."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    descriptors = DESCRIPTORS_MAX if soft == resource.RLIM_INFINITY else soft
    free = descriptors - min(FILES_MIN, descriptors // 2)
    return max(1, min(limits.CONNECTIONS_MAX, free // DESCRIPTORS_PER_CONNECTION))


def is_out_of_descriptors(error: BaseException) -> bool:
    """Whether an error, or the cause of a UserError, is that no more files can be opened: a passing condition."""
    cause = error.__cause__ if isinstance(error, UserError) else error
    return isinstance(cause, OSError) and cause.errno in EXHAUSTED


async def listen(host: str, port: int) -> list[socket.socket]:
    """Listen at all addresses of `host`, all at one port (0: any); return the sockets.

    Raises:
        OSError: the address or port is not available.
    """
    if not 0 <= port < 1 << 16:
        raise OSError(errno.EINVAL, "a port is a number below 65536")
    listeners, absent = list[socket.socket](), OSError(errno.EADDRNOTAVAIL, "no address")
    for family, address in await _addresses(host.strip("[]")):
        try:
            listeners.append(_listen(family, address, port))
        except OSError as error:
            absent = error
            if error.errno not in _ABSENT:
                break
            continue
        port = listeners[0].getsockname()[1]
        if address == "::":
            break  # a dual-stack socket covers IPv4, too
    if not listeners or absent.errno not in _ABSENT:
        for listener in listeners:
            listener.close()
        raise absent
    return listeners


async def _addresses(host: str) -> list[tuple[int, str]]:
    if host in ("0.0.0.0", "::", ""):
        dual = [(int(socket.AF_INET6), "::")] if socket.has_dualstack_ipv6() else []
        return [*dual, (int(socket.AF_INET), "0.0.0.0")]
    loop = asyncio.get_running_loop()
    infos = await loop.getaddrinfo(host, 0, type=socket.SOCK_STREAM)
    return list(dict.fromkeys((int(family), str(where[0])) for family, _, _, _, where in infos))


def _listen(family: int, address: str, port: int) -> socket.socket:
    dual = family == socket.AF_INET6 and address == "::"
    listener = socket.create_server((address, port), family=family, backlog=BACKLOG, dualstack_ipv6=dual)
    listener.setblocking(False)
    return listener


def notice_when_gone(sock: socket.socket) -> None:
    """Have the kernel close a connection whose caller's machine vanished: it asks by itself, without waking a process
    at either end, where pings of gRPC for thousands of silent workers cost a large share of a core.
    """
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if sys.platform == "linux":
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, SILENCE_SECONDS * 1000)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, QUIET_SECONDS)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, QUIET_SECONDS)
    elif sys.platform == "darwin":
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPALIVE, QUIET_SECONDS)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, QUIET_SECONDS)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, SILENCE_SECONDS // QUIET_SECONDS)


def plain(host: str) -> str:
    """Return an IPv4-mapped IPv6 address as IPv4; other addresses unchanged."""
    address = ipaddress.ip_address(host.partition("%")[0])
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return str(mapped or address)
