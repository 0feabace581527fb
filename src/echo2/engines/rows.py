"""The rows that a torch engine decodes: the tokens drawn so far, which rows still run, and their results. KV caches of
ended rows are kept, so that a rollout's next turn prefills only its new tokens.

Shape suffixes: B = rows (one per request), V = vocabulary, T = tokens of the longest completion so far, Q = different
rules that end a completion.
"""

from __future__ import annotations

import bisect
from abc import ABC, abstractmethod
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from echo2.core.types import FinishReason
from echo2.engines.engine import Completion, SampleRequest, stream_keys
from echo2.engines.sampler import Draw, Ints, Sampler

DROP_BELOW = 0.85
"""Ended rows are dropped when fewer than this share of the rows still runs: copying the cache costs about a third of a
step."""
FIRST_TOKENS = 64
"""Tokens that a completion has room for at first; the room is doubled when it is used up."""
KEPT_SHARE = 1 / 16
"""Limit of all kept rows together, as a share of the device's free memory when a policy's first row is kept."""

WORTH_SHARE = 0.5
"""A part of a kept row is used if it has at least this share of a prompt: prompts of which nothing is known are read
faster."""


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits of a model that the decode loop needs."""

    vocab_size: int
    max_positions: int
    end_tokens: tuple[int, ...]


@dataclass(slots=True)
class _Row:
    """The fields of a row that are not columns of an array."""

    number: int
    request: SampleRequest
    spans: list[tuple[int, int]] = field(default_factory=list)
    supports: list[npt.NDArray[np.int32]] = field(default_factory=list)


class RowTable:
    """All rows. A row's place is its index in the tensors."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.clear()

    def clear(self) -> None:
        self._rows: list[_Row] = []
        self._streaming_places: list[int] = []
        self._length_B: Ints = np.zeros(0, dtype=np.int64)
        self._is_running_B = np.zeros(0, dtype=bool)
        self._room_B: Ints = np.zeros(0, dtype=np.int64)
        self._tokens_BT = np.zeros((0, FIRST_TOKENS), dtype=np.int32)
        self._logprobs_BT = np.zeros((0, FIRST_TOKENS), dtype=np.float32)
        self.last_B: Ints = np.zeros(0, dtype=np.int64)
        self._version: int | None = None

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def running(self) -> Ints:
        """Places whose rows have not ended."""
        return np.flatnonzero(self._is_running_B)

    @property
    def has_many_ended(self) -> bool:
        """Whether dropping the ended rows is worth it."""
        return len(self._rows) > 0 and bool(self._is_running_B.mean() < DROP_BELOW)

    def place_of(self, number: int) -> int:
        return next(place for place, row in enumerate(self._rows) if row.number == number)

    def place_of_prompt(self, prompt: array[int], first_number: int) -> int | None:
        """Return the place of a running row with this prompt and a number of at least `first_number`, or None."""
        return next(
            (
                place
                for place in self.running.tolist()
                if (row := self._rows[place]).number >= first_number and row.request.prompt_tokens == prompt
            ),
            None,
        )

    def end(self, numbers: Sequence[int]) -> None:
        """End these rows: their requests were aborted."""
        unwanted = set(numbers)
        for place, row in enumerate(self._rows):
            if row.number in unwanted:
                self._is_running_B[place] = False

    def change(self, kept_places: Ints, added: Mapping[int, SampleRequest], limits: Limits) -> None:
        """Keep only the rows at the places `kept_places`, in this order, and append the rows `added`, by number."""
        requests = list(added.values())
        zeros = np.zeros(len(requests), dtype=np.int64)
        self._rows = [self._rows[place] for place in kept_places]
        self._rows += [_Row(number, request) for number, request in added.items()]
        self._length_B = np.concatenate((self._length_B[kept_places], zeros))
        self._is_running_B = np.concatenate((self._is_running_B[kept_places], zeros == 0))
        rooms = [
            min(request.params.max_tokens, limits.max_positions - len(request.prompt_tokens)) for request in requests
        ]
        self._room_B = np.concatenate((self._room_B[kept_places], np.array(rooms, dtype=np.int64)))
        self.last_B = np.concatenate(
            (self.last_B[kept_places], [request.prompt_tokens[-1] for request in requests])
        ).astype(np.int64)
        columns = self._tokens_BT.shape[1]
        self._tokens_BT = np.concatenate((self._tokens_BT[kept_places], np.zeros((len(requests), columns), np.int32)))
        self._logprobs_BT = np.concatenate(
            (self._logprobs_BT[kept_places], np.zeros((len(requests), columns), np.float32))
        )
        self._streaming_places = [place for place, row in enumerate(self._rows) if row.request.on_token is not None]
        self._prepare([row.request for row in self._rows], limits)

    def _prepare(self, requests: Sequence[SampleRequest], limits: Limits) -> None:
        keys = stream_keys([request.seed for request in requests], [request.sample for request in requests])
        self._sampler = Sampler(keys, [request.params for request in requests], self._device)
        rules = {(request.stop_tokens, request.stop): 0 for request in requests}
        rules = {rule: number for number, rule in enumerate(rules)}
        self._rule_B = np.array([rules[request.stop_tokens, request.stop] for request in requests], dtype=np.int64)
        self._is_end_QV = np.zeros((len(rules), limits.vocab_size), dtype=bool)
        self._may_end_QV = np.zeros_like(self._is_end_QV)
        for (stop_tokens, stop), number in rules.items():
            for table_V, tokens in (
                (self._is_end_QV[number], (*limits.end_tokens, *stop_tokens)),
                (self._may_end_QV[number], stop.tokens if stop else ()),
            ):
                table_V[[token for token in tokens if 0 <= token < limits.vocab_size]] = True
        self._version = None  # new rows have no version yet

    def draw(self, logits_BV: Tensor, version: int) -> list[tuple[int, Completion]]:
        """Draw a token for every row, with a policy of this version. Returns the rows that ended with this token.

        Raises:
            PeerError: the logits are not finite.
        """
        running = self.running
        if version != self._version:
            self._version = version
            for place in running.tolist():
                spans = self._rows[place].spans
                if not spans or spans[-1][1] != version:
                    spans.append((int(self._length_B[place]), version))
        drawn = self._sampler.draw(logits_BV, self._length_B)
        self._record(drawn, running)
        self.last_B = drawn.tokens_B
        self._tell(drawn.tokens_B)
        drawn_by = self._rule_B[running], drawn.tokens_B[running]
        is_end = self._is_end_QV[drawn_by]
        for at in np.flatnonzero(self._may_end_QV[drawn_by] & ~is_end).tolist():
            is_end[at] = self._is_stopped(int(running[at]))
        is_over = is_end | (self._length_B[running] >= self._room_B[running])
        ended = list(zip(running[is_over].tolist(), is_end[is_over].tolist(), strict=True))
        self._is_running_B[running[is_over]] = False
        return [
            (self._rows[place].number, self._completion(place, "stop" if by_end else "length"))
            for place, by_end in ended
        ]

    def _tell(self, tokens_B: Ints) -> None:
        for place in self._streaming_places:
            if self._is_running_B[place] and (hear := self._rows[place].request.on_token) is not None:
                hear(int(tokens_B[place]))

    def _is_stopped(self, place: int) -> bool:
        stop, length = self._rows[place].request.stop, int(self._length_B[place])
        return stop is not None and stop.ends(self._tokens_BT[place, max(0, length - stop.window) : length].tolist())

    @property
    def requests(self) -> list[SampleRequest]:
        return [row.request for row in self._rows]

    def _record(self, drawn: Draw, running: Ints) -> None:
        at = self._length_B[running]
        if len(at) and int(at.max()) >= self._tokens_BT.shape[1]:
            self._tokens_BT = np.concatenate((self._tokens_BT, np.zeros_like(self._tokens_BT)), axis=1)
            self._logprobs_BT = np.concatenate((self._logprobs_BT, np.zeros_like(self._logprobs_BT)), axis=1)
        self._tokens_BT[running, at] = drawn.tokens_B[running]
        self._logprobs_BT[running, at] = drawn.logprobs_B[running]
        self._length_B[running] += 1
        if drawn.supports:
            for place in running.tolist():
                if place in drawn.supports:
                    self._rows[place].supports.append(drawn.supports[place])

    def _completion(self, place: int, finish: FinishReason) -> Completion:
        row, length = self._rows[place], int(self._length_B[place])
        tokens, supports = array("i", self._tokens_BT[place, :length].tobytes()), row.supports
        return Completion(
            tokens=tokens,
            logprobs=array("f", self._logprobs_BT[place, :length].tobytes()),
            version_spans=tuple(row.spans),
            finish=finish,
            support_tokens=array("i", np.concatenate(supports).tobytes()) if supports else None,
            support_offsets=array("i", np.cumsum([0, *map(len, supports)], dtype=np.int32).tobytes())
            if supports
            else None,
        )


class Cache(ABC):
    """Keys and values of the tokens read so far, one row per sequence."""

    @property
    def can_join(self) -> bool:
        """Whether `join` works."""
        return True

    @property
    def num_bytes(self) -> int:
        """Memory of this cache, bytes, if it can be copied."""
        return 0

    def copy(self, row: int, length: int) -> Cache | None:
        """Copy the first `length` columns of one row into a new cache; None: this kind of cache cannot be copied."""
        return None

    def routes(self, row: int, length: int) -> bytes:
        """Return the experts that were chosen for the first `length` tokens of a row; empty: not known of each."""
        return b""

    @abstractmethod
    def select(self, rows: Tensor) -> Cache:
        """Return the cache of these rows, which may repeat. This cache must not be used afterwards."""

    @abstractmethod
    def join(self, rows: Tensor, other: Cache, other_rows: Tensor) -> Cache:
        """Return the cache of these rows, followed by those rows of another cache; rows may repeat. Neither cache may
        be used afterwards."""


class PrefixCache:
    """Caches by the tokens that were read, least recently used first. Above the memory limit the first are dropped, so
    rollouts that never continue do not pile up. Keys are the bytes of tokens, 4 each, behind a scope, whose bytes are a
    multiple of 4 and as many at every call: what is kept in one scope is not found in another.
    """

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        self._rows: dict[bytes, Cache] = {}
        self._sorted: list[bytes] = []
        self.num_bytes = 0

    def keep(self, key: bytes, cache: Cache) -> None:
        self._drop(key)
        self._rows[key] = cache
        bisect.insort(self._sorted, key)
        self.num_bytes += cache.num_bytes
        while self.num_bytes > self._most_bytes:
            self._drop(next(iter(self._rows)))

    def known(self, key: bytes, scope_bytes: int = 0) -> Cache | None:
        """Return the cache of the longest prefix of these tokens that is kept. A row that goes on as a whole is
        removed; of another, the common part is copied, if that is at least half of these tokens."""
        place = bisect.bisect(self._sorted, key)
        beside = self._sorted[max(0, place - 1) : place + 1]  # no other key has more in common with it
        nearest_key = max(beside, key=lambda other: _num_common(key, other), default=b"")
        num_tokens = (_num_common(key, nearest_key) - scope_bytes) // 4
        is_whole = num_tokens == (len(nearest_key) - scope_bytes) // 4
        if num_tokens < 1 or (not is_whole and num_tokens < WORTH_SHARE * (len(key) - scope_bytes) / 4):
            return None
        cache = self._drop(nearest_key)
        assert cache is not None
        if is_whole:
            return cache
        self.keep(nearest_key, cache)  # it is the one that was used last
        return cache.copy(0, num_tokens)

    def _drop(self, key: bytes) -> Cache | None:
        if (cache := self._rows.pop(key, None)) is not None:
            del self._sorted[bisect.bisect_left(self._sorted, key)]
            self.num_bytes -= cache.num_bytes
        return cache


def _num_common(one: bytes, other: bytes) -> int:
    """Return how many first bytes two texts have in common."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if one[:middle] == other[:middle] else (low, middle - 1)
    return low
