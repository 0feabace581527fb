"""A teacher behind an endpoint is greeted before it is asked, over real HTTP: what it must have, and a dry run."""

from __future__ import annotations

import asyncio
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from echo2.config import build
from echo2.core.errors import UserError
from echo2.engines.tokenizer import load_tokenizer
from echo2.launch.start import check_teachers
from echo2.learner.link import teacher_endpoint
from echo2.learner.link.teacher_endpoint import greeted
from learner_cases import (
    TEXTS,
    model_directory,
    write_tokenizer,
)
from teacher_standin import TeacherStandIn
from test_learner_endpoint_teachers import likely, standin_of, tokenizer_files_in


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    return tokenizer_files_in(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_tokenizer(model_directory(tmp_path_factory.mktemp("teacher") / "model", seed=7)))


def greet(standin: TeacherStandIn, files: dict[str, bytes], top_k: int = 0, name: str = "") -> str:
    return asyncio.run(greeted(standin.url + name, top_k, load_tokenizer(files), 60.0))


def test_a_compatible_teacher_passes_the_greeting(teacher: str, files: dict[str, bytes]) -> None:
    with standin_of(teacher) as standin:
        assert greet(standin, files, 13) == ""
        standin.models = ("one", "two")
        assert greet(standin, files, 0, "#two") == ""
        assert standin.bodies[-1]["model"] == "two"


@pytest.mark.parametrize(
    ("options", "name", "words"),
    [
        (
            {"models": ("one", "two")},
            "",
            r"it serves one, two\. Name one behind the address: http://127\.0\.0\.1:\d+/v1#NAME",
        ),
        ({"models": ("one",)}, "#three", "it serves one"),
        ({"models": ()}, "", "it serves nothing"),
        ({"max_logprobs": 5}, "", "Start it with --max-logprobs 6 or more"),
    ],
)
def test_the_error_names_what_the_teacher_does_not_serve(
    teacher: str, files: dict[str, bytes], options: dict[str, Any], name: str, words: str
) -> None:
    with standin_of(teacher, **options) as standin, pytest.raises(UserError, match=words):
        greet(standin, files, 6, name)


def test_another_vocabulary_or_tokenizer_is_refused_with_a_token(teacher: str, files: dict[str, bytes]) -> None:
    with standin_of(teacher) as standin:
        standin.texts = TEXTS[:-1]
        with pytest.raises(UserError, match=r"Token id 12 is out of vocabulary.*The policy has 13 tokens: take"):
            greet(standin, files)
        standin.texts = [*TEXTS[:5], "t6", "t5", *TEXTS[7:]]
        with pytest.raises(UserError, match=r"another tokenizer: number 5 is 't5' here, and 't6' there"):
            greet(standin, files)
        standin.texts = [f" {text}" for text in TEXTS]  # decoders tidy up spaces
        assert greet(standin, files) == ""


def test_a_wrong_answer_to_the_greeting_costs_a_request(teacher: str, files: dict[str, bytes]) -> None:
    spoils = lambda path, n: "short" if path == "/v1/completions" and n == 1 else ""  # noqa: E731
    with standin_of(teacher, fault=spoils) as standin:
        assert greet(standin, files, 4) == ""
        assert standin.num_asked["/v1/completions"] == 3


def test_a_key_comes_from_the_environment_and_is_in_no_message(
    teacher: str, files: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(teacher_endpoint.KEY_VARIABLE, "a-secret-key")
    with standin_of(teacher) as standin:
        assert greet(standin, files) == ""
        assert set(standin.keys) == {"Bearer a-secret-key"}
        standin.fault = lambda path, n: "401"
        told = asyncio.run(greeted(standin.url, 0, load_tokenizer(files), 1.0))
    assert "it answers 401" in told
    assert f"the key is that of ${teacher_endpoint.KEY_VARIABLE}" in told
    assert "a-secret-key" not in told


# ---- a dry run -------------------------------------------------------------------------------------------------------


def test_a_dry_run_asks_a_teacher_that_is_there_and_names_one_that_is_not(
    teacher: str, files: dict[str, bytes], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: Any
) -> None:
    for name, data in files.items():
        (tmp_path / name).write_bytes(data)
    settings: dict[str, Any] = {"model": {"path": str(tmp_path)}, "distill": {"divergence": likely(7)}}
    monkeypatch.setattr("echo2.launch.start.greeted", partial(greeted, seconds=1.0))
    with standin_of(teacher, max_logprobs=6) as standin:
        settings["distill"]["teacher"] = standin.url
        with pytest.raises(UserError, match="--max-logprobs 7"):
            check_teachers(build(settings, "my.toml"))
        settings["distill"]["divergence"] = likely(6)
        monkeypatch.setattr("echo2.launch.start.greeted", partial(greeted, seconds=60.0))
        check_teachers(build(settings, "my.toml"))
    assert capsys.readouterr().err == ""
    monkeypatch.setattr("echo2.launch.start.greeted", partial(greeted, seconds=1.0))
    settings["distill"]["teacher"] = "http://127.0.0.1:1/v1"
    check_teachers(build(settings, "my.toml"))
    assert "note: distill.teacher = 'http://127.0.0.1:1/v1' does not answer now" in capsys.readouterr().err
