"""What is held in few bits: a base model in nf4 is to everybody else a model in bfloat16; moments of 8 bits."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from echo2.config import Config, to_json
from echo2.config.rundir import RunDir
from echo2.config.sections import LoraConfig, ModelConfig
from echo2.core.documents import safetensors_pieces
from echo2.core.errors import UserError
from echo2.learner.core.adapters import Adapter, load_trained
from echo2.learner.core.model import load_policy
from echo2.learner.core.quantised import Nf4Linear, codes, layers_in_4_bits, packed_in_4_bits
from echo2.learner.grpo.loop import GrpoClient
from echo2.models.export import export
from learner_cases import config_of, model_directory, random_group

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


def test_what_cannot_be_quantised_is_refused() -> None:
    for changes, told in (
        ({"quantised": "base"}, "Set lora.rank"),
        ({"quantised": "moments", "ranks": 2}, "learner.ranks = 2"),
    ):
        with pytest.raises(UserError, match=told):
            config_of(**changes)
    with pytest.raises(UserError, match="adapter's moments are small"):
        config_of(NF4, quantised="moments")
