"""Recipes of two cookbooks, as they come from PyPI, learn here. `make test-all` makes a Python for each."""

from __future__ import annotations

import json
import math
import os
import statistics
import string
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

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
    environment |= {"TINKER_BASE_URL": served.url, "HF_HOME": str(log.parent / "huggingface")}
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
    write_prompts(served.folder / "models")
    run(served, cookbook, "chat", tmp_path / "chat")
    run(served, cookbook, "distill", log := tmp_path / "distill")
    distances = curve(log, "teacher_kl")
    assert len(distances) == 10
    assert statistics.mean(distances[-3:]) < 0.7 * distances[0], distances
    run(served, cookbook, "distill_from_two", log := tmp_path / "two")
    first, second = (curve(log, f"teacher_kl/dataset_{number}") for number in range(2))
    assert abs(second[0]) < 1e-3, "the base model is the second, and the adapter begins as it"
    assert min(first) < 0.7 * first[0], (first, second)  # they pull in two directions


@pytest.mark.parametrize("cookbook", ["tinker"], indirect=True)
def test_an_adapter_learns_from_itself_with_the_answer(served: Served, cookbook: str, tmp_path: Path) -> None:
    """Its targets are the likely tokens of a prompt's logprobs, with weights."""
    question = {"domain": "Chemistry", "details": {"level": "L3"}, "type": "mcq", "prompt": {"default": "Answer."}}
    question |= {"choices": {"label": ["A", "B"], "text": ["this", "that"]}, "answerKey": "B"}
    rows = [{**question, "question": f"Which? {number}"} for number in range(120)]
    write_rows(served.folder / "models" / "hicai-zju" / "SciKnowEval" / "test.jsonl", rows)
    run(served, cookbook, "self_distill", log := tmp_path / "self")
    entropies = curve(log, "sdft/mean_teacher_entropy")
    assert len(entropies) == 10
    assert set(curve(log, "sdft/num_datums")) == {16.0}
    assert statistics.mean(entropies[-2:]) < statistics.mean(entropies[:2]) - 0.1, entropies


@pytest.mark.parametrize("cookbook", ["tinker"], indirect=True)
@pytest.mark.parametrize("recipe", ["off_policy", "prompt_distill"])
def test_an_adapter_learns_from_what_another_model_wrote(
    served: Served, cookbook: str, tmp_path: Path, recipe: str
) -> None:
    said = [[("human", f"What is {number}?"), ("gpt", f"It is {number}.")] for number in range(256)]
    rows = [{"conversations": [{"from": who, "value": text} for who, text in turns]} for turns in said]
    write_rows(served.folder / "models" / "open-thoughts" / "OpenThoughts3-1.2M" / "train.jsonl", rows)
    run(served, cookbook, recipe, log := tmp_path / recipe)
    nats = curve(log, "train_mean_nll")
    assert len(nats) == 10
    assert nats[-1] < nats[0] - 1.0, nats


@pytest.mark.parametrize("cookbook", ["tinker"], indirect=True)
def test_an_adapter_learns_from_preferences(served: Served, cookbook: str, tmp_path: Path) -> None:
    """DPO, whose loss is the client's own, and RL on pairs of answers that the client compares."""
    talk = "\n\nHuman: What is {}?\n\nAssistant: {}"
    rows = [{"chosen": talk.format(at, f"It is {at}."), "rejected": talk.format(at, "No.")} for at in range(128)]
    for split, part in {"train": rows, "test": rows[:16]}.items():
        write_rows(served.folder / "models" / "Anthropic" / "hh-rlhf" / f"{split}.jsonl", part)
    run(served, cookbook, "preferences", log := tmp_path / "preferences")
    losses = curve(log, "dpo_loss")
    assert losses[0] == pytest.approx(math.log(2.0), abs=1e-3)
    assert losses[-1] < 0.4, losses
    run(served, cookbook, "shorter", log := tmp_path / "shorter")
    lengths = curve(log, "env/all/ac_tokens_per_turn")
    assert min(lengths) < 0.5 * lengths[0], lengths


@pytest.mark.parametrize("cookbook", ["tinker"], indirect=True)
def test_a_model_of_the_service_grades(served: Served, cookbook: str, tmp_path: Path) -> None:
    """It is random, so its grades are none, which the recipe counts as 0."""
    run(served, cookbook, "rubric", log := tmp_path / "rubric")
    assert len(curve(log, "env/all/reward/total")) == 3


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


def write_rows(file: Path, rows: list[dict[str, Any]]) -> None:
    """Under a name that is loaded from the hub: a folder of such a name is taken before it."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("\n".join(map(json.dumps, rows)))


def write_prompts(folder: Path) -> None:
    """For on-policy distillation."""
    talks = [{"messages": [{"role": "user", "content": f"Which number? {number}"}]} for number in range(64)]
    write_rows(folder / "allenai" / "tulu-3-sft-mixture" / "train.jsonl", talks)
    questions = [{"question": f"How much is {number}?"} for number in range(64)]
    write_rows(folder / "zwhe99" / "DeepMath-103K" / "train.jsonl", questions)


def write_data_sets(folder: Path) -> None:
    """For the loops."""
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
        write_rows(folder / name / "train.jsonl", lines)
    parts = "configs:\n- config_name: main\n  data_files: main/train.jsonl\n"
    (folder / "openai" / "gsm8k" / "README.md").write_text(f"---\n{parts}---\n")
