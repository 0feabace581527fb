"""The service's learner process under SIGKILL."""

from __future__ import annotations

import asyncio
import os
import signal
from array import array
from pathlib import Path

import pytest

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
from learner_cases import model_directory
from service_cases import some_data

pytestmark = pytest.mark.timeout(600)

ADAM = AdamSettings(1e-2)


def test_killed_under_load_the_numbers_are_those_of_an_undisturbed_run(tmp_path: Path) -> None:
    """Two owners' pipelined steps; the learner process is killed with SIGKILL again and again in their midst."""

    async def train(backend: LocalBackend, model: str) -> list[float]:
        await backend.call(CreateModelCall(model, ModelSpec("tiny", owner=model, rank=2)))
        calls = []
        for step in range(8):
            forward = ForwardBackwardCall(model, 2 * step + 1, some_data(f"{step}"), "cross_entropy", {})
            both = forward, OptimStepCall(model, 2 * step + 2, ADAM)
            calls += [asyncio.create_task(backend.call(call)) for call in both]
            if step % 3 == 2:
                await asyncio.gather(*calls)
        return [
            (done.metrics or {})["grad_norm"] if done.trained is None else done.trained.metrics["loss:sum"]
            for done in await asyncio.gather(*calls)
        ]

    async def run() -> None:
        model_directory(tmp_path / "base")
        quiet = LocalBackend({"tiny": str(tmp_path / "base")}, tmp_path / "quiet", "cpu")
        undisturbed = await train(quiet, "a")
        await quiet.close()
        backend = LocalBackend({"tiny": str(tmp_path / "base")}, tmp_path / "killed", "cpu")
        training = [asyncio.create_task(train(backend, model)) for model in ("a", "b")]
        for number in range(2):
            await backend.call(
                CreateModelCall(f"m{number}", ModelSpec("tiny", owner="other", rank=2))
            )  # until it is up
            assert backend.learner.process_id is not None
            os.kill(backend.learner.process_id, signal.SIGKILL)
        found = await asyncio.gather(*training)
        assert (await backend.call(OptimStepCall("a", 1, ADAM))).metrics is None, "operation 1 was another one before"
        await backend.close()
        assert found == [undisturbed, undisturbed]

    asyncio.run(run())


@pytest.mark.slow
def test_a_killed_sampler_answers_what_it_would_have(tmp_path: Path) -> None:
    async def sample(backend: LocalBackend, snapshot: Path) -> list[bytes]:
        specs = [SampleSpec(array("i", [1, 2, 3]), 2, max_tokens=100, seed=seed) for seed in range(20)]
        found = await asyncio.gather(*(backend.sample("tiny", snapshot, spec) for spec in specs))
        return [each.tokens.tobytes() for output in found for each in output.sequences]

    async def run() -> None:
        model_directory(tmp_path / "base")
        backend = LocalBackend({"tiny": str(tmp_path / "base")}, tmp_path / "root", "cpu")
        await backend.call(CreateModelCall("m", ModelSpec("tiny", rank=2)))
        await backend.call(PublishCall("m", 1, str(tmp_path / "snapshot")))
        undisturbed = await sample(backend, tmp_path / "snapshot")
        for _ in range(2):
            sampling = asyncio.create_task(sample(backend, tmp_path / "snapshot"))
            await backend.sample("tiny", None, SampleSpec(array("i", [1]), max_tokens=1))  # until it is up
            assert backend.sampler.process_id is not None
            os.kill(backend.sampler.process_id, signal.SIGKILL)
            assert await sampling == undisturbed
        await backend.close()

    asyncio.run(run())
