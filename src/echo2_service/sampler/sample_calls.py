"""The sampler process of a service: reads calls from stdin, writes answers to stdout, and ends with its parent.

All samples from one base model and its published adapters are in one batch. A published adapter is read when it is
first used, and not again while it is in memory, because it never changes.
"""

from __future__ import annotations

import asyncio
import logging
import math
import sys
import threading
from array import array
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import BinaryIO

import msgspec

from echo2.core.background import Shared, spawn, together
from echo2.core.errors import Echo2Error, UserError
from echo2.core.loop_thread import call_in
from echo2.core.types import SamplingParams, Snapshot, SnapshotRef
from echo2.engines.compact import CompactModel
from echo2.engines.decode_loop import DecodeLoop
from echo2.engines.engine import Outcome, RequestFailure
from echo2.engines.many_policies import ManyPolicies, PolicyRequest
from echo2.engines.prefill import ScoreRequest, TextScores, score
from echo2.engines.tokenizer import StopRule, Tokenizer, load_tokenizer, stop_rule
from echo2.learner.core import checkpoint
from echo2.weights.format.model_files import read_adapter, read_base_model
from echo2_service import limits
from echo2_service.backend import Answer, CancelCall, Request, SampleCall, SampledSequence, SampleOutput, SampleSpec
from echo2_service.calling import ProcessSettings, begin, failed, receive
from echo2_service.decide.placing import OTHERS_SHARE, SLOTS

log = logging.getLogger(__name__)

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
        requests = self._requests(policy, snapshot, spec, stop)
        scores = None
        async with together() as runs:
            outcomes = [runs.create_task(self._slots.run(spec.owner, request)) for request in requests]
            if spec.wants_scores:
                if (refused := self._loop.refusal(requests[0])) is not None:
                    raise UserError(refused.detail)
                scores = await asyncio.to_thread(_prompt_scores, policy, spec)
        sequences = [_sequence(outcome.result()) for outcome in outcomes]
        if spec.top_sample_logprobs:
            sequences = [await _with_tops(policy, spec, sequence) for sequence in sequences]
        return SampleOutput(sequences) if scores is None else _scored(sequences, scores)

    async def close(self) -> None:
        """Abort all requests in progress."""
        await self._loop.close()

    def _requests(
        self, policy: CompactModel, snapshot: str, spec: SampleSpec, stop: StopRule | None
    ) -> list[PolicyRequest]:
        if not 1 <= spec.num_samples <= limits.SAMPLES_MAX:
            raise UserError(f"num_samples = {spec.num_samples}: give 1 to {limits.SAMPLES_MAX}.")
        if spec.temperature < 0.0 or not 0.0 < spec.top_p <= 1.0 or spec.top_k < 0:
            raise UserError("Give temperature >= 0, 0 < top_p <= 1 and top_k >= 0 (0: all tokens).")
        params = SamplingParams(spec.temperature, spec.top_p, spec.top_k, spec.max_tokens)
        ends = frozenset(spec.stop_tokens) | frozenset(self._policies.end_tokens if spec.ends_with_model else ())
        return [
            PolicyRequest(
                *(spec.prompt, spec.seed, sample, params, ends, policy, snapshot, spec.owner), in_turns=True, stop=stop
            )
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
        policy.logits,
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
    tops = await asyncio.to_thread(score, policy.logits, request)
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


class SampleCalls:
    """Passes each call to the sampler of its base model, and the answer to `tell`. For one event loop."""

    def __init__(self, sampler_of: Callable[[str], Awaitable[BaseSampler]], send: Callable[[Answer], None]) -> None:
        """`sampler_of` raises UserError if there is no such base model."""
        self._sampler_of, self._send = sampler_of, send
        self._under_way: dict[int, asyncio.Task[None]] = {}

    @property
    def num_under_way(self) -> int:
        """Number of calls that have no answer yet."""
        return len(self._under_way)

    def take(self, request: Request) -> None:
        """Begin a sample call, or cancel one."""
        call, number = request.call, request.number
        if isinstance(call, CancelCall):
            if task := self._under_way.get(number):
                task.cancel()
        elif isinstance(call, SampleCall):
            self._under_way[number] = task = spawn(self._answer(number, call), partial(self._failed, number))
            task.add_done_callback(partial(self._ended, number))

    def drop_all(self) -> None:
        """Cancel all calls, because their answers are no longer awaited."""
        for task in self._under_way.values():
            task.cancel()

    def _ended(self, number: int, task: asyncio.Task[None]) -> None:
        if self._under_way.get(number) is task:
            del self._under_way[number]

    def _failed(self, number: int, error: Exception) -> None:
        """Answer a call whose answer cannot be told: it may be too large."""
        log.error("the answer of a sample", exc_info=error)
        self._send(Answer(number, fault=f"The samples cannot be sent: {error}", is_ours=True))

    async def _answer(self, number: int, call: SampleCall) -> None:
        self._send(Answer(number, has_begun=True))
        try:
            sampler = await self._sampler_of(call.base)
            answer = Answer(number, sampled=await sampler.sample(call.snapshot, call.spec))
        except Exception as error:  # this caller gets the error
            answer = failed(number, error, "a sample")
        self._send(answer)


def published(directory: str, base: SnapshotRef) -> Snapshot:
    """Return the adapter that the learner wrote to a directory, with the base model that it was trained on.

    Raises:
        UserError: the directory holds no adapter.
    """
    trained_over = checkpoint.read_client(Path(directory))["base_model"]
    return read_adapter(Path(directory), base, SnapshotRef(trained_over, 0, 0))


def base_sampler(directory: str, device: str, slots: int = SLOTS) -> BaseSampler:
    """Return a sampler of a base model and its adapters on this disk, which calls name by their directories.

    Raises:
        UserError: the directory holds no model that the compact engine supports.
    """
    base = read_base_model(Path(directory))

    async def read(snapshot: str) -> Snapshot:
        return await asyncio.to_thread(published, snapshot, base.ref)

    return BaseSampler(base, device, read, slots)


async def serve(settings: ProcessSettings, inbox: BinaryIO, send: Callable[[Answer], None]) -> None:
    """Answer calls until the requests end."""
    samplers = {name: base_sampler(directory, settings.device) for name, directory in settings.bases.items()}

    async def sampler_of(base: str) -> BaseSampler:
        if base not in samplers:
            raise UserError(f"There is no base model {base!r}; there are {', '.join(samplers)}.")
        return samplers[base]

    calls, loop = SampleCalls(sampler_of, send), asyncio.get_running_loop()
    log.info("ready: %s", ", ".join(samplers))

    def take(request: Request) -> None:
        call_in(loop, calls.take, request)

    await asyncio.to_thread(receive, inbox, take)


def main(settings_text: str) -> None:
    """Run the process until stdin ends."""
    asyncio.run(serve(msgspec.json.decode(settings_text, type=ProcessSettings), *begin("sampler")))


if __name__ == "__main__":
    try:
        main(sys.argv[1])
    except Echo2Error as error:
        sys.exit(str(error))
