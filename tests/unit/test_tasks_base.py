"""Order of tasks (a permutation every epoch, the same for the same cursor) and what a row must be."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from echo2.core.errors import UserError
from echo2.core.types import Message
from echo2.tasks.base import MAX_COLUMNS_BYTES, MAX_PROMPT_CHARS, TaskStream, permute, task_from_row


@given(size=st.integers(1, 300), key=st.text(max_size=8))
def test_permute_is_a_bijection(size: int, key: str) -> None:
    assert sorted(permute(position, size, key) for position in range(size)) == list(range(size))


@given(size=st.integers(2**31, 2**62), data=st.data())
def test_permute_of_a_huge_range_stays_inside_without_collisions(size: int, data: st.DataObject) -> None:
    first, second = data.draw(st.lists(st.integers(0, size - 1), min_size=2, max_size=2, unique=True))
    images = {permute(first, size, "k"), permute(second, size, "k")}
    assert len(images) == 2
    assert all(0 <= image < size for image in images)


def test_permute_looks_random() -> None:
    size = 1000
    images = [permute(position, size, "0/0") for position in range(size)]
    mean_step = sum(abs(a - b) for a, b in pairwise(images)) / (size - 1)
    assert 0.28 * size < mean_step < 0.39 * size  # E|X - Y| of uniform X, Y is size / 3


class Rows:
    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> dict[str, object]:
        return {"prompt": f"row {index}", "index": index}


@given(size=st.integers(1, 40), seed=st.integers(0, 2**63), epochs=st.integers(1, 3))
def test_every_epoch_holds_every_row_once(size: int, seed: int, epochs: int) -> None:
    stream = TaskStream(Rows(size), seed, True)
    for epoch in range(epochs):
        tasks = [stream.task(epoch * size + position) for position in range(size)]
        assert sorted(task.columns["index"] for task in tasks) == list(range(size))
        assert [task.cursor for task in tasks] == list(range(epoch * size, (epoch + 1) * size))


def test_same_cursor_same_task_whatever_was_drawn_before() -> None:
    one, other = TaskStream(Rows(50), 3, True), TaskStream(Rows(50), 3, True)
    drawn = [one.task(cursor) for cursor in range(120)]
    assert [other.task(cursor) for cursor in reversed(range(120))] == drawn[::-1]


def test_epochs_and_seeds_differ_and_unshuffled_is_in_order() -> None:
    def order(seed: int, epoch: int, shuffle: bool = True) -> list[int]:
        stream = TaskStream(Rows(50), seed, shuffle)
        return [stream.task(epoch * 50 + position).columns["index"] for position in range(50)]

    assert order(0, 0) != order(0, 1)
    assert order(0, 0) != order(1, 0)
    assert order(0, 7, shuffle=False) == list(range(50))
    assert len(TaskStream(Rows(50), 0, True)) == 50


def test_an_empty_source_and_an_unfit_first_row_show_at_once() -> None:
    with pytest.raises(UserError, match="empty"):
        TaskStream(Rows(0), 0, True)
    with pytest.raises(UserError, match=r"list row 0.*no column 'prompt' \(columns: question\)"):
        TaskStream([{"question": "?"}], 0, False)


class Broken(Rows):
    def __getitem__(self, index: int) -> dict[str, object]:
        raise KeyError("nothing here")

    def where(self, index: int) -> str:
        return f"broken.db line {index}"


def test_the_error_about_a_source_that_raises_has_its_line() -> None:
    with pytest.raises(UserError, match=r"broken.db line 0 could not be read: .*test_tasks_base.py:\d+.*KeyError"):
        TaskStream(Broken(3), 0, False)


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ([1], "must be a mapping"),
        ({"prompt": None}, "text or a list of chat messages, got NoneType"),
        ({"prompt": ""}, "empty"),
        ({"prompt": " \n"}, "empty"),
        ({"prompt": []}, "empty"),
        ({"prompt": [{"role": "user", "content": ""}]}, "empty"),
        ({"prompt": "x" * (MAX_PROMPT_CHARS + 1)}, "the limit is"),
        ({"prompt": "\ud800"}, "an incomplete character"),
        ({"prompt": ["hello"]}, "message 0 of the prompt"),
        ({"prompt": [{"role": "user", "content": None}]}, "message 0"),
        ({"prompt": [{"role": "not a role", "content": "x"}]}, "one word"),
        ({"prompt": [{"role": "user", "content": "x", "tool_calls": [1]}]}, "'tool_calls', which would be lost"),
        ({"prompt": "x", "image": b"png"}, "column 'image' = b'png' cannot be sent as JSON"),
        ({"prompt": "x", "score": float("nan")}, "column 'score' = nan"),
        ({"prompt": "x", "a": 1, "b": "y" * MAX_COLUMNS_BYTES}, "The largest is 'b'"),
    ],
)
def test_the_reason_names_unfit_rows(row: object, said: str) -> None:
    with pytest.raises(UserError) as caught:
        task_from_row(row, 0, "rows.jsonl:17")
    assert said in str(caught.value)
    assert str(caught.value).startswith("rows.jsonl:17")
    assert len(str(caught.value)) < 400


def test_a_fit_row() -> None:
    messages = [{"role": "system", "content": "Sort."}, {"role": "user", "content": "21", "name": None}]
    task = task_from_row({"prompt": messages, "answer": "12", "extra_info": {"pair": (1, 2), 3: None}}, 5, "here")
    assert task.prompt == (Message("system", "Sort."), Message("user", "21"))
    assert task.columns == {"answer": "12", "extra_info": {"pair": [1, 2], "3": None}}  # as every machine will see them
    assert task.cursor == 5
