"""A LoRA run of real processes: the base model once to each worker, adapters of a few kB from then on."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from real_runs import ENDLESS, REPOSITORY, Run

pytestmark = pytest.mark.timeout(600)

LORA = ("--lora.rank", "4", "--learner.lr", "1e-3", "--schedule.max_staleness", "1")
HERE = "the base model base-"


def join(run: Run, state: Path, *more: str) -> subprocess.Popen[str]:
    """Another worker, by the run's ticket."""
    arguments = [sys.executable, "-m", "echo2", "worker", f"@{run.out / 'ticket'}", "--state", str(state), *more]
    return subprocess.Popen(
        arguments,
        cwd=REPOSITORY,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


def wait_for_learner(run: Run) -> None:
    """It imports PEFT, which takes long on a busy machine."""
    log = run.out / "logs" / "learner.log"
    run.wait(lambda: log.exists() and "joined as" in log.read_text(), "learner")


def test_workers_get_the_base_model_once_also_those_that_are_killed_or_join_late(
    tmp_path: Path, sort_model: Path
) -> None:
    run = Run(
        tmp_path / "run", sort_model, *LORA, "--workers.count", "1", *ENDLESS
    ).start()  # until all three have come
    wait_for_learner(run)
    run.wait_version(2)
    own, late = join(run, tmp_path / "own", "--base", str(sort_model)), join(run, tmp_path / "late")
    run.kill("worker-0")
    run.wait_version(6)
    run.kill("head")
    run.wait_version(9)
    run.kill("learner")
    run.wait(lambda: sum(bool(one.get("installed")) for one in run.status().get("workers", [])) >= 3, "three workers")
    run.wait_version(run.status()["version"] + 3)
    version = run.stop()
    joined = [process.communicate(timeout=60)[0] for process in (own, late)]
    logs = [path.read_text() for path in sorted((run.out / "logs").glob("worker-*.log"))]
    for text in [*logs, *joined]:
        assert text.count(HERE) == 1 + ("--base" in text), text[-2000:]
        assert "installed;" in text
    audit = run.command("audit")
    assert (audit["lost"], audit["doubled"], audit["trained"]) == (0, 0, version * 16)
    assert run.command("replay")["num_different"] == 0


@pytest.mark.slow
def test_a_base_model_that_differs_by_a_byte_is_refused_by_name(tmp_path: Path, sort_model: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    for path in sort_model.iterdir():
        (other / path.name).write_bytes(path.read_bytes())
    weights = other / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + bytes([weights.read_bytes()[-1] ^ 1]))
    run = Run(tmp_path / "run", sort_model, *LORA, "--run.max_steps", "200").start()
    wait_for_learner(run)
    run.wait_version(1)
    worker = join(run, tmp_path / "state", "--base", str(other))
    said, _ = worker.communicate(timeout=100)
    assert worker.returncode == 2, said
    assert [line for line in said.splitlines() if line.startswith("error: ")] == said.splitlines()[-1:]
    assert "Traceback" not in said
    assert said.count("base-") >= 3
    assert "leave --base out" in said
    assert run.process is not None
    run.process.send_signal(signal.SIGINT)
    run.process.communicate(timeout=60)
