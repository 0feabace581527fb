"""How many groups a worker decodes at once: begun as set, and found from how long its groups take."""

from __future__ import annotations

import itertools
import math
import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from echo2.head.decide import commands as do
from echo2.head.decide import events as ev
from echo2.head.fleet.decide.widths import GROWTH, LEVELS, Spreads, Width
from echo2.planning.sim.engine import FullEngine
from echo2.planning.sim.scenario import BroadcastSpec, LearnerSpec, Scenario, WorkersSpec
from invariants import run_scenario
from planner_cases import OPTIONS, Desk, of
from worlds import judge, judge_replay

SECONDS = 32.0


def work(width: Width, full: int, num_groups: int, seed: int = 0, waits: bool = True, spread: float = 0.3) -> list[int]:
    """Let an engine that is full at so many groups, which has work now and then, bring groups. Return the widths."""
    rng, engine, everybody = random.Random(seed), FullEngine(full), Spreads()
    now, number, held, moves = 0.0, 0, list[int](), [width.groups]
    while num_groups > 0:
        for _ in range(rng.choice([0, 1, 1, width.groups])):
            if len(held) < width.groups:
                number += 1
                held.append(number)
                width.take(number, now)
                engine.begin(number, SECONDS * rng.lognormvariate(0.0, spread))
        if not held:
            now += 1.0
            engine.advance(now)
            continue
        seconds = engine.keep(held)
        assert seconds is not None
        now += seconds
        engine.advance(now)
        done = engine.pop_first()
        held.remove(done)
        width.end(done, True, everybody, now)
        num_groups -= 1
        if width.look(everybody, waits):
            moves.append(width.groups)
    return moves


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("begun", [1, 2, 4, 8])
def test_the_width_comes_to_where_the_engine_is_full(begun: int, seed: int) -> None:
    moves = work(Width(begun, 64), 4, 300, seed)
    assert 3 <= moves[-1] <= 6, moves


@pytest.mark.parametrize("seed", range(5))
def test_an_engine_that_is_never_full_gets_all_that_it_has_room_for_and_keeps_it(seed: int) -> None:
    assert work(Width(2, 16), 256, 300, seed) == [2, 4, 8, 16]
    assert work(Width(16, 16), 256, 300, seed, spread=0.8) == [16], "what takes long is no engine that is full"


def test_leases_of_an_earlier_head_fill_the_engine_and_tell_no_duration() -> None:
    """Left out, they made each group of the new head look slow, and 40 machines were rented in place of 20."""
    width, everybody = Width(4, 4), Spreads()
    width.resume(range(4), now=100.0)
    width.take(4, now=100.0)  # waits for room
    for lease_id in range(4):
        width.end(lease_id, True, everybody, now=101.0 + lease_id)
    assert (everybody.count, any(width._means)) == (0, False)
    width.end(4, True, everybody, now=133.0)
    assert math.exp(width._means[0]) == pytest.approx(29.0 + 1.0 / 4 + 1.0 / 3 + 1.0 / 2, rel=0.2)


def test_where_the_learner_does_not_wait_nothing_grows() -> None:
    assert work(Width(2, 16), 256, 100, waits=False) == [2]


@given(st.integers(1, 64), st.integers(0, 1000), st.lists(st.sampled_from([1, 2, 4, 8, 64]), min_size=1, max_size=4))
def test_it_never_oscillates_whatever_the_engine_does(begun: int, seed: int, fulls: list[int]) -> None:
    """The engine may become fuller and less full; a width that was too large is not tried again."""
    width, moves = Width(begun, 64), [begun]
    for full in fulls:
        moves += work(width, full, 60, seed)[1:]
    too_many = math.inf
    for before, after in itertools.pairwise(moves):
        assert 1 <= after <= 64
        assert after < too_many
        too_many = before if after < before else too_many
    assert len(moves) <= 1 + 2 * len(LEVELS)


# ---- in the planner --------------------------------------------------------------------------------------------------


def joined(desk: Desk, slots: int, ticket: str = "") -> list[do.SetWidth]:
    return of(do.SetWidth, desk.tell(ev.WorkerJoined("a", slots, 0.5, None, ticket=ticket)))


def test_a_worker_with_room_for_more_begins_as_set_and_comes_back_as_it_was() -> None:
    """With two groups of four rollouts at once, and a bound on what anybody may say."""
    desk = Desk()
    (told,) = joined(desk, 1 << 30)
    assert (told.num_groups, told.num_slots) == (2, 8)
    worker = desk.planner.fleet.get("a")
    assert worker is not None
    assert worker.width is not None
    assert worker.slots == GROWTH * 8
    worker.width.groups = 6
    (told,) = joined(desk, 1 << 30)
    assert (told.num_groups, told.num_slots) == (6, 24)
    (told,) = joined(desk, 17)
    assert (told.num_groups, told.num_slots) == (5, 17)


def test_strangers_fixed_batches_and_the_frontier_keep_the_setting() -> None:
    for options in (replace(OPTIONS, deterministic=True), replace(OPTIONS, order="frontier"), OPTIONS):
        desk = Desk(options)
        assert joined(desk, 1 << 30, ticket="t" if options is OPTIONS else "") == []
        worker = desk.planner.fleet.get("a")
        assert worker is not None
        assert (worker.slots, worker.width) == (8, None)


@pytest.mark.parametrize(("begun", "idle"), [(1, 0.2), (16, 0.2)])
def test_a_run_with_a_wrong_number_of_groups_at_once_soon_has_the_right_one(begun: int, idle: float) -> None:
    """Engines that are full with four groups, of 32 s each, and a learner that needs 16 in 30 s. With one group at once
    it waited for 61 % of the time, with 16 for 51 %.
    """
    rate = min(1.0, begun / 4) * 4 / 32.0 * 4
    scenario = Scenario(
        max_steps=30,
        groups_per_step=16,
        group_size=4,
        max_staleness=2,
        groups_per_batch=begun,
        lease_seconds=300.0,
        heartbeat_seconds=5.0,
        faults_until_seconds=0.0,
        workers=(WorkersSpec(count=7, capacity_groups=16, full_groups=4, rollouts_per_second=rate),),
        learner=LearnerSpec(train_seconds=30.0, publish_seconds=0.5),
        broadcast=BroadcastSpec(scheme="fixed", seconds=6.0),
    )
    report = run_scenario(scenario, 1)
    assert judge(report, scenario) + judge_replay(report, scenario) == []
    assert report.steady_idle_ratio < idle
