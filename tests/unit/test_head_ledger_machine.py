"""Random legal histories with crashes at any instant and learners that fall back: never lost, never doubled.

The model keeps for each group its step, state and oldest version, and says what the audit and the recovery must find.
"""

from __future__ import annotations

import shutil
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from echo2.head.ledger.audit import audit
from echo2.head.ledger.ledger import Ledger
from seeds import examples

MAX_STALENESS = 2


@dataclass
class Model:
    """What should be on disk."""

    version: int = 0
    lineage: int = 1
    oldest_kept: int = 0
    steps: list[int] = field(default_factory=list)
    states: list[str] = field(default_factory=list)
    oldest: list[int] = field(default_factory=list)
    rollouts: dict[int, bytes] = field(default_factory=dict)
    held: list[int] = field(default_factory=list)
    num_leases: int = 0
    num_refused: int = 0

    def in_state(self, *states: str) -> list[int]:
        return [number for number, state in enumerate(self.states) if state in states]

    def uncovered(self) -> list[tuple[int, str]]:
        needed = self.rollouts_needed()
        kept = [self.steps[n] for n in self.rollouts if self.states[n] == "trained"]
        first = min([self.version, *kept])
        ahead = {n for n, state in enumerate(self.states) if state == "retired" and self.steps[n] >= first}
        return [(n, state) for n, state in enumerate(self.states) if state == "open" or n in needed or n in ahead]

    def rollouts_needed(self) -> set[int]:
        return {n for n in self.rollouts if self.states[n] != "retired"}


class LedgerMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.directory = tempfile.TemporaryDirectory()
        self.num_crashes = 0
        self.model = Model()
        self.path = Path(self.directory.name) / "0" / "ledger.sqlite"
        self.path.parent.mkdir()
        self.ledger = Ledger(self.path)

    def teardown(self) -> None:
        self.ledger.close()
        self.directory.cleanup()

    @initialize()
    def join(self) -> None:
        self.ledger.learner_joined(0, 1, now=0.0)

    def pick(self, data: st.DataObject, *states: str) -> int:
        return data.draw(st.sampled_from(self.model.in_state(*states)))

    @rule(ahead=st.integers(0, MAX_STALENESS))
    def issue(self, ahead: int) -> None:
        number = len(self.model.steps)
        self.ledger.issue(number, self.model.version + ahead, cursor=2 * number, now=1.0)
        self.model.steps.append(self.model.version + ahead)
        self.model.states.append("open")
        self.model.oldest.append(-1)

    @precondition(lambda self: self.model.in_state("open"))
    @rule(data=st.data())
    def grant(self, data: st.DataObject) -> None:
        self.model.num_leases += 1
        self.ledger.grant(self.model.num_leases, self.pick(data, "open"), "w", now=1.0, deadline=2.0, num_samples=4)
        self.model.held.append(self.model.num_leases)

    @precondition(lambda self: self.model.held)
    @rule(data=st.data(), outcome=st.sampled_from(["accepted", "expired", "lost"]))
    def close_lease(self, data: st.DataObject, outcome: str) -> None:
        lease_id = data.draw(st.sampled_from(self.model.held))
        self.ledger.close_lease(lease_id, outcome, now=2.0)
        self.model.held.remove(lease_id)

    @rule(number=st.integers(0, 50))
    def refuse(self, number: int) -> None:
        self.ledger.refuse(number, number, "w", "late", 3, 1.0, now=2.0)
        self.model.num_refused += 1

    @precondition(lambda self: self.model.in_state("open"))
    @rule(data=st.data(), size=st.sampled_from([0, 10, 20_000]))
    def deliver(self, data: st.DataObject, size: int) -> None:
        number = self.pick(data, "open")
        oldest = data.draw(st.integers(max(0, self.model.steps[number] - MAX_STALENESS), self.model.steps[number]))
        rollouts = bytes([number % 256]) * size
        self.ledger.deliver(number, rollouts, "w", oldest, oldest, size, 1.0, now=2.0)
        self.model.states[number] = "delivered"
        self.model.oldest[number] = oldest
        self.model.rollouts[number] = rollouts

    @precondition(lambda self: self.model.in_state("delivered"))
    @rule(data=st.data())
    def score(self, data: st.DataObject) -> None:
        number = self.pick(data, "delivered")
        self.model.rollouts[number] += b"scored"
        self.ledger.score(number, b"scored", number % 2 == 0, now=2.5)
        self.model.states[number] = "ready"

    @precondition(lambda self: self.model.in_state("open", "delivered", "ready"))
    @rule(data=st.data())
    def retire(self, data: st.DataObject) -> None:
        number = self.pick(data, "open", "delivered", "ready")
        self.ledger.retire(number, "stale", now=3.0)
        self.model.states[number] = "retired"

    def batch(self) -> list[int]:
        return [n for n in self.model.in_state("ready") if self.model.steps[n] == self.model.version]

    @precondition(lambda self: self.batch())
    @rule(num_reports=st.integers(1, 2))
    def train(self, num_reports: int) -> None:
        numbers = self.batch()
        for _ in range(num_reports):
            self.ledger.train(self.model.version, self.model.lineage, numbers, now=4.0)
        for number in numbers:
            self.model.states[number] = "trained"
        self.model.version += 1

    @rule(data=st.data())
    def fall_back(self, data: st.DataObject) -> None:
        self.model.version = data.draw(st.integers(self.model.oldest_kept, self.model.version))
        self.model.lineage += 1
        self.ledger.learner_joined(self.model.version, self.model.lineage, now=5.0)
        for number in self.model.in_state("trained"):
            if self.model.steps[number] >= self.model.version:
                self.model.states[number] = "ready"

    @rule(data=st.data())
    def checkpoint(self, data: st.DataObject) -> None:
        model = self.model
        model.oldest_kept = data.draw(st.integers(model.oldest_kept, model.version))
        self.ledger.checkpoint(model.version, model.oldest_kept)
        covered = [n for n in model.in_state("trained") if model.steps[n] < model.oldest_kept]
        for number in covered + model.in_state("retired"):
            model.rollouts.pop(number, None)

    def copy(self) -> Path:
        """What a machine would find after ``kill -9`` now: the files as they are, nobody having closed them."""
        self.num_crashes += 1
        folder = Path(self.directory.name) / str(self.num_crashes)
        folder.mkdir()
        for path in self.path.parent.iterdir():
            if not path.name.endswith("-shm"):
                shutil.copy(path, folder)
        return folder / self.path.name

    @rule()
    def crash(self) -> None:
        copy = self.copy()
        self.ledger.close()
        self.path, self.ledger = copy, Ledger(copy)

    @rule(event=st.sampled_from(["issue", "train", "learner_joined"]))
    def crash_inside_a_transaction(self, event: str) -> None:
        """Some of its statements were executed, and were even pushed out of the cache into the log."""
        connection = self.ledger._connection
        connection.execute("PRAGMA cache_size = 1")
        connection.execute("BEGIN IMMEDIATE")
        connection.execute("UPDATE groups SET state = 'trained'")
        connection.execute("INSERT INTO rollouts (policy, number, data) VALUES ('policy', 10000, zeroblob(50000))")
        self.crash()

    @rule(kept=st.floats(0, 1))
    def crash_while_the_log_is_written(self, kept: float) -> None:
        """A torn log: some of the last transactions never happened, which is a legal earlier history."""
        copy = self.copy()
        log = copy.with_name(copy.name + "-wal")
        if log.exists():
            with log.open("r+b") as file:
                file.truncate(int(log.stat().st_size * kept))
        if not audit_is_possible(copy):
            return
        torn = Ledger(copy)
        result = audit(copy)
        assert result.is_balanced
        assert (result.lost, result.doubled) == (0, 0)
        assert result.issued == torn.recover().next_number <= len(self.model.steps)
        torn.close()

    @invariant()
    def audit_agrees(self) -> None:
        model, result = self.model, audit(self.path)
        trained = model.in_state("trained")
        assert result.issued == len(model.steps)
        assert result.trained == len(trained)
        assert sum(result.retired.values()) == len(model.in_state("retired"))
        assert result.open == len(model.in_state("open", "delivered", "ready"))
        assert (result.lost, result.doubled) == (0, 0)
        assert result.is_balanced
        assert result.max_staleness == max((model.steps[n] - model.oldest[n] for n in trained), default=0)
        assert result.max_staleness <= MAX_STALENESS
        assert sum(result.refused.values()) == model.num_refused
        assert result.leases.get("held", 0) == len(model.held)

    @invariant()
    def recovery_agrees(self) -> None:
        model, state = self.model, self.ledger.recover()
        if state.lineage == 0:  # before the first learner
            return
        assert (state.version, state.lineage) == (model.version, model.lineage)
        assert (state.next_number, state.next_lease_id) == (len(model.steps), model.num_leases + 1)
        assert [(g.number, g.state) for g in state.groups] == model.uncovered()
        assert [g.step for g in state.groups] == [model.steps[number] for number, _ in model.uncovered()]
        assert [lease.lease_id for lease in state.leases] == model.held
        for number in model.rollouts_needed():
            assert self.ledger.rollouts(number) == model.rollouts[number]


def audit_is_possible(path: Path) -> bool:
    """False where even the tables never reached the disk: a ledger that was never made."""
    return path.stat().st_size > 0


LedgerMachine.TestCase.settings = settings(examples(30), stateful_step_count=40)
TestLedgerMachine = LedgerMachine.TestCase
