"""Several sources as one: fixed shares, the same task under the same cursor, sets one after the other."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from echo2.config.sections import EvalConfig, TasksConfig
from echo2.core.errors import UserError
from echo2.tasks.base import TaskStream
from echo2.tasks.streams import BLOCK, Mixture, held_out_tasks, quotas, training_tasks
from seeds import examples


def rows(directory: Path, name: str, size: int) -> str:
    path = directory / f"{name}.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"{name} {at}", "answer": at}) + "\n" for at in range(size)))
    return str(path)


@given(st.lists(st.floats(1e-3, 1e3), min_size=1, max_size=8), st.integers(1, 5000))
def test_quotas_add_up_and_are_within_one_of_their_share(weights: list[float], size: int) -> None:
    found = quotas(weights, size)
    assert sum(found) == size
    assert all(abs(quota - size * weight / sum(weights)) < 1 for quota, weight in zip(found, weights, strict=True))


def test_a_mixture_keeps_its_shares_and_goes_through_every_row_of_each(tmp_path: Path) -> None:
    one, other = rows(tmp_path, "one", 50), rows(tmp_path, "other", 700)
    tasks = training_tasks(TasksConfig(source=[f"0.3 * {one}", f"0.7 * {other}"]), seed=4)
    found = [tasks.task(cursor) for cursor in range(BLOCK)]
    assert [task.cursor for task in found] == list(range(BLOCK))
    assert Counter(tasks.source_of(cursor) for cursor in range(BLOCK)) == {"one.jsonl": 300, "other.jsonl": 700}
    prompts = Counter(task.prompt for task in found)
    assert len(prompts) == 750
    assert {count for prompt, count in prompts.items() if str(prompt).startswith("one")} == {6}  # epochs of 50 rows
    near = Counter(tasks.source_of(cursor) for cursor in range(100))
    assert 15 <= near["one.jsonl"] <= 45  # mixed, not one after the other


def test_the_task_follows_from_seed_and_cursor_alone(tmp_path: Path) -> None:
    named = TasksConfig(source=[rows(tmp_path, "one", 5), rows(tmp_path, "other", 7)])
    first, again, other = (training_tasks(named, seed) for seed in (0, 0, 1))
    late = range(5 * BLOCK, 5 * BLOCK + 50)
    assert [again.task(cursor) for cursor in reversed(late)] == [first.task(cursor) for cursor in late][::-1]
    assert [other.task(cursor).prompt for cursor in late] != [first.task(cursor).prompt for cursor in late]


def test_metrics_name_a_source_without_the_machine_it_lies_on(tmp_path: Path) -> None:
    """An absolute path in a metric's name differs between machines, and goes to other people's servers."""

    def named(*sources: str) -> set[str]:
        tasks = training_tasks(TasksConfig(source=list(sources)), seed=4)
        return {tasks.source_of(cursor) for cursor in range(BLOCK)}

    for folder in ("easy", "hard", "x/hard"):
        (tmp_path / folder).mkdir(parents=True)
    easy, hard, deep = (rows(tmp_path / folder, "rows", 5) for folder in ("easy", "hard", "x/hard"))
    assert named(rows(tmp_path, "a", 5), rows(tmp_path, "b", 5)) == {"a.jsonl", "b.jsonl"}
    assert named(easy, hard) == {"easy/rows.jsonl", "hard/rows.jsonl"}
    assert named(easy, deep, "digit_sorting") == {"easy/rows.jsonl", "hard/rows.jsonl", "digit_sorting"}
    assert named(hard, deep) == {f"{tmp_path.name}/hard/rows.jsonl", "x/hard/rows.jsonl"}


@pytest.mark.parametrize(
    ("entries", "word"),
    [([], "at least one"), (["-1 * {}"], "above 0"), (["{}", "2 * {}"], "each once"), (["1e-9 * {}", "{}2"], "share")],
)
def test_invalid_mixtures_are_refused(entries: list[str], word: str, tmp_path: Path) -> None:
    one = rows(tmp_path, "one", 5)
    named = [entry.replace("{}2", rows(tmp_path, "two", 3)).replace("{}", one) for entry in entries]
    with pytest.raises(UserError, match=word):
        training_tasks(TasksConfig(source=named), 0)


def test_held_out_sets_follow_each_other_each_up_to_the_limit(tmp_path: Path) -> None:
    sets = {"short": rows(tmp_path, "short", 3), "long": rows(tmp_path, "long", 9)}
    tasks = held_out_tasks(EvalConfig(source=sets, limit=4), seed=0)
    assert tasks is not None
    assert [tasks.task(at).prompt for at in range(len(tasks))] == [
        *(f"short {at}" for at in range(3)),
        *(f"long {at}" for at in range(4)),
    ]
    assert [tasks.source_of(at) for at in range(7)] == ["short"] * 3 + ["long"] * 4
    assert held_out_tasks(EvalConfig(), 0) is None


def test_tasks_of_a_single_source_have_no_source_name(tmp_path: Path) -> None:
    tasks = training_tasks(TasksConfig(source=rows(tmp_path, "one", 3)), 0)
    assert isinstance(tasks, TaskStream)
    assert tasks.source_of(2) == ""


@examples(10)
@given(st.lists(st.integers(1, 40), min_size=2, max_size=5), st.integers(0, 3))
def test_every_cursor_is_used_for_any_weights(weights: list[int], seed: int) -> None:
    """Each source's own cursors are 0, 1, 2 ... without a gap, over blocks."""

    class Rows:
        def __len__(self) -> int:
            return 10**9

        def __getitem__(self, index: int) -> dict[str, object]:
            return {"prompt": str(index)}

    streams = {str(at): TaskStream(Rows(), 0, False) for at in range(len(weights))}
    mixture = Mixture(streams, weights, seed)
    seen: dict[str, list[int]] = {}
    for cursor in range(3 * BLOCK):
        seen.setdefault(mixture.source_of(cursor), []).append(int(str(mixture.task(cursor).prompt)))
    assert all(sorted(own) == list(range(len(own))) for own in seen.values())


def test_a_head_may_read_beyond_the_last_held_out_task(tmp_path: Path) -> None:
    """It reads ahead: what is not there is said, and does not end the thread that reads."""
    found = held_out_tasks(EvalConfig(source=rows(tmp_path, "a", 9), limit=4), 0)
    assert found is not None
    assert len(found) == 4
    with pytest.raises(UserError, match="There are 4 held-out tasks"):
        found.task(4)
