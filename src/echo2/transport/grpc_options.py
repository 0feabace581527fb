"""The options of gRPC at both ends: limits, keepalive, and flow control for fast links with long delays."""

from __future__ import annotations

from typing import Any

from echo2.transport import limits

#: A silent connection is probed after this long, and given up after as long again without an answer: a black hole (a
#: host that is gone without a word) is noticed within ten seconds. Below that, a host that is only overloaded would be
#: cut off.
KEEPALIVE_SECONDS = 5.0
#: What one attempt to connect may take: four round trips until both ends have proven who they are. (gRPC calls this the
#: least time between attempts, which it is not: a refused connection is tried again after 0.2 s.)
CONNECT_SECONDS = 5.0
#: What a receiver lets a sender have under way in one stream, to begin with; gRPC widens it where the path proves
#: longer. A worker takes chunks from many at once: with 8 MiB for each, their BBR start-ups together overran its queue
#: (100 Mbit/s, four sources: 4700 packets of 48 MiB dropped, 2900 with this, 750 with gRPC's own window; one run each,
#: on a busy machine).
WINDOW_BYTES = 256 << 10
#: Of HTTP/2. The default of 16 KiB makes sixty-four of a chunk of 1 MiB.
FRAME_BYTES = 1 << 20

#: What a stranger's handshake may take.
HANDSHAKE_SECONDS = 10.0
#: Of a call whose request has no body.
REQUEST_HEADER = "request-bin"

_BOTH: list[tuple[str, Any]] = [
    ("grpc.max_send_message_length", limits.MESSAGE_BYTES_MAX),
    ("grpc.keepalive_time_ms", int(KEEPALIVE_SECONDS * 1000)),
    ("grpc.keepalive_timeout_ms", int(KEEPALIVE_SECONDS * 1000)),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.http2.lookahead_bytes", WINDOW_BYTES),
    ("grpc.http2.max_frame_size", FRAME_BYTES),
]
_SERVER: list[tuple[str, Any]] = [
    *_BOTH,
    ("grpc.so_reuseport", 0),  # two servers on one port would share its callers at random
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 1000),
    ("grpc.http2.max_ping_strikes", 0),
    ("grpc.max_concurrent_streams", limits.CALLS_MAX),
]
_CLIENT: list[tuple[str, Any]] = [
    *_BOTH,
    ("grpc.max_receive_message_length", limits.MESSAGE_BYTES_MAX),
    ("grpc.use_local_subchannel_pool", 1),  # each link is a connection of its own
    ("grpc.initial_reconnect_backoff_ms", 200),
    ("grpc.min_reconnect_backoff_ms", int(CONNECT_SECONDS * 1000)),
    ("grpc.max_reconnect_backoff_ms", 2000),
    ("grpc.enable_retries", 0),  # what may be repeated is the caller's to know
]


def server(message_bytes_max: int, connections_max: int) -> list[tuple[str, Any]]:
    """For a server that takes messages, and connections, up to these."""
    bounds = [
        ("grpc.max_receive_message_length", message_bytes_max),
        ("grpc.max_allowed_incoming_connections", connections_max),
        ("grpc.server_handshake_timeout_ms", int(HANDSHAKE_SECONDS * 1000)),
    ]
    return [*_SERVER, *bounds]


def client(server_name: str) -> list[tuple[str, Any]]:
    """For a link whose other end must prove this name."""
    return [*_CLIENT, ("grpc.ssl_target_name_override", server_name)]
