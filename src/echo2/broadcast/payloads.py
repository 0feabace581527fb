"""Names of payloads on the wire, and back. Nothing in a stranger's message is trusted."""

from __future__ import annotations

from echo2.errors import PeerError
from echo2.transport import wire_pb2 as wire
from echo2.transport.messages import decode_ref, encode_ref
from echo2.types import PayloadId
from echo2.weights.manifest import HASH_BYTES

#: Chunks one request may ask for; more are asked for by more requests.
REQUEST_CHUNKS_MAX = 4096


def encode_payload(payload: PayloadId) -> wire.PayloadId:
    """The wire form of a payload's name."""
    base = None if payload.base is None else encode_ref(payload.base)
    return wire.PayloadId(ref=encode_ref(payload.ref), base=base)


def decode_payload(message: wire.PayloadId) -> PayloadId:
    """Raises PeerError("malformed") for what no snapshot is called."""
    return PayloadId(decode_ref(message.ref), decode_ref(message.base) if message.HasField("base") else None)


def requested(request: wire.ChunkRequest) -> dict[bytes, None]:
    """The hashes asked for, distinct, in order.

    Raises:
        PeerError: "oversized" or "malformed".
    """
    if len(request.hashes) > REQUEST_CHUNKS_MAX:
        raise PeerError("oversized", f"{len(request.hashes)} chunks at once; {REQUEST_CHUNKS_MAX} allowed")
    if any(len(hash_) != HASH_BYTES for hash_ in request.hashes):
        raise PeerError("malformed", f"a chunk hash that has not {HASH_BYTES} bytes")
    return dict.fromkeys(request.hashes)
