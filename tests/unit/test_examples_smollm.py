"""The examples of the pretrained model: rows, rewards, and answers that are right."""

from __future__ import annotations

from pathlib import Path

import pytest

from echo2.core.errors import UserError
from echo2.sandbox.plugins import load_named

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
SMOLLM = EXAMPLES / "smollm"
rows, same_json, NAMES, CITIES = (
    load_named(f"{SMOLLM / 'facts.py'}:{name}") for name in ("rows", "same_json", "NAMES", "CITIES")
)
Arithmetic, Corridors, solution = (
    load_named(f"{SMOLLM / 'answered.py'}:{name}") for name in ("Arithmetic", "Corridors", "solution")
)
SokobanGame = load_named(f"{EXAMPLES / 'sokoban' / 'sokoban.py'}:SokobanGame")


def said(text: str) -> list[dict[str, str]]:
    return [{"role": "assistant", "content": text}]


@pytest.mark.parametrize(
    ("text", "reward"),
    [
        ('{"name": "Uma", "age": 31}', 1.0),
        ('\n{"age":31,"name":"Uma"} ', 1.0),
        ('{"name": "Uma", "age": "31"}', 0.2),
        ("{}", 0.2),
        ('["Uma", 31]', 0.0),
        ('{"name": "Uma", "age": 31} is the JSON.', 0.0),
        ("", 0.0),
        ("[" * 100_000, 0.0),
    ],
)
def test_facts_are_judged_as_json(text: str, reward: float) -> None:
    assert same_json([said(text)], ['{"name": "Uma", "age": 31}']) == [reward]


def test_held_out_facts_have_other_names_and_cities() -> None:
    train, held_out = ([row["prompt"][1]["content"] for row in rows(split)] for split in ("train", "heldout"))
    assert (len(set(train)), len(set(held_out))) == (600, 96)
    words = {word.strip(".,") for text in train for word in text.split()}
    assert not words & {*NAMES["heldout"], *CITIES[12:]}


def test_moves_solve_the_level_in_one_turn() -> None:
    levels = Corridors("train", width=4, height=4, pulls=4)
    for row in (levels[index] for index in range(20)):
        _, reward, is_done = SokobanGame(row, seed=0).step(row["answer"])
        assert is_done, row["level"]
        assert reward == 1.0


def test_a_level_without_solution_is_an_error() -> None:
    with pytest.raises(UserError, match="no moves solve"):
        solution("#####\n#$-@#\n#--.#\n#####")


def test_the_splits_share_no_sums() -> None:
    train, held_out = Arithmetic("train"), Arithmetic("heldout")
    for index in range(100):
        for tasks, others in ((train, NAMES["heldout"]), (held_out, NAMES["train"])):
            assert not any(name in tasks[index]["prompt"][0]["content"] for name in others)
    assert train[7] == Arithmetic("train")[7] != Arithmetic("train", seed=1)[7]
    for tasks in (train, held_out):
        with pytest.raises(IndexError):
            tasks[len(tasks)]
