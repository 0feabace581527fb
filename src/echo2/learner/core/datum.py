"""What the learner trains on: a sequence of tokens, which of them are in the loss, and what the loss needs for each."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field

from echo2.transport.routes import Routes


@dataclass(frozen=True, slots=True)
class Datum:
    """One sequence of P prompt tokens and T tokens after them. Prompt tokens are read and never predicted.

    prompt_tokens       'i' [P], P >= 1. Neighbouring data with equal prompts share the prompt's computation
    tokens              'i' [T], T >= 1
    loss_mask           [T], 1 where the token is predicted and counts; at least one is
    weights             'd' [T], factor of each token's loss; None: 1. Gradients are sums of weighted token losses
    advantages          'd' [T], for policy gradients; None: 0
    behaviour_logprobs  'f' [T], of the sampler, at the temperature and the supports it drew from; None: 0
    reference_logprobs  'd' [T], of a reference policy, for losses with a penalty towards one; None: 0
    teacher_logprobs    'd' [T], of a teacher, at the temperature and the supports of the sampler; None: 0
    version_spans       (first token, policy version that sampled from there on), ascending; empty: not sampled by one
    version             the policy version that is trained; lags count from it
    source              the worker that sampled the sequence, for statistics
    support_*           as in `types.Rollout`: the tokens that each was drawn from, where sampling was narrowed
    top_*               a teacher's k most likely tokens at each loss token, row by row ('i'), and their logprobs ('f');
                        empty: not known
    targets             'i' [T], the token to predict in place of each token; None: the token itself
    routes              [P + T - 1, layers, chosen], the experts that the sampler's mixture chose; None: not known
    clip_low, clip_high 'd' [T], bounds of each token's ratio in a client's loss; None: the loss's bounds
    """

    prompt_tokens: array[int]
    tokens: array[int]
    loss_mask: bytes
    weights: array[float] | None = None
    advantages: array[float] | None = None
    behaviour_logprobs: array[float] | None = None
    reference_logprobs: array[float] | None = None
    teacher_logprobs: array[float] | None = None
    version_spans: tuple[tuple[int, int], ...] = ()
    version: int = 0
    source: str = ""
    support_tokens: array[int] | None = None
    support_offsets: array[int] | None = None
    top_tokens: array[int] = field(default_factory=lambda: array("i"))
    top_logprobs: array[float] = field(default_factory=lambda: array("f"))
    targets: array[int] | None = None
    clip_low: array[float] | None = None
    clip_high: array[float] | None = None
    routes: Routes | None = None

    @property
    def num_inputs(self) -> int:
        """Number of tokens after the prompt that are run: those before the last loss token."""
        return self.loss_mask.rindex(1)
