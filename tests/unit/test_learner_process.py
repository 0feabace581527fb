"""Two learners with one run's ticket: one trains, the other changes nothing, and is told who is there. And one learner
that does not hear that its step is recorded.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import pytest

from echo2.config.rundir import read_metrics
from echo2.core.errors import LinkError, PeerError
from echo2.core.types import RUN_POLICY, Backoff, RolloutGroup
from echo2.head.ledger.audit import audit
from echo2.learner.core.publication import Publisher
from echo2.learner.link import sending
from echo2.learner.link.head_client import LearnerInfo, join_head
from echo2.transport import wire_pb2 as wire
from echo2.transport.limits import PROTOCOL_VERSION
from head_cases import LEARNER, OpenHead, delivery, rows, sample, settings, until
from memory_links import MemoryLink
from rollout_cases import END, VOCAB

RIGHT = [5, 7, END]
STALE: dict[str, Any] = {
    "report_step": wire.StepReport(step=0, metrics_json="{}"),
    "offer_chunks": wire.ChunkOffer(hashes=[bytes(32)]),
    "put_chunk": wire.OfferedChunk(hash=bytes(32)),
    "publish": wire.PublishRequest(),
    "report_checkpoint": wire.CheckpointReport(version=0),
    "learner_report": wire.LearnerReport(doing="lying"),
}


def run(scenario: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(scenario, 60.0))


def one_task(path: Path) -> OpenHead:
    return OpenHead(path, settings(rows(path / "rows.jsonl", "53=")))


def hello(epoch: int = 0, version: int = 0) -> wire.LearnerHello:
    return wire.LearnerHello(
        protocol=PROTOCOL_VERSION, policy=RUN_POLICY, version=version, vocab_size=8, host="other", pid=77, epoch=epoch
    )


async def train_step(one: OpenHead, step: int) -> wire.StepReport:
    """A worker samples the step's group, and its report is recorded."""
    async with one.attending(version=0) as leases:
        await until(lambda: leases)
        await one.deliver(delivery(leases[0], [sample(RIGHT)] * 4))
        await until(lambda: len(one.fed) == step + 1)
    report = wire.StepReport(step=step, groups=[one.fed[-1].group.number], metrics_json="{}", epoch=one.epoch)
    await one.service.learner.report_step(LEARNER, report)
    return report


def standing(one: OpenHead) -> tuple[Any, ...]:
    """All that a second learner could spoil."""
    planner = one.head.planner
    published, rows_ = dict(planner.snapshots.published), [row["step"] for row in read_metrics(one.head.rundir.metrics)]
    return (
        planner.training.version,
        planner.training.lineage,
        published,
        rows_,
        planner.training.checkpoint_version,
        one.head.ending.outcome,
    )


def test_a_copy_of_the_learner_is_refused_and_the_run_goes_on(tmp_path: Path) -> None:
    """It holds version 0, as a copy does that has no checkpoint: the run fell back to it, and its rows were gone."""

    async def scenario() -> None:
        async with one_task(tmp_path) as one:
            await train_step(one, 0)
            before = standing(one)
            for epoch in (0, one.epoch + 1):
                with pytest.raises(PeerError, match="the run has a learner, process 0 on") as refused:
                    await anext(one.service.learner.learner_hello(LEARNER, hello(epoch)))
                assert refused.value.reason == "taken"
            assert standing(one) == before
            assert before[3] == [1]

    run(scenario())


@pytest.mark.parametrize("method", STALE)
def test_a_call_of_another_epoch_changes_nothing(method: str, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with one_task(tmp_path) as one:
            await train_step(one, 0)
            before, learner = standing(one), one.head.connections.learner
            assert learner is not None
            for epoch in (0, one.epoch - 1, one.epoch + 1):
                request = type(STALE[method])()
                request.CopyFrom(STALE[method])
                request.epoch = epoch
                with pytest.raises(PeerError, match="unknown_learner"):
                    await getattr(one.service.learner, method)(LEARNER, request)
                with pytest.raises(PeerError, match="unknown_learner"):
                    await anext(one.service.learner.take_groups(LEARNER, wire.TakeGroups(step=1, epoch=epoch)))
            assert (standing(one), learner.doing) == (before, "")

    run(scenario())


def test_a_learner_that_comes_back_ends_its_own_old_streams(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with one_task(tmp_path) as one:
            feed = one.service.learner.take_groups(LEARNER, wire.TakeGroups(step=0, epoch=one.epoch))
            waiting = asyncio.ensure_future(anext(feed))
            connections = one.head.connections
            await until(lambda: connections.learner is not None and connections.learner.feed is not None)
            again = one.service.learner.learner_hello(LEARNER, hello(one.epoch))
            welcome = await anext(again)
            assert welcome.epoch > one.epoch
            with pytest.raises(PeerError, match="unknown_learner"):
                await waiting
            with pytest.raises(StopAsyncIteration):
                await anext(one.session)
            assert connections.learner is not None
            assert (connections.learner.epoch, one.head.planner.training.learner_joined) == (welcome.epoch, True)
            await again.aclose()
            assert (connections.learner, one.head.planner.training.learner_joined) == (None, False)

    run(scenario())


def test_another_learner_may_come_once_the_first_is_gone_and_no_epoch_is_given_twice(tmp_path: Path) -> None:
    async def scenario() -> None:
        epochs = []
        for _ in range(2):  # the second time of a head that was restarted
            async with one_task(tmp_path) as one:
                epochs.append(one.epoch)
                await one.session.aclose()
                other = one.service.learner.learner_hello(LEARNER, hello())
                epochs.append((await anext(other)).epoch)
                await other.aclose()
        assert epochs == sorted(set(epochs))

    run(scenario())


class DeafLink(MemoryLink):
    """Loses the answer to the first report of a step, and with it the connection."""

    is_deaf = False

    async def call(self, method: str, request: Any, timeout_seconds: float) -> Any:
        answer = await super().call(method, request, timeout_seconds)
        if method == "ReportStep" and not self.is_deaf:
            self.is_deaf = True
            self.cut()
            raise LinkError("the answer is lost")
        return answer


def test_a_learner_whose_step_report_is_interrupted_does_not_fall_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another call says hello while the report waits for the head."""

    async def scenario() -> None:
        async with one_task(tmp_path) as one:
            await one.session.aclose()
            link = DeafLink(one.service.handlers(), LEARNER)
            publisher = Publisher(tmp_path / "learner")
            client = await join_head(link, 0, LearnerInfo("cpu", VOCAB), publisher, 60.0, lambda reason: None)
            async with one.attending(version=0) as leases:
                await until(lambda: leases)
                await one.deliver(delivery(leases[0], [sample(RIGHT)] * 4))
                numbers = [fed.group.number async for fed in client.take_groups(0) if isinstance(fed, RolloutGroup)]
            monkeypatch.setattr(sending, "PAUSE_SECONDS", Backoff(60.0, 60.0))  # until the head is tried again
            reporting = asyncio.ensure_future(client.report_step(0, numbers, {}, {}))
            await until(lambda: link.is_deaf and one.head.connections.learner is None)
            before = standing(one)
            assert before[:2] == (1, 1)
            link.mend()
            monkeypatch.setattr(sending, "PAUSE_SECONDS", Backoff(0.0, 0.0))
            await client.report_checkpoint(0, 0, [0])
            assert (one.head.planner.training.version, one.head.planner.training.lineage, client.lineage) == (1, 1, 1)
            reporting.cancel()
            await client.report_step(0, numbers, {}, {})
            assert standing(one)[:4] == before[:4]
            found = audit(one.head.rundir.ledger)
            assert (found.trained, found.doubled) == (1, 0)
            await client.close()

    run(scenario())
