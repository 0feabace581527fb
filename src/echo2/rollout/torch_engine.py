"""What the torch engines share: rows join a batch, are stepped, and leave it. No forward pass.

A *model* is one policy, ready to run, never changed: a new snapshot is a new model, and a swap is one assignment. Rows
under way keep their key-value cache across a swap: what was read under the old weights is not read again (as
PipelineRL, arXiv 2509.19128); the logprob of each token is the one it was really drawn with.

Rows that have ended are dropped from the batch as soon as enough of them have, or others join, so that short
completions stop costing. Rows that join together and have the same prompt share its prefill.

Shape suffixes: R = prompts, B = rows (one a request), V = vocabulary.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from echo2.devices import pick_device
from echo2.errors import InvariantError, PeerError
from echo2.rollout.engine import Completion, OutOfMemoryError, RequestFailure, SampleRequest, refuse_request
from echo2.rollout.rows import Limits, RowTable
from echo2.types import Snapshot, SnapshotRef

#: How torch's allocator on the CPU words it; it has no exception of its own.
CPU_MEMORY_IS_FULL = "can't allocate memory"


class Cache(Protocol):
    """Keys and values of the tokens read so far, one row per sequence."""

    @property
    def can_join(self) -> bool:
        """Whether `join` works."""

    def select(self, rows: Tensor) -> Cache:
        """The cache of these rows, which may repeat; this one is not used afterwards."""

    def join(self, rows: Tensor, other: Cache, other_rows: Tensor) -> Cache:
        """The cache of these rows, and behind them those rows of another cache, which may repeat; neither is used
        afterwards."""


class Model(Protocol):
    """One policy on a device. `architecture` is equal for models that can go on with each other's cache."""

    @property
    def limits(self) -> Limits:
        """Sizes of the vocabulary and the context, and what ends a completion."""

    @property
    def architecture(self) -> Hashable:
        """Equal for models that can go on with each other's cache."""

    def prefill(self, prompts: Sequence[array[int]]) -> Cache:
        """Read R sequences of tokens, any of which may be empty."""

    def step(self, cache: Cache, tokens_B: Tensor) -> Tensor:
        """Read one more token per row into the cache (in place): the logits [B, V] (float32) of the next."""


BuildModel = Callable[[Snapshot, torch.device], Model]


class TorchDecoder:
    """A `Decoder` around any `Model`."""

    def __init__(self, build_model: BuildModel, device: str = "auto") -> None:
        self._build_model = build_model
        self._device = pick_device(device)
        self._current: tuple[SnapshotRef, Model] | None = None
        self._cache: Cache | None = None
        self._rows = RowTable(self._device)

    @property
    def installed(self) -> SnapshotRef | None:
        """See `Decoder.installed`."""
        current = self._current
        return current[0] if current else None

    @property
    def can_join(self) -> bool:
        """See `Decoder.can_join`."""
        return self._cache is None or self._cache.can_join

    def refusal(self, request: SampleRequest) -> RequestFailure | None:
        """See `Decoder.refusal`."""
        limits = self._policy()[1].limits
        return refuse_request(request, limits.vocab_size, limits.max_positions)

    def load(self, snapshot: Snapshot) -> None:
        """See `Decoder.load`."""
        try:
            with torch.inference_mode():
                model = self._build_model(snapshot, self._device)
        except (MemoryError, RuntimeError) as error:
            is_full = isinstance(error, MemoryError | torch.OutOfMemoryError) or CPU_MEMORY_IS_FULL in str(error)
            if not is_full:
                raise
            raise OutOfMemoryError(f"{self._device} has no room for a second policy") from error
        if self._current is not None and self._current[1].architecture != model.architecture:
            raise PeerError("architecture", f"snapshot {snapshot.ref} has another architecture than the one before")
        self._current = (snapshot.ref, model)  # the swap: the next step reads this once

    def step(self, added: Mapping[int, SampleRequest], dropped: Sequence[int]) -> list[tuple[int, Completion]]:
        """See `Decoder.step`."""
        with torch.inference_mode():
            ref, model = self._policy()
            self._rows.end(dropped)
            if added or self._rows.has_many_ended:
                self._change(model, added)
            if self._cache is None:
                return []
            logits_BV = model.step(self._cache, torch.from_numpy(self._rows.last_B).to(self._device))
            ended = self._rows.draw(logits_BV, ref.version)
            if not len(self._rows.running):
                self.clear()
            return ended

    def clear(self) -> None:
        """See `Decoder.clear`."""
        self._cache = None
        self._rows.clear()

    def _policy(self) -> tuple[SnapshotRef, Model]:
        if self._current is None:
            raise InvariantError("the engine was asked for tokens and has no weights")
        return self._current

    def _change(self, model: Model, added: Mapping[int, SampleRequest]) -> None:
        """Drop the ended rows, and read all but the last token of new prompts: the next step reads that."""
        kept = self._rows.running
        if not len(kept):
            self.clear()  # before there is another cache
        if added:
            row_of = {request.prompt_tokens.tobytes(): request.prompt_tokens for request in added.values()}
            place_of = {prompt: place for place, prompt in enumerate(row_of)}
            fresh = model.prefill([prompt[:-1] for prompt in row_of.values()])
            rows = self._on_device([place_of[request.prompt_tokens.tobytes()] for request in added.values()])
            if self._cache is None:
                self._cache = fresh.select(rows)
            else:
                self._cache = self._cache.join(self._on_device(kept), fresh, rows)
        elif self._cache is not None:
            self._cache = self._cache.select(self._on_device(kept))
        if self._cache is not None:
            self._rows.change(kept, added, model.limits)

    def _on_device(self, rows: Sequence[int] | np.ndarray[tuple[int], np.dtype[np.int64]]) -> Tensor:
        return torch.as_tensor(rows, dtype=torch.long).to(self._device)
