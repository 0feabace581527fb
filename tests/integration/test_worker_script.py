"""`launch/worker.sh`, which containers and rented machines start, beside a real run."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from real_runs import REPOSITORY, Run, is_running, run_without_workers

SCRIPT = REPOSITORY / "launch" / "worker.sh"


def start(directory: Path, **variables: str) -> subprocess.Popen[str]:
    """The script as a machine's only process, with `echo2` on its path."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    kept = {name: os.environ[name] for name in ("PYTHONPATH", "HOME") if name in os.environ}
    environment = {**kept, "PATH": path, "OMP_NUM_THREADS": "1", **variables}
    return subprocess.Popen(["bash", SCRIPT], cwd=directory, env=environment, stderr=subprocess.PIPE, text=True)


def attending(run: Run) -> list[dict[str, Any]]:
    return [entry for entry in run.status().get("workers", []) if entry["attends"]]


@pytest.mark.slow
def test_a_machine_that_is_taken_away_hands_back_and_comes_again_as_the_same_worker(
    tmp_path: Path, sort_model: Path
) -> None:
    with run_without_workers(tmp_path / "run", sort_model) as (run, crew):
        ticket, state = (run.out / "ticket").read_text(), str(tmp_path / "state")
        seen = set()
        for _ in range(2):
            worker = start(
                tmp_path, ECHO2_TICKET=ticket, ECHO2_STATE=state, ECHO2_PRICE_USD_PER_HOUR="0.25", ECHO2_LISTEN=""
            )
            crew.callback(worker.kill)
            # The status may still be that of the machine before, whose groups also suffice for some steps.
            run.wait(lambda pid=worker.pid: [entry["pid"] for entry in attending(run)] == [pid], "this worker alone")
            run.wait_version(max(0, run.status()["version"]) + 4)
            (entry,) = attending(run)
            assert entry["price_usd_per_hour"] == 0.25
            seen.add(entry["id"])
            worker.send_signal(signal.SIGTERM)
            _, errors = worker.communicate(timeout=60)
            assert worker.returncode == 0, errors
            assert "its leases go to other workers" in errors
            assert not is_running(worker.pid)
        assert len(seen) == 1
    audit = run.command("audit")
    assert audit["lost"] == audit["doubled"] == 0


def test_a_machine_without_a_ticket_says_what_it_needs(tmp_path: Path) -> None:
    _, errors = (worker := start(tmp_path)).communicate(timeout=30)
    assert worker.returncode != 0
    assert "ECHO2_TICKET" in errors
    assert "echo2 invite" in errors
