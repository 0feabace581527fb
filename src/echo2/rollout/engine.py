"""The contract of engines: an engine holds one policy and samples token sequences from it. No torch here.

One contract for engines in this process and for token servers. A request is one rollout's tokens: prompt token ids in,
token ids out, with the logprob and the version of every token. Requests are submitted one by one and awaited one by
one; each ends by itself, may be aborted by itself, and new weights may come while others run.

`engines.py` lists the engines.
"""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from echo2.errors import Echo2Error
from echo2.rollout.stop_strings import StopRule
from echo2.types import FinishReason, SamplingParams, Snapshot, SnapshotRef


@dataclass(frozen=True, slots=True)
class SampleRequest:
    """One prompt, to be continued once.

    The tokens are drawn from the random stream (seed, sample): what else the engine samples at the time does not
    change them. The completion ends with the model's end token, one of `stop_tokens`, where `stop` says, or with
    `params.max_tokens`.

    `in_turns`: one of several that go on from each other. An engine may keep what it has read and written, and read
    only what is new in a request that begins with it.
    """

    prompt_tokens: array[int]
    seed: int
    sample: int
    params: SamplingParams
    stop_tokens: frozenset[int] = frozenset()
    in_turns: bool = field(default=False, kw_only=True)
    stop: StopRule | None = field(default=None, kw_only=True)


@dataclass(frozen=True, slots=True)
class Completion:
    """One sampled continuation of T tokens; the fields are those of `types.Rollout`.

    An end or stop token that was sampled is the last of `tokens`.
    """

    tokens: array[int]
    logprobs: array[float]
    version_spans: tuple[tuple[int, int], ...]
    finish: FinishReason
    support_tokens: array[int] | None = None
    support_offsets: array[int] | None = None
    top_tokens: array[int] = field(default_factory=lambda: array("i"))
    top_logprobs: bytes = b""


@dataclass(frozen=True, slots=True)
class RequestFailure:
    """This request can't be sampled; the others are. `reason` is one word, as in `control/head/leases.py`.
    `traceback`: of the user's environment.
    """

    reason: str
    detail: str
    traceback: str = ""


class OutOfMemoryError(Echo2Error):
    """The device has no room for this policy."""


Outcome = Completion | RequestFailure


class Engine(Protocol):
    """Holds one policy. Methods are called from one event loop and never block it."""

    @property
    def installed(self) -> SnapshotRef | None:
        """The snapshot that the next token is sampled with."""

    @property
    def base_model(self) -> SnapshotRef | None:
        """The base model that it holds below an adapter; None: the policy is a whole model, or there is none."""

    @property
    def slots(self) -> int:
        """Requests that are decoded at once; further ones wait in order of arrival."""

    @property
    def free_slots(self) -> int:
        """Slots that neither a running nor a waiting request needs."""

    def refusal(self, request: SampleRequest) -> RequestFailure | None:
        """Why this request can't be sampled, or None. May be called from any thread."""

    def submit(self, request: SampleRequest) -> asyncio.Future[Outcome]:
        """Sample one request. Cancelling the future, or the task that awaits it, aborts the request: its slot is free
        at the next token.

        The future raises `PeerError` where the policy gives logits that are not finite, and whatever else broke the
        engine while the request was in it; the engine itself goes on.

        Raises:
            UserError: nothing is installed.
        """

    def submit_together(self, requests: Sequence[SampleRequest]) -> list[asyncio.Future[Outcome]]:
        """Sample these requests together and alone: they start when nothing else runs, however many they are, and
        nothing joins them. The shapes of the computation, and so its last bits, depend on these requests only.

        Raises:
            UserError: nothing is installed.
        """

    async def update_weights(self, snapshot: Snapshot, base: Snapshot | None = None) -> float:
        """Check a new policy and put it in the place of the installed one, which goes on sampling until then. Requests
        under way go on with the new weights from their next token. The engine decides whether the new weights come
        beside the old ones for a while or are copied over them between two tokens. Returns the seconds in which nothing
        could be sampled because of it.

        `base`: the base model of an adapter, where the engine does not hold it (`base_model`).

        Raises:
            PeerError: the snapshot is torn or wrong, or an adapter that does not fit its base model; the old weights
                stay, except where its bytes, which were checked, could not be read again half-way through copying: then
                nothing is installed.
            UserError: this engine does not know the architecture; the old weights stay.
            OutOfMemoryError: there is no room for it; the old weights stay.
        """

    async def close(self) -> None:
        """Abort all requests and give back the device."""


def refuse_request(request: SampleRequest, vocab_size: int, max_positions: int) -> RequestFailure | None:
    """Why a model with this vocabulary and context can't sample this request, or None."""
    prompt = request.prompt_tokens
    if not prompt:
        return RequestFailure("engine_failed", "The prompt has no tokens. Give the model at least one (a start token).")
    if len(prompt) >= max_positions:
        detail = f"The prompt has {len(prompt)} tokens; the model's context is {max_positions}. Shorten it."
        return RequestFailure("prompt_too_long", detail)
    if request.params.max_tokens < 1:
        return RequestFailure("engine_failed", f"max_tokens = {request.params.max_tokens}: give at least 1.")
    if min(prompt) < 0 or max(prompt) >= vocab_size:
        detail = f"A prompt token is outside 0..{vocab_size - 1}: this tokenizer does not belong to this model."
        return RequestFailure("engine_failed", detail)
    return None
