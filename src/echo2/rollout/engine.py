"""What an engine is: something that holds one policy and samples token sequences from it. No torch here.

A batch of requests is sampled together; each request's completions are handed over the moment its last one ends, so
that a complete group can travel while the others are still being written (complete-group streaming).

Engines: `compact` (hand-written forward pass for Llama, Qwen2 and Qwen3, the fast one), `transformers` (any Hugging
Face causal language model), `fake` (no model at all).
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from echo2.types import FinishReason, SamplingParams, Snapshot, SnapshotRef

SwapMode = Literal["between", "during"]


@dataclass(frozen=True, slots=True)
class SampleRequest:
    """One prompt to be continued `num_samples` times: samples `first_sample`, `first_sample` + 1, ...

    Sample i draws its tokens from the random stream (seed, i): what else is in the batch does not change them. It ends
    with the model's end token or one of `stop_tokens`.
    """

    prompt_tokens: array[int]
    num_samples: int
    seed: int
    params: SamplingParams
    stop_tokens: frozenset[int] = frozenset()
    first_sample: int = 0

    @property
    def samples(self) -> range:
        return range(self.first_sample, self.first_sample + self.num_samples)


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


@dataclass(frozen=True, slots=True)
class RequestFailure:
    """This request can't be sampled; the others of its batch are. `reason` is one word, as in `control/leases.py`."""

    reason: str
    detail: str


Outcome = list[Completion] | RequestFailure
OnFinished = Callable[[int, Outcome], None]


class Engine(Protocol):
    """Holds one policy. `generate` runs in one thread at a time; `load_snapshot` may be called from another."""

    @property
    def installed(self) -> SnapshotRef | None:
        """The snapshot that the next token is sampled with."""

    def load_snapshot(self, snapshot: Snapshot) -> float:
        """Build the new policy beside the old one, check it, then swap. Returns the seconds in which the engine could
        not generate because of it.

        With swap "during", a running generation goes on with the new weights from its next token; with "between" the
        caller only calls this while nothing is generated.

        Raises:
            PeerError: the snapshot is torn or wrong; the old weights stay.
            UserError: this engine does not know the architecture.
        """

    def generate(
        self, requests: Sequence[SampleRequest], on_finished: OnFinished, should_stop: Callable[[], bool]
    ) -> None:
        """Sample all requests as one batch. `on_finished(index, outcome)` is called once per request, from this
        thread, in the order in which they end. When `should_stop()` turns true (asked once per token), it returns at
        once and the unfinished requests get no call.

        Raises:
            UserError: nothing is installed.
            PeerError: the policy gives logits that are not finite.
        """


def refuse_request(request: SampleRequest, vocab_size: int, max_positions: int) -> RequestFailure | None:
    """Why this request can't be sampled, or None."""
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
