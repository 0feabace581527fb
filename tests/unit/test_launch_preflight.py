"""`checks.check`: every mistake that can be found before a process starts, in one sentence that says what to do."""

from __future__ import annotations

import json
import socket
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from echo2.config import build
from echo2.config import rundir as run_directories
from echo2.config.rundir import RunDir, claimed, create
from echo2.core.errors import UserError
from echo2.launch import preflight
from echo2.launch.preflight import check
from echo2.launch.start import absolute, open_run, run
from model_cases import LLAMA


def refusal(raw: dict[str, Any]) -> str:
    with pytest.raises(UserError) as caught:
        check(build(raw, "my.toml"))
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_good_settings_pass(raw: dict[str, Any]) -> None:
    check(build(raw, "my.toml"))


@pytest.mark.parametrize("form", ["text", "messages"])
@pytest.mark.parametrize("template", ["none", "chat_template.jinja", "tokenizer_config.json"])
def test_texts_that_a_chat_model_reads_without_its_template_are_noted(
    raw: dict[str, Any], capsys: pytest.CaptureFixture[str], form: str, template: str
) -> None:
    prompt = "1 + 1 =" if form == "text" else [{"role": "user", "content": "1 + 1 ="}]
    Path(raw["tasks"]["source"]).write_text(json.dumps({"prompt": prompt, "answer": "2"}) + "\n")
    if template != "none":
        (Path(raw["model"]["path"]) / template).write_text('{"chat_template": "..."}')
    check(build(raw, "my.toml"))
    noted = "are texts, which the model reads as they are, without its chat template" in capsys.readouterr().err
    assert noted == (form == "text" and template != "none")


def test_paths_of_a_run_become_absolute_and_other_names_stay(
    raw: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own.py").write_text("")
    for given, became in {
        "own.py:Own": f"{tmp_path}/own.py:Own",
        "harness:own.py:Own": f"harness:{tmp_path}/own.py:Own",
        "openenv:http://127.0.0.1:8003": "openenv:http://127.0.0.1:8003",
        "verifiers": "verifiers",
        "package.module:Own": "package.module:Own",
    }.items():
        raw["tasks"]["environment"] = given
        assert absolute(build(raw, "my.toml")).tasks.environment == became


@pytest.mark.parametrize(
    ("section", "values", "words"),
    [
        ("reward", {"functions": ["environment"]}, ['has "environment"', "tasks.environment is empty"]),
        (
            "tasks",
            {"source": "TMP/rows.jsonl", "environment": "sokobam"},
            ["'sokobam' is not a reference to code", "file.py:Name"],
        ),
        ("tasks", {"source": "TMP/rows.jsonl", "environment": "nowhere.py:Game"}, ["There is no file nowhere.py"]),
        ("model", {"path": ""}, ["model.path is empty", "name a Hugging Face model"]),
        ("model", {"path": "TMP"}, ["model.path = 'TMP'", "no config.json"]),
        ("model", {"path": "TMP/nowhere"}, ["model.path = 'TMP/nowhere'", "no such directory"]),
        ("model", {"path": "no/such/model"}, ["model.path = 'no/such/model'", "not a hub id (owner/name)"]),
        ("tasks", {"source": ""}, ["tasks.source is empty"]),
        ("tasks", {"source": "TMP/none.jsonl"}, ["TMP/none.jsonl"]),
        ("tasks", {"source": "digit_sortin"}, ["'digit_sortin'", "Did you mean digit_sorting?"]),
        ("eval", {"source": "TMP/none.parquet"}, ["TMP/none.parquet"]),
        ("reward", {"functions": []}, ["reward.functions is empty", '["exact_match"]']),
        ("reward", {"functions": ["exact_mach"]}, ["'exact_mach'", "Did you mean exact_match?"]),
        ("reward", {"functions": ["TMP/none.py:f"]}, ["TMP/none.py"]),
        (
            "tasks",
            {"source": "TMP/rows.jsonl", "environment": "harbor"},
            ["'TMP/rows.jsonl'", "a directory of Harbor"],
        ),
        ("head", {"store": "TMP/rows.jsonl/store"}, ["head.store = 'TMP/rows.jsonl/store'", "Name a directory"]),
        ("head", {"store": "/proc/none"}, ["head.store = '/proc/none'", "Name a directory"]),
        ("head", {"store": "s9://bucket/a"}, ["head.store = 's9://bucket/a'", "Install the package for s9://"]),
    ],
)
def test_the_error_has_the_value_and_a_remedy(
    raw: dict[str, Any], tmp_path: Path, section: str, values: dict[str, Any], words: list[str]
) -> None:
    fill: dict[str, Any] = json.loads(json.dumps(values).replace("TMP", str(tmp_path)))
    message = refusal(raw | {section: fill})
    for word in words:
        assert word.replace("TMP", str(tmp_path)) in message


def test_the_error_about_a_bad_row_has_file_and_line(raw: dict[str, Any], tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "a", "answer": "b"}\n{"prompt": 3}\n')
    assert f"{rows}:2" in refusal(raw)
    rows.write_text('{"prompt": "a"}\n{"prompt"\n')
    assert f"{rows}:2" in refusal(raw)


def test_a_model_without_a_tokenizer_is_refused(raw: dict[str, Any]) -> None:
    (Path(raw["model"]["path"]) / "tokenizer.json").unlink()
    assert "holds no tokenizer" in refusal(raw)


def test_a_model_without_weights_is_refused(raw: dict[str, Any]) -> None:
    (Path(raw["model"]["path"]) / "model.safetensors").unlink()
    assert "holds no weights" in refusal(raw)


def test_adapters_of_layers_that_the_model_lacks_are_refused(raw: dict[str, Any]) -> None:
    weights = {f"model.layers.0.{name}.weight": np.zeros((2, 2)) for name in ("self_attn.q_proj", "mlp.up_proj")}
    weights |= {"lm_head.weight": np.zeros((2, 2)), "model.norm.weight": np.zeros(2)}
    save_file(weights, Path(raw["model"]["path"]) / "model.safetensors")
    lacks = raw | {"lora": {"rank": 2, "targets": ["q_proj", "query"]}}
    linear = "q_proj, up_proj; "
    assert f"lora.targets has 'query', and no linear layer of the model has that name. There are: {linear}" in refusal(
        lacks
    )
    check(build(raw | {"lora": {"rank": 2, "targets": ["q_proj", "mlp.up_proj"]}}, "my.toml"))


@pytest.mark.parametrize(
    ("file", "text", "words"),
    [
        ("model/tokenizer.json", "{}", "The model's tokenizer can't be used: no tokenizer that transformers reads"),
        ("rows.jsonl", '{"prompt": [{"role": "user", "content": "a"}], "answer": "b"}', "has no chat template"),
    ],
)
def test_a_dry_run_finds_what_the_head_would_find(
    raw: dict[str, Any], tmp_path: Path, file: str, text: str, words: str
) -> None:
    (tmp_path / file).write_text(text)
    path = tmp_path / "my.json"
    path.write_text(json.dumps(raw))
    with pytest.raises(UserError, match=words):
        run(path, tmp_path / "run", resume=False, dry_run=True, overrides={}, as_json=False)


def test_a_dry_run_minds_no_run_that_is_there_already(
    raw: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, out = tmp_path / "my.json", tmp_path / "run"
    path.write_text(json.dumps(raw))
    with pytest.raises(UserError, match="Nothing to resume"):
        run(path, out, resume=True, dry_run=True, overrides={}, as_json=False)
    create(out, build(raw, "my.json"), resume=False)
    run(path, out, resume=False, dry_run=True, overrides={}, as_json=False)
    assert f"{out} holds a run already: a start needs --resume" in capsys.readouterr().err
    run(path, out, resume=True, dry_run=True, overrides={}, as_json=False)


def test_foreign_files_in_a_new_run_directory_stay(raw: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "rollouts").mkdir()
    (tmp_path / "rollouts" / "mine.jsonl").touch()
    create(tmp_path, build(raw, "my.json"), resume=False)
    assert (tmp_path / "rollouts" / "mine.jsonl").exists()


def test_a_model_that_the_engine_cannot_run_is_refused_with_the_engine_that_can(raw: dict[str, Any]) -> None:
    (Path(raw["model"]["path"]) / "config.json").write_text(json.dumps({**LLAMA, "model_type": "gpt_neox"}))
    check(build(raw, "my.toml"))  # `auto` takes the other one
    assert 'Set workers.engine = "auto" or "transformers"' in refusal({**raw, "workers": {"engine": "compact"}})


@pytest.mark.parametrize("engine", ["llamacpp-q4_0", "mlx", "mlx-q8"])
def test_a_model_that_engines_of_homes_cannot_run_is_refused(raw: dict[str, Any], engine: str) -> None:
    (Path(raw["model"]["path"]) / "config.json").write_text(json.dumps({**LLAMA, "model_type": "mistral"}))
    said = refusal({**raw, "workers": {"engine": engine, "count": 0}})
    assert f"workers.engine = '{engine}' does not support model_type = 'mistral'" in said
    assert 'Set workers.engine = "auto"' in said
    check(build({**raw, "workers": {"engine": "compact", "count": 0}}, "my.toml"))


@pytest.mark.parametrize(
    ("engine", "python", "told"),
    [
        ("vllm", "", "this Python environment has no vllm. Set ECHO2_ENGINE_PYTHON"),
        ("vllm", "/nowhere/python", "ECHO2_ENGINE_PYTHON = '/nowhere/python', which does not exist"),
        ("llamacpp-q8_0", sys.executable, "workers.count = 1: llama_cpp not installed (pip install 'echo2[llamacpp]')"),
    ],
)
def test_an_engine_that_the_workers_here_would_not_find_is_refused(
    raw: dict[str, Any], engine: str, python: str, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ECHO2_ENGINE_PYTHON", python)
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "llama_cpp", None)
        patch.setitem(sys.modules, "gguf", json)  # any module
        assert told in refusal({**raw, "workers": {"engine": engine}})
    check(build({**raw, "workers": {"engine": engine, "count": 0}}, "my.toml"))  # others may have it
    if engine != "vllm":
        return
    monkeypatch.setenv("ECHO2_ENGINE_PYTHON", sys.executable)
    check(build({**raw, "workers": {"engine": engine}}, "my.toml"))


@pytest.mark.parametrize("count", [0, 1])
def test_an_engine_that_does_not_exist_is_refused(raw: dict[str, Any], count: int) -> None:
    message = refusal({**raw, "workers": {"engine": "vlm", "count": count}})
    assert message.startswith("There is no engine 'vlm'. Did you mean vllm?")


@pytest.mark.parametrize("below", ["", "deeper/run"])
def test_a_run_directory_that_is_a_file_is_refused(raw: dict[str, Any], tmp_path: Path, below: str) -> None:
    path, out = tmp_path / "my.json", tmp_path / "afile"
    path.write_text(json.dumps(raw))
    out.touch()
    with pytest.raises(UserError, match=f"cannot be a run directory: {out} is a file. Choose another"):
        run(path, out / below, resume=False, dry_run=True, overrides={}, as_json=False)


def test_answers_for_which_no_prompt_leaves_room_are_refused(raw: dict[str, Any]) -> None:
    context = LLAMA["max_position_embeddings"]
    check(build({**raw, "sampling": {"max_tokens": 31}}, "my.toml"))
    told = refusal({**raw, "sampling": {"max_tokens": context}})
    assert told.startswith(f"sampling.max_tokens = 32, and the model's context has {context} tokens for prompt and")
    assert "Set sampling.max_tokens to 32 less your longest prompt" in told


def test_a_dry_run_finds_prompts_that_fill_the_context(
    raw: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, rows = tmp_path / "my.json", tmp_path / "rows.jsonl"
    path.write_text(json.dumps(raw))

    def tried(*lengths: int) -> str:
        rows.write_text("".join(json.dumps({"prompt": "1" * n, "answer": "2"}) + "\n" for n in lengths))
        run(path, tmp_path / "run", resume=False, dry_run=True, overrides={}, as_json=False)
        told, note = capsys.readouterr().err, "note: engine compact: it knows llama models\n"
        assert told.endswith(note)
        return told.removesuffix(note)

    assert tried(24, 5) == ""
    assert "leave less than sampling.max_tokens = 8 of the model's context of 32 tokens" in (tight := tried(31, 5))
    assert "The longest has 31: lower sampling.max_tokens to 1, or" in tight
    told = f"2 of 3 prompts of {rows} fill the model's context of 32 tokens ({rows}:2 has 32)"
    assert f"warning: {told}: their groups will fail." in tried(31, 32, 40)
    with pytest.raises(UserError, match=r"2 of 2 prompts .*: nothing could be sampled\. Shorten them"):
        tried(32, 40)


@pytest.mark.parametrize("style", ["(completions, solution, **kw)", "(solution_str, ground_truth)"])
def test_a_reward_column_that_no_row_has_is_refused(raw: dict[str, Any], tmp_path: Path, style: str) -> None:
    path = tmp_path / "my_reward.py"
    path.write_text(f"def mine{style}: return []\n")
    message = refusal(raw | {"reward": {"functions": [f"{path}:mine"]}})
    assert "The reward mine needs the column" in message
    assert "(the first has answer)" in message


def test_a_partly_missing_reward_column_causes_a_warning(
    raw: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = '{"prompt": "a", "answer": "b"}\n{"prompt": "c"}\n{"prompt": "d", "answer": "b"}\n'
    (tmp_path / "rows.jsonl").write_text(rows)
    check(build(raw, "my.toml"))
    said = capsys.readouterr().err
    assert "1 of 3 rows" in said
    assert "lack the column 'answer': their groups will fail in exact_match" in said


def test_unreachable_addresses_and_ports_in_use_are_refused(raw: dict[str, Any], tmp_path: Path) -> None:
    assert "Set head.advertise" in refusal({**raw, "head": {"listen": "0.0.0.0:0"}})
    check(build({**raw, "head": {"listen": "0.0.0.0:0", "advertise": "203.0.113.5"}}, "my.toml"))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        listen = f"127.0.0.1:{port}"
        raw["head"] = {"listen": listen}
        path, out = tmp_path / "my.json", tmp_path / "run"
        path.write_text(json.dumps(raw))
        for dry_run in (True, False):
            with pytest.raises(UserError, match=rf"{listen}.*Choose another port"):
                run(path, out, resume=False, dry_run=dry_run, overrides={}, as_json=False)
        with pytest.raises(UserError, match=rf"{listen}.*Choose another port"):
            open_run(path, out, resume=False, overrides={})
        assert not RunDir(out).config.exists()


def test_a_port_held_by_the_run_itself_is_accepted(
    raw: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a killed run, the head listens a moment longer than its supervisor lives: the next head waits for it."""
    monkeypatch.setattr(run_directories, "CLAIM_SECONDS", 0.0)
    out, path = tmp_path / "run", tmp_path / "my.json"
    with socket.create_server(("127.0.0.1", 0)) as of_the_run:
        raw["head"] = {"listen": f"127.0.0.1:{of_the_run.getsockname()[1]}"}
        path.write_text(json.dumps(raw))
        create(out, build(raw, "my.json"), resume=False)
        assert open_run(path, out, resume=True, overrides={}).path == out
        with claimed(out, "run"):
            for resume in (True, False):
                with pytest.raises(UserError, match="Another `echo2 run` works on"):
                    run(path, out, resume=resume, dry_run=False, overrides={}, as_json=False)


@pytest.mark.parametrize(("target", "package"), [("tensorboard", "tensorboardX"), ("wandb:mine", "wandb")])
def test_a_log_without_its_package_is_refused(
    raw: dict[str, Any], target: str, package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preflight, "LOG_PACKAGES", {target.partition(":")[0]: f"{package}_that_is_absent"})
    assert f"needs the package {package}_that_is_absent" in refusal({**raw, "run": {"log_to": [target]}})


def test_an_empty_file_of_tasks_is_refused(raw: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text("")
    assert "empty" in refusal(raw)


def test_the_error_about_a_reward_module_has_the_line_that_raised(raw: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "bad_reward.py"
    path.write_text("import math\nraise RuntimeError('not today')\n")
    message = refusal(raw | {"reward": {"functions": [f"{path}:score"]}})
    assert f"{path}:2" in message
    assert "not today" in message


def test_a_hub_model_while_the_hub_is_switched_off_is_refused(
    raw: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    message = refusal(raw | {"model": {"path": "an-owner/a-model"}})
    assert message.startswith("model.path = 'an-owner/a-model': ")
    assert "HF_HUB_OFFLINE" in message


def test_a_damaged_configuration_of_a_model_is_not_called_a_file_of_a_run(raw: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "broken").mkdir()
    for name, text in (("config.json", '{"model_type": "qwen3"'), ("tokenizer.json", "{}"), ("model.safetensors", "")):
        (tmp_path / "broken" / name).write_text(text)
    message = refusal(raw | {"model": {"path": str(tmp_path / "broken")}})
    assert "config.json is damaged" in message
    assert message.endswith("download or save the model again.")
    assert "rewrites it" not in message


def test_money_that_could_not_be_spent_is_refused(raw: dict[str, Any]) -> None:
    message = refusal({**raw, "fleet": {"budget_usd": 5.0}})
    assert all(word in message for word in ("fleet.budget_usd = 5 would never be spent", "learner.price_usd_per_hour"))


@pytest.mark.parametrize(
    "priced",
    [
        {"learner": {"price_usd_per_hour": 3.0}},
        {"workers": {"price_usd_per_hour": 0.3}},
        {"workers": {"count": 0}},  # those who join bring their prices
    ],
)
def test_a_budget_is_accepted_if_something_costs_money(raw: dict[str, Any], priced: dict[str, Any]) -> None:
    check(build({**raw, "fleet": {"budget_usd": 5.0}, **priced}, "my.toml"))
