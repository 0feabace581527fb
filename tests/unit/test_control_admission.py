"""How far ahead sampling may run, by the effective sample size of the steps: in fast, out slowly, within its limits."""

from __future__ import annotations

import math

from hypothesis import given, settings
from hypothesis import strategies as st

from echo2.control.admission import CALM_STEPS, MARGIN, Admission

ESS = st.lists(st.floats(0.0, 1.0), max_size=80)


def after(ess: list[float], floor: float = 0.5, lowest: int = 0, highest: int = 8) -> Admission:
    admission = Admission(floor, lowest, highest)
    for step, value in enumerate(ess):
        admission.step_trained(step, value)
    return admission


def test_one_bad_step_halves_the_room_above_the_least_bound() -> None:
    assert after([0.9, 0.4]).bound == 4
    assert after([0.4], lowest=2).bound == 2 + 3
    assert after([0.5]).bound == 8  # at the floor is not below it


def test_steps_let_in_under_the_old_bound_change_nothing() -> None:
    assert after([0.1] * 9).bound == 4  # step 0 changed it; workers with version 0 may have sampled for steps 1 to 8
    assert after([0.1] * 10).bound == 2
    assert after([0.1] * (10 + 4)).bound == 2
    assert after([0.1] * (10 + 5)).bound == 1


def test_it_comes_back_one_version_at_a_time_and_only_from_well_above_the_floor() -> None:
    low = [0.1] + [0.1] * 8  # bound 4
    assert after(low + [0.6] * 30).bound == 4  # above the floor, not well above it: as good as it should be
    assert after(low + [0.7] * (CALM_STEPS - 1)).bound == 4
    assert after(low + [0.7] * CALM_STEPS).bound == 5
    assert after([*low, 0.7, 0.7, 0.6, 0.7, 0.7]).bound == 4  # in a row
    assert after(low + [0.7] * (CALM_STEPS + 4 + CALM_STEPS)).bound == 6
    assert after(low + [0.7] * 200).bound == 8


def test_without_a_floor_or_without_a_measurement_nothing_changes() -> None:
    assert after([0.0] * 50, floor=0.0).bound == 8
    admission = Admission(0.5, 0, 8)
    for step in range(50):
        admission.step_trained(step, None)
    assert admission.bound == 8


@given(ESS, st.floats(0.01, 0.99), st.integers(0, 6), st.integers(0, 30))
def test_it_stays_between_its_limits_and_depends_on_the_steps_alone(
    ess: list[float], floor: float, lowest: int, room: int
) -> None:
    admission = Admission(floor, lowest, lowest + room)
    for step, value in enumerate(ess):
        admission.step_trained(step, value)
        assert lowest <= admission.bound <= lowest + room
    recovered = Admission(floor, lowest, lowest + room)
    recovered.recover(enumerate(ess))
    assert recovered.bound == admission.bound


@given(ESS, ESS, st.data())
def test_a_fall_back_forgets_the_steps_that_are_trained_again(
    ess: list[float], again: list[float], data: st.DataObject
) -> None:
    version = data.draw(st.integers(0, len(ess)))
    fallen = after(ess)
    fallen.forget_from(version)
    for step, value in enumerate(again, start=version):
        fallen.step_trained(step, value)
    assert fallen.bound == after(ess[:version] + again).bound


@given(st.integers(1, 32), st.floats(0.02, 0.3), st.floats(0.3, 0.9))
@settings(max_examples=30)
def test_where_ess_falls_with_age_it_settles_where_ess_is_near_the_floor(
    highest: int, decay: float, floor: float
) -> None:
    """A learner whose ESS is exp(-decay * age), with every step as old as the bound of its time allowed."""
    admission, bounds = Admission(floor, 0, highest), list[int]()
    for step in range(600):
        # What step t is trained on was let in when the learner stood at t - bound.
        age = max((bounds[at] for at in range(max(0, step - highest), step) if at + bounds[at] >= step), default=0)
        admission.step_trained(step, math.exp(-decay * age))
        bounds.append(admission.bound)

    def oldest(ess: float) -> int:
        return max((age for age in range(highest + 1) if math.exp(-decay * age) >= ess), default=0)

    late, well_above = bounds[400:], oldest(floor + MARGIN * (1.0 - floor))
    assert max(late) <= max(oldest(floor), well_above + 1)
    assert min(late) >= (well_above + 1) // 2
    assert len(set(late)) == 1 or oldest(floor) == well_above  # else there is a bound that fits, and it stays there
