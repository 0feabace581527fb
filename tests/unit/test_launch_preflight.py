"""`checks.check`: every mistake that can be found before a process starts, in one sentence that says what to do."""

from __future__ import annotations

import json
import shutil
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
from echo2.head.ledger.audit import audit
from echo2.head.ledger.ledger import Ledger
from echo2.launch import preflight
from echo2.launch.preflight import check
from echo2.launch.start import absolute, joining, open_run, resolve, run
from model_cases import LLAMA, model_directory


@pytest.fixture
def raw(tmp_path: Path) -> dict[str, Any]:
    """Settings that pass: a directory that looks like a model, rows and a reward."""
    model = model_directory(tmp_path / "model")
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "1 + 1 =", "answer": "2"}\n')
    return {
        "model": {"path": str(model)},
        "tasks": {"source": str(rows)},
        "reward": {"functions": ["exact_match"]},
        "sampling": {"max_tokens": 8},
    }


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
def test_a_mistake_is_named_with_its_value_and_the_way_out(
    raw: dict[str, Any], tmp_path: Path, section: str, values: dict[str, Any], words: list[str]
) -> None:
    fill: dict[str, Any] = json.loads(json.dumps(values).replace("TMP", str(tmp_path)))
    message = refusal(raw | {section: fill})
    for word in words:
        assert word.replace("TMP", str(tmp_path)) in message


def test_a_bad_row_is_named_with_file_and_line(raw: dict[str, Any], tmp_path: Path) -> None:
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


def test_what_else_lies_in_the_directory_of_a_new_run_stays(raw: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "rollouts").mkdir()
    (tmp_path / "rollouts" / "mine.jsonl").touch()
    create(tmp_path, build(raw, "my.json"), resume=False)
    assert (tmp_path / "rollouts" / "mine.jsonl").exists()


def test_a_model_that_the_engine_cannot_run_is_refused_with_the_engine_that_can(raw: dict[str, Any]) -> None:
    (Path(raw["model"]["path"]) / "config.json").write_text(json.dumps({**LLAMA, "model_type": "gpt_neox"}))
    check(build(raw, "my.toml"))  # `auto` takes the other one
    assert 'Set workers.engine = "auto" or "transformers"' in refusal({**raw, "workers": {"engine": "compact"}})


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


def test_a_reward_column_that_some_rows_lack_is_said(
    raw: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = '{"prompt": "a", "answer": "b"}\n{"prompt": "c"}\n{"prompt": "d", "answer": "b"}\n'
    (tmp_path / "rows.jsonl").write_text(rows)
    check(build(raw, "my.toml"))
    said = capsys.readouterr().err
    assert "1 of 3 rows" in said
    assert "lack the column 'answer': their groups will fail in exact_match" in said


def test_an_address_that_nobody_can_call_and_a_port_in_use_are_refused(raw: dict[str, Any], tmp_path: Path) -> None:
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


def test_a_port_that_the_run_itself_holds_is_no_mistake(
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


def test_paths_are_absolute_so_that_a_run_can_be_used_from_elsewhere(
    raw: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "my_reward.py").write_text("def mine(completions, **kw): return [0.0] * len(completions)\n")
    (tmp_path / "digit_sorting").mkdir()
    monkeypatch.chdir(tmp_path)
    reward = {"functions": ["0.5 * my_reward.py:mine", "exact_match"]}
    relative = {**raw, "model": {"path": "model"}, "tasks": {"source": "./rows.jsonl"}, "reward": reward}
    Path("my.json").write_text(json.dumps({**relative, "eval": {"source": "digit_sorting#test"}}))
    config, where = resolve(Path("my.json"), {}, Path("run"))
    assert where == tmp_path / "run"
    assert config.model.path == str(tmp_path / "model")
    assert config.tasks.source == str(tmp_path / "rows.jsonl")
    assert config.eval.source == "digit_sorting#test"
    assert config.reward.functions == [f"0.5 * {tmp_path}/my_reward.py:mine", "exact_match"]


def test_a_start_that_failed_does_not_block_the_corrected_one(raw: dict[str, Any], tmp_path: Path) -> None:
    config = build(raw, "my.toml")
    rundir = create(tmp_path / "run", config, resume=False)
    Ledger(rundir.ledger).close()
    with pytest.raises(UserError, match="holds a run already"):
        create(rundir.path, config, resume=False)
    rundir.outcome.write_text('{"kind": "user_error", "reason": "no such port"}')
    assert create(rundir.path, config, resume=False) == rundir
    assert not rundir.ledger.exists()


@pytest.mark.parametrize("end", ["delivered", "scored", "trained"])
def test_a_resume_that_failed_does_not_let_a_run_be_started_over_its_ledger(
    raw: dict[str, Any], tmp_path: Path, end: str
) -> None:
    """A group that was paid for counts as much as a checkpoint; one that nobody delivered, or that was retired, not."""
    config = build(raw, "my.toml")
    rundir = create(tmp_path / "run", config, resume=False)
    ledger = Ledger(rundir.ledger)
    for number in range(3):
        ledger.issue(number, 0, number, 0.0)
    ledger.deliver(0, b"", "w", 0, 0, 1, 1.0, 1.0)
    ledger.retire(0, "failed_reward", 1.0)
    ledger.close()
    failure = '{"kind": "user_error", "reason": "no such port"}'
    copy = tmp_path / "copy"  # so far, nothing is lost with it
    shutil.copytree(rundir.path, copy)
    (copy / "outcome.json").write_text(failure)
    assert not create(copy, config, resume=False).ledger.exists()

    ledger = Ledger(rundir.ledger)
    ledger.deliver(1, b"", "w", 0, 0, 1, 1.0, 1.0)
    if end != "delivered":
        ledger.score(1, b"", False, 2.0)
    if end == "trained":
        ledger.learner_joined(0, 1, 2.0)
        ledger.train(0, 1, [1], 3.0)
    ledger.close()
    create(rundir.path, config, resume=True)  # takes the status of the run away
    rundir.outcome.write_text(failure)
    with pytest.raises(UserError, match="holds a run already"):
        create(rundir.path, config, resume=False)
    assert audit(rundir.ledger).trained == (end == "trained")


def test_a_resumed_run_says_what_changed_and_refuses_what_cannot(
    raw: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "my.json"
    path.write_text(json.dumps({**raw, "schedule": {"max_staleness": 3}}))
    open_run(path, tmp_path / "run", False, {})
    resolve(path, {}, tmp_path / "run", resume=True)
    assert capsys.readouterr().err == ""
    resolve(path, {"learner.lr": "0.5", "schedule.max_staleness": "4"}, tmp_path / "run", resume=True)
    said = capsys.readouterr().err
    assert "resumed with learner.lr: 1e-06 -> 0.5" in said
    assert "resumed with schedule.max_staleness: 3 -> 4" in said
    for flag, value, why in (
        ("run.seed", "5", "cannot change run.seed: 0 -> 5"),
        ("sampling.group_size", "3", "cannot change sampling.group_size"),
        ("model.path", "other/model", "the checkpoints are of that model"),
        ("tasks.source", "digit_sorting", "cannot change tasks.source"),
        ("tasks.params", "{levels = 3}", "cannot change tasks.params"),
        ("tasks.environment", "own.py:Other", "cannot change tasks.environment"),
        ("schedule.max_staleness", "2", r"cannot lower schedule.max_staleness \(3 -> 2\)"),
    ):
        with pytest.raises(UserError, match=why):
            resolve(path, {flag: value}, tmp_path / "run", resume=True)


def test_a_resumed_run_that_is_alive_is_refused_before_its_changes_are_said(
    raw: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(run_directories, "CLAIM_SECONDS", 0.0)
    path, out = tmp_path / "my.json", tmp_path / "run"
    path.write_text(json.dumps(raw))
    create(out, build(raw, "my.json"), resume=False)
    capsys.readouterr()
    changed, before = {"learner.lr": "0.5"}, RunDir(out).config.read_text()
    with claimed(out, "run"), pytest.raises(UserError, match="Another `echo2 run` works on"):
        run(path, out, resume=True, dry_run=False, overrides=changed, as_json=False)
    with claimed(out, "head"), pytest.raises(UserError, match="Another `echo2 head` works on"):
        open_run(path, out, True, changed)
    assert (capsys.readouterr().err, RunDir(out).config.read_text()) == ("", before)


def test_an_empty_file_of_tasks_is_refused(raw: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text("")
    assert "empty" in refusal(raw)


def test_a_reward_whose_module_raises_is_named_with_the_line(raw: dict[str, Any], tmp_path: Path) -> None:
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


def test_the_run_directory_is_the_flags_or_named_after_the_file(tmp_path: Path) -> None:
    path = tmp_path / "sort.toml"
    path.write_text("")
    assert resolve(path, {}, None)[1] == Path.cwd() / "outputs" / "sort"
    assert resolve(path, {}, Path("here"))[1] == Path.cwd() / "here"


def test_a_head_alone_takes_a_run_directory_or_a_configuration(raw: dict[str, Any], tmp_path: Path) -> None:
    config = build(raw, "my.toml")
    made = create(tmp_path / "run", config, resume=False)
    assert open_run(made.path, None, False, {}) == made
    again = open_run(made.config, tmp_path / "other", False, {"run.seed": "7"})
    assert again.read_config().run.seed == 7
    with pytest.raises(UserError, match="is not a run directory"):
        open_run(tmp_path, None, False, {})


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
def test_a_budget_is_fine_where_something_may_cost(raw: dict[str, Any], priced: dict[str, Any]) -> None:
    check(build({**raw, "fleet": {"budget_usd": 5.0}, **priced}, "my.toml"))


def test_a_start_says_how_other_machines_join_and_where_they_cannot(raw: dict[str, Any], tmp_path: Path) -> None:
    rundir = RunDir(tmp_path / "run")
    alone = joining(rundir, build(raw, "my.toml"))
    assert alone[1] == "no other machine can join: head.listen is 127.0.0.1:0; set it to 0.0.0.0:7341 to let them"
    for head in ({"listen": "0.0.0.0:7341", "advertise": "203.0.113.5"}, {"advertise": "203.0.113.5"}):
        lines = joining(rundir, build({**raw, "head": head}, "my.toml"))
        assert lines[1] == f"your machines join with: echo2 worker @{rundir.ticket}"
        assert lines[2] == f"other people's machines: echo2 invite {rundir.path}"
