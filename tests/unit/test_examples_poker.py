"""The poker sandbox: its rules, what it says a move is worth, and the logs it writes."""

import json
import sys
from collections import defaultdict
from itertools import permutations
from pathlib import Path
from typing import Any

import pytest

from echo2 import config
from echo2.reward.score import Scorer
from echo2.tasks.streams import load_tasks

POKER = Path(__file__).resolve().parents[2] / "examples" / "poker"


@pytest.fixture(scope="module")
def kuhn() -> Any:
    from echo2.sandbox.plugins import load_named

    load_named(f"{POKER}/kuhn.py:Decisions")
    return sys.modules[load_named(f"{POKER}/kuhn.py:Decisions").__module__]


@pytest.fixture(scope="module")
def hands(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from echo2.sandbox.plugins import load_named

    out = tmp_path_factory.mktemp("poker") / "hands.jsonl"
    load_named(f"{POKER}/make_logs.py:make_logs")(out, hands=6000, seed=5)
    return out


def test_the_payoff_of_poker_hands(kuhn: Any) -> None:
    for moves, chips in {
        ("check", "check"): 1,
        ("bet", "call"): 2,
        ("check", "bet", "call"): 2,
    }.items():
        assert kuhn.payoff(("K", "J"), moves, 0) == chips
        assert kuhn.payoff(("J", "Q"), moves, 0) == -chips
    assert kuhn.payoff(("J", "K"), ("bet", "fold"), 0) == 1
    assert kuhn.payoff(("K", "J"), ("check", "bet", "fold"), 0) == -1


def test_chips_are_neither_made_nor_lost(kuhn: Any) -> None:
    ends = [("check", "check"), ("bet", "call"), ("bet", "fold"), ("check", "bet", "call"), ("check", "bet", "fold")]
    for cards in permutations("JQK", 2):
        for moves in ends:
            assert kuhn.payoff(cards, moves, 0) + kuhn.payoff(cards, moves, 1) == 0


def test_the_log_agrees_with_the_values_of_moves(kuhn: Any, hands: Path) -> None:
    """Means of what was logged against values computed from the rules: within four standard errors, seed 5."""
    paid = defaultdict(list)
    for line in map(json.loads, hands.read_text().splitlines()):
        paid[line["prompt"], line["completion"]].append(line["reward"])
    decisions = [kuhn.Decisions()[i] for i in range(12)]
    for row in decisions:
        for move, worth in row["values"].items():
            rewards = paid.pop((row["prompt"], move))
            mean = sum(rewards) / len(rewards)
            spread = (sum((reward - mean) ** 2 for reward in rewards) / len(rewards)) ** 0.5
            assert abs(mean - worth) <= 4 * spread / len(rewards) ** 0.5 + 1e-9, (row["prompt"], move, mean, worth)
    assert not paid


def test_the_best_moves_of_poker(kuhn: Any) -> None:
    best = {
        row["prompt"]: max(row["values"], key=row["values"].get) for row in map(kuhn.Decisions().__getitem__, range(12))
    }
    assert best["pot 3, bet. call or fold with K?"] == "call"
    assert best["pot 3, bet. call or fold with J?"] == "fold"
    assert best["pot 2, check. check or bet with J?"] == "bet"  # the opponent folds too much
    row = kuhn.Decisions()[8]
    assert kuhn.best_move([" call", "fold", "raise"], [row["values"]] * 3) == [1.0, 0.0, 0.0]


def test_the_example_is_whole(hands: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(POKER.parents[1])
    settings = config.load(POKER.parent / "poker.toml")
    rows = load_tasks(f"logs:{hands}", settings.tasks.params, 0)
    assert len(rows) > 500
    held_out = load_tasks(settings.eval.source, settings.eval.params, 0)
    assert len(held_out) == 192
    assert {rows[i]["prompt"] for i in range(len(rows))} == {held_out[i]["prompt"] for i in range(12)}
    Scorer(settings.reward.functions)
