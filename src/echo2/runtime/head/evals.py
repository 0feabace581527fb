"""Results of evaluations under way, until they are all in."""

from __future__ import annotations

import statistics
from typing import Any

from echo2.types import RolloutGroup


class Evals:
    """Scored eval groups by version, and why versions were not evaluated. In memory only: a restarted head evaluates
    again.
    """

    def __init__(self) -> None:
        self._groups: dict[int, list[RolloutGroup]] = {}
        self.not_evaluated: dict[int, str] = {}

    def start(self, version: int) -> None:
        self._groups[version] = []

    def keep(self, group: RolloutGroup) -> None:
        """A scored result, while its version is evaluated."""
        if group.step in self._groups:
            self._groups[group.step].append(group)

    def skip(self, version: int, reason: str) -> dict[str, Any]:
        """The metrics of an evaluation that is given up: no accuracy. What came for it so far counts no more."""
        self._groups.pop(version, None)
        self.not_evaluated[version] = reason
        return {"eval/version": version, "eval/num_tasks": 0}

    def finish(self, version: int, num_failed: int) -> dict[str, Any]:
        """The metrics of a finished evaluation. Accuracy is the mean reward: the share solved, if each is 0 or 1."""
        groups = self._groups.pop(version, [])
        rewards = [r.reward for group in groups for r in group.rollouts if r.reward is not None]
        lengths = [len(r.tokens) for group in groups for r in group.rollouts]
        return {
            "eval/version": version,
            "eval/accuracy": sum(rewards) / max(1, len(rewards) + num_failed),
            "eval/num_tasks": len(rewards),
            "eval/num_failed": num_failed,
            "eval/mean_length": statistics.fmean(lengths) if lengths else 0.0,
        }
