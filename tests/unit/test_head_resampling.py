"""Dynamic sampling: groups without a gradient are replaced, so often and no oftener, through restarts and fall-backs.
And what the ESS floor does to leases.
"""

from __future__ import annotations

from dataclasses import replace

from echo2.core.types import RUN_POLICY, GroupRef, SnapshotRef
from echo2.head.decide import commands as do
from echo2.head.decide import events as ev
from echo2.head.decide.groups import UNINFORMATIVE
from echo2.head.decide.planner import Planner
from echo2.head.fleet.decide.standby import live_demand
from planner_cases import OPTIONS, Desk, of, running

RESAMPLING = replace(OPTIONS, dynamic_sampling=True)
MOST = 2 * RESAMPLING.groups_per_step  # groups that a step may replace


def retired(commands: list[do.Command]) -> list[tuple[int, str]]:
    return [(command.number, command.why) for command in of(do.RetireGroup, commands)]


def fed(commands: list[do.Command]) -> list[int]:
    return [command.number for command in of(do.FeedGroup, commands)]


def test_a_group_without_a_gradient_is_replaced_by_a_new_one_of_the_same_step() -> None:
    desk = running(RESAMPLING)
    commands = desk.deliver(1, is_flat=True)
    assert retired(commands) == [(0, UNINFORMATIVE)]
    assert fed(commands) == []
    assert of(do.AcceptDelivery, commands) != []  # it is a valid result, and paid for
    assert [(command.number, command.step) for command in of(do.IssueGroup, commands)] == [(4, 0)]
    (grant,) = of(do.GrantLeases, commands)
    assert [lease.group.number for lease in grant.leases] == [4]
    assert fed(desk.deliver(2)) == [1]
    commands = desk.deliver(grant.leases[0].lease_id)
    assert fed(commands) == [4]
    assert [(command.num_groups, command.cursor) for command in of(do.EndStep, commands)] == [(2, 5)]


def test_a_flat_group_is_replaced_when_the_head_has_scored_it() -> None:
    desk = running(RESAMPLING)
    assert retired(desk.deliver(1, scored=False)) == []
    assert retired(desk.tell(ev.GroupScored(GroupRef(RUN_POLICY, "train", 0), is_flat=True))) == [(0, UNINFORMATIVE)]
    assert retired(desk.tell(ev.GroupScored(GroupRef(RUN_POLICY, "train", 0), is_flat=True))) == []


def test_without_dynamic_sampling_and_for_evaluations_nothing_is_replaced() -> None:
    desk = running()
    assert (retired(commands := desk.deliver(1, is_flat=True)), fed(commands)) == ([], [0])
    desk = running(replace(RESAMPLING, eval_size=2))
    evals = [lease_id for lease_id, (_, lease) in desk.leases.items() if lease.group.kind == "eval"]
    assert [retired(desk.deliver(lease_id, is_flat=True)) for lease_id in evals] == [[], []]


def test_flat_groups_are_trained_on_after_a_limit_of_replacements() -> None:
    desk = running(RESAMPLING)
    num_replaced, kept = 0, list[int]()
    for _ in range(20):
        held = [i for i in desk.open() if desk.leases[i][1].step == 0]
        if held:
            commands = desk.deliver(held[0], is_flat=True)
            num_replaced += len(retired(commands))
            kept += fed(commands)
    assert (num_replaced, len(kept)) == (MOST, 2)
    assert desk.planner.groups.num_uninformative(0) == MOST
    assert of(do.RecordStep, desk.tell(ev.StepTrained(0, tuple(kept)))) != []


def test_demand_counts_replaced_groups() -> None:
    desk = running(RESAMPLING)
    desk.deliver(1, is_flat=True)
    desk.deliver(2)
    while not desk.planner.training.has_all:
        desk.deliver(next(i for i in desk.open() if desk.leases[i][1].step == 0))
    fed_numbers = tuple(record.number for record in desk.planner.groups.of_step(0) if record.state == "fed")
    desk.tell(ev.StepTrained(0, fed_numbers, busy_seconds=2.0))
    demand = live_demand(desk.planner)
    assert demand is not None
    assert demand.groups_per_step == 3


def test_a_second_lease_on_a_replaced_group_is_taken_back() -> None:
    desk = running(RESAMPLING)
    held = desk.planner.leases.get(1)
    assert held is not None
    desk.planner.open_lease("a", replace(held[1], lease_id=99))
    commands = desk.deliver(1, is_flat=True)
    assert [command.lease_ids for command in of(do.RevokeLease, commands)] == [(99,)]
    desk.leases[99] = ("a", replace(held[1], lease_id=99))
    assert [command.refusal for command in of(do.RefuseDelivery, desk.deliver(99))] == ["duplicate"]


def recovered(*groups: ev.RecoveredGroup) -> ev.HeadStarted:
    return ev.HeadStarted(next_number=len(groups), groups=groups, published=(SnapshotRef(RUN_POLICY, 1, 0),))


def test_a_restarted_head_replaces_what_was_scored_just_before_the_kill() -> None:
    started = recovered(
        ev.RecoveredGroup(0, 0, "ready", 0, "a", is_flat=True), ev.RecoveredGroup(1, 0, "ready", 0, "a")
    )
    assert retired(Planner(RESAMPLING).handle(started, 0.0)) == [(0, UNINFORMATIVE)]
    assert retired(Planner(OPTIONS).handle(started, 0.0)) == []


def test_a_restarted_head_knows_how_many_were_replaced() -> None:
    """Else it would replace groups that the learner has been fed, and has perhaps trained on."""
    started = recovered(
        *(ev.RecoveredGroup(number, 0, "retired", 0, "a", why=UNINFORMATIVE) for number in range(MOST)),
        ev.RecoveredGroup(MOST, 0, "retired", None, why="gave_up"),
        ev.RecoveredGroup(MOST + 1, 0, "ready", 0, "a", is_flat=True),
        ev.RecoveredGroup(MOST + 2, 0, "ready", 0, "a", is_flat=True),
    )
    desk = Desk(RESAMPLING, started)
    assert desk.planner.groups.num_uninformative(0) == MOST
    assert fed(desk.tell(ev.LearnerJoined(0), ev.GroupsWanted(0))) == [MOST + 1, MOST + 2]


def test_a_fall_back_trains_the_same_groups_again_the_flat_ones_too() -> None:
    desk, given = running(RESAMPLING), list[int]()
    for _ in range(MOST + 1):  # one more than may be replaced
        given += fed(desk.deliver(next(i for i in desk.open() if desk.leases[i][1].step == 0), is_flat=True))
    assert len(given) == 1
    trained = [command.numbers for command in of(do.RecordStep, desk.train(0))]
    commands = desk.tell(ev.LearnerJoined(0), ev.GroupsWanted(0))
    assert ([tuple(sorted(fed(commands)))], retired(commands)) == (trained, [])
