"""Sokoban: every level can be solved, the rules are the game's, rewards add up."""

from __future__ import annotations

import random
from collections import deque
from pathlib import Path
from typing import Any

import pytest

from echo2.core.errors import UserError
from echo2.sandbox.plugins import load_named
from echo2.tasks.streams import load_tasks

CODE = Path(__file__).resolve().parents[2] / "examples" / "sokoban" / "sokoban.py"
Sokoban, SokobanGame, Level = (load_named(f"{CODE}:{name}") for name in ("Sokoban", "SokobanGame", "Level"))
DIRECTIONS, MOVES, SYMBOLS = (load_named(f"{CODE}:{name}") for name in ("DIRECTIONS", "MOVES", "SYMBOLS"))
is_held_out = load_named(f"{CODE}:is_held_out")

ROOM = "#######\n#.-$-@#\n#-----#\n#######"


def shortest(level: Level) -> str | None:
    """The moves of a shortest solution, by breadth-first search."""
    start = (level.player, frozenset(level.boxes))
    seen, edge = {start}, deque([(start, "")])
    while edge:
        (player, boxes), moves = edge.popleft()
        if boxes == level.targets:
            return moves
        for letter, direction in zip(MOVES, DIRECTIONS, strict=True):
            after = Level(level.floor, level.targets, set(boxes), player)
            after.move(direction)
            state = (after.player, frozenset(after.boxes))
            if state not in seen:
                seen.add(state)
                edge.append((state, moves + letter))
    return None


def columns(level: str = ROOM, **changes: Any) -> dict[str, Any]:
    return {"level": level, "symbols": SYMBOLS, "moves": MOVES, "partial": 0.0, "turn_moves": 16} | changes


@pytest.mark.parametrize(
    "room",
    [
        {"width": 5, "height": 1, "walls": 0.0, "pulls": 3},
        {"width": 3, "height": 3, "walls": 0.0},
        {"width": 5, "height": 5, "boxes": 2, "pulls": 6},
        {"width": 4, "height": 6, "boxes": 3, "walls": 0.3},
    ],
    ids=str,
)
def test_every_level_can_be_solved_and_is_not_solved_yet(room: dict[str, Any]) -> None:
    seed = random.Random(str(room)).randrange(1 << 32)  # the same in every run: in a small room few levels differ
    rows = Sokoban(seed=seed, **room)
    levels = {rows[index]["level"] for index in range(12)}
    assert len(levels) > 3, f"seed {seed}"
    for text in sorted(levels):
        level = Level.from_text(text)
        assert level.text() == text, f"seed {seed}"
        assert len(level.boxes) == room.get("boxes", 1), f"seed {seed}"
        moves = shortest(level)
        assert moves, f"seed {seed}: no solution, or none needed:\n{text}"
        game = SokobanGame(columns(text), 0)
        replies = [game.step(move) for move in moves]
        assert [(reward, done) for _, reward, done in replies] == [(0.0, False)] * (len(moves) - 1) + [(1.0, True)], (
            seed
        )


def test_rows_follow_from_seed_split_and_index() -> None:
    rows = Sokoban(seed=3)
    assert [rows[i] for i in (5, 2, 5)] == [Sokoban(seed=3)[i] for i in (5, 2, 5)]
    assert rows[-1] == rows[len(rows) - 1]
    assert rows[0] != Sokoban(seed=4)[0]
    assert list(Sokoban(size=2)) == [Sokoban(size=2)[0], Sokoban(size=2)[1]]
    with pytest.raises(IndexError):
        Sokoban(size=2)[2]
    for split in ("train", "heldout"):
        rows = load_tasks(f"{CODE}:Sokoban#{split}", {"symbols": "W_OX*PS", "moves": "8246"}, 0)
        for index in range(20):
            row = rows[index]
            assert is_held_out(Level.from_text(row["level"], "W_OX*PS").text()) == (split == "heldout")
            assert row["prompt"].endswith(f"\n{row['level']}\n")
            assert "(8 up, 2 down, 4 left, 6 right)" in row["prompt"]


def test_moves_and_pushes() -> None:
    level = Level.from_text(ROOM)
    right, left, up = DIRECTIONS[3], DIRECTIONS[2], DIRECTIONS[0]
    for direction in (right, up):  # walls
        level.move(direction)
        assert level.text() == ROOM
    level.move(left)
    assert level.text().split("\n")[1] == "#.-$@-#"
    level.move(left)
    assert level.text().split("\n")[1] == "#.$@--#"
    level.move(right)  # a box is not pulled
    assert level.text().split("\n")[1] == "#.$-@-#"
    level.move(left)
    level.move(left)
    assert level.text().split("\n")[1] == "#*@---#"
    assert level.is_solved
    level.move(left)  # nor pushed into a wall
    assert level.text().split("\n")[1] == "#*@---#"
    two = Level.from_text("######\n#.$$@#\n#.---#\n######")
    two.move(left)  # nor two at once
    assert two.text() == "######\n#.$$@#\n#.---#\n######"
    on = Level.from_text("#####\n#+$-#\n#####")
    on.move(right)
    assert on.text() == "#####\n#.@$#\n#####"


def test_a_turn_has_any_number_of_moves_and_ends_when_solved() -> None:
    game = SokobanGame(columns(), 0)
    assert game.step("x? L\t") == (ROOM + "\n", 0.0, False)
    text, reward, done = game.step("lzl")
    assert (text.split("\n")[1], reward, done) == ("#.$@--#", 0.0, False)
    text, reward, done = game.step("lllllrrrr")
    assert (text.split("\n")[1], reward, done) == ("#*@---#", 1.0, True)
    slow = SokobanGame(columns(turn_moves=2), 0)
    assert [slow.step("?lull")[2], slow.step("l l")[2]] == [False, True]  # a turn's moves are bounded


def test_partial_rewards_add_up_to_one() -> None:
    for level, moves in (("#.$@$.#", "lrr"), ("#*@$.#", "r"), (ROOM, "lll")):
        for partial in (0.0, 0.4, 1.0):
            game = SokobanGame(columns(level, partial=partial), 0)
            rewards = [game.step(letter)[1] for letter in moves]
            assert sum(rewards) == pytest.approx(1.0)
    half = SokobanGame(columns("#.$@$.#", partial=0.4), 0)
    assert [half.step(letter)[1] for letter in "lrr"] == pytest.approx([0.2, 0.0, 0.8])
    undone = SokobanGame(columns("#-*@-$.#", partial=0.4), 0)
    assert undone.step("l")[1] == pytest.approx(-0.2)  # a box pushed off its target


@pytest.mark.parametrize(
    ("params", "complaint"),
    [
        ({"split": "test"}, "split"),
        ({"width": 0}, "width"),
        ({"height": 99}, "height"),
        ({"boxes": 2.5}, "boxes"),
        ({"pulls": 0}, "pulls"),
        ({"size": 0}, "size"),
        ({"turn_moves": 17}, "turn_moves"),
        ({"walls": 0.9}, "walls"),
        ({"partial": -1.0}, "partial"),
        ({"symbols": "#####"}, "symbols"),
        ({"symbols": "abcdef\n"}, "symbols"),
        ({"moves": "uuuu"}, "moves"),
        ({"width": 2, "height": 1, "walls": 0.0}, "no train level"),
        ({"width": 3, "height": 3, "boxes": 8}, "no train level"),
    ],
    ids=str,
)
def test_impossible_rooms_are_refused(params: dict[str, Any], complaint: str) -> None:
    with pytest.raises(UserError, match=complaint):
        Sokoban(**params)


@pytest.mark.parametrize(
    "level",
    ["", "####", "#@@$.#", "#@$#", "#@$.x#", "#-$.-#", "@"],
    ids=["empty", "walls", "two", "box", "x", "0", "p"],
)
def test_broken_levels_are_refused(level: str) -> None:
    with pytest.raises(UserError, match="a level with"):
        Level.from_text(level)
