"""Where memory is short, a plan proposes to hold in few bits what costs the least learning, and that plan exists."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest

from echo2.cli import main
from echo2.core.types import Hardware
from echo2.learner.decide.memory import GB
from echo2.planning import here, plan_request, ways_out
from first_plans import QWEN3_1_7B, QWEN3_8B, write
from rollout_cases import tokenizer_files

SETTINGS = """[run]
max_steps = 20
[sampling]
group_size = 8
groups_per_batch = 2
max_tokens = 512
[schedule]
groups_per_step = 8
max_staleness = 3
[workers]
count = 0
"""
OFFERS = '[[offers]]\nname = "card"\nprice_usd_per_hour = 0.4\nrollouts_per_second = 1\ncount = 4\nmemory_gb = 48\n'
TRAINS = ["--train-seconds", "120"]


def proposed(words: list[str], capsys: pytest.CaptureFixture[str]) -> tuple[list[str], dict[str, Any]]:
    """The command that a refusal names, and the plan that it prints when it is taken literally."""
    assert main(words) == 2
    told = capsys.readouterr().err
    command = shlex.split(told.partition("A plan that works: `echo2 ")[2].partition("`")[0])
    assert command, told
    assert main([*command, "--json"]) == 0
    plan: dict[str, Any] = json.loads(capsys.readouterr().out)
    learner = plan["memory"]["learner"]
    assert learner["bytes"] <= learner["available"]
    return command, plan


def test_a_base_under_adapters_is_held_in_four_bits(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [*write(tmp_path, QWEN3_8B, SETTINGS + "[lora]\nrank = 16\n", OFFERS), *TRAINS, "--learner-memory-gb", "16"]
    command, plan = proposed(words, capsys)
    assert command[len(words) :] == ["--learner.quantised", "base"]
    assert plan["memory"]["learner"]["parts"]["weights"] < 0.5 * plan["memory"]["worker"]["parts"]["weights"]


def test_moments_are_held_in_eight_bits_where_there_is_no_gpu(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (plan_request, ways_out):
        monkeypatch.setattr(module, "this_machine", lambda: Hardware(26 * GB))
    words = [*write(tmp_path, QWEN3_1_7B, SETTINGS, OFFERS), *TRAINS]
    command, plan = proposed(words, capsys)
    assert command[len(words) :] == ["--learner.quantised", "moments"]
    parts = plan["memory"]["learner"]["parts"]
    assert parts["moments"] < 0.52 * parts["weights"]


def test_a_run_on_this_machine_is_made_to_fit_too(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, QWEN3_1_7B, SETTINGS.replace("count = 0", "count = 1"), OFFERS)
    model = tmp_path / "model"
    for name, data in tokenizer_files().items():
        if name != "config.json":
            (model / name).write_bytes(data)
    header = json.dumps({"w": {"dtype": "F32", "shape": [1000, 1000], "data_offsets": [0, 4_000_000]}}).encode()
    (model / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(4_000_000))
    for module in (here, ways_out):
        monkeypatch.setattr(module, "this_machine", lambda: Hardware(31 * GB))
    words = ["plan", str(tmp_path / "run.toml"), "--here"]
    command, _ = proposed(words, capsys)
    assert command == [*words, "--learner.quantised", "moments"]
    monkeypatch.setattr(here, "this_machine", lambda: Hardware(2 * GB))
    monkeypatch.setattr(ways_out, "this_machine", lambda: Hardware(2 * GB))
    assert main(words) == 2
    assert "A plan that works" not in capsys.readouterr().err


def test_a_gpu_first_puts_its_moments_into_the_machine_s_memory(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """That gives the same result, so nothing is proposed; where that is not enough, an adapter over 4 bits is."""
    words = [*write(tmp_path, QWEN3_1_7B, SETTINGS, OFFERS), *TRAINS, "--learner-memory-gb"]
    assert main([*words, "24", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["memory"]["learner"]["offloaded"]
    command, _ = proposed([*words, "4"], capsys)
    assert {"--learner.quantised", "base", "--lora.rank"} < set(command)
