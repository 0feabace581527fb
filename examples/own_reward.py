"""Rewards in TRL's style: lists in, a list of one number a rollout out. Used by trl_reward.toml.

They run in a process of their own beside the head: print, import and allocate as you like.
"""

from typing import Any


def sorted_prefix(completions: list[str], answer: list[str], **columns: Any) -> list[float]:
    """How much of the answer is right, counted from its start."""
    scores = []
    for completion, wanted in zip(completions, answer, strict=True):
        right = 0
        while right < min(len(completion), len(wanted)) and completion[right] == wanted[right]:
            right += 1
        scores.append(right / max(len(completion), len(wanted)))
    return scores


def right_length(completions: list[str], prompts: list[str], **columns: Any) -> list[float | None]:
    """Whether as many characters come out as digits went in. None: "does not apply here", and is left out."""
    return [
        float(len(completion) == len(prompt) - 1) if prompt.endswith("=") else None
        for completion, prompt in zip(completions, prompts, strict=True)
    ]
