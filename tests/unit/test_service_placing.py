"""Which machine samples which call: in random histories nothing is lost or doubled, or waits beside a free slot."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from echo2_service.decide.placing import LOCAL, TRIES_MAX, Placing
from seeds import seeds


@pytest.mark.parametrize("seed", seeds(20, 100))
def test_a_call_is_under_way_once_or_waits_where_nothing_has_room(seed: int) -> None:
    rng, placing = random.Random(seed), Placing(4)
    slots = {LOCAL: 4}
    sizes: dict[int, tuple[str, int]] = {}
    where: dict[int, tuple[str, int]] = {}  # number: the machine and which of its lives
    lives: Counter[str] = Counter()
    gone: list[int] = []
    number = 0
    for _ in range(400):
        match rng.randrange(6):
            case 0 | 1:
                number += 1
                sizes[number] = rng.choice("abc"), rng.choice([1, 1, 2, 8])
                placing.arrive(number, sizes[number][0], rng.choice("xyz"), sizes[number][1])
            case 2 if sizes:
                ended = rng.choice(sorted(sizes))
                placing.ended(ended)
                del sizes[ended]
                where.pop(ended, None)
                gone = [each for each in gone if each != ended]
            case 3:
                name = rng.choice("mno")
                if name not in slots:
                    slots[name] = rng.randrange(1, 5)
                    lives[name] += 1
                    placing.joined(name, slots[name])
            case 4 if len(slots) > 1:
                name = rng.choice(sorted(slots.keys() - {LOCAL}))
                del slots[name]
                placing.remove(name)
                gone += [each for each, (at, _) in where.items() if at == name and each not in gone]
            case 5 if gone:
                back = gone.pop(rng.randrange(len(gone)))
                placing.came_back(back)
                del where[back]
        for each, name in placing.place():
            assert each in sizes
            assert each not in where, f"seed {seed}: {each} is under way twice"
            where[each] = name, lives[name]
        used = placing.under_way()
        assert used.keys() == slots.keys()
        for name in slots:
            here = [sizes[each][1] for each, at in where.items() if at == (name, lives[name]) and each not in gone]
            assert used[name] == sum(here), f"seed {seed}: {name}"
            assert sum(here) - max(here, default=0) < 2 * slots[name], f"seed {seed}: more than there is room for"
        assert placing.num_waiting == len(sizes.keys() - where.keys())
        if placing.num_waiting:
            assert used[LOCAL] >= 2 * slots[LOCAL], f"seed {seed}: calls wait, and this machine has room"


def test_the_owner_with_least_under_way_is_next() -> None:
    placing = Placing(2)
    for number in range(10):
        placing.arrive(number, "busy", "x", 1)
    assert len(placing.place()) == 4
    placing.arrive(10, "late", "x", 1)
    placing.ended(0)
    assert placing.place() == [(10, LOCAL)]


def test_fleet_machines_come_before_this_one_and_those_with_the_snapshot_before_equally_busy_ones() -> None:
    placing = Placing(1)
    placing.joined("a", 8)
    placing.joined("b", 8)
    placing.arrive(1, "ada", "x", 1)
    assert placing.place() == [(1, "a")]
    placing.arrive(2, "ada", "x", 2)
    assert placing.place() == [(2, "a")], "b would have to fetch it"
    placing.arrive(3, "ada", "x", 1)
    assert placing.place() == [(3, "b")], "a has more to do by then"
    placing.arrive(4, "ada", "y", 16)
    assert placing.place() == [(4, "b")]
    placing.arrive(5, "ada", "y", 16)
    assert placing.place() == [(5, "a")]
    placing.arrive(6, "ada", "y", 1)
    assert placing.place() == [(6, LOCAL)], "both are full"


def test_a_call_that_machines_die_of_ends_on_this_one() -> None:
    placing = Placing(1)
    for name in "abcde":
        placing.joined(name, 1)
    placing.arrive(1, "ada", "x", 1)
    tried = []
    for _ in range(TRIES_MAX + 1):
        ((_, name),) = placing.place()
        tried.append(name)
        if name != LOCAL:
            placing.remove(name)
            placing.came_back(1)
    assert tried == ["a", "b", "c", LOCAL]


def test_one_owner_leaves_room_for_others_whatever_its_calls_ask_for() -> None:
    placing = Placing(16)
    for number in range(40):
        placing.arrive(number, "busy", "x", 1)
    assert len(placing.place()) == 30
    placing.arrive(100, "late", "x", 1)
    assert placing.place() == [(100, LOCAL)]
    placing = Placing(16)
    placing.arrive(1, "busy", "x", 1024)
    assert placing.place() == [(1, LOCAL)]
    placing.arrive(2, "busy", "x", 1)
    placing.arrive(3, "late", "x", 1)
    assert placing.place() == [(3, LOCAL)]
    placing.ended(1)
    assert placing.place() == [(2, LOCAL)]
