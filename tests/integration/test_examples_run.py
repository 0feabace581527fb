"""Every example is run as a user runs it, on local data: real processes, two small steps."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from real_runs import REPOSITORY

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]

#: Neither machines nor a service are a run.
EXAMPLES = sorted({path.stem for path in (REPOSITORY / "examples").glob("*.toml")} - {"offers", "serve"})
SMALL = {
    "run.max_steps": "2",
    "schedule.groups_per_step": "4",
    "sampling.groups_per_batch": "4",
    "eval.limit": "8",
    "workers.count": "1",
}


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory, sort_model: Path) -> Path:
    """A directory as a user has it after `make demo` and `examples/make_data.py`."""
    root = tmp_path_factory.mktemp("checkout")
    shutil.copytree(REPOSITORY / "examples", root / "examples")
    shutil.copytree(sort_model, root / "outputs" / "models" / "digit_sorting")
    subprocess.run([sys.executable, "examples/make_data.py"], cwd=root, check=True, capture_output=True)
    return root


def echo2(root: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "echo2", *arguments]
    return subprocess.run(command, cwd=root, capture_output=True, text=True, check=False, env=environment)


@pytest.mark.parametrize("name", EXAMPLES)
def test_example_runs(checkout: Path, name: str) -> None:
    flags = [word for key, value in SMALL.items() for word in (f"--{key}", value)]
    done = echo2(checkout, "run", f"examples/{name}.toml", "--out", f"outputs/{name}", "--json", *flags)
    assert done.returncode == 0, done.stderr
    summary = json.loads(done.stdout)
    assert summary["outcome"][0] == "finished"
    assert summary["groups"]["trained"] == 8
    audit = json.loads(echo2(checkout, "audit", f"outputs/{name}", "--json").stdout)
    assert (audit["trained"], audit["lost"], audit["doubled"], audit["retired"]) == (8, 0, 0, {})
    rows = [json.loads(line) for line in (checkout / "outputs" / name / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows if "reward/mean" in row] == [1, 2]
