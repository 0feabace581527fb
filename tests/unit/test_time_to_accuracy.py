"""The benchmark's arithmetic: where a curve crosses the threshold, and what is divided by what."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import time_to_accuracy as bench

from echo2.core.errors import UserError


@pytest.mark.parametrize(
    ("points", "seconds"),
    [
        ([(0.0, 0.3), (10.0, 0.5), (20.0, 0.9)], 15.0),
        ([(0.0, 0.3), (10.0, 0.7)], 10.0),  # exactly at a point
        ([(0.0, 0.3), (4.0, 0.8), (8.0, 0.6), (12.0, 0.9)], 3.2),  # the first time counts
        ([(0.0, 0.8), (4.0, 0.9)], 0.0),
        ([(0.0, 0.3), (10.0, 0.69)], None),
        ([], None),
    ],
)
def test_crossing_a_slow_uplink(points: list[tuple[float, float]], seconds: float | None) -> None:
    found = bench.crossing(points, 0.7)
    assert found == (None if seconds is None else pytest.approx(seconds))


def test_baseline_is_the_better_trl() -> None:
    result = bench.compare({"echo2": {0: 10.0, 1: 20.0}, "trl-1": {0: 50.0, 1: 60.0}, "trl-2": {0: 30.0, 1: 50.0}})
    assert result["baseline"] == "trl-2"
    assert result["ratio_by_seed"] == {0: 3.0, 1: 2.5}
    assert result["ratio_median"] == 2.75
    assert (result["ratio_min"], result["ratio_max"]) == (2.5, 3.0)


def test_a_missed_threshold_is_reported_without_a_ratio() -> None:
    result = bench.compare({"echo2": {0: 10.0, 1: None}, "trl-1": {0: None, 1: None}, "trl-2": {0: 30.0, 1: 50.0}})
    assert result["ratio_by_seed"] == {0: 3.0}
    assert result["missed_threshold"] == ["echo2 seed 1", "trl-1 seed 0", "trl-1 seed 1"]


def test_clock_starts_at_the_first_training_lease(tmp_path: Path) -> None:
    def grant(now: float, kind: str) -> dict[str, object]:
        return {"now": now, "event": {}, "commands": [{"type": "GrantLeases", "leases": [{"group": {"kind": kind}}]}]}

    log = tmp_path / "events.jsonl"
    records = [{"options": {}}, {"now": 1.0, "event": {}, "commands": []}, grant(2.0, "eval"), grant(3.5, "train")]
    log.write_text("".join(json.dumps(record) + "\n" for record in records))
    assert bench.first_lease(log) == 3.5
    log.write_text(json.dumps(records[0]) + "\n")
    with pytest.raises(UserError, match="did not start"):
        bench.first_lease(log)
