"""`examples/from_scratch.py` computes what the framework computes, and trains."""

from __future__ import annotations

import asyncio
import importlib.util
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from echo2.core.types import RUN_POLICY
from echo2.learner.core.losses import LossTokens, make_loss
from echo2.learner.grpo.data import group_advantages
from rollout_cases import tiny_directory

EXAMPLE = Path(__file__).parents[2] / "examples" / "from_scratch.py"


@pytest.fixture(scope="module")
def example() -> Iterator[ModuleType]:
    spec = importlib.util.spec_from_file_location("from_scratch", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules["from_scratch"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    yield module
    del sys.modules["from_scratch"]


@given(rewards=st.lists(st.floats(-10, 10), min_size=2, max_size=16))
def test_the_examples_advantages_equal_the_frameworks(example: ModuleType, rewards: list[float]) -> None:
    assert example.advantages(rewards) == pytest.approx(group_advantages(rewards, "grpo"), rel=1e-6, abs=1e-9)


@pytest.mark.parametrize("seed", range(5))
def test_the_examples_loss_equals_the_frameworks_ppo(example: ModuleType, seed: int) -> None:
    random_numbers = torch.Generator().manual_seed(seed)
    count = 200
    logp_n = -3 * torch.rand(count, generator=random_numbers, dtype=torch.float64)
    nothing, index = torch.zeros(count, dtype=torch.float64), torch.zeros(count, dtype=torch.int64)
    tokens = LossTokens(
        behaviour_n=logp_n + 0.5 * torch.randn(count, generator=random_numbers, dtype=torch.float64),
        advantage_n=torch.randn(count, generator=random_numbers, dtype=torch.float64),
        sequence_n=index,
        lag_n=index,
        source_S=torch.zeros(1, dtype=torch.int64),
        sources=("",),
        weight_n=torch.ones(count, dtype=torch.float64),
        reference_n=nothing,
        teacher_n=nothing,
        top_teacher_nk=nothing[:, None][:, :0],
        top_policy_nk=nothing[:, None][:, :0],
        entropy_n=nothing,
        clip_low_n=nothing * float("nan"),
        clip_high_n=nothing * float("nan"),
    )
    own, theirs = logp_n.clone().requires_grad_(), logp_n.clone().requires_grad_()
    loss_n, _ = example.loss(own, tokens)
    loss_n.sum().backward()
    make_loss("ppo")(theirs, tokens).loss_n.sum().backward()
    assert torch.allclose(own.grad, theirs.grad, rtol=1e-12)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """It knows digits, and sorts none: the tests reward something else."""
    return str(tiny_directory(tmp_path_factory.mktemp("models") / "tiny"))


def test_the_example_trains(example: ModuleType, model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(example, "GROUPS", 4)
    monkeypatch.setattr(example, "reward", lambda text, task: float(len(text) % 2))
    asyncio.run(example.main(model, num_steps=3, staleness=1))


def test_a_step_moves_the_weights_towards_what_was_rewarded(example: ModuleType, model: str) -> None:
    loop = example.Loop(model)
    asyncio.run(loop.publish(0))
    rng = random.Random(7)
    [group] = asyncio.run(loop.sample([{"prompt": "93172=", "answer": "12379"}], seed=3, group_size=8))
    rewards = [float(rng.random() < 0.5) for _ in group]
    rewards[:2] = [0.0, 1.0]
    for rollout, reward, advantage in zip(group, rewards, example.advantages(rewards), strict=True):
        rollout.reward, rollout.advantage = reward, advantage

    def gain() -> float:
        logprobs = loop.trainer.forward(RUN_POLICY, [example.datum(one) for one in group])
        return sum(one.advantage * sum(found) for one, found in zip(group, logprobs, strict=True))

    before = gain()
    loop.train(10, [group])
    assert gain() > before
