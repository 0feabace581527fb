"""What the learner is handed when, which groups are hurried, and who gets a second lease."""

from __future__ import annotations

from dataclasses import replace

import pytest

from echo2.control import commands as do
from echo2.control import events as ev
from echo2.control.second_leases import LEASES_KNOWN
from echo2.control.state import PlannerOptions
from planner_cases import OPTIONS, Desk, of, running

ON_POLICY = PlannerOptions(groups_per_step=12, group_size=2, max_steps=50, max_staleness=0, groups_per_batch=4)


def desk_with(options: PlannerOptions, workers: str) -> Desk:
    """The learner waits for step 0, and these workers have its version and capacity for two groups."""
    desk = Desk(options)
    desk.tell(ev.LearnerJoined(0), ev.GroupsWanted(0))
    for worker_id in workers:
        desk.join(worker_id)
    desk.publish(0)
    return desk


def step_forward(desk: Desk, step: int) -> None:
    """Train the step and let every worker have the next version."""
    fed = of(do.FeedGroup, desk.tell(ev.GroupsWanted(step)))
    while not desk.planner.step_ended:
        fed += of(do.FeedGroup, desk.deliver(desk.open()[0], step))
    desk.tell(ev.StepTrained(step, tuple(command.number for command in fed)))
    desk.publish(step + 1)
    for worker in desk.planner.fleet.all():
        desk.tell(ev.WorkerReported(worker.worker_id, desk.planner.published[step + 1]))


def sizes(desk: Desk) -> dict[str, int]:
    counts: dict[str, int] = {}
    for worker_id, _ in desk.planner.leases.open_leases():
        counts[worker_id] = counts.get(worker_id, 0) + 1
    return counts


# ---- handing over ----------------------------------------------------------------------------------------------------


def test_a_complete_group_is_handed_over_at_once() -> None:
    assert [fed.number for fed in of(do.FeedGroup, running().deliver(1))] == [0]


def test_with_hand_over_step_nothing_is_before_the_last_group_is_complete() -> None:
    desk = running(replace(OPTIONS, hand_over="step"))
    assert of(do.FeedGroup, desk.deliver(2)) == []
    commands = desk.deliver(1)
    assert [fed.number for fed in of(do.FeedGroup, commands)] == [1, 0]
    assert len(of(do.EndStep, commands)) == 1


def test_a_step_is_not_handed_over_while_a_group_waits_for_its_score() -> None:
    desk = running(replace(OPTIONS, hand_over="step"))
    desk.deliver(1)
    group = desk.leases[2][1].group
    assert of(do.FeedGroup, desk.deliver(2, scored=False)) == []
    assert len(of(do.FeedGroup, desk.tell(ev.GroupScored(group)))) == 2


def test_a_retired_group_is_replaced_before_the_step_is_handed_over() -> None:
    desk = running(replace(OPTIONS, hand_over="step"))
    desk.deliver(1)
    failed = desk.tell(ev.LeaseFailed("a", 2, "prompt_too_long", "too long"))
    assert of(do.RetireGroup, failed)
    assert of(do.FeedGroup, failed) == []
    new = next(i for i in desk.open() if desk.leases[i][1].step == 0)
    assert len(of(do.FeedGroup, desk.deliver(new))) == 2


def test_a_learner_that_asks_again_is_handed_the_whole_step_again() -> None:
    desk = running(replace(OPTIONS, hand_over="step"))
    desk.deliver(1)
    desk.deliver(2)
    desk.tell(ev.LearnerLost("gone"), ev.LearnerJoined(0))
    assert len(of(do.FeedGroup, desk.tell(ev.GroupsWanted(0)))) == 2


# ---- frontier --------------------------------------------------------------------------------------------------------


def first_grants(options: PlannerOptions) -> list[int]:
    """How many groups each grant has of those that follow from the first publication, to two workers."""
    desk = Desk(options)
    desk.tell(ev.LearnerJoined(0), ev.GroupsWanted(0))
    desk.join("a")
    desk.join("b")
    return [len(grant.leases) for grant in of(do.GrantLeases, desk.publish(0))]


def test_any_order_gives_whole_batches_and_the_frontier_begins_with_a_smaller_one() -> None:
    options = replace(ON_POLICY, groups_per_batch=2)
    assert first_grants(options) == [2, 2, 2, 2]
    assert first_grants(replace(options, order="frontier")) == [1, 2, 2, 2]


def test_every_group_of_a_step_is_leased_once_whatever_the_width() -> None:
    desk = desk_with(replace(ON_POLICY, order="frontier"), "abc")
    for step in range(12):
        desk.now += 1.0
        desk.tell(ev.GroupsWanted(step))
        numbers = set()
        while desk.open():
            lease_id = desk.open()[0]
            assert max(sizes(desk).values()) <= 4, "more than two batches of two groups"
            numbers.add(desk.leases[lease_id][1].group.number)
            desk.now += 0.5 if len(desk.open()) % 2 else 0.1
            desk.deliver(lease_id, step)
        assert len(numbers) == 12, step
        desk.tell(ev.StepTrained(step, tuple(sorted(numbers))))
        desk.publish(step + 1)
        for worker_id in "abc":
            desk.tell(ev.WorkerReported(worker_id, desk.planner.published[step + 1]))


def test_a_step_with_an_evaluation_says_nothing_about_its_batches() -> None:
    options = replace(ON_POLICY, order="frontier", groups_per_batch=2)
    for eval_size, tried in ((0, {1, 2}), (1, {2})):
        desk, widths = desk_with(replace(options, eval_size=eval_size, eval_every=1), "ab"), set()
        for step in range(5):
            desk.now += 1.0
            step_forward(desk, step)
            widths.add(desk.planner.fleet.most_groups)
        assert widths == tried, eval_size


# ---- second leases ---------------------------------------------------------------------------------------------------

SECOND = replace(
    ON_POLICY, second_lease_after=3.0, groups_per_step=4, groups_per_batch=2, lost_after_seconds=1e3, lease_seconds=1e3
)
STEPS = LEASES_KNOWN // SECOND.groups_per_step


def on_time(options: PlannerOptions) -> Desk:
    """Leases took one second each so far; now both workers hold two groups of step `STEPS`."""
    desk = desk_with(options, "ab")
    for step in range(STEPS):
        desk.now += 1.0
        step_forward(desk, step)
    desk.tell(ev.GroupsWanted(STEPS))
    assert sizes(desk) == {"a": 2, "b": 2}
    return desk


def with_a_straggler() -> tuple[Desk, int]:
    """One second later, all groups but one are there."""
    desk = on_time(SECOND)
    late, *others = desk.open()
    desk.now += 1.0
    for lease_id in others:
        desk.deliver(lease_id, STEPS)
    return desk, late


def test_an_idle_worker_gets_a_second_lease_on_a_late_group_and_the_first_result_counts() -> None:
    desk, late = with_a_straggler()
    holder = desk.leases[late][0]
    assert of(do.GrantLeases, desk.tell(ev.Tick())) == [], "not late yet"
    desk.now += 1.9
    assert of(do.GrantLeases, desk.tell(ev.Tick())) == [], "not three times as long as usual"
    desk.now += 0.2
    (grant,) = of(do.GrantLeases, desk.tell(ev.Tick()))
    (second,) = grant.leases
    assert {grant.worker_id, holder} == {"a", "b"}
    assert (second.group, second.seed) == (desk.leases[late][1].group, desk.leases[late][1].seed)
    assert of(do.GrantLeases, desk.tell(ev.Tick())) == [], "two are enough"
    commands = desk.deliver(second.lease_id, STEPS)
    assert [(c.worker_id, c.lease_ids) for c in of(do.RevokeLease, commands)] == [(holder, (late,))]
    assert [fed.number for fed in of(do.FeedGroup, commands)] == [second.group.number]
    closed = {close.lease_id: close.outcome for close in of(do.CloseLease, commands)}
    assert closed == {second.lease_id: "accepted", late: "superseded"}
    assert of(do.RefuseDelivery, desk.deliver(late, STEPS))[0].refusal == "duplicate"


def test_the_planner_asks_to_be_woken_when_the_group_will_be_late() -> None:
    desk = on_time(SECOND)
    began = desk.now
    _, *others = desk.open()
    desk.now += 1.0
    wakes = [wake for lease_id in others for wake in of(do.WakeAt, desk.deliver(lease_id, STEPS))]
    assert wakes[-1].at == pytest.approx(began + 3.0)


def test_a_second_lease_that_fails_leaves_the_first_alone() -> None:
    desk, late = with_a_straggler()
    desk.now += 2.1
    (grant,) = of(do.GrantLeases, desk.tell(ev.Tick()))
    desk.tell(ev.LeaseFailed(grant.worker_id, grant.leases[0].lease_id, "engine_failed", "it broke"))
    assert late in desk.open()
    assert of(do.FeedGroup, desk.deliver(late, STEPS))


def test_nobody_gets_a_second_lease_unless_it_is_asked_for() -> None:
    desk = on_time(replace(SECOND, second_lease_after=0.0))
    _, *others = desk.open()
    for lease_id in others:
        desk.deliver(lease_id, STEPS)
    desk.now += 50.0
    assert of(do.GrantLeases, desk.tell(ev.Tick())) == []
