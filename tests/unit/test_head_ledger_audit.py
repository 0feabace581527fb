"""The audit: right on a history worked out by hand, and able to fail on every kind of damage."""

from __future__ import annotations

import shutil
import sqlite3
from pathlib import Path

import pytest

from echo2.cli import main
from echo2.config import build, to_json
from echo2.core.errors import UserError
from echo2.head.ledger.audit import audit
from echo2.head.ledger.ledger import Ledger
from echo2.head.ledger.schema import open_for_reading


def write_history(path: Path) -> None:
    """Groups 0 1 2 trained at steps 0 1 2; 1 and 2 again after a fall-back; 3 retired, 4 ready, 5 delivered, 6 open."""
    ledger = Ledger(path)
    ledger.learner_joined(0, 1, now=0.0)
    for number, step in enumerate([0, 1, 2, 3, 3, 3, 4]):
        ledger.issue(number, step, cursor=number, now=1.0)
        ledger.grant(number + 1, number, "w1", now=1.0, deadline=9.0, num_samples=4)
    for number, oldest in enumerate([0, 0, 0, 1, 2, 3]):
        ledger.deliver(number, b"rollouts", "w1", oldest, oldest, 10, 2.0, now=2.0)
        if number != 5:
            ledger.score(number, b"", is_flat=False, now=2.0)
        ledger.close_lease(number + 1, "accepted", now=2.0)
    for step in range(3):
        ledger.train(step, 1, [step], now=3.0)
    ledger.learner_joined(1, 2, now=4.0)
    for step in (1, 2):
        ledger.train(step, 2, [step], now=5.0)
    ledger.retire(3, "stale", now=6.0)
    ledger.refuse(2, 1, "w2", "duplicate", 10, 2.0, now=6.0)
    ledger.refuse(3, 2, "w2", "duplicate", 10, 2.0, now=6.0)
    ledger.close()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "ledger.sqlite"
    write_history(path)
    return path


def damage(path: Path, *statements: str) -> None:
    connection = sqlite3.connect(path, isolation_level=None)
    for statement in statements:
        connection.execute(statement)
    connection.close()


def test_a_history_worked_out_by_hand(path: Path) -> None:
    assert audit(path).to_dict() == {
        "issued": 7,
        "trained": 3,
        "retired": {"stale": 1},
        "open": 3,
        "lost": 0,
        "doubled": 0,
        "max_staleness": 2,  # group 2: step 2, tokens of version 0
        "refused": {"duplicate": 2},
        "leases": {"accepted": 6, "held": 1},
    }
    assert audit(path).is_balanced


def test_an_empty_ledger(tmp_path: Path) -> None:
    Ledger(tmp_path / "new").close()
    result = audit(tmp_path / "new")
    assert (result.issued, result.trained, result.open, result.max_staleness) == (0, 0, 0, 0)
    assert result.is_balanced


@pytest.mark.parametrize(
    ("statement", "lost"),
    [
        ("DELETE FROM groups WHERE number = 0", 1),  # trained
        ("DELETE FROM groups WHERE number = 3", 1),  # retired
        ("DELETE FROM groups WHERE number = 6", 1),  # the newest one
        ("DELETE FROM groups", 7),
        ("DELETE FROM rollouts WHERE number = 4", 1),  # ready
        ("DELETE FROM rollouts WHERE number = 5", 1),  # delivered
        ("DELETE FROM trainings WHERE number = 0", 1),
        ("DELETE FROM trainings WHERE number = 1 AND lineage = 2", 1),  # the other one does not survive
        ("DELETE FROM trainings", 3),
        ("UPDATE trainings SET lineage = 1 WHERE step = 2", 1),
    ],
)
def test_a_missing_group_counts_as_lost(path: Path, statement: str, lost: int) -> None:
    damage(path, statement)
    result = audit(path)
    assert result.lost == lost
    assert result.is_balanced


def test_a_group_missing_with_its_lease_is_counted_as_lost(path: Path) -> None:
    damage(path, "DELETE FROM groups WHERE number = 6", "DELETE FROM leases WHERE number = 6")
    assert (audit(path).issued, audit(path).lost) == (7, 1)


def test_a_step_trained_again_without_a_group_loses_it(path: Path) -> None:
    """Step 0 of a higher lineage replaces the one that group 0 was in."""
    damage(
        path,
        "INSERT INTO trainings VALUES ('policy', 6, 0, 3, 9.0)",
        "UPDATE groups SET state = 'trained' WHERE number = 6",
    )
    assert audit(path).lost == 1


@pytest.mark.parametrize(
    "row",
    [
        "('policy', 0, 1, 1, 9.0)",  # at another step
        "('policy', 0, 5, 2, 9.0)",  # at another step of another lineage
        "('policy', 0, 0, 1, 9.0)",  # at the same step of the same lineage
        "('policy', 2, 2, 2, 9.0)",
    ],
)
def test_a_second_training_is_doubled(path: Path, row: str) -> None:
    damage(path, f"INSERT INTO trainings VALUES {row}")
    assert audit(path).doubled == 1


@pytest.mark.parametrize(
    "statement",
    [
        "UPDATE groups SET state = 'vanished' WHERE number = 6",
        "UPDATE groups SET state = 'ready' WHERE number = 0",  # trained, and about to be trained again
        "UPDATE groups SET state = 'retired' WHERE number = 0",
    ],
)
def test_contradictions_do_not_balance(path: Path, statement: str) -> None:
    damage(path, statement)
    assert not audit(path).is_balanced


def test_staleness_counts_the_oldest_token_of_surviving_trainings(path: Path) -> None:
    damage(path, "UPDATE groups SET oldest_version = -5 WHERE number = 1")
    assert audit(path).max_staleness == 6
    damage(path, "DELETE FROM trainings WHERE number = 1")
    assert audit(path).max_staleness == 2


def test_a_head_may_write_meanwhile(path: Path) -> None:
    ledger = Ledger(path)
    reader = open_for_reading(path)
    reader.execute("BEGIN")
    count = "SELECT count(*) FROM groups"
    before = reader.execute(count).fetchone()
    ledger.issue(7, 4, 7, now=9.0)
    assert reader.execute(count).fetchone() == before
    assert audit(path).issued == 8
    reader.close()


def test_a_copy_can_be_audited(path: Path, tmp_path: Path) -> None:
    ledger = Ledger(path)
    ledger.issue(7, 4, 7, now=9.0)
    copies = tmp_path / "copies"
    copies.mkdir()
    for name in ("ledger.sqlite", "ledger.sqlite-wal"):
        shutil.copy(path.with_name(name), copies)
    assert audit(copies / path.name) == audit(path)
    ledger.close()
    shutil.copy(path, tmp_path / "alone # 100%?")
    assert audit(tmp_path / "alone # 100%?") == audit(path)


def test_auditing_writes_nothing(path: Path) -> None:
    before = path.read_bytes()
    audit(path)
    assert path.read_bytes() == before
    with pytest.raises(sqlite3.OperationalError, match="readonly"):
        open_for_reading(path).execute("DELETE FROM groups")


def test_a_missing_ledger_is_a_user_error_and_none_is_created(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="There is no ledger"):
        audit(tmp_path / "ledger.sqlite")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("bound", "status"), [(2, 0), (1, 1)])
def test_the_command_judges_the_bound_of_the_run(
    path: Path, bound: int, status: int, capsys: pytest.CaptureFixture[str]
) -> None:
    config = build({"schedule": {"max_staleness": bound}}, "test")
    path.with_name("config.json").write_text(to_json(config))
    assert main(["audit", str(path.parent)]) == status
    assert ("trained 2 versions old; the bound is 1" in capsys.readouterr().err) == (status == 1)
