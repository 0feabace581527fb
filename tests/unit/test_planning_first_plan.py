"""A plan without measurements: from config.json and data sheets."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from echo2 import config as configuration
from echo2.cli import main
from echo2.core.errors import UserError
from echo2.learner.decide.model_shape import ModelShape, read_shape
from echo2.planning.estimates import (
    GPUS,
    Gpu,
    Workload,
    gpu,
    rollouts_per_second,
    several,
    tokens_per_second,
    touched_weights,
    training_flops_per_token,
    training_seconds,
)
from echo2.planning.first_plan import FirstPlan
from first_plans import MIXTURE, QWEN3_8B, write

CARDS = st.sampled_from(sorted(GPUS))


def shape(values: dict[str, object]) -> ModelShape:
    found = read_shape(values)
    assert found is not None
    return found


DENSE, SPARSE = Workload(shape(QWEN3_8B), 1000.0), Workload(shape(MIXTURE), 1000.0)


@pytest.mark.parametrize(
    ("text", "count", "memory_gb"),
    [("4xA100-80GB", 4, 80), ("H200", 1, 141), ("2 x GeForce RTX 4090", 2, 24), ("8×h100", 8, 80), ("a100", 1, 80)],
)
def test_gpus_are_named_as_people_write_them(text: str, count: int, memory_gb: float) -> None:
    found = several(text, "--learner")
    assert (found[0], found[2].memory_gb) == (count, memory_gb)


@pytest.mark.parametrize("text", ["", "0xH100", "4x", "GTX 9090", "-1xH100", "4 4090", "x" * 1000, "4x\n"])
def test_a_gpu_without_data_sheet_is_refused_with_those_that_have_one(text: str) -> None:
    with pytest.raises(UserError, match=r"H100|B200"):
        several(text, "--learner")


def test_flops_are_those_of_the_textbook() -> None:
    """6 for each weight and token, 4 with frozen weights, 8 with activations computed again."""
    weights = 6.0 * (shape(QWEN3_8B).parameters - 151936 * 4096)
    assert training_flops_per_token(DENSE) == pytest.approx(weights, rel=0.05)
    assert training_flops_per_token(replace(DENSE, lora=True)) == pytest.approx(weights * 4 / 6, rel=0.05)
    assert training_flops_per_token(replace(DENSE, checkpointing=True)) == pytest.approx(weights * 8 / 6, rel=0.05)


@given(name=CARDS, rollouts=st.integers(1, 4096), count=st.integers(1, 64), work=st.sampled_from([DENSE, SPARSE]))
def test_more_of_anything_is_never_slower(name: str, rollouts: int, count: int, work: Workload) -> None:
    card = GPUS[name]
    seconds = training_seconds(work, rollouts, card, count)
    assert seconds > training_seconds(work, rollouts, card, 2 * count) > 0
    assert training_seconds(work, 2 * rollouts, card, count) == pytest.approx(2 * seconds)
    assert training_seconds(replace(work, lora=True), rollouts, card, count) < seconds
    assert training_seconds(work, rollouts, replace(card, tflops=2 * card.tflops), count) < seconds
    rate = tokens_per_second(work, card, rollouts)
    assert tokens_per_second(work, card, rollouts + 1) > rate
    faster = Gpu(card.memory_gb, 2 * card.bandwidth_gb_per_second, 2 * card.tflops)
    assert rate < tokens_per_second(work, faster, rollouts) < 2 * rate
    assert rollouts_per_second(replace(work, answer_tokens=2000.0), card, rollouts) < rate / 1000
    assert rate / rollouts <= tokens_per_second(work, card, 1)


@given(rollouts=st.integers(1, 10_000))
def test_a_mixture_reads_what_some_rollout_chose(rollouts: int) -> None:
    sparse = SPARSE.shape
    read = touched_weights(sparse, rollouts)
    assert sparse.active * (1 - 1e-9) <= read <= sparse.parameters
    assert touched_weights(DENSE.shape, rollouts) == DENSE.shape.parameters


SETTINGS = """[run]
max_steps = 50
[sampling]
group_size = 16
groups_per_batch = 1
max_tokens = 4096
[schedule]
groups_per_step = 32
max_staleness = 3
[learner]
ranks = 4
[workers]
count = 0
"""
OFFERS = '[[offers]]\nname = "card"\nprice_usd_per_hour = 0.35\ngpu = "RTX 5090"\ncount = 40\n'


def test_a_plan_needs_no_measurement(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = write(tmp_path, QWEN3_8B, SETTINGS, OFFERS)
    assert main(words) == 2
    assert "--learner 4xA100-80GB" in capsys.readouterr().err
    assert main([*words, "--learner", "2xH100"]) == 2
    assert "Add --learner.ranks 2" in capsys.readouterr().err
    assert main([*words, "--learner", "4xA100-80GB", "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    fewest, most = plan["range"]["machines"]
    assert fewest <= plan["machines"]["card"] <= most
    assert fewest < most
    least, highest = plan["range"]["usd_per_step"]
    assert 0 < least < plan["usd_per_step"] < highest
    assert "estimated" in plan["inputs"]["T_train"][1]
    assert plan["inputs"]["snapshot"][0] == "16.4 GB"
    assert plan["memory"]["learner"]["available"] == 80_000_000_000
    assert main([*words, "--learner", "4xA100-80GB", "--answer-tokens", "1024"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "once measured" in shown
    assert "answers of 1024, --answer-tokens" in shown


def test_the_learner_has_a_rank_for_each_gpu_that_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [*write(tmp_path, QWEN3_8B, SETTINGS.replace("ranks = 4\n", ""), OFFERS), "--learner", "4xA100-80GB"]
    assert main(words) == 0
    assert "learner.ranks 4" in " ".join(capsys.readouterr().out.split()), "what a run needs beside the plan"
    assert main([*words, "--learner.ranks", "2"]) == 2
    assert "has 4 GPUs and learner.ranks = 2" in capsys.readouterr().err


def test_a_teacher_costs_a_forward_pass_and_memory(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of a step with a teacher of the policy's size, a quarter more than the 6 operations: 2 for each weight."""
    found, seconds = {}, dict[str, float]()
    for name, distill in {
        "alone": "",
        "self": 'teacher = "self"',
        "model": f'teacher = "{tmp_path}/model"',
        "either": f'teacher = {{ a = "{tmp_path}/model", b = "{tmp_path}/model" }}',
    }.items():
        words = write(tmp_path, QWEN3_8B, f"{SETTINGS}[distill]\n{distill}\n", OFFERS)
        assert main([*words, "--learner", "4xA100-80GB", "--json"]) == 0
        found[name] = json.loads(capsys.readouterr().out)
        first = FirstPlan(configuration.load(tmp_path / "run.toml"), "4xA100-80GB", None)
        seconds[name], basis = first.train_seconds()
        assert ("for the teacher's logprobs" in basis.origin) == (name != "alone")
    parts = {name: plan["memory"]["learner"]["parts"]["teachers"] for name, plan in found.items()}
    assert 1.2 < seconds["self"] / seconds["alone"] < 1.4
    assert seconds["self"] == pytest.approx(seconds["model"])
    assert seconds["self"] == pytest.approx(seconds["either"]), "each row has one"
    assert (parts["alone"], parts["self"]) == (0, 0)
    assert parts["model"] == pytest.approx(2 * 8.19e9 / 4, rel=0.01)
    assert parts["either"] == pytest.approx(2 * parts["model"], abs=2)


def test_more_rollouts_at_once_are_proposed_where_there_is_no_plan(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    offers = (
        '[[offers]]\nname = "card"\nprice_usd_per_hour = 3.0\ngpu = "H200"\nup_mbps = 2000\ndown_mbps = 2000\ncount = '
    )
    words = [*write(tmp_path, MIXTURE, SETTINGS, offers + "12\n"), "--learner", "4xH200"]
    assert main([*words]) == 2
    told = capsys.readouterr().err
    assert "A plan that works, with more rollouts at once: `echo2 plan" in told


def test_a_gpu_of_an_offer_that_is_not_known_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = write(tmp_path, QWEN3_8B, SETTINGS, OFFERS.replace("5090", "9090"))
    assert main([*words, "--learner", "4xA100-80GB"]) == 2
    assert "offer 'card': gpu: the data sheet of 'RTX 9090' is not known" in capsys.readouterr().err
    assert gpu("rtx3090", "x").memory_gb == 24
