"""What the learner is handed when, which groups are hurried, and who gets a second lease."""

from __future__ import annotations

import statistics
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from echo2.core.types import RUN_POLICY, Lease, SnapshotRef
from echo2.head.decide import commands as do
from echo2.head.decide import events as ev
from echo2.head.decide import granting
from echo2.head.decide.granting import LATE_AFTER, LEASES_KNOWN
from echo2.head.decide.state import PlannerOptions
from echo2.head.fleet.decide.fleet import LATE_REST, Fleet, Worker
from echo2.planning.sim.scenario import BroadcastSpec, LearnerSpec, Scenario, WorkersSpec
from invariants import run_scenario
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
    while not desk.planner.training.has_all:
        fed += of(do.FeedGroup, desk.deliver(desk.open()[0], step))
    desk.tell(ev.StepTrained(step, tuple(command.number for command in fed)))
    desk.publish(step + 1)
    for worker in list(desk.planner.fleet):
        desk.tell(ev.WorkerReported(worker.worker_id, desk.planner.snapshots.published[step + 1]))


def sizes(desk: Desk) -> dict[str, int]:
    counts: dict[str, int] = {}
    for worker_id, _ in desk.planner.leases.open_leases():
        counts[worker_id] = counts.get(worker_id, 0) + 1
    return counts


# ---- handing over ----------------------------------------------------------------------------------------------------


def test_a_complete_group_is_handed_over_at_once() -> None:
    assert [fed.number for fed in of(do.FeedGroup, running().deliver(1))] == [0]


# ---- frontier --------------------------------------------------------------------------------------------------------


def first_grants(options: PlannerOptions) -> list[int]:
    """How many groups each grant has of those that follow from the first publication, to two workers."""
    desk = Desk(options)
    desk.tell(ev.LearnerJoined(0), ev.GroupsWanted(0))
    desk.join("a")
    desk.join("b")
    return [len(grant.leases) for grant in of(do.GrantLeases, desk.publish(0))]


def test_any_order_fills_the_slots_and_the_frontier_begins_with_different_numbers_of_groups() -> None:
    options = replace(ON_POLICY, groups_per_batch=2)
    assert first_grants(options) == [4, 4]  # two that run, two that wait
    assert first_grants(replace(options, order="frontier")) == [1, 2]


def test_groups_go_one_by_one_to_the_worker_that_holds_least() -> None:
    desk = desk_with(replace(ON_POLICY, groups_per_step=3), "ab")
    numbers = {worker_id: [] for worker_id in "ab"}  # type: dict[str, list[int]]
    for worker_id, lease in desk.planner.leases.open_leases():
        numbers[worker_id].append(lease.group.number)
    assert numbers == {"a": [0, 2], "b": [1]}


def test_groups_of_lost_workers_wait_at_others_as_new_ones_do() -> None:
    desk = desk_with(ON_POLICY, "abcdef")
    assert sizes(desk) == dict.fromkeys("abcdef", 2)
    for worker_id in "fe":
        desk.tell(ev.WorkerLeft(worker_id, "it was revoked"))
    assert sizes(desk) == dict.fromkeys("abcd", 2), "four queued groups are too few to fill eight slots"
    desk.tell(ev.WorkerLeft("d", "it was revoked"))
    assert sizes(desk) == {"a": 3, "b": 2, "c": 2}, "six fill six"


def test_a_worker_that_has_begun_with_few_gets_more_once_one_is_in() -> None:
    desk = desk_with(replace(ON_POLICY, groups_per_batch=2, order="frontier"), "ab")
    assert sizes(desk) == {"a": 1, "b": 2}
    desk.deliver(desk.open()[0])
    assert sizes(desk) == {"a": 4, "b": 2}


@given(slots=st.lists(st.integers(1, 40), min_size=1, max_size=5), group_size=st.integers(1, 8), data=st.data())
def test_every_slot_is_filled_while_there_is_work_and_no_worker_holds_more_than_twice_its_slots(
    slots: list[int], group_size: int, data: st.DataObject
) -> None:
    options = PlannerOptions(60, group_size, max_steps=9, max_staleness=1, groups_per_batch=40)
    desk = Desk(options)
    desk.tell(ev.LearnerJoined(0), ev.GroupsWanted(0))
    for number, count in enumerate(slots):
        desk.tell(ev.WorkerJoined(f"w{number}", count, 0.5, SnapshotRef(RUN_POLICY, 1, 0)))
    desk.publish(0)
    for _ in range(30):
        held = {f"w{number}": 0 for number in range(len(slots))}
        for worker_id, lease in desk.planner.leases.open_leases():
            held[worker_id] += lease.num_samples
        is_left = granting.room(desk.planner, 0) + granting.room(desk.planner, 1) > 0
        for number, count in enumerate(slots):
            assert held[f"w{number}"] >= count or not is_left, (held, slots)
            assert held[f"w{number}"] <= 2 * (count + group_size), (held, slots)
        desk.deliver(data.draw(st.sampled_from(desk.open())))


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
            desk.tell(ev.WorkerReported(worker_id, desk.planner.snapshots.published[step + 1]))


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

SECOND = replace(ON_POLICY, groups_per_step=4, groups_per_batch=2, heartbeat_seconds=1e3, lease_seconds=1e3)
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
    desk.now += LATE_AFTER - 1.1
    assert of(do.GrantLeases, desk.tell(ev.Tick())) == [], "not twice as long as usual"
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
    assert wakes[-1].at == pytest.approx(began + LATE_AFTER)


def test_evaluations_do_not_make_train_groups_late() -> None:
    """A lease of one held-out rollout is quicker than one of a group: what is usual is measured of groups alone."""
    desk = Desk(replace(OPTIONS, eval_size=2, eval_every=1))
    desk.publish(0)
    desk.join()
    of_evaluation = [lease_id for lease_id in desk.open() if desk.leases[lease_id][1].group.kind == "eval"]
    desk.now = 1.0
    for lease_id in of_evaluation:
        desk.deliver(lease_id)
    assert len(of_evaluation) == 2
    assert desk.planner.measurements.num_leases == 0
    desk.now = 8.0
    desk.deliver(desk.open()[0])
    assert desk.planner.measurements.lease_seconds > 6.0


def test_a_second_lease_that_fails_leaves_the_first_alone() -> None:
    desk, late = with_a_straggler()
    desk.now += LATE_AFTER - 0.9
    (grant,) = of(do.GrantLeases, desk.tell(ev.Tick()))
    desk.tell(ev.LeaseFailed(grant.worker_id, grant.leases[0].lease_id, "engine_failed", "it broke"))
    assert late in desk.open()
    assert of(do.FeedGroup, desk.deliver(late, STEPS))


def with_usual_leases(options: PlannerOptions) -> Desk:
    """Workers `a` and `b` hold all groups that may be sampled; leases usually take a second."""
    desk = Desk(options)
    desk.tell(ev.LearnerJoined(0), ev.GroupsWanted(0))
    desk.publish(0)
    desk.join("a")
    desk.join("b")
    for _ in range(LEASES_KNOWN):
        desk.planner.measurements.lease_done(1.0)
    desk.now = 1.0
    return desk


def test_a_late_group_of_a_later_step_gets_a_second_lease_before_the_learner_waits_for_it() -> None:
    desk = with_usual_leases(replace(SECOND, max_staleness=1))
    late = next(one for one in desk.open() if desk.leases[one][0] == "b" and desk.leases[one][1].step == 1)
    while others := [one for one in desk.open() if one != late]:
        desk.deliver(others[0])
    assert desk.planner.training.open_step is None, "the learner trains"
    late_at = LATE_AFTER * desk.planner.measurements.lease_seconds
    desk.now = late_at - 0.1
    assert of(do.GrantLeases, desk.tell(ev.Tick())) == []
    desk.now = late_at + 0.1
    (grant,) = of(do.GrantLeases, desk.tell(ev.Tick()))
    assert (grant.worker_id, [one.group for one in grant.leases]) == ("a", [desk.leases[late][1].group])


def late_at_b() -> tuple[Desk, list[int]]:
    """Worker `a` has nothing to do, and `b` is late with all that it holds."""
    desk = with_usual_leases(replace(SECOND, groups_per_step=8))
    while held := desk.planner.leases.of_worker("a"):
        desk.deliver(held[0])
    desk.now = LATE_AFTER + 0.1
    return desk, list(desk.planner.leases.of_worker("b"))


def test_late_groups_come_before_groups_without_a_lease() -> None:
    desk, held = late_at_b()
    failed, *late = held
    commands = desk.tell(ev.LeaseFailed("b", failed, "engine_failed", "it broke"))
    granted = [lease.group for grant in of(do.GrantLeases, commands) for lease in grant.leases]
    assert granted == [desk.leases[lease_id][1].group for lease_id in (*late, failed)]


def test_a_worker_whose_groups_others_sample_sooner_rests_and_the_status_says_why() -> None:
    desk, held = late_at_b()
    seconds = [lease for grant in of(do.GrantLeases, desk.tell(ev.Tick())) for lease in grant.leases]
    assert len(held) == len(seconds) == 2
    desk.deliver(seconds[0].lease_id)
    assert desk.planner.fleet.rests.get("b") is None, "one may be bad luck"
    (rest,) = of(do.RestWorker, desk.deliver(seconds[1].lease_id))
    usual = desk.planner.measurements.lease_seconds
    assert (rest.worker_id, rest.seconds) == ("b", pytest.approx(usual * LATE_REST.after(1)))
    assert rest.reason == "others were done sooner with 2 groups of its in a row"
    assert desk.planner.fleet.rests.get("b") == desk.now + rest.seconds
    (said,) = [wait.reason for wait in desk.planner.waits(desk.now) if wait.waiter == "b"]
    assert said.startswith("it is too slow: others began its last 2 groups later and had them sooner, and come first")
    assert said.endswith(" s. It costs $0.5 an hour until you stop it")


def test_a_worker_that_was_too_slow_gets_one_group_and_nobody_waits_for_it() -> None:
    fleet = Fleet(2.0, group_size=2)
    for name in "ab":
        fleet.join(Worker(name, 6, 0.0, None, 0.0), 0.0)
    slow = next(iter(fleet))
    assert not any(fleet.came_late(slow, 1.0, 1.0) for _ in range(2))
    assert (fleet.room(slow, 0), fleet.is_on_trial(slow)) == (6, False)
    assert fleet.came_late(slow, 1.0, 1.0) == LATE_REST.after(1)
    assert (fleet.room(slow, 0), fleet.room(slow, 1), fleet.is_on_trial(slow)) == (2, 2, True)
    fleet.deliver(slow, 2, True, 2.0)
    assert (fleet.room(slow, 0), fleet.is_on_trial(slow)) == (6, False)


def test_a_slow_worker_is_judged_by_a_group_that_another_begins_in_the_same_instant() -> None:
    """It would get one group after the other otherwise, and another worker would sample each of them, too."""
    desk, _ = late_at_b()
    for lease in [lease for grant in of(do.GrantLeases, desk.tell(ev.Tick())) for lease in grant.leases]:
        commands = desk.deliver(lease.lease_id)
    (rest,) = of(do.RestWorker, commands)
    desk.now += rest.seconds + 0.1
    desk.tell(ev.StepTrained(0, tuple(record.number for record in desk.planner.groups.of_step(0))))
    desk.publish(1)
    for worker_id in "cde":
        desk.join(worker_id)
    for worker_id in "bacde":
        desk.tell(ev.WorkerReported(worker_id, desk.planner.snapshots.published[1]))
    mine = desk.planner.leases.of_worker("b")
    desk.tell(ev.Tick())
    (tried,) = [desk.leases[lease_id][1] for lease_id in mine]
    (again,) = [one for one in desk.open() if desk.leases[one][1].group == tried.group and one not in mine]
    assert desk.leases[again][1].granted_at == tried.granted_at, "nobody waits for it"
    (longer,) = of(do.RestWorker, desk.deliver(again, 1))
    assert (longer.worker_id, longer.seconds > 1.5 * rest.seconds) == ("b", True)


def test_a_rest_is_as_long_as_a_few_groups_take() -> None:
    """Where groups take a twentieth of a second, a minute would be a thousand steps."""
    for usual in (0.05, 30.0):
        fleet = Fleet(2.0)
        for name in "ab":
            fleet.join(Worker(name, 1, 0.0, None, 0.0), 0.0)
        rests = []
        for _ in range(12):
            rests.append(fleet.came_late(next(iter(fleet)), usual, 0.0))
            fleet.end_rests(1e9)
        assert rests == pytest.approx([usual * min(2.0 ** (count + 1), 128.0) for count in range(12)])


def test_who_rests_leaves_its_share_of_a_step_to_others() -> None:
    fleet = Fleet(2.0)
    for name in "ab":
        fleet.join(Worker(name, 3, 0.0, None, 0.0), 0.0)
    assert fleet.active_groups == 6
    slow = next(iter(fleet))
    assert [bool(fleet.came_late(slow, 1.0, 0.0)) for _ in range(3)] == [False, False, True]
    assert fleet.active_groups == 3
    fleet.end_rests(10.0)
    assert fleet.active_groups == 4, "it gets one group"
    fleet.deliver(slow, 1, True, 10.0)
    fleet.file(slow)
    assert fleet.active_groups == 6


def test_a_new_worker_is_late_as_soon_as_others_usually_have_brought_something() -> None:
    """Of two groups at once one should be there after the usual time; a stranger, which may come again under another
    name, is waited for like all others.
    """
    for is_stranger in (False, True):
        desk = with_usual_leases(replace(SECOND, max_staleness=1, groups_per_step=8))
        usual = desk.planner.measurements.lease_seconds
        for worker in desk.planner.fleet:
            worker.is_proven = worker.worker_id == "a"
            if worker.worker_id == "b" and is_stranger:
                worker.ticket = "t"
            standing = desk.planner.fleet.standing(worker)
            assert standing == ("new" if worker.worker_id == "b" and not is_stranger else "known")
    desk.now = 1.1
    for standing, late_at in (("known", 1.0 + LATE_AFTER * usual), ("new", 1.0 + 1.5 * usual), ("slow", 1.0)):
        lease = replace(desk.leases[desk.open()[0]][1], deadline=1001.0, seconds=1000.0)
        desk.planner.now = desk.now
        assert granting._late_at(desk.planner, standing, "b", lease) == pytest.approx(late_at), standing


def with_one_lease(names: str) -> tuple[Desk, Lease]:
    """The only group of the run, leased to one of these workers."""
    desk = Desk(replace(SECOND, groups_per_step=1, max_steps=1))
    desk.tell(ev.LearnerJoined(0), ev.GroupsWanted(0))
    desk.publish(0)
    for name in names:
        desk.join(name)
    return desk, desk.leases[desk.open()[0]][1]


def test_a_third_lease_goes_to_a_busy_worker_too_and_a_fourth_only_to_one_without_work() -> None:
    """Both of the first two may have been unlucky; with three, the answer is long."""
    desk, lease = with_one_lease("abcde")
    state = desk.planner
    record, holder, counts = state.groups.get(lease.group.number), desk.leases[lease.lease_id][0], list[int]()
    assert record is not None
    for worker in state.fleet:
        state.fleet.load(worker, SECOND.group_size * (1 + (worker.worker_id == holder)), desk.now)
    while (worker := granting._free_worker(state, lease, holder)) is not None:
        counts.append(len(state.leases.of_group(lease.group)))
        state.open_lease(worker.worker_id, granting.lease_of(state, record, desk.now, 9.0, 2))
        state.fleet.load(worker, 2 * SECOND.group_size, desk.now)
    assert counts == [1, 2], "with two leases one more, with three none"
    desk.join("f")
    free = granting._free_worker(state, lease, holder)
    assert free is not None
    assert free.worker_id == "f"


def test_a_late_worker_with_the_fewest_groups_hides_no_other() -> None:
    """It has free slots, too, and would get the next group; but not its own again."""
    desk, lease = with_one_lease("ab")
    state = desk.planner
    holder = desk.leases[lease.lease_id][0]
    for worker in state.fleet:
        state.fleet.load(worker, 0 if worker.worker_id == holder else SECOND.group_size, desk.now)
    helper = granting._free_worker(state, lease, holder)
    assert helper is not None
    assert helper.worker_id != holder


def test_slow_machines_hardly_hold_a_run_up() -> None:
    """Three of ten take ten times as long: after each rest they are tried with one group, which others sample, too."""
    kinds = [WorkersSpec(count=count, rollout_seconds=seconds) for count, seconds in ((7, 32.0), (3, 320.0))]
    scenario = Scenario(
        max_steps=30,
        groups_per_step=16,
        group_size=4,
        max_staleness=2,
        heartbeat_seconds=5.0,
        lease_seconds=120.0,
        max_failures=1000,
        faults_until_seconds=0.0,
        workers=tuple(kinds),
        learner=LearnerSpec(train_seconds=30.0, publish_seconds=0.5),
        broadcast=BroadcastSpec(scheme="fixed", seconds=6.0),
    )
    idle = [run_scenario(scenario, seed).steady_idle_ratio for seed in range(3)]
    assert statistics.fmean(idle) < 0.15, idle


@given(
    events=st.lists(st.tuples(st.sampled_from(("late", "delivered", "waits")), st.sampled_from("abc")), max_size=200),
    seconds=st.floats(0.1, 600.0),
)
def test_at_least_one_worker_samples_and_a_slow_one_is_tried_less_and_less(
    events: list[tuple[str, str]], seconds: float
) -> None:
    fleet, now, began = Fleet(2.0), 0.0, dict[str, list[float]]()
    for name in "abc":
        fleet.join(Worker(name, 1, 0.0, None, now), now)
    for event, name in events:
        worker = fleet.get(name)
        assert worker is not None
        before = fleet.rests.get(name)
        if event == "late":
            fleet.came_late(worker, 30.0, now)
        elif event == "delivered":
            fleet.deliver(worker, 1, True, now)
            began[name] = []
        else:
            now += seconds
            fleet.end_rests(now)
        assert fleet.num_resting < 3
        until = fleet.rests.get(name)
        if event == "late" and before is None and until is not None:
            began.setdefault(name, []).append(until - now)
    for rests in began.values():
        assert rests == pytest.approx([30.0 * LATE_REST.after(count) for count in range(1, len(rests) + 1)])


def test_deterministic_batches_get_no_second_lease() -> None:
    desk = on_time(replace(SECOND, deterministic=True, groups_per_batch=2))
    _, *others = desk.open()
    for lease_id in others:
        desk.deliver(lease_id, STEPS)
    desk.now += 50.0
    assert of(do.GrantLeases, desk.tell(ev.Tick())) == []
