"""`publish_every = "auto"`: what it becomes, from which times, and that it is settled before anything starts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from echo2.config import Config, build, load
from echo2.config.rundir import create
from echo2.config.sections import ScheduleConfig
from echo2.core.errors import InvariantError, UserError
from echo2.head.fleet.decide.formulas import staleness_bound
from echo2.launch.start import settle


def auto(max_staleness: int, **others: Any) -> Config:
    return build({"schedule": {"publish_every": "auto", "max_staleness": max_staleness, **others}}, "my.toml")


def measured(path: Path, train_seconds: float, broadcast_seconds: float | None) -> Path:
    path.mkdir(exist_ok=True)
    row = {"time/train": train_seconds, "broadcast/t_bcast": broadcast_seconds}
    (path / "metrics.jsonl").write_text("".join(json.dumps({"step": at, **row}) + "\n" for at in range(1, 5)))
    return path


def number(config: Config) -> int:
    return config.schedule.kappa


@pytest.mark.parametrize(
    ("max_staleness", "train", "broadcast", "expected"),
    [
        (0, 10.0, 500.0, 1),  # on-policy allows no other
        (1, 10.0, 8.0, 1),
        (2, 10.0, 8.0, 1),
        (3, 1631.2, 1437.0, 2),  # the paper's S - 1
        (4, 1649.3, 1437.0, 3),
        (6, 10.0, 8.0, 5),
        (11, 10.0, 8.0, 10),
        (6, 10.0, 19.0, 4),  # 4 + ceil(3/4 x 1.9); 5 would be 5 + 2
    ],
)
def test_the_times_of_another_run_decide(
    tmp_path: Path, max_staleness: int, train: float, broadcast: float, expected: int
) -> None:
    settled = settle(auto(max_staleness), tmp_path / "run", False, measured(tmp_path / "past", train, broadcast))
    assert number(settled.config) == expected
    if max_staleness:
        assert staleness_bound(expected, train, broadcast) <= max_staleness
        assert all(
            staleness_bound(larger, train, broadcast) > max_staleness
            for larger in range(expected + 1, max_staleness + 2)
            if larger * train > broadcast
        )
    assert settled.reason


def test_a_number_is_left_alone(tmp_path: Path) -> None:
    config = build({"schedule": {"publish_every": 2, "max_staleness": 3}}, "my.toml")
    settled = settle(config, tmp_path, False, measured(tmp_path / "past", 1.0, 0.1))
    assert settled.config is config
    assert settled.reason == ""


def test_before_anything_is_measured_it_is_1(tmp_path: Path) -> None:
    settled = settle(auto(6), tmp_path / "run", False, None)
    assert number(settled.config) == 1
    assert "nothing is measured yet" in settled.reason


def test_a_run_that_is_resumed_goes_by_its_own_times(tmp_path: Path) -> None:
    first = settle(auto(6), tmp_path / "run", False, None).config
    rundir = create(tmp_path / "run", first, resume=False)
    assert load(rundir.config).schedule.publish_every == 1  # what head and learner read
    again = settle(auto(6), rundir.path, True, None)
    assert number(again.config) == 1
    assert again.reason.startswith("as before: nothing is measured yet")
    measured(rundir.path, 10.0, 8.0)
    later = settle(auto(6), rundir.path, True, None)
    assert number(later.config) == 5
    assert "this run has T_train 10 s, T_bcast 8 s" in later.reason


def test_where_no_number_keeps_the_bound_a_resumed_run_keeps_its_own_and_says_so(tmp_path: Path) -> None:
    rundir = create(tmp_path / "run", settle(auto(1), tmp_path / "run", False, None).config, resume=False)
    measured(rundir.path, 10.0, 25.0)
    settled = settle(auto(1), rundir.path, True, None)
    assert number(settled.config) == 1
    assert settled.reason.startswith("as before. max_staleness = 1 is below what this broadcast allows")
    with pytest.raises(UserError, match=r"need max_staleness >= 5 \(publish_every = 3\)"):
        settle(auto(1), rundir.path, False, rundir.path)


def test_damaged_or_missing_measurements_are_refused_not_passed_over(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="measured no broadcast yet"):
        settle(auto(3), tmp_path / "run", False, measured(tmp_path / "past", 1.0, None))
    with pytest.raises(UserError, match="has no trained step yet"):
        settle(auto(3), tmp_path / "run", False, tmp_path)
    rundir = create(tmp_path / "run", settle(auto(3), tmp_path / "run", False, None).config, resume=False)
    rundir.metrics.write_text('{"step": 1}\nnot json\n{"step": 2}\n')
    with pytest.raises(UserError, match="line 2 is damaged"):
        settle(auto(3), rundir.path, True, None)


def test_a_deterministic_run_needs_a_number() -> None:
    raw = {"run": {"deterministic": True}, "schedule": {"publish_every": "auto", "max_staleness": 2}}
    with pytest.raises(UserError, match=r"run\.deterministic = true cannot be combined with schedule\.publish_every"):
        build(raw, "my.toml")
    build({**raw, "schedule": {"publish_every": "auto", "max_staleness": 0}}, "my.toml")  # 1, whatever is measured


def test_nobody_trains_by_a_number_that_was_never_settled() -> None:
    with pytest.raises(InvariantError, match="was not settled"):
        assert ScheduleConfig(publish_every="auto").kappa
