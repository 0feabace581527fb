"""How long leases last: a slow worker of the owner keeps its groups while nobody else is free, and everything is
bounded."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from echo2.core.types import RUN_POLICY, SnapshotRef
from echo2.head.decide import commands as do
from echo2.head.decide import events as ev
from echo2.head.decide.granting import FULL_TIMES, LEASE_STRETCH_MAX, STRANGER_STRETCH
from echo2.head.fleet.decide.fleet import LOST_AFTER_HEARTBEATS, LOST_AFTER_REPORTS
from echo2.planning.sim.scenario import LearnerSpec, Scenario, WorkersSpec
from head_cases import OpenHead, rows, settings, until
from invariants import run_scenario
from planner_cases import OPTIONS, Desk, of, running

FIRST = SnapshotRef(RUN_POLICY, 1, 0)
SECONDS = OPTIONS.lease_seconds
QUIET = replace(OPTIONS, heartbeat_seconds=1e6)
LOST_SECONDS = (LOST_AFTER_REPORTS + LOST_AFTER_HEARTBEATS) * OPTIONS.heartbeat_seconds


def wait_until(desk: Desk, at: float) -> list[do.Command]:
    """Let time pass as the planner's own timers do."""
    commands: list[do.Command] = []
    while desk.now < at:
        first = desk.planner.leases.deadlines.first()
        desk.now = min(at, max(desk.now, first)) if first is not None else at
        commands += desk.tell(ev.Tick())
    return commands


def reasons(desk: Desk, name: str) -> str:
    return "; ".join(one.reason for one in desk.planner.waits(desk.now) if name in (one.waiter, one.waits_for))


def test_a_slow_single_worker_keeps_its_groups_and_the_status_says_so() -> None:
    desk = running(QUIET)
    held = desk.open()
    assert "longer than schedule.lease_seconds" not in reasons(desk, "a")
    assert of(do.CloseLease, wait_until(desk, 3.0 * SECONDS)) == []
    assert desk.open() == held
    said = "it has held 4 groups for longer than schedule.lease_seconds = 120 (its rate is not known yet)"
    assert said in reasons(desk, "a")
    for lease_id in held[:2]:
        desk.deliver(lease_id)
    assert desk.planner.groups.num_live(0) == 2
    desk.tell(ev.StepTrained(0, (0, 1)))
    assert "(it needs 480 s for all that it may hold)" in reasons(desk, "a")


def test_the_leases_of_a_slow_worker_follow_the_time_that_it_takes() -> None:
    desk = running(QUIET)
    wait_until(desk, 2.0 * SECONDS)
    granted = of(do.GrantLeases, desk.train(0) + desk.publish(1))
    granted += of(do.GrantLeases, desk.tell(ev.WorkerReported("a", replace(FIRST, version=1))))
    assert {lease.seconds for grant in granted for lease in grant.leases} == {
        FULL_TIMES * desk.planner.fleet.full_seconds(desk.planner.fleet.get("a"))
    }


def test_a_worker_that_hangs_loses_its_groups_all_the_same() -> None:
    desk = running(QUIET)
    wait_until(desk, LEASE_STRETCH_MAX * SECONDS - 1.0)
    assert set(desk.open()) == {1, 2, 3, 4}
    closed = of(do.CloseLease, wait_until(desk, LEASE_STRETCH_MAX * SECONDS))
    assert {(command.lease_id, command.outcome) for command in closed} >= {(1, "expired"), (2, "expired")}
    desk = running(QUIET)  # one that has shown that it is quick loses them at the deadline
    desk.now = 0.1 * SECONDS
    for lease_id in (1, 2):
        desk.deliver(lease_id)
    wait_until(desk, SECONDS - 1.0)
    assert {3, 4} <= set(desk.open())
    wait_until(desk, SECONDS)
    assert not {3, 4} & set(desk.open())


def test_an_idle_worker_also_samples_groups_of_a_slow_one_and_the_first_result_counts() -> None:
    desk = running(QUIET)
    wait_until(desk, 0.5 * SECONDS)
    assert of(do.GrantLeases, desk.join("b")) == []
    granted = of(do.GrantLeases, wait_until(desk, SECONDS))
    assert [grant.worker_id for grant in granted for _ in grant.leases] == ["b", "b"]
    assert [lease.group.number for grant in granted for lease in grant.leases] == [0, 1]
    assert {1, 2, 3, 4} < set(desk.open())
    desk.deliver(1)
    assert not of(do.AcceptDelivery, desk.deliver(granted[0].leases[0].lease_id))


def test_a_worker_whose_connection_is_closed_keeps_its_leases_until_it_counts_as_lost() -> None:
    desk = running(replace(QUIET, heartbeat_seconds=SECONDS))
    desk.now = 0.5 * SECONDS
    desk.tell(ev.WorkerDetached("a", "its stream closed"))
    lost_at = desk.planner.fleet.silence.get("a")
    assert lost_at is not None
    assert lost_at > SECONDS
    assert of(do.CloseLease, wait_until(desk, lost_at - 1.0)) == []
    assert {command.outcome for command in of(do.CloseLease, wait_until(desk, lost_at))} == {"lost"}


def restarted(at: float) -> Desk:
    """A second head that starts at this time: worker `a` holds lease 2, and the learner waits."""
    lease = ev.RecoveredLease(2, 0, "a", 0.0, SECONDS, 8)
    group = ev.RecoveredGroup(0, 0, "open")
    started = ev.HeadStarted(next_number=1, next_lease_id=3, groups=(group,), leases=(lease,), published=(FIRST,))
    desk = Desk(started=started, now=at)
    desk.tell(ev.LearnerJoined(0), ev.GroupsWanted(0))
    return desk


@pytest.mark.parametrize("at", [0.5 * SECONDS, 3.0 * SECONDS])
def test_a_slow_worker_keeps_its_leases_over_a_restart_of_the_head(at: float) -> None:
    """It had been extended before, or its deadline passed while there was no head."""
    desk = restarted(at)
    desk.now += OPTIONS.heartbeat_seconds
    desk.join("a", held=(2,))
    desk.planner.fleet.silence.drop("a")  # it is heard of
    wait_until(desk, LEASE_STRETCH_MAX * SECONDS - 1.0)
    assert 2 in desk.open()
    closed = of(do.CloseLease, wait_until(desk, LEASE_STRETCH_MAX * SECONDS))
    assert (2, "expired") in {(command.lease_id, command.outcome) for command in closed}


def test_after_a_restart_a_worker_that_does_not_return_is_waited_for_a_few_heartbeats_only() -> None:
    desk = restarted(3.0 * SECONDS)
    lost_at = desk.now + LOST_SECONDS
    assert of(do.CloseLease, wait_until(desk, lost_at - 0.1)) == []
    closed = of(do.CloseLease, wait_until(desk, lost_at))
    assert [(command.outcome, command.held_seconds) for command in closed] == [("lost", lost_at)]
    desk = restarted(LEASE_STRETCH_MAX * SECONDS)  # nobody may hold a lease so long
    assert 2 not in desk.open()


def test_a_stranger_gains_a_few_heartbeats_at_most_by_a_restart_of_the_head() -> None:
    desk = restarted(3.0 * SECONDS)
    lost_at = desk.now + LOST_SECONDS
    desk.now += OPTIONS.heartbeat_seconds
    desk.join("own")
    desk.tell(ev.WorkerJoined("a", 16, 0.5, FIRST, ticket="t", held_leases=(2,)))
    closed = of(do.CloseLease, wait_until(desk, lost_at))
    assert [(command.lease_id, command.outcome) for command in closed] == [(2, "expired")]


@pytest.mark.parametrize(("has_own", "most"), [(True, 1.0), (False, STRANGER_STRETCH)])
def test_a_stranger_gains_little_by_being_slow(has_own: bool, most: float) -> None:
    """Beside a machine of the owner nothing, even where that one is busy; alone twice the time, whatever it did."""
    desk = Desk(replace(QUIET, groups_per_step=64))
    desk.tell(ev.LearnerJoined(0), ev.GroupsWanted(0))
    if has_own:
        desk.join("own")
    desk.tell(ev.WorkerJoined("s", 16, 0.5, FIRST, ticket="t"))
    desk.publish(0)
    (held,) = desk.planner.leases.of_worker("s")
    granted_at = desk.now
    while desk.planner.leases.get(held) is not None:
        assert desk.now - granted_at < most * SECONDS
        wait_until(desk, desk.now + 5.0)
    assert desk.now - granted_at == most * SECONDS
    assert desk.planner.credits.of("t").num_rests == 1


@given(
    slowness=st.lists(st.floats(0.1, LEASE_STRETCH_MAX / 3), min_size=1, max_size=3),
    seed=st.integers(0, 999),
    max_staleness=st.integers(0, 2),
    deterministic=st.booleans(),
)
@example(slowness=[2.5], seed=0, max_staleness=1, deterministic=False)
@example(slowness=[2.5, 2.5], seed=1, max_staleness=0, deterministic=True)
@example(slowness=[0.1, 2.5], seed=2, max_staleness=2, deterministic=False)
def test_a_run_ends_however_slow_its_workers_are(
    slowness: list[float], seed: int, max_staleness: int, deterministic: bool
) -> None:
    """All rules are checked after each event (`invariants`); no group is trained twice, and none is given up."""
    workers = tuple(
        WorkersSpec(count=1, rollout_seconds=60.0 * slow, spread=0.1, capacity_groups=2) for slow in slowness
    )
    scenario = Scenario(
        max_steps=4,
        groups_per_step=4,
        groups_per_batch=2,
        group_size=2,
        max_staleness=max_staleness,
        deterministic=deterministic,
        lease_seconds=60.0,
        workers=workers,
        learner=LearnerSpec(train_seconds=1.0),
    )
    report = run_scenario(scenario, seed)
    assert report.finished, report.to_text()
    assert report.retired == {}, report.to_text()
    assert sum(report.staleness.values()) == scenario.max_steps * scenario.groups_per_step
    if len(slowness) == 1:
        assert set(report.leases) == {"accepted"}, report.to_text()


@pytest.mark.parametrize("jump_seconds", [-3600.0, 0.0])
def test_a_lease_ends_when_it_was_to_end_where_the_clock_was_set_back_before_a_restart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, jump_seconds: float
) -> None:
    raw, system = settings(rows(tmp_path / "rows.jsonl", "53=", "27=")), time.time

    async def scenario() -> None:
        async with OpenHead(tmp_path, raw) as open_head, open_head.attending() as leases:
            await until(lambda: leases)
        monkeypatch.setattr(time, "time", lambda: system() + jump_seconds)
        async with OpenHead(tmp_path, raw) as again:
            (deadline, *_) = (lease.deadline for _, lease in again.head.planner.leases.open_leases())
            assert deadline - again.head.clock.now() <= LEASE_STRETCH_MAX * 120.0

    asyncio.run(asyncio.wait_for(scenario(), 60.0))
