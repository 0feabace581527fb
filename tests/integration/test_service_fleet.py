"""Samples of a service on machines that joined by ticket: real processes, killed under load, answer as one does."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from array import array
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from echo2.core.errors import UserError
from echo2_service.backend import (
    AdamSettings,
    CreateModelCall,
    ForwardBackwardCall,
    ModelSpec,
    OptimStepCall,
    PublishCall,
    SampleSpec,
)
from echo2_service.fleet.machines import LocalBackend
from echo2_service.fleet.server import FleetServer
from echo2_service.settings import FleetSettings
from learner_cases import model_directory
from real_runs import free_port
from service_cases import some_data

pytestmark = pytest.mark.timeout(600)


class Service:
    """A back end with a door for machines, and the machines as real processes."""

    def __init__(self, root: Path) -> None:
        self.root = root
        if not (root / "base").exists():
            model_directory(root / "base")
        self.settings = FleetSettings(f"127.0.0.1:{free_port()}")
        self.machines: dict[str, subprocess.Popen[bytes]] = {}
        self.open()

    def open(self) -> None:
        base = str(self.root / "base")
        self.backend = LocalBackend({"tiny": base}, self.root / "backend", "cpu")
        self.door = FleetServer(self.root / "out", self.settings, {"tiny": base}, self.backend.samplers)

    async def close(self) -> None:
        await self.door.close()
        await self.backend.close()

    def start_machine(self, name: str, *options: str) -> None:
        state = ["--state", str(self.root / name), "--device", "cpu", *options]
        command = [sys.executable, "-m", "echo2", "worker", f"@{self.root / 'out' / 'ticket'}", *state]
        with (self.root / f"{name}.log").open("ab") as log_file:
            self.machines[name] = subprocess.Popen(
                ["sh", "-c", 'trap "" INT; exec "$@"', "sh", *command], stderr=log_file, stdout=log_file
            )  # as from a script with "&": it hears SIGTERM alone

    def end_machines(self) -> None:
        for machine in self.machines.values():
            machine.kill()
            machine.wait()

    def logs(self) -> str:
        return "\n".join((self.root / f"{name}.log").read_text() for name in self.machines)


async def with_a_service(root: Path, check: Callable[[Service], Awaitable[None]]) -> None:
    service = Service(root)
    try:
        await check(service)
    finally:
        await service.close()
        service.end_machines()


async def until(is_true: Callable[[], bool], service: Service) -> None:
    for _ in range(1200):
        if is_true():
            return
        assert all(machine.poll() in (None, 0, -9) for machine in service.machines.values()), service.logs()
        await asyncio.sleep(0.1)
    raise AssertionError(f"not within two minutes\n{service.logs()}")


async def sample(backend: LocalBackend, snapshot: Path | None, num_calls: int = 30, length: int = 60) -> list[bytes]:
    specs = [SampleSpec(array("i", [1, 2, 3]), 2, length, seed=seed, owner=f"{seed % 3}") for seed in range(num_calls)]
    found = await asyncio.gather(*(backend.sample("tiny", snapshot, spec) for spec in specs))
    return [each.tokens.tobytes() for output in found for each in output.sequences]


async def sample_until(is_over: asyncio.Event, backend: LocalBackend, snapshot: Path) -> list[list[bytes]]:
    """The same again and again, since a fast machine is done with it before one looks."""
    found = []
    while not is_over.is_set():
        found.append(await sample(backend, snapshot, 200))
    return found


async def train_and_publish(backend: LocalBackend, directory: Path) -> None:
    await backend.call(CreateModelCall("m", ModelSpec("tiny", rank=2)))
    await backend.call(ForwardBackwardCall("m", 1, some_data("x"), "cross_entropy", {}))
    await backend.call(OptimStepCall("m", 2, AdamSettings(0.1)))
    await backend.call(PublishCall("m", 3, str(directory)))


def test_a_fleet_answers_as_one_process_does_whatever_is_killed(tmp_path: Path) -> None:
    async def check(service: Service) -> None:
        backend, adapter = service.backend, tmp_path / "adapter"
        await train_and_publish(backend, adapter)
        alone = await sample(backend, adapter), await sample(backend, None)
        assert alone[0] != alone[1]
        await service.door.open()
        service.start_machine("a")
        service.start_machine("b", "--base", str(tmp_path / "base"))
        await until(lambda: len(service.door.status()["machines"]) == 2, service)
        assert (await sample(backend, adapter), await sample(backend, None)) == alone
        done = [machine["sampled"] for machine in service.door.status()["machines"].values()]
        assert min(done) > 0, "one machine had nothing to do"
        assert sum(done) == 2 * 2 * 30, "this machine's own process had a share, though the fleet had room"
        is_killed = asyncio.Event()
        under_load = asyncio.create_task(sample_until(is_killed, backend, adapter))
        await until(lambda: any(each["under_way"] for each in service.door.status()["machines"].values()), service)
        service.machines["a"].kill()
        service.machines["a"].wait()
        is_killed.set()
        again = await sample(backend, adapter, 200)
        assert all(found == again for found in await under_load)
        await until(lambda: len(service.door.status()["machines"]) == 1, service)
        service.start_machine("a")  # the same machine: it is known by its key, and has the weights
        await until(lambda: len(service.door.status()["machines"]) == 2, service)
        assert await sample(backend, adapter, 200) == again
        service.machines["b"].terminate()
        assert await asyncio.to_thread(service.machines["b"].wait) == 0
        await until(lambda: len(service.door.status()["machines"]) == 1, service)
        await service.close()
        service.open()  # the service is started again: the machine comes back by itself
        await service.door.open()
        await until(lambda: len(service.door.status()["machines"]) == 1, service)
        assert await sample(service.backend, adapter, 200) == again

    asyncio.run(with_a_service(tmp_path, check))


@pytest.mark.slow
def test_a_tenants_mistakes_raise_errors_and_tickets_of_others_are_refused(tmp_path: Path) -> None:
    async def check(service: Service) -> None:
        await service.door.open()
        service.start_machine("a")
        await until(lambda: len(service.door.status()["machines"]) == 1, service)
        with pytest.raises(UserError, match="num_samples"):
            await service.backend.sample("tiny", None, SampleSpec(array("i", [1]), 0))
        with pytest.raises(UserError, match="nothing"):
            await service.backend.sample("tiny", tmp_path / "nothing", SampleSpec(array("i", [1])))
        assert len(service.door.status()["machines"]) == 1
        service.start_machine("b", "--engine", "vllm")
        assert await asyncio.to_thread(service.machines["b"].wait) == 2
        assert "A service samples with the engine compact" in service.logs()

    asyncio.run(with_a_service(tmp_path, check))
