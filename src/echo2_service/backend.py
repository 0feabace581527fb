"""The interface between a service's front and the back end that carries out the work: calls and their answers, which
also pass between processes (`calling.py`). No torch here.

The front numbers the operations of a model 1, 2, 3, ... and calls them in that order; it may call the next operation
before the previous one is answered. An operation is carried out once, even if processes die: a repeated call with the
same number returns the answer of the first one. An answer that was returned survives the death of every process.

Calls raise:
    UserError: the tenant's mistake: unknown names or shapes, or values that the model or the loss does not accept.
    InvariantError: the operation repeatedly killed the process that carried it out.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol, TypeAlias

import msgspec

if TYPE_CHECKING:
    Ints: TypeAlias = array[int]
    Floats: TypeAlias = array[float]
else:
    Ints = Floats = array  # array takes no parameter at run time, when annotations are evaluated


@dataclass(frozen=True, slots=True)
class BaseInfo:
    """A base model: its name for clients, its directory (with its tokenizer) and its context length in tokens."""

    name: str
    directory: str
    max_tokens: int


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """An adapter to train. `owner`: the tenant whose share of the learner it uses. `alpha`: 0 means twice the rank.
    `targets`: suffixes of the names of linear layers; ("all-linear",): all except the output head.
    """

    base: str
    owner: str = ""
    rank: int = 32
    alpha: int = 32
    seed: int = 0
    targets: tuple[str, ...] = ("all-linear",)


@dataclass(frozen=True, slots=True)
class ClientDatum:
    """N input tokens, and after each of them K >= 1 target tokens, whose logprobs enter the loss.

    tokens      'i' [N]
    targets     'i' [N * K], row by row; a target may be any token, not only the next one
    weights     'd' [N * K], factors of the losses; None: 1
    advantages  'd' [N * K]; None: 0
    logprobs    'f' [N * K], of the sampler; None: 0
    clip_low    'd' [N * K], in place of the loss's `clip_low_threshold`, and clip_high likewise; None: the loss's

    A target 0 with logprob 0 and advantage 0 is padding in the losses that have advantages: its weight is 0.
    """

    tokens: Ints
    targets: Ints
    weights: Floats | None = None
    advantages: Floats | None = None
    logprobs: Floats | None = None
    clip_low: Floats | None = None
    clip_high: Floats | None = None


@dataclass(frozen=True, slots=True)
class TrainWork:
    """A parsed `forward_backward`: its settings, and its data or, in `error`, what is wrong with the data.

    widths       targets a token of each datum; 0 where they have one dimension
    num_counted  those of the `num_tokens` that count in the loss
    digest       identifies a repeated request
    request      the request whose file has the data, so that `data` is empty; empty: none
    """

    model: str
    seq: int | None
    data: list[ClientDatum]
    widths: list[int]
    loss: str
    params: dict[str, float]
    forward_only: bool
    error: str = ""
    num_tokens: int = 0
    num_counted: int = 0
    digest: str = ""
    request: str = ""


@dataclass(frozen=True, slots=True)
class TrainOutput:
    """`logprobs[i]` is 'f' [N * K] of datum i; `metrics` has `loss:sum`."""

    logprobs: list[Floats]
    metrics: dict[str, float]


@dataclass(frozen=True, slots=True)
class AdamSettings:
    """AdamW. `grad_clip`: maximum norm of the gradient; 0: no clipping."""

    lr: float
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-12
    weight_decay: float = 0.0
    grad_clip: float = 0.0


@dataclass(frozen=True, slots=True)
class SampleSpec:
    """`num_samples` samples from a prompt of P tokens. `owner`: the tenant whose share of the sampler they use.

    stop_tokens, stop_strings  what ends a sample besides `max_tokens`; the sample includes the stop token or the tokens
                               of the stop string. `ends_with_model`: the model's own end tokens end it, too
    temperature                0: greedy. Logprobs are of the distribution at this temperature; at 0, of that at 1
    prompt_logprobs            whether to return the prompt's logprobs
    top_prompt_logprobs        number of most likely tokens to return at each position of the prompt
    top_sample_logprobs        likewise for the samples, at their temperature and before top-p and top-k are applied
    target_places              'i' [M], ascending positions in the prompt, from 1 on
    target_tokens              'i' [M], tokens whose logprobs to return at these positions
    num_alternatives           number of tokens to draw, at `temperature`, at each position of the prompt but the first
    """

    prompt: Ints
    num_samples: int = 1
    max_tokens: int = 256
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0
    stop_tokens: tuple[int, ...] = ()
    stop_strings: tuple[str, ...] = ()
    ends_with_model: bool = True
    prompt_logprobs: bool = False
    top_prompt_logprobs: int = 0
    top_sample_logprobs: int = 0
    target_places: Ints = field(default_factory=lambda: array("i"))
    target_tokens: Ints = field(default_factory=lambda: array("i"))
    num_alternatives: int = 0
    owner: str = ""

    @property
    def wants_scores(self) -> bool:
        """Whether any scores at positions of the prompt are requested."""
        most = max(self.top_prompt_logprobs, len(self.target_places), self.num_alternatives)
        return self.prompt_logprobs or most > 0


@dataclass(frozen=True, slots=True)
class SampledSequence:
    """T sampled tokens 'i' and their logprobs 'f'; the k most likely tokens at each position, 'i' and 'f' [T * k]."""

    tokens: Ints
    logprobs: Floats
    finish: Literal["stop", "length"]
    top_tokens: Ints = field(default_factory=lambda: array("i"))
    top_logprobs: Floats = field(default_factory=lambda: array("f"))


@dataclass(frozen=True, slots=True)
class SampleOutput:
    """`prompt_logprobs` 'f' [P], NaN first; `top_prompt_tokens` 'i' and `top_prompt_logprobs` 'f' [P, k] row by row,
    the first row -1 and NaN; `target_logprobs` 'f' [M]; `alternative_tokens` 'i' and `alternative_logprobs` 'f', at
    temperature 1, [P - 1, D]. Arrays that were not requested are empty.
    """

    sequences: list[SampledSequence]
    prompt_logprobs: Floats = field(default_factory=lambda: array("f"))
    top_prompt_tokens: Ints = field(default_factory=lambda: array("i"))
    top_prompt_logprobs: Floats = field(default_factory=lambda: array("f"))
    target_logprobs: Floats = field(default_factory=lambda: array("f"))
    alternative_tokens: Ints = field(default_factory=lambda: array("i"))
    alternative_logprobs: Floats = field(default_factory=lambda: array("f"))


class CreateModelCall(msgspec.Struct, frozen=True, tag=True):
    """Create an adapter with this id (letters, digits and ":._-"). An identical call has no further effect."""

    model: str
    spec: ModelSpec


class ForwardBackwardCall(msgspec.Struct, frozen=True, tag=True):
    """Add up the gradients of the *sum* of the data's token losses, never a mean (`learner/losses.py`). `file`: has the
    data (`calling.with_data`); it stays until the call is answered.
    """

    model: str
    operation: int
    data: list[ClientDatum]
    loss: str
    params: dict[str, float]
    forward_only: bool = False
    file: str = ""


class OptimStepCall(msgspec.Struct, frozen=True, tag=True):
    """Apply one AdamW step to the gradients added since the last step, and clear them. Metrics: `grad_norm`. A gradient
    that is not finite is a fault, and leaves the weights unchanged."""

    model: str
    operation: int
    adam: AdamSettings


class SaveStateCall(msgspec.Struct, frozen=True, tag=True):
    """Write weights and optimizer to `directory`, whole or not at all."""

    model: str
    operation: int
    directory: str


class LoadStateCall(msgspec.Struct, frozen=True, tag=True):
    """Load weights, and optionally the optimizer, that `SaveStateCall` wrote for an adapter of equal rank and targets;
    or only weights that `PublishCall` wrote. Gradients are cleared."""

    model: str
    operation: int
    directory: str
    with_optimizer: bool


class PublishCall(msgspec.Struct, frozen=True, tag=True):
    """Write the current weights to `directory` as a PEFT adapter for samplers. The adapter never changes."""

    model: str
    operation: int
    directory: str


class UnloadCall(msgspec.Struct, frozen=True, tag=True):
    """Unload the model from memory; its next operation loads it again."""

    model: str


class DeleteCall(msgspec.Struct, frozen=True, tag=True):
    """Delete the model permanently. Directories to which it was saved or published stay."""

    model: str


class SampleCall(msgspec.Struct, frozen=True, tag=True):
    """Sample, see `Backend.sample`; `snapshot`: "" for the base model alone."""

    base: str
    snapshot: str
    spec: SampleSpec


class ReadCall(msgspec.Struct, frozen=True, tag=True):
    """Read training data in the file BODY, and write them to the file WORK (`calling.write_work`)."""

    body: str
    work: str
    is_protobuf: bool
    forward_only: bool


class TextCall(msgspec.Struct, frozen=True, tag=True):
    """Decode tokens with the tokenizer of the base model in `directory`; "" if it has none that can be read."""

    directory: str
    rows: list[Ints]


class PromptCall(msgspec.Struct, frozen=True, tag=True):
    """Write a prompt with the tokenizer of the base model in `directory`: of chat messages and tools, in OpenAI's form
    as JSON, or of a plain text.
    """

    directory: str
    messages: bytes = b""
    tools: bytes = b""
    text: str = ""


class ReplyCall(msgspec.Struct, frozen=True, tag=True):
    """Decode the answers to a chat, without special tokens, with the tokenizer of the base model in `directory`."""

    directory: str
    rows: list[Ints]


class CancelCall(msgspec.Struct, frozen=True, tag=True):
    """The caller no longer waits for the answer to call `number`."""

    number: int


Operation: TypeAlias = ForwardBackwardCall | OptimStepCall | SaveStateCall | LoadStateCall | PublishCall
ModelCall: TypeAlias = CreateModelCall | Operation | UnloadCall | DeleteCall
Call: TypeAlias = ModelCall | SampleCall | ReadCall | TextCall | PromptCall | ReplyCall | CancelCall


class Request(msgspec.Struct, frozen=True):
    """A call, numbered by the caller."""

    number: int
    call: Call


class Answer(msgspec.Struct, frozen=True):
    """The outcome of a call; fields of other kinds of calls are None. `has_begun`: no outcome yet, but the call is in
    progress. `fault`: an error message; `is_ours`: the fault is echo2's, not the tenant's.
    """

    number: int = 0
    has_begun: bool = False
    fault: str = ""
    is_ours: bool = False
    trained: TrainOutput | None = None
    metrics: dict[str, float] | None = None
    sampled: SampleOutput | None = None
    work: TrainWork | None = None
    texts: list[str] | None = None
    prompt: Ints | None = None


class JournalRecord(msgspec.Struct, frozen=True):
    """An operation that was carried out. `call`: the call to repeat to restore the model's state; None if there is
    nothing to repeat. `is_checkpoint`: no operation, but a mark that a checkpoint covers all up to `operation`.
    """

    operation: int
    call: ForwardBackwardCall | OptimStepCall | None
    answer: Answer
    is_checkpoint: bool = False


class Backend(Protocol):
    """Carries out calls on models, and samples. For one event loop."""

    @property
    def bases(self) -> Mapping[str, BaseInfo]:
        """The base models by name."""

    async def call(self, call: ModelCall) -> Answer:
        """Carry out a call, and return its answer."""

    def num_bytes(self, model: str) -> int:
        """Return the size of the model on the disk, without what was saved or published. May be called in a thread."""

    async def sample(self, base: str, snapshot: Path | None, spec: SampleSpec) -> SampleOutput:
        """Sample from what `PublishCall` wrote to `snapshot`, or from the base model alone. The same seed gives the
        same samples."""

    async def close(self) -> None:
        """End the processes."""
