"""A machine at home stops and begins again seldom, whatever its measurements do, and always when they are clear."""

from __future__ import annotations

from hypothesis import example, given
from hypothesis import strategies as st

from echo2.worker.decide.home import BUSY_SECONDS, BUSY_SHARE, CALM_SECONDS, CALM_SHARE, Presence

Measured = tuple[float, float, bool]  # seconds since the one before, share of others, on battery
measured = st.tuples(st.floats(0.1, 30.0), st.floats(0.0, 1.0), st.sampled_from([False, False, False, True]))
stories = st.lists(measured, max_size=200)


def changes(story: list[Measured]) -> list[tuple[float, bool]]:
    """When it stopped (True) and when it began again."""
    presence, now, found = Presence(), 0.0, list[tuple[float, bool]]()
    for seconds, share, on_battery in story:
        now += seconds
        before = presence.paused
        presence.measured(share, on_battery, now)
        if bool(presence.paused) != bool(before):
            found.append((now, bool(presence.paused)))
    return found


@given(stories)
@example([(1.0, 0.0, True), (61.0, 0.0, False), (61.0, 0.0, False), (0.1, 0.0, True)])
def test_sampling_resumes_only_after_a_calm_period(story: list[Measured]) -> None:
    found = changes(story)
    assert [stopped for _, stopped in found] == [at % 2 == 0 for at in range(len(found))]
    for (stopped_at, _), (began_at, _) in zip(found[::2], found[1::2], strict=False):
        assert began_at - stopped_at >= CALM_SECONDS


@given(st.lists(st.tuples(st.floats(0.1, 30.0), st.floats(CALM_SHARE, BUSY_SHARE, exclude_max=True)), max_size=100))
def test_no_worker_changes_between_the_thresholds(story: list[tuple[float, float]]) -> None:
    assert changes([(seconds, share, False) for seconds, share in story]) == []
    stopped = changes([(1.0, 0.0, True), *((seconds, share, False) for seconds, share in story)])
    assert stopped == [(1.0, True)]


@given(stories)
def test_a_clear_signal_pauses_or_resumes_the_worker(story: list[Measured]) -> None:
    for share, on_battery, paused in ((1.0, False, True), (0.0, True, True), (0.0, False, False)):
        presence, now = Presence(), 0.0
        for seconds, *one in [*story, *[(1.0, share, on_battery)] * int(max(BUSY_SECONDS, CALM_SECONDS) + 2)]:
            now += seconds
            presence.measured(*one, now)
        assert bool(presence.paused) == paused


def test_a_short_peak_does_not_pause_and_a_long_one_is_named_as_the_reason() -> None:
    presence = Presence()
    for now in range(9):
        presence.measured(0.9, False, float(now))
    presence.measured(0.4, False, 9.0)
    presence.measured(0.9, False, 10.0)
    assert not presence.paused
    presence.measured(0.9, False, 20.0)
    assert presence.paused == "other programs use 90% of the processors"
