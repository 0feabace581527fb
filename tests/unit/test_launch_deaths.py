"""When a failure that repeats ends a run: by progress, never by the clock."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from echo2.core.logs import last_words
from echo2.launch.supervisor import RESTARTS_MAX, START_FAILURES_MAX, Deaths, is_up, progress

WORKERS = [{"id": "w-1", "pid": 5, "useful_groups": 3}, {"id": "w-2", "pid": None, "useful_groups": 4}]
STATUS: dict[str, Any] = {"version": 7, "head": {"pid": 1}, "learner": {"pid": 2}, "workers": WORKERS}


@pytest.mark.parametrize("hours", [0.0, 1.0, 1000.0])
@pytest.mark.parametrize(("was_up", "most"), [(False, START_FAILURES_MAX), (True, RESTARTS_MAX)])
def test_the_same_failure_ends_the_run_however_long_it_takes(hours: float, was_up: bool, most: int) -> None:
    deaths = Deaths()
    for number in range(most):
        assert not deaths.why_hopeless()
        deaths.died(f"CUDA out of memory: {number} MiB at 0x7f{number}", (3, 0), was_up, 3600 * number * hours)
    assert f"died {most} times in a row" in deaths.why_hopeless()


def test_different_failures_at_the_start_get_more_tries() -> None:
    deaths = Deaths()
    for words in ("no route", "disk error", "no route", "disk error"):
        deaths.died(words, (0,), False, 0.0)
        assert not deaths.why_hopeless()
    deaths.died("no route", (0,), False, 0.0)
    assert deaths.why_hopeless()


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 2)), min_size=1, max_size=60))
def test_no_process_is_restarted_more_often_than_it_comes_further(reached: list[tuple[int, int]]) -> None:
    """Steps that are trained again after a fall back to a checkpoint are no progress."""
    deaths, num_started = Deaths(), 0
    for best in reached:
        deaths.died("killed", best, True, 0.0)
        num_started += 1
        if deaths.why_hopeless():
            break
    num_further = max(version for version, _ in reached) + max(left_out for _, left_out in reached)
    assert num_started <= RESTARTS_MAX * (1 + num_further)


def test_a_process_that_comes_further_is_always_started_again() -> None:
    deaths = Deaths()
    for version in range(100):
        deaths.died("killed", (version, 0), True, 0.0)
        assert not deaths.why_hopeless()
    deaths = Deaths()
    for left_out in range(3):  # each found by four deaths at one step
        for _ in range(4):
            deaths.died("killed", (7, left_out), True, 0.0)
            assert not deaths.why_hopeless()


def test_progress_of_each_process() -> None:
    assert progress(STATUS, "learner", "", 2) == (7, 2)
    assert progress(STATUS, "head", "", 2) == (7, 7)
    assert progress(STATUS, "worker", "w-2", 0) == (4,)
    assert progress({}, "worker", "", 0) == (0,)
    assert [is_up(STATUS, pid) for pid in (1, 2, 5, 6)] == [True, True, True, False]


@pytest.mark.parametrize(
    ("log", "words"),
    [
        ("", ""),
        ("2026-01-01 10:00:00 INFO x: loading\n", ""),
        ("error: the model is gone\n2026-01-01 10:00:00 INFO x: bye\n", "the model is gone"),
        ("terminate called after throwing\n2026-01-01 10:00:00 INFO x: y\n", "terminate called after throwing"),
        (
            "Traceback (most recent call last):\n  File 'a'\nKeyError: 1\n\nDuring handling ...\n\n"
            "Traceback (most recent call last):\n  File 'b'\nValueError: two\nlines\n",
            "ValueError: two",
        ),
    ],
)
def test_the_last_lines_of_a_process(log: str, words: str) -> None:
    assert last_words(log.encode()) == words
