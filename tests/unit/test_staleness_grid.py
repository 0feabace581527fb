"""The staleness grid's table: which cells there are and in what order, what a rerun skips, what is averaged."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import staleness_grid as grid

from echo2.config.sections import LearnerConfig
from echo2.core.errors import UserError

Cell = grid.Cell


def record(*accuracies: float, diverged: str | None = None) -> dict[str, Any]:
    """Evaluations every 60 steps; the mismatch grows by 0.1 from one to the next."""
    numbers = dict.fromkeys(("k3", "ess", "dropped_positive", "dropped_negative", "vetoed", "lr"), 0.5)
    points: list[dict[str, float]] = [{"step": 0, "accuracy": accuracies[0]}]
    for number, accuracy in enumerate(accuracies[1:], start=1):
        points.append({"step": 60 * number, "accuracy": accuracy, "abs_log_ratio": 0.1 * number, **numbers})
    return {"steps": 120, "points": points, "diverged": diverged}


def test_every_cell_comes_once_and_the_important_ones_first() -> None:
    cells = grid.all_cells([0, 1, 2])
    assert len(cells) == len(set(cells)) == 3 * (3 * 7 + 5 * 3)
    assert [str(cell) for cell in cells[:6]] == ["dppo:0:0", "dppo:0:1", "dppo:0:2", "dppo:8:0", "dppo:8:1", "dppo:8:2"]
    first = cells[: 3 * len(grid.FIRST)]
    assert {(cell.loss, cell.staleness) for cell in first} == set(grid.FIRST)
    assert {cell.staleness for cell in cells if cell.loss == "gspo"} == {0, 8, 32}


@pytest.mark.parametrize(("lag", "steps"), [(0, 120), (8, 120), (16, 160), (32, 320)])
def test_a_cell_has_ten_steps_a_version_of_lag(lag: int, steps: int) -> None:
    assert Cell("dppo", lag, 0).steps(120) == steps


def test_written_cells_are_read_and_unfinished_files_skipped(tmp_path: Path) -> None:
    cell = Cell("dppo,tv_high=0.1", 8, 2)
    grid.write_cell(tmp_path, cell, 120, record(0.3, 0.6))
    (tmp_path / ".unfinished-1").write_text("{", encoding="utf-8")
    found = grid.read_cells(tmp_path)
    assert list(found) == [cell]
    assert found[cell]["points"] == record(0.3, 0.6)["points"]
    assert grid.parse_cell(str(cell)) == cell


def test_cells_of_other_settings_are_not_mixed(tmp_path: Path) -> None:
    grid.claim(tmp_path, {"groups": 64})
    grid.claim(tmp_path, {"groups": 64})
    with pytest.raises(UserError, match="another --out"):
        grid.claim(tmp_path, {"groups": 32})
    assert json.loads((tmp_path / "settings.json").read_text(encoding="utf-8")) == {"groups": 64}


@pytest.mark.parametrize("text", ["dppo", "dppo:8", "dppo:x:0", ":8:0", "dppo:8:0:1"])
def test_files_other_than_cells_are_refused(text: str) -> None:
    with pytest.raises(UserError, match="LOSS:LAG:SEED"):
        grid.parse_cell(text)


def test_accuracy_at_a_step() -> None:
    whole = record(0.3, 0.5, 0.7)
    assert [grid.accuracy_at(whole, step) for step in (0, 60, 100, 120)] == [0.3, 0.5, 0.5, 0.7]
    assert grid.accuracy_at(whole, 180) is None
    assert grid.accuracy_at(record(0.3, 0.1, diverged="step 70"), 120) == 0.1


def test_summary_is_over_seeds_and_the_mismatch_is_of_the_second_half() -> None:
    cells = {Cell("ppo", 0, 0): record(0.3, 0.5, 0.7), Cell("ppo", 0, 1): record(0.3, 0.6, 0.9)}
    (row,) = grid.summary(cells)
    assert (row["loss"], row["staleness"], row["steps"], row["seeds"]) == ("ppo", 0, 120, [0, 1])
    assert row["accuracy_60"]["mean"] == pytest.approx(0.55)
    assert row["accuracy_end"] == {"mean": pytest.approx(0.8), "min": 0.7, "max": 0.9}
    assert row["abs_log_ratio"] == pytest.approx(0.2)  # of the steps after 60
    assert row["diverged"] == 0


def test_a_cell_may_change_settings() -> None:
    changed = grid.with_changes(LearnerConfig(), "dppo,tv_high=0.1,lr=0.5,lr_schedule=linear")
    assert changed.lr_schedule == "linear"
    assert (changed.loss, changed.loss_params, changed.lr) == ("dppo", {"tv_high": 0.1}, 0.5)
