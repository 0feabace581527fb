"""Objects that several threads use are closed at any moment, in many orders of the threads (`thread_orders.py`).

More orders than `make test-all` tries:

    PYTHONPATH=src:tests:tests/unit python -c "import test_closing as t; t.search(t.SCENARIOS[0], range(1000))"
"""

from __future__ import annotations

import asyncio
import logging
import random
import tempfile
from array import array
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping
from concurrent.futures import CancelledError
from contextlib import aclosing, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import code_handler
import test_learner_sending as sending
from broadcast_fleet import Fleet, content
from echo2.config import Config
from echo2.core.errors import Echo2Error, LinkError, UserError
from echo2.core.loop_thread import LoopThread
from echo2.core.types import RUN_POLICY, GroupRef, StoredTensor, TensorBytes
from echo2.engines.decode_loop import DecodeLoop
from echo2.engines.engine import Completion, Engine, SampleRequest
from echo2.engines.fake_engine import FakeDecoder
from echo2.engines.servers.engine import ServerEngine
from echo2.engines.servers.models import ServedModel
from echo2.head.ledger.metrics import Copy, Sink
from echo2.head.serve.reading import TaskReader
from echo2.learner.core.publication import BorrowedWeights, Publisher
from echo2.learner.link.head_client import LearnerInfo
from echo2.learner.link.session import HeadSession
from echo2.sandbox.code_process import CodeFailure, CodeProcess
from echo2.tasks.base import TaskStream
from echo2.transport import wire_pb2 as wire
from echo2.trl import RolloutFleet
from echo2.weights.format import segments
from echo2.weights.store.archive import Archive
from echo2.weights.store.store import ChunkStore
from test_engines_servers import request, snapshot
from test_trl import ROWS, trainer_arguments
from thread_orders import at_once, in_loop, search

log = logging.getLogger(__name__)

FEW, MANY = range(4), range(4, 224)


@pytest.fixture(autouse=True)
def small_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(segments, "SEGMENT_BYTES", 16 << 10)
    monkeypatch.setenv("PYTHONPATH", str(Path(code_handler.__file__).parent))


@contextmanager
def directory() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as path:
        yield Path(path)


def lent(version: int) -> BorrowedWeights:
    data = np.random.default_rng(7).integers(0, 1 << 16, 40_000).astype(np.uint16) + np.uint16(version)
    return BorrowedWeights({"w": TensorBytes("BF16", (40_000,), data.tobytes())}, sending.FILES)


def shuffled(draw: random.Random, *actions: Callable[[], object]) -> list[Callable[[], object]]:
    return draw.sample(actions, len(actions))


def ranks(draw: random.Random) -> None:
    """A learner of three ranks leaves, in any order, and with publications under way. A publication that needs a rank
    which has left says so."""
    with directory() as path:
        made = sending.Learner(sending.Head(), path)
        num_before = draw.randrange(3)
        for version in range(num_before):
            made.publish(version, lambda _, version=version: lent(version))  # type: ignore[misc]
        if are_here := draw.random() < 0.5:
            made.session.finish_publishing()
        leave_at_once = draw.random() < 0.5

        def lead() -> None:
            try:
                if num_before and are_here and leave_at_once:
                    made.session.publish(5, lent(5))
                    with pytest.raises(RuntimeError, match=r"rank \d is gone"):
                        made.session.finish_publishing()
            finally:
                made.session.close()

        def follow(sender: Any) -> None:
            for version in range(7, 7 + draw.randrange(3)):
                sender.lend(version, lent(version))
            sender.close()

        follows = [lambda sender=sender: follow(sender) for sender in made.senders]  # type: ignore[misc]
        closings = shuffled(draw, lead, *follows)
        if leave_at_once:
            at_once(*closings)
        else:
            for close in closings:
                close()


class FlakyLink(sending.HeadLink):
    """A link to a head that says that the run is over, or is away, when the seed says so."""

    def __init__(self, head: sending.Head, draw: random.Random, fails_hello: bool) -> None:
        super().__init__(head, 0)
        self._fails_hello, self._stops, self.is_closed = fails_hello, draw.random() < 0.3, False

    async def stream(self, method: str, request: Any) -> AsyncIterator[Any]:
        if self._fails_hello:
            raise LinkError("the head is away")
        if method == "TakeGroups":
            yield wire.FedGroups(done=wire.StepDone())
            return
        async with aclosing(super().stream(method, request)) as welcomes:
            async for welcome in welcomes:
                yield welcome
                if self._stops:
                    yield wire.LearnerWelcome(stop="the head stops")

    async def call(self, method: str, request: Any, timeout_seconds: float) -> Any:
        if method == "ReportCheckpoint":
            return wire.CheckpointReply()
        return await super().call(method, request, timeout_seconds)

    async def close(self) -> None:
        self.is_closed = True


def session(draw: random.Random) -> None:
    """A learner that trains, is told to stop by a signal and by its head, and leaves. A head that is away at the start
    is an error; every link is closed."""
    with directory() as path:
        link, publisher = FlakyLink(sending.Head(), draw, draw.random() < 0.2), Publisher(path)

        async def connect() -> Any:
            return link

        try:
            made = HeadSession(connect, 0, LearnerInfo("cpu", 8), publisher, 0.0)
        except LinkError:
            assert link.is_closed
            return
        lendings: list[BorrowedWeights] = []

        def train() -> None:
            for step in range(draw.randrange(4)):
                made.want_groups(step)
                if any(item.stop for item in made.groups() if isinstance(item, wire.StepDone)) or made.stop_reason:
                    break
                lendings.append(lent_until_read(step))
                made.publish(step, lendings[-1])
                with suppress(LinkError):  # a session that stops waits for no head
                    made.report_step(step, [], {}, {})
            if draw.random() < 0.3:
                with suppress(LinkError):
                    made.finish_publishing()
            made.close()
            assert all(weights.returned.done() for weights in lendings)
            with pytest.raises(LinkError, match="closed"):
                made.report_checkpoint(1, 1, [])
            made.close()

        at_once(train, *[lambda: made.stop("a signal")] * draw.randrange(3))
        assert link.is_closed


def lent_until_read(version: int) -> BorrowedWeights:
    """Weights that must not be read once they are given back: they may change then."""
    data = lent(version).tensors["w"]

    def read(start: int, stop: int) -> Any:
        if weights.returned.done():
            log.error("weights were given back while they are read")
        return data.read(start, stop)

    weights = BorrowedWeights({"w": StoredTensor(data.dtype, data.shape, data.num_bytes, read)}, sending.FILES)
    return weights


async def _sampled(engine: Engine, draw: random.Random) -> None:
    """Sample until the engine is closed. A request ends as a completion, or is cancelled."""
    for _ in range(draw.randrange(1, 6)):
        try:
            futures = [engine.submit(request(draw.randrange(1, 9), seed)) for seed in range(draw.randrange(1, 4))]
        except UserError:  # the engine is closed
            return
        if draw.random() < 0.2:
            futures[0].cancel()
        if draw.random() < 0.8:
            for future in futures:
                await asyncio.wait([future])
                assert future.cancelled() or isinstance(future.result(), Completion)


def _engine(engine: Engine, draw: random.Random) -> None:
    first = draw.randrange(3)
    if first:
        asyncio.run(engine.update_weights(snapshot(10)))

    async def load() -> None:
        with suppress(UserError):  # the engine is closed
            await engine.update_weights(snapshot(11, 1))

    async def load_after() -> None:
        await engine.update_weights(snapshot(12, 2))

    async def close() -> None:
        await engine.close()
        await engine.close()

    samplers = [in_loop(partial(_sampled, engine, random.Random(draw.random()))) for _ in range(first)]
    at_once(in_loop(close), in_loop(load), *samplers)
    with pytest.raises(UserError, match="closed"):
        in_loop(load_after)()
    assert engine.free_slots == engine.slots


def decode_loop(draw: random.Random) -> None:
    """An engine in this process; requests come from several event loops."""
    _engine(DecodeLoop(FakeDecoder(), draw.randrange(1, 4)), draw)


class Server:
    """A token server. One that is stopped runs nothing; one that runs at the end was forgotten."""

    unties = False

    def __init__(self, draw: random.Random) -> None:
        self._draw, self.is_running = draw, False

    async def _work(self) -> None:
        for _ in range(self._draw.randrange(4)):
            await asyncio.sleep(0)

    async def start(self, model: ServedModel) -> int:
        await self._work()
        self.is_running = True
        await self._work()
        return 100

    async def load(self, model: ServedModel) -> float:
        await self._work()
        return 0.0

    async def check(self, model: ServedModel) -> None:
        await self._work()

    async def sample(self, request: SampleRequest, model: ServedModel, versions: dict[str, int]) -> Completion:
        await self._work()
        return Completion(array("i", [4]), array("f", [-0.5]), ((0, 0),), "length")

    async def stop(self) -> None:
        await self._work()
        self.is_running = False


def token_server(draw: random.Random) -> None:
    """An engine over a token server: started, loaded, sampled from and closed at once."""
    server = Server(draw)
    with directory() as path:
        _engine(ServerEngine(server, 8, path if draw.random() < 0.5 else None), draw)
    assert not server.is_running


def fleet_for_trl(draw: random.Random) -> None:
    """TRL's trainer publishes and ends while steps are handed out in another thread; its head may end the run."""
    with directory() as path:
        fleet = RolloutFleet("some/model", ROWS, "exact_match", trainer_arguments(), out=path / "run")
        link = FlakyLink(sending.Head(), draw, fails_hello=False)

        async def connect() -> Any:
            return link

        fleet._rules, fleet._files = Config(), {"config.json": b"{}"}
        fleet._session = HeadSession(connect, 0, LearnerInfo("TRL", 8), Publisher(path), 1.0)
        fleet.start()
        with suppress(Echo2Error):  # the run has ended
            for version in range(draw.randrange(4)):
                fleet.send_weights([("w", torch.full((9_000,), float(version)))])
                fleet.update_model_version(version)
        fleet.destroy()
        fleet.destroy()
        assert link.is_closed


class Rows:
    def __len__(self) -> int:
        return 100

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"prompt": f"row {index}"}


def tasks(draw: random.Random) -> None:
    """Tasks are read for event loops that end, and the reader is closed meanwhile."""
    reader = TaskReader(TaskStream(Rows(), 0, False), None)

    async def read() -> None:
        for cursor in draw.sample(range(90), draw.randrange(4)):
            with suppress(TimeoutError):
                async with asyncio.timeout(draw.choice((0.0, 10.0))):
                    await reader.task(GroupRef(RUN_POLICY, "train", cursor), cursor)

    asyncio.run(read())
    reader.close()
    reader.close()


def metric_copies(draw: random.Random) -> None:
    """Metrics are copied and the copy is closed. Each row that came before is written, in order; none comes after."""
    written: list[int] = []

    class Sheet(Sink):
        def write(self, step: int, values: Mapping[str, Any]) -> None:
            written.append(step)

        def close(self) -> None:
            written.append(-1)

    copy, num = Copy(Sheet()), draw.randrange(9)
    for step in range(num):
        copy.write(step, {})
    at_once(*[copy.close] * draw.randrange(1, 3), *[lambda: copy.write(99, {})] * draw.randrange(2))
    assert [step for step in written if step != 99] == [*range(num), -1]


def broadcast(draw: random.Random) -> None:
    """Workers fetch from the head and from each other, and each leaves at any moment; so does the head."""

    async def leave() -> None:
        with directory() as path:
            fleet = Fleet(path)
            await fleet.start("memory")
            for name in ("a", "b", "c"):
                await fleet.join(name)
            fleet.publish(content(1, num_chunks=8))
            for name in draw.sample(("a", "b", "c"), draw.randrange(4)):
                for _ in range(draw.randrange(30)):
                    await asyncio.sleep(0)
                await fleet.leave(name)
            await fleet.close()

    asyncio.run(leave())


def archive(draw: random.Random) -> None:
    """Snapshots are stored and dropped by calls that are given up, and the archive is closed before its loop."""

    async def use() -> None:
        with directory() as path:
            made, (manifest, chunks) = Archive(ChunkStore(path)), content(1, num_chunks=8)

            async def store() -> None:
                for name in made.offer(manifest.hashes):
                    await made.put(name, bytes(chunks[name]))
                await made.take(manifest)
                await made.drop(manifest.ref)

            works = [asyncio.ensure_future(_after(draw.randrange(9), store)) for _ in range(draw.randrange(1, 4))]
            for _ in range(draw.randrange(40)):
                await asyncio.sleep(0)
            for work in works:
                work.cancel()
            await asyncio.gather(*works, return_exceptions=True)
            await made.close()

    asyncio.run(use())


async def _after(moments: int, work: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
    for _ in range(moments):
        await asyncio.sleep(0)
    return await work()


def code_process(draw: random.Random) -> None:
    """A process of the user's code is started, called, given up and closed at any moment, and leaves no child."""

    async def use() -> None:
        process = CodeProcess("The process of a test", "code_handler:make_handler", {})
        if is_there := draw.random() < 0.5:
            await process.start()
        calls = [
            asyncio.ensure_future(_after(draw.randrange(20), partial(process.call, {"ask": at}, 60.0, "asking")))
            for at in range(draw.randrange(1, 4))
        ]
        if draw.random() < 0.3:
            asyncio.get_running_loop().call_soon(calls[0].cancel)
        await _after(draw.randrange(60 if is_there else 20), process.close)
        for outcome in await asyncio.gather(*calls, return_exceptions=True):
            assert isinstance(outcome, dict | CodeFailure | asyncio.CancelledError), outcome
        assert process.pid is None
        await process.close()

    asyncio.run(use())


def loop_thread(draw: random.Random) -> None:
    """Work is begun, cancelled and awaited from several threads while the loop is closed: every future ends."""
    thread, ends = LoopThread("loop"), list[str]()

    async def work(moments: int) -> int:
        for _ in range(moments):
            await asyncio.sleep(0)
        if moments == 5:
            raise ValueError(moments)
        return moments

    def use(draws: random.Random) -> None:
        for _ in range(draws.randrange(1, 5)):
            moments = draws.randrange(8)
            future = thread.start(work(moments))
            if draws.random() < 0.3:
                future.cancel()
            try:
                assert future.result() == moments
            except (CancelledError, ValueError):
                assert future.cancelled() or moments == 5

    async def leave() -> None:
        ends.append("left")

    users = [partial(use, random.Random(draw.random())) for _ in range(draw.randrange(1, 4))]
    at_once(*[partial(thread.close, leave)] * 2, *users)
    assert ends == ["left"]


SCENARIOS = [
    *(ranks, session, decode_loop, token_server, fleet_for_trl),
    *(tasks, metric_copies, broadcast, archive, code_process, loop_thread),
]


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.__name__)
def test_closing_works_in_a_few_orders(scenario: Callable[[random.Random], None]) -> None:
    search(scenario, FEW)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.__name__)
def test_closing_works_in_many_orders(scenario: Callable[[random.Random], None]) -> None:
    search(scenario, MANY)
