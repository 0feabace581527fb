"""Which groups of strangers are checked, by whom, and what follows: decisions of the planner."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest

from check_cases import CHECKED, FIRST, answers, brings, desk_with, honest, joins
from echo2.core.types import RUN_POLICY, SnapshotRef
from echo2.head.decide import commands as do
from echo2.head.decide import events as ev
from echo2.head.strangers.decide.checks import (
    CHECK_SHARE,
    EXPELLED_REST_SECONDS,
    LATE_LEASES,
    OVERDUE_LEASES,
    UNTRUSTED,
)
from echo2.head.strangers.decide.trust import CLEAN_TO_LEAVE, NEWCOMER_CHECKS
from planner_cases import Desk, of
from seeds import seeds


def test_a_newcomers_first_groups_are_checked_and_not_fed_before_the_verdict() -> None:
    desk = desk_with("s")
    for _ in range(NEWCOMER_CHECKS):
        commands = brings(desk, "s")
        (asked,) = of(do.CheckGroup, commands)
        assert (asked.worker_id, asked.ref) == ("own", FIRST)
        assert not of(do.FeedGroup, commands)
        assert any("being checked" in wait.reason for wait in desk.planner.waits(desk.now))
        (fed,) = of(do.FeedGroup, answers(desk, asked))
        assert fed.number == asked.group.number
    assert not desk.planner.trust.of("ticket-s").is_new


def test_a_share_of_later_groups_is_checked_without_waiting_for_the_verdict() -> None:
    desk = desk_with("s", groups_per_step=1200)  # of which a ticket supplies half at most
    honest(desk, "s", NEWCOMER_CHECKS)
    num_checks = 0
    for _ in range(500):
        commands = brings(desk, "s")
        assert of(do.FeedGroup, commands)
        for asked in of(do.CheckGroup, commands):
            num_checks += 1
            answers(desk, asked)
    assert 0.4 * CHECK_SHARE < num_checks / 500 < 1.6 * CHECK_SHARE


def test_groups_of_the_owners_machines_are_not_checked_and_nothing_is_without_a_seed() -> None:
    desk = desk_with("s")
    assert not of(do.CheckGroup, brings(desk, "own"))
    unchecked = desk_with("s", check_seed=None)
    assert not of(do.CheckGroup, brings(unchecked, "s"))
    assert not of(do.CheckGroup, brings(desk_with("s", deterministic=True), "s"))


def test_newcomers_get_no_leases_while_no_machine_of_the_owner_can_check_them() -> None:
    desk = desk_with("s", own=False)
    joins(desk, "server", draws=False)
    assert not desk.planner.leases.of_worker("s")
    assert any("no machine of yours is connected that can check it" in w.reason for w in desk.planner.waits(desk.now))
    assert desk.planner.leases.of_worker("server")
    joins(desk, "own")
    assert desk.planner.leases.of_worker("s")


def test_a_stranger_whose_engine_cannot_be_checked_gets_no_leases_unless_the_run_allows_it() -> None:
    for require_checks in (True, False):
        desk = desk_with(require_checks=require_checks)
        joins(desk, "server", "t", draws=False)
        assert bool(desk.planner.leases.of_worker("server")) != require_checks
        assert any("can't be checked" in wait.reason for wait in desk.planner.waits(desk.now)) == require_checks


def test_rounded_weights_are_checked_by_a_machine_that_can_round_and_by_no_other() -> None:
    """Machines of the owner with other engines, or with rounded weights themselves, are no help."""

    def with_engine(worker_id: str, ticket: str = "", **engine: Any) -> None:
        desk.tell(ev.WorkerJoined(worker_id, 16, 0.5, FIRST, ticket=ticket, draws=True, **engine))

    desk = desk_with(own=False)
    for name, engine in (
        ("transformers", {}),
        ("q8_0", {"form": "q8_0"}),
        ("rounds", {"form": "q8_0", "rounds": True}),
    ):
        with_engine(name, **engine)
    with_engine("s", "ticket-s", form="q8_0")
    assert not desk.planner.leases.of_worker("s")
    assert any("compact or, unless it rounds its weights" in wait.reason for wait in desk.planner.waits(desk.now))
    with_engine("compact", rounds=True)
    assert desk.planner.leases.of_worker("s")
    (asked,) = of(do.CheckGroup, brings(desk, "s"))
    assert (asked.worker_id, asked.form) == ("compact", "q8_0")


def test_rollouts_that_the_head_reads_from_a_log_need_no_check() -> None:
    desk = desk_with("s")
    commands = desk.deliver(desk.planner.leases.of_worker("s")[0], logged=True)
    assert of(do.FeedGroup, commands)
    assert not of(do.CheckGroup, commands)
    assert desk.planner.trust.of("ticket-s").is_new


def test_without_required_checks_strangers_are_trained_unchecked_while_no_checker_is_there() -> None:
    desk = desk_with("s", own=False, require_checks=False)
    assert of(do.FeedGroup, brings(desk, "s"))
    joins(desk, "own")
    assert not of(do.FeedGroup, brings(desk, "s"))


def test_a_fault_retires_what_is_not_trained_yet_and_a_second_one_expels_the_ticket() -> None:
    desk = desk_with("s")
    joins(desk, "s2", "ticket-s")
    honest(desk, "s", 1)  # so that the ticket may hold two leases
    (first,) = of(do.CheckGroup, brings(desk, "s"))
    brings(desk, "s" if desk.planner.leases.of_worker("s") else "s2")  # waits, behind the first
    commands = answers(desk, first, "100 of 100 tokens are wrong")
    assert [(one.why, "tokens are wrong" in one.reason) for one in of(do.RetireGroup, commands)] == [
        (UNTRUSTED, True)
    ] * 2
    assert desk.planner.trust.of("ticket-s").is_quarantined
    assert not of(do.ExpelWorker, commands)
    (second,) = of(do.CheckGroup, brings(desk, "s" if desk.planner.leases.of_worker("s") else "s2"))
    commands = answers(desk, second, "again")
    assert {one.worker_id for one in of(do.ExpelWorker, commands)} == {"s", "s2"}
    assert desk.planner.credits.rests.get("ticket-s") == pytest.approx(desk.now + EXPELLED_REST_SECONDS)
    trust = desk.planner.trust.of("ticket-s")
    assert trust.history[0][1].endswith("100 of 100 tokens are wrong")
    assert trust.score == pytest.approx(2 / 5)


def test_clean_checks_in_a_row_end_a_quarantine() -> None:
    desk = desk_with("s")
    (asked,) = of(do.CheckGroup, brings(desk, "s"))
    answers(desk, asked, "wrong")
    assert honest(desk, "s", CLEAN_TO_LEAVE) == CLEAN_TO_LEAVE
    assert not desk.planner.trust.of("ticket-s").is_quarantined


@pytest.mark.parametrize("is_quarantined", [False, True])
def test_a_held_group_whose_verdict_is_overdue_is_retired_and_its_ticket_rests(is_quarantined: bool) -> None:
    desk = desk_with("s")
    if is_quarantined:
        honest(desk, "s", 1, "wrong")
    brings(desk, "s")
    desk.now += OVERDUE_LEASES * CHECKED.lease_seconds
    commands = desk.tell(ev.Tick())
    assert [one.why for one in of(do.RetireGroup, commands)] == [UNTRUSTED]
    assert not of(do.FeedGroup, commands)
    assert not desk.planner.leases.of_worker("s")
    desk.now += CHECKED.lease_seconds
    desk.tell(ev.Tick())
    assert desk.planner.leases.of_worker("s")


def test_a_late_verdict_counts_for_the_ticket_and_its_machine_gets_no_other_check_before() -> None:
    desk = desk_with("s", "other")
    (asked,) = of(do.CheckGroup, brings(desk, "s"))
    desk.now += OVERDUE_LEASES * CHECKED.lease_seconds
    assert [one.number for one in of(do.RetireGroup, desk.tell(ev.Tick()))] == [asked.group.number]
    assert not of(do.CheckGroup, brings(desk, "other"))
    answers(desk, asked, "drawn otherwise")
    trust = desk.planner.trust.of("ticket-s")
    assert (trust.is_quarantined, trust.num_missed, trust.num_failed) == (True, 1, 1)
    assert desk.planner.trust.open[next(iter(desk.planner.trust.open))].checker == "own"  # the machine is free again


def test_a_verdict_that_does_not_come_is_given_up_and_the_machine_gets_the_next_check() -> None:
    desk = desk_with("s")
    (asked,) = of(do.CheckGroup, brings(desk, "s"))
    desk.now += OVERDUE_LEASES * CHECKED.lease_seconds
    assert not of(do.CheckGroup, desk.tell(ev.Tick()))
    desk.now += LATE_LEASES * CHECKED.lease_seconds
    desk.tell(ev.Tick())
    joins(desk, "other", "ticket-other")
    assert of(do.CheckGroup, brings(desk, "other"))
    answers(desk, asked, "too late")
    assert desk.planner.trust.of("ticket-s").num_failed == 0


def test_a_machine_without_those_weights_leaves_the_check_to_another() -> None:
    desk = desk_with("s")
    joins(desk, "own2")
    (asked,) = of(do.CheckGroup, brings(desk, "s"))
    (again,) = of(do.CheckGroup, answers(desk, asked, missed="snapshot_gone"))
    assert (asked.worker_id, again.worker_id) == ("own", "own2")
    assert again.group == asked.group
    assert of(do.RetireGroup, answers(desk, again, missed="snapshot_gone"))
    assert desk.planner.trust.of("ticket-s").num_missed == 1


def test_verdicts_count_only_from_the_machine_that_was_asked() -> None:
    desk = desk_with("s", "liar")
    (asked,) = of(do.CheckGroup, brings(desk, "s"))
    desk.tell(
        ev.GroupChecked("liar", asked.group, 9, "it says so"), ev.GroupChecked("own", replace(asked.group, number=77))
    )
    assert desk.planner.trust.of("ticket-s").num_failed == 0
    assert of(do.FeedGroup, answers(desk, asked))


def test_a_restarted_head_goes_on_with_the_checks_that_were_under_way() -> None:
    """What was held stays held: who can wait for a restart, or cause one, would not be checked."""
    desk = desk_with("liar")
    (kept,) = of(do.RecordCheck, brings(desk, "liar"))
    check = kept.check
    assert (check.worker_id, check.holds) == ("liar", True)
    others = [ev.RecoveredGroup(number, 1, "ready", 0, name) for number, name in ((5, "liar"), (6, "own"))]
    groups = (ev.RecoveredGroup(check.number, 0, "ready", 0, "liar"), *others)
    started = ev.HeadStarted(next_number=7, next_lease_id=2, groups=groups, published=(FIRST,), checks=(check,))
    desk = Desk(CHECKED, started)
    assert not of(do.FeedGroup, desk.tell(ev.LearnerJoined(0), ev.GroupsWanted(0)))
    joins(desk, "liar", "ticket-liar")
    (asked,) = of(do.CheckGroup, joins(desk, "own"))
    commands = answers(desk, asked, "wrong")
    assert [one.number for one in of(do.RetireGroup, commands)] == [check.number, 5]  # what it delivered before, too
    assert [one.number for one in of(do.EndCheck, commands)] == [check.number]
    assert desk.planner.trust.of("ticket-liar").is_quarantined


def test_a_restarted_head_knows_resting_and_expelled_workers_and_for_how_long() -> None:
    desk = desk_with("s")
    for _ in range(2):
        (asked,) = of(do.CheckGroup, brings(desk, "s"))
        commands = answers(desk, asked, "wrong")
    (rest,), (gone,) = of(do.RecordRest, commands), of(do.ExpelWorker, commands)
    expulsions = (ev.RecoveredExpulsion(gone.worker_id, desk.now + gone.seconds, gone.num_expelled, gone.reason),)
    desk = Desk(CHECKED, ev.HeadStarted(published=(FIRST,), rests=(rest.rest,), expulsions=expulsions))
    assert desk.planner.penalties.expulsion("s", desk.now + gone.seconds - 1) is not None
    assert desk.planner.penalties.expulsion("s", desk.now + gone.seconds + 1) is None
    assert desk.planner.penalties.expel("s", "again", desk.now) == (2 * gone.seconds, 2)
    desk.tell(ev.LearnerJoined(0), ev.GroupsWanted(0))
    joins(desk, "own")
    assert not of(do.GrantLeases, joins(desk, "another", "ticket-s"))  # with another key, by the same ticket
    desk.now = EXPELLED_REST_SECONDS
    assert "another" in [one.worker_id for one in of(do.GrantLeases, desk.tell(ev.Tick()))]


def test_a_restarted_head_knows_quarantined_and_trusted_workers() -> None:
    desk = desk_with("liar", "honest", groups_per_step=1200)
    recorded = {}
    for name, fault in (("liar", "wrong"), *[("honest", "")] * NEWCOMER_CHECKS):
        (asked,) = of(do.CheckGroup, brings(desk, name))
        recorded |= {one.ticket: one.trust for one in of(do.RecordTrust, answers(desk, asked, fault))}
    started = ev.HeadStarted(next_number=9, published=(FIRST,), trust=tuple(recorded.items()))
    desk = Desk(CHECKED, started)
    desk.tell(ev.LearnerJoined(0), ev.GroupsWanted(0))
    joins(desk, "own")
    for name in ("liar", "honest"):
        joins(desk, name, f"ticket-{name}")
    assert of(do.FeedGroup, brings(desk, "honest"))
    commands = brings(desk, "liar")
    (asked,) = of(do.CheckGroup, commands)
    assert not of(do.FeedGroup, commands)
    assert [one.worker_id for one in of(do.ExpelWorker, answers(desk, asked, "again"))] == ["liar"]


@pytest.mark.parametrize("seed", seeds(10, 40))
def test_random_worlds_with_liars(seed: int) -> None:
    """Liars whose every group is faulty and honest strangers, checks that are answered, missed or forgotten in any
    order, own machines that come and go: invariants hold after every event, no honest ticket is in quarantine, each
    liar is once two of its groups were found, and steps end.
    """
    rng = random.Random(seed)
    liars, good = [f"l{at}" for at in range(rng.randrange(1, 3))], [f"h{at}" for at in range(rng.randrange(0, 3))]
    desk = desk_with(*liars, *good, groups_per_step=6, max_staleness=0, check_seed=seed)
    asked: list[do.CheckGroup] = []
    sampler: dict[int, str] = {}
    step, num_found = 0, dict.fromkeys(liars, 0)
    for _ in range(600):
        commands: list[do.Command] = []
        kind = rng.choice(["deliver"] * 8 + ["answer"] * 4 + ["wait", "leave"])
        holders = [name for name in (*liars, *good, "own") if desk.planner.leases.of_worker(name)]
        if kind == "deliver" and holders:
            name = rng.choice(holders)
            lease_id = rng.choice(desk.planner.leases.of_worker(name))
            sampler[desk.leases[lease_id][1].group.number] = name
            commands = desk.deliver(lease_id, version=step)
        elif kind == "answer" and asked:
            one = asked.pop(rng.randrange(len(asked)))
            lies, missed = sampler[one.group.number] in liars, "snapshot_gone" if rng.random() < 0.1 else ""
            is_open = one.group.number in {**desk.planner.trust.open, **desk.planner.trust.late}
            num_found[sampler[one.group.number]] = num_found.get(sampler[one.group.number], 0) + (
                lies and is_open and not missed
            )
            commands = answers(desk, one, "a lie" if lies and not missed else "", missed)
        elif kind == "wait":
            desk.now += rng.choice([0.1, 10.0, 70.0])
            commands = desk.tell(ev.Tick())
        elif kind == "leave":
            desk.tell(ev.WorkerLeft("own", "it goes"))
            commands = joins(desk, "own")
            commands += desk.tell(ev.WorkerReported("own", SnapshotRef(RUN_POLICY, 1, step)))
        asked += of(do.CheckGroup, commands)
        if desk.planner.training.has_all:
            numbers = tuple(r.number for r in desk.planner.groups.of_step(step) if r.state == "fed")
            assert len(numbers) == 6, seed
            step += 1
            if step == CHECKED.max_steps:
                break
            asked += of(do.CheckGroup, desk.tell(ev.StepTrained(step - 1, numbers)))
            asked += of(do.CheckGroup, desk.publish(step))
            for worker in list(desk.planner.fleet):
                told = desk.tell(ev.WorkerReported(worker.worker_id, SnapshotRef(RUN_POLICY, 1, step)))
                asked += of(do.CheckGroup, told)
            asked += of(do.CheckGroup, desk.tell(ev.GroupsWanted(step)))
    assert step > 0, seed
    trust = desk.planner.trust.all()
    assert not any(trust[f"ticket-{name}"].is_quarantined for name in good if f"ticket-{name}" in trust), seed
    for name in liars:
        assert (num_found[name] == 0) == (not desk.planner.trust.of(f"ticket-{name}").is_quarantined), (seed, name)
        assert num_found[name] < 2 or desk.planner.fleet.get(name) is None, (seed, name)


NAMED = [(1, 1, 1, ()), (0, 1, 1, ()), (0, 2, 1, (1,)), (0, 0, 2, ())]


@pytest.mark.parametrize(("oldest", "newest", "lineage", "between"), NAMED)
def test_a_stranger_may_not_name_unpublished_weights(
    oldest: int, newest: int, lineage: int, between: tuple[int, ...]
) -> None:
    """Nobody could sample such a group again: who names them would escape every check. The owner's word counts."""
    desk = desk_with("s", groups_per_step=8, max_staleness=2, publish_every=2)
    for step in range(2):
        _train(desk, step, version=0)
    desk.publish(2)
    desk.tell(ev.GroupsWanted(2))
    named = {"oldest_version": oldest, "newest_version": newest, "lineage": lineage, "versions_between": between}
    refused = desk.deliver(_lease_of_step(desk, "s", 2), **named)
    assert [one.refusal for one in of(do.RefuseDelivery, refused)] == ["malformed"]
    assert not of(do.AcceptDelivery, refused)
    assert of(do.AcceptDelivery, desk.deliver(_lease_of_step(desk, "own", 2), **named))


def test_a_stranger_names_no_version_below_what_it_had_when_it_got_the_lease() -> None:
    """Versions never fall: it would sample with the version of its choice."""
    desk = desk_with("s", groups_per_step=4, max_staleness=2)
    for step in range(2):
        _complete(desk, step)
    newest, leases = SnapshotRef(RUN_POLICY, 1, 2), desk.planner.leases
    for leaver, name, ticket, outcome in (("own", "own2", "", do.AcceptDelivery), ("s", "t", "t", do.RefuseDelivery)):
        desk.tell(ev.WorkerLeft(leaver, "its leases go to the one that comes"))
        desk.tell(ev.WorkerJoined(name, 4, 0.5, newest, ticket=ticket, draws=True))
        lease_id = leases.of_worker(name)[0]
        assert desk.leases[lease_id][1].min_version < 2
        assert of(outcome, answer := desk.deliver(lease_id, oldest_version=1, newest_version=2))
    assert "the worker had version 2" in of(do.RefuseDelivery, answer)[0].reason


@pytest.mark.parametrize(("draws", "word"), [(True, "malformed"), (False, "")])
def test_a_group_of_a_stranger_that_is_checked_has_one_version(draws: bool, word: str) -> None:
    """It could try several places for the change of weights, and send the best: 1.1 to 1.4 standard deviations of the
    reward. A token server swaps where its requests are; its tokens are not checked one by one."""
    desk = desk_with(require_checks=False, groups_per_step=4, max_staleness=2)
    for step in range(2):
        _complete(desk, step)
    desk.tell(ev.WorkerLeft("own", "its leases go to the one that comes"))
    joins(desk, "s", "ticket-s", draws=draws)
    desk.tell(ev.GroupsWanted(2))
    lease_id = _lease_of_step(desk, "s", 2)
    answer = desk.deliver(lease_id, oldest_version=0, newest_version=1)
    assert [one.refusal for one in of(do.RefuseDelivery, answer)] == [word] * draws
    assert len(of(do.AcceptDelivery, answer)) == (not draws)
    if draws:
        assert "a stranger's group has one" in of(do.RefuseDelivery, answer)[0].reason


ALONE: dict[str, Any] = {"own": False, "require_checks": False, "groups_per_step": 4, "max_staleness": 2}


@pytest.mark.parametrize("comes_back", [False, True])
def test_a_stranger_that_delivered_with_new_weights_has_them_whatever_it_reports(comes_back: bool) -> None:
    """Else every group might be said to have a swap inside, at a place of the worker's choice."""
    desk, old = desk_with("s", **ALONE | {"groups_per_step": 16}), SnapshotRef(RUN_POLICY, 1, 1)
    for step in range(2):
        _complete(desk, step)
    desk.tell(ev.WorkerReported("s", old))
    for newest in (2, 1):  # the second group was begun and ended before the first one's swap, as it says
        lease_id = desk.planner.leases.of_worker("s")[0]
        assert of(do.AcceptDelivery, desk.deliver(lease_id, oldest_version=newest, newest_version=newest))
    if comes_back:
        for lease_id in desk.planner.leases.of_worker("s"):
            desk.deliver(lease_id, 1)
        desk.tell(ev.WorkerLeft("s", "it returns as if it were new"))
        desk.tell(ev.WorkerJoined("s", 16, 0.5, old, ticket="ticket-s", draws=True))
    desk.tell(ev.GroupsWanted(2))
    lease_id = desk.planner.leases.of_worker("s")[-1]
    had = desk.planner.leases.installed_at[lease_id]
    assert had is not None
    assert had.version == 2
    refused = desk.deliver(lease_id, oldest_version=1, newest_version=1)
    assert [one.refusal for one in of(do.RefuseDelivery, refused)] == ["malformed"]


def test_weights_from_before_the_fall_back_are_not_held_against_a_stranger() -> None:
    """It could deliver nothing until the next version, for which its groups may be the only ones."""
    desk = desk_with("s", **ALONE)
    for step in range(2):
        _complete(desk, step)
    desk.tell(ev.GroupsWanted(2))
    assert of(do.AcceptDelivery, desk.deliver(_lease_of_step(desk, "s", 2), 2))
    desk.tell(ev.LearnerLost("killed"), ev.LearnerJoined(1), ev.GroupsWanted(1))
    for lease_id in desk.planner.leases.of_worker("s"):
        desk.deliver(lease_id, 2)  # begun before it heard of the fall-back
    desk.tell(ev.WorkerReported("s", SnapshotRef(RUN_POLICY, 1, 1)))
    assert of(do.AcceptDelivery, desk.deliver(desk.planner.leases.of_worker("s")[0], 1))


def _train(desk: Desk, step: int, version: int) -> None:
    """Everybody delivers what it holds of the step, sampled with this version, until the learner has it."""
    desk.tell(ev.GroupsWanted(step))
    while not desk.planner.training.has_all:
        lease_id = next(one for one in desk.open() if desk.leases[one][1].step == step)
        for asked in of(do.CheckGroup, desk.deliver(lease_id, version)):
            answers(desk, asked)
    desk.tell(ev.StepTrained(step, tuple(one.number for one in desk.planner.groups.of_step(step))))


def _complete(desk: Desk, step: int) -> None:
    """The step is trained, and all install what comes of it."""
    _train(desk, step, step)
    desk.publish(step + 1)
    for worker in list(desk.planner.fleet):
        desk.tell(ev.WorkerReported(worker.worker_id, SnapshotRef(RUN_POLICY, 1, step + 1)))


def _lease_of_step(desk: Desk, worker_id: str, step: int) -> int:
    return next(one for one in desk.planner.leases.of_worker(worker_id) if desk.leases[one][1].step == step)


@pytest.mark.parametrize("has_new_weights", [False, True])
def test_a_worker_that_does_not_know_of_the_older_checkpoint_loses_a_group_and_nothing_else(
    has_new_weights: bool,
) -> None:
    desk = desk_with("s", groups_per_step=4)
    for step in range(2):
        _complete(desk, step)
    desk.tell(ev.GroupsWanted(2), ev.WorkerLeft("own", "it goes"))
    joins(desk, "own")
    lease_id = _lease_of_step(desk, "s", 2)
    credit = desk.planner.credits.of("ticket-s").credit
    desk.tell(ev.LearnerLost("killed"), ev.LearnerJoined(1))
    if has_new_weights:  # they came while it sampled
        answer = desk.tell(ev.LeaseFailed("s", lease_id, "snapshot_gone", "a snapshot of another lineage came"))
        assert [one.outcome for one in of(do.CloseLease, answer)] == ["late"]
    else:
        answer = desk.deliver(lease_id, 2)
        refused = [(one.refusal, "not published" in one.reason) for one in of(do.RefuseDelivery, answer)]
        assert refused == [("late", True)]
    assert desk.planner.credits.of("ticket-s").credit == credit
    group = desk.leases[lease_id][1].group.number
    record = desk.planner.groups.get(group)
    assert record is not None
    assert record.state in ("pending", "leased")  # others sample it


def test_a_version_above_the_steps_own_never_reaches_the_learner_from_any_sender() -> None:
    """The learner would take it for a mistake of ours, and end. After a fall-back an honest worker may name one."""
    desk = desk_with(groups_per_step=4)
    for step in range(3):
        _complete(desk, step)
    desk.tell(ev.LearnerLost("killed"), ev.LearnerJoined(0))
    desk.publish(0, lineage=2)
    desk.tell(ev.WorkerReported("own", SnapshotRef(RUN_POLICY, 2, 0)), ev.GroupsWanted(0))
    lease_id = next(iter(desk.planner.leases.of_worker("own")))
    step = desk.leases[lease_id][1].step
    refused = desk.deliver(lease_id, oldest_version=step, newest_version=step + 1, lineage=2)
    assert [one.refusal for one in of(do.RefuseDelivery, refused)] == ["late"]
