"""Messages whose bytes are read and written by hand: chunks, groups that are fed, the learner's logprobs.

A chunk (`wire.Chunk`) is read and written without a copy of its data: a relay hashes, stores and forwards the bytes of
the same message. Only one encoding is accepted: protobuf's, with `hash` before `data`. No hash and no data: the sender
is alive. A hash without data: the sender has no such chunk.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Mapping, Sequence

from echo2.core.errors import PeerError
from echo2.transport import wire_pb2 as wire
from echo2.transport.limits import LOGGED_GROUPS, LOGGED_TOKENS

HASH_BYTES = 32
#: The message of a sender that is alive but has nothing to send yet.
ALIVE = b""

_HASH = bytes((0x0A, HASH_BYTES))  # field 1, bytes, of this length
_DATA = 0x12  # field 2, bytes
_GROUPS = 0x0A  # field 1, a message
_LENGTH_BYTES_MAX = 5
LearnerLogprobs = Mapping[int, "Sequence[array[float]]"]
"""By group number, for each rollout the logprobs 'f' of its first tokens."""


def pack(hash_: bytes, data: bytes | memoryview) -> bytes:
    """Encode the message of one chunk."""
    return b"".join((_HASH, hash_, _head(_DATA, len(data)), data))


def fed_group(parts: Sequence[bytes]) -> tuple[bytes, ...]:
    """Return the pieces of a `FedGroups` message with one group, whose encoded parts these are. Pieces of several
    groups, joined, are one message."""
    return _head(_GROUPS, sum(map(len, parts))), *parts


def _head(tag: int, size: int) -> bytes:
    """Encode what stands before a field of this length."""
    head = bytearray((tag,))
    while size > 0x7F:
        head.append(size & 0x7F | 0x80)
        size >>= 7
    head.append(size)
    return bytes(head)


def pack_missing(hash_: bytes) -> bytes:
    """Encode the message that says that the sender has no such chunk."""
    return _HASH + hash_


def hash_of(message: bytes) -> bytes:
    """Return the hash in a message made by `pack` or `pack_missing`; other messages give arbitrary bytes."""
    return message[len(_HASH) : len(_HASH) + HASH_BYTES]


def unpack(message: bytes) -> tuple[bytes, memoryview]:
    """Decode a message into (hash, data); the data is a view of the message. Both empty: alive. Data empty: no such
    chunk.

    Raises:
        PeerError: "malformed".
    """
    if not message:
        return b"", memoryview(b"")
    end = len(_HASH) + HASH_BYTES
    if message[: len(_HASH)] != _HASH or len(message) < end:
        raise PeerError("malformed", f"a message of {len(message)} bytes that is not a chunk")
    hash_, start = message[len(_HASH) : end], end
    if len(message) == end:
        return hash_, memoryview(b"")
    size = 0
    if message[start] == _DATA:
        for place in range(_LENGTH_BYTES_MAX):
            start += 1
            byte = message[start] if start < len(message) else 0
            size |= (byte & 0x7F) << (7 * place)
            if not byte & 0x80:
                break
    data = memoryview(message)[start + 1 :]
    if size == 0 or size != len(data):
        raise PeerError("malformed", f"a chunk of {len(data)} bytes that says it has {size}")
    return hash_, data


def _require(holds: bool, complaint: str) -> None:
    if not holds:
        raise PeerError("malformed", complaint)


def logged_tokens(num_rollouts: int) -> int:
    """Return how many first tokens of each rollout of a group are written for people one by one."""
    return LOGGED_TOKENS // (LOGGED_GROUPS * num_rollouts)


def encode_logprobs(logprobs: LearnerLogprobs) -> list[wire.GroupLogprobs]:
    """Encode the logprobs for a StepReport."""
    return [
        wire.GroupLogprobs(group=number, rollouts=[each.tobytes() for each in of_rollouts])
        for number, of_rollouts in logprobs.items()
    ]


def decode_logprobs(messages: Iterable[wire.GroupLogprobs]) -> LearnerLogprobs:
    """Decode the logprobs of a StepReport.

    Raises:
        PeerError: "malformed": more than `LOGGED_GROUPS` groups or `LOGGED_TOKENS` tokens, or no whole float32.
    """
    by_group = {message.group: message.rollouts for message in messages}
    sizes = [len(data) for rollouts in by_group.values() for data in rollouts]
    if len(by_group) > LOGGED_GROUPS or sum(sizes) > 4 * LOGGED_TOKENS or any(size % 4 for size in sizes):
        raise PeerError("malformed", f"logprobs of {len(by_group)} groups in {sum(sizes)} bytes")
    return {number: [array("f", data) for data in rollouts] for number, rollouts in by_group.items()}
