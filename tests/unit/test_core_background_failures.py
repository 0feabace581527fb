"""Whatever runs in the background of a head, a worker, the broadcast, a learner's link or the service raises something
that nobody foresaw: the owner hears of it.

Each story runs once undisturbed, which shows what it runs in the background; then once for each of these, which raises
at its first step. It is heard if the story raises it, or the owner is told, or a log says so; a story that goes on, or
waits, in silence fails.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import warnings
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec
import pytest

import test_learner_sending as sending
from broadcast_fleet import Fleet, content
from echo2.core.types import RUN_POLICY, SnapshotRef
from echo2.learner.core.publication import Publisher
from echo2.learner.link import sending as link_words
from echo2.learner.link.head_client import LearnerInfo, join_head
from echo2.learner.link.sending import Meeting, OtherRanks
from echo2.worker.decide import messages as ev
from front_service import Service
from head_cases import OpenHead, delivery, rows, sample, settings, until
from random_faults import WORDS, Strike
from test_worker_sampling import Bench, assignment

MODEL = {"model_seq_id": 0, "base_model": "echo2/tiny", "lora_config": {"rank": 4}}

Story = Callable[[Path, list[BaseException]], Awaitable[None]]


async def _broadcast(folder: Path, told: list[BaseException]) -> None:
    fleet = Fleet(folder)
    fleet.errors = told
    await fleet.start("memory")
    try:
        await fleet.join("w-1")
        await fleet.join("w-2", is_dialable=False)
        await fleet.join("w-3")
        made = fleet.publish(content(1))
        for worker in fleet.workers.values():
            await worker.has(made)
    finally:
        for name in list(fleet.workers):
            await fleet.leave(name, "the story is over")
        await fleet.stop()


async def _head(folder: Path, told: list[BaseException]) -> None:
    opened = OpenHead(folder, settings(rows(folder / "rows.jsonl", "53=")))
    try:
        await opened.__aenter__()
    except BaseException:  # what was struck is needed for the start
        if "head" in vars(opened):
            await opened.head.close()
            await opened.head.distribution.close()
        raise
    try:
        async with opened.attending() as leases:
            await until(lambda: bool(leases))
            await opened.report()
            await opened.deliver(delivery(leases[0], [sample([3, 5, 2]) for _ in range(4)]))
            await until(lambda: bool(opened.fed) or opened.head.ending.outcome is not None)
    finally:
        await opened.__aexit__()


async def _worker(folder: Path, told: list[BaseException]) -> None:
    bench = Bench()
    bench.sampler._fail = told.append
    bench.sampler.start(assignment(1))
    await until(lambda: bool(told or bench.of(ev.GroupProduced) or bench.of(ev.LeaseAbandoned)))
    told += [RuntimeError(str(event)) for event in bench.events if isinstance(event, ev.LeaseAbandoned)]
    await bench.sampler.close()


async def _learner_link(folder: Path, told: list[BaseException]) -> None:
    ranks, link = OtherRanks(1), sending.HeadLink(sending.Head(), 0)
    await ranks.open()
    meeting = msgspec.msgpack.decode(ranks.meeting("127.0.0.1", ""), type=Meeting)
    _, writer = await asyncio.open_connection(meeting.host, meeting.port)
    client = await join_head(link, 0, LearnerInfo("cpu", 8), Publisher(folder), 5.0, lambda reason: None)  # type: ignore[arg-type]
    try:
        await link_words._write(writer, link_words._Hello(meeting.token, 1))
        await ranks.call("weights", SnapshotRef(RUN_POLICY, 1, 1), 0)
        await client.publish(1, sending.lent(1)(0))
    finally:
        writer.close()
        ranks.close()
        await client.close()
        await asyncio.gather(writer.wait_closed(), return_exceptions=True)


STORIES: dict[str, tuple[Story, int]] = {
    "broadcast": (_broadcast, 6),
    "head": (_head, 2),
    "worker": (_worker, 2),
    "learner's link": (_learner_link, 2),
}


def is_heard(told: list[BaseException], logs: pytest.LogCaptureFixture) -> bool:
    errors = [record.exc_info[1] for record in logs.records if record.exc_info and record.levelno >= logging.WARNING]
    return any(WORDS in repr(error) for error in [*told, *errors])


def play(story: Story, strike: Strike, folder: Path, logs: pytest.LogCaptureFixture) -> bool:
    """Play a story until it ends or the failure is heard. Returns whether it was heard."""

    async def run() -> bool:
        asyncio.get_running_loop().set_task_factory(strike)  # type: ignore[arg-type]
        told: list[BaseException] = []
        playing: Coroutine[Any, Any, None] = story(folder, told)  # type: ignore[assignment]
        task = asyncio.ensure_future(playing)
        try:
            await until(lambda: task.done() or is_heard(told, logs))
        finally:
            task.cancel()
            (outcome,) = await asyncio.gather(task, return_exceptions=True)
        told += [outcome] if isinstance(outcome, BaseException) else []
        causes = [cause for error in told for cause in (error, error.__cause__) if cause is not None]
        return is_heard(causes, logs)

    folder.mkdir()
    logs.clear()
    heard = asyncio.run(run())
    with warnings.catch_warnings(action="ignore", category=ResourceWarning):
        gc.collect()  # children whose killer was struck; they end as their pipes are closed
    return heard


@pytest.mark.parametrize("name", STORIES)
def test_an_unforeseen_failure_in_the_background_reaches_its_owner(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    story, least = STORIES[name]
    calm = Strike()
    assert not play(story, calm, tmp_path / "calm", caplog)
    assert len(calm.seen) >= least, calm.seen
    silent = [
        site
        for number, site in enumerate(sorted(calm.seen))
        if not play(story, Strike(site), tmp_path / str(number), caplog)
    ]
    assert silent == []


def serve(strike: Strike, folder: Path) -> bool:
    """A tenant trains and samples. Returns whether all went well; its calls return, or this test fails by its time."""
    folder.mkdir()
    with closing(Service(folder, f"sqlite:///{folder}/service.sqlite")) as service:
        service.in_front(lambda: asyncio.get_running_loop().set_task_factory(strike))
        created = service.post("create_model", {**MODEL, "session_id": service.session()})
        model = service.result(created).get("model_id")
        if model is None:
            return False
        answers = [service.result(service.train(model, 1, [1, 2, 3]))]
        answers.append(service.result(service.step(model, 2)))
        return not any("error" in one for one in answers)


def test_an_unforeseen_failure_in_the_background_of_the_service_fails_the_request(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    calm = Strike()
    assert serve(calm, tmp_path / "calm")
    assert len(calm.seen) >= 3, calm.seen
    silent = []
    for number, site in enumerate(sorted(calm.seen)):
        caplog.clear()
        told: list[BaseException] = []
        try:
            went_well = serve(Strike(site), tmp_path / str(number))
        except RuntimeError as error:  # of a call that awaits it
            told, went_well = [error], False
        if went_well or not is_heard(told, caplog):
            silent.append(site)
    assert silent == []
