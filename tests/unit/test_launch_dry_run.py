"""What `--dry-run` and a start find before any process exists: environments that no row fits, a
judge without its key."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from echo2.config import build
from echo2.core.errors import UserError
from echo2.launch.preflight import ENVIRONMENTS_TRIED, check
from model_cases import model_directory

GAME = """
from pathlib import Path
class Game:
    def __init__(self, columns, seed):
        with Path(__file__).with_suffix(".begun").open("a") as file:
            file.write("x")
        self.board = columns["board"]
    def step(self, action):
        return "", 0.0, True
"""


def settings(tmp_path: Path, *rows: dict[str, Any]) -> dict[str, Any]:
    (tmp_path / "game.py").write_text(GAME)
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps({"prompt": "go", **row}) + "\n" for row in rows))
    return {
        "model": {"path": str(model_directory(tmp_path / "model"))},
        "tasks": {"source": str(tmp_path / "rows.jsonl"), "environment": f"{tmp_path}/game.py:Game"},
        "reward": {"functions": ["environment"]},
        "sampling": {"max_tokens": 8},
    }


def num_begun(tmp_path: Path) -> int:
    return len((tmp_path / "game.begun").read_text())


def test_an_environment_that_needs_a_column_of_no_row_is_refused(tmp_path: Path) -> None:
    raw = settings(tmp_path, {"bord": 1}, {"bord": 2})
    with pytest.raises(UserError) as caught:
        check(build(raw, "my.toml"))
    said = str(caught.value)
    assert "game.py:Game raised: " in said
    assert "KeyError: 'board'" in said
    assert said.endswith(f"The same is true of the first 2 rows of {tmp_path}/rows.jsonl (columns of the first: bord).")


def test_a_row_that_an_environment_cannot_begin_with_costs_its_group_only(tmp_path: Path) -> None:
    check(build(settings(tmp_path, {"bord": 1}, {"board": 2}), "my.toml"))
    assert num_begun(tmp_path) == 2


def test_few_rows_are_tried(tmp_path: Path) -> None:
    check(build(settings(tmp_path, *({"board": at} for at in range(50))), "my.toml"))
    assert num_begun(tmp_path) == ENVIRONMENTS_TRIED


@pytest.mark.parametrize(
    ("section", "values", "is_told"),
    [
        ("workers", {"engine": "vllm", "count": 0}, False),  # nobody else can join
        ("head", {"advertise": "203.0.113.5"}, True),
        ("workers", {"engine": "vllm", "count": 0, "forms": ["q8_0"]}, True),
    ],
)
def test_a_start_warns_that_no_machine_can_check_strangers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], section: str, values: dict[str, Any], is_told: bool
) -> None:
    raw = settings(tmp_path, {"board": 1}) | {"workers": {"engine": "vllm", "count": 0}} | {section: values}
    check(build(raw, "my.toml"))
    assert ("note: the run's engine, vllm, checks no rollouts of strangers." in capsys.readouterr().err) == is_told


def test_a_judge_without_its_key_or_its_column_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table = {"model": "m", "base_url": "http://127.0.0.1:1/v1", "rubric": "Right is {wanted}.", "api_key_env": "A_KEY"}
    raw = settings(tmp_path, {"board": 1}) | {"reward": {"functions": ["judge"], "judge": table}}
    monkeypatch.delenv("A_KEY", raising=False)
    with pytest.raises(UserError, match="api_key_env = 'A_KEY': there is no key in that environment variable"):
        check(build(raw, "my.toml"))
    monkeypatch.setenv("A_KEY", "secret")
    with pytest.raises(UserError, match="The reward judge needs the column 'wanted', which no row of"):
        check(build(raw, "my.toml"))
    table["rubric"] = "Right is {board}."
    check(build(raw, "my.toml"))
