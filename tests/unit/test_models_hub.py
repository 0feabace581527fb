"""`echo2 export --push`, with the library that people have, against a stand-in for the hub over HTTP on loopback."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, redirect_stderr, redirect_stdout
from dataclasses import replace
from io import StringIO
from pathlib import Path

import pytest
from huggingface_hub import close_session, constants

from echo2.cli import main
from echo2.config import Config, to_json
from echo2.config.rundir import RunDir
from echo2.config.sections import LoraConfig
from echo2.core.errors import UserError
from echo2.learner.core.model import load_policy
from echo2.learner.grpo.loop import GrpoClient
from echo2.models.export import _check_repo, write_card
from echo2.weights.format.adapter_files import ADAPTER_CONFIG
from echo2.weights.format.model_files import MLX_WEIGHTS
from hub_standin import Hub, Repo
from learner_cases import model_directory

SOURCE = Path(__file__).parents[2] / "src"


@pytest.fixture
def hub() -> Iterator[Hub]:
    with closing(Hub()) as server:
        yield server


@pytest.fixture
def rundir(tmp_path: Path) -> RunDir:
    """A run with the checkpoint step_3, whose configuration names files of this machine."""
    base, rundir = model_directory(tmp_path / "base"), RunDir(tmp_path / "run")
    rundir.path.mkdir()
    config = replace(
        Config(),
        model=replace(Config().model, path=str(base)),
        tasks=replace(Config().tasks, source=[f"0.7 * {tmp_path}/rows.jsonl", "0.3 * hub:owner/name"]),
        reward=replace(Config().reward, functions=[f"{tmp_path}/own.py:score"]),
    )
    rundir.config.write_text(to_json(config))
    rundir.metrics.write_text('{"step": 0, "eval/accuracy": 0.25}\n{"step": 3, "eval/accuracy": 0.5}\n')
    GrpoClient(load_policy(str(base), "float32", "cpu"), config).save_state(rundir.checkpoints / "step_3").result()
    return rundir


def export(rundir: RunDir, endpoint: str, *flags: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """`echo2 export`, to the directory `model` beside the run, as somebody with the token `hf_mine`."""
    home = rundir.path.parent
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "HUGGING"))}
    environment |= {
        "HF_HOME": str(home / "hf"),
        "HF_TOKEN": "hf_mine",
        "HF_ENDPOINT": endpoint,
        "NO_PROXY": "127.0.0.1",
    }
    environment |= {"HF_HUB_DISABLE_TELEMETRY": "1", "PYTHONPATH": str(SOURCE), **variables}
    words = [sys.executable, "-m", "echo2", "export", str(rundir.path), "--to", str(home / "model"), *flags]
    return subprocess.run(words, capture_output=True, text=True, check=False, env=environment)


def export_here(rundir: RunDir, endpoint: str, *flags: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """The same in this process, where the library has read the environment already."""
    home, words = rundir.path.parent, ["export", str(rundir.path), "--to", str(rundir.path.parent / "model"), *flags]
    with pytest.MonkeyPatch.context() as patched, StringIO() as out, StringIO() as err:
        patched.setenv("HF_TOKEN", variables.get("HF_TOKEN", "hf_mine"))
        patched.setattr(constants, "HF_TOKEN_PATH", str(home / "no token"))
        patched.setattr(constants, "ENDPOINT", variables.get("HF_ENDPOINT", endpoint))
        patched.setattr(constants, "HF_HUB_OFFLINE", "HF_HUB_OFFLINE" in variables)
        with redirect_stdout(out), redirect_stderr(err):
            status = main(words)
        close_session()
        return subprocess.CompletedProcess(words, status, out.getvalue(), err.getvalue())


LOOK_FOR = """
import sys
from echo2.core.errors import UserError
from echo2.launch.preflight import check_model
for name in sys.argv[1:]:
    try:
        check_model(name, "auto")
        print("fine")
    except UserError as error:
        print(error)
"""


def test_a_hub_id_that_the_hub_does_not_know_is_refused_at_once(hub: Hub, tmp_path: Path) -> None:
    hub.repos |= {"me/model": Repo(False, {"config.json": b"{}"}), "me/rows": Repo(False, {"rows.jsonl": b""})}
    names = ["me/model", "me/modle", "me/rows", "my own/model"]
    there, unknown, empty, misspelt = looked_for(names, tmp_path, hub.url)
    assert there == "fine"
    asks = "Check the name; a private or gated model needs `hf auth login`."
    provides_not = "there is no such directory, and the hub does not provide it (404 Repository not found)"
    assert unknown == f"model.path = 'me/modle': {provides_not}. {asks}"
    assert empty.startswith("model.path = 'me/rows': there is no such directory, and the hub does not provide it (404")
    assert "'my own/model': there is no such directory, and it is not a hub id: Repo id must use" in misspelt
    (alone,) = looked_for(["me/model"], tmp_path, "http://127.0.0.1:1")
    assert "the hub can't be reached ([Errno 111] Connection refused). See to the network" in alone


def test_without_the_hub_every_command_says_so_in_one_line_and_tries_once(tmp_path: Path) -> None:
    (tmp_path / "my.toml").write_text(
        '[model]\npath = "me/model"\n[tasks]\nsource = "digit_sorting"\n[reward]\nfunctions = ["exact_match"]\n'
    )
    for command in (["plan", "my.toml", "--learner", "1xA100-80GB"], ["sft", "my.toml", "--to", "x", "--steps", "1"]):
        words = [sys.executable, "-m", "echo2", *command]
        environment = os.environ | with_hub_at(tmp_path, "http://127.0.0.1:1")
        ended = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, check=False, env=environment)
        assert ended.returncode == 2
        (line,) = ended.stderr.splitlines()  # no line of a library that tries again
        assert "the hub can't be reached ([Errno 111] Connection refused). See to the network" in line
        assert ("put it into a directory, and name that: --model.path DIR" in line) == (command[0] == "plan")


def with_hub_at(home: Path, endpoint: str) -> dict[str, str]:
    """The environment of a process whose hub is at `endpoint`."""
    hub = {"HF_ENDPOINT": endpoint, "HF_HOME": str(home / "hf"), "HF_HUB_OFFLINE": "0", "NO_PROXY": "127.0.0.1"}
    return hub | {"PYTHONPATH": str(SOURCE)}


def looked_for(names: list[str], home: Path, endpoint: str) -> list[str]:
    """What `check_model` says of each name, in a process that asks the hub."""
    words = [sys.executable, "-c", LOOK_FOR, *names]
    environment = os.environ | with_hub_at(home, endpoint)
    return subprocess.run(words, capture_output=True, text=True, check=True, env=environment).stdout.splitlines()


def refusal(done: subprocess.CompletedProcess[str]) -> str:
    """The one line that a user's mistake gives."""
    assert (done.returncode, done.stdout) == (2, ""), done.stderr
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    return line


@pytest.mark.parametrize(("uses_lfs", "is_public"), [(False, False), (True, True)])
def test_an_export_is_pushed_to_the_hub_with_its_card(rundir: RunDir, uses_lfs: bool, is_public: bool) -> None:
    flags = ["--dtype", "bfloat16", "--push", "me/sorter", "--json", *(["--public"] if is_public else [])]
    with closing(Hub(uses_lfs)) as hub:
        done = export(rundir, hub.url, *flags, **({"HF_HUB_DISABLE_XET": "1"} if uses_lfs else {}))
        assert done.returncode == 0, done.stderr
    model = rundir.path.parent / "model"
    written = {path.name: path.read_bytes() for path in model.iterdir()}
    assert hub.repos == {"me/sorter": Repo(private=not is_public, files=written)}
    assert len(hub.objects) == (1 if uses_lfs else 0)
    said = json.loads(done.stdout)
    assert (said["url"], said["step"], said["dtype"]) == (f"{hub.url}/me/sorter", 3, "bfloat16")
    assert said["bytes"] == sum(map(len, written.values()))
    assert {"README.md", "config.json", "model.safetensors"} <= set(written)
    assert not any(str(rundir.path.parent).encode() in data for data in written.values())


def test_a_public_repository_needs_a_flag_and_is_reused_by_a_second_push(rundir: RunDir, hub: Hub) -> None:
    hub.repos["me/sorter"] = Repo(private=False, files={"notes.txt": b"of mine"})
    said = refusal(export_here(rundir, hub.url, "--push", "me/sorter"))
    assert "me/sorter exists and is public: add --public, or choose another name. Nothing was pushed" in said
    assert set(hub.repos["me/sorter"].files) == {"notes.txt"}
    model = rundir.path.parent / "model"
    model.rename(model.with_name("first"))
    done = export_here(rundir, hub.url, "--push", "me/sorter", "--public")
    assert done.stdout == f"exported step_3 to {model}, pushed to {hub.url}/me/sorter\n", done.stderr
    assert {"notes.txt", "README.md", "model.safetensors"} <= set(hub.repos["me/sorter"].files)


def test_a_whole_model_does_not_go_where_an_adapter_is(rundir: RunDir, hub: Hub) -> None:
    hub.repos["me/sorter"] = Repo(private=True, files={ADAPTER_CONFIG: b"{}"})
    assert "me/sorter holds an adapter, and this is a whole model" in refusal(
        export_here(rundir, hub.url, "--push", "me/sorter")
    )
    assert set(hub.repos["me/sorter"].files) == {ADAPTER_CONFIG}


def test_a_model_for_mlx_does_not_go_where_a_whole_model_is(tmp_path: Path) -> None:
    for name, mark in (("mlx", MLX_WEIGHTS), ("gguf", "model-q8_0.gguf")):
        (tmp_path / name).mkdir()
        (tmp_path / name / mark).write_text("weights")
        kind = {"mlx": "a model for MLX", "gguf": "a model for llama.cpp"}[name]
        with pytest.raises(UserError, match=f"me/sorter holds a whole model, and this is {kind}: they cannot share"):
            _check_repo("me/sorter", True, False, ["model.safetensors", "config.json"], tmp_path / name)
        for files in ([mark, "README.md"], ["README.md"], ["model.safetensors", mark]):
            _check_repo("me/sorter", True, False, files, tmp_path / name)


def test_an_export_that_the_hub_refuses_stays_here_with_instructions(rundir: RunDir, hub: Hub) -> None:
    model = rundir.path.parent / "model"
    cases = [
        ("me/sorter", {"HF_TOKEN": "hf_old"}, "the hub does not take the token (401). Run `hf auth login`"),
        ("you/sorter", {}, "the token may not write to you (403 You don't have the rights"),
        ("me/closed", {}, "the token may not write to me (403 the test refuses"),
        ("me/sorter", {"HF_HUB_OFFLINE": "1"}, "HF_HUB_OFFLINE is set. Unset it."),
        ("me/sorter", {"HF_ENDPOINT": "http://127.0.0.1:1"}, "http://127.0.0.1:1 can't be reached"),
    ]
    hub.repos["me/closed"] = Repo(private=True, refuses=True)
    for number, (name, variables, words) in enumerate(cases):
        done = export_here(rundir, hub.url, "--push", name, **variables)
        said = refusal(done)
        assert said.startswith(f"error: {model} is written, but not pushed to {name}: {words}"), done.stderr
        assert said.endswith(f"Then: hf upload {name} {model} . --private"), said
        assert {"README.md", "model.safetensors"} <= {path.name for path in model.iterdir()}
        model.rename(model.with_name(f"kept {number}"))


def test_an_impossible_push_is_refused_before_anything_is_written(rundir: RunDir, hub: Hub) -> None:
    cases = [
        (["--push", "me/sorter"], {"HF_TOKEN": ""}, "there is no token for the Hugging Face hub. Run `hf auth login`"),
        (["--push", "sorter"], {}, "--push 'sorter' is not a repository name. Give OWNER/NAME"),
        (["--push", "me/so--rter"], {}, "--push 'me/so--rter' is not a repository name"),
        (["--public"], {}, "--public: nothing is pushed. Add --push OWNER/NAME"),
    ]
    for flags, variables, words in cases:
        assert words in refusal(export_here(rundir, hub.url, *flags, **variables))
    config = replace(rundir.read_config(), lora=LoraConfig(rank=2))
    rundir.config.write_text(to_json(config))
    assert "Add --merged" in refusal(export_here(rundir, hub.url, "--push", "me/sorter"))
    assert hub.calls == []
    assert not (rundir.path.parent / "model").exists()


def test_a_card_says_what_the_run_recorded_and_no_directory_of_this_machine(rundir: RunDir, tmp_path: Path) -> None:
    write_card(tmp_path, rundir, 3, "bfloat16")
    text = (tmp_path / "README.md").read_text()
    assert str(tmp_path) not in text
    assert "base_model:" not in text  # the hub would look for it
    for row in (
        "| base model | `base`, a local directory |",
        "| run | `run`, after step 3 |",
        "| what is here | whole model, in bfloat16 |",
        "| tasks | `rows.jsonl`, `hub:owner/name` |",
        "| rewards | `own.py:score` |",
        "| mean reward of the run's held-out tasks | 0.250 before training, 0.500 after step 3 |",
    ):
        assert row in text.splitlines()
    write_card(tmp_path, rundir, 2, "float32")
    assert "held-out" not in (tmp_path / "README.md").read_text()  # that version was not measured


def test_the_card_of_an_adapter_names_its_base_on_the_hub(rundir: RunDir, tmp_path: Path) -> None:
    config = replace(rundir.read_config(), model=replace(Config().model, path="own/er"), lora=LoraConfig(rank=2))
    rundir.config.write_text(to_json(config))
    (tmp_path / ADAPTER_CONFIG).write_text("{}")
    write_card(tmp_path, rundir, 3, "float32")
    lines = (tmp_path / "README.md").read_text().splitlines()
    assert lines[:4] == ["---", "base_model: own/er", "library_name: peft", "pipeline_tag: text-generation"]
    assert "| what is here | LoRA adapter of rank 2, in float32 |" in lines
