"""How a stranger's ticket comes to be trusted, and how it loses that: by checks alone."""

from __future__ import annotations

import math
import random

import pytest

from check_cases import CHECKED, answers, brings, desk_with, honest, joins
from echo2.head.decide import commands as do
from echo2.head.decide import events as ev
from echo2.head.fleet.decide import standby
from echo2.head.strangers.decide import strangers
from echo2.head.strangers.decide.checks import CHECK_SHARE, OVERDUE_LEASES
from echo2.head.strangers.decide.trust import (
    MISMATCH_TOKENS,
    NEWCOMER_CHECKS,
    SURPRISE_KEPT,
    SURPRISE_MAX,
    SURPRISE_ODD,
    UNCHECKED_MAX,
)
from planner_cases import Desk, of


def test_a_newcomer_earns_leases_by_checks_that_it_passed_and_not_by_deliveries() -> None:
    desk = desk_with("s")
    for num_held in (1, 2, 4):
        asked: list[do.CheckGroup] = []
        while desk.planner.leases.of_worker("s"):
            asked += of(do.CheckGroup, brings(desk, "s"))
        assert desk.planner.trust.num_held("ticket-s") == num_held
        while asked:  # the machine gets one after the other
            asked += of(do.CheckGroup, answers(desk, asked.pop()))
    assert desk.planner.trust.of("ticket-s").is_believed


def test_a_group_passes_only_if_all_of_it_was_judged() -> None:
    """A worker that says of all tokens but one that they are of weights that the machine does not hold has not been
    checked."""
    desk = desk_with("s")
    (asked,) = of(do.CheckGroup, brings(desk, "s"))
    commands = desk.tell(ev.GroupChecked(asked.worker_id, asked.group, num_tokens=1, num_skipped=99))
    assert of(do.RetireGroup, commands)
    assert (desk.planner.trust.of("ticket-s").num_passed, desk.planner.trust.of("ticket-s").num_missed) == (0, 1)
    assert desk.planner.trust.of("ticket-s").num_failed == 0


def test_a_fault_counts_even_if_part_of_the_group_was_not_judged() -> None:
    desk = desk_with("s")
    (asked,) = of(do.CheckGroup, brings(desk, "s"))
    desk.tell(ev.GroupChecked(asked.worker_id, asked.group, 1, "not drawn so", num_skipped=99))
    assert desk.planner.trust.of("ticket-s").is_quarantined


def test_unchecked_groups_never_create_trust() -> None:
    """However many checks end without a verdict, nothing of a newcomer is trained."""
    desk = desk_with("s")
    for _ in range(50):
        (asked,) = of(do.CheckGroup, brings(desk, "s"))
        assert not of(do.FeedGroup, answers(desk, asked, missed="it took too long"))
        desk.now += 2.0 * CHECKED.lease_seconds
        desk.tell(ev.Tick())
    assert not desk.planner.trust.of("ticket-s").is_believed


def test_trust_lapses_when_checks_in_a_row_end_without_a_verdict() -> None:
    """A ticket that was found good, and then delivers what nobody can check."""
    desk = desk_with("s", groups_per_step=1200)
    honest(desk, "s", NEWCOMER_CHECKS)
    num_missed = num_groups = 0
    while num_missed < UNCHECKED_MAX:
        num_groups += 1
        commands = brings(desk, "s")
        assert of(do.FeedGroup, commands)
        for asked in of(do.CheckGroup, commands):
            num_missed += 1
            answers(desk, asked, missed="snapshot_gone")
    assert num_groups < 4 * UNCHECKED_MAX / CHECK_SHARE
    trust = desk.planner.trust.of("ticket-s")
    assert (trust.is_new, trust.num_failed) == (True, 0)
    assert "newcomer again" in trust.history[-1][1]
    assert not of(do.FeedGroup, brings(desk, "s"))


def too_cold(desk: Desk, deviations: float, most: int) -> int:
    """Groups that all pass alone, each by so many standard deviations less surprising: how many until a fault."""
    for count in range(1, most + 1):
        for asked in of(do.CheckGroup, brings(desk, "s")):
            told = ev.GroupChecked(asked.worker_id, asked.group, 200, surprise=-deviations, variance=150.0)
            desk.tell(told)
        if desk.planner.trust.of("ticket-s").num_failed:
            return count
    return most


def test_small_deviations_are_found_over_many_groups() -> None:
    """Each group is 2 standard deviations off, which one in twenty honest groups is."""
    desk = desk_with("s", groups_per_step=1200)
    desk.planner.penalties.measured("s", MISMATCH_TOKENS, 0.0, 2 * SURPRISE_ODD * MISMATCH_TOKENS)  # all are checked
    assert too_cold(desk, 2.0, 100) == math.floor((SURPRISE_MAX / 2.0) ** 2) + 1
    assert "-7." in desk.planner.trust.of("ticket-s").history[-1][1]


def test_honest_groups_never_add_up_to_a_fault() -> None:
    """Spread as honest ones are, with the bias that rounding may have: of a hundredth of the spread."""
    desk, rng = desk_with("s", groups_per_step=4000), random.Random(5)
    desk.planner.penalties.measured("s", MISMATCH_TOKENS, 0.0, 2 * SURPRISE_ODD * MISMATCH_TOKENS)
    for _ in range(400):
        for asked in of(do.CheckGroup, brings(desk, "s")):
            off = rng.gauss(0.0, 1.0) + 0.01 * math.sqrt(150.0)
            desk.tell(ev.GroupChecked(asked.worker_id, asked.group, 200, surprise=off, variance=150.0))
    trust = desk.planner.trust.of("ticket-s")
    assert (trust.num_failed, trust.num_passed) == (0, 400)
    assert trust.variance < 2 * SURPRISE_KEPT


def test_a_worker_with_tokens_that_surprise_the_learner_is_checked_more() -> None:
    desk = desk_with("s")
    honest(desk, "s", NEWCOMER_CHECKS)
    assert honest(desk, "s", 12) < 6
    desk.planner.penalties.measured("s", MISMATCH_TOKENS, 0.0, 2 * SURPRISE_ODD * MISMATCH_TOKENS)
    assert honest(desk, "s", 12) == 12
    assert not desk.planner.penalties.to_expel
    desk.planner.penalties.measured("s", MISMATCH_TOKENS, 0.0, 0.0)
    assert honest(desk, "s", 12) < 6


@pytest.mark.parametrize("is_lost", [False, True])
def test_a_machine_that_returns_without_its_check_is_asked_again(is_lost: bool) -> None:
    """The order may never have reached it, or its process began anew: the group would wait in vain."""
    desk = desk_with("s")
    (asked,) = of(do.CheckGroup, brings(desk, "s"))
    desk.tell(ev.WorkerLeft("own", "silent") if is_lost else ev.WorkerDetached("own", "its connection closed"))
    (again,) = of(do.CheckGroup, joins(desk, "own"))
    assert again.group == asked.group
    assert of(do.FeedGroup, answers(desk, again))


def test_a_rest_never_shortens_a_longer_one() -> None:
    """A ticket that is barred for an hour may still have a group whose check ends without a verdict."""
    desk = desk_with("s")
    desk.planner.credits.rest("ticket-s", desk.now + 3600.0)
    strangers.rest(desk.planner, "ticket-s", 120.0, "its groups could not be checked")
    assert desk.planner.credits.rests.get("ticket-s") == desk.now + 3600.0


def test_an_overdue_check_does_not_lengthen_the_next_rest() -> None:
    """That the owner's machines were slow is not the fault of the ticket."""
    desk = desk_with("s")
    brings(desk, "s")
    desk.now += OVERDUE_LEASES * CHECKED.lease_seconds
    desk.tell(ev.Tick())
    assert desk.planner.credits.rests.get("ticket-s") is not None
    assert desk.planner.credits.of("ticket-s").num_rests == 0


def test_a_check_whose_group_was_retired_meanwhile_lets_no_ticket_rest() -> None:
    """Its group is not missing for want of a verdict: all its rewards were equal, or the reward failed."""
    desk = desk_with("s", dynamic_sampling=True)
    lease_id = desk.planner.leases.of_worker("s")[0]
    desk.deliver(lease_id, is_flat=True)
    record = desk.planner.groups.get(desk.leases[lease_id][1].group.number)
    assert record is not None
    assert record.why == "uninformative"
    desk.now += OVERDUE_LEASES * CHECKED.lease_seconds
    desk.tell(ev.Tick())
    assert desk.planner.credits.rests.get("ticket-s") is None
    assert desk.planner.trust.of("ticket-s").num_missed == 1


def test_a_machine_that_strangers_need_does_not_stand_by() -> None:
    """Nobody else can check newcomers. Their measured rate would suffice, but says nothing while they have no leases:
    the run would wait for ever."""
    desk = desk_with("s", activation=True)
    assert desk.planner.rentals is not None
    desk.planner.rentals.needed_rate = 0.01
    brings(desk, "s")
    desk.tell(ev.WorkerLeft("own", "its owner ended it"))
    desk.now += OVERDUE_LEASES * CHECKED.lease_seconds
    desk.tell(ev.Tick())
    assert of(do.RetireGroup, joins(desk, "server", draws=False)) == []
    assert of(do.ActivateWorker, joins(desk, "own2"))
    joins(desk, "own3")
    desk.now += CHECKED.lease_seconds
    desk.tell(ev.Tick())
    assert desk.planner.leases.of_worker("s")
    standby.release(desk.planner, "own2", "the others suffice", desk.now)
    assert of(do.ActivateWorker, desk.tell(ev.WorkerLeft("own2", "its owner ended it")))
    assert [one.worker_id for one in desk.planner.fleet.own() if not one.standby] == ["server", "own3"]
