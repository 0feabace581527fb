"""Whether a group can be trained on at all: what the head checked when it came, checked again where it would cost most.

A group that is fed is in the ledger, and is fed again whenever the learner comes back. One that kills the learner would
end the run that way; so what the model and the configuration do not make possible is left out of the sums, named.
"""

from __future__ import annotations

import numpy as np

from echo2.types import RolloutGroup


def why_unfit(group: RolloutGroup, vocab_size: int, max_positions: int | None, max_tokens: int) -> str:
    """What is impossible about the group, for people; empty: nothing."""
    prompt, longest = len(group.prompt_tokens), max(len(rollout.tokens) for rollout in group.rollouts)
    if not prompt:
        return "its prompt is empty: nothing predicts its first token"
    if longest > max_tokens:
        return f"a rollout of {longest} tokens, where sampling.max_tokens is {max_tokens}"
    if max_positions is not None and prompt + longest > max_positions:
        return f"{prompt} + {longest} tokens, where the model has {max_positions} positions"
    for rollout in group.rollouts:
        for tokens in (group.prompt_tokens, rollout.tokens, rollout.support_tokens):
            if tokens and not 0 <= min(tokens) <= max(tokens) < vocab_size:
                return f"a token outside the vocabulary of {vocab_size}"
        if rollout.support_offsets is not None:
            widest = int(np.diff(np.frombuffer(rollout.support_offsets, dtype=np.int32)).max())
            if widest > vocab_size:
                return f"a token drawn from {widest} candidates, of a vocabulary of {vocab_size}"
    return ""
