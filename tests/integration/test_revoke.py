"""`echo2 revoke` beside a running head: the worker is out, its groups go to others, and nothing is lost."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from real_runs import ENDLESS, REPOSITORY, Run

pytestmark = pytest.mark.timeout(600)


def echo2(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "echo2", *arguments]


@pytest.mark.slow
def test_revoked_worker_is_out_and_its_groups_are_not_lost(tmp_path: Path, sort_model: Path) -> None:
    run = Run(tmp_path / "run", sort_model, "--workers.count", "1", *ENDLESS).start()  # a fast one is over too soon
    run.wait(lambda: (run.out / "ticket").exists(), "ticket")
    text = (run.out / "ticket").read_text()
    join = echo2("worker", f"@{run.out / 'ticket'}", "--state", str(tmp_path / "state"))
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(join, cwd=REPOSITORY, env=environment, stderr=subprocess.PIPE, text=True) as worker:

        def seen() -> list[str]:
            return [each["id"] for each in run.status().get("workers", []) if each["pid"] == worker.pid]

        run.wait(lambda: bool(seen()), "second worker")
        [worker_id] = seen()
        nobody = subprocess.run(
            echo2("revoke", str(run.out), "w-0123456789"), cwd=REPOSITORY, capture_output=True, text=True
        )
        assert nobody.returncode == 2
        assert worker_id in nobody.stderr
        subprocess.run(echo2("revoke", str(run.out), worker_id), cwd=REPOSITORY, check=True, capture_output=True)
        _, errors = worker.communicate(timeout=100)
        assert worker.returncode == 2
        assert f"error: {worker_id} was revoked by the run's owner. Ask" in errors
    run.wait(lambda: worker_id not in [each["id"] for each in run.status()["workers"]], "expulsion")
    again = subprocess.run(join, cwd=REPOSITORY, env=environment, capture_output=True, text=True, timeout=100)
    assert again.returncode == 2
    assert "was revoked" in again.stderr
    with_another_key = echo2("worker", text, "--state", str(tmp_path / "another state"))
    back = subprocess.run(
        with_another_key, cwd=REPOSITORY, env=environment, capture_output=True, text=True, timeout=100
    )
    assert back.returncode == 2
    assert "this ticket is closed" in back.stderr
    run.wait(lambda: (run.out / "ticket").read_text() != text, "another ticket for the owner's machines")
    run.wait_version(run.status()["version"] + 4)  # beyond every step that it had groups of
    version = run.stop()
    audit = run.command("audit")
    assert (audit["lost"], audit["doubled"], audit["trained"]) == (0, 0, version * 16)
    assert run.command("replay")["num_different"] == 0
