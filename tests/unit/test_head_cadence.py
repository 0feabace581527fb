"""How many steps lie between two snapshots: begun as set, and changed where the learner waits."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from echo2.head.decide.pacing import LEAST_GAIN, LOOK_STEPS, WORSE, Cadence
from echo2.planning.sim.scenario import BroadcastSpec, LearnerSpec, Scenario, WorkersSpec
from invariants import run_scenario
from worlds import judge, judge_replay

TRAIN_SECONDS = 10.0


def steps(cadence: Cadence, count: int, seconds: float, now: float = 0.0) -> float:
    """Train so many steps, each of which took so long. Return the time."""
    for _ in range(count):
        now += seconds
        cadence.step_trained(now)
    return now


def test_it_falls_to_the_largest_divisor_that_ends_the_waits_as_soon_as_there_is_a_forecast() -> None:
    cadence = Cadence(6, 5)
    now = steps(cadence, 1, TRAIN_SECONDS)
    assert cadence.is_due()
    assert cadence.choices() == [6, 3, 2, 1]
    assert cadence.look(now, TRAIN_SECONDS, {6: 0.3, 3: 0.004, 2: 0.0, 1: 0.0})
    assert cadence.publish_every == 3
    assert cadence.why() == "the learner would wait 30% of the time, and 0% with 3"
    assert not cadence.is_due(), "what was sampled before says nothing"


def test_it_stays_where_the_learner_does_not_wait_or_nothing_would_be_better() -> None:
    for forecast in ({2: LEAST_GAIN / 2, 1: 0.0}, {2: 0.4, 1: 0.4}, {2: 0.4}, {1: 0.0}, {}):
        cadence = Cadence(2, 2)
        assert not cadence.look(steps(cadence, 1, TRAIN_SECONDS), TRAIN_SECONDS, forecast), forecast
    cadence = Cadence(2, 2)
    now = steps(cadence, 3 + LOOK_STEPS, TRAIN_SECONDS)
    assert not cadence.look(now, TRAIN_SECONDS, {2: 0.5, 1: 0.0}), "the forecast is wrong"


def test_it_rises_again_where_the_learner_waits_more_than_before_and_stays() -> None:
    cadence = Cadence(2, 2)
    now = steps(cadence, 1, TRAIN_SECONDS)
    assert cadence.look(now, TRAIN_SECONDS, {2: 0.1, 1: 0.0})
    now = steps(cadence, 3 + LOOK_STEPS, TRAIN_SECONDS / (1 - 0.1 - WORSE) * 1.01, now)
    assert cadence.is_due()
    assert cadence.look(now, TRAIN_SECONDS, {1: 0.0})
    assert cadence.publish_every == 2
    assert cadence.choices() == [2]
    assert not cadence.is_due()


@given(st.integers(1, 24), st.integers(0, 6), st.lists(st.tuples(st.floats(10, 30), st.floats(0, 0.9)), max_size=200))
def test_it_never_oscillates_and_never_exceeds_the_setting(
    setting: int, max_staleness: int, looks: list[tuple[float, float]]
) -> None:
    """Whatever is measured and forecast: a number that was given up does not come again."""
    cadence, now, moves = Cadence(setting, max_staleness), 0.0, [setting]
    for seconds, idle in looks:
        now = steps(cadence, 1, seconds, now)
        forecast = {one: idle / (1 + at) for at, one in enumerate(cadence.choices())}
        if cadence.is_due() and cadence.look(now, TRAIN_SECONDS, forecast):
            moves.append(cadence.publish_every)
    assert all(setting % one == 0 for one in moves)
    rises = [(one, other) for one, other in itertools.pairwise(moves) if other > one]
    assert len(rises) <= 1 or sorted(set(rises)) == sorted(rises)
    assert len(moves) <= 1 + 2 * len([one for one in range(1, setting + 1) if setting % one == 0])


def test_a_run_that_publishes_too_rarely_waits_no_more_and_keeps_every_rule() -> None:
    scenario = Scenario(
        max_steps=24,
        groups_per_step=16,
        group_size=4,
        max_staleness=4,
        publish_every=4,
        lease_seconds=120.0,
        heartbeat_seconds=5.0,
        faults_until_seconds=0.0,
        workers=(WorkersSpec(count=7, rollout_seconds=32.0),),
        learner=LearnerSpec(train_seconds=30.0, publish_seconds=0.5),
        broadcast=BroadcastSpec(scheme="fixed", seconds=6.0),
    )
    report = run_scenario(scenario, 1)
    assert judge(report, scenario) + judge_replay(report, scenario) == []
    assert report.steady_idle_ratio < 0.05, "it was .3 with a snapshot after every fourth step"
    assert report.max_staleness <= 4
