"""The service's front, the links to its processes, its fleet, its store and its journals are closed at any moment, in
many orders of the threads (`thread_orders.py`), while what runs in the background, and what closes something, fails or
takes its time (`random_faults.py`): everything ends, and somebody hears of each fault.

More seeds than `make test-all` tries:

    PYTHONPATH=src:tests:tests/unit python -c "import test_service_closing as t; t.search_all(range(1000))"
"""

from __future__ import annotations

import asyncio
import logging
import os
import random
import socket
import subprocess
import sys
import tempfile
from array import array
from collections.abc import Iterable, Iterator
from contextlib import aclosing, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest
from grpc.aio import init_grpc_aio
from sqlalchemy.exc import OperationalError

import answering_child
from echo2.core.errors import InvariantError, UserError
from echo2.transport import wire_pb2 as wire
from echo2.transport.base import Peer
from echo2.transport.grpc_server import GrpcServer
from echo2.transport.identity import PeerIdentity, RunIdentity
from echo2.transport.limits import PROTOCOL_VERSION
from echo2.transport.tickets import Ticket
from echo2.weights.broadcast.distribution import Distribution
from echo2_service.backend import AdamSettings, Answer, JournalRecord, OptimStepCall, SampleSpec, TextCall
from echo2_service.calling import AnsweringProcess
from echo2_service.fleet.machines import JoinedMachine, Samplers
from echo2_service.fleet.server import FleetServer
from echo2_service.front import dispatch
from echo2_service.front.body_reader import BodyReader
from echo2_service.front.chat_api import ChatApi
from echo2_service.front.database import OPEN, Database, requests
from echo2_service.front.dispatch import Dispatcher
from echo2_service.learner import journal
from echo2_service.learner.journal import Journal
from echo2_service.settings import FleetSettings
from front_service import Service
from model_cases import model_directory
from random_faults import WORDS, Faults, is_heard
from real_runs import free_port
from thread_orders import at_once, search

FEW, MANY = range(3), range(3, 103)


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    quick(monkeypatch)


def quick(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(dispatch, "AGAIN_SECONDS", 0.001)
    patch.setenv("PYTHONPATH", os.pathsep.join([str(Path(answering_child.__file__).parent), *filter(None, sys.path)]))


@contextmanager
def directory() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as path:
        yield Path(path)


@pytest.fixture(scope="module", autouse=True)
def polling() -> None:
    asyncio.run(begin_polling())


async def begin_polling() -> None:
    """Start gRPC's own thread, which all of its objects of a process share. It asks for the running loop."""
    init_grpc_aio()


def children() -> set[psutil.Process]:
    return {one for one in psutil.Process().children(recursive=True) if one.status() != psutil.STATUS_ZOMBIE}


class Told(logging.Handler):
    """What was logged."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.errors: list[BaseException] = []

    def emit(self, record: logging.LogRecord) -> None:
        if record.exc_info and record.exc_info[1] is not None:
            self.errors.append(record.exc_info[1])
        self.errors.append(RuntimeError(record.getMessage()))

    def __enter__(self) -> Told:
        logging.getLogger().addHandler(self)
        return self

    def __exit__(self, *_: object) -> None:
        logging.getLogger().removeHandler(self)


def front(draw: random.Random) -> None:
    """Tenants train, sample, give up and are swept, and the service ends."""
    faults, raised, handlers = Faults(draw), list[BaseException](), [*logging.getLogger().handlers]
    others = children()  # of earlier tests in this process
    closes = [(Dispatcher, "close"), (BodyReader, "close"), (ChatApi, "close")]
    with directory() as path, Told() as told, faults.in_calls(closes, before=False):
        service = Service(path, f"sqlite:///{path}/service.sqlite")
        try:
            service.in_front(lambda: asyncio.get_running_loop().set_task_factory(faults))
            if draw.random() < 0.7:
                service.in_front(store_fails, service.front.database, random.Random(draw.random()))
            asks = partial(ask, service)
            at_once(*[partial(asks, random.Random(draw.random())) for _ in range(draw.randrange(1, 4))])
            if draw.random() < 0.5:
                with suppress(OSError):
                    service.sweep()
            if draw.random() < 0.7:
                # A request whose failure cannot be stored, either, stays open, and the log says so.
                service.until(lambda: all_ended(service) or any("stays open" in str(one) for one in told.errors))
        except BaseException as error:
            raised.append(error)
        for close in (service.end, service.database.close):
            try:
                close()
            except BaseException as error:
                raised.append(error)
        assert not children() - others
        assert faults.done >= {"Dispatcher.close", "BodyReader.close", "ChatApi.close"}
        assert logging.getLogger().handlers == [*handlers, told]
    assert not faults.made or is_heard([*raised, *told.errors]), faults.made
    for error in raised:
        if not is_heard([error]):
            raise error


def all_ended(service: Service) -> bool:
    return service.front.database.find(requests, columns=["id"], state=OPEN) is None


def store_fails(database: Database, draw: random.Random) -> None:
    """From now on the store can't be reached at times."""
    begin = database._engine.begin

    def at_times() -> Any:
        if draw.random() < 0.05:
            raise OperationalError(WORDS, {}, RuntimeError(WORDS))
        return begin()

    database._engine.begin = at_times  # type: ignore[method-assign]


def ask(service: Service, draw: random.Random) -> None:
    """A tenant of one model; whatever fails is tried no more."""

    def post(name: str, body: dict[str, Any]) -> Any:
        answer = service.client.post(f"/api/v1/{name}", headers={"x-api-key": service.key}, json=body)
        return answer.json() if answer.status_code == 200 else None

    made = post("create_session", {"tags": [], "sdk_version": "0.38.0"})
    if made is None:
        return
    session = made["session_id"]
    body = {"session_id": session, "model_seq_id": 0, "base_model": "echo2/tiny", "lora_config": {"rank": 4}}
    if (future := post("create_model", body)) is None:
        return
    outcome = post("retrieve_future", {"request_id": future["request_id"]})
    if outcome is None or "model_id" not in outcome:
        return
    for number in range(1, 1 + draw.randrange(4)):
        step = {"model_id": outcome["model_id"], "seq_id": number, "adam_params": {"learning_rate": 0.1}}
        post("optim_step", step)
    if draw.random() < 0.5:
        prompt = {"chunks": [{"type": "encoded_text", "tokens": [1, 2]}]}
        asked = {"base_model": "echo2/tiny", "prompt": prompt, "num_samples": 1, "sampling_params": {"max_tokens": 2}}
        post("asample", {**asked, "session_id": session})
    if draw.random() < 0.4:
        post(f"sessions/{session}/finish", {})


def link(draw: random.Random) -> None:
    """The link to a process that answers, dies and fails: it is called by several, who may give up, and closed."""
    faults, outcomes, others = Faults(draw), list[Any](), children()

    async def use() -> None:
        asyncio.get_running_loop().set_task_factory(faults)
        process = AnsweringProcess("answering_child", "", path / "child.log")
        words = [draw.choice(("hello", "hello", "fail", "die")) for _ in range(draw.randrange(1, 5))]
        calls = [asyncio.ensure_future(after(draw.randrange(40), process, word)) for word in words]
        if draw.random() < 0.3:
            asyncio.get_running_loop().call_soon(calls[0].cancel)
        if draw.random() < 0.3:
            await asyncio.wait(calls)
        for _ in range(draw.randrange(30)):
            await asyncio.sleep(0)
        await process.close()
        late = asyncio.ensure_future(process.call(TextCall("late", [])))
        outcomes.extend(await asyncio.gather(*calls, late, return_exceptions=True))
        await process.close()

    with directory() as path, Told() as told:
        asyncio.run(asyncio.wait_for(use(), 100.0))
        assert not children() - others
    for outcome in outcomes:
        assert isinstance(outcome, Answer | UserError | InvariantError | asyncio.CancelledError), outcome
    fault = [one for one in outcomes if isinstance(one, BaseException)]
    assert not faults.made or is_heard([*told.errors, *fault]), faults.made


async def after(moments: int, process: AnsweringProcess, word: str) -> Answer:
    for _ in range(moments):
        await asyncio.sleep(0)
    return await process.call(TextCall(word, []))


def member(path: Path, identity: RunIdentity, number: int) -> str:
    """The id of a machine of the owner."""
    ticket = Ticket.parse(identity.make_ticket("sampler", "127.0.0.1:1", 1, 1.0, is_own=True))
    return identity.enrol(ticket.ticket_id, "sampler", PeerIdentity(path / f"machine-{number}").request())[0]


class Own:
    """The sampler beside the service."""

    async def call(self, call: Any) -> Answer:
        raise UserError("not here")


def fleet(draw: random.Random) -> None:
    """Machines attend, are asked, leave and are lost, and the fleet is closed."""
    faults, raised = Faults(draw), list[BaseException]()

    async def attend(server: FleetServer, peer: Peer, moments: int) -> None:
        hello = wire.WorkerHello(protocol=PROTOCOL_VERSION, slots=4, engine="compact", device="cpu", host="here")
        async with aclosing(server._attend(peer, hello)) as orders:  # type: ignore[type-var]
            async for _ in orders:
                moments -= 1
                if moments < 0:
                    return

    async def use(path: Path) -> None:
        asyncio.get_running_loop().set_task_factory(faults)
        base = str(model_directory(path / "base"))
        samplers = Samplers(Own())  # type: ignore[arg-type]
        server = FleetServer(path / "out", FleetSettings(f"127.0.0.1:{free_port()}"), {"tiny": base}, samplers)
        try:
            await server.open()
        except UserError:  # the port is another's by now
            await server.close()
            return
        peers = [Peer(member(path, server._identity, number), "sampler") for number in range(draw.randrange(3))]
        attending = [asyncio.ensure_future(attend(server, peer, draw.randrange(9))) for peer in peers]
        spec = SampleSpec(array("i", [3, 4]), max_tokens=2, owner="ada")
        calls = [asyncio.ensure_future(samplers.sample("tiny", None, spec)) for _ in range(draw.randrange(4))]
        for _ in range(1 + draw.randrange(60)):  # they attend by now
            await asyncio.sleep(0)
        for call in calls:  # as the front does, which is closed first
            call.cancel()
        try:
            await server.close()
        except OSError as error:
            raised.append(error)
        for one in await asyncio.gather(*attending, *calls, return_exceptions=True):
            raised.extend([one] if isinstance(one, BaseException) else [])
            assert one is None or isinstance(one, UserError | asyncio.CancelledError) or is_heard([one]), repr(one)
        with socket.socket() as taken:  # nobody listens any more
            taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            taken.bind(server._settings.address)
        assert not server._machines
        is_struck = any(name.endswith("Server._stop") for name in faults.made)  # within its stop, which is heard
        assert faults.done >= {"Distribution.close"} | (set() if is_struck else {"GrpcServer.stop"})

    closes = [(GrpcServer, "stop"), (Distribution, "close"), (JoinedMachine, "lose")]
    with directory() as path, Told() as told, faults.in_calls(closes, before=False):
        asyncio.run(asyncio.wait_for(use(path), 100.0))
    assert not faults.made or is_heard([*raised, *told.errors]), faults.made


def opened(path: Path) -> Journal:
    """The journal, as soon as it can be read."""
    while True:
        with suppress(OSError):
            return Journal(path)


def journals(draw: random.Random) -> None:
    """Operations are recorded and covered by checkpoints while the disk fails: none that was answered is lost."""
    faults, step, told = Faults(draw), OptimStepCall("model", 0, AdamSettings(0.1)), 0
    writes = [(os, "replace"), (journal, "append_whole"), (journal, "frame"), (Path, "open")]
    with directory() as path, faults.in_calls(writes, before=True):
        made, saved = opened(path / "journal"), 0
        for _ in range(draw.randrange(40)):
            if draw.random() < 0.2:
                saved = told
                with suppress(OSError):
                    made.cover()
            elif draw.random() < 0.1:
                made.close()
                made = opened(path / "journal")
                assert [one.operation for one in made.take_to_redo(saved)] == [*range(saved + 1, told + 1)]
            with suppress(UserError, OSError):
                made.append(JournalRecord(told + 1, step, Answer(metrics={"grad_norm": float(told + 1)})))
                told += 1
        made.close()
        made = opened(path / "journal")
        assert made.last_operation == told
        for operation in range(max(1, told - 20), told + 1):
            answer = made.answer(operation)
            assert answer == Answer(metrics={"grad_norm": float(operation)})
        made.close()


def search_all(these: Iterable[int]) -> None:
    """All scenarios, outside of pytest."""
    patch = pytest.MonkeyPatch()
    quick(patch)
    asyncio.run(begin_polling())
    for scenario in SCENARIOS:
        search(scenario, these, foreseen=WORDS)
        print(scenario.__name__, "held", flush=True)
    patch.undo()


SCENARIOS = [front, link, fleet, journals]


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda one: one.__name__)
def test_whatever_fails_or_dawdles_everything_ends_and_somebody_hears(scenario: Any) -> None:
    search(scenario, FEW, foreseen=WORDS)


@pytest.mark.slow
@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda one: one.__name__)
def test_the_same_with_more_seeds(scenario: Any) -> None:
    search(scenario, MANY, foreseen=WORDS)


def test_a_learner_that_cannot_read_a_request_ends() -> None:
    """The thread that reads them is not the one that works: that would wait for the next request for ever."""
    code = "import io; from echo2.core.frames import frame; from echo2_service.learner.call_queue import _receive; "
    code += "_receive(io.BytesIO(frame(b'no request')), print)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=200)
    assert (done.returncode, "a request can't be read" in done.stderr) == (1, True), done
