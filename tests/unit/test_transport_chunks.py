"""The message of a chunk is what protobuf would write, and nothing else is read."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from echo2.core.errors import PeerError
from echo2.transport import message_bytes
from echo2.transport import wire_pb2 as wire

HASHES = st.binary(min_size=32, max_size=32)


@given(HASHES, st.integers(1, 70_000), st.binary(min_size=1, max_size=16))
@example(bytes(32), 1 << 20, b"x")
@example(bytes(32), 127, b"x")
@example(bytes(32), 128, b"x")
@example(bytes(32), 1 << 14, b"x")
def test_chunk_messages_equal_those_of_protobuf(hash_: bytes, size: int, pattern: bytes) -> None:
    data = (pattern * (size // len(pattern) + 1))[:size]
    message = message_bytes.pack(hash_, memoryview(data))
    assert message == wire.Chunk(hash=hash_, data=data).SerializeToString()
    assert message_bytes.unpack(message) == (hash_, data)
    assert message_bytes.hash_of(message) == hash_


@given(HASHES)
def test_signs_without_data(hash_: bytes) -> None:
    assert message_bytes.unpack(message_bytes.ALIVE) == (b"", b"")
    assert wire.Chunk().SerializeToString() == message_bytes.ALIVE
    assert message_bytes.unpack(message_bytes.pack_missing(hash_)) == (hash_, b"")
    assert message_bytes.pack_missing(hash_) == wire.Chunk(hash=hash_).SerializeToString()


@given(
    st.binary(max_size=80) | st.builds(lambda hash_, rest: b"\x0a\x20" + hash_ + rest, HASHES, st.binary(max_size=30))
)
def test_any_bytes_are_a_chunk_as_protobuf_reads_it_or_refused(message: bytes) -> None:
    try:
        hash_, data = message_bytes.unpack(message)
    except PeerError:
        return
    assert wire.Chunk.FromString(message) == wire.Chunk(hash=hash_, data=bytes(data))


@given(HASHES, st.binary(min_size=1, max_size=300), st.data())
def test_truncated_message_is_refused(hash_: bytes, data: bytes, draw: st.DataObject) -> None:
    message = message_bytes.pack(hash_, data)
    cut = draw.draw(st.integers(1, len(message) - 1).filter(lambda size: size != 34))  # 34: "no such chunk"
    with pytest.raises(PeerError, match="malformed"):
        message_bytes.unpack(message[:cut])
