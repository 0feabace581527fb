"""A worker whose new weights come after the steps that they may sample gets no groups; its owner hears why, and what
would help."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest

from echo2.core.types import RUN_POLICY, SnapshotRef
from echo2.head.decide import events as ev
from echo2.head.fleet.decide.fleet import LATE_INSTALLS
from echo2.planning.sim.scenario import Case, LearnerSpec, Scenario, Study, WorkersSpec
from echo2.planning.simulate import to_table
from echo2.transport import wire_pb2 as wire
from echo2.transport.base import Peer
from echo2.transport.grpc_link import join
from echo2.transport.grpc_server import GrpcServer
from echo2.transport.identity import RunIdentity
from echo2.worker.worker_process import NO_USE_CHARS_MAX, WorkerOptions, WorkerProcess
from head_cases import OpenHead, rows, settings, until
from invariants import run_scenario
from planner_cases import OPTIONS, Desk, running

LONG = replace(OPTIONS, max_steps=60)


def told(desk: Desk, worker_id: str) -> str:
    return "; ".join(wait.reason for wait in desk.planner.waits(desk.now) if wait.waiter == worker_id)


def installed(desk: Desk, worker_id: str, version: int) -> None:
    desk.tell(ev.WorkerReported(worker_id, SnapshotRef(RUN_POLICY, 1, version), ""))


def trained(desk: Desk, lag: int, until: int, since: int = 0) -> None:
    """Train the steps. Worker `a` has each version at once, and `b` when the learner is `lag` steps further."""
    for step in range(since, until):
        desk.train(step)
        desk.publish(step + 1)
        installed(desk, "a", step + 1)
        if step + 1 - lag > 0:
            installed(desk, "b", step + 1 - lag)


@pytest.mark.parametrize("lag", [2, 9])
def test_a_worker_that_the_learner_outruns_is_told_so_with_the_staleness_that_would_do(lag: int) -> None:
    desk = running(LONG)
    desk.join("b")
    trained(desk, lag, until=lag + LATE_INSTALLS - 1)
    assert "too late" not in told(desk, "b"), "the first snapshot is whole, and the next may come in a busy moment"
    slots = desk.planner.fleet.active_groups
    trained(desk, lag, until=lag + LATE_INSTALLS, since=lag + LATE_INSTALLS - 1)
    said = told(desk, "b")
    assert f"the learner was up to {lag} steps ahead" in said
    assert f"To get groups it needs schedule.max_staleness >= {lag + 1}, larger steps" in said
    assert said == desk.planner.why_of_no_use("b")
    assert desk.planner.why_of_no_use("a") == desk.planner.why_of_no_use("nobody") == ""
    assert desk.planner.fleet.active_groups < slots, "no share of a step is kept for it"


def test_a_worker_that_keeps_up_again_is_of_use_again() -> None:
    desk = running(LONG)
    desk.join("b")
    trained(desk, 2, until=5)
    assert desk.planner.why_of_no_use("b")
    desk.train(5)
    desk.publish(6)
    installed(desk, "b", 6)
    assert not desk.planner.why_of_no_use("b")


def test_a_quick_worker_of_a_fleet_that_is_too_large_is_not_called_late() -> None:
    desk = running(LONG)
    desk.join("b")
    trained(desk, 0, until=8)
    assert not desk.planner.why_of_no_use("b")


def test_a_simulation_names_the_machines_that_are_of_no_use() -> None:
    quick, late = (WorkersSpec(rollouts_per_second=8.0, install_seconds=seconds) for seconds in (0.1, 18.0))
    scenario = Scenario(
        name="late",
        max_steps=30,
        groups_per_step=8,
        faults_until_seconds=0.0,
        workers=(quick, late),
        learner=LearnerSpec(train_seconds=3.0),
    )
    report = run_scenario(scenario, 0)
    assert list(report.of_no_use) == ["w1-0"]
    assert "of no use   w1-0: new weights reach it too late" in report.to_text()
    assert "w1-0: new weights reach it too late" in to_table(Study("late", "", (Case("", (), scenario),)), [report])
    assert run_scenario(replace(scenario, max_staleness=8), 0).of_no_use == {}


def test_the_head_says_it_in_its_answer_to_the_worker_s_report(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with OpenHead(tmp_path, settings(rows(tmp_path / "rows.jsonl", "5 * 7"))) as desk, desk.attending():
            peer, planner = desk.peer("w-1"), desk.head.planner
            await until(lambda: planner.fleet.get(peer.peer_id) is not None)
            worker = planner.fleet.get(peer.peer_id)
            assert worker is not None
            assert (await desk.service.report(peer, wire.WorkerReport())).of_no_use == ""
            for _ in range(LATE_INSTALLS):
                planner.fleet.came_in(worker, 7, is_late=True)
            said = (await desk.service.report(peer, wire.WorkerReport())).of_no_use
            assert "schedule.max_staleness >= 8" in said
            assert len(said) < NO_USE_CHARS_MAX

    asyncio.run(scenario())


def test_the_worker_s_own_terminal_says_it_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    reports = asyncio.Semaphore(0)

    async def report(peer: Peer, _: wire.WorkerReport) -> wire.ReportReply:
        reports.release()
        return wire.ReportReply(heartbeat_seconds=0.01, of_no_use="new weights reach it\x1b[31m too late")

    async def attend(peer: Peer, _: wire.WorkerHello) -> AsyncIterator[wire.Order]:
        run = wire.RunSettings(run_id="r", heartbeat_seconds=0.01, swap="during", slots=1, engine="fake")
        yield wire.Order(settings=run)
        for _ in range(3):
            await reports.acquire()
        yield wire.Order(stop=wire.Stop(reason="the run is over"))

    async def scenario() -> None:
        identity = RunIdentity.create_or_load(tmp_path / "identity")
        server = GrpcServer("127.0.0.1", 0, identity, {"Report": report, "Attend": attend})
        ticket = identity.make_ticket("worker", f"127.0.0.1:{await server.start()}", 1, 1.0)
        try:
            member = await join(ticket, tmp_path / "state")
            worker = WorkerProcess(member, tmp_path / "worker", WorkerOptions(relays=False), {})
            assert await worker.run() == "the run is over"
        finally:
            await server.stop()

    with caplog.at_level(logging.WARNING):
        asyncio.run(scenario())
    assert caplog.text.count("the head has hardly any work for this worker: new weights reach it too late") == 1
