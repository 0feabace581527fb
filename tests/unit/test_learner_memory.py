"""Memory that runs out in a pass: halved micro-batches, each gradient once; activations that are computed again."""

from __future__ import annotations

import gc
import json
import logging
import random
import subprocess
import sys
import weakref
from pathlib import Path

import pytest
import torch
from torch import Tensor

from echo2.config import Config
from echo2.learner.core.datum import Datum
from echo2.learner.core.fitting import fitted
from echo2.learner.core.losses import LossTokens
from echo2.learner.core.mesh import Mesh
from echo2.learner.core.model import Policy
from echo2.learner.core.trainer import AdamParams, Trainer
from learner_cases import data_of, random_group, tiny_module, tiny_policy

TESTS = str(Path(__file__).parents[1])


def imitate(logp_n: Tensor, tokens: LossTokens) -> tuple[Tensor, float]:
    return -logp_n, float(logp_n.detach().sum())


def data_for(seed: int, groups: int = 4) -> list[Datum]:
    rng = random.Random(seed)
    return [d for n in range(groups) for d in data_of(random_group(rng, n), [rng.uniform(-1, 1) for _ in range(4)])]


def gradients(trainer: Trainer) -> dict[str, Tensor]:
    return {name: p.grad.clone() for name, p in trainer._policy("it").parameters.items() if p.grad is not None}


def test_activations_that_are_computed_again_give_the_same_bits() -> None:
    found = []
    for checkpointing in (False, True):
        policy, trainer = tiny_policy(), Trainer(1000)
        if checkpointing:
            assert policy.checkpoint_activations()
        trainer.add("it", policy)
        logprobs = trainer.forward_backward("it", data_for(0), imitate).logprobs
        found.append((logprobs, gradients(trainer)))
        assert not any(module.training for module in policy.module.modules())
    assert found[0][0] == found[1][0]
    assert all(torch.equal(grad, found[1][1][name]) for name, grad in found[0][1].items())


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("module_name", ["model.norm", "model.layers.1.mlp", "model.layers.0.self_attn.k_proj"])
@pytest.mark.parametrize("most_tokens", [20, 40])
def test_gradients_of_an_interrupted_backward_pass_are_not_counted_twice(
    module_name: str, most_tokens: int, checkpointing: bool
) -> None:
    """A backward pass over more than so many tokens asks, half-way, for more memory than there is in the world."""
    found: list[dict[str, Tensor]] = []
    halved = []
    for fails in (False, True):
        policy, trainer = tiny_policy(), Trainer(1000, "plain")
        if checkpointing:
            policy.checkpoint_activations()

        def ask(_module: object, grads: tuple[Tensor, ...], fails: bool = fails) -> None:
            if fails and grads[0].numel() // grads[0].shape[-1] > most_tokens:
                torch.empty(1 << 55, dtype=torch.uint8)

        dict(policy.module.named_modules())[module_name].register_full_backward_pre_hook(ask)
        trainer.add("it", policy)
        data = data_for(1)
        for half in (data[:5], data[5:]):
            trainer.forward_backward("it", half, imitate)
        found.append(gradients(trainer))
        halved.append(trainer.tokens_per_microbatch < 1000)
    assert found[0].keys() == found[1].keys()
    for name, grad in found[0].items():
        torch.testing.assert_close(found[1][name], grad, rtol=1e-10, atol=1e-12)
    assert halved == [False, True]


@pytest.mark.parametrize("tied", [False, True])
def test_gradients_of_the_vocabulary_are_made_when_the_activations_are_gone(tied: bool) -> None:
    """They are as large as the head, and nothing else of its size should be there then."""
    policy, trainer, made = Policy(tiny_module(tied=tied), {}, torch.device("cpu")), Trainer(1000), list[str]()
    trainer.add("it", policy)
    for name, parameter in policy.module.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: made.append(name))
    trainer.forward_backward("it", data_for(0), imitate)
    assert made[-1] == ("model.embed_tokens.weight" if tied else "lm_head.weight")
    assert len(made) == len(list(policy.module.parameters()))


def test_a_policy_that_is_gone_leaves_no_weights() -> None:
    """A tensor's hooks keep what they refer to, and no collector of cycles looks into them."""
    policy, trainer = tiny_policy(), Trainer(1000)
    trainer.add("it", policy)
    trainer.forward_backward("it", data_for(0), imitate)
    trainer.optim_step("it", AdamParams(1e-3))
    kept = [weakref.ref(parameter) for parameter in policy.module.parameters()]
    trainer.remove("it")
    del policy
    gc.collect()
    assert [one for one in kept if one() is not None] == []


#: The process may take 150 MB more than it has when the second pass begins; the kernel refuses the rest.
LIMITED = """
import json, random, resource, sys
sys.path.append(sys.argv[1])
import torch
from echo2.core.errors import UserError
from echo2.learner.core.model import Policy
from echo2.learner.core.trainer import AdamParams, Trainer
from learner_cases import tiny_module
from array import array
from echo2.learner.core.datum import Datum

torch.set_num_threads(1)
policy = Policy(tiny_module(hidden=64, layers=6, vocab=8000).double(), {}, torch.device("cpu"))
trainer = Trainer(1_000_000, "plain")
trainer.add("it", policy)
rng = random.Random(0)

def data(num, length):
    rows = [array("i", [rng.randrange(8000) for _ in range(length)]) for _ in range(num)]
    return [Datum(row[:4], row[4:], b"\\x01" * (len(row) - 4)) for row in rows]

def passed(data):
    done = trainer.forward_backward("it", data, lambda logp_n, tokens: (-logp_n, None))
    norms = {name: float(p.grad.norm()) for name, p in trainer._policy("it").parameters.items()}
    policy.module.zero_grad()
    return {"tokens": trainer.tokens_per_microbatch, "norms": norms, "sums": [sum(each) for each in done.logprobs]}

rows = data(16, 150)
found = [passed(rows)]
pages = int(open("/proc/self/statm").read().split()[0])
limit = pages * resource.getpagesize() + 150_000_000
resource.setrlimit(resource.RLIMIT_AS, (limit, resource.RLIM_INFINITY))
found.append(passed(rows))
try:
    passed(data(1, 20_001))
except UserError as error:
    found.append(str(error))
print(json.dumps(found))
"""


@pytest.mark.slow
def test_out_of_memory_halves_the_micro_batch_and_counts_every_gradient_once() -> None:
    done = subprocess.run([sys.executable, "-c", LIMITED, TESTS], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    free, bound, refusal = json.loads(done.stdout)
    assert free["tokens"] == 1_000_000
    assert bound["tokens"] <= 16 * 149 / 2
    assert bound["sums"] == pytest.approx(free["sums"], rel=1e-9)
    assert bound["norms"] == pytest.approx(free["norms"], rel=1e-9)
    assert "no memory for one rollout of 20000 tokens" in refusal


def test_the_error_about_a_model_without_forecast_has_the_micro_batch(
    caplog: pytest.LogCaptureFixture,
) -> None:
    policy = tiny_policy()
    policy.module.config.num_experts = 8
    caplog.set_level(logging.WARNING)
    assert fitted(policy, Config(), Mesh()).tokens == 2048
    kind = policy.module.config.model_type
    assert caplog.messages == [f"no memory forecast for {kind}: micro-batches have at most 2048 tokens"]
