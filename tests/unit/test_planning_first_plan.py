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
from echo2.learner.decide.memory import GB, form_bytes
from echo2.learner.decide.model_shape import ModelShape, read_shape
from echo2.planning import first_plan
from echo2.planning.estimates import (
    Workload,
    rollouts_per_second,
    tokens_per_second,
    touched_weights,
    training_flops_per_token,
    training_seconds,
)
from echo2.planning.first_plan import FirstPlan
from echo2.planning.gpus import GPUS, Gpu, gpu, several
from echo2.planning.memory_needs import rollouts_held
from echo2.worker.decide.home import SamplingNeed
from first_plans import MIXTURE, QWEN3_8B, write
from real_runs import REPOSITORY

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
def test_common_names_of_gpus_are_recognised(text: str, count: int, memory_gb: float) -> None:
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


#: Parameters that the hub tells of each, from the headers of its safetensors files.
PUBLISHED = {
    "Qwen/Qwen2.5-0.5B-Instruct": 494_032_768,
    "Qwen/Qwen3-0.6B": 596_049_920,
    "Qwen/Qwen3-1.7B": 1_720_574_976,
    "Qwen/Qwen3-4B": 4_022_468_096,
    "Qwen/Qwen3-8B": 8_190_735_360,
    "Qwen/Qwen3-32B": 32_762_123_264,
    "Qwen/Qwen3-30B-A3B-Instruct-2507": 30_532_122_624,
}


def test_the_models_of_the_examples_are_known_without_a_network(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(first_plan, "_fetch_config", lambda path: pytest.fail(f"{path} was asked for"))
    examples = [*sorted((REPOSITORY / "examples" / "gpu").glob("*.toml")), REPOSITORY / "src/echo2/demo/sort.toml"]
    paths = {configuration.load(one).model.path for one in examples}
    assert paths - {"outputs/models/digit_sorting"} == PUBLISHED.keys()
    for path in paths:
        known = first_plan.fetched_shape(path).parameters
        assert known == pytest.approx(PUBLISHED.get(path, 7_042_080), rel=2e-4), path


def test_the_learner_has_a_rank_for_each_named_gpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
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
        "asked": 'teacher = "http://10.0.0.9:8000/v1"',
        "half": f'teacher = {{ a = "{tmp_path}/model", b = "http://10.0.0.9:8000/v1" }}',
    }.items():
        words = write(tmp_path, QWEN3_8B, f"{SETTINGS}[distill]\n{distill}\n", OFFERS)
        assert main([*words, "--learner", "4xA100-80GB", "--json"]) == 0
        found[name] = json.loads(capsys.readouterr().out)
        first = FirstPlan(configuration.load(tmp_path / "run.toml"), "4xA100-80GB", None)
        seconds[name], basis = first.train_seconds()
        assert ("for the teacher's logprobs" in basis.origin) == (name not in ("alone", "asked"))
        assert ("http://10.0.0.9:8000/v1 computes elsewhere" in basis.origin) == (name in ("asked", "half"))
    parts = {name: plan["memory"]["learner"]["parts"]["teachers"] for name, plan in found.items()}
    assert 1.2 < seconds["self"] / seconds["alone"] < 1.4
    assert seconds["self"] == pytest.approx(seconds["model"])
    assert seconds["self"] == pytest.approx(seconds["either"]), "each row has one"
    assert (parts["alone"], parts["self"], parts["asked"]) == (0, 0, 0)
    assert parts["half"] == parts["model"]
    assert seconds["asked"] == seconds["alone"]
    assert seconds["half"] - seconds["alone"] == pytest.approx((seconds["model"] - seconds["alone"]) / 2)
    assert parts["model"] == pytest.approx(2 * 8.19e9 / 4, rel=0.01)
    assert parts["either"] == pytest.approx(2 * parts["model"], abs=2)


def test_an_impossible_plan_proposes_more_rollouts_at_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    offers = (
        '[[offers]]\nname = "card"\nprice_usd_per_hour = 3.0\ngpu = "H200"\nup_mbps = 2000\ndown_mbps = 2000\ncount = '
    )
    words = [*write(tmp_path, MIXTURE, SETTINGS, offers + "12\n"), "--learner", "4xH200"]
    assert main([*words]) == 2
    told = capsys.readouterr().err
    assert "A plan that works, with more rollouts at once: `echo2 plan" in told


def test_the_error_names_the_unknown_gpu_of_an_offer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = write(tmp_path, QWEN3_8B, SETTINGS, OFFERS.replace("5090", "9090"))
    assert main([*words, "--learner", "4xA100-80GB"]) == 2
    assert "offer 'card': gpu = 'RTX 9090': the data sheet of 'RTX 9090' is not known" in capsys.readouterr().err
    assert gpu("rtx3090", "x").memory_gb == 24


# ---- forms -----------------------------------------------------------------------------------------------------------


def test_the_bytes_of_a_form_are_those_of_its_blocks() -> None:
    """By hand, Qwen3-8B: 8,190,427,136 weights, 1,244,659,712 of them in the embedding and the output layer."""
    eight = shape(QWEN3_8B)
    assert form_bytes(eight, "q8_0") == 8_190_427_136 * 8.5 // 8
    assert form_bytes(eight, "q4_0") == (6_945_767_424 * 4.5 + 1_244_659_712 * 8.5) // 8
    assert form_bytes(eight, "mlx-q4") == (6_945_767_424 * 5 + 1_244_659_712 * 9) // 8


@pytest.mark.parametrize(
    ("memory_gb", "form", "length", "rollouts"),
    [
        (10.7, "mlx-q8", 640, 0),  # a Mac with 16 GB
        (10.7, "mlx-q4", 640, 10),
        (8, "q8_0", 640, 0),
        (8, "q4_0", 640, 4),
        (8, "q4_0", 2176, 0),
        (12, "q8_0", 640, 4),
        (12, "q4_0", 640, 16),
        (12, "q4_0", 2176, 4),
    ],
)
def test_tokens_that_small_machines_hold_beside_8_billion_weights(
    memory_gb: float, form: str, length: int, rollouts: int
) -> None:
    """The table of docs/capacity.md, and by hand: .9 of the memory holds a process, the weights, logits, and three
    times the keys and values in 16 bits."""
    eight = shape(QWEN3_8B)
    found = rollouts_held(SamplingNeed(eight, 64, length, 2, has_adapter=True), form, memory_gb)
    assert found == rollouts
    fixed = 0.5 * GB + form_bytes(eight, form) + 4 * 512 * 151936
    most = (0.9 * memory_gb * GB - fixed) / (3 * length * 36 * 2 * 8 * 128 * 2 + 16 * 151936)
    assert found == (int(most) if most >= 4 else 0)
    whole = rollouts_held(SamplingNeed(eight, 64, length, 2, has_adapter=False), form, memory_gb)
    assert whole == 0  # the form of the next version is loaded beside it


def test_decoding_is_bound_by_the_bytes_of_the_form() -> None:
    """By hand: 4 rollouts of 256 tokens after prompts of 128 on a card with 272 GB/s and 30 Tflop/s."""
    eight, card = shape(QWEN3_8B), GPUS["RTX-4060"]
    width = form_bytes(eight, "q4_0") / eight.parameters
    work = Workload(eight, 256.0, bytes_per_weight=width, engine="llamacpp-q4_0")
    reading = (5_229_445_120 + 2 * 73728 * (128 + 128) * 4) / (272e9 * 0.9)
    active = eight.parameters - 151936 * 4096
    computing = 2 * active * 4 * (1 + 128 / 256) / (30e12 * 0.8)
    assert tokens_per_second(work, card, 4) == pytest.approx(4 / (reading + computing + 0.02), rel=0.02)
    published = replace(work, bytes_per_weight=2.0)
    assert tokens_per_second(work, card, 4) > 1.9 * tokens_per_second(published, card, 4)


HOME = SETTINGS.replace("4096", "512") + "[lora]\nrank = 16\n"
HOME_OFFERS = """[[offers]]
name = "mac"
price_usd_per_hour = 0.01
gpu = "M4-16GB"
form = "mlx-q4"
count = 64
[[offers]]
name = "old"
price_usd_per_hour = 0.01
gpu = "RTX 4060"
count = 64
"""


def test_plan_accepts_machines_that_round(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = write(tmp_path, QWEN3_8B, HOME, HOME_OFFERS)
    assert main([*words, "--learner", "4xA100-80GB", "--train-seconds", "600", "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert "for vllm and the engines that round" in said["inputs"]["rates"][1]
    work = Workload(
        shape(QWEN3_8B), 256.0, bytes_per_weight=form_bytes(shape(QWEN3_8B), "mlx-q4") / 8_190_427_136, engine="mlx-q4"
    )
    rate = rollouts_per_second(work, GPUS["M4-16GB"], 10)
    assert said["inputs"]["rates"][0].startswith(f"mac {rate:.3g}/s with 10 at once in mlx-q4, old ")
    assert said["machines"].keys() == {"mac"}
    name, why = said["inputs"]["without"]
    assert name == "old"
    assert why.startswith("A worker on 'old' needs ")
    assert why.endswith(', form = "q4_0" would hold 4 rollouts at once')


@pytest.mark.parametrize(
    ("values", "offers", "said"),
    [
        (QWEN3_8B, HOME_OFFERS.replace("mlx-q4", "q5_k"), "offer 1 ('mac'): form = 'q5_k' is none. Give one of mlx-q8"),
        (MIXTURE, HOME_OFFERS, "offer 'mac': form = 'mlx-q4': the engines that round have the models of compact, and"),
        (
            QWEN3_8B,
            HOME_OFFERS.replace('"mlx-q4"', '"mlx-q8"').partition('[[offers]]\nname = "old')[0],
            "A worker on 'mac' with form = 'mlx-q8' needs",
        ),
    ],
)
def test_a_form_that_no_worker_could_use_is_refused(
    values: dict[str, object], offers: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*write(tmp_path, values, HOME, offers), "--learner", "4xA100-80GB"]) == 2
    assert said in capsys.readouterr().err


def test_waiting_for_a_remote_teacher_is_named_and_is_not_training_time(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = write(tmp_path, QWEN3_8B, f'{SETTINGS}[distill]\nteacher = "http://10.0.0.9:8000/v1"\n', OFFERS)
    (run := tmp_path / "run").mkdir()
    rows = [{"step": at, "time/train": 100.0, "time/teacher_wait": 2.5, "time/teacher": 9.0} for at in range(1, 5)]
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    words += ["--learner", "4xA100-80GB", "--snapshot-bytes", "1000000000", "--broadcast-seconds", "1"]
    assert main([*words, "--from", str(run)]) == 0
    told = " ".join(capsys.readouterr().out.split())
    assert "T_train 100 s" in told
    assert "teacher 2.5 s (waited in a step for a teacher that computes elsewhere" in told
