"""`echo2 sft`: a small model learns its rows; ended and resumed it is the same; mistakes are named."""

from __future__ import annotations

import io
import json
import signal
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from echo2 import config as configuration
from echo2.cli import main
from echo2.core.errors import UserError
from echo2.engines.tokenizer import load_tokenizer
from echo2.learner.core.adapters import load_trained
from echo2.models.sft import Answers, SupervisedClient
from echo2.tasks.base import TaskStream
from echo2.tasks.streams import load_tasks
from rollout_cases import END, tiny_directory, tokenizer_files

NUM_ROWS = 64
ROWS = [{"prompt": f"{number % 8}=", "completion": f"{number % 8 + 1}"} for number in range(NUM_ROWS)]
TEMPLATE = b"{% for m in messages %}{{ m.content }}<eos>{% endfor %}"
#: Rows that tell the process to end when the one of a cursor is read.
ENDING = """
import json, os, signal
from pathlib import Path

class Tasks:
    def __init__(self):
        self.rows = [json.loads(line) for line in Path("rows.jsonl").read_text().splitlines()]
        self.reads = 0

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        self.reads += 1
        if self.reads == 20:
            os.kill(os.getpid(), signal.SIGTERM)
        return self.rows[index]
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """With a model, rows, and a run's file that names them."""
    monkeypatch.chdir(tmp_path)
    tiny_directory(Path("model"))
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    Path("ending.py").write_text(ENDING)
    source = '[tasks]\nsource = "rows.jsonl"\n[eval]\nsource = "rows.jsonl"\n[reward]\nfunctions = ["exact_match"]\n'
    Path("run.toml").write_text(f'[model]\npath = "model"\n{source}')
    return tmp_path


def sft(to: str, *more: str, steps: int = 12) -> int:
    given = ["--to", to, "--steps", str(steps), "--rows-per-step", "8", "--learner.lr=1e-2", *more]
    return main(["sft", "run.toml", *given])


def found(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    told: dict[str, Any] = json.loads(capsys.readouterr().out)
    return told


def test_a_model_learns_its_rows_and_answers_them(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert sft("warm", "--json", steps=60) == 0
    told = found(capsys)
    assert told["held_out_loss"] < 0.2 * told["held_out_loss_before"]
    assert not Path("warm.unfinished").exists()
    monkeypatch.setattr("sys.stdin", io.StringIO("3="))
    assert main(["chat", "warm", "--json", "--temperature", "0"]) == 0
    assert found(capsys)["answer"] == "4"


def test_an_adapter_is_written_as_peft_does(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert sft("warm", "--json", "--lora.rank=4") == 0
    assert found(capsys)["held_out_loss"] < 4.0
    assert {"adapter_config.json", "adapter_model.safetensors"} <= {path.name for path in Path("warm").iterdir()}
    assert not Path("warm", "model.safetensors").exists()


def test_ended_and_resumed_the_weights_are_those_of_a_training_that_was_not(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = signal.getsignal(signal.SIGTERM)
    assert sft("whole") == 0
    told = capsys.readouterr().err.splitlines()  # stderr is no terminal
    assert [told[0][:13], told[-1][:14]] == ["step 1 of 12,", "step 12 of 12,"]
    assert all(float(line.rpartition(" ")[2]) > 0.0 for line in told)
    assert sft("parts", "--tasks.source=ending.py:Tasks") == 130
    assert "stopped after step" in capsys.readouterr().err
    assert signal.getsignal(signal.SIGTERM) is before
    assert not Path("parts").exists()
    assert sft("parts") == 2
    assert "--resume" in capsys.readouterr().err
    assert sft("parts", "--resume", steps=13) == 2
    assert "not of 13" in capsys.readouterr().err
    assert sft("parts", "--resume") == 0
    whole, parts = (load_file(Path(name, "model.safetensors")) for name in ("whole", "parts"))
    assert whole.keys() == parts.keys()
    assert all(bool((whole[name] == parts[name]).all()) for name in whole)


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["--rows-per-step", "4"], "--rows-per-step = 8, not 4"),
        (["--run.seed=5"], "run.seed = 0, not 5"),
        (["--column", "prompt"], "--column = 'completion', not 'prompt'"),
        (["--model.chat_template_args={a = 1}"], "model.chat_template_args = {}, not {'a': 1}"),
    ],
)
def test_a_training_is_not_resumed_on_another_order_of_rows(
    folder: Path, capsys: pytest.CaptureFixture[str], more: list[str], said: str
) -> None:
    """A step's rows are found by its number: rows would be left out, or trained on twice."""
    assert sft("warm", "--tasks.source=ending.py:Tasks") == 130
    capsys.readouterr()
    assert sft("warm", "--resume", *more) == 2
    assert said in capsys.readouterr().err
    assert sft("warm", "--resume") == 0


@pytest.mark.parametrize("more", [(), ("--json",)])
def test_a_training_that_was_killed_behind_its_last_step_is_written(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, more: tuple[str, ...]
) -> None:
    """It says what an uninterrupted one says, the loss before the first step too."""

    def kill(*_: object) -> None:
        raise KeyboardInterrupt

    assert sft("whole", *more) == 0
    told = capsys.readouterr().out.replace("whole", "parts")
    with monkeypatch.context() as patched:
        patched.setattr("echo2.models.sft.copy_model", kill)
        assert sft("parts", *more) == 130
    capsys.readouterr()
    assert sft("parts", "--resume", *more) == 0
    assert capsys.readouterr().out == told


def test_a_training_is_not_resumed_on_other_rows(folder: Path) -> None:
    config = configuration.load(Path("run.toml"), {})
    policy = load_trained(config, "cpu")
    SupervisedClient(policy, config, 3, {"rows.jsonl": "one"}).save(folder / "kept")
    SupervisedClient(policy, config, 3, {"rows.jsonl": "one", "more.jsonl": "new"}).resume(folder / "kept")
    with pytest.raises(UserError, match=r"The rows of rows\.jsonl have changed"):
        SupervisedClient(policy, config, 3, {"rows.jsonl": "two"}).resume(folder / "kept")


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (["--column", "answer"], "--column 'answer' must have text, and the row with the prompt '"),
        (["--to", "model"], "model exists"),
        (["--steps", "0"], "--steps"),
        (["--learner.ranks=2"], "sft trains in one process"),
    ],
)
def test_sft_reports_mistakes(folder: Path, capsys: pytest.CaptureFixture[str], more: list[str], words: str) -> None:
    assert sft("warm", *more) == 2
    assert words in capsys.readouterr().err
    assert not Path("warm").exists()


def test_the_error_names_a_row_beyond_the_context(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("rows.jsonl").write_text(json.dumps({"prompt": "1" * 5000, "completion": "2"}) + "\n")
    assert sft("warm") == 2
    assert "the model's context is" in capsys.readouterr().err


def test_the_end_token_of_the_chat_template_is_taught(tmp_path: Path) -> None:
    """Of the model's end tokens, <pad> stands first; a chat's answers end with <eos>."""
    Path(tmp_path, "rows.jsonl").write_text('{"prompt": [{"role": "user", "content": "1+1="}], "completion": "2"}\n')
    tokenizer = load_tokenizer(tokenizer_files() | {"chat_template.jinja": TEMPLATE})
    rows = TaskStream(load_tasks(str(tmp_path / "rows.jsonl"), {}, 0), 0, shuffle=False)
    (datum,) = Answers(rows, "completion", tokenizer, (0, END), None).data(range(1))
    assert datum.tokens.tolist() == [*tokenizer.encode("2", add_special_tokens=False), END]
