"""Kuhn poker: a sandbox to make logs in, and the tasks that tell what the logs taught.

Three cards J < Q < K, one each, one chip each in the pot. The first player checks or bets one chip; to a check the
second may check or bet; to a bet the other calls or folds. The higher card takes the pot (H. W. Kuhn, 1950).

What a player sees is text, and so is what it does:

    prompt      pot 3, check bet. call or fold with K?
    completion  call
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from fractions import Fraction
from itertools import permutations
from typing import Any

CARDS = "JQK"
#: After which moves of a hand which moves may follow; whoever's turn it is follows from their number.
MOVES: Mapping[tuple[str, ...], tuple[str, str]] = {
    (): ("check", "bet"),
    ("check",): ("check", "bet"),
    ("bet",): ("call", "fold"),
    ("check", "bet"): ("call", "fold"),
}
#: The scripted opponent: how often it makes the second of its two moves, by card and by whether it faces a bet. It
#: bluffs too much with the jack and folds too many queens.
OPPONENT: Mapping[tuple[str, bool], Fraction] = {
    ("J", False): Fraction(1, 2),
    ("Q", False): Fraction(0),
    ("K", False): Fraction(1),
    ("J", True): Fraction(1),
    ("Q", True): Fraction(3, 4),
    ("K", True): Fraction(0),
}
#: The careless player whose hands are logged: how often it makes the second of its two moves, by card. It folds kings.
HABIT: Mapping[str, Fraction] = {"J": Fraction(7, 10), "Q": Fraction(1, 2), "K": Fraction(3, 10)}
Hand = tuple[str, str]  # the cards of the first and the second player


def prompt(card: str, moves: Sequence[str]) -> str:
    """What the player with `card` sees when it is to move."""
    pot = 2 + sum(move in ("bet", "call") for move in moves)
    first, second = MOVES[tuple(moves)]
    return f"pot {pot}, {' '.join(moves) or 'you start'}. {first} or {second} with {card}?"


def payoff(cards: Hand, moves: Sequence[str], seat: int) -> int:
    """Chips that the player at `seat` (0 or 1) has won when the hand is over."""
    if moves[-1] == "fold":
        winner, chips = len(moves) % 2, 1
    else:
        winner, chips = int(CARDS.index(cards[1]) > CARDS.index(cards[0])), 1 + (moves[-1] == "call")
    return chips if winner == seat else -chips


def opponents_chance(card: str, moves: Sequence[str], move: str) -> Fraction:
    """How likely the scripted opponent makes this move."""
    second = OPPONENT[card, bool(moves) and moves[-1] == "bet"]
    return second if move == MOVES[tuple(moves)][1] else 1 - second


def habit(card: str, moves: Sequence[str], move: str) -> Fraction:
    """How likely the careless player makes this move."""
    return HABIT[card] if move == MOVES[tuple(moves)][1] else 1 - HABIT[card]


def play_hand(rng: random.Random, seat: int) -> list[dict[str, Any]]:
    """One hand of the careless player against the scripted opponent: its decisions as lines of a log, each worth what
    the hand brought."""
    first, second = rng.sample(CARDS, 2)
    cards, moves, lines = (first, second), [], []
    while tuple(moves) in MOVES:
        mover, options = len(moves) % 2, MOVES[tuple(moves)]
        chance = (habit if mover == seat else opponents_chance)(cards[mover], moves, options[1])
        move = options[1] if rng.random() < chance else options[0]
        if mover == seat:
            lines.append({"prompt": prompt(cards[seat], moves), "completion": move})
        moves.append(move)
    return [{**line, "reward": payoff(cards, moves, seat)} for line in lines]


def value(cards: Hand, moves: tuple[str, ...], seat: int) -> Fraction:
    """What the player at `seat` can expect from here if it goes on as the log's player does."""
    if moves not in MOVES:
        return Fraction(payoff(cards, moves, seat))
    mover = len(moves) % 2
    chance = habit if mover == seat else opponents_chance
    ways = ((chance(cards[mover], moves, move), value(cards, (*moves, move), seat)) for move in MOVES[moves])
    return sum((likely * worth for likely, worth in ways), Fraction(0))


class Decisions:
    """The 12 decisions there are, over and over, each with what either move is worth against the opponent if the player
    goes on as in the log."""

    def __init__(self, size: int = 12) -> None:
        self._size = size
        self._rows = [
            {
                "prompt": prompt(card, moves),
                "values": _values(card, moves),
                "habits": {move: float(habit(card, moves, move)) for move in MOVES[moves]},
            }
            for moves in MOVES
            for card in CARDS
        ]

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, index: int) -> Mapping[str, Any]:
        return self._rows[index % len(self._rows)]


def _values(card: str, moves: tuple[str, ...]) -> dict[str, float]:
    """Over the hands that can have led here, by how likely the opponent played so."""
    seat = len(moves) % 2
    worth = dict.fromkeys(MOVES[moves], Fraction(0))
    whole = Fraction(0)
    for cards in permutations(CARDS, 2):
        if cards[seat] != card:
            continue
        reach = Fraction(1)
        for place, move in enumerate(moves):
            if place % 2 != seat:
                reach *= opponents_chance(cards[1 - seat], moves[:place], move)
        whole += reach
        for move in worth:
            worth[move] += reach * value(cards, (*moves, move), seat)
    return {move: float(total / whole) for move, total in worth.items()}


def best_move(
    completions: Sequence[str], values: Sequence[Mapping[str, float]] | None = None, **_: Any
) -> list[float | None]:
    """1.0 for the move that is worth most; nothing where the task is from a log and does not say."""
    if values is None:
        return [None] * len(completions)
    return [
        float(text.strip() in table and table[text.strip()] == max(table.values()))
        for text, table in zip(completions, values, strict=True)
    ]
