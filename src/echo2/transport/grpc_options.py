"""The options of gRPC at both ends: limits, keepalive, flow control for fast links with long delays, and proxies.

A proxy (CONNECT) is used only if `grpc_proxy` names it, and never for loopback and private addresses: gRPC would send
every address to `http_proxy`. That one and `https_proxy` are set for browsers and package indexes; such proxies often
refuse other ports than 443. `no_proxy` excepts hosts, as gRPC reads it.
"""

from __future__ import annotations

import os
from typing import Any
from urllib.parse import urlsplit

import grpc

from echo2.core import addresses
from echo2.transport import limits

#: The variable that names the proxy, those that list hosts without it, and others that programs commonly read.
VARIABLE = "grpc_proxy"
EXCEPTIONS = ("no_grpc_proxy", "no_proxy")
OTHERS = ("https_proxy", "http_proxy", "HTTPS_PROXY", "HTTP_PROXY", "all_proxy", "ALL_PROXY")
#: A caller probes a silent connection after this long, and closes it after `ANSWER_SECONDS` without an answer: a host
#: that vanished is noticed within ten seconds. A shorter time would cut off hosts that are only overloaded.
KEEPALIVE_SECONDS = 5.0
#: The same for a connection to the head, which answers all of them: a caller with a report or a result notices sooner.
#: And of a server, for processes that hang: whether the machine is there, the kernel asks (`door`), which wakes no
#: process.
HEAD_KEEPALIVE_SECONDS, SERVER_KEEPALIVE_SECONDS = 60.0, 120.0
ANSWER_SECONDS = 5.0
#: Limit on one attempt to connect: four round trips until both ends are authenticated. (gRPC calls this the minimum
#: time between attempts, which it is not: a refused connection is tried again after 0.2 s.)
CONNECT_SECONDS = 5.0
#: The same to the head, to which a whole fleet may come back at once: who gives up its turn makes the head begin again.
HEAD_CONNECT_SECONDS = 10.0
#: Initial flow-control window of one stream; gRPC widens it on longer paths. A worker fetches chunks from many peers at
#: once: with 8 MiB each, the senders' BBR start-ups together overran its queue (100 Mbit/s, four sources: 4700 packets
#: of 48 MiB dropped, 2900 with this window, 750 with gRPC's own; one run each, on a busy machine).
WINDOW_BYTES = 256 << 10
#: Size of an HTTP/2 frame. The default of 16 KiB splits a chunk of 1 MiB into sixty-four frames.
FRAME_BYTES = 1 << 20
#: Limit on a caller's TLS handshake.
HANDSHAKE_SECONDS = 10.0
#: Header that carries the request of a call without a body (`Method.in_header`).
REQUEST_HEADER = "request-bin"
_BOTH: list[tuple[str, Any]] = [
    ("grpc.max_send_message_length", limits.MESSAGE_BYTES_MAX),
    ("grpc.keepalive_timeout_ms", int(ANSWER_SECONDS * 1000)),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.http2.lookahead_bytes", WINDOW_BYTES),
    ("grpc.http2.max_frame_size", FRAME_BYTES),
    # No compression: 61 kB become 60 MiB. A call or answer that names an algorithm is refused; none is decompressed.
    ("grpc.compression_enabled_algorithms_bitset", 1 << grpc.Compression.NoCompression),
    ("grpc.per_message_decompression", 0),
]
_SERVER: list[tuple[str, Any]] = [
    *_BOTH,
    ("grpc.keepalive_time_ms", int(SERVER_KEEPALIVE_SECONDS * 1000)),
    ("grpc.so_reuseport", 0),  # two servers on one port would share its callers at random
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 1000),
    ("grpc.http2.max_ping_strikes", 0),
    ("grpc.max_concurrent_streams", limits.CALLS_MAX),
]
_CLIENT: list[tuple[str, Any]] = [
    *_BOTH,
    ("grpc.use_local_subchannel_pool", 1),  # each link is a connection of its own
    ("grpc.initial_reconnect_backoff_ms", 200),
    ("grpc.max_reconnect_backoff_ms", 2000),
    ("grpc.enable_retries", 0),  # only the caller knows which calls may be repeated
]


def proxy_of(host: str) -> str:
    """Return the URL of the proxy for this host; "" to connect directly."""
    return "" if addresses.is_private(host) or _is_excepted(host) else os.environ.get(VARIABLE, "")


def note(host: str) -> str:
    """Return what the variables for proxies mean for a connection to this host, for an error message; "" if none is
    set. Passwords are left out."""
    if url := proxy_of(host):
        return f"It was called through the proxy {_shown(url)}, as {VARIABLE} says: does that allow CONNECT?"
    variable = next((name for name in (VARIABLE, *OTHERS) if os.environ.get(name)), "")
    if not variable:
        return ""
    beginning = f"{variable} is set, and was not used:"
    if addresses.is_private(host):
        return f"{beginning} private addresses are called directly."
    if variable == VARIABLE:
        return f"{beginning} no_proxy excepts {host}."
    return f"{beginning} if only that proxy leads to {host}, set {VARIABLE} to it."


def _is_excepted(host: str) -> bool:
    listed = next((os.environ[name] for name in EXCEPTIONS if os.environ.get(name)), "")
    ends = [entry.strip().removeprefix("*") for entry in listed.split(",")]
    return any(end and host.strip("[]").endswith(end) for end in ends)


def _shown(url: str) -> str:
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}" if parts.netloc else "(no URL)"


def server(message_bytes_max: int, connections_max: int) -> list[tuple[str, Any]]:
    """Options of a server with these limits on message size and number of connections."""
    bounds = [
        ("grpc.max_receive_message_length", message_bytes_max),
        ("grpc.max_allowed_incoming_connections", connections_max),
        ("grpc.server_handshake_timeout_ms", int(HANDSHAKE_SECONDS * 1000)),
    ]
    return [*_SERVER, *bounds]


def client(server_name: str, host: str, is_head: bool = False) -> list[tuple[str, Any]]:
    """Options of a link to `host`, which must prove `server_name`."""
    keepalive_seconds = HEAD_KEEPALIVE_SECONDS if is_head else KEEPALIVE_SECONDS
    connect_seconds = HEAD_CONNECT_SECONDS if is_head else CONNECT_SECONDS
    own = [
        ("grpc.ssl_target_name_override", server_name),
        ("grpc.enable_http_proxy", int(bool(proxy_of(host)))),
        ("grpc.keepalive_time_ms", int(keepalive_seconds * 1000)),
        ("grpc.min_reconnect_backoff_ms", int(connect_seconds * 1000)),
        ("grpc.max_receive_message_length", limits.MESSAGE_BYTES_MAX if is_head else limits.PEER_MESSAGE_BYTES_MAX),
    ]
    return [*_CLIENT, *own]
