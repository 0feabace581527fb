"""What is held in few bits: a base model in nf4 is to everybody else a model in bfloat16; moments of 8 bits."""

from __future__ import annotations

import random
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from echo2.config import Config, to_json
from echo2.config.rundir import RunDir
from echo2.config.sections import LoraConfig, ModelConfig
from echo2.core.documents import safetensors_pieces
from echo2.core.errors import UserError
from echo2.learner.core import optimizer
from echo2.learner.core.adapters import Adapter, load_trained
from echo2.learner.core.model import Policy, load_policy
from echo2.learner.core.optimizer import make_optimizer
from echo2.learner.core.quantised import Nf4Linear, codes, layers_in_4_bits, packed_in_4_bits
from echo2.learner.core.trainer import AdamParams, Trainer
from echo2.learner.decide.memory import GRADIENTS, MOMENTS
from echo2.learner.grpo.loop import GrpoClient
from echo2.models.export import export
from learner_cases import config_of, data_of, model_directory, random_group, tiny_module

bitsandbytes = pytest.importorskip("bitsandbytes")
NF4 = replace(config_of(lr=1e-2, groups_per_step=4), lora=LoraConfig(rank=2))


def over(path: Path, **changes: str) -> Config:
    return config_of(replace(NF4, model=ModelConfig(path=str(path))), **changes)


def client_of(config: Config) -> GrpoClient:
    return GrpoClient(load_trained(config, "cpu"), config)


def train(client: GrpoClient, steps: range) -> GrpoClient:
    for step in steps:
        rng = random.Random(step)
        client.forward_backward([random_group(rng, number) for number in range(4)])
        client.optim_step()
    return client


def same_weights(one: GrpoClient, other: GrpoClient) -> bool:
    theirs = other.policy.state()
    return all(torch.equal(tensor, theirs[name]) for name, tensor in one.policy.state().items())


@pytest.mark.parametrize("shape", [(16, 16), (32, 64), (3, 128)])
def test_codes_are_those_of_bitsandbytes_and_values_keep_theirs(shape: tuple[int, int]) -> None:
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    weight[0, :64] = 0.0
    packed, factors = packed_in_4_bits(weight)
    theirs, state = bitsandbytes.functional.quantize_4bit(weight, blocksize=64, quant_type="nf4")
    assert torch.equal(packed, theirs)
    assert torch.equal(factors, state.absmax)
    layer = Nf4Linear(weight, None)
    both = torch.stack([packed[:, 0] >> 4, packed[:, 0] & 15], 1).long()
    assert torch.equal(layer.weight, (codes()[both].view(-1, 64) * factors[:, None]).to(torch.bfloat16).view(shape))
    assert torch.equal(Nf4Linear(layer.weight, None).weight, layer.weight)


@pytest.mark.parametrize("compute_dtype", ["float32", "bfloat16"])
def test_a_base_in_4_bits_trains_as_the_model_in_bfloat16_that_is_published(tmp_path: Path, compute_dtype: str) -> None:
    """Workers hold what is published. So at lag 0 the two differ as with a base in bfloat16, by no more."""
    config = over(model_directory(tmp_path / "model"), quantised="base", compute_dtype=compute_dtype)
    client = client_of(config)
    adapter = client.policy
    assert isinstance(adapter, Adapter)
    assert len(layers_in_4_bits(adapter.module)) == 2 * 7
    published = adapter.base.snapshot
    assert {tensor.dtype for tensor in published.tensors.values()} == {"BF16"}
    (tmp_path / "published").mkdir()
    with (tmp_path / "published" / "model.safetensors").open("wb") as file:
        file.writelines(safetensors_pieces(published.tensors))
    for name, data in published.files.items():
        (tmp_path / "published" / name).write_bytes(data)
    plain = client_of(over(tmp_path / "published", compute_dtype=compute_dtype))
    assert isinstance(plain.policy, Adapter)
    assert plain.policy.base.snapshot.ref == published.ref
    assert adapter.pair_cost == plain.policy.pair_cost
    before = {name: tensor.clone() for name, tensor in adapter.state().items()}
    assert same_weights(train(client, range(2)), train(plain, range(2)))
    assert not all(torch.equal(tensor, before[name]) for name, tensor in adapter.state().items())


def test_a_base_in_4_bits_resumes_and_is_exported_as_the_model_that_was_trained(tmp_path: Path) -> None:
    config, rundir = over(model_directory(tmp_path / "model"), quantised="base"), RunDir(tmp_path / "run")
    rundir.path.mkdir()
    rundir.config.write_text(to_json(config))
    client = train(client_of(config), range(2))
    client.save_state(rundir.checkpoints / "step_2").result()
    again = client_of(config)
    again.load_state(rundir.checkpoints / "step_2")
    with pytest.raises(UserError, match="is a checkpoint of an adapter over"):
        client_of(over(tmp_path / "model")).load_state(rundir.checkpoints / "step_2")
    export(rundir.path, None, tmp_path / "whole", is_merged=True)
    whole = load_policy(str(tmp_path / "whole"), "float32", "cpu").module
    tokens = torch.arange(12)[None]
    with torch.no_grad(), client.policy.engaged():
        torch.testing.assert_close(whole(tokens).logits, client.policy.module(tokens).logits, rtol=0, atol=1e-5)
    assert same_weights(train(client, range(2, 4)), train(again, range(2, 4)))


def test_unquantisable_models_are_refused() -> None:
    for changes, told in (
        ({"quantised": "base"}, "Set lora.rank"),
        ({"quantised": "moments", "ranks": 2}, "learner.ranks = 2"),
    ):
        with pytest.raises(UserError, match=told):
            config_of(**changes)
    with pytest.raises(UserError, match="adapter's moments are small"):
        config_of(NF4, quantised="moments")


def trained(trainer: Trainer, policy: Policy, steps: range) -> dict[str, torch.Tensor]:
    for step in steps:
        rng = random.Random(step)
        for number in range(2):  # gradients of two calls add up
            data = data_of(random_group(rng, number))
            trainer.forward_backward("it", data, lambda logp, tokens: (-logp * tokens.advantage_n, None))
        assert trainer.optim_step("it", AdamParams(1e-2, weight_decay=0.1, grad_clip=0.1)).updated
    return {name: tensor.clone() for name, tensor in policy.state().items()}


@pytest.mark.parametrize("kind", [{"offloaded": MOMENTS}, {"offloaded": GRADIENTS}, {"in_8_bits": True}])
def test_moments_elsewhere_or_in_8_bits_go_on_exactly(
    tmp_path: Path, kind: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(optimizer, "PIECE", 64)  # several pieces, the last one not full
    tiny_module(hidden=64).save_pretrained(tmp_path / "model")  # moments of small tensors keep 32 bits

    def begun(**how: Any) -> tuple[Trainer, Policy]:
        trainer, policy = Trainer(1000), load_policy(str(tmp_path / "model"), "float32", "cpu")
        trainer.add("it", policy, **how)
        return trainer, policy

    def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
        return all(torch.equal(tensor, other[name]) for name, tensor in one.items())

    whole, again, plain = begun(**kind), begun(**kind), begun()
    is_exact = "offloaded" in kind
    assert same(trained(*whole, range(2)), trained(*plain, range(2))) == is_exact
    whole[0].save_state("it", tmp_path / "step_2", {}).result()
    again[0].load_state("it", tmp_path / "step_2")
    after = trained(*whole, range(2, 4))
    assert same(trained(*again, range(2, 4)), after)
    if is_exact:
        plain[0].load_state("it", tmp_path / "step_2")
        assert same(trained(*plain, range(2, 4)), after)
    else:
        with pytest.raises(UserError, match="moments have 8 bits"):
            plain[0].load_state("it", tmp_path / "step_2")


def test_the_error_has_the_command_that_installs_bitsandbytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = over(model_directory(tmp_path / "model"), quantised="base")
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    for refused in (lambda: load_trained(config, "cpu"), lambda: make_optimizer([], torch.device("cpu"), True)):
        with pytest.raises(UserError, match=r"pip install 'echo2\[low-memory\]'"):
            refused()
