"""Names of payloads on the wire, and back. Nothing of a stranger's message is trusted."""

from __future__ import annotations

from echo2.errors import PeerError
from echo2.transport import wire_pb2 as wire
from echo2.transport.limits import NUMBER_MAX
from echo2.types import PayloadId, SnapshotRef
from echo2.weights.snapshot import HASH_BYTES

#: Chunks one request may ask for; more are asked for by more requests.
REQUEST_CHUNKS_MAX = 4096


def encode_payload(payload: PayloadId) -> wire.PayloadId:
    """The wire form of a payload's name."""
    base = payload.base
    return wire.PayloadId(
        ref=wire.SnapshotId(lineage=payload.ref.lineage, version=payload.ref.version),
        base=None if base is None else wire.SnapshotId(lineage=base.lineage, version=base.version),
    )


def decode_payload(message: wire.PayloadId) -> PayloadId:
    """Raises PeerError("malformed") for numbers that no version has."""
    return PayloadId(_ref(message.ref), _ref(message.base) if message.HasField("base") else None)


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


def _ref(message: wire.SnapshotId) -> SnapshotRef:
    if max(message.lineage, message.version) > NUMBER_MAX:
        raise PeerError("malformed", f"no version has the number {message.lineage}.{message.version}")
    return SnapshotRef(message.lineage, message.version)
