"""The demo's task: right answers, two splits that never meet, the same rows everywhere."""

from __future__ import annotations

from typing import Any
from zlib import crc32

import pytest
from hypothesis import given
from hypothesis import strategies as st

from echo2.core.errors import UserError
from echo2.tasks.digit_sorting import DigitSorting


@given(
    st.sampled_from(["train", "heldout"]),
    st.integers(0, 999),
    st.integers(0, 1000),
    st.integers(2, 12),
    st.integers(0, 5),
)
def test_rows_are_right_in_their_split_and_repeatable(
    split: Any, row: int, seed: int, shortest: int, more: int
) -> None:
    tasks = DigitSorting(split, shortest, shortest + more, seed=seed, size=1000)
    task = tasks[row]
    digits = task["prompt"].removesuffix("=")
    assert task["prompt"] == digits + "="
    assert digits.isdigit()
    assert shortest <= len(digits) <= shortest + more
    assert task["answer"] == "".join(sorted(digits))
    assert (crc32(task["prompt"].encode()) % 8 == 0) == (split == "heldout")
    assert DigitSorting(split, shortest, shortest + more, seed=seed, size=1000)[row] == task


def test_the_digit_tasks_are_a_sequence() -> None:
    tasks = DigitSorting(size=5)
    assert len(tasks) == 5
    assert list(tasks) == [tasks[i] for i in range(5)]
    assert tasks[-1] == tasks[4]
    with pytest.raises(IndexError):
        tasks[5]
    assert len({task["prompt"] for task in DigitSorting("heldout", size=300)}) > 290
    assert DigitSorting(seed=1)[0] != DigitSorting(seed=0)[0]


def test_a_row_keeps_its_values() -> None:
    """Frozen: a resumed run must see the tasks it saw before."""
    assert DigitSorting()[0] == {"prompt": "2123592540=", "answer": "0122234559"}
    assert DigitSorting("heldout")[0] == {"prompt": "25503646=", "answer": "02345566"}


@pytest.mark.parametrize(
    "arguments",
    [{"split": "test"}, {"min_digits": 1}, {"min_digits": 6, "max_digits": 5}, {"size": 0}, {"max_digits": 10**6}],
)
def test_the_error_names_impossible_arguments(arguments: dict[str, Any]) -> None:
    with pytest.raises(UserError, match=next(iter(arguments))):
        DigitSorting(**arguments)
