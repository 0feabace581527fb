"""How many groups a worker decodes at once where the first ones are wanted soon: by trial, staggered at the start."""

from __future__ import annotations

import random
from collections.abc import Callable

from echo2.head.decide.pacing import TRIAL_EVERY, WidthSearch
from echo2.head.fleet.decide.fleet import LOOK_AHEAD, Fleet, Worker


def play(frontier: WidthSearch, seconds_of: Callable[[int], float], steps: int) -> list[int]:
    """The width that each of so many steps had, each taking what its width takes."""
    now, widths = 0.0, []
    for step in range(steps):
        widths.append(frontier.width)
        frontier.leased(step, now)
        now += seconds_of(frontier.width)
        frontier.step_trained(step, now)
        now += 0.3  # until the next step's weights are there
    return widths


def test_a_frontier_starts_with_whole_batches_and_narrows_as_steps_get_shorter() -> None:
    widths = play(WidthSearch(8), lambda width: 10.0 + abs(width - 3), 8)
    assert widths == [8, 8, 5, 3, 2, 1, 3, 3]


def test_an_engine_that_takes_as_long_for_one_group_as_for_eight_gets_eight() -> None:
    widths = play(WidthSearch(8), lambda width: 8.0 / width, 12)
    assert widths[:5] == [8, 8, 5, 3, 8]
    assert set(widths[4:]) == {8}


def test_one_bad_step_does_not_end_the_search() -> None:
    bad_luck = iter((0.0, 0.0, 5.0))

    def seconds_of(width: int) -> float:
        return 10.0 + abs(width - 3) + next(bad_luck, 0.0)

    assert play(WidthSearch(8), seconds_of, 8)[-1] == 3


def test_a_single_best_width_is_found_and_compared_with_its_neighbours() -> None:
    for seed in range(50):
        rng = random.Random(seed)
        frontier = WidthSearch(rng.randint(1, 40))
        best = rng.choice(frontier.widths)
        at = frontier.widths.index(best)
        costs = {width: 10.0 + abs(frontier.widths.index(width) - at) for width in frontier.widths}
        widths = play(frontier, costs.__getitem__, 100)
        late = widths[len(frontier.widths) + 3 :]
        others = [width for width in late if width != best]
        assert len(others) <= len(late) / TRIAL_EVERY + 1, f"seed {seed}: {best} of {frontier.widths}: {widths}"
        assert len(frontier.widths) == 1 or others, f"seed {seed}: no other width was tried again"


def test_another_width_becomes_best_when_the_fleet_changes() -> None:
    frontier = WidthSearch(8)
    assert play(frontier, lambda width: float(width), 10)[-1] == 1
    later = play(frontier, lambda width: 10.0 - width, 60)
    assert later[-1] > 1, later


def test_a_step_that_was_interrupted_is_not_measured() -> None:
    frontier = WidthSearch(4)
    play(frontier, lambda width: 5.0, 2)
    before = frontier.width
    frontier.leased(2, 100.0)
    frontier.interrupted()
    frontier.step_trained(2, 100.001)  # trained again, with groups that were there already
    assert frontier.width == before
    frontier.step_trained(3, 100.002)  # of no lease at all
    assert frontier.width == before


def test_workers_begin_a_step_with_different_numbers_of_groups_the_fewest_first() -> None:
    frontier = WidthSearch(8)
    assert [frontier.begin(0, 4) for _ in range(6)] == [2, 4, 6, 8, None, None]
    assert frontier.begin(1, 4) == 2  # the next step begins anew
    assert [WidthSearch(1).begin(0, 4) for _ in range(3)] == [1, 1, 1]


def test_a_worker_whose_width_is_below_its_slots_holds_no_groups_ahead() -> None:
    """It would decode them at once: with twice the width, the first groups end late."""
    for width, held in ((8, 16), (5, 5), (1, 1)):
        fleet = Fleet(1.0, group_size=4)
        fleet.limit(width)
        fleet.join(Worker("w-1", 32, 0.0, None, 0.0), 0.0)
        worker = fleet.get("w-1")
        assert worker is not None
        assert fleet.room(worker, LOOK_AHEAD - 1) == 4 * held, width
