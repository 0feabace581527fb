"""Recipes of the Tinker cookbook, as they come from PyPI, learn here. `make test-sdk` makes their Python."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import house
from served import SCRIPTS, Served

PYTHON = house.REPOSITORY / ".venv-cookbook"
#: Lines of metrics after which the chat recipe is killed; how long that may take.
KILL_AFTER, DEADLINE_SECONDS = 5, 600.0

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    if not (PYTHON / ".installed").exists():
        pytest.skip(f"{PYTHON} is not there or not whole; `make test-sdk` makes it")
    made = Served(tmp_path_factory.mktemp("service"))
    yield made
    made.machine.terminate()
    made.process.terminate()
    made.machine.communicate(timeout=60)
    made.process.communicate(timeout=60)


def start(served: Served, recipe: str, log: Path) -> subprocess.Popen[bytes]:
    """A recipe, where the tokenizer of the base model lies."""
    environment = {**os.environ, "TINKER_TELEMETRY": "0", "HF_HUB_OFFLINE": "1", "TINKER_API_KEY": served.key}
    command = [PYTHON / "bin" / "python", "-W", "ignore", SCRIPTS / "recipes.py", recipe, served.url, log]
    with log.with_suffix(".out").open("a") as out:
        return subprocess.Popen(command, cwd=served.folder / "models", env=environment, stdout=out, stderr=out)


def curve(log: Path, name: str) -> list[float]:
    """A metric by step; a step that was made again after a kill counts as it was made last."""
    lines = (log / "metrics.jsonl").read_text().splitlines()
    rows = [row for row in map(json.loads, lines) if name in row]
    found = {row["step"]: float(row[name]) for row in rows}
    assert sorted(found) == list(range(len(found)))
    return [found[step] for step in sorted(found)]


def test_chat_learns_and_goes_on_after_a_kill(served: Served, tmp_path: Path) -> None:
    log, metrics, until = tmp_path / "chat", tmp_path / "chat" / "metrics.jsonl", time.monotonic() + DEADLINE_SECONDS
    killed = start(served, "chat", log)
    while not metrics.exists() or len(metrics.read_text().splitlines()) < KILL_AFTER:
        assert killed.poll() is None, log.with_suffix(".out").read_text()[-3000:]
        assert time.monotonic() < until
        time.sleep(0.1)
    killed.kill()
    killed.wait()
    assert start(served, "chat", log).wait() == 0, log.with_suffix(".out").read_text()[-3000:]
    assert "Resumed training from tinker://" in log.with_suffix(".out").read_text()
    nats = curve(log, "train_mean_nll")
    assert len(nats) == 14
    assert nats[0] > 5.0
    assert statistics.mean(nats[-3:]) < nats[0] - 1.0, nats


@pytest.mark.parametrize("recipe", ["math-ppo-0", "math-importance_sampling-1", "math-stable_reinforce-2"])
def test_math_learns_in_step_and_behind(served: Served, tmp_path: Path, recipe: str) -> None:
    """The last number: how many steps a sample may be old; 0: none, one batch after the other."""
    log = tmp_path / recipe
    assert start(served, recipe, log).wait() == 0, log.with_suffix(".out").read_text()[-3000:]
    rewards = curve(log, "env/all/reward/total")
    assert rewards[0] < -0.08, rewards  # a random answer of 8 tokens seldom ends
    assert max(rewards) > rewards[0] + 0.03, rewards


def test_a_penalty_is_paid_for_leaving_the_base_model(served: Served, tmp_path: Path) -> None:
    log = tmp_path / "kl"
    assert start(served, "math_kl", log).wait() == 0, log.with_suffix(".out").read_text()[-3000:]
    distances = curve(log, "kl_policy_base")
    assert abs(distances[0]) < 1e-3 < max(distances), distances
