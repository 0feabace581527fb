"""The environment of the head that the fuzzer attacks: it asks again until the answer has a 3."""

from collections.abc import Mapping
from typing import Any


class Three:
    turn_tokens = 2

    def __init__(self, columns: Mapping[str, Any], seed: int) -> None:
        pass

    def step(self, action: str) -> tuple[str, float, bool]:
        """(the next words, the reward of this turn, whether the rollout is over)"""
        return "=", 0.5, "3" in action
