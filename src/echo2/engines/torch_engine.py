"""The common part of the torch engines: rows join a batch, are decoded, and leave it. No forward pass.

A *model* is one policy. If there is room, a new snapshot becomes a new model beside the old one, and the swap is one
assignment. Otherwise the whole snapshot is checked, and then copied over the old weights between two tokens. Rows under
way keep their key-value cache across a swap: tokens read under the old weights are not read again (as in PipelineRL,
arXiv 2509.19128). The reported logprob of each token is the one that it was drawn with.

An adapter is a model that shares the weights of its base model and never changes them. The swap to another adapter over
the same base model is one assignment, too.

Ended rows are dropped from the batch once there are enough of them, or when other rows join, so that short completions
stop costing compute. Rows with the same prompt share its prefill, if they join together or one of them still runs. The
next turn of a rollout continues from the kept cache of its last turn (`rows.py`). Both kinds of reuse need a cache
that was read entirely with the installed policy: a prompt is never read partly with another one.

Shape suffixes: R = prompts, B = rows (one a request), V = vocabulary.
"""

from __future__ import annotations

import logging
import threading
import time
from abc import ABC, abstractmethod
from array import array
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from echo2.core.devices import (
    Beside,
    exact,
    exact_device,
    free_memory_bytes,
    has_own_memory,
    is_out_of_memory,
    pick_device,
)
from echo2.core.errors import InvariantError, PeerError
from echo2.core.types import Snapshot, SnapshotRef
from echo2.engines.adapter import Adapter, read_adapter
from echo2.engines.engine import (
    Completion,
    OutOfMemoryError,
    Prefill,
    PrefillRequest,
    RequestFailure,
    RouteCheck,
    SampleRequest,
    refuse_request,
)
from echo2.engines.parking import Parked
from echo2.engines.prefill import TILE_ITEMS, batches, measure, sequence_of
from echo2.engines.rows import KEPT_SHARE, Cache, Limits, PrefixCache, RowTable
from echo2.engines.snapshot_tensors import Places, check_layout, check_values, copy_tensors

log = logging.getLogger(__name__)

#: New weights are built beside the old ones if they take at most this share of the free memory. The engine has a GPU to
#: itself, and leaves half for keys and values. It shares main memory with others, and copying in place is quick there.
GPU_SHARE = 1 / 2
CPU_SHARE = 1 / 32
#: The same in main memory for an engine that checks, or whose rollouts keep the weights that they began with.
CHECKING_SHARE = 1 / 8
META = torch.device("meta")


class Model(ABC):
    """One policy on a device.

    limits        sizes of the vocabulary and the context, and the end tokens
    architecture  equal for models that can continue from each other's cache
    dtype         of the computation
    places        the tensors into which a snapshot's tensors are loaded, or others of their shapes
    linears       what may have an adapter, by module: see `read_adapter`
    """

    limits: Limits
    architecture: Hashable
    dtype: torch.dtype
    places: Places
    linears: Mapping[str, tuple[int, ...]]

    def fill(self, snapshot: Snapshot) -> None:
        """Load all tensors of a snapshot. Call `check_layout` before.

        Raises:
            PeerError: as `copy_tensors`; some tensors are loaded then, others not.
        """
        copy_tensors(snapshot, self.places)

    @abstractmethod
    def adapted(self, adapter: Adapter) -> Model:
        """Return a model that shares these weights and has this adapter over them, in place of any other."""

    def formed(self, form: str) -> Model:
        """Return this policy with its weights rounded (`forms.py`), in float32.

        Raises:
            PeerError: "unknown_form", this engine has none.
        """
        raise PeerError("unknown_form", f"this engine does not round weights to the form {form}; compact does")

    def pack(self) -> None:
        """Make a copy of the weights that is faster to compute with, if there is one. Called when all weights are
        loaded, if memory allows."""
        return

    def unpack(self) -> None:
        """Drop that copy, and rounded ones, before the weights change."""
        return

    @abstractmethod
    def prefill(
        self, prompts: Sequence[array[int]], known: Sequence[Cache | None] = (), keeps_routes: bool = False
    ) -> Cache:
        """Read R sequences of tokens, any of which may be empty. `known`: for each sequence the cache of its first
        tokens, which are not read again, or None. `keeps_routes`: the cache records the experts of a mixture."""

    @abstractmethod
    def step(self, cache: Cache, tokens_B: Tensor) -> Tensor:
        """Read one more token per row into the cache (in place). Returns the logits [B, V] (float32) of the next."""

    def logits(self, sequences: Sequence[array[int]], firsts: Sequence[int], most: int) -> Iterator[Tensor]:
        """Read whole sequences, and yield logits (float32) sequence by sequence, in tiles of at most `most` tokens. A
        sequence gives the logits behind each of its tokens from place `first` on, except behind the last."""
        for sequence, first in zip(sequences, firsts, strict=True):
            yield from self.extend(None, sequence[:-1], first, most)[1]

    def extend(
        self, cache: Cache | None, tokens: array[int], first: int, most: int, routes: RouteCheck | None = None
    ) -> tuple[Cache, Iterator[Tensor]]:
        """Read more tokens of one sequence into its cache (None: it has read none). Returns the cache, complete once
        the logits are taken, and the logits (float32) behind each of these tokens from place `first` on, in tiles of at
        most `most` tokens. The cache may have been read by other models of this architecture. `routes`: of the whole
        sequence, judged as far as it is read.

        Raises:
            PeerError: "snapshot_gone", the weights are rounded, and what others drew can't be checked with them.
        """
        raise PeerError("snapshot_gone", "this engine cannot check rollouts: it holds rounded weights")


BuildModel = Callable[[Snapshot, torch.device], Model]
"""Builds the model of a snapshot from its files and the dtype of its largest tensor; the weights are not loaded. On the
device "meta" the model takes no memory and can only be inspected."""


class TorchDecoder:
    """A `Decoder` around any `Model`."""

    def __init__(self, build_model: BuildModel, device: str = "auto") -> None:
        self._build_model = build_model
        self._device = pick_device(device, any_kind=True)
        self._current: tuple[SnapshotRef, Model, Limits] | None = None
        self._before: tuple[SnapshotRef, Model, Limits] | None = None
        self._checks = self._shares = False  # whether it checks others; whether another decodes with these weights
        self.base_model: SnapshotRef | None = None
        self._cache: Cache | None = None
        self._rows = RowTable(exact_device(self._device))
        self._prefixes: PrefixCache | None = None
        self._parked: Parked | None = None
        self._keeps_routes = False  # since a request asked for them
        # Rows from this number on were read with the policy of `_read_with` from their first token.
        self._read_with: SnapshotRef | None = None
        self._read_from = self._next_number = 0
        # A thread holds `_using` while it uses or changes the weights, and `_next` while it waits for `_using`. Without
        # `_next` the decode thread, which releases `_using` only for an instant, would starve the other threads.
        self._next, self._using = threading.Lock(), threading.Lock()

    @property
    def installed(self) -> SnapshotRef | None:
        current = self._current
        return current[0] if current else None

    @property
    def held_refs(self) -> tuple[SnapshotRef, ...]:
        return tuple(one[0] for one in (self._current, self._before) if one is not None)

    @property
    def can_join(self) -> bool:
        return self._cache is None or self._cache.can_join

    def refusal(self, request: SampleRequest) -> RequestFailure | None:
        limits = self._policy()[2]
        return refuse_request(request, limits.vocab_size, limits.max_positions)

    def successor(self) -> TorchDecoder:
        other = copy(self)
        other._cache, other._prefixes, other._before, other._parked = None, None, None, None
        other._rows, other._read_with, other._shares = RowTable(exact_device(self._device)), None, True
        other._next, other._using = threading.Lock(), threading.Lock()
        return other

    def load(self, snapshot: Snapshot, base: Snapshot | None = None) -> float:
        whole, before = snapshot if snapshot.base_model is None else base, self._current
        self._before = None  # freed first: there is no room for three sets of weights
        with torch.inference_mode():
            if whole is None:
                self._load_adapter(snapshot)
                self._before = before
                return 0.0
            outline = self._build_model(whole, META)
            if self._current is not None and self._current[1].architecture != outline.architecture:
                raise PeerError("architecture", f"snapshot {whole.ref} has another architecture than the one before")
            check_layout(whole, outline.places)
            adapter = {} if whole is snapshot else read_adapter(snapshot, outline.linears, self._device)
            seconds = 0.0
            if self._load_beside(snapshot.ref, whole, adapter):
                self._before = before if self._checks else None
            else:
                check_values(whole, outline.places)
                seconds = self._load_in_place(snapshot.ref, whole, adapter, outline.limits)
            self.base_model = snapshot.base_model
            return seconds

    def _load_adapter(self, snapshot: Snapshot) -> None:
        """Install an adapter over the base model that is loaded already."""
        if snapshot.base_model != self.base_model:
            raise InvariantError(f"{snapshot.ref} is over {snapshot.base_model}; the engine holds {self.base_model}")
        _, model, limits = self._policy()
        adapter = read_adapter(snapshot, model.linears, self._device)
        self._current = (snapshot.ref, model.adapted(adapter), limits)

    def _load_beside(self, ref: SnapshotRef, snapshot: Snapshot, adapter: Adapter) -> bool:
        """Load new weights beside the old ones. Returns whether there was room; raises OutOfMemoryError if there was no
        room and there are no old weights to copy over."""
        num_bytes, free = sum(tensor.num_bytes for tensor in snapshot.tensors.values()), free_memory_bytes(self._device)
        needs_both = self._checks or self._shares
        share = GPU_SHARE if has_own_memory(self._device) else CHECKING_SHARE if needs_both else CPU_SHARE
        if self._current is not None and num_bytes > share * free:
            return self._refuses(num_bytes)
        try:
            model = self._build_model(snapshot, self._device)
            with Beside(self._device).work():  # decoding goes on meanwhile
                model.fill(snapshot)
            if num_bytes <= share * free:
                model.pack()
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            if self._current is not None:
                return self._refuses(num_bytes)
            raise OutOfMemoryError(f"{self._device} has no room for {num_bytes / 1e6:,.0f} MB of weights") from error
        self._current = (ref, model.adapted(adapter), model.limits)  # the swap: the next step reads this once
        self._shares = False
        return True

    def _refuses(self, num_bytes: int) -> bool:
        """There is no room beside the old weights: False, unless they must stay."""
        if self._shares:
            detail = "beside those that rollouts under way began with"
            raise OutOfMemoryError(f"{self._device} has no room for {num_bytes / 1e6:,.0f} MB of weights {detail}")
        return False

    def _load_in_place(self, ref: SnapshotRef, snapshot: Snapshot, adapter: Adapter, limits: Limits) -> float:
        """Copy new weights over the old ones. Returns the seconds for which no weights could be used."""
        with self._next, self._using:
            started, (_, model, _) = time.perf_counter(), self._policy()
            model.unpack()
            try:
                model.fill(snapshot)
            except BaseException:
                self._current = self.base_model = None  # the weights are a mixture of two policies
                raise
            self._current = (ref, model.adapted(adapter), limits)
        seconds = time.perf_counter() - started
        log.info("weights of %s copied over the old ones in %.2f s: no room beside them", snapshot.ref, seconds)
        return seconds

    def step(self, added: Mapping[int, SampleRequest], dropped: Sequence[int]) -> list[tuple[int, Completion]]:
        with self._next:
            self._using.acquire()
        try:
            with torch.inference_mode():
                return self._step(added, dropped)
        finally:
            self._using.release()

    def _step(self, added: Mapping[int, SampleRequest], dropped: Sequence[int]) -> list[tuple[int, Completion]]:
        ref, model, limits = self._policy()
        if ref != self._read_with:
            self._read_with, self._read_from, self._prefixes = ref, self._next_number, None
        self._next_number = max(added, default=self._next_number - 1) + 1
        self._rows.end(dropped)
        if added or self._rows.has_many_ended:
            self._change(model, limits, added)
        if self._cache is None:
            return []
        logits_BV = self._rows_model(model).step(self._cache, torch.from_numpy(self._rows.last_B).to(self._device))
        ended = [(number, self._routed(number, one)) for number, one in self._rows.draw(exact(logits_BV), ref.version)]
        self._keep(ended)
        if not len(self._rows.running):
            self._let_go()
        return ended

    def _routed(self, number: int, completion: Completion) -> Completion:
        """Return the completion of a row with its routes, if they were asked for."""
        place = self._rows.place_of(number)
        request = self._rows.requests[place]
        if self._cache is None or not request.params.routes:
            return completion
        num_read = len(request.prompt_tokens) + len(completion.tokens) - 1
        return replace(completion, routes=self._cache.routes(place, num_read))

    def _keep(self, ended: Sequence[tuple[int, Completion]]) -> None:
        """Keep the caches of ended rows for the next turns of their rollouts."""
        for number, completion in ended:
            place = self._rows.place_of(number)
            request = self._rows.requests[place]
            if self._cache is None or not request.in_turns or number < self._read_from:
                continue
            tokens = (request.prompt_tokens + completion.tokens)[:-1]  # the last was never read
            if (cache := self._cache.copy(place, len(tokens))) is not None:
                if self._prefixes is None:
                    self._prefixes = PrefixCache(int(KEPT_SHARE * free_memory_bytes(self._device)))
                self._prefixes.keep(self._scope(request) + tokens.tobytes(), cache)

    def _prefix_cache(self, request: SampleRequest) -> Cache | None:
        """Return the cache of a prefix of its prompt, if a running row or an earlier turn read it with this policy."""
        prompt = request.prompt_tokens
        place = self._rows.place_of_prompt(prompt, self._read_from)
        if place is not None and self._cache is not None:
            return self._cache.copy(place, len(prompt) - 1)
        return self._kept_prefix(request)

    def _kept_prefix(self, request: SampleRequest) -> Cache | None:
        if not request.in_turns or self._prefixes is None:
            return None
        scope = self._scope(request)
        return self._prefixes.known(scope + request.prompt_tokens[:-1].tobytes(), len(scope))

    def _scope(self, request: SampleRequest) -> bytes:
        """Return what a request must have in common with another one, besides tokens, to continue from its cache."""
        return b""

    def prefill(self, ref: SnapshotRef, requests: Sequence[PrefillRequest]) -> list[Prefill]:
        self._checks = True
        self._held(ref)
        prefills: dict[int, Prefill] = {}
        for batch in batches(requests):
            with self._next:
                self._using.acquire()
            try:
                with torch.inference_mode():
                    prefills |= self._prefill(ref, {place: requests[place] for place in batch})
            finally:
                self._using.release()
        return [prefills[place] for place in range(len(requests))]

    def _prefill(self, ref: SnapshotRef, requests: Mapping[int, PrefillRequest]) -> dict[int, Prefill]:
        """Requests of one version are read in one batch, those with swaps or routes one by one."""
        prefills: dict[int, Prefill] = {}
        steady: dict[tuple[int, str], dict[int, PrefillRequest]] = {}
        for place, request in requests.items():
            if len(request.reads) == 1 and not request.routes:
                steady.setdefault((request.reads[0][1], request.form), {})[place] = request
                continue
            models = [self._held(replace(ref, version=version), request.form) for _, version in request.reads]
            routes = RouteCheck(request.routes, request.is_routed) if request.routes else None
            measured = measure(replay(models, request, routes), request, _bits(models[0], request.form))
            prefills[place] = measured if routes is None else replace(measured, regrets=np.array(routes.regrets))
        for (version, form), of_version in steady.items():
            model = self._held(replace(ref, version=version), form)
            firsts = [len(one.prompt_tokens) - 1 + one.first for one in of_version.values()]
            tiles = model.logits([sequence_of(one) for one in of_version.values()], firsts, _tile_tokens(model))
            prefills |= {place: measure(tiles, request, _bits(model, form)) for place, request in of_version.items()}
        return prefills

    def _held(self, ref: SnapshotRef, form: str = "") -> Model:
        """Return the model of a snapshot that can be checked under, with its weights in this form."""
        for one in (self._current, self._before):
            if one is not None and one[0] == ref:
                try:
                    return one[1].formed(form) if form else one[1]
                except (MemoryError, RuntimeError) as error:
                    if not is_out_of_memory(error):
                        raise
                    raise PeerError("no_room", f"no room for the weights of {ref} in the form {form}") from error
        raise PeerError("snapshot_gone", f"the engine does not hold {ref}")

    def clear(self) -> None:
        self._let_go()
        self._prefixes = None

    def sleep(self) -> None:
        """See `Decoder.sleep`. Caches of ended rows are dropped: their next turns are read again."""
        with self._next, self._using:
            self._prefixes = None
            self._parked = Parked(self._device, self._current, self._before, self._cache)

    def wake_up(self) -> None:
        if self._parked is not None:
            self._parked.fetch()
            self._parked = None

    def _let_go(self) -> None:
        self._cache = None
        self._rows.clear()

    def _policy(self) -> tuple[SnapshotRef, Model, Limits]:
        if self._current is None:
            raise InvariantError("the engine was asked for tokens and has no weights")
        return self._current

    def _change(self, model: Model, limits: Limits, added: Mapping[int, SampleRequest]) -> None:
        """Drop the ended rows, and read new prompts up to their last token, which the next step reads."""
        kept_places = self._rows.running
        if not len(kept_places):
            self._let_go()  # frees this cache before there is another one
        if added:
            fresh, places = self._read_prompts(model, added)
            rows = self._on_device(places)
            if self._cache is None:
                self._cache = fresh.select(rows)
            else:
                self._cache = self._cache.join(self._on_device(kept_places), fresh, rows)
        elif self._cache is not None:
            self._cache = self._cache.select(self._on_device(kept_places))
        if self._cache is not None:
            self._rows.change(kept_places, added, limits)

    def _read_prompts(self, model: Model, added: Mapping[int, SampleRequest]) -> tuple[Cache, list[int]]:
        """Read all but the last token of these prompts, each distinct prompt once. Returns the cache, and the row of
        each request in it."""
        first_of: dict[bytes, SampleRequest] = {}
        for request in added.values():
            first_of.setdefault(request.prompt_tokens.tobytes(), request)
        prefixes = [self._prefix_cache(request) for request in first_of.values()]
        self._keeps_routes = self._keeps_routes or any(request.params.routes for request in added.values())
        prompts = [request.prompt_tokens[:-1] for request in first_of.values()]
        fresh = model.prefill(prompts, prefixes, self._keeps_routes)
        place_of = {prompt: place for place, prompt in enumerate(first_of)}
        return fresh, [place_of[request.prompt_tokens.tobytes()] for request in added.values()]

    def _rows_model(self, model: Model) -> Model:
        return model

    def _on_device(self, rows: Sequence[int] | np.ndarray[tuple[int], np.dtype[np.int64]]) -> Tensor:
        return torch.as_tensor(rows, dtype=torch.long).to(self._device)


def replay(models: Sequence[Model], request: PrefillRequest, routes: RouteCheck | None = None) -> Iterator[Tensor]:
    """Yield the logits [N, V] that the tokens of a request, from `first` on, were drawn from: each part of the sequence
    is read by the model (one for each of `reads`) that read it when it was sampled. `routes` are judged on the way."""
    sequence, behind = sequence_of(request), len(request.prompt_tokens) - 1
    starts = [0, *(behind + first for first, _ in request.reads[1:]), len(sequence) - 1]
    cache: Cache | None = None
    for model, start, stop in zip(models, starts, starts[1:], strict=False):
        first = max(0, behind + request.first - start)
        cache, tiles = model.extend(cache, sequence[start:stop], first, _tile_tokens(model), routes)
        yield from tiles


def _tile_tokens(model: Model) -> int:
    return max(1, TILE_ITEMS // model.limits.vocab_size)


def _bits(model: Model, form: str = "") -> int:
    """Return in how many bits the tokens were computed. An engine with rounded weights also rounds what it multiplies
    with them, so it is no nearer than 16 bits."""
    return 32 if model.dtype == torch.float32 and not form else 16
