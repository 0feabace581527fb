"""What carries out a service's work, as its front sees it. No torch here.

The front numbers the operations of a model 1, 2, 3, ... and calls them in that order; it need not await one before it
calls the next. An operation is carried out once, whatever dies: called again under its number it is answered with what
came of it. An answer that was given survives the death of every process.

All methods raise:
    UserError: the tenant's mistake: unknown names, shapes, values that the model or the loss does not take.
    InvariantError: the operation ended the process that carried it out, again and again.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol, TypeAlias

if TYPE_CHECKING:
    Ints: TypeAlias = array[int]
    Floats: TypeAlias = array[float]
else:
    Ints = Floats = array  # when it runs it takes no parameter, and these classes are read when they run


@dataclass(frozen=True, slots=True)
class BaseInfo:
    """A base model: the name that clients know it by, its directory (with its tokenizer) and its context in tokens."""

    name: str
    directory: str
    max_tokens: int


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """An adapter that is to be trained. `owner`: whose share of the learner it uses. `alpha` 0: twice the rank.
    `targets`: ends of the names of linear layers; ("all-linear",): all but the head.
    """

    base: str
    owner: str = ""
    rank: int = 32
    alpha: int = 32
    seed: int = 0
    targets: tuple[str, ...] = ("all-linear",)


@dataclass(frozen=True, slots=True)
class ClientDatum:
    """N tokens that are read, and after each of them K >= 1 tokens whose logprobs count.

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
class TrainOutput:
    """`logprobs[i]` is 'f' [N * K] of datum i; `metrics` has `loss:sum`."""

    logprobs: list[Floats]
    metrics: dict[str, float]


@dataclass(frozen=True, slots=True)
class AdamSettings:
    """AdamW. `grad_clip`: largest norm of the gradient; 0: it is not clipped."""

    lr: float
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-12
    weight_decay: float = 0.0
    grad_clip: float = 0.0


@dataclass(frozen=True, slots=True)
class SampleSpec:
    """What to sample from a prompt of P tokens, `num_samples` times. `owner`: whose share of the sampler it uses.

    stop_tokens, stop_strings  what ends a sample beside `max_tokens`; a stop token is its last token, and a stop string
                               is in its last tokens. `ends_with_model`: the model's own end tokens end it, too
    temperature                0: the most likely token. Logprobs are of the tempered distribution; at 0 of the plain
    prompt_logprobs            whether the prompt's logprobs are wanted
    top_prompt_logprobs        how many of the most likely tokens at each place of the prompt
    top_sample_logprobs        likewise of the samples, at their temperature and before top-p and top-k narrow it
    target_places              'i' [M], ascending places of the prompt from 1 on
    target_tokens              'i' [M], tokens whose logprobs are wanted at these places
    num_alternatives           how many tokens to draw at each place of the prompt but the first, at `temperature`
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
        """Whether anything of the prompt's own places is wanted."""
        most = max(self.top_prompt_logprobs, len(self.target_places), self.num_alternatives)
        return self.prompt_logprobs or most > 0


@dataclass(frozen=True, slots=True)
class SampledSequence:
    """T sampled tokens 'i' and their logprobs 'f'; of the k most likely ones the ids 'i' and logprobs 'f' [T * k]."""

    tokens: Ints
    logprobs: Floats
    finish: Literal["stop", "length"]
    top_tokens: Ints = field(default_factory=lambda: array("i"))
    top_logprobs: Floats = field(default_factory=lambda: array("f"))


@dataclass(frozen=True, slots=True)
class SampleOutput:
    """`prompt_logprobs` 'f' [P], NaN first; `top_prompt_tokens` 'i' and `top_prompt_logprobs` 'f' [P, k] row by row,
    the first row -1 and NaN; `target_logprobs` 'f' [M]; `alternative_tokens` 'i' and `alternative_logprobs` 'f', at
    temperature 1, [P - 1, D]. Empty where they were not wanted.
    """

    sequences: list[SampledSequence]
    prompt_logprobs: Floats = field(default_factory=lambda: array("f"))
    top_prompt_tokens: Ints = field(default_factory=lambda: array("i"))
    top_prompt_logprobs: Floats = field(default_factory=lambda: array("f"))
    target_logprobs: Floats = field(default_factory=lambda: array("f"))
    alternative_tokens: Ints = field(default_factory=lambda: array("i"))
    alternative_logprobs: Floats = field(default_factory=lambda: array("f"))


class Backend(Protocol):
    """Carries out operations on models, and samples. For one event loop."""

    @property
    def bases(self) -> Mapping[str, BaseInfo]:
        """The base models by name."""

    async def create_model(self, model: str, spec: ModelSpec) -> None:
        """A new adapter under this id (letters, digits and ":._-"); the same again is no mistake."""

    async def forward_backward(
        self,
        model: str,
        operation: int,
        data: Sequence[ClientDatum],
        loss: str,
        params: Mapping[str, float],
        forward_only: bool = False,
    ) -> TrainOutput:
        """Add up the gradients of the *sum* of the data's token losses, never a mean (`learner/client_losses.py`)."""

    async def optim_step(self, model: str, operation: int, adam: AdamSettings) -> dict[str, float]:
        """One AdamW step on the gradients added since the last, which are forgotten. Metrics: `grad_norm`. A gradient
        that is not finite is a UserError and leaves the weights as they were."""

    async def save_state(self, model: str, operation: int, directory: Path) -> None:
        """Write weights and optimizer to `directory`, whole or not at all."""

    async def load_state(self, model: str, operation: int, directory: Path, with_optimizer: bool) -> None:
        """Weights, and if wanted the optimizer, of what `save_state` wrote for an adapter of equal rank and targets;
        of what `publish` wrote, the weights. Gradients are forgotten."""

    async def publish(self, model: str, operation: int, directory: Path) -> None:
        """Write the weights as they are now to `directory`, as a PEFT adapter, for samplers. It never changes."""

    async def unload(self, model: str) -> None:
        """Let the model leave memory; its next operation brings it back."""

    async def delete(self, model: str) -> None:
        """Forget the model for ever. What was saved or published elsewhere stays."""

    async def sample(self, base: str, snapshot: Path | None, spec: SampleSpec) -> SampleOutput:
        """Sample from what `publish` wrote to `snapshot`, or from the base model alone. The same seed gives the same
        samples."""

    async def close(self) -> None:
        """End the processes."""
