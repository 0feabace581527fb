"""Payload names, requests for chunks and workers' addresses on the wire. Nothing in a stranger's message is trusted."""

from __future__ import annotations

from echo2.core.addresses import PORT_MAX, is_loopback, join, split
from echo2.core.errors import PeerError
from echo2.core.types import PayloadId
from echo2.transport import wire_pb2 as wire
from echo2.transport.messages import decode_ref, encode_ref
from echo2.weights.broadcast.decide.origin_messages import ONE_MACHINE
from echo2.weights.format.manifest import HASH_BYTES

#: Maximum number of chunks per request; larger demands are split into several requests.
REQUEST_CHUNKS_MAX = 4096
HOST_CHARS_MAX = 253


def encode_payload(payload: PayloadId) -> wire.PayloadId:
    """The wire form of a payload's name."""
    base = None if payload.base is None else encode_ref(payload.base)
    return wire.PayloadId(ref=encode_ref(payload.ref), base=base)


def decode_payload(message: wire.PayloadId) -> PayloadId:
    """Return the decoded name. Raises PeerError("malformed") if it is not a valid snapshot name."""
    return PayloadId(decode_ref(message.ref), decode_ref(message.base) if message.HasField("base") else None)


def requested(request: wire.ChunkRequest) -> dict[bytes, None]:
    """Return the distinct requested hashes, in order.

    Raises:
        PeerError: "oversized" or "malformed".
    """
    if len(request.hashes) > REQUEST_CHUNKS_MAX:
        raise PeerError("oversized", f"{len(request.hashes)} chunks at once; {REQUEST_CHUNKS_MAX} allowed")
    if any(len(hash_) != HASH_BYTES for hash_ in request.hashes):
        raise PeerError("malformed", f"a chunk hash that has not {HASH_BYTES} bytes")
    return dict.fromkeys(request.hashes)


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
