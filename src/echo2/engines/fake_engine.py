"""An engine without a model: tokens, lengths and logprobs are a hash of (seed, sample, position, version).

For tests and benchmarks. It costs next to nothing, never sleeps, and gives the same answer in every process. It takes
any snapshot that has a config.json.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Mapping, Sequence
from typing import Any

from echo2.core.decide.model_config import context_length
from echo2.core.errors import InvariantError, PeerError
from echo2.core.types import FinishReason, Snapshot, SnapshotRef
from echo2.engines.decode_loop import DecodeLoop
from echo2.engines.engine import (
    Completion,
    Engine,
    Prefill,
    PrefillRequest,
    RequestFailure,
    SampleRequest,
    refuse_request,
)
from echo2.engines.model_values import read_text_values
from echo2.weights.format.snapshot_files import end_tokens

DEFAULT_VOCAB_SIZE = 256
DEFAULT_MAX_POSITIONS = 1 << 20


def make_engine(device: str, slots: int) -> Engine:
    """The engine `fake`; `device` is ignored."""
    return DecodeLoop(FakeDecoder(), slots)


class FakeDecoder:
    """A `Decoder`. Each sample ends after a hashed number of tokens, spread evenly over 1..max_tokens, or earlier at a
    stop token or stop string among its hashed tokens.
    """

    can_join = True
    held_refs: tuple[SnapshotRef, ...] = ()

    def __init__(self) -> None:
        self._installed: tuple[SnapshotRef, int, int, int] | None = None
        self._rows: dict[int, _Row] = {}
        self.base_model: SnapshotRef | None = None

    @property
    def installed(self) -> SnapshotRef | None:
        return self._installed[0] if self._installed else None

    def refusal(self, request: SampleRequest) -> RequestFailure | None:
        _, vocab, positions, _ = self._policy()
        return refuse_request(request, vocab, positions)

    def load(self, snapshot: Snapshot, base: Snapshot | None = None) -> float:
        config = read_text_values(snapshot.files)
        vocab = _positive(config, "vocab_size", DEFAULT_VOCAB_SIZE)
        positions = context_length(config) or DEFAULT_MAX_POSITIONS
        ends = end_tokens(snapshot.files)
        self.base_model = snapshot.base_model
        self._installed = (snapshot.ref, vocab, positions, ends[0] if ends and 0 <= ends[0] < vocab else vocab - 1)
        return 0.0

    def step(self, added: Mapping[int, SampleRequest], dropped: Sequence[int]) -> list[tuple[int, Completion]]:
        ref, vocab, positions, end = self._policy()
        for number in dropped:
            del self._rows[number]
        for number, request in added.items():
            room = min(request.params.max_tokens, positions - len(request.prompt_tokens))
            self._rows[number] = _Row(request, room, end)
        for row in self._rows.values():
            row.step(ref.version, vocab)
        ended = [number for number, row in self._rows.items() if row.is_ended]
        return [(number, self._rows.pop(number).completion()) for number in ended]

    def prefill(self, ref: SnapshotRef, requests: Sequence[PrefillRequest]) -> list[Prefill]:
        """See `Decoder.prefill`. Always raises: there is no distribution to check tokens against."""
        raise PeerError("snapshot_gone", "the fake engine holds no weights")

    def clear(self) -> None:
        self._rows.clear()

    def successor(self) -> FakeDecoder:
        other = FakeDecoder()
        other._installed, other.base_model = self._installed, self.base_model
        return other

    def sleep(self) -> None:
        """See `Decoder.sleep`. There are no tensors."""

    def wake_up(self) -> None:
        """See `Decoder.wake_up`."""

    def _policy(self) -> tuple[SnapshotRef, int, int, int]:
        if self._installed is None:
            raise InvariantError("the engine was asked for tokens and has no weights")
        return self._installed


class _Row:
    """One sample being decoded. Its last token is the end token, unless its length is the maximum."""

    def __init__(self, request: SampleRequest, room: int, end: int) -> None:
        self._name = (request.seed, request.sample)
        self._stop_tokens, self._stop, self._on_token = request.stop_tokens, request.stop, request.on_token
        self._end = end
        self._length = 1 + _hash(*self._name, 0, 0) % room
        self._finish: FinishReason = "stop" if self._length < room else "length"
        self._tokens, self._logprobs = array("i"), array("f")
        self._spans: list[tuple[int, int]] = []

    @property
    def is_ended(self) -> bool:
        return len(self._tokens) >= self._length

    def step(self, version: int, vocab: int) -> None:
        position = len(self._tokens)
        drawn = _hash(*self._name, position + 1, version)
        is_last_by_choice = position + 1 == self._length and self._finish == "stop"
        # Any token but the end token, which has a meaning.
        other = (self._end + 1 + drawn % (vocab - 1)) % vocab if vocab > 1 else 0
        self._tokens.append(self._end if is_last_by_choice else other)
        if self._on_token is not None:
            self._on_token(self._tokens[-1])
        if other in self._stop_tokens or (self._stop is not None and self._stop.ends(self._tokens)):
            self._length, self._finish = position + 1, "stop"
        self._logprobs.append(-5.0 * ((drawn >> 32) % 1000 + 1) / 1000)
        if not self._spans or self._spans[-1][1] != version:
            self._spans.append((position, version))

    def completion(self) -> Completion:
        return Completion(self._tokens, self._logprobs, tuple(self._spans), self._finish)


def _hash(seed: int, sample: int, position: int, version: int) -> int:
    digest = hashlib.blake2b(f"{seed} {sample} {position} {version}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")


def _positive(config: dict[str, Any], key: str, default: int) -> int:
    value = config.get(key, default)
    if not isinstance(value, int) or value < 1:
        raise PeerError("bad_snapshot", f"{key} in config.json is {value!r}")
    return value
