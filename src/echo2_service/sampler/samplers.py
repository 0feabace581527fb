"""Samples from one base model and its published adapters, all in one batch.

A published adapter is read when it is first used, and not again while it is in memory, because it never changes.
"""

from __future__ import annotations

import asyncio
import math
import threading
from array import array
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import replace

from echo2.core.background import Shared
from echo2.core.errors import UserError
from echo2.core.types import SamplingParams, Snapshot
from echo2.engines.compact import CompactModel
from echo2.engines.decode_loop import DecodeLoop
from echo2.engines.engine import Outcome, RequestFailure
from echo2.engines.many_policies import ManyPolicies, PolicyRequest
from echo2.engines.text_scores import ScoreRequest, TextScores, score
from echo2.engines.tokenizer import StopRule, Tokenizer, load_tokenizer, stop_rule
from echo2_service import limits
from echo2_service.backend import SampledSequence, SampleOutput, SampleSpec
from echo2_service.decide.placing import OTHERS_SHARE, SLOTS

#: Maximum memory of all adapters; the least recently used are dropped.
MEMORY_BYTES = 2 << 30


class BaseSampler:
    """Samples from a base model and its adapters. For one event loop."""

    def __init__(
        self, base: Snapshot, device: str, read: Callable[[str], Awaitable[Snapshot]], slots: int = SLOTS
    ) -> None:
        """`read` returns an adapter by its name in calls.

        Raises:
            UserError: the compact engine does not support the model.
        """
        self._files, self._read_adapter = base.files, read
        self._policies = ManyPolicies(base, device)
        self._loop = DecodeLoop(self._policies, slots)
        self._slots = _Slots(self._loop)
        self._adapters = Shared(self._read)
        self._tokenizer: Tokenizer | None = None
        self._loading = threading.Lock()

    async def sample(self, snapshot: str, spec: SampleSpec) -> SampleOutput:
        """Sample from the adapter `snapshot`, or from the base model if it is "".

        Raises:
            UserError: the request cannot be sampled.
            PeerError: the adapter does not fit, or its logits are not finite.
            Whatever `read` raises.
        """
        policy = await self._policy(snapshot)
        stop = await asyncio.to_thread(self._stop_rule, spec.stop_strings) if spec.stop_strings else None
        requests = self._requests(policy, spec, stop)
        outcomes = asyncio.gather(*(self._slots.run(spec.owner, request) for request in requests))
        try:
            scores = None
            if spec.wants_scores:
                if (refused := self._loop.refusal(requests[0])) is not None:
                    raise UserError(refused.detail)
                scores = await asyncio.to_thread(_prompt_scores, policy, spec)
            sequences = [_sequence(outcome) for outcome in await outcomes]
        finally:
            outcomes.cancel()
        if spec.top_sample_logprobs:
            sequences = [await _with_tops(policy, spec, sequence) for sequence in sequences]
        return SampleOutput(sequences) if scores is None else _scored(sequences, scores)

    async def close(self) -> None:
        """Abort all requests in progress."""
        await self._loop.close()

    def _requests(self, policy: CompactModel, spec: SampleSpec, stop: StopRule | None) -> list[PolicyRequest]:
        if not 1 <= spec.num_samples <= limits.SAMPLES_MAX:
            raise UserError(f"num_samples = {spec.num_samples}: give 1 to {limits.SAMPLES_MAX}.")
        if spec.temperature < 0.0 or not 0.0 < spec.top_p <= 1.0 or spec.top_k < 0:
            raise UserError("Give temperature >= 0, 0 < top_p <= 1 and top_k >= 0 (0: all tokens).")
        params = SamplingParams(spec.temperature, spec.top_p, spec.top_k, spec.max_tokens)
        ends = frozenset(spec.stop_tokens) | frozenset(self._policies.end_tokens if spec.ends_with_model else ())
        return [
            PolicyRequest(spec.prompt, spec.seed, sample, params, ends, policy, stop=stop)
            for sample in range(spec.num_samples)
        ]

    def _stop_rule(self, strings: tuple[str, ...]) -> StopRule:
        with self._loading:  # several threads may need it at once
            if self._tokenizer is None:
                self._tokenizer = load_tokenizer(self._files)
        return stop_rule(self._tokenizer, strings)

    async def _policy(self, snapshot: str) -> CompactModel:
        if not snapshot:
            return self._policies.base
        policy, _ = await self._adapters.get(snapshot)
        self._make_room()
        return policy

    def _make_room(self) -> None:
        read = self._adapters.made()
        excess = sum(num_bytes for _, num_bytes in read.values()) - MEMORY_BYTES
        for name, (_, num_bytes) in list(read.items())[:-1]:
            if excess <= 0:
                break
            excess -= num_bytes
            self._adapters.drop(name)

    async def _read(self, name: str) -> tuple[CompactModel, int]:
        """Return an adapter, and its size in bytes."""
        snapshot = await self._read_adapter(name)
        num_bytes = sum(tensor.num_bytes for tensor in snapshot.tensors.values())
        return await asyncio.to_thread(self._policies.adapter, snapshot), num_bytes


def _sequence(outcome: Outcome) -> SampledSequence:
    if isinstance(outcome, RequestFailure):
        raise UserError(outcome.detail)
    return SampledSequence(outcome.tokens, outcome.logprobs, outcome.finish)


def _prompt_scores(policy: CompactModel, spec: SampleSpec) -> TextScores:
    return score(
        policy,
        ScoreRequest(
            spec.prompt,
            top_k=spec.top_prompt_logprobs,
            cell_places=spec.target_places,
            cell_tokens=spec.target_tokens,
            num_draws=spec.num_alternatives,
            draw_temperature=spec.temperature,
            seed=spec.seed,
        ),
    )


async def _with_tops(policy: CompactModel, spec: SampleSpec, sequence: SampledSequence) -> SampledSequence:
    """Add the most likely tokens, from a second forward pass over the sequence. Threads are few: other calls get their
    turn between two sequences, and a cancelled call ends there."""
    request = ScoreRequest(spec.prompt + sequence.tokens, len(spec.prompt), spec.top_sample_logprobs, spec.temperature)
    tops = await asyncio.to_thread(score, policy, request)
    return replace(sequence, top_tokens=tops.top_tokens, top_logprobs=tops.top_logprobs)


def _scored(sequences: list[SampledSequence], scores: TextScores) -> SampleOutput:
    width = len(scores.top_tokens) // max(1, len(scores.logprobs))
    return SampleOutput(
        sequences,
        array("f", [math.nan]) + scores.logprobs,
        array("i", [-1] * width) + scores.top_tokens,
        array("f", [math.nan] * width) + scores.top_logprobs,
        scores.cell_logprobs,
        scores.drawn_tokens,
        scores.drawn_logprobs,
    )


class _Slots:
    """Shares an engine's slots equally: the next free slot goes to the waiting owner that uses the fewest. One owner
    never uses all of them.
    """

    def __init__(self, engine: DecodeLoop) -> None:
        self._engine = engine
        self._used: dict[str, int] = {}
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}

    async def run(self, owner: str, request: PolicyRequest) -> Outcome:
        """Wait for a free slot, run the request, and return its outcome."""
        slot: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(owner, deque()).append(slot)
        self._give()
        try:
            await slot
            return await self._engine.submit(request)
        finally:
            if slot.done() and not slot.cancelled():
                self._used[owner] -= 1
                if not self._used[owner]:
                    del self._used[owner]
                self._give()

    def _give(self) -> None:
        slots = self._engine.slots
        most = slots - slots // OTHERS_SHARE
        while self._waiting and sum(self._used.values()) < slots:
            owner = min(self._waiting, key=lambda name: self._used.get(name, 0))
            if self._used.get(owner, 0) >= most:
                return
            slot = self._waiting[owner].popleft()
            if not self._waiting[owner]:
                del self._waiting[owner]
            if not slot.done():
                self._used[owner] = self._used.get(owner, 0) + 1
                slot.set_result(None)
