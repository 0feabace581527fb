"""Runs whose learner and worker take turns on one card, here forced on a CPU: real processes, with and without, and one
of them killed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from echo2.config.rundir import RunDir, create, read_metrics
from echo2.launch.start import resolve
from echo2.launch.supervisor import Supervisor
from real_runs import CONFIG, SMALL

pytestmark = pytest.mark.timeout(600)


def supervised(out: Path, model: Path, takes_turns: bool, **changes: str) -> tuple[RunDir, Supervisor]:
    file = out.with_suffix(".toml")
    file.write_text(CONFIG.format(model=model), encoding="utf-8")
    settings = SMALL | {"run.max_steps": "4", **{key.replace("__", "."): value for key, value in changes.items()}}
    config, where = resolve(file, settings, out)
    rundir = create(where, config, resume=False)
    return rundir, Supervisor(rundir, 1, [], takes_turns=takes_turns)


def weights(rundir: RunDir, step: int) -> bytes:
    return (rundir.checkpoints / f"step_{step}" / "model.safetensors").read_bytes()


@pytest.mark.slow
@pytest.mark.parametrize("staleness", ["0", "1"])
def test_a_run_that_takes_turns_trains_the_same_policy(tmp_path: Path, sort_model: Path, staleness: str) -> None:
    changes = {"schedule__max_staleness": staleness, "run__deterministic": "true"}
    found = []
    for takes_turns in (True, False):
        rundir, supervisor = supervised(tmp_path / f"turns-{takes_turns}", sort_model, takes_turns, **changes)
        assert supervisor.run(lambda: None)["kind"] == "finished"
        found.append(rundir)
    with_turns, without = found
    assert weights(with_turns, 4) == weights(without, 4)
    rows = [row for row in read_metrics(with_turns.metrics) if "time/train" in row]
    turns = [row for row in rows if row.get("time/card_move", 0.0) > 0.0 and row["time/card_wait"] >= 0.0]
    assert len(rows) == 4
    assert len(turns) >= (4 if staleness == "0" else 2)  # ahead, a worker may sample for two steps in one turn
    assert not any("time/card_move" in row for row in read_metrics(without.metrics))


def test_the_death_of_a_process_on_the_card_does_not_stop_the_other(tmp_path: Path, sort_model: Path) -> None:
    steps = 16  # the status may show every third version only, on a machine that is busy
    rundir, supervisor = supervised(tmp_path / "run", sort_model, True, run__max_steps=str(steps))
    killed: dict[str, int] = {}

    def kill() -> None:
        status: Any = json.loads(rundir.status.read_text()) if rundir.status.is_file() else {}
        children = [child for child in supervisor.others if child.name not in killed and child.process is not None]
        if children and status.get("version", 0) > max(killed.values(), default=0):
            killed[children[0].name] = status["version"]  # the learner, and when it has trained again the worker
            children[0].process.kill()

    assert supervisor.run(kill)["kind"] == "finished"
    assert list(killed) == ["learner", "worker-0"]
    assert len(weights(rundir, steps)) > 0
    assert any(row.get("time/card_move", 0.0) > 0.0 for row in read_metrics(rundir.metrics))
    log = (rundir.logs / "worker-0.log").read_text(encoding="utf-8")
    assert "the learner gets the card" in log
    assert "the worker has the card" in log
