"""A ledger's records make the same ledger elsewhere, from nothing or from any copy."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

import msgspec
import pytest

from echo2.core.errors import InvariantError
from echo2.head.store.mirror import LedgerFile, LoggedLedger, copy_ledger


def live(ledger: LoggedLedger, first: int) -> None:
    """A step's life, with all that a ledger records."""
    ledger.learner_joined(version=first, lineage=1 + first, now=1.0)
    for number in range(2 * first, 2 * first + 2):
        ledger.issue(number, first, number, 1.0)
        ledger.grant(number + 1, number, "w1", 1.0, 9.0, 4)
        with ledger.together():
            ledger.close_lease(number + 1, "accepted", 2.0)
            ledger.deliver(number, bytes([255, number]), "w1", first, first, 10, 2.5, 2.0)
        ledger.score(number, b"\x00scores", is_flat=False, now=3.0)
    ledger.retire(2 * first + 1, "stale", 3.0)
    ledger.refuse(-7, 1 << 70, "w2", "late", 3, 1.0, 3.0)
    ledger.train(first, 1 + first, [2 * first], 4.0)
    ledger.checkpoint(first + 1, first)
    ledger.use_lease_ids(40 + first)
    ledger.keep("trust", "t1", {"history": [[1.0, "é"]]})
    ledger.keep("rest", "t1", {})
    ledger.forget("rest", "t1")
    ledger.set_meta("costs", {"usd": 1.5})


def dump(path: Path) -> list[str]:
    with closing(sqlite3.connect(path)) as connection:
        return list(connection.iterdump())


def test_records_make_the_same_ledger(tmp_path: Path) -> None:
    records: list[tuple[int, bytes]] = []
    ledger = LoggedLedger(tmp_path / "a", lambda number, record: records.append((number, record)))
    live(ledger, 0)
    with pytest.raises(InvariantError):
        ledger.issue(7, 0, 7, 1.0)  # rolled back: no record
    assert copy_ledger(tmp_path / "a", tmp_path / "copy") == len(records)
    live(ledger, 1)
    ledger.close()
    assert [number for number, _ in records] == list(range(1, len(records) + 1))
    for name in ("b", "copy"):
        with closing(LedgerFile(tmp_path / name)) as other:
            for number, record in records[other.number :]:
                other.apply(number, record)
            assert other.number == len(records)
        assert dump(tmp_path / name) == dump(tmp_path / "a")


def test_numbers_go_on_after_a_restart(tmp_path: Path) -> None:
    numbers: list[int] = []
    for _ in range(2):
        ledger = LoggedLedger(tmp_path / "a", lambda number, _: numbers.append(number))
        ledger.set_meta("x", 1)
        ledger.counts()
        ledger.close()
    assert numbers == [1, 2]


def test_other_statements_are_refused(tmp_path: Path) -> None:
    """Who can write the store must not thereby write other files here."""
    with closing(LedgerFile(tmp_path / "a")) as ledger, pytest.raises(InvariantError, match="ATTACH"):
        ledger.apply(1, msgspec.msgpack.encode([("ATTACH DATABASE 'b' AS b", [])]))
