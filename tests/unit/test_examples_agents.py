"""The rows of examples/agents: each can be answered by its two look-ups, and held-out ones have other names and cities.
The agent itself plays in tests/foreign/test_agents.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from echo2 import config
from echo2.core.errors import UserError
from echo2.sandbox.plugins import load_named
from echo2.tasks.harness_process import is_harness
from echo2.tasks.streams import load_tasks
from real_runs import REPOSITORY

SPLITS = ("train", "heldout")
PEOPLE = REPOSITORY / "examples" / "agents" / "people.py"
People, Shown, calls = (load_named(f"{PEOPLE}:{name}") for name in ("People", "Shown", "calls"))


def words(row: dict[str, Any]) -> set[str]:
    return {word.strip(".,:?") for said in (row["question"], *row["people"].values()) for word in said.split()}


@pytest.mark.parametrize("split", ["train", "heldout"])
def test_two_look_ups_answer_a_row_and_one_does_not(split: str) -> None:
    rows = People(split, 1)
    for index in range(50):
        row = rows[index]
        assert row == People(split, 1)[index]
        first, second = (row["people"][name] for name in row["chain"])
        assert row["chain"][0] in row["question"]
        assert f"friend {row['chain'][1]}." in first
        assert f" {row['answer']}," in second
        assert [answer for _, answer in calls(row)][2] == row["answer"]
        (*_, compacted), _ = calls(row)[2]
        assert compacted["content"] == f"{row['question']}\n{first}\n{second}"


def test_held_out_names_and_cities_are_new() -> None:
    trained, held_out = (set[str]().union(*(words(People(split, 1)[i]) for i in range(99))) for split in SPLITS)
    new = {word for word in held_out - trained if word[0].isupper()}
    assert new >= {"Uma", "Victor", "Sydney", "Toronto"}
    assert not {word for word in held_out & trained if word[0].isupper()} - {"How", "In"}


def test_a_warm_up_shows_each_of_the_three_calls() -> None:
    shown = [Shown("train", 1)[index] for index in range(60)]
    kinds = {(len(row["prompt"]), row["answer"].startswith("<tool_call>")) for row in shown}
    assert kinds == {(2, True), (4, True), (2, False)}


def test_the_agent_example_is_a_valid_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(REPOSITORY)
    settings = config.load(Path("examples/agents.toml"))
    assert is_harness(settings.tasks.environment)
    assert len(load_tasks(settings.eval.source, {}, 0)) == 1024
    with pytest.raises(UserError, match="split = 'test'"):
        load_tasks("examples/agents/people.py:People#test", {}, 0)
