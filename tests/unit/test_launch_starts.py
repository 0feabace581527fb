"""Where a run is written, and what a start and a resume refuse or say before any process begins."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from echo2.config import build
from echo2.config import rundir as run_directories
from echo2.config.rundir import RunDir, claimed, create
from echo2.core.errors import UserError
from echo2.head.ledger.audit import audit
from echo2.head.ledger.ledger import Ledger
from echo2.launch.start import joining, open_run, resolve, run


def test_paths_are_absolute_so_that_a_run_can_be_used_from_elsewhere(
    raw: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "my_reward.py").write_text("def mine(completions, **kw): return [0.0] * len(completions)\n")
    (tmp_path / "digit_sorting").mkdir()
    monkeypatch.chdir(tmp_path)
    reward = {"functions": ["0.5 * my_reward.py:mine", "exact_match"]}
    relative = {**raw, "model": {"path": "model"}, "tasks": {"source": "./rows.jsonl"}, "reward": reward}
    Path("my.json").write_text(json.dumps({**relative, "eval": {"source": "digit_sorting#test"}}))
    config, where = resolve(Path("my.json"), {}, Path("run"))
    assert where == tmp_path / "run"
    assert config.model.path == str(tmp_path / "model")
    assert config.tasks.source == str(tmp_path / "rows.jsonl")
    assert config.eval.source == "digit_sorting#test"
    assert config.reward.functions == [f"0.5 * {tmp_path}/my_reward.py:mine", "exact_match"]


def test_a_start_that_failed_does_not_block_the_corrected_one(raw: dict[str, Any], tmp_path: Path) -> None:
    config = build(raw, "my.toml")
    rundir = create(tmp_path / "run", config, resume=False)
    Ledger(rundir.ledger).close()
    with pytest.raises(UserError, match="holds a run already"):
        create(rundir.path, config, resume=False)
    rundir.outcome.write_text('{"kind": "user_error", "reason": "no such port"}')
    assert create(rundir.path, config, resume=False) == rundir
    assert not rundir.ledger.exists()


@pytest.mark.parametrize("end", ["delivered", "scored", "trained"])
def test_a_resume_that_failed_does_not_let_a_run_be_started_over_its_ledger(
    raw: dict[str, Any], tmp_path: Path, end: str
) -> None:
    """A group that was paid for counts as much as a checkpoint; one that nobody delivered, or that was retired, not."""
    config = build(raw, "my.toml")
    rundir = create(tmp_path / "run", config, resume=False)
    ledger = Ledger(rundir.ledger)
    for number in range(3):
        ledger.issue(number, 0, number, 0.0)
    ledger.deliver(0, b"", "w", 0, 0, 1, 1.0, 1.0)
    ledger.retire(0, "failed_reward", 1.0)
    ledger.close()
    failure = '{"kind": "user_error", "reason": "no such port"}'
    copy = tmp_path / "copy"  # so far, nothing is lost with it
    shutil.copytree(rundir.path, copy)
    (copy / "outcome.json").write_text(failure)
    assert not create(copy, config, resume=False).ledger.exists()

    ledger = Ledger(rundir.ledger)
    ledger.deliver(1, b"", "w", 0, 0, 1, 1.0, 1.0)
    if end != "delivered":
        ledger.score(1, b"", False, 2.0)
    if end == "trained":
        ledger.learner_joined(0, 1, 2.0)
        ledger.train(0, 1, [1], 3.0)
    ledger.close()
    create(rundir.path, config, resume=True)  # takes the status of the run away
    rundir.outcome.write_text(failure)
    with pytest.raises(UserError, match="holds a run already"):
        create(rundir.path, config, resume=False)
    assert audit(rundir.ledger).trained == (end == "trained")


def test_a_resumed_run_says_what_changed_and_refuses_what_cannot(
    raw: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "my.json"
    path.write_text(json.dumps({**raw, "schedule": {"max_staleness": 3}}))
    open_run(path, tmp_path / "run", False, {})
    resolve(path, {}, tmp_path / "run", resume=True)
    assert capsys.readouterr().err == ""
    resolve(path, {"learner.lr": "0.5", "schedule.max_staleness": "4"}, tmp_path / "run", resume=True)
    said = capsys.readouterr().err
    assert "resumed with learner.lr: 1e-06 -> 0.5" in said
    assert "resumed with schedule.max_staleness: 3 -> 4" in said
    for flag, value, why in (
        ("run.seed", "5", "cannot change run.seed: 0 -> 5"),
        ("sampling.group_size", "3", "cannot change sampling.group_size"),
        ("sampling.temperature", "0.5", "delivered groups have logprobs at it"),
        ("model.path", "other/model", "the checkpoints are of that model"),
        ("tasks.source", "digit_sorting", "cannot change tasks.source"),
        ("tasks.params", "{levels = 3}", "cannot change tasks.params"),
        ("tasks.environment", "own.py:Other", "cannot change tasks.environment"),
        ("schedule.max_staleness", "2", r"cannot lower schedule.max_staleness \(3 -> 2\)"),
    ):
        with pytest.raises(UserError, match=why):
            resolve(path, {flag: value}, tmp_path / "run", resume=True)


def test_a_resumed_run_that_is_alive_is_refused_before_its_changes_are_printed(
    raw: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(run_directories, "CLAIM_SECONDS", 0.0)
    path, out = tmp_path / "my.json", tmp_path / "run"
    path.write_text(json.dumps(raw))
    create(out, build(raw, "my.json"), resume=False)
    capsys.readouterr()
    changed, before = {"learner.lr": "0.5"}, RunDir(out).config.read_text()
    with claimed(out, "run"), pytest.raises(UserError, match="Another `echo2 run` works on"):
        run(path, out, resume=True, dry_run=False, overrides=changed, as_json=False)
    with claimed(out, "head"), pytest.raises(UserError, match="Another `echo2 head` works on"):
        open_run(path, out, True, changed)
    assert (capsys.readouterr().err, RunDir(out).config.read_text()) == ("", before)


def test_the_run_directory_is_the_flags_or_named_after_the_file(tmp_path: Path) -> None:
    path = tmp_path / "sort.toml"
    path.write_text("")
    assert resolve(path, {}, None)[1] == Path.cwd() / "outputs" / "sort"
    assert resolve(path, {}, Path("here"))[1] == Path.cwd() / "here"


def test_a_head_alone_takes_a_run_directory_or_a_configuration(raw: dict[str, Any], tmp_path: Path) -> None:
    config = build(raw, "my.toml")
    made = create(tmp_path / "run", config, resume=False)
    assert open_run(made.path, None, False, {}) == made
    again = open_run(made.config, tmp_path / "other", False, {"run.seed": "7"})
    assert again.read_config().run.seed == 7
    with pytest.raises(UserError, match="is not a run directory"):
        open_run(tmp_path, None, False, {})


def test_a_start_says_how_other_machines_join_and_where_they_cannot(raw: dict[str, Any], tmp_path: Path) -> None:
    rundir = RunDir(tmp_path / "run")
    alone = joining(rundir, build(raw, "my.toml"))
    assert alone[1] == "no other machine can join: head.listen is 127.0.0.1:0; set it to 0.0.0.0:7341 to let them"
    for head in ({"listen": "0.0.0.0:7341", "advertise": "203.0.113.5"}, {"advertise": "203.0.113.5"}):
        lines = joining(rundir, build({**raw, "head": head}, "my.toml"))
        assert lines[1] == f"your machines join with: echo2 worker @{rundir.ticket}"
        assert lines[2] == f"other people's machines: echo2 invite {rundir.path}"
