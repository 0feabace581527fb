"""What only a GPU can show of turns on it: its memory is free while a learner or an engine is away, and they go on with
the same bits. Skipped where there is none."""

from __future__ import annotations

import asyncio
import random
from array import array
from typing import Any

import pytest
import torch

from echo2.core.types import RUN_POLICY, SamplingParams, Snapshot, SnapshotRef
from echo2.engines.engine import SampleRequest
from echo2.engines.parking import Parked
from echo2.engines.registry import make_engine
from echo2.learner.core.losses import make_loss
from echo2.learner.core.model import Policy
from echo2.learner.core.trainer import AdamParams, Trainer
from echo2.learner.grpo.loop import GrpoLoss
from learner_cases import data_of, random_group, tiny_module

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")

CUDA = torch.device("cuda:0")
#: Left on the GPU: workspaces of libraries, and what the random number generator has there.
LEFT_BYTES = 48 << 20


def large_policy() -> Policy:
    """Of 60 million weights."""
    module: Any = tiny_module(hidden=1024, layers=4, vocab=8192)
    module.config.eos_token_id = None
    files = {"config.json": module.config.to_json_string(use_diff=False).encode()}
    return Policy(module, files, CUDA)


@pytest.mark.parametrize("offloaded", ["", "moments", "moments and gradients"])
def test_a_learner_that_sleeps_frees_the_gpu_and_trains_to_the_same_bits(offloaded: str) -> None:
    def trained(turns: bool) -> list[torch.Tensor]:
        policy, rng, trainer = large_policy(), random.Random(1), Trainer(256)
        trainer.add("it", policy, offloaded=offloaded)
        for step in range(3):
            trainer.forward_backward("it", data_of(random_group(rng, step)), GrpoLoss(make_loss("dppo"), 0.0))
            trainer.optim_step("it", AdamParams(1e-3))
            if turns:
                held = torch.cuda.memory_allocated()
                parked = Parked(CUDA, trainer.tensors())
                assert torch.cuda.memory_reserved() < LEFT_BYTES < held
                parked.fetch()
        return [tensor.cpu() for tensor in policy.module.state_dict().values()]

    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        assert all(torch.equal(one, other) for one, other in zip(trained(True), trained(False), strict=True))
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("name", ["compact", "transformers"])
def test_an_engine_that_sleeps_frees_the_gpu_and_resumes(name: str) -> None:
    policy = large_policy()
    snapshot = Snapshot(SnapshotRef(RUN_POLICY, 1, 0), policy.tensors(), policy.files)
    del policy
    torch.cuda.empty_cache()
    params = SamplingParams(temperature=1.0, max_tokens=200)
    wanted = [SampleRequest(array("i", [5, 6, 7 + number]), 7, number, params) for number in range(8)]

    async def sampled(sleeps: bool) -> list[Any]:
        engine = make_engine(name, "cuda")
        try:
            await engine.update_weights(snapshot)
            running = engine.submit_together(wanted)
            await asyncio.sleep(0.2)  # into the rollouts, or before them: the results are the same
            if sleeps:
                held = torch.cuda.memory_allocated()
                await engine.sleep()
                assert torch.cuda.memory_reserved() < LEFT_BYTES < held
                await engine.wake_up()
            return await asyncio.gather(*running)
        finally:
            await engine.close()

    assert asyncio.run(sampled(True)) == asyncio.run(sampled(False))
