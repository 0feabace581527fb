"""The contract of engines: an engine holds one policy and samples token sequences from it. No torch here.

The same contract holds for engines in this process and for token servers. A request samples one completion: prompt
token ids in, token ids out, with the logprob and the version of every token. Each request is submitted, awaited,
finished and aborted independently of the others, and weights may be updated while requests run.

Where an engine draws tokens itself, random numbers are counter-based: number t of stream (seed, sample) is a pure
function of the three. No state is kept, so a row's randomness does not depend on which rows share its batch, on the
device, or on when it runs. The generator is splitmix64 (Steele, Lea, Flood: Fast Splittable Pseudorandom Number
Generators, OOPSLA 2014).

`config/values.py` lists the engines.
"""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import numpy.typing as npt

from echo2.core.errors import Echo2Error, InvariantError
from echo2.core.types import FinishReason, Rollout, SamplingFailure, SamplingParams, Snapshot, SnapshotRef
from echo2.engines.tokenizer import StopRule

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Keys = npt.NDArray[np.uint64]
Spans = tuple[tuple[int, int], ...]
"""((first token, policy version), ...), ascending from token 0, as `Rollout.version_spans`."""


@dataclass(slots=True)
class Conversation:
    """The state of one rollout. `pending`: the environment's last reply, kept only if the policy answers it."""

    tokens: array[int] = field(default_factory=lambda: array("i"))
    logprobs: array[float] = field(default_factory=lambda: array("f"))
    loss_mask: bytearray = field(default_factory=bytearray)
    spans: list[tuple[int, int]] = field(default_factory=list)
    support_tokens: array[int] | None = None
    support_offsets: array[int] = field(default_factory=lambda: array("i", [0]))
    routes: bytes = b""
    pending: array[int] = field(default_factory=lambda: array("i"))
    turns: int = 0
    reward: float = 0.0
    finish: FinishReason | None = None

    def take(self, completion: Completion) -> None:
        """Append the environment's pending reply, and the policy's turn."""
        start = len(self.tokens) + len(self.pending)
        self.tokens += self.pending + completion.tokens
        self.logprobs += array("f", bytes(4 * len(self.pending))) + completion.logprobs
        self.loss_mask += bytes(len(self.pending)) + b"\x01" * len(completion.tokens)
        for first, version in completion.version_spans:
            if not self.spans or self.spans[-1][1] != version:
                # The environment's tokens belong to the version span of the turn before them.
                self.spans.append((start + first, version))
        if completion.support_tokens is not None and completion.support_offsets is not None:
            before = self.support_offsets[-1]
            self.support_offsets.extend([before] * len(self.pending))
            self.support_offsets.extend(before + offset for offset in completion.support_offsets[1:])
            self.support_tokens = (self.support_tokens or array("i")) + completion.support_tokens
        # A turn that is read again keeps the routes of the turn that drew its tokens.
        is_whole = completion.routes and (self.routes or not self.turns)
        self.routes = self.routes + completion.routes[len(self.routes) :] if is_whole else b""
        self.pending = array("i")
        self.turns += 1

    def completion(self, finish: FinishReason) -> Completion:
        return Completion(
            self.tokens,
            self.logprobs,
            tuple(self.spans),
            finish,
            self.support_tokens,
            self.support_offsets if self.support_tokens is not None else None,
            self.routes,
        )

    def rollout(self) -> Rollout:
        if self.finish is None or not self.tokens:
            raise InvariantError("a rollout was handed over before it was over")
        return Rollout(
            tokens=self.tokens,
            logprobs=self.logprobs,
            loss_mask=bytes(self.loss_mask),
            version_spans=tuple(self.spans),
            finish=self.finish,
            reward_parts={"environment": self.reward},
            support_tokens=self.support_tokens,
            support_offsets=self.support_offsets if self.support_tokens is not None else None,
            routes=self.routes,
        )


@dataclass(frozen=True, slots=True)
class PrefillRequest:
    """A finished completion to check. `support_tokens`, `support_offsets`: as in `Rollout`, of these tokens.

    reads  the weights that drew the tokens, all in one turn: the first version reads the prompt and the tokens; token s
           of a later span (s, v) is drawn behind token s - 1, the first that v reads. Keys and values are kept.
    first  no distributions are wanted of the tokens before this one
    routes the experts that a mixture is said to have chosen, of all these tokens but the last, which are read along
           them; empty: none
    is_routed
           one byte a token: 1 where these weights are said to have chosen the experts, 0 where they choose again
    form   the weights are rounded to this form before they read (`forms.py`); empty: they read as they are
    """

    prompt_tokens: array[int]
    tokens: array[int]
    params: SamplingParams
    reads: Spans
    first: int = 0
    support_tokens: array[int] | None = None
    support_offsets: array[int] | None = None
    routes: bytes = b""
    is_routed: bytes = b""
    form: str = ""


@dataclass(slots=True)
class RouteCheck:
    """Routes to judge, as in `PrefillRequest`, and the regret (`engines/routing.py`) of each token's that was read."""

    given: bytes
    is_given: bytes
    regrets: list[float] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Prefill:
    """A policy's distributions for each of T given tokens, with temperature and narrowing applied; all [T] float64. The
    first is token `PrefillRequest.first`.

    low, high       inversion draws the token for random numbers from `low` to `high`
    logprobs        of the token
    entropies       of the distribution, nats
    variances       of -logprob under the distribution, nats^2
    support_errors  probability by which the reported support is not what top-k and top-p leave
    bits            of the computing dtype: 32 or 16
    regrets         of the request's routes, of all tokens that were read; infinite where they were not given
    """

    low: Floats
    high: Floats
    logprobs: Floats
    entropies: Floats
    variances: Floats
    support_errors: Floats
    bits: int
    regrets: Floats = field(default_factory=lambda: np.zeros(0))


@dataclass(frozen=True, slots=True)
class SampleRequest:
    """One prompt, and how to sample one completion of it.

    Tokens are drawn from the random stream (seed, sample), so they do not depend on what else the engine samples. The
    completion ends with the model's end token, with one of `stop_tokens`, where `stop` says, or after
    `params.max_tokens` tokens.

    `in_turns`: the request is one turn of several. An engine may keep the key-value cache of a turn, and prefill only
    the new tokens of a later request whose prompt begins with that turn.

    `on_token`: an engine that knows each token as it is drawn calls this with it, in order, from any thread; others
    never do.

    `version`: the version, installed or the one before, whose weights draw all of the completion; token servers do not
    keep to it. None: the installed one, and from a swap of weights on the next.
    """

    prompt_tokens: array[int]
    seed: int
    sample: int
    params: SamplingParams
    stop_tokens: frozenset[int] = frozenset()
    in_turns: bool = field(default=False, kw_only=True)
    stop: StopRule | None = field(default=None, kw_only=True)
    on_token: Callable[[int], object] | None = field(default=None, kw_only=True, compare=False)
    version: int | None = field(default=None, kw_only=True)


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
    routes: bytes = b""


@dataclass(frozen=True, slots=True)
class RequestFailure:
    """This request cannot be sampled; other requests go on. `traceback`: from the user's environment."""

    reason: SamplingFailure
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
        """The base model of the installed adapter; None: the policy is a whole model, or nothing is installed."""

    @property
    def slots(self) -> int:
        """Maximum number of requests decoded at once; further requests wait in order of arrival."""

    @property
    def free_slots(self) -> int:
        """Number of slots that no running or waiting request needs."""

    @property
    def trouble(self) -> str:
        """Why requests wait although there are weights, in one line for people; empty: they do not."""

    def refusal(self, request: SampleRequest) -> RequestFailure | None:
        """Why this request can't be sampled, or None. May be called from any thread."""

    def submit(self, request: SampleRequest) -> asyncio.Future[Outcome]:
        """Sample one request. Cancelling the future, or the task that awaits it, aborts the request: its slot is free
        at the next token.

        The future raises `PeerError` if the policy's logits are not finite, or any other error that occurred in the
        engine while the request ran; the engine itself goes on.

        Raises:
            UserError: nothing is installed, or the engine is closed.
        """

    def submit_together(self, requests: Sequence[SampleRequest]) -> list[asyncio.Future[Outcome]]:
        """Sample these requests as one batch of their own. The batch starts when nothing else runs, may exceed `slots`,
        and no other request joins it. So the shapes of the computation, and the last bits of its results, depend on
        these requests only.

        Raises:
            UserError: nothing is installed, or the engine is closed.
        """

    async def update_weights(self, snapshot: Snapshot, base: Snapshot | None = None) -> float:
        """Check a new policy and install it in place of the old one, which samples until then. Requests under way
        continue with the new weights from their next token. The engine decides whether it loads the new weights beside
        the old ones or copies them over the old ones between two tokens. Returns the seconds for which the update kept
        the engine from sampling.

        An engine that was given requests with a version keeps the old weights for these, so it must have room for both;
        those before the old ones must not be needed any more.

        `base`: the base model of an adapter, if the engine does not hold it (`base_model`).

        Raises:
            PeerError: the snapshot is damaged or wrong, or is an adapter that does not fit its base model. The old
                weights stay, unless the bytes, which were checked, could not be read again while they were copied: then
                nothing is installed.
            UserError: this engine does not support the architecture; the old weights stay. Or the engine is closed.
            OutOfMemoryError: the device has no room for the policy; the old weights stay.
        """

    async def sleep(self) -> None:
        """Take all tensors off the device, between two tokens; requests stay, and wait. Until `wake_up`, no weights may
        be updated. An engine that sleeps already does nothing."""

    async def wake_up(self) -> None:
        """Put the tensors back, and go on with the requests. An engine that is awake does nothing."""

    async def close(self) -> None:
        """Abort all requests, whose futures are cancelled, and release the device. A second call does nothing."""


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


_GAMMA = np.uint64(0x9E3779B97F4A7C15)
_MULTIPLIER_1 = np.uint64(0xBF58476D1CE4E5B9)
_MULTIPLIER_2 = np.uint64(0x94D049BB133111EB)
_MASK = (1 << 64) - 1


def derived_seed(seed: int, sample: int, turn: int) -> int:
    """Return a separate 63-bit seed for every turn of every sample."""
    (of_sample,) = stream_keys([seed], [sample])
    (of_turn,) = stream_keys([int(of_sample)], [turn])
    return int(of_turn) >> 1


def finalise(values: Keys) -> Keys:
    """splitmix64's output function: a bijection of 64-bit integers in which every input bit reaches every output
    bit."""
    values = (values ^ (values >> np.uint64(30))) * _MULTIPLIER_1
    values = (values ^ (values >> np.uint64(27))) * _MULTIPLIER_2
    return values ^ (values >> np.uint64(31))


def stream_keys(seeds: Sequence[int], samples: Sequence[int]) -> Keys:
    """A 64-bit key for each (seed, sample) pair."""
    seed_B = np.array([seed & _MASK for seed in seeds], dtype=np.uint64)
    sample_B = np.array(samples, dtype=np.uint64)
    return finalise(finalise(seed_B + _GAMMA) ^ ((sample_B + np.uint64(1)) * _GAMMA))


def uniforms(keys_B: Keys, token_B: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    """Number `token_B` of each stream: multiples of 2^-53 in [0, 1)."""
    step_B = (token_B + 1).astype(np.uint64) * _GAMMA
    return (finalise(keys_B + step_B) >> np.uint64(11)).astype(np.float64) * 2.0**-53
