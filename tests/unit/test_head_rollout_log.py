"""rollouts/step_N.jsonl: the first groups that a step is fed, whenever their texts are ready; and tables of them."""

from __future__ import annotations

import importlib.util
import json
import random
import sqlite3
from dataclasses import replace
from pathlib import Path

import pytest

from disk_cases import no_file_beyond
from echo2.core.types import LOGGED_ROLLOUTS, Message, Task
from echo2.head.ledger.metrics import (
    COLUMNS,
    TABLE_ROWS,
    TABLE_STEPS,
    TEXT_CHARS,
    Metrics,
    TrackioSink,
    WandbSink,
    rollout_rows,
)
from echo2.head.ledger.rollout_log import (
    COLUMN_CHARS_MAX,
    COLUMNS_MAX,
    KEPT_EVERY,
    KEPT_STEPS,
    RolloutLog,
    names,
    read_groups,
    task_over_steps,
)
from echo2.transport.limits import LOGGED_GROUPS, LOGGED_TOKENS
from learner_cases import group, random_group, rollout

TASK = Task(0, "53=")


def logged(path: Path) -> list[int]:
    return [json.loads(line)["group"] for line in path.read_text().splitlines()]


def test_a_few_groups_are_claimed_and_late_ones_spoil_no_other_step(tmp_path: Path) -> None:
    log = RolloutLog(tmp_path, "grpo")
    (tmp_path / "step_1.jsonl").write_text("of an earlier head\n")
    claims = {step: [log.claim(step) for _ in range(LOGGED_GROUPS + 3)] for step in (1, 2)}
    assert all(claimed == [True] * LOGGED_GROUPS + [False] * 3 for claimed in claims.values())
    for number, step in enumerate([2, 1, 2, 1, 2]):
        log.write(f"step_{step}", random_group(random.Random(number), number), TASK)
    assert logged(tmp_path / "step_1.jsonl") == [1, 3]
    assert logged(tmp_path / "step_2.jsonl") == [0, 2, 4]


def test_a_step_that_is_fed_again_overwrites_its_file(tmp_path: Path) -> None:
    log = RolloutLog(tmp_path, "grpo")
    for number, step in enumerate([1, 2, 1]):
        assert log.claim(step)
        log.write(f"step_{step}", random_group(random.Random(number), number), TASK)
    assert logged(tmp_path / "step_1.jsonl") == [2]


def test_the_newest_steps_of_a_long_run_stay_and_a_few_older_ones(tmp_path: Path) -> None:
    log, num_steps, made = RolloutLog(tmp_path, "grpo"), 3 * KEPT_STEPS, random_group(random.Random(0), 0)
    for step in range(1, num_steps + 1):
        assert log.claim(step)
        log.write(f"step_{step}", made, TASK)
    log.write("eval_1", made, TASK)
    newest = range(num_steps - KEPT_STEPS + 1, num_steps + 1)
    few = range(KEPT_EVERY, newest[0], KEPT_EVERY)
    assert set(names(tmp_path)) == {f"step_{step}" for step in (*few, *newest)} | {"eval_1"}


def test_a_training_groups_tokens_come_with_what_a_reader_asks_of_each(tmp_path: Path) -> None:
    turns = rollout([5, 6, 7, 8], reward=1.0, logprobs=[-0.5, 0.0, 0.0, -1.25], loss_mask=b"\1\0\0\1", version=2)
    plain = rollout([5], reward=0.0, logprobs=[-0.123456], version=3)
    made = group(9, [1, 2], [turns, plain], step=4)
    RolloutLog(tmp_path, "dr_grpo").write("step_5", made, TASK, lambda tokens: [f"<{token}>" for token in tokens])
    record = json.loads((tmp_path / "step_5.jsonl").read_text())
    assert (record["task"], record["staleness"], record["prompt"]) == (9, 2, "53=")
    first, second = record["rollouts"]
    assert (first["advantage"], second["advantage"]) == (0.5, -0.5)
    assert first["tokens"] == ["<5>", "<6>", "<7>", "<8>"]
    assert first["logprobs"] == [-0.5, 0.0, 0.0, -1.25]
    assert first["environment"] == [[1, 3]]
    assert second["logprobs"] == [-0.1235]


def test_long_rollouts_share_the_room_that_a_steps_tokens_have(tmp_path: Path) -> None:
    long = [rollout([1] * (LOGGED_TOKENS + 1), reward=float(number)) for number in range(4)]
    RolloutLog(tmp_path, "grpo").write("step_1", group(0, [1], long), TASK, lambda tokens: ["x"] * len(tokens))
    found = json.loads((tmp_path / "step_1.jsonl").read_text())["rollouts"]
    lengths = [len(each["tokens"]) for each in found]
    assert lengths == [LOGGED_TOKENS // (LOGGED_GROUPS * 4)] * 4
    assert [each["num_tokens"] for each in found] == [LOGGED_TOKENS + 1] * 4


def test_a_group_that_a_full_disk_refused_does_not_damage_the_next(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    log, groups = RolloutLog(tmp_path, "grpo"), [random_group(random.Random(number), number) for number in range(3)]
    log.write("step_1", groups[0], TASK)
    with no_file_beyond((tmp_path / "step_1.jsonl").stat().st_size + 50):
        log.write("step_1", groups[1], TASK)
    log.write("step_1", groups[2], TASK)
    assert [each["group"] for each in read_groups(tmp_path, "step_1")] == [0, 2]
    assert len((tmp_path / "step_1.jsonl").read_bytes().splitlines()) == 2
    assert len(caplog.records) == 1


def test_a_tasks_columns_are_there_as_text_and_bounded(tmp_path: Path) -> None:
    columns = {"answer": 42, "nan": float("nan"), "long": "ä" * (COLUMN_CHARS_MAX + 1), LOGGED_ROLLOUTS: ["x"]}
    many = {f"column{number}": number for number in range(COLUMNS_MAX)}
    log = RolloutLog(tmp_path, "grpo")
    log.write("step_1", random_group(random.Random(1), 0), Task(0, "53=", columns | many))
    log.write("step_1", random_group(random.Random(1), 1), TASK)
    found = [record["columns"] for record in read_groups(tmp_path, "step_1")]
    assert list(found[0]) == ["answer", "nan", "long", *list(many)[: COLUMNS_MAX - 3]]
    assert (found[0]["answer"], found[0]["nan"], found[0]["long"]) == ("42", "nan", "ä" * COLUMN_CHARS_MAX)
    assert found[1] == {}


def test_answers_to_held_out_tasks_are_text_alone(tmp_path: Path) -> None:
    RolloutLog(tmp_path, "grpo").write("eval_3", random_group(random.Random(1), 0), TASK)
    assert "tokens" not in json.loads((tmp_path / "eval_3.jsonl").read_text())["rollouts"][0]


def test_a_table_has_a_row_of_each_rollout(tmp_path: Path) -> None:
    log = RolloutLog(tmp_path, "grpo")
    swapped = replace(rollout([5, 6], reward=1.0), text="35", version_spans=((0, 4), (1, 5)))
    made = replace(group(0, [1], [swapped, replace(rollout([5], reward=0.0), text="3")]), worker_id="w-1")
    log.write("eval_5", made, TASK)
    log.write("eval_5", made, Task(1, (Message("system", "Sort."), Message("user", "53="))))
    assert COLUMNS == ("prompt", "completion", "reward", "worker", "version")
    assert rollout_rows(tmp_path, "eval_5") == [
        ["53=", "35", 1.0, "w-1", 4],
        ["53=", "3", 0.0, "w-1", 0],
        ["system: Sort.\nuser: 53=", "35", 1.0, "w-1", 4],
        ["system: Sort.\nuser: 53=", "3", 0.0, "w-1", 0],
    ]
    assert rollout_rows(tmp_path, "eval_6") == []


def test_a_table_is_bounded_in_rows_and_characters(tmp_path: Path) -> None:
    log = RolloutLog(tmp_path, "grpo")
    long = [replace(rollout([5]), text="ä" * (TEXT_CHARS + number)) for number in range(2)]
    for number in range(TABLE_ROWS):
        log.write("step_1", group(number, [1], long), Task(0, "5" * 3 * TEXT_CHARS))
    rows = rollout_rows(tmp_path, "step_1")
    assert len(rows) == TABLE_ROWS
    assert rows[0][0] == "5" * (TEXT_CHARS - 1) + "…"
    assert rows[0][1] == "ä" * TEXT_CHARS
    assert rows[1][1] == "ä" * (TEXT_CHARS - 1) + "…"


def test_logprobs_of_the_learner_are_read_with_their_rollouts_whichever_was_written_first(tmp_path: Path) -> None:
    """The text of a group may be ready after its step has been trained."""
    log, made = RolloutLog(tmp_path, "grpo"), [group(number, [1], [rollout([5, 6]), rollout([7])]) for number in (3, 4)]
    log.write("step_1", made[0], TASK)
    log.trained(1, {3: [[-0.51234, -1.0], [float("-inf")]], 4: [[-2.0, -3.0], []], 9: [[-4.0]]})
    log.write("step_1", made[1], TASK)
    expected = {3: [[-0.5123, -1.0], [None]], 4: [[-2.0, -3.0], []]}
    found = read_groups(tmp_path, "step_1")
    assert {one["group"]: [each["learner_logprobs"] for each in one["rollouts"]] for one in found} == expected
    log.write("step_2", group(5, [1], [rollout([5])]), TASK)
    over = task_over_steps(tmp_path, "step_1", 3)
    assert [(name, "learner_logprobs" in one["rollouts"][0]) for name, one in over] == [
        ("step_1", True),
        ("step_1", True),
        ("step_2", False),
    ]
    log.begin("step_1")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step_2.jsonl"]


@pytest.mark.skipif(importlib.util.find_spec("wandb") is None, reason="wandb is not installed here")
@pytest.mark.parametrize("is_wanted", [True, False])
def test_wandb_gets_tables_of_evaluations_and_of_every_tenth_step(
    tmp_path: Path, is_wanted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    folder = tmp_path / "rollouts"
    folder.mkdir()
    log, names = RolloutLog(folder, "grpo"), [f"step_{TABLE_STEPS}", f"step_{TABLE_STEPS + 1}", "eval_3"]
    for number, name in enumerate(names):
        log.write(name, replace(group(number, [1], [replace(rollout([5]), text=name)])), TASK)
    sink = WandbSink("project", "id", tmp_path, {}, folder if is_wanted else None)
    metrics = Metrics(tmp_path / "metrics.jsonl", [sink])
    for step in (TABLE_STEPS, TABLE_STEPS + 1):
        metrics.write({"step": step, "reward/mean": 0.5})
    metrics.amend(3, {"eval/accuracy": 0.25})
    metrics.close()
    tables = {
        path.name.partition("_")[0]: json.loads(path.read_text())
        for path in tmp_path.glob("wandb/offline-run-*/files/media/table/**/*.table.json")
    }
    texts = {name: [row[1] for row in table["data"]] for name, table in tables.items()}
    assert texts == ({"train": [f"step_{TABLE_STEPS}"], "held": ["eval_3"]} if is_wanted else {})
    assert all(table["columns"] == list(COLUMNS) for table in tables.values())


@pytest.mark.skipif(importlib.util.find_spec("trackio") is None, reason="trackio is not installed here")
def test_trackio_gets_every_number_and_goes_on_with_a_resumed_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))  # read when it is first imported
    for step in (1, 2):
        metrics = Metrics(tmp_path / "metrics.jsonl", [TrackioSink("project", "run-7", {"seed": 0})])
        metrics.write({"step": step, "reward/mean": 0.5, "note": "no number"})
        metrics.amend(step, {"eval/accuracy": 0.25})
        metrics.close()
    (file,) = (tmp_path / "trackio").glob("*.db")
    rows = sqlite3.connect(file).execute("select run_name, step, metrics from metrics order by id").fetchall()
    expected = [(step, values) for step in (1, 2) for values in ({"reward/mean": 0.5}, {"eval/accuracy": 0.25})]
    assert [(step, json.loads(values)) for _, step, values in rows] == expected
    assert {name for name, *_ in rows} == {"run-7"}
    assert capfd.readouterr().out == ""
