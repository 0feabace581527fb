"""A pretrained model, as a user has it after `make smollm`: fetched, converted, and trained for six steps."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from real_runs import REPOSITORY, echo2

# Nothing here is about speed: a minute or two on two idle cores, as long as it takes on others.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(7200)]
#: What pip says of an index that it can't reach.
UNREACHABLE = "connection broken by"


@pytest.fixture(scope="module")
def desk(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the examples, and the model that `make smollm` makes, from nothing; one that the checkout has
    already is taken."""
    root = tmp_path_factory.mktemp("smollm")
    (root / "examples").symlink_to(REPOSITORY / "examples")
    model = root / "outputs" / "models" / "smollm2"
    model.parent.mkdir(parents=True)
    made = REPOSITORY / "outputs" / "models" / "smollm2"
    subprocess.run([sys.executable, "examples/smollm/facts.py"], cwd=root, check=True)
    if (made / "config.json").is_file():
        model.symlink_to(made)
        return root
    built = subprocess.run(
        ["make", "-C", str(REPOSITORY), f"SMOLLM={model}", f"{model}/config.json"],
        capture_output=True,
        text=True,
        check=False,
    )
    if UNREACHABLE in built.stderr:
        pytest.skip(f"the package index can't be reached: {built.stderr[-300:]}")
    assert built.returncode == 0, built.stdout + built.stderr
    return root


def test_a_pretrained_model_is_half_right_after_six_steps(desk: Path) -> None:
    flags = ("--json", "--run.max_steps", "6", "--eval.every", "0", "--workers.count", "1")
    done = echo2(desk, "run", "examples/smollm/json.toml", *flags)
    assert done.returncode == 0, done.stderr[-3000:]
    summary = json.loads(done.stdout)
    assert summary["outcome"][0] == "finished"
    assert summary["eval_before"] < 0.3
    assert summary["eval_after"] >= 0.5
    assert summary["groups"]["trained"] == 36
    audit = json.loads(echo2(desk, "audit", "outputs/json", "--json").stdout)
    assert (audit["trained"], audit["lost"], audit["doubled"]) == (36, 0, 0)
