"""A machine that samples for a service, with its models and its engine, and the learner's process with a model on disk
are failed, delayed, killed and closed at any moment, as `test_service_closing.py` does it with stand-ins: everything
ends, somebody hears of each fault, and what a learner has answered is what it would have answered undisturbed.

More seeds than `make test-all` tries:

    PYTHONPATH=src:tests:tests/unit python -c "import test_service_closing_models as t; t.search_all(range(1000))"
"""

from __future__ import annotations

import asyncio
import atexit
import json
import os
import random
import signal
import tempfile
from array import array
from collections.abc import Iterable
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from echo2.config.sections import LoraConfig
from echo2.core.errors import Echo2Error, InvariantError, UserError
from echo2.learner.core.adapters import load_base
from echo2.transport.grpc_server import GrpcServer
from echo2.weights.broadcast.distribution import Distribution
from echo2.weights.broadcast.peer import PeerNode
from echo2.worker.worker_process import WorkerOptions
from echo2_service.backend import (
    AdamSettings,
    Answer,
    CreateModelCall,
    ForwardBackwardCall,
    ModelCall,
    ModelSpec,
    OptimStepCall,
    SampleOutput,
    SampleSpec,
    UnloadCall,
)
from echo2_service.calling import AnsweringProcess
from echo2_service.fleet.machines import JoinedMachine, Samplers
from echo2_service.fleet.server import FleetServer
from echo2_service.learner import journal
from echo2_service.learner import models as models_module
from echo2_service.learner.tenants import Tenants
from echo2_service.sampler.machine import join
from echo2_service.sampler.sample_calls import BaseSampler
from echo2_service.settings import FleetSettings
from learner_cases import model_directory
from random_faults import WORDS, Faults, is_heard
from real_runs import free_port
from service_cases import some_data
from test_service_closing import Own, Told, begin_polling, children, directory, quick
from test_service_learner import Client
from thread_orders import search


@pytest.fixture(scope="module", autouse=True)
def begun() -> None:
    asyncio.run(begin_polling())
    models(), undisturbed()  # what libraries start once for all is not a scenario's


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    quick(monkeypatch)


@cache
def models() -> tuple[str, Path]:
    """The directories of a base model and of a published adapter, for this process."""
    folder = tempfile.TemporaryDirectory()
    atexit.register(folder.cleanup)
    base = str(model_directory(Path(folder.name) / "base"))
    tenants = Tenants(load_base(base, "cpu"))
    tenants.add("m", LoraConfig(rank=2), 0)
    tenants.publish("m", Path(folder.name) / "adapter")
    return base, Path(folder.name) / "adapter"


class Watched(Samplers):
    """`first` is set when a machine has joined."""

    def __init__(self, own: AnsweringProcess) -> None:
        super().__init__(own)
        self.first = asyncio.Event()

    def joined(self, name: str, slots: int, machine: JoinedMachine) -> None:
        super().joined(name, slots, machine)
        self.first.set()


def machine(draw: random.Random) -> None:
    """Machines join a service, fetch a model and an adapter, sample, and end; or the service ends before them."""
    faults, raised, (base, adapter) = Faults(draw), list[BaseException](), models()

    async def use(path: Path) -> None:
        asyncio.get_running_loop().set_task_factory(faults)
        samplers = Watched(Own())  # type: ignore[arg-type]
        server = FleetServer(path / "out", FleetSettings(f"127.0.0.1:{free_port()}"), {"tiny": base}, samplers)
        try:
            await server.open()
        except UserError:  # the port is another's by now
            await server.close()
            return
        ticket = (path / "out" / "ticket").read_text()
        options = WorkerOptions(device="cpu", patience_seconds=0.05, listen="127.0.0.1:0", slots=4)
        joined = [
            asyncio.ensure_future(join(ticket, path / f"machine-{number}", options))
            for number in range(draw.randrange(1, 3))
        ]
        here = asyncio.ensure_future(samplers.first.wait())
        if draw.random() < 0.9:
            await asyncio.wait([here, *joined], return_when=asyncio.FIRST_COMPLETED)
        here.cancel()
        calls = [
            asyncio.ensure_future(samplers.sample("tiny", draw.choice((None, adapter)), a_call(draw)))
            for _ in range(draw.randrange(5))
        ]
        if draw.random() < 0.5 and calls:
            await asyncio.wait(calls, timeout=draw.random())
        for _ in range(draw.randrange(60)):
            await asyncio.sleep(0)
        ends = [end_service(server, calls, raised), *(end_machine(one) for one in joined)]
        for end in draw.sample(ends, len(ends)):
            await end
        for one in await asyncio.gather(*joined, *calls, return_exceptions=True):
            raised.extend([one] if isinstance(one, BaseException) else [])
            expected = isinstance(one, SampleOutput | Echo2Error | asyncio.CancelledError)
            assert expected or is_heard([one] if isinstance(one, BaseException) else []), repr(one)
        assert not server._machines

    closes = [(GrpcServer, "stop"), (Distribution, "close"), (JoinedMachine, "lose")]
    closes += [(PeerNode, "close"), (BaseSampler, "close")]
    with directory() as path, Told() as told, faults.in_calls(closes, before=False):
        asyncio.run(asyncio.wait_for(use(path), 60.0))
    assert not faults.made or is_heard([*raised, *told.errors]), faults.made


def a_call(draw: random.Random) -> SampleSpec:
    prompt = array("i", [draw.randrange(2, 20) for _ in range(draw.randrange(1, 9))])
    stop = draw.choice(((), ("ab",)))
    return SampleSpec(prompt, 2, draw.randrange(1, 20), stop_strings=stop, prompt_logprobs=True, owner="ada")


async def end_service(server: FleetServer, calls: Iterable[asyncio.Future[Any]], raised: list[BaseException]) -> None:
    """The service ends."""
    for call in calls:  # as the front does, which is closed first
        call.cancel()
    try:
        await server.close()
    except OSError as error:
        raised.append(error)


async def end_machine(machine: asyncio.Future[Any]) -> None:
    """The machine's owner ends it."""
    machine.cancel()
    with suppress(BaseException):
        await machine


ADAM, MODEL = AdamSettings(1e-2), CreateModelCall("m", ModelSpec("tiny", rank=2))
#: What a learner does on its disk.
WRITES = [(os, "replace"), (os, "fsync"), (journal, "append_whole"), (Path, "mkdir"), (Path, "replace")]
#: Tries of one call: a third of its writes fail in one seed of three.
TRIES_MAX = 300


def operation(number: int) -> ModelCall:
    """The operation of this number, whoever asks for it."""
    if number % 3 == 0:
        return OptimStepCall("m", number, ADAM)
    return ForwardBackwardCall("m", number, some_data(f"{number}"), "cross_entropy", {})


def number_in(answer: Answer) -> float:
    if answer.trained is not None:
        return answer.trained.metrics["loss:sum"]
    assert answer.metrics is not None, answer
    return answer.metrics["grad_norm"]


@cache
def undisturbed() -> list[float]:
    """What the operations 1 to 14 answer."""
    with directory() as path:
        client = Client(path)
        client.call(MODEL)
        found = [number_in(client.call(operation(number))) for number in range(1, 15)]
        client.models.close()
        return found


def models_on_disk(draw: random.Random) -> None:
    """A model is trained, unloaded and loaded while the disk fails: its numbers are those of an undisturbed one."""
    faults, expected = Faults(draw), undisturbed()
    calls = [*WRITES, (Path, "open")] if faults.share < 0.1 else WRITES  # a model is loaded by a dozen reads in a row

    def call(what: ModelCall) -> Answer:
        for _ in range(TRIES_MAX):
            with faults.in_calls(calls, before=True), suppress(UserError, OSError):
                return client.call(what)
        raise AssertionError(f"{TRIES_MAX} tries of {what}")

    with directory() as path, pytest.MonkeyPatch.context() as patch:
        patch.setattr(models_module, "REDO_SECONDS", draw.choice((0.0, 1000.0)))  # a checkpoint each time, or none
        client = Client(path)
        call(MODEL)
        for number in range(1, 1 + draw.randrange(4, 15)):
            if draw.random() < 0.2:
                client.restart()
            if draw.random() < 0.2:
                call(UnloadCall("m"))
            again = draw.randrange(1, number + 1) if draw.random() < 0.2 else number  # its answer was lost
            for each in {again, number}:
                assert number_in(call(operation(each))) == expected[each - 1], each
        client.models.close()


def learner(draw: random.Random) -> None:
    """The learner's process is called, given up, killed and closed while its disk and the link to it fail: what it has
    answered at last is what it would have answered undisturbed, and so is what the next process answers."""
    faults, others, expected, (base, _) = Faults(draw), children(), undisturbed(), models()

    def started(path: Path, module: str) -> AnsweringProcess:
        settings = {"bases": {"tiny": base}, "root": f"{path}/models", "device": "cpu", "seed": draw.random()}
        return AnsweringProcess(module, json.dumps(settings), path / "learner.log")

    async def answer(process: AnsweringProcess, what: ModelCall) -> Answer:
        for _ in range(TRIES_MAX):
            with suppress(UserError, InvariantError):  # the disk, or too many deaths
                return await process.call(what)
        raise AssertionError(f"{TRIES_MAX} tries of {what}")

    async def use(path: Path) -> None:
        asyncio.get_running_loop().set_task_factory(faults)
        process, deaths_left = started(path, "faulty_learner"), draw.randrange(3)
        await answer(process, MODEL)
        last = draw.randrange(1, 15)
        for number in range(1, 1 + last):
            if draw.random() < 0.2 and deaths_left and process.process_id is not None:
                deaths_left -= 1
                os.kill(process.process_id, signal.SIGKILL)
            if draw.random() < 0.2:
                given_up = asyncio.ensure_future(process.call(operation(number)))
                for _ in range(draw.randrange(9)):
                    await asyncio.sleep(0)
                given_up.cancel()
                await asyncio.gather(given_up, return_exceptions=True)
            assert number_in(await answer(process, operation(number))) == expected[number - 1], number
        late = asyncio.ensure_future(process.call(UnloadCall("m")))
        for _ in range(draw.randrange(9)):
            await asyncio.sleep(0)
        await process.close()
        (outcome,) = await asyncio.gather(late, return_exceptions=True)
        assert isinstance(outcome, Answer | Echo2Error | asyncio.CancelledError), outcome
        process = started(path, "echo2_service.learner.call_queue")
        for number in (last, *range(last + 1, 15)):
            assert number_in(await answer(process, operation(number))) == expected[number - 1], number
        await process.close()

    with directory() as path, Told() as told:
        asyncio.run(asyncio.wait_for(use(path), 600.0))
        assert not children() - others
    assert not faults.made or is_heard(told.errors), faults.made


#: With seeds for every run of the tests, and for the slow part: a learner's process takes seconds to start.
SCENARIOS = {
    machine: ((0, 1, 2, 150), range(3, 103)),  # 150: Ctrl-C while it ends for a fault
    models_on_disk: (range(4), range(4, 104)),
    learner: (range(1), range(1, 16)),
}


def look(scenario: Any, seeds: Iterable[int]) -> None:
    """Run a scenario with these seeds. Raises AssertionError at the first that fails."""
    if scenario is machine:
        search(scenario, seeds, foreseen=WORDS)
        return
    for seed in seeds:  # one thread; a process, whose start takes longer than a scenario may in `search`
        try:
            scenario(random.Random(seed))
        except Exception as error:
            raise AssertionError(f"seed {seed} of {scenario.__name__}: {error}") from error


def search_all(these: Iterable[int]) -> None:
    """All scenarios, outside of pytest."""
    patch = pytest.MonkeyPatch()
    quick(patch)
    asyncio.run(begin_polling())
    models(), undisturbed()  # what libraries start once for all is not a scenario's
    for scenario in SCENARIOS:
        look(scenario, these)
        print(scenario.__name__, "held", flush=True)


@pytest.mark.timeout(900)
@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda one: one.__name__)
def test_whatever_fails_with_real_models_everything_ends_and_somebody_hears(scenario: Any) -> None:
    look(scenario, SCENARIOS[scenario][0])


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda one: one.__name__)
def test_the_same_with_more_seeds(scenario: Any) -> None:
    look(scenario, SCENARIOS[scenario][1])
