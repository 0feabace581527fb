"""Reports: the learner's of steps, of which late and repeated ones change nothing that was written; and heartbeats."""

from __future__ import annotations

import asyncio
import json
from array import array
from pathlib import Path
from typing import Any

import pytest

from echo2.config.rundir import best_version, read_json, read_metrics
from echo2.core.errors import PeerError
from echo2.head.fleet.decide.fleet import REPORTS_PER_SECOND, Worker
from echo2.head.ledger.metrics import KEPT_ROWS, Metrics
from echo2.head.ledger.rollout_log import read_groups
from echo2.head.serve.head_process import STATUS_SECONDS_MAX, STATUS_SHARE, status_pause_seconds
from echo2.head.serve.report import ROWS_AT_ONCE, status, write_status_in_turns
from echo2.transport import wire_pb2 as wire
from echo2.transport.limits import LOGGED_TOKENS
from echo2.transport.message_bytes import encode_logprobs
from echo2.views.run_view import SILENT_SECONDS
from head_cases import LEARNER, OpenHead, delivery, rows, sample, settings, until
from rollout_cases import END


async def train(open_head: OpenHead, leases: list[wire.Lease], step: int) -> wire.StepReport:
    """The worker delivers the step's group; the report that the learner would send."""
    await until(lambda: [lease for lease in leases if lease.step == step])
    (lease,) = (lease for lease in leases if lease.step == step)
    assert (await open_head.deliver(delivery(lease, [sample([5, 7, END], version=step)] * 4)))[0][0]
    await until(lambda: len(open_head.fed) > step)
    metrics = json.dumps({"loss": float(step)})
    return wire.StepReport(step=step, groups=[lease.number], metrics_json=metrics, epoch=open_head.epoch)


async def three_steps(open_head: OpenHead, leases: list[wire.Lease]) -> list[wire.StepReport]:
    reports = []
    for step in range(3):
        reports.append(await train(open_head, leases, step))
        await open_head.service.learner.report_step(LEARNER, reports[-1])
        if step < 2:
            await open_head.publish(step + 1)
            await open_head.report(version=step + 1)
            open_head.learn()
    return reports


def test_logprobs_of_a_report_are_written_once_and_bounded(tmp_path: Path) -> None:
    async def scenario() -> None:
        raw = settings(rows(tmp_path / "rows.jsonl", "53="))
        async with OpenHead(tmp_path, raw) as open_head, open_head.attending() as leases:
            report = await train(open_head, leases, 0)
            values = array("f", [-0.5, -1.0, -0.25])
            for number, data in ((7, b"123"), (7, bytes(4 * LOGGED_TOKENS + 4))):
                bad = wire.StepReport(step=0, groups=report.groups, metrics_json="{}", epoch=open_head.epoch)
                bad.logprobs.add(group=number, rollouts=[data])
                with pytest.raises(PeerError, match=r"malformed.*logprobs of 1 groups"):
                    await open_head.service.learner.report_step(LEARNER, bad)
            report.logprobs.extend(encode_logprobs({report.groups[0]: [values] * 4}))
            folder = open_head.head.rundir.rollouts
            for _ in range(2):
                await open_head.service.learner.report_step(LEARNER, report)
            await until(lambda: read_groups(folder, "step_1"))
            (group,) = read_groups(folder, "step_1")
            assert [each["learner_logprobs"] for each in group["rollouts"]] == [list(values)] * 4
            assert len((folder / "step_1.jsonl").read_text().splitlines()) == 1

    asyncio.run(asyncio.wait_for(scenario(), 60.0))


def test_late_and_repeated_reports_change_no_row(tmp_path: Path) -> None:
    async def scenario() -> None:
        raw = settings(rows(tmp_path / "rows.jsonl", "53="), learner={"price_usd_per_hour": 3.0})
        async with OpenHead(tmp_path, raw) as open_head, open_head.attending() as leases:
            reports = await three_steps(open_head, leases)
            written = read_metrics(open_head.head.rundir.metrics)
            assert [(row["step"], row["loss"], row["groups/trained"]) for row in written] == [
                (1, 0.0, 1),
                (2, 1.0, 2),
                (3, 2.0, 3),
            ]
            assert all(row["cost/step_usd"] > 0 for row in written)
            for report in (reports[1], reports[2], reports[0]):
                await open_head.service.learner.report_step(LEARNER, report)
            assert read_metrics(open_head.head.rundir.metrics) == written

    asyncio.run(asyncio.wait_for(scenario(), 60.0))


def test_a_row_that_a_kill_prevented_is_written_when_the_learner_reports_again(tmp_path: Path) -> None:
    async def scenario() -> None:
        raw = settings(rows(tmp_path / "rows.jsonl", "53="))
        async with OpenHead(tmp_path, raw) as open_head, open_head.attending() as leases:
            reports = await three_steps(open_head, leases)
            open_head.head.books.metrics.truncate(2)
            await open_head.service.learner.report_step(LEARNER, reports[2])
            assert [row["step"] for row in read_metrics(open_head.head.rundir.metrics)] == [1, 2, 3]

    asyncio.run(asyncio.wait_for(scenario(), 60.0))


def test_a_step_that_the_run_does_not_record_gets_no_row(tmp_path: Path) -> None:
    async def scenario() -> None:
        raw = settings(rows(tmp_path / "rows.jsonl", "53="))
        async with OpenHead(tmp_path, raw) as open_head, open_head.attending() as leases:
            report = await train(open_head, leases, 0)
            open_head.head.ending.end("stopped", "by hand")
            with pytest.raises(PeerError, match="the run is over: by hand"):
                await open_head.service.learner.report_step(LEARNER, report)
            assert read_metrics(open_head.head.rundir.metrics) == []

    asyncio.run(asyncio.wait_for(scenario(), 60.0))


def test_the_newest_rows_are_in_memory_and_all_can_be_amended(tmp_path: Path) -> None:
    path, num_rows = tmp_path / "metrics.jsonl", 5 * KEPT_ROWS
    metrics = Metrics(path)
    for step in range(1, num_rows + 1):
        metrics.write({"step": step, "loss": 0.5})
        assert len(metrics.recent) <= 2 * KEPT_ROWS
    assert (metrics.last_step, len(read_metrics(path))) == (num_rows, num_rows)
    changes: list[tuple[int, dict[str, Any]]] = [(num_rows, {"eval/accuracy": 1.0}), (2, {"eval/accuracy": 0.5})]
    for step, values in changes:
        metrics.amend(step, values)
    assert len(metrics.recent) <= 2 * KEPT_ROWS
    found = {row["step"]: row for row in read_metrics(path)}
    assert sorted(found) == list(range(1, num_rows + 1))
    assert (found[2]["eval/accuracy"], found[num_rows]["eval/accuracy"]) == (0.5, 1.0)
    assert metrics.accuracies == {2: 0.5, num_rows: 1.0}
    assert best_version([1, 2, num_rows], metrics.accuracies) == num_rows
    assert best_version([1, 2, 3], metrics.accuracies) == 2
    metrics.truncate(3)
    assert metrics.accuracies == Metrics(path).accuracies == {2: 0.5}
    assert best_version([1, 3], metrics.accuracies) is None
    metrics.write({"step": 4})
    assert [row["step"] for row in read_metrics(path)] == [1, 2, 3, 4]
    assert [row["step"] for row in Metrics(path).recent] == [1, 2, 3, 4]


def test_heartbeats_without_news_are_one_event_for_all_workers(tmp_path: Path) -> None:
    async def scenario() -> None:
        raw = settings(rows(tmp_path / "rows.jsonl", "53="))
        async with OpenHead(tmp_path, raw) as open_head, open_head.attending(), open_head.attending("w-2"):
            head = open_head.head

            def events(kind: str) -> list[dict[str, Any]]:
                lines = [json.loads(line).get("event", {}) for line in head.rundir.events.read_bytes().splitlines()]
                return [event for event in lines if event.get("type") == kind]

            await until(lambda: len(head.connections.workers) == 2)
            for _ in range(20):
                await open_head.report("w-1")
                await open_head.report("w-2")
            await until(lambda: events("WorkersHeard"))
            (heard,) = events("WorkersHeard")
            assert sorted(heard["worker_ids"]) == sorted(head.connections.workers)
            assert [event["worker_id"] for event in events("WorkerReported")] == list(head.connections.workers)

    asyncio.run(asyncio.wait_for(scenario(), 60.0))


def test_a_report_is_answered_with_the_time_until_the_next_which_grows_with_the_fleet(tmp_path: Path) -> None:
    async def scenario() -> None:
        raw = settings(rows(tmp_path / "rows.jsonl", "53="))
        async with OpenHead(tmp_path, raw) as open_head, open_head.attending():
            fleet, peer = open_head.head.planner.fleet, open_head.peer("w-1")
            await until(lambda: fleet.num_attending)
            reply = await open_head.service.report(peer, wire.WorkerReport())
            assert reply.heartbeat_seconds == fleet.report_seconds == fleet.heartbeat_seconds
            for number in range(int(10 * fleet.heartbeat_seconds * REPORTS_PER_SECOND)):
                fleet.join(Worker(f"other-{number}", 1, 0.0, None, 0.0), 0.0)
            reply = await open_head.service.report(peer, wire.WorkerReport())
            assert reply.heartbeat_seconds == pytest.approx(10 * fleet.heartbeat_seconds, rel=0.01)

    asyncio.run(scenario())


def test_a_status_that_takes_long_is_written_seldom_but_not_so_that_its_head_seems_silent() -> None:
    """With 6,500 workers on a busy machine it took half a second, and stood still for fifty."""
    assert status_pause_seconds(0.001) == pytest.approx(0.001 / STATUS_SHARE)
    assert max(map(status_pause_seconds, (0.5, 60.0))) == STATUS_SECONDS_MAX < SILENT_SECONDS / 5


def test_a_status_with_many_workers_is_written_while_calls_are_answered(tmp_path: Path) -> None:
    async def scenario() -> None:
        raw = settings(rows(tmp_path / "rows.jsonl", "53="))
        async with OpenHead(tmp_path, raw) as open_head, open_head.attending():
            head = open_head.head
            now = head.clock.now()
            for number in range(3 * ROWS_AT_ONCE):
                head.planner.fleet.join(Worker(f"other-{number}", 1, 0.0, None, now), now)
            writing = asyncio.ensure_future(write_status_in_turns(head))
            num_turns = 0
            while not writing.done():
                num_turns += 1
                await asyncio.sleep(0)
            assert num_turns > 3
            assert writing.result() > 0.0
            found, expected = read_json(head.rundir.status), json.loads(json.dumps(status(head)))
            assert found["workers"] == expected["workers"]
            assert found.keys() == expected.keys()

    asyncio.run(asyncio.wait_for(scenario(), 60.0))
