"""The decode loop that the torch engines share: prefill, then draw and step until every row has ended. No forward pass.

A *model* is one policy, ready to run, never changed: a new snapshot is a new model, and a swap is one assignment. A
running generation keeps its key-value cache across a swap: what was read under the old weights is not read again (as
PipelineRL, arXiv 2509.19128); the logprob of each token is the one it was really drawn with.

Rows that have ended are dropped from the batch as soon as enough of them have, so that short completions stop costing.

Shape suffixes: R = requests, B = rows (one per sample), V = vocabulary, T = tokens of the longest completion, Q = ways
to end.
"""

from __future__ import annotations

import threading
import time
from array import array
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from echo2.devices import pick_device
from echo2.errors import InvariantError, PeerError, UserError
from echo2.rollout.engine import Completion, OnFinished, SampleRequest, SwapMode, refuse_request
from echo2.rollout.random_streams import stream_keys
from echo2.rollout.sampler import Draw, Ints, Sampler
from echo2.types import Snapshot, SnapshotRef

COMPACT_BELOW = 0.85
"""Ended rows are dropped when fewer than this share of the rows still runs: copying the cache costs about a third of a
step."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What the decode loop must know of a model."""

    vocab_size: int
    max_positions: int
    end_tokens: tuple[int, ...]


class Cache(Protocol):
    """Keys and values of the tokens read so far, one row per sequence."""

    def select(self, rows: Tensor) -> Cache:
        """The cache of these rows, which may repeat; this one is not used afterwards."""


class Model(Protocol):
    """One policy on a device. `architecture` is equal for models that can go on with each other's cache."""

    @property
    def limits(self) -> Limits: ...

    @property
    def architecture(self) -> Hashable: ...

    def prefill(self, prompts: Sequence[array[int]], max_tokens: int) -> tuple[Cache, Tensor]:
        """Read R prompts: their cache, with room for up to `max_tokens` more tokens each (it may grow as it goes), and
        the logits [R, V] (float32) of the token that follows each."""

    def step(self, cache: Cache, tokens_B: Tensor) -> Tensor:
        """Read one more token per row into the cache (in place): the logits [B, V] (float32) of the next."""


BuildModel = Callable[[Snapshot, torch.device], Model]


class TorchEngine:
    """An `Engine` around any `Model`."""

    def __init__(self, build_model: BuildModel, device: str = "auto", swap: SwapMode = "between") -> None:
        self._build_model = build_model
        self._device = pick_device(device, "workers.device")
        self._swap = swap
        self._current: tuple[SnapshotRef, Model] | None = None
        self._generating = threading.Lock()

    @property
    def installed(self) -> SnapshotRef | None:
        current = self._current
        return current[0] if current else None

    def load_snapshot(self, snapshot: Snapshot) -> float:
        """See `Engine.load_snapshot`."""
        started = time.perf_counter()
        is_running = self._generating.locked()
        if is_running and self._swap == "between":
            raise InvariantError(
                f"snapshot {snapshot.ref} came during a generation of an engine that swaps between them"
            )
        with torch.inference_mode():
            model = self._build_model(snapshot, self._device)
        if self._current is not None and self._current[1].architecture != model.architecture:
            raise PeerError("architecture", f"snapshot {snapshot.ref} has another architecture than the one before")
        built = time.perf_counter()
        self._current = (snapshot.ref, model)  # the swap: the decode loop reads this once per token
        # While it was being built, a running generation went on under the old weights.
        return time.perf_counter() - (built if is_running else started)

    def generate(
        self, requests: Sequence[SampleRequest], on_finished: OnFinished, should_stop: Callable[[], bool]
    ) -> None:
        """See `Engine.generate`."""
        if self._current is None:
            raise UserError("The engine has no weights yet: load a snapshot before generating.")
        if not self._generating.acquire(blocking=False):
            raise InvariantError("two generations at once in one engine")
        try:
            with torch.inference_mode():
                self._generate(requests, on_finished, should_stop)
        finally:
            self._generating.release()

    def _model(self) -> tuple[SnapshotRef, Model]:
        if self._current is None:
            raise InvariantError("the weights went away during a generation")
        return self._current

    def _generate(
        self, requests: Sequence[SampleRequest], on_finished: OnFinished, should_stop: Callable[[], bool]
    ) -> None:
        ref, model = self._model()
        accepted = []
        for index, request in enumerate(requests):
            failure = refuse_request(request, model.limits.vocab_size, model.limits.max_positions)
            if failure is not None:
                on_finished(index, failure)
            elif request.num_samples > 0:
                accepted.append((index, request))
            else:
                on_finished(index, [])
        if not accepted or should_stop():
            return
        batch = _Batch(accepted, model.limits, self._device, on_finished)
        cache, logits_RV = model.prefill([request.prompt_tokens for _, request in accepted], batch.max_tokens)
        rows = torch.from_numpy(batch.request_of_row).to(self._device)
        cache, logits_BV = cache.select(rows), logits_RV[rows]
        while True:
            tokens_B, kept = batch.take(logits_BV, ref.version)
            if not len(tokens_B) or should_stop():
                return
            if kept is not None:
                cache = cache.select(torch.from_numpy(kept).to(self._device))
            ref, model = self._model()
            logits_BV = model.step(cache, torch.from_numpy(tokens_B).to(self._device))


class _Batch:
    """Every row's tokens so far, and which rows still run. Row numbers are fixed; a *place* is a row's position in the
    tensors at the moment."""

    def __init__(
        self,
        requests: Sequence[tuple[int, SampleRequest]],
        limits: Limits,
        device: torch.device,
        on_finished: OnFinished,
    ) -> None:
        self._requests = [request for _, request in requests]
        self._index_of_request = [index for index, _ in requests]
        self._on_finished = on_finished
        counts = [request.num_samples for request in self._requests]
        self.request_of_row: Ints = np.repeat(np.arange(len(counts)), counts)
        self._first_row = np.cumsum([0, *counts])
        owners = [self._requests[i] for i in self.request_of_row]
        samples = [sample for request in self._requests for sample in request.samples]
        room = [min(owner.params.max_tokens, limits.max_positions - len(owner.prompt_tokens)) for owner in owners]
        self._sampler = Sampler(
            stream_keys([owner.seed for owner in owners], samples), [owner.params for owner in owners], device
        )
        self._room_B = np.array(room, dtype=np.int64)
        self.max_tokens = max(room)
        rules = list(dict.fromkeys(request.stop_tokens for request in self._requests))
        self._is_end_QV = np.zeros((len(rules), limits.vocab_size), dtype=bool)
        for is_end_V, stop_tokens in zip(self._is_end_QV, rules, strict=True):
            is_end_V[[token for token in (*limits.end_tokens, *stop_tokens) if 0 <= token < limits.vocab_size]] = True
        self._rule_B = np.array([rules.index(owner.stop_tokens) for owner in owners])
        # Untouched pages of np.empty take no memory, so the longest allowed completion may be much longer than the
        # usual.
        self._tokens_BT = np.empty((len(owners), self.max_tokens), dtype=np.int32)
        self._logprobs_BT = np.empty((len(owners), self.max_tokens), dtype=np.float32)
        self._length_B = np.zeros(len(owners), dtype=np.int64)
        self._is_running_B = np.ones(len(owners), dtype=bool)
        self._supports: list[list[np.ndarray[tuple[int], np.dtype[np.int32]]]] = [[] for _ in owners]
        self._rows: Ints = np.arange(len(owners))  # row at each place
        self._num_left = list(counts)
        self._spans: list[tuple[int, int]] = []
        self._time = 0

    def take(self, logits_BV: Tensor, version: int) -> tuple[Ints, Ints | None]:
        """Draw a token for every place. Returns the tokens to read next, and which places to keep (None: all of
        them)."""
        if not self._spans or self._spans[-1][1] != version:
            self._spans.append((self._time, version))
        draw = self._sampler.draw(logits_BV, self._time)
        self._record(draw)
        running = self._is_running_B[self._rows]
        if running.mean() >= COMPACT_BELOW:
            return draw.tokens_B, None
        kept = np.flatnonzero(running)
        self._rows = self._rows[kept]
        self._sampler = self._sampler.keep(kept)
        return draw.tokens_B[kept], kept

    def _record(self, draw: Draw) -> None:
        """Append the drawn tokens to the rows that still run; hand over the requests that are complete."""
        rows, time_ = self._rows, self._time
        places = np.flatnonzero(self._is_running_B[rows])
        running, tokens = rows[places], draw.tokens_B[places]
        self._tokens_BT[running, time_] = tokens
        self._logprobs_BT[running, time_] = draw.logprobs_B[places]
        if draw.supports:
            for place, row in zip(places.tolist(), running.tolist(), strict=True):
                if place in draw.supports:
                    self._supports[row].append(draw.supports[place])
        self._time += 1
        ended = running[self._is_end_QV[self._rule_B[running], tokens] | (self._time >= self._room_B[running])]
        self._length_B[ended] = self._time
        self._is_running_B[ended] = False
        for row in ended.tolist():
            request = int(self.request_of_row[row])
            self._num_left[request] -= 1
            if not self._num_left[request]:
                members = range(self._first_row[request], self._first_row[request + 1])
                self._on_finished(self._index_of_request[request], [self._completion(member) for member in members])

    def _completion(self, row: int) -> Completion:
        length = int(self._length_B[row])
        tokens = array("i", self._tokens_BT[row, :length].tobytes())
        supports, self._supports[row] = self._supports[row], []
        return Completion(
            tokens=tokens,
            logprobs=array("f", self._logprobs_BT[row, :length].tobytes()),
            version_spans=tuple(span for span in self._spans if span[0] < length),
            finish="stop" if self._is_end_QV[self._rule_B[row], tokens[-1]] else "length",
            support_tokens=array("i", np.concatenate(supports).tobytes()) if supports else None,
            support_offsets=array("i", np.cumsum([0, *map(len, supports)], dtype=np.int32).tobytes())
            if supports
            else None,
        )
