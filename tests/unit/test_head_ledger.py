"""The ledger's methods one by one: what is recorded, what is refused as a bug, what survives."""

from __future__ import annotations

import signal
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from disk_cases import no_file_beyond
from echo2.core.errors import InvariantError, UserError
from echo2.head.decide.events import HeadStarted, RecoveredGroup, RecoveredLease
from echo2.head.ledger import ledger as ledger_module
from echo2.head.ledger.audit import audit
from echo2.head.ledger.ledger import Ledger
from echo2.head.ledger.schema import TRANSITIONS


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "ledger.sqlite"


@pytest.fixture
def ledger(path: Path) -> Iterator[Ledger]:
    ledger = Ledger(path)
    ledger.learner_joined(version=0, lineage=1, now=0.0)
    yield ledger
    ledger.close()


def deliver(ledger: Ledger, number: int, *, oldest: int = 0, is_scored: bool = True, rollouts: bytes = b"raw") -> None:
    ledger.deliver(
        number,
        rollouts,
        worker_id="w1",
        oldest_version=oldest,
        newest_version=oldest,
        num_tokens=10,
        seconds=2.5,
        now=2.0,
    )
    if is_scored:
        ledger.score(number, b"", is_flat=False, now=2.0)


def bring_to(ledger: Ledger, state: str, number: int = 0, step: int = 0) -> None:
    """A new group in `state`."""
    ledger.issue(number, step=step, cursor=number, now=1.0)
    if state in ("delivered", "ready", "trained"):
        deliver(ledger, number, is_scored=state != "delivered")
    if state == "trained":
        ledger.train(step, lineage=1, numbers=[number], now=3.0)
    if state == "retired":
        ledger.retire(number, "stale", now=3.0)


class Watched(Ledger):
    """Counts how often the rollouts of a group are read from the file."""

    num_reads = 0

    def _execute(self, sql: str, parameters: Sequence[Any] = ()) -> sqlite3.Cursor:
        self.num_reads += sql.startswith("SELECT rollouts.data")
        return super()._execute(sql, parameters)


def test_groups_of_this_process_are_not_read_back_from_the_disk(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """But for the oldest groups beyond the limit, and groups that were trained on, which a fall-back may feed again."""
    monkeypatch.setattr(ledger_module, "RECENT_BYTES_MAX", 7)
    ledger = Watched(path)
    ledger.learner_joined(version=0, lineage=1, now=0.0)
    for number in range(3):
        ledger.issue(number, step=0, cursor=number, now=1.0)
        deliver(ledger, number, rollouts=b"raw")
    assert [ledger.rollouts(number) for number in (2, 1)] == [b"raw"] * 2
    assert ledger.num_reads == 0
    assert ledger.rollouts(0) == b"raw"
    assert ledger.num_reads == 1
    ledger.train(0, lineage=1, numbers=[0, 1, 2], now=3.0)
    assert ledger.rollouts(2) == b"raw"
    assert ledger.num_reads == 2


def test_a_rolled_back_transaction_leaves_nothing(ledger: Ledger) -> None:
    ledger.issue(0, step=0, cursor=0, now=1.0)

    def fail() -> None:
        with ledger.together():
            deliver(ledger, 0)
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    with pytest.raises(InvariantError, match="no rollouts"):
        ledger.rollouts(0)


def test_a_new_ledger_is_empty(path: Path) -> None:
    assert Ledger(path).recover() == HeadStarted(lineage=0)


def test_a_group_goes_through_its_states(ledger: Ledger, path: Path) -> None:
    ledger.issue(0, step=0, cursor=5, now=1.0)
    ledger.grant(1, 0, "w1", now=1.5, deadline=121.5, num_samples=4)
    opened = RecoveredGroup(0, 0, "open")
    lease = RecoveredLease(1, 0, "w1", 1.5, 121.5, 4)
    assert ledger.recover() == HeadStarted(next_number=1, next_lease_id=2, groups=(opened,), leases=(lease,))
    assert ledger.sizes() == {0: 4}

    deliver(ledger, 0, is_scored=False, rollouts=b"raw")
    ledger.close_lease(1, "accepted", now=2.0)
    assert ledger.rollouts(0) == b"raw"
    ledger.score(0, b"scored", is_flat=True, now=2.5)
    assert ledger.rollouts(0) == b"rawscored"
    ready = RecoveredGroup(0, 0, "ready", 0, "w1", is_flat=True)
    assert ledger.recover() == HeadStarted(next_number=1, next_lease_id=2, groups=(ready,))
    with sqlite3.connect(path) as raw:
        told = raw.execute("SELECT cursor, newest_version, num_tokens FROM groups").fetchall()
    assert told == [(5, 0, 10)]

    ledger.train(0, lineage=1, numbers=[0], now=3.0)
    trained = RecoveredGroup(0, 0, "trained", 0, "w1", is_flat=True)
    assert ledger.recover() == HeadStarted(version=1, next_number=1, next_lease_id=2, groups=(trained,))
    ledger.checkpoint(version=1, oldest_kept=1)
    assert ledger.recover() == HeadStarted(
        version=1, next_number=1, next_lease_id=2, checkpoint_version=1, oldest_kept=1
    )
    assert audit(path).leases == {"accepted": 1}


def test_everything_is_there_after_opening_again(ledger: Ledger, path: Path) -> None:
    bring_to(ledger, "ready")
    ledger.set_meta("port", 4711)
    before = ledger.recover()
    again = Ledger(path)
    assert again.recover() == before
    assert again.get_meta("port") == 4711


EVENTS: dict[str, Callable[[Ledger], None]] = {
    "deliver": lambda ledger: deliver(ledger, 0, is_scored=False),
    "score": lambda ledger: ledger.score(0, b"scored", is_flat=False, now=2.5),
    "retire": lambda ledger: ledger.retire(0, "stale", now=3.0),
    "train": lambda ledger: ledger.train(0, lineage=1, numbers=[0], now=3.0),
}


@pytest.mark.parametrize("event", sorted(EVENTS))
@pytest.mark.parametrize("state", sorted(TRANSITIONS))
def test_every_event_in_every_state_follows_the_table(ledger: Ledger, path: Path, state: str, event: str) -> None:
    bring_to(ledger, state)
    before = audit(path)
    if event in TRANSITIONS[state] or (state, event) == ("trained", "train"):  # the same training again is no event
        EVENTS[event](ledger)
    else:
        with pytest.raises(InvariantError, match="Story of group 0"):
            EVENTS[event](ledger)
        assert audit(path) == before


def test_the_error_tells_the_groups_history(ledger: Ledger) -> None:
    ledger.issue(0, step=0, cursor=0, now=1.0)
    ledger.grant(1, 0, "w1", now=1.0, deadline=2.0, num_samples=4)
    ledger.refuse(1, 0, "w2", "late", 77, 1.0, now=4.0)
    ledger.retire(0, "stale", now=5.0)
    with pytest.raises(InvariantError) as caught:
        deliver(ledger, 0)
    for word in ("stale", "w1", "w2", "late", "77"):
        assert word in str(caught.value)


def test_numbers_follow_each_other(ledger: Ledger) -> None:
    with pytest.raises(InvariantError, match="next number is 0"):
        ledger.issue(1, step=0, cursor=0, now=0.0)
    ledger.issue(0, step=0, cursor=0, now=0.0)
    with pytest.raises(InvariantError, match="next number is 1"):
        ledger.issue(0, step=0, cursor=0, now=0.0)


def test_leases_are_granted_once_on_groups_that_are_not_over_and_closed_once(ledger: Ledger) -> None:
    bring_to(ledger, "open")
    ledger.grant(4, 0, "w1", now=1.0, deadline=2.0, num_samples=4)
    with pytest.raises(InvariantError, match="UNIQUE"):
        ledger.grant(4, 0, "w2", now=1.0, deadline=2.0, num_samples=4)
    ledger.close_lease(4, "expired", now=2.0)
    with pytest.raises(InvariantError, match="lease 4 is not held"):
        ledger.close_lease(4, "late", now=3.0)
    with pytest.raises(InvariantError, match="never granted"):
        ledger.close_lease(5, "late", now=3.0)
    ledger.retire(0, "stale", now=3.0)
    with pytest.raises(InvariantError, match="is over"):
        ledger.grant(5, 0, "w2", now=4.0, deadline=5.0, num_samples=4)
    assert ledger.recover().next_lease_id == 5


def test_a_training_reported_twice_counts_once(ledger: Ledger, path: Path) -> None:
    for number in range(2):
        bring_to(ledger, "ready", number)
    ledger.train(0, lineage=1, numbers=[1, 0], now=3.0)
    ledger.train(0, lineage=1, numbers=[0, 1], now=4.0)
    assert (audit(path).trained, audit(path).doubled) == (2, 0)


@pytest.mark.parametrize(
    ("step", "lineage", "numbers"), [(0, 1, [0]), (1, 1, [0, 1]), (0, 2, [2]), (1, 1, [2]), (0, 1, []), (0, 1, [0, 0])]
)
def test_impossible_trainings_are_bugs_and_change_nothing(
    ledger: Ledger, path: Path, step: int, lineage: int, numbers: list[int]
) -> None:
    for number in range(3):
        bring_to(ledger, "ready", number)
    if numbers == [0]:
        ledger.train(0, lineage=1, numbers=[0, 1], now=3.0)
    before = audit(path)
    with pytest.raises(InvariantError):
        ledger.train(step, lineage, numbers, now=4.0)
    assert audit(path) == before


def test_a_fall_back_replays_the_same_groups_at_the_same_steps(ledger: Ledger, path: Path) -> None:
    for number in range(3):
        bring_to(ledger, "trained", number, step=number)
    ledger.learner_joined(version=1, lineage=2, now=10.0)
    state = ledger.recover()
    assert (state.version, state.lineage) == (1, 2)
    assert [(g.number, g.step, g.state) for g in state.groups] == [(0, 0, "trained"), (1, 1, "ready"), (2, 2, "ready")]
    assert (audit(path).trained, audit(path).open, audit(path).lost) == (1, 2, 0)
    for number in (1, 2):
        assert ledger.rollouts(number) == b"raw"
        ledger.train(number, lineage=2, numbers=[number], now=11.0)
    assert ledger.recover().version == 3
    assert (audit(path).trained, audit(path).doubled, audit(path).lost) == (3, 0, 0)


def test_joining_at_the_runs_step_keeps_the_lineage(ledger: Ledger) -> None:
    bring_to(ledger, "trained")
    before = ledger.recover()
    ledger.learner_joined(version=1, lineage=1, now=10.0)
    assert ledger.recover() == before


@pytest.mark.parametrize("lineage", [0, 1])
def test_a_fall_back_needs_a_new_lineage(ledger: Ledger, lineage: int) -> None:
    bring_to(ledger, "trained")
    with pytest.raises(InvariantError):
        ledger.learner_joined(version=0, lineage=lineage, now=10.0)
    assert ledger.recover().version == 1


def test_the_user_learns_of_a_fall_back_behind_the_checkpoints(ledger: Ledger) -> None:
    for number in range(4):
        bring_to(ledger, "trained", number, step=number)
    ledger.checkpoint(version=4, oldest_kept=3)
    with pytest.raises(UserError, match="version 3 or later"):
        ledger.learner_joined(version=2, lineage=2, now=10.0)
    assert (ledger.recover().version, ledger.recover().lineage) == (4, 1)
    ledger.learner_joined(version=3, lineage=2, now=10.0)


def test_a_checkpoint_drops_only_what_it_covers(ledger: Ledger) -> None:
    for number, state in enumerate(["trained", "trained", "ready", "delivered"]):
        bring_to(ledger, state, number, step=number)
    ledger.retire(3, "stale", now=4.0)
    ledger.checkpoint(version=2, oldest_kept=1)
    assert [ledger.rollouts(number) for number in (1, 2)] == [b"raw", b"raw"]
    for number in (0, 3):
        with pytest.raises(InvariantError, match="has no rollouts"):
            ledger.rollouts(number)


def test_reasons_of_retired_groups_of_coming_steps_are_kept(ledger: Ledger) -> None:
    bring_to(ledger, "ready", 0, step=3)
    ledger.retire(0, "uninformative", now=4.0)
    (found,) = ledger.recover().groups
    assert (found.state, found.step, found.why) == ("retired", 3, "uninformative")


def test_meta_keeps_json_values(ledger: Ledger) -> None:
    for value in (None, 3, "x", [1, 2.5], {"a": None}):
        ledger.set_meta("key", value)
        assert ledger.get_meta("key", "default") == value
    assert ledger.get_meta("other") is None
    assert ledger.get_meta("other", 7) == 7


def test_a_strangers_numbers_are_recorded_even_when_absurd(ledger: Ledger, path: Path) -> None:
    for number in (999, (1 << 64) - 1, -1):
        ledger.refuse(number, number, "w1", "malformed", 5, 1.0, now=1.0)
    assert audit(path).refused == {"malformed": 3}
    assert (audit(path).issued, audit(path).lost) == (0, 0)


def test_a_full_disk_is_one_clear_error_and_loses_nothing(ledger: Ledger, path: Path) -> None:
    bring_to(ledger, "delivered")
    before = ledger.recover(), audit(path)
    with no_file_beyond(200_000), pytest.raises(UserError) as caught:
        ledger.score(0, b"x" * 500_000, is_flat=False, now=3.0)
    assert str(path) in str(caught.value)
    assert "Nothing that was recorded is lost" in str(caught.value)
    assert (ledger.recover(), audit(path)) == before
    ledger.score(0, b"x" * 500_000, is_flat=False, now=4.0)
    assert len(Ledger(path).rollouts(0)) == 500_003


def test_a_locked_ledger_is_one_clear_error(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("echo2.head.ledger.schema.BUSY_SECONDS", 0.0)
    ledger = Ledger(path)
    other = sqlite3.connect(path, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    with pytest.raises(UserError, match="locked"):
        ledger.issue(0, step=0, cursor=0, now=0.0)
    other.execute("ROLLBACK")
    ledger.issue(0, step=0, cursor=0, now=0.0)


def test_files_without_a_ledger_are_refused(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("no database at all, but long enough to look at" * 40)
    with sqlite3.connect(tmp_path / "other") as other:
        other.execute("CREATE TABLE t (x)")
    with sqlite3.connect(tmp_path / "newer") as newer:
        newer.execute("CREATE TABLE t (x)")
        newer.execute("PRAGMA user_version = 99")
    for name, words in (("text", "not a database"), ("other", "not a ledger"), ("newer", "schema version 99")):
        for opener in (Ledger, audit):
            with pytest.raises(UserError, match=words):
                opener(tmp_path / name)
    for place in (tmp_path, tmp_path / "nowhere" / "ledger.sqlite"):
        with pytest.raises(UserError, match="Cannot use the ledger"):
            Ledger(place)


RECORD_FOR_EVER = """
import itertools, pathlib, sys
from echo2.head.ledger.ledger import Ledger
ledger = Ledger(pathlib.Path(sys.argv[1]))
ledger.learner_joined(0, 1, 0.0)
for n in itertools.count():
    ledger.issue(n, n, n, 0.0)
    ledger.grant(n, n, "w", 0.0, 1.0, 4)
    ledger.deliver(n, b"x" * 5000, "w", n, n, 1, 1.0, 0.0)
    ledger.score(n, b"x" * 500, False, 0.0)
    ledger.close_lease(n, "accepted", 0.0)
    ledger.train(n, 1, [n], 0.0)
    ledger.checkpoint(n + 1, n)
    print(n, flush=True)
"""


@pytest.mark.parametrize("num_steps", [1, 20, 200])
def test_kill_9_keeps_all_that_was_acknowledged(path: Path, num_steps: int) -> None:
    with subprocess.Popen([sys.executable, "-c", RECORD_FOR_EVER, str(path)], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        acknowledged = [int(process.stdout.readline()) for _ in range(num_steps)][-1]
        process.send_signal(signal.SIGKILL)
    state, result = Ledger(path).recover(), audit(path)
    assert state.version > acknowledged
    assert result.is_balanced
    assert (result.lost, result.doubled) == (0, 0)
    assert result.trained == state.version
    assert result.open == state.next_number - state.version <= 1
