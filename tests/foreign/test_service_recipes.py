"""Recipes of two cookbooks, as they come from PyPI, learn here. `make test-all` makes a Python for each."""

from __future__ import annotations

import json
import os
import statistics
import string
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import house
from served import SCRIPTS, Served

#: Lines of metrics after which the chat recipe is killed; how long that may take.
KILL_AFTER, DEADLINE_SECONDS = 5, 600.0

PRICES = "usd_per_million_tokens = { forward_backward = 1.0, sample = 1.0 }"

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture(scope="module", params=["tinker", "logits"])
def cookbook(request: pytest.FixtureRequest) -> str:
    """Asked for before anything is started: a cookbook whose Python is missing costs nothing."""
    name: str = request.param
    if not (python_of(name) / ".installed").exists():
        pytest.skip(
            f"{python_of(name)} is not there or not whole; `make test-foreign FOREIGN={name}-cookbook` makes it"
        )
    return name


@pytest.fixture(scope="module")
def served(cookbook: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    made = Served(tmp_path_factory.mktemp("service"), ("echo2/tiny", "Qwen/Qwen3-8B"), PRICES)
    yield made
    made.machine.terminate()
    made.process.terminate()
    made.machine.communicate(timeout=60)
    made.process.communicate(timeout=60)


def python_of(cookbook: str) -> Path:
    return house.REPOSITORY / f".venv-{cookbook}-cookbook"


def start(served: Served, cookbook: str, recipe: str, log: Path) -> subprocess.Popen[bytes]:
    """A recipe, where the tokenizers of the base models and the data sets lie."""
    environment = {**os.environ, "TINKER_TELEMETRY": "0", "HF_HUB_OFFLINE": "1", "TINKER_API_KEY": served.key}
    environment["HF_HOME"] = str(log.parent / "huggingface")
    script = [python_of(cookbook) / "bin" / "python", "-W", "ignore", SCRIPTS / "recipes.py"]
    with log.with_suffix(".out").open("a") as out:
        return subprocess.Popen(
            [*script, cookbook, recipe, served.url, log],
            cwd=served.folder / "models",
            env=environment,
            stdout=out,
            stderr=out,
        )


def run(served: Served, cookbook: str, recipe: str, log: Path) -> None:
    assert start(served, cookbook, recipe, log).wait() == 0, log.with_suffix(".out").read_text()[-3000:]


def curve(log: Path, name: str) -> list[float]:
    """A metric by step; a step that was made again after a kill counts as it was made last."""
    lines = (log / "metrics.jsonl").read_text().splitlines()
    rows = [row for row in map(json.loads, lines) if name in row]
    found = {row["step"]: float(row[name]) for row in rows}
    assert sorted(found) == list(range(len(found)))
    return [found[step] for step in sorted(found)]


def test_chat_learns_and_goes_on_after_a_kill(served: Served, cookbook: str, tmp_path: Path) -> None:
    log, metrics, until = tmp_path / "chat", tmp_path / "chat" / "metrics.jsonl", time.monotonic() + DEADLINE_SECONDS
    killed = start(served, cookbook, "chat", log)
    while not metrics.exists() or len(metrics.read_text().splitlines()) < KILL_AFTER:
        assert killed.poll() is None, log.with_suffix(".out").read_text()[-3000:]
        assert time.monotonic() < until
        time.sleep(0.1)
    killed.kill()
    killed.wait()
    run(served, cookbook, "chat", log)
    assert "Resumed training from tinker://" in log.with_suffix(".out").read_text()
    nats = curve(log, "train_mean_nll")
    assert len(nats) == 14
    assert nats[0] > 5.0
    assert min(curve(log, "cost/step_usd")) > 0.0  # of a step, and of the run since it was resumed
    assert curve(log, "cost/cum_usd")[-1] >= sum(curve(log, "cost/step_usd")[-3:])
    assert statistics.mean(nats[-3:]) < nats[0] - 1.0, nats


@pytest.mark.parametrize(
    ("cookbook", "recipe"),
    [
        ("tinker", "math-ppo-0"),
        ("tinker", "math-importance_sampling-1"),
        ("tinker", "math-stable_reinforce-2"),
        ("logits", "math-importance_sampling-0"),
        ("logits", "math-importance_sampling-1"),
    ],
    indirect=["cookbook"],
)
def test_math_learns_in_step_and_behind(served: Served, cookbook: str, tmp_path: Path, recipe: str) -> None:
    """The last number: how many steps a sample may be old; 0: none, one batch after the other."""
    log = tmp_path / recipe
    run(served, cookbook, recipe, log)
    dollars = curve(log, "cost/cum_usd")
    assert 0.0 < dollars[0] < dollars[-1]
    rewards = curve(log, "env/all/reward/total")
    assert rewards[0] < -0.08, rewards  # a random answer of 8 tokens seldom ends
    assert max(rewards) > rewards[0] + 0.03, rewards


@pytest.mark.parametrize("cookbook", ["tinker"], indirect=True)
def test_a_penalty_is_paid_for_leaving_the_base_model(served: Served, cookbook: str, tmp_path: Path) -> None:
    log = tmp_path / "kl"
    run(served, cookbook, "math_kl", log)
    distances = curve(log, "kl_policy_base")
    assert abs(distances[0]) < 1e-3 < max(distances), distances


@pytest.mark.parametrize("cookbook", ["tinker"], indirect=True)
def test_an_adapter_learns_from_another_one_on_its_own_samples(served: Served, cookbook: str, tmp_path: Path) -> None:
    """The cookbook's on-policy distillation: a sampling client of a checkpoint scores what another policy sampled."""
    prompts = [{"messages": [{"role": "user", "content": f"Which number? {number}"}]} for number in range(64)]
    folder = served.folder / "models" / "allenai" / "tulu-3-sft-mixture"
    folder.mkdir(parents=True)
    (folder / "train.jsonl").write_text("\n".join(map(json.dumps, prompts)))
    run(served, cookbook, "chat", tmp_path / "chat")
    run(served, cookbook, "distill", log := tmp_path / "distill")
    distances = curve(log, "teacher_kl")
    assert len(distances) == 10
    assert statistics.mean(distances[-3:]) < 0.7 * distances[0], distances


@pytest.mark.parametrize("cookbook", ["logits"], indirect=True)
def test_a_client_continues_from_the_weights_of_an_earlier_one(served: Served, cookbook: str, tmp_path: Path) -> None:
    """`sl_loop` shows the answer to a question, and `rl_loop` rewards it."""
    write_data_sets(served.folder / "models")
    log = tmp_path / "loops"
    log.mkdir()
    run(served, cookbook, "loops", log)
    nats, rewards = curve(log / "sl", "train_mean_nll"), curve(log / "rl", "reward/total")
    assert nats[0] > 5.0 > 1.0 > nats[-1], nats
    assert len(rewards) == 4
    assert rewards[0] > 0.02, rewards  # without what the other loop taught there is no such answer at all


def write_data_sets(folder: Path) -> None:
    """Under the names that the loops load from the hub: a folder of such a name is taken before it."""
    ask = "{} Provide a numerical answer without units, written inside \\boxed{{}}."
    rows = []
    for count in range(400):
        word = string.ascii_lowercase[count % 26 :][: 1 + count % 17]
        letters = " ".join(f"{place}) {letter}" for place, letter in enumerate(word, 1))
        turns = [("user", ask.format(f"How many letters are in {word}?"))]
        turns += [("assistant", f"Let us number all of them: {letters}. We have {len(word)}. \\boxed{{{len(word)}}}")]
        turns += [("user", ask.format("Which number?")), ("assistant", "\\boxed{3}")]
        rows.append({"messages": [{"role": role, "content": text} for role, text in turns]})
    questions = [{"question": "Which number?", "answer": "#### 3"}] * 32
    for name, lines in {"HuggingFaceH4/no_robots": rows, "openai/gsm8k/main": questions}.items():
        (folder / name).mkdir(parents=True, exist_ok=True)
        (folder / name / "train.jsonl").write_text("\n".join(map(json.dumps, lines)))
    parts = "configs:\n- config_name: main\n  data_files: main/train.jsonl\n"
    (folder / "openai" / "gsm8k" / "README.md").write_text(f"---\n{parts}---\n")
