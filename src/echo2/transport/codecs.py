"""Messages whose bytes are read and written by hand: chunks, likely tokens, the learner's logprobs.

A chunk (`wire.Chunk`) is read and written without a copy of its data: a relay hashes, stores and forwards the bytes of
the same message. Only one encoding is accepted: protobuf's, with `hash` before `data`. No hash and no data: the sender
is alive. A hash without data: the sender has no such chunk. Data without a hash: `NUDGE`, which says nothing.

The likely tokens of a worker's report (`types.Rollout.top_tokens`) are checked; impossible reports are refused. The
logprobs of tokens that were not drawn cannot be verified here; the losses bound their influence (docs/losses.md).

Shape suffixes: m = sampled tokens of a rollout, k = most likely tokens of each.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from echo2.core.errors import PeerError
from echo2.core.types import Rollout, RolloutGroup
from echo2.transport import wire_pb2 as wire
from echo2.transport.limits import LOGGED_GROUPS, LOGGED_TOKENS, LOGPROB_MIN, LOGPROB_SLACK, TOP_ERROR

HASH_BYTES = 32
#: The message of a sender that is alive but has nothing to send yet.
ALIVE = b""
#: A message without meaning. What is written after a pause pushes out the end of what was written before.
NUDGE = b"\x12\x01\x00"

_HASH = bytes((0x0A, HASH_BYTES))  # field 1, bytes, of this length
_DATA = 0x12  # field 2, bytes
_LENGTH_BYTES_MAX = 5
LearnerLogprobs = Mapping[int, "Sequence[array[float]]"]
"""By group number, for each rollout the logprobs 'f' of its first tokens."""


def pack(hash_: bytes, data: bytes | memoryview) -> bytes:
    """Encode the message of one chunk."""
    size, length = len(data), bytearray()
    while size > 0x7F:
        length.append(size & 0x7F | 0x80)
        size >>= 7
    length.append(size)
    return b"".join((_HASH, hash_, bytes((_DATA,)), length, data))


def pack_missing(hash_: bytes) -> bytes:
    """Encode the message that says that the sender has no such chunk."""
    return _HASH + hash_


def hash_of(message: bytes) -> bytes:
    """Return the hash in a message made by `pack` or `pack_missing`; other messages give arbitrary bytes."""
    return message[len(_HASH) : len(_HASH) + HASH_BYTES]


def unpack(message: bytes) -> tuple[bytes, memoryview]:
    """Decode a message into (hash, data); the data is a view of the message. Both empty: alive. Data empty: no such
    chunk. Hash empty: a nudge.

    Raises:
        PeerError: "malformed".
    """
    if not message:
        return b"", memoryview(b"")
    if message == NUDGE:
        return b"", memoryview(NUDGE)[2:]
    end = len(_HASH) + HASH_BYTES
    if message[: len(_HASH)] != _HASH or len(message) < end:
        raise PeerError("malformed", f"a message of {len(message)} bytes that is no chunk")
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


def check_top(group: RolloutGroup, num_asked: int, vocab_size: int) -> None:
    """Raises PeerError("malformed") unless each sampled token of each rollout has `num_asked` likely tokens (or
    `vocab_size` if that is less), consistent with a distribution that gives the sampled token its logprob."""
    width = min(num_asked, vocab_size)
    for rollout in group.rollouts:
        num_entries = rollout.loss_mask.count(1) * width
        _require(len(rollout.top_tokens) == num_entries, f"{len(rollout.top_tokens)} top tokens, not {num_entries}")
        _require(len(rollout.top_logprobs) == 2 * num_entries, "not as many top logprobs as top tokens")
        if num_entries:
            _check_values(rollout, width, vocab_size)


def _check_values(rollout: Rollout, width: int, vocab_size: int) -> None:
    ids_mk = np.frombuffer(rollout.top_tokens, dtype=np.int32).reshape(-1, width)
    logprobs_mk = np.frombuffer(rollout.top_logprobs, dtype="<f2").reshape(-1, width).astype(np.float32)
    _require(ids_mk.min() >= 0 and ids_mk.max() < vocab_size, "a top token is outside the vocabulary")
    _require(bool((np.diff(np.sort(ids_mk)) > 0).all()), "a top token comes twice")
    is_bounded = (logprobs_mk >= LOGPROB_MIN) & (logprobs_mk <= LOGPROB_SLACK)  # NaN: neither
    _require(bool(is_bounded.all()), "a top logprob is out of bounds")
    _require(bool((np.exp(logprobs_mk).sum(1) <= 1.0 + TOP_ERROR).all()), "top logprobs of more than everything")
    is_sampled = np.frombuffer(rollout.loss_mask, dtype=np.uint8) == 1
    drawn_m = np.frombuffer(rollout.tokens, dtype=np.int32)[is_sampled]
    logprob_m = np.frombuffer(rollout.logprobs, dtype=np.float32)[is_sampled]
    is_drawn_mk = ids_mk == drawn_m[:, None]
    # A sampled token outside the top k is at most as likely as each of them.
    told_m = np.where(is_drawn_mk, logprobs_mk, 0.0).sum(1)
    error_m = TOP_ERROR * (1.0 - logprob_m)
    is_same_m = np.abs(told_m - logprob_m) <= error_m
    is_rarer_m = logprob_m <= logprobs_mk.min(1) + error_m
    holds_m = np.where(is_drawn_mk.any(1), is_same_m, is_rarer_m)
    _require(bool(holds_m.all()), "top logprobs that the drawn token's own logprob contradicts")


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
    found = {message.group: message.rollouts for message in messages}
    sizes = [len(data) for rollouts in found.values() for data in rollouts]
    if len(found) > LOGGED_GROUPS or sum(sizes) > 4 * LOGGED_TOKENS or any(size % 4 for size in sizes):
        raise PeerError("malformed", f"logprobs of {len(found)} groups in {sum(sizes)} bytes")
    return {number: [array("f", data) for data in rollouts] for number, rollouts in found.items()}
