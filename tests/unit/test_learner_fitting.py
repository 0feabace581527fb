"""Whether learner and workers fit on their machines: the papers' own sizes, refusals, and what plan and start say."""

from __future__ import annotations

import json
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from echo2 import config as configuration
from echo2.cli import main
from echo2.config import Config
from echo2.config.offers import load_offers
from echo2.core.errors import UserError
from echo2.core.types import Hardware
from echo2.launch import preflight
from echo2.launch.preflight import check_memory, take_turns
from echo2.learner.core.fitting import learner_need, learner_setup, model_shape, row_tokens, settle, worker_need
from echo2.learner.decide.memory import GB, GRADIENTS, MOMENTS, PROCESS_BYTES
from echo2.learner.decide.model_shape import ModelShape, read_shape
from echo2.planning.memory_needs import learner_that_fits, offers_that_fit, worker_that_fits
from model_cases import QWEN3_30B_A3B

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
A100, RTX5090 = Hardware(1000 * GB, (80 * GB,)), Hardware(64 * GB, (32 * GB,))
FOUR_A100 = Hardware(1000 * GB, (80 * GB,) * 4)
QWEN3 = {"model_type": "qwen3", "vocab_size": 151_936, "num_key_value_heads": 8, "head_dim": 128, "dtype": "bfloat16"}
SIZES: dict[str, dict[str, Any]] = {
    "qwen3_4b": {
        **QWEN3,
        "hidden_size": 2560,
        "intermediate_size": 9728,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "tie_word_embeddings": True,
    },
    "qwen3_8b": {
        **QWEN3,
        "hidden_size": 4096,
        "intermediate_size": 12_288,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
    },
    "qwen3_32b_lora": {
        **QWEN3,
        "hidden_size": 5120,
        "intermediate_size": 25_600,
        "num_hidden_layers": 64,
        "num_attention_heads": 64,
    },
    "one_gpu_1_7b": {
        **QWEN3,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "tie_word_embeddings": True,
    },
    "qwen3_30b_a3b": QWEN3_30B_A3B,
    "qwen3_30b_a3b_lora": QWEN3_30B_A3B,
}
SIZES["one_gpu_0_6b"] = {**SIZES["one_gpu_1_7b"], "hidden_size": 1024, "intermediate_size": 3072}
SIZES |= {"one_gpu_8b_lora": SIZES["qwen3_8b"], "one_gpu_24gb": SIZES["qwen3_8b"], "one_gpu_8gb": SIZES["one_gpu_0_6b"]}
MIXTURE = ("qwen3_30b_a3b", "qwen3_30b_a3b_lora")
PARAMETERS = {"qwen3_4b": 4.02e9, "qwen3_8b": 8.19e9, "qwen3_32b_lora": 32.8e9, **dict.fromkeys(MIXTURE, 30.5e9)}
PARAMETERS |= {"one_gpu_8b_lora": 8.19e9, "one_gpu_1_7b": 1.72e9, "one_gpu_0_6b": 0.596e9}
PARAMETERS |= {"one_gpu_24gb": 8.19e9, "one_gpu_8gb": 0.596e9}
H200 = Hardware(1000 * GB, (141 * GB,))
LEARNER = {"qwen3_4b": FOUR_A100, "qwen3_8b": FOUR_A100, "qwen3_32b_lora": H200}
LEARNER |= {"qwen3_30b_a3b": Hardware(2000 * GB, (141 * GB,) * 8), "qwen3_30b_a3b_lora": H200}
GIB = 1 << 30
LEARNER |= {"one_gpu_8b_lora": Hardware(32 * GIB, (12 * GIB,)), "one_gpu_1_7b": Hardware(32 * GIB, (16 * GIB,))}
LEARNER["one_gpu_0_6b"] = LEARNER["one_gpu_8gb"] = Hardware(16 * GIB, (8 * GIB,))
LEARNER["one_gpu_24gb"] = Hardware(32 * GIB, (24 * GIB,))
WORKER = {"qwen3_4b": RTX5090, "qwen3_8b": RTX5090, "qwen3_32b_lora": A100, **dict.fromkeys(MIXTURE, A100)}


WORKER |= {"one_gpu_8b_lora": Hardware(32 * GIB, (24 * GIB,)), "one_gpu_1_7b": Hardware(16 * GIB, (6 * GIB,))}
WORKER |= {name: LEARNER[name] for name in ("one_gpu_0_6b", "one_gpu_8gb", "one_gpu_24gb")}


def shape_of(name: str) -> ModelShape:
    shape = read_shape(SIZES[name])
    assert shape is not None
    return shape


def example(name: str) -> Config:
    return configuration.load(EXAMPLES / "gpu" / f"{name}.toml")


@pytest.mark.parametrize("name", SIZES)
def test_the_papers_sizes_fit_their_machines(name: str) -> None:
    shape, config = shape_of(name), example(name)
    assert shape.parameters == pytest.approx(PARAMETERS[name], rel=0.01)
    hardware = LEARNER[name]
    assert config.learner.ranks == len(hardware.gpus)
    learner = learner_that_fits(config, shape, hardware)
    assert learner.microbatch.tokens >= row_tokens(config, shape)
    assert learner.total <= 0.9 * hardware.gpus[0]
    assert worker_that_fits(config, shape, WORKER[name]).total <= WORKER[name].gpus[0]


def test_settings_that_the_examples_call_too_large_do_not_fit() -> None:
    adapter = example("qwen3_32b_lora")
    whole = replace(adapter, lora=Config().lora, learner=replace(adapter.learner, ranks=4))
    assert learner_setup(whole, shape_of("qwen3_32b_lora"), on_gpu=True).needed(1, True) > 130 * GB
    with pytest.raises(UserError, match=r"The learner needs 1\d\d\.\d GB .*learner\.ranks = 8"):
        learner_that_fits(whole, shape_of("qwen3_32b_lora"), FOUR_A100)
    config = example("qwen3_8b")
    longer = replace(config, sampling=replace(config.sampling, max_tokens=8192))
    with pytest.raises(UserError, match=r"A worker needs 3\d\.\d GB .* and a GPU has 32\.0 GB"):
        worker_that_fits(longer, shape_of("qwen3_8b"), RTX5090)


def test_an_offer_that_cannot_hold_a_worker_is_left_out_by_name_and_refused_if_none_can() -> None:
    offers = load_offers(EXAMPLES / "offers.toml")
    config, shape = example("qwen3_32b_lora"), shape_of("qwen3_32b_lora")
    fitting, left_out = offers_that_fit(config, shape, offers)
    assert [offer.name for offer in fitting] == ["a100", "desk"]  # the desk's memory is not known
    assert left_out.keys() == {"rtx5090", "rtx5090-spot"}
    assert left_out["rtx5090"].startswith("A worker on 'rtx5090' needs")
    with pytest.raises(UserError, match=r"A worker on 'rtx5090' needs"):
        offers_that_fit(config, shape, offers[:2])


def test_a_model_under_adapters_counts_as_it_travels() -> None:
    config, shape = example("qwen3_32b_lora"), replace(shape_of("qwen3_32b_lora"), stored_bytes=4)
    for dtype, width in (("bfloat16", 2), ("float32", 4)):
        asked = replace(config, model=replace(config.model, snapshot_dtype=dtype))
        assert worker_need(asked, shape, A100).parts["weights"] == width * shape.parameters
        assert learner_setup(asked, shape, on_gpu=True).base_bytes == width
    narrow = replace(config, model=replace(config.model, snapshot_dtype="float32"))
    in_4_bits = replace(narrow, learner=replace(config.learner, quantised="base"))
    assert worker_need(in_4_bits, shape, A100).parts["weights"] == 2 * shape.parameters
    assert worker_need(narrow, shape_of("qwen3_32b_lora"), A100).parts["weights"] == 2 * shape.parameters


def test_a_learner_that_cannot_fit_gets_a_remedy() -> None:
    one = replace(example("qwen3_8b"), learner=replace(example("qwen3_8b").learner, ranks=1))
    with pytest.raises(UserError, match=r"The learner needs 1\d\d\.\d GB .*moments.* has 80\.0 GB .*lora\.rank"):
        learner_that_fits(one, shape_of("qwen3_8b"), Hardware(64 * GB, A100.gpus))


def test_the_micro_batch_is_the_same_on_every_start_and_never_below_the_longest_row() -> None:
    config, shape = Config(), shape_of("qwen3_4b")
    small = Hardware(40 * GB)
    assert settle(config, shape, small) == settle(config, shape, small)
    assert settle(config, shape, small).tokens >= config.sampling.max_tokens
    fixed = replace(config, learner=replace(config.learner, tokens_per_microbatch=77))
    assert settle(fixed, shape, small).tokens == 77


def test_local_workers_take_their_memory_from_the_learners() -> None:
    shape, config = shape_of("qwen3_4b"), Config()
    alone = replace(config, workers=replace(config.workers, count=0))
    machine = Hardware(500 * GB)
    taken = learner_need(alone, shape, machine).available - learner_need(config, shape, machine).available
    assert taken == worker_need(config, shape, machine).total
    one, two = Hardware(500 * GB, (80 * GB,)), Hardware(500 * GB, (80 * GB, 80 * GB))
    assert learner_need(config, shape, one).available == 80 * GB - taken
    assert learner_need(config, shape, two).available == 80 * GB


@pytest.mark.parametrize(
    ("machine", "own", "stranger"),
    [
        (Hardware(0, (80 * GB,)), 0, 1),  # on a GPU new weights take half of what is free
        (Hardware(0, (40 * GB,)), 0, 0),  # no room for both: new weights wait until nothing is sampled
        (Hardware(600 * GB), 1, 1),  # on a CPU a thirty-second of it, or an eighth
        (Hardware(200 * GB), 0, 1),
        (Hardware(100 * GB), 0, 0),
    ],
)
def test_a_stranger_has_the_weights_that_its_rollouts_began_with(machine: Hardware, own: int, stranger: int) -> None:
    config, shape = example("qwen3_8b"), shape_of("qwen3_8b")
    config = replace(config, workers=replace(config.workers, engine="compact"))
    one = 2 * shape.parameters
    for keeps_both, sets in ((False, own), (True, stranger)):
        need = worker_need(config, shape, machine, keeps_both)
        assert need.parts["second and packed weights"] == sets * one
        assert need.total <= need.available
    adapter = replace(config, lora=replace(config.lora, rank=16))
    assert worker_need(adapter, shape, A100, keeps_both=True).total == worker_need(adapter, shape, A100).total


def test_plan_says_it_for_people_and_for_programs_and_refuses(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps({**SIZES["qwen3_4b"], "tie_word_embeddings": True}))
    shape = model_shape(str(model))
    assert shape == replace(shape_of("qwen3_4b"), max_positions=32_768)  # as the class has it
    words = ["plan", str(EXAMPLES / "gpu" / "qwen3_4b.toml"), "--offers", str(EXAMPLES / "offers.toml")]
    words += ["--train-seconds", "1600", "--snapshot-bytes", "8e9", "--model.path", str(model)]
    assert main([*words, "--learner-memory-gb", "80", "--json"]) == 0
    memory = json.loads(capsys.readouterr().out)["memory"]
    assert memory["learner"]["bytes"] == sum(memory["learner"]["parts"].values()) <= 80 * GB
    tokens = memory["learner"]["tokens_per_microbatch"]
    assert tokens >= 8192
    assert memory["worker"]["parts"]["weights"] == 2 * shape.parameters
    assert memory["stranger"]["bytes"] == memory["worker"]["bytes"] + 2 * shape.parameters
    assert main([*words, "--learner-memory-gb", "80"]) == 0
    assert f"micro-batches of {tokens} tokens" in capsys.readouterr().out
    assert main([*words, "--learner-memory-gb", "16"]) == 2
    told = capsys.readouterr().err
    assert "The learner needs" in told
    assert main(shlex.split(told.partition("A plan that works: `echo2 ")[2].partition("`")[0])) == 0


def test_a_start_refuses_what_this_machine_cannot_hold(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**SIZES["qwen3_8b"], "num_hidden_layers": 900}))
    config = configuration.build({"model": {"path": str(tmp_path)}}, "a test")
    with pytest.raises(UserError, match=r"needs .* GB"):
        check_memory(config)
    (tmp_path / "config.json").write_text("{}")
    check_memory(config)  # nothing is known of it


def test_moments_leave_a_gpu_that_is_too_small_and_gradients_follow_them() -> None:
    config, shape = example("one_gpu_1_7b"), shape_of("one_gpu_1_7b")

    def offloaded(gpu_gb: int, memory_gb: int = 64, **changes: Any) -> str:
        asked = replace(config, learner=replace(config.learner, **changes))
        return settle(asked, shape, Hardware(memory_gb * GB, (gpu_gb * GB,))).offloaded

    assert [offloaded(size) for size in (48, 24, 16)] == ["", MOMENTS, GRADIENTS]
    assert offloaded(8) == ""  # of no use
    assert offloaded(16, memory_gb=16) == ""  # the machine has no room either
    assert offloaded(26, quantised="moments") == ""  # they fit
    with pytest.raises(UserError, match=r'The learner needs .*learner\.quantised = "moments".*lora\.rank = 16'):
        learner_that_fits(config, shape, Hardware(16 * GB, (16 * GB,)))
    lora = replace(example("one_gpu_8b_lora"), learner=config.learner)
    with pytest.raises(UserError, match=r'The learner needs .*learner\.quantised = "base"'):
        learner_that_fits(lora, shape_of("one_gpu_8b_lora"), Hardware(32 * GB, (12 * GB,)))


def test_learner_and_workers_take_turns_on_a_gpu_that_does_not_hold_both() -> None:
    for name in ("one_gpu_8gb", "one_gpu_24gb"):
        config, shape, machine = example(name), shape_of(name), LEARNER[name]
        need = learner_that_fits(config, shape, machine)
        assert need.microbatch.in_turns
        assert need.available == machine.gpus[0] - PROCESS_BYTES
        away = sum(need.parts[part] for part in ("weights", "moments") if not need.microbatch.offloaded)
        assert need.host >= away + PROCESS_BYTES
        beside = replace(config, sampling=replace(config.sampling, max_tokens=64, groups_per_batch=1))
        assert settle(beside, shape, machine).in_turns == (name == "one_gpu_24gb")  # 8 billion weights twice never fit
        for other in (
            Hardware(machine.memory_bytes, machine.gpus * 2),  # a GPU for each
            Hardware(machine.memory_bytes // 3, machine.gpus),  # no room for what is put away
            Hardware(machine.memory_bytes, (machine.gpus[0] // 2,)),  # no room for either
            Hardware(machine.memory_bytes * 4),  # one memory for all
        ):
            assert not settle(config, shape, other).in_turns
        for workers in ({"count": 0}, {"engine": "llamacpp-q8_0"}):
            changed = replace(config, workers=replace(config.workers, **workers))
            assert not settle(changed, shape, machine).in_turns


def test_plan_and_a_start_say_that_they_take_turns(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, name = tmp_path / "model", "one_gpu_8gb"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(SIZES[name]))
    words = ["plan", str(EXAMPLES / "gpu" / f"{name}.toml"), "--offers", str(EXAMPLES / "offers.toml")]
    words += ["--train-seconds", "1600", "--snapshot-bytes", "8e9", "--model.path", str(model)]
    words += ["--learner-memory-gb", "8.59"]
    assert main([*words, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["memory"]["learner"]["in_turns"]
    assert main(words) == 0
    assert "take turns on the GPU" in capsys.readouterr().out
    config = replace(example(name), model=replace(example(name).model, path=str(model)))
    assert not take_turns(config)  # there is no GPU
    monkeypatch.setattr(preflight, "this_machine", lambda: LEARNER[name])
    assert take_turns(config)
