"""A worker at home beside a real run: it hands back when its owner needs the machine, and comes again when not."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from echo2.core.background import awaited
from echo2.worker import joining, worker_process
from echo2.worker.at_home import Measurement
from echo2.worker.decide.home import CALM_SECONDS
from echo2.worker.worker_process import WorkerOptions
from real_runs import Run, run_without_workers

STEP_SECONDS = 0.05


class Machine:
    """What is measured of a machine, on a clock that runs fast."""

    def __init__(self) -> None:
        self.on_battery = False

    async def measurements(self) -> AsyncIterator[Measurement]:
        now = 0.0
        while True:
            yield 0.0, self.on_battery, now
            await asyncio.sleep(STEP_SECONDS)
            now += CALM_SECONDS / 4


def attending(run: Run) -> list[str]:
    workers: list[dict[str, Any]] = run.status().get("workers", [])
    return [entry["id"] for entry in workers if entry["attends"]]


@pytest.mark.slow
def test_a_worker_pauses_for_its_owner_and_returns_as_the_same_worker(
    tmp_path: Path, sort_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = Machine()
    monkeypatch.setattr(worker_process, "measurements", machine.measurements)

    async def scenario(run: Run) -> None:
        async def waited(holds: Callable[[], bool], what: str) -> None:
            await asyncio.to_thread(run.wait, holds, what)

        options = WorkerOptions(at_home=True, device="cpu")
        working = awaited(joining.join((run.out / "ticket").read_text(), tmp_path / "state", options))
        try:
            await waited(lambda: bool(attending(run)), "a worker")
            (worker,) = attending(run)
            await asyncio.to_thread(run.wait_version, 2)
            machine.on_battery = True
            await waited(lambda: not attending(run), "a worker that stepped back")
            version = run.status()["version"]
            machine.on_battery = False
            await waited(lambda: attending(run) == [worker], "the same worker")
            await asyncio.to_thread(run.wait_version, version + 2)
        finally:
            working.cancel()
            await asyncio.wait({working})

    with run_without_workers(tmp_path / "run", sort_model) as (run, _):
        asyncio.run(scenario(run))
    audit = run.command("audit")
    assert audit["lost"] == audit["doubled"] == 0
