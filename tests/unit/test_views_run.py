"""One view of a run directory: read as it grows, whatever a kill, a copy or another start has left of it."""

from __future__ import annotations

import json
import os
import random
import socket
import time
from pathlib import Path
from typing import Any

import pytest

from echo2.config import Config
from echo2.config.rundir import RunDir, create, read_metrics, write_atomically
from echo2.core.errors import UserError
from echo2.views.run_view import Forecast, MetricsFile, RunView
from seeds import seeds


def row(step: int, **values: Any) -> dict[str, Any]:
    return {"step": step, "reward/mean": step / 10, **values}


def text(rows: list[dict[str, Any]]) -> str:
    return "".join(json.dumps(each) + "\n" for each in rows)


@pytest.mark.parametrize("seed", seeds(10, 40))
def test_a_file_read_as_it_grows_holds_what_it_holds_when_read_at_once(seed: int, tmp_path: Path) -> None:
    rng, path = random.Random(seed), tmp_path / "metrics.jsonl"
    rows: list[dict[str, Any]] = []
    found = MetricsFile()
    for _ in range(60):
        match rng.choice(["append", "append", "append", "amend", "fall back", "tear", "remove", "shrink in place"]):
            case "append":
                new = [row(len(rows) + number) for number in range(rng.randrange(1, 4))]
                rows += new
                with path.open("a") as file:
                    file.write(text(new))
            case "amend" if rows:
                rng.choice(rows)["eval/accuracy"] = rng.choice([0.25, 0.75])
                write_atomically(path, text(rows))
            case "fall back":
                rows = rows[: rng.randrange(len(rows) + 1)]
                write_atomically(path, text(rows))
            case "tear" if rows:
                whole = text(rows)
                path.write_text(whole[: rng.randrange(len(whole))])
                found = found.newer(path)
                assert list(found.rows) == read_metrics(path), f"seed {seed}"
                write_atomically(path, whole)
            case "remove" if rng.random() < 0.2:
                path.unlink(missing_ok=True)
                rows = []
            case "shrink in place":
                rows = rows[: rng.randrange(len(rows) + 1)]
                path.write_text(text(rows))
        found = found.newer(path)
        assert list(found.rows) == read_metrics(path), f"seed {seed}"


def test_no_more_is_read_than_the_size_that_was_found() -> None:
    """A display that reads a device without an end took all memory of the machine."""
    assert MetricsFile().newer(Path("/dev/full")).rows == ()


def test_no_row_is_parsed_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, rows = tmp_path / "metrics.jsonl", [row(step) for step in range(100)]
    path.write_text(text(rows))
    before = MetricsFile().newer(path)
    assert before.newer(path) is before
    with path.open("a") as file:
        file.write(text([row(100)]))
    after = before.newer(path)
    assert [new is old for new, old in zip(after.rows, before.rows, strict=False)] == [True] * 100
    rows[90]["eval/accuracy"] = 0.5
    write_atomically(path, text([*rows, row(100)]))
    amended = after.newer(path)
    assert [number for number, each in enumerate(before.rows[:91]) if amended.rows[number] is not each] == [90]
    assert amended.rows[90]["eval/accuracy"] == 0.5


@pytest.fixture
def rundir(tmp_path: Path) -> RunDir:
    return create(tmp_path / "run", Config(), resume=False)


def status(**values: Any) -> dict[str, Any]:
    head = {"pid": os.getpid(), "host": socket.gethostname()}
    told = {"time": time.time(), "head": head, "learner": None, "workers": [], "version": 3, "max_steps": 40}
    return told | {"waits": []} | values


def test_the_view_of_a_run_that_has_not_begun_says_so(tmp_path: Path, rundir: RunDir) -> None:
    for path in (tmp_path / "nowhere", rundir.path):
        view = RunView.read(path)
        assert (view.state, view.version, view.max_steps) == ("no head was started here yet", 0, None)
        assert (view.rows, view.steps, view.accuracies, view.waits) == ((), (), (), ())
        assert view.forecast() is None
        with pytest.raises(UserError):
            view.cost()


def test_the_page_updates_while_a_run_goes_on(rundir: RunDir) -> None:
    view = RunView.read(rundir.path)
    wait = {"waiter": "learner", "waits_for": "w-1", "since": 1.0, "until": 9.0, "reason": "step 3"}
    rundir.status.write_text(json.dumps(status(waits=[wait])))
    rundir.metrics.write_text(text([{"step": 0, "eval/accuracy": 0.25}, row(1), row(2), row(3)]))
    view = view.newer()
    assert (view.state, view.version, view.max_steps) == ("running", 3, 40)
    assert view.waits[0].reason == "step 3"
    assert view.accuracies == ((0, 0.25),)
    assert view.series("reward/mean") == ((1, 0.1), (2, 0.2), (3, 0.3))
    rundir.outcome.write_text('{"kind": "finished", "reason": "all steps are trained"}')
    rundir.summary.write_text('{"steps": 3}')
    view = view.newer()
    assert (view.state, view.summary) == ("finished: all steps are trained", {"steps": 3})


def test_a_damaged_status_is_reported_and_metrics_are_shown_nevertheless(rundir: RunDir) -> None:
    rundir.status.write_text("{")
    rundir.metrics.write_text(text([row(1)]))
    view = RunView.read(rundir.path)
    assert "status.json is damaged" in view.state
    assert view.version == 1


def test_a_run_on_another_machine_is_alive_while_its_head_writes(rundir: RunDir) -> None:
    head = {"pid": 1, "host": "elsewhere"}
    rundir.status.write_text(json.dumps(status(head=head)))
    assert RunView.read(rundir.path).state == "running"
    rundir.status.write_text(json.dumps(status(head=head, time=time.time() - 3600)))
    assert RunView.read(rundir.path).state == "no news from the head on elsewhere for 60 s"


def test_the_newest_steps_say_when_it_ends_and_for_how_much(rundir: RunDir) -> None:
    rows = [row(step, **{"cost/cum_usd": step / 100, "time/since_start": 2.0 * step}) for step in range(1, 11)]
    rundir.status.write_text(json.dumps(status(version=10)))
    rundir.metrics.write_text(text(rows))
    forecast = RunView.read(rundir.path).forecast()
    assert forecast == Forecast(usd=pytest.approx(0.4), seconds=pytest.approx(60.0))
