"""What an earlier run measured, from its metrics: seconds of a step, of a broadcast, and how small its deltas are."""

from __future__ import annotations

import math
import statistics
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from echo2.control.capacity import INSTALLED_QUANTILE
from echo2.documents import parse_json
from echo2.errors import UserError


@dataclass(frozen=True, slots=True)
class PastRun:
    """`train_seconds`: median over steps. `broadcast_seconds`: at quantile 1 / 1.1 of the publications, or None.
    `delta_ratio`: bytes sent over bytes of the whole, median, or None.
    """

    num_steps: int
    train_seconds: float
    broadcast_seconds: float | None
    delta_ratio: float | None


def read_past_run(directory: Path) -> PastRun:
    """Read `metrics.jsonl` of a run directory; its first step, which warms up, does not count where there are more.

    Raises:
        UserError: there is no such file, or no trained step in it.
    """
    rows = read_rows(directory / "metrics.jsonl")
    steps = [row for row in rows if _number(row.get("time/train")) is not None]
    if not steps:
        raise UserError(f"{directory} has no trained step yet: {directory / 'metrics.jsonl'} has no time/train.")
    warm = steps[1:] or steps
    broadcasts = sorted(_numbers(warm, "broadcast/t_bcast"))
    ratios = _numbers(warm, "broadcast/delta_ratio")
    return PastRun(
        num_steps=len(steps),
        train_seconds=statistics.median(_numbers(warm, "time/train")),
        broadcast_seconds=broadcasts[math.ceil(len(broadcasts) * INSTALLED_QUANTILE) - 1] if broadcasts else None,
        delta_ratio=statistics.median(ratios) if ratios else None,
    )


def read_rows(path: Path) -> list[dict[str, Any]]:
    """The rows of a metrics file; a last line that is only half there is passed over.

    Raises:
        UserError: it can't be read, or another line is damaged.
    """
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise UserError(f"Cannot read {path}: {error.strerror}. --from names a run directory.") from error
    rows = []
    for number, line in enumerate(lines, 1):
        try:
            row = parse_json(line)
        except ValueError as error:
            if number == len(lines):
                break  # torn by a kill, or just being written
            raise UserError(f"{path}, line {number} is damaged: {error}.") from error
        if isinstance(row, dict):
            rows.append(row)
    return rows


def _numbers(rows: list[dict[str, Any]], key: str) -> list[float]:
    return [value for row in rows if (value := _number(row.get(key))) is not None]


def _number(value: Any) -> float | None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= sys.float_info.max
    return float(value) if is_number else None
