"""Sokoban: push the boxes on the targets. Levels as tasks, and the game that answers the moves.

A level is made backwards: boxes start on their targets and are pulled away, so that pushing them back solves it. Train
and held-out levels can't overlap: a level is held out when `crc32(level) % 8 == 0`.

A level is text, one line a row, walls all round. Its letters, in this order: wall, floor, target, box, box on a target,
player, player on a target.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from typing import Any, Literal
from zlib import crc32

from echo2.core.errors import UserError

SYMBOLS = "#-.$*@+"
MOVES = "udlr"
DIRECTIONS = ((-1, 0), (1, 0), (0, -1), (0, 1))
INSTRUCTIONS = (
    "Sokoban. {wall} wall, {floor} floor, {target} target, {box} box, {done} box on a target, {player} you, {on} you "
    "on a target. Push every box on a target; boxes cannot be pulled. Answer with moves ({up} up, {down} down, {left} "
    "left, {right} right) and a new line; you are then shown the level again.\n"
)
DEFAULT_SIZE = {"train": 100_000, "heldout": 1024}
MAX_SIDE, MAX_BOXES, MAX_PULLS = 32, 16, 256
MAX_TURN_MOVES = 16
TRIES = 1000

Cell = tuple[int, int]


class Sokoban:
    """A sequence of rows {"prompt", "level", ...}; row i is a pure function of (seed, split, i).

    `width`, `height`: of the room within its walls. `walls`: share of the room that is walled up at random. `pulls`:
    boxes are pulled away so often, at most. `partial`: how much of the reward is for the share of boxes on targets, not
    for the solved level. `turn_moves`: moves that one turn may hold; it may be one token longer. `symbols`, `moves`:
    letters for levels and for moves (up, down, left, right). `instructions`: whether the prompt explains the game.

    Raises:
        UserError: on an unknown split or impossible numbers.
    """

    def __init__(
        self,
        split: Literal["train", "heldout"] = "train",
        width: int = 5,
        height: int = 5,
        boxes: int = 1,
        walls: float = 0.15,
        pulls: int = 8,
        partial: float = 0.0,
        turn_moves: int = MAX_TURN_MOVES,
        symbols: str = SYMBOLS,
        moves: str = MOVES,
        instructions: bool = True,
        seed: int = 0,
        size: int | None = None,
    ) -> None:
        if split not in DEFAULT_SIZE:
            raise UserError(f"sokoban: split = {split!r}. Use train or heldout.")
        within = {"width": (width, MAX_SIDE), "height": (height, MAX_SIDE), "boxes": (boxes, MAX_BOXES)}
        within |= {
            "pulls": (pulls, MAX_PULLS),
            "turn_moves": (turn_moves, MAX_TURN_MOVES),
            "size": (1 if size is None else size, 1 << 62),
        }
        for name, (value, most) in within.items():
            if int(value) != value or not 1 <= value <= most:
                raise UserError(f"sokoban: {name} = {value!r}. It must be a whole number within 1..{most}.")
        if not 0.0 <= walls <= 0.5 or not 0.0 <= partial <= 1.0:
            raise UserError(f"sokoban: walls = {walls}, partial = {partial}. They must be within 0..0.5 and 0..1.")
        check_symbols(symbols)
        check_symbols(moves, MOVES, "moves")
        self._size = DEFAULT_SIZE[split] if size is None else size
        self._split, self._seed = split, seed
        self._room = (width, height, boxes, walls, pulls)
        self._columns: dict[str, Any] = {"symbols": symbols, "moves": moves, "partial": partial}
        self._columns["turn_moves"] = turn_moves
        names = ("wall", "floor", "target", "box", "done", "player", "on", "up", "down", "left", "right")
        self._opening = INSTRUCTIONS.format(**dict(zip(names, symbols + moves, strict=True))) if instructions else ""
        self[0]  # a room in which nothing can be pulled shows at once

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, index: int) -> dict[str, Any]:
        """Row `index`; negative indices count from the end.

        Raises:
            IndexError: there is no such row.
            UserError: no level was found in the room.
        """
        position = index + self._size if index < 0 else index
        if not 0 <= position < self._size:
            raise IndexError(index)
        rng = random.Random(f"sokoban {self._seed} {self._split} {position}")
        for _ in range(TRIES):
            level = make_level(rng, *self._room)
            if level is None:
                continue
            if is_held_out(level.text()) == (self._split == "heldout"):
                text = level.text(self._columns["symbols"])
                return {"prompt": f"{self._opening}{text}\n", "level": text, **self._columns}
        width, height, boxes, walls, pulls = self._room
        raise UserError(
            f"sokoban: no {self._split} level in {TRIES} tries with width = {width}, height = {height}, boxes = "
            f"{boxes}, walls = {walls}, pulls = {pulls}. Make the room larger, or its boxes or walls fewer."
        )

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return (self[index] for index in range(self._size))


class SokobanGame:
    """One rollout at a level: an environment (`tasks/environments.py`). A turn is some moves; what is no move,
    or goes against a wall or a box that is stuck, does nothing. Nothing in it is random."""

    stop = "\n"

    def __init__(self, columns: Mapping[str, Any], seed: int) -> None:
        self._symbols, self._partial = str(columns["symbols"]), float(columns["partial"])
        self._level = Level.from_text(str(columns["level"]), self._symbols)
        self._direction = dict(zip(str(columns["moves"]), DIRECTIONS, strict=True))
        self._turn_moves = int(columns["turn_moves"])
        self.turn_tokens = self._turn_moves + 1
        self._start = self._level.share_done

    def step(self, action: str) -> tuple[str, float, bool]:
        """Move; what the level looks like then, the reward of these moves, and whether it is solved. A solved level
        adds up to 1."""
        before = self._level.share_done
        moves = [self._direction[letter] for letter in action if letter in self._direction]
        for direction in moves[: self._turn_moves]:
            if not self._level.is_solved:
                self._level.move(direction)
        reward = self._partial * (self._level.share_done - before)
        if self._level.is_solved:
            reward += 1.0 - self._partial * (1.0 - self._start)
        return self._level.text(self._symbols) + "\n", reward, self._level.is_solved


class Level:
    """Walls, targets, boxes and the player; row and column count from the upper left corner."""

    def __init__(self, floor: set[Cell], targets: set[Cell], boxes: set[Cell], player: Cell) -> None:
        self.floor, self.targets, self.boxes, self.player = floor, targets, boxes, player

    @classmethod
    def from_text(cls, text: str, symbols: str = SYMBOLS) -> Level:
        """The level that `text` shows.

        Raises:
            UserError: a letter that is no symbol, not one player, or not as many boxes as targets.
        """
        check_symbols(symbols)
        cells = {(i, j): letter for i, row in enumerate(text.split("\n")) for j, letter in enumerate(row)}
        wall, _, target, box, done, player, on = tuple(symbols)
        unknown = sorted(set(cells.values()) - set(symbols))
        players = [cell for cell, letter in cells.items() if letter in (player, on)]
        targets = {cell for cell, letter in cells.items() if letter in (target, done, on)}
        boxes = {cell for cell, letter in cells.items() if letter in (box, done)}
        if unknown or len(players) != 1 or len(boxes) != len(targets) or not boxes:
            raise UserError(
                f"sokoban: a level with {len(players)} players, {len(boxes)} boxes, {len(targets)} targets"
                + (f" and the letter {unknown[0]!r}" if unknown else "")
                + f". It needs one player, as many targets as boxes, and the symbols {symbols!r} only."
            )
        return cls({cell for cell, letter in cells.items() if letter != wall}, targets, boxes, players[0])

    @property
    def is_solved(self) -> bool:
        return self.boxes == self.targets

    @property
    def share_done(self) -> float:
        return len(self.boxes & self.targets) / len(self.boxes)

    def move(self, direction: Cell) -> None:
        """One step of the player, with a push if a box is in the way; nothing where that is impossible."""
        to = _beside(self.player, direction)
        if to in self.boxes:
            behind = _beside(to, direction)
            if behind not in self.floor or behind in self.boxes:
                return
            self.boxes = (self.boxes - {to}) | {behind}
        elif to not in self.floor:
            return
        self.player = to

    def text(self, symbols: str = SYMBOLS) -> str:
        wall, floor, target, box, done, player, on = tuple(symbols)
        height, width = (max(cell[axis] for cell in self.floor) + 2 for axis in (0, 1))

        def letter(cell: Cell) -> str:
            is_target = cell in self.targets
            if cell in self.boxes:
                return done if is_target else box
            if cell == self.player:
                return on if is_target else player
            if cell not in self.floor:
                return wall
            return target if is_target else floor

        return "\n".join("".join(letter((i, j)) for j in range(width)) for i in range(height))


def make_level(rng: random.Random, width: int, height: int, boxes: int, walls: float, pulls: int) -> Level | None:
    """A level that up to `pulls` pushes solve; None where these draws led to none."""
    cells = [(i, j) for i in range(1, height + 1) for j in range(1, width + 1)]
    floor = set(cells) - set(rng.sample(cells, int(walls * len(cells))))
    floor = _reached(rng.choice(sorted(floor)), floor)
    if len(floor) < 2 * boxes + 1:
        return None
    targets = set(rng.sample(sorted(floor), boxes))
    level = Level(floor, targets, set(targets), rng.choice(sorted(floor - targets)))
    for _ in range(rng.randint(1, pulls)):
        walked = _reached(level.player, floor - level.boxes)
        possible = [
            (box, direction)
            for box in sorted(level.boxes)
            for direction in DIRECTIONS
            if {_beside(box, direction), _beside(_beside(box, direction), direction)} <= walked
        ]
        if not possible:
            break
        box, direction = rng.choice(possible)
        pulled = _beside(box, direction)
        level.boxes = (level.boxes - {box}) | {pulled}
        level.player = _beside(pulled, direction)
    if level.is_solved:
        return None
    level.player = rng.choice(sorted(_reached(level.player, floor - level.boxes)))
    return level


def is_held_out(level: str) -> bool:
    """Whether a level, in the usual symbols, belongs to the held-out split."""
    return crc32(level.encode()) % 8 == 0


def check_symbols(letters: str, like: str = SYMBOLS, name: str = "symbols") -> None:
    """Raises UserError where these are not as many letters as `like` has, which can be told apart."""
    if len(letters) != len(like) or len(set(letters)) != len(like) or "\n" in letters:
        raise UserError(f"sokoban: {name} = {letters!r}. Give {len(like)} different letters, such as {like!r}.")


def _beside(cell: Cell, direction: Cell) -> Cell:
    return cell[0] + direction[0], cell[1] + direction[1]


def _reached(start: Cell, free: set[Cell]) -> set[Cell]:
    """The cells of `free` that can be walked to from `start`."""
    found, edge = {start}, [start]
    while edge:
        cell = edge.pop()
        fresh = [to for to in (_beside(cell, direction) for direction in DIRECTIONS) if to in free - found]
        found.update(fresh)
        edge += fresh
    return found
