"""`echo2 chat`: conversations with a small model, with and without a chat template; what a script pipes in."""

from __future__ import annotations

import io
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from echo2.cli import main
from echo2.core.errors import UserError
from echo2.engines.dialogue import Dialogue
from echo2.engines.tokenizer import load_tokenizer
from echo2.learner.core.model import load_policy
from rollout_cases import tiny_directory

TEMPLATE = "{% for m in messages %}<{{ m.role[0] }}>{{ m.content }}{% endfor %}<a>"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_directory(tmp_path_factory.mktemp("chat") / "model")


def conversation(
    model: Path, template: str | None = None, temperature: float = 0.0, system: str = ""
) -> tuple[Dialogue, list[str]]:
    """And the texts that the model was given, as its tokenizer saw them."""
    policy = load_policy(str(model), "stored", "cpu")
    tokenizer: Any = load_tokenizer(policy.files)
    tokenizer.chat_template = template
    texts: list[str] = []

    class Noting(type(tokenizer)):  # type: ignore[misc]
        def encode(self, text: str, **options: Any) -> Any:
            texts.append(text)
            return super().encode(text, **options)

    tokenizer.__class__ = Noting
    return Dialogue(policy.module, tokenizer, policy.files, temperature, system), texts


def test_earlier_messages_precede_the_new_one(model: Path) -> None:
    talk, texts = conversation(model, TEMPLATE)
    first = talk.answer("a", 4, lambda _: None)["answer"]
    second = talk.answer("b", 4, lambda _: None)["answer"]
    assert texts == ["<u>a<a>", f"<u>a<a>{first}<u>b<a>"]
    assert isinstance(second, str)
    talk.reset()
    assert talk.answer("a", 4, lambda _: None)["answer"] == first
    assert texts[-1] == "<u>a<a>"


def test_a_system_prompt_comes_first_and_stays(model: Path) -> None:
    talk, texts = conversation(model, TEMPLATE, system="be brief")
    first = talk.answer("a", 4, lambda _: None)["answer"]
    talk.answer("b", 4, lambda _: None)
    assert texts == ["<s>be brief<u>a<a>", f"<s>be brief<u>a<a>{first}<u>b<a>"]
    talk.reset()
    talk.answer("c", 4, lambda _: None)
    assert texts[-1] == "<s>be brief<u>c<a>"


def test_a_system_prompt_that_has_no_place_is_refused(
    model: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("ab"))
    assert main(["chat", str(model), "--system", "be brief"]) == 2
    assert "no chat template" in capsys.readouterr().err


def test_without_a_template_a_text_is_used_alone(model: Path) -> None:
    talk, texts = conversation(model)
    assert not talk.is_chat
    told: list[str] = []
    found = talk.answer("ab", 5, told.append)
    talk.answer("cd", 5, lambda _: None)
    assert texts == ["ab", "cd"]
    assert "".join(told) == found["answer"]
    assert 1 <= found["tokens"] <= 5
    assert found["finish"] == ("stop" if found["tokens"] < 5 else "length")


def test_ctrl_c_ends_an_answer_and_not_the_conversation(model: Path) -> None:
    talk, _ = conversation(model, temperature=1.0)

    def interrupt(piece: str) -> None:
        raise KeyboardInterrupt

    found = talk.answer("ab", 50, interrupt)
    assert (found["finish"], found["tokens"]) == ("interrupted", 1)
    assert talk.answer("ab", 3, lambda _: None)["finish"] in ("stop", "length")


def test_the_error_says_that_a_conversation_exceeds_the_context(model: Path) -> None:
    talk, _ = conversation(model)
    with pytest.raises(UserError, match="context"):
        talk.answer("ab" * 5000, 5, lambda _: None)


def test_a_script_pipes_a_message_in(
    model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("ab\n"))
    assert main(["chat", str(model), "--json", "--max-tokens", "4", "--temperature", "0"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["message"], found["tokens"] <= 4) == ("ab", True)


def test_a_script_with_empty_input_gets_an_error(
    model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(""))
    assert main(["chat", str(model)]) == 2
    assert capsys.readouterr().err.startswith("error: The input is empty: pipe a message")


@pytest.mark.parametrize("flags", [["--temperature", "-1"], ["--max-tokens", "0"], ["--step", "3"]])
def test_chat_reports_mistakes(
    model: Path, flags: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    where = tmp_path / "none" if flags[0] == "--step" else model
    assert main(["chat", str(where), *flags]) == 2
    assert capsys.readouterr().err.startswith("error: ")


def test_the_error_names_a_truncated_weight_file(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(model, tmp_path / "torn")
    (tmp_path / "torn" / "model.safetensors").write_bytes(b"")
    assert main(["chat", str(tmp_path / "torn")]) == 2
    assert "does not hold a causal language model" in capsys.readouterr().err


def test_an_empty_text_is_refused(model: Path) -> None:
    talk, _ = conversation(model)
    with pytest.raises(UserError, match="no tokens"):
        talk.answer("", 5, lambda _: None)
