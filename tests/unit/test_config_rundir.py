"""The files of a run: the directory, small files replaced whole, metrics.jsonl, events.jsonl; torn and damaged ones."""

from __future__ import annotations

import errno
import importlib.util
import json
import os
import random
import threading
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from disk_cases import no_file_beyond
from echo2 import cli
from echo2.config import Config, build
from echo2.config.rundir import RunDir, claimed, create, newest_run, read_json, read_metrics, write_atomically
from echo2.core import logs
from echo2.core.errors import UserError
from echo2.core.types import RUN_POLICY, GroupRef
from echo2.head.decide import events as ev
from echo2.head.decide.planner import Planner
from echo2.head.decide.state import PlannerOptions
from echo2.head.ledger.eventlog import PARTS_KEPT, VERSION, EventLog, from_plain, replay, to_plain
from echo2.head.ledger.metrics import ROWS_MAX, Metrics, Row, Sink, TensorBoardSink, WandbSink

OPTIONS = PlannerOptions(groups_per_step=2, group_size=2, max_steps=3)


# ---- the run directory -----------------------------------------------------------------------------------------------


def test_a_new_run_has_its_folders_and_its_configuration(tmp_path: Path) -> None:
    config = build({"run": {"seed": 5}}, "my.toml")
    rundir = create(tmp_path / "a" / "run", config, resume=False)
    assert rundir.read_config() == config
    assert all(folder.is_dir() for folder in (rundir.logs, rundir.checkpoints, rundir.snapshots, rundir.rollouts))
    assert rundir.identity.stat().st_mode & 0o077 == 0, "private keys are nobody else's"


def test_a_directory_is_used_again_only_on_demand(tmp_path: Path) -> None:
    create(tmp_path / "run", Config(), resume=False)
    with pytest.raises(UserError, match=r"holds a run already\. Continue it with --resume"):
        create(tmp_path / "run", Config(), resume=False)
    with pytest.raises(UserError, match="Nothing to resume"):
        create(tmp_path / "other", Config(), resume=True)
    assert not (tmp_path / "other").exists()


def test_resuming_takes_the_new_configuration_and_forgets_how_the_last_part_ended(tmp_path: Path) -> None:
    rundir = create(tmp_path / "run", Config(), resume=False)
    for stale in (rundir.outcome, rundir.status, rundir.processes, rundir.summary):
        stale.write_text("{}")
    rundir.metrics.write_text('{"step": 1}\n')
    longer = build({"run": {"max_steps": 7}}, "my.toml")
    again = create(tmp_path / "run", longer, resume=True)
    assert again.read_config() == longer
    assert not any(path.exists() for path in (again.outcome, again.status, again.processes, again.summary))
    assert again.metrics.exists()


def test_the_error_names_a_path_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"file/run cannot be a run directory: .*/file is a file\. Choose another"):
        create(tmp_path / "file" / "run", Config(), resume=False)


def test_the_error_says_that_a_directory_has_no_run(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"is not a run directory: it has no config\.json"):
        RunDir(tmp_path).read_config()


def test_a_full_disk_leaves_the_old_file_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "status.json"
    write_atomically(path, "old")
    with no_file_beyond(100), pytest.raises(UserError, match=r"Cannot write .*status\.json: .*Free some space"):
        write_atomically(path, "n" * 1000)
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["status.json"], "no half-written file is left"


def test_a_private_file_is_private_from_its_first_byte(tmp_path: Path) -> None:
    write_atomically(tmp_path / "ticket", "secret", mode=0o600)
    assert (tmp_path / "ticket").stat().st_mode & 0o777 == 0o600


def test_a_json_file_may_be_missing_but_not_damaged(tmp_path: Path) -> None:
    assert read_json(tmp_path / "status.json") is None
    (tmp_path / "status.json").write_text('{"a"')
    with pytest.raises(UserError, match=r"status\.json is damaged"):
        read_json(tmp_path / "status.json")


def test_the_newest_run_is_the_one_whose_head_wrote_last(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="No run found below"):
        newest_run(tmp_path)
    older, newer = (create(tmp_path / name, Config(), resume=False) for name in ("older", "newer"))
    (tmp_path / "models").mkdir()
    for rundir, written_at in ((older, 1000), (newer, 2000)):
        rundir.status.write_text("{}")
        for path in (rundir.config, rundir.status):
            os.utime(path, (written_at, written_at))
    (older.path / "ledger.sqlite-shm").write_text("")  # somebody looked into the older run
    assert newest_run(tmp_path) == newer
    os.utime(older.config, (3000, 3000))  # resumed
    assert newest_run(tmp_path) == older


# ---- metrics.jsonl ---------------------------------------------------------------------------------------------------


def row(step: int, **values: float) -> Row:
    return {"step": step, **values}


def test_rows_are_appended_and_read_back(tmp_path: Path) -> None:
    metrics = Metrics(tmp_path / "metrics.jsonl")
    metrics.write(row(1, loss=0.5))
    metrics.write(row(2, loss=0.25))
    assert read_metrics(tmp_path / "metrics.jsonl") == [row(1, loss=0.5), row(2, loss=0.25)]
    assert read_metrics(tmp_path / "nothing.jsonl") == []


def test_an_evaluation_is_added_to_its_steps_row_or_makes_one(tmp_path: Path) -> None:
    metrics = Metrics(tmp_path / "metrics.jsonl")
    metrics.write(row(1, loss=0.5))
    metrics.write(row(2, loss=0.25))
    metrics.amend(1, {"eval/accuracy": 0.75})
    metrics.amend(0, {"eval/accuracy": 0.5})
    assert read_metrics(tmp_path / "metrics.jsonl") == [
        {"step": 0, "eval/accuracy": 0.5},
        {"step": 1, "loss": 0.5, "eval/accuracy": 0.75},
        row(2, loss=0.25),
    ]


def test_steps_trained_again_replace_what_they_were(tmp_path: Path) -> None:
    metrics = Metrics(tmp_path / "metrics.jsonl")
    for step in (1, 2, 3):
        metrics.write(row(step, loss=float(step)))
    metrics.truncate(1)
    assert [r["step"] for r in read_metrics(tmp_path / "metrics.jsonl")] == [1]
    metrics.write(row(2, loss=20.0))
    metrics.write(row(2, loss=21.0))
    assert read_metrics(tmp_path / "metrics.jsonl") == [row(1, loss=1.0), row(2, loss=21.0)]


@given(cut=st.integers(1, 30), step=st.integers(2, 9))
def test_a_row_torn_by_a_kill_is_passed_over_and_never_glued_to_the_next(
    tmp_path_factory: pytest.TempPathFactory, cut: int, step: int
) -> None:
    path = tmp_path_factory.mktemp("torn") / "metrics.jsonl"
    Metrics(path).write(row(1, loss=0.5))
    whole = path.read_bytes()
    torn = json.dumps(row(step, text="é"), ensure_ascii=False).encode() + b"\n"
    path.write_bytes(whole + torn[: min(cut, len(torn) - 2)])
    metrics = Metrics(path)
    assert metrics.recent == [row(1, loss=0.5)]
    metrics.write(row(2, loss=0.25))
    assert read_metrics(path) == [row(1, loss=0.5), row(2, loss=0.25)]


def test_a_full_disk_stops_the_metrics_with_advice(tmp_path: Path) -> None:
    metrics = Metrics(tmp_path / "metrics.jsonl")
    metrics.write(row(1))
    refused = row(2, **{f"name/{number}": 0.0 for number in range(20)})
    with no_file_beyond(50), pytest.raises(UserError, match=r"Cannot write .*metrics\.jsonl: .*--resume"):
        metrics.write(refused)
    assert read_metrics(tmp_path / "metrics.jsonl", refuses_damage=True) == [row(1)]
    metrics.write(row(3))
    assert read_metrics(tmp_path / "metrics.jsonl", refuses_damage=True) == [row(1), refused, row(3)]
    again = Metrics(tmp_path / "metrics.jsonl")
    again.write(row(4))
    assert read_metrics(tmp_path / "metrics.jsonl") == [row(1), refused, row(3), row(4)]


def test_a_row_that_could_not_be_amended_is_written_with_the_next_one(tmp_path: Path) -> None:
    metrics = Metrics(tmp_path / "metrics.jsonl")
    metrics.write(row(1))
    with no_file_beyond(10), pytest.raises(UserError, match="Cannot write"):
        metrics.amend(1, {"eval/accuracy": 0.5})
    metrics.write(row(2))
    assert read_metrics(tmp_path / "metrics.jsonl") == [row(1) | {"eval/accuracy": 0.5}, row(2)]


def test_tensorboard_gets_every_number(tmp_path: Path) -> None:
    sink = TensorBoardSink(tmp_path / "tensorboard")
    metrics = Metrics(tmp_path / "metrics.jsonl", [sink])
    metrics.write({"step": 1, "reward/mean": 0.5, "note": "no number"})
    metrics.amend(1, {"eval/accuracy": 0.25})
    metrics.close()
    (file,) = (tmp_path / "tensorboard").iterdir()
    data = file.read_bytes()
    assert b"reward/mean" in data
    assert b"eval/accuracy" in data
    assert b"note" not in data


class BadSink(Sink):
    """Fails at the second row, or waits at the first for as long as it may."""

    def __init__(self, fails: bool) -> None:
        self.fails, self.go_on, self.steps = fails, threading.Event(), list[int]()

    def write(self, step: int, values: Any) -> None:
        self.steps.append(step)
        if not self.fails:
            self.go_on.wait()
        elif len(self.steps) == 2:
            raise OSError("the network is gone")

    def close(self) -> None:
        pass


def test_a_sink_that_fails_costs_its_copy_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    sink = BadSink(fails=True)
    metrics = Metrics(tmp_path / "metrics.jsonl", [sink])
    for step in range(1, 3000):
        metrics.write({"step": step})
    metrics.close()
    assert sink.steps == [1, 2]
    assert "the network is gone" in caplog.text
    assert [row["step"] for row in read_metrics(tmp_path / "metrics.jsonl")] == [*range(1, 3000)]


def test_a_stalled_sink_does_not_block_the_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("echo2.head.ledger.metrics.CLOSE_SECONDS", 0.01)
    sink = BadSink(fails=False)
    metrics = Metrics(tmp_path / "metrics.jsonl", [sink])
    for step in range(1, ROWS_MAX + 10):
        metrics.write({"step": step})
    metrics.close()
    assert "rows behind" in caplog.text
    assert "did not end" in caplog.text
    assert metrics.last_step == ROWS_MAX + 9
    sink.go_on.set()


@pytest.mark.skipif(importlib.util.find_spec("wandb") is not None, reason="wandb is installed here")
def test_the_error_about_a_missing_logger_package_names_its_setting(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"run\.log_to has wandb, which needs the package wandb: pip install wandb"):
        WandbSink("project", "id", tmp_path, {})


# ---- events.jsonl ----------------------------------------------------------------------------------------------------


def some_events() -> list[ev.Event]:
    """A little life of a head: learner and worker come, groups are wanted, one lease fails, the worker goes."""
    return [
        ev.HeadStarted(0, 1, -1, 0, 0, 1, (), (), (), ()),
        ev.LearnerJoined(0),
        ev.WorkerJoined("w1", 4, 0.5, None, ()),
        ev.GroupsWanted(0),
        ev.Tick(),
        ev.LeaseFailed("w1", 1, "environment_failed", "it raised"),
        ev.DeliveryMalformed("w1", 2, "malformed", "no rollouts"),
        ev.GroupScored(GroupRef(RUN_POLICY, "train", 0)),
        ev.WorkerDetached("w1", "its connection closed"),
    ]


def log_life(path: Path, events: list[ev.Event]) -> int:
    """Log a head that is told these events; the number of commands it answered."""
    planner, log, num_commands = Planner(OPTIONS), EventLog(path, OPTIONS), 0
    for second, event in enumerate(events):
        commands = planner.handle(event, float(second))
        log.write(float(second), event, commands)
        log.flush()
        num_commands += len(commands)
    log.close()
    return num_commands


def test_a_replay_of_two_heads_gives_the_same_commands(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    expected = log_life(path, some_events()) + log_life(path, some_events()[:4])
    found = replay(path)
    assert expected > 5
    assert (found.num_heads, found.num_events, found.num_commands) == (2, 13, expected)
    assert (found.num_different, found.first_difference) == (0, "")


def test_the_command_that_replays_counts_heads(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for heads in ("1 head", "2 heads"):
        log_life(tmp_path / "events.jsonl", some_events())
        assert cli.main(["replay", str(tmp_path)]) == 0
        assert f" events of {heads}, " in capsys.readouterr().out


def test_a_replay_names_the_first_command_that_differs(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    log_life(path, some_events())
    lines = path.read_text().splitlines()
    changed = [number for number, line in enumerate(lines) if '"commands":[]' not in line and "options" not in line]
    for number in changed[:2]:
        lines[number] = json.dumps({**json.loads(lines[number]), "commands": []})
    path.write_text("\n".join(lines) + "\n")
    found = replay(path)
    assert found.num_different == 2
    assert found.first_difference.startswith(f"{path}:{changed[0] + 1}, ")


@given(kept=st.floats(0.0, 0.99))
def test_a_line_torn_by_a_kill_is_the_last_of_its_head_and_is_passed_over(
    tmp_path_factory: pytest.TempPathFactory, kept: float
) -> None:
    path = tmp_path_factory.mktemp("torn") / "events.jsonl"
    log_life(path, some_events())
    whole = path.read_bytes()
    last = whole.rstrip(b"\n").rfind(b"\n") + 1
    path.write_bytes(whole[: last + int((len(whole) - 1 - last) * kept)])
    assert replay(path).num_events == len(some_events()) - 1
    log_life(path, some_events())  # the next head begins a line of its own
    found = replay(path)
    assert (found.num_heads, found.num_events, found.num_different) == (2, 2 * len(some_events()) - 1, 0)


def test_damage_in_the_middle_is_not_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    log_life(path, some_events())
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([*lines[:3], lines[3][:10] + b"\n", *lines[4:]]))
    with pytest.raises(UserError, match=r"events\.jsonl:4 is damaged"):
        replay(path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"now": 0, "event": {"type": "Tick"}, "commands": []}\n', ":1: an event stands before any planner options"),
        ('OPTIONS{"now": 0, "event": {"type": "Tock"}, "commands": []}\n', ":2 holds no event that this version knows"),
        ('OPTIONS{"now": 0, "event": {"type": "LearnerJoined"}, "commands": []}\n', ":2 holds no event"),
    ],
)
def test_the_error_says_that_a_file_has_no_event_log(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "events.jsonl"
    EventLog(path, OPTIONS).close()
    path.write_text(text.replace("OPTIONS", path.read_text()))
    with pytest.raises(UserError, match=message):
        replay(path)


@pytest.mark.parametrize("wrote", [None, "0.1.9-00ff", 3, "9" * 5000])
def test_a_log_of_another_version_is_refused_in_one_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], wrote: Any
) -> None:
    """Also where the options can be read: the same events may be answered in another way."""
    path = tmp_path / "events.jsonl"
    log_life(path, some_events())
    first, *others = path.read_text().splitlines(keepends=True)
    record = json.loads(first)
    assert record.pop("echo2") == VERSION
    named = {} if wrote is None else {"echo2": wrote}
    path.write_text("".join([json.dumps({**record, **named}) + "\n", *others]))
    assert cli.main(["replay", str(tmp_path)]) == 2
    (told,) = capsys.readouterr().err.splitlines()
    assert f"events.jsonl:1 was written by {'echo2' if isinstance(wrote, str) else 'an echo2 that did not'}" in told
    assert told.endswith(f"and this is {VERSION}. A log is replayed by the version of echo2 that wrote it.")
    assert len(told) < 600


def test_a_missing_event_log_is_a_user_error(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"Cannot read .*events\.jsonl: No such file"):
        replay(tmp_path / "events.jsonl")


def test_lines_that_a_full_disk_refused_are_written_when_there_is_room(tmp_path: Path) -> None:
    path, events, planner = tmp_path / "events.jsonl", some_events(), Planner(OPTIONS)
    log = EventLog(path, OPTIONS)

    def write(number: int) -> None:
        log.write(float(number), events[number], planner.handle(events[number], float(number)))

    write(0)
    log.flush()
    whole = path.read_bytes()
    write(1)
    with no_file_beyond(len(whole) + 10), pytest.raises(UserError, match=r"Cannot write .*events\.jsonl: "):
        log.flush()
    assert path.read_bytes() == whole, "no half of a line"
    write(2)
    log.flush()
    write(3)
    log.close()
    found = replay(path)
    assert (found.num_events, found.num_different) == (4, 0)


def test_a_part_of_the_log_that_cannot_begin_leaves_the_old_one_in_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, planner = tmp_path / "events.jsonl", Planner(OPTIONS)
    log = EventLog(path, OPTIONS, part_bytes_max=2500)

    def refused(*_: object) -> None:
        raise OSError(errno.EACCES, "denied")

    with monkeypatch.context() as patched:
        patched.setattr(logs, "shift", refused)
        for second in range(200):
            log.write(float(second), ev.Tick(), planner.handle(ev.Tick(), float(second)))
            if second in (99, 199):
                with pytest.raises(UserError, match="Cannot write"):
                    log.flush()
    log.close()
    assert (len(logs.parts(path)), replay(path).num_events) == (2, 200)


def test_a_log_that_is_closed_on_a_full_disk_says_how_many_events_it_lacks(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path, planner = tmp_path / "events.jsonl", Planner(OPTIONS)
    log = EventLog(path, OPTIONS)
    with no_file_beyond(path.stat().st_size + 10):
        for second in range(3):
            log.write(float(second), ev.Tick(), planner.handle(ev.Tick(), float(second)))
        log.close()
    assert [record.getMessage()[:35] for record in caplog.records] == ["3 events are not in the event log, "]
    log_life(path, some_events())
    assert (replay(path).num_events, replay(path).num_different) == (len(some_events()), 0)


def test_a_log_in_parts_is_replayed_as_one(tmp_path: Path) -> None:
    path, planner = tmp_path / "events.jsonl", Planner(OPTIONS)
    log = EventLog(path, OPTIONS, part_bytes_max=800)
    for second, event in enumerate(some_events()):
        log.write(float(second), event, planner.handle(event, float(second)))
        log.flush()
    log.close()
    log_life(path, some_events())
    assert len(logs.parts(path)) >= 3
    assert max(part.stat().st_size for part in logs.parts(path)[:-1]) < 800 + 1000  # the limit and a line
    found = replay(path)
    assert (found.num_heads, found.num_events, found.num_headless) == (2, 2 * len(some_events()), 0)
    assert found.num_different == 0


def test_a_log_without_its_oldest_part_is_replayed_from_the_next_head_with_a_note(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, planner, ticks = tmp_path / "events.jsonl", Planner(OPTIONS), 4000
    log = EventLog(path, OPTIONS, part_bytes_max=2500)
    for second in range(ticks):
        log.write(float(second), ev.Tick(), planner.handle(ev.Tick(), float(second)))
        log.flush()
    log.close()
    parts = logs.parts(path)
    assert len(parts) == PARTS_KEPT + 1, "what is older is deleted"
    left = sum(len(part.read_bytes().splitlines()) for part in parts)
    log_life(path, some_events())
    found = replay(path)
    assert (found.num_heads, found.num_events, found.num_headless) == (1, len(some_events()), left)
    assert found.num_different == 0
    assert cli.main(["replay", str(tmp_path)]) == 0
    assert f"{left} events before them can't be replayed: the log's oldest part is gone" in capsys.readouterr().out


@pytest.mark.parametrize("seed", range(3))
def test_events_survive_the_event_log(seed: int) -> None:
    events = some_events()
    random.Random(seed).shuffle(events)
    assert [from_plain(json.loads(json.dumps(to_plain(event)))) for event in events] == events


def test_a_run_directory_has_one_run_and_one_head(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("echo2.config.rundir.CLAIM_SECONDS", 0.0)
    with claimed(tmp_path / "run", "run"), claimed(tmp_path / "run", "head"):
        with pytest.raises(UserError, match="Another `echo2 head` works on"), claimed(tmp_path / "run", "head"):
            pass
        with claimed(tmp_path / "other", "head"):
            pass
    with claimed(tmp_path / "run", "head"):
        pass


def test_a_models_directory_is_not_taken_for_a_run(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}')
    with pytest.raises(UserError, match=r"is a model's directory\. Name the directory of a run"):
        RunDir(tmp_path).read_config()
