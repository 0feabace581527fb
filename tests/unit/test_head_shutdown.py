"""A run is told to stop: the learner hears it, its last step is recorded, and its checkpoint is waited for."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import pytest

from echo2.head.serve import head as head_process
from echo2.transport import wire_pb2 as wire
from head_cases import LEARNER, OpenHead, delivery, rows, sample, settings, until
from rollout_cases import END


def run(scenario: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(scenario, 60.0))


def open_head(path: Path) -> OpenHead:
    return OpenHead(path, settings(rows(path / "rows.jsonl", "53=")))


def is_fed(one: OpenHead) -> bool | None:
    """Whether the learner takes the groups of a step; None without a learner."""
    learner = one.head.connections.learner
    return None if learner is None else learner.feed is not None


async def trained(one: OpenHead) -> None:
    """Step 0 has its group, and the learner trains it: it listens to no stream."""
    async with one.attending() as leases:
        await until(lambda: leases)
        await one.deliver(delivery(leases[0], [sample([5, 7, END])] * 4))
        await until(lambda: one.fed and is_fed(one) is False)


def test_a_learner_that_trains_has_its_step_recorded_and_its_checkpoint_awaited(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with open_head(tmp_path) as one:
            await trained(one)
            one.head.ending.request_stop("enough")
            await asyncio.sleep(0)
            assert one.head.ending.outcome is None
            report = wire.StepReport(step=0, groups=[one.fed[0].group.number], metrics_json=b"{}", epoch=one.epoch)
            await one.service.learner.report_step(LEARNER, report)
            assert one.head.planner.training.version == 1
            (stop,) = [
                wire.FedGroups.FromString(fed)
                async for fed in one.service.learner.take_groups(LEARNER, wire.TakeGroups(step=1, epoch=one.epoch))
            ]
            assert (stop.done.stop, stop.done.reason) == (True, "enough")
            assert one.head.ending.outcome is None
            await one.service.learner.report_checkpoint(
                LEARNER, wire.CheckpointReport(version=1, oldest_kept=1, epoch=one.epoch)
            )
            await until(lambda: one.head.ending.outcome is not None)
            assert one.head.ending.outcome == ("stopped", "enough")

    run(scenario())


def test_a_waiting_learner_stops_at_once_and_a_checkpoint_on_disk_is_sufficient(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with open_head(tmp_path) as one:
            await until(lambda: is_fed(one))
            one.head.ending.stop("the budget is spent")
            one.head.ending.stop("the budget is spent")
            await until(lambda: is_fed(one) is False)  # it read the stop
            assert one.head.ending.outcome is None
            step = one.head.rundir.checkpoints / "step_0"
            step.mkdir(parents=True)
            (step / "state.json").write_text("{}")
            await until(lambda: one.head.ending.outcome is not None)

    run(scenario())


@pytest.mark.parametrize("why", ["told twice", "no learner"])
def test_a_stop_does_not_wait_for_a_learner_that_is_gone_or_for_a_second_signal(tmp_path: Path, why: str) -> None:
    async def scenario() -> None:
        async with open_head(tmp_path) as one:
            if why == "no learner":
                await one.session.aclose()
            one.head.ending.request_stop("enough")
            if why == "told twice":
                one.head.ending.request_stop("enough")
            await until(lambda: one.head.ending.outcome == ("stopped", "enough"))

    run(scenario())


def test_a_first_signal_waits_for_the_checkpoint_though_the_run_was_about_to_stop(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with open_head(tmp_path) as one:
            await until(lambda: one.head.connections.learner is not None)
            one.head.ending.stop("the budget is spent")
            one.head.ending.request_stop("enough")
            assert one.head.ending.outcome is None
            one.head.ending.request_stop("enough")
            assert one.head.ending.outcome == ("stopped", "the budget is spent")

    run(scenario())


@pytest.mark.parametrize("is_back", [True, False])
def test_a_learner_that_is_gone_for_a_moment_is_waited_for(
    tmp_path: Path, is_back: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(head_process, "LOST_SECONDS", 3600.0)

    async def scenario() -> None:
        async with open_head(tmp_path) as one:
            await trained(one)
            report = wire.StepReport(step=0, groups=[one.fed[0].group.number], metrics_json=b"{}", epoch=one.epoch)
            await one.service.learner.report_step(LEARNER, report)
            learner, one.head.connections.learner = one.head.connections.learner, None
            one.head.ending.stop("enough")
            for _ in range(3):
                await asyncio.sleep(0)
            assert one.head.ending.outcome is None
            if is_back:
                one.head.connections.learner = learner
                checkpoint = wire.CheckpointReport(version=1, oldest_kept=1, epoch=one.epoch)
                await one.service.learner.report_checkpoint(LEARNER, checkpoint)
            else:
                monkeypatch.setattr(head_process, "LOST_SECONDS", 0.0)  # the moment is over
            await until(lambda: one.head.ending.outcome == ("stopped", "enough"))

    run(scenario())
