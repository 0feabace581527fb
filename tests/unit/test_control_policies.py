"""Several policies of one head: who works for whom, who is moved when; and one policy alone, as without others."""

from __future__ import annotations

import pytest

from echo2.control.head import commands as do
from echo2.control.head import events as ev
from echo2.control.head.policies import Policies
from echo2.control.head.state import PlannerOptions
from echo2.errors import InvariantError
from echo2.types import GroupRef, Lease, SnapshotRef
from invariants import check, run_scenario
from planner_cases import of
from worlds import random_scenario

LEASE_SECONDS = 20.0


def options(policy: str, **changes: object) -> PlannerOptions:
    values = {"groups_per_step": 2, "group_size": 4, "max_steps": 10, "groups_per_batch": 1, **changes}
    return PlannerOptions(policy=policy, lease_seconds=LEASE_SECONDS, heartbeat_seconds=1e6, **values)  # type: ignore[arg-type]


class Office:
    """Two policies, `a` and `b`, each with a snapshot and a learner that waits; a clock; every lease granted."""

    def __init__(self, *both: PlannerOptions) -> None:
        self.policies, self.now = Policies(both or (options("a"), options("b"))), 0.0
        self.leases: dict[int, tuple[str, Lease]] = {}
        for policy in self.policies.planners:
            self.tell(ev.HeadStarted(policy=policy))
            self.publish(policy)

    def publish(self, policy: str) -> None:
        self.tell(ev.LearnerJoined(0, policy), ev.SnapshotPublished(SnapshotRef(policy, 1, 0), 9))
        self.tell(ev.GroupsWanted(0, policy))

    def tell(self, *events: ev.Event) -> list[do.Command]:
        commands = [command for event in events for command in self.policies.handle(event, self.now)]
        check(self.policies)
        for grant in of(do.GrantLeases, commands):
            self.leases.update((lease.lease_id, (grant.worker_id, lease)) for lease in grant.leases)
        return commands

    def join(self, worker_id: str, installed: SnapshotRef | None = None) -> list[do.Command]:
        return self.tell(ev.WorkerJoined(worker_id, 4, 0.5, installed))

    def wait(self, seconds: float) -> list[do.Command]:
        self.now += seconds
        return self.tell(ev.Tick())

    def install(self, worker_id: str) -> list[do.Command]:
        """It has what its policy published."""
        ref = SnapshotRef(self.where(worker_id), 1, 0)
        return self.tell(ev.WorkerReported(worker_id, ref))

    def finish(self, worker_id: str) -> list[do.Command]:
        """It delivers all that it holds now."""
        commands: list[do.Command] = []
        for lease_id, (holder, lease) in list(self.leases.items()):
            planner = self.policies.planners[lease.group.policy]
            if holder == worker_id and planner.leases.get(lease_id) is not None:
                commands += self.tell(ev.GroupDelivered(worker_id, lease_id, lease.group, lease.num_samples, 0, 0, 9))
        return commands

    def where(self, worker_id: str) -> str:
        return self.policies.posts[worker_id].policy


def test_with_one_policy_the_commands_are_the_planners() -> None:
    num_events = 0
    for seed in range(25):
        scenario = random_scenario(seed)
        for life in run_scenario(scenario, seed).history.lives:
            policies = Policies([scenario.planner_options(seed)])
            for event, now, commands in life:
                assert policies.handle(event, now) == commands, f"seed {seed} at {now}: {event}"
            num_events += len(life)
    assert num_events > 5000


def test_leases_of_all_policies_are_numbered_together() -> None:
    office = Office()
    for worker_id in ("w1", "w2", "w3"):
        office.join(worker_id)
        office.install(worker_id)
    granted = {lease.group.policy: set[int]() for _, lease in office.leases.values()}
    for lease_id, (_, lease) in office.leases.items():
        granted[lease.group.policy].add(lease_id)
    assert granted.keys() == {"a", "b"}
    assert granted["a"] | granted["b"] == set(range(1, len(office.leases) + 1))
    assert {lease.group for _, lease in office.leases.values()} >= {
        GroupRef("a", "train", 0),
        GroupRef("b", "train", 0),
    }


def test_a_new_worker_goes_where_no_worker_is() -> None:
    office = Office()
    told = office.join("w1", SnapshotRef("b", 1, 0))
    assert office.where("w1") == "b", "whose weights it has"
    assert of(do.GrantLeases, told)
    told = office.join("w2", SnapshotRef("b", 1, 0))
    assert office.where("w2") == "a", "which has nobody"
    assert [one.ref for one in of(do.AnnounceSnapshot, told)] == [SnapshotRef("a", 1, 0)]
    assert not of(do.GrantLeases, told), "it has no weights of a"
    assert of(do.GrantLeases, office.install("w2"))


def test_the_only_worker_serves_both_policies_in_turn() -> None:
    """It is taken away only when its leases are done, and each policy has it again after a bounded time."""
    office = Office(options("a", max_staleness=50, max_steps=100), options("b", max_staleness=50, max_steps=100))
    office.join("w")
    office.install("w")
    served = []
    for _ in range(6):
        first = office.where("w")
        served.append(first)
        moved_after = 0.0
        while office.where("w") == first:
            office.wait(1.5)
            moved_after += 1.5
            assert moved_after < 3 * LEASE_SECONDS
            if office.policies.posts["w"].target:
                held = len(office.policies.planners[first].leases.of_worker("w"))
                assert office.where("w") == first or not held
            office.finish("w")
        assert moved_after >= LEASE_SECONDS, "not before its turn is over"
        office.install("w")
    assert served == ["a", "b"] * 3 or served == ["b", "a"] * 3


def test_a_policy_without_workers_is_given_one_of_several_at_once() -> None:
    office = Office()
    office.policies.planners["b"].retained.clear()  # as if it had published nothing yet
    for worker_id in ("w1", "w2", "w3"):
        office.join(worker_id, SnapshotRef("a", 1, 0))
    assert {office.where(worker_id) for worker_id in ("w1", "w2", "w3")} == {"a"}
    office.publish("b")
    office.wait(1.5)
    withdrawn = [worker_id for worker_id, post in office.policies.posts.items() if post.target == "b"]
    assert len(withdrawn) == 1
    before = len(office.leases)
    office.finish(withdrawn[0])
    assert not [held for lease_id, held in office.leases.items() if lease_id > before and held[0] == withdrawn[0]]
    assert of(do.AnnounceSnapshot, office.wait(1.5))[-1].worker_ids == (withdrawn[0],)
    assert office.where(withdrawn[0]) == "b"


def test_a_worker_that_a_policy_leaves_idle_goes_to_one_that_has_work() -> None:
    office = Office(options("a", max_staleness=0, groups_per_step=1), options("b", max_staleness=9))
    office.join("w1", SnapshotRef("a", 1, 0))
    office.join("w2", SnapshotRef("b", 1, 0))
    office.finish("w1")
    assert office.where("w1") == "a"
    office.wait(1.5)
    office.wait(1.5)
    assert office.where("w1") == "b"


def test_a_worker_that_is_lost_while_it_moves_is_gone() -> None:
    office = Office()
    office.policies.planners["b"].retained.clear()
    for worker_id in ("w1", "w2"):
        office.join(worker_id, SnapshotRef("a", 1, 0))
    office.publish("b")
    office.wait(1.5)
    (moving,) = [worker_id for worker_id, post in office.policies.posts.items() if post.target == "b"]
    told = office.tell(ev.WorkerLeft(moving, "it says good-bye"))
    assert [one.worker_id for one in of(do.WorkerGone, told)] == [moving]
    assert moving not in office.policies.posts


def test_a_worker_that_comes_back_while_it_moves_gets_nothing_new_of_the_old_policy() -> None:
    office = Office()
    office.policies.planners["b"].retained.clear()
    for worker_id in ("w1", "w2"):
        office.join(worker_id, SnapshotRef("a", 1, 0))
    office.publish("b")
    office.wait(1.5)
    (moving,) = [worker_id for worker_id, post in office.policies.posts.items() if post.target == "b"]
    office.tell(ev.WorkerDetached(moving, "its connection closed"))
    assert not of(do.GrantLeases, office.join(moving, SnapshotRef("a", 1, 0)))
    office.wait(1.5)
    assert office.where(moving) == "b"


def test_after_a_restart_a_worker_stays_with_the_policy_whose_leases_it_holds() -> None:
    policies = Policies((options("a"), options("b")))
    policies.handle(ev.HeadStarted(policy="a", next_lease_id=8), 0.0)
    lease = ev.RecoveredLease(7, 0, "w", 15.0)
    group = ev.RecoveredGroup(0, 0, "open")
    policies.handle(
        ev.HeadStarted(
            policy="b",
            next_lease_id=8,
            next_number=1,
            groups=(group,),
            leases=(lease,),
            published=(SnapshotRef("b", 1, 0),),
        ),
        0.0,
    )
    policies.handle(ev.WorkerJoined("w", 4, 0.5, SnapshotRef("b", 1, 0), held_leases=(7,)), 1.0)
    assert policies.posts["w"].policy == "b"
    assert policies.planners["b"].leases.of_worker("w")[0] == 7
    check(policies)


def test_the_head_is_done_when_every_policy_is() -> None:
    office = Office(options("a", max_steps=1), options("b", max_steps=1))
    ends: list[do.Command] = []
    for policy in ("a", "b"):
        assert not ends
        office.join(f"for {policy}", SnapshotRef(policy, 1, 0))
        while office.policies.planners[policy].version < 1:
            told = office.finish(f"for {policy}")
            told += office.tell(*(ev.GroupScored(one.group) for one in of(do.ScoreGroup, told)))
            numbers = tuple(one.number for one in of(do.FeedGroup, told))
            if of(do.EndStep, told):
                office.tell(ev.StepTrained(0, numbers, policy=policy))
        ends = of(do.FinishRun, office.tell(ev.CheckpointSaved(1, 1, policy)))
    assert len(ends) == 1


def test_an_event_of_a_policy_that_the_head_does_not_hold_is_a_bug() -> None:
    with pytest.raises(InvariantError, match="no policy c"):
        Office().tell(ev.GroupsWanted(0, "c"))
