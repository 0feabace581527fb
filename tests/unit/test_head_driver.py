"""The driver: what is durable is recorded before anything leaves, all of it or nothing."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from echo2.core.errors import InvariantError, UserError
from echo2.core.types import RUN_POLICY, Attachment, GroupRef, SnapshotRef
from echo2.head.decide import commands as do
from echo2.head.decide import events as ev
from echo2.head.decide.planner import Planner
from echo2.head.decide.state import PlannerOptions
from echo2.head.ledger.driver import Driver, Stored
from echo2.planning.sim.head import Killed, MortalLedger

OPTIONS = PlannerOptions(groups_per_step=2, group_size=4, max_steps=3, max_staleness=1, groups_per_batch=2)
SNAPSHOT = SnapshotRef(RUN_POLICY, 1, 0)
JOINED = ev.WorkerJoined("w", 8, 0.0, SNAPSHOT)


class Effects:
    """Notes what it is told, and what the ledger held then."""

    def __init__(self, ledger: MortalLedger) -> None:
        self.ledger = ledger
        self.decided_commands: list[do.Command] = []
        self.carried_out: list[do.Command] = []
        self.in_ledger: list[tuple[int, ...]] = []

    def decided(self, event: ev.Event, now: float, commands: Sequence[do.Command]) -> None:
        self.decided_commands += commands

    def carry_out(self, command: do.Command, now: float) -> None:
        self.carried_out.append(command)
        planned, self.ledger.statements_left = self.ledger.statements_left, None  # looking is not to be killed
        self.in_ledger.append(tuple(lease.lease_id for lease in self.ledger.recover().leases))
        self.ledger.statements_left = planned


@pytest.fixture
def ledger(tmp_path: Path) -> Iterator[MortalLedger]:
    ledger = MortalLedger(tmp_path / "ledger.sqlite")
    yield ledger
    ledger.close()


def begun(ledger: MortalLedger) -> tuple[Driver, Effects]:
    """A learner has joined and published; no worker is there."""
    effects = Effects(ledger)
    driver = Driver(Planner(OPTIONS), ledger, effects, Stored((SNAPSHOT,)), 0.0)
    driver.handle(ev.LearnerJoined(0), 0.0)
    return driver, effects


def delivered(lease_id: int, number: int, rollouts: Attachment | None) -> ev.GroupDelivered:
    group = GroupRef(RUN_POLICY, "train", number)
    return ev.GroupDelivered("w", lease_id, group, 4, 0, 0, 10, 2.0, rollouts)


def test_leases_are_recorded_before_they_are_sent(ledger: MortalLedger) -> None:
    driver, effects = begun(ledger)
    driver.handle(JOINED, 1.0)
    sent = [place for place, command in enumerate(effects.carried_out) if isinstance(command, do.GrantLeases)]
    granted = [lease.lease_id for lease in ledger.recover().leases]
    assert granted
    assert all(effects.in_ledger[place] == tuple(granted) for place in sent)
    assert effects.carried_out == effects.decided_commands


def test_a_kill_between_any_two_statements_leaves_nothing_recorded_and_nothing_sent(ledger: MortalLedger) -> None:
    num_killed = 0
    while True:
        driver, effects = begun(ledger)
        before, num_sent = ledger.recover(), len(effects.carried_out)
        ledger.statements_left = num_killed
        try:
            driver.handle(JOINED, 1.0)
            ledger.statements_left = None
        except Killed:
            num_killed += 1
            assert (ledger.recover(), len(effects.carried_out)) == (before, num_sent)
            assert ledger.counts()["issued"] == before.next_number
        else:
            break
    assert num_killed > 8
    assert ledger.counts()["issued"] == ledger.recover().next_number > 0


def test_rollouts_and_scores_go_from_their_events_to_the_ledger(ledger: MortalLedger) -> None:
    driver, effects = begun(ledger)
    driver.handle(JOINED, 1.0)
    rollouts = Attachment(b"tokens")
    driver.handle(delivered(1, 0, rollouts), 2.0)
    (asked,) = [command for command in effects.carried_out if isinstance(command, do.ScoreGroup)]
    assert asked.rollouts is rollouts
    driver.handle(ev.GroupScored(GroupRef(RUN_POLICY, "train", 0), True, scores=Attachment(b"+rewards")), 3.0)
    assert ledger.rollouts(0) == b"tokens+rewards"
    assert [(group.number, group.state) for group in ledger.recover().groups if group.is_flat] == [(0, "ready")]


def test_events_that_wait_together_are_recorded_together_or_not_at_all(ledger: MortalLedger) -> None:
    driver, effects = begun(ledger)
    driver.handle(JOINED, 1.0)
    events: list[ev.Event] = [delivered(lease_id, lease_id - 1, Attachment(b"tokens")) for lease_id in (1, 2)]
    events += [ev.GroupScored(GroupRef(RUN_POLICY, "train", number), scores=Attachment(b"!")) for number in (0, 1)]
    asked, before, num_sent, num_killed = driver.planner, ledger.recover(), len(effects.carried_out), 0
    while True:
        driver.planner, ledger.statements_left = copy.deepcopy(asked), num_killed
        try:
            answers = driver.handle_all(events, 2.0)
        except Killed:
            num_killed += 1
            assert (ledger.recover(), len(effects.carried_out)) == (before, num_sent)
        else:
            break
    assert num_killed > 10
    assert answers == [asked.handle(event, 2.0) for event in events], "as one after the other"
    assert effects.carried_out[num_sent:] == [command for answer in answers for command in answer]
    ledger.statements_left = None
    assert [ledger.rollouts(number) for number in (0, 1)] == [b"tokens!"] * 2


def test_a_result_without_its_rollouts_is_a_bug_and_leaves_no_trace(ledger: MortalLedger) -> None:
    driver, effects = begun(ledger)
    driver.handle(JOINED, 1.0)
    before, num_sent = ledger.recover(), len(effects.carried_out)
    with pytest.raises(InvariantError, match="without what is to be stored"):
        driver.handle(delivered(1, 0, None), 2.0)
    assert (ledger.recover(), len(effects.carried_out)) == (before, num_sent)


def test_commands_without_records_open_no_transaction(ledger: MortalLedger) -> None:
    driver, _ = begun(ledger)
    driver.handle(JOINED, 1.0)
    ledger.statements_left = 0
    driver.handle(ev.WorkerReported("w", SNAPSHOT), 2.0)
    driver.handle(ev.Tick(), 3.0)
    with pytest.raises(Killed):
        driver.handle(ev.WorkerLeft("w", "gone"), 4.0)


def test_a_restart_finds_what_was_recorded(ledger: MortalLedger) -> None:
    driver, _ = begun(ledger)
    driver.handle(JOINED, 1.0)
    driver.handle(delivered(1, 0, Attachment(b"tokens")), 2.0)
    driver.handle(ev.CheckpointSaved(0, 0), 2.5)
    effects = Effects(ledger)
    again = Driver(Planner(OPTIONS), ledger, effects, Stored((SNAPSHOT,), evaluated=(0, 7)), 9.0)
    assert [command.group.number for command in effects.carried_out if isinstance(command, do.ScoreGroup)] == [0]
    assert (again.planner.training.version, again.planner.training.checkpoint_version) == (0, 0)
    assert again.planner.evaluation.evaluated == {0}, "7 is of a history that a fall-back undid"
    assert len(again.planner.leases) == len(driver.planner.leases)


def test_leases_of_evaluations_use_up_their_ids(ledger: MortalLedger) -> None:
    ledger.use_lease_ids(41)
    assert ledger.recover().next_lease_id == 42


@pytest.mark.parametrize("change", [{"group_size": 8}, {"max_steps": 0}])
def test_a_run_that_cannot_continue_with_its_settings_is_refused(ledger: MortalLedger, change: dict[str, int]) -> None:
    driver, _ = begun(ledger)
    driver.handle(JOINED, 1.0)
    options = replace(OPTIONS, **change)  # type: ignore[arg-type]
    if "max_steps" in change:
        ledger.learner_joined(1, 2, 0.0)
    with pytest.raises(UserError, match=next(iter(change))):
        Driver(Planner(options), ledger, Effects(ledger), Stored((SNAPSHOT,)), 9.0)


def test_the_next_head_knows_the_faults_of_strangers(ledger: MortalLedger) -> None:
    """A check under way, then a fault; a second one expels and lets the ticket rest."""
    options = replace(OPTIONS, groups_per_step=16, check_seed=1)
    driver = Driver(Planner(options), ledger, Effects(ledger), Stored((SNAPSHOT,)), 0.0)
    driver.handle(ev.LearnerJoined(0), 0.0)
    driver.handle(ev.WorkerJoined("own", 8, 0.0, SNAPSHOT, draws=True), 0.0)
    driver.handle(ev.WorkerJoined("s", 8, 0.0, SNAPSHOT, ticket="t", draws=True), 0.0)
    for num_faults in (0, 1, 2):
        (lease_id, *_) = driver.planner.leases.of_worker("s") or (0,)
        if num_faults < 2:
            _, lease = driver.planner.leases.get(lease_id) or ("", None)
            assert lease is not None
            driver.handle(delivered_by("s", lease_id, lease.group), 1.0)
        known = Driver(Planner(options), ledger, Effects(ledger), Stored((SNAPSHOT,)), 1.0)
        trust, rest = known.planner.trust, known.planner.credits.rests.get("t")
        assert list(trust.open) == ([] if num_faults == 2 else [lease.group.number])
        assert trust.of("t").num_failed == num_faults
        assert (rest is not None) == (known.planner.penalties.expulsion("s", 2.0) is not None) == (num_faults == 2)
        if num_faults < 2:
            driver.handle(ev.GroupChecked("own", lease.group, 9, "wrong"), 1.0)


def delivered_by(worker_id: str, lease_id: int, group: GroupRef) -> ev.GroupDelivered:
    return ev.GroupDelivered(worker_id, lease_id, group, 4, 0, 0, 10, 2.0, Attachment(b"tokens"))
