"""Collects the results of an evaluation until it is complete, and computes its metrics."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from echo2.types import RolloutGroup

#: Minimum reward of a rollout that counts as solved in pass@k.
SOLVED = 1.0
#: Prefix of the metrics that count failed tasks, before the reason.
FAILED_BECAUSE = "eval/num_failed/"


class Evals:
    """Scored eval groups by version, and the reasons for versions that were not evaluated. In memory only: a restarted
    head evaluates again. `set_of`: held-out position -> name of its set; "" if there is only one set.
    """

    def __init__(self, set_of: Callable[[int], str] = lambda position: "") -> None:
        self._set_of = set_of
        self._groups: dict[int, list[RolloutGroup]] = {}
        self.not_evaluated: dict[int, str] = {}

    def start(self, version: int) -> None:
        self._groups[version] = []

    def keep(self, group: RolloutGroup) -> None:
        """Keep a scored group if its version is being evaluated."""
        if group.step in self._groups:
            self._groups[group.step].append(group)

    def skip(self, version: int, reason: str) -> dict[str, Any]:
        """Drop an evaluation that is given up. Return its metrics, which have no accuracy."""
        self._groups.pop(version, None)
        self.not_evaluated[version] = reason
        return {"eval/version": version, "eval/num_tasks": 0}

    def finish(self, version: int, failed: Mapping[str, int]) -> dict[str, Any]:
        """Return the metrics of a finished evaluation. `failed`: by reason, how many tasks have no result."""
        found = eval_metrics(self._groups.pop(version, []), sum(failed.values()), self._set_of)
        by_reason = {f"{FAILED_BECAUSE}{reason}": count for reason, count in sorted(failed.items())}
        return {"eval/version": version, **found, **by_reason}


def eval_metrics(groups: Iterable[RolloutGroup], num_failed: int, set_of: Callable[[int], str]) -> dict[str, Any]:
    """Return the metrics of an evaluation. Accuracy is the mean over the tasks of the mean reward of their n rollouts
    (avg@n); with rewards of 0 or 1, the share solved. A failed task is counted, and has no reward: what failed is not
    the policy. With n above 1 also pass@k for powers of two up to n. With several held-out sets also the accuracy of
    each.
    """
    found = list(groups)
    means = [statistics.fmean(_rewards(group)) for group in found]
    lengths = [len(rollout.tokens) for group in found for rollout in group.rollouts]
    metrics: dict[str, Any] = {"eval/num_tasks": len(means), "eval/num_failed": num_failed}
    if not means:
        return metrics
    metrics |= {"eval/accuracy": statistics.fmean(means), "eval/mean_length": statistics.fmean(lengths)}
    num_samples = min(len(group.rollouts) for group in found)
    for k in (1 << power for power in range(1, num_samples.bit_length())):
        solved = (pass_at_k(len(group.rollouts), _num_solved(group), k) for group in found)
        metrics[f"eval/pass@{k}"] = statistics.fmean(solved)
    by_set: dict[str, list[float]] = {}
    for group, mean in zip(found, means, strict=True):
        by_set.setdefault(set_of(group.cursor), []).append(mean)
    by_set.pop("", None)
    return metrics | {f"eval/accuracy/{name}": statistics.fmean(values) for name, values in sorted(by_set.items())}


def pass_at_k(num_samples: int, num_solved: int, k: int) -> float:
    """Return an unbiased estimate of the probability that any of k samples is solved, from n samples of which c are
    solved: 1 - C(n - c, k) / C(n, k). 1 <= k <= n. (Chen et al. 2021, arXiv 2107.03374, equation 1.)
    """
    return 1.0 - math.comb(num_samples - num_solved, k) / math.comb(num_samples, k)


def _rewards(group: RolloutGroup) -> list[float]:
    return [rollout.reward for rollout in group.rollouts if rollout.reward is not None]


def _num_solved(group: RolloutGroup) -> int:
    return sum(reward >= SOLVED for reward in _rewards(group))
