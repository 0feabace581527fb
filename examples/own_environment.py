"""Guess a digit: `+` means more, `-` means less. An environment and its tasks. Used by own_environment.toml."""

import random
from collections.abc import Mapping
from typing import Any


class Secrets:
    """The rows. All rollouts of a group start from the row's prompt; what they are to find is in its columns."""

    def __init__(self, size: int = 1000, seed: int = 0) -> None:
        self.size = size
        self.seed = seed

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"prompt": "?", "secret": random.Random(f"{self.seed} {index}").randrange(10)}


class Guess:
    """One rollout. The same columns, seed and actions must always get the same answers."""

    turn_tokens = 1  # a turn is one token

    def __init__(self, columns: Mapping[str, Any], seed: int) -> None:
        self.secret = columns["secret"]

    def step(self, action: str) -> tuple[str, float, bool]:
        """What the policy reads next, the reward of this turn, and whether the rollout is over."""
        if not action.isdecimal():
            return "?", -0.1, False
        guess = int(action)
        return "+" if guess < self.secret else "-", float(guess == self.secret), guess == self.secret
