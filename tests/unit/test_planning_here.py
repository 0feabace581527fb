"""`echo2 plan --here`: a forecast for the cores of one machine."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from echo2 import config as configuration
from echo2.cli import main
from echo2.core.errors import UserError
from echo2.engines.processor import Processor, Products, this_processor
from echo2.learner.decide.model_shape import ModelShape, read_shape
from echo2.planning import here, on_cores
from echo2.planning.lengths import SeenLengths
from echo2.planning.on_cores import Lengths
from rollout_cases import tiny_directory

SIZES: dict[str, Any] = {
    "model_type": "qwen3",
    "vocab_size": 32_768,
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_hidden_layers": 12,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "tie_word_embeddings": True,
    "max_position_embeddings": 40_960,
}
CORE = Processor(2, 100.0, Products(15.0, 500.0), Products(17.0, 90.0), 40.0, 3.0, 4.0, 5e-6, 2e-9)
LENGTHS = Lengths(40.0, 20.0, 15.0, 30.0)
PROBE = {
    "num_rollouts": 96,
    "core_seconds": 6.0,
    "seconds": 8.0,
    "group_size": 8,
    "groups_per_batch": 6,
    "max_tokens": 32,
}


def shape() -> ModelShape:
    found = read_shape(SIZES)
    assert found is not None
    return found


def config(**sampling: Any) -> configuration.Config:
    values = {"group_size": 8, "groups_per_batch": 6, "max_tokens": 32} | sampling
    tables = {"tasks": {"source": "digit_sorting"}, "reward": {"functions": ["exact_match"]}, "sampling": values}
    return configuration.build(tables, "test")


def twice_as_fast() -> Processor:
    whole = msgspec.to_builtins(CORE)
    fast = {name: 2 * value for name, value in whole.items() if isinstance(value, float)}
    products = {name: Products(*(2 * part for part in whole[name].values())) for name in ("bfloat16", "float32")}
    seconds = {"operation_seconds": CORE.operation_seconds / 2, "drawn_seconds": CORE.drawn_seconds / 2}
    return replace(CORE, **{**fast, **products, **seconds})


def test_a_core_that_does_all_twice_as_fast_needs_half_as_long() -> None:
    fast = twice_as_fast()
    assert on_cores.training_seconds(shape(), LENGTHS, 6, 8, fast) == pytest.approx(
        on_cores.training_seconds(shape(), LENGTHS, 6, 8, CORE) / 2
    )
    for width in (2, 4):
        slow = on_cores.batch_seconds(shape(), LENGTHS, 6, 8, width, CORE)
        assert on_cores.batch_seconds(shape(), LENGTHS, 6, 8, width, fast) == pytest.approx(slow / 2)


def test_training_is_mostly_products_and_a_prompt_is_read_once_a_group() -> None:
    of, model = on_cores.training_seconds, shape()
    products = 6 * (6 * (40 + 8 * 15) * (model.parameters - model.vocabulary) + 6 * 8 * 15 * model.vocabulary) / 100e9
    assert products < of(model, LENGTHS, 6, 8, CORE) < 2.5 * products
    longer = of(model, replace(LENGTHS, prompt=80.0), 6, 8, CORE) - of(model, LENGTHS, 6, 8, CORE)
    answers = of(model, replace(LENGTHS, trained=20.0), 6, 8, CORE) - of(model, LENGTHS, 6, 8, CORE)
    assert 0.4 * answers < longer < answers  # as many tokens, 40 a group; those of prompts make no logits


def test_a_batch_lasts_as_long_as_its_longest_answer() -> None:
    def seconds(lengths: Lengths, groups: float) -> float:
        return on_cores.batch_seconds(shape(), lengths, groups, 8, 2, CORE)

    even, uneven = replace(LENGTHS, longest=20.0), replace(LENGTHS, longest=40.0)
    assert seconds(even, 6) < seconds(uneven, 6) < 2 * seconds(even, 6)
    assert seconds(even, 3) < seconds(even, 6) < 2 * seconds(even, 3)


def test_plan_reads_the_output_of_a_probe_and_refuses_other_runs_and_files(tmp_path: Path) -> None:
    path = tmp_path / "probe.json"
    lengths = {"prompt": 43.0, "answer": 27.0, "preferred": 19.0, "trained": 21.0, "preferred_trained": 7.0}
    whole = PROBE | {"parameters": 7, "lengths": lengths | {"flat": 0.1, "longest": 32.0}, "name": "it"}
    path.write_text(json.dumps(whole))
    found = here.read_probe(path, config())
    assert found.lengths == SeenLengths(43.0, 27.0, 19.0, 21.0, 7.0, 0.1, 32.0)
    with pytest.raises(UserError, match=r"sampling.max_tokens = 32, and the run has 64.*Probe this"):
        here.read_probe(path, config(max_tokens=64))
    with pytest.raises(UserError, match=r"No such file.*echo2 probe CONFIG --json"):
        here.read_probe(tmp_path / "none.json", config())
    for damaged in ("", "[[offers]]", "{}", json.dumps(whole | {"core_seconds": -1.0})):
        path.write_text(damaged)
        with pytest.raises(UserError, match="echo2 probe"):
            here.read_probe(path, config())


def test_the_command_forecasts_a_run_before_and_after_a_probe(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = tiny_directory(tmp_path / "model")
    toml = tmp_path / "run.toml"
    toml.write_text(
        f'[run]\nmax_steps = 5\n[model]\npath = "{model}"\n[tasks]\nsource = "digit_sorting"\n'
        '[reward]\nfunctions = ["exact_match"]\n[eval]\nsource = "digit_sorting"\nlimit = 8\n[workers]\ncount = 2\n'
        "[sampling]\ngroup_size = 4\ngroups_per_batch = 2\nmax_tokens = 12\n[schedule]\ngroups_per_step = 4\n"
    )
    plan = ["plan", str(toml), "--here"]
    assert main([*plan, "--json"]) == 0
    first = json.loads(capsys.readouterr().out)
    assert first["lengths"]["answer"] == 6.0
    assert 0.0 <= first["steady_idle_ratio"] < 1.0
    assert first["run_seconds"] == pytest.approx(5 * first["step_seconds"])
    assert first["step_seconds"] >= first["train_seconds"] > 0.0
    assert first["memory"]["learner"]["bytes"] > first["memory"]["worker"]["bytes"] > 0

    assert main(["probe", str(toml), "--json", "--seconds", "0.1"]) == 0
    probe = tmp_path / "probe.json"
    probe.write_text(capsys.readouterr().out)
    assert main([*plan, str(probe), "--json"]) == 0
    second, probed = json.loads(capsys.readouterr().out), json.loads(probe.read_text())
    assert second["worker_rollouts_per_second"] == pytest.approx(probed["num_rollouts"] / probed["core_seconds"])
    assert second["lengths"]["prompt"] == probed["lengths"]["prompt"]
    probe.write_text(json.dumps(probed | {"parameters": 7}))
    assert main([*plan, str(probe)]) == 2
    assert "a model of 7 parameters" in capsys.readouterr().err
    assert main(plan) == 0
    assert "a worker makes" in capsys.readouterr().out

    assert main(["plan", str(toml), "--learner", "cpu"]) == 2
    assert "plan CONFIG --here" in capsys.readouterr().err
    for more, why in (
        (["--offers", "offers.toml"], "without --offers"),
        (["--learner", "H100"], "without --learner"),
        (["--learner.ranks", "2"], "no forecast for learner.ranks above 1"),
        (["--lora.rank", "8", "--learner.quantised", "base"], 'no forecast for learner.quantised = "base"'),
        (["--model.path", "owner/none"], "is not a directory here"),
        (["--workers.count", "0"], r"workers.count = 0. Set it to 1"),
    ):
        assert main([*plan, *more]) == 2
        assert why in capsys.readouterr().err


def test_adapters_have_no_gradients_of_the_weights_below_them() -> None:
    of, model = on_cores.training_seconds, shape()
    whole, adapter = of(model, LENGTHS, 6, 8, CORE), of(model, LENGTHS, 6, 8, CORE, lora_rank=16)
    assert 2 / 3 * whole < adapter < 0.95 * whole  # products are two thirds; activations pass through memory as before
    assert adapter < of(model, LENGTHS, 6, 8, CORE, lora_rank=64)


def test_a_teacher_scores_a_step_in_a_forward_pass() -> None:
    model = shape()
    taught, trained = (of(model, LENGTHS, 6, 8, CORE) for of in (on_cores.scoring_seconds, on_cores.training_seconds))
    assert 0.25 * trained < taught < 0.4 * trained  # measured: .33 to .46 of the rest (docs/capacity.md)


ENVIRONMENT = """
class Twice:
    turn_tokens = 2
    def __init__(self, columns, seed):
        self.turns = 0
    def step(self, action):
        self.turns += 1
        return "1=", float(len(action)), self.turns == 2
"""


def test_adapters_teachers_and_environments_are_forecast(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, toml = tiny_directory(tmp_path / "model"), tmp_path / "run.toml"
    toml.write_text(
        f'[run]\nmax_steps = 5\n[model]\npath = "{model}"\n[tasks]\nsource = "digit_sorting"\n'
        '[reward]\nfunctions = ["exact_match"]\n[workers]\ncount = 1\n'
        "[sampling]\ngroup_size = 4\ngroups_per_batch = 2\nmax_tokens = 12\n[schedule]\ngroups_per_step = 4\n"
    )

    def planned(*more: str) -> dict[str, Any]:
        assert main(["plan", str(toml), "--here", *more, "--json"]) == 0
        found: dict[str, Any] = json.loads(capsys.readouterr().out)
        return found

    whole, adapter = planned(), planned("--lora.rank", "2")
    assert adapter["network"]["first"] > whole["network"]["first"]  # the base model, and an adapter
    assert adapter["network"]["version"] < whole["network"]["version"]
    assert adapter["memory"]["worker"]["parts"]["adapter"] > 0
    taught = planned("--distill.teacher", "self")
    assert "the teacher's logprobs" in taught["inputs"]
    assert "the teacher's logprobs" not in whole["inputs"]

    own = tmp_path / "own.py"
    own.write_text(ENVIRONMENT)
    played = [str(toml), f"--tasks.environment={own}:Twice", "--sampling.max_turns=3", "--sampling.max_tokens=40"]
    assert main(["plan", *played, "--here"]) == 2
    assert "echo2 probe CONFIG --json > probe.json" in capsys.readouterr().err
    assert main(["probe", *played, "--json", "--seconds", "0.1"]) == 0
    printed = capsys.readouterr().out
    (tmp_path / "probe.json").write_text(printed)
    assert main(["plan", *played, "--here", str(tmp_path / "probe.json"), "--json"]) == 0
    found, probed = json.loads(capsys.readouterr().out), json.loads(printed)
    assert found["worker_rollouts_per_second"] == pytest.approx(probed["num_rollouts"] / probed["seconds"])
    assert found["lengths"]["answer"] == (probed["lengths"]["answer"] + probed["lengths"]["preferred"]) / 2 > 0


def test_this_machine_s_core_is_measured() -> None:
    found = this_processor(2)
    numbers = msgspec.to_builtins(found)
    numbers |= {f"{name} {part}": value for name in ("bfloat16", "float32") for part, value in numbers[name].items()}
    for name, value in numbers.items():
        assert isinstance(value, dict) or value > 0, name
    assert found.cores >= 1
    assert 1e-8 < found.operation_seconds < 1e-2
