"""LoRA in the learner: version 0 is the base, adapters do not touch each other, and PEFT reads what is saved."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from echo2.config import Config, to_json
from echo2.config.rundir import RunDir
from echo2.config.sections import LoraConfig, ModelConfig
from echo2.core.errors import UserError
from echo2.core.types import Snapshot, SnapshotRef, StoredTensor
from echo2.learner.core import checkpoint
from echo2.learner.core.adapters import Adapter, BaseModel, load_base, load_merged, load_trained
from echo2.learner.core.datum import Datum
from echo2.learner.core.model import Policy, load_policy
from echo2.learner.core.trainer import AdamParams, Trainer
from echo2.learner.grpo.loop import GrpoClient
from echo2.models.export import export
from echo2.weights.format.model_files import read_base_model, rounded
from hub_models import hub_model
from learner_cases import config_of, data_of, model_directory, random_group

LORA = LoraConfig(rank=2)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return model_directory(tmp_path / "model")


def some_data(seed: int = 0) -> list[Datum]:
    rng = random.Random(seed)
    return [datum for number in range(4) for datum in data_of(random_group(rng, number))]


def trained(trainer: Trainer, name: str, steps: int = 2) -> None:
    for step in range(steps):
        trainer.forward_backward(name, some_data(step), lambda logp, tokens: (-logp * tokens.advantage_n, None))
        assert trainer.optim_step(name, AdamParams(1e-2)).updated


def logits(module: torch.nn.Module) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = module(torch.arange(12)[None]).logits
    return found


def computed(policy: Policy) -> torch.Tensor:
    with policy.engaged():
        return logits(policy.module)


def lora_config(**changes: int) -> Config:
    return replace(config_of(lr=1e-2, groups_per_step=4), lora=LoraConfig(rank=2, **changes))


def test_version_0_is_the_base_and_a_seed_is_an_adapter(model: Path) -> None:
    base = load_base(str(model), "cpu")
    one, same, other = (base.adapter(LORA, seed) for seed in (1, 1, 2))
    plain = logits(load_policy(str(model), "float32", "cpu").module)
    assert all(torch.equal(computed(policy), plain) for policy in (one, same, other, base.alone()))
    assert one.state().keys() == other.state().keys()
    assert all(torch.equal(one.state()[name], same.state()[name]) for name in one.state())
    assert not all(torch.equal(one.state()[name], other.state()[name]) for name in one.state())
    assert {tensor.dtype for tensor in one.state().values()} == {torch.float32}


def test_the_requested_base_is_loaded_by_the_learner_and_sent_to_workers(model: Path, tmp_path: Path) -> None:
    """float32 on the disk, `model.snapshot_dtype = "bfloat16"`: half the bytes travel, and both sides compute alike."""
    asked = replace(lora_config(), model=ModelConfig(path=str(model), snapshot_dtype="bfloat16"))
    policy, stored = load_trained(asked, "cpu"), read_base_model(model)
    assert isinstance(policy, Adapter)
    sent = policy.base.snapshot
    assert sum(one.num_bytes for one in sent.tensors.values()) * 2 == sum(
        one.num_bytes for one in stored.tensors.values()
    )
    assert (sent.ref, {one.dtype for one in sent.tensors.values()}) == (rounded(stored).ref, {"BF16"})
    assert sent.ref != stored.ref
    state = policy.base.policy.held()
    for name, tensor in sent.tensors.items():
        half = torch.frombuffer(bytearray(tensor.read(0, tensor.num_bytes)), dtype=torch.bfloat16)
        held = state.get(name, state.get(name.replace("proj.", "proj.base_layer.")))
        assert held is not None
        assert torch.equal(half.float().reshape(tensor.shape), held)
    full = load_trained(replace(asked, model=ModelConfig(path=str(model))), "cpu")
    assert isinstance(full, Adapter)
    assert full.base.snapshot.ref == stored.ref


def test_rounding_is_torch_s() -> None:
    bits = [0x3F808000, 0x3F818000, 0x3F808001, 0x7F7FFFFF, 0xFF7FFFFF, 0x7F800000, 0x7F800001, 0xFFFFFFFF, 0x80000001]
    values = torch.tensor([one - (1 << 32) * (one >> 31) for one in bits], dtype=torch.int32).view(torch.float32)
    data = values.numpy().tobytes()
    tensor = StoredTensor("F32", (len(bits),), len(data), lambda start, stop: data[start:stop])
    (half,) = rounded(Snapshot(SnapshotRef("p", 0, 0), {"w": tensor}, {"config.json": b"{}"})).tensors.values()
    got = torch.frombuffer(bytearray(half.read(2, half.num_bytes)), dtype=torch.bfloat16)
    assert torch.equal(got.nan_to_num(nan=7.0), values[1:].to(torch.bfloat16).nan_to_num(nan=7.0))


def test_training_one_adapter_leaves_the_others_and_the_base_bit_for_bit(model: Path) -> None:
    base = load_base(str(model), "cpu")
    before = {name: tensor.clone() for name, tensor in base.policy.held().items() if "lora" not in name}
    trainer = Trainer(64)
    for seed, name in enumerate(("one", "other")):
        trainer.add(name, base.adapter(LORA, seed))
    trainer.add("base", base.alone(), is_trained=False)
    trained(trainer, "other")
    data = some_data(7)
    others = trainer.forward("other", data)
    bases = trainer.forward("base", data)
    trained(trainer, "one")
    assert trainer.forward("one", data) != others
    assert trainer.forward("other", data) == others
    assert trainer.forward("base", data) == bases != others
    now = base.policy.held()
    assert {name.replace(".base_layer", "") for name in now if "lora" not in name} == set(before)
    assert all(torch.equal(now[name.replace("proj.", "proj.base_layer.")], old) for name, old in before.items())


def test_adapters_on_experts_do_not_touch_each_other_or_the_base(tmp_path: Path) -> None:
    hub = hub_model(tmp_path / "hub", "qwen3_moe")
    base = load_base(str(hub), "cpu")
    before = {name: tensor.clone() for name, tensor in base.policy.held().items()}
    plain = logits(base.policy.module)
    on_experts = replace(LORA, targets=["experts"])
    one, other, third = (base.adapter(lora, 3) for lora in (on_experts, on_experts, LORA))
    assert all(torch.equal(computed(policy), plain) for policy in (one, other, third, base.alone()))
    assert not one.state().keys() & third.state().keys()
    trainer = Trainer(64)
    for name, policy in (("one", one), ("other", other), ("third", third)):
        trainer.add(name, policy)
    trained(trainer, "one")
    found = computed(one)
    assert not torch.allclose(found, plain)
    assert all(torch.equal(computed(policy), plain) for policy in (other, third, base.alone()))
    trained(trainer, "third")
    base.remove(other)
    base.remove(third)
    assert torch.equal(computed(one), found)
    assert torch.equal(computed(base.alone()), plain)
    again = load_base(str(hub), "cpu").policy.held()
    assert all(torch.equal(again[name], old) for name, old in before.items())


def test_gradients_of_two_adapters_do_not_mix_within_a_step(model: Path) -> None:
    def steps(name: str, others: bool) -> dict[str, torch.Tensor]:
        base = load_base(str(model), "cpu")
        trainer, policies = Trainer(64), {key: base.adapter(LORA, 3) for key in ("one", "other")}
        for key, policy in policies.items():
            trainer.add(key, policy)
        for step in range(3):
            for key in ("one", "other") if others else (name,):
                data = some_data(step + 10 * (key == "other"))
                trainer.forward_backward(key, data, lambda logp, tokens: (-logp * tokens.advantage_n, None))
            for key in ("one", "other") if others else (name,):
                trainer.optim_step(key, AdamParams(1e-2))
        return policies[name].state()

    for name in ("one", "other"):
        alone, together = steps(name, False), steps(name, True)
        assert all(torch.equal(alone[key], together[key]) for key in alone)


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # PEFT asks for it
def test_a_checkpoint_goes_on_bit_for_bit_and_is_a_peft_directory(model: Path, tmp_path: Path) -> None:
    from peft import PeftModel

    def client() -> GrpoClient:
        return GrpoClient(load_base(str(model), "cpu").adapter(LORA, 0), lora_config())

    rng = random.Random(5)
    groups = [random_group(rng, number) for number in range(4)]
    first = client()
    first.forward_backward(groups)
    first.optim_step()
    saved = tmp_path / "checkpoints" / "step_1"
    first.save_state(saved, lineage=1, cursor=9).result()
    again = client()
    assert again.load_state(saved).cursor == 9
    for one in (first, again):
        one.forward_backward(groups)
        one.optim_step()
    state = again.policy.state()
    assert all(torch.equal(tensor, state[name]) for name, tensor in first.policy.state().items())

    first.save_state(tmp_path / "step_2").result()
    assert checkpoint.is_whole(tmp_path / "step_2")
    peft = PeftModel.from_pretrained(load_policy(str(model), "float32", "cpu").module, str(tmp_path / "step_2")).eval()
    torch.testing.assert_close(logits(peft), computed(first.policy), rtol=0, atol=1e-6)
    assert not torch.equal(logits(peft), computed(client().policy))
    merged = load_merged(str(model), tmp_path / "step_2", "cpu")
    assert not any("lora" in name for name in merged.state())
    torch.testing.assert_close(logits(merged.module), computed(first.policy), rtol=0, atol=1e-5)


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # PEFT asks for it
def test_export_is_a_peft_directory_or_a_whole_model(model: Path, tmp_path: Path) -> None:
    from peft import AutoPeftModelForCausalLM

    rundir = RunDir(tmp_path / "run")
    rundir.path.mkdir()
    config = replace(lora_config(), model=replace(Config().model, path=str(model)))
    rundir.config.write_text(to_json(config))
    client = GrpoClient(load_trained(config, "cpu"), config)
    rng = random.Random(5)
    client.forward_backward([random_group(rng, number) for number in range(4)])
    client.optim_step()
    client.save_state(rundir.checkpoints / "step_1").result()
    export(rundir.path, None, tmp_path / "adapter")
    export(rundir.path, None, tmp_path / "whole", is_merged=True)
    assert not (tmp_path / "adapter" / "optimizer.safetensors").exists()
    adapter = AutoPeftModelForCausalLM.from_pretrained(str(tmp_path / "adapter")).eval()
    torch.testing.assert_close(logits(adapter), computed(client.policy), rtol=0, atol=1e-6)
    whole = load_policy(str(tmp_path / "whole"), "float32", "cpu")
    assert whole.files["chat_template.jinja"] == client.policy.files["chat_template.jinja"]
    torch.testing.assert_close(logits(whole.module), computed(client.policy), rtol=0, atol=1e-5)


def test_a_whole_model_has_nothing_to_merge(model: Path, tmp_path: Path) -> None:
    rundir = RunDir(tmp_path / "run")
    rundir.path.mkdir()
    rundir.config.write_text(to_json(Config()))
    GrpoClient(load_policy(str(model), "float32", "cpu"), Config()).save_state(rundir.checkpoints / "step_0").result()
    with pytest.raises(UserError, match="a whole model already"):
        export(rundir.path, None, tmp_path / "whole", is_merged=True)


def test_checkpoints_of_something_else_are_refused(model: Path, tmp_path: Path) -> None:
    def saved(policy: Policy, name: str) -> Path:
        GrpoClient(policy, Config()).save_state(tmp_path / name).result()
        return tmp_path / name

    other_model = model_directory(tmp_path / "other", seed=1)
    base = load_base(str(model), "cpu")
    mine = base.adapter(LORA, 0)
    whole = load_policy(str(model), "float32", "cpu")
    cases = [
        (
            mine,
            saved(load_base(str(other_model), "cpu").adapter(LORA, 0), "a"),
            "an adapter over base-.*model.path holds",
        ),
        (mine, saved(base.adapter(LoraConfig(rank=3), 0), "b"), "r = 3; lora.rank makes it 2"),
        (mine, saved(base.adapter(LoraConfig(rank=2, alpha=9), 0), "c"), "lora_alpha = 9; lora.alpha makes it 4"),
        (mine, saved(base.adapter(LoraConfig(rank=2, targets=["q_proj"]), 0), "d"), "lora.targets makes"),
        (mine, saved(whole, "e"), "a whole model, and holds no adapter_model"),
        (whole, saved(mine, "f"), "an adapter over base-.*, and holds no model"),
    ]
    for policy, directory, complaint in cases:
        with pytest.raises(UserError, match=complaint):
            GrpoClient(policy, Config()).load_state(directory)


def test_a_run_begins_with_an_adapter(model: Path, tmp_path: Path) -> None:
    config = lora_config()
    config = replace(config, model=replace(config.model, path=str(model)))
    client, rng = GrpoClient(load_trained(config, "cpu"), config), random.Random(3)
    client.forward_backward([random_group(rng, number) for number in range(4)])
    client.optim_step()
    client.save_state(tmp_path / "before").result()

    def begun(path: Path, **changes: Any) -> Policy:
        return load_trained(replace(config, lora=replace(config.lora, path=str(path), **changes)), "cpu")

    found = begun(tmp_path / "before").state()
    assert all(torch.equal(found[name], tensor) for name, tensor in client.policy.state().items())
    with pytest.raises(UserError, match=r"with r = 2; lora\.rank makes it 3.*another adapter"):
        begun(tmp_path / "before", rank=3)
    with pytest.raises(UserError, match="holds no PEFT adapter"):
        begun(model)
    other = load_base(str(model_directory(tmp_path / "other", seed=1)), "cpu").adapter(LORA, 0)
    GrpoClient(other, Config()).save_state(tmp_path / "of_other").result()
    with pytest.raises(UserError, match=r"is an adapter over base-.*, and model\.path holds base-"):
        begun(tmp_path / "of_other")


def test_targets(model: Path) -> None:
    base = load_base(str(model), "cpu")
    with pytest.raises(UserError, match=r"'query'.* There are: down_proj, gate_proj, .*v_proj"):
        base.adapter(LoraConfig(rank=2, targets=["q_proj", "query"]), 0)
    with pytest.raises(UserError, match="'lm_head'"):
        base.adapter(LoraConfig(rank=2, targets=["lm_head"]), 0)
    narrow = base.adapter(LoraConfig(rank=2, targets=["q_proj"]), 0)
    assert {name.split(".")[-3] for name in narrow.state()} == {"q_proj"}
    wide = base.adapter(LORA, 0)
    ends = {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
    assert {name.split(".")[-3] for name in wide.state()} == ends
    assert len(narrow.state()) == 4  # the first adapter did not grow with the second


def test_the_reference_of_an_adapter_is_its_base(model: Path) -> None:
    config = replace(lora_config(), learner=replace(lora_config().learner, reference_kl=0.1))
    base = load_base(str(model), "cpu")
    client = GrpoClient(base.adapter(LORA, 0), config)
    num_base = sum(p.numel() for p in load_policy(str(model), "float32", "cpu").module.parameters())
    frozen = sum(p.numel() for name, p in client.policy.module.named_parameters() if "lora" not in name)
    assert frozen == num_base
    rng = random.Random(1)
    groups = [random_group(rng, number) for number in range(4)]
    first = client.forward_backward(groups)
    assert first.reference_kl == 0.0
    client.optim_step()
    assert client.forward_backward(groups).reference_kl > 0.0


def test_the_base_model_is_what_the_directory_holds(model: Path, tmp_path: Path) -> None:
    base = load_base(str(model), "cpu")
    assert base.snapshot.ref == read_base_model(model).ref
    assert base.snapshot.ref != read_base_model(model_directory(tmp_path / "other", seed=1)).ref
    tensors = base.policy.tensors()
    assert {name: bytes(one.data) for name, one in tensors.items()} == {
        name: bytes(one.read(0, one.num_bytes)) for name, one in base.snapshot.tensors.items()
    }


def test_a_model_in_bfloat16_is_published_as_it_is_and_computed_in_float32_on_a_cpu(
    model: Path, tmp_path: Path
) -> None:
    policy = load_policy(str(model), "bfloat16", "cpu")
    policy.module.save_pretrained(tmp_path / "half")
    base = load_base(str(tmp_path / "half"), "cpu")
    assert isinstance(base, BaseModel)
    adapter = base.adapter(LORA, 0)
    assert isinstance(adapter, Adapter)
    assert base.policy.dtype == torch.float32
    assert {one.dtype for one in base.snapshot.tensors.values()} == {"BF16"}
    trainer = Trainer(64)
    trainer.add("one", adapter)
    trained(trainer, "one")
    assert {tensor.dtype for tensor in adapter.state().values()} == {torch.float32}


def test_directories_without_readable_weights(tmp_path: Path, model: Path) -> None:
    with pytest.raises(UserError, match="no model in safetensors"):
        read_base_model(tmp_path)
    weights = model / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-10])
    with pytest.raises(UserError, match="lies outside of the file"):
        read_base_model(model)
