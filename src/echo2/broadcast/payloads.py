"""Encodes payload names for the wire, and decodes them. Nothing in a stranger's message is trusted."""

from __future__ import annotations

from echo2.errors import PeerError
from echo2.transport import wire_pb2 as wire
from echo2.transport.messages import decode_ref, encode_ref
from echo2.types import PayloadId
from echo2.weights.manifest import HASH_BYTES

#: Maximum number of chunks per request; larger demands are split into several requests.
REQUEST_CHUNKS_MAX = 4096


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
