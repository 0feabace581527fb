"""Three workloads whose rows have an answer that a program made, in the column `answer`: for a warm-up by `echo2 sft`.

    answered.py:Knights#train       who always tells the truth, who always lies (reasoning-gym's puzzles and verifier)
    answered.py:Arithmetic#train    word problems of two or three steps, and the steps
    answered.py:Corridors#train     Sokoban in text (examples/sokoban), and the shortest moves that solve the level

A pretrained model of this size is hardly ever right in them. After the warm-up it knows the form of an answer and is
right sometimes, which is all that reinforcement learning needs.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from echo2.core.errors import UserError
from echo2.sandbox.plugins import load_named
from echo2.tasks.sources import ReasoningGymRows

FACTS, GAME = (Path(__file__).parents[1] / name for name in ("smollm/facts.py", "sokoban/sokoban.py"))
NAMES: dict[str, Sequence[str]] = load_named(f"{FACTS}:NAMES")
DIRECTIONS, MOVES, Level, Sokoban = (
    load_named(f"{GAME}:{name}") for name in ("DIRECTIONS", "MOVES", "Level", "Sokoban")
)

SIZE = {"train": 100_000, "heldout": 1024}
THINGS = ("rolls", "pens", "cards", "books", "apples", "shells", "stamps", "tickets", "bricks", "eggs")
BOXES = ("boxes", "bags", "trays", "shelves", "crates", "drawers")


class Knights:
    """Puzzles of `people` people, asked in a chat; reasoning-gym's own verifier reads the other columns."""

    def __init__(self, split: str = "train", people: int = 2, seed: int = 0) -> None:
        params = {"n_people": people, "depth_constraint": 2, "width_constraint": 2, "size": _size(split)}
        self._rows = ReasoningGymRows("knights_knaves", params, seed, split)

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> Mapping[str, Any]:
        row = self._rows[index]
        return {**row, "prompt": _asked(row["prompt"])}


class Arithmetic:
    """Word problems with small numbers; row i depends on (seed, split, i) only. Held-out ones have other names."""

    def __init__(self, split: str = "train", seed: int = 0) -> None:
        self._split, self._seed, self._size = split, seed, _size(split)
        self._names = NAMES[split]

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, index: int) -> Mapping[str, Any]:
        if not 0 <= index < self._size:
            raise IndexError(index)
        question, steps, number = _problem(random.Random(f"sums {self._seed} {self._split} {index}"), self._names)
        answer = f"{steps}\n#### {number}"
        return {"prompt": _asked(f"{question} End with #### and the number."), "answer": answer}


class Corridors(Sokoban):
    """Levels as `Sokoban` makes them, asked in a chat; the answer has the moves, and the new line that ends a turn."""

    def __getitem__(self, index: int) -> dict[str, Any]:
        row = super().__getitem__(index)
        return {**row, "prompt": _asked(row["prompt"]), "answer": solution(row["level"]) + "\n"}


def solution(text: str) -> str:
    """The fewest moves that solve this level.

    Raises:
        UserError: none does.
    """
    level = Level.from_text(text)
    edge = deque([(level.player, frozenset(level.boxes), "")])
    seen = {edge[0][:2]}
    while edge:
        player, boxes, moves = edge.popleft()
        if boxes == level.targets:
            return moves
        for letter, direction in zip(MOVES, DIRECTIONS, strict=True):
            tried = Level(level.floor, level.targets, set(boxes), player)
            tried.move(direction)
            state = (tried.player, frozenset(tried.boxes))
            if state not in seen:
                seen.add(state)
                edge.append((*state, moves + letter))
    raise UserError(f"no moves solve the level\n{text}")


def _problem(rng: random.Random, names: Sequence[str]) -> tuple[str, str, int]:
    """A question, its steps, and its answer."""
    name, other = rng.sample(names, 2)
    thing, box = rng.choice(THINGS), rng.choice(BOXES)
    a, b, c = rng.randint(2, 9), rng.randint(2, 9), rng.randint(2, 9)
    kind = rng.randrange(3)
    if kind == 0:
        question = f"{name} has {a} {box} with {b} {thing} each and gets {c} more {thing}. How many {thing} are there?"
        return question, f"{a} * {b} = {a * b}\n{a * b} + {c} = {a * b + c}", a * b + c
    if kind == 1:
        left = a * b - min(c, a * b)
        question = f"{name} fills {a} {box} with {b} {thing} each and gives {other} {min(c, a * b)} of them. "
        question += f"How many {thing} are left?"
        return question, f"{a} * {b} = {a * b}\n{a * b} - {min(c, a * b)} = {left}", left
    question = f"{name} has {a} {thing}. {other} has {b} more than {name}. How many {thing} do they have together?"
    return question, f"{a} + {b} = {a + b}\n{a} + {a + b} = {2 * a + b}", 2 * a + b


def _asked(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def _size(split: str) -> int:
    if split not in SIZE:
        raise UserError(f"split = {split!r}. Use train or heldout.")
    return SIZE[split]
