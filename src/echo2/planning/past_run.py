"""Reads an earlier run's metrics: seconds per step, per broadcast and per rewarded group, and the size of deltas."""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from echo2.config.rundir import RunDir, read_metrics
from echo2.core.documents import is_number
from echo2.core.errors import UserError
from echo2.head.fleet.decide.formulas import INSTALLED_QUANTILE


@dataclass(frozen=True, slots=True)
class PastRun:
    """Measurements of an earlier run. `train_seconds`: median over steps. `broadcast_seconds`: quantile 1 / 1.1 over
    publications, or None. `delta_ratio`: bytes sent over bytes of the full snapshot, median, or None. `reward_seconds`:
    time of the reward functions per group, median, or None.
    """

    num_steps: int
    train_seconds: float
    broadcast_seconds: float | None
    delta_ratio: float | None
    reward_seconds: float | None = None


def read_past_run(directory: Path) -> PastRun:
    """Read `metrics.jsonl` of a run directory. The first step is a warm-up and is left out if there are more.

    Raises:
        UserError: the file is damaged, or has no trained step.
    """
    rows = read_metrics(RunDir(directory).metrics, refuses_damage=True)
    steps = [row for row in rows if _number(row.get("time/train")) is not None]
    if not steps:
        raise UserError(
            f"{directory} has no trained step yet: no row of {directory / 'metrics.jsonl'} has time/train. Name the "
            "directory of a run that has trained."
        )
    warm = steps[1:] or steps
    broadcasts = sorted(_numbers(warm, "broadcast/t_bcast"))
    ratios, rewards = _numbers(warm, "broadcast/delta_ratio"), _numbers(warm, "time/reward")
    return PastRun(
        num_steps=len(steps),
        train_seconds=statistics.median(_numbers(warm, "time/train")),
        broadcast_seconds=broadcasts[math.ceil(len(broadcasts) * INSTALLED_QUANTILE) - 1] if broadcasts else None,
        delta_ratio=statistics.median(ratios) if ratios else None,
        reward_seconds=statistics.median(rewards) if rewards else None,
    )


def _numbers(rows: list[dict[str, Any]], key: str) -> list[float]:
    return [value for row in rows if (value := _number(row.get(key))) is not None]


def _number(value: Any) -> float | None:
    return float(value) if is_number(value) else None
